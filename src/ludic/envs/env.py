"""The environment kernel: a state-transition function for any number of agents.

An env knows no models, prompts or tokens. It names the agents that must act (`active_agents`), takes their actions, and returns
outcomes for those that acted and optionally for others. All its random numbers come from `reset(seed=…)`, so the same seed and
the same actions give the same episode, also with concurrent episodes.

Protocols await only `async_reset` and `async_step`. An env that computes implements `reset` and `step`, which run in the env's own
thread (ludic.envs.threads); one that does asynchronous I/O overrides the awaitable pair instead.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from ludic.envs.threads import thread_of
from ludic.types import JSON, ConfigError, Info, ResetNeeded, Snapshot, SnapshotUnsupported, StepOutcome

AgentID = TypeVar("AgentID", bound=str)
Obs = TypeVar("Obs")
Action = TypeVar("Action")


class LudicEnv(ABC, Generic[AgentID, Obs, Action]):
    """Multi-agent by default; SingleAgentEnv is the convenient special case."""

    blocking: bool = True
    """True if `reset` and `step` run in the env's own thread. False is for envs that answer within microseconds: they run on the
    event loop, which saves under 0.1 ms per call; one that hangs there stops every episode. Not inherited."""
    full_reward: float | None = None
    """Total reward that `reference_action` earns; None when the env has no reference solution."""

    _episode_id: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.blocking = cls.__dict__.get("blocking", True)

    @property
    @abstractmethod
    def agent_ids(self) -> list[AgentID]:
        """Every role in this env, in a fixed order."""

    @property
    @abstractmethod
    def active_agents(self) -> list[AgentID]:
        """The agents that must act now: one = turn-based, several = simultaneous, none = over."""

    def reset(self, *, seed: int | None = None) -> dict[AgentID, tuple[Obs, Info]]:
        """Start an episode; returns first observation and info, at least for the active agents.

        An agent that is left out needs an outcome before its first turn."""
        raise NotImplementedError(f"{type(self).__name__} must implement reset (or async_reset, if it does I/O).")

    def step(self, actions: Mapping[AgentID, Action]) -> dict[AgentID, StepOutcome]:
        """One transition; returns an outcome at least for every agent in `actions`. An active agent whose reply could not be
        read is missing there.

        An agent without an outcome gets no observation, no reward and no end. Where one agent's move ends the game for
        another, return outcomes for both."""
        raise NotImplementedError(f"{type(self).__name__} must implement step (or async_step, if it does I/O).")

    async def async_reset(self, *, seed: int | None = None) -> dict[AgentID, tuple[Obs, Info]]:
        return await thread_of(self).run(partial(self.reset, seed=seed)) if self.blocking else self.reset(seed=seed)

    async def async_step(self, actions: Mapping[AgentID, Action]) -> dict[AgentID, StepOutcome]:
        return await thread_of(self).run(partial(self.step, actions)) if self.blocking else self.step(actions)

    async def async_close(self) -> None:
        """Release processes and connections. It runs on the event loop after the env's last call; the engine calls it after every
        episode, except when a call of the env hangs."""

    @property
    def suggested_sysprompt(self) -> str | None:
        """A system prompt that explains the task; used when the agent's context has none."""
        return None

    def system_prompt_for(self, agent_id: AgentID) -> str | None:
        """The system prompt of one role. Override it where roles need different ones."""
        return self.suggested_sysprompt

    def current_obs(self) -> dict[AgentID, Obs]:
        raise NotImplementedError(f"{type(self).__name__} does not offer current_obs.")

    def episode_tools(self, agent_id: AgentID) -> Sequence[Callable[..., Any]]:
        """Tools of the running episode for this agent, such as a search over this question's documents: callables with type hints
        and a docstring. The agent calls them between two actions, like its own tools, and must be able to call tools. A call may
        take 30 s, or the callable's attribute `timeout_s` (None: no limit)."""
        return ()

    # --- optional: for people, scripted agents and check_env ---

    def legal_actions(self, agent_id: AgentID) -> list[str] | None:
        """This agent's legal actions now; None when actions are free text."""
        return None

    def reference_action(self, agent_id: AgentID) -> str | None:
        """The action of a reference solution; None when there is none. It may call tools first: it replies
        `<tool_call>{"name": …, "arguments": …}</tool_call>`, and is asked again."""
        return None

    def snapshot(self) -> Snapshot:
        raise SnapshotUnsupported(f"{type(self).__name__} does not offer snapshots.")

    def _snapshot(self, kind: str, version: int, world: dict[str, JSON]) -> Snapshot:
        obs: dict[str, Any] = {str(agent_id): seen for agent_id, seen in self.current_obs().items()}
        return Snapshot(env_kind=kind, version=version, episode_id=self._episode_id, obs=obs, world=world)

    def restore(self, snapshot: Snapshot) -> None:
        raise SnapshotUnsupported(f"{type(self).__name__} does not offer snapshots.")

    def _require_running(self) -> None:
        """For `step`: refuse to continue before reset or after the end."""
        if not self.active_agents:
            raise ResetNeeded(f"{type(self).__name__}.step was called, but no episode is running. Call reset first.")


# --- reading a snapshot, and random states as JSON ---


def world_of(snapshot: Snapshot, *, kind: str, version: int) -> dict[str, Any]:
    """The stored state, if it was taken of this kind and version of env."""
    if (snapshot.env_kind, snapshot.version) != (kind, version):
        raise ConfigError(f"Cannot restore {snapshot.env_kind} v{snapshot.version} into {kind} v{version}.")
    return dict(snapshot.world)


def rng_to_json(rng: random.Random) -> JSON:
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def rng_from_json(stored: Any) -> random.Random:
    version, words, gauss = stored
    rng = random.Random()
    rng.setstate((version, tuple(words), gauss))
    return rng
