"""Every pair of features of a run: it is refused in one sentence that a declaration makes, or it makes a plan; some train."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ludic.envs import SingleAgentEnv
from ludic.models.loading import make_tiny
from ludic.run import Run, build
from ludic.run.features.core import features, features_on
from ludic.training.algorithms import make_grpo
from ludic.types import ConfigError, StepOutcome

pytestmark = pytest.mark.slow

ENVS = {"envs": [{"id": "tic_tac_toe"}, {"id": "key_door"}]}
PIPELINE = {"engine": "pipeline", "redis": "redis://here"}


class Letter(SingleAgentEnv):
    """A capital letter earns 1; with `sample` it asks about one."""

    def env_reset(self, *, seed=None):
        return "?", {}

    def env_step(self, action):
        return StepOutcome("", reward=float(action.isupper()), terminated=True)


class Question(Letter):
    def __init__(self, sample):
        super().__init__()
        self.sample = sample


def plays(task):
    """An agent that is a function."""


def scores(rollout):
    return 1.0


SETTINGS: dict[str, dict[str, Any]] = {
    "engine = 'local'": {},
    "engine = 'vllm'": {"engine": "vllm"},
    "engine = 'pipeline'": PIPELINE,
    "redis": {"redis": "redis://here"},
    "engine = 'vllm' (in a pipeline actor_engine = 'vllm')": {**PIPELINE, "actor_engine": "vllm"},
    "server": {"server": ("http://there:1",)},
    "push = 'adapter'": {"push": "adapter", "lora_rank": 2},
    "transport": {"transport": "cuda_ipc"},
    "transport to named servers": {"transport": "gloo", "engine": "vllm"},
    "server_sleep": {"server_sleep": True},
    "[policies.…]": {"policies": {"a": {"roles": ["X"]}, "b": {"roles": ["O"]}}},
    "[[envs]]": ENVS,
    "preferences": {"preferences": Path("pairs.jsonl"), "algo": "dpo"},
    "data (with sft)": {"data": Path("q.jsonl"), "algo": "sft"},
    "rollouts": {"rollouts": (Path("rollouts.jsonl"),)},
    "reward": {"reward_weight": {"env": 2.0}},
    "dynamic_sampling": {"dynamic_sampling": 4},
    "close_batch_at": {"close_batch_at": 0.5},
    "curriculum": {"curriculum": "uniform"},
    "filter": {"filter": ("drop_truncated",)},
    "kl_coeff": {"kl_coeff": 0.1},
    "entropy_bonus": {"entropy_bonus": 0.1},
    "[[recorded]]": {"recorded": [{"rollouts": ["rollouts.jsonl"]}]},
    "[replay]": {"replay": 4},
    "league_every": {"league_every": 2},
    "teacher": {"teacher": "tiny", "algo": "grpo_opd"},
    "[teachers]": {**ENVS, "teachers": {"tic_tac_toe": "tiny", "key_door": "tiny"}, "algo": "mopd", "group_size": 4},
    "max_lag": {"max_lag": 2},
    "eval_in_background": {"eval_in_background": True, "eval_every": 2},
    "protocol": {"protocol": "single_agent"},
    "data": {"data": Path("q.jsonl")},
    "updates_per_batch": {"updates_per_batch": 2},
    "mini_batches": {"mini_batches": 2},
    "quantize_base": {"quantize_base": "4bit", "lora_rank": 2},
    "source=": {"source": lambda source: source},
    "scorers=": {"reward": [scores]},
    "reward= of an agent behind the gateway": {"agent": plays, "reward": scores},
    "policies= of an agent behind the gateway": {"agent": plays, "policies": {"other": object()}},
    "protocol= as an object": {"protocol": lambda client, model, chat_template: None},
    "data= as an object": {"data": [{"question": "?"}] * 20},
    "algo= as an object": {"algo": make_grpo(group_size=4)},
    "model= as an object": {"model": make_tiny(seed=0)},
    "judge": {"judge": "tiny"},
    "env_workers": {"env_workers": 2},
    "sandbox": {"sandbox": "bubblewrap"},
}  # fmt: skip
"""Name of each feature -> settings, and arguments of `build`, with which a run has it."""

SEATS, ASKS = {"policies", "league_every"}, {"data"}
"""Settings for envs with several roles, and for those that ask about samples."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text("".join(json.dumps({"question": "?", "answer": "A"}) + "\n" for _ in range(20)))
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    Path("rollouts.jsonl").write_text("")


def with_both(first: str, second: str) -> dict[str, Any] | None:
    """The settings of both; None where they give one setting two values, or need different envs."""
    one, other = SETTINGS[first], SETTINGS[second]
    given = {**one, **other}
    if any(one[name] != other[name] for name in one.keys() & other.keys()):
        return None
    kinds = [kind for kind in (SEATS, ASKS, {"envs"}) if kind & given.keys()]
    if len(kinds) > 1 and not {"envs", "policies", "league_every"} & one.keys() & other.keys():
        is_declared = {second} & declared(first) or {first} & declared(second)
        return None if not is_declared else given
    return given


def declared(name: str) -> set[str]:
    """Names of the features that this one excludes."""
    return set(next(feature for feature in features() if feature.name == name).excludes)


def built(given: dict[str, Any]) -> Run:
    usual = {
        "model": "tiny",
        "name": "n",
        "group_size": 4,
        "rollouts_per_update": 16,
        "max_tokens": 1,
        "steps": 4,
        "logger": "none",
    }
    if "envs" not in given:
        has_seats = "league_every" in given or ("policies" in given and "agent" not in given)
        usual["env"] = "tic_tac_toe_duel" if has_seats else Question if ASKS & given.keys() else Letter
    if ASKS & given.keys() and "eval_every" in given:
        usual["eval_data"] = Path("q.jsonl")
    return build(**{**usual, **given})


def outcome(given: dict[str, Any]) -> str:
    """Why the run is refused; empty if it has a plan."""
    try:
        run = built(given)
        run.plan()
    except ConfigError as error:
        return str(error)
    return ""


def is_declared(sentence: str) -> bool:
    names = [feature.name for feature in features()]
    needs = any(f" is for {name}: " in sentence for name in names)
    return needs or " exclude each other: " in sentence


def test_every_feature_is_in_the_table():
    assert {feature.name for feature in features()} == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_feature_with_each_other_makes_a_plan_or_is_refused_by_a_declaration(name, folder):
    later = list(SETTINGS)[list(SETTINGS).index(name) + 1 :]
    wrong = {}
    for other in later:
        given = with_both(name, other)
        refused = "" if given is None else outcome(given)
        if refused and not is_declared(refused):
            wrong[other] = refused
    assert not wrong


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_table_turn_their_feature_on(name, folder):
    try:
        run = built(SETTINGS[name])
    except ConfigError as error:  # it needs another one
        assert is_declared(str(error)), error
        return
    assert name in [feature.name for feature in features_on(run.config, run.resolved.parts)]


TRAINED = [
    ("[replay]", "filter"), ("[replay]", "mini_batches"), ("close_batch_at", "filter"), ("dynamic_sampling", "kl_coeff"),
    ("curriculum", "entropy_bonus"), ("league_every", "[replay]"), ("[[envs]]", "[replay]"), ("teacher", "max_lag"),
    ("scorers=", "source="), ("[[envs]]", "close_batch_at"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), TRAINED)
def test_a_run_with_two_features_trains(first, second, folder):
    given = with_both(first, second)
    assert given is not None and second not in declared(first) and first not in declared(second)
    with built({**given, "threads": 1}) as run:
        assert run.train(steps=2).step == 2


def test_no_declaration_names_a_feature_that_there_is_not():
    names = {feature.name for feature in features()}
    unknown = {f.name: missing for f in features() if (missing := {*f.excludes, *f.needs} - names)}
    assert not unknown


def test_no_feature_excludes_itself_and_names_are_unique():
    names = [feature.name for feature in features()]
    assert len(set(names)) == len(names)
    assert not [feature.name for feature in features() if feature.name in feature.excludes]
    both = [
        (a.name, b.name)
        for a, b in itertools.combinations(features(), 2)
        if b.name in a.excludes and a.name in b.excludes
    ]
    assert not both, "one of the two declares a pair"
