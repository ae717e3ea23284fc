"""Plans: what is divided how, what fits, what is said when nothing does; and rates against what was measured."""

from dataclasses import replace

import pytest

from ludic.scaling import (
    SHAPES,
    Hardware,
    Job,
    PlanOptions,
    Rates,
    TrainingSetup,
    best_plan,
    changes_that_help,
    training_memory,
)
from ludic.scaling.memory import GIB, cache_bytes_per_token, serving_memory
from ludic.scaling.plan import divisions
from ludic.scaling.throughput import (
    LEAST_DECODE_S,
    communication_s,
    decode_s,
    offload_s,
    training_flops,
    training_rate,
)
from ludic.types import ConfigError

SMALL, MIDDLE, LARGE = SHAPES["1.5b"], SHAPES["7b"], SHAPES["70b"]
H200 = Hardware(gpus=8)


# --- memory over ranks ---


def test_what_is_kept_is_divided_by_the_ranks():
    """16 bytes per parameter: weight and gradient in bf16, two moments and a copy in fp32."""
    memory = training_memory(MIDDLE, TrainingSetup(ranks=8))
    assert memory.kept == 16 * -(-MIDDLE.params // 8)
    assert memory.step == 4 * -(-MIDDLE.params // 8)
    held_in_fp32 = training_memory(MIDDLE, TrainingSetup(ranks=8, held="fp32"))
    assert held_in_fp32.kept == memory.kept and held_in_fp32.step == 0


def test_whole_gradients_are_held_only_between_micro_batches_without_a_sum():
    def buffers(**changes):
        return training_memory(MIDDLE, TrainingSetup(ranks=8, **changes)).gradient_buffers

    one, every = buffers(), buffers(micro_batches=4, sync_gradients="every")
    assert buffers(micro_batches=4) == one + 4 * MIDDLE.params
    assert every == one


def test_gathered_weights_do_not_shrink_with_more_ranks():
    few, many = (training_memory(LARGE, TrainingSetup(ranks=n)) for n in (8, 64))
    assert few.gathered == many.gathered == 2 * (LARGE.root_params + 3 * LARGE.block_params)
    assert many.kept == pytest.approx(few.kept / 8)


def test_one_process_neither_gathers_nor_sends():
    memory = training_memory(SMALL, TrainingSetup())
    assert memory.gathered == memory.gradient_buffers == 0
    # With one micro-batch gradients come as activations go.
    assert memory.gradients == 0 and memory.new_gradients == 2 * SMALL.params
    assert training_memory(SMALL, TrainingSetup(micro_batches=2)).gradients == 2 * SMALL.params


def test_an_adapter_leaves_weights_and_little_else():
    memory = training_memory(MIDDLE, TrainingSetup(lora_rank=16, micro_batches=2))
    adapter = MIDDLE.lora_params(16)
    assert memory.weights == 2 * (MIDDLE.params + adapter)
    assert memory.optimizer == 12 * adapter and memory.gradients == 2 * adapter


def test_offloading_moves_what_is_kept_to_the_host():
    setup = TrainingSetup(ranks=8)
    here, there = training_memory(LARGE, setup), training_memory(LARGE, replace(setup, offload=True))
    assert there.kept == there.step == 0 and there.host == here.kept
    assert there.activations == here.activations and there.gathered == here.gathered


def test_a_cache_is_divided_until_each_gpu_has_one_head():
    """Qwen2.5-1.5B: 28 layers × 2 heads × 128 numbers, keys and values, 2 bytes."""
    assert cache_bytes_per_token(SMALL) == 28_672
    per_token = [serving_memory(SMALL, usable=80 * GIB, tensor_parallel=size).cache_per_token for size in (1, 2, 4)]
    assert per_token == [28_672, 14_336, 14_336]


# --- rates ---


def test_the_rates_that_were_measured_come_back():
    setup = TrainingSetup()
    rate = training_rate(SMALL, H200, Rates(), length=1024, action_share=0.7, setup=setup)
    assert rate == pytest.approx(51_950)
    step = decode_s(SMALL, H200, sequences=512, context=256, tensor_parallel=1)
    assert 512 / step == pytest.approx(66_334)


def test_a_second_measurement_is_met_within_a_tenth():
    """Qwen2.5-1.5B at 128 at a time: 3.50 ms per step (docs/log.md), which no constant was taken from."""
    step = decode_s(SMALL, H200, sequences=128, context=256, tensor_parallel=1)
    assert step == pytest.approx(3.50e-3, rel=0.1)


def test_small_models_are_not_promised_more_than_was_measured():
    tiny = SHAPES["135m"]
    setup = TrainingSetup()
    assert training_rate(tiny, H200, Rates(), length=1024, action_share=0.7, setup=setup) == 316_000
    assert decode_s(tiny, H200, sequences=1, context=256, tensor_parallel=1) == LEAST_DECODE_S


def test_checkpointing_costs_one_forward_pass_of_the_blocks():
    plain = training_flops(LARGE, 0, 0.0)
    assert training_flops(LARGE, 0, 0.0, checkpointing=True) == plain * 4 / 3
    assert training_flops(LARGE, 0, 0.0, is_lora=True) == plain * 2 / 3
    assert plain == 6 * LARGE.layers * LARGE.block_params


def test_a_measured_rate_is_taken_as_it_is_and_slowed_by_checkpointing():
    def rate(**changes):
        setup = TrainingSetup(**changes)
        return training_rate(MIDDLE, H200, Rates(training=9000), length=1024, action_share=0.7, setup=setup)

    assert rate() == 9000
    assert 9000 * 0.7 < rate(checkpointing=True) < 9000 * 0.8


def test_summing_after_every_micro_batch_sends_more():
    last = communication_s(MIDDLE, H200, TrainingSetup(ranks=8, micro_batches=4))
    every = communication_s(MIDDLE, H200, TrainingSetup(ranks=8, micro_batches=4, sync_gradients="every"))
    # 4 × (2 + 2) bytes of weights and 4 of gradients against 4 × 4 of them.
    assert every / last == pytest.approx((16 + 16) / (16 + 4))
    assert last == pytest.approx(20 * MIDDLE.params * 7 / 8 / 300e9)
    assert communication_s(MIDDLE, H200, TrainingSetup()) == 0.0
    assert offload_s(MIDDLE, TrainingSetup(ranks=8)) == 0.0


# --- the split ---


def test_the_plan_is_the_fastest_of_all_splits():
    plan = best_plan(MIDDLE, Job(), H200)
    others = [best_plan(MIDDLE, Job(), H200, wishes=PlanOptions(inference_gpus=n)) for n in range(1, 8)]
    assert plan.update_s == min(other.update_s for other in others if other.fits)
    assert plan.inference_gpus + plan.setup.ranks == 8


def test_slow_generation_gets_more_gpus():
    job = Job()
    slow = best_plan(SMALL, job, H200, rates=Rates(training=50_000, generation=5_000))
    fast = best_plan(SMALL, job, H200, rates=Rates(training=5_000, generation=50_000))
    assert slow.inference_gpus == 7 and fast.inference_gpus == 1


def test_measured_rates_give_the_seconds_that_can_be_worked_out_by_hand():
    """512 × 1280 tokens on 4 GPUs of 10,000 tokens/s, 512 × 1024 on 4 of 8,192."""
    rates, wishes = Rates(training=10_000, generation=8_192), PlanOptions(inference_gpus=4, checkpointing=False)
    plan = best_plan(SMALL, Job(), H200, rates=rates, wishes=wishes)
    assert plan.training_s == pytest.approx(512 * 1280 / 40_000)
    assert plan.generation_s == pytest.approx(16)
    assert plan.updates_per_h == pytest.approx(3600 / 16.384)
    assert plan.generated_per_s == pytest.approx(32_768) and plan.trained_per_s == pytest.approx(40_000)


def test_one_gpu_takes_turns_on_the_same_weights():
    plan = best_plan(SMALL, Job(), Hardware(gpus=1))
    assert plan.is_shared and plan.setup.ranks == 1 and plan.serving.weights == 0
    assert plan.update_s == plan.generation_s + plan.training_s
    assert plan.serving.cache == plan.hardware.usable_bytes - plan.training.peak


def test_gpus_of_one_copy_divide_its_heads():
    sizes = {size for _, size in divisions(SMALL, Hardware(gpus=16), PlanOptions())}
    assert sizes == {1, 2, 4}  # 12 heads


def test_no_more_sequences_run_than_there_are_rollouts_or_room():
    plan = best_plan(LARGE, Job(), Hardware(gpus=64))
    assert plan.sequences * plan.copies <= 512 + plan.copies
    assert plan.sequences * plan.job.mean_tokens <= plan.serving.tokens
    assert best_plan(SMALL, Job(concurrency=4), H200).sequences == 4


def test_settings_are_only_as_thrifty_as_they_have_to_be():
    assert not best_plan(SMALL, Job(), H200).setup.checkpointing
    large = best_plan(LARGE, Job(), Hardware(gpus=64))
    assert large.setup.checkpointing and not large.setup.offload
    assert best_plan(LARGE, Job(), H200).setup.offload


def test_what_was_wished_is_what_is_planned():
    wishes = PlanOptions(
        checkpointing=True, sync_gradients="every", micro_token_budget=8192, lora_rank=8, tensor_parallel=2
    )
    plan = best_plan(SMALL, Job(), H200, wishes=wishes)
    setup = plan.setup
    assert (setup.checkpointing, setup.sync_gradients, plan.budget, setup.lora_rank) == (True, "every", 8192, 8)
    assert plan.tensor_parallel == 2


# --- when it does not fit ---


def test_what_does_not_fit_is_said_with_what_helps():
    wishes, hardware = PlanOptions(offload=False), Hardware(gpus=8, memory_gib=80)
    plan = best_plan(LARGE, Job(), hardware, wishes=wishes)
    assert not plan.fits and plan.training_excess > 0
    helps = changes_that_help(LARGE, Job(), hardware, wishes=wishes)
    assert [change.what for change in helps] == [
        "offload to the host's memory", "train a LoRA adapter of rank 16", "32 GPUs",
    ]  # fmt: skip
    assert all(change.plan.fits for change in helps)


def test_settings_that_were_forbidden_are_among_what_helps():
    hardware = Hardware(gpus=4, memory_gib=40)
    wishes = PlanOptions(checkpointing=False, micro_token_budget=16_384)
    assert not best_plan(SMALL, Job(), hardware, wishes=wishes).fits
    found = {change.what for change in changes_that_help(SMALL, Job(), hardware, wishes=wishes)}
    assert {"checkpoint activations", "a smaller micro_token_budget"} <= found


def test_a_model_that_cannot_be_served_says_so():
    plan = best_plan(LARGE, Job(), Hardware(gpus=2, memory_gib=80))
    assert plan.serving_excess > 50 * GIB and not plan.fits


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Job(rollouts=100, group_size=8), "not whole groups of 8"),
        (lambda: Job(max_tokens=1000), "1280 tokens on average"),
        (lambda: Job(completion_tokens=0), "completion_tokens=0"),
        (lambda: Hardware(gpus=0), "gpus=0"),
        (lambda: Hardware(gpus=1, memory_gib=0), "memory_gib=0"),
        (lambda: Rates(training=0), "training rate is 0"),
        (lambda: TrainingSetup(offload=True), "ranks=1"),
        (lambda: TrainingSetup(action_share=0), "action_share=0"),
        (lambda: best_plan(SMALL, Job(), H200, wishes=PlanOptions(micro_token_budget=2048)), "longest sample of 4096"),
        (lambda: best_plan(SMALL, Job(), H200, wishes=PlanOptions(inference_gpus=8)), "at least one trains"),
        (lambda: best_plan(SMALL, Job(), H200, wishes=PlanOptions(tensor_parallel=8)), "no way to divide 8 GPUs"),
        (lambda: best_plan(SMALL, Job(), Hardware(gpus=1), wishes=PlanOptions(offload=True)), "two or more training GPUs"),
    ],
)  # fmt: skip
def test_impossible_wishes_are_errors_that_say_why(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
