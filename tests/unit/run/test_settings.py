"""Settings: a dataclass of sections from flags and TOML, and back."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludic.cli.args import Switch, parse_with_settings
from ludic.run.config.run_config import RunConfig
from ludic.run.settings import (
    differences,
    read_pair,
    read_toml,
    settings_of,
    to_toml,
    values_of,
    with_values,
)
from ludic.training import TrainerConfig
from ludic.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Game:
    """What is played."""

    set: dict[str, Any] = field(default_factory=dict)
    """Argument of the game."""
    data: Path | None = None
    """A file."""
    rounds: int | None = None
    """How many."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How it learns."""

    lr: float = 1e-5
    """Learning rate."""
    kind: Literal["constant", "linear"] = "constant"
    """Its schedule."""
    fast: bool = False
    """Faster."""
    shown: tuple[str, ...] = ("rich",)
    """By whom."""
    note: str | None = None
    """Free text."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"lr = {self.lr}; it must be above 0.")


@dataclass(frozen=True, kw_only=True)
class Config:
    game: Game = field(default_factory=Game)
    learning: Learning = field(default_factory=Learning)


@dataclass(frozen=True)
class Args:
    again: Switch = False
    """Once more."""


def typed(*args: str, default: Config | None = None) -> Config:
    return parse_with_settings(Args, default or Config(), args, prog="test", description="A test.")[1]


def from_text(text: str, tmp_path: Path) -> Config:
    (tmp_path / "c.toml").write_text(text)
    return read_toml(Config, tmp_path / "c.toml")


# --- names ---


def test_no_two_settings_of_a_run_share_a_name():
    counts = Counter(setting.name for setting in settings_of(RunConfig))
    assert [name for name, count in counts.items() if count > 1] == []


def test_what_a_resume_may_change_is_what_does_not_make_another_run():
    may_change = {
        "logger", "name", "runs", "checkpoint_every", "checkpoint_keep", "save_optimizer", "best_metric", "best_mode",
        "save_rollouts", "save_tokens", "max_failed_share", "concurrency", "threads", "device", "micro_token_budget",
        "share_prefixes", "gradient_checkpointing", "offload_activations", "context_parallel", "compile",
        "eval_every", "eval_at_start", "eval_in_background", "eval_episodes", "eval_pass_k", "eval_data", "eval_temperature",
        "eval_concurrency", "eval_timeout_s", "redis", "episode_timeout", "env_timeout", "env_workers", "env_memory_mb",
        "env_server", "sandbox", "agent_memory", "actors", "max_waiting", "acknowledge", "max_restarts", "server",
        "control_token", "server_memory", "server_sleep", "server_hung_after", "judge_key_env", "judge_concurrency",
        "judge_cache", "judge_device", "transport",
    }  # fmt: skip
    assert {setting.name for setting in settings_of(RunConfig) if setting.may_change} == may_change


def test_a_stored_file_may_have_a_retired_setting_that_was_off(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[train]\nbitwise = false\nlr = 1e-3\n")
    assert read_toml(RunConfig, file) == with_values(RunConfig(), {"lr": 1e-3})


def test_a_retired_setting_names_what_takes_its_place(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[train]\nbitwise = true\n")
    for refused in (
        lambda: read_toml(RunConfig, file),
        lambda: with_values(RunConfig(), {"bitwise": True}),
        lambda: parse_with_settings(Args, RunConfig(), ["--bitwise"], prog="ludic train", description=""),
    ):
        with pytest.raises(ConfigError, match="bitwise is gone.*train/logp_difference_abs"):
            refused()


def test_only_none_is_left_out_of_a_file_so_it_must_be_the_default():
    never_none = {"lr", "max_grad_norm", "checkpoint_keep"}  # None is not a value that a file or a flag can give
    for setting in settings_of(RunConfig):
        may_be_none = type(None) in getattr(setting.kind, "__args__", ())
        assert setting.name in never_none or not may_be_none or values_of(RunConfig())[setting.name] is None, (
            setting.name
        )


def test_every_setting_has_a_help_text():
    assert [setting.name for setting in settings_of(RunConfig) if not setting.help] == []


def test_no_clipping_can_be_written_to_a_file(tmp_path):
    config = RunConfig(trainer=TrainerConfig(max_grad_norm=None, lr_schedule=RunConfig().trainer.lr_schedule))
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert read_toml(RunConfig, tmp_path / "run.toml").trainer.max_grad_norm == 0


# --- flags ---


def test_flags_are_flat_and_set_the_field_of_that_name():
    config = typed(
        "--lr", "1e-3", "--kind", "linear", "--rounds", "3", "--data", "x.jsonl", "--fast", "--shown", "a", "b"
    )
    assert values_of(config) == {
        "set": {}, "data": Path("x.jsonl"), "rounds": 3, "lr": 1e-3, "kind": "linear", "fast": True, "shown": ("a", "b"),
        "note": None,
    }  # fmt: skip


def test_a_flag_overrides_the_file_and_the_rest_stays():
    before = with_values(Config(), {"lr": 0.5, "fast": True, "note": "from the file"})
    after = typed("--lr", "0.25", "--no-fast", default=before)
    assert (after.learning.lr, after.learning.fast, after.learning.note) == (0.25, False, "from the file")


def test_arguments_of_a_part_can_be_repeated_and_add_to_those_of_the_file():
    before = with_values(Config(), {"set": {"a": 1, "b": 2}})
    after = typed("--set", "b=[3, 4]", "--set=c=text", "--set", "d=true", default=before)
    assert after.game.set == {"a": 1, "b": [3, 4], "c": "text", "d": True}


def test_a_flag_may_be_written_with_underscores_and_no_pair_is_lost():
    _, config = parse_with_settings(
        Args, RunConfig(), ["--algo_set", "a=1", "--algo_set=b_c=2", "--algo-set", "d=3"], prog="test", description=""
    )
    assert config.algo.algo_set == {"a": 1, "b_c": 2, "d": 3}


def test_arguments_of_the_file_are_for_the_part_of_the_file():
    before = with_values(RunConfig(), {"parser": "xml_tag", "parser_set": {"tag": "move"}, "algo_set": {"a": 1}})

    def arguments(*args: str) -> dict:
        return parse_with_settings(Args, before, args, prog="test", description="")[1].agent.parser_set

    assert arguments("--parser", "boxed") == {}
    assert arguments("--parser", "pattern", "--parser-set", "pattern=x") == {"pattern": "x"}
    assert arguments("--algo", "reinforce") == arguments("--parser", "xml_tag") == {"tag": "move"}


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--learning-rate", "1"], ["--learning-rate"]),
        (["--rond", "1"], ["--rond", "--rounds"]),
        (["--lr", "fast"], ["--lr", "'fast'", "float"]),
        (["--kind", "cosine"], ["--kind", "'cosine'", "constant", "linear"]),
        (["--rounds", "2.5"], ["--rounds", "2.5", "int"]),
    ],
)
def test_a_wrong_flag_ends_with_code_2_and_names_what_is_wrong_and_what_there_is(args, parts, capsys):
    try:
        typed(*args)
    except ConfigError as error:
        code, printed = 2, str(error)
    except SystemExit as ended:
        code, printed = ended.code, capsys.readouterr().err
    assert code == 2 and all(part in printed for part in parts), printed


def test_help_is_the_docstrings_under_the_fields(capsys):
    with pytest.raises(SystemExit) as ended:
        typed("--help-all")
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    for text in ("A test.", "What is played.", "Learning rate.", "--set NAME=VALUE", "--again", "--no-fast"):
        assert text in printed


def test_a_value_that_no_file_could_keep_is_refused():
    with pytest.raises(ConfigError, match="a=None"):
        typed("--set", "a=null")
    with pytest.raises(ConfigError, match="name=value"):
        typed("--set", "a")
    with pytest.raises(ConfigError, match="name=value"):
        typed("--set")


def test_values_are_json_or_python_where_they_can_be():
    pairs = ["a=true", "b=3", "c=minimax", "d=[1, 2]", "e=", "f=(1, 2)", "g=x=y"]
    assert dict(map(read_pair, pairs)) == {
        "a": True, "b": 3, "c": "minimax", "d": [1, 2], "e": "", "f": (1, 2), "g": "x=y",
    }  # fmt: skip


# --- TOML ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[game]\nround = 3", "no setting 'round' in .game.. Did you mean 'rounds'"),
        ("[lerning]\nlr = 3", "no section .lerning.. Did you mean 'learning'"),
        ("[game]\nlr = 3", "lr belongs under .learning., not under .game."),
        ("lr = 3", "lr stands outside its section. Put it under .learning."),
        ('[learning]\nlr = "fast"', "lr = 'fast': expected a number"),
        ("[learning]\nlr = true", "lr = True: expected a number"),
        ("[learning]\nfast = 1", "fast = 1: expected true or false"),
        ("[game]\nrounds = 2.5", "rounds = 2.5: expected a whole number"),
        ("[game]\nrounds = true", "rounds = True: expected a whole number"),
        ('[game]\nset = "a"', "set = 'a': expected a table"),
        ("[game]\ndata = 3", "data = 3: expected a path"),
        ('[learning]\nkind = "cosine"', "kind = 'cosine': expected one of 'constant', 'linear'"),
        ('[learning]\nshown = "rich"', "shown = 'rich': expected a list, each text"),
        ("[learning]\nshown = [3]", "shown = .3.: expected a list, each text"),
        ("[learning]\nlr = 0", "lr = 0.0; it must be above 0"),
        ("[learning\n", "is not TOML"),
    ],
)
def test_a_mistake_in_a_file_names_the_key_the_value_and_what_is_expected(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        from_text(text, tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        read_toml(Config, tmp_path / "nowhere.toml")


scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner), max_leaves=5
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(
    st.builds(
        Config,
        game=st.builds(
            Game,
            set=st.dictionaries(st.text(st.characters(codec="utf-8")), values),
            data=st.none() | st.just(Path("some/file.jsonl")),
            rounds=st.none() | st.integers(-(2**63), 2**63 - 1),
        ),
        learning=st.builds(
            Learning,
            lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
            kind=st.sampled_from(["constant", "linear"]),
            fast=st.booleans(),
            shown=st.lists(st.text(st.characters(codec="utf-8"))).map(tuple),
            note=st.none() | st.text(st.characters(codec="utf-8")),
        ),
    )
)
def test_any_config_round_trips_through_toml(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "again.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert read_toml(Config, path) == config


def test_resolved_config_round_trips_through_toml(tmp_path):
    config = with_values(
        RunConfig(), {"logger": ("rich", "tensorboard"), "set": {"a": 1}, "name": "x", "device": "cpu"}
    )
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert read_toml(RunConfig, tmp_path / "run.toml") == config


def test_the_file_in_the_docs_is_one(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "ludic-train.md").read_text()
    (tmp_path / "run.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    config = read_toml(RunConfig, tmp_path / "run.toml")
    assert config.env.id == "gsm8k" and config.algo.algo_set == {"clip_eps_high": 0.28}


def test_differences_show_both_values():
    before, now = Config(), with_values(Config(), {"lr": 0.5, "note": "new"})
    assert list(map(str, differences(before, now))) == ["lr: 1e-05 there, 0.5 now", 'note: not set there, "new" now']
