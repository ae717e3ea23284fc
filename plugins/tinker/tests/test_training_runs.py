"""Training runs of the Tinker server: the numbers of a plain model and of `Trainer`, whatever runs share a pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.models.adapters import AdapterSpec
from ludic.training import Trainer, TrainerConfig, make_cispo, make_grpo, make_sft
from ludic.training.learner.gradients import batch_facts
from ludic.types import ConfigError, NotFinite
from ludic_tinker.learner import built_in_of, rows_of
from ludic_tinker.server.bodies import AdamSettings
from ludic_tinker.server.losses import Row
from ludic_tinker.server.runs import PassJob, PassOutput, TrainingBase, TrainingRun
from ludic_tinker.server.targets import target_logps
from tests.tinker_fake.lora_model import LoraSettings, TrainedLora, with_lora
from tests.tinker_fake.lora_model import Row as PlainRow
from tests.unit.training.bandit import tiny_llama
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow

VOCAB = 264
ADAM = AdamSettings(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.02, grad_clip_norm=0.5)
PROMPT = np.arange(3, 27, dtype=np.int32)


@pytest.fixture(scope="module")
def base() -> TrainingBase:
    return TrainingBase(tiny_llama(), token_budget=256)


def random_rows(
    lengths: Sequence[int], loss: str = "ppo", *, seed: int = 0, prompt: np.ndarray = PROMPT[:0], num_targets: int = 0
) -> list[Row]:
    """Rows that begin with the prompt; old log-probs around the untrained model's, so that ratios lie on both sides of bounds."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        shape = (length + len(prompt), num_targets) if num_targets else (length + len(prompt),)
        own = rng.integers(0, VOCAB, size=length).astype(np.int32)
        inputs = {"weights": rng.normal(size=shape).astype(np.float32) * (rng.random(shape) < 0.7)}
        if loss != "cross_entropy":
            is_sampled = np.arange(shape[0]) >= len(prompt)
            inputs = {
                "logprobs": np.where(is_sampled, rng.uniform(-6.0, -5.2, size=shape), 0).astype(np.float32),
                "advantages": np.where(is_sampled, rng.normal(size=shape), 0).astype(np.float32),
            }
        rows.append(Row(np.concatenate([prompt, own]), rng.integers(0, VOCAB, size=shape), inputs))
    return rows


def result(base: TrainingBase, run: TrainingRun, rows: list[Row], loss: str = "ppo", **settings: Any) -> PassOutput:
    job = PassJob(run, rows, loss, settings.pop("config", {}), **settings)
    (found,) = base.compute([job])
    assert isinstance(found, PassOutput), found
    return found


def gradient_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name[9:]: value for name, value in run.state(gradient=True).items() if name.startswith("gradient/")}


def assert_near(found: torch.Tensor, expected: torch.Tensor, *, relative: float = 1e-5) -> None:
    limit = relative * float(expected.abs().max())
    assert float((found - expected).abs().max()) <= limit


# --- against a plain model, and against the local trainer ---


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_two_steps_equal_those_of_a_plain_model(base: TrainingBase, loss: str):
    spec = AdapterSpec(rank=8, seed=7)
    run, plain = base.new_run(spec), TrainedLora(tiny_llama(), LoraSettings(rank=8, seed=7))
    rows = random_rows((9, 30, 12, 7), loss, prompt=PROMPT) + random_rows((5, 20), loss, seed=1)
    theirs = [
        PlainRow(r.tokens.tolist(), r.targets.tolist(), {n: torch.from_numpy(v) for n, v in r.inputs.items()})
        for r in rows
    ]
    config = {"clip_high_threshold": 1.1} if loss in ("ppo", "cispo") else {}
    for _ in range(2):  # the second off-policy, and with the first one's moments
        parts = [result(base, run, rows[:2], loss, config=config), result(base, run, rows[2:], loss, config=config)]
        logps, total = plain.forward_backward(theirs, loss, config, forward_only=False)
        assert sum(part.metrics["loss:sum"] for part in parts) == pytest.approx(total, rel=1e-5, abs=1e-5)
        for own, expected in zip(parts[0].logprobs + parts[1].logprobs, logps, strict=True):
            assert_near(torch.from_numpy(own), expected)
        gradient = gradient_of(run)
        norm = run.step(ADAM)["unclipped_grad_l2:mean"]
        assert norm == pytest.approx(plain.step({f: getattr(ADAM, f) for f in ADAM.__slots__}), rel=1e-5)
        for name, expected in plain.last_gradient.items():
            assert_near(gradient[name.replace(".default", "")], expected)
    weights = run.adapter.named()
    for name, expected in plain.weights().items():
        assert torch.allclose(weights[name.replace(".default", "")], expected, atol=1e-5)
    assert max(float(value.abs().max()) for name, value in weights.items() if "lora_B" in name) > 1e-3


@pytest.mark.parametrize("algo", [make_grpo(clip_eps_high=0.1), make_cispo(), make_sft(length_normalize=True)])
def test_two_steps_equal_those_of_the_trainer_with_a_peft_adapter(base: TrainingBase, algo: Any):
    model = with_lora(tiny_llama(), LoraSettings(rank=8, seed=7, train_unembed=False))
    run = base.new_run(AdapterSpec(rank=8, seed=7, head=False))
    items = random_items((9, 5, 12, 7, 3, 10), vocab=VOCAB)
    cfg = TrainerConfig(
        lr=ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
        max_grad_norm=ADAM.grad_clip_norm,
        max_seq_len=64,
        watch_entropy=False,
    )
    trainer = Trainer(model=model, algo=algo, batch_source=_Repeated(items), cfg=cfg)
    built_in = built_in_of(algo.loss)
    assert built_in is not None
    rows = [
        Row(row.tokens, row.targets.astype(np.int64), row.loss_inputs)
        for row in rows_of(items, algo.loss, batch_facts(items))
    ]
    for _ in range(2):
        expected = trainer.train_step_sync()
        found = result(base, run, rows, built_in.name, config=built_in.settings)
        assert found.metrics["loss:sum"] == pytest.approx(expected["train/loss"], rel=1e-4, abs=1e-5)
        assert run.step(ADAM)["unclipped_grad_l2:mean"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    own = run.adapter.named()
    for name, value in model.named_parameters():
        if value.requires_grad:
            assert torch.allclose(own[name.replace(".default", "")], value, atol=1e-5)


class _Repeated:
    def __init__(self, items: Any) -> None:
        self.items = items

    async def next_batch(self) -> Any:
        from ludic.types import SAWBatch

        return SAWBatch(items=list(self.items))


def test_several_targets_of_a_position_add_up(base: TrainingBase):
    several, alone = (base.new_run(AdapterSpec(rank=4, seed=1)) for _ in range(2))
    rows = random_rows((9, 14), "cross_entropy", num_targets=3, prompt=PROMPT)
    found = result(base, several, rows, "cross_entropy")
    single = [
        [Row(row.tokens, row.targets[:, k], {"weights": row.inputs["weights"][:, k]}) for row in rows] for k in range(3)
    ]
    parts = [result(base, alone, own, "cross_entropy") for own in single]
    assert found.metrics["loss:sum"] == pytest.approx(sum(part.metrics["loss:sum"] for part in parts), rel=1e-5)
    for number, own in enumerate(found.logprobs):
        expected = np.stack([part.logprobs[number] for part in parts], axis=1)
        assert np.allclose(own, expected, atol=1e-6)
    assert several.gradient is not None and alone.gradient is not None
    assert_near(several.gradient, alone.gradient)


# --- runs that share passes ---

SPECS = [
    AdapterSpec(rank=4, seed=1),
    AdapterSpec(rank=8, seed=2, head=False),
    AdapterSpec(rank=2, seed=3, attention=False, mlp=False),
]


def trained_runs(base: TrainingBase) -> list[TrainingRun]:
    """Three runs whose adapters change what the model says."""
    runs = [base.new_run(spec) for spec in SPECS]
    for number, run in enumerate(runs):
        generator = torch.Generator().manual_seed(number)
        run.adapter.flat.copy_(torch.randn(run.adapter.flat.shape, generator=generator) * 0.1)
    return runs


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=3, max_size=3),
    budget=st.sampled_from([64, 100, 4096]),
    seed=st.integers(0, 1000),
)
def test_a_run_gets_the_same_whatever_shares_its_passes(base: TrainingBase, lengths, budget: int, seed: int):
    losses = ["ppo", "cross_entropy", "dro"]
    rows = [
        random_rows(own, loss, seed=seed + number, prompt=PROMPT[: 24 * (seed % 2)])
        for number, (own, loss) in enumerate(zip(lengths, losses, strict=True))
    ]
    alone = trained_runs(base)
    expected = [result(base, run, own, loss) for run, own, loss in zip(alone, rows, losses, strict=True)]
    together = trained_runs(base)
    jobs = [PassJob(run, own, loss, {}) for run, own, loss in zip(together, rows, losses, strict=True)]
    # The last run's data arrives as two requests.
    jobs[2:] = [PassJob(together[2], part, "dro", {}) for part in (rows[2][:1], rows[2][1:]) if part]
    small = TrainingBase.__new__(TrainingBase)
    small.__dict__ = {**base.__dict__, "token_budget": budget}
    outputs = small.compute(jobs)
    found = [PassOutput([], {"loss:sum": 0.0}) for _ in together]
    for job, output in zip(jobs, outputs, strict=True):
        assert isinstance(output, PassOutput), output
        own = found[together.index(job.run)]
        own.logprobs.extend(output.logprobs)
        own.metrics["loss:sum"] += output.metrics["loss:sum"]
    for number, run in enumerate(together):
        assert found[number].metrics["loss:sum"] == pytest.approx(
            expected[number].metrics["loss:sum"], rel=1e-4, abs=1e-4
        )
        for own, other in zip(found[number].logprobs, expected[number].logprobs, strict=True):
            assert np.allclose(own, other, atol=1e-5)
        gradient = alone[number].gradient
        assert run.gradient is not None and gradient is not None
        assert_near(run.gradient, gradient, relative=2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_run_that_is_not_finite_leaves_others_bit_for_bit(base: TrainingBase, value: float):
    rows = [random_rows((9, 14, 30), seed=number, prompt=PROMPT) for number in range(3)]
    gradients = []
    for is_broken in (False, True):
        runs = trained_runs(base)
        if is_broken:
            runs[1].adapter.flat.fill_(value)
        outputs = base.compute([PassJob(run, own, "ppo", {}) for run, own in zip(runs, rows, strict=True)])
        gradients.append([run.gradient for run in (runs[0], runs[2])])
        before = runs[1].adapter.flat.clone()
        if is_broken:
            assert isinstance(outputs[1], PassOutput) and not np.isfinite(outputs[1].metrics["loss:sum"])
            with pytest.raises(NotFinite, match="step 1 is not finite; the weights were not changed"):
                runs[1].step(ADAM)
            assert torch.equal(runs[1].adapter.flat.nan_to_num(), before.nan_to_num())
            assert runs[1].gradient is None
    for healthy, beside_nan in zip(*gradients, strict=True):
        assert healthy is not None and beside_nan is not None and healthy.isfinite().all()
        assert torch.equal(healthy, beside_nan)


def test_a_refused_job_and_a_failing_job_are_their_own_results(base: TrainingBase, monkeypatch: pytest.MonkeyPatch):
    runs = trained_runs(base)
    result(base, runs[1], random_rows((5,)))
    kept = runs[1].gradient.clone() if runs[1].gradient is not None else None
    failing = runs[1].adapter

    def without_room(bank: Any, hidden: Any, spans: Any, *args: Any, **options: Any) -> Any:
        if any(adapter is failing for adapter, _ in spans):
            raise torch.OutOfMemoryError("no room")
        return target_logps(bank, hidden, spans, *args, **options)

    monkeypatch.setattr("ludic_tinker.server.runs.target_logps", without_room)
    jobs = [PassJob(run, random_rows((9, 14), seed=number), "ppo", {}) for number, run in enumerate(runs)]
    outputs = base.compute([*jobs, PassJob(runs[2], random_rows((3,)), "sparkle", {})])
    assert [isinstance(output, PassOutput) for output in outputs] == [True, False, True, False]
    assert "token budget" in str(outputs[1]) and "no loss 'sparkle'" in str(outputs[3])
    assert kept is not None and runs[1].gradient is not None and torch.equal(runs[1].gradient, kept)
    monkeypatch.undo()
    alone = trained_runs(base)
    result(base, alone[0], list(jobs[0].rows))
    assert alone[0].gradient is not None and runs[0].gradient is not None
    assert_near(runs[0].gradient, alone[0].gradient)


def test_forward_computes_the_same_log_probs_and_leaves_no_gradient(base: TrainingBase):
    run = trained_runs(base)[0]
    rows = random_rows((9, 14))
    forward = result(base, run, rows, forward_only=True)
    assert run.gradient is None
    both = result(base, run, rows)
    assert forward.metrics["loss:sum"] == pytest.approx(both.metrics["loss:sum"], rel=1e-6)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(forward.logprobs, both.logprobs, strict=True))


# --- steps, saving ---


def test_a_step_without_a_gradient_changes_nothing(base: TrainingBase):
    run = trained_runs(base)[0]
    before = run.adapter.flat.clone()
    assert run.step(ADAM) == {"unclipped_grad_l2:mean": 0.0}
    assert torch.equal(run.adapter.flat, before)


def test_a_loaded_run_continues_bit_for_bit_with_its_gradient(base: TrainingBase):
    run, rows = trained_runs(base)[0], random_rows((9, 14))
    result(base, run, rows)
    run.step(ADAM)
    result(base, run, rows)
    state = run.state(gradient=True)
    other = base.new_run(AdapterSpec(rank=4, seed=99))
    other.load(state, optimizer=True)
    for each in (run, other):
        result(base, each, rows[:1])
        each.step(ADAM)
    assert torch.equal(run.adapter.flat, other.adapter.flat)
    assert other.num_steps == 2
    assert not any(name.startswith("gradient/") for name in run.state())


def test_weights_alone_begin_with_fresh_moments(base: TrainingBase):
    run, rows = trained_runs(base)[0], random_rows((9, 14))
    result(base, run, rows)
    run.step(ADAM)
    fresh, other = base.new_run(SPECS[0]), base.new_run(SPECS[0])
    fresh.adapter.load(run.adapter.named())
    other.load(run.state(), optimizer=False)
    for each in (fresh, other):
        result(base, each, rows)
        each.step(ADAM)
    assert torch.equal(fresh.adapter.flat, other.adapter.flat)
    assert not torch.equal(fresh.adapter.flat, run.adapter.flat)


def test_a_state_of_another_shape_is_refused_and_nothing_changes(base: TrainingBase):
    run, other = trained_runs(base)[:2]
    before = other.adapter.flat.clone()
    with pytest.raises(ConfigError, match="belong to another adapter"):
        other.load(run.state(), optimizer=True)
    assert torch.equal(other.adapter.flat, before)


@pytest.mark.parametrize(
    "wrong", [{"beta2": 1.0}, {"learning_rate": -1.0}, {"eps": float("nan")}, {"weight_decay": float("inf")}]
)
def test_settings_that_adam_cannot_use_are_refused(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdamSettings(**wrong).checked()
