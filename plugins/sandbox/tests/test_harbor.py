"""Harbor tasks in real workspaces: solutions earn their reward, hostile agents earn nothing, faults leave nothing behind."""

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from ludic.agents import ReActAgent
from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import InferenceSpec, ReturnSpec, Rollout, SamplingParams, StopReason
from ludic_sandbox import SandboxLimits, is_bubblewrap_available
from ludic_sandbox.harbor import HarborEnv, find_tasks
from ludic_sandbox.harbor.workspace import BubblewrapWorkspace, LocalWorkspace
from ludic_serve.gateway import AgentCommand, AgentFunction, GatewayProtocol
from plugins.sandbox.tests.sandbox_pools import IMAGE, SHOW_USR, podman_config
from tests.fakes import make_agent
from tests.unit.agents.test_tool_agents import call

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here"),
]
ROOT = Path(__file__).parents[3]
TASKS = find_tasks(ROOT / "examples" / "harbor_tasks")
BOTH = pytest.mark.parametrize("workspace", ["bubblewrap", "unsafe-local"])
TASK = {
    "task.toml": "[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 20\n",
    "instruction.md": "Write the word yes to /app/answer.txt.",
    "environment/Dockerfile": "FROM x\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\nsleep 0.2\nif grep -qx yes /app/answer.txt; then r=1; else r=0; fi\n"
    "echo $r > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\necho yes > /app/answer.txt\n",
}


def small_env(**settings) -> HarborEnv:
    return HarborEnv({"id": "small", "files": {**TASK, **settings.pop("files", {})}}, **settings)


async def opened(env: HarborEnv, seed: int = 0) -> HarborEnv:
    await env.async_reset(seed=seed)
    return env


async def ended(env: HarborEnv, action: str = "finished"):
    return (await env.async_step({"agent_0": action}))["agent_0"]


def processes_below(pid: int) -> set[int]:
    children = [int(c) for f in Path(f"/proc/{pid}/task").glob("*/children") for c in f.read_text().split()]
    return {one for child in children for one in (child, *processes_below(child))}


@pytest.fixture
def nothing_left():
    """No process, temporary folder or memory group of a workspace outlives the test."""

    def found() -> tuple[set[int], set[str], set[str]]:
        groups = Path("/sys/fs/cgroup/memory/ludic-sandbox")
        own = {p.name for p in groups.iterdir() if p.name.startswith(f"{os.getpid()}-")} if groups.is_dir() else set()
        folders = {path.name for path in Path("/tmp").glob("ludic-workspace-*") if path.stat().st_uid in (0, 64_999)}
        return processes_below(os.getpid()), folders, own

    before = found()
    yield
    after = found()
    assert not after[0] - before[0] and not after[2] - before[2]
    assert {name for name in after[1] - before[1] if Path("/tmp", name).exists()} == set()


# --- tasks and solutions ---


@pytest.mark.parametrize("folder", TASKS, ids=lambda folder: folder.name)
async def test_an_example_task_gives_its_solution_full_reward_and_an_empty_attempt_none(folder, nothing_left):
    env = await opened(HarborEnv(task=str(folder)))
    assert (await env.solve()).exit_code == 0
    assert (await ended(env)).reward == 1.0
    outcome = await ended(await opened(env))
    assert outcome.reward == 0.0 and outcome.info["grading_problem"] == ""
    local = await opened(HarborEnv(task=str(folder), workspace="unsafe-local"))
    await local.solve()
    assert (await ended(local)).reward == 1.0


async def test_a_terminal_bench_task_is_graded_by_the_exit_code():
    files = {
        "task.yaml": "instruction: Make /app/x.\n",
        "run-tests.sh": "#!/bin/bash\nbash $TEST_DIR/check.sh\n",
        "tests/check.sh": "test -e /app/x\n",
        "solution.sh": "touch /app/x\n",
    }
    env = await opened(HarborEnv({"files": files}))
    assert (await ended(env)).reward == 0.0
    await env.async_reset(seed=0)
    await env.shell("touch x")
    outcome = await ended(env)
    assert outcome.reward == 1.0 and outcome.info["test_exit_code"] == 0


# --- agents ---


async def test_the_react_agent_solves_a_task_with_the_shell_tool():
    replies = [call("shell", command="pwd; ls /tests"), call("shell", command="echo yes > answer.txt"), "It is solved."]
    agent = make_agent(replies, cls=ReActAgent, parser=raw_parser, max_react_steps=5)
    (rollout,) = await SingleAgentProtocol(agent).run(env=small_env(), max_steps=2, env_seed=0)
    assert [step.action_target for step in rollout.agent_steps] == ["internal", "internal", "env"]
    assert rollout.agent_steps[0].tool_results[0]["content"] == "/app", "the tests are not there yet"
    assert rollout.stop is StopReason.TERMINATED and rollout.total_reward == 1.0


async def test_commands_as_actions_show_their_output_and_end_with_done():
    env = small_env(play="commands", max_commands=4)
    assert env.episode_tools("agent_0") == ()
    await env.async_reset(seed=0)
    assert (await ended(env, "```bash\necho one; false\n```")).obs == "one\n[exit code 1]"
    assert "no command" in (await ended(env, "I wonder\nwhat to do")).obs
    assert (await ended(env, "echo yes > answer.txt")).obs == "[no output]"
    outcome = await ended(env, "DONE")
    assert outcome.reward == 1.0 and outcome.terminated and outcome.info["num_commands"] == 3


async def test_the_last_command_ends_the_episode():
    env = await opened(small_env(play="commands", max_commands=2))
    assert not (await ended(env, "true")).terminated
    assert (await ended(env, "echo yes > answer.txt")).reward == 1.0


async def test_both_workspaces_show_a_command_the_same():
    commands = [
        "pwd; echo $HOME; echo a > /tmp/a; cat /tmp/a /app/../tmp/a",
        "cd /app && mkdir -p x/y && cd x/y && pwd && pwd -P",
        "echo out; echo err >&2; exit 3",
        'python3 -c \'import os; print(os.getcwd()); open("/app/f", "w").write("z")\'; cat /app/f',
        "yes | head -c 9000",
        "cat /nowhere; kill -9 $$",
    ]
    seen = []
    for workspace in ("bubblewrap", "unsafe-local"):
        env = await opened(small_env(workspace=workspace))
        seen.append([await env.shell(command) for command in commands])
        await env.async_close()
    assert seen[0] == seen[1]


# --- outside agents ---


async def read_tools(task, base_url, api_key, model, tools, tools_url):
    """Ask once, call tools in three ways, and answer with what came back."""
    async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {api_key}"}) as client:
        messages = [{"role": "user", "content": task}]
        await client.post(f"{base_url}/chat/completions", json={"model": model, "messages": messages})
        listed = (await client.get(tools_url)).json()["tools"]
        made = (await client.post(f"{tools_url}/shell", json={"command": "echo yes > answer.txt; pwd"})).json()
        wrong = (await client.post(f"{tools_url}/shell", json={"cmd": "ls"})).json()
        missing = await client.post(f"{tools_url}/sing", json={})
        stranger = await client.post(f"{tools_url}/shell", json={}, headers={"Authorization": "Bearer other"})
    return [listed == [*tools], made, wrong["is_error"], missing.status_code, stranger.status_code]


async def play_outside(agent, replies, env) -> Rollout:
    template = ByteTemplate(tool_parser=HermesToolParser())
    client = ScriptedClient(replies)
    made = GatewayProtocol(agent, client=client, model="small", chat_template=template)
    inference = InferenceSpec(sampling=SamplingParams(max_tokens=200), return_=ReturnSpec.for_rl())
    try:
        (rollout,) = await made.run(env=env, max_steps=1, env_seed=0, sampling_seed=0, inference=inference)
    finally:
        await made.agent.close()
    return rollout


async def test_an_outside_agent_calls_the_tools_of_the_env_at_the_gateway():
    env = small_env()
    answers = []

    async def agent(task, *, base_url, api_key, model, tools, tools_url):
        answers.append(await read_tools(task, base_url, api_key, model, tools, tools_url))

    rollout = await play_outside(AgentFunction(agent), ["I look."], env)
    assert answers == [[True, {"content": "/app", "is_error": False}, True, 404, 401]]
    assert rollout.total_reward == 1.0 and env._workspace is None


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_the_example_agent_solves_a_task_from_outside(kind, nothing_left):
    path = ROOT / "examples" / "harbor_tasks" / "agent.py"
    replies = ["```bash\npwd\n```", "```bash\necho yes > answer.txt\n```", "It is solved."]
    function = runpy.run_path(str(path))["solve"]
    agent = AgentFunction(function) if kind == "function" else AgentCommand(f"python3 {path}", binds=[path.parent])
    rollout = await play_outside(agent, replies, small_env())
    assert rollout.total_reward == 1.0 and len(rollout.agent_steps) == 3


# --- hostile agents ---

FORGED = "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json"  # no quotes: it is quoted below
ATTACKS = {
    "writes the reward": FORGED,
    "locks its reward": f"{FORGED}; chmod 000 /logs/verifier; chmod 555 /logs",
    "links the reward": f"mkdir /app/v; rm -rf /logs/verifier; ln -s /app/v /logs/verifier; {FORGED}",
    "writes the tests": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests/test.sh /tests",
    "leaves a process": f"(setsid nohup bash -c 'trap \"\" TERM INT HUP; while :; do {FORGED}; done' >/dev/null 2>&1 &)",
    "leaves many processes": f"for i in 1 2 3 4 5 6; do (setsid bash -c 'while :; do {FORGED}; done' >/dev/null 2>&1 &) ; done",
}


@BOTH
@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_forged_reward_counts_for_nothing(workspace, attack, nothing_left):
    env = await opened(small_env(workspace=workspace))
    await env.shell(ATTACKS[attack])
    outcome = await ended(env)
    assert outcome.reward == 0.0 and outcome.info["rewards"] == {"reward": 0.0}, outcome.info


@BOTH
async def test_code_that_an_agent_leaves_for_python_does_not_run_in_the_tests(workspace):
    test = "#!/bin/bash\npython3 /tests/check.py && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
    files = {"tests/test.sh": test, "tests/check.py": "assert open('/app/answer.txt').read() == 'yes'\n"}
    env = await opened(small_env(workspace=workspace, files=files))
    await env.shell(
        "folder=$(python3 -m site --user-site); mkdir -p $folder; cd $folder; echo 'import os; os._exit(0)' > usercustomize.py; "
        "cp usercustomize.py sitecustomize.py; cp usercustomize.py /app/sitecustomize.py"
    )
    assert (await ended(env)).reward == 0.0


async def test_tests_and_solution_are_not_there_before_grading():
    env = await opened(small_env())
    assert await env.shell("find /tests /solution -mindepth 1") == "[no output]"
    await env.async_close()


async def test_system_folders_cannot_be_changed():
    env = await opened(small_env())
    shown = await env.shell(
        "touch /usr/bin/x /etc/ld.so.preload; rm /bin; echo x > /usr/bin/env; unshare -m true; ls -d /bin"
    )
    assert shown.count("Read-only file system") >= 3 and shown.endswith("/bin")
    await env.async_close()


async def test_an_agent_that_ends_its_workspace_earns_nothing(nothing_left):
    env = await opened(small_env())
    await env.shell("echo yes > answer.txt")
    assert "ended the whole workspace" in await env.shell("kill -INT 1; sleep 5")
    assert "has ended" in await env.shell("ls")
    outcome = await ended(env)
    assert outcome.reward == 0.0 and "has ended" in outcome.info["grading_problem"]


async def test_tests_that_hang_give_no_reward():
    env = await opened(small_env(test_timeout_s=0.3, files={"tests/test.sh": "#!/bin/bash\nsleep 60\n"}))
    outcome = await ended(env)
    assert outcome.reward == 0.0 and "did not end" in outcome.info["grading_problem"]


# --- faults ---


@BOTH
async def test_a_hanging_command_is_ended_and_the_next_one_runs(workspace, nothing_left):
    env = await opened(small_env(workspace=workspace, command_timeout_s=0.3))
    assert "It ran longer than it may." in await env.shell("echo begun; sleep 60 & sleep 60")
    env.command_timeout_s = 60.0  # a busy machine may take a second to begin the next one
    assert await env.shell("echo yes > answer.txt; echo ok") == "ok"
    assert (await ended(env)).reward == 1.0


async def test_the_time_of_the_task_is_the_time_of_its_commands():
    env = await opened(small_env(agent_timeout_s=0.4))
    assert "longer than it may" in await env.shell("sleep 60")
    assert "time for this task is up" in await env.shell("echo yes > answer.txt")
    assert (await ended(env)).reward == 0.0


async def test_a_full_disk_ends_neither_the_workspace_nor_its_grading():
    env = await opened(small_env(storage_mb=4))
    full = await env.shell(
        "echo yes > answer.txt; for d in /app /tmp /logs /tests /root; do cat /dev/zero > $d/zero; done"
    )
    assert full.count("No space left on device") + full.count("File size limit") >= 4
    assert (await ended(env)).reward == 1.0


async def test_files_that_do_not_fit_fail_the_episode():
    big = {"environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY big .\n", "environment/big": "x" * 3_000_000}
    with pytest.raises(RuntimeError, match="No space left on device"):
        await small_env(storage_mb=2, files=big).async_reset(seed=0)


@BOTH
async def test_a_killed_workspace_ends_its_command_and_earns_nothing(workspace, nothing_left):
    env = await opened(small_env(workspace=workspace))
    running = asyncio.create_task(env.shell("sleep 600 & sleep 600"))
    below = lambda: {p for p in processes_below(os.getpid()) if b"sleep" in Path(f"/proc/{p}/cmdline").read_bytes()}  # noqa: E731
    while len(below()) < 2:
        await asyncio.sleep(0.02)
    os.kill(env._workspace.pid, signal.SIGKILL)
    assert "ended the whole workspace" in await asyncio.wait_for(running, 30)
    assert (await ended(env)).reward == 0.0


async def test_closing_ends_a_running_command(nothing_left):
    for kind in (BubblewrapWorkspace, LocalWorkspace):
        workspace = await kind.open(SandboxLimits(), ["/app", "/tmp", "/root"])
        running = asyncio.create_task(
            workspace.run("(setsid sleep 600 &) ; echo up > /tmp/up; sleep 600", timeout_s=600)
        )
        await asyncio.sleep(0.3)
        await workspace.close()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_many_workspaces_run_side_by_side(nothing_left):
    envs = await asyncio.gather(*(opened(small_env()) for _ in range(12)))
    await asyncio.gather(*(env.shell(f"echo {n} > n; sleep 0.05") for n, env in enumerate(envs)))
    assert await asyncio.gather(*(env.shell("cat n") for env in envs)) == [str(n) for n in range(12)]
    await asyncio.gather(*(env.async_close() for env in envs))


HARNESS = f"""
import asyncio
from ludic_sandbox.harbor import HarborEnv

TASK = {TASK}

async def main():
    env = HarborEnv({{"id": "small", "files": TASK}})
    await env.async_reset(seed=0)
    running = asyncio.create_task(env.shell("(setsid sleep 600 &) ; sleep 600"))
    await asyncio.sleep(0.5)
    print("running", flush=True)
    await running

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_harness():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    harness = subprocess.Popen([sys.executable, "-c", HARNESS], stdout=subprocess.PIPE, env=env)
    assert harness.stdout is not None and harness.stdout.readline() == b"running\n"
    below = processes_below(harness.pid)
    assert len(below) >= 4, "bwrap, its supervisor, a shell and two sleeps"
    harness.kill()
    harness.wait(timeout=60)
    harness.stdout.close()
    deadline = time.monotonic() + 30
    while any(map(is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in below if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- containers ---


async def test_a_task_in_a_podman_container_is_built_solved_and_graded():
    podman_config()  # skips where podman cannot run a container, and makes the image
    files = {
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nENV WORD=yes\nCOPY note.txt .\n",
        "environment/note.txt": "here",
    }
    env = small_env(workspace="podman", container_args=SHOW_USR, files=files, command_timeout_s=20)
    await env.async_reset(seed=0)
    assert await env.shell("pwd; cat note.txt; echo; ls /tests") == "/app\nhere"
    await env.shell(ATTACKS["leaves a process"])
    assert (await ended(env)).reward == 0.0
    await env.async_reset(seed=0)
    assert await env.shell("echo $WORD > answer.txt; exit 4") == "[exit code 4]"
    assert (await ended(env)).reward == 1.0
    left = subprocess.run(["podman", "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True).stdout
    assert f"ludic-{os.getpid()}-" not in left
