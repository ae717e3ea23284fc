"""The parts of a run, made from its settings."""

import gc
from collections import deque
from dataclasses import replace

import pytest
import torch

from ludic import registry
from ludic.agents import ToolAgent
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.inference.local import LocalEngine
from ludic.interaction import MultiAgentProtocol
from ludic.models.loading import character_tokenizer
from ludic.run.config.env_and_agent import AgentSettings, EnvSettings
from ludic.run.config.model import ModelSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.given import env_factory
from ludic.run.model import dtype_of, load_policy, make_template, serve_locally
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import EpisodeSetup, make_episode_setup
from ludic.run.parts.requests import fixed_requests, train_requests
from ludic.run.parts.source import make_source
from ludic.run.protocols.agents import agent_factory
from ludic.run.resolve import ResolvedRun, resolve
from ludic.run.settings import with_values
from ludic.tasks import long_lived_objects_exempt
from ludic.training.losses import ActionTokens, BatchFacts, Loss, ObservedTokens
from ludic.types import ConfigError, InferenceSpec, ReturnSpec, SamplingParams, load_rollouts

pytestmark = pytest.mark.slow


def resolved(env: str, **values) -> ResolvedRun:
    return resolve(with_values(RunConfig(), {"id": env, "model": "tiny", **values}), env_factory(env))


def scripted_play(run: ResolvedRun, reply: str = "A1") -> EpisodeSetup:
    client = ScriptedClient(lambda request: reply)
    return make_episode_setup(run.config.env, run.config.agent, run.env, client, ByteTemplate(), "scripted")


# --- what is left open ---


def test_suggestions_of_the_env_fill_open_settings():
    run = resolved("gsm8k", set={"sample": {"question": "1+1?", "answer": "#### 2"}})
    config = run.config
    assert (config.agent.parser, run.max_steps, run.sampling.max_tokens) == ("final_number", 1, 512)
    own = resolved("tic_tac_toe", parser="xml_tag", parser_set={"tag": "move"}, max_steps=7, max_tokens=64).config
    assert (own.agent.parser, own.agent.parser_set, own.env.max_steps) == ("xml_tag", {"tag": "move"}, 7)


def test_algorithms_that_compare_nothing_need_no_groups():
    assert resolved("tic_tac_toe").group_size == 8
    assert resolved("tic_tac_toe", algo="reinforce").group_size == 1
    assert resolved("tic_tac_toe", algo="reinforce", group_size=4).num_groups == 32


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"id": "tic_tac_toe"}, "tic_tac_toe-smollm2-135m-grpo"),
        ({"id": "my/env.py:Maze", "model": "models/my model.gguf"}, "Maze-my_model-grpo"),
        ({"id": "other/maze", "model": "Qwen/Qwen2.5-0.5B-Instruct"}, "maze-Qwen2.5-0.5B-Instruct-grpo"),
    ],
)
def test_a_run_is_named_after_env_model_and_algorithm(values, name):
    from ludic.run.resolve import default_name

    assert default_name(with_values(RunConfig(), values)) == name


GREEDY = InferenceSpec(sampling=SamplingParams(temperature=0.0), return_=ReturnSpec.for_eval())


# --- playing ---


async def test_an_env_is_played_and_every_request_is_a_new_task():
    config = resolved("tic_tac_toe", set={"opponent": "minimax"})
    play = scripted_play(config)
    requests = fixed_requests(play, 3, GREEDY)
    assert len({request.env_seed for request in requests}) == 3
    assert requests == fixed_requests(play, 3, GREEDY), "the same every time"
    rollouts = await play.engine().generate_rollouts(requests, max_steps=play.max_steps)
    assert [rollout.failure for rollout in rollouts] == [None] * 3
    assert all(rollout.env_steps[0].action == "A1" for rollout in rollouts)


async def test_env_with_several_players_uses_copies_of_the_agent():
    play = scripted_play(resolved("prisoners_dilemma", set={"rounds": 2}), reply="defect")
    assert isinstance(play.make_protocol(play.client), MultiAgentProtocol)
    rollouts = await play.engine().generate_rollouts([play.request(GREEDY)], max_steps=2)
    assert len(rollouts) == 2 and {r.total_reward for r in rollouts} == {2.0}


def test_the_agent_is_made_as_the_settings_say():
    settings = AgentSettings(
        agent="react",
        agent_set={"tools": ["calculator"], "max_react_steps": 3, "tools_in_prompt": False},
        context="sliding_window",
        context_set={"max_turns": 2},
        parser="xml_tag",
        parser_set={"tag": "move"},
        system_prompt="Be brief.",
        cut_off="read",
    )
    template = make_template(character_tokenizer(), with_tools=True)
    agent = agent_factory(settings, template, "m")(ScriptedClient(lambda request: ""))
    assert isinstance(agent, ToolAgent) and list(agent.tool_map) == ["calculator"]
    assert agent.ctx.max_turns == 2 and agent.ctx.default_system_prompt == "Be brief."
    assert agent.parser("<move>A1</move>").action == "A1" and not agent.reject_incomplete_completions


@pytest.mark.parametrize(("max_tokens", "rejects"), [(1, False), (2, True)])
def test_a_reply_of_one_token_is_never_cut_off(max_tokens, rejects):
    settings = resolved("key_door", max_tokens=max_tokens).config.agent
    agent = agent_factory(settings, ByteTemplate(), "m")(ScriptedClient(lambda request: ""))
    assert agent.reject_incomplete_completions is rejects


def test_settings_override_suggestions_of_the_env():
    suggested = resolved("tic_tac_toe").config.agent
    own = resolved("tic_tac_toe", cut_off="reject", unreadable="go_on").config.agent
    assert (suggested.cut_off, suggested.unreadable) == ("read", "stop")
    assert (own.cut_off, own.unreadable) == ("reject", "go_on")


# --- requests ---


def test_samples_come_in_a_new_order_each_pass_and_reach_the_env(tmp_path):
    data = tmp_path / "q.jsonl"
    data.write_text("".join(f'{{"question": "{n}", "answer": "#### {n}"}}\n' for n in range(8)))
    config = resolved("gsm8k", data=data, group_size=4, rollouts_per_update=32, set={"system_prompt": "Think."})
    next_requests = train_requests(config, scripted_play(config))
    passes = [[request.env.kwargs["sample"]["question"] for request in next_requests()] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == [str(n) for n in range(8)] and passes[0] != passes[1]
    assert next_requests()[0].env.kwargs["system_prompt"] == "Think."


async def test_groups_share_a_task_and_differ_in_their_sampling(tmp_path):
    config = resolved("tic_tac_toe", group_size=4, rollouts_per_update=8)
    source = make_source(config, scripted_play(config), make_algorithm(config), jsonl_path=tmp_path / "r.jsonl")
    await source.next_batch()
    facts = [rollout.meta["engine"] for rollout in load_rollouts(tmp_path / "r.jsonl")]
    assert len({fact["env_seed"] for fact in facts}) == 2 and len({fact["sampling_seed"] for fact in facts}) == 8


def test_algorithm_gets_group_size_and_arguments():
    algorithm = make_algorithm(resolved("tic_tac_toe", group_size=16, algo_set={"clip_eps_high": 0.28}))
    assert algorithm.credit_assigner.group_size == 16 and algorithm.loss.clip_eps_high == 0.28
    assert make_algorithm(resolved("tic_tac_toe", algo="ppo")).name == "ppo"


TRAINED_BY_THE_COMMAND = sorted(set(registry.algorithms.list()) - {"sft", "dpo", "ipo", "kto"})


@pytest.mark.parametrize("algo", TRAINED_BY_THE_COMMAND)
def test_gradient_scale_does_not_grow_with_reply_length(algo):
    # Norms of 60 to 95 under a limit of 1 make the clip a normaliser; a mean over tokens has none of that.
    loss = make_algorithm(resolved("tic_tac_toe", algo=algo)).loss
    short, long = (_gradient_size(loss, length) for length in (4, 400))
    assert long == pytest.approx(short, rel=1e-4) and long < 3


def _gradient_size(loss: Loss, length: int) -> float:
    """Σ |dL / dℓ_t| of two samples of this length with weights 1 and −1."""
    logps = torch.full((2 * length,), -0.5, requires_grad=True)
    values = torch.zeros(2 * length, requires_grad=True)
    tokens = ActionTokens(
        logps=logps,
        weights=torch.tensor([1.0, -1.0]).repeat_interleave(length),
        item_index=torch.arange(2).repeat_interleave(length),
        num_items=2,
        facts=BatchFacts(num_items=2, num_tokens=2 * length, num_observed=2 * length),
        old_logps=logps.detach(),
        observed=ObservedTokens(logps=logps, item_index=torch.arange(2).repeat_interleave(length)),
        values=values,
        returns=torch.ones(2 * length),
        old_values=values.detach(),
    )
    loss(tokens)[0].backward()
    assert logps.grad is not None
    return float(logps.grad.abs().sum() + (0.0 if values.grad is None else values.grad.abs().sum()))


def test_reduction_can_be_chosen():
    assert make_algorithm(resolved("tic_tac_toe")).loss.reduction.kind == "token_mean"
    assert make_algorithm(resolved("tic_tac_toe", reduction="sample_sum")).loss.reduction.kind == "sample_sum"
    paper = resolved("tic_tac_toe", algo_set={"length_normalize": True})
    assert make_algorithm(paper).loss.reduction.kind == "sample_mean"
    constant = resolved("tic_tac_toe", algo="dr_grpo", algo_set={"constant_length": 64})
    assert make_algorithm(constant).loss.reduction.kind == "constant"
    with pytest.raises(ConfigError, match="gspo takes a mean by its own rule"):
        resolved("tic_tac_toe", algo="gspo", reduction="token_mean")
    for algo in ("grpo", "gspo", "gmpo", "dr_grpo", "rloo"):
        by_episode = make_algorithm(resolved("tic_tac_toe", algo=algo, reduction="episode_mean"))
        assert by_episode.loss.reduction.kind == "episode_mean"
    assert make_algorithm(resolved("tic_tac_toe", algo="gspo")).loss.reduction.kind == "sample_mean"
    with pytest.raises(ConfigError, match="dapo takes a mean by its own rule"):
        resolved("tic_tac_toe", algo="dapo", reduction="episode_mean")


def test_the_trainer_gets_what_was_set():
    run = resolved("tic_tac_toe", lr=1e-3, schedule="cosine", warmup_steps=2, steps=10, max_grad_norm=0.0, max_lag=2)
    made = run.trainer
    assert made.lr == 1e-3 and made.max_grad_norm == 0 and made.max_lag == 2 and made.eval_every_n_steps is None
    assert made.lr_schedule is not None and made.lr_schedule(0) == 0.5 and made.lr_schedule(9) < 0.1


# --- the model ---


def test_the_tiny_model_is_the_same_for_the_same_seed_and_has_a_token_per_character():
    import torch

    first, second, other = (load_policy(ModelSettings(model="tiny"), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)
    assert len(first.tokenizer.encode("A1, b\n~", add_special_tokens=False)) == 7
    assert dtype_of(ModelSettings(model="tiny")) is torch.float32


def test_a_conversation_in_characters_continues_token_by_token():
    tokenizer = character_tokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n  two  spaces"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    template = make_template(tokenizer)
    opening = [{"role": "system", "content": "Play."}, {"role": "user", "content": " X\n"}]
    prompt = template.apply(opening).prompt_token_ids.tolist()
    reply = [*tokenizer.encode("A 1", add_special_tokens=False), tokenizer.eos_token_id]
    messages = [*opening, {"role": "assistant", "content": "A 1"}, {"role": "user", "content": "X B2"}]
    delta = template.delta(messages, num_sent=2, completion_token_ids=reply).tolist()
    assert prompt + reply + delta == template.apply(messages).prompt_token_ids.tolist()


def test_as_many_episodes_run_at_a_time_as_the_engine_computes_together():
    run = resolved("tic_tac_toe")
    assert run.config.rollouts.concurrency is None and scripted_play(run).concurrency == 64
    loaded = load_policy(ModelSettings(model="tiny"))
    engine = LocalEngine(loaded.model, loaded.tokenizer, max_sequences=7)
    setup = replace(scripted_play(run), client=engine)
    assert setup.concurrency == engine.max_sequences == 7
    engine.close()
    served = serve_locally(loaded, max_length=64, concurrency=1000)
    assert served.client.max_sequences == 64  # a CPU is not faster with more
    assert served.client.max_model_len == 64, "no more than can be trained on"
    served.close()


@pytest.fixture
def nothing_exempt():
    """tests/conftest.py exempts what it has imported, and sets its own pace."""
    thresholds, was_on = gc.get_threshold(), gc.isenabled()
    gc.unfreeze()
    gc.set_threshold(100, 5, 5)
    gc.enable()
    yield
    gc.freeze()
    gc.set_threshold(*thresholds)
    if not was_on:
        gc.disable()


def test_existing_objects_are_exempt_from_garbage_collection_only_inside_the_block(nothing_exempt):
    with pytest.raises(KeyError), long_lived_objects_exempt():
        assert gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_objects_that_the_program_has_exempted_stay_so(nothing_exempt):
    with long_lived_objects_exempt():
        with long_lived_objects_exempt():
            pass
        assert gc.get_freeze_count() > 1000


class Loop:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self):
        self.itself = self


def test_garbage_that_lived_for_a_while_is_freed_inside_the_block(nothing_exempt):
    program = [[] for _ in range(400_000)]  # as many objects as torch and transformers have
    with long_lived_objects_exempt():
        living = deque(maxlen=4_000)
        for _ in range(40_000):
            living.append(Loop())
        num_loops = sum(isinstance(each, Loop) for each in gc.get_objects())
    assert len(program) == 400_000 and num_loops < 12_000


@pytest.mark.parametrize(
    ("env", "agent", "message"),
    [
        (EnvSettings(id="tic_tac_toe", set={"opponnent": 1}, max_steps=5), AgentSettings(max_tokens=8), "opponent"),
        (
            EnvSettings(id="tic_tac_toe", max_steps=5),
            AgentSettings(max_tokens=8, agent="reacts"),
            "Did you mean 'react'",
        ),
        (EnvSettings(id="tic_tac_toe", max_steps=5), AgentSettings(max_tokens=8, agent_set={"x": 1}), "x"),
        (EnvSettings(id="tic_tac_toe", max_steps=5), AgentSettings(max_tokens=8, context_set={"y": 1}), "y"),
    ],
)
def test_a_part_that_cannot_be_made_is_found_before_the_first_episode(env, agent, message):
    with pytest.raises((ConfigError, KeyError, TypeError), match=message):
        make_episode_setup(env, agent, env_factory(env.id), ScriptedClient(lambda _: ""), ByteTemplate(), "scripted")
