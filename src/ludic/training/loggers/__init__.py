"""Loggers: where the numbers of a step go. Every logger has `log(step, stats)` and `close()`.

`run` makes them by name; the trainer calls them. base.py has the optional interfaces, TeeLogger and the
record of a run.
"""

from typing import TYPE_CHECKING

from ludic.util.lazy import lazy

if TYPE_CHECKING:
    from ludic.training.loggers.base import *  # noqa: F403  # noqa: F403
    from ludic.training.loggers.print import *  # noqa: F403
    from ludic.training.loggers.rich_live import *  # noqa: F403
    from ludic.training.loggers.trackers import *  # noqa: F403
    from ludic.util.metrics_file import newest_step_of as newest_step_of
    from ludic.util.metrics_file import read_metrics as read_metrics

_NAMES_BY_MODULE = {
    "base": "Closable JSONLLogger KeepsRecord Resumable ShowsActivity TeeLogger",
    "print": "PrintLogger",
    "rich_live": "RichLiveLogger",
    "trackers": "TensorBoardLogger TrackioLogger WandbLogger",
    "ludic.util.metrics_file": "newest_step_of read_metrics",
}
__all__ = [name for names in _NAMES_BY_MODULE.values() for name in names.split()]
__getattr__ = lazy(__name__, _NAMES_BY_MODULE)
