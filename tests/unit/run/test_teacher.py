"""`ludic train --teacher`: a teacher in the process or behind a server, and what does not go together. Everything is real but vLLM."""

from pathlib import Path

import pytest

from ludic.models.tiny import character_tokenizer, tiny_llama
from ludic.run.config import AlgoSettings, RunConfig
from ludic.run.settings import read_toml
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError
from tests.unit.cli.train_parts import RUN, command_in


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    return command_in(tmp_path, monkeypatch, capsys)


def logged(folder: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(folder / "metrics.jsonl") if name in row]


def save_teacher(folder: Path, tokenizer=None) -> None:
    tokenizer = tokenizer or character_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer), width=32, layers=1, seed=5).save_pretrained(folder)


@pytest.mark.parametrize(
    ("algo", "metric"),
    [
        (["opd"], "train/teacher_kl"),
        (["grpo_opd"], "train/teacher_kl"),
        (["opd", "--algo-set", "kl=reverse"], "train/teacher_kl"),
        (["opd", "--algo-set", "kl=forward", "--algo-set", "top_k=8"], "train/teacher_kl_forward"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_local_teacher_teaches(ludic, tmp_path, algo, metric):
    save_teacher(tmp_path / "taught")
    ended = ludic("train", *RUN, "--algo", *algo, "--teacher", "taught", "--dtype", "float32")
    assert ended.code == 0, ended.err
    assert "taught by taught" in ended.out
    kls = logged(tmp_path / "runs" / "first", metric)
    assert len(kls) == 2 and any(kl != 0 for kl in kls)


def test_run_as_teacher_is_fixed_to_its_newest_checkpoint(ludic, tmp_path):
    assert ludic("train", *RUN).code == 0
    ended = ludic("train", *RUN, "--name", "second", "--algo", "opd", "--teacher", "runs/first", "--max-lag", "1")
    assert ended.code == 0, ended.err
    config = read_toml(RunConfig, tmp_path / "runs" / "second" / "config.toml")
    assert config.algo.teacher == "runs/first/checkpoints/step_000002"
    assert ludic("train", "runs/second", "--resume", "--steps", "3").code == 0
    assert len(logged(tmp_path / "runs" / "second", "train/teacher_kl")) == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--algo", "opd"], "learns from a teacher: give --teacher"),
        (["--algo", "opd", "--algo-set", "kl=reverse"], "learns from a teacher: give --teacher"),
        (["--teacher", "tiny"], "learns from rewards alone"),
        (
            ["--algo", "opd", "--teacher", "http://127.0.0.1:1", "--algo-set", "kl=forward"],
            "compares whole distributions",
        ),
        (
            ["--algo", "opd", "--teacher", "http://127.0.0.1:1", "--temperature", "0.7"],
            "scores tokens at temperature 1",
        ),
        (["--algo", "opd", "--teacher", "tiny", "--engine", "pipeline"], "not there for engine = 'pipeline'"),
        (["--algo", "opd", "--teacher", "tiny", "--teacher-tokenizer", "x"], "for a teacher behind a URL"),
    ],
    ids=["none", "none for kl", "no use", "served kl", "served temperature", "pipeline", "tokenizer"],
)
def test_invalid_teacher_combinations_are_refused_before_loading(ludic, flags, says):
    for how in ([], ["--dry-run"]):
        ended = ludic("train", *RUN, *flags, *how)
        assert ended.code == 2 and says in ended.err.replace("\n", " "), ended.err


def test_a_teacher_with_another_tokenizer_is_refused(ludic, tmp_path):
    other = character_tokenizer()
    other.add_tokens(["<more>"])
    save_teacher(tmp_path / "taught", other)
    for kl in ("sampled", "reverse"):
        ended = ludic(
            "train", *RUN, "--algo", "opd", "--algo-set", f"kl={kl}", "--teacher", "taught", "--dtype", "float32"
        )
        assert ended.code == 2 and "another tokenizer" in ended.err, ended.err


def test_only_a_url_is_a_served_teacher():
    assert AlgoSettings(teacher="https://host:8000", teacher_tokenizer="folder").teacher_is_served
    assert not AlgoSettings(teacher="org/http-model").teacher_is_served
    with pytest.raises(ConfigError, match="behind a URL"):
        AlgoSettings(teacher_tokenizer="folder")
