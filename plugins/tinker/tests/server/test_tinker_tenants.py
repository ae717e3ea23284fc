"""Tenants, keys and limits; repeated, disordered and malformed requests; failures that stay with their tenant."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tinker.proto.request_conv import forward_backward_request_to_proto

from ludic.models.adapters import AdapterSpec
from ludic.types import ConfigError
from ludic_tinker.server import app
from ludic_tinker.server.records import (
    LOCAL_TENANT,
    CheckpointPath,
    Keys,
    Refused,
    Run,
    Session,
    TenantLimits,
    Usage,
)
from ludic_tinker.server.storage.database import StorageError
from ludic_tinker.server.storage.journal import Record, _insert
from ludic_tinker.server.storage.store import DiskStore
from plugins.tinker.tests.server.running import NAME, RunningServer, datum, prompt

pytestmark = pytest.mark.slow

ANNA, BERT = "tml-anna", "tml-bert"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        limits = TenantLimits(max_runs=4, max_rank=8, max_requests=3, max_samplers=2)
        with RunningServer(keys={ANNA: "anna", BERT: "bert"}, limits=limits) as running:
            yield running


class Raw:
    """Requests as bytes, without the SDK's retries."""

    def __init__(self, server: RunningServer, key: str | None = ANNA) -> None:
        headers = {} if key is None else {"X-API-Key": key}
        self.http = httpx.Client(base_url=f"{server.url}/api/v1/", headers=headers, timeout=60)

    def post(self, name: str, body: Any) -> httpx.Response:
        data = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.http.post(name, **data)

    def result(self, request_id: str) -> httpx.Response:
        return self.post("retrieve_future", {"request_id": request_id})

    def session(self) -> str:
        return self.post("create_session", {"tags": [], "sdk_version": "0"}).json()["session_id"]

    def run(self, session: str | None = None, number: int = 0, **lora: Any) -> str:
        body = {"session_id": session or self.session(), "model_seq_id": number, "base_model": NAME}
        promise = self.post("create_model", {**body, "lora_config": {"rank": 2, "seed": 1, **lora}}).json()
        return self.result(promise["request_id"]).json()["model_id"]

    def finish(self, run: str) -> None:
        self.post(f"sessions/{run.split(':')[0]}/finish", {"reason": {"type": "success"}})


@pytest.fixture
def raw(server: RunningServer) -> Raw:
    return Raw(server)


@pytest.fixture
def run(raw: Raw) -> Iterator[str]:
    made = raw.run()
    yield made
    raw.finish(made)


def pass_body(run: str, number: int, *, forward_only: bool = False) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum(weights=1.0)], loss_fn="cross_entropy"),
        model_id=run,
        seq_id=number,
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def huge_body(run: str, number: int, columns: int = 1 << 24, rows: int = 1) -> bytes:
    """Sparse tensors of shape [4, columns] without entries: 222 bytes that would take gigabytes."""
    request = proto.ForwardBackwardRequest(model_id=run, seq_id=number, loss_fn="cross_entropy")
    for _ in range(rows):
        added = request.data.add()
        added.model_input.add().encoded_text.tokens = np.arange(4, dtype=np.int32).tobytes()
        for name, kind in (("target_tokens", proto.DTYPE_INT64), ("weights", proto.DTYPE_FLOAT32)):
            tensor = added.loss_fn_inputs[name]
            tensor.dtype = kind
            tensor.shape.extend([4, columns])
            tensor.sparse_csr.crow_indices = bytes(5 * 8)
    return request.SerializeToString()


def step_body(run: str, number: int) -> dict[str, Any]:
    return {"model_id": run, "seq_id": number, "adam_params": {"learning_rate": 0.01}}


def loss_in(answer: httpx.Response) -> float:
    output = proto.ForwardBackwardOutput()
    output.ParseFromString(answer.content)
    return output.metrics["loss:sum"]


# --- tenants ---


@pytest.mark.parametrize("key", [None, "", "tml-else", "tml-ann"])
def test_other_keys_are_refused(server, key):
    answer = Raw(server, key).post("create_session", {})
    assert (answer.status_code, "does not know the API key" in answer.json()["detail"]) == (401, True)
    assert Raw(server, key).http.get("healthz").json() == {"status": "ok"}


def test_nothing_of_one_tenant_exists_for_another(server, raw, run):
    other, session = Raw(server, BERT), run.split(":")[0]
    raw.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
    saved = raw.result(
        raw.post("save_weights_for_sampler", {"model_id": run, "seq_id": 2, "path": "a"}).json()["request_id"]
    )
    unnamed = raw.post("save_weights_for_sampler", {"model_id": run, "seq_id": 3, "sampling_session_seq_id": 7})
    sampler = raw.result(unnamed.json()["request_id"]).json()["sampling_session_id"]
    path, state = saved.json()["path"], f"tinker://{run}/weights/a"
    theirs = other.session()
    sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    tried = {
        "session_heartbeat": {"session_id": session},
        f"sessions/{session}/finish": {},
        "create_model": {"session_id": session, "model_seq_id": 9, "base_model": NAME},
        "get_info": {"model_id": run},
        "unload_model": {"model_id": run},
        "forward_backward": pass_body(run, 4),
        "optim_step": step_body(run, 4),
        "save_weights": {"model_id": run, "seq_id": 4},
        "save_weights_for_sampler": {"model_id": run, "seq_id": 4},
        "weights_info": {"tinker_path": state},
        "create_sampling_session": {"session_id": theirs, "sampling_session_seq_id": 0, "model_path": path},
        "join_sampling_session": {"sampling_session_id": sampler},
        "retrieve_future": {"request_id": f"{run}#1"},
        "asample": {**sample, "sampling_session_id": sampler, "seq_id": 0},
    }
    assert {name: other.post(name, body).status_code for name, body in tried.items()} == dict.fromkeys(tried, 404)
    assert other.http.get(f"samplers/{sampler}").status_code == 404
    assert other.post("asample", {**sample, "model_path": path}).status_code == 404
    created = other.post("load_weights", {"session_id": theirs, "model_seq_id": 0, "path": state, "optimizer": False})
    assert created.status_code == 404
    own = other.run(theirs, 1)
    loading = other.post("load_weights", {"model_id": own, "seq_id": 1, "path": state, "optimizer": False})
    assert "There is no checkpoint" in other.result(loading.json()["request_id"]).json()["error"]
    other.finish(own)
    assert raw.post("session_heartbeat", {"session_id": session}).status_code == 200, "it still lives"


def test_diverged_weights_of_one_tenant_leave_another_alone(server):
    with server.client(ANNA) as anna, server.client(BERT) as bert:
        broken = anna.create_lora_training_client(NAME, rank=2, seed=1).result()
        broken.forward_backward([datum(weights=1.0)], "cross_entropy")
        broken.optim_step(types.AdamParams(learning_rate=1e38)).result()
        healthy = bert.create_lora_training_client(NAME, rank=2, seed=1).result()
        before = healthy.forward([datum(weights=1.0)], "cross_entropy").result().metrics["loss:sum"]
        passes = [run.forward_backward([datum(weights=1.0)], "cross_entropy") for run in (broken, healthy)]
        assert passes[1].result().metrics["loss:sum"] == pytest.approx(before, rel=1e-5)
        with pytest.raises(tinker.RequestFailedError, match="not finite"):
            broken.optim_step(types.AdamParams()).result()
        healthy.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        samplers = [run.save_weights_and_get_sampling_client().result() for run in (broken, healthy)]
        samples = [own.sample(prompt(1, 2), 1, types.SamplingParams(max_tokens=3, stop=[])) for own in samplers]
        assert len(samples[1].result().sequences[0].tokens) == 3
        with pytest.raises(tinker.RequestFailedError, match="not finite"):
            samples[0].result()


# --- limits ---


def test_run_and_rank_limits_say_what_is_allowed(server):
    with server.client(BERT) as client:
        with pytest.raises(tinker.BadRequestError, match="this server allows 8"):
            client.create_lora_training_client(NAME, rank=16).result()
        for _ in range(4):
            client.create_lora_training_client(NAME, rank=1).result()
        with pytest.raises(tinker.PermissionDeniedError, match="4 training runs open"):
            client.create_lora_training_client(NAME, rank=1).result()
        with server.client(ANNA) as other:
            other.create_lora_training_client(NAME, rank=1).result()
    with server.client(BERT) as client:  # the session has ended, and its runs with it
        client.create_lora_training_client(NAME, rank=1).result()


def test_too_many_waiting_requests_are_sent_again_later(raw, run):
    """Requests 2 to 4 wait for the first, which is accepted however many wait."""
    promises = [raw.post("optim_step", step_body(run, number)) for number in (2, 3, 4)]
    full = raw.post("optim_step", step_body(run, 5))
    assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
    assert "3 requests of yours are waiting, and this server allows 3" in full.json()["detail"]
    assert raw.post("optim_step", step_body(run, 3)).json() == promises[1].json(), "a repeated one is no new one"
    first = raw.post("forward_backward", pass_body(run, 1))
    assert loss_in(raw.result(first.json()["request_id"])) > 0
    assert all("metrics" in raw.result(promise.json()["request_id"]).json() for promise in promises)
    assert raw.post("optim_step", step_body(run, 5)).status_code == 200


def test_sdk_gets_all_results_though_few_requests_may_wait(server):
    with server.client(ANNA) as client:
        sampler = client.create_sampling_client(base_model=NAME).result()
        answers = [sampler.sample(prompt(1, n), 1, types.SamplingParams(max_tokens=1)) for n in range(1, 7)]
        assert [len(answer.result().sequences) for answer in answers] == [1] * 6


def test_oldest_unnamed_sampler_weights_are_forgotten(server):
    with server.client(ANNA) as client:
        training = client.create_lora_training_client(NAME, rank=1).result()
        samplers = [training.save_weights_and_get_sampling_client().result() for _ in range(3)]
        assert len(samplers[2].compute_logprobs(prompt(1, 2)).result()) == 2
        with pytest.raises(tinker.NotFoundError, match="no sampling session"):
            samplers[0].compute_logprobs(prompt(1, 2)).result()


# --- repeated and disordered requests ---


def test_repeated_request_is_carried_out_once(raw, run):
    for _ in range(3):
        promise = raw.post("forward_backward", pass_body(run, 1)).json()
    once = loss_in(raw.result(promise["request_id"]))
    assert loss_in(raw.result(promise["request_id"])) == once, "a result can be asked for again"
    for _ in range(2):
        stepped = raw.result(raw.post("optim_step", step_body(run, 2)).json()["request_id"]).json()
    single = raw.run(run.split(":")[0], 1)
    raw.post("forward_backward", pass_body(single, 1))
    alone = raw.result(raw.post("optim_step", step_body(single, 2)).json()["request_id"]).json()
    assert stepped == alone, "the gradient of three requests would be three times as large"


def test_client_is_told_which_request_is_missing(raw, run, monkeypatch):
    monkeypatch.setattr(app, "POLL_S", 0.01)
    waiting = raw.post("optim_step", step_body(run, 2)).json()["request_id"]
    answer = raw.result(waiting)
    assert (answer.status_code, answer.json()["type"]) == (408, "try_again")
    assert answer.json()["queue_state_reason"] == f"request 1 of {run} has not arrived"


def test_repeated_session_requests_give_the_same_answer(raw, run):
    session = run.split(":")[0]
    body = {"session_id": session, "sampling_session_seq_id": 5, "base_model": NAME}
    assert raw.post("create_sampling_session", body).json() == raw.post("create_sampling_session", body).json()
    assert raw.run(session, 0, rank=2) == run
    assert raw.post(f"sessions/{session}/finish", {}).status_code == 200
    assert raw.post(f"sessions/{session}/finish", {}).status_code == 200
    assert raw.post("session_heartbeat", {"session_id": session}).status_code == 410
    assert raw.post("optim_step", step_body(run, 1)).status_code == 404


def test_created_run_is_not_made_again_when_its_result_was_dropped(server, raw, run):
    body = {
        "session_id": run.split(":")[0],
        "model_seq_id": 0,
        "base_model": NAME,
        "lora_config": {"rank": 2, "seed": 1},
    }
    raw.post("forward_backward", pass_body(run, 1))
    step = raw.result(raw.post("optim_step", step_body(run, 2)).json()["request_id"])
    assert step.status_code == 200
    before = server.service._runs[run].training
    server.call(lambda: server.service.futures._by_id.pop(f"{run}#0"))
    assert raw.result(raw.post("create_model", body).json()["request_id"]).json()["model_id"] == run
    assert server.service._runs[run].training is before


def test_unknown_results_are_gone_for_samples_and_missing_for_runs(raw):
    assert raw.result("session-1:sample:0#3").status_code == 410
    assert raw.result("session-1:train:0#3").status_code == 404


def test_silent_session_ends(server, raw, run):
    service, session = server.service, run.split(":")[0]
    service._last_seen[session] -= 2 * service._max_idle_s
    server.call(service.sweep)
    assert raw.post("session_heartbeat", {"session_id": session}).status_code == 410
    assert raw.post("get_info", {"model_id": run}).status_code == 404


# --- malformed requests ---


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("optim_step", b"{", "not what OptimStep should be"),
        ("optim_step", b"[]", "must be a JSON object"),
        ("optim_step", b"[" * 100_000, "recursion"),
        ("optim_step", {"model_id": "x", "seq_id": -1}, "seq_id"),
        ("optim_step", {"model_id": "x", "seq_id": 1, "momentum": 0.9}, "does not know momentum"),
        ("forward_backward", b"\xff\xff", "no ForwardBackwardRequest"),
        ("forward_backward", b"", "needs a model_id"),
        ("create_model", {"session_id": "x"}, "model_seq_id"),
        ("save_weights_for_sampler", {"model_id": "x", "seq_id": 1, "kind": "inflight"}, "kind"),
        ("load_weights", {"path": "x"}, "needs model_id and seq_id"),
        ("weights_info", {"tinker_path": "tinker://run/weights/../x"}, "no path of a checkpoint"),
        ("asample", {"prompt": {"chunks": []}}, "sampling_params"),
    ],
)
def test_malformed_body_is_refused_with_what_is_wrong(raw, name, body, said):
    answer = raw.post(name, body)
    assert answer.status_code == 400 and said in answer.json()["detail"]


# --- requests that would take much memory ---


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (
            {},
            "has the shape [4, 16777216]; a sparse tensor here has the shape [4, K], with K from 1 to 1024",
        ),
        ({"columns": 1024, "rows": 2100}, "have 17203200 entries when they are filled, more than the 16777216"),
        ({"columns": 0, "rows": 40_000}, "160000 data, chunks and tensors; this server takes 131072"),
    ],
)
def test_pass_that_is_small_only_on_the_wire_fails_and_is_not_kept(server, raw, run, size, said):
    failed = raw.result(raw.post("forward_backward", huge_body(run, 1, **size)).json()["request_id"]).json()
    assert failed["category"] == "user" and said in failed["error"]
    assert [record.kind for record in server.service.store.journal.recover(run).requests][1] == "refused"
    second = raw.post("forward_backward", pass_body(run, 2)).json()["request_id"]
    assert loss_in(raw.result(second)) > 0, "the run goes on"


def test_sparse_targets_of_a_prompt_are_checked_from_their_shape(raw):
    targets = {"data": [], "dtype": "int64", "shape": [1, 1 << 24], "sparse_crow_indices": [0, 0]}
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 1}, "base_model": NAME}

    def failure(**changed: Any) -> str:
        promise = raw.post("asample", {**body, "target_prompt_logprobs": {**targets, **changed}}).json()
        return raw.result(promise["request_id"]).json()["error"]

    assert "shape [1, 16777216]" in failure()
    assert "do not fit its shape" in failure(shape=[1, 2], sparse_crow_indices=[0])
    assert "cannot be read" in failure(shape=[1, 2], sparse_crow_indices=[0, 1], data=[10**30])


def test_a_server_without_keys_starts_though_its_journals_hold_what_it_cannot_read(server, caplog):
    """Twelve huge passes, accepted by an earlier version; a result that is no JSON; a success that cannot be read again."""
    restarted = RunningServer(model=server.model)
    store = DiskStore(restarted.folder.name, base_model=NAME)
    store.sessions.put(Session(id="session-1", tenant=LOCAL_TENANT, created=1.0))
    names = [f"session-1:train:{number}" for number in range(4)]
    for name in names:
        spec = AdapterSpec(rank=1, alpha=32.0, seed=1)
        made = Run(id=name, session="session-1", tenant=LOCAL_TENANT, base_model=NAME, spec=spec, created=1.0)
        store.add_run(made, "create_model")
    good, huge, no_json, unreadable = names
    for number in range(1, 13):
        store.journal.accept(huge, number, "forward_backward", huge_body(huge, number))
    store.journal.accept(no_json, 1, "optim_step", b"{}")
    _insert(store.journal._databases[no_json], "result", Record(1, "json", b"{"))
    store.journal.accept(unreadable, 1, "forward_backward", b"\xff")
    store.journal.executed(unreadable, 1, b"", dict)
    store.close()
    with restarted:
        raw = Raw(restarted)
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):  # it has no keys
            answer = raw.http.post("create_session", json={}, headers=headers)
            assert answer.status_code == 403 and "no key or token" in answer.json()["detail"]
        failures = [raw.result(f"{huge}#{number}").json()["error"] for number in range(1, 13)]
        assert all("[4, 16777216]" in failure for failure in failures)
        for name, number in ((good, 1), (huge, 13)):
            promise = raw.post("forward_backward", pass_body(name, number)).json()
            assert loss_in(raw.result(promise["request_id"])) > 0
        assert raw.post("forward_backward", pass_body(no_json, 2)).status_code == 404
        assert [raw.http.get(f"training_runs/{name}").json()["corrupted"] for name in names] == [
            False,
            False,
            True,
            True,
        ]
        assert restarted.service._usage._num_requests[LOCAL_TENANT] == 0, "one that cannot be read again does not count"


# --- what a tenant leaves ---


def test_sessions_that_have_ended_make_room_and_open_ones_are_counted(server, raw, run, monkeypatch):
    session = run.split(":")[0]
    raw.finish(run)
    is_ended = {known.id: known.finished is not None for known in server.service.store.sessions.listed("anna")}
    num_open = list(is_ended.values()).count(False)
    monkeypatch.setattr(server.service, "limits", replace(server.service.limits, max_sessions=num_open + 1))
    fresh = raw.session()
    left = {known.id for known in server.service.store.sessions.listed("anna")}
    assert left == {fresh} | {id for id in is_ended if not is_ended[id]}
    assert session not in left and raw.http.get(f"training_runs/{run}").status_code == 404
    full = raw.post("create_session", {})
    assert full.status_code == 403 and f"You have {num_open + 1} sessions open" in full.json()["detail"]
    raw.post(f"sessions/{fresh}/finish", {})
    assert raw.post("create_session", {}).status_code == 200


def test_ended_runs_and_samplers_of_an_open_session_are_bounded(server, raw, run, monkeypatch):
    session, service = run.split(":")[0], server.service
    monkeypatch.setattr(service, "limits", replace(service.limits, max_ended_runs=2))
    monkeypatch.setattr(service.sampling, "_limits", replace(service.limits, max_session_samplers=3))
    for number in range(1, 7):
        made = raw.run(session, number)
        if number == 2:
            saved = raw.post("save_weights", {"model_id": made, "seq_id": 1, "path": "a"}).json()
            raw.result(saved["request_id"])
        raw.post("unload_model", {"model_id": made})
    kept = {known.id for known in service.store.runs.listed("anna") if known.session == session}
    assert kept == {run, *(f"{session}:train:{number}" for number in (2, 4, 5, 6))}
    assert not service.store.folder.joinpath("runs", f"{session}:train:1").exists()
    wanted = {"session_id": session, "base_model": NAME}
    answers = [raw.post("create_sampling_session", {**wanted, "sampling_session_seq_id": n}) for n in (0, 1, 2, 3, 2)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 403, 200]
    assert "has 3 sampling sessions" in answers[3].json()["detail"]


def test_metadata_are_limited(raw, run):
    large = {"note": "x" * (1 << 16)}
    session = {"session_id": run.split(":")[0], "model_seq_id": 7, "base_model": NAME}
    for name, body in (("create_session", {}), ("create_model", session)):
        answer = raw.post(name, {**body, "user_metadata": large})
        assert answer.status_code == 400 and "this server keeps 65536" in answer.json()["detail"]
    promise = raw.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a", "user_metadata": large})
    assert "this server keeps 65536" in raw.result(promise.json()["request_id"]).json()["error"]


def test_a_lifetime_is_a_century_at_most_and_an_earlier_one_is_shown(server, raw, run):
    raw.result(raw.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"}).json()["request_id"])
    checkpoint = f"training_runs/{run}/checkpoints/weights/a"
    for asked in (10**18, 10**400):
        assert raw.http.put(f"{checkpoint}/ttl", content=b'{"ttl_seconds": %d}' % asked).status_code == 400
        body = b'{"model_id": "%s", "seq_id": 2, "path": "b", "ttl_seconds": %d}' % (run.encode(), asked)
        assert raw.post("save_weights", body).status_code == 400
    server.service.store.checkpoints.set_ttl(CheckpointPath.parse(f"tinker://{run}/weights/a"), 10**18)
    listed = raw.http.get("checkpoints").json()["checkpoints"]
    assert listed[0]["expires_at"].startswith("9999")


def test_only_a_failure_to_write_is_answered_507(server, raw, run, monkeypatch, tmp_path):
    def fails_with(error: Exception) -> int:
        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(server.service.store.sessions, "put", fail)
        return raw.post("create_session", {}).status_code

    assert fails_with(StorageError.of(tmp_path, OSError(28, "No space left on device"))) == 507
    assert fails_with(OSError(75, "Value too large")) == 500


def test_sampler_weights_are_saved_as_sdk_0_38_asks(raw, run):
    body = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    saved = raw.result(raw.post("save_weights_for_sampler", body).json()["request_id"])
    assert saved.status_code == 200 and "sampling_session_id" in saved.json()


def test_sdk_that_sends_no_protobuf_is_refused(raw):
    answer = raw.post("create_session", {"sdk_version": "0.20.0"})
    assert answer.status_code == 400 and "tinker 0.22 and later; yours is 0.20.0" in answer.json()["detail"]
    assert raw.post("create_session", {"sdk_version": "1.0"}).status_code == 200


def test_unknown_endpoint_and_missing_features(raw):
    assert raw.post("nonsense", {}).status_code == 404
    answer = raw.post("create_custom_loss", {})
    assert answer.status_code == 400 and "forward_backward_custom" in answer.json()["detail"]
    assert raw.post("telemetry", {"events": [{"anything": 1}]}).json() == {"status": "accepted"}


# --- keys and names ---


def test_keys_are_read_from_lines_of_names_and_keys(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# tenants\nanna tml-1\nanna tml-2  # a second key\n\nbert tml-3\n")
    keys = Keys.read(file)
    assert [keys.tenant(key) for key in ("tml-1", "tml-2", "tml-3")] == ["anna", "anna", "bert"]
    with pytest.raises(Refused):
        keys.tenant("tml-4")
    for text, said in (
        ("anna", "1 words"),
        ("anna sk-1", "does not begin with 'tml-'"),
        ("anna tml-1\nbert tml-1", "repeats the key of anna"),
        ("# nothing", "no keys"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            Keys.read(file)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 200, "-", "é"])
def test_names_that_are_no_file_names_are_refused(name):
    with pytest.raises(Refused):
        CheckpointPath.named("run", "training", name)
    with pytest.raises(Refused):
        CheckpointPath.parse(f"tinker://run/weights/{name}")


def test_usage_counts_down_to_nothing():
    usage = Usage(TenantLimits(max_requests=2, max_tokens=10))
    usage.add("a", 11)
    with pytest.raises(Refused, match="11 tokens"):
        usage.check("a")
    usage.check("b")
    usage.remove("a", 11)
    usage.check("a")
