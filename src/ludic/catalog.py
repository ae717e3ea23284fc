"""The catalogue of built-in parts: kind -> name -> import path.

Pure data. Targets are "module:attribute" strings, so that listing them imports nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

CutOff: TypeAlias = Literal["reject", "read"]
Unreadable: TypeAlias = Literal["go_on", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggested:
    """Suggested settings of an env; commands use them as defaults."""

    agent: str = "agent"
    """Registered agent; it must call tools if the env offers some."""
    agent_args: Mapping[str, Any] = field(default_factory=dict)
    parser: str = "raw"
    parser_args: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 32
    """Turns of an episode."""
    max_tokens: int = 256
    """Tokens of one reply."""
    cut_off: CutOff = "reject"
    """A reply that hit max_tokens is rejected, or parsed."""
    unreadable: Unreadable = "go_on"
    """After a reply that cannot be parsed the episode continues, or stops."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One part: of this catalogue, or of a package whose entry point names it."""

    target: str | Callable[..., Any]
    """The factory, or "module:attribute", imported on first use."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for a small instance, if the entry needs arguments; docs and tests use them."""
    bind: bool = False
    """The target is the part itself (a parser, a tool) and not its factory; arguments are bound to it."""
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


# An untrained model writes text around its move; the last cell it names is the move.
_CELL = Suggested(
    parser="pattern", parser_args={"pattern": r"\b[ABC][123]\b"}, max_steps=5, max_tokens=12, cut_off="read"
)

_ALGORITHMS = (
    "grpo", "dr_grpo", "maxrl", "echo", "gdpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "gigpo", "rloo", "reinforce",
    "reinforce_baseline", "reinforce_pp", "ppo", "scalerl", "sft", "rft", "dpo", "ipo", "kto", "proposer_solver", "fold_grpo",
    "opd", "grpo_opd", "mopd",
)  # fmt: skip

BUILTINS: Mapping[str, Mapping[str, Entry]] = {
    "env": {
        "tic_tac_toe": Entry("ludic.envs.tic_tac_toe:TicTacToeEnv", suggested=replace(_CELL, unreadable="stop")),
        "tic_tac_toe_duel": Entry("ludic.envs.tic_tac_toe:TicTacToeDuel", suggested=replace(_CELL, max_steps=9)),
        "gsm8k": Entry(
            "ludic.envs.gsm8k:GSM8KEnv",
            example={"sample": _GSM8K_SAMPLE},
            suggested=Suggested(parser="final_number", max_steps=1, max_tokens=512),
        ),
        "math": Entry(
            "ludic.envs.math:MATHEnv",
            example={"sample": _MATH_SAMPLE},
            suggested=Suggested(parser="boxed", max_steps=1, max_tokens=768),
        ),
        "key_door": Entry("ludic.envs.key_door:KeyDoorEnv", suggested=Suggested(max_steps=64, max_tokens=8)),
    },
    "agent": {
        "agent": Entry("ludic.agents:Agent"),
        "tool_agent": Entry("ludic.agents:ToolAgent"),
        "react": Entry("ludic.agents:ReActAgent"),
        "call_agent": Entry("ludic.agents:CallAgent"),
        "retool": Entry("ludic.agents:ReToolAgent"),
        "branching": Entry("ludic.agents:BranchingAgent"),
        "folding": Entry("ludic.agents:FoldingAgent"),
        "folding_react": Entry("ludic.agents:FoldingReActAgent"),
    },
    "context": {
        "full_dialog": Entry("ludic.context:FullDialog"),
        "truncated_thinking": Entry("ludic.context:TruncatedThinkingContext"),
        "sliding_window": Entry("ludic.context:SlidingWindow"),
        "summarised": Entry("ludic.context:SummarisedDialog"),
    },
    "protocol": {
        "single_agent": Entry("ludic.interaction:SingleAgentProtocol"),
        "multi_agent": Entry("ludic.interaction:MultiAgentProtocol"),
        "delegating": Entry("ludic.interaction:DelegatingProtocol"),
    },
    "parser": {
        "raw": Entry("ludic.parsers:raw_parser", bind=True),
        "xml": Entry("ludic.parsers:xml_parser", example={"tag": "move"}),
        "xml_tag": Entry("ludic.parsers:xml_tag_parser", example={"tag": "move"}),
        "think_prefix": Entry("ludic.parsers:think_prefix_parser", bind=True),
        "boxed": Entry("ludic.parsers:boxed_parser", bind=True),
        "final_number": Entry("ludic.parsers:final_number_parser", bind=True),
        "pattern": Entry("ludic.parsers:pattern_parser", example={"pattern": "[ABC][123]"}),
    },
    "tool": {
        "calculator": Entry("ludic.tools.calculator:calculator", bind=True),
    },
    "reward": {
        "length": Entry("ludic.rewards.shaping:LengthPenalty"),
        "overlong": Entry("ludic.rewards.shaping:SoftOverlong", example={"max_tokens": 256}),
        "shorter": Entry("ludic.rewards.shaping:ShorterThanSiblings"),
    },
    "filter": {
        name: Entry(f"ludic.training.filters:{name}", bind=True)
        for name in (
            "drop_truncated",
            "drop_incomplete_completions",
            "drop_parse_errors",
            "keep_env_steps",
            "keep_agent_steps",
        )
    },
    "curriculum": {
        "uniform": Entry("ludic.batch_gen.requests.curriculum:UniformCurriculum"),
        "easiest_first": Entry("ludic.batch_gen.requests.curriculum:EasiestFirstCurriculum"),
        "success_band": Entry("ludic.batch_gen.requests.curriculum:SuccessBandCurriculum"),
        "prioritised": Entry("ludic.batch_gen.requests.curriculum:PrioritisedCurriculum"),
        "rising_difficulty": Entry("ludic.batch_gen.requests.streams:RisingDifficultyCurriculum"),
    },
    "logger": {
        "rich": Entry("ludic.training.loggers:RichLiveLogger"),
        "print": Entry("ludic.training.loggers:PrintLogger"),
        "tensorboard": Entry("ludic.training.loggers:TensorBoardLogger"),
        "wandb": Entry("ludic.training.loggers:WandbLogger"),
        "trackio": Entry("ludic.training.loggers:TrackioLogger"),
    },
    "algorithm": {name: Entry(f"ludic.training.algorithms:make_{name}") for name in _ALGORITHMS}
    | {"spo": Entry("ludic.training.algorithms:spo_algorithm")},
}

PACKAGES: Mapping[str, Mapping[str, str]] = {
    "env": {"game_boy": "ludic-game-boy", "rustorio": "ludic-rustorio"},
    "agent": {"game_boy": "ludic-game-boy"},
}
"""Parts of this repository in separate packages: kind -> id -> distribution. The package of `ludic-x-y` is in
environments/x_y; its parts are found through entry points, as those of any package, but keep their short ids."""
