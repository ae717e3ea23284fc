"""How an HTTP server ends: requests in progress end first, new ones are refused, and a limit or a cancellation cuts the rest off."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from ludic.http.app import AppServer, ServerLimits

pytestmark = pytest.mark.slow

LONG_S = 600.0


class Running:
    """A server whose /work answers when `go` is set, and whose /echo answers with the body."""

    def __init__(self, *, has_token: bool = False) -> None:
        self.go, self.begun = asyncio.Event(), asyncio.Event()
        app = web.Application(handler_args={"handler_cancellation": True})
        app.add_routes([web.get("/work", self.work), web.post("/echo", self.echo), web.get("/now", self.now)])
        self.server = AppServer(app, ServerLimits(), has_token=has_token)

    async def work(self, request: web.Request) -> web.Response:
        self.begun.set()
        await self.go.wait()
        return web.Response(text="done")

    async def echo(self, request: web.Request) -> web.Response:
        self.begun.set()
        return web.Response(body=await request.read())

    async def now(self, request: web.Request) -> web.Response:
        return web.Response(text="now")


@contextlib.asynccontextmanager
async def running(*, has_token: bool = False) -> AsyncIterator[tuple[Running, aiohttp.ClientSession]]:
    here = Running(has_token=has_token)
    url = await here.server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(url) as session:
        yield here, session
    await here.server.close()


async def text(answer: "aiohttp.client._RequestContextManager") -> str:
    async with answer as response:
        response.raise_for_status()
        return await response.text()


@pytest.mark.parametrize(
    ("host", "headers", "expected"),
    [
        ("127.0.0.1", {"Host": "evil.example"}, 403),
        ("127.0.0.1", {"Origin": "https://evil.example"}, 403),
        ("0.0.0.0", {"Origin": "https://evil.example"}, 403),
        ("0.0.0.0", {"Host": "gpu7:8000", "Origin": "http://gpu7:8000"}, 200),
        ("0.0.0.0", {"Host": "gpu7:8000"}, 200),
    ],
)
async def test_without_a_token_no_page_of_another_origin_is_answered_wherever_it_listens(host, headers, expected):
    here = Running()
    url = await here.server.start(host, 0)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/now", headers=headers) as answer:
        assert answer.status == expected
    await here.server.close()


async def test_a_request_in_progress_ends_and_later_ones_are_refused():
    async with running() as (here, session):
        assert await text(session.get("/now")) == "now"  # leaves an idle connection
        work = asyncio.create_task(text(session.get("/work")))  # takes it
        await here.begun.wait()
        closing = asyncio.create_task(here.server.close(LONG_S))
        await asyncio.sleep(0)
        url = session._base_url
        async with aiohttp.ClientSession(url) as other:
            with pytest.raises(aiohttp.ClientConnectorError):
                await text(other.get("/now"))
        assert not closing.done() and not work.done()
        here.go.set()
        assert await work == "done"
        await closing


async def test_a_body_that_is_being_sent_still_arrives():
    more = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"first "
        await more.wait()
        yield b"second"

    async with running() as (here, session):
        echo = asyncio.create_task(text(session.post("/echo", data=body())))
        await here.begun.wait()
        closing = asyncio.create_task(here.server.close(LONG_S))
        await asyncio.sleep(0)
        more.set()
        assert await echo == "first second"
        await closing


async def test_idle_connections_are_closed_while_a_request_is_in_progress():
    async with running() as (here, session):
        reader, writer = await asyncio.open_connection(session._base_url.host, session._base_url.port)
        writer.write(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"now")).startswith(b"HTTP/1.1 200")
        silent, other = await asyncio.open_connection(session._base_url.host, session._base_url.port)
        asking, busy = await asyncio.open_connection(session._base_url.host, session._base_url.port)
        busy.write(b"GET /work HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await here.begun.wait()
        closing = asyncio.create_task(here.server.close(LONG_S))
        async with asyncio.timeout(60):
            assert await reader.read() == await silent.read() == b""
        assert not closing.done()
        here.go.set()
        async with asyncio.timeout(60):
            answer = await asking.read()
        assert answer.endswith(b"done") and b"Connection: close\r\n" in answer
        await closing
        for each in (writer, other, busy):
            each.close()


async def test_a_request_that_comes_while_it_drains_is_refused_and_its_connection_closed(tmp_path):
    """On a Unix socket, where idle connections stay open."""
    here, socket = Running(), tmp_path / "socket"
    url = await here.server.start("127.0.0.1", 0, unix_socket=socket)
    async with aiohttp.ClientSession(url) as session:
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"now")
        work = asyncio.create_task(text(session.get("/work")))
        await here.begun.wait()
        closing = asyncio.create_task(here.server.close(LONG_S))
        await asyncio.sleep(0)
        writer.write(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 This server is stopping") and b"Connection: close\r\n" in answer
        here.go.set()
        assert await work == "done"
        await closing
        writer.close()


@pytest.mark.parametrize("drain_s", [0.0, 0.01])
async def test_what_has_not_ended_in_time_is_cut_off(drain_s, caplog):
    async with running() as (here, session):
        work = asyncio.create_task(text(session.get("/work")))
        await here.begun.wait()
        await here.server.close(drain_s)
        with pytest.raises(aiohttp.ClientError):
            await work
    assert ("requests cut off after 0.01 s: 1" in caplog.text) == (drain_s > 0)


async def test_a_second_request_to_stop_ends_it_at_once():
    async with running() as (here, session):
        work = asyncio.create_task(text(session.get("/work")))
        await here.begun.wait()
        closing = asyncio.create_task(here.server.close(LONG_S))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(aiohttp.ClientError):
            await work


# --- requests of a browser ---


async def status(session: aiohttp.ClientSession, **headers: str) -> int:
    async with session.post("/echo", headers=headers, data=b"x") as response:
        return response.status


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "10.0.0.1", "127.0.0.1.evil.example", "[::2]:80", ""]
)
async def test_a_name_that_only_dns_points_here_is_refused(host: str):
    async with running() as (here, session):
        assert await status(session, Host=host) == 403
        assert not here.begun.is_set()


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"])
async def test_a_page_of_another_origin_is_refused(origin: str):
    async with running() as (here, session):
        assert await status(session, Origin=origin) == 403
        assert not here.begun.is_set()


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]"])
async def test_this_machine_and_its_own_pages_are_answered(host: str):
    async with running() as (_, session):
        assert await status(session, Host=host) == 200
        assert await status(session, Host=host, Origin=f"http://{host}") == 200


async def test_a_server_with_a_token_may_have_any_name():
    async with running(has_token=True) as (_, session):
        assert await status(session, Host="models.example", Origin="https://models.example") == 200


async def test_an_old_client_without_a_host_is_answered():
    async with running() as (_, session):
        reader, writer = await asyncio.open_connection("127.0.0.1", session._base_url.port)
        writer.write(b"GET /now HTTP/1.0\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        writer.close()
