"""A training run as a library part: settings, model, environment, folder, and the objects that a run consists of.

`cli`, examples and notebooks import it; it may import everything but `cli`. Start with run.py (`build`, `Run`), then
config/ (settings), given.py (the env, and parts as objects), resolve.py (every default filled in) and checks.py. features/ has what
a run may have beyond the plain loop, each declared in one place. session.py is what a run consists of once weights are loaded:
samples, evaluation, the loop; several.py is the same for several policies, whose settings and seats are in policies.py; other
engines are plug-ins. parts/ makes episodes, requests, the batch source, the algorithm and loggers, protocols/ agents and protocols.
model.py loads weights and serves them, folder.py is the run folder, names.py the names of its files, settings.py reads and writes
TOML; dry_run.py and export.py are `--dry-run` and `ludic export`.
"""

from typing import TYPE_CHECKING

from ludic.util.lazy import lazy

if TYPE_CHECKING:
    from ludic.run.config.run_config import RunConfig
    from ludic.run.run import Run, RunFailed, TrainResult, build, load

__all__ = ["Run", "RunConfig", "RunFailed", "TrainResult", "build", "load"]
__getattr__ = lazy(__name__, {"config.run_config": "RunConfig", "run": "Run RunFailed TrainResult build load"})
