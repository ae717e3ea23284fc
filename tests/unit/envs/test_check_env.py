"""check_env finds what it is there to find: each broken env here fails for its own reason."""

import random
import subprocess
import sys
from typing import Annotated, Literal

import msgspec
import pytest

from ludic.envs import EnvCheckFailed, EnvReport, SingleAgentEnv, check_env
from ludic.types import Snapshot, StepOutcome
from tests.fakes import CountingEnv


class Sound(CountingEnv):
    full_reward = 1.0

    def reference_action(self, agent_id):
        return "inc"

    def snapshot(self):
        return Snapshot(env_kind="count", version=1, episode_id="", obs={}, world={"count": self.count})

    def restore(self, snapshot):
        self.reset()
        self.count = snapshot.world["count"]


class GlobalDice(Sound):
    def env_reset(self, *, seed=None):
        super().env_reset(seed=seed)
        return f"rolled {random.random()}", {}


class LeavesStateBehind(Sound):
    episodes = 0

    def env_reset(self, *, seed=None):
        self.episodes += 1
        super().env_reset(seed=seed)
        return f"episode {self.episodes}", {}


class SharesState(CountingEnv):
    everything = 0

    def env_reset(self, *, seed=None):
        SharesState.everything = 0
        return super().env_reset(seed=seed)

    def env_step(self, action):
        SharesState.everything += 1
        outcome = super().env_step(action)
        return StepOutcome(f"{SharesState.everything}", outcome.reward, False, outcome.terminated)

    def legal_actions(self, agent_id):
        return ["inc"]


class ChokesOnGarbage(Sound):
    def env_step(self, action):
        return {"inc": super().env_step}[action](action)


class IntegerObs(Sound):
    def env_step(self, action):
        outcome = super().env_step(action)
        return StepOutcome(7, outcome.reward, False, outcome.terminated)


class NeverEnds(CountingEnv):
    def env_step(self, action):
        return StepOutcome("again", 0.0)


class HiddenChance(Sound):
    """Shows chance in one episode of three, as a deck that is shuffled once a day would."""

    rolls = iter([1, 1, 2] * 1000)

    def env_reset(self, *, seed=None):
        super().env_reset(seed=seed)
        return f"roll {next(self.rolls)}", {}

    def __reduce__(self):
        return (type(self), ())


class Keys(SingleAgentEnv):
    """The moves are tool calls: take the key of the right colour, then answer."""

    full_reward = 1.0

    def env_reset(self, *, seed=None):
        self.colour, self.taken = random.Random(seed).choice(["red", "blue"]), ""
        return f"Take the {self.colour} key, then say done.", {}

    def episode_tools(self, agent_id):
        return [self.take]

    def take(self, colour: Literal["red", "blue"]) -> str:
        """Take a key."""
        self.taken = colour
        return f"You have the {colour} key."

    def env_step(self, action):
        return StepOutcome("", float(self.taken == self.colour), terminated=True)

    def reference_action(self, agent_id):
        if self.taken == self.colour:
            return "done"
        return f'<tool_call>{{"name": "take", "arguments": {{"colour": "{self.colour}"}}}}</tool_call>'


class SharedKeys(Keys):
    calls = 0

    def env_reset(self, *, seed=None):
        SharedKeys.calls = 0
        return super().env_reset(seed=seed)

    def take(self, colour: Literal["red", "blue"]) -> str:
        SharedKeys.calls += 1
        return f"{super().take(colour)} Calls: {SharedKeys.calls}"


class DividesByZero(Keys):
    def episode_tools(self, agent_id):
        return [self.take, self.per_door]

    def per_door(self, num_doors: int) -> float:
        """Keys per door."""
        return 1 / num_doors


class PutsNothing(Keys):
    def episode_tools(self, agent_id):
        return [self.take, self.put]

    def put(self, where: tuple[int, Literal["left"]], what: dict) -> str:
        """Put something somewhere."""
        raise TypeError("nothing to put")


class TitlesFollowAPattern(Keys):
    def episode_tools(self, agent_id):
        return [self.take, self.title]

    def title(self, text: Annotated[str, msgspec.Meta(pattern="^Key [0-9]+$")]) -> str:
        """Give the key a title."""
        return text


class RefusesArguments(Keys):
    def episode_tools(self, agent_id):
        return [self.take, self.look]

    def look(self, room: str) -> str:
        """Look into a room."""
        raise ValueError(f"there is no room {room!r}")


class WrongReference(Keys):
    def reference_action(self, agent_id):
        return '<tool_call>{"name": "grab"}</tool_call>'


class BoolReward(Sound):
    def env_step(self, action):
        outcome = super().env_step(action)
        return StepOutcome("x", bool(outcome.reward), False, outcome.terminated)


class StepsAfterTheEnd(Sound):
    def step(self, actions):
        return {self.agent_id: self.env_step("inc")}

    async def async_step(self, actions):
        return self._stepped(self.env_step(actions.get(self.agent_id, "")))


class BadSnapshot(Sound):
    def restore(self, snapshot):
        self.reset()


class ForgetsItsView(Sound):
    view = "start"

    def env_step(self, action):
        self.view = "later"
        return super().env_step(action)

    def env_current_obs(self):
        return self.view


class Overpromises(Sound):
    full_reward = 2.0


class Unpicklable(Sound):
    def env_reset(self, *, seed=None):
        self.callback = lambda: None
        return super().env_reset(seed=seed)


class SetInInfo(Sound):
    def env_step(self, action):
        outcome = super().env_step(action)
        return StepOutcome(outcome.obs, outcome.reward, False, outcome.terminated, {"seen": {1}})


class NeedsAnAction(Sound):
    def step(self, actions):
        return super().step({self.agent_id: actions[self.agent_id]})

    async def async_step(self, actions):
        return self.step(actions)


class ActiveBeforeReset(Sound):
    active_agents = ["agent_0"]


class NoReference(Sound):
    def reference_action(self, agent_id):
        return None


@pytest.mark.parametrize("env", [Sound, Keys, RefusesArguments])
async def test_a_correct_env_passes(env):
    await check_env(env)


async def test_only_the_first_steps_of_an_endless_env_are_checked_where_they_are_asked_for():
    with pytest.warns(UserWarning, match="ended within 5 steps"):
        await check_env(NeverEnds, max_steps=5)


async def test_a_tool_that_generated_arguments_do_not_reach_is_named():
    with pytest.warns(UserWarning, match="TitlesFollowAPattern: the tool title was not checked"):
        await check_env(TitlesFollowAPattern)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (GlobalDice, "two different episodes"),
        (LeavesStateBehind, "leaves state behind"),
        (SharesState, "envs share state"),
        (ChokesOnGarbage, "unreadable action raised KeyError"),
        (NeverEnds, "no checked episode ended within 200 steps"),
        (HiddenChance, "two fresh envs"),
        (SharedKeys, "envs share state"),
        (
            DividesByZero,
            r"the tool per_door failed with ZeroDivisionError: division by zero \(arguments: {'num_doors': 0}\)",
        ),
        (PutsNothing, r"the tool put failed with TypeError: nothing to put \(arguments: .*'left'\], 'what': {}}\)"),
        (WrongReference, "the reference calls the tool 'grab'; there are take"),
        (IntegerObs, "int, not text"),
        (BoolReward, r"\(bool\), not a finite number"),
        (StepsAfterTheEnd, "must raise ResetNeeded"),
        (BadSnapshot, "snapshot continued differently"),
        (ForgetsItsView, "snapshot shows another observation"),
        (Overpromises, "full_reward is 2.0"),
        (ActiveBeforeReset, "before reset"),
        (Unpicklable, "cannot be pickled"),
        (SetInInfo, "not JSON"),
        (NeedsAnAction, "missing action raised KeyError"),
        (NoReference, "reference_action"),
    ],
)
async def test_each_contract_violation_is_reported(env, reason):
    with pytest.raises(EnvCheckFailed, match=reason):
        await check_env(env)


# --- the report ---

COSTS = {
    "env": "Mine", "blocking": False, "is_async": False, "num_steps": 10, "reset_s": 0.001, "step_s": 0.0001,
    "step_cpu_s": 0.0001, "slowest_s": 0.002, "memory_mb": 3.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("cost", "suits", "said"),
    [
        ({}, "in process", "0.1 ms on the event loop"),
        ({"step_s": 0.03}, "env workers", "holds the event loop for 30 ms"),
        ({"step_s": 0.03, "is_async": True}, "in process", "30 ms on the event loop"),
        ({"step_s": 2.0, "blocking": True}, "in process", "2 s in its thread"),
        ({"step_s": 0.03, "step_cpu_s": 0.03, "blocking": True}, "env workers", "computes for 30 ms"),
        ({"memory_mb": 3000.0}, "env workers", "3,000 MB"),
    ],
)
def test_report_says_where_an_env_belongs(cost, suits, said):
    report = EnvReport(**{**COSTS, **cost})
    assert report.suits == suits and said in str(report)


async def test_report_has_what_was_measured():
    report = await check_env(Sound)
    assert (report.env, report.is_async) == ("Sound", False) and report.num_steps > 0
    assert report.slowest_s >= report.step_s > 0


@pytest.mark.parametrize(
    ("step", "last", "num_lines"),
    [
        ("return len(action)", "EnvContractError: Mine.env_step returned int", 1),
        ("return 1 / 0", "ZeroDivisionError: division by zero", 5),
    ],
)
def test_a_failed_check_prints_the_env_s_own_lines_in_a_script(tmp_path, step, last, num_lines):
    script = tmp_path / "mine.py"
    script.write_text(
        "import asyncio\nfrom ludic.envs import SingleAgentEnv, check_env\n\n\nclass Mine(SingleAgentEnv):\n"
        "    def env_reset(self, *, seed=None):\n        return 'Go.', {}\n\n"
        f"    def env_step(self, action):\n        {step}\n\n\nasyncio.run(check_env(Mine))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[-1].startswith(last) and len(lines) <= num_lines, done.stderr
