"""Everything built in, on one page: kind -> name -> where it lives.

Pure data. Targets are "module:attribute" strings, so that listing what there is imports nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

CutOff: TypeAlias = Literal["reject", "read"]
Unreadable: TypeAlias = Literal["go_on", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggested:
    """How an env is best played; what a command takes where its user does not say."""

    parser: str = "raw"
    parser_args: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 32
    """Turns of an episode."""
    max_tokens: int = 256
    """Tokens of one reply."""
    cut_off: CutOff = "reject"
    """What becomes of a reply that ran out of tokens."""
    unreadable: Unreadable = "go_on"
    """What becomes of an episode after a reply that cannot be read."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """One entry of the catalogue."""

    target: str
    example: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for a small instance, where the entry cannot be made without any; people and tests use it."""
    bind: bool = False
    """The target is the thing itself (a parser, a tool), not a factory of it; arguments are bound to it."""
    suggested: Suggested = Suggested()
    """For envs."""


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

# A model that has never played talks around its move; the last cell it names is the one it means.
_CELL = Suggested(
    parser="pattern", parser_args={"pattern": r"\b[ABC][123]\b"}, max_steps=5, max_tokens=12, cut_off="read"
)

BUILTINS: Mapping[str, Mapping[str, Builtin]] = {
    "env": {
        "tic_tac_toe": Builtin("ludic.envs.tic_tac_toe:TicTacToeEnv", suggested=replace(_CELL, unreadable="stop")),
        "tic_tac_toe_duel": Builtin("ludic.envs.tic_tac_toe:TicTacToeDuel", suggested=replace(_CELL, max_steps=9)),
        "gsm8k": Builtin(
            "ludic.envs.gsm8k:GSM8KEnv",
            example={"sample": _GSM8K_SAMPLE},
            suggested=Suggested(parser="final_number", max_steps=1, max_tokens=512),
        ),
        "math": Builtin(
            "ludic.envs.math:MATHEnv",
            example={"sample": _MATH_SAMPLE},
            suggested=Suggested(parser="boxed", max_steps=1, max_tokens=768),
        ),
        "key_door": Builtin("ludic.envs.key_door:KeyDoorEnv", suggested=Suggested(max_steps=64, max_tokens=8)),
        "twenty_forty_eight": Builtin(
            "ludic.envs.twenty_forty_eight:TwentyFortyEightEnv", suggested=Suggested(max_steps=512, max_tokens=8)
        ),
        "prisoners_dilemma": Builtin(
            "ludic.envs.prisoners_dilemma:PrisonersDilemmaEnv", suggested=Suggested(max_steps=32, max_tokens=8)
        ),
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
        "final_number": Builtin("ludic.parsers:final_number_parser", bind=True),
        "pattern": Builtin("ludic.parsers:pattern_parser", example={"pattern": "[ABC][123]"}),
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
