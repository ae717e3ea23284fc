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
    """Whether a reply that hit max_tokens is rejected or parsed."""
    unreadable: Unreadable = "go_on"
    """Whether the episode continues after a reply that cannot be parsed."""


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

_MUSIQUE_SAMPLE = {
    "id": "example",
    "question": "In which year was the founder of the Alder Street Observatory born?",
    "answer": "1871",
    "answer_aliases": ["in 1871"],
    "decomposition": [
        {"question": "Who founded the Alder Street Observatory?", "answer": "Ida Morrow"},
        {"question": "In which year was #1 born?", "answer": "1871"},
    ],
    "paragraphs": [
        {
            "title": "Alder Street Observatory",
            "text": "The Alder Street Observatory is a small public observatory. It was founded by Ida Morrow in 1902.",
            "is_supporting": True,
        },
        {
            "title": "Ida Morrow",
            "text": "Ida Morrow (1871 to 1940) was an astronomer and a maker of lenses.",
            "is_supporting": True,
        },
        {
            "title": "Alder",
            "text": "Alders are trees of the birch family. They grow along streams and on wet ground.",
            "is_supporting": False,
        },
        {
            "title": "Samuel Morrow",
            "text": "Samuel Morrow, born in 1868, was a painter of harbours and ships.",
            "is_supporting": False,
        },
    ],
}

_PROGRAM_SAMPLE = {
    "id": "example",
    "question": "Read a whole number n and then n whole numbers, one per line. Write the largest of them.",
    "tests": [
        {"input": "3\n4\n-1\n2\n", "expected": "4\n"},
        {"input": "1\n-7\n", "expected": "-7\n", "weight": 2.0},
        {"input": "2\n10\n9\n", "expected": "10\n", "timeout_s": 2.0},
    ],
    "solution": "n = int(input())\nprint(max(int(input()) for _ in range(n)))\n",
}
_APPS_SAMPLE = {
    "problem_id": "example",
    "question": "One line holds words. Write how many of them begin with a capital letter.",
    "input_output": '{"inputs": ["Ada met Bob\\n", "none here\\n"], "outputs": ["2\\n", "0\\n"]}',
    "solutions": '["print(sum(word[0].isupper() for word in input().split()))\\n"]',
}
_HUMANEVAL_SAMPLE = {
    "task_id": "example",
    "prompt": 'def without_vowels(text: str) -> str:\n    """The text without a, e, i, o and u, in either case."""\n',
    "entry_point": "without_vowels",
    "canonical_solution": '    return "".join(letter for letter in text if letter.lower() not in "aeiou")\n',
    "test": (
        'def check(candidate):\n    assert candidate("Anna") == "nn"\n    assert candidate("") == ""\n'
        '    assert not candidate("aEiOu")\n'
    ),
}
_MBPP_SAMPLE = {
    "task_id": "example",
    "prompt": "Write a function that gives the sum of the digits of a whole number.",
    "code": "def digit_sum(n):\n    return sum(int(digit) for digit in str(abs(n)))\n",
    "test_imports": [],
    "test_list": ["assert digit_sum(305) == 8", "assert digit_sum(0) == 0", "assert digit_sum(-19) == 10"],
}
_HARBOR_SAMPLE = {
    "id": "example",
    "files": {
        "task.toml": "[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 60.0\n",
        "instruction.md": "Write the names in `/app/names.txt`, sorted by the alphabet, to `/app/sorted.txt`.\n",
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY names.txt .\n",
        "environment/names.txt": "mona\nada\nkira\n",
        "tests/test.sh": "#!/bin/bash\nif cmp -s /app/sorted.txt /tests/expected.txt; then reward=1; else reward=0; fi\n"
        "echo $reward > /logs/verifier/reward.txt\n",
        "tests/expected.txt": "ada\nkira\nmona\n",
        "solution/solve.sh": "#!/bin/bash\nsort /app/names.txt > /app/sorted.txt\n",
    },
}
_BFCL_SAMPLE = {
    "id": "parallel_0",
    "question": [
        [{"role": "user", "content": "What is the weather in Bonn tomorrow, and in Lyon over the next 3 days?"}]
    ],
    "function": [
        {
            "name": "weather.forecast",
            "description": "Weather of a place.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "place": {"type": "string", "description": "Name of a town."},
                    "days": {"type": "integer", "description": "Number of days, 1 if not given."},
                },
                "required": ["place"],
            },
        }
    ],
    "ground_truth": [
        {"weather.forecast": {"place": ["Bonn"], "days": [1, ""]}},
        {"weather.forecast": {"place": ["Lyon", "Lyon, France"], "days": [3]}},
    ],
}
_TAU2_SAMPLE = {
    "domain": "mock",
    "id": "example",
    "user_scenario": {"instructions": "You are user_1. Let the agent make a task called 'Buy bread' for you."},
    "evaluation_criteria": {
        "actions": [
            {"action_id": "make", "name": "create_task", "arguments": {"user_id": "user_1", "title": "Buy bread"}}
        ],
        "communicate_info": ["Buy bread"],
    },
}
# Reads the last code block of a reply; a reply without one gets the reward of a program that does not compile.
_CODE = Suggested(
    parser="pattern",
    parser_args={"pattern": r"(?s)```(?:python|py)?[ \t]*\n(.*?)```", "error_reward": -0.1},
    max_steps=8,
    max_tokens=512,
    unreadable="stop",
)

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
        "musique_search": Entry(
            "ludic.envs.musique_search:MuSiQueSearchEnv",
            example={"sample": _MUSIQUE_SAMPLE},
            suggested=Suggested(
                agent="react",
                agent_args={"max_react_steps": 8},
                parser="xml_tag",
                parser_args={"tag": "answer", "success_reward": 0.0, "error_reward": -1.0},
                max_steps=3,
            ),
        ),
        "code_exec": Entry("ludic.envs.code_exec:ProgrammingEnv", example={"sample": _PROGRAM_SAMPLE}, suggested=_CODE),
        "apps": Entry("ludic.envs.code_exec:APPSEnv", example={"sample": _APPS_SAMPLE}, suggested=_CODE),
        "humaneval": Entry("ludic.envs.code_exec:HumanEvalEnv", example={"sample": _HUMANEVAL_SAMPLE}, suggested=_CODE),
        "mbpp": Entry("ludic.envs.code_exec:MBPPEnv", example={"sample": _MBPP_SAMPLE}, suggested=_CODE),
        "key_door": Entry("ludic.envs.key_door:KeyDoorEnv", suggested=Suggested(max_steps=64, max_tokens=8)),
        "picture_grid": Entry("ludic.envs.picture_grid:PictureGridEnv", suggested=Suggested(max_steps=8, max_tokens=8)),
        "twenty_forty_eight": Entry(
            "ludic.envs.twenty_forty_eight:TwentyFortyEightEnv", suggested=Suggested(max_steps=512, max_tokens=8)
        ),
        "gymnasium": Entry(
            "ludic.envs.adapters.gymnasium:GymnasiumEnv",
            example={"env_id": "FrozenLake-v1"},
            suggested=Suggested(max_steps=100, max_tokens=8),
        ),
        "pettingzoo": Entry(
            "ludic.envs.adapters.pettingzoo:PettingZooEnv",
            example={"game": "classic.connect_four_v3"},
            suggested=Suggested(max_steps=64, max_tokens=8),
        ),
        "textarena": Entry(
            "ludic.envs.adapters.textarena:TextArenaEnv",
            example={"game": "TicTacToe-v0", "num_players": 2},
            suggested=Suggested(max_steps=64, max_tokens=64),
        ),
        "verifiers": Entry(
            "ludic.envs.adapters.verifiers:VerifiersEnv",
            example={"taskset": "ludic.envs.adapters.sums_taskset", "answer_field": "answer"},
            suggested=Suggested(max_steps=16, max_tokens=512),
        ),
        "reasoning_gym": Entry(
            "ludic.envs.adapters.reasoning_gym:ReasoningGymEnv",
            example={"task": "chain_sum"},
            suggested=Suggested(parser="xml_tag", parser_args={"tag": "answer"}, max_steps=1, max_tokens=512),
        ),
        "harbor": Entry(
            "ludic.envs.harbor:HarborEnv",
            example={"task": _HARBOR_SAMPLE},
            suggested=Suggested(agent="react", agent_args={"max_react_steps": 17}, max_steps=32, max_tokens=512),
        ),
        "harbor_family": Entry(
            "ludic.envs.harbor:HarborFamilyEnv",
            suggested=Suggested(
                agent="react", agent_args={"max_react_steps": 17}, max_steps=32, max_tokens=384, unreadable="stop"
            ),
        ),
        "openenv": Entry(
            "ludic.envs.adapters.openenv:OpenEnvEnv",
            example={"server": "http://127.0.0.1:8000"},
            suggested=Suggested(max_steps=32, max_tokens=256),
        ),
        "bfcl": Entry(
            "ludic.envs.adapters.bfcl:BFCLEnv",
            example={"sample": _BFCL_SAMPLE},
            suggested=Suggested(agent="call_agent", max_steps=1, max_tokens=512, unreadable="stop"),
        ),
        "textworld": Entry(
            "ludic.envs.adapters.textworld:TextWorldEnv",
            example={"rooms": 2, "objects": 3, "quest_length": 2, "num_games": 3},
            suggested=Suggested(max_steps=50, max_tokens=24),
        ),
        "tau2": Entry(
            "ludic.envs.adapters.tau2:Tau2Env",
            example={"sample": _TAU2_SAMPLE},
            suggested=Suggested(agent="tool_agent", agent_args={"max_model_calls": 16}, max_steps=100, max_tokens=512),
        ),
        "dialogue": Entry(
            "ludic.envs.dialogue:DialogueEnv",
            example={"sample": {"goal": "a table for four at seven", "answer": "4 19:00"}},
            suggested=Suggested(max_steps=32, max_tokens=128),
        ),
        "prisoners_dilemma": Entry(
            "ludic.envs.prisoners_dilemma:PrisonersDilemmaEnv", suggested=Suggested(max_steps=32, max_tokens=8)
        ),
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
        "python": Entry("ludic.tools.python_tool:python_tool"),
        "search": Entry("ludic.tools.search:DocumentSearch", example={"documents": ["Alders grow on wet ground."]}),
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
