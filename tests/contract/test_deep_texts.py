"""Brackets within brackets within brackets: every place that reads JSON or TOML from outside gives its ordinary error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")
pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

from ludic.batch_gen.requests.samples import read_samples
from ludic.batch_gen.store import index_lines
from ludic.batch_gen.training_traces import read_training_traces
from ludic.http.client import Answer, json_object
from ludic.run.config.run_config import RunConfig
from ludic.run.settings import read_pair, read_toml
from ludic.training.checkpoint.manifest import CheckpointError, read_object
from ludic.types import ConfigError, load_rollouts
from ludic.util.metrics_file import read_metrics
from ludic_envs.adapters.openenv_actions import ActionFormat, UnreadableAction
from ludic_judges.llm import read_criteria
from ludic_ops.scaling import read_shape
from ludic_pipeline.launch.launch import ray_resources
from ludic_sandbox.code_exec.datasets import APPSTestAdapter
from ludic_sandbox.harbor.dockerfile import read_dockerfile
from ludic_sandbox.harbor.task import HarborTask
from ludic_serve.request import parse_object
from ludic_tinker.server.bodies import OptimStep, read_json
from ludic_tinker.server.records import Refused

DEPTH = 100_000
LIST, OBJECT, TOML = "[" * DEPTH, '{"a":' * DEPTH, "a = " + "[" * DEPTH
APPS = APPSTestAdapter()
OPENENV = ActionFormat({"action": {"properties": {}, "required": []}}, "server")
TEXTS: dict[str, tuple[Callable[[str], Any], str, type[Exception]]] = {
    "body of a Tinker request": (lambda text: read_json(text.encode(), OptimStep), LIST, Refused),
    "body of a server's request": (lambda text: parse_object(text.encode()), OBJECT, ConfigError),
    "reply to an OpenEnv server": (OPENENV.read, OBJECT, UnreadableAction),
    "response of an endpoint": (
        lambda text: json_object("http://x", Answer(status=200, data=text.encode(), retry_after=None), "is no model"),
        OBJECT,
        ConfigError,
    ),
    "tests of APPS": (lambda text: APPS.get_tests({"input_output": text}), OBJECT, ConfigError),
    "solutions of APPS": (lambda text: APPS.get_reference({"solutions": text}), LIST, ConfigError),
    "task of Harbor": (lambda text: HarborTask.from_files({"task.toml": text}, "x"), TOML, ConfigError),
    "task of Terminal-Bench": (lambda text: HarborTask.from_files({"task.yaml": text}, "x"), "[" * 5000, ConfigError),
    "COPY of a Dockerfile": (lambda text: read_dockerfile(text, {}), f"FROM x\nCOPY {LIST}]", ConfigError),
    "resources of Ray": (lambda text: ray_resources("--ray-resources", text, is_for_ray=True), OBJECT, ConfigError),
}
FILES: dict[str, tuple[Callable[[Path], Any], str, type[Exception]]] = {
    "line of a data set": (read_samples, OBJECT, ConfigError),
    "list of a data set": (read_samples, LIST, ConfigError),
    "config": (lambda path: read_toml(RunConfig, path), TOML, ConfigError),
    "criteria of a judge": (read_criteria, TOML, ConfigError),
    "shape of a model": (read_shape, OBJECT, ConfigError),
    "training traces": (lambda path: list(read_training_traces(path)), OBJECT, ConfigError),
    "rollouts": (lambda path: list(load_rollouts(path)), OBJECT, ValueError),
    "rollouts without their steps": (lambda path: list(index_lines(path)), OBJECT, ConfigError),
    "state of a checkpoint": (read_object, OBJECT, CheckpointError),
}


@pytest.mark.parametrize("place", TEXTS)
def test_a_deep_text_is_refused_as_other_unreadable_ones(place: str):
    read, text, expected = TEXTS[place]
    with pytest.raises(expected):
        read(text)


@pytest.mark.parametrize("place", FILES)
def test_a_deep_file_is_refused_as_other_unreadable_ones(place: str, tmp_path: Path):
    read, text, expected = FILES[place]
    path = tmp_path / "config.json"
    path.write_text(text + "\n")
    with pytest.raises(expected) as caught:
        read(path)
    assert caught.type is not RecursionError


def test_a_deep_line_of_metrics_is_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{OBJECT}\n{{"step": 2}}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_a_deep_value_of_a_flag_is_text():
    assert read_pair(f"name={LIST}") == ("name", LIST)
