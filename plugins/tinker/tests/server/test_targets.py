"""Log-probs of targets with adapters on the output layer: the values and gradients of autograd over whole logits."""

import pytest
import torch
from torch import Tensor, nn

from ludic.models.head import Head
from ludic_tinker.server import targets
from ludic_tinker.server.targets import HeadAdapter, TargetLogps

T, D, V, R = 11, 6, 17, 2


def two_adapters() -> list[HeadAdapter]:
    """On tokens 2 to 4 and 6 to 10; the others have none."""
    torch.manual_seed(1)
    return [
        HeadAdapter(start, end, nn.Parameter(torch.randn(R, D)), nn.Parameter(torch.randn(V, R)), scale)
        for start, end, scale in ((2, 5, 0.5), (6, 11, 2.0))
    ]


def whole_logits(hidden_TD: Tensor, linear: nn.Linear, head: Head, adapters: list[HeadAdapter]) -> Tensor:
    x_TD = hidden_TD * head.scale
    logits_TV = linear(x_TD)
    for start, end, a_RD, b_VR, scale in adapters:
        own = torch.zeros(T, 1)
        own[start:end] = scale
        logits_TV = logits_TV + own * (x_TD @ a_RD.t() @ b_VR.t())
    return logits_TV if head.softcap is None else torch.tanh(logits_TV / head.softcap) * head.softcap


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("chunk", [V, 4 * V, 1 << 20])
def test_values_and_gradients_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, kept: int, chunk: int
):
    monkeypatch.setattr(targets, "_KEPT_ELEMENTS", kept)
    monkeypatch.setattr(targets, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    linear = nn.Linear(D, V).requires_grad_(False)
    head = Head(linear, softcap, 0.7)
    hidden_TD = torch.randn(T, D, requires_grad=True)
    token_P = torch.tensor([3, 0, 0, 4, 7, 7, 10, 5, 3, 9])  # in any order; several of one token; none of some
    target_P = torch.tensor([1, 2, 2, 4, 16, 0, 7, 7, 9, 3])
    grad_P = torch.randn(10)
    grad_P[[1, 9]] = 0.0
    found, expected = two_adapters(), two_adapters()
    mine = TargetLogps(hidden_TD, head, found, token_P, target_P, for_backward=True)
    logps_P = whole_logits(hidden_TD, linear, head, expected).log_softmax(-1)[token_P, target_P]
    torch.testing.assert_close(mine.logps_P, logps_P)
    logps_P.backward(grad_P)
    torch.testing.assert_close(mine.backward(grad_P), hidden_TD.grad)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.a_RD.grad, other.a_RD.grad)
        torch.testing.assert_close(own.b_VR.grad, other.b_VR.grad)
