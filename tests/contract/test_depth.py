"""How deep the library is: own frames from the command `ludic train` to the optimizer's step."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ludic.cli.main import main

ROOT = Path(__file__).parents[2] / "src" / "ludic"
COMMAND = [
    "ludic", "train", "tic_tac_toe", "--model", "tiny", "--max-tokens", "1", "--group-size", "2", "--rollouts-per-update", "2",
    "--steps", "1", "--logger", "none",
]  # fmt: skip


def frames_on_stack(thread_id: int) -> list[str]:
    frame, found = sys._current_frames()[thread_id], []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return own(reversed(found))


def awaited_frames(task: asyncio.Task) -> list[str]:
    """The coroutines from the task down to what it waits for; none of them is on a stack meanwhile."""
    coroutine, found = task.get_coro(), []
    while hasattr(coroutine, "cr_code"):
        found.append(coroutine.cr_code)
        coroutine = coroutine.cr_await
    return own(found)


def own(codes) -> list[str]:
    return [code.co_qualname for code in codes if Path(code.co_filename).is_relative_to(ROOT)]


def test_seven_frames_from_the_command_to_the_optimizer_step(tmp_path, monkeypatch):
    tasks, chains = [], []

    async def noted(work):
        tasks.append(asyncio.current_task())
        return await work

    def record(*_: object) -> None:
        main_thread, this_thread = threading.main_thread().ident, threading.get_ident()
        assert main_thread != this_thread, "the update leaves the event loop free"
        awaited = max(map(awaited_frames, tasks), key=len)
        chains.append([*frames_on_stack(main_thread), *awaited, *frames_on_stack(this_thread)])

    monkeypatch.setattr(asyncio, "run", lambda work, run=asyncio.run: run(noted(work)))
    monkeypatch.setattr(sys, "argv", COMMAND)
    monkeypatch.chdir(tmp_path)
    hook = register_optimizer_step_pre_hook(record)
    try:
        main()
    finally:
        hook.remove()
    assert chains[0][0] == "main" and "Run.train_async" in chains[0] and len(chains[0]) <= 7, chains[0]
