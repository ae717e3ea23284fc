"""The model of a run: adapters, forks, random weights, and what a path means."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ludic.models.loading import character_tokenizer, tiny_llama
from ludic.run.config.entries import LeagueSettings, check_name
from ludic.run.config.env_and_agent import EnvSettings
from ludic.run.config.model import ModelSettings
from ludic.run.config.rollouts import RolloutSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.dry_run import plan_lines
from ludic.run.folder import ResumePoint, prepare_folder
from ludic.run.given import env_factory
from ludic.run.model import load_policy, with_pinned_checkpoints
from ludic.run.parts.loggers import make_loggers
from ludic.run.resolve import ResolvedRun, resolve
from ludic.run.run import build
from ludic.run.settings import differences, read_toml, to_toml, with_values
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.types import ConfigError

ADAPTER = ModelSettings(model="tiny", lora_rank=2)


def save_run(folder: Path, settings: ModelSettings = ADAPTER, *, steps: tuple[int, ...] = (2,)) -> Path:
    """A training run, as far as others see it; its newest checkpoint."""
    model = load_policy(settings).model
    manager = CheckpointManager(CheckpointConfig(folder / "checkpoints"))
    for step in steps:
        manager.save(step, model=model)
    (folder / "config.toml").write_text(to_toml(RunConfig(env=EnvSettings(id="tic_tac_toe"), model=settings)))
    return folder / "checkpoints" / f"step_{steps[-1]:06d}"


def run_with(model: ModelSettings, **values: object) -> ResolvedRun:
    config = RunConfig(env=EnvSettings(id="tic_tac_toe"), model=model)
    return resolve(with_values(config, values), env_factory("tic_tac_toe"))


# --- adapters ---


def test_alpha_is_what_was_asked_for_also_below_one():
    model = load_policy(replace(ADAPTER, lora_alpha_mult=0.2)).model
    assert model.peft_config["default"].lora_alpha == pytest.approx(0.4)
    assert model.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] == pytest.approx(0.2)


@pytest.mark.parametrize("settings", [replace(ADAPTER, lora_alpha_mult=4.0), replace(ADAPTER, lora_rank=4)])
def test_an_adapter_is_not_forked_into_another_scale(settings, tmp_path):
    save_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"lora_alpha is 4 there and 8 here.*--lora-alpha-mult"):
        load_policy(replace(settings, fork_from=tmp_path / "run"))
    load_policy(replace(ADAPTER, fork_from=tmp_path / "run"))


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"lora_rank": 2}, "--lora-rank"),
        ({"lora_alpha_mult": 1.0}, "--lora-alpha-mult"),
        ({"lora_dropout": 0.1}, "--lora-dropout"),
        ({"fork_from": Path("elsewhere")}, "--fork-from"),
    ],
)
def test_a_model_that_is_an_adapter_takes_no_other_adapter(change, flag, tmp_path):
    save_run(tmp_path / "run")
    settings = ModelSettings(model=str(tmp_path / "run"), **change)
    with pytest.raises(ConfigError, match=f"{flag} would be ignored"):
        load_policy(settings)
    with pytest.raises(ConfigError, match=f"{flag} would be ignored"):
        plan_lines(run_with(settings), ResumePoint())


def test_an_adapter_is_loaded_in_the_number_format_of_its_run(tmp_path):
    checkpoint = save_run(tmp_path / "run", replace(ADAPTER, dtype="bfloat16"))
    model = load_policy(ModelSettings(model=str(checkpoint))).model
    assert model.base_model.model.lm_head.weight.dtype is torch.bfloat16


# --- what a path means ---


def test_run_folder_resolves_to_its_newest_checkpoint(tmp_path):
    newest = save_run(tmp_path / "run", ModelSettings(model="tiny"), steps=(2, 4))
    config = with_pinned_checkpoints(
        run_with(ModelSettings(model=str(tmp_path / "run"), fork_from=tmp_path / "run")).config
    )
    assert (config.model.model, config.model.fork_from) == (str(newest), newest)
    other = run_with(ModelSettings(model="tiny", fork_from=tmp_path / "gone")).config
    assert with_pinned_checkpoints(other) == other


def test_run_that_has_saved_no_checkpoint_is_refused_in_a_sentence(tmp_path):
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        load_policy(ModelSettings(model=str(tmp_path)))


def test_random_weights_of_a_config_follow_the_seed_and_can_be_planned(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(len(tokenizer), width=16, layers=1).config.save_pretrained(tmp_path)
    settings = ModelSettings(model=str(tmp_path / "config.json"))
    first, again, other = (load_policy(settings, seed=seed).model.lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert "parameters" in plan_lines(run_with(settings), ResumePoint())[0]


# --- the rest of a run ---


async def outside(task, *, base_url, api_key, model):
    return ""


@pytest.mark.parametrize(
    ("context", "given", "length", "budget"),
    [
        (2000, {}, 2000, 8192),
        (20_000, {}, 20_000, 20_000),
        (10**6, {}, 32_768, 32_768),
        (20_000, {"max_seq_len": 1024}, 1024, 8192),
        (20_000, {"max_seq_len": 9000, "micro_token_budget": 10_000}, 9000, 10_000),
        (20_000, {"micro_token_budget": 2048}, 2048, 2048),
        (20_000, {"config": RunConfig(trainer=TrainerConfig(max_seq_len=4096))}, 4096, 8192),
    ],
)
def test_an_outside_agent_may_fill_the_models_context(tmp_path, context, given, length, budget):
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = tiny_llama(len(tokenizer), width=16, layers=1, max_length=context).config
    config.save_pretrained(tmp_path)
    settings = {"env": "tic_tac_toe", "model": str(tmp_path / "config.json"), **given}
    run = build(agent=outside, **settings).resolved
    assert (run.trainer.max_seq_len, run.trainer.micro_token_budget) == (length, budget)
    assert run.config.train.max_seq_len == length, "it is written to config.toml"
    is_given = "max_seq_len" in str(given)
    assert build(**settings).resolved.trainer.max_seq_len == (length if is_given else 1024)
    bundled = {name: build(env="tic_tac_toe", agent=outside, model=name).resolved for name in ("tiny", "smollm2-135m")}
    assert [run.trainer.max_seq_len for run in bundled.values()] == [4096, 8192]


def test_a_length_given_to_the_trainer_is_kept_in_the_file_of_the_run(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(RunConfig(trainer=TrainerConfig(max_seq_len=4096))))
    assert read_toml(RunConfig, tmp_path / "run.toml").trainer.max_seq_len == 4096


@pytest.mark.parametrize("agent", [None, outside])
def test_a_run_keeps_the_length_that_its_file_has(tmp_path, agent):
    settings = {"env": "tic_tac_toe", "agent": agent, "model": "tiny", "runs": tmp_path, "name": "old"}
    before = build(**settings, max_seq_len=1024, micro_token_budget=8192).resolved
    prepare_folder(before, ResumePoint())
    assert not differences(before.config, build(**settings).config)


def test_a_model_that_cannot_be_read_asks_for_the_length(tmp_path):
    settings = {"env": "tic_tac_toe", "agent": outside, "model": str(tmp_path)}
    with pytest.raises(ConfigError, match="Give --max-seq-len"):
        build(**settings)
    assert build(**settings, max_seq_len=512).config.trainer.max_seq_len == 512


class FakeWandb:
    """Hears which run it is of, and nothing else."""

    ids: list[str]

    def __init__(self, init_kwargs: dict[str, str] | None = None) -> None:
        assert init_kwargs is not None
        self.ids.append(init_kwargs["id"])

    def log(self, step, stats): ...

    def close(self) -> None: ...


def test_wandb_id_is_kept_on_resume_and_new_on_restart(tmp_path, monkeypatch):
    FakeWandb.ids = []
    monkeypatch.setattr("ludic.training.loggers.WandbLogger", FakeWandb)
    for start in (ResumePoint(), ResumePoint(first_step=2), ResumePoint(restarts=True)):
        start_logging(tmp_path / "here", start)
    start_logging(tmp_path / "there", ResumePoint())  # a run of the same name in another place
    first, resumed, started_over, other = FakeWandb.ids
    assert first == resumed and len({first, started_over, other}) == 3


def start_logging(runs: Path, start: ResumePoint) -> None:
    run = run_with(ModelSettings(model="tiny"), name="same", runs=runs, logger=("wandb",))
    prepare_folder(run, start)
    make_loggers(run).close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelSettings(lora_dropout=5), "lora_dropout = 5; it must be at least 0 and below 1"),
        (lambda: ModelSettings(lora_dropout=-0.1), "lora_dropout = -0.1"),
        (lambda: ModelSettings(lora_dropout=float("nan")), "lora_dropout = nan"),
        (lambda: RolloutSettings(server_memory=-1), "server_memory = -1; it must be above 0 and at most 1"),
        (lambda: RolloutSettings(server_memory=1.5), "server_memory = 1.5"),
        (lambda: LeagueSettings(league_share=0.004), "league_share = 0.004; it must be at least 0.01 and at most 1"),
        (lambda: RolloutSettings(concurrency=0), "concurrency = 0"),
        (lambda: check_name("n" * 10**6), "name = 'nnn"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert len(str(caught.value)) < 500
