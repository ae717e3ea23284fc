"""`ludic rescore`: saved rollouts with another reward or judge, in a new file that can be trained on. See docs/judges.md."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ludic.cli.args import parse_with_settings
from ludic.cli.terminal.colour import make_console
from ludic.rewards import Rewards
from ludic.run.config.entries import check_name
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.config.reward import RewardSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.folder import CONFIG, ROLLOUTS
from ludic.run.parts.episodes import make_rewards
from ludic.run.settings import read_toml
from ludic.types import ConfigError
from ludic.util.files import is_compressed
from ludic_judges import agreement
from ludic_judges.rescoring import Rescored, rescore

DESCRIPTION = (
    "Score the episodes of a run again, as if they had been played with these rewards: scores of earlier scorers are removed, the "
    "env's reward stays (--reward-weight env=0 leaves it out). The old files stay as they are; `ludic train ENV --rollouts FILE` "
    "trains on the new one."
)
RESCORED = "rescored"
"""Folder of the results in a run folder; each is a folder with rollouts/ inside, which `ludic view` and `ludic show` open."""


@dataclass(frozen=True)
class RescoreArgs:
    """The rollouts to score."""

    run: tyro.conf.Positional[Path]
    """A run folder, also one of `ludic eval`, or a file of rollouts (.jsonl, .jsonl.gz)."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write. Default: RUN/rescored/NAME/rollouts/rescored.jsonl.gz; of a file, FILE with NAME before its ending."""
    name: str | None = None
    """NAME in the default of --out. Default: the names of the scorers."""

    def __post_init__(self) -> None:
        check_name(self.name)


@dataclass(frozen=True, kw_only=True)
class RescoreConfig:
    """The scorers."""

    reward: RewardSettings = field(default_factory=RewardSettings)


def rescore_run(args: list[str]) -> int:
    given, config = parse_with_settings(
        RescoreArgs, RescoreConfig(), args, prog="ludic rescore", description=DESCRIPTION
    )
    rewards = make_rewards(config.reward, _agent_of(given.run))
    if rewards is None:
        raise ConfigError("No reward: give --reward file.py:function, --judge MODEL, or --reward-weight env=0.5.")
    paths = rollout_files(given.run)
    out = given.out or _default_out(given.run, given.name or "+".join(s.name for s in rewards.scorers) or "weights")
    if out.resolve() in [path.resolve() for path in paths]:
        raise ConfigError(f"--out {out} is the file that is read; give another.")
    console = make_console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("scoring", total=None)
        found = asyncio.run(
            rescore(paths, out, rewards, on_progress=lambda done, num: bar.update(task, completed=done, total=num))
        )
    _report(console, found, rewards)
    console.print(escape(f"Written: {out}. To train on it: ludic train ENV --rollouts {out}"))
    return 0 if found.rollouts else 1


def _agent_of(run: Path) -> AgentSettings:
    """The run's agent: penalties on length depend on its max_tokens."""
    path = run / CONFIG
    return read_toml(RunConfig, path).agent if path.is_file() else AgentSettings()


def rollout_files(run: Path) -> list[Path]:
    if run.is_file():
        return [run]
    folder = run if (run / ROLLOUTS).is_dir() else Path("runs") / run
    found = [path for path in (folder / ROLLOUTS).glob("*.jsonl*") if path.suffix == ".jsonl" or is_compressed(path)]
    if not found:
        raise ConfigError(f"{run} is neither a file of rollouts nor a run with files in {ROLLOUTS}/.")
    return sorted(found)


def _default_out(run: Path, name: str) -> Path:
    if run.is_file():
        stem, dot, ending = run.name.partition(".jsonl")
        return run.with_name(f"{stem}.{name}{dot}{ending}")
    folder = run if (run / ROLLOUTS).is_dir() else Path("runs") / run
    return folder / RESCORED / name / ROLLOUTS / "rescored.jsonl.gz"


# --- what it says ---


def _report(console: Console, found: Rescored, rewards: Rewards) -> None:
    for reason, number in sorted(found.failures.items(), key=lambda pair: -pair[1])[:3]:
        console.print(escape(f"{number} rollouts have no score and count as failed: {reason:.300}"))
    if found.num_skipped:
        console.print(f"{found.num_skipped} rollouts had failed when they were played; they stay as they are.")
    if not found.rollouts:
        console.print("No rollout was scored.")
        return
    table = Table("", "before", "after", box=None, pad_edge=False)
    table.add_row("reward", f"{found.before:.4f}", f"{found.after:.4f}")
    for name in sorted({name for one in found.rollouts for name in one.scores}):
        mean = sum(one.scores.get(name, 0.0) for one in found.rollouts) / len(found.rollouts)
        table.add_row(f"{name} × {rewards.weight_of(name):g}", "", f"{mean:.4f}")
    console.print(f"{len(found.rollouts)} rollouts of {len({one.group for one in found.rollouts})} groups")
    console.print(table)
    same, ordered = found.same_order
    if found.correlation is not None:
        console.print(f"Correlation of the rewards before and after: {found.correlation:.3f}")
    if ordered:
        console.print(f"Pairs of siblings in the same order: {same} of {ordered} ({same / ordered:.1%})")
    for scorer in rewards.scorers:
        _show_agreement(console, found, scorer.name)
    for name, value in rewards.metrics().items():
        console.print(f"{name} {value:,.6g}")


def _show_agreement(console: Console, found: Rescored, name: str) -> None:
    """A scorer against the env's verdicts, where there are some and its scores are between 0 and 1."""
    pairs = [
        (sum(value for key, value in one.scores.items() if key.split("/")[0] == name), one.correct)
        for one in found.rollouts
        if one.correct is not None
    ]
    if not pairs or not all(-1e-9 <= score <= 1 + 1e-9 for score, _ in pairs):
        return
    one = agreement([score for score, _ in pairs], [bool(correct) for _, correct in pairs])
    rates = [
        f"accepts {rate:.1%} of the {kind} replies"
        for kind, rate in (("right", one.true_positive_rate), ("wrong", one.false_positive_rate))
        if rate is not None
    ]
    console.print(
        f"{name} and the env's verdict: accuracy {one.accuracy:.1%}, kappa {one.kappa:.3f}, {', '.join(rates)}"
    )
