"""Where samples come from: files, and datasets as `datasets` loads them (here a folder, which it reads as it reads the hub)."""

import json

import pytest

from ludic.batch_gen.requests import samples
from ludic.batch_gen.requests.samples import read_samples
from ludic.types import ConfigError

ROWS = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_file_is_read_line_by_line(tmp_path):
    assert read_samples(write(tmp_path / "a.jsonl")) == ROWS
    assert read_samples(str(tmp_path / "a.jsonl")) == ROWS


def test_a_dataset_is_read_by_name_and_split(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    folder.mkdir()
    write(folder / "train.jsonl")
    write(folder / "test.jsonl", ROWS[:1])
    assert read_samples(f"hub:{folder}:train") == ROWS
    assert read_samples(f"hub:{folder}:default:test") == ROWS[:1]
    with pytest.raises(ConfigError, match=r"--eval-data hub:.*:dev could not be fetched: .*dev"):
        read_samples(f"hub:{folder}:dev", "--eval-data")


@pytest.mark.parametrize("place", ["hub:openai/gsm8k", "hub:", "hub:a:b:c:d", "hub::train"])
def test_a_dataset_that_is_named_wrongly_is_told_how(place):
    with pytest.raises(ConfigError, match="hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT"):
        read_samples(place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{}\nnot json\n", "Line 2 of .* is not JSON"),
        ("{}\n\n\nnot json\n", "Line 4 of .* is not JSON"),
        ("[1]\n", "one JSON object"),
    ],
)
def test_a_broken_file_says_where(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_samples(tmp_path / "a.jsonl")


def test_a_json_list_and_a_parquet_file_are_read_too(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
    assert read_samples(tmp_path / "a.json") == ROWS
    assert read_samples(write(tmp_path / "lines.json")) == ROWS, "one object per line under that name as well"
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read_samples(tmp_path / "a.parquet") == ROWS


@pytest.mark.parametrize(("value", "limit"), [("x" * 1000, "_MAX_CHARS"), ([0] * 100, "_MAX_VALUES")])
def test_a_small_parquet_file_that_says_one_value_very_often_is_refused(tmp_path, monkeypatch, value, limit):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"a": [value] * 20_000}), path)
    assert path.stat().st_size < 2**15 and len(read_samples(path)) == 20_000
    monkeypatch.setattr(samples, limit, 2**20)
    with pytest.raises(ConfigError, match="a.parquet has more than .* once it is decoded"):
        read_samples(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1]", "a list of JSON objects"),
        ("a.json", "[{}", "is not JSON"),
        ("a.parquet", "no", "Cannot read"),
    ],
)
def test_other_formats_that_are_broken_are_named(tmp_path, name, text, message):
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_samples(tmp_path / name)
