"""Rustorio: the agent writes Rust against a game whose rules are types. The game's crate is the user's; a small one of the
same shape is built in."""

from ludic.envs.rustorio.env import RustorioEnv
from ludic.envs.rustorio.judge import Status

__all__ = ["RustorioEnv", "Status"]
