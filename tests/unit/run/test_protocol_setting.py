"""`ludic train --protocol`: who runs the turns of an episode. Everything is real, the models are tiny or scripted."""

import itertools
import json
import re
from pathlib import Path

import pytest

from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.inference.openai_client import messages_of
from ludic.interaction import DelegatingProtocol, MultiAgentProtocol, SingleAgentProtocol
from ludic.run import build
from ludic.run.config.env_and_agent import AgentSettings, EnvSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.given import Parts, env_factory
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import make_episode_setup
from ludic.run.parts.source import make_source
from ludic.run.protocols.factory import protocol_factory
from ludic.run.resolve import resolve
from ludic.run.settings import read_toml, with_values
from ludic.types import InferenceSpec, load_rollouts
from tests.unit.cli.train_parts import AGENT, CASES, RUN, SMALL, command_in
from tests.unit.run.test_parts_as_objects import Letter

pytestmark = pytest.mark.slow

OWN = '''
from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.interaction import DelegatingProtocol, SingleAgentProtocol, TaskEnv
from ludic.parsers import raw_parser


class Noted(SingleAgentProtocol):
    """Writes its note on every rollout."""

    def __init__(self, agent, *, note="none", **settings):
        super().__init__(agent, **settings)
        self.note = note

    async def run(self, **settings):
        rollouts = await super().run(**settings)
        for rollout in rollouts:
            rollout.meta["note"] = self.note
        return rollouts


class Plain(SingleAgentProtocol):
    def __init__(self, agent):
        super().__init__(agent)


def whole(*, client, model, chat_template):
    agent = Agent(
        client=client, model=model, ctx=FullDialog(), parser=raw_parser, chat_template=chat_template,
        reject_incomplete_completions=False,
    )
    return SingleAgentProtocol(agent)


def nothing(note):
    return note


def number(agent):
    return 7


class Order(TaskEnv):
    """A sub-task with a heading."""

    def __init__(self, task):
        super().__init__(f"Order: {task}")
'''
DELEGATES = '{"poet": "writes one line"}'
FOLD = ["--protocol", "delegating", "--protocol-set", f"delegates={DELEGATES}", "--algo", "fold_grpo"]


@pytest.fixture
def ludic(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "cases.py").write_text(CASES)
    (tmp_path / "my_agent.py").write_text(AGENT)
    return command_in(tmp_path, monkeypatch, capsys)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_class_of_a_file_runs_the_episodes_with_the_agent_of_the_settings(ludic, tmp_path):
    flags = ["--protocol", "own.py:Noted", "--protocol-set", "note=seen", "--system-prompt", "Shout."]
    ended = ludic("train", *RUN, *flags)
    assert ended.code == 0, ended.err
    (file,) = (tmp_path / "runs" / "first" / "rollouts").iterdir()
    rollouts = list(load_rollouts(file))
    assert len(rollouts) == 16 and {rollout.meta["note"] for rollout in rollouts} == {"seen"}
    assert rollouts[0].agent_steps[0].prompt_messages[0]["content"] == "Shout."
    written = read_toml(RunConfig, tmp_path / "runs" / "first" / "config.toml").agent
    assert (written.protocol, written.protocol_set) == ("own.py:Noted", {"note": "seen"})
    assert ludic("eval", "runs/first", "--num-tasks", "2").code == 0
    files = (tmp_path / "runs" / "eval").rglob("rollouts/*.jsonl*")
    evaluated = [rollout for file in files for rollout in load_rollouts(file)]
    assert len(evaluated) >= 2 and {rollout.meta["note"] for rollout in evaluated} == {"seen"}


@pytest.mark.slow
def test_a_function_that_takes_the_client_makes_its_own_agent(ludic, tmp_path):
    assert ludic("train", *RUN, "--protocol", "own.py:whole").code == 0
    assert ludic("train", *RUN[:-1], "plain").code == 0
    own, plain = (json.loads((tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in
                  ("first", "plain"))  # fmt: skip
    assert own["train/loss"] == plain["train/loss"] and own["train/grad_norm"] == plain["train/grad_norm"]


@pytest.mark.slow
def test_fold_grpo_trains_with_sub_agents(ludic, tmp_path):
    flags = [*FOLD, "--max-tokens", "8", "--agent-set", "tools_in_prompt=false"]
    shown = ludic("train", *RUN, *flags, "--dry-run")
    assert shown.code == 0 and 'protocol = "delegating"' in shown.out and 'agent = "react"' in shown.out, shown.err
    ended = ludic("train", *RUN, *flags)
    assert ended.code == 0, ended.err
    rows = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 2


# --- sub-agents ---


def sub_agents(**delegates):
    settings = AgentSettings(
        agent="react", parser="xml_tag", parser_set={"tag": "answer"}, max_tokens=200, system_prompt="Lead.",
        protocol="delegating", protocol_set={"delegates": delegates, "max_children": 2},
    )  # fmt: skip
    return settings


def order(to: str, task: str) -> str:
    call = json.dumps({"name": "delegate", "arguments": {"to": to, "task": task}})
    return f"<tool_call>{call}</tool_call>"


async def played(settings: AgentSettings, replies: list[str]):
    client, template = ScriptedClient(replies), ByteTemplate(tool_parser=HermesToolParser())
    env = EnvSettings(id="tic_tac_toe", max_steps=1)
    setup = make_episode_setup(env, settings, env_factory(env.id), client, template, "scripted")
    return await setup.engine().generate_rollouts([setup.request(InferenceSpec())], max_steps=1)


async def test_sub_agents_answer_the_agent_of_the_settings():
    settings = sub_agents(
        poet="writes one line", solver={"description": "adds", "system_prompt": "Add.", "max_steps": 2}
    )
    parent, child = await played(settings, [order("solver", "1 + 1"), "2", "<answer>A1</answer>"])
    assert child.meta["delegate"] == "solver" and child.meta["parent_rollout_id"] == parent.id
    assert [message["content"] for message in child.agent_steps[0].prompt_messages] == ["Add.", "1 + 1"]
    assert parent.agent_steps[1].prompt_messages[-1]["content"] == "2" and parent.env_steps[0].parsed_action == "A1"


async def test_a_sub_agent_has_its_own_env_and_parser(here):
    settings = sub_agents(poet={"env": "own.py:Order", "parser": "boxed"})
    _, child = await played(settings, [order("poet", "rain"), "\\boxed{grey}", "<answer>A1</answer>"])
    assert (
        child.agent_steps[0].prompt_messages[-1]["content"] == "Order: rain"
        and child.env_steps[0].parsed_action == "grey"
    )


@pytest.mark.parametrize(("depth", "num_rollouts"), [(1, 2), (2, 3)])
async def test_sub_agents_delegate_further_where_the_depth_allows_it(depth, num_rollouts):
    settings = sub_agents(poet="writes")
    settings.protocol_set["max_depth"] = depth
    further = [order("poet", "a word"), "wet"] if depth == 2 else []
    replies = [order("poet", "rain"), *further, "grey and wet", "<answer>A1</answer>"]
    rollouts = await played(settings, replies)
    assert len(rollouts) == num_rollouts and [r.failure for r in rollouts] == [None] * num_rollouts
    assert max(rollout.meta["depth"] for rollout in rollouts) == depth


async def test_samples_of_sub_agents_are_trained_with_the_weight_of_their_parent():
    answers = itertools.cycle(["<answer>A</answer>", "<answer>a</answer>"])

    def reply(request):
        task = messages_of(request.prompt_token_ids)[-1]["content"]
        return {"a": order("poet", "rain"), "rain": "grey"}.get(task) or next(answers)

    settings = sub_agents(poet="writes one line")
    values = {
        "id": env_factory(Letter).id,
        "model": "tiny",
        "algo": "fold_grpo",
        "group_size": 4,
        "rollouts_per_update": 4,
    }
    run = resolve(with_values(RunConfig(agent=settings), values), env_factory(Letter))
    client, template = ScriptedClient(reply), ByteTemplate(tool_parser=HermesToolParser())
    setup = make_episode_setup(run.config.env, run.config.agent, run.env, client, template, "scripted")
    batch = await make_source(run, setup, make_algorithm(run), jsonl_path=None).next_batch()
    weights = [
        {item.origin.episode: set(item.token_weights.tolist()) for item in batch.items if item.origin.delegate == who}
        for who in (None, "poet")
    ]
    assert len(weights[0]) == 4 and weights[0] == weights[1]
    assert {round(weight) for own in weights[0].values() for weight in own} == {-1, 1}


# --- what is refused ---


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--protocol", "delegate"], "Did you mean 'delegating'"),
        (["--protocol", "delegating", "--algo", "fold_grpo"], "needs sub-agents"),
        ([*FOLD, "--agent", "agent"], "agent = 'agent' calls none that a protocol runs"),
        ([*FOLD, "--agent", "call_agent"], "agent = 'call_agent' calls none that a protocol runs"),
        ([*FOLD[:-2]], "Take fold_grpo"),
        (["--protocol", "single_agent", "--protocol-set", "max_external_round=1"], "Did you mean 'max_external_rounds'"),
        (["--protocol", "delegating", "--protocol-set", 'delegates={"a": {"step": 1}}', "--algo", "fold_grpo"], "'step'"),
        ([*FOLD[:2], "--protocol-set", 'delegates={"a": {"agent": "reac"}}', *FOLD[4:]], "Did you mean 'react'"),
        ([*FOLD[:2], "--protocol-set", 'delegates={"a": {"env": "own.py:Ordr"}}', *FOLD[4:]], "Did you mean 'Order'"),
        (["--protocol-set", "note=1"], "none is named; give --protocol"),
        (["--protocol", "own.py:nothing"], "none of the parameters agent, agents and client"),
        (["--protocol", "own.py:number"], "makes a int; it must be an InteractionProtocol"),
        (["--protocol", "multi_agent", "--unreadable", "stop"], "Give --unreadable go_on"),
        (["--protocol", "own.py:Plain", "--unreadable", "stop"], "Give --unreadable go_on"),
        (["--protocol", "single_agent", "--agent", "my_agent.py:solve"], "is a function or a command"),
        (["--protocol", "single_agent", "--agent-command", "true"], "is a function or a command"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:20],
)  # fmt: skip
def test_invalid_protocols_are_refused_before_loading(ludic, flags, says):
    for how in ([], ["--dry-run"]):
        ended = ludic("train", *RUN, *flags, *how)
        assert ended.code == 2 and says in " ".join(ended.err.split()), ended.err


def test_a_protocol_for_one_agent_refuses_an_env_with_two(ludic):
    ended = ludic("train", "cases.py:Cases", *SMALL, "--protocol", "single_agent", "--dry-run")
    assert ended.code == 2 and "runs one agent, but the env has left, right. Take multi_agent" in ended.err, ended.err


# --- files, several envs, Python ---


@pytest.mark.slow
def test_each_env_of_several_may_have_its_own_protocol(ludic, tmp_path):
    (tmp_path / "run.toml").write_text(
        '[[envs]]\nid = "letter.py:Letter"\nprotocol = "own.py:Noted"\nprotocol_set = {note = "one"}\n'
        '[[envs]]\nid = "cases.py:Cases"\n'
    )
    ended = ludic("train", "run.toml", *SMALL, "--rollouts-per-update", "16", "--steps", "1", "--name", "first")
    assert ended.code == 0, ended.err
    (file,) = (tmp_path / "runs" / "first" / "rollouts").iterdir()
    assert {(r.env_name, r.meta.get("note")) for r in load_rollouts(file)} == {
        ("Letter", "one"),
        ("Cases", None),
    }


@pytest.mark.parametrize("page", ["fold_grpo", "mopd"])
def test_the_file_of_a_page_is_a_file_of_settings(page, tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "algorithms" / f"{page}.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "run.toml").write_text(block)
    config = read_toml(RunConfig, tmp_path / "run.toml")
    if page == "mopd":
        assert config.algo.algo == "mopd" and set(config.teachers) == {entry.label for entry in config.envs}
        return
    (tmp_path / "my_env.py").write_text(OWN.replace("class Order", "class Task"))
    settings = with_values(
        config, {"protocol_set": _with_env(config.agent.protocol_set, tmp_path / "my_env.py:Task")}
    ).agent
    template = ByteTemplate(tool_parser=HermesToolParser())
    made = protocol_factory(settings, ["x"], template, "scripted", Parts())(ScriptedClient([""]))
    assert (made.max_children, made.max_child_tokens, made.delegates["scout"].max_steps) == (4, 2048, 2)


def _with_env(arguments: dict, place: Path) -> dict:
    scout = arguments["delegates"]["scout"]
    assert scout["env"] == "my_env.py:Task"
    return arguments | {"delegates": {"scout": scout | {"env": str(place)}}}


def test_build_takes_a_name_or_an_object():
    small = {"model": "tiny", "max_tokens": 1}
    assert build(env=Letter, protocol="single_agent", **small).config.agent.protocol == "single_agent"
    run = build(env=Letter, protocol=SingleAgentProtocol, **small)
    assert run.resolved.parts.protocol is SingleAgentProtocol
    assert run.config.agent.protocol == "ludic.interaction.single_agent:SingleAgentProtocol"


@pytest.mark.parametrize(
    ("id", "kind", "roles"),
    [("single_agent", SingleAgentProtocol, ["x"]), ("multi_agent", MultiAgentProtocol, ["x", "o"]),
     ("delegating", DelegatingProtocol, ["x"])],
)  # fmt: skip
def test_each_registered_protocol_is_made_from_settings(id, kind, roles):
    arguments = {"delegates": {"poet": "writes"}} if id == "delegating" else {}
    settings = AgentSettings(agent="react", protocol=id, protocol_set=arguments | {"max_external_rounds": 3})
    client, template = ScriptedClient([""]), ByteTemplate(tool_parser=HermesToolParser())
    make = protocol_factory(settings, roles, template, "scripted", Parts())
    first, second = make(client), make(client)
    assert type(first) is kind and first.max_external_rounds == 3 and first is not second
