"""The Tinker server's losses: values and gradients worked by hand, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from ludic.types import ConfigError
from ludic_tinker.server.losses import LOSSES, Row, check_rows, loss_of

LOG2 = math.log(2.0)


def loss_and_gradient(
    loss: str, ratios: list[float], rows: list[int] | None = None, config: Any = None, **inputs: Any
) -> tuple[float, list[float]]:
    """For tokens of the log-prob −2 whose probability is this many times the sampled one."""
    logps = torch.full((len(ratios),), -2.0, requires_grad=True)
    given = {"logprobs": -2.0 - torch.tensor(ratios).log()} if "weights" not in inputs else {}
    given |= {name: torch.tensor(values) for name, values in inputs.items()}
    row = torch.tensor(rows or [0] * len(ratios))
    total = loss_of(loss, logps, given, row, int(row.max()) + 1, config or {})
    total.backward()
    assert logps.grad is not None
    return float(total.detach()), logps.grad.tolist()


def test_cross_entropy():
    assert loss_and_gradient("cross_entropy", [1, 1], weights=[1.0, 0.5]) == (3.0, [-1.0, -0.5])


def test_importance_sampling():
    loss, gradient = loss_and_gradient("importance_sampling", [2, 0.5], advantages=[1.0, -4.0])
    assert loss == pytest.approx(-2 + 2)
    assert gradient == pytest.approx([-2.0, 2.0])


def test_ppo_clips_where_the_advantage_is_already_gained():
    # 2 · 1 and 0.5 · −1 are held at 1.2 and 0.8 and have no gradient; 0.5 · 1 and 2 · −1 are not.
    loss, gradient = loss_and_gradient("ppo", [2, 0.5, 0.5, 2], advantages=[1.0, -1.0, 1.0, -1.0])
    assert loss == pytest.approx(-1.2 + 0.8 - 0.5 + 2)
    assert gradient == pytest.approx([0, 0, -0.5, 2.0])


def test_ppo_takes_bounds_of_the_request_and_of_each_token():
    bounds = {"clip_low_threshold": 0.4, "clip_high_threshold": 1.5}
    loss, _ = loss_and_gradient("ppo", [2, 0.5], config=bounds, advantages=[1.0, -1.0])
    assert loss == pytest.approx(-1.5 + 0.5)
    loss, _ = loss_and_gradient("ppo", [2, 2], advantages=[1.0, 1.0], clip_high_threshold=[1.1, 3.0])
    assert loss == pytest.approx(-1.1 - 2)


def test_cispo_weighs_the_log_prob_by_the_held_ratio():
    loss, gradient = loss_and_gradient("cispo", [2, 1.0], advantages=[1.0, -1.0])
    assert loss == pytest.approx(1.2 * 2 - 2)
    assert gradient == pytest.approx([-1.2, 1.0])


def test_dro_adds_half_beta_times_the_squared_log_ratio():
    loss, gradient = loss_and_gradient("dro", [2, 1.0], config={"beta": 0.1}, advantages=[1.0, -1.0])
    assert loss == pytest.approx(2 + 0.05 * LOG2**2 - 2, abs=1e-6)
    assert gradient == pytest.approx([-1 + 0.1 * LOG2, 1.0])


def test_gspo_has_one_ratio_per_row_over_the_marked_tokens():
    # Row 0: the geometric mean of 4 and 1 is 2; its third token is not marked. Row 1: one.
    loss, gradient = loss_and_gradient(
        "gspo",
        [4, 1, 100, 1],
        [0, 0, 0, 1],
        {"clip_high_threshold": 3.0},
        advantages=[1.0, 0.5, 0.0, 1.0],
        sequence_ratio_mask=[1.0, 1.0, 0.0, 1.0],
    )
    assert loss == pytest.approx(-2 - 1 - 1)
    assert gradient == pytest.approx([-2.0, -1.0, 0.0, -1.0])


def test_an_enormous_ratio_stays_finite():
    logps = torch.zeros(1, requires_grad=True)
    given = {"logprobs": torch.tensor([-200.0]), "advantages": torch.tensor([0.0])}
    assert loss_of("importance_sampling", logps, given, torch.zeros(1).long(), 1, {}) == 0


# --- refusals ---


def row(length: int = 3, **changes: Any) -> Row:
    values = np.zeros(length, np.float32)
    given: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32),
        "targets": np.arange(length, dtype=np.int64),
        "inputs": {"logprobs": values, "advantages": values},
    }
    return Row(**{**given, **changes})


def checked(loss: str, *rows: Row, config: Any = None) -> None:
    check_rows(loss, rows, config or {}, vocab_size=10, max_tokens=8)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_loss_takes_is_accepted(loss: str):
    inputs = {name: np.zeros(3, np.float32) for name in LOSSES[loss].inputs}
    checked(loss, row(inputs=inputs), config=dict(LOSSES[loss].defaults))


NAN = {"logprobs": np.array([0, np.nan, 0], np.float32), "advantages": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("loss", "rows", "config", "said"),
    [
        ("sparkle", [row()], {}, "no loss 'sparkle' here. There are cross_entropy, importance_sampling"),
        ("stable_reinforce", [row()], {}, "this server does not"),
        ("custom", [row()], {}, "forward_backward_custom with a Python function works"),
        ("ppo", [], {}, "holds no data"),
        ("ppo", [row(), row(0)], {}, "Datum 1 of 2: its model input is empty"),
        ("ppo", [row(9)], {}, "9 tokens, more than the 8"),
        ("ppo", [row(targets=np.zeros(2, np.int64))], {}, r"3 tokens, but target_tokens has the shape \[2\]"),
        ("cross_entropy", [row(targets=np.zeros((3, 0), np.int64))], {}, r"target_tokens has the shape \[3, 0\]"),
        ("ppo", [row(targets=np.zeros((3, 2), np.int64))], {}, "ppo takes one target per token"),
        ("cross_entropy", [row()], {}, "takes the loss_fn_inputs target_tokens, weights; it was given target_tokens, adv"),
        ("ppo", [row(inputs={**row().inputs, "mask": np.zeros(3)})], {}, "it was given .*mask"),
        ("ppo", [row(inputs={**row().inputs, "logprobs": np.zeros(2)})], {}, r"logprobs has the shape \[2\]"),
        ("ppo", [row(), row(inputs={**row().inputs, "clip_low_threshold": np.zeros(3)})], {}, "but datum 0 has"),
        ("ppo", [row(tokens=np.array([1, 10, 2], np.int32))], {}, "model input holds the id 10; the model has 10 tokens"),
        ("ppo", [row(targets=np.array([1, -1, 2]))], {}, "target_tokens holds the id -1"),
        ("ppo", [row(inputs=NAN)], {}, "logprobs holds NaN"),
        ("ppo", [row()], {"beta": 1.0}, r"no settings beta .* clip_low_threshold \(default 0.8\)"),
        ("dro", [row()], {"beta": "much"}, "'much'; it must be a finite number"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused(loss: str, rows: list[Row], config: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        checked(loss, *rows, config=config)
