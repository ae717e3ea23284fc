"""docs/gateway.md and the agents that it names run as they stand, over a scripted model; the first one learns."""

import asyncio
import re
import runpy
import shutil
import socket
from pathlib import Path

import pytest

from ludic.inference import HFChatTemplate, ScriptedClient, tool_parser_for
from ludic_serve.gateway.server import Gateway
from ludic_serve.gateway.session import Policy
from tests.contract.pages import BLOCK, DOCS, run
from tests.unit.inference.test_real_templates import tokenizer_of

pytestmark = pytest.mark.integration

PAGE = (DOCS / "gateway.md").read_text()
SECTIONS = {
    section.partition("\n")[0]: BLOCK.findall(section) for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)
}
AGENTS = sorted((DOCS.parent / "examples" / "gateway_agents").glob("*.py"))
CALL = '<tool_call>\n{"name":"weather", "arguments": {"city" : "%s"}}\n</tool_call>'
SCRIPT = [f"I look. {CALL % 'Rome'}\n{CALL % 'Bern'}", CALL % "Oslo", "Sunny everywhere."]


def test_the_page_names_the_agent_of_every_framework():
    named = re.findall(r"\(\.\./examples/gateway_agents/(\w+)\.py\)", PAGE)
    assert sorted(named) == [file.stem for file in AGENTS] and len(named) == 6


@pytest.mark.parametrize("file", AGENTS, ids=lambda file: file.stem)
@pytest.mark.slow
async def test_an_agent_of_a_framework_is_one_exact_chain(file: Path):
    names = runpy.run_path(str(file))
    tokenizer = tokenizer_of("qwen2_5")
    template = HFChatTemplate(tokenizer, tool_parser=tool_parser_for(tokenizer))
    policy = Policy(client=ScriptedClient(SCRIPT, tokenizer=tokenizer), chat_template=template, model="m")
    gateway = Gateway({"policy": policy}, default="policy")
    await gateway.start()
    try:
        session = gateway.open_session()
        async with asyncio.timeout(60):
            answer = await names["agent"](
                "Is it sunny?", base_url=session.base_url, api_key=session.api_key, model="policy"
            )
    finally:
        await gateway.close()
    assert answer == SCRIPT[-1]
    counts = session.counts
    assert counts["calls"] == 3 and counts["continued"] + counts["healed"] == 2, counts
    shown = tokenizer.decode(session.nodes[-1].trace.prompt_token_ids.tolist())
    assert all(f"{city}: sunny" in shown for city in ("Rome", "Bern", "Oslo"))


@pytest.mark.docs
def test_the_first_agent_learns(tmp_path: Path):
    [(_, code)] = SECTIONS["# Training an agent that exists already"]
    assert code.removeprefix("# learns.py\n") in (DOCS.parent / "README.md").read_text(), "the README has it too"
    printed = run("python", code, tmp_path).strip().splitlines()[-1]
    assert re.fullmatch(r"(0\.[89]|1\.0) of the characters are digits", printed), printed


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed (`make system`)")
def test_a_command_is_an_agent(tmp_path: Path):
    tmp_path.chmod(0o755)  # as root, the sandbox has another user
    for language, code in SECTIONS["Commands"]:
        if language == "python":
            (tmp_path / "ask.py").write_text(code)
        else:
            run(language, code, tmp_path)
    assert list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="curl and jq are not installed")
def test_a_session_of_another_language_is_saved(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    [(_, code)] = SECTIONS["Other languages, other machines"]
    printed = run("bash", code.replace("8001", str(port)), tmp_path)
    assert '"rollouts": 1' in printed and (tmp_path / "sessions.jsonl").stat().st_size > 0
