"""The endpoints of `tinker.RestClient` and the `tinker` command: runs, checkpoints and sessions of a tenant, and downloads.

A download has a signed address that needs no key and ends after an hour, since the SDK fetches it without one. Refusals are
never 5xx: the SDK (0.36) repeats such a request for five minutes before it shows the text.
"""

import asyncio
import hashlib
import hmac
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
from aiohttp import web
from msgspec import Struct

from ludic.util.urls import is_same_secret
from ludic_tinker.server.bodies import Lifetime
from ludic_tinker.server.records import Checkpoint, CheckpointPath, Refused, Run
from ludic_tinker.server.storage.store import DiskStore

DOWNLOAD = "/api/v1/download"
"""The one address that needs a signature instead of a key."""
_VALID_S = 3600
_LAST_DATE = 253402300799.0
"""The end of the year 9999."""
_ARCHIVE = "adapter.tar.gz"
_BLOCK = 1 << 20
_RUN = "/api/v1/training_runs/{run}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{folder}}/{{name}}"
_HERE_ONLY = "This server keeps checkpoints for the tenant that saved them: publishing and copying are not here."
_NOT_HERE = {
    ("POST", f"{_CHECKPOINT}/publish"): _HERE_ONLY,
    ("DELETE", f"{_CHECKPOINT}/publish"): _HERE_ONLY,
    ("POST", "/api/v1/copy_weights"): _HERE_ONLY,
    ("PUT", "/api/v1/sessions/{id}/project"): "There are no projects here; a tenant has one list of sessions.",
    ("GET", "/api/v1/sessions/{id}/trace_export"): "This server records no traces.",
    ("POST", "/api/v1/sessions/search"): "Sessions cannot be searched here; list_sessions names them all.",
    ("GET", "/api/v1/audit"): "This server keeps no audit log.",
    ("GET", "/api/v1/billing/usage/events"): "This server bills nothing.",
    ("POST", "/api/v1/billing/usage/events"): "This server bills nothing.",
    ("GET", "/api/v1/billing/usage/checkpoints/current"): "This server bills nothing.",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Item = TypeVar("Item")


class _Ttl(Struct, forbid_unknown_fields=True):
    """Body of a request that sets when a checkpoint expires."""

    ttl_seconds: Lifetime | None


def routes(store: DiskStore, tenant_of: Callable[[web.Request], str]) -> list[web.RouteDef]:
    """The endpoints. `tenant_of` says who asks; a `Refused` becomes an answer elsewhere."""
    rest = _Rest(store, tenant_of)
    found: list[tuple[str, str, Handler]] = [
        ("GET", "/api/v1/training_runs", rest.runs),
        ("GET", _RUN, rest.run),
        ("GET", f"{_RUN}/checkpoints", rest.checkpoints_of_run),
        ("GET", "/api/v1/checkpoints", rest.checkpoints),
        ("DELETE", _CHECKPOINT, rest.delete),
        ("PUT", f"{_CHECKPOINT}/ttl", rest.set_ttl),
        ("GET", f"{_CHECKPOINT}/external_weights_urls", rest.urls),
        ("GET", f"{_CHECKPOINT}/archive", rest.archive),
        ("GET", "/api/v1/sessions", rest.sessions),
        ("GET", "/api/v1/sessions/{id}", rest.session),
        ("GET", DOWNLOAD, rest.download),
        *((method, path, _refusing(why)) for (method, path), why in _NOT_HERE.items()),
    ]
    return [web.route(method, path, handler) for method, path, handler in found]


def _refusing(why: str) -> Handler:
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise Refused(400, why)

    return refuse


class _Rest:
    """The handlers."""

    def __init__(self, store: DiskStore, tenant_of: Callable[[web.Request], str]) -> None:
        self._store, self._tenant = store, tenant_of

    # --- runs ---

    async def runs(self, request: web.Request) -> web.Response:
        page, cursor = _page(request, self._store.runs.listed(self._tenant(request)), default=20)
        return web.json_response({"training_runs": [self._about_run(run) for run in page], "cursor": cursor})

    async def run(self, request: web.Request) -> web.Response:
        return web.json_response(self._about_run(self._run(request)))

    def _run(self, request: web.Request) -> Run:
        return self._store.runs.get(request.match_info["run"], self._tenant(request))

    def _about_run(self, run: Run) -> dict[str, Any]:
        saved = self._store.checkpoints.listed(run.tenant, run.id)
        last = {kind: next((c for c in saved if c.path.kind == kind), None) for kind in ("training", "sampler")}
        about = {name: None if c is None else self._about(c) for name, c in last.items()}
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": run.tenant,
            "is_lora": True,
            "lora_rank": run.spec.rank,
            "corrupted": run.id in self._store.damaged,
            "last_request_time": _date(self._store.last_request(run.id)),
            "last_checkpoint": about["training"],
            "last_sampler_checkpoint": about["sampler"],
            "user_metadata": {name: str(value) for name, value in run.user_metadata.items()},
        }

    # --- checkpoints ---

    async def checkpoints(self, request: web.Request) -> web.Response:
        page, cursor = _page(request, self._store.checkpoints.listed(self._tenant(request)), default=100)
        return web.json_response({"checkpoints": [self._about(c) for c in page], "cursor": cursor})

    async def checkpoints_of_run(self, request: web.Request) -> web.Response:
        run = self._run(request)
        saved = self._store.checkpoints.listed(run.tenant, run.id)
        return web.json_response({"checkpoints": [self._about(c) for c in saved]})

    def _about(self, checkpoint: Checkpoint) -> dict[str, Any]:
        path = checkpoint.path
        return {
            "checkpoint_id": str(path).removeprefix(f"tinker://{path.run}/"),
            "checkpoint_type": path.kind,
            "time": _date(checkpoint.created),
            "tinker_path": str(path),
            "size_bytes": self._store.checkpoints.size(path),
            "public": False,
            "user_metadata": dict(checkpoint.user_metadata),
            "expires_at": None if checkpoint.expires is None else _date(checkpoint.expires),
        }

    def _checkpoint(self, request: web.Request) -> CheckpointPath:
        """The path in the address; the tenant has a checkpoint there."""
        info = request.match_info
        path = CheckpointPath.parse(f"tinker://{info['run']}/{info['folder']}/{info['name']}")
        return self._store.checkpoints.get(path, self._tenant(request)).path

    async def delete(self, request: web.Request) -> web.Response:
        self._store.checkpoints.delete(self._checkpoint(request))
        return web.json_response({})

    async def set_ttl(self, request: web.Request) -> web.Response:
        path = self._checkpoint(request)
        try:
            body = msgspec.json.decode(await request.read(), type=_Ttl)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Refused(400, f"The body must have ttl_seconds, a number of seconds or null: {error}.") from error
        self._store.checkpoints.set_ttl(path, body.ttl_seconds)
        return web.json_response({})

    # --- downloads ---

    async def urls(self, request: web.Request) -> web.Response:
        """The addresses of the files of external weights."""
        path, expires = self._checkpoint(request), int(time.time()) + _VALID_S
        files = self._store.checkpoints.files(path)
        urls = {name: self._signed(request, path, name, expires) for name in files}
        return web.json_response({"urls": urls, "expires": _date(expires)})

    async def archive(self, request: web.Request) -> web.Response:
        """A redirection to all files in one .tar.gz."""
        path, expires = self._checkpoint(request), int(time.time()) + _VALID_S
        headers = {"Location": self._signed(request, path, _ARCHIVE, expires), "Expires": _date(expires)}
        return web.Response(status=302, headers=headers)

    def _signed(self, request: web.Request, path: CheckpointPath, name: str, expires: int) -> str:
        scheme = request.headers.get("X-Forwarded-Proto", request.scheme)  # a proxy with TLS in front of the server
        host = request.headers.get("X-Forwarded-Host", request.host)
        query = {"path": str(path), "file": name, "expires": str(expires)}
        return f"{scheme}://{host}{DOWNLOAD}?{urlencode({**query, 'signature': self._signature(query)})}"

    def _signature(self, query: dict[str, str]) -> str:
        signed = "\n".join(query[name] for name in ("path", "file", "expires"))
        return hmac.new(self._store.secret, signed.encode(), hashlib.sha256).hexdigest()

    async def download(self, request: web.Request) -> web.StreamResponse:
        query = {name: request.query.get(name, "") for name in ("path", "file", "expires")}
        if not is_same_secret(request.query.get("signature", ""), self._signature(query)):
            raise Refused(403, "The address of this download is not signed by this server.")
        if int(query["expires"]) < time.time():
            raise Refused(403, "The address of this download has expired; ask for a new one.")
        path = CheckpointPath.parse(query["path"])
        if query["file"] != _ARCHIVE:
            return await _send(request, self._store.checkpoints.files(path)[query["file"]])
        with tempfile.TemporaryDirectory(dir=self._store.folder, prefix=".archive-") as folder:
            file = Path(folder) / _ARCHIVE
            await asyncio.to_thread(self._store.checkpoints.archive, path, file)
            return await _send(request, file)

    # --- sessions ---

    async def sessions(self, request: web.Request) -> web.Response:
        page, _ = _page(request, self._store.sessions.listed(self._tenant(request)), default=20)
        return web.json_response({"sessions": [session.id for session in page]})

    async def session(self, request: web.Request) -> web.Response:
        session = self._store.sessions.get(request.match_info["id"], self._tenant(request))
        found = {
            "training_run_ids": [r.id for r in self._store.runs.listed(session.tenant) if r.session == session.id],
            "sampler_ids": [s.id for s in self._store.samplers.listed(session.tenant) if s.session == session.id],
        }
        metadata = {name: str(value) for name, value in session.user_metadata.items()}
        return web.json_response({**found, "user_metadata": metadata, "display_name": session.display_name})


def _page(request: web.Request, items: Sequence[Item], *, default: int) -> tuple[Sequence[Item], dict[str, int]]:
    """The part that `limit` and `offset` ask for, and the cursor that describes it."""
    asked = {"limit": default, "offset": 0}
    for name in asked:
        text = request.query.get(name)
        if text is not None:
            if not text.isdecimal() or len(text) > 9:
                raise Refused(400, f"{name}={text!r:.50}; it must be a number.")
            asked[name] = int(text)
    return items[asked["offset"] :][: asked["limit"]], {**asked, "total_count": len(items)}


def _date(seconds: float) -> str:
    # Earlier servers took any lifetime.
    return datetime.fromtimestamp(min(seconds, _LAST_DATE), UTC).isoformat()


async def _send(request: web.Request, file: Path) -> web.StreamResponse:
    """Block by block. A checkpoint that is deleted meanwhile is still sent: its files are open."""
    with file.open("rb") as opened:
        response = web.StreamResponse(headers={"Content-Disposition": f'attachment; filename="{file.name}"'})
        response.content_type = "application/octet-stream"
        response.content_length = file.stat().st_size
        await response.prepare(request)
        while block := await asyncio.to_thread(opened.read, _BLOCK):
            await response.write(block)
    return response
