"""Declarations of this plug-in: environments with a small example of each, and a command. Entry points name them."""

from ludic.catalog import Entry, Suggested
from ludic.cli.commands import Command

ENV_SERVER = Command(
    "ludic_envs.command:env_server",
    "Hold environments for runs on other machines.",
    "ludic env-server tic_tac_toe --workers 4",
)

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

MUSIQUE_SEARCH = Entry(
    "ludic_envs.musique_search:MuSiQueSearchEnv",
    example={"sample": _MUSIQUE_SAMPLE},
    suggested=Suggested(
        agent="react",
        agent_args={"max_react_steps": 8},
        parser="xml_tag",
        parser_args={"tag": "answer", "success_reward": 0.0, "error_reward": -1.0},
        max_steps=3,
    ),
)
PICTURE_GRID = Entry("ludic_envs.picture_grid:PictureGridEnv", suggested=Suggested(max_steps=8, max_tokens=8))
TWENTY_FORTY_EIGHT = Entry(
    "ludic_envs.twenty_forty_eight:TwentyFortyEightEnv", suggested=Suggested(max_steps=512, max_tokens=8)
)
GYMNASIUM = Entry(
    "ludic_envs.adapters.gymnasium:GymnasiumEnv",
    example={"env_id": "FrozenLake-v1"},
    suggested=Suggested(max_steps=100, max_tokens=8),
)
PETTINGZOO = Entry(
    "ludic_envs.adapters.pettingzoo:PettingZooEnv",
    example={"game": "classic.connect_four_v3"},
    suggested=Suggested(max_steps=64, max_tokens=8),
)
TEXTARENA = Entry(
    "ludic_envs.adapters.textarena:TextArenaEnv",
    example={"game": "TicTacToe-v0", "num_players": 2},
    suggested=Suggested(max_steps=64, max_tokens=64),
)
VERIFIERS = Entry(
    "ludic_envs.adapters.verifiers:VerifiersEnv",
    example={"taskset": "ludic_envs.adapters.sums_taskset", "answer_field": "answer"},
    suggested=Suggested(max_steps=16, max_tokens=512),
)
REASONING_GYM = Entry(
    "ludic_envs.adapters.reasoning_gym:ReasoningGymEnv",
    example={"task": "chain_sum"},
    suggested=Suggested(parser="xml_tag", parser_args={"tag": "answer"}, max_steps=1, max_tokens=512),
)
OPENENV = Entry(
    "ludic_envs.adapters.openenv:OpenEnvEnv",
    example={"server": "http://127.0.0.1:8000"},
    suggested=Suggested(max_steps=32, max_tokens=256),
)
BFCL = Entry(
    "ludic_envs.adapters.bfcl:BFCLEnv",
    example={"sample": _BFCL_SAMPLE},
    suggested=Suggested(agent="call_agent", max_steps=1, max_tokens=512, unreadable="stop"),
)
TEXTWORLD = Entry(
    "ludic_envs.adapters.textworld:TextWorldEnv",
    example={"rooms": 2, "objects": 3, "quest_length": 2, "num_games": 3},
    suggested=Suggested(max_steps=50, max_tokens=24),
)
TAU2 = Entry(
    "ludic_envs.adapters.tau2:Tau2Env",
    example={"sample": _TAU2_SAMPLE},
    suggested=Suggested(agent="tool_agent", agent_args={"max_model_calls": 16}, max_steps=100, max_tokens=512),
)
DIALOGUE = Entry(
    "ludic_envs.dialogue:DialogueEnv",
    example={"sample": {"goal": "a table for four at seven", "answer": "4 19:00"}},
    suggested=Suggested(max_steps=32, max_tokens=128),
)
PRISONERS_DILEMMA = Entry(
    "ludic_envs.prisoners_dilemma:PrisonersDilemmaEnv", suggested=Suggested(max_steps=32, max_tokens=8)
)
SEARCH = Entry("ludic_envs.search:DocumentSearch", example={"documents": ["Alders grow on wet ground."]})
