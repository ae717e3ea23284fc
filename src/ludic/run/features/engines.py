"""`Engine`: what generates the samples of a run, a value of the setting `engine`. The core has `local`; others are plug-ins.

Loads without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from ludic.run.features.base import Feature
from ludic.run.features.plugged import plugged

if TYPE_CHECKING:
    from ludic.run.config.run_config import RunConfig
    from ludic.run.given import Parts
    from ludic.run.resolve import ResolvedRun
    from ludic.run.session import Session


class Engine(Feature):
    """Generates the samples of a run. The entry point of one in a plug-in has the name that the setting `engine` has."""

    engine: ClassVar[str]
    """Its name in the settings."""
    session: ClassVar[str]
    """module:Class of its `Session`, which is loaded when a run begins."""
    plays_here: bool = True
    """Whether the process of the trainer plays the episodes."""
    batches_behind: int = 0
    """Batches that samples may be behind the trained weights where max_lag is not given."""
    command: str = "train"
    """The command that resumes a run with it."""
    retries_a_divergence: bool = False
    """Whether an update that diverged may succeed when the process is started again."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"engine = {self.engine!r}"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.rollouts.engine == self.engine

    def samples_on_servers(self, config: RunConfig) -> bool:
        """Whether servers sample: the weights are in another process, one copy of them."""
        return False

    def corrects_lag(self, config: RunConfig) -> bool:
        """Whether old samples may be masked by default."""
        return True

    def filled(self, config: RunConfig, name: str, group_size: int) -> dict[str, Any]:
        """Defaults of its settings that depend on others, for a run of this name."""
        return {}

    async def finished(self, run: ResolvedRun, step: int) -> None:
        """Called after the last update of the run."""

    def session_class(self) -> type[Session]:
        module, _, name = self.session.partition(":")
        found: type[Session] = getattr(importlib.import_module(module), name)
        return found


class Local(Engine):
    """The engine in the trainer's process, which shares its weights."""

    engine = "local"
    session = "ludic.run.session:EmbeddedSession"


LOCAL = Local()


def engine_of(config: RunConfig) -> Engine:
    """The engine that the settings name; MissingPlugin for one whose plug-in is not installed."""
    name = config.rollouts.engine
    if name == LOCAL.engine:
        return LOCAL
    found: Engine = plugged(name, f"engine = {name!r}")
    return found
