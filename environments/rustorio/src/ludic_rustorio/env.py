"""Rustorio: a game that is played by writing a Rust program. If it compiles and does not panic, it has won.

The agent writes the player's crate; the env compiles it against the game in a sandbox and runs it in another. Compiler errors are
the next observation, so that the agent can try again.
"""

import asyncio
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from ludic.envs.env import world_of
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import ConfigError, Info, Observation, Snapshot, StepOutcome, UnknownName, new_id
from ludic_rustorio.game import build_game, read_game
from ludic_rustorio.judge import Judge, Limits, Status, Verdict
from ludic_rustorio.toolchain import find_toolchain
from ludic_sandbox import SandboxPool, shared_pool

_KIND = "rustorio"
_VERSION = 1
_EDITIONS = ("2021", "2024")
_FENCE = re.compile(r"```(?:rust|rs)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TOLD = {
    Status.WON: "You won in {ticks} ticks.",
    Status.REFUSED: "The program was refused.",
    Status.COMPILE_ERROR: "The program does not compile.",
    Status.COMPILE_LIMIT: "The program could not be compiled in time.",
    Status.PANICKED: "The program compiles, but it did not win.",
    Status.RUN_LIMIT: "The program compiles, but it ran out of time or memory.",
}


class RustorioEnv(SingleAgentEnv):
    """A game whose rules are Rust types: the program that compiles and does not panic wins."""

    def __init__(
        self,
        game: str | Path = "demo",
        *,
        harness: str | Path | None = None,
        max_attempts: int = 5,
        par_ticks: int | None = None,
        tick_weight: float = 0.5,
        toolchain: str | Path | None = None,
        edition: str = "2021",
        max_error_chars: int = 3000,
        sandbox_pool: SandboxPool | None = None,
        **limits: Any,
    ) -> None:
        """`game`: folder of the game's crate, or "demo"; `harness`: how it is played, if not in the crate's `ludic`.
        With `par_ticks`, the share `tick_weight` of the reward is par_ticks / ticks, at most 1. `toolchain`: folder with
        bin/cargo and bin/rustc, if not those on the PATH; `edition`: of Rust. `sandbox_pool`: if not the shared one of
        the process. `limits`: those of `judge.Limits`, as compile_timeout_s, compile_memory_mb, run_timeout_s, run_memory_mb."""
        super().__init__()
        if max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts}; an episode needs at least one.")
        if par_ticks is not None and par_ticks < 1:
            raise ConfigError(f"par_ticks={par_ticks}; it must be at least 1, or None if ticks do not matter.")
        if edition not in _EDITIONS:
            raise ConfigError(
                f"edition={edition!r}; one of {', '.join(_EDITIONS)}: older ones have `dyn` without the word."
            )
        if not 0 <= tick_weight <= 1:
            raise ConfigError(f"tick_weight={tick_weight}; it is a share of the reward, between 0 and 1.")
        self.game = read_game(game, harness)
        self.max_attempts = max_attempts
        self.par_ticks = par_ticks
        self.tick_weight = tick_weight
        self.toolchain = toolchain
        self.max_error_chars = max_error_chars
        known = {limit.name for limit in fields(Limits)} - {"edition"}
        for name in limits:
            if name not in known:
                own = RustorioEnv.__init__.__kwdefaults__ or {}
                raise UnknownName.among("argument of RustorioEnv", name, ["game", *own, *known])
        self.limits = Limits(**limits, edition=edition)
        self.full_reward = 1.0 if self.game.solution is not None and par_ticks is None else None
        self._pool = sandbox_pool
        self._judge: Judge | None = None
        self._attempts_left = 0
        self._obs: Observation = ""

    @property
    def suggested_sysprompt(self) -> str | None:
        return (
            "You play a game by writing a Rust program: a program that compiles and does not panic wins. Reply with the "
            "whole file player.rs, in one ```rust block. Its first lines must stay as they are; there is no standard "
            "library, only core and alloc, and extern, include, dyn, named lifetimes and loop labels are not allowed. If it "
            "does not compile, you are shown what the compiler says and may try again."
        )

    async def async_env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        await self._ready()
        self._attempts_left = self.max_attempts
        self._episode_id = new_id()
        self._obs = f"{self.game.rules}\n\nplayer.rs begins as this:\n```rust\n{self.game.template}```\n{self._left()}"
        return self._obs, {"attempts_left": self._attempts_left}

    async def _ready(self) -> Judge:
        if self._judge is None:
            self._judge = await asyncio.to_thread(self._make_judge)
        return self._judge

    def _make_judge(self) -> Judge:
        toolchain = find_toolchain(self.toolchain, self.game.crate)
        built = build_game(self.game.crate, toolchain)
        return Judge(game=self.game, built=built, toolchain=toolchain, limits=self.limits)

    async def async_env_step(self, action: str) -> StepOutcome:
        judge = await self._ready()
        pool = await shared_pool() if self._pool is None else self._pool
        verdict = await judge.verdict(source_of(action), pool)
        self._attempts_left -= 1
        won = verdict.status is Status.WON
        self._obs = self._told(verdict)
        info: Info = {
            "status": verdict.status.value,
            "ticks": verdict.ticks,
            "won": won,
            "attempts_left": self._attempts_left,
        }
        out = not won and self._attempts_left == 0
        return StepOutcome(self._obs, self._reward(verdict), terminated=won or out, info=info)

    def _reward(self, verdict: Verdict) -> float:
        if verdict.ticks is None:
            return 0.0
        if self.par_ticks is None:
            return 1.0
        speed = min(1.0, self.par_ticks / max(verdict.ticks, 1))
        return 1.0 - self.tick_weight + self.tick_weight * speed

    def _told(self, verdict: Verdict) -> Observation:
        lines = [_TOLD[verdict.status].format(ticks=verdict.ticks)]
        if verdict.message:
            lines.append(verdict.message[: self.max_error_chars].strip())
        return "\n".join([*lines, self._left()])

    def _left(self) -> str:
        return f"Attempts left: {self._attempts_left}."

    def env_current_obs(self) -> Observation:
        return self._obs

    def reference_action(self, agent_id: str) -> str | None:
        return None if self._over else self.game.solution

    def snapshot(self) -> Snapshot:
        return self._snapshot(_KIND, _VERSION, {"attempts_left": self._attempts_left, "over": self._over})

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=_KIND, version=_VERSION)
        self._attempts_left, self._over = world["attempts_left"], world["over"]
        self._obs = snapshot.obs[self.agent_id]
        self._episode_id = snapshot.episode_id

    def __getstate__(self) -> dict[str, Any]:
        """Without the judge: its compiled libraries are on this machine, and another machine builds its own."""
        return {**self.__dict__, "_judge": None, "_pool": None}


def source_of(action: str) -> str:
    """The last code block, or the whole text if there is none."""
    blocks = _FENCE.findall(action)
    return blocks[-1] if blocks else action
