"""Grading: the task's own tests run in the workspace after the agent has ended, and their reward file is read.

As in Harbor, the tests are copied to /tests only then and write /logs/verifier/reward.json (numbers by name) or reward.txt (one
number); tasks in Terminal-Bench's format are graded by the exit code. Before that, /tests, /logs and /solution are emptied, and no
process of the agent is left, so a reward that the agent wrote counts for nothing. Tests that give no readable reward are worth 0:
an agent may have caused it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ludic.types import ConfigError
from ludic.util.files import parse_json
from ludic_sandbox.harbor.task import HarborTask
from ludic_sandbox.harbor.workspace import CommandOutput, Workspace

REWARD_JSON: Final = "/logs/verifier/reward.json"
REWARD_TEXT: Final = "/logs/verifier/reward.txt"
PREPARE: Final = "/bin/mkdir -p /logs/agent /logs/verifier /logs/artifacts /tests /solution"
_CLEAR: Final = (
    "/bin/chmod -R u+rwX /tests /logs /solution 2>/dev/null; "
    f"/usr/bin/find /tests /logs /solution -mindepth 1 -delete && {PREPARE}"
)
_CLEAR_S = 60.0
_ISOLATED = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""A user site folder in HOME would be the agent's code in every Python of the tests."""
_SHOWN = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The result of the tests."""

    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Every number of reward.json; {"reward": …} of reward.txt."""
    problem: str = ""
    """Why there is no reward of the tests; empty if there is one."""
    exit_code: int | None = None
    output: str = ""
    """The end of what the tests wrote."""


async def grade(workspace: Workspace, task: HarborTask, *, timeout_s: float, reward_key: str = "reward") -> Grade:
    """Run the tests of `task` in `workspace`."""
    cleared = await workspace.run(_CLEAR, timeout_s=_CLEAR_S)
    if cleared.is_lost or cleared.exit_code != 0:
        return Grade(
            reward=0.0, problem=cleared.detail or f"/tests and /logs could not be emptied: {cleared.text:.200}"
        )
    done = await workspace.run(
        f"/tests/{task.test_script}",
        cwd=task.setup.workdir,
        timeout_s=timeout_s,
        env={**task.setup.env, **_ISOLATED, **task.test_env},
        files={f"/tests/{path}": data for path, data in task.tests.items()},
        outputs=(REWARD_JSON, REWARD_TEXT),
        is_trusted=True,
    )
    shown = done.text[-_SHOWN:]
    if done.timed_out or done.is_lost or (done.exit_code is None and task.format == "terminal-bench"):
        return Grade(reward=0.0, problem=f"The tests did not end: {done.detail}", output=shown)
    if task.format == "terminal-bench":
        reward = float(done.exit_code == 0)
        return Grade(reward=reward, rewards={"reward": reward}, exit_code=done.exit_code, output=shown)
    rewards, problem = read_rewards(done)
    return Grade(
        reward=0.0 if problem else _chosen(rewards, reward_key, task.name),
        rewards=rewards,
        problem=problem,
        exit_code=done.exit_code,
        output=shown,
    )


def read_rewards(done: CommandOutput) -> tuple[dict[str, float], str]:
    """The rewards by name, or why there are none. reward.json comes first, as in Harbor."""
    path = REWARD_JSON if REWARD_JSON in done.outputs else REWARD_TEXT
    if path not in done.outputs:
        return {}, f"The tests wrote neither {REWARD_JSON} nor {REWARD_TEXT}."
    text = done.outputs[path].decode("utf-8", "replace").strip()
    try:
        value = parse_json(text) if path == REWARD_JSON else float(text)
    except ValueError:
        return {}, f"{path} cannot be read: {text!r:.80}"
    found = value if isinstance(value, dict) else {"reward": value}
    for name, number in found.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            return {}, f"{path} has {name!r:.40} = {number!r:.40}, which is no finite number."
    return {str(name): float(number) for name, number in found.items()}, "" if found else f"{path} has no reward."


def _chosen(rewards: Mapping[str, float], key: str, name: str) -> float:
    if key in rewards:
        return rewards[key]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise ConfigError(
        f"The tests of {name} give the rewards {', '.join(rewards)}, but none is named {key!r}. Choose one: reward_key=…"
    )
