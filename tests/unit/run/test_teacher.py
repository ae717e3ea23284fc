"""`ludic train` with a teacher in the process or behind a server, or one for each domain, and what does not go together. Everything
is real but vLLM."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from ludic.batch_gen import DomainTeachers
from ludic.models.loading import character_tokenizer, tiny_llama
from ludic.run import build
from ludic.run.config.run_config import RunConfig
from ludic.run.model import make_teachers
from ludic.run.settings import read_toml
from ludic.training.loggers import read_metrics
from ludic.types import SampleOrigin, SAWItem
from tests.unit.cli.train_parts import CASES, RUN, SMALL, command_in

pytestmark = pytest.mark.slow


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
        (["--algo", "opd", "--teacher", "tiny", "--teacher-tokenizer", "x"], "for a teacher behind a URL"),
    ],
    ids=["none", "none for kl", "no use", "served kl", "served temperature", "tokenizer"],
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


# --- a teacher for each domain ---

TWO_ENVS = """
[[envs]]
id = "letter.py:Letter"
name = "letters"

[[envs]]
id = "letter.py:Flat"
name = "flats"
"""
TEACHERS = '\n[teachers]\nletters = "taught"\nflats = "other"\n'
TWO = ["run.toml", *SMALL, "--rollouts-per-update", "16", "--steps", "2", "--name", "first", "--dtype", "float32"]


@pytest.mark.parametrize("algo", ["mopd", "opd"])
@pytest.mark.slow
def test_each_domain_has_its_teacher(ludic, tmp_path, monkeypatch, algo):
    scored = []
    teacher_for = DomainTeachers.teacher_for

    def noted(self, item):
        scored.append((item.origin.domain, self.domains, teacher_for(self, item)))
        return scored[-1][-1]

    monkeypatch.setattr(DomainTeachers, "teacher_for", noted)
    save_teacher(tmp_path / "taught")
    save_teacher(tmp_path / "other")
    (tmp_path / "run.toml").write_text(TWO_ENVS + TEACHERS)
    ended = ludic("train", *TWO, "--algo", algo)
    assert ended.code == 0, ended.err
    assert "taught by taught and other" in ended.out
    chosen = {(domain, id(teacher)) for domain, _, teacher in scored}
    assert {domain for domain, _ in chosen} == {"letters", "flats"} and len({teacher for _, teacher in chosen}) == 2
    assert len(chosen) == 2 and len(logged(tmp_path / "runs" / "first", "train/teacher_kl")) == 2
    config = read_toml(RunConfig, tmp_path / "runs" / "first" / "config.toml")
    assert config.teachers == {"letters": "taught", "flats": "other"}
    assert ludic("train", "runs/first", "--resume", "--steps", "3").code == 0


@pytest.mark.slow
def test_domains_with_the_same_model_share_it_and_a_run_is_its_newest_checkpoint(ludic, tmp_path):
    assert ludic("train", *RUN).code == 0
    (tmp_path / "run.toml").write_text(TWO_ENVS + '\n[teachers]\nletters = "runs/first"\nflats = "runs/first"\n')
    run = build(read_toml(RunConfig, tmp_path / "run.toml"), algo="mopd", model="tiny", max_tokens=1)
    assert set(run.config.teachers.values()) == {"runs/first/checkpoints/step_000002"}
    with ExitStack() as stack:
        teachers = make_teachers(run.resolved, stack)
        made = [teachers.teacher_for(item_of(domain)) for domain in ("letters", "flats")]
        assert made[0] is made[1]


def item_of(domain: str) -> SAWItem:
    return SAWItem([0, 1], None, [0, 1], 1.0, origin=SampleOrigin(rollout_id="r", domain=domain))


@pytest.mark.parametrize(
    ("file", "flags", "says"),
    [
        (TWO_ENVS + TEACHERS, [], "learns from rewards alone"),
        (TWO_ENVS + TEACHERS, ["--algo", "opd", "--algo-set", "kl=reverse"], "with one teacher. Give --teacher"),
        (TWO_ENVS + TEACHERS.replace("other", "http://h"), ["--algo", "mopd", "--temperature", "0.7"], "http://h is a vLLM"),
        (TWO_ENVS + TEACHERS.replace("other", "http://a:b@h"), ["--algo", "mopd"], "[teachers] flats"),
        (TWO_ENVS + TEACHERS.replace("flats", "flat"), ["--algo", "mopd"], "has none for flats"),
        (TWO_ENVS + TEACHERS + 'more = "taught"', ["--algo", "mopd"], "one for more, but the entries of [[envs]] are letters"),
        (TWO_ENVS + "\n[teachers]\nletters = 1", ["--algo", "mopd"], "expected a table whose values are text"),
        ('[env]\nid = "letter.py:Letter"' + TEACHERS, ["--algo", "mopd"], "for one env give --teacher"),
        (TWO_ENVS, ["--teachers", "letters=tiny"], "write [teachers] in a file"),
    ],
)  # fmt: skip
def test_invalid_tables_of_teachers_are_refused_before_loading(ludic, tmp_path, file, flags, says):
    (tmp_path / "run.toml").write_text(file)
    (tmp_path / "cases.py").write_text(CASES)
    for how in ([], ["--dry-run"]):
        ended = ludic("train", *TWO, *flags, *how)
        assert ended.code == 2 and says in " ".join(ended.err.split()), ended.err
