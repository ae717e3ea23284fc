"""PettingZoo games with discrete actions, as text envs: turn by turn (AEC) or all at once (parallel).

Every agent gets an outcome for every step, so a reward from another agent's move is credited at once. In a parallel
game only the agent whose reply was no action is asked again; the actions of the others wait for it.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from ludic.types import ConfigError, Info, MissingExtra, Observation, StepOutcome, UnknownName
from ludic_envs.adapters.base import Choices, ReplayedEnv, as_json, board_or_text

Order: TypeAlias = Literal["auto", "turns", "together"]
_MAKERS = {"auto": ("parallel_env", "env"), "turns": ("env",), "together": ("parallel_env",)}
_MASK = "action_mask"
_RULES = "Reply with one of the legal moves. On a board, x is yours and o is the other player's."


class PettingZooEnv(ReplayedEnv):
    """Any PettingZoo game with discrete actions, turn by turn or all at once."""

    kind = "pettingzoo"

    def __init__(
        self,
        game: str,
        *,
        game_args: Mapping[str, Any] | None = None,
        order: Order = "auto",
        action_names: Sequence[str] | None = None,
        render: Callable[[Any], str] | None = None,
        invalid_reward: float = 0.0,
        system_prompt: str | None = None,
    ) -> None:
        """`game` is an id of PettingZoo's registry ("classic/tictactoe-v3", from 1.27 on), or a module with `env` or
        `parallel_env`, in PettingZoo ("classic.tictactoe_v3") or anywhere else.
        `order`: "turns" plays `env`, "together" `parallel_env`, "auto" the latter where there is one. `action_names`
        name the actions in order, else they are numbers. `render` makes text of an observation (without its mask). An invalid
        reply does not change the game, costs `invalid_reward` and is answered with the legal actions.
        """
        self.game, self.game_args, self.order, self.invalid_reward = game, dict(game_args or {}), order, invalid_reward
        self._live = self._make()
        self._roles = list(self._live.possible_agents)
        self._choices = Choices(repr(game), self._num_actions(), action_names)
        self._render = render or board_or_text
        name = game.replace("/", ".").rpartition(".")[2]
        self._system_prompt = system_prompt or f"You play {name}. {_RULES}"
        self._on_turn: list[str] = []
        self._chosen: dict[str, int] = {}

    def _make(self) -> Any:
        offered = _offered(self.game)
        found = next((name for name in _MAKERS.get(self.order, ()) if name in offered), None)
        if found is None:
            raise ConfigError(f"order={self.order!r} does not go with {self.game!r}, which offers {sorted(offered)}.")
        self._is_parallel = found == "parallel_env"
        try:
            return offered[found](**self.game_args)
        except (TypeError, ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(f"PettingZoo cannot make {self.game!r} with {self.game_args}: {error}") from error

    def _num_actions(self) -> int:
        from gymnasium.spaces import Discrete

        spaces = [self._live.action_space(role) for role in self._roles]
        if any(not isinstance(space, Discrete) or space.start != 0 or space.n != spaces[0].n for space in spaces):
            raise ConfigError(f"The action spaces of {self.game!r} are {spaces}; all must be the same Discrete(n).")
        return int(spaces[0].n)

    def _to_act(self) -> list[str]:
        return [role for role in self._on_turn if role not in self._chosen]

    def _begin(self, seed: int) -> dict[str, tuple[Observation, Info]]:
        self._live = self._make() if self._live is None else self._live
        opened = self._live.reset(seed=seed)
        self._chosen, self._ended = {}, dict.fromkeys(self._roles, (False, False))
        if self._is_parallel:
            (self._seen, self._infos), self._on_turn = opened, list(self._live.agents)
        else:
            self._look_around()
        return {role: (self._view(role), self._facts(role)) for role in self._roles}

    def _advance(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        for role in self.active_agents:
            action = self._choices.read(actions.get(role, ""), self._legal(role))
            self._chosen |= {} if action is None else {role: action}
        refused = self.active_agents
        rewards = {r: self.invalid_reward for r in refused if r in actions} if refused else self._move()
        return {role: self._outcome(role, rewards.get(role, 0.0), role in refused) for role in self._roles}

    def _outcome(self, role: str, reward: float, refused: bool) -> StepOutcome:
        obs = f"That is not a legal move.\n{self._view(role)}" if refused else self._view(role)
        info = {"illegal_move": refused, **self._facts(role)}
        return StepOutcome(obs, float(reward), *self._ended[role], info=info)

    def _move(self) -> Mapping[str, float]:
        """Carry out the chosen actions; returns the rewards."""
        chosen, self._chosen = self._chosen, {}
        if self._is_parallel:
            self._seen, rewards, terminated, truncated, self._infos = self._live.step(chosen)
            self._ended |= {role: (bool(truncated[role]), bool(terminated[role])) for role in terminated}
            self._on_turn = list(self._live.agents)
        else:
            self._live.step(chosen[self._live.agent_selection])
            rewards = dict(self._live.rewards)
            self._look_around()
        return rewards

    def _look_around(self) -> None:
        """Store the observations; agents that have finished then take their empty turn, which removes them."""
        game = self._live
        self._seen, self._infos = {role: game.observe(role) for role in game.agents}, dict(game.infos)
        self._ended |= {role: (bool(game.truncations[role]), bool(game.terminations[role])) for role in game.agents}
        while game.agents and any(self._ended[game.agent_selection]):
            game.step(None)
        self._on_turn = [game.agent_selection] if game.agents else []

    def _view(self, role: str) -> Observation:
        if self.active_agents and role not in self.active_agents:
            return f"Waiting for {', '.join(self.active_agents)}."
        if role not in self._seen:
            return "The game is over."
        seen = self._seen[role]
        shown = self._render(seen["observation"] if isinstance(seen, Mapping) and _MASK in seen else seen)
        moves = f"Legal moves: {', '.join(self._choices.names(self._legal(role)))}"
        return f"{shown}\n{moves if self.active_agents else 'The game is over.'}"

    def _legal(self, role: str) -> list[int]:
        seen = self._seen[role]
        mask = seen.get(_MASK) if isinstance(seen, Mapping) else self._infos.get(role, {}).get(_MASK)
        return [number for number in self._choices.by_number if mask is None or mask[number]]

    def _facts(self, role: str) -> Info:
        return {"env": as_json({name: fact for name, fact in self._infos.get(role, {}).items() if name != _MASK})}

    def legal_actions(self, agent_id: str) -> list[str]:
        return self._choices.names(self._legal(agent_id)) if agent_id in self.active_agents else []


def _offered(game: str) -> dict[str, Callable[..., Any]]:
    """The game's makers: `env`, `parallel_env`, or both."""
    if importlib.util.find_spec("pettingzoo") is None:
        raise MissingExtra("pettingzoo", f"The PettingZoo game {game!r}")
    if "/" in game:
        return _registered(game)
    inside = importlib.util.find_spec(f"pettingzoo.{game.split('.')[0]}")
    try:
        module = importlib.import_module(f"pettingzoo.{game}" if inside else game)
    except ImportError as error:
        raise ConfigError(f"The PettingZoo game {game!r} cannot be imported: {error}.") from error
    return {name: make for name, make in vars(module).items() if name in _MAKERS["auto"]}


def _registered(game: str) -> dict[str, Callable[..., Any]]:
    package = importlib.import_module("pettingzoo")
    if not hasattr(package, "make"):
        raise ConfigError(
            f"{game!r} is an id of PettingZoo's registry, which comes with 1.27; name the module instead."
        )
    registries = {"env": ("aec", package.aec_registry), "parallel_env": ("parallel", package.parallel_registry)}
    found: dict[str, Callable[..., Any]] = {
        name: partial(package.make, kind, game) for name, (kind, known) in registries.items() if game in known
    }
    if not found:
        raise UnknownName.among("PettingZoo game", game, {*package.aec_registry, *package.parallel_registry})
    return found
