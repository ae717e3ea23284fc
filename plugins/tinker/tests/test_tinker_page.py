"""docs/tinker.md: the programs that it names run as they stand, on a fake of the service, with a tokenizer that it names.
docs/tinker-server.md: its Python runs against a server."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

from ludic.models.loading import character_tokenizer, tiny_llama
from ludic_tinker.server.sampling import Offer
from plugins.tinker.tests.server.running import KEY, RunningServer
from tests.chat_templates import make_tokenizer
from tests.contract.pages import DOCS
from tests.tinker_fake import FakeTinker

pytestmark = pytest.mark.docs

PAGE = (DOCS / "tinker.md").read_text()
LIBRARY, MINIMAL = (DOCS / name for name in re.findall(r"\((\.\./examples/tinker_service/\w+\.py)\)", PAGE))
SERVER_PAGE = (DOCS / "tinker-server.md").read_text()
MODEL = "Qwen/Qwen3-4B-Instruct-2507"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTinker]:
    tokenizer = make_tokenizer("qwen")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    base = tiny_llama(len(tokenizer), width=32, layers=2)
    with FakeTinker({MODEL: base}, eos_id=tokenizer.eos_token_id, context=256) as service:
        service.tokenizer_id = str(tmp_path / "tokenizer")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TINKER_BASE_URL", service.url)
        monkeypatch.setenv("TINKER_API_KEY", service.api_key)
        monkeypatch.setenv("TINKER_PROJECT_ID", "project-1")
        monkeypatch.setenv("TINKER_TELEMETRY", "0")
        yield service


def test_the_program_for_the_library_runs(fake: FakeTinker, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(LIBRARY), run_name="page")
    printed = capsys.readouterr().out
    assert len(re.findall(r"step \d \| train/avg_total_reward [\d.e-]+ \| train/loss", printed)) == 3
    assert printed.strip().endswith("/sampler_weights/vowels")
    assert fake.run.num_steps == 3
    assert sorted(path.name for path in (tmp_path / "runs/vowels/checkpoints").glob("step_*")) == [
        "step_000002",
        "step_000003",
    ]
    assert fake.asked("create_session")[0]["project_id"] == "project-1"


def test_the_program_for_the_minimal_loop_runs(fake: FakeTinker):
    runpy.run_path(str(MINIMAL), run_name="page")
    assert 1 <= fake.run.num_steps <= 2, "a step whose groups have no spread teaches nothing"
    assert fake.asked("sessions/session-0/finish")


def test_the_program_of_the_servers_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (program,) = re.findall(r"```python\n(.*?)```", SERVER_PAGE, re.DOTALL)
    (name,) = re.findall(r'base_model="([^"]+)"', program)
    assert f"ludic serve --tinker --model {name} " in SERVER_PAGE
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    offer = Offer(names=(name,), max_context=64, tokenizer_id=str(tmp_path))
    with RunningServer(model=tiny_llama(len(tokenizer), width=32, layers=2), offer=offer) as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        monkeypatch.setenv("TINKER_TELEMETRY", "0")
        made: dict[str, Any] = {}
        exec(compile(program, "docs/tinker-server.md", "exec"), made)
        made["training"].holder.close()  # or its heartbeats look for a server that has gone
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
