"""`ludic play`: a person plays an environment in the terminal, or watches a scripted agent play it."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from ludic.batch_gen.requests.samples import is_on_hub, read_lines, read_sample, read_samples
from ludic.cli.args import Switch, parse
from ludic.cli.play_tools import Toolbox
from ludic.cli.scripted import reference_or_random, scripted_protocol
from ludic.interaction.base import AnyEnv
from ludic.interaction.env_outputs import check_outcomes, outcome_for
from ludic.run.env import env_factory
from ludic.run.settings import read_pair
from ludic.types import ConfigError, InferenceSpec, Rollout, SamplingParams, StepOutcome, derive_seed

_UNCUT = InferenceSpec(sampling=SamplingParams(max_tokens=1_000_000))
"""A script's reply is as long as it is."""

console = Console(highlight=False)


@dataclass(frozen=True)
class PlayArgs:
    """Play an environment yourself, or watch it being played."""

    env: tyro.conf.Positional[str]
    """Id of an environment (`ludic envs` lists them), or file.py:Class of your own."""
    watch: Switch = False
    """Watch a scripted agent instead of playing."""
    seed: int | None = None
    """Seed of the episode; random if not given."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Argument of the env; may be repeated."""
    data: Path | None = None
    """JSONL file of samples, for envs that ask questions."""
    index: int = 0
    """Which line of --data, from 0."""
    max_steps: int = 1000
    """Stop after this many steps."""
    delay: float = 0.0
    """Seconds between turns when watching."""

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.delay < 0:
            raise ConfigError(
                f"--max-steps {self.max_steps} --delay {self.delay}: give at least 1 step, and 0 seconds."
            )


def play(args: list[str]) -> int:
    given = parse(PlayArgs, args, prog="ludic play")
    seed = random.randrange(2**31) if given.seed is None else given.seed
    made = make_env(given.env, dict(map(read_pair, given.set)), given.data, given.index)
    again = [f"--seed {seed}", *(f"--set {pair}" for pair in given.set)]
    again += [f"--data {given.data} --index {given.index}"] if given.data else []
    console.print(f"[bold]{escape(given.env)}[/bold]  [dim]({escape(' '.join(again))} plays it again)[/dim]")
    if made.suggested_sysprompt:
        console.print(escape(made.suggested_sysprompt), style="dim")
    if given.watch:
        _watch(made, seed, given.max_steps, given.delay)
    else:
        _play(made, seed, given.max_steps)
    return 0


# --- set-up ---


def make_env(id: str, settings: Mapping[str, Any], data: Path | None, index: int) -> AnyEnv:
    """A registered env, or `module:Class` / `file.py:Class` of your own."""
    found = env_factory(id)
    example = found.example
    if data is not None:
        example = {"sample": _sample(data, index)}
    elif example and not settings.keys() & example.keys():
        console.print("[dim]No --data given; using the example that ships with this env.[/dim]")
    return found.make({**example, **settings})


def _sample(place: Path, index: int) -> dict[str, Any]:
    if is_on_hub(place):
        samples = read_samples(place)
        _check_index(index, place, len(samples))
        return samples[index]
    lines = read_lines(place)  # other broken lines of the file do not matter
    _check_index(index, place, len(lines))
    number, line = lines[index]
    return read_sample(line, number, place)


def _check_index(index: int, place: Path, num: int) -> None:
    if not 0 <= index < num:
        raise ConfigError(f"--index {index} is not in {place}, which has {num} lines (0 to {num - 1}).")


# --- a person plays ---


def _play(env: AnyEnv, seed: int, max_steps: int) -> None:
    """Run only the env's steps inside asyncio, so that Ctrl-C reaches the prompt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - arrow keys and history at the prompt

    with asyncio.Runner() as runner:
        try:
            _play_episode(env, seed, max_steps, runner)
        except (EOFError, KeyboardInterrupt):
            console.print("\nBye.")
        finally:
            runner.run(env.async_close())


def _play_episode(env: AnyEnv, seed: int, max_steps: int, runner: asyncio.Runner) -> None:
    opening = runner.run(env.async_reset(seed=seed))
    shown = {agent_id: obs for agent_id, (obs, _) in opening.items()}
    totals = dict.fromkeys(env.agent_ids, 0.0)
    outcomes: Mapping[str, StepOutcome] = {}
    for _ in range(max_steps):
        if not env.active_agents:
            break
        actions = {agent_id: _ask(env, agent_id, shown.get(agent_id, ""), runner) for agent_id in env.active_agents}
        outcomes = check_outcomes(env, runner.run(env.async_step(actions)), actions)
        for agent_id in outcomes:
            outcome = outcome_for(env, agent_id, outcomes)
            shown[agent_id] = outcome.obs
            totals[agent_id] += outcome.reward
            _report_reward(env, agent_id, outcome)
    for agent_id, obs in shown.items():
        console.print(escape(f"\n{_address(env, agent_id)}{obs}"))
    _say_goodbye(env, totals, outcomes)


def _ask(env: AnyEnv, agent_id: str, obs: str, runner: asyncio.Runner) -> str:
    console.print(escape(f"\n{_address(env, agent_id)}{obs}"))
    legal = env.legal_actions(agent_id)
    toolbox = Toolbox(env.episode_tools(agent_id))
    if toolbox.usage:
        console.print(escape(f"Tools: {toolbox.usage}"), style="dim")
    while True:
        text = console.input(
            f"[bold]{escape(agent_id)}>[/bold] " if len(env.agent_ids) > 1 else "[bold]>[/bold] "
        ).strip()
        if text.lower() in ("quit", "exit", "q"):
            raise EOFError
        answer = runner.run(toolbox.answer(text))
        if answer is not None:
            console.print(escape(answer))
            continue
        chosen = matching_action(text, legal) if text else None
        if chosen is not None:
            return chosen
        options = ", ".join(legal) if legal is not None else "any text"
        console.print(f"[yellow]Not possible here.[/yellow] You can play: {options} (or quit).")


def matching_action(text: str, legal: list[str] | None) -> str | None:
    """The action for the typed text: equal up to case, or the only legal one with that prefix."""
    if legal is None:
        return text
    exact = [action for action in legal if action.casefold() == text.casefold()]
    if exact:
        return exact[0]
    begun = [action for action in legal if text and action.casefold().startswith(text.casefold())]
    return begun[0] if len(begun) == 1 else None


def _address(env: AnyEnv, agent_id: str) -> str:
    return f"[{agent_id}]\n" if len(env.agent_ids) > 1 else ""


def _report_reward(env: AnyEnv, agent_id: str, outcome: StepOutcome) -> None:
    if outcome.reward:
        console.print(f"[cyan]{escape(_address(env, agent_id))}reward {outcome.reward:+g}[/cyan]")


def _say_goodbye(env: AnyEnv, totals: Mapping[str, float], outcomes: Mapping[str, StepOutcome]) -> None:
    console.print(Rule("over" if not env.active_agents else "step limit reached"))
    for agent_id, total in totals.items():
        facts = outcomes[agent_id].info if agent_id in outcomes else {}
        told = {key: value for key, value in facts.items() if value not in (None, False, "")}
        console.print(escape(f"{agent_id}: total reward {total:+g}   {json.dumps(told, default=str)}"))


# --- a scripted agent plays ---


def _watch(env: AnyEnv, seed: int, max_steps: int, delay: float) -> None:
    rollouts = asyncio.run(_scripted_episode(env, seed, max_steps))
    for rollout in rollouts:
        if len(rollouts) > 1:
            console.print(Rule(escape(str(rollout.agent_id))))
        _show_rollout(rollout, delay)


async def _scripted_episode(env: AnyEnv, seed: int, max_steps: int) -> list[Rollout]:
    # A separate generator: an agent with the env's random numbers would know every secret.
    protocol = scripted_protocol(env, reference_or_random(random.Random(derive_seed(seed, 1))))
    try:
        return await protocol.run(env=env, max_steps=max_steps, env_seed=seed, sampling_seed=seed, inference=_UNCUT)
    finally:
        await env.async_close()


def _show_rollout(rollout: Rollout, delay: float) -> None:
    for step in rollout.env_steps:
        console.print(escape(f"\n{step.prev_obs}"))
        console.print(
            f"[bold green]> {escape(step.action)}[/bold green]" + (f"   reward {step.reward:+g}" if step.reward else "")
        )
        time.sleep(delay)
    if rollout.env_steps:
        console.print(escape(f"\n{rollout.env_steps[-1].info.get('final_obs', '')}"))
    tokens = sum(len(step.trace.completion_token_ids) for step in rollout.agent_steps)
    console.print(
        f"\n[bold]{rollout.stop}[/bold]: total reward {rollout.total_reward:+g} in {len(rollout.env_steps)} turn(s), "
        f"{tokens} sampled tokens"
    )
