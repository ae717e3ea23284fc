"""The fused pass of a small model as CUDA graphs: there a GPU computes a layer faster than Python launches it.

A pass over a shape that was seen before is captured once, its forward and its backward, over fixed memory; after that, two
launches run it. Tokens, sequences and the longest sequence are rounded up to few shapes: padding is further sequences, whose
gradient is zero. All graphs of a decoder share the memory between them, so only one pass at a time runs through them;
another one meanwhile is launched kernel by kernel, as are shared prefixes.
"""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.models.execution import CAPTURING, MAX_LAUNCHED_WEIGHTS
from ludic.models.packed_attention import PackedSequences, to_device

logger = logging.getLogger(__name__)

_MAX_MEMORY_SHARE = 0.1
"""Share of the GPU's memory for what the layers store: graphs never give it back."""
_MAX_GRAPHS = 16
_MIN_TOKENS = 512


# Letters: T flat tokens, N hidden size, D head size, S sequences.
class PassGraphs:
    """The graphs of one decoder, by shape."""

    def __init__(self) -> None:
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._memory: Any = None
        self._grads: dict[tuple[bool, ...], Tensor] = {}
        self._holder: Callable[[], HeldGraphs | None] = lambda: None
        self._is_off = False

    def take(
        self, decoder: Any, run: Any, x_TN: Tensor, parameters: Sequence[Any], needs: tuple[bool, ...]
    ) -> "HeldGraphs | None":
        """The graphs for this pass, until its backward is through; None: launch it kernel by kernel."""
        is_kept = not run.recomputes and run.host is None
        if self._is_off or not is_kept or not isinstance(run.state, PackedSequences) or self._holder() is not None:
            return None
        lengths = run.state.lengths
        shape = _rounded_shape(lengths)
        if not _is_worth(decoder, shape[0], x_TN, parameters):
            return None
        key = (*shape, needs)
        captured = self._captured.get(key)
        if captured is not None and not captured.reads(parameters):
            self._captured.clear()  # the weights lie elsewhere now
            captured = None
        if captured is None:
            self._seen[key] += 1
            if self._seen[key] < 2 or len(self._captured) >= _MAX_GRAPHS:
                return None
            captured = self._capture(decoder, shape, run, x_TN, parameters, needs)
            if captured is None:
                return None
            self._captured[key] = captured
        held = HeldGraphs(captured, lengths)
        self._holder = weakref.ref(held)
        return held

    def _capture(self, decoder: Any, shape: tuple[int, int, int], *what: Any) -> "_Captured | None":
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            with CAPTURING, torch.no_grad():
                return _Captured(self._memory, self._grads, decoder, shape, *what)
        except RuntimeError as error:
            self._is_off = True
            self._captured.clear()
            logger.warning("The training pass is launched kernel by kernel: capturing it failed (%s)", error)
            return None


class HeldGraphs:
    """The graphs of one shape, for one pass."""

    def __init__(self, captured: "_Captured", lengths: Sequence[int]) -> None:
        self._captured = captured
        self._lengths = lengths

    def forward(self, run: Any, x_TN: Tensor) -> Tensor:
        return self._captured.forward(run, x_TN, self._lengths)

    def backward(self, grad_TN: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        return self._captured.backward(grad_TN)


class _Captured:
    """Forward and backward of one shape."""

    def __init__(
        self,
        memory: Any,
        shared_grads: dict[tuple[bool, ...], Tensor],
        decoder: Any,
        shape: tuple[int, int, int],
        run: Any,
        x_TN: Tensor,
        parameters: Sequence[Any],
        needs: tuple[bool, ...],
    ) -> None:
        num_tokens, num_sequences, self._longest = shape
        self._addresses = _addresses(parameters)
        self._needs = needs
        self._x_TN, self._grad_TN = (x_TN.new_zeros(num_tokens, x_TN.shape[1]) for _ in range(2))
        self._cosines_TD, self._sines_TD = (
            table.new_zeros(num_tokens, table.shape[1]) for table in (run.cosines_TD, run.sines_TD)
        )
        bounds = _padded_bounds([], num_tokens, num_sequences, self._longest)
        self._bounds = to_device(bounds, x_TN.device)
        state = PackedSequences.at(self._bounds, self._longest)
        fixed = replace(run, cosines_TD=self._cosines_TD, sines_TD=self._sines_TD, state=state)
        wanted = [p for p, is_needed in zip(parameters, needs, strict=True) if is_needed]
        if needs not in shared_grads:
            shared_grads[needs] = x_TN.new_empty(sum(p.numel() for p in wanted))
        self._flat, self._shapes = shared_grads[needs], wanted
        places = torch._utils._unflatten_dense_tensors(self._flat, wanted) if wanted else ()

        def forward() -> tuple[Tensor, Any]:
            found: tuple[Tensor, Any] = decoder.forward(fixed, self._x_TN, parameters)
            return found

        def backward(tape: Any) -> Tensor:
            grad_x_TN, grads = decoder.backward(fixed, tape, self._grad_TN, parameters, needs)
            if places:
                torch._foreach_copy_(list(places), [grad for grad in grads if grad is not None])
            found: Tensor = grad_x_TN
            return found

        _warm_up(lambda: backward(forward()[1]))
        self._replay_forward, (self._hidden_TN, tape) = _record(forward, memory)
        self._replay_backward, self._grad_x_TN = _record(lambda: backward(tape), memory)

    def reads(self, parameters: Sequence[Any]) -> bool:
        """True if the weights are where they were."""
        return self._addresses == _addresses(parameters)

    def forward(self, run: Any, x_TN: Tensor, lengths: Sequence[int]) -> Tensor:
        _fill(self._x_TN, x_TN)
        _fill(self._cosines_TD, run.cosines_TD)
        _fill(self._sines_TD, run.sines_TD)
        bounds = _padded_bounds(lengths, len(self._x_TN), len(self._bounds) - 1, self._longest)
        self._bounds.copy_(to_device(bounds, self._bounds.device))
        self._replay_forward()
        return self._hidden_TN[: len(x_TN)].clone()

    def backward(self, grad_TN: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        _fill(self._grad_TN, grad_TN)
        self._replay_backward()
        # Copies: the next replay overwrites these.
        found = iter(torch._utils._unflatten_dense_tensors(self._flat.clone(), self._shapes) if self._shapes else ())
        grads = [next(found) if is_needed else None for is_needed in self._needs]
        return self._grad_x_TN[: len(grad_TN)].clone(), grads


def _warm_up(work: Callable[[], Any]) -> None:
    """Compile and load its kernels, which a capture cannot."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


def _record(work: Callable[[], Any], memory: Any) -> tuple[Callable[[], None], Any]:
    """Capture it: what runs it again, and where its results will lie."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads allocate meanwhile, which would invalidate a capture in the default mode.
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


def _is_worth(decoder: Any, num_tokens: int, x_TN: Tensor, parameters: Sequence[Any]) -> bool:
    """True if Python would take longer to launch the pass than the GPU to compute it, and there is memory to hold."""
    num_weights = sum(p.numel() for p in parameters[: len(parameters) // decoder.num_layers] if p is not None)
    memory = torch.cuda.get_device_properties(x_TN.device).total_memory if x_TN.is_cuda else math.inf
    stored = num_tokens * decoder.stored_bytes_per_token
    return num_weights <= MAX_LAUNCHED_WEIGHTS and stored <= _MAX_MEMORY_SHARE * memory


def _rounded_shape(lengths: Sequence[int]) -> tuple[int, int, int]:
    """(tokens, sequences, longest) of the graph that serves sequences of these lengths."""
    num_tokens, longest = sum(lengths), _power_of_two(max(lengths))
    step = max(_MIN_TOKENS, _power_of_two(num_tokens) // 16)
    tokens = -(-num_tokens // step) * step
    num_padding = -(-(tokens - num_tokens) // longest)
    return tokens, _power_of_two(len(lengths) + num_padding), longest


def _padded_bounds(lengths: Sequence[int], num_tokens: int, num_sequences: int, longest: int) -> np.ndarray:
    """[S + 1]: where sequences begin and end; then those of padding, and empty ones."""
    used = np.concatenate([[0], np.cumsum(lengths)])
    padding = np.arange(used[-1] + longest, num_tokens, longest)
    bounds = np.full(num_sequences + 1, num_tokens, dtype=np.int32)
    bounds[: len(used)] = used
    bounds[len(used) : len(used) + len(padding)] = padding
    return bounds


def _fill(whole: Tensor, part: Tensor) -> None:
    """Copy it, and zeros behind it."""
    whole[: len(part)].copy_(part)
    if len(part) < len(whole):
        whole[len(part) :].zero_()


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _addresses(parameters: Sequence[Any]) -> list[int]:
    return [0 if p is None else p.data_ptr() for p in parameters]
