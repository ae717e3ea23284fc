"""Checks what an env returns, and copies it into plain types that the env cannot change later."""

import json
import numbers
from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np

from ludic.envs import LudicEnv
from ludic.interaction.base import AnyEnv
from ludic.types import ConfigError, EnvContractError, Info, Observation, StepOutcome
from ludic.types.errors import encodable
from ludic.types.messages import is_picture, plain_content
from ludic.types.rollout import json_number
from ludic.types.steps import MAX_INFO_CHARS, MAX_OBS_CHARS, MAX_REWARD

_TO_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=json_number)


def check_run(env: AnyEnv, max_steps: int) -> None:
    """Raise ConfigError for wrong arguments of `run`."""
    if not isinstance(env, LudicEnv):
        raise ConfigError(f"env must be an environment object, got {env!r}. Make one: env=MyEnv().")
    if max_steps < 1:
        raise ConfigError(f"max_steps={max_steps}; an episode needs at least one.")


def opening_for(
    env: AnyEnv, agent_id: str, opening: Mapping[str, tuple[Observation, Info]]
) -> tuple[Observation, Info] | None:
    """This agent's (observation, info) from `env.reset`, checked; None if the env has none for it yet."""
    if not isinstance(opening, Mapping) or (agent_id not in opening and agent_id in env.active_agents):
        got = sorted(map(str, opening)) if isinstance(opening, Mapping) else type(opening).__name__
        raise EnvContractError(
            f"{type(env).__name__}.reset must return (obs, info) for every agent that must act; {agent_id!r} is missing from {got}."
        )
    if agent_id not in opening:
        return None
    first = opening[agent_id]
    if not (isinstance(first, tuple) and len(first) == 2):
        raise EnvContractError(
            f"{type(env).__name__}.reset gave {agent_id!r} {first!r:.80}; it must be (observation, info dict)."
        )
    where = (env, "reset", agent_id)
    return _plain_obs(first[0], where), _plain_info(first[1], where)


def check_outcomes(
    env: AnyEnv, outcomes: Mapping[str, StepOutcome], actions: Collection[str]
) -> Mapping[str, StepOutcome]:
    """The result of `env.step`, checked to hold an outcome for every agent that acted; other agents are optional."""
    if not isinstance(outcomes, (dict, Mapping)) or not outcomes.keys() >= {*actions}:
        got = sorted(map(str, outcomes)) if isinstance(outcomes, Mapping) else type(outcomes).__name__
        raise EnvContractError(
            f"{type(env).__name__}.step must return an outcome for every agent that acted, {sorted(actions)}; it returned {got}."
        )
    return outcomes


def outcome_for(env: AnyEnv, agent_id: str, outcomes: Mapping[str, StepOutcome]) -> StepOutcome:
    """This agent's outcome, checked and copied into plain types that the env cannot change later."""
    outcome = outcomes[agent_id]
    if not isinstance(outcome, StepOutcome):
        raise EnvContractError(
            f"{type(env).__name__}.step returned {type(outcome).__name__} for {agent_id!r}; "
            "it must be a StepOutcome(obs, reward, truncated, terminated, info)."
        )
    where = (env, "step", agent_id)
    return StepOutcome(
        _plain_obs(outcome.obs, where),
        _plain_reward(outcome.reward, where),
        _plain_flag(outcome.truncated, "truncated", where),
        _plain_flag(outcome.terminated, "terminated", where),
        _plain_info(outcome.info, where),
        outcome.trace,
    )


_Place: TypeAlias = tuple[AnyEnv, str, str]
"""Env, method and agent id, for error messages."""


def _gave(where: _Place) -> str:
    env, method, agent_id = where
    return f"{type(env).__name__}.{method} gave {agent_id!r}"


def _plain_obs(obs: object, where: _Place) -> Observation:
    try:
        plain = plain_content(obs)
    except ValueError as error:
        raise EnvContractError(
            f"{_gave(where)} obs={obs!r:.200} ({type(obs).__name__}); an observation is text, or texts and pictures: {error}."
        ) from error
    texts = [plain] if isinstance(plain, str) else [part["text"] for part in plain if not is_picture(part)]
    if (size := sum(map(len, texts))) > MAX_OBS_CHARS:
        raise EnvContractError(
            f"{_gave(where)} an observation of {size:,} characters, {texts[0][:40]!r}…; at most {MAX_OBS_CHARS:,} are read. "
            "Shorten it."
        )
    return plain


def _plain_reward(reward: object, where: _Place) -> float:
    if type(reward) is float and -MAX_REWARD <= reward <= MAX_REWARD:
        return reward
    number = reward.item() if isinstance(reward, np.generic) else reward
    is_number = isinstance(number, numbers.Real)
    if not is_number or not -MAX_REWARD <= number <= MAX_REWARD:  # type: ignore[operator]  # false for NaN
        raise EnvContractError(
            f"{_gave(where)} reward={reward!r:.200} ({type(reward).__name__}); a reward is a finite number, at most {MAX_REWARD:g} "
            "in size: larger ones overflow where advantages are computed."
        )
    return float(number)  # type: ignore[arg-type]


def _plain_flag(flag: object, name: str, where: _Place) -> bool:
    if flag is True or flag is False:
        return flag
    if isinstance(flag, np.bool_ | int) and flag in (0, 1):
        return bool(flag)
    raise EnvContractError(f"{_gave(where)} {name}={flag!r:.200} ({type(flag).__name__}); it is True or False.")


def _plain_info(info: object, where: _Place) -> Info:
    if not isinstance(info, dict):
        raise EnvContractError(f"{_gave(where)} info={info!r:.200} ({type(info).__name__}); info is a dict.")
    if len(info) < 100 and _is_plain(info):
        return dict(info)
    try:
        text = _TO_JSON.encode(info)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvContractError(
            f"{_gave(where)} an info that is not JSON: {str(error).rstrip('.')}. Info holds text, finite numbers, None, and "
            "lists and dicts of them."
        ) from error
    if len(text) > MAX_INFO_CHARS:
        raise EnvContractError(
            f"{_gave(where)} an info of {len(text):,} characters of JSON; at most {MAX_INFO_CHARS:,} are kept. Its keys: "
            f"{list(info)!r:.200}."
        )
    plain: Info = json.loads(encodable(text))
    return plain


def _is_plain(info: Info) -> bool:
    """True if the info holds only short texts, 64-bit ints, bools and None, which need no conversion; most do."""
    for key, value in info.items():
        if type(key) is not str or not key.isascii() or len(key) > 100:
            return False
        if value is None or value is True or value is False:
            continue
        kind = type(value)
        if kind is str:
            if not value.isascii() or len(value) >= 1000:
                return False
        elif kind is not int or not -(2**63) <= value < 2**63:
            return False
    return True
