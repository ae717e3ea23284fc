"""Seeds: one number per episode, and everything else derived from it.

Adding an index to a base seed makes neighbours collide (seed 7, call 1 = seed 8, call 0). Mixing does not. The embedded engine
computes the same function on tensors and in its GPU kernel (ludic.inference.local.sampling), from the constants here.
"""

_MASK = (1 << 64) - 1
SEED_BITS = 48
"""Exact in JSON readers that only have doubles, and inside every backend's range."""
STEP_FACTOR = 0xD1342543DE82EF95
"""The multiplication by it tells (a, b) from (b, a)."""
MIX_CONSTANTS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX_SHIFTS = (30, 27, 31)


def _mix(x: int) -> int:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    increment, first, second = MIX_CONSTANTS
    x = (x + increment) & _MASK
    x = ((x ^ (x >> MIX_SHIFTS[0])) * first) & _MASK
    x = ((x ^ (x >> MIX_SHIFTS[1])) * second) & _MASK
    return x ^ (x >> MIX_SHIFTS[2])


def derive_seed(base: int, *path: int) -> int:
    """A seed for one place below `base`, for instance (turn, call).

    Give at least one index. Same arguments, same seed, on every machine.
    """
    state = base
    for index in path:
        state = _mix((state * STEP_FACTOR + index) & _MASK)
    return state >> (64 - SEED_BITS)
