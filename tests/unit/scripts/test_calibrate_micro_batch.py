"""The budget finder: the search by itself, real steps on a tiny model, and what it says when it cannot."""

import re
import signal
import time
from pathlib import Path

import pytest
import torch

from scripts import calibrate_micro_batch as script
from tests import forked

SCRIPT = Path(__file__).parents[3] / "scripts" / "calibrate_micro_batch.py"


TINY = ["tiny", "--hidden-size", "16", "--layers", "1", "--heads", "2", "--vocab-size", "32", "--max-seq-len", "32"]
TINY += ["--device", "cpu"]


@pytest.mark.parametrize("limit", [100, 101, 137, 1000, 5000])
def test_the_search_finds_the_limit_from_below_within_a_sixteenth(limit):
    tried = []

    def fits(budget):
        tried.append(budget)
        return budget <= limit

    found = script.search(fits, smallest=100, largest=1 << 20)
    assert limit * 16 / 17 - 1 <= found <= limit
    assert len(tried) == len(set(tried)) < 20


def test_the_search_ends_at_the_largest_budget_it_may_try():
    tried = []
    assert script.search(lambda budget: tried.append(budget) is None, smallest=100, largest=350) == 350
    assert tried == [100, 200, 350]


@pytest.mark.parametrize(("best", "recommended"), [(4096, 3648), (1000, 896), (520, 512), (512, 512)])
def test_the_recommendation_keeps_a_tenth_and_holds_a_sample(best, recommended):
    assert script.recommended(best, 512) == recommended


@pytest.mark.parametrize("num_tokens", [64, 65, 66, 100])
def test_the_samples_of_a_trial_fill_two_micro_batches(num_tokens):
    from ludic.training.learner.packing import split_packed

    items = script.samples(num_tokens, 32, 16) * 2
    bins = split_packed(items, num_tokens)
    tokens = num_tokens - (num_tokens % 32 == 1)  # a sample of one token has nothing to predict
    assert [sum(len(item.input_ids) for item in members) for members in bins] == [tokens, tokens]


def test_a_tiny_model_is_calibrated_by_real_steps(capsys):
    assert script.main([*TINY, "--max-budget", "128"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^ +(\d+)  yes", printed, flags=re.MULTILINE) == ["32", "64", "128"]
    assert (
        "TrainerConfig(max_seq_len=32, micro_token_budget=64)  # at least 10% less than the 128 that fitted" in printed
    )


def test_a_trial_leaves_the_weights_as_they_were():
    model = script.build_model(script.parse(TINY))
    before = [p.detach().clone() for p in model.parameters()]
    script.Step(model, 32).run(64)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_limit_that_is_too_small_is_noticed_and_says_what_to_do(capsys):
    assert script.main([*TINY, "--memory-limit-gb", "0.01"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^ +32  no ", printed, flags=re.MULTILINE) and "Lower --max-seq-len" in printed


def test_the_limit_stops_a_forward_pass_before_it_is_over():
    model = script.build_model(script.parse([*TINY, "--layers", "3"]))
    memory = script.CpuMemory(model, limit_gb=0.01)
    entered = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: entered.append(1))
    with pytest.raises(script.OverLimit), memory.watched():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert not entered
    model(torch.zeros(1, 4, dtype=torch.long))  # outside a trial nothing is stopped
    assert entered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--max-seqlen", "32"], "unrecognized arguments: --max-seqlen"),
        (["tiny", "--max-seq-len", "1"], "1 is less than 2"),
        (["tiny", "--max-seq-len", "64", "--max-budget", "32"], "--max-budget 32 is less than --max-seq-len 64"),
        (["tiny", "--memory-limit-gb", "-3"], "-3 is not an amount of memory"),
        ([], "the following arguments are required: model"),
    ],
    ids=str,
)
def test_a_mistake_in_the_arguments_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tny"], "Did you mean 'tiny'?"),
        (["smollm-135m"], "Did you mean 'smollm2-135m'?"),
        (["nowhere.gguf"], "There is no GGUF file at nowhere.gguf"),
        (["tiny", "--hidden-size", "10", "--heads", "4"], "--hidden-size 10 cannot be split into --heads 4"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_had_is_one_line(arguments, message, capsys):
    assert script.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("calibrate_micro_batch: ") and message in line


@pytest.mark.slow
def test_ctrl_c_prints_what_is_known_so_far():
    process = forked.python(SCRIPT, *TINY, "--hidden-size", "64", "--max-budget", "1000000000")
    while process.said().count("\n") < 4:  # what is tried, the heading, two budgets
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "" and " yes " in printed.splitlines()[3]
    assert "Interrupted" in printed and "TrainerConfig(max_seq_len=32, micro_token_budget=" in printed
