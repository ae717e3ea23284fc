"""Picture grid: name the marked cell of a grid that is shown as a picture.

The text says nothing about the mark, so a player without the picture is right by chance. `blank=True` leaves the mark out: the
control for whether a model looks at the picture.
"""

import random

import numpy as np

from ludic.envs.env import rng_from_json, rng_to_json, world_of
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import JSON, ConfigError, Image, Info, Observation, Snapshot, StepOutcome, content_of, new_id

_KIND = "picture_grid"
_VERSION = 1
_PAPER, _LINE, _MARK = (255, 255, 255), (120, 120, 120), (215, 25, 25)


def draw_grid(size: int, cell_pixels: int, marked: int | None) -> Image:
    """A picture of `size` × `size` cells, of which one is marked, counted from 0 row by row."""
    pixels = np.full((size * cell_pixels, size * cell_pixels, 3), _PAPER, dtype=np.uint8)
    pixels[::cell_pixels] = pixels[:, ::cell_pixels] = _LINE
    if marked is not None:
        row, column = (place * cell_pixels for place in divmod(marked, size))
        pixels[row + 1 : row + cell_pixels, column + 1 : column + cell_pixels] = _MARK
    return Image.of(pixels)


class PictureGridEnv(SingleAgentEnv):
    """Each round shows a new picture; a right answer earns 1 / rounds, any other reply 0."""

    blocking = False
    full_reward = 1.0

    def __init__(self, *, size: int = 3, rounds: int = 1, cell_pixels: int = 28, blank: bool = False) -> None:
        """`blank`: no cell is marked in the picture."""
        super().__init__()
        for name, value, least in (("size", size, 2), ("rounds", rounds, 1), ("cell_pixels", cell_pixels, 4)):
            if value < least:
                raise ConfigError(f"picture_grid: {name}={value}; it must be at least {least}.")
        self.size, self.rounds, self.cell_pixels, self.blank = size, rounds, cell_pixels, blank
        self._rng = random.Random()
        self._marked = 0
        self._round = 0
        self._obs: Observation = ""

    @property
    def suggested_sysprompt(self) -> str | None:
        return (
            f"You see a grid of {self.size} × {self.size} cells. They are numbered from 1 to {self.size**2}, row by row from the "
            "top left. One cell is red. Reply with its number only."
        )

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._rng = random.Random(seed)
        self._round = 0
        self._episode_id = new_id()
        return self._show(), {"round": 0}

    def _show(self, text: str = "Which cell is red?") -> Observation:
        self._marked = self._rng.randrange(self.size**2)
        self._obs = content_of(text, draw_grid(self.size, self.cell_pixels, None if self.blank else self._marked))
        return self._obs

    def env_step(self, action: str) -> StepOutcome:
        said, cell = action.strip(), self._marked + 1
        is_right = said == str(cell)
        self._round += 1
        is_over = self._round == self.rounds
        event = "Right." if is_right else f"Wrong: it was {cell}."
        if is_over:
            self._obs = event
        else:
            self._show(f"{event} Which cell is red now?")
        info: Info = {
            "round": self._round,
            "cell": cell,
            "correct": is_right,
            "illegal_move": said not in self.legal_actions(self.agent_id),
        }
        return StepOutcome(self._obs, float(is_right) / self.rounds, terminated=is_over, info=info)

    def env_current_obs(self) -> Observation:
        return self._obs

    def legal_actions(self, agent_id: str) -> list[str]:
        return [] if self._over else [str(cell + 1) for cell in range(self.size**2)]

    def reference_action(self, agent_id: str) -> str | None:
        """The marked cell, also where the picture is blank."""
        return None if self._over else str(self._marked + 1)

    def snapshot(self) -> Snapshot:
        world: dict[str, JSON] = {
            "rng": rng_to_json(self._rng),
            "marked": self._marked,
            "round": self._round,
            "over": self._over,
        }
        return self._snapshot(_KIND, _VERSION, world)

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        self._rng, self._marked = rng_from_json(world["rng"]), world["marked"]
        self._round, self._over = world["round"], world["over"]
        self._obs = snapshot.obs[self.agent_id]
        self._episode_id = snapshot.episode_id
