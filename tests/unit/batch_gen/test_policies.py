"""Who plays which seat: by name, per request, and the same for all members of a group."""

import asyncio
from collections.abc import Sequence

import pytest

from ludic.batch_gen import (
    AssignedRequests,
    RolloutEngine,
    assign_roles,
    make_dataset_sequence_requests_fn,
)
from ludic.inference import ScriptedClient
from ludic.interaction import Policies
from ludic.types import ConfigError, EnvSpec, ProtocolSpec, RolloutRequest, UnknownName
from tests.fakes import make_agent

GAME = RolloutRequest(env=EnvSpec("tic_tac_toe_duel"), protocol=ProtocolSpec("duel"), env_seed=0, sampling_seed=0)


class Past:
    """A league of scripts."""

    def __init__(self, versions: Sequence[int]) -> None:
        self.versions = list(versions)

    def client(self, version: int) -> ScriptedClient:
        return ScriptedClient(lambda _: f"<a>v{version}</a>", version=version)


def says(text: str) -> ScriptedClient:
    return ScriptedClient(lambda _: f"<a>{text}</a>")


def policies(**players) -> Policies:
    return Policies(players, lambda client, name: make_agent(client, model=name))


def play(policies: Policies, *requests: RolloutRequest) -> list:
    engine = RolloutEngine(protocol_registry={"duel": policies.protocol})
    return asyncio.run(engine.generate_rollouts(requests, max_steps=9))


def test_the_request_decides_who_is_asked_and_the_rollouts_say_who_it_was():
    both = policies(one=says("A1"), two=says("B2"))
    rollouts = play(both, assign_roles(GAME, {"X": "one", "O": "two"}), assign_roles(GAME, {"X": "two", "O": "one"}))
    moves = [(r.meta["agent_id"], r.meta["model"], r.agent_steps[0].action) for r in rollouts]
    assert moves == [
        ("X", "one", "<a>A1</a>"), ("O", "two", "<a>B2</a>"), ("X", "two", "<a>B2</a>"), ("O", "one", "<a>A1</a>"),
    ]  # fmt: skip
    assert [r.meta["policies"] for r in rollouts[::2]] == [{"X": "one", "O": "two"}, {"X": "two", "O": "one"}]


def test_a_member_of_a_league_is_asked_by_its_version():
    rollouts = play(policies(now=says("A1"), past=Past([0, 4])), assign_roles(GAME, {"X": "past@4", "O": "now"}))
    assert rollouts[0].agent_steps[0].action == "<a>v4</a>" and rollouts[0].meta["model"] == "past@4"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "No policy named 'missing'"),
        ("past", "is a league; assign one of its members"),
        ("past@²", "is a league; assign one of its members"),
        ("now@3", "is not a league"),
    ],
)
def test_a_role_without_a_known_policy_stops_the_run(name, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        play(policies(now=says("A1"), past=Past([0])), assign_roles(GAME, {"X": name, "O": "now"}))


def test_an_agent_that_hides_its_policy_is_refused():
    hiding = Policies({"one": says("A1")}, lambda client, name: make_agent(client))
    with pytest.raises(ConfigError, match="pass the name on"):
        play(hiding, assign_roles(GAME, {"X": "one", "O": "one"}))


# --- seats are drawn ---


SEATINGS = [{"X": "one", "O": "past"}, {"X": "past", "O": "one"}]


def requests_fn(batch_size: int = 40):
    return make_dataset_sequence_requests_fn(
        range(1000), batch_size=batch_size, group_size=3, env_kind="tic_tac_toe_duel", protocol_kind="duel"
    )


def drawn(requests) -> list[dict[str, str]]:
    return [dict(request.protocol.kwargs["policies"]) for request in requests]


def test_members_of_a_group_sit_alike_and_groups_differ():
    all_policies = policies(one=says("A1"), past=Past([0, 5, 9]))
    seats = drawn(AssignedRequests(requests_fn(), SEATINGS, all_policies)())
    groups = [seats[start : start + 3] for start in range(0, len(seats), 3)]
    assert all(group == [group[0]] * 3 for group in groups)
    met = {(group[0]["X"], group[0]["O"]) for group in groups}
    opponents = ("past@0", "past@5", "past@9")
    assert met == {("one", past) for past in opponents} | {(past, "one") for past in opponents}


def test_a_resumed_run_draws_what_it_would_have_drawn():
    all_policies = policies(one=says("A1"), past=Past([0, 5, 9]))
    whole = AssignedRequests(requests_fn(), SEATINGS, all_policies)
    first, state, second = whole(), whole.state_dict(), whole()
    again = AssignedRequests(requests_fn(), SEATINGS, all_policies)
    again.load_state_dict(state)
    assert drawn(again()) == drawn(second) != drawn(first)


def test_every_call_seats_each_policy_that_always_plays():
    seatings = [{"X": "a", "O": "past"}, {"X": "past", "O": "b"}, {"X": "c", "O": "past"}, {"X": "past", "O": "past"}]
    all_policies = policies(a=says("A1"), b=says("A1"), c=says("A1"), past=Past([0, 5, 9]))

    def played(always) -> list[list[dict[str, str]]]:
        requests = AssignedRequests(requests_fn(batch_size=3), seatings, all_policies, always=always)
        return [drawn(requests()) for _ in range(40)]

    free, stratified = played([]), played(["a", "b", "c"])
    names = [{name for seats in call for name in seats.values()} for call in stratified]
    assert all({"a", "b", "c"} <= own for own in names)
    assert all(call[n] == call[n + 1] == call[n + 2] for call in stratified for n in (0, 3, 6)), "a group sits alike"
    for before, after in zip(free, stratified, strict=True):
        assert (before == after) == ({"a", "b", "c"} <= {name for seats in before for name in seats.values()})
    assert len({str(call[0]["X"])[:1] + str(call[0]["O"])[:1] for call in stratified}) >= 3, "not always the same group"
