"""The viewer's server over HTTP: headers, access, hostile requests, and events while a run writes."""

import asyncio
import json
import shutil

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient, TestServer  # noqa: E402

from ludic.types import ConfigError  # noqa: E402
from ludic.util.line_writer import LineWriter  # noqa: E402
from ludic_view.index import Runs  # noqa: E402
from ludic_view.server import make_app, serve  # noqa: E402
from plugins.view.tests.test_index import empty_run, line_of  # noqa: E402
from tests.fakes import status_with_header  # noqa: E402


@pytest.fixture
async def client(recorded):
    async with TestClient(TestServer(make_app(Runs(recorded)))) as made:
        yield made


async def test_answers_are_json_with_strict_headers(client):
    response = await client.get("/api/runs/letters/steps")
    assert response.status == 200 and response.content_type == "application/json"
    assert len((await response.json())["steps"]) == 3
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff" and response.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_page_is_served_with_the_same_headers(client, tmp_path):
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<h1>runs</h1>")
    (page / "app.js").write_text("1")
    (page / "secret.py").write_text("1")
    (tmp_path / "outside.js").write_text("1")
    (page / "link.js").symlink_to(tmp_path / "outside.js")
    async with TestClient(TestServer(make_app(Runs(tmp_path), page=page))) as made:
        first, script = await made.get("/"), await made.get("/app.js")
        assert first.content_type == "text/html" and script.content_type == "text/javascript"
        assert "Content-Security-Policy" in first.headers and first.headers["X-Content-Type-Options"] == "nosniff"
        for path in ("/secret.py", "/link.js", "/../outside.js", "/%2e%2e/outside.js", "/..%2foutside.js"):
            assert (await made.get(path)).status == 404, path


@pytest.mark.parametrize(
    "path",
    ["/api/runs/..%2F..%2Fetc", "/api/runs/%2Fetc%2Fpasswd", "/api/runs/letters/rollouts/..%2F..%2Fconfig.toml",
     "/api/runs/letters/groups/%00", "/api/runs/letters/tasks/%F0%9F%8E%B2", "/api/runs/%FF", "/api/", "/api/x"],
)  # fmt: skip
async def test_hostile_path_is_answered_with_an_error(client, path):
    from yarl import URL

    response = await client.get(URL(path, encoded=True))
    assert response.status == 404 and "message" in (await response.json())["error"]


async def test_bad_parameter_is_a_400_with_its_name(client):
    response = await client.get("/api/runs/letters/rollouts?step=<script>")
    assert response.status == 400 and "step" in (await response.json())["error"]["message"]
    assert response.content_type == "application/json"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_only_get_is_answered(client, method):
    response = await client.request(method, "/api/runs")
    assert response.status == 405


@pytest.mark.parametrize("headers", [{"Host": "evil.example:7711"}, {"Origin": "https://evil.example"}])
async def test_other_web_pages_are_refused_without_a_token(recorded, headers):
    for token, expected in ((None, 403), ("secret", 200)):
        address = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(Runs(recorded), port=0, token=token, on_ready=address.set_result))
        url = (await address).partition("?")[0]
        async with aiohttp.ClientSession() as http:
            sent = {**headers, "Authorization": f"Bearer {token}"}
            async with http.get(f"{url}api/runs", headers=sent) as response:
                assert response.status == expected and "Content-Security-Policy" in response.headers
        serving.cancel()
        await asyncio.wait({serving})


async def test_token_is_asked_for_and_kept_in_a_cookie(recorded, tmp_path):
    (tmp_path / "index.html").write_text("page")
    async with TestClient(TestServer(make_app(Runs(recorded), token="s3cret", page=tmp_path))) as made:
        for headers, path in (
            ({}, "/"),
            ({}, "/api/runs"),
            ({"Authorization": "Bearer wrong"}, "/api/runs"),
            ({}, "/?token=no"),
            ({}, "/?token=%C2%B2"),
        ):
            assert (await made.get(path, headers=headers)).status == 401
        for name, value in (("Authorization", b"Bearer s3cr\xe9t"), ("Cookie", b"ludic_view=s3cr\xe9t")):
            assert await status_with_header(str(made.make_url("/api/runs")), name, value) == 401
        assert (await made.get("/api/runs", headers={"Authorization": "Bearer s3cret"})).status == 200
        first = await made.get("/?token=s3cret")
        cookie = first.cookies["ludic_view"]
        assert first.status == 200 and cookie["httponly"] and cookie["samesite"] == "Strict"
        assert (await made.get("/api/runs", cookies={"ludic_view": "s3cret"})).status == 200


async def test_other_machines_need_a_token(recorded):
    with pytest.raises(ConfigError, match="--token"):
        await serve(Runs(recorded), "0.0.0.0")


async def next_event(response, *kinds: str) -> dict:
    while True:
        line = await asyncio.wait_for(response.content.readline(), 60)
        if line.startswith(b"data: ") and (event := json.loads(line[6:]))["kind"] in kinds:
            return event


async def test_what_a_run_appends_is_told(tmp_path):
    empty_run(tmp_path / "x")
    writer = LineWriter(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl.gz")
    writer.append(line_of(0))
    async with TestClient(TestServer(make_app(Runs(tmp_path)))) as made:
        response = await made.get("/api/runs/x/events")
        assert response.content_type == "text/event-stream" and "Content-Security-Policy" in response.headers
        assert (await next_event(response, "state"))["state"] == "running"
        writer.append(line_of(1))
        event = await next_event(response, "rollouts")
        assert event["num_rollouts"] == 2
        (tmp_path / "x" / "metrics.jsonl").write_text('{"step":4,"time":1.0,"train/loss":1.0}\n')
        assert (await next_event(response, "metrics"))["step"] == 4
        found = await (await made.get("/api/runs/x/rollouts")).json()
        assert found["total"] == 2
        response.close()


async def test_run_that_is_removed_while_it_is_shown_is_no_error(tmp_path, recorded):
    shutil.copytree(recorded / "letters", tmp_path / "letters")
    async with TestClient(TestServer(make_app(Runs(tmp_path)))) as made:
        card = (await (await made.get("/api/runs/letters/rollouts")).json())["rollouts"][0]
        shutil.rmtree(tmp_path / "letters")
        for path in ("", "/steps", f"/rollouts/{card['id']}"):
            assert (await made.get(f"/api/runs/letters{path}")).status == 404


async def test_hostile_text_of_a_model_stays_json(tmp_path):
    empty_run(tmp_path / "x")
    hostile = "<script>alert(1)</script>\u2028\u0000\ud800"
    line = line_of(0, text=hostile).replace(b'"info":{}', b'"info":{"score":NaN}')
    LineWriter(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl").append(line)
    async with TestClient(TestServer(make_app(Runs(tmp_path)))) as made:
        for path in ("rollouts", "rollouts/r0", "rollouts?text=alert(1)"):
            response = await made.get(f"/api/runs/x/{path}")
            assert response.status == 200 and response.content_type == "application/json", path
            assert "alert(1)" in json.dumps(await response.json())
