"""Policies that play together are graded one by one: by policy, by role, and with the episodes that failed."""

import asyncio

import pytest

from ludic.batch_gen import RolloutEngine
from ludic.batch_gen.requests.groups import assign_roles
from ludic.eval import Grading, PolicyEvaluator
from ludic.inference import ScriptedClient
from ludic.interaction import Policies
from ludic.parsers import raw_parser
from ludic.types import EnvSpec, ProtocolSpec, RolloutRequest
from tests.fakes import make_agent
from tests.unit.cli.train_parts import CASES

made: dict = {}
exec(CASES, made)


class Breaks(made["Cases"]):
    """The third game cannot be played."""

    def reset(self, *, seed=None):
        if seed == 2:
            raise OSError("no such game")
        return super().reset(seed=seed)


def evaluated(env: type, *seatings: dict[str, str], episodes: int = 1, grading: Grading | None = None):
    says = {"ann": "A", "bob": "b"}
    players = {name: ScriptedClient(lambda request, text=text: text) for name, text in says.items()}
    policies = Policies(players, lambda client, name: make_agent(client, model=name, parser=raw_parser))
    engine = RolloutEngine(env_registry={"cases": env}, protocol_registry={"play": policies.protocol})
    game = RolloutRequest(env=EnvSpec("cases"), protocol=ProtocolSpec("play"), num_episodes=episodes)
    requests = [
        assign_roles(
            RolloutRequest(env=game.env, protocol=game.protocol, num_episodes=episodes, env_seed=number), seats
        )
        for number, seats in enumerate(seatings)
    ]
    evaluator = PolicyEvaluator(engine, lambda: requests, grading=grading)
    return evaluator, *asyncio.run(evaluator.eval())


APART, SWAPPED = {"left": "ann", "right": "bob"}, {"left": "bob", "right": "ann"}


def test_each_policy_is_graded_in_each_of_its_roles():
    evaluator, records, metrics = evaluated(made["Cases"], APART, SWAPPED, APART, APART)
    assert (metrics["ann/mean_reward"], metrics["bob/mean_reward"]) == (0.75, 0.75)
    assert (metrics["ann/left/mean_reward"], metrics["ann/right/mean_reward"]) == (1.0, 0.0)
    assert (metrics["bob/left/accuracy"], metrics["bob/right/accuracy"]) == (0.0, 1.0)
    assert (metrics["ann/num_tasks"], metrics["ann/left/num_tasks"]) == (4, 3)
    assert len(records) == 8, "a record counts once, not for its role again"
    assert set(evaluator.last_reports) == {"ann", "ann/left", "ann/right", "bob", "bob/left", "bob/right"}


def test_policy_with_one_role_has_one_report():
    _, _, metrics = evaluated(made["Cases"], APART, APART)
    assert metrics["ann/accuracy"] == 1.0 and not any(name.startswith("ann/left") for name in metrics)


def test_two_roles_of_one_episode_are_not_two_attempts():
    _, _, metrics = evaluated(made["Cases"], {"left": "ann", "right": "ann"}, episodes=2)
    assert "ann/pass@2" not in metrics and "ann/pass@4" not in metrics
    assert (metrics["ann/left/pass@2"], metrics["ann/right/pass@2"]) == (1.0, 0.0)


def test_attempts_count_for_a_policy_that_plays_its_roles_in_turn():
    _, _, metrics = evaluated(made["Cases"], APART, SWAPPED, episodes=2)
    assert (metrics["ann/pass@2"], metrics["ann/left/pass@2"], metrics["ann/right/pass@2"]) == (0.5, 1.0, 0.0)


def test_failed_episode_counts_for_everyone_at_the_table(caplog):
    _, _, metrics = evaluated(Breaks, APART, APART, APART, APART)
    for policy in ("ann", "bob"):
        assert metrics[f"{policy}/num_failed"] == 1 and metrics[f"{policy}/accuracy"] == pytest.approx(0.75)
