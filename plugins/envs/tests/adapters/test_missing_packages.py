"""A package that is not installed is named with the extra that brings it."""

import sys

import pytest

from ludic.types import MissingExtra
from ludic_envs.adapters.gymnasium import GymnasiumEnv
from ludic_envs.adapters.pettingzoo import PettingZooEnv
from ludic_envs.adapters.reasoning_gym import ReasoningGymEnv
from ludic_envs.adapters.textarena import TextArenaEnv
from ludic_envs.adapters.verifiers import VerifiersEnv
from ludic_envs.search import DocumentSearch


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("gymnasium", "gymnasium", lambda: GymnasiumEnv("FrozenLake-v1")),
        ("pettingzoo", "pettingzoo", lambda: PettingZooEnv("classic.tictactoe_v3")),
        ("textarena", "textarena", lambda: TextArenaEnv("TicTacToe-v0")),
        ("verifiers", "verifiers", lambda: VerifiersEnv("anything")),
        ("reasoning_gym", "reasoning-gym", lambda: ReasoningGymEnv("chain_sum")),
        ("bm25s", "search", lambda: DocumentSearch(["a text"])),
    ],
)
def test_missing_package_is_named_with_its_extra(monkeypatch, package, extra, make):
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"ludic-rl\[{extra}\]"):
        make()
