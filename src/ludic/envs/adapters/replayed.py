"""`ReplayedEnv`: base of adapters whose inner env cannot be copied.

A pickle or a snapshot holds only the seed and the actions, and the copy replays them; an
env without a seed draws one. A copy costs one more pass over the episode.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from ludic.envs.env import LudicEnv, world_of
from ludic.types import JSON, Info, Observation, ResetNeeded, Snapshot, StepOutcome, new_id

_VERSION = 1


class ReplayedEnv(LudicEnv[str, Observation, str]):
    """Write `_begin`, `_advance` and `_to_act`, set `_roles`; keep what cannot be pickled in `_live` only."""

    kind: ClassVar[str]
    """Id in the catalogue; a snapshot belongs to it."""
    _live: Any = None
    """The other package's env, while it is open; `_begin` makes a new one when there is none."""
    _roles: list[str]
    _system_prompt: str | None = None
    _seed: int | None = None
    _obs: Mapping[str, Observation] = MappingProxyType({})

    @abstractmethod
    def _begin(self, seed: int) -> dict[str, tuple[Observation, Info]]:
        """Start an episode, whatever went on before."""

    @abstractmethod
    def _advance(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        """One transition of a running episode."""

    @abstractmethod
    def _to_act(self) -> list[str]:
        """Who must act now, in an env that is open."""

    @property
    def agent_ids(self) -> list[str]:
        return list(self._roles)

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    @property
    def active_agents(self) -> list[str]:
        return [] if self._live is None else self._to_act()

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        self._seed = random.Random().randrange(2**31) if seed is None else seed
        self._episode_id = new_id()
        self._played: list[dict[str, str]] = []
        opening = self._begin(self._seed)
        self._obs = {agent_id: obs for agent_id, (obs, _) in opening.items()}
        return opening

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        self._played.append(dict(actions))
        outcomes = self._advance(actions)
        self._obs = {agent_id: outcome.obs for agent_id, outcome in outcomes.items()}
        return outcomes

    def current_obs(self) -> dict[str, Observation]:
        return dict(self._obs)

    async def async_close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def snapshot(self) -> Snapshot:
        if self._seed is None:
            raise ResetNeeded(f"{type(self).__name__} has played nothing that a snapshot could hold. Call reset first.")
        world: dict[str, JSON] = {"seed": self._seed, "played": [{**actions} for actions in self._played]}
        return Snapshot(
            env_kind=self.kind, version=_VERSION, episode_id=self._episode_id, obs=self.current_obs(), world=world
        )

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=self.kind, version=_VERSION)
        self._replay(world["seed"], world["played"])
        self._episode_id = snapshot.episode_id

    def _replay(self, seed: int, played: list[dict[str, str]]) -> None:
        self.reset(seed=seed)
        for actions in played:
            self.step(actions)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_live"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._seed is not None:
            self._replay(self._seed, self._played)
