"""Game Boy games on PyBoy. The ROM is yours; a small game to try it with is built in."""

from ludic.envs.game_boy.env import GameBoyEnv
from ludic.envs.game_boy.memory_map import Fact, Kind, MemoryMap, load_map
from ludic.envs.game_boy.milestones import Milestone

__all__ = ["GameBoyEnv", "MemoryMap", "Fact", "Kind", "Milestone", "load_map"]
