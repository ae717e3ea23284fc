"""How deep the library is: own frames from the command `ludic train` to the optimizer's step and to a model call."""

import asyncio
import gc
import sys
import threading
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ludic.cli.main import main
from ludic.inference.local.engine import LocalEngine

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
    waiting, found = task.get_coro(), []
    while waiting is not None:
        if not isinstance(waiting, CoroutineType | AsyncGeneratorType):  # one step of an `async for`
            waiting = next((part for part in gc.get_referents(waiting) if isinstance(part, AsyncGeneratorType)), None)
            continue
        is_coroutine = isinstance(waiting, CoroutineType)
        found.append(waiting.cr_code if is_coroutine else waiting.ag_code)
        waiting = waiting.cr_await if is_coroutine else waiting.ag_await
    return own(found)


def own(codes) -> list[str]:
    return [code.co_qualname for code in codes if Path(code.co_filename).is_relative_to(ROOT)]


@pytest.fixture
def run_command(tmp_path, monkeypatch):
    """Runs COMMAND; the list that it returns gets the tasks of the event loop's mains."""
    tasks = []

    async def noted(work):
        tasks.append(asyncio.current_task())
        return await work

    monkeypatch.setattr(asyncio, "run", lambda work, run=asyncio.run: run(noted(work)))
    monkeypatch.setattr(sys, "argv", COMMAND)
    monkeypatch.chdir(tmp_path)
    return main, tasks


def test_seven_frames_from_the_command_to_the_optimizer_step(run_command):
    run, tasks = run_command
    chains = []

    def record(*_: object) -> None:
        main_thread, this_thread = threading.main_thread().ident, threading.get_ident()
        assert main_thread != this_thread, "the update leaves the event loop free"
        awaited = max(map(awaited_frames, tasks), key=len)
        chains.append([*frames_on_stack(main_thread), *awaited, *frames_on_stack(this_thread)])

    hook = register_optimizer_step_pre_hook(record)
    try:
        run()
    finally:
        hook.remove()
    assert chains[0][0] == "main" and "Run.train_async" in chains[0] and len(chains[0]) <= 7, chains[0]


def test_eighteen_frames_from_a_training_step_to_a_model_call(run_command, monkeypatch):
    run, tasks = run_command
    chains = []
    complete_tokens = LocalEngine.complete_tokens

    async def noted(self, request):
        waiting = [awaited_frames(task) for task in asyncio.all_tasks()]
        (source,) = [frames for frames in waiting if "RolloutBatchSource.next_batch" in frames]
        on_stack = frames_on_stack(threading.get_ident())
        chains.append([*max(map(awaited_frames, tasks), key=len), *source, *on_stack[on_stack.index("_work") :]])
        return await complete_tokens(self, request)

    monkeypatch.setattr(LocalEngine, "complete_tokens", noted)
    run()
    step = chains[0][chains[0].index("Run.train_async") + 1 :]
    assert step[-1] == "Agent._call_model" and len(step) <= 18, step
