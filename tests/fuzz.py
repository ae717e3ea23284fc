"""How many cases a fuzzer tries, from the options --fuzz-seed and --fuzz-cases."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Fuzz:
    """How many cases a fuzzer tries, and from which seed. A failing case is repeated with the flags that `at` prints."""

    seed: int
    wanted_cases: int | None
    is_default_tier: bool = False
    """Then a third is enough: another run has the rest."""

    def cases(self, default: int, *, least: int = 1) -> int:
        if self.wanted_cases is not None:
            return self.wanted_cases
        return max(least, default // 3) if self.is_default_tier else default

    def rng(self, case: int) -> Random:
        return Random(f"{self.seed} {case}")

    def at(self, case: int) -> str:
        return f"fuzz case {case}: run again with --fuzz-seed {self.seed} --fuzz-cases {case + 1}"
