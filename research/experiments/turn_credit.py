"""How well each credit rule tells good moves from bad ones, measured on the stored rollouts of runs.

For every turn of the groups in a run folder, each rule gives a weight, and the env says how good the move was. In key_door: by how
many moves it brought the agent nearer to the end (1, 0 or −1). In tic_tac_toe: whether it kept the best result that was still
possible (1 or 0). The program prints their correlation with a 95 % bootstrap interval over groups. No model is needed.

    PYTHONPATH=.:src .venv/bin/python research/experiments/turn_credit.py runs/key_door-grpo-0 runs/tic_tac_toe-grpo-0 [--episode]

`--episode` prints one episode of the first run, turn by turn, with the weights of all rules.
"""

import random
import tomllib
from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import tyro

from ludic.envs.key_door import KeyDoorEnv, shortest_path
from ludic.envs.tic_tac_toe import TicTacToeEnv
from ludic.envs.tic_tac_toe.board import CELLS, position
from ludic.training import GroupNormalizedReturn, StateGroupReturn, TurnLeaveOneOutReturn
from ludic.types import CreditAssigner, Rollout, Turn, load_rollouts


def with_clock(turn: Turn) -> tuple[object, int]:
    """A state as an observation with a clock shows it: what is seen, and at which turn."""
    return turn.steps[-1].prev_obs if turn.steps[-1].kind == "env" else None, turn.number


RULES: Mapping[str, CreditAssigner] = {
    "grpo": GroupNormalizedReturn(8, normalize_adv=True),
    "turns, gamma 1": TurnLeaveOneOutReturn(8),
    "turns, gamma 0.9": TurnLeaveOneOutReturn(8, gamma=0.9),
    "gigpo": StateGroupReturn(8),
    "gigpo, clock in the state": StateGroupReturn(8, state_of=with_clock),
}
NUM_DRAWS = 500


def main(runs: tyro.conf.Positional[tuple[Path, ...]], *, num_episodes: int = 1600, episode: bool = False) -> None:
    """Args:
    runs: Run folders of key_door or tic_tac_toe, with groups of eight.
    num_episodes: How many of a run's first training episodes are read; whole groups of eight.
    episode: Print one episode, turn by turn.
    """
    for folder in runs:
        env = tomllib.loads((folder / "config.toml").read_text())["env"]
        quality = {"key_door": key_door_moves, "tic_tac_toe": tic_tac_toe_moves}[env["id"]]
        stored = (rollout for path in sorted((folder / "rollouts").glob("*.jsonl*")) for rollout in load_rollouts(path))
        rollouts = list(islice(stored, num_episodes))
        weights = {name: rule.compute(rollouts) for name, rule in RULES.items()}
        good = {r.id: quality(r, env.get("set", {})) for r in rollouts}
        turns = fmean(len(rollout.env_steps) for rollout in rollouts)
        print(f"{folder.name}: {len(rollouts)} episodes of {turns:.1f} turns, {env['id']}")
        groups: dict[object, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        for name, found in weights.items():
            pairs = [
                np.array([(found[r.id, s.index], g) for r in own for s, g in zip(r.env_steps, good[r.id], strict=True)])
                for own in groups.values()
            ]
            low, high = interval(pairs)
            print(f"  {name:26}  {correlation(np.concatenate(pairs)):.3f}  [{low:.3f}, {high:.3f}]")
        if episode:
            shown = next(r for r in rollouts if r.total_reward > 0 and 8 <= len(r.env_steps) <= 12)
            for step, gain in zip(shown.env_steps, good[shown.id], strict=True):
                numbers = "  ".join(f"{found[shown.id, step.index]:+.2f}" for found in weights.values())
                print(f"  {step.prev_obs}  {step.parsed_action:5}  {gain:+.0f}   {numbers}")
            return


def correlation(pairs: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float(np.corrcoef(pairs.T)[0, 1])


def interval(groups: list[np.ndarray[Any, np.dtype[np.float64]]]) -> tuple[float, float]:
    """The middle 95 % of the correlations of groups drawn with replacement."""
    dice = random.Random(0)
    drawn = [correlation(np.concatenate(dice.choices(groups, k=len(groups)))) for _ in range(NUM_DRAWS)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def key_door_moves(rollout: Rollout, settings: Mapping[str, Any]) -> list[float]:
    """By how many moves each move brought the agent nearer to the end of a shortest way. The game is played again."""
    env = KeyDoorEnv(**settings)
    env.reset(seed=rollout.meta["env_seed"])
    distances = [distance(env)]
    for step in rollout.env_steps:
        env.step({env.agent_id: str(step.parsed_action)})
        distances.append(distance(env) if env.active_agents or not step.terminated else 0)
    return [float(before - after) for before, after in pairwise(distances)]


def distance(env: KeyDoorEnv) -> int:
    """Moves to the key and from there to the door."""
    world = env.snapshot().world
    free = frozenset(tuple(cell) for cell in world["free"])
    agent, key, door = (tuple(world[name]) for name in ("agent", "key", "door"))
    to_key = [] if world["has_key"] else shortest_path(agent, key, free - {door})
    to_door = shortest_path(agent if world["has_key"] else key, door, free)
    assert to_key is not None and to_door is not None, "every world can be solved"
    return len(to_key) + len(to_door)


def tic_tac_toe_moves(rollout: Rollout, settings: Mapping[str, Any]) -> list[float]:
    """Whether each move kept the best result that was still possible. The game is played again."""
    env, kept = TicTacToeEnv(**settings), []
    env.reset(seed=rollout.meta["env_seed"])
    for step in rollout.env_steps:
        faced = position(str(env.snapshot().world["board"]), "X")
        kept.append(float(str(step.parsed_action).upper() in {CELLS[cell] for cell in faced.optimal}))
        env.step({env.agent_id: str(step.parsed_action)})
    return kept


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
