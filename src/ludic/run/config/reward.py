"""Settings of the section reward: scorers of episodes in addition to the env, and the judge. `ludic eval` shares them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeAlias

from ludic.run.config.entries import Arguments, Section
from ludic.run.config.model import is_served
from ludic.run.settings import may_change
from ludic.types import ConfigError
from ludic.util.urls import PUT_LOGIN, refuse_login

JudgeBy: TypeAlias = Literal["reply", "ranking", "pairs"]
"""The judge sees one reply, the replies of a group to rank, or pairs of them."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Section):
    """Rewards in addition to the env's (docs/rewards.md)."""

    reward: tuple[str, ...] = ()
    """Scorer of finished episodes (`ludic parts reward`), or file.py:function, which is called with a rollout; NAME=… names its
    component; may be repeated."""
    reward_set: Arguments = field(default_factory=dict)
    """Argument of a scorer, such as length.per_tokens=500; may be repeated."""
    reward_weight: dict[str, float] = field(default_factory=dict)
    """Weight of a reward component, such as length=0.1 or env=2; may be repeated. Default: 1."""
    judge: str | None = None
    """Model that grades episodes, the component judge: a model as for --model, or the URL of an OpenAI-compatible endpoint
    (docs/judges.md)."""
    judge_criteria: Path | None = None
    """TOML file of criteria: a table [NAME] with text, and if wanted weight and scale. Default: one, whether the task is solved."""
    judge_by: JudgeBy = "reply"
    """The judge sees one reply, the replies of a group to rank, or pairs of them."""
    judge_reference: str | None = None
    """Key in the info of an env's last step of a right answer that the judge may see, such as target_answer."""
    judge_model: str | None = None
    """For a judge behind a URL: what the endpoint calls its model. Default: the only one that it lists."""
    judge_key_env: str | None = may_change(None)
    """For a judge behind a URL: environment variable that holds its key."""
    judge_tokens: int = 512
    """Tokens of a verdict."""
    judge_concurrency: int = may_change(64)
    """Calls of the judge at a time."""
    judge_cache: Path | None = may_change(None)
    """JSONL file of verdicts, which several runs may share. Default: they are kept in memory."""
    judge_device: str | None = may_change(None)
    """Device of a judge in this process. Default: the GPU if there is one."""

    RANGES = ("judge_tokens judge_concurrency in [1, inf)",)

    def problems(self) -> Iterator[str]:
        yield from self._judge_problems()
        names = [name for name, _ in self.named]
        if twice := {name for name in names if names.count(name) > 1}:
            yield f"Two rewards are called {twice.pop()!r}; name one of them: --reward NAME=file.py:function."
        for key in self.reward_set:
            if key.partition(".")[0] not in names or "." not in key:
                yield (
                    f"reward_set {key!r} is no argument of a scorer: write NAME.argument, where --reward has NAME (there is "
                    f"{', '.join(names) or 'none'})."
                )
        for name, weight in self.reward_weight.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                yield f"reward_weight {name} = {weight!r}; a weight is a number."

    def _judge_problems(self) -> Iterator[str]:
        usual = {one.name: one.default for one in fields(self) if one.name.startswith("judge_")}
        given = [name for name, value in usual.items() if getattr(self, name) != value]
        if self.judge is None:
            yield from (f"{name} = {getattr(self, name)} is for a judge; give --judge MODEL as well." for name in given)
        elif self.judge_is_served:
            refuse_login("judge", self.judge, f"A key is given by --judge-key-env NAME. Or: {PUT_LOGIN}")
        else:
            for name in {"judge_model", "judge_key_env"}.intersection(given):
                yield f"{name} is for a judge behind a URL; judge = {self.judge!r} is loaded in this process."

    def check_siblings(self, num: int, flag: str) -> None:
        """ConfigError if the judge compares siblings and there are none."""
        if self.judge_by != "reply" and num < 2:
            raise ConfigError(
                f"judge_by = {self.judge_by!r} compares the episodes of one task, but {flag} is {num}. Give at least 2."
            )

    @property
    def judge_is_served(self) -> bool:
        return is_served(self.judge)

    @property
    def named(self) -> list[tuple[str, str]]:
        """(name of the component, id of the scorer)."""
        pairs = [given.partition("=") if "=" in given.partition(":")[0] else ("", "", given) for given in self.reward]
        return [(name or id.rpartition(":")[2].rpartition("/")[2], id) for name, _, id in pairs]
