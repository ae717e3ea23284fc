"""The environment kernel: a state-transition function for any number of agents.

An env knows no models, prompts or tokens. It names the agents that must act (`active_agents`), takes their
actions, and returns outcomes for those that acted and optionally for others. All its random numbers come from
`reset(seed=…)`, so the same seed and the same actions give the same episode, also beside concurrent episodes.

Protocols only ever await `async_reset` and `async_step`. An env that computes implements `reset` and `step`, which run in a
thread of the env's own (ludic.envs.threads); one that does asynchronous I/O overrides the awaitable pair instead.
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
    """Whether `reset` and `step` run in the env's own thread. False is for envs that answer within microseconds: they run on the
    event loop, which saves the thread's share of each call (under 0.1 ms). One that hangs there stops every episode. Not
    inherited: each class says it for itself."""
    full_reward: float | None = None
    """Total reward that `reference_action` earns; None when the env has no reference solution."""

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
        """Who must act now: one = turn-based, several = simultaneous, none = over."""

    def reset(self, *, seed: int | None = None) -> dict[AgentID, tuple[Obs, Info]]:
        """Start an episode; first observation and info, for those who must act at least.

        An agent that is left out needs an outcome before its first turn."""
        raise NotImplementedError(f"{type(self).__name__} must implement reset (or async_reset, if it does I/O).")

    def step(self, actions: Mapping[AgentID, Action]) -> dict[AgentID, StepOutcome]:
        """One transition; an outcome for every agent in `actions` at least. An active agent may be missing there: its reply
        could not be read.

        An agent that is left out hears nothing: no observation, no reward, no end. In a game that one side loses by the
        other's move, tell both."""
        raise NotImplementedError(f"{type(self).__name__} must implement step (or async_step, if it does I/O).")

    async def async_reset(self, *, seed: int | None = None) -> dict[AgentID, tuple[Obs, Info]]:
        return await thread_of(self).run(partial(self.reset, seed=seed)) if self.blocking else self.reset(seed=seed)

    async def async_step(self, actions: Mapping[AgentID, Action]) -> dict[AgentID, StepOutcome]:
        return await thread_of(self).run(partial(self.step, actions)) if self.blocking else self.step(actions)

    async def async_close(self) -> None:
        """Give back what the env holds (processes, connections). It runs on the event loop, after the env's last call has ended;
        the engine calls it however the episode went, except when a call of the env hangs."""
        return None

    @property
    def suggested_sysprompt(self) -> str | None:
        """A system prompt that explains the task; used when the agent's context brings none."""
        return None

    def current_obs(self) -> dict[AgentID, Obs]:
        raise NotImplementedError(f"{type(self).__name__} does not offer current_obs.")

    def episode_tools(self, agent_id: AgentID) -> Sequence[Callable[..., Any]]:
        """Tools of the episode that is running, for this agent: callables with type hints and a docstring.

        For tools that belong to the task, such as a search over this question's documents. The
        agent calls them between two actions, like its own tools; the env needs an agent that can call tools.
        """
        return ()

    # --- optional offers: people, scripted agents and check_env use them ---

    def legal_actions(self, agent_id: AgentID) -> list[str] | None:
        """The canonical actions that are open to this agent now; None when actions are free text."""
        return None

    def reference_action(self, agent_id: AgentID) -> str | None:
        """What a reference solution plays now; None when there is none."""
        return None

    def snapshot(self) -> Snapshot:
        raise SnapshotUnsupported(f"{type(self).__name__} does not offer snapshots.")

    def restore(self, snapshot: Snapshot) -> None:
        raise SnapshotUnsupported(f"{type(self).__name__} does not offer snapshots.")

    def _require_running(self) -> None:
        """For `step`: refuse to go on before reset or after the end."""
        if not self.active_agents:
            raise ResetNeeded(f"{type(self).__name__}.step was called, but no episode is running. Call reset first.")


# --- Snapshots: reading one of the right kind, and the random state as plain JSON ---


def world_of(snapshot: Snapshot, *, kind: str, version: int) -> dict[str, Any]:
    """The stored world, if it was taken of this kind of env and in this version."""
    if (snapshot.env_kind, snapshot.version) != (kind, version):
        raise ConfigError(f"Cannot restore {snapshot.env_kind} v{snapshot.version} into {kind} v{version}.")
    return dict(snapshot.world)


def dice_to_json(rng: random.Random) -> JSON:
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def dice_from_json(stored: Any) -> random.Random:
    version, words, gauss = stored
    rng = random.Random()
    rng.setstate((version, tuple(words), gauss))
    return rng
