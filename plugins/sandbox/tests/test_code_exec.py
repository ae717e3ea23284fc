"""Programs in the real sandbox: each test under its own limits, every verdict from outside, no result by trickery."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from ludic import registry
from ludic.types import BrokenSample, ConfigError
from ludic_sandbox import RunStatus, Sandbox, create_sandbox_pool
from ludic_sandbox.bubblewrap import bubblewrap_problem
from ludic_sandbox.code_exec import (
    AssertRunner,
    BatchTestResult,
    CodeExecConfig,
    ExactMatchVerifier,
    HumanEvalEnv,
    StdinStdoutRunner,
    TestCase,
)
from ludic_sandbox.code_exec.batch import program

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(bubblewrap_problem()), reason=bubblewrap_problem()),
]

DOUBLE = [TestCase(str(n), str(2 * n), id=str(n)) for n in range(6)]
PROGRAMS = StdinStdoutRunner(default_timeout_s=20.0)
ASSERTS = AssertRunner(default_timeout_s=20.0)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with await create_sandbox_pool(n_workers=1) as pool:
        held = await pool.checkout()
        yield held
        await pool.release(held)


async def run(sandbox: Sandbox, code: str, tests=DOUBLE[:2], runner=PROGRAMS, **how) -> BatchTestResult:
    return await runner.run_tests(sandbox, code, tests, verifier=ExactMatchVerifier(), **how)


def statuses(result: BatchTestResult) -> list[str]:
    return [str(each.execution.run_status) for each in result.results]


def passes(result: BatchTestResult) -> str:
    return "".join("-+"[each.passed] for each in result.results)


def asserts(*texts: str, **metadata) -> list[TestCase]:
    return [TestCase("", text, id=text, metadata={"functions": ["f"], **metadata}) for text in texts]


# --- programs that read stdin ---

WRONG_AT_2 = "n = int(input())\nprint(2 * n if n != 2 else 'two')"


@pytest.mark.parametrize("batched", [True, False])
async def test_results_come_in_the_order_of_the_tests_and_stop_where_they_are_told_to(sandbox, batched):
    runner = StdinStdoutRunner(default_timeout_s=20.0, use_batch_execution=batched)
    everything = await run(sandbox, WRONG_AT_2, DOUBLE, runner)
    assert passes(everything) == "++-+++" and statuses(everything) == ["success"] * 6
    assert [each.test_case for each in everything.results] == DOUBLE
    assert everything.first_failure.comparison_details == "Line 1 is 'two', '4' is expected."
    early = await run(sandbox, WRONG_AT_2, DOUBLE, runner, stop_on_first_failure=True)
    assert passes(early) == "++----" and statuses(early) == ["success"] * 3 + ["not_run"] * 3


async def test_every_way_to_end_has_its_status(sandbox):
    code = """
import os, sys
n = int(input())
print(2 * n, flush=True)
if n == 1: raise KeyError("lost")
if n == 2: sys.exit(3)
if n == 3: os.kill(os.getpid(), 11)
if n == 4: x = bytearray(10**9)
if n == 5: print("x" * 2 * 10**6)
"""
    result = await run(sandbox, code, DOUBLE)
    assert passes(result) == "+-----"
    assert statuses(result) == ["success", "runtime_error", "runtime_error", "killed", "memory_exceeded", "killed"]
    _, error, exit_code, signal, memory, output = [each.execution for each in result.results]
    assert error.stderr.endswith("KeyError: 'lost'\n") and "serve_tests" not in error.stderr
    assert (exit_code.exit_code, signal.signal, memory.exit_code) == (3, 11, 1)
    assert output.detail == "It wrote too much." and 10**6 < len(output.stdout) < 2 * 10**6


async def test_each_test_has_its_own_limits_and_a_late_one_does_not_hurt_the_next(sandbox):
    code = "import time\nn = int(input())\nif n: time.sleep(600)\nx = bytearray(100 << 20)\nprint(2 * n)"
    tests = [
        TestCase("1", "2", metadata={"timeout_s": 0.5}),
        TestCase("0", "0", metadata={"memory_limit_mb": 80}),
        TestCase("0", "0"),
    ]
    assert statuses(await run(sandbox, code, tests)) == ["timeout", "memory_exceeded", "success"]


async def test_a_program_that_does_not_compile_fails_all_tests_and_says_where(sandbox):
    for code, line in (("x = 1\ndef (", 2), ("print(1)\0", None)):
        result = await run(sandbox, code, DOUBLE)
        assert result.compile_failed and statuses(result) == ["not_run"] * 6
        assert result.compile_result.error_line == line
    for batched in (True, False):
        runner = StdinStdoutRunner(default_timeout_s=20.0, use_batch_execution=batched)
        result = await run(sandbox, "def (", DOUBLE[:2], runner, compile_first=False)
        assert not result.compile_failed and statuses(result) == ["runtime_error"] * 2
        assert "SyntaxError" in result.results[0].execution.stderr


async def test_a_program_sees_an_interpreter_like_its_own(sandbox):
    code = """
import atexit, dataclasses, sys, threading
@dataclasses.dataclass
class Point:
    x: "int"
assert __name__ == "__main__" and sys.modules["__main__"].Point is Point
n = int(sys.stdin.readline())
threading.Thread(target=lambda: print(2 * n)).start()
atexit.register(print, "bye")
"""
    result = await run(sandbox, code, [TestCase("4\nrest", "8\nbye")])
    assert result.all_passed, result.results[0]
    assert passes(await run(sandbox, "print(2 * int(open('/dev/stdin').read()))")) == "++"


async def test_large_inputs_arrive_and_unread_ones_do_not_block(sandbox):
    big = "1 " * 500_000
    tests = [TestCase(big, "500000"), TestCase(big, "500000")]
    assert passes(await run(sandbox, "print(len(input().split()))", tests)) == "++"
    assert passes(await run(sandbox, "print(500000)", tests)) == "++"


async def test_many_large_inputs_do_not_eat_the_memory_of_the_program(sandbox):
    tests = [TestCase("1 " * 1_000_000, "1000000", id=str(n)) for n in range(20)]
    assert passes(await run(sandbox, "print(len(input().split()))", tests)) == "+" * 20


async def test_what_a_program_prints_right_before_it_ends_is_not_lost(sandbox):
    """It ends near the moment at which the harness looks whether it has: every 50 ms."""
    tests = [TestCase(str(n), "done", id=str(n)) for n in range(60)]
    code = "import time\nn = int(input())\ntime.sleep(0.045 + n * 0.0002)\nprint('done')"
    assert passes(await run(sandbox, code, tests)) == "+" * 60


async def test_outputs_that_do_not_fit_into_one_run_of_the_sandbox_all_arrive(sandbox):
    tests = [TestCase(str(n), "\x01" * 900_000 + str(n)) for n in range(4)]  # which JSON writes with six bytes each
    assert passes(await run(sandbox, "print('\\x01' * 900_000 + input())", tests)) == "++++"


async def test_a_daemon_that_a_program_leaves_behind_delays_no_run(sandbox):
    code = (
        "import os, time\nprint(2 * int(input()), flush=True)\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)"
    )
    assert passes(await run(sandbox, code)) == "++"


# --- trickery ---

FORGED = '{"test": %d, "status": "success", "stdout": "0", "stderr": "", "exit_code": 0, "signal": null, "ms": 1}'
REPORT_IT_ONESELF = f"""
import os
with open(f"/proc/{{os.getppid()}}/fd/1", "w") as reports:
    for n in range(2):
        print('{FORGED}' % n, file=reports)
    print('{{"done": true}}', file=reports)
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os\nprint(0, flush=True)\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(9)", "killed"),
        ("import os\nos.kill(-1, 9)", "killed"),
        ("import os, time\nos.kill(os.getppid(), 19)\ntime.sleep(1.5)\nos.kill(os.getppid(), 18)\nprint(0)", "timeout"),
        (REPORT_IT_ONESELF, "runtime_error"),
        ("import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')", "runtime_error"),
        (f"print('{FORGED}' % 0)\nprint('{{\"done\": true}}')", "success"),  # a wrong answer like any other
    ],
    ids=["ends it", "ends all processes", "stops it", "writes reports", "writes its memory", "prints reports"],
)
async def test_no_program_passes_by_meddling_with_the_harness(sandbox, code, status):
    brief = {"timeout_s": 1.0}
    tests = [
        TestCase("0", "0", metadata=brief),
        TestCase("1", "2", metadata=brief),
    ]  # the first would pass by a forged 0
    result = await run(sandbox, code, tests)
    assert passes(result) == "--" and statuses(result)[0] == status
    assert passes(await run(sandbox, "print(2 * int(input()))")) == "++"  # and the sandbox is as good as before


async def test_what_is_expected_never_enters_the_sandbox_of_the_program(sandbox):
    """The program looks through its own memory, its parent's files and everything it can read for the answers."""
    spy = """
import gc, glob, os, sys
seen = [str(gc.get_objects()), str(sys.argv), str(dict(os.environ)), str(sys._getframe().f_globals)]
frame = sys._getframe()
while frame:
    seen.append(str(frame.f_locals))
    frame = frame.f_back
for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ") + glob.glob("/tmp/**", recursive=True):
    try:
        seen.append(open(path).read())
    except OSError:
        pass
everything = "".join(seen)
def has(*parts):  # what is looked for must not itself be there
    return "".join(parts) in everything
"""
    secret = "right-answer-77"
    tests = [TestCase("visible-input", secret)]
    found = await run(sandbox, spy + "print(has('right-', 'answer'), has('visible', '-input'))", tests)
    assert found.results[0].actual == "False True\n"
    hidden = asserts(f"assert f(3) == {secret!r}", f"for x in [4]:\n    assert f(x) == {secret!r}")
    code = spy + "def f(x):\n    return has('right-', 'answer'), has('ass', 'ert f')"
    answers = await run(sandbox, code, hidden, ASSERTS)
    assert [each.actual for each in answers.results] == ["(False, False)"] * 2


# --- functions judged by asserts ---


async def test_asserts_are_judged_over_what_the_functions_return(sandbox):
    code = """
import re
def f(x):
    if x == 3:
        raise ValueError("three")
    return re.match("a", x) if isinstance(x, str) else x + 1
"""
    tests = asserts(
        "assert f(1) == 2",
        "assert f(1) == 3",
        "assert f(f(0)) == 2",
        "assert f('a') and not f('b')",
        "assert f(3) == 4",
        "assert [f(x) for x in (1, 2)] == [2, 3]",
        "for x in range(10, 60):\n    assert f(x) == x + 1",
        "for x in range(5):\n    assert f(x) == x + 1",
        "try:\n    f(3)\nexcept ValueError as error:\n    assert str(error) == 'three'\nelse:\n    assert False",
        "import random\ny = f(random.randint(100, 10**9))\nassert y > 100\nassert f(y) == y + 1",
        "assert [f(10), f(11), f(12), f(13), f(14), f(15), f(16), f(17), f(18)] == [11, 12, 13, 14, 15, 16, 17, 18, 19]",
        "assert (f(-1) or 5) == 5",
        "assert (f(1) or 0) == True",
        "assert helper(f(4)) == 10",
    )
    tests[-1] = TestCase("", tests[-1].expected, metadata={"functions": ["f"], "setup": "def helper(x): return 2 * x"})
    result = await run(sandbox, code, tests, ASSERTS)
    assert passes(result) == "+-++-++-++++-+"
    assert result.results[1].comparison_details == "f(1) returned 2"
    assert result.results[4].comparison_details == "f(3) raised ValueError: three"
    assert result.results[4].execution.run_status is RunStatus.RUNTIME_ERROR
    assert result.results[7].comparison_details == "f(3) raised ValueError: three"
    assert [each.execution.stderr.count("ValueError") for each in result.results] == [
        0,
        0,
        0,
        0,
        1,
        0,
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        0,
    ]
    early = await run(sandbox, code, tests, ASSERTS, stop_on_first_failure=True)
    assert passes(early) == "+" + "-" * 13 and statuses(early)[2:] == ["not_run"] * 12


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("class Same:\n    def __eq__(self, other): return True\ndef f(x): return Same()", "success"),
        ("import os\ndef f(x): os._exit(0)", "runtime_error"),
        ("import sys\ndef f(x): sys.exit(0)", "runtime_error"),
        ("def f(x):\n    while True: pass", "timeout"),
        ("while True: pass", "timeout"),
        ("def f(x): return 'x' * 10**9", "memory_exceeded"),
        ("def f(x): return 'x' * 2 * 10**6", "killed"),
        ("g = 1", "runtime_error"),
        ("raise SystemExit(0)", "runtime_error"),
        ('import os\ndef f(x):\n    os.write(100, b\'[{"value": {"__reduce__": 1}}]\\n\')\n    return 1', "killed"),
        (
            "import os\ndef f(x):\n    os.write(100, b'[{\"value\": {\"complex\": [1' + b'0' * 400 + b', 0]}}]\\n')\n    return 1",
            "killed",
        ),
        ("def f(x): return [0] * 100_000", "success"),
        (
            "import sys\ndef f(x):\n    print('File \"solution.py\", line ' + '9' * 5000, file=sys.stderr)\n    return 0",
            "success",
        ),
        ("def f(x):\n    a = []\n    a.append(a)\n    return a", "runtime_error"),
        ("import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return None", "success"),
    ],
)
async def test_no_function_passes_by_anything_but_its_answer(sandbox, code, status):
    runner = AssertRunner(default_timeout_s=1.0 if status == "timeout" else 20.0)
    tests = asserts("assert f(1) == 2", "for x in [1]:\n    assert f(x) == 2")
    result = await run(sandbox, code, tests, runner)
    assert passes(result) == "--" and statuses(result)[0] == status


async def test_a_program_is_compiled_as_if_it_stood_alone(sandbox):
    """Nothing of the harness rubs off: not its postponed annotations, nor its names."""
    for code in ("def f(x: Undefined): return x", "def f(x): return time.time() or os or sys"):
        result = await run(sandbox, code, asserts("assert f(1)"), ASSERTS)
        assert passes(result) == "-" and "NameError" in result.results[0].execution.stderr


async def test_a_death_in_one_test_leaves_the_others_their_chance(sandbox):
    code = "import os\ndef f(x):\n    if x == 2: os.abort()\n    return x"
    tests = asserts("assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3")
    result = await run(sandbox, code, tests, ASSERTS)
    assert passes(result) == "+-+" and result.results[1].execution.signal == 6


async def test_a_test_that_is_broken_itself_is_no_failure_of_the_program(sandbox):
    with pytest.raises(BrokenSample, match=r"'bad' fails before any answer.*ModuleNotFoundError"):
        test = TestCase("", "for x in []: pass", id="bad", metadata={"functions": ["f"], "setup": "import not_there"})
        await run(sandbox, "def f(x): return x", [test], ASSERTS)
    with pytest.raises(ConfigError, match="needs the list of the names"):
        await run(sandbox, "def f(x): return x", [TestCase("", "assert f(1)")], ASSERTS)


async def test_a_test_that_calls_other_things_each_time_fails_and_says_so(sandbox):
    (test,) = asserts("import time\nfor x in [time.time()]:\n    assert f(x)")
    result = await run(sandbox, "def f(x): return 1", [test], ASSERTS)
    assert "other calls" in result.results[0].comparison_details


async def test_the_programs_inside_also_run_where_python_is_another(sandbox):
    """They are sent as source then; Python 3.8 syntax is not tried here, but the text is that of the files."""
    source = program("serve_tests", "0.0")
    assert source.count("from __future__") == 1 and "import ludic" not in source and "from ludic" not in source
    job = {"mode": "calls", "code": "def f(x): return x", "stop_on_failure": False, "max_output": 1000, "max_reports": 9999,
           "tests": [{"calls": [("f", {"tuple": [{"tuple": [5]}, {"dict": []}]})], "timeout_s": 20, "memory_mb": 200}]}  # fmt: skip
    result = await sandbox.execute(source, stdin=ascii(job), skip_compile=True, timeout_s=60.0)
    assert '"answers":"[{\\"value\\":5}]"' in result.stdout, result


# --- the env on the shared pool ---


async def test_an_agent_mends_its_program_by_what_it_is_told():
    sample = registry.envs.spec("humaneval").example["sample"]
    env = HumanEvalEnv(sample, config=CodeExecConfig(max_attempts=2, timeout_per_test_s=20.0))
    await env.async_reset(seed=0)
    wrong = (await env.async_step({"agent_0": "def without_vowels(text):\n    return text"}))["agent_0"]
    assert "without_vowels('Anna') returned 'Anna'" in wrong.obs and not wrong.terminated
    right = (await env.async_step({"agent_0": env.reference_action("agent_0")}))["agent_0"]
    assert right.reward == 1.0 and right.terminated


async def test_the_lines_of_an_error_are_those_of_the_code_that_was_handed_in():
    sample = registry.envs.spec("humaneval").example["sample"]
    env = HumanEvalEnv(sample, config=CodeExecConfig(max_attempts=3, timeout_per_test_s=20.0))
    await env.async_reset(seed=0)
    for code, told in (
        ("def without_vowels(text):\n    return (", "in line 2"),
        ("    return (", "in line 1"),
        ("def without_vowels(text):\n    pass\n    return text.x", 'File "solution.py", line 3, in without_vowels'),
    ):
        assert told in (await env.async_step({"agent_0": code}))["agent_0"].obs


async def test_many_episodes_share_the_pool_without_mixing_their_results():
    sample = registry.envs.spec("code_exec").example["sample"]

    async def episode(number: int) -> float:
        env = registry.envs.make("code_exec", sample=sample)
        await env.async_reset(seed=number)
        code = sample["solution"] if number % 2 else f"print({number})"
        return (await env.async_step({"agent_0": code}))["agent_0"].reward

    assert await asyncio.gather(*map(episode, range(8))) == [0.0, 1.0] * 4
