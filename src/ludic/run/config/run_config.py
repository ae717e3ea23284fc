"""All settings of a training run, as the user wrote them: `RunConfig`. `resolve` (resolve.py) fills in the defaults."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ludic.run.config.entries import (
    EnvEntry,
    LeagueSettings,
    PolicyEntry,
    RecordedEntry,
    ReplaySettings,
    Section,
    check_name,
    policy_problems,
)
from ludic.run.config.env_and_agent import AgentSettings, EnvSettings
from ludic.run.config.model import ModelSettings, is_served
from ludic.run.config.reward import RewardSettings
from ludic.run.config.rollouts import RolloutSettings
from ludic.run.config.training import AlgoSettings, EvalSettings, TrainSettings
from ludic.run.features.base import added_sections
from ludic.run.names import CHECKPOINTS
from ludic.run.settings import MayChange, Retired, Sections, may_change, refuse
from ludic.training.config import CheckpointConfig, LRSchedule, TrainerConfig
from ludic.types import SamplingParams
from ludic.util.urls import PUT_LOGIN, refuse_login

FILE_SECTIONS = frozenset({"league", "replay"})
"""Sections whose settings are no flags, like lists of tables: a file has them."""
_OPEN_END = 2**31
"""Last step of the schedule as written; `resolve` puts the run's last step there."""


@dataclass(frozen=True, kw_only=True)
class _RunSettings(Section):
    """The run's folder, and what shows its progress."""

    name: str | None = may_change(None)
    """Name of the run folder. Default: env, model and algorithm."""
    runs: Path = may_change(Path("runs"))
    """Folder of run folders."""
    logger: tuple[str, ...] = may_change(("rich",))
    """Displays of the progress, one or several: rich, print, tensorboard, wandb, trackio, or file.py:Class, called with those of
    folder, name and config that are its parameters (docs/ludic-train.md); or none. metrics.jsonl is always written."""

    def problems(self) -> Iterator[str]:
        check_name(self.name, r"[\w.+-]+(/[\w.+-]+)*")
        yield from ()


def _keys(part: str, names: str, kind: type[str] = str) -> dict[str, str]:
    """Settings that are fields of `part` with the same names."""
    return {name: kind(f"{part}.{name}") for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that makes a run what it is, as it was written: None means that `resolve` chooses.

    `trainer`, `checkpoint` and `sampling` are the library's own dataclasses; `KEYS` says which of their fields are settings, and
    under which section and name a file or a flag has them.
    """

    env: EnvSettings = field(default_factory=EnvSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    algo: AlgoSettings = field(default_factory=AlgoSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    train: TrainSettings = field(default_factory=TrainSettings)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalSettings = field(default_factory=EvalSettings)
    plugins: Sections = field(default_factory=lambda: _usual_sections())
    """The sections of features that plug-ins add, such as [pipeline]."""
    run: _RunSettings = field(default_factory=_RunSettings)
    league: LeagueSettings = field(default_factory=LeagueSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    teachers: dict[str, str] = field(default_factory=dict)
    """Instead of --teacher: domain -> model, as for --teacher. A domain is the name of an entry of [[envs]], or what stored
    rollouts say (docs/algorithms/mopd.md)."""
    envs: tuple[EnvEntry, ...] = ()
    recorded: tuple[RecordedEntry, ...] = ()
    policies: dict[str, PolicyEntry] = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(CHECKPOINTS, every_n_steps=20))

    KEYS: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "rollouts": _keys("sampling", "temperature top_p top_k min_p"),
        "train": {
            "lr": "trainer.learning_rate",  # the one of the two names that wins
            "schedule": "trainer.lr_schedule.kind",
            "warmup_steps": "trainer.lr_schedule.warmup_steps",
            **_keys("trainer", "critic_lr optimizer weight_decay max_grad_norm too_long"),
            **_keys("trainer", "share_prefixes gradient_checkpointing offload_activations context_parallel", MayChange),
            **_keys("trainer", "compile", MayChange),
            **_keys("trainer", "seed balance_experts replay_experts updates_per_batch mini_batches"),
        },
        "eval": {
            "eval_every": MayChange("trainer.eval_every_n_steps"),
            **_keys("trainer", "eval_at_start eval_in_background eval_concurrency eval_timeout_s", MayChange),
        },
        "run": {
            "checkpoint_every": MayChange("checkpoint.every_n_steps"),
            "checkpoint_keep": MayChange("checkpoint.max_to_keep"),
            **_keys("checkpoint", "save_optimizer best_metric best_mode", MayChange),
        },
    }

    RETIRED: ClassVar[Mapping[str, Retired]] = {
        "bitwise": Retired(
            section="train",
            off=False,
            reason="bitwise is gone: on a GPU it made sampling 53 times slower. Each update measures how far sampler and trainer "
            "differ: train/logp_difference_abs and train/kl_actor_policy (docs/importance_sampling.md). Leave bitwise out.",
        )
    }

    def __post_init__(self) -> None:
        schedule = self.trainer.lr_schedule or LRSchedule(total_steps=_OPEN_END)
        norm = self.trainer.max_grad_norm or 0.0  # a file has no word for None
        for name, usual in TrainSettings().limits.items():  # a TrainerConfig may say something else
            if getattr(self.train, name) is None and (given := getattr(self.trainer, name)) != usual:
                object.__setattr__(self, "train", replace(self.train, **{name: given}))
        trainer = replace(self.trainer, lr_schedule=schedule, max_grad_norm=norm, **self.train.limits)
        object.__setattr__(self, "trainer", trainer)
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.envs and self.env.id:
            yield f"[[envs]] names the envs of the run, and [env] or the command line names {self.env.id!r}; give one."
        for what, names in (("envs", [e.label for e in self.envs]), ("recorded", [r.name for r in self.recorded])):
            if len(set(names)) != len(names):
                yield f'[[{what}]] has the names {", ".join(names)}; give each entry its own name = "…".'
        yield from policy_problems(self.policies)
        for domain, teacher in self.teachers.items():
            if is_served(teacher):
                refuse_login(f"[teachers] {domain}", teacher, PUT_LOGIN)

    @property
    def all_teachers(self) -> tuple[str, ...]:
        """The only teacher, or that of each domain; empty where there is none."""
        return tuple(self.teachers.values()) if self.algo.teacher is None else (self.algo.teacher,)

    @property
    def stored(self) -> Path | None:
        """The file of texts that the run learns from instead of playing: of --preferences, or with sft of --data."""
        answers = self.env.data if self.algo.algo == "sft" and not self.rollouts.rollouts else None
        return self.rollouts.preferences or answers

    @property
    def env_ids(self) -> tuple[str, ...]:
        return tuple(entry.id for entry in self.envs) or ((self.env.id,) if self.env.id else ())

    @property
    def is_evaluated(self) -> bool:
        return self.trainer.eval_at_start or bool(self.trainer.eval_every_n_steps)

    @staticmethod
    def added_sections() -> dict[str, type[Any] | None]:
        """The sections that `plugins` holds, and None for those of a plug-in that is not installed."""
        return added_sections()


def _usual_sections() -> Sections:
    """The sections of plug-ins with their defaults."""
    return Sections({name: made() for name, made in added_sections().items() if made is not None})
