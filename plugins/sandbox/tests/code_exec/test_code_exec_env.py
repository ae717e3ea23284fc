"""The env around its runner: rewards, attempts, feedback, cache. What runs programs is a fake here."""

import asyncio
import pickle

import pytest

from ludic.types import ConfigError, ResetNeeded
from ludic_sandbox import CompileResult, CompileStatus, ExecutionResult, LRUCache, RunStatus, SandboxError
from ludic_sandbox.code_exec import (
    CodeExecConfig,
    CodeExecEnv,
    Feedback,
    ProgramTestAdapter,
    TestCase,
    TestResult,
)
from ludic_sandbox.code_exec.runner import batch_result

SAMPLE = {
    "id": "p1",
    "question": "Double it.",
    "tests": [{"input": str(i), "expected": str(2 * i), "weight": i} for i in (1, 2, 3)],
    "solution": "right",
}


class Pool:
    """Lends one object, and remembers."""

    python_version = "3.11"
    available = 1

    def __init__(self) -> None:
        self.cache: LRUCache = LRUCache(10)
        self.lent = self.returned = 0

    @property
    def cache_stats(self) -> dict[str, int]:
        return self.cache.stats

    async def start(self) -> None: ...

    async def shutdown(self) -> None: ...

    async def checkout(self, timeout_s: float = 30.0) -> object:
        self.lent += 1
        return object()

    async def release(self, sandbox: object) -> None:
        self.returned += 1

    def get_cached(self, code_hash: str, tests_hash: str) -> object:
        return self.cache.get((code_hash, tests_hash))

    def put_cached(self, code_hash: str, tests_hash: str, result: object) -> None:
        self.cache.put((code_hash, tests_hash), result)


class Runner:
    """Programs are words that say what happens: right, wrong2 (from the second test on), crash, slow, broken, no_sandbox."""

    def __repr__(self) -> str:
        return "Runner()"

    async def run_tests(self, sandbox, code, tests, *, verifier, stop_on_first_failure=False, compile_first=True):
        results = [self.result(code.strip(), number, test) for number, test in enumerate(tests, start=1)]
        return batch_result(code, tests, results, stop_on_first_failure=stop_on_first_failure)

    def result(self, code: str, number: int, test: TestCase) -> TestResult:
        status = {"crash": RunStatus.RUNTIME_ERROR, "slow": RunStatus.TIMEOUT, "no_sandbox": RunStatus.SANDBOX_ERROR}
        compiled = CompileResult(status=CompileStatus.SUCCESS)
        if code == "broken":
            compiled = CompileResult(status=CompileStatus.SYNTAX_ERROR, error_message="invalid syntax", error_line=3)
        execution = ExecutionResult(
            compile_result=compiled,
            run_status=RunStatus.NOT_RUN if code == "broken" else status.get(code, RunStatus.SUCCESS),
            stderr="Traceback: " + "x" * 600 + " the reason" if code == "crash" else "",
            exit_code=1 if code == "crash" else 0,
        )
        passed = code == "right" or (code == "wrong2" and number < 2)
        return TestResult(test_case=test, passed=passed, actual="output!", execution=execution)


def make(pool: Pool | None = None, **config) -> CodeExecEnv:
    return CodeExecEnv(
        SAMPLE, test_adapter=ProgramTestAdapter(), sandbox_pool=pool or Pool(), code_runner=Runner(), config=config
    )


async def play(env: CodeExecEnv, *codes: str):
    await env.async_reset(seed=0)
    for code in codes:
        outcome = (await env.async_step({"agent_0": code}))["agent_0"]
    return outcome


@pytest.mark.parametrize(
    ("code", "config", "reward"),
    [
        ("right", {}, 1.0),
        ("wrong2", {}, 0.0),
        ("wrong2", {"partial_credit": True}, 1 / 6),  # by weight: 1 of 1 + 2 + 3
        ("right", {"partial_credit": True}, 1.0),
        ("crash", {}, 0.0),
        ("broken", {}, -0.1),
        ("broken", {"compile_failure_reward": -0.5, "partial_credit": True}, -0.5),
        ("", {}, -0.1),
        (" \n", {}, -0.1),
    ],
)
async def test_the_reward_follows_the_test_results(code, config, reward):
    outcome = await play(make(**config), code)
    assert outcome.reward == pytest.approx(reward) and outcome.terminated


async def test_the_info_counts_and_holds_nothing_that_differs_from_run_to_run():
    outcome = await play(make(), "wrong2")
    info = outcome.info
    assert (info["problem_id"], info["passed"], info["total"], info["pass_rate"]) == ("p1", 1, 3, pytest.approx(1 / 6))
    assert not info["all_passed"] and not info["compile_failed"] and info["attempt"] == 1
    assert [test["status"] for test in info["tests"]] == ["success", "success", "not_run"]
    assert [test["passed"] for test in info["tests"]] == [True, False, False]
    assert not any("ms" in key or "cache" in key for key in info)


async def test_only_the_first_tests_count_where_the_config_says_so():
    outcome = await play(make(max_tests=1), "wrong2")
    assert outcome.reward == 1.0 and outcome.info["total"] == 1


async def test_an_agent_sees_what_failed_and_tries_again_and_only_its_last_attempt_is_paid():
    env = make(max_attempts=3, compile_failure_reward=-0.5)
    first = await play(env, "broken")
    assert first.reward == 0.0 and not first.terminated and "in line 3" in first.obs and "Attempts left: 2" in first.obs
    second = (await env.async_step({"agent_0": "wrong2"}))["agent_0"]
    assert (
        second.reward == 0.0 and "Input:\n2" in second.obs and "Expected:\n4" in second.obs and "output!" in second.obs
    )
    assert env.current_obs() == {"agent_0": second.obs}
    third = (await env.async_step({"agent_0": "right"}))["agent_0"]
    assert (
        third.reward == 1.0 and third.terminated and third.obs == "All 3 tests passed." and third.info["attempt"] == 3
    )
    with pytest.raises(ResetNeeded):
        await env.async_step({"agent_0": "right"})
    assert (await play(env, "wrong2", "wrong2", "broken")).reward == -0.5


async def test_a_pass_ends_the_episode_at_once():
    assert (await play(make(max_attempts=3), "right")).terminated


@pytest.mark.parametrize(
    ("feedback", "told", "kept"),
    [
        (Feedback.TEST, ["1 of 3", "Input:", "Expected:"], []),
        (Feedback.STATUS, ["1 of 3", "The output is wrong"], ["Input", "4"]),
        (Feedback.NOTHING, ["did not pass"], ["1 of 3", "Input", "4"]),
        ("nothing", ["did not pass"], ["1 of 3", "Input", "4"]),
    ],
)
async def test_how_much_an_agent_is_told_is_a_setting(feedback, told, kept):
    obs = (await play(make(max_attempts=9, feedback=feedback), "wrong2")).obs.replace("Attempts left: 8", "")
    assert all(part in obs for part in told) and not any(part in obs for part in kept)


async def test_long_errors_are_cut_at_the_front_and_empty_ones_left_out():
    obs = (await play(make(max_error_length=50), "crash")).obs
    assert "the reason" in obs and "Traceback" not in obs and "exit code 1" in obs
    assert "reason" not in (await play(make(include_stderr_in_obs=False), "crash")).obs


# --- pool and cache ---


async def test_a_repeated_program_is_graded_from_the_cache_and_sandboxes_are_released():
    pool = Pool()
    outcomes = [await play(make(pool), "wrong2") for _ in range(3)]
    assert outcomes[0] == outcomes[1] == outcomes[2] and (pool.lent, pool.returned) == (1, 1)
    await play(make(pool, use_cache=False), "wrong2")
    assert pool.lent == 2


async def test_envs_that_grade_differently_do_not_share_results():
    pool = Pool()
    await play(make(pool), "wrong2")
    outcome = await play(make(pool, partial_credit=True), "wrong2")
    assert pool.lent == 2 and outcome.info["tests"][2]["status"] == "success"


async def test_a_runner_without_a_repr_of_its_settings_is_not_cached():
    class Silent(Runner):
        __repr__ = object.__repr__

    pool = Pool()
    for _ in range(2):
        env = CodeExecEnv(SAMPLE, test_adapter=ProgramTestAdapter(), sandbox_pool=pool, code_runner=Silent())
        await play(env, "right")
    assert pool.lent == 2 and pool.cache_stats["size"] == 0


@pytest.mark.parametrize("code", ["slow", "no_sandbox"])
async def test_time_outs_and_sandbox_errors_are_not_cached(code):
    pool = Pool()
    for _ in range(2):
        try:
            await play(make(pool), code)
        except SandboxError:
            assert code == "no_sandbox"
    assert (pool.lent, pool.returned) == (2, 2) and pool.cache_stats["size"] == 0


async def test_a_sandbox_that_fails_is_no_wrong_answer():
    with pytest.raises(SandboxError, match="problem p1"):
        await play(make(), "no_sandbox")


async def test_a_cancelled_step_gives_its_sandbox_back():
    class Endless(Runner):
        async def run_tests(self, *args, **kwargs):
            await asyncio.sleep(3600)

    pool = Pool()
    env = CodeExecEnv(SAMPLE, test_adapter=ProgramTestAdapter(), sandbox_pool=pool, code_runner=Endless())
    task = asyncio.create_task(play(env, "right"))
    while not pool.lent:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert pool.returned == 1


# --- settings ---


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"timeout_per_test_s": 0}, "timeout_per_test_s=0"),
        ({"max_attempts": 0}, "max_attempts=0"),
        ({"feedback": "all"}, "use one of test, status, nothing"),
        ({"timeout": 3}, "has no timeout"),
    ],
)
def test_a_setting_that_cannot_work_is_named(config, named):
    with pytest.raises(ConfigError, match=named):
        make(**config)


def test_a_problem_without_tests_is_refused():
    with pytest.raises(ConfigError, match="has no tests"):
        CodeExecEnv({**SAMPLE, "tests": []}, test_adapter=ProgramTestAdapter())


def test_an_env_with_the_pool_of_its_process_can_be_pickled():
    env = CodeExecEnv(SAMPLE, test_adapter=ProgramTestAdapter(), config=CodeExecConfig(max_attempts=2))
    assert pickle.loads(pickle.dumps(env)).tests == env.tests


def test_system_prompt_and_reference_action():
    env = make()
    assert env.reference_action("agent_0") == "right" and env.full_reward == 1.0
    assert "standard input" in env.suggested_sysprompt
    bare = {key: value for key, value in SAMPLE.items() if key != "solution"}
    assert CodeExecEnv(bare, test_adapter=ProgramTestAdapter()).full_reward is None
