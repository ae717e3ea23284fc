"""How many CPU threads a small model should use: measured, not guessed.

More threads help large matrices; small ones lose more in waiting for each other than they gain, and on a machine whose cores
are busy with something else two threads can be several times slower than one.
"""

import os
import time
from statistics import median

import torch

_WIDTH, _TOKENS, _LAYERS = 128, 2048, 8
_ROUNDS = 7


def use_fastest_num_threads(most: int | None = None) -> int:
    """Try 1, 2, 4 … threads on work like a small model's, keep the fastest, and return how many that is.

    `most` is, where it is not given, what OMP_NUM_THREADS allows, else the number of cores.
    """
    most = most or int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    candidates = [1]
    while candidates[-1] * 2 <= most:
        candidates.append(candidates[-1] * 2)
    # In turns: whatever else the machine does for a moment should not fall on one candidate alone.
    rounds = [{number: _time_steps(number) for number in candidates} for _ in range(_ROUNDS)]
    best = min(candidates, key=lambda number: median(seconds[number] for seconds in rounds))
    torch.set_num_threads(best)
    return best


def _time_steps(num_threads: int, repeats: int = 3) -> float:
    """The middle of a few forward and backward passes."""
    torch.set_num_threads(num_threads)
    weights = [torch.randn(_WIDTH, _WIDTH, requires_grad=True) for _ in range(_LAYERS)]
    inputs = torch.randn(_TOKENS, _WIDTH)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        hidden = inputs
        for weight in weights:
            hidden = torch.nn.functional.silu(hidden @ weight) * 0.1
        hidden.sum().backward()
        times.append(time.perf_counter() - started)
    return median(times[1:])  # the first one also starts the threads
