"""The user simulator's example: either role learns from a scripted partner."""

import asyncio
from pathlib import Path

import pytest

from ludic.agents import Agent
from ludic.batch_gen import GRPORequestStrategy, RolloutEngine, SharedRollouts, assign_roles
from ludic.context import FullDialog
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.interaction import Policies
from ludic.parsers import raw_parser
from ludic.types import EnvSpec, InferenceSpec, ProtocolSpec, ReturnSpec, RolloutRequest
from tests import programs

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")

from ludic.training import make_grpo

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program():
    return programs.load(ROOT / "examples" / "user_simulator.py")


def earned(out: str, name: str) -> list[float]:
    return [float(line.split(f"{name} ")[1].split()[0]) for line in out.splitlines() if name in line]


@pytest.mark.slow
@pytest.mark.extended(covered_by="test_both_roles_are_trained_together")
@pytest.mark.parametrize(("role", "name"), [("assistant", "helper"), ("user", "simulator")])
def test_a_role_learns_from_a_scripted_partner(program, capsys, role, name):
    assert program.main(["--train", role, "--updates", "20", "--groups", "4", "--group-size", "16"]) == 0
    rewards = earned(capsys.readouterr().out, name)
    # One word of 13 is right at first; one colour of four where the partner is not listened to.
    assert len(rewards) == 2 and rewards[-1] > 0.4, rewards


def test_both_roles_are_trained_together(program, capsys):
    assert program.main(["--train", "both", "--updates", "10", "--groups", "2", "--group-size", "4"]) == 0
    out = capsys.readouterr().out
    assert earned(out, "simulator") == earned(out, "helper"), "they share the reward"


def test_policies_in_code_give_batches_of_the_trained_role_only():
    clients = {
        "simulator": ScriptedClient(lambda request: "A table for four at seven, please."),
        "helper": ScriptedClient(lambda request: "SUBMIT: 4 19:00"),
    }

    def make_agent(client, name):
        return Agent(client=client, model=name, ctx=FullDialog(), parser=raw_parser, chat_template=ByteTemplate())

    request = RolloutRequest(
        env=EnvSpec("dialogue", {"sample": {"goal": "a table for four at seven", "answer": "4 19:00"}}),
        protocol=ProtocolSpec("talk"),
        inference=InferenceSpec(return_=ReturnSpec.for_rl()),
    )
    engine = RolloutEngine(protocol_registry={"talk": Policies(clients, make_agent).protocol})
    tasks = [assign_roles(request, {"user": "simulator", "assistant": "helper"})]
    dialogues = SharedRollouts(engine, requests_fn=lambda: tasks, strategy=GRPORequestStrategy(8), max_steps=16)
    batch = asyncio.run(dialogues.batches_for("helper", algorithm=make_grpo(group_size=8)).next_batch())
    assert {item.origin.policy for item in batch.items} == {"helper"} and batch.meta["avg_total_reward"] == 1.0
