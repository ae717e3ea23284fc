"""The index of rollout files: incremental, cached, unmoved by what a run writes, removes or leaves half written."""

import gzip
import json
import shutil
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ludic.cli.eval.results import write_page
from ludic.types import ConfigError, Rollout
from ludic.util.line_writer import LineWriter
from ludic_view import api
from ludic_view import files as files_module
from ludic_view.index import RunIndex, Runs

FOREVER = float("inf")


def line_of(
    number: int, *, version: int = 0, reward: float = 0.0, group: str | None = None, text: str = "hello"
) -> bytes:
    """A stored rollout of one call, made without a model."""
    tokens = list(range(8))
    step = {
        "index": 0, "prompt_messages": [{"role": "user", "content": f"task {number % 7}"}], "action": text,
        "trace": {"prompt_token_ids": tokens * 4, "completion_token_ids": tokens, "completion_logprobs": [-0.5] * 8,
                  "finish_reason": "stop", "version_runs": [[version, 8]], "temperature": 1.0},
        "action_target": "env", "loop_index": 0, "reward": reward, "truncated": False, "terminated": True, "info": {},
        "reward_components": {}, "kind": "agent", "id": f"{number}.0", "ts_ns": 10**18 + number, "turn_id": f"{number}/1",
        "parent_id": None, "tool_calls": None, "tool_results": None,
    }  # fmt: skip
    meta = {
        "request_meta": {"group_id": group or f"g{number // 4}"},
        "engine": {"env_kind": "env"},
        "sample_index": number % 7,
    }
    row = {
        "format": 1, "id": f"r{number}", "meta": meta, "stop": "terminated", "failure": None, "total_reward": reward,
        "length": 1, "duration_ns": 0, "steps": [step],
    }  # fmt: skip
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def write(path: Path, numbers, **facts) -> None:
    LineWriter(path).append(b"".join(line_of(n, **facts) for n in numbers))


def empty_run(folder: Path) -> RunIndex:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text("[train]\nsteps = 10\n")
    return RunIndex("x", folder)


def ids(index: RunIndex) -> list[str]:
    return [card.id for card in index.cards]


@pytest.mark.parametrize(
    "messages", ["abc", ["abc"], 5, None, {"after": 0, "new": "abc"}, [{"role": "user", "content": "x"}, [1]]]
)
def test_messages_that_are_no_messages_are_said_to_be_damaged(tmp_path, messages):
    index, row = empty_run(tmp_path / "x"), json.loads(line_of(0))
    row["steps"][0]["prompt_messages"] = messages
    (tmp_path / "x" / "rollouts" / "from_step_000000.jsonl").write_text(json.dumps(row) + "\n")
    index.refresh(FOREVER)
    with pytest.raises(api.NotFound, match="Rollout 'r0' of run x cannot be read: prompt_messages is "):
        api.show_rollout(index, "r0", {})
    with pytest.raises(ValueError, match="prompt_messages is "):
        Rollout.from_dict(row)


def test_text_is_found_beside_numbers_that_no_decoder_takes(tmp_path):
    index = empty_run(tmp_path / "x")
    row = line_of(1, text="needle").replace(b'"content":"task 1"', b'"content":' + b"7" * 5000)
    (tmp_path / "x" / "rollouts" / "from_step_000000.jsonl").write_bytes(line_of(0) + row)
    index.refresh(FOREVER)
    assert [card["id"] for card in api.rollouts(index, {"text": "needle"})["rollouts"]] == ["r1"]
    assert api.rollouts(index, {"text": "task 0"})["total"] == 1


def test_one_id_in_two_files_is_searched_in_both(tmp_path):
    index, folder = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts"
    write(folder / "from_step_000000.jsonl", [9, 1], text="first")
    write(folder / "actor.jsonl.gz", [1], text="second")
    index.refresh(FOREVER)
    assert [api.rollouts(index, {"text": text})["total"] for text in ("first", "second", "task")] == [2, 1, 3]
    write(folder / "actor.jsonl.gz", [9], text="second")
    index.refresh(FOREVER)
    assert [api.rollouts(index, {"text": text})["total"] for text in ("first", "second", "task")] == [2, 2, 4]


def test_time_is_kept_in_a_file_of_nothing_but_gzip_headers(tmp_path):
    index = empty_run(tmp_path / "x")
    header = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
    (tmp_path / "x" / "rollouts" / "from_step_000000.jsonl.gz").write_bytes(header * 2**17)
    began = time.monotonic()
    index.refresh(0.2)
    assert time.monotonic() - began < 3


def test_time_and_memory_are_kept_in_a_member_of_tiny_lines(tmp_path):
    index = empty_run(tmp_path / "x")
    path = tmp_path / "x" / "rollouts" / "from_step_000000.jsonl.gz"
    path.write_bytes(gzip.compress(line_of(0) + b"1\n" * 3_000_000 + line_of(1)))
    tracemalloc.start()
    index.refresh(0.2)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ids(index) == ["r0"] and most < 40e6
    (file,) = index._files.values()
    before = file.num_decoded
    file._num_seen = 2 * 2_900_000 + len(line_of(0))  # as if refreshed many times
    began = time.monotonic()
    while not index.refresh(0.2):
        pass
    assert time.monotonic() - began < 5 and ids(index) == ["r0", "r1"] and file.num_decoded - before < 10**5 + 10


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_only_new_lines_are_decoded(tmp_path, suffix):
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / f"from_step_000000.{suffix}"
    writer = LineWriter(path)
    for first in range(0, 60, 20):
        for number in range(first, first + 20):
            writer.append(line_of(number))
        assert index.refresh(FOREVER)
        assert ids(index) == [f"r{n}" for n in range(first + 20)]
        assert index.num_decoded == first + 20
    index.refresh(FOREVER)
    assert index.num_decoded == 60
    assert all(Rollout.from_json(index.line_of(card).read()).id == card.id for card in index.cards)


def test_many_gzip_members_are_followed(tmp_path):
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / "from_step_000000.jsonl.gz"
    writer = LineWriter(path)
    for first in range(0, 1200, 100):
        writer.append(b"".join(line_of(n) for n in range(first, first + 100)))
        if first % 300 == 0:
            index.refresh(FOREVER)
    assert index.refresh(FOREVER) and ids(index) == [f"r{n}" for n in range(1200)] and index.num_decoded == 1200
    assert len({card.member for card in index.cards}) > 1
    assert all(Rollout.from_json(index.line_of(card).read()).id == card.id for card in index.cards[::100])


def test_a_large_file_is_opened_from_the_cache(tmp_path, monkeypatch):
    """The first start decodes heads; the next decodes only what is new."""
    monkeypatch.setattr(files_module, "_CACHE_FROM", 100)
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / "from_step_000000.jsonl"
    write(path, range(200))
    index.refresh(FOREVER)
    again = RunIndex("x", tmp_path / "x")
    assert again.refresh(FOREVER)
    assert again.num_decoded == 0 and ids(again) == ids(index)
    write(path, [200])
    assert again.refresh(FOREVER) and again.num_decoded == 1 and len(again.cards) == 201


def test_large_file_is_answered_from_before_it_is_read(tmp_path):
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / "from_step_000000.jsonl"
    with path.open("wb") as file:
        file.writelines(line_of(n) for n in range(500))
    assert not index.refresh(0.0) and 0 < len(index.cards) < 500 and not index.is_complete
    while not index.refresh(0.01):
        pass
    assert ids(index) == [f"r{n}" for n in range(500)] and index.num_decoded == 500


def test_run_folder_is_never_written_to(tmp_path, recorded):
    folder = tmp_path / "letters"
    shutil.copytree(recorded / "letters", folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    runs = Runs(tmp_path)
    for path in ("", "/steps", "/rollouts", "/groups", "/tasks", "/time", "/health"):
        api.answer(runs, f"/api/runs/letters{path}")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_half_written_last_line_waits_for_its_rest(tmp_path):
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / "from_step_000000.jsonl"
    half = line_of(1)
    path.write_bytes(line_of(0) + half[:100])
    index.refresh(FOREVER)
    assert ids(index) == ["r0"]
    with path.open("ab") as file:
        file.write(half[100:])
    index.refresh(FOREVER)
    assert ids(index) == ["r0", "r1"] and index.num_damaged == 0


def test_half_written_gzip_member_gives_its_whole_lines(tmp_path):
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / "from_step_000000.jsonl.gz"
    write(path, range(5))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # as between two writes of the writer
    index.refresh(FOREVER)
    first = ids(index)
    path.write_bytes(whole)
    index.refresh(FOREVER)
    assert ids(index) == [f"r{n}" for n in range(5)] and first == ids(index)[: len(first)]


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / "from_step_000000.jsonl"
    path.write_bytes(line_of(0) + b'{"id": 5}\n' + b"not json\n" + b'["a list"]\n' + b"\n" + line_of(1))
    index.refresh(FOREVER)
    assert ids(index) == ["r0", "r1"] and index.num_damaged == 3


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.toml", f"x = {DEEP}", "config.toml: the TOML is nested too deeply"),
        ("config.toml", f"{'a.' * 5000}a = 1", "config.toml: "),
        ("config.toml", "[train\n", "config.toml: "),
        ("config.toml", "#" * 2**21, "config.toml: longer than"),
        ("metrics.jsonl", f'{{"step": 1, "x": {DEEP}\n', "metrics.jsonl: 1 lines cannot be read"),
        ("metrics.jsonl", '{"step": 1, "time": "noon"}\n{"step": 1, "perf/step_s": [1]}\n', "metrics.jsonl: 2 lines"),
        ("metrics.jsonl", f'{{"step": 1, "x": {"9" * 400}}}\n', "metrics.jsonl: 1 lines"),
        ("metrics.jsonl", f'{{"step": 1, "{"x" * 2**21}": 1}}\n', "metrics.jsonl: 1 lines"),
        ("failure.json", DEEP, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_damage_belongs_to_the_row_of_its_run(tmp_path, name, content, says):
    for run in ("good", "bad"):
        empty_run(tmp_path / run)
        (tmp_path / run / "metrics.jsonl").write_text('{"step": 1, "time": 5, "train/loss": 0.5}\n')
    with (tmp_path / "bad" / name).open("a") as file:
        file.write(content)
    bad, good = json.loads(api.encode(api.list_runs(Runs(tmp_path))))["runs"]
    assert good["damage"] == [] and good["last"] == bad["last"] == {"train/loss": 0.5}
    assert [line.startswith(says) for line in bad["damage"]] == ([True] if says else [])
    index = Runs(tmp_path).get("bad")
    index.refresh(FOREVER)
    assert [each["code"] for each in api.advisories(index)] == (["damaged"] if says else [])


def test_settings_of_other_types_than_ours_are_no_error(tmp_path):
    index = empty_run(tmp_path / "x")
    (tmp_path / "x" / "config.toml").write_text('rollouts = 5\nmodel = [1]\n[train]\nsteps = "many"\n')
    write(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl", range(4))
    index.refresh(FOREVER)
    found = api.show_run(index)
    assert found["steps_planned"] is None and found["model"] is None and found["num_rollouts"] == 4


def test_numbers_that_nothing_can_compute_with_are_damage(tmp_path):
    index = empty_run(tmp_path / "x")
    row = json.loads(line_of(1))
    row["steps"][0]["ts_ns"] = 10**400
    path = tmp_path / "x" / "rollouts" / "from_step_000000.jsonl"
    path.write_bytes(line_of(0) + json.dumps(row).encode() + b"\n")
    (tmp_path / "x" / "config.toml").write_text(f"[rollouts]\nmax_failed_share = {10**400}\n")
    index.refresh(FOREVER)
    assert ids(index) == ["r0"] and [each["code"] for each in api.advisories(index)] == ["damaged"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_file_that_was_replaced_is_read_from_its_start(tmp_path, suffix):
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / f"from_step_000000.{suffix}"
    write(path, range(6))
    index.refresh(FOREVER)
    path.unlink()
    index.refresh(FOREVER)
    assert ids(index) == []
    write(path, range(10, 13))
    index.refresh(FOREVER)
    assert ids(index) == ["r10", "r11", "r12"]
    other = path.with_name("other")
    other.write_bytes(gzip.compress(line_of(20)) if suffix.endswith("gz") else line_of(20))
    other.replace(path)
    index.refresh(FOREVER)
    assert ids(index) == ["r20"]


def test_rollouts_that_a_resumed_start_has_played_again_are_abandoned(tmp_path):
    index, folder = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts"
    for version in range(4):
        write(folder / "from_step_000000.jsonl.gz", range(version * 4, version * 4 + 4), version=version)
    write(folder / "from_step_000002.jsonl.gz", range(100, 104), version=2)
    index.refresh(FOREVER)
    rows = api.steps(index)["steps"]
    assert [(row["step"], row["num_rollouts"]) for row in rows] == [(1, 4), (2, 4), (3, 4)]
    assert api.rollouts(index, {"step": "3"})["rollouts"][0]["id"] == "r100"
    assert api.rollouts(index, {"abandoned": "1"})["total"] == 20


def test_metrics_of_a_resumed_run_replace_those_after_its_checkpoint(tmp_path):
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "metrics.jsonl"
    rows = [json.dumps({"step": n, "time": float(n), "train/loss": float(n)}) + "\n" for n in range(1, 5)]
    path.write_text("".join(rows) + '{"step": 5, "ti')
    index.refresh()
    assert sorted(index.metrics) == [1, 2, 3, 4]
    other = path.with_name("shorter")
    other.write_text("".join(rows[:2]) + '{"step":3,"time":9.0,"train/loss":null}\n')
    other.replace(path)
    index.refresh()
    assert sorted(index.metrics) == [1, 2, 3] and index.metrics[3] == {"train/loss": None}


def test_lines_of_one_step_are_put_together(tmp_path):
    index = empty_run(tmp_path / "x")
    lines = ['{"step":1,"time":1.0,"train/loss":2.0}', '{"step":1,"time":2.0,"eval/accuracy":0.5}', "damaged", "[]"]
    (tmp_path / "x" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    index.refresh()
    assert index.metrics == {1: {"train/loss": 2.0, "eval/accuracy": 0.5}}


def test_old_run_without_records_or_config_is_shown(tmp_path):
    write(tmp_path / "old" / "rollouts" / "from_step_000000.jsonl", range(3))
    runs = Runs(tmp_path)
    run = api.answer(runs, "/api/runs/old")
    assert run["num_rollouts"] == 3 and not run["has_tokens"] and not run["has_text"] and run["config"] == {}
    shown = api.answer(runs, "/api/runs/old/rollouts/r1")
    tokens = shown["turns"][0]["steps"][0]["tokens"]
    assert tokens["text"][:2] == ["⟨0⟩", "⟨1⟩"] and tokens["advantage"] == [None] * 8 and tokens["mask"] == [0] * 8
    assert tokens["logprob"] == [-0.5] * 8 and shown["lag"] == 0


def test_tokenizer_in_the_run_folder_gives_tokens_their_text(tmp_path):
    from tokenizers import Tokenizer, models

    write(tmp_path / "old" / "rollouts" / "from_step_000000.jsonl", range(1))
    words = {word: id for id, word in enumerate("abcdefghijklmnop")}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "old" / "tokenizer.json"))
    runs = Runs(tmp_path)
    assert api.answer(runs, "/api/runs/old")["has_text"]
    shown = api.answer(runs, "/api/runs/old/rollouts/r0")
    assert shown["turns"][0]["steps"][0]["tokens"]["text"][0] == "a"


def _with_compressed_zeros(file, arrays):
    np.savez_compressed(file, **(arrays | {"logp": np.zeros(10**8, dtype=np.float32)}))


def _with_raw(header: bytes):
    """A member that is not what numpy writes."""

    def write_raw(file, arrays):
        np.savez(file, **arrays)
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("entropy.npy", header)

    return write_raw


def _with(**columns):
    return lambda file, arrays: np.savez(file, **(arrays | columns))


_HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117) + "\n"
_RECORD = {
    "rollout_id": np.array([b"r0", b"r1"]), "segment": np.array([0, 0], dtype=np.int32),
    "num_tokens": np.array([8, 8], dtype=np.int32), "num_weights": np.array([1, 8], dtype=np.int32),
    "weight": np.ones(9, dtype=np.float32), "logp": np.zeros(16, dtype=np.float32),
}  # fmt: skip


@pytest.mark.parametrize(
    "write_record",
    [
        _with_compressed_zeros,
        lambda file, arrays: file.write_bytes(b"not a zip"),
        lambda file, arrays: file.write_bytes(b""),
        _with_raw(b""),
        _with_raw(b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr'".ljust(118)),  # tokenize.TokenError
        _with_raw(b"\x93NUMPY\x01\x00\x76\x00" + _HUGE.encode()),
        _with(segment=np.array([0, -1], dtype=np.int32)),
        _with(num_tokens=np.array([8, -8], dtype=np.int32)),
        _with(num_tokens=np.array([8, 2**31 - 1], dtype=np.int32)),
        _with(num_weights=np.array([1, 9], dtype=np.int32), weight=np.ones(10, dtype=np.float32)),
        _with(num_tokens=np.array([8.0, 8.0])),
        _with(num_tokens=np.array([8], dtype=np.int32)),
        _with(logp=np.zeros((4, 4), dtype=np.float32)),
        _with(logp=np.zeros(15, dtype=np.float32)),
        _with(logp=np.array(["x"] * 16)),
        _with(logp=np.array([{}] * 16)),
        _with(rollout_id=np.array([5, 6])),
        _with(rollout_id=np.array(5)),
        lambda file, arrays: np.savez(file, logp=arrays["logp"]),
    ],
)
def test_damaged_record_of_the_trainer_is_damage_of_its_run(tmp_path, write_record):
    index = empty_run(tmp_path / "x")
    write(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl", range(2))
    (tmp_path / "x" / "trained").mkdir()
    write_record(tmp_path / "x" / "trained" / "step_000001.rank0.npz", dict(_RECORD))
    index.refresh(FOREVER)
    assert index.damage() == ["trained: 1 files cannot be read"]
    assert not api.show_rollout(index, "r0", {})["has_trainer"]
    np.savez(tmp_path / "x" / "trained" / "step_000001.rank0.npz", **_RECORD)  # repaired
    index.refresh(FOREVER)
    assert index.damage() == [] and api.show_rollout(index, "r0", {})["has_trainer"]


def test_record_that_is_damaged_while_it_is_shown_is_counted(tmp_path):
    index = empty_run(tmp_path / "x")
    write(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl", range(2))
    (tmp_path / "x" / "trained").mkdir()
    file = tmp_path / "x" / "trained" / "step_000001.rank0.npz"
    np.savez(file, **_RECORD)
    index.refresh(FOREVER)
    file.write_bytes(b"not a zip")
    assert not api.show_rollout(index, "r0", {})["has_trainer"]
    assert index.damage() == ["trained: 1 files cannot be read"]


def test_evaluation_is_a_run_without_steps(tmp_path):
    folder = tmp_path / "eval" / "gsm8k"
    write(folder / "rollouts" / "model.jsonl.gz", range(3))
    (folder / "config.toml").write_text('[env]\nid = "gsm8k"\n')
    (folder / "metrics.json").write_text("{}")
    assert write_page(folder) == folder / "page.html" and "task 0" in (folder / "page.html").read_text()
    (run,) = api.answer(Runs(tmp_path), "/api/runs")["runs"]
    assert (run["id"], run["state"], run["env"]) == ("eval/gsm8k", "finished", "gsm8k")
    assert api.answer(Runs(tmp_path), "/api/runs/eval%2Fgsm8k/rollouts")["total"] == 3
    assert api.answer(Runs(tmp_path), "/api/runs/eval/gsm8k/rollouts")["total"] == 3


# --- where runs are looked for ------------------------------------------------------------------------------------


def test_run_folder_itself_can_be_served(recorded):
    runs = Runs(recorded / "letters")
    assert runs.ids() == ["letters"] and api.answer(runs, "/api/runs/letters")["num_rollouts"] > 0
    (recorded / "other").mkdir(exist_ok=True)
    with pytest.raises(ConfigError):
        runs.get("other")


def test_links_out_of_the_root_are_not_followed(tmp_path, recorded):
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(recorded / "letters")
    assert Runs(root).ids() == []
    folder = root / "mine"
    (folder / "rollouts").mkdir(parents=True)
    source = next((recorded / "letters" / "rollouts").glob("*.gz"))
    (folder / "rollouts" / source.name).symlink_to(source)
    (folder / "metrics.jsonl").symlink_to(recorded / "letters" / "metrics.jsonl")
    (folder / "config.toml").symlink_to(recorded / "letters" / "config.toml")
    (folder / "trained").symlink_to(recorded / "letters" / "trained")
    run = api.answer(Runs(root), "/api/runs/mine")
    assert run["num_rollouts"] == 0 and run["metrics"] == [] and run["config"] == {} and not run["has_tokens"]


@pytest.mark.parametrize("id", ["..", ".", "", "/etc", "letters/..", "letters/../letters", "letters/rollouts"])
def test_id_that_is_no_run_is_refused(runs, id):
    with pytest.raises(ConfigError, match="There is no run"):
        runs.get(id)


def test_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        Runs(tmp_path / "none")


def test_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_CACHE_FROM", 1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    index = empty_run(tmp_path / "x")
    write(tmp_path / "x" / "rollouts" / "from_step_000000.jsonl", range(3))
    assert index.refresh(FOREVER) and len(index.cards) == 3


def test_cache_of_another_file_under_the_same_name_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_CACHE_FROM", 1)
    index, path = empty_run(tmp_path / "x"), tmp_path / "x" / "rollouts" / "from_step_000000.jsonl"
    write(path, range(3))
    index.refresh(FOREVER)
    content = b"".join(line_of(n) for n in range(50, 60))
    path.write_bytes(content)  # the same inode
    again = RunIndex("x", tmp_path / "x")
    again.refresh(FOREVER)
    assert ids(again) == [f"r{n}" for n in range(50, 60)]
