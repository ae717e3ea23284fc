"""`ludic eval`: evaluates one or several models on an env. See docs/evaluation.md."""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from ludic.cli.args import Switch, parse_with_settings
from ludic.cli.eval.config import EvalConfig, of_run, resolve, trains_on
from ludic.run.env import env_factory
from ludic.types import ConfigError

DESCRIPTION = (
    "Play an environment and say how well it went: accuracy and rewards with 95 % confidence intervals, pass@k, majority@k. A "
    "reply that cannot be read is a wrong answer; so is an episode that was cut off or failed. Episodes are written to a folder "
    "under runs/eval/ as they finish; --resume goes on with it."
)


@dataclass(frozen=True)
class EvalArgs:
    """What to do."""

    target: tyro.conf.Positional[str]
    """Id of an env (`ludic envs`), file.py:Class of your own, or the folder of a training run: its env, before and after."""
    resume: Switch = False
    """Go on with the evaluation in the folder --name, or else with the newest of this env and model."""


def evaluate(args: list[str]) -> int:
    command, config = read_command(args)
    run = Path(command.target)
    if is_run(run) and trains_on(run, config.env.data):
        print(f"These are the samples that {run} was trained on, {config.env.data}; --data FILE.jsonl takes others.")
    env = env_factory(config.env.id)
    config = resolve(config, env)
    from ludic.cli.eval.run import run as run_evaluation

    return run_evaluation(config, env, resume=command.resume)


def read_command(args: list[str]) -> tuple[EvalArgs, EvalConfig]:
    """The arguments, and the settings: flags over the settings of the run that the target names, over the defaults."""
    command, config = _parse(args, EvalConfig())
    folder = Path(command.target)
    if is_run(folder):
        usual = of_run(folder)
        command, config = _parse(args, replace(usual, policy=replace(usual.policy, model=())))
        model = config.policy.model or usual.policy.model
        return command, replace(config, policy=replace(config.policy, model=model))
    if folder.is_dir():
        raise ConfigError(f"{folder} is a folder without a config.toml. Name an env, and give the folder as --model.")
    return command, replace(config, env=replace(config.env, id=command.target))


def is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def _parse(args: list[str], default: EvalConfig) -> tuple[EvalArgs, EvalConfig]:
    return parse_with_settings(EvalArgs, default, args, prog="ludic eval", description=DESCRIPTION)
