"""`PolicyEntry`: a table `[policies.NAME]` of the settings; `with_policies`: the same from the flag `--policy`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ludic.run.config.entries import Arguments, at_least
from ludic.run.settings import converted, read_pair, storable
from ludic.types import ConfigError

POLICIES = "policies"
"""Folder, in a run folder, with a folder for each policy."""


@dataclass(frozen=True, kw_only=True)
class PolicyEntry:
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

    def __post_init__(self) -> None:
        at_least(0, lora_rank=self.lora_rank, kl_coeff=self.kl_coeff, entropy_bonus=self.entropy_bonus, lr=self.lr)
        learns = ("algo", "reduction", "kl_coeff", "entropy_bonus", "lr")
        given = [name for name in learns if getattr(self, name) is not None]
        if self.frozen and (given or self.algo_set):
            raise ConfigError(
                f"A policy with frozen = true is not trained, so {', '.join(given) or 'algo_set'} has no meaning. Leave one out."
            )


def check_policies(policies: Mapping[str, PolicyEntry]) -> None:
    """ConfigError for names that cannot be the name of a folder and of metrics, and for a run in which nothing learns."""
    for name in policies:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in ("train", "eval", "perf"):
            raise ConfigError(
                f"[policies.{name}]: a policy is named with letters, digits, _ and -, and not train, eval or perf, which are "
                "kinds of metrics."
            )
    if policies and all(entry.frozen for entry in policies.values()):
        raise ConfigError(f"The policies {', '.join(policies)} are all frozen: nothing would be trained.")


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
