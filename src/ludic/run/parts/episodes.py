"""Everything that the episodes of a run are played with: envs, agents and protocol, the client that answers them, rewards, engines.

`ludic eval` and actors use it too, so it makes nothing that only a trainer needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ludic import registry
from ludic.batch_gen import RolloutEngine
from ludic.inference import ByteTemplate, ChatTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import DelegatingProtocol, InteractionProtocol, Policies, RoleAssignment
from ludic.rewards import RenamedScorer, Rewards, as_scorer
from ludic.rewards.shaping import SoftOverlong
from ludic.run.config.env_and_agent import AgentSettings, EnvSettings
from ludic.run.config.reward import RewardSettings
from ludic.run.features.base import plugged
from ludic.run.given import EnvFactory, Parts
from ludic.run.parts.samples import env_arguments, first_env, first_sample
from ludic.run.protocols.factory import protocol_factory
from ludic.run.resolve import ResolvedRun
from ludic.types import ChatClient, ConfigError, EnvSpec, InferenceSpec, ProtocolSpec, RolloutRequest, Scorer
from ludic.types.interfaces import BatchingClient


def make_rewards(settings: RewardSettings, agent: AgentSettings, parts: Parts | None = None) -> Rewards | None:
    """The scorers of the settings and the given ones, with their weights; None if nothing is scored or weighted."""
    scorers = [_scorer(settings, name, id, agent.max_tokens) for name, id in settings.named]
    if settings.judge is not None:
        scorers.append(plugged("judge", f"judge = {settings.judge!r}").scorer(settings))
    scorers += [as_scorer(given) for given in (parts.scorers if parts is not None else ())]
    if not scorers and not settings.reward_weight:
        return None
    return Rewards(scorers, settings.reward_weight, max_concurrent=max(64, settings.judge_concurrency))


def _scorer(settings: RewardSettings, name: str, id: str, max_tokens: int | None) -> Scorer:
    given = {key.partition(".")[2]: value for key, value in settings.reward_set.items() if key.startswith(f"{name}.")}
    factory = registry.rewards.spec(id).load()
    is_renamed = f"{name}={id}" in settings.reward
    if factory is SoftOverlong:
        given.setdefault("max_tokens", max_tokens)  # of the run's replies
    parameters = inspect.signature(factory).parameters
    if is_renamed and inspect.isclass(factory) and "name" in parameters:
        given["name"] = name
    made = registry.rewards.make(id, **given)
    if not inspect.isclass(factory) and all(one.default is not one.empty for one in parameters.values()):
        made = made()  # a reward function takes a rollout; this one makes a scorer
        if not isinstance(made, Scorer):
            raise ConfigError(
                f"{id} takes no rollout and returned {made!r:.60}; without a rollout, it must return a scorer, such as a judge."
            )
    if is_renamed and isinstance(made, Scorer) and made.name != name:
        return RenamedScorer(made, name)
    return as_scorer(made, name if is_renamed or not isinstance(made, Scorer) else None)


PROTOCOL = "play"
_CONCURRENCY = 64
"""Episodes at a time with servers, where the settings do not say."""


class _EnvHolder(Protocol):
    """Pools of envs in other processes."""

    async def make(self, **arguments: Any) -> Any:
        """A new env there."""

    def close(self) -> None:
        """End the processes, or the connections to them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSetup:
    """Everything that episodes of an env with a policy need."""

    env: EnvSettings
    factory: EnvFactory
    client: ChatClient
    """Answers the agents."""
    make_protocol: Callable[[ChatClient], InteractionProtocol]
    """A new one, with new agents, for each episode."""
    max_steps: int
    player: str | None = None
    """Name of the model, a part of every request: the episodes of another model in the same file do not count."""
    rewards: Rewards | None = None
    """Scores the episodes in addition to the env."""
    protocol: str = PROTOCOL
    """Name of its protocol in requests."""
    others: tuple[EpisodeSetup, ...] = ()
    """The other envs of the run: its engines play their episodes as well."""
    policies: Policies | None = None
    """The policies by role, for requests that say it."""
    with_prompt: Callable[[str], Callable[[ChatClient], InteractionProtocol]] | None = None
    """Returns `make_protocol` with a system prompt, for requests that name one."""
    pool: _EnvHolder | None = None
    """Holds the envs; None: this process does."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Ends what the episodes share, before the client is closed."""
    engines: dict[str, RolloutEngine] = field(default_factory=dict)
    """Every engine that was made, by its purpose; `activity` reports their progress."""

    def engine(
        self,
        *,
        jsonl_path: Path | None = None,
        resume: bool = False,
        seed: int = 0,
        max_failed_share: float = 0.5,
        max_unscored_share: float = 1.0,
        purpose: str = "playing",
    ) -> RolloutEngine:
        """A new rollout engine; `purpose` is its name in `activity`."""
        self.engines[purpose] = RolloutEngine(
            env_registry=self._env_registry(),
            protocol_registry={s.protocol: s.new_protocol for s in (self, *self.others)},
            jsonl_path=jsonl_path,
            resume=resume,
            seed=seed,
            episode_timeout_s=self.env.episode_timeout or None,
            env_timeout_s=self.env.env_timeout or None,
            max_failed_share=max_failed_share,
            max_unscored_share=max_unscored_share,
            rewards=self.rewards,
        )
        return self.engines[purpose]

    def _env_registry(self) -> dict[str, Callable[..., Any]]:
        """The makers of the envs: a pool, or a factory of this process where the registry has none."""
        setups = (self, *self.others)
        own = {s.env.id: s.factory.factory for s in setups if s.env.id not in registry.envs}
        return own | {s.env.id: s.pool.make for s in setups if s.pool is not None}

    def close(self) -> None:
        """End the env workers, if there are some, and what the episodes share."""
        self.closing.close()
        if self.pool is not None:
            self.pool.close()

    def new_protocol(
        self, model: str | None = None, policies: RoleAssignment | None = None, system_prompt: str | None = None
    ) -> InteractionProtocol:
        """For one episode."""
        seats = None if policies is None else self.policies
        if seats is not None:
            made: InteractionProtocol = seats.protocol(policies or {})
        elif self.with_prompt is not None and system_prompt is not None:
            made = self.with_prompt(system_prompt)(self.client)
        else:
            made = self.make_protocol(self.client)
        made.max_steps = self.max_steps
        return made

    @property
    def concurrency(self) -> int:
        """Episodes at a time where the settings do not say: as many as the client answers together."""
        return self.client.max_sequences if isinstance(self.client, BatchingClient) else _CONCURRENCY

    def activity(self) -> str:
        """A line about the episodes that are being played, for displays; empty when there are none."""
        return "; ".join(
            f"{purpose} {progress}"
            for purpose, engine in self.engines.items()
            if (progress := engine.progress) is not None
        )

    def request(self, inference: InferenceSpec, sample: Any = None, **facts: Any) -> RolloutRequest:
        return RolloutRequest(
            env=EnvSpec(self.env.id, env_arguments(self.env, sample)),
            protocol=ProtocolSpec(self.protocol, {} if self.player is None else {"model": self.player}),
            inference=inference,
            **facts,
        )


def make_episode_setup(
    env: EnvSettings,
    agent: AgentSettings,
    factory: EnvFactory,
    client: ChatClient,
    template: ChatTemplate,
    model: str,
    parts: Parts | None = None,
    *,
    reward: RewardSettings | None = None,
) -> EpisodeSetup:
    """`env` and `agent` are resolved. In an env with several players, each is a copy of the agent."""
    parts = parts or Parts()
    if env.sandbox is not None:
        plugged("sandbox", f"sandbox = {env.sandbox!r}").use(env.sandbox)
    made = factory.make(env_arguments(env, first_sample(env, parts)))
    closing = ExitStack()
    make_protocol = protocol_factory(agent, made.agent_ids, template, model, parts, closing)
    make_protocol(client)  # a wrong name or argument is found now, not in the first episode
    return EpisodeSetup(
        env=env,
        factory=factory,
        client=client,
        make_protocol=make_protocol,
        max_steps=env.max_steps or 1,
        rewards=make_rewards(reward or RewardSettings(), agent, parts),
        pool=make_pool(env, factory),
        closing=closing,
    )


def make_pool(env: EnvSettings, factory: EnvFactory) -> _EnvHolder | None:
    """For envs in other processes; None if the settings have none."""
    if env.env_server is None and not env.env_workers:
        return None
    made: _EnvHolder = plugged("env_workers", f"env_workers = {env.env_workers}").pool(env, factory)
    return made


def check_protocol(run: ResolvedRun, template: ChatTemplate | None = None) -> None:
    """ConfigError if the protocol of the settings cannot be made for an env of the run. With the model's `template`, also if its
    agents, parsers and tools cannot; without one, a named protocol alone is tried."""
    for own in run.each:
        agent = own.config.agent
        if (agent.protocol is not None or template is not None) and own.parts.protocol is None:
            shown = template or ByteTemplate(tool_parser=HermesToolParser())
            make = protocol_factory(agent, first_env(own).agent_ids, shown, "checked", own.parts)
            made = make(ScriptedClient(lambda request: ""))
            for delegate in made.delegates.values() if isinstance(made, DelegatingProtocol) else ():
                delegate.make_agent()
