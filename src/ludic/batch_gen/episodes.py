"""The parts of an episode that `RolloutEngine` runs: its seeds, its fresh env and protocol, its limits, and its failures."""

import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic import registry
from ludic.envs import LudicEnv
from ludic.interaction import InteractionProtocol
from ludic.interaction.base import AnyEnv
from ludic.seeds import EpisodeSeeds
from ludic.types import ConfigError, Failure, LudicError, Rollout, RolloutRequest, UnknownName, derive_seed, new_id
from ludic.types.rollout import plain_fields

logger = logging.getLogger(__name__)

DEFAULT_ENV_TIMEOUT_S = 600.0

Factory = Callable[..., Any]

# --- factories of envs and protocols ---


class Factories:
    """Builds one env and one protocol per episode. Env kinds without a factory come from the registry."""

    def __init__(self, envs: Mapping[str, Factory] | None, protocols: Mapping[str, Factory] | None) -> None:
        self._envs = envs or {}
        self._protocols = protocols or {}
        self._checked: set[tuple[Factory, tuple[str, ...]]] = set()
        """Argument names already checked against a factory; checking every call costs more than building the object."""
        self._on_loop: dict[str, bool] = {}

    def check(self, request: RolloutRequest) -> None:
        """Raise UnknownName for an unknown env or protocol, before the first episode starts."""
        if request.env.kind not in self._envs and request.env.kind not in registry.envs:
            known = {*self._envs, *registry.envs.list()}
            raise UnknownName.among("env", request.env.kind, known, "Add it to env_registry, or register it.")
        if request.protocol.kind not in self._protocols:
            raise UnknownName.among(
                "protocol", request.protocol.kind, self._protocols, "Add a factory to protocol_registry."
            )

    def makes_env_on_loop(self, request: RolloutRequest) -> bool:
        """True if the factory is a non-blocking env class or a coroutine function (`EnvPool.make`). Any other factory may block and
        is called in a thread."""
        kind = request.env.kind
        if kind not in self._on_loop:
            made_by = self._envs[kind] if kind in self._envs else registry.envs.spec(kind).load()
            is_light = isinstance(made_by, type) and issubclass(made_by, LudicEnv) and not made_by.blocking
            self._on_loop[kind] = is_light or inspect.iscoroutinefunction(made_by)
        return self._on_loop[kind]

    def make_env(self, request: RolloutRequest) -> AnyEnv | Awaitable[AnyEnv]:
        kind, kwargs = request.env.kind, request.env.kwargs
        own = self._envs.get(kind)
        env: AnyEnv | Awaitable[AnyEnv] = (
            registry.envs.make(kind, **kwargs) if own is None else self._make("env", kind, own, kwargs)
        )
        return env

    def make_protocol(self, request: RolloutRequest) -> InteractionProtocol:
        kind = request.protocol.kind
        protocol = self._make("protocol", kind, self._protocols[kind], request.protocol.kwargs)
        if not isinstance(protocol, InteractionProtocol):
            raise ConfigError(
                f"The factory of protocol {kind!r} returned {type(protocol).__name__}; it must make a new "
                "InteractionProtocol, for example SingleAgentProtocol(agent), each time it is called."
            )
        return protocol

    def _make(self, what: str, kind: str, factory: Factory, kwargs: Mapping[str, Any]) -> Any:
        call = (factory, tuple(kwargs))
        if call not in self._checked:
            _check_arguments(what, kind, factory, kwargs)
            self._checked.add(call)
        return factory(**kwargs)


def _check_arguments(what: str, kind: str, factory: Factory, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for wrong arguments: a mistake in the set-up, which would otherwise fail every episode."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "no arguments"
        raise ConfigError(
            f"The {what} {kind!r} cannot be made from {sorted(kwargs)}: {error}. Its factory takes: {takes}."
        ) from error


# --- plans and limits ---


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    """Limits on the turns, the time and the retries of an episode."""

    max_steps: int
    """Turns."""
    timeout_s: float | None = None
    """For each model call."""
    episode_timeout_s: float | None = None
    """For the whole episode."""
    env_timeout_s: float | None = DEFAULT_ENV_TIMEOUT_S
    """For making the env, and for each of its resets and steps."""
    max_retries: int = 1
    """Retries of a failed episode, with the same seeds."""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ConfigError(f"max_steps={self.max_steps}; an episode needs at least one turn.")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries={self.max_retries}; it must be 0 (no retry) or more.")
        for name in ("timeout_s", "episode_timeout_s", "env_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0:
                raise ConfigError(f"{name}={seconds}; give a positive number of seconds, or None for no limit.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlan:
    """One episode to run: a request and its final seeds."""

    index: int
    """Number of the episode, counted over the lifetime of the engine or batch source."""
    request: RolloutRequest
    env_seed: int
    sampling_seed: int

    @property
    def group_id(self) -> str | None:
        return self.request.group_id

    @property
    def label(self) -> str:
        """Number and seeds of the episode, for messages; enough to reproduce it."""
        return f"episode {self.index} (env seed {self.env_seed}, sampling seed {self.sampling_seed})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One finished episode."""

    plan: EpisodePlan
    rollouts: list[Rollout]
    """One per agent perspective, and one per delegated sub-task."""
    num_attempts: int = 1
    """0 if the episode was read from a file."""

    @property
    def failure(self) -> Failure | None:
        """Why the episode failed. A delegated sub-task that failed was told to its parent; that is no failure."""
        return next((r.failure for r in self.rollouts if r.failure and not r.is_sub_task), None)


def plan_episodes(
    requests: Iterable[RolloutRequest], *, first_index: int | Sequence[int], seed: int
) -> Iterator[EpisodePlan]:
    """One plan per episode, in the order of the requests. Seeds depend only on the request and the episode's number.

    `first_index`: number of the first episode, or of the first episode of each request.
    """
    index = first_index if isinstance(first_index, int) else 0
    for position, request in enumerate(requests):
        if not isinstance(first_index, int):
            index = first_index[position]
        for repeat in range(request.num_episodes):
            env_seed, sampling_seed = request.env_seed, request.sampling_seed
            if env_seed is None:
                env_seed = derive_seed(seed, EpisodeSeeds.ENV, index)
            if sampling_seed is None:
                sampling_seed = derive_seed(seed, EpisodeSeeds.SAMPLING, index)
            elif request.num_episodes > 1:
                sampling_seed = derive_seed(sampling_seed, repeat)  # otherwise all episodes of the request are equal
            yield EpisodePlan(index=index, request=request, env_seed=env_seed, sampling_seed=sampling_seed)
            index += 1


# --- running an episode ---


class FailureLog:
    """Logs the first failed attempt of each kind with the user's traceback, and later only counts.

    A kind is the type of an exception and the place that raised it.
    """

    def __init__(self) -> None:
        self._num_seen: Counter[tuple[str, str]] = Counter()
        self._num_logged: Counter[tuple[str, str]] = Counter()

    def add(self, plan: EpisodePlan, failure: Failure, *, is_retried: bool) -> None:
        kind = (failure.error, failure.place)
        self._num_seen[kind] += 1
        if kind in self._num_logged:
            return
        self._num_logged[kind] = 1
        details = (
            f" (at {failure.place}; the full traceback is in the rollout's failure.traceback)" if failure.place else ""
        )
        if failure.user_traceback:
            details = f"\n{failure.user_traceback.rstrip()}"
        logger.warning(
            "%s of env %r failed%s: %s%s",
            plan.label.capitalize(),
            plan.request.env.kind,
            " and will be retried" if is_retried else "",
            failure.summary,
            details,
        )

    def log_repeated(self) -> None:
        """Log each kind whose count has doubled since it was last logged; the engine calls this after a batch."""
        for (error, place), num_seen in self._num_seen.items():
            if num_seen >= 2 * self._num_logged[error, place]:
                self._num_logged[error, place] = num_seen
                logger.warning("%s%s: %d failed attempts so far.", error, f" at {place}" if place else "", num_seen)


class TooManyFailures(LudicError, RuntimeError):
    """More episodes failed than the run allows."""


class FailureLimit:
    """Counts failed episodes and raises TooManyFailures as soon as the limit is certain to be exceeded.

    Episodes that a scorer failed have their own limit: while training, a judge's server may be away for a while.
    """

    def __init__(self, max_failed_share: float, max_unscored_share: float = 1.0, *, num_episodes: int) -> None:
        for name, share in {"max_failed_share": max_failed_share, "max_unscored_share": max_unscored_share}.items():
            if not 0 <= share <= 1:
                raise ConfigError(f"{name}={share}; it is a share of the episodes, from 0 to 1.")
        self._share, self._unscored_share, self._num_episodes = max_failed_share, max_unscored_share, num_episodes
        self.num_failed = self.num_unscored = 0
        self._kinds: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], str] = {}
        """Kind of failure → place, episode and message of the first one."""

    def count(self, episode: Episode) -> None:
        failure = episode.failure
        if failure is None:
            return
        self.num_failed += 1
        if failure.by_scorer:
            self.num_unscored += 1
            if self.num_unscored > self._unscored_share * self._num_episodes:
                raise TooManyFailures(
                    f"A judge or reward function failed on {self.num_unscored} of {self._num_episodes} episodes, more than "
                    f"max_unscored_share={self._unscored_share:g} allows. The last: {failure.summary}"
                )
            return
        kind, text = (failure.error, failure.place), failure.summary
        self._kinds[kind] += 1
        place, end = f" at {failure.place}" if failure.place else "", "" if text.endswith((".", "!", "?")) else "."
        self._first.setdefault(kind, f"{place}, first in {episode.plan.label}: {text}{end}")
        num_broken = self.num_failed - self.num_unscored
        if num_broken > self._share * self._num_episodes:
            shown = " ".join(f"{count} x{self._first[kind]}" for kind, count in self._kinds.most_common(3))
            raise TooManyFailures(
                f"{num_broken} of {self._num_episodes} episodes failed, more than max_failed_share={self._share:g} "
                f"allows. {shown} Fix that, or raise max_failed_share."
            )


@dataclass(slots=True)
class RunningEpisode:
    """A running episode; the engine reads its token count for progress reports."""

    plan: EpisodePlan
    began: float = field(default_factory=time.monotonic)
    protocol: InteractionProtocol | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.protocol is None else sum(map(num_sampled_tokens, self.protocol.unfinished))


def num_sampled_tokens(rollout: Rollout) -> int:
    return sum(len(step.trace.completion_token_ids) for step in rollout.agent_steps)


def episode_meta(plan: EpisodePlan, limits: EpisodeLimits) -> dict[str, Any]:
    """Facts from the engine for the rollouts of one attempt."""
    request = plan.request
    return {
        **request.meta,
        "episode_idx": plan.index,
        "request_meta": dict(request.meta),
        "engine": {
            "episode_run": new_id(),
            "started_ns": time.time_ns(),
            "max_steps": limits.max_steps,
            "timeout_s": limits.timeout_s,
            "env_kind": request.env.kind,
            "protocol_kind": request.protocol.kind,
            "env_seed": plan.env_seed,
            "sampling_seed": plan.sampling_seed,
            "forced_env_seed": request.env_seed,
            "forced_sampling_seed": request.sampling_seed,
            "return_spec": None if request.inference is None else plain_fields(request.inference.return_),
        },
    }
