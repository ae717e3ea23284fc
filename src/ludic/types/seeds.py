"""Seeds: one number per episode, and everything else derived from it.

Adding an index to a base seed makes neighbours collide (seed 7, call 1 = seed 8, call 0). Mixing does not.
"""

_MASK = (1 << 64) - 1
_SEED_BITS = 48  # exact in JSON readers that only have doubles, and inside every backend's range


def _mix(x: int) -> int:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_seed(base: int, *path: int) -> int:
    """A seed for one place below `base`, for instance (turn, call).

    Give at least one index. Same arguments, same seed, on every machine.
    """
    state = base
    for index in path:
        # The multiplication tells (a, b) from (b, a).
        state = _mix((state * 0xD1342543DE82EF95 + index) & _MASK)
    return state >> (64 - _SEED_BITS)
