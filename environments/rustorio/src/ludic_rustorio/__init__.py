"""Rustorio: the agent writes Rust against a game whose rules are types. The game's crate is the user's; a small one of the
same shape is built in, in demo/. Start reading in env.py. Ludic finds the env through an entry point.
"""

from ludic.catalog import Entry, Suggested
from ludic_rustorio.env import RustorioEnv
from ludic_rustorio.judge import Status

ENV = Entry("ludic_rustorio:RustorioEnv", suggested=Suggested(max_steps=5, max_tokens=2048))

__all__ = ["RustorioEnv", "Status"]
