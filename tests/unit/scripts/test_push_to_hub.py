"""The uploader, as a separate process, with the real hub client, against a hub on loopback.

The hub keeps what it is sent in memory and speaks the parts of the protocol that an upload takes: repositories, branches,
preupload, LFS, commits. It does not speak Xet, so HF_HUB_DISABLE_XET=1 makes the client use LFS.
"""

import asyncio
import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests import programs, warm_python

pytestmark = pytest.mark.slow

web = pytest.importorskip("aiohttp.web", reason="the serve extra is not installed")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "push_to_hub.py"
TOKEN = "hf_the_right_one"


@dataclass
class FakeRepo:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b"*.x lfs"}})
    messages: list[tuple[str, str]] = field(default_factory=list)


class FakeHub:
    """Its repositories can be looked at while it runs."""

    def __init__(self) -> None:
        self.repos: dict[str, FakeRepo] = {}
        self.blobs: dict[str, bytes] = {}
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._authorised], client_max_size=1 << 26)
        model = "/api/models/{user}/{name}"
        app.router.add_post("/api/repos/create", self._create_repo)
        app.router.add_get(model, self._info)
        app.router.add_post(model + "/branch/{branch}", self._create_branch)
        app.router.add_get(model + "/tree/{branch}", self._tree)
        app.router.add_post(model + "/preupload/{branch}", self._preupload)
        app.router.add_post(model + "/commit/{branch}", self._commit)
        app.router.add_post("/{user}/{name}.git/info/lfs/objects/batch", self._lfs_batch)
        app.router.add_put("/lfs/{oid}", self._lfs_put)
        return app

    @web.middleware
    async def _authorised(self, request, handler):
        if not request.path.startswith("/lfs/") and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid username or password."}, status=401)
        return await handler(request)

    def _repo(self, request) -> FakeRepo:
        return self.repos[f"{request.match_info['user']}/{request.match_info['name']}"]

    def _files(self, request) -> dict[str, bytes]:
        return self._repo(request).branches[unquote(request.match_info["branch"])]

    async def _create_repo(self, request):
        body = await request.json()
        name = f"{body['organization'] or 'me'}/{body['name']}"
        if name.startswith("others/"):
            return web.json_response({"error": "You may not create models under others."}, status=403)
        answer = {"url": f"{self.url}/{name}", "name": name}
        if name in self.repos:
            return web.json_response({**answer, "error": "You already created this model repo"}, status=409)
        self.repos[name] = FakeRepo(private=body.get("visibility") == "private" or bool(body.get("private")))
        return web.json_response(answer)

    async def _info(self, request):
        name = f"{request.match_info['user']}/{request.match_info['name']}"
        if name not in self.repos:
            return web.json_response({"error": "Repository not found"}, status=404)
        return web.json_response({"id": name, "private": self.repos[name].private, "siblings": []})

    async def _create_branch(self, request):
        repo, branch = self._repo(request), unquote(request.match_info["branch"])
        if branch in repo.branches:
            return web.json_response({"error": f"Reference already exists: {branch}"}, status=409)
        repo.branches[branch] = dict(repo.branches["main"])
        return web.json_response({})

    async def _tree(self, request):
        files = self._files(request)
        return web.json_response(
            [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]
        )

    async def _preupload(self, request):
        body = await request.json()
        modes = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for f in body["files"]
        ]
        return web.json_response({"files": modes})

    async def _lfs_batch(self, request):
        body = await request.json()
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}} for each in body["objects"]
        ]
        return web.json_response({"objects": objects, "transfer": "basic"})

    async def _lfs_put(self, request):
        data = await request.read()
        if hashlib.sha256(data).hexdigest() != request.match_info["oid"]:
            return web.Response(status=422)
        self.blobs[request.match_info["oid"]] = data
        return web.Response()

    async def _commit(self, request):
        repo, branch, files = self._repo(request), unquote(request.match_info["branch"]), dict(self._files(request))
        for line in (await request.text()).splitlines():
            row = json.loads(line)
            kind, value = row["key"], row["value"]
            if kind == "header":
                repo.messages.append((branch, value["summary"]))
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        repo.branches[branch] = files
        number = len(repo.messages)
        url = f"{self.url}/{request.match_info['user']}/{request.match_info['name']}/commit/{number:040x}"
        return web.json_response({"commitUrl": url, "commitOid": f"{number:040x}"})


@pytest.fixture
def hub():
    """A hub in a separate thread, gone when the test is over."""
    fake, loop, started = FakeHub(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> web.AppRunner:
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return runner

    def work() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(serve())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has imported what the script imports, and its variables, which the hub client reads when imported."""
    environment = {
        "PATH": os.environ["PATH"], "HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }  # fmt: skip
    path, program = warm_python.socket_and_program(sys.executable)
    imported = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.path.insert(0, sys.argv[2])"
    served = f"{imported}; from tests import programs, warm_python; warm_python.serve(sys.argv[3])"
    server = subprocess.Popen([sys.executable, "-c", served, SCRIPT, ROOT, path], env=environment)
    yield program, environment
    server.terminate()
    server.wait()


@pytest.fixture
def push(hub, python):
    program, environment = python

    def run(*arguments, token=TOKEN):
        command = [program, str(SCRIPT), *map(str, arguments), "--endpoint", hub.url]
        known = environment if token is None else {**environment, "HF_TOKEN": token}
        return subprocess.run(command, capture_output=True, text=True, env=known, timeout=120)

    return run


def checkpoint(folder: Path, **files: str) -> Path:
    """As the trainer writes one, as far as an uploader can tell."""
    folder.mkdir(parents=True)
    contents = {
        "config.json": "{}", "model.safetensors": f"weights of {folder.name}", "tokenizer.json": "{}",
        "ranks/00000-000.safetensors": "o", "optimizer.pt": "o", "trainer_state.json": "{}", **files,
    }  # fmt: skip
    for name, text in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    from ludic.training.checkpoint.manifest import finish_folder

    finish_folder(folder, step=1, serial=1)
    return folder


def test_a_checkpoint_arrives_without_what_only_a_resume_needs(hub, push, tmp_path):
    folder = checkpoint(tmp_path / "step_000007")
    done = push(folder, "me/model", "--private", "--commit-message", "Seven")
    assert done.returncode == 0, done.stderr
    repo = hub.repos["me/model"]
    assert repo.private and repo.messages == [("main", "Seven")]
    assert repo.branches["main"] == {
        ".gitattributes": b"*.x lfs",
        "config.json": b"{}",
        "model.safetensors": b"weights of step_000007",
        "tokenizer.json": b"{}",
    }
    assert "me/model@main: 3 files" in done.stdout and f"{hub.url}/me/model/commit/" in done.stdout


def test_a_revision_is_made_and_main_is_left_alone(hub, push, tmp_path):
    folder = checkpoint(tmp_path / "step_000007")
    assert push(folder, "me/model", "--revision", "exp/seven").returncode == 0
    again = push(folder, "me/model", "--revision", "exp/seven")
    assert again.returncode == 0 and "The branch exp/seven is there already" in again.stdout
    branches = hub.repos["me/model"].branches
    assert branches["exp/seven"]["model.safetensors"] == b"weights of step_000007"
    assert "model.safetensors" not in branches["main"]


def test_all_checkpoints_of_a_run_get_a_branch_each(hub, push, tmp_path):
    for step in (1, 2, 10):
        checkpoint(tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
    done = push(tmp_path / "run", "me/model", "--all")
    assert done.returncode == 0, done.stderr
    repo = hub.repos["me/model"]
    assert [branch for branch, _ in repo.messages] == ["step_000001", "step_000002", "step_000010"]
    assert repo.branches["step_000010"]["model.safetensors"] == b"weights of step_000010"
    assert set(repo.branches["main"]) == {".gitattributes"}


def test_weights_of_an_earlier_checkpoint_under_other_names_go_in_the_same_commit(hub, push, tmp_path):
    before = {"README.md": b"mine", "config.json": b"{}", "model.safetensors": b"old", "adapter_config.json": b"{}"}
    hub.repos["me/model"] = repo = FakeRepo(private=False, branches={"main": before})
    shards = {"model-00001-of-00001.safetensors": "shard", "model.safetensors.index.json": "{}"}
    folder = checkpoint(tmp_path / "sharded", **shards)
    (folder / "manifest.json").unlink()
    (folder / "model.safetensors").unlink()
    done = push(folder, "me/model")
    assert done.returncode == 0 and "2 stale ones removed" in done.stdout
    assert len(repo.messages) == 1
    assert repo.branches["main"].keys() == {"README.md", "config.json", "tokenizer.json", *shards}


@pytest.mark.slow
def test_a_tokenizer_of_a_base_model_goes_along_and_never_over_the_checkpoints_own(hub, push, refused, tmp_path):
    from ludic.models.loading import word_tokenizer

    word_tokenizer(["a", "b"]).save_pretrained(tmp_path / "base")
    folder = checkpoint(tmp_path / "step_000001")
    assert push(folder, "me/model", "--base-model", tmp_path / "base").returncode == 0
    files = hub.repos["me/model"].branches["main"]
    assert files["tokenizer.json"] == b"{}" and b"<|end|>" in files["tokenizer_config.json"]
    assert "gave no tokenizer" in refused(folder, "me/model", "--base-model", tmp_path / "nowhere")


# --- what can go wrong ---


def the_line(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("push_to_hub: ")
    return line


@pytest.mark.parametrize("token", ["hf_wrong", None])
def test_a_token_that_the_hub_does_not_know_says_where_to_put_a_better_one(token, hub, push, tmp_path):
    line = the_line(push(checkpoint(tmp_path / "step_000001"), "me/model", token=token))
    assert "does not accept the token (401" in line and "Set HF_TOKEN" in line and not hub.repos


def test_a_name_that_is_not_ours_is_said(hub, push, tmp_path):
    line = the_line(push(checkpoint(tmp_path / "step_000001"), "others/model"))
    assert "may not write to others/model (403: You may not create models under others.)" in line


def test_a_public_repository_is_not_taken_for_a_private_one(hub, push, tmp_path):
    hub.repos["me/model"] = FakeRepo(private=False)
    line = the_line(push(checkpoint(tmp_path / "step_000001"), "me/model", "--private"))
    assert "exists and is public" in line and not hub.repos["me/model"].messages


# --- mistakes that are found before the hub is asked for anything ---


@pytest.fixture
def refused(capsys):
    """The line that the script says, run in this process."""
    script = programs.load(SCRIPT)

    def run(*arguments, endpoint="http://127.0.0.1:9"):  # no server listens there
        assert script.main([*map(str, arguments), "--endpoint", endpoint]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


def test_a_damaged_checkpoint_keeps_the_whole_run_from_being_sent(refused, tmp_path):
    checkpoint(tmp_path / "run" / "step_000001")
    (checkpoint(tmp_path / "run" / "step_000002") / "model.safetensors").write_text("weights of step_00000X")
    line = refused(tmp_path / "run", "me/model", "--all")
    assert "step_000002 is damaged: model.safetensors is not what was written" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "me/model"], "There is no folder nowhere"),
        (["nowhere", "me/model", "--all"], "There is no folder nowhere"),
        (["{empty}", "me/model"], "holds no weights (*.safetensors); it holds notes.txt"),
        (["{empty}", "me/model", "--all"], "has no checkpoints"),
        (["{good}", "me/my/model"], "'me/my/model' is no repository name"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_that_says_what_to_do(arguments, message, refused, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no weights")
    good = checkpoint(tmp_path / "step_000001")
    line = refused(*(text.format(empty=tmp_path / "empty", good=good) for text in arguments))
    assert line.startswith("push_to_hub: ") and message in line


def test_all_and_a_revision_contradict_each_other(refused, capsys):
    with pytest.raises(SystemExit):
        refused("run", "me/model", "--all", "--revision", "x")
    assert "does not go with --revision" in capsys.readouterr().err
