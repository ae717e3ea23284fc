"""The whole loop on a tiny model: it learns, it is reproducible, it resumes, it stops, and it says what is wrong."""

import contextlib
import json
import math
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ludic.batch_gen import AsyncRolloutBatchSource
from ludic.inference.local import LocalEngine
from ludic.training import (
    CheckpointConfig,
    Trainer,
    TrainerConfig,
    make_cispo,
    make_dapo,
    make_dr_grpo,
    make_gmpo,
    make_grpo,
    make_gspo,
    make_reinforce_baseline,
    make_reinforce_pp,
    make_rloo,
    make_sapo,
    make_scalerl,
    make_sft,
)
from ludic.training.learner.batches import NothingToTrainOn
from ludic.training.losses import CompositeLoss, LossTerm, TokenKLLoss
from ludic.types import ConfigError
from tests import forked
from tests.extended import cases
from tests.unit.training.bandit import (
    AsciiBandit,
    BanditRequests,
    ByteTokenizer,
    Given,
    bandit_protocol,
    bandit_trainer,
    earns,
    hand_trainer,
    mean_reward,
    tiny_llama,
    train_until,
)
from tests.unit.training.samples import assert_same_up_to_rounding, first_moments, random_items

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


async def learn(algorithm, steps, is_learned=lambda history: False, **settings):
    """The stats of `steps` updates; of fewer, as soon as it is learned."""
    trainer, engine = bandit_trainer(algorithm, **settings)
    history = []
    with contextlib.suppress(NothingToTrainOn):  # all is solved, for those that leave out groups without variance
        while len(history) < steps and not is_learned(history):
            history.append(await trainer.train_step())
    engine.close()
    return history


def is_better(history):
    return len(history) >= 8 and mean_reward(history[-5:]) > mean_reward(history[:3]) + 0.25


# --- learning ---


@pytest.mark.slow
async def test_tiny_model_learns_the_bandit():
    history = await learn(make_grpo(group_size=8), steps=32, is_learned=earns(0.85))
    assert mean_reward(history[:3]) < 0.6
    assert mean_reward(history[-5:]) > 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    cases(
        [make_dr_grpo, make_dapo, make_gspo, make_cispo, make_sapo, make_gmpo, make_rloo, make_scalerl],
        default=[make_gspo, make_rloo],
    ),
    ids=lambda make: make.__name__,
)
async def test_every_group_algorithm_learns(make):
    settings = {"clip_eps_low": 0.2, "clip_eps_high": 0.2} if make is make_gspo else {}
    assert is_better(await learn(make(group_size=8, **settings), steps=28, is_learned=is_better))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    cases([make_reinforce_baseline, make_reinforce_pp], default=[make_reinforce_pp]),
    ids=lambda make: make.__name__,
)
async def test_algorithms_without_groups_learn(make):
    assert is_better(await learn(make(), steps=28, is_learned=is_better, group_size=1, num_prompts=64))


async def test_sampler_and_trainer_agree_and_nothing_is_stale():
    history = await learn(make_grpo(group_size=4), steps=3, group_size=4, num_prompts=4)
    for stats in history:
        assert stats["train/logp_difference_abs"] < 1e-4
        assert stats["train/ess"] == pytest.approx(1.0, abs=1e-4)
        assert stats["train/lag_max"] == 0


async def test_the_same_seeds_give_the_same_run():
    runs = [await learn(make_grpo(group_size=4), steps=4, group_size=4, num_prompts=4) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert {k: v for k, v in first.items() if not k.startswith("perf/")} == {
            k: v for k, v in second.items() if not k.startswith("perf/")
        }


@pytest.mark.slow
async def test_generation_overlaps_with_training_within_the_lag():
    trainer, engine = bandit_trainer(
        make_grpo(group_size=8), make_source=lambda source: AsyncRolloutBatchSource(source, max_lag=1)
    )
    async with trainer.batch_source:
        history = await train_until(trainer, is_better, at_most=32)
    engine.close()
    assert max(stats["train/lag_max"] for stats in history) <= 1
    assert any(stats["train/lag_max"] == 1 for stats in history), "nothing overlapped"
    assert is_better(history)


class BagOfTokens(torch.nn.Module):
    """The smallest language model that is no transformers model: each token predicts the next."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = torch.nn.Embedding(128, 8), torch.nn.Linear(8, 128)

    def forward(self, input_ids, attention_mask):
        return (self.out(self.embedding(input_ids)),)


async def test_plain_module_trains_and_resumes_bit_for_bit(tmp_path):
    batches = [random_items([12, 9, 30], seed=seed) for seed in range(3)]

    def trainer(*some, **settings):
        saved = CheckpointConfig(tmp_path, every_n_steps=2)
        return hand_trainer(*some, model=BagOfTokens(), checkpoint_config=saved, **settings)

    whole = trainer(*batches)
    await whole.train(3)
    assert not torch.equal(whole.model.out.bias, BagOfTokens().out.bias)
    resumed = trainer(batches[2], resume_from=2)
    assert resumed.step == 2
    await resumed.train_step()
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


# --- adapters and references ---


def with_adapter(model):
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


@pytest.mark.slow
async def test_training_an_adapter_leaves_its_base_unchanged():
    base = tiny_llama(initializer_range=0.3)  # a frozen head that makes a difference
    before = {name: p.clone() for name, p in base.named_parameters()}
    model = with_adapter(base)
    trainer, engine = bandit_trainer(
        make_grpo(group_size=8), model=model, cfg=TrainerConfig(lr=3e-2, max_seq_len=64, weight_decay=0.0)
    )
    history = await train_until(trainer, is_better, at_most=32)
    engine.close()
    assert is_better(history)
    assert all(stats["train/logp_difference_abs"] < 1e-4 for stats in history)
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(parameter, before[plain]), name


async def test_reference_of_an_adapter_is_its_base():
    grpo = make_grpo(group_size=4)
    loss = CompositeLoss(
        [LossTerm(name="policy", loss=grpo.loss), LossTerm(name="kl", loss=TokenKLLoss(to="reference", coeff=0.1))]
    )
    batch = random_items([12, 20])
    trainer = hand_trainer(
        batch, batch, algo=replace(grpo, loss=loss), model=with_adapter(tiny_llama()), cfg={"lr": 0.1}
    )
    first, second = await trainer.train_step(), await trainer.train_step()
    assert first["train/kl/kl_mean"] == pytest.approx(0.0, abs=1e-6), "an adapter begins as nothing"
    assert second["train/kl/kl_mean"] > 1e-6


def test_loss_that_needs_a_reference_is_refused_without_one():
    with pytest.raises(ConfigError, match="frozen reference"):
        hand_trainer(algo=make_reinforce_pp(kl_coeff=0.1))


def test_frozen_adapter_logs_a_warning(caplog):
    model = with_adapter(tiny_llama())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    hand_trainer(model=model)
    assert "adapter is inactive" in caplog.text


# --- batches that cannot be used ---


async def test_empty_batches_end_the_run_with_a_reason():
    trainer = hand_trainer(*[[]] * 100, cfg={"max_empty_batches": 5})
    with pytest.raises(NothingToTrainOn, match="5 batches in a row had nothing to train on at step 0"):
        await trainer.train_step()
    assert len(trainer.batch_source.batches) == 95


async def test_stale_samples_are_dropped_and_counted():
    fresh, stale = random_items([10, 12]), random_items([14], seed=1)
    for item, version in [(fresh[0], 5), (fresh[1], 4), (stale[0], 2)]:
        object.__setattr__(item.attachments, "version_runs", ((version, item.num_action_tokens),))
        item.attachments.__post_init__()
    trainer = hand_trainer([*fresh, *stale], cfg={"max_lag": 1})
    trainer.step = 5
    stats = await trainer.train_step()
    assert stats["train/num_stale"] == 1 and stats["train/num_samples"] == 2 and stats["train/lag_max"] == 1


@pytest.mark.parametrize(("policy", "kept"), [("truncate", 2), ("drop", 1)])
async def test_too_long_truncates_or_drops_long_samples(policy, kept):
    trainer = hand_trainer(random_items([20, 100]), cfg={"too_long": policy})
    assert (await trainer.train_step())["train/num_samples"] == kept


async def test_gradient_that_is_not_finite_leaves_the_weights_unchanged():
    model = tiny_llama()
    before = model.model.embed_tokens.weight.clone()
    trainer = hand_trainer(random_items([20]), model=model)
    model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError, match="weights were not changed"):
        await trainer.train_step()
    assert torch.equal(model.model.embed_tokens.weight, before) and trainer.step == 0


async def test_clipped_steps_are_counted():
    items = random_items([12, 9])
    cut, free = (hand_trainer(items, cfg={"max_grad_norm": limit}) for limit in (1e-6, 1e6))
    assert (await cut.train_step())["train/grad_clipped"] == 1.0
    stats = await free.train_step()
    assert stats["train/grad_clipped"] == 0.0 and stats["train/grad_norm"] > 1e-6
    for off in (None, 0.0):
        assert (await hand_trainer(items, cfg={"max_grad_norm": off}).train_step())["train/grad_clipped"] == 0.0


async def test_sampler_with_another_model_logs_a_warning(caplog):
    items = random_items([20, 30])  # log-probs around −5 where the model says −5.6
    await hand_trainer(items).train_step()
    assert "Sampler and trainer disagree" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"), [({"sync_every_steps": 1}, "no publisher"), ({"eval_at_start": True}, "no evaluator")]
)
def test_settings_without_the_part_that_they_are_for_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        hand_trainer(cfg=settings)


def test_learning_rate_is_another_name_of_lr():
    assert TrainerConfig(learning_rate=2e-5).lr == 2e-5


# --- stopping and resuming, in separate processes ---


def start(folder, steps, pause_s=0.0, *more):
    return forked.python("-m", "tests.unit.training.bandit_run", folder, steps, pause_s, *more, cwd=ROOT)


def metrics(folder):
    path = folder / "metrics.jsonl"
    written = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half written
    rows = [json.loads(line) for line in written.splitlines()]
    drop = ("perf/", "time")
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(drop)} for row in rows}


def wait_for_step(folder, step, process, timeout_s=120):
    deadline = time.time() + timeout_s
    while step not in metrics(folder):
        assert process.poll() is None and time.time() < deadline, f"step {step} was never reached"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("more", cases([[], [2]], default=[[]]), ids=["one step per batch", "four steps per batch"])
def test_killed_run_resumes_to_the_same_ten_steps(tmp_path, more):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole, 10, 0.0, *more).wait(timeout=120) == 0
    process = start(broken, 10, 0.2, *more)
    wait_for_step(broken, 7, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert start(broken, 10, 0.0, *more).wait(timeout=120) == 0
    expected, found = metrics(whole), metrics(broken)
    assert list(expected) == list(range(1, 11)) and expected == found


@pytest.mark.slow
@pytest.mark.parametrize("number", cases([signal.SIGINT, signal.SIGTERM], default=[signal.SIGTERM]))
def test_signal_finishes_the_step_saves_and_ends(tmp_path, number):
    process = start(tmp_path, 1000, pause_s=0.1)
    wait_for_step(tmp_path, 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    last = max(metrics(tmp_path))
    assert process.returncode == 0 and f"ended at {last}" in output
    assert (tmp_path / "checkpoints" / f"step_{last:06d}").is_dir()


async def test_resuming_needs_a_checkpointer():
    with pytest.raises(ConfigError, match="needs a checkpointer"):
        hand_trainer(resume_from="latest")


# --- the seeds' example ---


async def test_example_training_loop_of_the_seeds_runs():
    from ludic.training import GRPORequestStrategy, RolloutBatchSource, RolloutEngine, TrainerConfig, make_grpo

    model = tiny_llama()
    client = LocalEngine(model, ByteTokenizer(), max_model_len=64, kv_tokens=8192)
    requests, strategy = BanditRequests(2), GRPORequestStrategy(8)

    def make_requests():
        return strategy.expand(requests())

    engine = RolloutEngine(
        env_registry={"bandit": AsciiBandit}, protocol_registry={"single": lambda: bandit_protocol(client)}
    )
    algo = make_grpo(group_size=8)

    batch_source = RolloutBatchSource(
        engine=engine,
        request_fn=make_requests,
        algorithm=algo,
        max_steps=512,
    )

    trainer = Trainer(
        model=model,
        algo=algo,
        batch_source=batch_source,
        cfg=TrainerConfig(learning_rate=2e-5),
    )

    await trainer.train(num_steps=3)
    assert trainer.step == 3
    assert client.version == 2, "without a publisher, the engine notices new weights when it is next asked"
    client.close()


# --- servers that forget --------------------------------------------------------------------------------------


class ForgetfulServer:
    """What publishing to another process looks like from here."""

    def __init__(self):
        self.pushed = []
        self.served = None

    def publish(self, state_dict, version=None):
        self.pushed.append(version)
        self.served = version

    def is_current(self, version):
        return self.served == version


async def test_restarted_server_gets_its_weights_before_the_next_batch():
    server = ForgetfulServer()
    trainer = hand_trainer(*[random_items([12, 9], vocab=64) for _ in range(3)], algo=make_sft(), publisher=server)
    await trainer.train_step()
    await trainer.train_step()
    assert server.pushed == [1, 2]  # and not again while it remembers
    server.served = None
    await trainer.train_step()
    assert server.pushed == [1, 2, 2, 3]


# --- sources that keep accounts -------------------------------------------------------------------------------


class Accounting(Given):
    """Writes down what it is told."""

    def __init__(self, *batches):
        super().__init__(*batches)
        self.told = []

    def notify_trained(self, step, num_items):
        self.told.append(("trained", step, num_items))

    def notify_saved(self, step):
        self.told.append(("saved", step))


async def test_source_is_notified_of_trained_and_saved_steps(tmp_path):
    trainer = hand_trainer(
        algo=make_sft(), checkpoint_config=CheckpointConfig(tmp_path, every_n_steps=2), cfg={"too_long": "drop"}
    )
    source = trainer.batch_source = Accounting(
        random_items([12, 9, 100], vocab=64), [], random_items([8], vocab=64), random_items([7], vocab=64)
    )
    await trainer.train(3)
    assert source.told == [
        ("trained", 1, 2), ("trained", 2, 1), ("saved", 2), ("trained", 3, 1), ("saved", 3)
    ]  # fmt: skip


class AdapterServer(ForgetfulServer):
    """Takes the adapter from the model itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.handed = []

    def publish(self, state_dict, version=None):
        super().publish(state_dict, version)
        self.handed.append(state_dict)

    def require_trained(self, model):
        if model is not self.model:
            raise ConfigError("made for another model")


async def test_adapter_publisher_gets_no_merged_weights():
    model = tiny_llama()
    server = AdapterServer(model)
    batches = [random_items([12, 9], vocab=64) for _ in range(2)]
    trainer = hand_trainer(*batches, algo=make_sft(), model=model, publisher=server)
    await trainer.train_step()
    server.served = None
    await trainer.train_step()
    assert server.pushed == [1, 1, 2] and server.handed == [{}, {}, {}]


def test_publisher_of_another_models_adapter_is_refused():
    with pytest.raises(ConfigError, match="another model"):
        hand_trainer(publisher=AdapterServer(tiny_llama()))
    model = tiny_llama()
    with pytest.raises(ConfigError, match="param_filter"):
        hand_trainer(model=model, publisher=AdapterServer(model), param_filter=lambda name, weight: True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("lr", "learning_rate", "critic_lr") for value in (0.0, -1.0, math.nan, math.inf)),
        *(("max_grad_norm", value) for value in (-1.0, math.nan)),
        *(("weight_decay", value) for value in (-0.1, math.nan, math.inf)),
        *(("eps", value) for value in (0.0, math.nan)),
        *(("betas", value) for value in ((0.9, 1.0), (math.nan, 0.9), (-0.1, 0.9))),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 10**50)),
        *((name, 0) for name in ("updates_per_batch", "mini_batches")),
        *((name, -1) for name in ("sync_every_steps", "eval_every_n_steps")),
        ("micro_token_budget", 10),
        ("too_long", "cut"),
        ("mixed_precision_dtype", "fp16"),
    ],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match="lr=" if name == "learning_rate" else f"{name}="):
        TrainerConfig(**{name: value})


async def test_gradient_checkpointing_does_not_change_the_update():
    batch = random_items([12, 20, 9])
    weights = []
    for checkpointing in (False, True):
        trainer = hand_trainer(batch, cfg={"gradient_checkpointing": checkpointing})
        await trainer.train()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*weights, strict=True))


async def test_packed_and_padded_training_agree():
    batch = random_items([12, 20, 9, 15, 30])
    results = []
    for packed in (True, False):
        trainer = hand_trainer(batch, batch, cfg={"packed": packed})
        await trainer.train()
        results.append(first_moments(trainer.model, trainer.optimizer))
    assert_same_up_to_rounding(*results)


async def test_failed_step_is_not_reported_as_trained():
    trainer = hand_trainer(algo=make_sft())
    source = trainer.batch_source = Accounting(random_items([12], vocab=64))
    trainer.learner._clip_gradients = lambda step: (_ for _ in ()).throw(FloatingPointError("nan"))
    with pytest.raises(FloatingPointError):
        await trainer.train_step()
    assert source.told == []
