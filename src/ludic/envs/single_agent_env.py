"""Environments with one agent: write `env_reset` and `env_step`."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.envs.threads import thread_of
from ludic.types import ConfigError, EnvContractError, Info, Observation, StepOutcome


class SingleAgentEnv(LudicEnv[str, Observation, str]):
    """Gym-like: one agent; text (and pictures) in, text out."""

    agent_id: str = "agent_0"  # on the class too, for subclasses that do not call super().__init__()

    def __init__(self, agent_id: str = "agent_0") -> None:
        self.agent_id = agent_id

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("env_reset", "env_step"):
            if inspect.iscoroutinefunction(cls.__dict__.get(name)):
                raise ConfigError(f"{cls.__name__}.{name} is async; name it async_{name} and it will be awaited.")

    # --- implemented by an env ---

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        """Start an episode."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement env_reset (or async_env_reset, if it does I/O)."
        )

    def env_step(self, action: str) -> StepOutcome:
        """One transition."""
        raise NotImplementedError(f"{type(self).__name__} must implement env_step (or async_env_step, if it does I/O).")

    def env_current_obs(self) -> Observation:
        raise NotImplementedError(f"{type(self).__name__} does not offer env_current_obs.")

    async def async_env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        """Override this instead if starting an episode does asynchronous I/O."""
        if not self.blocking:
            return self.env_reset(seed=seed)
        return await thread_of(self).run(partial(self.env_reset, seed=seed))

    async def async_env_step(self, action: str) -> StepOutcome:
        """Override this instead if a transition does asynchronous I/O."""
        return await thread_of(self).run(partial(self.env_step, action)) if self.blocking else self.env_step(action)

    # --- the interface of LudicEnv ---

    _over: bool = True

    @property
    def agent_ids(self) -> list[str]:
        return [self.agent_id]

    @property
    def active_agents(self) -> list[str]:
        return [] if self._over else [self.agent_id]

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        return self._opened(self.env_reset(seed=seed))

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        return self._stepped(self.env_step(actions.get(self.agent_id, "")))

    async def async_reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        return self._opened(await self.async_env_reset(seed=seed))

    async def async_step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        return self._stepped(await self.async_env_step(actions.get(self.agent_id, "")))

    def current_obs(self) -> dict[str, Observation]:
        return {self.agent_id: self.env_current_obs()}

    def _opened(self, first: tuple[Observation, Info]) -> dict[str, tuple[Observation, Info]]:
        if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], (str, list))):
            raise EnvContractError(
                f"{type(self).__name__}.env_reset returned {type(first).__name__} {first!r:.80}; "
                "it must return (observation, info dict); the observation is text, or content_of(text, picture, …)."
            )
        self._over = False
        return {self.agent_id: first}

    def _stepped(self, outcome: StepOutcome) -> dict[str, StepOutcome]:
        if not isinstance(outcome, StepOutcome):
            raise EnvContractError(
                f"{type(self).__name__}.env_step returned {type(outcome).__name__} {outcome!r:.80}; "
                "it must return a StepOutcome(obs, reward, truncated, terminated, info)."
            )
        self._over = outcome.terminated or outcome.truncated
        return {self.agent_id: outcome}


def is_plain(kind: type[LudicEnv[Any, Any, Any]]) -> bool:
    """True if the awaitable methods only call `reset` and `step`."""
    if issubclass(kind, SingleAgentEnv):
        inherited, base = ("async_reset", "async_step", "async_env_reset", "async_env_step"), SingleAgentEnv
        return all(getattr(kind, name) is getattr(base, name) for name in inherited)
    return kind.async_reset is LudicEnv.async_reset and kind.async_step is LudicEnv.async_step
