"""The iterated prisoner's dilemma: two agents choose at the same time, round after round.

A small env with simultaneous actions and rewards that depend on both. It is deterministic; the seed changes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from ludic.envs.env import LudicEnv, world_of
from ludic.types import JSON, ConfigError, Info, Observation, Snapshot, StepOutcome, new_id

Move: TypeAlias = Literal["cooperate", "defect"]

PLAYERS: Final = ("player_0", "player_1")
_OTHER = {"player_0": "player_1", "player_1": "player_0"}
_MOVE_OF: dict[str, Move] = {"cooperate": "cooperate", "c": "cooperate", "defect": "defect", "d": "defect"}
_KIND = "prisoners_dilemma"
_VERSION = 1


class PrisonersDilemmaEnv(LudicEnv[str, Observation, str]):
    """Both moves decide the rewards of a round; a missing or unreadable move counts as cooperate."""

    blocking = False

    def __init__(self, *, rounds: int = 10, payoffs: Sequence[float] = (5.0, 3.0, 1.0, 0.0)) -> None:
        """`payoffs`, in falling order: temptation (defect against cooperate), reward (both cooperate), punishment (both defect)
        and sucker (cooperate against defect)."""
        if rounds < 1:
            raise ConfigError(f"rounds={rounds} leaves nothing to play; give at least 1.")
        if len(payoffs) != 4 or not payoffs[0] > payoffs[1] > payoffs[2] > payoffs[3]:
            raise ConfigError(
                f"payoffs={payoffs} is no dilemma; give four falling numbers: temptation, reward, punishment, sucker."
            )
        self.rounds = rounds
        self._temptation, self._reward, self._punishment, self._sucker = map(float, payoffs)
        self._payoff: dict[tuple[Move, Move], float] = {
            ("defect", "cooperate"): self._temptation,
            ("cooperate", "cooperate"): self._reward,
            ("defect", "defect"): self._punishment,
            ("cooperate", "defect"): self._sucker,
        }
        self._round = 0
        self._over = True
        self._last: dict[str, Move] = {}
        self._scores = dict.fromkeys(PLAYERS, 0.0)

    @property
    def agent_ids(self) -> list[str]:
        return list(PLAYERS)

    @property
    def active_agents(self) -> list[str]:
        return [] if self._over else list(PLAYERS)

    @property
    def suggested_sysprompt(self) -> str | None:
        return (
            f"You and another player meet for {self.rounds} rounds. In each round both choose, at the same time and "
            f"unseen, to cooperate or to defect. Both cooperate: {self._reward:g} points each. Both defect: "
            f"{self._punishment:g} each. One defects: {self._temptation:g} for the one who defects, {self._sucker:g} "
            "for the other. Get as many points as you can. Reply with your choice: cooperate or defect."
        )

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        self._round, self._over, self._last = 0, False, {}
        self._scores = dict.fromkeys(PLAYERS, 0.0)
        self._episode_id = new_id()
        return {player: (self._view(player), {"round": 0}) for player in PLAYERS}

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        read = {player: _MOVE_OF.get(actions.get(player, "").strip().lower()) for player in PLAYERS}
        # Cooperating never pays more than defecting, so an unreadable reply gains nothing.
        self._last = {player: move or "cooperate" for player, move in read.items()}
        rewards = {player: self._payoff[self._last[player], self._last[_OTHER[player]]] for player in PLAYERS}
        self._scores = {player: self._scores[player] + rewards[player] for player in PLAYERS}
        self._round += 1
        self._over = self._round == self.rounds
        return {
            player: StepOutcome(
                self._view(player),
                rewards[player],
                truncated=False,
                terminated=self._over,
                info=self._info(player, illegal=read[player] is None),
            )
            for player in PLAYERS
        }

    def _info(self, player: str, *, illegal: bool) -> Info:
        return {
            "round": self._round,
            "move": self._last[player],
            "opponent_move": self._last[_OTHER[player]],
            "illegal_move": illegal,
            "score": self._scores[player],
            "opponent_score": self._scores[_OTHER[player]],
        }

    def _view(self, player: str) -> Observation:
        other = _OTHER[player]
        lines = []
        if self._last:
            lines.append(f"Last round you chose to {self._last[player]}, the other player to {self._last[other]}.")
        lines.append(f"Scores: you {self._scores[player]:g}, the other player {self._scores[other]:g}.")
        left = self.rounds - self._round
        lines.append(f"Rounds left: {left}. Cooperate or defect?" if left else "The game is over.")
        return "\n".join(lines)

    def current_obs(self) -> dict[str, Observation]:
        return {player: self._view(player) for player in PLAYERS}

    def legal_actions(self, agent_id: str) -> list[str]:
        return [] if self._over else ["cooperate", "defect"]

    def reference_action(self, agent_id: str) -> str | None:
        """Tit for tat: cooperate first, then repeat the other player's last move."""
        return None if self._over else self._last.get(_OTHER[agent_id], "cooperate")

    def snapshot(self) -> Snapshot:
        world: dict[str, JSON] = {
            "round": self._round,
            "last": {**self._last},
            "scores": {**self._scores},
            "over": self._over,
        }
        return self._snapshot(_KIND, _VERSION, world)

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        self._round, self._over = world["round"], world["over"]
        self._last, self._scores = dict(world["last"]), dict(world["scores"])
        self._episode_id = snapshot.episode_id
