"""Everything built in, on one page: kind -> name -> where it lives.

Pure data. Targets are "module:attribute" strings, so that listing what there is imports nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Builtin:
    """One entry of the catalogue."""

    target: str
    example: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for a small instance, where the entry cannot be made without any; people and tests use it."""
    bind: bool = False
    """The target is the thing itself (a parser, a tool), not a factory of it; arguments are bound to it."""


_GSM8K_SAMPLE = {
    "id": "example",
    "question": "A crate holds 12 jars and each jar holds 9 plums. Half of the plums are eaten. How many are left?",
    "answer": "There are 12 * 9 = 108 plums.\nHalf of them is 108 / 2 = 54.\n#### 54",
}
_MATH_SAMPLE = {
    "id": "example",
    "problem": "What is the sum of the reciprocals of the roots of $x^2 - 6x + 4 = 0$?",
    "solution": "The sum of the roots is 6 and their product is 4, so the sum is $\\boxed{\\frac{3}{2}}$.",
}

BUILTINS: Mapping[str, Mapping[str, Builtin]] = {
    "env": {
        "tic_tac_toe": Builtin("ludic.envs.tic_tac_toe:TicTacToeEnv"),
        "tic_tac_toe_duel": Builtin("ludic.envs.tic_tac_toe:TicTacToeDuel"),
        "gsm8k": Builtin("ludic.envs.gsm8k:GSM8KEnv", example={"sample": _GSM8K_SAMPLE}),
        "math": Builtin("ludic.envs.math:MATHEnv", example={"sample": _MATH_SAMPLE}),
        "key_door": Builtin("ludic.envs.key_door:KeyDoorEnv"),
        "twenty_forty_eight": Builtin("ludic.envs.twenty_forty_eight:TwentyFortyEightEnv"),
        "prisoners_dilemma": Builtin("ludic.envs.prisoners_dilemma:PrisonersDilemmaEnv"),
    },
    "agent": {
        "agent": Builtin("ludic.agents:Agent"),
        "tool_agent": Builtin("ludic.agents:ToolAgent"),
        "react": Builtin("ludic.agents:ReActAgent"),
    },
    "context": {
        "full_dialog": Builtin("ludic.context:FullDialog"),
        "truncated_thinking": Builtin("ludic.context:TruncatedThinkingContext"),
        "sliding_window": Builtin("ludic.context:SlidingWindow"),
    },
    "protocol": {
        "single_agent": Builtin("ludic.interaction:SingleAgentProtocol"),
        "multi_agent": Builtin("ludic.interaction:MultiAgentProtocol"),
        "delegating": Builtin("ludic.interaction:DelegatingProtocol"),
    },
    "parser": {
        "raw": Builtin("ludic.parsers:raw_parser", bind=True),
        "xml": Builtin("ludic.parsers:xml_parser", example={"tag": "move"}),
        "xml_tag": Builtin("ludic.parsers:xml_tag_parser", example={"tag": "move"}),
        "think_prefix": Builtin("ludic.parsers:think_prefix_parser", bind=True),
        "boxed": Builtin("ludic.parsers:boxed_parser", bind=True),
    },
    "tool": {
        "calculator": Builtin("ludic.tools.calculator:calculator", bind=True),
    },
    "algorithm": {
        name: Builtin(f"ludic.training.algorithms:make_{name}")
        for name in (
            "grpo",
            "dr_grpo",
            "dapo",
            "gspo",
            "cispo",
            "sapo",
            "gmpo",
            "rloo",
            "reinforce",
            "reinforce_baseline",
            "reinforce_pp",
            "ppo",
            "scalerl",
            "sft",
        )
    },
}
