"""The loggers of a run: metrics.jsonl, and the displays and services of the settings."""

import inspect
from collections.abc import Callable
from typing import Any

from ludic import registry
from ludic.run.checks import is_ours
from ludic.run.folder import wandb_id
from ludic.run.names import METRICS
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import values_of
from ludic.training import JSONLLogger, TeeLogger
from ludic.types import TrainingLogger

SHOWN = (
    "avg_total_reward", "reward/*", "score/*", "!reward/env", "!reward/parser", "accuracy", "mean_reward", "*_rate", "avg_turns",
    "avg_completion_length", "num_failed",
    "loss", "entropy", "grad_norm", "grad_clipped", "ess", "lr", "lag_max", "correction_zero_frac", "queue_items",
    "difficulty", "num_open_tasks", "margin", "preference_accuracy", "wanted_reward", "unwanted_reward",
    "step_s", "fetch_s", "update_s", "tokens_per_s",
    # Of the rates: how games ended, unreadable_rate and over_limit_rate, which count a reply that was cut off once.
    "!parse_error_rate", "!truncated_rate", "!truncation_rate", "!completion_truncated_rate", "!seq_len_truncated_rate",
    "!zero_weight_rate", "!same_reply_rate", "!failed_rate",
    "!healed_rate", "!foreign_rate", "!retried_rate", "!undelivered_rate", "!limited_rate",
)  # fmt: skip
"""Training stats that progress displays show; metrics.jsonl has them all."""


def _plain_values(run: ResolvedRun) -> dict[str, Any]:
    """The settings as JSON has them."""
    return {
        name: value if isinstance(value, (int, float)) else str(value) for name, value in values_of(run.config).items()
    }


def make_loggers(run: ResolvedRun, status: Callable[[], str] | None = None) -> TeeLogger:
    """metrics.jsonl in any case, and what was asked for; consoles also show the line that `status` returns."""
    made: list[TrainingLogger] = [JSONLLogger(run.folder / METRICS), *run.parts.loggers]
    own = [f"{'!' * k.startswith('!')}{name}/*/{k.removeprefix('!')}" for name in run.trained_names for k in SHOWN]
    offered = {"folder": run.folder, "name": run.folder.name, "config": _plain_values(run)}
    for_ours = {
        "keys": own or SHOWN,
        "total_steps": run.steps,
        "status": status,
        "log_dir": run.folder / "events",
        "dir": run.folder,
    }
    for name in run.config.run.logger:
        if name == "none":
            continue
        logger = registry.loggers.spec(name).load()
        known = offered | for_ours if is_ours(logger) else offered
        given = {key: value for key, value in known.items() if key in inspect.signature(logger).parameters}
        if name == "wandb":
            given["init_kwargs"] = {"id": wandb_id(run.folder), "resume": "allow"}
        made.append(registry.loggers.make(name, **given))
    return TeeLogger(*made)
