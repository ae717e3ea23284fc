"""Agent commands, sandboxed and plain, against a small server in the place of the gateway."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ludic.types import ConfigError
from ludic_sandbox import bubblewrap, is_bubblewrap_available
from ludic_sandbox.runner.cgroup import memory_groups
from ludic_serve.gateway import agents
from ludic_serve.gateway.agents import AgentCall, AgentCommand, split_command

pytestmark = pytest.mark.slow

SANDBOXES = [
    "none",
    pytest.param(
        "bubblewrap", marks=pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
    ),
]
ASK = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))["text"], end="")
"""

# Node's fetch runs WebAssembly, which reserves 10 GB of address space.
ASK_IN_NODE = """
const answer = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: {"Content-Type": "application/json", Authorization: "Bearer " + process.env.OPENAI_API_KEY},
  body: JSON.stringify({model: process.env.OPENAI_MODEL, messages: [{role: "user", content: process.argv[2]}]}),
});
process.stdout.write((await answer.json()).text);
"""


class Server:
    """Answers every request with the key and the last message; notes the requests in flight."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "gateway.sock"
        self.begun = asyncio.Event()
        self.is_slow = False
        self.num_open = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_open += 1
        self.begun.set()
        try:
            if self.is_slow:
                await asyncio.sleep(60)
        finally:
            self.num_open -= 1
        said = body["messages"][-1]["content"]
        return web.json_response({"text": f"{request.headers['Authorization']} {body['model']} {said}"})

    def call(self, task: object = "2 + 2?") -> AgentCall:
        return AgentCall(
            task=task, base_url=self.base_url, api_key="key-1", model="small", session_id="s1", socket=self.socket
        )


@pytest.fixture
async def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("g")
    folder.chmod(0o700)
    server = Server(folder)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    await web.UnixSite(runner, str(server.socket)).start()
    server.socket.chmod(0o666)
    for name in ("passwd", "hosts"):
        (folder / name).write_text("")
    port = runner.addresses[0][1]
    server.base_url = f"http://127.0.0.1:{port}/v1"
    yield server
    await runner.cleanup()


@pytest.fixture
def here(tmp_path_factory, monkeypatch):
    """The folder that commands start in."""
    folder = tmp_path_factory.mktemp("work")
    folder.chmod(0o755)
    (folder / "ask.py").write_text(ASK)
    (folder / "ask.py").chmod(0o644)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
async def make():
    """Makes agents, and closes them."""
    made: list[AgentCommand] = []

    def make_one(*arguments: Any, **settings: Any) -> AgentCommand:
        made.append(AgentCommand(*arguments, **settings))
        return made[-1]

    yield make_one
    for agent in made:
        await agent.close()


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_a_command_calls_the_model_and_answers_on_stdout(make, server, here, sandbox):
    agent = make("python ask.py {task}", sandbox=sandbox)
    assert await agent.answer(server.call()) == "Bearer key-1 small 2 + 2?"


@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node (make system)")
@pytest.mark.parametrize("has_cgroup", [True, False])
async def test_a_node_program_calls_the_model_with_fetch(make, server, here, monkeypatch, has_cgroup):
    if not has_cgroup:
        monkeypatch.setattr(bubblewrap, "memory_groups", lambda: None)
    (here / "ask.mjs").write_text(ASK_IN_NODE)
    assert await make("node ask.mjs {task}").answer(server.call()) == "Bearer key-1 small 2 + 2?"


@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
@pytest.mark.skipif(memory_groups() is None, reason="no memory cgroup can be made here")
async def test_a_command_and_its_children_share_the_memory_that_they_may_use(make, server, here):
    (here / "two.py").write_text(
        "import subprocess, sys\n"
        "held = bytearray(120 << 20)\n"
        "subprocess.run([sys.executable, '-c', 'bytearray(120 << 20)'], check=True)\n"
    )
    assert await make("python two.py", memory_mb=400).answer(server.call()) == ""
    with pytest.raises(RuntimeError, match="ran out of memory. It may use 200 MB; raise --agent-memory"):
        await make("python two.py", memory_mb=200).answer(server.call())


@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
async def test_without_a_memory_cgroup_the_refused_flag_is_not_advised(make, server, here, monkeypatch):
    monkeypatch.setattr(bubblewrap, "memory_groups", lambda: None)
    monkeypatch.setattr(agents, "AGENT_LIMITS", replace(agents.AGENT_LIMITS, memory_mb=100))
    (here / "full.py").write_text("import os\nheld = bytearray(b'x' * (120 << 20))\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(RuntimeError, match="ran out of memory") as raised:
        await make("python full.py").answer(server.call())
    assert "--agent-memory" not in str(raised.value)


@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
def test_a_memory_limit_that_cannot_be_kept_is_refused(here, monkeypatch):
    with pytest.raises(ConfigError, match="--agent-memory 200 limits the sandbox, but --agent-sandbox none has none"):
        AgentCommand("true", sandbox="none", memory_mb=200)
    monkeypatch.setattr(bubblewrap, "memory_groups", lambda: None)
    with pytest.raises(ConfigError, match="--agent-memory 200 needs a memory cgroup"):
        AgentCommand("true", memory_mb=200)


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_placeholders_and_variables(make, server, here, sandbox):
    (here / "show.py").write_text("import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))")
    task = "say '{model}' \"$HOME\"\n; rm -rf *"
    agent = make("python show.py {task} --url={base_url} {api_key}:{model} {other}", sandbox=sandbox)
    argv, env = json.loads(await agent.answer(server.call(task)))
    url = server.base_url if sandbox == "none" else "http://127.0.0.1:8000/v1"
    assert argv == [task, f"--url={url}", "key-1:small", "{other}"]
    assert env["OPENAI_BASE_URL"] == url and env["ANTHROPIC_BASE_URL"] == url.removesuffix("/v1")
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_AUTH_TOKEN"] == "key-1"
    assert env["OPENAI_MODEL"] == env["ANTHROPIC_MODEL"] == "small"
    assert env["LUDIC_TASK"] == task and env["LUDIC_SESSION"] == "s1"


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_a_task_that_is_no_text_is_given_as_json(make, server, here, sandbox):
    agent = make("printenv LUDIC_TASK", sandbox=sandbox)
    assert json.loads(await agent.answer(server.call({"question": "2 + 2?"}))) == {"question": "2 + 2?"}


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_a_non_zero_exit_code_fails_with_the_end_of_stderr(make, server, here, sandbox):
    agent = make("sh -c 'echo answer; echo first >&2; echo the reason >&2; exit 3'", sandbox=sandbox)
    with pytest.raises(RuntimeError, match=r"ended with exit code 3(.|\n)*stderr:\nfirst\nthe reason\Z"):
        await agent.answer(server.call())


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_cancelling_kills_the_command_its_children_and_their_model_calls(make, server, here, sandbox):
    server.is_slow = True
    agent = make("sh -c 'python ask.py hello & python ask.py again; wait'", sandbox=sandbox)
    running = asyncio.create_task(agent.answer(server.call()))
    await server.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(60):
        while server.num_open:
            await asyncio.sleep(0.01)


async def test_children_that_outlive_a_plain_command_are_killed(make, server, here):
    agent = make("sh -c 'sleep 1000 & echo $!'", sandbox="none")
    child = int(await agent.answer(server.call()))
    async with asyncio.timeout(60):
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            await asyncio.sleep(0.01)


@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
async def test_a_sandboxed_command_reaches_the_gateway_only(make, server, here, tmp_path_factory):
    hidden = tmp_path_factory.mktemp("hidden")
    listener = socket.create_server(("127.0.0.1", 0))
    (here / "probe.py").write_text(
        "import json, os, socket, sys\n"
        "def reach(port):\n"
        "    try: socket.create_connection(('127.0.0.1', port), 2).close(); return 'reached'\n"
        "    except OSError as e: return type(e).__name__\n"
        "def write(path):\n"
        "    try: open(path, 'w').close(); return 'written'\n"
        "    except OSError as e: return type(e).__name__\n"
        "print(json.dumps([reach(8000), reach(int(sys.argv[1])), write('new'), write(os.environ['HOME'] + '/new'),\n"
        "    os.path.exists(sys.argv[2])]))\n"
    )
    agent = make(f"python probe.py {listener.getsockname()[1]} {hidden}")
    with listener:
        found = json.loads(await agent.answer(server.call()))
    assert found == ["reached", "ConnectionRefusedError", "OSError", "written", False]
    assert not (here / "new").exists()


@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
async def test_a_folder_is_shown_by_binding_it(make, server, here, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    other.chmod(0o755)
    (other / "agent").write_text("#!/bin/sh\necho from the other folder\n")
    (other / "agent").chmod(0o755)
    with pytest.raises(ConfigError, match=f"does not show {other}/agent.*--agent-bind {other}"):
        make(f"{other}/agent {{task}}")
    assert await make(f"{other}/agent {{task}}", binds=[other]).answer(server.call()) == "from the other folder\n"


async def test_too_much_output_fails(make, server, here):
    agent = make([sys.executable, "-c", "print('x' * (9 << 20))"], sandbox="none")
    with pytest.raises(RuntimeError, match="more than 8 MB"):
        await agent.answer(server.call())


async def test_a_plain_command_has_the_environment_of_the_run(make, server, here, monkeypatch):
    monkeypatch.setenv("MY_SETTING", "on")
    assert await make("printenv MY_SETTING", sandbox="none").answer(server.call()) == "on\n"


def test_mistakes_in_a_command_are_named():
    with pytest.raises(ConfigError, match=r"has \{taks\}. Did you mean \{task\}"):
        split_command("my-agent {taks}")
    with pytest.raises(ConfigError, match="No closing quotation"):
        split_command("my-agent 'task")
    with pytest.raises(ConfigError, match="is empty"):
        split_command("  ")
    with pytest.raises(ConfigError, match="no program 'no-such-agent'"):
        AgentCommand("no-such-agent {task}", sandbox="none")
    with pytest.raises(ConfigError, match="no such file or folder"):
        AgentCommand("true", binds=["/no/such/folder"])
    assert split_command("awk '{print $1}'") == ["awk", "{print $1}"]


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_a_command_that_is_killed_from_outside_ends_its_episode(make, server, here, sandbox):
    server.is_slow = True
    mark = f"--{here}-{sandbox}"
    agent = make(f"python ask.py {{task}} {mark}", sandbox=sandbox)
    running = asyncio.create_task(agent.answer(server.call("kill me")))
    await server.begun.wait()
    os.kill(_process_with(mark, "ask.py"), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"ended by (SIGKILL|signal 9)"):
        await running


def _process_with(*arguments: str) -> int:
    """The process with these arguments that is not the forwarder: the innermost one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if set(arguments) <= set(argv) and "-c" not in argv:
                found.append(int(folder.name))
    (pid,) = found
    return pid


@pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here")
def test_a_folder_that_the_sandbox_of_root_cannot_read_is_named(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match=rf"may not read {tmp_path}.*chmod o\+rx"):
        AgentCommand("/bin/true {task}", sandbox="bubblewrap")
