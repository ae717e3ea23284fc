"""One stream of episodes for several trainers: each gets its own policy's rollouts, credited by its own rule.

When a trainer asks for a batch and none is waiting, `SharedRollouts` runs a round of episodes and offers it to every trainer.
Policies without a trainer (a frozen opponent, a league) take part and are not trained. Failed episodes and incomplete groups are
dropped for all trainers, before the rollouts are split by policy.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludic.batch_gen.build_batch import BatchBuilder, HasCreditAssigner, credit_of
from ludic.batch_gen.engine import DEFAULT_MAX_STEPS, RolloutEngine
from ludic.batch_gen.episodes import Episode
from ludic.batch_gen.requests.groups import RequestsFn, RequestStrategy, RequestStream
from ludic.batch_gen.sources.rollouts import EpisodeRunner
from ludic.types import ConfigError, CreditAssigner, FollowsVersions, SampleFilter, SAWBatch, Stateful
from ludic.types.interfaces import load_into, state_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """The episodes of one round."""

    number: int
    before: dict[str, Any]
    """Position of the stream before the round; a resume runs the round again from it."""
    episodes: list[Episode]
    generation_s: float
    scorer_metrics: dict[str, float]
    """The scorers' own metrics so far, such as the cost of a judge."""

    @property
    def policies(self) -> list[str]:
        """Names of the policies that took part."""
        return sorted({str(rollout.policy) for episode in self.episodes for rollout in episode.rollouts})


class SharedRollouts:
    """Runs rounds of episodes; `batches_for` returns one batch source per trained policy.

    The trainers take turns (`ludic.training.train_policies`).
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        requests_fn: RequestsFn,
        strategy: RequestStrategy | None = None,
        max_steps: int = DEFAULT_MAX_STEPS,
        timeout_s: float | None = None,
        concurrency: int = 8,
    ) -> None:
        self._engine = engine
        self._runner = EpisodeRunner(engine, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        self._requests = RequestStream(requests_fn, strategy, {"requests": requests_fn})
        self._num_rounds = 0
        self._is_running = False
        self._sources: dict[str, PolicyBatchSource] = {}
        self._resumed: list[dict[str, Any]] = []
        """Positions of the policies loaded since the last round."""

    def batches_for(
        self,
        policy: str,
        *,
        credit_assigner: CreditAssigner | None = None,
        algorithm: HasCreditAssigner | None = None,
        sample_filter: SampleFilter | None = None,
        followers: Sequence[FollowsVersions] = (),
    ) -> "PolicyBatchSource":
        """Batches of `policy` for its trainer. `followers` (a league) get its version updates and are saved with it."""
        if policy in self._sources:
            raise ConfigError(f"The policy {policy!r} has a batch source already; one trainer trains one policy.")
        credit = credit_of(credit_assigner, algorithm)
        builder = BatchBuilder(credit_assigner=credit, sample_filter=sample_filter)
        self._sources[policy] = PolicyBatchSource(policy, self, builder, followers)
        return self._sources[policy]

    async def run_round(self) -> None:
        """Run the next episodes and offer them to every policy. An interrupted round resets the position."""
        if self._is_running:
            raise ConfigError(
                "Two trainers asked one SharedRollouts for a batch at the same time. Let them take turns: train_policies."
            )
        before, started = self.position(), time.perf_counter()
        self._is_running, self._resumed = True, []
        try:
            episodes = await self._runner.run(self._requests.take_draw())
        except BaseException:
            self._go_to(before)
            raise
        finally:
            self._is_running = False
        generation_s = time.perf_counter() - started
        finished = _Round(
            number=self._num_rounds,
            before=before,
            episodes=episodes,
            generation_s=generation_s,
            scorer_metrics=self._engine.scorer_metrics(),
        )
        self._num_rounds += 1
        for source in self._sources.values():
            source.offer(finished)

    def position(self) -> dict[str, Any]:
        return {
            "num_rounds": self._num_rounds,
            "num_episodes": self._runner.num_episodes,
            "requests": self._requests.state_dict(),
            "scorers": state_of(self._engine.rewards),
        }

    def resume_at(self, position: dict[str, Any]) -> None:
        """Resume one policy at `position`; the stream resumes at the earliest position of all policies."""
        self._resumed.append(position)
        self._go_to(min(self._resumed, key=lambda resumed: resumed["num_rounds"]))

    def _go_to(self, position: dict[str, Any]) -> None:
        self._num_rounds, self._runner.num_episodes = position["num_rounds"], position["num_episodes"]
        self._requests.load_state_dict(position["requests"])
        load_into(self._engine.rewards, position.get("scorers", {}))


class PolicyBatchSource:
    """One policy's part of every round.

    If a policy needs a second round (nothing to train on in the first), that round waits for the other policies. Only the
    newest round waits: older ones are dropped and counted, or the other policies would fall further behind each time.
    """

    def __init__(
        self, policy: str, shared: SharedRollouts, builder: BatchBuilder, followers: Sequence[FollowsVersions]
    ) -> None:
        self.policy = policy
        self._shared = shared
        self._builder = builder
        self._followers = list(followers)
        credit = builder.credit_assigner
        self._stateful_credit = credit if isinstance(credit, Stateful) else None
        self._waiting: _Round | None = None
        self._next_round = 0
        self._num_skipped = 0

    async def next_batch(self) -> SAWBatch:
        while (finished := self._waiting) is None:  # after a resume the stream may be several rounds behind this policy
            await self._shared.run_round()
        self._waiting = None
        self._next_round = finished.number + 1
        batch = self._builder.batch(finished.episodes, policy=self.policy)
        if not batch.meta["num_rollouts"]:
            logger.warning("%r has no rollouts in round %d of %s.", self.policy, finished.number, finished.policies)
        counts = {"round": finished.number, "num_rounds_skipped": self._num_skipped}
        batch.meta |= {
            "source": "shared_rollouts",
            "policy": self.policy,
            **counts,
            "generation_s": finished.generation_s,
        }
        batch.meta["rollout_metrics"] |= finished.scorer_metrics | {name: float(n) for name, n in counts.items()}
        return batch

    get_next_batch = next_batch

    def offer(self, finished: _Round) -> None:
        """Called by SharedRollouts. After a resume a round may come again that this policy has been trained on."""
        if finished.number >= self._next_round:
            self._num_skipped += self._waiting is not None
            self._waiting = finished

    def notify_version(self, version: int) -> None:
        for follower in self._followers:
            follower.notify_version(version)

    def state_dict(self) -> dict[str, Any]:
        """Call it between batches. A resume runs a waiting round again."""
        state: dict[str, Any] = {
            "position": self._shared.position() if self._waiting is None else self._waiting.before,
            "num_skipped": self._num_skipped,
            "followers": [state_of(part) for part in self._followers],
        }
        return state if self._stateful_credit is None else {**state, "credit": self._stateful_credit.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["followers"]) != len(self._followers):
            raise ConfigError(
                f"The checkpoint of {self.policy!r} has {len(state['followers'])} followers (leagues), batches_for was given "
                f"{len(self._followers)}. Give it the same followers in the same order."
            )
        self._waiting, self._num_skipped = None, state["num_skipped"]
        self._next_round = state["position"]["num_rounds"]
        if self._stateful_credit is not None and "credit" in state:
            self._stateful_credit.load_state_dict(state["credit"])
        for part, own in zip(self._followers, state["followers"], strict=True):
            load_into(part, own)
        self._shared.resume_at(state["position"])
