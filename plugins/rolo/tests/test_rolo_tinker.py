"""The Tinker back end on a fake of the service with a real LoRA: it learns, it updates as the local trainer, it keeps weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

from ludic.inference import HFChatTemplate
from ludic.models.loading import character_tokenizer, tiny_llama, word_tokenizer
from ludic.training import make_dr_grpo
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import ConfigError
from rolo import (
    Action,
    CompletionOutput,
    GRPOConfig,
    GRPOTrainer,
    Message,
    Reward,
    RolloutGenerator,
    State,
    TrainingBatch,
)
from rolo.examples import gsm8k
from rolo.library import saw_batch
from rolo.tinker_backend import TinkerModel, TinkerModelConfig, TinkerRenderer
from tests.tinker_fake import FakeTinker
from tests.tinker_fake.lora_model import LoraSettings, with_lora
from tests.unit.training.samples import assert_same_up_to_rounding

pytestmark = pytest.mark.slow

WORDS = ["say", "yes", "no", "maybe", "again"]
TOKENIZER = word_tokenizer(WORDS)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTinker]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    base = tiny_llama(len(TOKENIZER), width=32, layers=2)
    with FakeTinker({"words": base}, eos_id=TOKENIZER.eos_token_id) as service:
        yield service


@pytest.fixture
def model(fake: FakeTinker, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinkerModel]:
    monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
    made = TinkerModel(config_for(fake), tokenizer=TOKENIZER)
    yield made
    made.close()


def config_for(fake: FakeTinker, **settings: Any) -> TinkerModelConfig:
    known: dict[str, Any] = {
        "model_name": "words",
        "learning_rate": 1e-2,
        "max_tokens": 2,
        "lora_rank": 4,
        "max_seq_len": 64,
        "project_id": "project-1",
    }
    return TinkerModelConfig(**{**known, "base_url": fake.url, **settings})


class Turns:
    """Says `again` until as many turns are played as the example wants."""

    def __init__(self, example: Any) -> None:
        self.left, self.messages = example["turns"], (Message("user", "say yes"),)

    def start(self) -> State:
        return State(self.messages)

    def step(self, action: Action) -> State | None:
        self.left -= 1
        self.messages += (action.message, Message("user", "again"))
        return State(self.messages) if self.left else None


class TurnsBuilder:
    def build(self, example: Any) -> Turns:
        return Turns(example)


class YesReward:
    def score(self, example: Any, trajectory: Any) -> Reward:
        is_yes = trajectory.last_action.text.startswith("yes")
        return Reward(float(is_yes), is_yes)


class Examples:
    def __init__(self, turns: int) -> None:
        self.turns = turns

    def batches(self) -> Iterator[list[Any]]:
        while True:
            yield [{"turns": self.turns}] * 2


def loop(model: TinkerModel, *, turns: int = 1, **settings: Any) -> GRPOTrainer:
    generator = RolloutGenerator(env_builder=TurnsBuilder(), renderer=model.renderer(), max_turns=turns)
    return GRPOTrainer(
        model=model,
        generator=generator,
        reward_model=YesReward(),
        data_loader=Examples(turns),
        config=GRPOConfig(**{"samples_per_prompt": 8, **settings}),
        eval_examples=[{"turns": turns}] * 3,
    )


@pytest.mark.extended(covered_by="test_an_update_has_the_gradient_that_the_library_has")
async def test_it_learns_and_keeps_the_best_weights(fake: FakeTinker, model: TinkerModel, tmp_path: Path):
    trainer = loop(
        model, max_steps=12, eval_on_start=True, eval_every_steps=12, save_best_checkpoint=True, run_dir=tmp_path
    )
    first, last = await trainer.train()
    assert first["eval/accuracy"] < 0.4
    assert last["eval/accuracy"] > 0.9
    assert model.remote.client.version == model.trainer.step
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["path"] in fake.checkpoints and best["path"].startswith("tinker://")
    assert fake.asked("create_session")[0]["project_id"] == "project-1"


async def test_an_update_has_the_gradient_that_the_library_has(fake: FakeTinker, model: TinkerModel):
    """Of conversations of three turns, with the same trajectories and the same weights."""
    given: list[TrainingBatch] = []
    update = model.update

    async def kept(batch: TrainingBatch) -> Any:
        given.append(batch)
        return await update(batch)

    model.update = kept  # type: ignore[method-assign]
    await loop(model, turns=3, max_steps=1, eval_every_steps=0).train()
    (batch,) = (saw_batch(batch, 1.0) for batch in given)
    assert {sum(item.action_mask[1:] & ~item.action_mask[:-1]) for item in batch.items} == {3}, "one item, three turns"
    weighed = [item for item in batch.items if item.weight]
    # The local trainer cannot have an adapter on the head; a fresh one changes nothing, so all others are the same.
    here = with_lora(fake.base_models["words"], LoraSettings(rank=4, seed=0, train_unembed=False))
    there = with_lora(fake.base_models["words"], fake.run.settings)
    here.load_state_dict(
        {name: p for name, p in there.named_parameters() if "lora" in name and "lm_head" not in name}, strict=False
    )
    accumulate_gradients(TrainedPolicy(here), make_dr_grpo().loss, weighed, micro_token_budget=256)
    gradients = {name: p.grad for name, p in here.named_parameters() if p.grad is not None}
    assert len(gradients) == 2 * 2 * 7
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3
    assert_same_up_to_rounding({name: fake.run.last_gradient[name] for name in gradients}, gradients)


def test_a_renderer_is_the_tokenizers_own_template_where_the_cookbook_does_not_know_the_model(model: TinkerModel):
    renderer = TinkerRenderer(model)
    assert isinstance(renderer.template, HFChatTemplate)
    prompt = renderer.render([Message("user", "say yes")])
    assert TOKENIZER.decode(prompt.token_ids) == "<|user|> say yes <|end|> <|assistant|>"


def test_the_stop_token_of_a_cookbook_renderer_is_cut_from_the_message(
    fake: FakeTinker, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("tinker_cookbook")
    monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
    tokenizer = character_tokenizer()
    made = TinkerModel(config_for(fake, renderer_name="role_colon"), tokenizer=tokenizer)
    made.close()
    assert made.policy().sampling.stop == ["\n\nUser:"]
    renderer = made.renderer()
    prompt = renderer.render([Message("user", "say yes")])
    said = tokenizer.encode("yes\n\nUser:", add_special_tokens=False)
    reply = renderer.parse(CompletionOutput(prompt, said, [-1.0] * len(said)))
    assert reply == Message("assistant", "yes")


def test_an_unknown_project_is_refused_by_name(fake: FakeTinker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
    with pytest.raises(ConfigError, match="project_id='missing'"):
        TinkerModel(config_for(fake, project_id="missing"), tokenizer=TOKENIZER)


def test_close_ends_the_session_at_the_service(fake: FakeTinker, model: TinkerModel):
    model.close()
    assert fake.asked("sessions/session-0/finish")


def test_the_gsm8k_program_runs_on_tinker(
    fake: FakeTinker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["What", "is", "plus", "?", *(rf"\boxed{{{number}}}" for number in range(2, 7))]
    tokenizer = word_tokenizer(words)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fake.base_models["solver"] = tiny_llama(len(tokenizer), width=32, layers=2)
    fake.tokenizer_id, fake.context = str(tmp_path / "tokenizer"), 256
    fake.eos_id = tokenizer.eos_token_id
    rows = [{"question": f"What is {a} plus {b} ?", "answer": f"#### {a + b}"} for a in (1, 2, 3) for b in (1, 2, 3)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
    monkeypatch.setenv("TINKER_BASE_URL", fake.url)
    data = str(tmp_path / "sums.jsonl")
    gsm8k.main(
        gsm8k.Settings(
            backend="tinker",
            model_name="solver",
            data=data,
            eval_data=data,
            run_dir=tmp_path / "run",
            tensorboard=False,
            batch_size=3,
            samples_per_prompt=4,
            max_steps=2,
            max_tokens=3,
            eval_every_steps=2,
            eval_limit=2,
            save_best_checkpoint=True,
            learning_rate=1e-3,
        )
    )
    assert "pass@4" in capsys.readouterr().out.lower()
    assert fake.run.num_steps >= 1
    assert json.loads((tmp_path / "run" / "best.json").read_text())["path"].startswith("tinker://")
    assert fake.asked("sessions/session-0/finish")
