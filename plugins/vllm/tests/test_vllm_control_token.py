import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from ludic.http.tokens import CONTROL_HEADER, CONTROL_VARIABLE, make_control_token, read_control_token
from ludic.types import ConfigError
from ludic_vllm.inside.middlewares import ControlGuard


def test_the_token_is_long_and_only_its_owner_may_read_it(tmp_path):
    token = make_control_token(tmp_path / "run")
    file = tmp_path / "run" / "control_token"
    assert len(token) == 64 and file.read_text().strip() == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list((tmp_path / "run").iterdir()) == [file], "nothing else is left behind"


def test_two_folders_have_two_tokens_and_one_folder_keeps_its_own(tmp_path):
    first = make_control_token(tmp_path / "a")
    assert make_control_token(tmp_path / "a") == first != make_control_token(tmp_path / "b")


def test_servers_that_start_at_once_agree(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(lambda _: make_control_token(tmp_path), range(64)))
    assert len(tokens) == 1


def test_a_folder_or_the_file_itself_can_be_read(tmp_path):
    token = make_control_token(tmp_path)
    assert read_control_token(tmp_path) == read_control_token(tmp_path / "control_token") == token


def test_a_token_that_others_can_read_is_refused(tmp_path):
    make_control_token(tmp_path)
    (tmp_path / "control_token").chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644"):
        make_control_token(tmp_path)


def test_a_missing_or_empty_token_is_an_error_that_helps(tmp_path):
    with pytest.raises(ConfigError, match="No control token at"):
        read_control_token(tmp_path)
    (tmp_path / "control_token").touch(mode=0o600)
    with pytest.raises(ConfigError, match="empty"):
        read_control_token(tmp_path)


# --- the guard ---

TOKEN = "s3cret"


class Behind:
    """A tiny ASGI application that notes what reaches it."""

    def __init__(self):
        self.reached = []

    async def __call__(self, scope, receive, send):
        self.reached.append(scope.get("path", scope["type"]))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})


@pytest.fixture
def behind():
    return Behind()


@pytest.fixture
def guard(behind, monkeypatch):
    monkeypatch.setenv(CONTROL_VARIABLE, TOKEN)
    return ControlGuard(behind)


async def ask(guard, method, path, *, token=None, kind="http", root_path=""):
    """The messages that a request is answered with."""
    sent = []

    async def receive():
        raise AssertionError("a request that is refused must not be read")

    async def send(message):
        sent.append(message)

    headers = [] if token is None else [(CONTROL_HEADER.lower().encode(), token.encode())]
    scope = {"type": kind, "method": method, "path": path, "headers": headers, "root_path": root_path}
    await guard(scope, receive, send)
    return sent


CONTROL = [
    ("POST", "/pause"), ("POST", "/resume"), ("POST", "/start_weight_update"), ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"), ("POST", "/init_weight_transfer_engine"), ("POST", "/update_weight_version"),
    ("POST", "/collective_rpc"), ("POST", "/reset_prefix_cache"), ("POST", "/sleep"), ("POST", "/wake_up"),
    ("POST", "/abort_requests"), ("POST", "/inference/v1/abort_requests"), ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"), ("POST", "/scale_elastic_ep"), ("POST", "/start_profile"),
    ("GET", "/server_info"), ("DELETE", "/v1/completions"), ("POST", "/health"), ("GET", "/pause"),
    ("POST", "/something_that_vllm_adds_next_year"),
    # other ways to write the same path
    ("POST", "/pause/"), ("POST", "//pause"), ("POST", "/v1/completions/../../pause"), ("POST", "/health/../pause"),
]  # fmt: skip


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "Bearer " + TOKEN])
@pytest.mark.parametrize(("method", "path"), CONTROL)
async def test_a_control_endpoint_without_the_token_is_answered_401_and_never_reached(
    guard, behind, method, path, token
):
    start, body = await ask(guard, method, path, token=token)
    assert start["status"] == 401 and CONTROL_HEADER.encode() in body["body"]
    assert behind.reached == []


@pytest.mark.parametrize(("method", "path"), CONTROL)
async def test_the_token_opens_every_endpoint(guard, behind, method, path):
    start, _ = await ask(guard, method, path, token=TOKEN)
    assert start["status"] == 200 and behind.reached == [path]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/v1/models"), ("GET", "/weight_info"),
        ("GET", "/is_paused"), ("GET", "/get_world_size"), ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"), ("POST", "/inference/v1/generate"), ("POST", "/tokenize"),
        ("POST", "/detokenize"), ("OPTIONS", "/v1/chat/completions"),
    ],
)  # fmt: skip
async def test_inference_and_read_only_endpoints_need_no_token(guard, behind, method, path):
    start, _ = await ask(guard, method, path)
    assert start["status"] == 200 and behind.reached == [path]


async def test_root_path_is_removed_before_the_check(guard, behind):
    assert (await ask(guard, "GET", "/model/health", root_path="/model"))[0]["status"] == 200
    assert (await ask(guard, "POST", "/model/pause", root_path="/model"))[0]["status"] == 401
    assert behind.reached == ["/model/health"]


async def test_a_websocket_without_the_token_is_closed(guard, behind):
    (closed,) = await ask(guard, "GET", "/v1/realtime", kind="websocket")
    assert closed["type"] == "websocket.close" and behind.reached == []


async def test_lifespan_messages_pass(guard, behind):
    await guard({"type": "lifespan"}, None, None)
    assert behind.reached == ["lifespan"]


@pytest.mark.parametrize("value", [None, ""])
def test_a_server_without_a_token_does_not_start(behind, monkeypatch, value):
    monkeypatch.delenv(CONTROL_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(CONTROL_VARIABLE, value)
    with pytest.raises(ConfigError, match="is not set"):
        ControlGuard(behind)
