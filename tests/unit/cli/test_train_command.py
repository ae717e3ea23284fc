"""`ludic train` as it is typed: what it refuses, and what it plans. Everything is real; the model is tiny."""

import socket

import pytest

from ludic.models.loading import character_tokenizer, tiny_llama
from ludic.run.config.run_config import RunConfig
from ludic.run.settings import read_toml
from tests.unit.cli.train_parts import SMALL, command_in


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    return command_in(tmp_path, monkeypatch, capsys)


# --- what is refused ---


LEAVING_NAMES = ["..", "../x", "a/../../x", "a/..", ".", "./x"]
"""Names of run folders that would leave the runs folder, or be it."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tictactoe"], "Did you mean 'tic_tac_toe'"),
        (["letter.py:Leter"], "No env in letter.py named 'Leter'. Did you mean 'Letter'"),
        (["letter.py"], "letter.py is a file; which env in it? Write letter.py:Class"),
        (["letter.py:NoEnv"], "letter.py:NoEnv is no env: it makes an object of type NoEnv. Derive it from"),
        (["letter.py:NUMBER"], "letter.py:NUMBER is 7; for the env, name a class or a function"),
        (["letter.py:Misspelt"], "has no env_step. Did you mean 'env_stop'?"),
        (["letter.py:WithoutSeed"], "cannot be called as env_reset(*, seed=None)"),
        (["letter.py:Question", "--set", "sample=1", "--set", "size=2"], "unexpected keyword argument 'size'"),
        (["../{folder}/nothere"], "There is no run in ../{folder}/nothere, nor an env of that name. Runs in"),
        (["nowhere.toml"], "Cannot read nowhere.toml: No such file"),
        (["gsm8k", "--data", "nowhere.jsonl"], "Cannot read --data nowhere.jsonl: No such file"),
        (["gsm8k"], "asks about samples; give --data FILE.jsonl"),
        (["tic_tac_toe", "--data", "letter.py"], "has no argument `sample`"),
        (
            ["tic_tac_toe", "--algo", "sft", "--data", "qa.jsonl"],
            "leave TARGET out, or name an env that asks questions",
        ),
        (["letter.py:Question", "--data", "letter.py"], "Line 2 of letter.py is not JSON"),
        (["tic_tac_toe", "--group-size", "8", "--rollouts-per-update", "100"], "Take 96 or 104"),
        (["tic_tac_toe", "--group-size", "8", "--rollouts-per-update", "4"], "Take 8, or another group size"),
        (["tic_tac_toe", "--algo", "grop"], "Did you mean 'grpo'"),
        (["tic_tac_toe", "--algo-set", "clip=3"], "clip_eps_low"),
        (["tic_tac_toe", "--algo", "sft"], "give --data FILE.jsonl with questions and answers"),
        (["tic_tac_toe", "--set", "opponent=god"], "random and minimax"),
        (["tic_tac_toe", "--parser", "xmltag", "--dry-run"], "Did you mean 'xml_tag'"),
        (["tic_tac_toe", "--tools", "nope.py:x", "--dry-run"], "nope.py"),
        (["tic_tac_toe", "--context", "full"], "No context named 'full'"),
        (
            ["tic_tac_toe", "--max-seq-len", "9000", "--micro-token-budget", "8192"],
            "micro_token_budget=8192 must be at least max_seq_len=9000",
        ),
        (["tic_tac_toe", "--max-tokens", "1024"], "Raise --max-seq-len or lower --max-tokens"),
        (["tic_tac_toe", "--temperature", "0"], "there is nothing to learn from"),
        (["tic_tac_toe", "--engine", "pipeline"], "needs a Redis that learner and actors share"),
        (["tic_tac_toe", "--server", "http://127.0.0.1:1"], "is for engine = 'vllm'"),
        (
            ["tic_tac_toe", "--engine", "vllm", "--push", "adapter"],
            "there is none: all weights are trained. Give --lora-rank",
        ),
        (["tic_tac_toe", "--device", "gpu"], "is no device"),
        (["tic_tac_toe", "--schedule", "cosine", "--warmup-steps", "30"], "leaves none of the 30 steps"),
        (["tic_tac_toe", "--resume"], "There is nothing to resume"),
        (["tic_tac_toe", "--fork-from", "nowhere"], "there is no complete checkpoint"),
        (["tic_tac_toe", "--unreadable", "stop", "--set", "a"], "name=value"),
        (["tic_tac_toe_duel", "--unreadable", "stop"], "is for envs with one agent"),
    ],
)
def test_a_mistake_is_one_helpful_line_and_nothing_is_written(arguments, message, ludic, tmp_path):
    arguments = [argument.replace("{folder}", tmp_path.name) for argument in arguments]
    ended = ludic("train", *arguments, *(["--model", "tiny"] if "--device" not in arguments else []))
    assert ended.code == 2 and message.replace("{folder}", tmp_path.name) in ended.err, ended.err
    assert len(ended.err.strip().splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_an_unknown_model_is_named_and_the_hub_is_not_asked(ludic, monkeypatch, flags):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a server was asked"))
    ended = ludic("train", "tic_tac_toe", "--model", "tinny", *flags)
    assert ended.code == 2 and "No model named 'tinny'. Did you mean 'tiny'?" in ended.err


def test_an_env_that_cannot_be_made_shows_its_own_lines_and_none_of_ludic(ludic, tmp_path):
    ended = ludic("train", "letter.py:CannotBeMade", "--model", "tiny")
    assert ended.code == 2 and "OSError: no such server" in ended.err
    assert (
        'raise OSError("no such server")' in ended.err and "/ludic/" not in ended.err and "Traceback" not in ended.err
    )


@pytest.mark.parametrize("command", ["eval", "train"])
def test_missing_folder_is_reported_as_a_folder(command, ludic, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.toml").write_text("")
    ended = ludic(command, "runs/nothere")
    assert ended.code == 2
    assert ended.err == "ludic: There is no run in runs/nothere, nor an env of that name. Runs in runs: mine.\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["tic_tac_toe", "--grop-size", "8"], ["--grop-size", "--group-size"]),
        (["tic_tac_toe", "--lr", "fast"], ["--lr", "'fast'", "float"]),
        (["tic_tac_toe", "--group-size", "0"], ["group_size = 0; it must be at least 1"]),
        (["tic_tac_toe", "--name", "a b"], ["name = 'a b'", "letters, digits"]),
        ([], ["TARGET"]),
        *((["tic_tac_toe", "--name", name], [f"name = {name!r}", "cannot be . or .."]) for name in LEAVING_NAMES),
        *(
            (["tic_tac_toe", flag, value], [f"{name} = {value}; it must be a finite number"])
            for flag, name, value in [
                ("--lr", "lr", "inf"),
                ("--lr", "lr", "nan"),
                ("--lr", "lr", "-inf"),
                ("--critic-lr", "critic_lr", "nan"),
                ("--max-grad-norm", "max_grad_norm", "nan"),
                ("--max-grad-norm", "max_grad_norm", "inf"),
                ("--weight-decay", "weight_decay", "nan"),
                ("--temperature", "temperature", "nan"),
                ("--eval-timeout-s", "eval_timeout_s", "inf"),
            ]
        ),
        *(
            (["tic_tac_toe", "--seed", str(seed)], [f"seed = {seed}; a whole number lies between"])
            for seed in [2**63, 10**40, -(2**63) - 1]
        ),
        (["tic_tac_toe", "--algo-set", "clip_eps=NaN"], ["algo_set = {'clip_eps': nan}; it must be a finite number"]),
        (["tic_tac_toe", "--set", "size=[1, 99999999999999999999]"], ["a whole number lies between"]),
    ],
)
def test_wrong_flag_suggests_the_nearest(arguments, parts, ludic, tmp_path):
    ended = ludic("train", *arguments)
    assert ended.code == 2 and all(part in " ".join(ended.err.split()) for part in parts), ended.err
    assert "Traceback" not in ended.err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", LEAVING_NAMES)
def test_evaluation_name_cannot_leave_its_folder(name, ludic):
    ended = ludic("eval", "tic_tac_toe", "--model", "tiny", "--name", name)
    assert ended.code == 2 and f"name = {name!r}" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[algo]\ngroupsize = 8", "Did you mean 'group_size'"),
        ("[train]\nsteps = 1.5", "steps = 1.5: expected a whole number"),
        ("[train]\nsteps = 3", 'names no env; write id = "…" under [env]'),
        ("[train]\nlr = nan", "lr = nan; it must be a finite number"),
        ("[train]\nmax_grad_norm = inf", "max_grad_norm = inf; it must be a finite number"),
        ("[train]\nseed = 99999999999999999999", "seed = 99999999999999999999; a whole number lies between"),
    ],
)
def test_a_mistake_in_a_config_file_is_named(text, message, ludic, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    ended = ludic("train", "run.toml")
    assert ended.code == 2 and message in ended.err and "run.toml" in ended.err


def test_a_model_without_a_chat_template_is_refused_with_and_without_dry_run(ludic, tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    tiny_llama(len(tokenizer), width=16, layers=1).save_pretrained(tmp_path / "base")
    for more in ([], ["--dry-run"]):
        ended = ludic("train", "letter.py:Letter", "--model", "base", *more)
        assert ended.code == 2 and "has no chat template" in ended.err, ended.err
    assert not (tmp_path / "runs").exists()


# --- what is planned ---


def test_a_dry_run_shows_settings_and_plan_and_writes_nothing(ludic, tmp_path):
    ended = ludic("train", "letter.py:Letter", *SMALL, "--steps", "10", "--dry-run")
    assert ended.code == 0, ended.err
    settings, _, plan = ended.out.partition("\n\nModel ")
    (tmp_path / "shown.toml").write_text(settings)
    assert read_toml(RunConfig, tmp_path / "shown.toml").env.max_steps == 32
    assert "95,168 parameters, float32 on" in plan and "10 updates × 8 rollouts (2 groups of 4): 80 episodes" in plan
    assert "256 sampled tokens an update" in plan and "runs/Letter-tiny-grpo" in plan
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_counts_passes_over_the_data(ludic, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    ended = ludic("train", "letter.py:Question", "--data", "q.jsonl", *SMALL, "--steps", "3", "--dry-run")
    assert "3.00 passes over 2 samples" in ended.out
