"""`TraceCollector`: collects the steps of an episode into one rollout per agent."""

from typing import Any

from ludic.types import Rollout, Step, StopReason, new_id


class TraceCollector:
    """Collects steps; returns one rollout per agent.

    Every agent of the episode gets a rollout, even without steps: credit compares the siblings of a group role by role, so each
    sibling needs every role.
    """

    def __init__(self, **global_meta: Any) -> None:
        self._global_meta = global_meta
        self._rollouts: dict[str, Rollout] = {}

    @classmethod
    def for_episode(cls, env: object, *, env_seed: int | None, sampling_seed: int | None) -> "TraceCollector":
        """A collector whose rollouts record the episode, the env and the seeds."""
        return cls(episode_id=new_id(), env_name=type(env).__name__, env_seed=env_seed, sampling_seed=sampling_seed)

    def rollout(self, agent_id: str) -> Rollout:
        """The rollout of this agent; its id is fixed from the start."""
        found = self._rollouts.get(agent_id)
        if found is None:
            found = Rollout(id=new_id(), meta={**self._global_meta, "agent_id": agent_id})
            self._rollouts[agent_id] = found
        return found

    def add(self, agent_id: str, step: Step) -> None:
        self.rollout(agent_id).steps.append(step)

    def set_stop(self, agent_id: str, stop: StopReason) -> None:
        rollout = self.rollout(agent_id)
        rollout.stop = stop
        rollout.meta["episode_truncated"] = stop.is_truncation
        rollout.meta["truncation_reason"] = stop.value if stop.is_truncation else None

    def extract_rollouts(self, episode_truncated: bool = False, truncation_reason: str | None = None) -> list[Rollout]:
        """All rollouts, with one truncation status for the whole episode."""
        for rollout in self._rollouts.values():
            rollout.meta["episode_truncated"] = episode_truncated
            rollout.meta["truncation_reason"] = truncation_reason
        return self.extract_rollouts_with_per_agent_status()

    def extract_rollouts_with_per_agent_status(self) -> list[Rollout]:
        """All rollouts, each with its agent's status (see `set_stop`)."""
        return list(self._rollouts.values())
