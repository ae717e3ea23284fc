"""Tables of the settings: several envs, recorded rollouts, replay, a league (docs/ludic-train.md has a file for each), and
sub-agents. And the checks of values that all sections share."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ludic.run.settings import converted, read_pair, refuse, storable
from ludic.types import ConfigError

Arguments: TypeAlias = dict[str, Any]
"""Keyword arguments of a part: a table in the file, `--flag name=value` (again and again) on the command line."""


def at_least(low: float, **values: float | None) -> None:
    """ConfigError for a setting below `low`; None is not checked."""
    refuse(_out_of_range(values, f"{' '.join(values)} in [{low:g}, inf)"))


def _out_of_range(values: Mapping[str, Any], *ranges: str) -> Iterator[str]:
    """Sentences about the numbers that are not in their interval."""
    for names, _, interval in (text.partition(" in ") for text in ranges):
        low, high = (float(end) for end in interval[1:-1].split(","))
        words = f"{'at least' if interval[0] == '[' else 'above'} {low:g}"
        words += "" if high == math.inf else f" and {'at most' if interval[-1] == ']' else 'below'} {high:g}"
        for name in names.split():
            value = values[name]
            if value is None or low < value < high:
                continue
            if not ((value == low and interval[0] == "[") or (value == high and interval[-1] == "]")):
                yield f"{name} = {value}; it must be {words}."


class Section:
    """A table of the settings, which checks itself when it is made."""

    RANGES: ClassVar[tuple[str, ...]] = ()
    """Names of numbers and the interval they lie in, such as "top_p min_p in [0, 1)"; None is not checked."""

    def __post_init__(self) -> None:
        refuse(chain(_out_of_range(vars(self), *self.RANGES), self.problems()))

    def problems(self) -> Iterator[str]:
        """Sentences that say what is wrong, where more than one number is."""
        yield from ()


def check_name(name: str | None, pattern: str = r"[\w.+-]+") -> None:
    """The name of a folder, which stays inside the folder that it is created in."""
    parts = (name or "").split("/")
    if name is not None and (not re.fullmatch(pattern, name) or {".", ".."} & set(parts) or max(map(len, parts)) > 200):
        raise ConfigError(
            f"name = {name!r:.200}; a folder is named with at most 200 letters, digits and . _ + -, and cannot be . or .. (--runs "
            "or --out chooses where it is)."
        )


def _to_remove(where: str, values: Mapping[str, Any], names: str) -> Iterator[str]:
    for problem in _out_of_range(values, f"{names} in (0, inf)"):
        yield f"{where}: {problem} To leave it out, remove the entry."


@dataclass(frozen=True, kw_only=True)
class EnvEntry(Section):
    """One of several envs of a run. What it leaves out is as in [env], [agent] and [algo], or as suits the env."""

    id: str = ""
    """Id of an env, or file.py:Class."""
    name: str | None = None
    """For metrics. Default: the last part of the id."""
    weight: float = 1.0
    """Share of the episodes, compared with the other entries."""
    set: Arguments = field(default_factory=dict)
    data: Path | None = None
    eval_data: Path | None = None
    max_steps: int | None = None
    agent: str | None = None
    agent_set: Arguments = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    parser: str | None = None
    parser_set: Arguments = field(default_factory=dict)
    protocol: str | None = None
    protocol_set: Arguments = field(default_factory=dict)
    system_prompt: str | None = None
    max_tokens: int | None = None
    algo: str | None = None
    algo_set: Arguments = field(default_factory=dict)
    group_size: int | None = None

    RANGES = ("max_steps max_tokens group_size in [1, inf)",)

    def problems(self) -> Iterator[str]:
        if not self.id:
            yield '[[envs]]: an entry names no env; write id = "…".'
        yield from _to_remove(f"[[envs]] {self.id}", vars(self), "weight")

    @property
    def label(self) -> str:
        return self.name or re.split(r"[:/]", self.id)[-1]


@dataclass(frozen=True, kw_only=True)
class DelegateEntry(Section):
    """A kind of sub-agent, for the protocol delegating: a table in protocol_set.delegates, or its description alone. Its model and
    context are those of the run."""

    description: str = ""
    """Text by which the parent knows it."""
    env: str | None = None
    """file.py:Class, which is called with the text of the sub-task. Default: the reply is the answer."""
    max_steps: int = 1
    agent: str | None = None
    """Default: agent; react where there are tools, or where it may delegate too (max_depth above 1)."""
    agent_set: Arguments = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    parser: str = "raw"
    parser_set: Arguments = field(default_factory=dict)
    system_prompt: str | None = None

    RANGES = ("max_steps in [1, inf)",)


@dataclass(frozen=True, kw_only=True)
class RecordedEntry(Section):
    """Recorded rollouts that are trained on together with those that the run plays, by their own algorithm."""

    rollouts: tuple[Path, ...] = ()
    """Files of rollouts, or run folders."""
    name: str = "recorded"
    """For metrics."""
    share: float = 0.25
    """Samples for each one that is played."""
    weight: float = 1.0
    """Factor of their loss; with 1 it is that of a batch of them only."""
    algo: str = "sft"
    algo_set: Arguments = field(default_factory=dict)
    render: bool = False
    """Their messages are written with this model's chat template: for rollouts of another model, whose tokens mean other texts."""

    def problems(self) -> Iterator[str]:
        if not self.rollouts:
            yield '[[recorded]]: an entry names no rollouts; write rollouts = ["file.jsonl"].'
        yield from _to_remove(f"[[recorded]] {self.name}", vars(self), "share weight")

    @property
    def files(self) -> list[Path]:
        """All files of rollouts; ConfigError where there is none."""
        found = [
            f for path in self.rollouts for f in (sorted(path.glob("rollouts/*.jsonl*")) if path.is_dir() else [path])
        ]
        missing = [path for path in self.rollouts if not path.exists()] or ([] if found else self.rollouts)
        refuse(f"[[recorded]] {self.name}: there are no rollouts in {path}." for path in missing)
        return found


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Section):
    """Samples of earlier batches that are trained on again."""

    replay: int = 0
    """Such samples in each batch, in addition to its own; 0 is no replay."""
    replay_capacity: int = 4096
    """Samples that are kept, the newest; checkpoints hold them."""
    replay_max_lag: int | None = None
    """Versions after which a sample is dropped. Default: none."""
    replay_half_life: float | None = None
    """Versions that make a sample half as likely to be drawn. Default: all are equally likely."""
    replay_fresh_every: int = 1
    """Above 1, only each such batch plays new episodes; the others are replayed samples alone."""

    RANGES = (
        "replay replay_max_lag in [0, inf)",
        "replay_capacity replay_fresh_every in [1, inf)",
        "replay_half_life in (0, inf)",
    )


@dataclass(frozen=True, kw_only=True)
class LeagueSettings(Section):
    """Frozen snapshots of the policy as opponents, in envs with several players."""

    league_every: int = 0
    """Updates after which the policy's weights join the league; 0 is no league."""
    league_size: int = 4
    """Snapshots that are kept, the newest."""
    league_share: float = 0.5
    """Share of the groups that are played against a snapshot; in the others the policy plays itself."""

    RANGES = (
        "league_every in [0, inf)",
        "league_size in [1, inf)",
        "league_share in [0.01, 1]",
    )  # shares are kept in hundredths


POLICIES = "policies"
"""Folder, in a run folder, with a folder for each policy."""


@dataclass(frozen=True, kw_only=True)
class PolicyEntry(Section):
    """One of several policies of a run. What it leaves out is as in [model], [agent], [algo] and [train]."""

    roles: tuple[str, ...] = ()
    """Roles of the env that it plays. Default: all; policies that share roles change places from group to group."""
    frozen: bool = False
    """It plays and is not trained."""
    model: str | None = None
    lora_rank: int | None = None
    lora_alpha_mult: float | None = None
    fork_from: Path | None = None
    agent: str | None = None
    agent_set: Arguments = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    parser: str | None = None
    parser_set: Arguments = field(default_factory=dict)
    system_prompt: str | None = None
    algo: str | None = None
    algo_set: Arguments = field(default_factory=dict)
    reduction: str | None = None
    kl_coeff: float | None = None
    entropy_bonus: float | None = None
    lr: float | None = None

    RANGES = ("lora_rank kl_coeff entropy_bonus lr in [0, inf)",)

    def problems(self) -> Iterator[str]:
        learns = ("algo", "reduction", "kl_coeff", "entropy_bonus", "lr")
        given = [name for name in learns if getattr(self, name) is not None]
        if self.frozen and (given or self.algo_set):
            yield f"A policy with frozen = true is not trained, so {', '.join(given) or 'algo_set'} has no meaning. Leave one out."


def policy_problems(policies: Mapping[str, PolicyEntry]) -> Iterator[str]:
    """Names that cannot be the name of a folder and of metrics, and a run in which nothing learns."""
    for name in policies:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in ("train", "eval", "perf"):
            yield (
                f"[policies.{name}]: a policy is named with letters, digits, _ and -, and not train, eval or perf, which are "
                "kinds of metrics."
            )
    if policies and all(entry.frozen for entry in policies.values()):
        yield f"The policies {', '.join(policies)} are all frozen: nothing would be trained."


def with_policies(policies: Mapping[str, PolicyEntry], given: Sequence[str]) -> dict[str, PolicyEntry]:
    """The policies with those of the command line: NAME=ROLE,ROLE names one, NAME.SETTING=VALUE changes it."""
    found = dict(policies)
    for pair in given:
        where, value = read_pair(pair, "--policy")
        name, _, setting = where.partition(".")
        if setting:
            change: dict[str, Any] = {setting: storable(value, f"--policy {where}")}
        else:
            change = {"roles": [role for role in str(pair.partition("=")[2]).split(",") if role]}
        made = converted({name: change}, dict[str, PolicyEntry], "--policy")[name]
        found[name] = replace(found.get(name, PolicyEntry()), **{key: getattr(made, key) for key in change})
    return found
