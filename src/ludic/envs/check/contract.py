"""`check_env`: the environment contract, executable.

Run it on your own env before you train on it; the test suite runs it on every registered one. It checks that results have the
declared types and info is JSON, that one seed gives one episode (alone, again, pickled halfway, and interleaved with others), that
tools answer, that any text and a missing action get an outcome, that episodes end and a step after that raises, that snapshots
continue the same episode, and that the reference solution earns the full reward.
"""

import asyncio
import difflib
import inspect
import json
import math
import numbers
import pickle
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from ludic.envs.check.report import EnvCheckFailed, EnvReport, StepClock, failed, one_line_in_scripts
from ludic.envs.check.tools import reply_of, tools_of, try_tools
from ludic.envs.env import LudicEnv
from ludic.envs.single_agent_env import SingleAgentEnv, is_plain
from ludic.types import (
    ConfigError,
    ResetNeeded,
    Snapshot,
    SnapshotUnsupported,
    StepOutcome,
    derive_seed,
)
from ludic.types.messages import plain_content
from ludic.types.rollout import json_number

Env: TypeAlias = LudicEnv[Any, Any, Any]
EnvFactory = Callable[[], Env]
Chooser = Callable[[Env, str, random.Random], str]
Record = list[Any]
"""All observations and outcomes of an episode, comparable with ==."""

_GARBAGE = ("", "???", "\x00", "ünïcödé 🎲", "²", "9" * 5000)
_NUM_TRIED = 3  # steps of an episode before which each tool is called
_NUM_FRESH = 8  # replays in fresh envs before another cause than chance is named
_MAX_STEPS = 200
_PLAYER = 0xC0FFEE  # gives the player other random numbers than the env's, which would reveal its secrets


@one_line_in_scripts
async def check_env(make: EnvFactory, *, seeds: tuple[int, ...] = (0, 1, 2), max_steps: int | None = None) -> EnvReport:
    """Raise EnvCheckFailed at the first broken rule of the contract; returns what a step costs, and whether that suits one process.

    `make` is the env's class or a function that makes one. With `max_steps` only the first steps of longer episodes are checked;
    without it, some episode must end within 200. In a script: `print(asyncio.run(check_env(MyEnv)))`; in a notebook:
    `await check_env(MyEnv)`.
    """
    if not callable(make):
        raise ConfigError(f"check_env makes many envs; give it the class or a function, not an object ({make!r:.60}).")
    clock, must_end, max_steps = StepClock(), max_steps is None, max_steps or _MAX_STEPS
    _check_roles(make())
    alone = {seed: await _play(make(), seed, _some_action, max_steps, clock=clock) for seed in seeds}
    last = [outcome for record in alone.values() if len(record) > 1 for outcome in record[-1][1].values()]
    if not any(outcome.terminated or outcome.truncated for outcome in last):
        problem = failed(
            make(),
            f"no checked episode ended within {max_steps} steps, so its end was not checked. Return terminated, or truncated after "
            "a number of moves; offer legal_actions or reference_action; or check the first N steps with max_steps=N.",
        )
        if must_end:
            raise problem
        warnings.warn(str(problem), stacklevel=2)
    kind = type(make())
    report = clock.report(kind.__name__, blocking=kind.blocking, is_async=not is_plain(kind))
    for seed, record in alone.items():
        await _check_same_seed_same_episode(make, seed, record, max_steps)
    await _check_interleaved(make, alone, max_steps)
    for seed in seeds:
        await _check_garbage(make(), seed, max_steps)
        await _check_missing_action(make(), seed)
        await _check_end(make(), seed, max_steps)
        await _check_copies(make, seed, max_steps)
        await _check_reference(make(), seed, max_steps)
    return report


def require_env(made: object, what: str) -> Env:
    """`made`, if it is an env that has its methods. Commands call it before they load anything."""
    if not isinstance(made, LudicEnv):
        raise ConfigError(
            f"{what} is no env: it makes {'a class' if isinstance(made, type) else 'an object'} of type "
            f"{type(made).__name__}. Derive it from ludic.envs.SingleAgentEnv and write env_reset(*, seed=None) and "
            "env_step(action). Envs of Gymnasium and PettingZoo have adapters: `ludic envs`."
        )
    is_single = isinstance(made, SingleAgentEnv)
    for plain, arguments in (("reset", {"seed": 0}), ("step", {})):
        wanted = f"env_{plain}" if is_single else plain
        spellings = [plain, f"async_{plain}"] + ([f"env_{plain}", f"async_env_{plain}"] if is_single else [])
        base = SingleAgentEnv if is_single else LudicEnv
        written = [name for name in spellings if getattr(type(made), name) is not getattr(base, name)]
        if not written:
            near = difflib.get_close_matches(wanted, vars(type(made)), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{what} has no {wanted}.{hint} Write {wanted}, or async_{wanted} if it does I/O.")
        _check_signature(getattr(made, written[-1]), what, arguments)
    return made


def _check_signature(method: Callable[..., Any], what: str, arguments: dict[str, Any]) -> None:
    try:
        inspect.signature(method).bind(*([] if arguments else ["action"]), **arguments)
    except TypeError as error:
        expected = "(*, seed=None)" if arguments else "(action)"
        raise ConfigError(
            f"{what}: {method.__name__}{inspect.signature(method)} cannot be called as {method.__name__}{expected}: {error}."
        ) from error


def _check_roles(env: Env) -> None:
    if not env.agent_ids or len(set(env.agent_ids)) != len(env.agent_ids):
        raise failed(env, f"agent_ids must be a non-empty list without repeats, got {env.agent_ids!r}.")
    if env.active_agents:
        raise failed(env, f"active_agents is {env.active_agents!r} before reset; no agent can act yet.")
    prompt = env.suggested_sysprompt
    if prompt is not None and not isinstance(prompt, str):
        raise failed(env, f"suggested_sysprompt must be text or None, got {type(prompt).__name__}.")


# --- playing ---


def _some_action(env: Env, agent_id: str, rng: random.Random) -> str:
    """A legal action where the env lists them, else the reference action, else a word."""
    legal = env.legal_actions(agent_id)
    if legal is not None:
        if not legal:
            raise failed(env, f"legal_actions({agent_id!r}) is empty although that agent must act.")
        if not all(isinstance(action, str) for action in legal):
            raise failed(env, f"legal_actions({agent_id!r}) are not all text: {legal!r:.80}.")
        return rng.choice(legal)
    reference = env.reference_action(agent_id)
    return "pass" if reference is None else reference


def _reference_action(env: Env, agent_id: str, rng: random.Random) -> str:
    action = env.reference_action(agent_id)
    if action is None:
        raise failed(env, f"full_reward is {env.full_reward}, but reference_action({agent_id!r}) is None.")
    return action


def _garbage_action(env: Env, agent_id: str, rng: random.Random) -> str:
    return rng.choice(_GARBAGE) if rng.random() < 0.5 else _some_action(env, agent_id, rng)


async def _play(
    env: Env, seed: int, choose: Chooser, max_steps: int, *, give_way: bool = False, clock: StepClock | None = None
) -> Record:
    opening, rng = await _open(env, seed, clock), random.Random(derive_seed(seed, _PLAYER))
    return [opening, *await _finish(env, rng, choose, max_steps, give_way=give_way, clock=clock)]


async def _finish(
    env: Env,
    rng: random.Random,
    choose: Chooser,
    max_steps: int,
    *,
    give_way: bool = False,
    clock: StepClock | None = None,
) -> Record:
    """Play until the end; `give_way` lets other episodes run between two steps."""
    record: Record = []
    while env.active_agents and len(record) < max_steps:
        if give_way:
            await asyncio.sleep(0)
        tries_tools = choose is _some_action and len(record) < _NUM_TRIED
        record.append(await _advance(env, choose, rng, clock, with_tools=tries_tools))
    await env.async_close()
    return record


async def _open(env: Env, seed: int, clock: StepClock | None = None) -> Any:
    with (clock or StepClock()).timing("reset"):
        first = await env.async_reset(seed=seed)
    if not isinstance(first, dict) or not set(env.active_agents) <= set(first) <= set(env.agent_ids):
        who = f"{env.active_agents}, which must act, and at most for {env.agent_ids}"
        raise failed(env, f"reset must return observation and info for {who}; got {first!r:.120}.")
    for agent_id, opening in first.items():
        if not (isinstance(opening, tuple) and len(opening) == 2):
            raise failed(env, f"reset gave {agent_id!r} {opening!r:.120}; expected (observation, info dict).")
        _check_obs(env, agent_id, opening[0])
        _check_info(env, agent_id, opening[1])
        tools_of(env, agent_id)
    _check_active(env)
    if not env.active_agents:
        raise failed(env, "no agent is active after reset.")
    return first


async def _advance(
    env: Env, choose: Chooser, rng: random.Random, clock: StepClock | None = None, *, with_tools: bool = True
) -> Any:
    """One step: actions, outcomes, and what the tools answered before."""
    tried = [r for a in env.active_agents for r in await try_tools(env, a, rng)] if with_tools else []
    actions = {a: await reply_of(env, a, partial(choose, env, a, rng)) for a in env.active_agents}
    with (clock or StepClock()).timing("step"):
        outcomes = await env.async_step(actions)
    if not isinstance(outcomes, dict) or not set(actions) <= set(outcomes) <= set(env.agent_ids):
        who = f"{sorted(actions)}, which acted, and at most for {env.agent_ids}"
        raise failed(env, f"step must return an outcome for {who}; got {outcomes!r:.120}.")
    for agent_id, outcome in outcomes.items():
        _check_outcome(env, agent_id, outcome)
    _check_active(env)
    over = [a for a, o in outcomes.items() if o.terminated or o.truncated]
    if set(over) & set(env.active_agents):
        raise failed(env, f"the episode is over for {over}, but active_agents is {env.active_agents}.")
    return actions, outcomes, tried


def _check_obs(env: Env, agent_id: str, obs: Any) -> None:
    if not isinstance(obs, (str, list)):
        raise failed(env, f"the observation of {agent_id!r} is {type(obs).__name__}, not text.")
    try:
        plain = plain_content(obs)
    except ValueError as error:
        raise failed(env, f"the observation of {agent_id!r} cannot be shown: {error}.") from error
    if isinstance(obs, list) and plain != obs:
        raise failed(
            env, f"the observation of {agent_id!r} has parts that are changed on the way to the model: {obs!r:.120}."
        )


def _check_active(env: Env) -> None:
    if not set(env.active_agents) <= set(env.agent_ids):
        raise failed(env, f"active_agents {env.active_agents} are not all among agent_ids {env.agent_ids}.")


def _check_outcome(env: Env, agent_id: str, outcome: Any) -> None:
    if not isinstance(outcome, StepOutcome):
        raise failed(env, f"step gave {agent_id!r} {type(outcome).__name__}, not a StepOutcome.")
    _check_obs(env, agent_id, outcome.obs)
    reward = outcome.reward
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise failed(env, f"the reward of {agent_id!r} is {reward!r} ({type(reward).__name__}), not a finite number.")
    for flag in ("truncated", "terminated"):
        if not isinstance(getattr(outcome, flag), bool):
            raise failed(env, f"{flag} of {agent_id!r} is {getattr(outcome, flag)!r}, not a bool.")
    _check_info(env, agent_id, outcome.info)


def _check_info(env: Env, agent_id: str, info: Any) -> None:
    if not isinstance(info, dict):
        raise failed(env, f"info of {agent_id!r} is {type(info).__name__}, not a dict.")
    try:
        stored = json.loads(json.dumps(info, default=json_number))
    except (TypeError, ValueError) as error:
        raise failed(env, f"info of {agent_id!r} is not JSON ({error}); rollouts could not be stored.") from error
    if stored != info:
        raise failed(
            env, f"info of {agent_id!r} changes when it is stored as JSON: {info!r:.80} becomes {stored!r:.80}."
        )


# --- the rules ---


async def _check_same_seed_same_episode(make: EnvFactory, seed: int, record: Record, max_steps: int) -> None:
    await _check_fresh(make, seed, record, max_steps, num=1)
    used = make()
    await _play(used, seed + 1000, _some_action, max_steps)
    again = await _play(used, seed, _some_action, max_steps)
    await _check_equal(make, seed, record, again, max_steps, "after an earlier one: reset leaves state behind.")


async def _check_interleaved(make: EnvFactory, alone: dict[int, Record], max_steps: int) -> None:
    """Play each seed twice, all episodes stepping in turns, as they run in training."""
    seeds = [seed for seed in alone for _ in range(2)]
    playing = (_play(make(), seed, _some_action, max_steps, give_way=True) for seed in seeds)
    for seed, again in zip(seeds, await asyncio.gather(*playing), strict=True):
        await _check_equal(make, seed, alone[seed], again, max_steps, "while other episodes ran: envs share state.")


async def _check_fresh(make: EnvFactory, seed: int, record: Record, max_steps: int, *, num: int) -> None:
    for _ in range(num):
        again = await _play(make(), seed, _some_action, max_steps)
        if again != record:
            problem = (
                "two different episodes in two fresh envs. Draw from random.Random(seed); keep nothing on the class."
            )
            raise failed(make(), f"seed {seed} gave {problem} {_difference(record, again)}")


async def _check_equal(
    make: EnvFactory, seed: int, record: Record, again: Record, max_steps: int, problem: str
) -> None:
    """Name `problem` if fresh envs repeat the episode. Rare randomness would otherwise be reported as left-over state."""
    if again != record:
        await _check_fresh(make, seed, record, max_steps, num=_NUM_FRESH)
        raise failed(make(), f"seed {seed} gave another episode {problem} {_difference(record, again)}")


def _difference(one: Record, other: Record) -> str:
    for step, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"They differ at step {step}: {a!r:.300} and {b!r:.300}."
    return f"One has {len(one) - 1} steps, the other {len(other) - 1}."


async def _check_garbage(env: Env, seed: int, max_steps: int) -> None:
    try:
        await _play(env, seed, _garbage_action, max_steps)
    except EnvCheckFailed:
        raise
    except Exception as error:  # any exception is the finding here
        raise failed(env, f"an unreadable action raised {type(error).__name__}: {error}. Return an outcome.") from error


async def _check_end(env: Env, seed: int, max_steps: int) -> None:
    await _play(env, seed, _some_action, max_steps)
    if env.active_agents:
        return  # longer than max_steps: the end was not reached
    try:
        await env.async_step(dict.fromkeys(env.agent_ids, "pass"))
    except ResetNeeded:
        return
    raise failed(env, "step after the end was accepted; it must raise ResetNeeded.")


async def _check_missing_action(env: Env, seed: int) -> None:
    """An unreadable reply never becomes an action; if other agents act, the env is stepped without it."""
    await _open(env, seed)
    try:
        await env.async_step({})
    except Exception as error:  # any exception is the finding here
        raise failed(env, f"a missing action raised {type(error).__name__}: {error}. Return outcomes.") from error
    await env.async_close()


async def _check_copies(make: EnvFactory, seed: int, max_steps: int) -> None:
    """A pickled env, and one restored from a snapshot, continue an episode as the original does."""
    env, rng = make(), random.Random(derive_seed(seed, _PLAYER))
    await _open(env, seed)
    for _ in range(2):
        if env.active_agents:
            await _advance(env, _some_action, rng)
    if not env.active_agents:
        return
    copies = {"pickled copy": _pickled(env), "restored snapshot": _restored(env, make)}
    for name, copied in copies.items():
        if copied is not None and _current_obs(copied) != _current_obs(env):
            raise failed(env, f"a {name} shows another observation than the env it was taken of.")
    state = rng.getstate()
    rest = await _finish(env, rng, _some_action, max_steps)
    for name, copied in copies.items():
        rng.setstate(state)
        if copied is not None and await _finish(copied, rng, _some_action, max_steps) != rest:
            raise failed(env, f"a {name} continued differently from the env it was taken of.")


def _current_obs(env: Env) -> Any:
    try:
        return env.current_obs()
    except NotImplementedError:  # an env need not offer it
        return None


def _pickled(env: Env) -> Env:
    try:
        copied: Env = pickle.loads(pickle.dumps(env))
    except Exception as error:  # any exception is the finding here
        raise failed(env, f"it cannot be pickled ({type(error).__name__}: {error}).") from error
    return copied


def _restored(env: Env, make: EnvFactory) -> Env | None:
    try:
        saved = env.snapshot()
    except SnapshotUnsupported:
        return None
    other = make()
    other.restore(Snapshot.from_json(json.loads(json.dumps(saved.to_json()))))
    return other


async def _check_reference(env: Env, seed: int, max_steps: int) -> None:
    if env.full_reward is None:
        return
    record = await _play(env, seed, _reference_action, max_steps)
    totals = {a: sum(outcomes[a].reward for _, outcomes, _ in record[1:] if a in outcomes) for a in env.agent_ids}
    if any(abs(total - env.full_reward) > 1e-6 for total in totals.values()):
        raise failed(env, f"the reference solution earned {totals} on seed {seed}; full_reward is {env.full_reward}.")
