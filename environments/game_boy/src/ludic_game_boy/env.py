"""A Game Boy game as an environment: buttons in, screen text and facts out, rewards for milestones.

The env is deterministic: every seed begins in the same state, and the same presses lead to the same end. Memory, maps and plans are
the agent's part: see ludic_game_boy.agent.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludic.envs.env import world_of
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import JSON, ConfigError, Info, Observation, Snapshot, StepOutcome, UnknownName, new_id
from ludic_game_boy.demo_rom import demo_rom
from ludic_game_boy.emulator import (
    BUTTONS,
    Emulator,
    booted_state,
    read_buttons,
    read_rom,
    require_pyboy,
    screen_text,
    title_of,
)
from ludic_game_boy.games import MAPS, UNKNOWN
from ludic_game_boy.memory_map import MemoryMap, Milestone, Progress, load_map

_KIND = "game_boy"
_VERSION = 1
_MAX_WALKABLE = 64


class GameBoyEnv(SingleAgentEnv):
    """A Game Boy game on PyBoy: buttons, screen text, facts from memory; reward for milestones."""

    def __init__(
        self,
        rom: str | Path,
        *,
        game: str | None = None,
        start_state: str | Path | None = None,
        max_presses: int = 2000,
        max_presses_per_turn: int = 16,
        hold_frames: int = 8,
        settle_frames: int = 16,
    ) -> None:
        """`rom`: path of a cartridge file, or "demo". `game`: name of a memory map or path of one in JSON; found by the
        cartridge's title if not given. `start_state`: a PyBoy save state to begin in, else where the game boots.
        Out of presses is a truncation. A press is held for `hold_frames`, and the game goes on for `settle_frames`."""
        super().__init__()
        limits = {"max_presses": max_presses, "max_presses_per_turn": max_presses_per_turn, "hold_frames": hold_frames}
        for name, value in (limits | {"settle_frames": settle_frames}).items():
            if value < 1:
                raise ConfigError(f"{name}={value}; it must be at least 1.")
        require_pyboy()
        self.rom = rom
        self.start_state = start_state
        self.max_presses = max_presses
        self.max_presses_per_turn = max_presses_per_turn
        self.hold_frames = hold_frames
        self.settle_frames = settle_frames
        self._cartridge = demo_rom() if rom == "demo" else read_rom(rom)
        self.memory_map = _find_map(game, self._cartridge)
        self._emulator: Emulator | None = None
        self._opening: bytes | None = None
        self.full_reward = None if start_state else self.memory_map.full_reward
        self._progress = Progress(self.memory_map.milestones)
        self._on_route: int | None = None
        self._presses_left = 0
        self._obs: Observation = ""

    @property
    def suggested_sysprompt(self) -> str | None:
        return (
            f"You play a game on a Game Boy. {self.memory_map.hints} You are shown the screen as text and facts from the "
            f"game's memory. Reply with the buttons to press, in order: {', '.join(BUTTONS)}. A number behind a button "
            f"repeats it: `up 3 a` presses up three times, then a. At most {self.max_presses_per_turn} presses per reply."
        ).replace("  ", " ")

    # --- the episode ---

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        emulator = self._running()
        if self._opening is None:
            self._opening = self._first_state()
        emulator.load(self._opening)
        self._progress = Progress(self.memory_map.milestones)
        facts = self.memory_map.read(emulator.read)
        self._progress.update(facts)  # milestones of the start state earn no reward
        self._on_route = 0 if self.start_state is None else None
        self._presses_left = self.max_presses
        self._episode_id = new_id()
        self._obs = self._view(facts)
        return self._obs, self._info(facts, [], [])

    def _running(self) -> Emulator:
        if self._emulator is None:
            self._emulator = Emulator(self._cartridge)
        return self._emulator

    def _first_state(self) -> bytes:
        if self.start_state is None:
            return booted_state(self._cartridge)
        try:
            return Path(self.start_state).expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"Cannot read the save state {str(self.start_state)!r}: {error.strerror}.") from error

    def env_step(self, action: str) -> StepOutcome:
        presses = read_buttons(action, min(self.max_presses_per_turn, self._presses_left))
        if isinstance(presses, str):
            return self._refused(presses)
        track: list[list[Any]] = []
        reached: list[Milestone] = []
        facts: dict[str, int | str] = {}
        for button in presses:
            facts = self._press(button)
            track.append([button, *(facts[name] for name in self.memory_map.place)])
            reached += self._progress.update(facts)
            if any(milestone.is_end for milestone in reached):
                break
        names = [milestone.name for milestone in reached]
        self._obs = "".join(f"Milestone: {name}!\n" for name in names) + self._view(facts)
        is_end = any(milestone.is_end for milestone in reached)
        return StepOutcome(
            self._obs,
            sum(milestone.reward for milestone in reached),
            truncated=not is_end and self._presses_left == 0,
            terminated=is_end,
            info={**self._info(facts, track, names), "illegal_move": False},
        )

    def _press(self, button: str) -> dict[str, int | str]:
        """Press a button; returns the facts afterwards."""
        follows = button == self._next_on_route()
        self._on_route = self._on_route + 1 if follows and self._on_route is not None else None
        self._running().press(button, hold_frames=self.hold_frames, settle_frames=self.settle_frames)
        self._presses_left -= 1
        return self.memory_map.read(self._running().read)

    def _refused(self, reason: str) -> StepOutcome:
        """An unreadable action costs a press, so that every episode ends; the game does not move."""
        self._presses_left -= 1
        facts = self.memory_map.read(self._running().read)
        self._obs = f"{reason}\n{self._view(facts)}"
        info = {**self._info(facts, [], []), "illegal_move": True}
        return StepOutcome(self._obs, 0.0, truncated=self._presses_left == 0, terminated=False, info=info)

    def _info(self, facts: Mapping[str, int | str], track: list[list[Any]], reached: list[str]) -> Info:
        """`track` has a row per press: the button, and the place of the player after it."""
        place = [facts[name] for name in self.memory_map.place]
        return {
            "facts": dict(facts),
            "place": place,
            "track": track,
            "milestones": reached,
            "num_milestones": len(self._progress.reached),
            "presses_left": self._presses_left,
        }

    # --- observations ---

    def _view(self, facts: Mapping[str, int | str]) -> str:
        emulator, known = self._running(), self.memory_map
        screen = screen_text(
            emulator.tiles(), known.letters, sprites=emulator.sprites(), walkable=self._walkable(emulator)
        )
        shown = [f"{name}={value}" for name, value in facts.items() if known.facts[name].shown]
        lines = ["Screen:", screen]
        if shown:
            lines.append(f"Facts: {', '.join(shown)}")
        if self._progress.next is not None:
            lines.append(f"Next milestone: {self._progress.next}")
        return "\n".join([*lines, f"Presses left: {self._presses_left}"])

    def _walkable(self, emulator: Emulator) -> set[int]:
        if self.memory_map.walkable is None:
            return set()
        where = int.from_bytes(emulator.read(self.memory_map.walkable, 2), "little")
        if where > 0x8000 - _MAX_WALKABLE:
            return set()  # not in the cartridge: no map has been entered yet
        return set(emulator.read(where, _MAX_WALKABLE).split(b"\xff")[0])

    def env_current_obs(self) -> Observation:
        return self._obs

    def reference_action(self, agent_id: str) -> str | None:
        """The next press of the map's route, if all presses so far followed it."""
        return None if self._over else self._next_on_route()

    def _next_on_route(self) -> str | None:
        route = self.memory_map.route
        return None if self._on_route is None or self._on_route >= len(route) else route[self._on_route]

    # --- snapshots and copies ---

    def snapshot(self) -> Snapshot:
        world: dict[str, JSON] = {
            "title": title_of(self._cartridge),
            "state": base64.b64encode(self._running().save()).decode(),
            "reached": [*self._progress.reached],
            "presses_left": self._presses_left,
            "on_route": self._on_route,
            "over": self._over,
        }
        return self._snapshot(_KIND, _VERSION, world)

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        title = title_of(self._cartridge)
        if world["title"] != title:
            raise ConfigError(f"The snapshot was taken of the game {world['title']!r}; this is {title!r}.")
        self._running().load(base64.b64decode(world["state"]))
        self._progress = Progress(self.memory_map.milestones, world["reached"])
        self._presses_left, self._on_route, self._over = world["presses_left"], world["on_route"], world["over"]
        self._obs = snapshot.obs[self.agent_id]
        self._episode_id = snapshot.episode_id

    def __getstate__(self) -> dict[str, Any]:
        """An emulator cannot be pickled; its state can."""
        state = self.__dict__.copy()
        state["_emulator"] = None if self._emulator is None else self._emulator.save()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_emulator")
        self.__dict__.update(state, _emulator=None)
        if saved is not None:
            self._running().load(saved)

    async def async_close(self) -> None:
        if self._emulator is not None:
            self._emulator.close()
            self._emulator = None


def _find_map(game: str | None, cartridge: bytes) -> MemoryMap:
    if game is None:
        title = title_of(cartridge)
        return next((known for known in MAPS.values() if known.title == title), UNKNOWN)
    if game in MAPS:
        return MAPS[game]
    if game.endswith(".json"):
        return load_map(game)
    raise UnknownName.among("game", game, MAPS, "Or give the path of a memory map in JSON.")
