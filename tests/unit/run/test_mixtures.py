"""Several envs, recorded rollouts and a league in small runs of `ludic train`, each from a file."""

from pathlib import Path

import pytest

from ludic.run import build
from ludic.run.config.run_config import RunConfig
from ludic.run.settings import read_toml, to_toml
from ludic.types import ConfigError
from tests.unit.cli.train_parts import RUN, SMALL, command_in
from tests.unit.run.test_features import are_equal, done, logged, played, questions, weights

pytestmark = pytest.mark.slow

PARTS = '''
from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class Digit(SingleAgentEnv):
    """A digit earns 1; three turns."""

    def __init__(self, prize=1.0):
        super().__init__()
        self.prize = prize

    def env_reset(self, *, seed=None):
        self.turns = 0
        return "0", {}

    def env_step(self, action):
        self.turns += 1
        return StepOutcome("0", reward=self.prize * action.isdigit(), terminated=self.turns == 3)


def loud(text):
    from ludic.parsers import ParseResult

    return ParseResult(text.upper(), 0.0, None)
'''
BOTH = """
[model]
model = "tiny"

[[envs]]
id = "letter.py:Letter"
weight = 3

[[envs]]
id = "more.py:Digit"
name = "digits"
"""


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    (tmp_path / "more.py").write_text(PARTS)
    return command_in(tmp_path, monkeypatch, capsys)


def small(name: str = "first", *more: str, steps: int = 2) -> list[str]:
    rates = ["--steps", str(steps), "--lr", "1e-2", "--name", name, "--threads", "1", "--concurrency", "1"]
    return ["run.toml", *SMALL, *rates, *more]


def write(text: str) -> None:
    Path("run.toml").write_text(text)


# --- several envs ---


def test_envs_get_their_shares_of_the_episodes_over_the_run(ludic):
    write(BOTH)
    done(ludic("train", *small(steps=4)))
    assert logged("train/num_rollouts") == [8.0] * 4
    assert sum(logged("train/Letter/num_rollouts")) == 24.0 and sum(logged("train/digits/num_rollouts")) == 8.0
    counts = [rollout.env_name for rollout in played()]
    assert counts.count("Digit") == 8 and counts.count("Letter") == 24
    assert {len(r.env_steps) for r in played() if r.env_name == "Digit"} == {3}, "its own number of turns"


def test_a_run_with_several_envs_resumes_as_if_uninterrupted(ludic):
    write(BOTH)
    done(ludic("train", *small("whole")))
    done(ludic("train", *small("parts", steps=1)))
    done(ludic("train", "runs/parts", "--resume", "--steps", "2"))
    assert are_equal(weights("whole"), weights("parts"))


def test_an_entry_overrides_agent_and_data_for_its_env_alone(ludic, tmp_path):
    questions(tmp_path / "q.jsonl")
    write(
        """
        [[envs]]
        id = "letter.py:Question"
        data = "q.jsonl"
        parser = "more.py:loud"
        max_steps = 1
        [[envs]]
        id = "more.py:Digit"
        set = {prize = 2.0}
        max_steps = 2
        """
    )
    done(ludic("train", *small()))
    asked = [rollout for rollout in played() if rollout.env_name == "Question"]
    others = [rollout for rollout in played() if rollout.env_name == "Digit"]
    assert all(r.env_steps[0].parsed_action == r.env_steps[0].action.upper() for r in asked)
    assert {len(rollout.env_steps) for rollout in others} == {2}
    assert {r.total_reward for r in others} <= {0.0, 2.0, 4.0}
    assert len(asked) == len(others) == 8


def test_each_env_may_have_its_own_algorithm(ludic):
    write(BOTH + 'algo = "reinforce"\ngroup_size = 1\n')
    done(ludic("train", *small()))
    assert sum(logged("train/Letter/num_samples")) == 12.0 and sum(logged("train/digits/num_samples")) == 4.0
    assert logged("train/Letter/loss") and logged("train/digits/loss")


def test_the_losses_of_own_algorithms_are_weighted_by_their_shares(ludic):
    """Two entries of one env and algorithm, differing in nothing that matters, learn what one of them learns."""
    entry = '[[envs]]\nid = "letter.py:Letter"\nname = "{}"\nweight = {}\nalgo_set = {{name = "{}"}}\n'
    write(entry.format("a", 3, "x") + entry.format("b", 1, "y"))
    run = build(read_toml(RunConfig, Path("run.toml")), model="tiny").resolved
    from ludic.run.parts.algorithm import make_algorithm

    terms = make_algorithm(run).loss.terms
    assert {term.name: term.weight for term in terms} == {"a": 0.75, "b": 0.25}


def test_several_envs_are_evaluated_under_their_names(ludic):
    write(BOTH)
    flags = ["--eval-every", "2", "--eval-episodes", "4", "--eval-in-background"]
    done(ludic("train", *small("first", *flags)))
    (letters,), (digits,), (both,) = (logged(f"eval/{name}mean_reward") for name in ("Letter/", "digits/", ""))
    assert both == pytest.approx((letters + digits) / 2)


def test_a_file_with_lists_comes_back_the_same(tmp_path):
    (tmp_path / "run.toml").write_text(
        BOTH + 'set = {prize = 2.0}\n[[recorded]]\nrollouts = ["a.jsonl"]\n[league]\nleague_size = 2\n'
    )
    config = read_toml(RunConfig, tmp_path / "run.toml")
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert read_toml(RunConfig, tmp_path / "again.toml") == config
    assert [entry.label for entry in config.envs] == ["Letter", "digits"] and config.envs[1].set == {"prize": 2.0}


# --- recorded rollouts ---


def test_recorded_rollouts_are_imitated_beside_the_played_ones(ludic):
    done(ludic("train", *RUN, "--name", "earlier"))
    text = '[env]\nid = "letter.py:Letter"\n[[recorded]]\nrollouts = ["runs/earlier"]\nshare = 0.5\nweight = {}\n'
    write(text.format(1.0))
    done(ludic("train", *small()))
    assert logged("train/played/num_mixed") == [8.0, 8.0] and logged("train/recorded/num_mixed") == [4.0, 4.0]
    assert logged("train/recorded/nll_mean") and logged("train/played/loss")
    write(text.format(4.0))
    done(ludic("train", *small("heavier")))
    assert not are_equal(weights("first"), weights("heavier"))
    done(ludic("train", *RUN, "--name", "plain", "--threads", "1", "--concurrency", "1"))
    assert logged("train/avg_total_reward", "plain")[0] == logged("train/avg_total_reward")[0], (
        "the same first episodes"
    )


def test_a_run_with_recorded_rollouts_resumes_as_if_uninterrupted(ludic):
    done(ludic("train", *RUN, "--name", "earlier"))
    write('[env]\nid = "letter.py:Letter"\n[[recorded]]\nrollouts = ["runs/earlier"]\nshare = 0.3\nrender = true\n')
    done(ludic("train", *small("whole")))
    done(ludic("train", *small("parts", steps=1)))
    done(ludic("train", "runs/parts", "--resume", "--steps", "2"))
    assert are_equal(weights("whole"), weights("parts"))


# --- leagues ---

DUEL = """
[env]
id = "prisoners_dilemma"
set = {rounds = 2}

[league]
league_every = 1
league_size = 2
"""


@pytest.mark.extended(covered_by="test_all_groups_may_be_played_against_the_league")
def test_a_league_plays_and_is_not_trained(ludic):
    write(DUEL)
    done(ludic("train", *small("first", "--rollouts-per-update", "32", steps=3)))
    by_policy: dict[str, int] = {}
    for rollout in played():
        by_policy[rollout.policy] = by_policy.get(rollout.policy, 0) + 1
    members = {name for name in by_policy if name.startswith("league@")}
    assert members == {"league@0", "league@1", "league@2"}
    trained = sum(logged("train/num_rollouts"))
    assert trained == by_policy["policy"] < sum(by_policy.values()) == 3 * 32 * 2


def test_a_run_with_a_league_resumes_as_if_uninterrupted(ludic):
    write(DUEL)
    done(ludic("train", *small("whole", steps=3)))
    done(ludic("train", *small("parts", steps=2)))
    done(ludic("train", "runs/parts", "--resume", "--steps", "3"))
    assert are_equal(weights("whole", 3), weights("parts", 3))


def test_all_groups_may_be_played_against_the_league(ludic):
    write(DUEL + "league_share = 1.0\n")
    done(ludic("train", *small(steps=1)))
    assert logged("train/num_rollouts") == [8.0], "one of the two roles"


# --- mistakes, and the plan ---


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[envs]]\nweight = 2\n", "names no env"),
        ('[[envs]]\nid = "tic_tac_toe"\nwight = 2\n', "Did you mean 'weight'"),
        ('[[envs]]\nid = "tic_tac_toe"\nweight = 0\n', "above 0"),
        ('[[envs]]\nid = "tic_tac_to"\n', "Did you mean 'tic_tac_toe'"),
        ('[envs]\nid = "tic_tac_toe"\n', "two brackets"),
        ('[[envs]]\nid = "tic_tac_toe"\n[[envs]]\nid = "tic_tac_toe"\n', "its own name"),
        ('[env]\nid = "tic_tac_toe"\n[[envs]]\nid = "tic_tac_toe"\n', "give one"),
        ('[[envs]]\nid = "tic_tac_toe"\nalgo = "grpoo"\n', "Did you mean 'grpo'"),
        ('[[envs]]\nid = "gsm8k"\n', "asks about samples"),
        ('[env]\nid = "tic_tac_toe"\n[[recorded]]\nshare = 1\n', "names no rollouts"),
        ('[env]\nid = "tic_tac_toe"\n[[recorded]]\nrollouts = ["no.jsonl"]\n', "there are no rollouts in no.jsonl"),
        ('[env]\nid = "tic_tac_toe"\n[algo]\nalgo = "ppo"\n[[recorded]]\nrollouts = ["run.toml"]\n', "has a critic"),
        ('[env]\nid = "tic_tac_toe"\n[league]\nleague_every = 1\n', "several players"),
        ('[env]\nid = "tic_tac_toe"\n[leage]\nleague_every = 1\n', "Did you mean 'league'"),
    ],
)  # fmt: skip
def test_mistakes_are_named(ludic, text, says):
    write(text)
    for how in ([], ["--dry-run"]):
        ended = ludic("train", "run.toml", "--model", "tiny", "--logger", "none", *how)
        assert ended.code == 2 and says in ended.err.replace("\n", " "), ended.err


def test_settings_of_a_file_are_no_flags(ludic):
    ended = ludic("train", "tic_tac_toe", "--league-every", "2")
    assert ended.code == 2 and "under [league] in a file" in ended.err.replace("\n", " ")
    assert "league" not in ludic("train", "--help-all").out


def test_the_plan_has_every_env_with_its_share(ludic):
    write(BOTH)
    out = done(ludic("train", *small("first", "--dry-run"))).out
    assert "Letter, 75%" in out and "digits, 25%" in out and "learns" not in out
    write(DUEL)
    assert (
        "50% of the groups are played against one of the last 2 snapshots"
        in done(ludic("train", *small("x", "--dry-run"))).out
    )


def test_envs_are_given_to_build_as_tables(ludic):
    run = build(envs=[{"id": "letter.py:Letter"}, {"id": "more.py:Digit", "weight": 3}], model="tiny", group_size=4)
    assert [(env.name, env.share) for env in run.resolved.envs] == [("Letter", 0.25), ("Digit", 0.75)]
    with pytest.raises(ConfigError, match="Did you mean 'weight'"):
        build(envs=[{"id": "letter.py:Letter", "wieght": 3}])
