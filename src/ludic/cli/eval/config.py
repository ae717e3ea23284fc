"""The settings of an evaluation. Sections env and agent are those of `ludic train`; every field is a flag."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ludic.batch_gen.requests.streams import is_stream
from ludic.eval import Grading
from ludic.models import SMOLLM2
from ludic.run.config.entries import Section, check_name
from ludic.run.config.env_and_agent import AgentSettings, EnvSettings
from ludic.run.config.model import Dtype
from ludic.run.config.reward import RewardSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.given import EnvFactory, check_data
from ludic.run.resolve import resolve_play
from ludic.run.settings import may_change, read_toml
from ludic.types import ConfigError
from ludic.util.urls import PUT_LOGIN, refuse_login

DEFAULT_MODEL = SMOLLM2


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Section):
    """The place of the model, and the way to load it."""

    base_url: str | None = None
    """Ask an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1; --model is then what it calls its model."""
    api_key_env: str | None = may_change(None)
    """Environment variable that holds the endpoint's key."""
    dtype: Dtype = may_change("auto")
    """Number format of the weights; auto is what the hardware is fast at."""
    device: str | None = may_change(None)
    """cpu, cuda, cuda:1. Default: the GPU if there is one."""
    threads: int | None = may_change(None)
    """CPU threads of PyTorch. Default: its own choice."""
    max_model_len: int | None = None
    """Tokens of a prompt and its reply together. Default: what the model can."""

    def problems(self) -> Iterator[str]:
        if self.base_url is not None:
            refuse_login("base_url", self.base_url, f"A key is given by --api-key-env NAME. Or: {PUT_LOGIN}")
        if self.api_key_env is not None and self.base_url is None:
            yield "--api-key-env is for an endpoint; give --base-url as well."


@dataclass(frozen=True, kw_only=True)
class PolicySettings(ServingSettings):
    """Who plays."""

    model: tuple[str, ...] = may_change(())
    """A folder, checkpoint or run (RUN@10: its checkpoint of step 10), a hub id, a .gguf file, smollm2-135m (default); a
    config.json, or tiny: random weights. Repeat it to compare; see also --base-url."""
    against: str | None = None
    """In an env with several roles: the opponent, a model as for --model. The evaluated model plays each role in turn, the opponent
    the others, and only the evaluated model's rewards count. Default: one model plays all roles."""
    init_seed: int | None = None
    """Seed of random weights. Default: --seed; where a run is evaluated, the run's, whose first weights they were."""


@dataclass(frozen=True, kw_only=True)
class MeasureSettings(Section):
    """The tasks, and the numbers that are measured."""

    num_tasks: int = may_change(200)
    """Tasks: the first of --data, or this many seeds; 0 takes all of --data."""
    samples: int = may_change(1)
    """Episodes of each task."""
    pass_k: str | None = may_change(None)
    """Report pass@k for these k, such as 1,4,16. Default: the number of samples, where there are several."""
    majority_k: str | None = may_change(None)
    """Report majority@k for these k. Default: the same, for tasks of one turn."""
    success_reward: float | None = may_change(None)
    """Env reward from which on an episode is right, where the env gives no verdict. Default: the env's full reward."""
    temperature: float = 0.6
    """Temperature of sampling; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that make up this share."""
    seed: int = 0
    """Seed of tasks and sampling."""
    concurrency: int | None = may_change(None)
    """Episodes at a time. It changes the speed, not the episodes. Default: as many as the engine computes together (512 on a GPU,
    64 on a CPU); at an endpoint 64."""
    timeout_s: float | None = may_change(None)
    """Seconds for one model call. Default: no limit."""

    RANGES = ("num_tasks in [0, inf)", "samples concurrency in [1, inf)")

    def problems(self) -> Iterator[str]:
        if self.samples > 1 and self.temperature == 0:
            yield (
                f"--samples {self.samples} with temperature 0: all samples of a task would be the same. Give --temperature "
                "above 0, or --samples 1."
            )
        for flag, text in (("--pass-k", self.pass_k), ("--majority-k", self.majority_k)):
            for k in _read_ks(flag, text) or ():
                if not 1 <= k <= self.samples:
                    have = f"there are --samples {self.samples} per task"
                    yield f"{flag} {text}: k = {k}, but {have}. Take at least as many samples as the largest k."

    def grading(self, full_reward: float | None) -> Grading:
        return Grading(
            success_reward=full_reward if self.success_reward is None else self.success_reward,
            pass_k=_read_ks("--pass-k", self.pass_k),
            majority_k=_read_ks("--majority-k", self.majority_k),
        )


def _read_ks(flag: str, text: str | None) -> list[int] | None:
    """`1,4` as numbers."""
    if text is None:
        return None
    parts = re.split(r"[\s,]+", text.strip(" ,"))
    if not all(re.fullmatch(r"\d+", part) for part in parts):
        raise ConfigError(f"{flag} {text!r}; give whole numbers with commas between them, such as 1,4.")
    return sorted({int(part) for part in parts})


@dataclass(frozen=True, kw_only=True)
class _OutputSettings(Section):
    """Files of the evaluation."""

    name: str | None = may_change(None)
    """Name of the folder. Default: env and model, and a number where that is taken."""
    out: Path = may_change(Path("runs/eval"))
    """Folder of such folders."""

    def problems(self) -> Iterator[str]:
        check_name(self.name)
        yield from ()


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Everything that decides what an evaluation says."""

    env: EnvSettings = field(default_factory=EnvSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    agent: AgentSettings = field(default_factory=AgentSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    output: _OutputSettings = field(default_factory=_OutputSettings)


def of_run(folder: Path) -> EvalConfig:
    """The evaluation of a training run: its env and agent settings, its first and its newest weights."""
    run = read_toml(RunConfig, folder / "config.toml")
    if run.envs:
        raise ConfigError(
            f"{folder} has several envs, {', '.join(run.env_ids)}; evaluate one: ludic eval ENV --model {folder}"
        )
    return EvalConfig(
        env=replace(run.env, data=run.eval.eval_data or run.env.data),
        policy=PolicySettings(
            model=(str(run.model.fork_from or run.model.model), str(folder)),
            init_seed=run.trainer.seed,
            dtype=run.model.dtype,
            max_model_len=run.trainer.max_seq_len,
        ),
        agent=run.agent,
        reward=run.reward,
        measure=MeasureSettings(temperature=run.eval.eval_temperature, seed=run.trainer.seed),
    )


def trains_on(folder: Path, data: Path | None) -> bool:
    """True if these are the samples that the run was trained on."""
    trained = read_toml(RunConfig, folder / "config.toml").env.data
    if data is None or trained is None or is_stream(data):  # an evaluation draws other samples of a stream
        return False
    return data.resolve() == trained.resolve()


def resolve(config: EvalConfig, found: EnvFactory) -> EvalConfig:
    """The config with the env's suggestions filled in, checked."""
    check_data(found, config.env.data, config.env.set, "--data")
    if config.measure.num_tasks == 0 and config.env.data is None:
        raise ConfigError("--num-tasks 0 takes all of --data, but there is none. Give a number.")
    config.reward.check_siblings(config.measure.samples, "--samples")
    return resolve_play(config, found.suggested)
