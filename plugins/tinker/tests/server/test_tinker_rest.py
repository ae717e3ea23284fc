"""Runs, checkpoints and sessions through the SDK's RestClient and the `tinker` command, unchanged, against the server."""

import io
import json
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from click.testing import CliRunner
from safetensors.torch import load
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.lib.internal_client_holder import sessionless_holder_cache

from ludic_tinker.server.storage.checkpoints import ADAPTER, CONFIG
from plugins.tinker.tests.server.running import NAME, RunningServer, datum

ANN, BOB = "tml-ann", "tml-bob"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        with RunningServer(keys={ANN: "ann", BOB: "bob"}) as running:
            # The `tinker` command has no other way to be told.
            environment.setenv("TINKER_BASE_URL", running.url)
            environment.setenv("TINKER_API_KEY", ANN)
            yield running
            for holder in sessionless_holder_cache._holders.values():  # of RestClients, which nothing else closes
                holder.close()


@pytest.fixture(scope="module")
def service(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key=ANN, user_metadata={"for": "tests"})
    yield client
    client.close("success").result()


@pytest.fixture(scope="module")
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run with one step, a state and sampler weights."""
    training = service.create_lora_training_client(
        base_model=NAME, rank=4, seed=1, user_metadata={"name": "first"}
    ).result()
    training.forward_backward([datum(weights=1.0)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.01)).result()
    training.save_state("one", user_metadata={"k": "v"}).result()
    training.save_weights_for_sampler("final").result()
    training.save_weights_and_get_sampling_client().result()
    return training


@pytest.fixture(scope="module")
def rest(server: RunningServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=ANN)


def test_runs_are_listed_and_described(rest: tinker.RestClient, run: tinker.TrainingClient):
    listed = rest.list_training_runs(limit=5).result()
    assert run.model_id in [found.training_run_id for found in listed.training_runs]
    assert listed.cursor.total_count >= 1
    found = rest.get_training_run_by_tinker_path(f"tinker://{run.model_id}/weights/one").result()
    assert (found.base_model, found.lora_rank, found.model_owner, found.corrupted) == (NAME, 4, "ann", False)
    assert found.user_metadata == {"name": "first"}
    assert found.last_checkpoint is not None and found.last_checkpoint.checkpoint_id == "weights/one"
    assert found.last_sampler_checkpoint is not None
    assert found.last_sampler_checkpoint.checkpoint_id == "sampler_weights/final"
    assert abs(found.last_request_time.timestamp() - time.time()) < 600


def test_checkpoints_are_listed_without_unnamed_ones(rest: tinker.RestClient, run: tinker.TrainingClient):
    of_run = rest.list_checkpoints(run.model_id).result().checkpoints
    assert {c.checkpoint_id: c.checkpoint_type for c in of_run} == {
        "weights/one": "training",
        "sampler_weights/final": "sampler",
    }
    saved = next(c for c in of_run if c.checkpoint_type == "training")
    assert saved.user_metadata == {"k": "v"} and saved.size_bytes and saved.expires_at is None
    first, second = (rest.list_user_checkpoints(limit=1, offset=offset).result() for offset in (0, 1))
    assert first.cursor is not None and first.cursor.total_count >= 2
    assert first.checkpoints != second.checkpoints
    info = rest.get_weights_info_by_tinker_path(saved.tinker_path).result()
    assert (info.base_model, info.lora_rank, info.is_lora) == (NAME, 4, True)


def test_sessions_are_listed(rest: tinker.RestClient, service: tinker.ServiceClient, run: tinker.TrainingClient):
    session_id = run.model_id.partition(":")[0]
    assert session_id in rest.list_sessions().result().sessions
    found = rest.get_session(session_id).result()
    assert run.model_id in found.training_run_ids
    assert len(found.sampler_ids) == 1
    assert found.user_metadata == {"for": "tests"}


def test_another_tenant_sees_nothing(server: RunningServer, run: tinker.TrainingClient):
    bob = tinker.RestClient(base_url=server.url, api_key=BOB)
    path = f"tinker://{run.model_id}/weights/one"
    assert bob.list_training_runs().result().training_runs == []
    assert bob.list_user_checkpoints().result().checkpoints == []
    assert bob.list_sessions().result().sessions == []
    for call in (
        lambda: bob.get_training_run(run.model_id),
        lambda: bob.list_checkpoints(run.model_id),
        lambda: bob.get_weights_info_by_tinker_path(path),
        lambda: bob.delete_checkpoint_from_tinker_path(path),
        lambda: bob.set_checkpoint_ttl_from_tinker_path(path, 3600),
        lambda: bob.get_session(run.model_id.partition(":")[0]),
    ):
        with pytest.raises(tinker.NotFoundError, match="There is no"):
            call().result()


def test_a_checkpoint_gets_a_time_to_live_and_is_deleted(rest: tinker.RestClient, run: tinker.TrainingClient):
    path = run.save_state("short", ttl_seconds=3600).result().path

    def found() -> types.Checkpoint | None:
        return next(
            (c for c in rest.list_checkpoints(run.model_id).result().checkpoints if c.tinker_path == path), None
        )

    saved = found()
    assert saved is not None and saved.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    saved = found()
    assert saved is not None and saved.expires_at is None
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert found() is None
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()


def test_what_is_not_here_says_so_at_once(rest: tinker.RestClient, run: tinker.TrainingClient):
    path = f"tinker://{run.model_id}/weights/one"
    with pytest.raises(tinker.BadRequestError, match="publishing and copying are not here"):
        rest.publish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="no traces"):
        rest.export_session_trace("x").result()


# --- downloads ---


def fetched(url: str, key: str | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"X-API-Key": key} if key else {})) as response:
        body: bytes = response.read()
    return body


def test_external_weights_are_downloaded_as_a_peft_adapter(rest: tinker.RestClient, run: tinker.TrainingClient):
    path = run.save_weights_external("out").result().path
    assert path == f"tinker://{run.model_id}/external_weights/out"
    found = rest.get_external_weights_urls(path).result()
    assert set(found.urls) == {ADAPTER, CONFIG}
    assert json.loads(fetched(found.urls[CONFIG]))["r"] == 4
    weights = load(fetched(found.urls[ADAPTER]))
    assert any(name.endswith("lora_B.weight") and torch.any(tensor) for name, tensor in weights.items())


def test_a_download_needs_the_signature(rest: tinker.RestClient, run: tinker.TrainingClient):
    path = run.save_weights_external("signed").result().path
    url = rest.get_external_weights_urls(path).result().urls[CONFIG]
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query))
    for change in (
        {"file": "checkpoint.json"},
        {"expires": str(int(query["expires"]) + 1)},
        {"path": f"tinker://{run.model_id}/weights/one"},
        {"signature": ""},
        {"signature": "²"},
    ):
        wrong = f"{url.partition('?')[0]}?{urllib.parse.urlencode({**query, **change})}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(wrong)
        assert refused.value.code == 403


def test_an_archive_is_downloaded_with_a_key(server: RunningServer, run: tinker.TrainingClient):
    """As earlier versions of the SDK, and curl -L, do."""
    url = f"{server.url}/api/v1/training_runs/{run.model_id}/checkpoints/sampler_weights/final/archive"
    with tarfile.open(fileobj=io.BytesIO(fetched(url, ANN))) as tar:
        assert sorted(tar.getnames()) == [CONFIG, ADAPTER]
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetched(url, BOB)
    assert refused.value.code == 404


# --- the command ---


def tinker_command(*arguments: str) -> str:
    done = CliRunner().invoke(main_cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_downloads_deletes_and_expires_checkpoints(run: tinker.TrainingClient, tmp_path: Path):
    path = run.save_state("mine").result().path
    tinker_command("checkpoint", "set-ttl", path, "--ttl", "7200")
    tinker_command("checkpoint", "download", path, "--output", str(tmp_path))
    [folder] = tmp_path.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [CONFIG, ADAPTER]
    weights: dict[str, Any] = load((folder / ADAPTER).read_bytes())
    assert any(name.endswith("lora_B.weight") and torch.any(tensor) for name, tensor in weights.items())
    tinker_command("checkpoint", "delete", path, "--yes")
    assert path not in tinker_command("--format", "json", "checkpoint", "list", "--run-id", run.model_id)
