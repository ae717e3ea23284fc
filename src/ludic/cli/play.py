"""`ludic play`: a person plays an environment in the terminal, or watches an agent without a model play it (--watch)."""

import asyncio
import contextlib
import inspect
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.rule import Rule

from ludic import registry
from ludic.agents import Agent, ToolAgent
from ludic.batch_gen.requests.samples import is_on_hub, read_lines, read_sample, read_samples
from ludic.batch_gen.requests.streams import is_stream, read_or_generate
from ludic.cli.args import EnvId, Switch, parse
from ludic.cli.terminal.colour import make_console
from ludic.context import FullDialog
from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import InteractionProtocol, MultiAgentProtocol, SingleAgentProtocol
from ludic.interaction.base import AnyEnv
from ludic.interaction.env_outputs import check_outcomes, outcome_for
from ludic.parsers import raw_parser
from ludic.run.given import env_factory
from ludic.run.settings import read_pair
from ludic.tools import as_tool
from ludic.types import ConfigError, InferenceSpec, Observation, Rollout, SamplingParams, StepOutcome, derive_seed
from ludic.types.messages import text_of

_UNCUT = InferenceSpec(sampling=SamplingParams(max_tokens=1_000_000))
"""A script's reply is as long as it is."""

console = make_console(soft_wrap=False)


@dataclass(frozen=True)
class _PlayArgs:
    """Play an environment yourself, or watch it being played."""

    env: EnvId
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
    """Line of --data, from 0."""
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
    given = parse(_PlayArgs, args, prog="ludic play")
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


def make_env(id: str, settings: Mapping[str, Any], data: Path | None, index: int) -> AnyEnv:
    """A registered env, or `module:Class` / `file.py:Class` of your own."""
    found = env_factory(id)
    example = found.example
    if data is not None:
        example = {"sample": _sample(data, index)}
    elif example and _suffice(id, settings):
        example = {}  # it is a small instance; a user's own should have the usual defaults
    elif example and not settings.keys() & example.keys():
        console.print("[dim]No --data given; using the example that ships with this env.[/dim]")
    return found.make({**example, **settings})


def _suffice(id: str, settings: Mapping[str, Any]) -> bool:
    """True if the env can be made with these arguments alone."""
    try:
        inspect.signature(registry.envs.spec(id).load()).bind(**settings)
    except TypeError:
        return False
    return True


def _sample(place: Path, index: int) -> dict[str, Any]:
    if is_stream(place):
        return dict(read_or_generate(place, num=index + 1, seed=0)[-1])
    lines = read_samples(place) if is_on_hub(place) else read_lines(place)
    if not 0 <= index < len(lines):
        raise ConfigError(f"--index {index} is not in {place}, which has {len(lines)} lines (0 to {len(lines) - 1}).")
    found: Any = lines[index]
    if is_on_hub(place):
        return dict(found)
    number, line = found  # only this line is parsed: other broken lines of the file do not matter
    return read_sample(line, number, place)


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
            if outcome.reward:
                console.print(f"[cyan]{escape(_address(env, agent_id))}reward {outcome.reward:+g}[/cyan]")
    for agent_id, obs in shown.items():
        console.print(escape(f"\n{_address(env, agent_id)}{text_of(obs)}"))
    console.print(Rule("over" if not env.active_agents else "step limit reached"))
    for agent_id, total in totals.items():
        facts = outcomes[agent_id].info if agent_id in outcomes else {}
        known = {key: value for key, value in facts.items() if value not in (None, False, "")}
        console.print(escape(f"{agent_id}: total reward {total:+g}   {json.dumps(known, default=str)}"))


def _ask(env: AnyEnv, agent_id: str, obs: Observation, runner: asyncio.Runner) -> str:
    console.print(escape(f"\n{_address(env, agent_id)}{text_of(obs)}"))
    legal = env.legal_actions(agent_id)
    toolbox = Toolbox(env.episode_tools(agent_id))
    if toolbox.usage:
        console.print(escape(f"Tools: {toolbox.usage}"), style="dim")
    prompt = f"[bold]{escape(agent_id) if len(env.agent_ids) > 1 else ''}>[/bold] "
    while True:
        text = console.input(prompt).strip()
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


class Toolbox:
    """The tools of an env at the prompt: `/search first president`."""

    def __init__(self, tools: Sequence[Callable[..., Any]]) -> None:
        self._tools = {tool.name: tool for tool in map(as_tool, tools)}

    @property
    def usage(self) -> str:
        """One line of usage; empty without tools."""
        return ", ".join(
            f"/{tool.name} {' '.join(tool.parameters['properties'])}".strip() for tool in self._tools.values()
        )

    async def answer(self, text: str) -> str | None:
        """The answer to a line that calls a tool; None if the line is for the env."""
        if not self._tools or not text.startswith("/"):
            return None
        name, _, rest = text[1:].partition(" ")
        tool, rest = self._tools.get(name), rest.strip()
        if tool is None:
            return f"There is no tool {name!r}. Tools: {self.usage}"
        names = list(tool.parameters["properties"])
        if names and not rest.startswith("{"):  # no JSON object, so it is the first argument
            rest = json.dumps({names[0]: rest} if rest else {})
        return (await tool.call(rest)).content


# --- an agent without a model plays ---


def _watch(env: AnyEnv, seed: int, max_steps: int, delay: float) -> None:
    rollouts = asyncio.run(_scripted_episode(env, seed, max_steps))
    for rollout in rollouts:
        if len(rollouts) > 1:
            console.print(Rule(escape(str(rollout.agent_id))))
        _show_rollout(rollout, delay)


async def _scripted_episode(env: AnyEnv, seed: int, max_steps: int) -> list[Rollout]:
    # A separate generator: an agent with the env's random numbers would know every secret.
    rng = random.Random(derive_seed(seed, 1))
    protocol = scripted_protocol(env, lambda env, agent_id: _reference_or_random(env, agent_id, rng))
    try:
        return await protocol.run(env=env, max_steps=max_steps, env_seed=seed, sampling_seed=seed, inference=_UNCUT)
    finally:
        await env.async_close()


def _reference_or_random(env: AnyEnv, agent_id: str, rng: random.Random) -> str:
    """The reference solution if there is one, else a random legal action."""
    action: str | None = env.reference_action(agent_id)
    if action is not None:
        return action
    legal = env.legal_actions(agent_id)
    if not legal:
        raise ConfigError(
            f"{type(env).__name__} names neither legal actions nor a reference solution, so a scripted agent does not know what "
            "to play."
        )
    return rng.choice(legal)


def scripted_protocol(env: AnyEnv, choose: Callable[[AnyEnv, str], str]) -> InteractionProtocol:
    """A protocol with real agents and templates on a client that replies with `choose(env, agent_id)`."""

    def agent_for(agent_id: str) -> Agent:
        return ToolAgent(  # an env with tools needs an agent that can call them
            client=ScriptedClient(lambda request: choose(env, agent_id)),
            model="scripted",
            ctx=FullDialog(),
            parser=raw_parser,
            chat_template=ByteTemplate(tool_parser=HermesToolParser()),
            reject_incomplete_completions=False,  # a client without a model is not short of tokens
        )

    agents = {agent_id: agent_for(agent_id) for agent_id in env.agent_ids}
    return SingleAgentProtocol(*agents.values()) if len(agents) == 1 else MultiAgentProtocol(agents)


def _show_rollout(rollout: Rollout, delay: float) -> None:
    for step in rollout.env_steps:
        console.print(escape(f"\n{text_of(step.prev_obs)}"))
        console.print(
            f"[bold green]> {escape(step.action)}[/bold green]" + (f"   reward {step.reward:+g}" if step.reward else "")
        )
        time.sleep(delay)
    if rollout.env_steps:
        console.print(escape(f"\n{text_of(rollout.env_steps[-1].info.get('final_obs', ''))}"))
    tokens = sum(len(step.trace.completion_token_ids) for step in rollout.agent_steps)
    console.print(
        f"\n[bold]{rollout.stop}[/bold]: total reward {rollout.total_reward:+g} in {len(rollout.env_steps)} turn(s), "
        f"{tokens} sampled tokens"
    )
