"""Game Boy games on PyBoy. The ROM is yours; a small game to try it with is built in.

Start reading in env.py (the env), then agent.py (the agent for long games). Ludic finds both through entry points.
"""

from ludic.catalog import Entry, Suggested
from ludic_game_boy.agent import GameBoyAgent
from ludic_game_boy.env import GameBoyEnv
from ludic_game_boy.memory_map import Fact, Kind, MemoryMap, Milestone, load_map

ENV = Entry(
    "ludic_game_boy:GameBoyEnv",
    example={"rom": "demo", "max_presses": 40, "hold_frames": 2, "settle_frames": 2},
    suggested=Suggested(max_steps=128, max_tokens=256),
)

__all__ = ["GameBoyEnv", "GameBoyAgent", "MemoryMap", "Fact", "Kind", "Milestone", "load_map"]
