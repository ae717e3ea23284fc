"""Parts that a script hands to `build` as objects, and what a script's command line does with a run."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from ludic.agents import Agent
from ludic.cli.script import ScriptFlags, parse_script, run_script, train_script
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.registry import name_of
from ludic.run import build
from ludic.types import ConfigError, LudicError, Reducer, StepOutcome
from ludic.types.errors import RunComplete

SMALL = {
    "model": "tiny", "rollouts_per_update": 4, "group_size": 2, "max_tokens": 1, "max_steps": 1, "max_seq_len": 64, "steps": 1,
    "logger": (), "save_rollouts": False,
}  # fmt: skip


class Letter(SingleAgentEnv):
    """Any reply ends the episode; one that is upper case earns 1."""

    def env_reset(self, *, seed=None):
        return "a", {}

    def env_step(self, action):
        return StepOutcome(
            "", float(action.isupper()), terminated=True, info={"correct": action.isupper(), "length": 1}
        )


def metrics(run) -> dict:
    return json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])


LOGGERS = """
class Kept:
    def __init__(self, folder, config):
        self.path, self.kept = folder / "kept.txt", [config["lr"]]

    def log(self, step, stats):
        self.kept.append(step)

    def close(self):
        self.path.write_text(str(self.kept))


class Bare:
    def log(self, step, stats):
        print("bare", step)


class Mute: ...


class Greedy(Bare):
    def __init__(self, name, project): ...


class Own(Bare):
    def __init__(self, dir="own", status="own", **rest):
        with open("own.txt", "w") as file:
            file.write(f"{dir} {status}")
"""


def test_loggers_of_a_file_hear_every_step_beside_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOGGERS)
    names = ("mine.py:Kept", "print", "mine.py:Bare")
    with build(env=Letter, runs=tmp_path, **SMALL | {"logger": names, "steps": 2, "lr": 0.5}) as run:
        run.train()
    assert (run.folder / "kept.txt").read_text() == "[0.5, 1, 2]"
    out = capsys.readouterr().out
    assert "bare 2" in out and "step 2" in out


def test_the_logger_of_the_page_sends_every_step_to_mlflow(tmp_path, monkeypatch):
    """Tried with mlflow 3.17, too; here its functions note what they are called with."""
    calls = []
    mlflow = ModuleType("mlflow")
    mlflow.start_run = lambda run_id=None, *, run_name=None: calls.append(run_name)
    mlflow.log_metrics = lambda metrics, step=None: calls.append((step, metrics["train/step"]))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "ludic-train.md").read_text()
    (tmp_path / "tracking.py").write_text(page.split("# tracking.py\n")[1].split("```")[0])
    with build(env=Letter, runs=tmp_path, name="mine", **SMALL | {"logger": "tracking.py:MLflow"}) as run:
        run.train()
    assert calls == ["mine", (1, 1.0)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "No logger named 'tensorbord'. Did you mean 'tensorboard'?"),
        ("mine.py:Kpet", "Did you mean 'Kept'?"),
        ("other.py:Kept", "There is no file other.py"),
        ("os:getcwd", "no class with a method log"),
        ("mine.py:Mute", "no class with a method log"),
        ("mine.py:Greedy", "missing a required argument: 'project'. A run gives folder, name, config;"),
    ],
)
def test_a_logger_that_cannot_be_made_is_named_before_anything_is_loaded(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOGGERS)
    with pytest.raises(LudicError, match=re.escape(message)):
        build(env=Letter, runs=tmp_path, **SMALL | {"logger": name})


def test_a_logger_of_a_file_is_given_nothing_but_what_is_promised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOGGERS)
    with build(env=Letter, runs=tmp_path, **SMALL | {"logger": "mine.py:Own"}) as run:
        run.train()
    assert (tmp_path / "own.txt").read_text() == "own own"


def test_a_protocol_a_source_and_reducers_are_used(tmp_path):
    made, wrapped = [], []

    def protocol(*, client, model, chat_template):
        made.append(model)
        agent = Agent(
            client=client, model=model, ctx=FullDialog(), parser=raw_parser, chat_template=chat_template,
            reject_incomplete_completions=False,
        )  # fmt: skip
        return SingleAgentProtocol(agent)

    def source(rollouts):
        wrapped.append(rollouts)
        return rollouts

    reducers = {"mean_length": Reducer(kind="mean", source="length")}
    with build(env=Letter, runs=tmp_path, protocol=protocol, source=source, reducers=reducers, **SMALL) as run:
        run.train()
        assert len(made) >= 4 and len(wrapped) == 1
        assert metrics(run)["train/mean_length"] == 1 and "train/completion_truncated_rate" in metrics(run)


def test_play_returns_the_episodes_of_an_evaluation_several_of_each_task(tmp_path):
    with build(env=Letter, runs=tmp_path, eval_episodes=3, eval_pass_k=2, **SMALL) as run:
        rollouts, report = run.play(), run.evaluate()
    assert len(rollouts) == 6 and len({rollout.meta["env_seed"] for rollout in rollouts}) == 3
    assert [step.trace.completion_token_ids is not None for r in rollouts for step in r.agent_steps] == [True] * 6
    assert report.metrics["num_tasks"] == 3 and "pass@2" in report.estimates
    assert not run.folder.exists(), "nothing is trained, nothing is written"


def test_a_part_of_the_running_script_is_named_by_its_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "script.py"), raising=False)
    monkeypatch.setattr(Letter, "__module__", "__main__")
    assert name_of(Letter) == "script.py:Letter"


# --- the command line of a script ---


def test_a_script_trains_resumes_and_names_itself_in_messages(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["my_script.py", "--lr", "1e-3"])

    def main(args):
        flags, config = parse_script("What it is.", args, name="mine", runs=tmp_path, **SMALL)
        return train_script(build(config, env=Letter), flags)

    assert main(["--lr", "1e-3"]) == 0
    assert "Done after update 1 of 1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="`python my_script.py --lr 1e-3 --resume` goes on"):
        main(["--lr", "1e-3"])
    assert main(["--lr", "1e-3", "--steps", "2", "--resume"]) == 0
    assert "Going on after update 1." in capsys.readouterr().out
    assert main(["--dry-run", "--name", "other"]) == 0 and not (tmp_path / "other").exists()


def test_a_scripts_own_flags_stand_beside_those_of_a_run():
    flags, config = parse_script("", ["--resume", "--steps", "7", "--set", "view=compact"], steps=3, lr=0.5)
    assert flags == ScriptFlags(resume=True)
    assert (config.train.steps, config.trainer.learning_rate, config.env.set) == (7, 0.5, {"view": "compact"})


def test_a_mistake_in_a_script_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/my_script.py"])

    def main(args):
        raise ConfigError("Give --data.")

    with pytest.raises(SystemExit, match=r"^my_script: Give --data\.$"):
        run_script(main)
    with pytest.raises(SystemExit) as ended:
        run_script(lambda args: 3)
    assert ended.value.code == 3


def test_a_script_whose_run_is_complete_exits_with_0(capsys):
    def main(args):
        raise RunComplete("runs/x is complete.")

    with pytest.raises(SystemExit) as ended:
        run_script(main)
    assert not ended.value.code and capsys.readouterr().out == "runs/x is complete.\n"
