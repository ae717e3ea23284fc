"""Logins in URLs: hidden in messages, refused in settings, and sent only to their own server."""

import http.server
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.cli.eval.config import PolicySettings
from ludic.http.client import EndpointError
from ludic.inference.openai_client import OpenAIChatClient
from ludic.run.config.rollouts import RolloutSettings
from ludic.run.config.training import AlgoSettings
from ludic.types import ConfigError, shown_url
from ludic.util.urls import LOGINS_VARIABLE, holds_login, is_same_secret, login_of, without_login
from ludic_pipeline.feature import PipelineSettings
from ludic_vllm.client import VLLMChatClient

WITH_LOGINS = [
    "redis://hunter2@host:6379/0",
    "redis://:hunter2@host:6379/0",
    "redis://me:hunter2@host:6379/0",
    "rediss://me:hunter2@host/0?ssl_ca_certs=x",
    "redis://host:6379/0?password=hunter2",
    "redis://host:6379/0?db=1&PASSWORD=hunter2",
    "rediss://host/0?ssl_password=hunter2",
    "unix://me:hunter2@/tmp/redis.sock",
    "redis://:hunt#er2hunter2@host:6379",
    "redis://:hunt/hunter2@host:6379",
    "redis://:12/hunter2@host:6379",
    "redis://:12?hunter2@host:6379",
    "http://me:hunter2@host:8000",
    "https://hunter2@host:8000/v1",
    "https://host/v1?api_key=hunter2",
    "https://host/v1?X-Token=hunter2",
    "https://host/v1?signature=hunter2",
    "http://me:hunter2@[::1]:8000",
    "http://me:hunter2@host:port",
    "http://[hunter2@host",
]


@pytest.mark.parametrize("url", WITH_LOGINS)
def test_a_login_is_detected_and_hidden(url):
    assert holds_login(url)
    assert "hunter2" not in shown_url(url) and "me" not in shown_url(url).replace("scheme", "")


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:6379/0",
        "rediss://host:6379/0?ssl_ca_certs=/etc/ca.pem&ssl_keyfile=/etc/key.pem",
        "unix:///tmp/redis.sock?db=2",
        "http://127.0.0.1:8000",
        "https://api.example.org/v1",
        "http://[::1]:8000/v1",
    ],
)
def test_an_address_without_a_login_is_shown_unchanged(url):
    assert not holds_login(url)
    assert shown_url(url) == url.partition("?")[0]


@pytest.mark.parametrize("url", [url for url in WITH_LOGINS if url.startswith(("redis", "unix"))])
def test_settings_refuse_a_redis_with_a_login_and_name_the_variable(url):
    with pytest.raises(ConfigError, match="LUDIC_REDIS_URL") as refused:
        PipelineSettings(redis=url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", [url for url in WITH_LOGINS if url.startswith("http")])
@pytest.mark.parametrize(
    "make",
    [
        lambda url: RolloutSettings(server=("http://fine", url)),
        lambda url: AlgoSettings(teacher=url),
        lambda url: PolicySettings(base_url=url),
    ],
    ids=["server", "teacher", "base_url"],
)
def test_settings_refuse_a_server_with_a_login_and_name_the_variable(make, url):
    with pytest.raises(ConfigError, match=LOGINS_VARIABLE) as refused:
        make(url)
    assert "hunter2" not in str(refused.value)


def test_a_login_becomes_a_header_and_is_removed_from_the_url():
    url = "https://me%40home:p%3Aw@host:8000/v1"
    assert without_login(url) == "https://host:8000/v1"
    assert login_of(url) == "Basic bWVAaG9tZTpwOnc="  # me@home:p:w
    assert login_of("https://host:8000/v1") is None


# --- before a server ---


class Locked(http.server.BaseHTTPRequestHandler):
    """Answers me:hunter2 alone."""

    seen: list[str | None]

    def do_GET(self) -> None:
        said = self.headers.get("Authorization")
        self.seen.append(said)
        is_right = said == "Basic bWU6aHVudGVyMg=="
        body = b'{"data": [{"id": "model"}]}' if is_right else b'{"error": {"message": "who are you?"}}'
        self.send_response(200 if is_right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def locked() -> Iterator[tuple[str, list[str | None]]]:
    """host:port of the server, and the logins that it has seen."""
    seen: list[str | None] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Locked,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("by_variable", [True, False])
async def test_clients_log_in_from_the_url_or_the_variable_and_hide_both(locked, monkeypatch, by_variable):
    place, seen = locked
    if by_variable:
        monkeypatch.setenv(LOGINS_VARIABLE, f"http://other:pw@127.0.0.1:1  http://me:hunter2@{place}/")
    url = f"http://{place}" if by_variable else f"http://me:hunter2@{place}"
    endpoint = OpenAIChatClient(f"{url}/v1", max_retries=0)
    assert endpoint.base_url == f"http://{place}/v1"
    assert await endpoint.list_models() == ["model"]
    await endpoint.close()
    client = VLLMChatClient(servers=[url])  # waits for its health
    assert client.servers == [f"http://{place}"]
    assert (await client.control_get(client.servers[0], "/v1/models"))["data"]
    await client.close()
    assert set(seen) == {"Basic bWU6aHVudGVyMg=="}


async def test_a_login_is_sent_to_its_server_only_and_an_api_key_overrides_it(locked, monkeypatch):
    place, seen = locked
    monkeypatch.setenv(LOGINS_VARIABLE, "http://me:hunter2@127.0.0.1:1")
    endpoint = OpenAIChatClient(f"http://{place}/v1", max_retries=0)
    with pytest.raises(ConfigError, match="401"):
        await endpoint.list_models()
    await endpoint.close()
    monkeypatch.setenv(LOGINS_VARIABLE, f"http://me:hunter2@{place}")
    endpoint = OpenAIChatClient(f"http://{place}/v1", api_key="a-key", max_retries=0)
    with pytest.raises(ConfigError):
        await endpoint.list_models()
    await endpoint.close()
    assert seen == [None, "Bearer a-key"]


async def test_errors_name_a_server_without_its_login():
    endpoint = OpenAIChatClient("http://me:hunter2@127.0.0.1:9/v1", max_retries=0)
    with pytest.raises(EndpointError, match="127.0.0.1:9") as failed:
        await endpoint.list_models()
    await endpoint.close()
    assert "hunter2" not in str(failed.value)
    for make in (lambda url: OpenAIChatClient(url), lambda url: VLLMChatClient(servers=[url], connection_timeout_s=0)):
        for url in ("ftp://me:hunter2@host", "http://host?key=hunter2"):
            with pytest.raises(ConfigError) as refused:
                make(url)
            assert "hunter2" not in str(refused.value)


# --- secrets of servers ---

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=4)  # lone surrogates too: aiohttp makes them of bytes


@given(ANY_TEXT, ANY_TEXT)
def test_any_text_is_compared_with_a_secret_without_an_error(one, other):
    assert is_same_secret(one, other) == (one == other)
    assert is_same_secret(one, one)
