"""`ludic optimize-prompt`: a model rewrites the system prompt by what it reads in episodes. See docs/prompt_search.md.

    runs/prompts/<name>/  config.toml  best.txt  rollouts/search.json  rollouts/candidate_0000.jsonl …

The search is on disk after every round; `--resume` goes on from there.
"""

import asyncio
import shlex
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from ludic import __version__
from ludic.batch_gen.requests.streams import is_stream, read_or_generate
from ludic.cli.args import Switch, Target, config_file, flags_for, parse_with_settings
from ludic.cli.eval.config import EvalConfig, MeasureSettings, PolicySettings
from ludic.cli.eval.models import EvaluatedModel, OpenPolicy, endpoint_models, evaluated_models, opened
from ludic.cli.terminal.colour import make_console
from ludic.inference import ByteTemplate, HFChatTemplate, ScriptedClient
from ludic.run.config.env_and_agent import EnvSettings
from ludic.run.config.model import ModelSettings
from ludic.run.folder import CONFIG, ROLLOUTS
from ludic.run.given import EnvFactory, Parts, env_factory
from ludic.run.parts.episodes import EpisodeSetup, make_episode_setup
from ludic.run.parts.samples import env_arguments
from ludic.run.protocols.agents import uses_gateway
from ludic.run.protocols.factory import protocol_factory
from ludic.run.resolve import resolve_play
from ludic.run.settings import differences, read_toml, to_toml, with_values
from ludic.types import ConfigError, InferenceSpec, ReturnSpec, RolloutRequest, SamplingParams, derive_seed
from ludic.util.files import replacing
from ludic_judges import JudgeModel
from ludic_judges.prompt_search import ModelReflector, PromptSearch
from ludic_judges.prompt_search.config import MAY_CHANGE_ON_RESUME, PromptConfig, resolve

DESCRIPTION = (
    "Search for a better system prompt. A model reads episodes and rewrites the prompt; a rewrite that earns more is kept. No "
    "weights are changed. Prompts, scores and episodes go to a folder under runs/prompts/ after every round; --resume goes on."
)
USUAL = (
    "target", "model", "prompt_file", "data", "num_tasks", "max_episodes", "shown", "reflector", "base_url", "name", "resume",
    "dry_run",
)  # fmt: skip
"""Flags that `--help` shows."""
BEST = "best.txt"
_TASK_SEEDS = 111
"""`ludic eval` derives the seeds of its tasks in another way, so it plays tasks that were not searched on."""
console = make_console()


@dataclass(frozen=True)
class OptimizePromptArgs:
    """The target of the command and its mode."""

    target: Target
    """Id of an env (`ludic envs`), file.py:Class of your own, a TOML file, or the folder of a search."""
    dry_run: Switch = False
    """Check everything and show the settings and the plan; play nothing."""
    resume: Switch = False
    """Go on with the search in the folder."""


def optimize_prompt(args: list[str]) -> int:
    command, config = read_command(args)
    found = env_factory(config.env.id, server=config.env.env_server)
    config = resolve(config, found)
    samples = _samples(config)
    env = found.make(env_arguments(config.env, None if samples is None else samples[0]))
    if config.agent.system_prompt is None:
        config = with_values(config, {"system_prompt": env.system_prompt_for(env.agent_ids[0]) or ""})
    num_tasks = _check(config, env.agent_ids, samples)
    config = replace(config, player=_named_player(config))
    reflecting = _reflecting(config)
    folder = _checked_folder(config, resume=command.resume)
    if command.dry_run:
        return _show_plan(config, num_tasks)
    try:
        return asyncio.run(_search(config, found, samples, num_tasks, reflecting, folder))
    except KeyboardInterrupt:
        goes_on = (folder / ROLLOUTS / "search.json").is_file()
        _say("", f"Stopped. To go on: ludic optimize-prompt {folder} --resume" if goes_on else "Stopped.")
        return 130


def read_command(args: list[str]) -> tuple[OptimizePromptArgs, PromptConfig]:
    """The arguments, and the settings: flags over the target's file over the defaults."""
    parse = partial(parse_with_settings, prog="ludic optimize-prompt", description=DESCRIPTION, usual=USUAL)
    command, config = parse(OptimizePromptArgs, PromptConfig(), args)
    path = config_file(command.target)
    if path is None:
        return command, replace(config, env=replace(config.env, id=command.target))
    stored = read_toml(PromptConfig, path)
    if path.name == CONFIG and Path(command.target).is_dir():
        stored = with_values(stored, {"out": path.parent.parent, "name": path.parent.name})
    if not stored.env.id:
        raise ConfigError(f'{path} names no env; write id = "…" under [env].')
    return parse(OptimizePromptArgs, stored, args)


# --- checks ----------------------------------------------------------------------------------------------------


def _samples(config: PromptConfig) -> list[Any] | None:
    """The first of the data, or a stream's; not those that `ludic eval` takes of the same stream."""
    data, search = config.env.data, config.search
    if data is None:
        return None
    if is_stream(data) and not search.num_tasks:
        raise ConfigError(
            f"--num-tasks 0 takes all of --data, but {data} generates samples without end. Give a number."
        )
    found = read_or_generate(data, num=search.num_tasks, seed=search.seed)
    return found[: search.num_tasks or len(found)]


def _check(config: PromptConfig, roles: list[str], samples: list[Any] | None) -> int:
    """ConfigError for what cannot work, before weights are loaded; returns the number of tasks."""
    search, num_tasks = config.search, config.search.num_tasks if samples is None else len(samples)
    if len(roles) > 1:
        raise ConfigError(
            f"{config.env.id!r} has the roles {', '.join(roles)}, and this command searches for the prompt of one. In code, "
            "PromptSearch takes score=, which says whose reward counts (docs/prompt_search.md)."
        )
    if uses_gateway(config.agent, Parts()):
        raise ConfigError("An agent that is a function or a command writes its own prompts. Take one of ludic.agents.")
    if search.shown > num_tasks:
        raise ConfigError(f"shown = {search.shown}, but there are {num_tasks} tasks. Show at most all of them.")
    if search.max_episodes < 2 * num_tasks:
        raise ConfigError(
            f"max_episodes = {search.max_episodes} leaves no room for a second prompt: each takes {num_tasks}, one for each task. "
            f"Give at least {2 * num_tasks}, or fewer tasks (--num-tasks)."
        )
    # A wrong name or argument of the agent or parser is found now.
    protocol_factory(config.agent, roles, ByteTemplate(), "checked", Parts())(ScriptedClient(lambda request: ""))
    return num_tasks


def _named_player(config: PromptConfig) -> Any:
    """The model by the name that it is found by again: a run is its newest checkpoint, an endpoint's model its name there."""
    settings = asyncio.run(endpoint_models(config.player.policy))
    (model,) = evaluated_models(settings)
    return replace(config.player, model=model.source)


def _reflecting(config: PromptConfig) -> PolicySettings | None:
    """The model that reflects; an endpoint is asked for its name. None: the model that plays."""
    own = config.reflector
    if own.reflector is None:
        return None
    if not own.is_served:
        settings = PolicySettings(model=(own.reflector,), dtype=config.player.dtype, device=config.player.device)
        (model,) = evaluated_models(settings)
        return replace(settings, model=(model.source,))
    names = () if own.reflector_model is None else (own.reflector_model,)
    served = PolicySettings(base_url=own.reflector, api_key_env=own.reflector_key_env, model=names)
    return asyncio.run(endpoint_models(served, "--reflector-model"))


def _checked_folder(config: PromptConfig, *, resume: bool) -> Path:
    """The folder of the search; ConfigError if it holds another one. Nothing is written."""
    folder = config.folder
    path = folder / CONFIG
    if not resume:
        if folder.exists():
            raise ConfigError(
                f"{folder} is there already. --resume goes on with it; another --name starts a new search."
            )
        return folder
    if not path.is_file():
        there = ", ".join(sorted(file.parent.name for file in folder.parent.glob(f"*/{CONFIG}"))) or "none"
        raise ConfigError(f"There is nothing to resume: {folder} holds no search. In {folder.parent}: {there}.")
    changed = differences(read_toml(PromptConfig, path), config)
    if refused := [difference for difference in changed if difference.name not in MAY_CHANGE_ON_RESUME]:
        raise ConfigError(
            f"{folder} is a search with other settings: {'; '.join(map(str, refused))}. Its scores cannot be compared with new "
            "ones; give another --name, or the same settings."
        )
    return folder


def _show_plan(config: PromptConfig, num_tasks: int) -> int:
    search, player = config.search, config.player
    if player.base_url is None:
        from ludic.run.dry_run import num_parameters
        from ludic.run.model import base_settings

        held = ModelSettings(model=player.model or "", dtype=player.dtype, device=player.device)
        who = f"Model {player.model}: {num_parameters(base_settings(held))}."
    else:
        who = f"Model {player.model} at {player.base_url}."
    most = (search.max_episodes - 2 * num_tasks) // search.shown + 1
    _say(
        to_toml(config),
        f"{who} {config.reflector.reflector or 'The same model'} rewrites the prompt.",
        f"The first prompt: {config.agent.system_prompt!r:.300}.",
        f"Each prompt that is kept is played on {num_tasks} tasks; a reflection sees {search.shown} of them. At most "
        f"{search.max_episodes} episodes, {most} reflections.",
        f"Everything is written to {config.folder}.",
    )
    return 0


# --- the search ------------------------------------------------------------------------------------------------


async def _search(
    config: PromptConfig,
    found: EnvFactory,
    samples: list[Any] | None,
    num_tasks: int,
    reflecting: PolicySettings | None,
    folder: Path,
) -> int:
    search, settings = config.search, config.player.policy
    model = EvaluatedModel(config.player.model or "", config.player.model or "")
    with_tools = config.agent.may_call_tools
    serving = opened(model, settings, with_tools=with_tools, seed=search.seed, concurrency=search.concurrency)
    async with serving as player, AsyncExitStack() as stack:
        setup = _setup(config, found, player)
        stack.callback(setup.close)
        reflector = await _reflector(config, player, reflecting, stack)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(f"# ludic {__version__}\n\n{to_toml(config)}", encoding="utf-8")
        running = PromptSearch(
            setup.engine(seed=search.seed, max_unscored_share=0.5),
            _tasks(config, setup, samples, num_tasks),
            reflector,
            start=config.agent.system_prompt or "",
            shown=search.shown,
            max_merges=search.max_merges,
            max_steps=setup.max_steps,
            concurrency=search.concurrency or setup.concurrency,
            seed=search.seed,
            folder=folder / ROLLOUTS,
        )
        if running.candidates:
            _say(f"{folder}: going on after {running.num_episodes} episodes.")
        await running.search(search.max_episodes, on_round=partial(_note_round, running, folder, search.max_episodes))
    failed = reflector.asking.cost.failed
    if failed:
        _say(
            "",
            f"{failed} reflections wrote nothing that can be read. Take a larger --reflector, or raise --reflector-tokens "
            f"(now {config.reflector.reflector_tokens}).",
        )
    _report(config, found, running, folder)
    return 0


def _setup(config: PromptConfig, found: EnvFactory, player: OpenPolicy) -> EpisodeSetup:
    """Episodes whose requests name the system prompt."""
    setup = make_episode_setup(
        config.env, config.agent, found, player.client, player.template, player.model, reward=config.reward
    )
    roles = ["agent"]  # _check has refused envs with several; the name of a single one does not matter

    @cache
    def with_prompt(prompt: str) -> Any:
        agent = replace(config.agent, system_prompt=prompt)
        return protocol_factory(agent, roles, player.template, player.model, Parts())

    return replace(setup, with_prompt=with_prompt)


def _tasks(
    config: PromptConfig, setup: EpisodeSetup, samples: list[Any] | None, num_tasks: int
) -> list[RolloutRequest]:
    search = config.search
    sampling = SamplingParams(
        temperature=search.temperature, top_p=search.top_p, max_tokens=config.agent.max_tokens or 1
    )
    inference = InferenceSpec(sampling=sampling, return_=ReturnSpec.for_eval())
    return [
        setup.request(
            inference,
            None if samples is None else samples[index],
            env_seed=derive_seed(search.seed, _TASK_SEEDS, index),
            meta={"sample_index": index},
        )
        for index in range(num_tasks)
    ]


async def _reflector(
    config: PromptConfig, player: OpenPolicy, settings: PolicySettings | None, stack: AsyncExitStack
) -> ModelReflector:
    own, asked = config.reflector, player
    if settings is not None:
        (name,) = settings.model
        serving = opened(EvaluatedModel(name, name), settings, with_tools=False, seed=config.search.seed)
        asked = await stack.enter_async_context(serving)
    asking = JudgeModel(
        asked.client,
        model=asked.model,
        chat_template=asked.template,
        sampling=SamplingParams(temperature=own.reflector_temperature, max_tokens=own.reflector_tokens),
        # A model that opens a think block thinks first; for any other the answer is begun.
        prefill=isinstance(asked.template, HFChatTemplate) and not asked.template.reply_prefix,
        use_cache=False,
        seed=config.search.seed,
    )
    return ModelReflector(asking, goal=own.goal)


# --- what it says ----------------------------------------------------------------------------------------------


def _note_round(running: PromptSearch, folder: Path, max_episodes: int) -> None:
    best = running.best
    with replacing(folder / BEST) as unfinished:
        unfinished.write_text(best.prompt + "\n", encoding="utf-8")
    _say(
        f"{running.num_episodes} of {max_episodes} episodes, {running.num_reflections} reflections: best {best.mean:.3f}, "
        f"kept prompts: {len(running.candidates)}"
    )


def eval_command(config: PromptConfig, found: EnvFactory) -> str:
    """The `ludic eval` with the settings of the search, on other tasks; without the prompt."""
    data, search = config.env.data, config.search
    same = EvalConfig(
        env=replace(config.env, data=None),
        policy=config.player.policy,
        agent=replace(config.agent, system_prompt=None),
        reward=config.reward,
        measure=MeasureSettings(temperature=search.temperature, top_p=search.top_p),
    )
    default = resolve_play(EvalConfig(env=EnvSettings(id=config.env.id)), found.suggested)
    flags = flags_for(same, default)
    if data is not None:
        flags += ["--data", str(data) if is_stream(data) else "OTHER.jsonl"]
    return shlex.join(["ludic", "eval", config.env.id, *flags])


def _report(config: PromptConfig, found: EnvFactory, running: PromptSearch, folder: Path) -> None:
    best, first = running.best, running.candidates[0]
    _say(
        "",
        f"Reward on the {len(first.scores)} tasks of the search: {first.mean:.3f} with the first prompt, {best.mean:.3f} with the "
        f"best of {len(running.candidates)} (candidate {running.candidates.index(best)}):",
        "",
        best.prompt,
        "",
        f"Written: {folder / BEST}",
        f'Next, on other tasks: {eval_command(config, found)} --system-prompt "$(cat {shlex.quote(str(folder / BEST))})"',
        f"To go on: ludic optimize-prompt {folder} --resume --max-episodes {2 * config.search.max_episodes}",
    )


def _say(*lines: str) -> None:
    for line in lines:
        console.print(escape(line), soft_wrap=True)
