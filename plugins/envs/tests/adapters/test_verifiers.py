"""The verifiers adapter, on the real package: its single-agent and user-sim envs, and a game of several turns."""

import importlib
import sys
import types

import pytest
import verifiers.v1 as vf

from ludic.cli.play import scripted_protocol
from ludic.envs.check import check_env
from ludic.interaction import MultiAgentProtocol
from ludic.types import ConfigError, ResetNeeded
from ludic_envs.adapters.verifiers import VerifiersEnv

SUMS = "ludic_envs.adapters.sums_taskset"


class HotData(vf.TaskData):
    secret: int


class HotTask(vf.Task[HotData, vf.State, vf.TaskConfig]):
    async def setup(self, trace: vf.Trace) -> None:
        trace.info["guesses"] = 0

    @vf.reward(weight=2.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.secret))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class HotTaskset(vf.Taskset[HotTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield HotTask(HotData(prompt="A number from 0 to 9?", secret=number % 10), self.config.task)
            number += 1


class HotConfig(vf.EnvConfig):
    guesser: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class HotEnv(vf.Env[HotConfig]):
    """Says warm or cold until the number is found; one more reward for the pair of them at the end."""

    async def run(self, task, agents):
        async with agents.guesser.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and segment.last_reply != str(task.data.secret):
                digit = "0123456789".find(segment.last_reply[:1] or "?")
                near = digit >= 0 and abs(digit - task.data.secret) <= 2
                segment = await talk.turn("warm" if near else "cold")

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("quick", 1.0 / trace.num_turns)


class ToolTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    NEEDS_CONTAINER = True

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self):
        yield ToolTask(vf.TaskData(prompt="?"), self.config.task)


class BoxTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def compiles(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["true"], {})).exit_code == 0)


class BoxTaskset(vf.Taskset[BoxTask, vf.TasksetConfig]):
    def load(self):
        yield BoxTask(vf.TaskData(prompt="?"), self.config.task)


PLUG_INS = {
    "hot_and_cold": (HotTaskset, HotEnv),
    "needs_tools": (ToolTaskset,),
    "needs_a_box": (BoxTaskset,),
}


@pytest.fixture(autouse=True, scope="module")
def plug_ins():
    """Installed packages, as far as verifiers can tell."""
    for name, classes in PLUG_INS.items():
        module = types.ModuleType(name)
        module.__all__ = [cls.__name__ for cls in classes]
        vars(module).update({cls.__name__: cls for cls in classes})
        sys.modules[name] = module
    yield
    for name in PLUG_INS:
        del sys.modules[name]


async def started(taskset=SUMS, *, seed=0, **settings):
    env = VerifiersEnv(taskset, **settings)
    await env.async_reset(seed=seed)
    return env


@pytest.mark.parametrize(
    ("taskset", "settings"),
    [
        (SUMS, {}),
        (SUMS, {"answer_field": "answer", "taskset_args": {"largest": 9}}),
        (SUMS, {"env": "user-sim", "env_args": {"user": {"max_turns": 3}}}),
        ("hot_and_cold", {}),
    ],
)
async def test_the_env_keeps_the_contract(taskset, settings):
    await check_env(lambda: VerifiersEnv(taskset, **settings), seeds=(0, 1, 2, 3))


@pytest.fixture
def nltk_folder(tmp_path, monkeypatch):
    """Where nltk finds its data; it downloads none."""
    nltk = pytest.importorskip("nltk", reason="the textarena extra is not installed")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    return tmp_path


@pytest.fixture
def word_list(nltk_folder):
    """The English words that games of TextArena draw from, in small."""
    words = importlib.import_module("nltk.corpus").words
    folder = nltk_folder / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (folder / name).write_text("time\nyear\npeople\nschool\nstate\nfamily\nstudent\ncountry\nproblem\nhand\n")
    words.ensure_loaded()
    yield
    words._unload()


GAMES = "verifiers.v1.tasksets.textarena"


@pytest.mark.parametrize("game", ["Hangman-v0", "WordSearch-v0"])
@pytest.mark.filterwarnings("ignore:.*ended within")
async def test_a_taskset_of_verifiers_keeps_the_contract(game, word_list):
    await check_env(lambda: VerifiersEnv(GAMES, taskset_args={"game": game}, num_tasks=4), max_steps=30)


def test_a_taskset_without_its_data_names_them(nltk_folder):
    with pytest.raises(ConfigError, match="(?s)cannot load the taskset .*Resource.*words.*not found"):
        VerifiersEnv(GAMES, taskset_args={"game": "WordSearch-v0"}, num_tasks=1)


async def test_the_task_is_asked_and_its_own_rewards_score_the_answer():
    env = await started(index=3, answer_field="answer")
    question = env._view("agent")
    a, b = (int(part) for part in question.removesuffix(" = ?").split(" + "))
    assert env.suggested_sysprompt == "Answer with the number alone."
    assert env.reference_action("agent") == str(a + b)
    right = (await env.async_step({"agent": str(a + b)}))["agent"]
    assert (right.reward, right.terminated) == (pytest.approx(1.1), True)
    assert right.info == {"rewards": {"correct": 1.0, "brief": pytest.approx(0.1)}, "metrics": {}, "trainable": True}
    with pytest.raises(ResetNeeded):
        await env.async_step({"agent": "1"})


@pytest.mark.parametrize(("answer", "reward"), [("0", 0.1), ("far too long to be brief", 0.0), ("", 0.1)])
async def test_a_wrong_answer_gets_what_the_rewards_give_it(answer, reward):
    env = await started(index=3)
    assert (await env.async_step({"agent": answer}))["agent"].reward == pytest.approx(reward)


async def test_the_seed_draws_the_task_and_an_index_fixes_it():
    drawn = VerifiersEnv(SUMS)
    asked = [(await drawn.async_reset(seed=seed))["agent"][0] for seed in (1, 2, 3, 4, 1)]
    assert asked[0] == asked[-1] and len(set(asked)) > 1
    fixed = VerifiersEnv(SUMS, index=5)
    assert len({(await fixed.async_reset(seed=seed))["agent"][0] for seed in range(4)}) == 1
    await drawn.async_close()
    await fixed.async_close()


async def test_a_program_of_several_turns_runs_as_it_is():
    env = await started("hot_and_cold", index=4)
    assert (env.agent_ids, env.active_agents) == (["guesser"], ["guesser"])
    assert (await env.async_step({"guesser": "9"}))["guesser"].obs == "cold"
    assert (await env.async_step({"guesser": "5"}))["guesser"].obs == "warm"
    last = (await env.async_step({"guesser": "4"}))["guesser"]
    assert (last.reward, last.terminated, last.truncated) == (pytest.approx(2.0 + 1 / 3), True, False)
    assert last.info["metrics"] == {"turns": 3.0}


async def test_out_of_turns_is_a_truncation():
    env = await started("hot_and_cold", index=4)
    for guess in ("1", "2"):
        await env.async_step({"guesser": guess})
    last = (await env.async_step({"guesser": "3"}))["guesser"]
    assert (last.truncated, last.terminated, last.reward) == (True, False, pytest.approx(1 / 3))


async def test_two_ludic_agents_play_both_agents_of_user_sim():
    """The whole stack: verifiers' own env, our protocol, scripted agents."""
    env = VerifiersEnv(SUMS, env="user-sim", index=0, answer_field="answer")
    lines = {"user": iter(["What does it come to?", "###DONE###"])}

    def speak(env, agent_id):
        return next(lines["user"]) if agent_id == "user" else env.reference_action("assistant")

    protocol = scripted_protocol(env, speak)
    assert isinstance(protocol, MultiAgentProtocol)
    rollouts = await protocol.run(env=env, max_steps=8, env_seed=0)
    totals = {rollout.meta["agent_id"]: rollout.total_reward for rollout in rollouts}
    assert totals == {"assistant": pytest.approx(1.1), "user": 0.0}


async def test_an_exception_of_the_program_fails_the_episode():
    env = await started(env="best-of-n")
    with pytest.raises(ExceptionGroup) as raised:
        await env.async_step({"agent": "1"})
    assert all("second conversation" in str(error) for error in raised.value.exceptions)


async def test_a_task_that_uses_a_runtime_is_refused():
    env = await started("needs_a_box")
    with pytest.raises(vf.TaskError, match="plays verifiers tasks without one"):
        await env.async_step({"agent": "1"})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"taskset": "needs_tools"}, "needs a container and @stop conditions"),
        ({"taskset": "no_such_taskset"}, "not found"),
        ({"taskset": "no.such_module"}, "cannot be imported"),
        ({"taskset": SUMS, "taskset_args": {"lagest": 9}}, "lagest"),
        ({"taskset": SUMS, "taskset_args": {"num_tasks": 0}}, "has no tasks"),
        ({"taskset": SUMS, "env": "no-such-env"}, "not found"),
        ({"taskset": SUMS, "index": 100}, "tasks 0 to 99"),
    ],
)
def test_wrong_settings_are_refused_with_a_hint(settings, says):
    with pytest.raises(ConfigError, match=says):
        VerifiersEnv(**settings)
