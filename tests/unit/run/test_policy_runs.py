"""Several policies that learn in one `ludic train`: who plays what, what each learns, resume, export, errors."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ludic.run import build, load
from ludic.run.config.entries import LeagueSettings, PolicyEntry, with_policies
from ludic.run.config.run_config import RunConfig
from ludic.run.policies import league_seatings, seatings
from ludic.run.settings import from_table, read_toml, to_toml
from ludic.run.several import cache_fraction
from ludic.types import ConfigError
from tests.contract.pages import DOCS
from tests.unit.cli.train_parts import CASES, command_in
from tests.unit.run.test_features import are_equal, done, logged, played

pytestmark = pytest.mark.slow

SMALL = ["cases.py:Cases", "--model", "tiny", "--max-tokens", "1", "--group-size", "4", "--rollouts-per-update", "8",
         "--logger", "none", "--lr", "1e-2", "--threads", "1"]  # fmt: skip
PAIR = ["--policy", "ann=left", "--policy", "bob=right"]
EVALUATED = ["--eval-every", "2", "--eval-at-start", "--eval-episodes", "6", "--eval-temperature", "1"]


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    (tmp_path / "cases.py").write_text(CASES)
    return command_in(tmp_path, monkeypatch, capsys)


def saved(run: str, policy: str, step: int = 2) -> dict:
    folder = Path("runs", run, "policies", policy, "checkpoints", f"step_{step:06d}")
    return load_file(next(folder.glob("*model.safetensors")))


# --- settings ---


def test_flags_and_tables_name_the_same_policies():
    table = {
        "policies": {
            "ann": {"roles": ["X", "O"], "lr": 0.001},
            "bob": {"roles": ["O"], "frozen": True, "model": "tiny"},
        }
    }
    config = from_table(RunConfig, table, "test")
    flags = ["ann=X,O", "ann.lr=0.001", "bob=O", "bob.frozen=true", "bob.model=tiny"]
    assert with_policies({}, flags) == config.policies
    assert with_policies(config.policies, ["bob.model=other"])["bob"].model == "other", (
        "a flag changes that of the file"
    )


def test_policies_survive_a_file(tmp_path):
    config = RunConfig(
        policies={"ann": PolicyEntry(roles=("X",), algo_set={"clip": 0.1}), "bob-2": PolicyEntry(fork_from=tmp_path)}
    )
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert read_toml(RunConfig, tmp_path / "run.toml") == config


def test_seatings_have_as_many_policies_at_a_table_as_possible():
    both, x, o = PolicyEntry(), PolicyEntry(roles=("X",)), PolicyEntry(roles=("O",))
    assert seatings(["X", "O"], {"ann": x, "bob": o}, "duel") == ({"X": "ann", "O": "bob"},)
    assert seatings(["X", "O"], {"ann": both, "bob": both}, "duel") == (
        {"X": "ann", "O": "bob"},
        {"X": "bob", "O": "ann"},
    )
    assert len(seatings(["X", "O"], {"a": both, "b": both, "c": both}, "duel")) == 6, "every pair, both ways"
    assert seatings(["X", "O"], {"ann": both}, "duel") == ({"X": "ann", "O": "ann"},)
    assert len(seatings(["1", "2", "3"], {"ann": both, "bob": both}, "trio")) == 6, "no table with one policy alone"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "ann=left"], "No policy plays right: the roles of 'cases.py:Cases' are left, right"),
        (["--policy", "ann=left,middle"], "plays middle, but 'cases.py:Cases' has the roles left, right"),
        ([*PAIR, "--policy", "ann.algos=1"], "Did you mean 'algo'?"),
        ([*PAIR, "--policy", "ann.lr=fast"], "expected a number"),
        ([*PAIR, "--policy", "ann"], "is not of the form name=value"),
        (["--policy", "a/b=left"], "a policy is named with letters"),
        ([*PAIR, "--policy", "ann.frozen=true", "--policy", "bob.frozen=true"], "nothing would be trained"),
        ([*PAIR, "--policy", "ann.frozen=true", "--policy", "ann.lr=1e-3"], "so lr has no meaning"),
        ([*PAIR, "--policy", "ann.algo=grpoo"], "Did you mean 'grpo'"),
        ([*PAIR, "--policies", "x"], "write [policies.NAME] in a file"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(ludic, flags, said):
    ended = ludic("train", *SMALL, "--dry-run", *flags)
    assert ended.code == 2 and said in ended.err.replace("\n", " ") and "Traceback" not in ended.err
    assert not Path("runs").exists()


def test_env_with_one_role_is_refused(ludic):
    ended = ludic("train", "letter.py:Letter", *SMALL[1:], "--policy", "ann=agent")
    assert ended.code == 2 and "for envs with several roles" in ended.err


def test_dry_run_shows_every_policy(ludic):
    more = [
        "--policy",
        "eve=left,right",
        "--policy",
        "eve.frozen=true",
        "--policy",
        "bob.lr=0.5",
        "--policy",
        "bob.lora_rank=2",
    ]
    said = " ".join(done(ludic("train", *SMALL, *PAIR, *more, "--dry-run")).out.split())
    assert "ann plays left. Model tiny: 95,168 parameters, float32 on cpu; training all weights with grpo." in said
    assert "training a LoRA adapter of rank 2 with grpo, lr 0.5." in said and "eve plays left or right." in said
    assert "it is not trained." in said
    assert "one of 3 seatings: left ann; right bob | left ann; right eve | left eve; right bob." in said
    assert not Path("runs").exists()


def test_the_file_on_the_page_is_planned(ludic):
    page = (DOCS / "multi_policy.md").read_text()
    Path("run.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    Path("tasks.jsonl").write_text('{"goal": "Order a red car.", "answer": "red"}\n')
    said = done(ludic("train", "run.toml", "--dry-run")).out
    assert "simulator plays user. Model tiny" in said and "helper plays assistant. Model smollm2-135m" in said
    assert "training all weights with grpo, lr 1e-06." in said and "a LoRA adapter of rank 16 with gspo." in said


def test_caches_of_all_engines_take_what_one_engine_would():
    free = 1.0
    for number in range(3):
        taken = free * cache_fraction(number, 3)
        assert taken == pytest.approx(0.2)
        free -= taken
    assert cache_fraction(0, 1) == 0.6


# --- training ---


def test_each_policy_learns_its_own_role(ludic):
    big = ["--rollouts-per-update", "32", "--group-size", "8", "--lr", "3e-2", "--steps", "7", "--name", "first"]
    said = done(ludic("train", *SMALL, *PAIR, *big, "--policy", "bob.algo=reinforce_baseline")).out
    ann, bob = logged("ann/train/avg_total_reward"), logged("bob/train/avg_total_reward")
    assert sum(ann[-2:]) / 2 > 0.9 and sum(bob[-2:]) / 2 > 0.9 and ann[0] < 0.7
    assert "Reward of ann:" in said and "Next: ludic eval runs/first/policies/ann" in said
    assert {(r.meta["agent_id"], r.meta["model"]) for r in played()} == {("left", "ann"), ("right", "bob")}
    assert not are_equal(saved("first", "ann", 7), saved("first", "bob", 7))
    named = {path.name for path in Path("runs/first/trained").iterdir()}
    assert {"step_000007.rank0.npz", "step_000007.rank1.npz"} <= named, "the viewer's record of both"


def test_policies_that_share_roles_change_places(ludic):
    flags = ["--policy", "ann=left,right", "--policy", "bob=left,right", "--rollouts-per-update", "32", "--steps", "2"]
    done(ludic("train", *SMALL, *flags, "--name", "first"))
    assert {(r.meta["agent_id"], r.meta["model"]) for r in played()} == {
        (s, p) for s in ("left", "right") for p in ("ann", "bob")
    }
    assert all(set(r.meta["policies"].values()) == {"ann", "bob"} for r in played())


def test_adapters_share_their_base_and_a_frozen_policy_stays(ludic):
    policies = {"ann": {"roles": ["left"]}, "bob": {"roles": ["right"]}, "eve": {"roles": ["right"], "frozen": True}}
    with build(
        env="cases.py:Cases", model="tiny", max_tokens=1, group_size=4, rollouts_per_update=16, logger="none", lr=1e-2,
        lora_rank=4, threads=1, policies=policies, name="first",
    ) as run:  # fmt: skip
        run.prepare(steps=2)
        models = run.session._models
        base = {name: dict(loaded.model.named_parameters()) for name, loaded in models.items()}
        inner = "model.layers.0.self_attn.q_proj"
        places = {
            base["ann"][f"base_model.model.{inner}.base_layer.weight"].data_ptr(),
            base["bob"][f"base_model.model.{inner}.base_layer.weight"].data_ptr(),
            base["eve"][f"{inner}.weight"].data_ptr(),
        }
        assert len(places) == 1, "the base is in memory once"
        before = base["eve"][f"{inner}.weight"].clone()
        result = run.train()
        assert result.step == 2 and set(run.trainer.trainers) == {"ann", "bob"}
        assert before.equal(base["eve"][f"{inner}.weight"])
    assert {path.name for path in Path("runs/first/policies").iterdir()} == {"ann", "bob"}
    assert any(r.meta["model"] == "eve" for r in played())
    assert not are_equal(saved("first", "ann"), saved("first", "bob")), "different adapters from the start"


@pytest.mark.slow
def test_an_assistant_learns_beside_a_frozen_user_simulator(ludic):
    Path("tasks.jsonl").write_text(
        '{"goal": "Order a red car.", "answer": "red"}\n{"goal": "Go home.", "answer": "home"}\n'
    )
    Path("mine.py").write_text(
        "def letters(rollout):\n    return sum(s.action.isalpha() for s in rollout.agent_steps) / len(rollout.agent_steps)\n"
    )
    flags = ["--policy", "simulator=user", "--policy", "simulator.frozen=true", "--policy", "helper=assistant"]
    flags += ["--data", "tasks.jsonl", "--set", "max_turns=2", "--reward", "mine.py:letters", "--checkpoint-every", "1"]
    done(ludic("train", "dialogue", *SMALL[1:], *flags, "--max-seq-len", "2048", "--steps", "2", "--name", "first"))
    assert logged("helper/train/step") == [1, 2] and all(norm > 0 for norm in logged("helper/train/grad_norm"))
    assert not logged("simulator/train/step"), "it is frozen"
    assert {(r.meta["agent_id"], r.meta["model"]) for r in played()} == {("user", "simulator"), ("assistant", "helper")}
    assert all(len(r.agent_steps) == 2 for r in played()), "turns alternate until the assistant has had max_turns"
    shown = {
        role: [str(r.agent_steps[0].prompt_messages) for r in played() if r.meta["agent_id"] == role]
        for role in ("user", "assistant")
    }
    assert all("Order a red car." in brief or "Go home." in brief for brief in shown["user"])
    assert not any("Order a red car." in brief or "Go home." in brief for brief in shown["assistant"]), (
        "the user's alone"
    )
    assert not are_equal(saved("first", "helper", 1), saved("first", "helper", 2))
    assert {path.name for path in Path("runs/first/policies").iterdir()} == {"helper"}


# --- evaluation ---


def test_all_policies_are_evaluated_together_and_logged_by_policy_and_role(ludic):
    flags = ["--policy", "ann=left,right", "--policy", "bob=left,right", "--policy", "bob.frozen=true"]
    said = done(ludic("train", *SMALL, *flags, *EVALUATED, "--steps", "3", "--name", "first")).out
    assert logged("ann/eval/step") == logged("bob/eval/step") == [0, 2]
    for policy in ("ann", "bob"):
        whole = logged(f"{policy}/eval/mean_reward")
        left, right = (logged(f"{policy}/eval/{role}/mean_reward") for role in ("left", "right"))
        assert whole == pytest.approx([(a + b) / 2 for a, b in zip(left, right, strict=True)]), "as often in each role"
        assert logged(f"{policy}/eval/num_tasks") == [6, 6] and logged(f"{policy}/eval/left/num_tasks") == [3, 3]
    assert "Evaluation of ann: mean reward" in said and "after update 0" in said and "after update 2" in said
    assert len(played()) == 3 * 8 * 2, "episodes of evaluations are not trained on"


def test_evaluation_in_the_background_gives_the_same_numbers_and_the_best_checkpoint(ludic):
    once = [*SMALL, *PAIR, *EVALUATED, "--steps", "4", "--checkpoint-every", "2", "--best-metric", "eval/mean_reward"]
    done(ludic("train", *once, "--name", "waits"))
    done(ludic("train", *once, "--name", "beside", "--eval-in-background"))
    for name in ("ann/eval/mean_reward", "bob/eval/mean_reward", "ann/eval/step", "bob/train/loss"):
        assert logged(name, "waits") == logged(name, "beside") != []
    for policy in ("ann", "bob"):
        rewards = logged(f"{policy}/eval/mean_reward", "waits")[1:]
        named = [
            json.loads(Path("runs", run, "policies", policy, "checkpoints/best.json").read_text())
            for run in ("waits", "beside")
        ]
        assert named[0] == named[1] and named[0]["step"] == (2 if rewards[0] >= rewards[1] else 4)
        assert named[0]["value"] == max(rewards)


# --- leagues ---

LEAGUE = "[league]\nleague_every = 1\nleague_size = 2\nleague_share = 1.0\n"


def test_policies_meet_snapshots_of_each_other_which_are_not_trained_on(ludic):
    Path("run.toml").write_text(f'[env]\nid = "cases.py:Cases"\n{LEAGUE}')
    once = ["run.toml", *SMALL[1:], *PAIR, "--lora-rank", "4", "--rollouts-per-update", "32", "--checkpoint-every", "1"]
    said = done(ludic("train", *once, "--dry-run")).out.replace("\n", " ")
    assert "In 100% of the groups one role has its policy, and the others have one of the last 2 snapshots" in said
    done(ludic("train", *once, "--name", "first", "--steps", "2"))
    met = {tuple(sorted(r.meta["policies"].items())) for r in played()}
    assert all(len([name for _, name in seats if name.startswith("past ")]) == 1 for seats in met), met
    left, right = ({name for seats in met for role, name in seats if role == where} for where in ("left", "right"))
    assert left <= {"ann", "past ann@0", "past ann@1"} and "ann" in left and len(left) > 1
    assert right <= {"bob", "past bob@0", "past bob@1"} and "bob" in right and len(right) > 1
    trained = [*logged("ann/train/num_rollouts"), *logged("bob/train/num_rollouts")]
    assert sum(trained) == len([r for r in played() if not r.meta["model"].startswith("past ")]) == 64
    done(ludic("train", *once, "--name", "parts", "--steps", "1"))
    done(ludic("train", "runs/parts", "--resume", "--steps", "2"))
    for policy in ("ann", "bob"):
        assert are_equal(saved("first", policy), saved("parts", policy)), "a league is resumed with its members"


def test_league_without_an_opponent_that_learns_is_refused(ludic):
    Path("run.toml").write_text(f'[env]\nid = "cases.py:Cases"\n{LEAGUE}')
    ended = ludic("train", "run.toml", *SMALL[1:], *PAIR, "--policy", "bob.frozen=true", "--dry-run")
    assert ended.code == 2 and "no policy that learns plays against one" in ended.err.replace("\n", " ")


ALL_ROLES = [flag for name in ("ann", "bob", "eve") for flag in ("--policy", f"{name}=left,right")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ALL_ROLES,
            "An update has groups of 2 tasks, but 3 policies learn, ann, bob, eve,",
        ),
        (
            [*ALL_ROLES, "--group-size", "2", "--eval-every", "1", "--eval-episodes", "5"],
            "An evaluation has 5 tasks, but there are 6 seatings",
        ),
    ],
)
def test_too_few_episodes_for_a_turn_of_each_policy_are_refused(ludic, flags, said):
    ended = ludic("train", *SMALL, *flags, "--dry-run")
    assert ended.code == 2 and said in ended.err.replace("\n", " ")


def test_league_with_one_group_is_refused(ludic):
    Path("run.toml").write_text(f'[env]\nid = "cases.py:Cases"\n{LEAGUE}')
    ended = ludic("train", "run.toml", *SMALL[1:], *PAIR, "--rollouts-per-update", "4", "--dry-run")
    assert ended.code == 2 and "An update has groups of 1 tasks, but 2 policies learn" in ended.err.replace("\n", " ")


def test_share_of_the_league_is_a_share_of_the_groups():
    policies = {"ann": {"roles": ["left"]}, "bob": {"roles": ["right"]}, "eve": {"roles": ["right"], "frozen": True}}
    run = build(env="prisoners_dilemma", policies={name: {**own, "roles": []} for name, own in policies.items()})
    config = replace(run.config, league=LeagueSettings(league_every=1, league_share=0.3))
    ways = league_seatings(replace(run.resolved, config=config))
    past = [seats for seats in ways if any(name.startswith("past ") for name in seats.values())]
    assert len(past) / len(ways) == pytest.approx(0.3)
    assert all("eve" not in seats.values() for seats in past), "a frozen policy has no snapshots, and is none"
    assert {frozenset(seats.items()) for seats in ways} >= {frozenset(seats.items()) for seats in run.resolved.seatings}


# --- resume ---


RESUMED = [
    *SMALL,
    *PAIR,
    "--lora-rank",
    "4",
    "--lora-dropout",
    "0.1",
    "--policy",
    "bob.algo=gspo",
    "--policy",
    "bob.kl_coeff=0.1",
]


def test_resume_from_the_newest_step_that_all_policies_have_equals_undisturbed(ludic):
    once = [*RESUMED, "--checkpoint-every", "1", "--checkpoint-keep", "1"]
    done(ludic("train", *once, "--name", "whole", "--steps", "3"))
    shutil.copytree("runs/whole", "runs/killed")
    shutil.rmtree("runs/killed/policies/bob/checkpoints/step_000003")  # killed after ann's save, before bob's
    said = done(ludic("train", "runs/killed", "--name", "killed", "--resume")).out
    assert "Going on after update 2." in said
    for policy in ("ann", "bob"):
        assert are_equal(saved("whole", policy, 3), saved("killed", policy, 3))
    names = [
        name for name in json.loads(Path("runs/whole/metrics.jsonl").read_text().splitlines()[0]) if "/train/" in name
    ]
    assert "bob/train/loss" in names
    assert all(logged(name, "whole") == logged(name, "killed") for name in names)
    broken = Path("runs/killed/policies/ann/checkpoints/step_000003/adapter_model.safetensors")
    broken.write_bytes(broken.read_bytes()[:-1] + b"\0")
    assert "Updates 3 to 4" in done(ludic("train", "runs/killed", "--resume", "--steps", "4", "--dry-run")).out, (
        "a damaged checkpoint of one policy takes all to the step before"
    )


@pytest.mark.parametrize("policies", [PAIR, []], ids=["several policies", "one policy"])
@pytest.mark.slow
def test_the_last_evaluation_is_made_again_if_a_kill_has_ended_it(ludic, policies):
    once = [*SMALL, *policies, *EVALUATED, "--steps", "2"]
    done(ludic("train", *once, "--eval-in-background", "--name", "first"))
    metrics = Path("runs/first/metrics.jsonl")
    name = "ann/eval/mean_reward" if policies else "eval/mean_reward"
    rows, before = metrics.read_text().splitlines(keepends=True), logged(name)
    metrics.write_text("".join(row for row in rows if json.loads(row).get(name.replace("mean_reward", "step")) != 2))
    assert len(logged(name)) == 1, "as a process leaves it that is killed after its last save"
    assert "All 2 updates are done" in done(ludic("train", "runs/first", "--resume", "--dry-run")).out
    assert "the last evaluation was interrupted" in done(ludic("train", "runs/first", "--resume")).out
    assert logged(name) == before and len(before) == 2
    assert "is complete: 2 of 2" in done(ludic("train", "runs/first", "--resume")).out
    assert logged(name) == before


def test_resume_with_other_policies_is_refused(ludic):
    done(ludic("train", *SMALL, *PAIR, "--name", "first", "--steps", "1"))
    ended = ludic("train", "runs/first", "--resume", "--steps", "2", "--policy", "ann.lr=1")
    assert ended.code == 2 and "is a run with other settings: policies" in ended.err
    ended = ludic("train", "runs/first/policies/ann", "--resume", "--steps", "2")
    assert ended.code == 2 and "`ludic train runs/first --resume` goes on with all of them" in ended.err


# --- what comes after ---


def test_a_policy_is_exported_evaluated_and_forked_like_a_run(ludic):
    done(ludic("train", *SMALL, *PAIR, "--lora-rank", "4", "--name", "first", "--steps", "2"))
    ended = ludic("export", "runs/first", "out")
    assert (
        ended.code == 2 and "several policies; name one: runs/first/policies/ann, runs/first/policies/bob" in ended.err
    )
    assert "several policies" in ludic("export", "runs/first", "out", "--step", "2").err
    done(ludic("export", "runs/first/policies/bob", "out"))
    assert Path("out/model.safetensors").is_file()
    fork = [
        "--lora-rank",
        "4",
        "--policy",
        "ann.fork_from=runs/first/policies/bob",
        "--name",
        "second",
        "--steps",
        "1",
        "--lr",
        "1e-12",
    ]
    done(ludic("train", *SMALL, *PAIR, *fork))
    forked = saved("second", "ann", 1)
    for name, weight in saved("first", "bob").items():
        torch.testing.assert_close(forked[name], weight, atol=1e-9, rtol=0)
    assert "policies/bob/checkpoints/step_000002" in Path("runs/second/config.toml").read_text(), (
        "it is named for a resume"
    )
    with pytest.raises(ConfigError, match="evaluate one"):
        load("runs/first").evaluate()
    done(ludic("eval", "runs/first/policies/bob", "--num-tasks", "2"))
