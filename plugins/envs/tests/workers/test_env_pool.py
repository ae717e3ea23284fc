"""Envs in worker processes: the same episodes as in this process, the same errors, and nothing left when the pool is closed."""

import asyncio
import json
import random

import pytest

from ludic import registry
from ludic.agents import ReActAgent
from ludic.batch_gen import RolloutEngine
from ludic.envs import LudicEnv
from ludic.envs.key_door import MOVES
from ludic.inference import ScriptedClient
from ludic.interaction import MultiAgentProtocol, SingleAgentProtocol
from ludic.types import ConfigError, EnvSpec, EnvWorkerError, ProtocolSpec, ResetNeeded, RolloutRequest, UnknownName
from ludic_envs.workers import EnvPool, RemoteEnv
from plugins.envs.tests.workers import parts
from tests.fakes import make_agent
from tests.unit.agents.test_tool_agents import call
from tests.unit.batch_gen.parts import RL

pytestmark = pytest.mark.slow

REPLIES = {
    "tic_tac_toe": [f"<a>{row}{column}</a>" for row in "ABC" for column in "123"],
    "key_door": [*(f"<a>{move}</a>" for move in MOVES), "nonsense"],
    "prisoners_dilemma": ["<a>cooperate</a>", "<a>defect</a>", "<a>what?</a>"],
    "musique_search": [
        call("search", query="capital"),
        call("search", query="river", k=2),
        call("search", query="river", k=99),
        call("search", nothing=1),
        "<a>Paris</a>",
    ],
    "gsm8k": ["<a>42</a>", "<a>5</a>", "<a>1,234</a>"],
}
SETTINGS = {
    "tic_tac_toe": {"epsilon": 0.5, "opponent": "minimax"},
    "prisoners_dilemma": {"rounds": 4},
    **{name: dict(registry.envs.spec(name).example) for name in ("musique_search", "gsm8k")},
}
NEW_EACH_TIME = {"id", "ts_ns", "turn_id", "parent_id", "source_agent_step_id", "agent_step_ids", "episode_id",
                 "episode_run", "started_ns", "duration_ns"}  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    """For all tests of this file: each has its own event loop, so the pool serves several."""
    pool = EnvPool(parts.any_env, workers=2)
    yield pool
    pool.close()
    assert not pool.processes


@pytest.fixture(scope="module")
def faulty():
    pool = EnvPool(parts.FaultyOnLoop, workers=1)
    yield pool
    pool.close()


def without_ids(stored):
    if isinstance(stored, dict):
        return {key: without_ids(value) for key, value in stored.items() if key not in NEW_EACH_TIME}
    return [without_ids(item) for item in stored] if isinstance(stored, list) else stored


async def whole_rollouts(make, name: str):
    """All that six episodes leave, but ids and times."""
    client = ScriptedClient(lambda request: random.Random(request.seed).choice(REPLIES[name]))

    def protocol():
        agents = {agent_id: make_agent(client, cls=ReActAgent) for agent_id in ("player_0", "player_1")}
        is_single = name != "prisoners_dilemma"
        return SingleAgentProtocol(make_agent(client, cls=ReActAgent)) if is_single else MultiAgentProtocol(agents)

    engine = RolloutEngine(env_registry={"any": make}, protocol_registry={"play": protocol}, seed=5, max_retries=0)
    spec = EnvSpec("any", {"env_id": name, **SETTINGS.get(name, {})})
    requests = [RolloutRequest(env=spec, protocol=ProtocolSpec("play"), inference=RL) for _ in range(6)]
    rollouts = await engine.generate_rollouts(requests, max_steps=8, concurrency=6)
    assert not any(rollout.failure for rollout in rollouts)
    return [without_ids(json.loads(rollout.to_json())) for rollout in rollouts]


@pytest.mark.parametrize("name", REPLIES)
async def test_episodes_are_the_same_as_in_this_process(pool: EnvPool, name: str):
    here, there = await whole_rollouts(parts.any_env, name), await whole_rollouts(pool.make, name)
    assert here == there
    assert len({json.dumps(rollout) for rollout in here}) > 1, "the episodes differ from each other"
    assert pool.num_envs == 0


async def test_an_env_looks_like_the_one_in_its_worker(pool: EnvPool):
    env, real = await pool.make(env_id="tic_tac_toe"), registry.envs.make("tic_tac_toe")
    assert type(env).__name__ == type(real).__name__ and env.agent_ids == real.agent_ids and env.active_agents == []
    assert await env.async_reset(seed=3) == await real.async_reset(seed=3)
    assert (env.active_agents, env.suggested_sysprompt) == (real.active_agents, real.suggested_sysprompt)
    with pytest.raises(ConfigError, match="hints=True"):
        env.legal_actions("agent_0")
    await env.async_close()
    await env.async_close()  # twice does no harm
    assert env.active_agents == []


async def test_each_role_has_its_own_system_prompt():
    async with EnvPool(parts.Roles, workers=1) as pool:
        env = await pool.make()
        await env.async_reset(seed=7)
        assert [env.system_prompt_for(role) for role in env.agent_ids] == ["a of seed 7", "b of seed 7"]


def test_a_remote_env_answers_all_that_an_env_can_be_asked():
    """A new method of LudicEnv needs a place in a reply; else every env in a worker would answer with the default."""
    in_the_worker = {"reset", "step", "restore"}
    asked = {name for name in vars(LudicEnv) if not name.startswith("_")} - in_the_worker
    assert asked - vars(RemoteEnv).keys() == {"full_reward"}  # set by its constructor


async def test_hints_carry_legal_and_reference_actions():
    async with EnvPool("prisoners_dilemma", workers=1, hints=True, env_args={"rounds": 2}) as pool:
        env, real = await pool.make(), registry.envs.make("prisoners_dilemma", rounds=2)
        for shown in (env, real):
            await shown.async_reset(seed=0)
            await shown.async_step({"player_0": "defect", "player_1": "cooperate"})
        for agent_id in real.agent_ids:
            assert env.legal_actions(agent_id) == real.legal_actions(agent_id)
            assert env.reference_action(agent_id) == real.reference_action(agent_id)
        assert env.current_obs() == real.current_obs()


async def test_errors_of_the_env_keep_their_type_or_their_failure(pool: EnvPool, faulty: EnvPool):
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        await pool.make(env_id="tic_tac_toe", size=4)
    with pytest.raises(UnknownName, match="tic_tac_toe"):
        await pool.make(env_id="tic_tac_to")
    with pytest.raises(ConfigError, match="plain data"):
        await pool.make(env_id="tic_tac_toe", opponent=object())
    env = await faulty.make()
    with pytest.raises(ResetNeeded):
        await env.async_step({"agent_0": "a"})
    await env.async_reset(seed=0)
    with pytest.raises(EnvWorkerError, match="LookupError: no such thing") as caught:
        await env.async_step({"agent_0": "fail"})
    assert caught.value.failure.place.startswith("parts.py:")
    with pytest.raises(EnvWorkerError, match="SystemExit: bye"):
        await env.async_step({"agent_0": "leave"})
    assert (await env.async_step({"agent_0": "a"}))["agent_0"].obs.endswith(": a")  # it still runs
    await env.async_close()
    assert (pool.num_envs, faulty.num_envs) == (0, 0)


async def test_values_arrive_as_they_are_or_as_an_error_that_names_them():
    async with EnvPool(parts.Sends, workers=1) as pool:
        env = await pool.make()
        await env.async_reset(seed=0)

        async def sent(action):
            return (await env.async_step({"agent_0": action}))["agent_0"].info["value"]

        assert await sent("numpy") == {"a": 0.5, "b": 3, "c": True}
        assert await sent("nested") == {"a": [1, {"b": None}], "ü": "ö", "f": 1e300}
        assert await sent("surrogate") == "? text"
        with pytest.raises(TypeError, match=r"cannot be sent.*object"):
            await sent("object")


async def test_envs_are_spread_over_the_workers_and_run_at_the_same_time(pool: EnvPool):
    envs = [await pool.make(env_id="key_door") for _ in range(6)]
    assert sorted(env.worker for env in envs) == [0, 0, 0, 1, 1, 1]
    await asyncio.gather(*(env.async_reset(seed=0) for env in envs))
    await asyncio.gather(*(env.async_close() for env in envs))


async def test_a_cancelled_call_is_ended_in_the_worker_and_the_env_is_closed(pool: EnvPool, faulty: EnvPool):
    env = await pool.make(env_id="key_door")
    step = asyncio.create_task(env.async_reset(seed=0))
    await asyncio.sleep(0)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    await env.async_close()
    making = asyncio.create_task(pool.make(env_id="key_door"))
    await asyncio.sleep(0)
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
    assert pool.num_envs == 0


def test_what_another_process_cannot_import_is_refused():
    class Local(parts.Faulty):
        pass

    for env in (Local, lambda: parts.Faulty()):
        with pytest.raises(ConfigError, match="no name at the top of a module"):
            EnvPool(env)
    with pytest.raises(UnknownName, match="tic_tac_toe"):
        EnvPool("tic_tac_to")
    with pytest.raises(ConfigError, match="at least 1 worker"):
        EnvPool("tic_tac_toe", workers=0)


async def test_an_env_that_a_program_registers_is_found_by_its_workers(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from ludic.envs import SingleAgentEnv\n"
        "class Own(SingleAgentEnv):\n"
        "    def __init__(self, word='none'):\n        super().__init__()\n        self.word = word\n"
        "    def env_reset(self, *, seed=None):\n        return self.word, {}\n"
        "    def env_step(self, action):\n        raise SystemExit\n"
    )
    kind = registry.envs.spec(f"{file}:Own").load()
    registry.envs.register("mine/own", kind, kwargs={"word": "registered"})
    try:
        async with EnvPool("mine/own", workers=1) as pool:
            env = await pool.make()
            assert (await env.async_reset(seed=0))["agent_0"][0] == "registered"
    finally:
        registry.envs.unregister("mine/own")


async def test_a_module_that_cannot_be_imported_is_named_at_the_start(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import no_such_package\n")
    with pytest.raises(ConfigError, match="no_such_package"):
        async with EnvPool(f"{file}:Own", workers=1) as pool:
            await pool.make()
