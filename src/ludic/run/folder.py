"""The folder of a run: whether it may be used, how far the run got, and what it holds.

runs/<name>/  config.toml  metrics.jsonl  rollouts/from_step_000000.jsonl.gz  checkpoints/step_000020/  wandb_id  server/
              trained/step_000012.rank0.npz  failure.json (of a run that an error has ended)
              of several policies instead of checkpoints: policies/<name>/config.toml, policies/<name>/checkpoints/step_000020/
              of a pipeline also: rollouts/actor-0-….jsonl.gz  weights/weights_20.safetensors  redis/  logs/learner.log
"""

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic import __version__
from ludic.run.config.entries import POLICIES
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import engine_of
from ludic.run.names import CHECKPOINTS, CONFIG, FAILURE, LOGS, METRICS, REDIS, ROLLOUTS, SERVER, WANDB_ID
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import Difference, differences, read_toml, refuse, settings_of, to_toml
from ludic.training.checkpoint.manifest import CheckpointError, read_manifest
from ludic.types import ConfigError
from ludic.types.errors import RunComplete
from ludic.util.metrics_file import newest_step_of, read_metrics

if TYPE_CHECKING:
    from ludic.training.checkpoint.manager import CheckpointManager

logger = logging.getLogger(__name__)

_BEFORE_THE_RUN = {SERVER, ROLLOUTS, REDIS, LOGS}
"""Files that may be there before the learner writes anything: a server, a Redis or an actor started first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The step and the checkpoint that a run begins with."""

    first_step: int = 0
    """Updates that are done already."""
    checkpoint: Path | None = None
    """The checkpoint to go on from."""
    restarts: bool = False
    """It was interrupted before its first checkpoint: what it has written so far is written again."""
    changed: list[Difference] = field(default_factory=list)
    """Settings that differ from those in the folder."""


def resume_point(run: ResolvedRun, *, resume: bool) -> ResumePoint:
    """The point at which the run in the config's folder begins; an error if it must not be touched. Nothing is written."""
    folder, config = run.folder, run.config
    refuse(_folder_problems(folder, resume=resume))
    if not (folder / CONFIG).is_file():
        return ResumePoint()
    changed = differences(read_toml(RunConfig, folder / CONFIG), config)
    if not resume:
        if _has_begun(folder):
            raise ConfigError(_why_not_again(run, changed))
        return ResumePoint()
    refused = [difference for difference in changed if not _may_change(difference, config)]
    if refused:
        raise ConfigError(
            f"{folder} is a run with other settings: {'; '.join(map(str, refused))}. `{how_to_resume(run)}` goes on "
            "with its own; give another --name to start a new run."
        )
    checkpoint = _newest_undamaged(folder)
    step = _step_of(checkpoint)
    if step >= config.train.steps and not _lacks_evaluation(run, step):
        raise RunComplete(
            f"{folder} is complete: {step} of {config.train.steps} updates. To go on: {how_to_resume(run)} --steps {2 * step}"
        )
    return ResumePoint(
        first_step=step, checkpoint=checkpoint, restarts=checkpoint is None and _has_begun(folder), changed=changed
    )


def _lacks_evaluation(run: ResolvedRun, step: int) -> bool:
    """True if the last evaluation of a run that has made all updates was ended before it had a result."""
    cfg = run.trainer
    last_batch_end = step - step % cfg.steps_per_batch  # evaluations come between two batches
    return cfg.lacks_evaluation(last_batch_end, newest_step_of(run.folder / METRICS, "eval/step"))


def _folder_problems(folder: Path, *, resume: bool) -> Iterator[str]:
    """A folder in which no run may begin, or without a run to resume."""
    whole = folder.parents[1] if folder.parent.name == POLICIES else None
    if whole is not None and (whole / CONFIG).is_file():
        yield (
            f"{folder} is one of the policies of {whole}. `ludic train {whole} --resume` goes on with all of them; --fork-from "
            f"{folder} begins another run with its weights."
        )
    if (folder / CONFIG).is_file():
        return
    if resume:
        there = ", ".join(sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG}"))) or "none"
        yield f"There is nothing to resume: {folder} holds no run. Runs in {folder.parent}: {there}. Without --resume it starts."
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - _BEFORE_THE_RUN):
        yield f"{folder} exists and is not the folder of a run. Choose another --name."


def _has_begun(folder: Path) -> bool:
    metrics = folder / METRICS
    places = _policy_folders(folder) or [folder]
    return (metrics.is_file() and metrics.stat().st_size > 0) or not all(_checkpoints(p).is_empty() for p in places)


def _why_not_again(run: ResolvedRun, changed: list[Difference]) -> str:
    folder = run.folder
    named = [d for d in changed if d.name not in ("name", "runs")]
    what = f"a run with other settings ({'; '.join(map(str, named))})" if named else "this very run"
    return (
        f"{folder} holds {what}, {_step_of(latest_checkpoint(folder))} updates of it saved. `{how_to_resume(run)}` goes on "
        "with it; another --name starts a new one."
    )


def how_to_resume(run: ResolvedRun) -> str:
    """The command line to type, or the call to make."""
    if run.parts.reward is not None:
        return "the same call of ludic.gateway.train with resume=True"
    if run.parts.command:
        return f"{run.parts.command} --resume"
    return f"ludic {engine_of(run.config).command} {run.folder} --resume"


def _may_change(difference: Difference, config: RunConfig) -> bool:
    if difference.name == "steps":  # a schedule depends on the total number of steps
        schedule = config.trainer.lr_schedule
        return schedule is None or schedule.kind == "constant"
    if difference.name == "reduction" and difference.before is None:  # the run began before there was this setting
        return True
    return difference.name in {setting.name for setting in settings_of(RunConfig) if setting.may_change}


def prepare_folder(run: ResolvedRun, start: ResumePoint) -> None:
    """Write the config; remove files that the run is going to write again."""
    folder = run.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if start.restarts:
            (folder / METRICS).unlink(missing_ok=True)
            (folder / WANDB_ID).unlink(missing_ok=True)
            for file in (folder / ROLLOUTS).glob("from_step_*.jsonl*"):  # those of actors go on being written
                file.unlink()
        for file in (folder / ROLLOUTS).glob(f"from_step_{start.first_step:06d}.jsonl*"):  # older runs wrote plain ones
            file.unlink()
        write_config(run)
        for policy in run.policies:  # a folder like that of a run with this policy alone, for eval, export and forks
            if not policy.is_frozen:
                policy.run.folder.mkdir(parents=True, exist_ok=True)
                write_config(policy.run)
    except OSError as error:
        raise ConfigError(
            f"Cannot write the run folder {folder}: {error.strerror}. Choose another with --runs or --name."
        ) from error


@contextlib.contextmanager
def failure_written(folder: Path) -> Iterator[None]:
    """Write down which error ends the run. Of several ranks the first that fails is heard: the others fail because of it."""
    (folder / FAILURE).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        what = {"time": time.time(), "error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError), (folder / FAILURE).open("x", encoding="utf-8") as file:
            json.dump(what, file)
        raise


def write_config(run: ResolvedRun) -> None:
    (run.folder / CONFIG).write_text(f"# ludic {__version__}\n\n{to_toml(run.config)}", encoding="utf-8")


def rollouts_file(folder: Path, start: ResumePoint) -> Path:
    """One file per start: episodes after the last checkpoint of an interrupted start are played again in the next."""
    return folder / ROLLOUTS / f"from_step_{start.first_step:06d}.jsonl.gz"


def wandb_id(folder: Path) -> str:
    """The run's id at W&B: the same when it is resumed, and unique even among runs of the same name."""
    file = folder / WANDB_ID
    known = file.read_bytes() if file.is_file() else b""
    if re.fullmatch(rb"[0-9a-f]{16}", known):
        return known.decode()
    if known:
        logger.warning("%s is damaged; the run goes on under a new id at W&B.", file)
    new = secrets.token_hex(8)
    file.write_text(new, encoding="utf-8")
    return new


# --- what it holds ---------------------------------------------------------------------------------------------


def _checkpoints(folder: Path) -> "CheckpointManager":
    from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager  # loads torch

    return CheckpointManager(CheckpointConfig(folder / CHECKPOINTS))


def require_one_policy(folder: Path) -> None:
    """ConfigError for the folder of a run with several policies, where one has to be named."""
    if policies := _policy_folders(folder):
        raise ConfigError(f"{folder} has trained several policies; name one: {', '.join(map(str, policies))}.")


def _policy_folders(folder: Path) -> list[Path]:
    """The folders of the policies of a run that trains several; empty for others."""
    return sorted(path.parent for path in (folder / POLICIES).glob(f"*/{CONFIG}"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest by name and size; its content is not read. Of several policies the newest that all have, as the first has it."""
    policies = _policy_folders(folder)
    if not policies:
        return _checkpoints(folder).latest()
    steps = _common_steps(policies)
    return _checkpoints(policies[0]).root / f"step_{steps[0]:06d}" if steps else None


def _common_steps(policies: list[Path]) -> list[int]:
    """The steps of which all policies have a checkpoint, the newest first."""
    return sorted(set.intersection(*(set(_checkpoints(policy).steps()) for policy in policies)), reverse=True)


def _newest_undamaged(folder: Path) -> Path | None:
    """The checkpoint to go on from, with a warning for each newer one that is damaged; None if none was ever saved. Of several
    policies that of the first; the others have one of the same step."""
    policies = _policy_folders(folder)
    if policies:
        return _newest_of_all(policies)
    checkpoints = _checkpoints(folder)
    if checkpoints.is_empty():
        return None
    try:
        return checkpoints.find()
    except CheckpointError as error:
        raise ConfigError(
            f"All checkpoints in {folder / CHECKPOINTS} are damaged, so {folder} cannot go on. Put a backup of one there; or, "
            "to start over, remove them."
        ) from error


def _newest_of_all(policies: list[Path]) -> Path | None:
    steps = _common_steps(policies)
    for step in steps:
        try:
            found = [_checkpoints(policy).find(step=step) for policy in policies]
            return found[0]
        except CheckpointError as error:
            logger.warning("step %d cannot be gone on from: %s", step, error)
    if steps:
        raise ConfigError(
            f"Of every step that all policies have saved, a checkpoint is damaged, so {policies[0].parents[1]} cannot go on. Put a "
            "backup of one there; or, to start over, remove them."
        )
    return None


def saved_step(folder: Path) -> int:
    """Updates in the newest undamaged checkpoint."""
    return _step_of(_newest_undamaged(folder))


def _step_of(checkpoint: Path | None) -> int:
    manifest = None if checkpoint is None else read_manifest(checkpoint)
    return 0 if manifest is None else int(manifest["step"])


def metrics_with(folder: Path, name: str, policy: str = "") -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl that have this number; of several policies those of one, without its name before the numbers."""
    path, prefix = folder / METRICS, f"{policy}/" if policy else ""
    rows = read_metrics(path) if path.is_file() else []
    own = ({key.removeprefix(prefix): value for key, value in row.items()} if policy else row for row in rows)
    yield from (row for row in own if row.get(name) is not None)
