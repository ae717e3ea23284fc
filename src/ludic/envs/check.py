"""`check_env`: the environment contract, executable.

Run it on your own env before you train on it; the test suite runs it on every registered one. It checks that
results have the declared types, that one seed gives one episode (alone, again, and interleaved with others),
that any text is a survivable action, that stepping after the end is refused, that snapshots continue the same
episode, and that the reference solution earns the full reward.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.types import EnvContractError, ResetNeeded, Snapshot, SnapshotUnsupported, StepOutcome

EnvFactory = Callable[[], LudicEnv[Any, Any, Any]]
Chooser = Callable[[LudicEnv[Any, Any, Any], str, random.Random], str]
Record = list[Any]
"""Everything an episode showed, comparable with ==."""

_GARBAGE = ("", "???", "\x00", "ünïcödé 🎲", "9" * 300)


class EnvCheckFailed(EnvContractError):
    """An environment does not keep the contract; the message says which part of it."""


async def check_env(make: EnvFactory, *, seeds: tuple[int, ...] = (0, 1, 2), max_steps: int = 200) -> None:
    """Raise EnvCheckFailed at the first broken promise; return None when all hold."""
    _check_roles(make())
    for seed in seeds:
        record = await _play(make(), seed, _some_action, max_steps)
        await _check_same_seed_same_episode(make, seed, record, max_steps)
        await _check_garbage(make(), seed, max_steps)
        await _check_end(make(), seed, max_steps)
        await _check_snapshot(make, seed, max_steps)
        await _check_reference(make(), seed, max_steps)
    await _check_interleaved(make, seeds, max_steps)


def _fail(env: LudicEnv[Any, Any, Any], what: str) -> EnvCheckFailed:
    return EnvCheckFailed(f"{type(env).__name__}: {what}")


def _check_roles(env: LudicEnv[Any, Any, Any]) -> None:
    if not env.agent_ids or len(set(env.agent_ids)) != len(env.agent_ids):
        raise _fail(env, f"agent_ids must be a non-empty list without repeats, got {env.agent_ids!r}.")
    if env.active_agents:
        raise _fail(env, f"active_agents is {env.active_agents!r} before reset; nobody can act yet.")
    prompt = env.suggested_sysprompt
    if prompt is not None and not isinstance(prompt, str):
        raise _fail(env, f"suggested_sysprompt must be text or None, got {type(prompt).__name__}.")


# --- playing ------------------------------------------------------------------------------------------------


def _some_action(env: LudicEnv[Any, Any, Any], agent_id: str, rng: random.Random) -> str:
    """A legal action where the env lists them, else what the reference would do, else a word."""
    legal = env.legal_actions(agent_id)
    if legal is not None:
        if not legal:
            raise _fail(env, f"legal_actions({agent_id!r}) is empty although that agent must act.")
        return rng.choice(legal)
    reference = env.reference_action(agent_id)
    return "pass" if reference is None else reference


def _reference_action(env: LudicEnv[Any, Any, Any], agent_id: str, rng: random.Random) -> str:
    action = env.reference_action(agent_id)
    if action is None:
        raise _fail(env, f"full_reward is {env.full_reward}, but reference_action({agent_id!r}) is None.")
    return action


def _garbage_action(env: LudicEnv[Any, Any, Any], agent_id: str, rng: random.Random) -> str:
    return rng.choice(_GARBAGE) if rng.random() < 0.5 else _some_action(env, agent_id, rng)


async def _play(env: LudicEnv[Any, Any, Any], seed: int, choose: Chooser, max_steps: int) -> Record:
    record: Record = [await _open(env, seed)]
    rng = random.Random(seed)
    for _ in range(max_steps):
        if not env.active_agents:
            break
        record.append(await _advance(env, choose, rng))
    await env.async_close()
    return record


async def _open(env: LudicEnv[Any, Any, Any], seed: int) -> Any:
    first = await env.async_reset(seed=seed)
    if not isinstance(first, dict) or set(first) != set(env.agent_ids):
        raise _fail(
            env, f"reset must return observation and info for every one of {env.agent_ids}, got {first!r:.120}."
        )
    for agent_id, opening in first.items():
        if not (isinstance(opening, tuple) and len(opening) == 2 and isinstance(opening[1], dict)):
            raise _fail(env, f"reset gave {agent_id!r} {opening!r:.120}; expected (observation, info dict).")
        _check_obs(env, agent_id, opening[0])
    _check_active(env)
    if not env.active_agents:
        raise _fail(env, "nobody is active after reset.")
    return first


async def _advance(env: LudicEnv[Any, Any, Any], choose: Chooser, rng: random.Random) -> Any:
    actions = {agent_id: choose(env, agent_id, rng) for agent_id in env.active_agents}
    outcomes = await env.async_step(actions)
    if not isinstance(outcomes, dict) or set(outcomes) != set(env.agent_ids):
        raise _fail(env, f"step must return an outcome for every one of {env.agent_ids}, got {outcomes!r:.120}.")
    for agent_id, outcome in outcomes.items():
        _check_outcome(env, agent_id, outcome)
    _check_active(env)
    over = [a for a, o in outcomes.items() if o.terminated or o.truncated]
    if set(over) & set(env.active_agents):
        raise _fail(env, f"{over} are told that it is over, but active_agents is {env.active_agents}.")
    return actions, outcomes


def _check_obs(env: LudicEnv[Any, Any, Any], agent_id: str, obs: Any) -> None:
    if not isinstance(obs, str):
        raise _fail(env, f"the observation of {agent_id!r} is {type(obs).__name__}, not text.")


def _check_active(env: LudicEnv[Any, Any, Any]) -> None:
    if not set(env.active_agents) <= set(env.agent_ids):
        raise _fail(env, f"active_agents {env.active_agents} are not all among agent_ids {env.agent_ids}.")


def _check_outcome(env: LudicEnv[Any, Any, Any], agent_id: str, outcome: Any) -> None:
    if not isinstance(outcome, StepOutcome):
        raise _fail(env, f"step gave {agent_id!r} {type(outcome).__name__}, not a StepOutcome.")
    _check_obs(env, agent_id, outcome.obs)
    if isinstance(outcome.reward, bool) or not isinstance(outcome.reward, (int, float)):
        raise _fail(env, f"the reward of {agent_id!r} is {type(outcome.reward).__name__}, not a number.")
    for flag in ("truncated", "terminated"):
        if not isinstance(getattr(outcome, flag), bool):
            raise _fail(env, f"{flag} of {agent_id!r} is {getattr(outcome, flag)!r}, not a bool.")
    if not isinstance(outcome.info, dict):
        raise _fail(env, f"info of {agent_id!r} is {type(outcome.info).__name__}, not a dict.")


# --- promises -----------------------------------------------------------------------------------------------


async def _check_same_seed_same_episode(make: EnvFactory, seed: int, record: Record, max_steps: int) -> None:
    fresh = make()
    if await _play(fresh, seed, _some_action, max_steps) != record:
        raise _fail(fresh, f"seed {seed} gave two different episodes in two fresh envs. Draw from random.Random(seed).")
    used = make()
    await _play(used, seed + 1000, _some_action, max_steps)
    random.seed(12345)  # a well-behaved env does not notice
    if await _play(used, seed, _some_action, max_steps) != record:
        raise _fail(
            used, f"seed {seed} gave another episode after an earlier one in the same env: reset leaves state behind."
        )


async def _check_interleaved(make: EnvFactory, seeds: tuple[int, ...], max_steps: int) -> None:
    """The same seed twice, and others beside it, stepping in turns: the way episodes really run."""
    alone = {seed: await _play(make(), seed, _some_action, max_steps) for seed in seeds}
    crowd = [seed for seed in seeds for _ in range(2)]

    async def yielding_play(seed: int) -> Record:
        env = make()
        record: Record = [await _open(env, seed)]
        rng = random.Random(seed)
        for _ in range(max_steps):
            if not env.active_agents:
                break
            await asyncio.sleep(0)
            record.append(await _advance(env, _some_action, rng))
        await env.async_close()
        return record

    together = await asyncio.gather(*(yielding_play(seed) for seed in crowd))
    for seed, record in zip(crowd, together, strict=True):
        if record != alone[seed]:
            raise _fail(make(), f"seed {seed} gave another episode when others ran beside it: envs share state.")


async def _check_garbage(env: LudicEnv[Any, Any, Any], seed: int, max_steps: int) -> None:
    try:
        await _play(env, seed, _garbage_action, max_steps)
    except EnvCheckFailed:
        raise
    except Exception as error:  # any exception is the finding here
        raise _fail(
            env, f"an unreadable action raised {type(error).__name__}: {error}. Answer it with an outcome."
        ) from error


async def _check_end(env: LudicEnv[Any, Any, Any], seed: int, max_steps: int) -> None:
    await _play(env, seed, _some_action, max_steps)
    if env.active_agents:
        return  # longer than max_steps: the end was not reached
    await _refuses_step(env.async_step(dict.fromkeys(env.agent_ids, "pass")), env)


async def _refuses_step(step: Awaitable[Any], env: LudicEnv[Any, Any, Any]) -> None:
    try:
        await step
    except ResetNeeded:
        return
    raise _fail(env, "step after the end was accepted; it must raise ResetNeeded.")


async def _check_snapshot(make: EnvFactory, seed: int, max_steps: int) -> None:
    env, rng = make(), random.Random(seed)
    await _open(env, seed)
    for _ in range(2):
        if env.active_agents:
            await _advance(env, _some_action, rng)
    if not env.active_agents:
        return
    try:
        saved = env.snapshot()
    except SnapshotUnsupported:
        return
    other = make()
    other.restore(Snapshot.from_json(saved.to_json()))
    state = rng.getstate()
    rest = await _finish(env, rng, max_steps)
    rng.setstate(state)
    if await _finish(other, rng, max_steps) != rest:
        raise _fail(env, "a restored snapshot went on differently from the env it was taken of.")


async def _finish(env: LudicEnv[Any, Any, Any], rng: random.Random, max_steps: int) -> Record:
    record: Record = []
    for _ in range(max_steps):
        if not env.active_agents:
            break
        record.append(await _advance(env, _some_action, rng))
    await env.async_close()
    return record


async def _check_reference(env: LudicEnv[Any, Any, Any], seed: int, max_steps: int) -> None:
    if env.full_reward is None:
        return
    record = await _play(env, seed, _reference_action, max_steps)
    totals = {a: sum(outcomes[a].reward for _, outcomes in record[1:]) for a in env.agent_ids}
    if any(abs(total - env.full_reward) > 1e-6 for total in totals.values()):
        raise _fail(env, f"the reference solution earned {totals} on seed {seed}; full_reward is {env.full_reward}.")
