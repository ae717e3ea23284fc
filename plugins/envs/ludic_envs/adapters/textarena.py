"""TextArena's games, for one player or several, taking turns.

The game sends messages; each player gets the new ones at every step, and the agent's context keeps the history (TextArena's own
wrappers, which repeat it in every observation, are left out). Rewards come at the end. The game decides the cost of an invalid
move: usually the first is forgiven and the second loses.
"""

import importlib
import re
from collections.abc import Mapping
from typing import Any

from ludic.types import ConfigError, Info, MissingExtra, Observation, StepOutcome, UnknownName
from ludic_envs.adapters.base import GlobalRandom, ReplayedEnv, as_json

_LISTED = re.compile(r"(?:available|valid|legal) (?:moves|actions):(.*)", re.IGNORECASE)
_INVALID = "attempted an invalid move"
_MAX_CHARS = 4_000
"""Replies are cut there. The games turn any run of digits into a number, and Python refuses more than 4,300 of them."""


class TextArenaEnv(ReplayedEnv):
    """Any of TextArena's games, for one player or several."""

    kind = "textarena"

    def __init__(self, game: str, *, num_players: int = 1, game_args: Mapping[str, Any] | None = None) -> None:
        """`game` is an id of TextArena ("TicTacToe-v0"), `game_args` go to its `make`. Some games ask the network: for
        word lists (Wordle, Hangman) or for a model that judges (Debate); their error says so."""
        registry = _package().envs.registration.ENV_REGISTRY
        if game not in registry:
            raise UnknownName.among(
                "TextArena game", game, [id for id in registry if not id.endswith(("-raw", "-train"))]
            )
        self.game, self.game_args = game, dict(game_args or {})
        self._roles = [f"player_{number}" for number in range(num_players)]
        self._random = GlobalRandom(0)
        self._over = True
        self._listed: dict[str, list[str]] = {}

    def _to_act(self) -> list[str]:
        return [] if self._over else [self._roles[self._live.state.current_player_id]]

    def _begin(self, seed: int) -> dict[str, tuple[Observation, Info]]:
        self._random, self._listed = GlobalRandom(seed), {}
        with self._random.installed():
            try:
                opened = _package().make(self.game, **self.game_args)
                opened.reset(num_players=len(self._roles), seed=seed)
            except (AssertionError, ImportError, SyntaxError, LookupError, TypeError, ValueError, OSError) as error:
                raise ConfigError(
                    f"TextArena's {self.game!r} cannot be played here by {len(self._roles)} player(s) with "
                    f"{self.game_args}: {type(error).__name__}: {error}"
                ) from error
            self._live, self._over = opened, False
            return {role: (self._news(role), {}) for role in self._roles}

    def _advance(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        (mover,) = self.active_agents
        with self._random.installed():
            self._over, info = self._live.step(actions.get(mover, "")[:_MAX_CHARS])
            rewards, facts = self._live.close() if self._over else ({}, {})
            news = {role: self._news(role) for role in self._roles}
        outcomes = {}
        for number, role in enumerate(self._roles):
            about: Info = {"illegal_move": role == mover and _INVALID in news[role], "game": as_json(info)}
            if self._over:
                about["result"] = as_json(facts.get(number, {}))
                about["illegal_move"] = bool(facts.get(number, {}).get("invalid_move"))
            reward = float((rewards or {}).get(number, 0.0))
            outcomes[role] = StepOutcome(news[role], reward, terminated=self._over, info=about)
        return outcomes

    def _news(self, role: str) -> Observation:
        """The game's new messages for this player, without its own moves."""
        number = self._roles.index(role)
        if role in self.active_agents:
            _, messages = _unwrapped(self._live).get_observation()
        else:
            messages, self._live.state.observations[number] = self._live.state.observations[number], []
        text = "\n\n".join(self._said(sender, words) for sender, words, _ in messages if sender != number)
        if found := _LISTED.findall(text):
            self._listed[role] = re.findall(r"\[[^\[\]]+\]", found[-1])
        waiting = "The game is over." if self._over else f"Waiting for {', '.join(self.active_agents)}."
        return text.strip() or waiting

    def _said(self, sender: int, words: str) -> str:
        is_game = sender == _package().GAME_ID
        return words.strip() if is_game else f"[{self._live.state.role_mapping[sender]}] {words.strip()}"

    def legal_actions(self, agent_id: str) -> list[str] | None:
        """Those that the game has listed; most games take free text."""
        return [] if agent_id not in self.active_agents else self._listed.get(agent_id) or None


def _package() -> Any:
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise MissingExtra("textarena", "TextArena's games") from error


def _unwrapped(game: Any) -> Any:
    while isinstance(game, _package().Wrapper):
        game = game.env
    return game
