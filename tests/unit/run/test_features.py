"""What `ludic train` adds to a plain run, each feature in a small run: its values, its errors, a resume."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ludic.run import build
from ludic.run.config.run_config import RunConfig
from ludic.run.dry_run import mask_lines
from ludic.run.resolve import NEGATIVE_MASK
from ludic.run.settings import read_toml
from ludic.training.loggers import read_metrics
from ludic.types import load_rollouts
from tests.extended import cases
from tests.unit.cli.train_parts import RUN, SMALL, Ended, command_in

pytestmark = pytest.mark.slow

PARTS = '''
import random

from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class Sometimes(SingleAgentEnv):
    """A capital letter earns 1 on odd seeds; on even ones every reply does."""

    def env_reset(self, *, seed=None):
        self.easy = seed % 2 == 0
        return "?", {"easy": self.easy}

    def env_step(self, action):
        return StepOutcome("", reward=float(self.easy or action.isupper()), terminated=True)


def first_half(item):
    """Keeps samples that earned something."""
    return item.origin.total_reward > 0


class Backwards:
    """The last tasks first."""

    def __init__(self, tasks, batch_size, seed, step=1):
        self.tasks, self.batch_size, self.step = tasks, batch_size, step
        self.next = len(tasks)

    def next_requests(self):
        self.next -= self.batch_size * self.step
        return [self.tasks[(self.next + i) % len(self.tasks)] for i in range(self.batch_size)]

    def observe(self, rollouts):
        pass

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def longer(request):
    return len(request.env.kwargs["sample"]["question"])
'''


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(PARTS)
    return command_in(tmp_path, monkeypatch, capsys)


def logged(name: str, run: str = "first") -> list[float]:
    return [row[name] for row in read_metrics(Path("runs") / run / "metrics.jsonl") if name in row]


def weights(run: str, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(Path("runs") / run / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def played(run: str = "first") -> list:
    return [r for file in sorted(Path("runs", run, "rollouts").glob("*.gz")) for r in load_rollouts(file)]


def done(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    return ended


def resumes_as_if_uninterrupted(ludic, *flags: str) -> None:
    """Two updates, and one update that is resumed for another, end with the same weights."""
    once = ["train", *RUN, "--threads", "1", *flags]
    done(ludic(*once, "--name", "whole"))
    done(ludic(*once, "--name", "parts", "--steps", "1"))
    done(ludic("train", "runs/parts", "--resume", "--steps", "2"))
    assert are_equal(weights("whole"), weights("parts"))


# --- dynamic sampling ---


def test_dynamic_sampling_replaces_groups_of_equal_returns(ludic):
    env = ["mine.py:Sometimes", *SMALL, "--steps", "2", "--name", "first"]
    done(ludic("train", *env, "--dynamic-sampling", "8", "--rollouts-per-update", "16"))
    assert all(rounds > 1 for rounds in logged("train/num_sampling_rounds"))
    assert all(flat > 0 for flat in logged("train/num_zero_variance_groups"))
    assert logged("train/num_rollouts") == [16.0, 16.0], "full batches in spite of the easy seeds"


def test_dynamic_sampling_resumes(ludic):
    resumes_as_if_uninterrupted(ludic, "--dynamic-sampling", "4")


# --- stragglers ---


@pytest.mark.extended(
    covered_by="tests/unit/batch_gen/test_stragglers.py::test_a_batch_closes_without_the_slow_group_which_is_in_the_next"
)
def test_updates_begin_before_the_last_episodes_and_train_on_them_later(ludic):
    close = ["--close-batch-at", "0.5", "--rollouts-per-update", "16", "--max-tokens", "4", "--max-lag", "2"]
    done(ludic("train", *RUN, *close, "--steps", "3"))
    trained, carried = logged("train/num_rollouts"), logged("train/num_carried")
    assert all(number >= 8 and number % 4 == 0 for number in trained)
    assert [t + c for t, c in zip(trained, carried, strict=True)] == [16.0] * 3, (
        "what is carried counts for the next batch"
    )
    assert max(logged("train/lag_max")) <= 2.0 and sum(logged("train/num_stale")) == 0
    done(ludic("train", "runs/first", "--resume", "--steps", "4"))
    groups = [r.meta["episode_idx"] // 4 for r in played()]
    trained = sum(logged("train/num_rollouts"))
    assert len(set(groups)) * 4 >= trained, "no group twice"


# --- filters ---


def test_filters_leave_samples_out(ludic):
    done(ludic("train", *RUN, "--filter", "mine.py:first_half", "drop_truncated"))
    kept, all_samples = logged("train/num_samples"), logged("train/num_samples_before_filter")
    rewarded = [sum(r.total_reward > 0 for r in played()[start : start + 8]) for start in (0, 8)]
    assert kept == [float(number) for number in rewarded] and all_samples == [8.0, 8.0]


# --- curricula ---


def questions(path: Path, count: int = 12) -> str:
    path.write_text("".join(json.dumps({"question": "?" * (i + 1), "level": -i}) + "\n" for i in range(count)))
    return str(path)


ASK = ["letter.py:Question", *SMALL, "--steps", "2", "--name", "first", "--data", "q.jsonl"]


def asked(run: str = "first") -> list[int]:
    """Number of the sample of each group, in order."""
    return [rollout.request_meta["sample_index"] for rollout in played(run)[::4]]


def test_difficulty_and_curriculum_may_be_functions_of_ones_own(ludic, tmp_path):
    questions(tmp_path / "q.jsonl")
    own = ["--curriculum", "easiest_first", "--curriculum-set", "difficulty=mine.py:longer"]
    done(ludic("train", *ASK, *own, "--concurrency", "1"))
    assert set(asked()) == {0, 1}
    own = ["--curriculum", "mine.py:Backwards", "--curriculum-set", "step=2", "--name", "own", "--concurrency", "1"]
    done(ludic("train", *ASK, *own))
    assert asked("own") == [8, 9, 4, 5]


def test_a_curriculum_over_seeds_resumes(ludic):
    resumes_as_if_uninterrupted(ludic, "--curriculum", "success_band", "--curriculum-set", "num_tasks=6")


def test_prioritised_tasks_follow_what_the_algorithm_tracks(ludic, tmp_path):
    questions(tmp_path / "q.jsonl")
    spo = ["--algo", "spo", "--group-size", "1", "--curriculum", "prioritised", "--curriculum-set", "eps=0.1"]
    done(ludic("train", *ASK, *spo))
    assert logged("train/num_rollouts") == [8.0, 8.0]


# --- regularisers ---


@pytest.mark.parametrize("estimator", cases(["k1", "k2", "k3"], default=["k3"]))
def test_kl_to_the_first_weights_is_0_at_first_and_changes_the_second_update(ludic, estimator):
    done(ludic("train", *RUN, "--name", "plain"))
    done(ludic("train", *RUN, "--kl-coeff", "5", "--kl-estimator", estimator))
    first, second = logged("train/reference/kl_mean")
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-4
    assert not are_equal(weights("plain"), weights("first"))
    assert logged("train/grad_norm", "plain")[1] != logged("train/grad_norm")[1]


def test_weighted_kl_differs_once_the_policy_has_left_its_sampler(ludic):
    passes = ("--updates-per-batch", "2", "--kl-coeff", "5")
    done(ludic("train", *RUN, *passes, "--name", "plain"))
    done(ludic("train", *RUN, *passes, "--kl-weighted"))
    plain, weighted = logged("train/grad_norm", "plain"), logged("train/grad_norm")
    assert weighted[0] == plain[0] and weighted[1] != plain[1]


# --- off-policy ---


def test_a_run_with_several_steps_per_batch_resumes_in_the_middle_of_one(ludic):
    resumes_as_if_uninterrupted(ludic, "--updates-per-batch", "2", "--mini-batches", "2")


def test_corrections_are_named_with_their_numbers(ludic):
    masks = ("--correction", "negative_sequence_mask", "--correction", "divergence_mask=0.001")
    done(ludic("train", *RUN, "--updates-per-batch", "2", *masks))
    first, second = logged("train/correction_zero_frac")
    assert first == 0 < second


def stored_correction(run: str = "first") -> list[str]:
    return tomllib.loads(Path("runs", run, "config.toml").read_text())["algo"]["correction"]


LAGGED = [*RUN, "--max-lag", "1"]


@pytest.mark.parametrize("algo", ["cispo", "scalerl", "sapo"])
def test_a_preset_that_loses_on_old_samples_has_a_mask_there_and_says_so(ludic, algo):
    planned = done(ludic("train", *LAGGED, "--algo", algo, "--dry-run")).out
    assert f'correction = ["{NEGATIVE_MASK}"]' in planned
    assert f"With {algo}, older samples (max_lag 1)" in planned and "--correction none" in planned
    on_policy = done(ludic("train", *RUN, "--algo", algo, "--dry-run")).out
    assert "correction = []" in on_policy and "--correction none" not in on_policy


@pytest.mark.slow
def test_the_default_mask_is_trained_with_written_down_and_kept_by_a_resume(ludic):
    began = done(ludic("train", *LAGGED, "--algo", "cispo")).out
    assert "older samples (max_lag 1)" in began and "--correction none" in began
    assert stored_correction() == [NEGATIVE_MASK]
    assert len(logged("train/correction_zero_frac")) == 2
    went_on = done(ludic("train", "runs/first", "--resume", "--steps", "3")).out
    assert "--correction none" not in went_on, "a resumed run cannot change it"
    assert stored_correction() == [NEGATIVE_MASK] and len(logged("train/correction_zero_frac")) == 3
    refused = ludic("train", "runs/first", "--resume", "--steps", "4", "--correction", "none")
    assert refused.code == 2 and "correction" in refused.err


@pytest.mark.slow
def test_a_run_from_before_the_default_mask_goes_on_without_it(ludic):
    done(ludic("train", *LAGGED, "--algo", "cispo", "--correction", "none"))
    assert stored_correction() == [], "as runs had it before"
    done(ludic("train", "runs/first", "--resume", "--steps", "3"))
    assert stored_correction() == [] and logged("train/correction_zero_frac") == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max-lag", "1", "--correction", "none"], []),
        (["--max-lag", "1", "--correction", "token_mask"], ["token_mask"]),
        (["--max-lag", "1", "--correction", "auto", "--correction", "token_mask"], [NEGATIVE_MASK, "token_mask"]),
        (["--max-lag", "1", "--algo", "grpo"], []),
        (["--updates-per-batch", "2", "--mini-batches", "2"], []),
        (["--close-batch-at", "0.5"], [NEGATIVE_MASK]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_choice_of_corrections_is_kept_and_fresh_samples_have_none(ludic, flags, expected):
    out = done(ludic("train", *RUN, "--algo", "cispo", *flags, "--dry-run")).out
    settings, plan = out.split("\nModel ", 1)
    assert tomllib.loads(settings)["algo"]["correction"] == expected
    assert ("--correction none" in plan) == (NEGATIVE_MASK in expected)


def test_corrections_of_flags_replace_those_of_the_file(ludic, tmp_path):
    (tmp_path / "run.toml").write_text('[env]\nid = "letter.py:Letter"\n[algo]\ncorrection = ["token_mask"]')
    for flags, expected in (([], ["token_mask"]), (["--correction", "sequence_mask"], ["sequence_mask"])):
        out = done(ludic("train", "run.toml", "--model", "tiny", *flags, "--dry-run")).out
        assert tomllib.loads(out.split("\nModel ")[0])["algo"]["correction"] == expected


REPLAYED = """
[[envs]]
id = "letter.py:Letter"
{first}

[[envs]]
id = "letter.py:Flat"
algo = "cispo"
group_size = 4

[replay]
replay = 8
"""


@pytest.mark.parametrize(
    ("first", "written"),
    [('algo = "cispo"\ngroup_size = 4', [NEGATIVE_MASK]), ('algo = "grpo"\ngroup_size = 4', ["auto"])],
    ids=["one algorithm", "two"],
)
def test_each_of_several_envs_has_the_default_of_its_algorithm(ludic, tmp_path, first, written):
    (tmp_path / "two.toml").write_text(REPLAYED.format(first=first))
    run = build(read_toml(RunConfig, tmp_path / "two.toml"), model="tiny", rollouts_per_update=16)
    assert list(run.config.algo.correction) == written
    masks = [own.config.algo.correction for own in run.resolved.each]
    assert masks == [(NEGATIVE_MASK,) if own.config.algo.algo == "cispo" else () for own in run.resolved.each]
    (line,) = mask_lines(run.resolved)
    assert line.startswith("With cispo, older samples ([replay])")


def test_an_algorithm_or_loss_that_is_an_object_is_left_as_it_is(ludic):
    from ludic.training import make_cispo
    from ludic.training.losses import CISPOLoss

    for part in ({"algo": make_cispo(group_size=4)}, {"algo": "cispo", "loss": CISPOLoss()}):
        assert build(env="letter.py:Letter", model="tiny", max_lag=1, **part).config.algo.correction == ()


def test_a_resumed_run_keeps_its_first_weights_as_reference(ludic):
    resumes_as_if_uninterrupted(ludic, "--kl-coeff", "1")


def test_the_reference_may_be_another_run_and_is_fixed_to_its_checkpoint(ludic):
    done(ludic("train", *RUN, "--name", "other", "--seed", "7"))
    done(ludic("train", *RUN, "--kl-coeff", "1", "--reference", "runs/other"))
    assert logged("train/reference/kl_mean")[0] > 1e-4, "the other run's weights, not the first ones"
    assert 'reference = "runs/other/checkpoints/step_000002"' in Path("runs/first/config.toml").read_text()


def test_an_algorithm_that_needs_a_reference_gets_one(ludic):
    done(ludic("train", *RUN, "--algo", "reinforce_pp", "--algo-set", "kl_coeff=0.1"))
    assert len(logged("train/kl/kl_mean")) == 2


def test_an_adapter_is_held_near_the_model_under_it(ludic):
    done(ludic("train", *RUN, "--lora-rank", "2", "--kl-coeff", "1"))
    first, second = logged("train/reference/kl_mean")
    assert first == pytest.approx(0, abs=1e-6) and second > 0


def test_the_entropy_bonus_raises_entropy_where_rewards_teach_nothing(ludic):
    flat = ["letter.py:Flat", *SMALL, "--steps", "3", "--lr", "1e-3", "--weight-decay", "0"]
    done(ludic("train", *flat, "--name", "plain"))
    done(ludic("train", *flat, "--name", "first", "--entropy-bonus", "0.5"))
    before, after = logged("train/entropy")[0], logged("train/entropy")[-1]
    assert logged("train/entropy", "plain") == pytest.approx([before] * 3, abs=1e-6), "equal rewards teach nothing"
    assert after > before + 1e-3


# --- mistakes, and the plan ---


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--filter", "drop_trunkated"], "Did you mean 'drop_truncated'"),
        (["--curriculum", "easyest_first"], "Did you mean 'easiest_first'"),
        (["--curriculum", "easiest_first"], "difficulty"),
        (["--curriculum", "success_band", "--curriculum-set", "lo=0.1"], "lo"),
        (["--curriculum", "prioritised"], "tracks none"),
        (["--curriculum", "uniform", "--curriculum-set", "num_tasks=1"], "batch_size=2 of 1 tasks"),
        (["--curriculum-set", "low=0.1"], "none is named"),
        (["--dynamic-sampling", "1"], "give 2 or more"),
        (["--dynamic-sampling", "4", "--algo", "reinforce", "--group-size", "1"], "there are none"),
        (["--close-batch-at", "0"], "above 0 and at most 1"),
        (["--close-batch-at", "0.9", "--max-lag", "0"], "max_lag = 0 is too little"),
        (["--reference", "tiny"], "give --kl-coeff"),
        (["--correction", "none", "--correction", "token_mask"], "none stands alone"),
        (["--correction", "token_tis"], "no correction 'token_tis'"),
        (["--correction", "token_truncation"], "would count them twice"),
        (["--kl-estimator", "k4"], "k1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes_are_named_before_weights_are_loaded(ludic, flags, says):
    for how in ([], ["--dry-run"]):
        ended = ludic("train", *RUN, *flags, *how)
        assert ended.code == 2 and says in ended.err.replace("\n", " "), ended.err


def test_the_plan_names_what_a_run_adds(ludic):
    flags = ["--dynamic-sampling", "4", "--filter", "drop_truncated", "--curriculum", "uniform", "--kl-coeff", "0.1"]
    out = done(ludic("train", *RUN, *flags, "--entropy-bonus", "0.01", "--dry-run")).out
    for part in ("up to 4 times", "curriculum uniform", "drop_truncated", "0.1 × KL (k3)", "0.01 × its mean"):
        assert part in out
    assert "Entropy" not in done(ludic("train", *RUN, "--dry-run")).out


# --- the page ---

PAGE = Path(__file__).parents[3] / "docs" / "ludic-train.md"
ENV_OF_PAGE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]
FILES = re.findall(r"```toml\n(.*?)```", PAGE.read_text().split("## Which tasks, which samples")[1], flags=re.DOTALL)
PLAIN = '[env]\nid = "rps.py:RockPaperScissors"\n'
FILES += [
    PLAIN + "[rollouts]\ndynamic_sampling = 4",
    PLAIN + '[algo]\nfilter = ["drop_truncated", "drop_parse_errors"]',
    PLAIN + "[rollouts]\nclose_batch_at = 0.9",
    PLAIN + '[rollouts]\ncurriculum = "success_band"\ncurriculum_set = {num_tasks = 64, low = 0.1, high = 0.9}',
    PLAIN + '[algo]\nentropy_bonus = 0.001\nkl_coeff = 0.05\nkl_estimator = "k2"',
    PLAIN + '[algo]\ncorrection = ["token_mask"]\n[replay]\nreplay = 32\nreplay_half_life = 4',
    '[env]\nid = "prisoners_dilemma"\nset = {rounds = 2}\n'
    "[league]\nleague_every = 10\nleague_size = 4\nleague_share = 0.5",
    PLAIN + '[algo]\nalgo_set = {behavior_cap = 2.0}\ncorrection = ["negative_sequence_mask=0.1"]\n'
    "[train]\nupdates_per_batch = 2\nmini_batches = 2",
]
"""The files of the page, and one for each feature that the page names as a flag or a section."""


@pytest.mark.parametrize("text", FILES, ids=[str(number) for number in range(len(FILES))])
def test_every_file_of_the_page_and_every_feature_in_a_file_runs(ludic, tmp_path, text):
    (tmp_path / "rps.py").write_text(ENV_OF_PAGE)
    (tmp_path / "run.toml").write_text(text)
    small = [
        "--model",
        "tiny",
        "--max-tokens",
        "1",
        "--group-size",
        "16",
        "--rollouts-per-update",
        "32",
        "--logger",
        "none",
    ]
    if "runs/earlier" in text:
        done(ludic("train", "rps.py:RockPaperScissors", *small, "--steps", "1", "--name", "earlier"))
    done(ludic("train", "run.toml", *small, "--steps", "1", "--name", "first"))
    assert len(logged("train/grad_norm")) == 1
