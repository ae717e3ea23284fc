"""Evaluation through the real rollout stack: every rollout counts."""

import json

import numpy as np
import pytest

from ludic.batch_gen import RolloutEngine, TooManyFailures
from ludic.envs import SingleAgentEnv
from ludic.envs.tic_tac_toe import TicTacToeDuel
from ludic.eval import EngineEvaluator, Grading, evaluate, make_report, run_eval, run_eval_sync
from ludic.eval.outcome import canonical
from ludic.inference import ByteTemplate
from ludic.interaction import MultiAgentProtocol, SingleAgentProtocol
from ludic.parsers import ParseResult, raw_parser
from ludic.types import (
    ConfigError,
    EnvironmentStep,
    EnvSpec,
    ProtocolSpec,
    Reducer,
    Rollout,
    RolloutRequest,
    StepOutcome,
)
from tests.fakes import CountingEnv, ScriptedClient, make_agent
from tests.unit.eval.quiz import questions, quiz_engine, says

FOUR = [("q0", "yes"), ("q1", "yes"), ("q2", "yes"), ("q3", "yes")]


async def quiz(*replies: str, samples: int = 1, **settings):
    return await evaluate(quiz_engine(says(*replies)), questions(FOUR, samples=samples), concurrency=1, **settings)


# --- what counts as wrong (D-2) ---


async def test_an_unparseable_reply_is_wrong():
    report = await quiz("<a>yes</a>", "yes!", "dunno", "<b>yes</b>")
    assert report.metrics["accuracy"] == 0.25
    assert report.metrics["parse_error_rate"] == 0.75
    assert report.metrics["num_samples"] == report.metrics["num_tasks"] == 4
    assert [record["parse_error"] for record in report.records] == [False, True, True, True]
    assert report.metrics["truncation_rate"] == 0, "an unreadable reply is no limit"
    assert (report.metrics["unreadable_rate"], report.metrics["over_limit_rate"]) == (0.75, 0)


async def test_a_reducer_divides_by_unreadable_replies_too():
    rate = Reducer(kind="count_true", source="correct", normalize_by="samples")
    report = await quiz("<a>yes</a>", "yes!", "dunno", "?", reducers={"right": rate})
    assert report.metrics["right"] == 0.25


async def test_a_reply_that_was_cut_off_is_wrong_and_counted_as_truncated():
    engine = quiz_engine(lambda question: "<a>yes</a>" if question != "q1" else "<a>yes</a>" + " because" * 20)
    report = await evaluate(engine, questions(FOUR, max_tokens=32))
    assert report.metrics["accuracy"] == 0.75
    assert report.metrics["truncation_rate"] == report.metrics["completion_truncated_rate"] == 0.25
    assert report.metrics["parse_error_rate"] == 0.25
    assert (report.metrics["unreadable_rate"], report.metrics["over_limit_rate"]) == (0, 0.25), "displays count it once"


async def test_a_failed_episode_is_wrong_and_reported():
    def breaks(question: str) -> str:
        if question == "q2":
            raise RuntimeError("server on fire")
        return "<a>yes</a>"

    report = await evaluate(quiz_engine(breaks), questions(FOUR))
    assert report.metrics["accuracy"] == 0.75
    assert report.metrics["failed_rate"] == 0.25 and report.metrics["num_failed"] == 1
    (failed,) = [outcome for outcome in report.outcomes if outcome.failure]
    assert failed.correct is False and failed.failure == "RuntimeError: server on fire"
    assert [r["failure"] for r in report.records if r["failed"]] == ["RuntimeError: server on fire"]
    assert failed.task == "quiz:2:2"


async def test_format_rewards_do_not_make_an_answer_right():
    report = await quiz(*["<a>no</a>"] * 4)  # the parser gives 0.1 for each
    assert report.metrics["accuracy"] == 0 and report.metrics["mean_reward"] == 0
    assert report.metrics["mean_total_reward"] == pytest.approx(0.1)


# --- samples, tasks, votes ---


async def test_samples_of_one_task_are_grouped():
    yes, no = "<a>yes</a>", "<a>no</a>"
    grading = Grading(pass_k=(1, 2), majority_k=(1, 3))
    # q0 3/3, q1 1/3, q2 0/3, q3 2/3
    report = await quiz(yes, yes, yes, yes, no, no, no, no, "?", yes, "?", yes, samples=3, grading=grading)
    metrics = report.metrics
    assert (metrics["num_tasks"], metrics["num_samples"]) == (4, 12)
    assert metrics["accuracy"] == metrics["pass@1"] == metrics["majority@1"] == pytest.approx(0.5)
    # of two samples of each: certain, 2/3 (1 − C(2,2)/C(3,2)), never, certain
    assert metrics["pass@2"] == pytest.approx((1 + 2 / 3 + 0 + 1) / 4)
    assert metrics["majority@3"] == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert metrics["pass@2_low"] < metrics["pass@2"] < metrics["pass@2_high"]
    assert metrics["accuracy_low"] < 0.5 < metrics["accuracy_high"]


async def test_a_k_beyond_the_samples_is_refused():
    with pytest.raises(ConfigError, match="only 2 samples per task"):
        await quiz(*["?"] * 8, samples=2, grading=Grading(pass_k=(4,)))


def test_a_k_of_zero_is_refused_before_anything_is_played():
    with pytest.raises(ConfigError, match=r"majority_k=\[0\]"):
        Grading(majority_k=[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("18", "18.0"),
        ("1,000", "1000"),
        ("$18", "18."),
        (" Yes ", "yes"),
        ("50\\%", "50 %"),
        ("-0.50", "-.5"),
        ("007", "7"),
    ],
)
def test_equivalent_answers_vote_together(one, other):
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"), [("5", ".5"), ("1,00", "100"), ("-3", "3"), ("1e3", "1000"), ("a b", "ab"), ("10", "1")]
)
def test_different_answers_vote_separately(one, other):
    assert canonical(one) != canonical(other)


# --- envs that grade by reward, or not at all ---


def counting_engine(replies) -> RolloutEngine:
    return RolloutEngine(
        env_registry={"counting": CountingEnv},
        protocol_registry={"single": lambda: SingleAgentProtocol(make_agent(ScriptedClient(replies)))},
    )


def counting(num: int = 2) -> list[RolloutRequest]:
    return [RolloutRequest(env=EnvSpec("counting"), protocol=ProtocolSpec("single")) for _ in range(num)]


async def test_without_a_verdict_the_env_reward_decides():
    engine = counting_engine(lambda request: "<a>inc</a>")
    report = await evaluate(engine, counting(), max_steps=3)
    assert report.metrics["accuracy"] == 1 and report.metrics["mean_turns"] == 3
    harder = await evaluate(engine, counting(), max_steps=3, grading=Grading(success_reward=1.5))
    assert harder.metrics["accuracy"] == 0


async def test_an_episode_that_runs_out_of_turns_is_wrong_and_truncated():
    report = await evaluate(counting_engine(lambda request: "<a>inc</a>"), counting(), max_steps=2)
    assert report.metrics["accuracy"] == 0 and report.metrics["truncation_rate"] == 1


async def test_an_env_without_a_notion_of_success_has_no_accuracy():
    ungraded = Grading(success_reward=None)
    report = await evaluate(counting_engine(lambda r: "<a>inc</a>"), counting(), max_steps=3, grading=ungraded)
    assert "accuracy" not in report.metrics and report.metrics["mean_reward"] == 1
    with pytest.raises(ConfigError, match="success_reward"):
        make_report([Rollout()], Grading(success_reward=None, pass_k=(1,)))


async def test_accuracy_is_zero_where_no_reply_of_any_episode_can_be_read():
    ungraded = Grading(success_reward=None)
    report = await evaluate(counting_engine(lambda request: "inc"), counting(), max_steps=2, grading=ungraded)
    assert report.metrics["accuracy"] == 0 and report.metrics["unreadable_rate"] == 1


async def test_a_failure_does_not_make_an_ungraded_env_a_graded_one():
    calls = iter(range(100))

    def breaks_once(request) -> str:
        if next(calls) < 2:
            raise RuntimeError("no")
        return "<a>inc</a>"

    report = await evaluate(
        counting_engine(breaks_once), counting(3), max_steps=3, concurrency=1, grading=Grading(success_reward=None)
    )
    assert report.metrics["num_failed"] == 1 and "accuracy" not in report.metrics


# --- games ---


class Coin(SingleAgentEnv):
    """Ends with the result that the reply names: win, draw, loss; anything else is illegal."""

    def env_reset(self, *, seed=None):
        return "call it", {}

    def env_step(self, action):
        legal = action in ("win", "draw", "loss")
        info = {"result": action if legal else None, "illegal_move": not legal}
        return StepOutcome("", {"win": 1.0, "draw": 0.5, "loss": 0.0}.get(action, -1.0), terminated=True, info=info)


async def test_results_of_games_are_shares_of_all_games():
    def protocol() -> SingleAgentProtocol:
        def parser(text: str) -> ParseResult:
            return ParseResult(None, -1.0, "what?") if text == "mumble" else raw_parser(text)

        return SingleAgentProtocol(make_agent(ScriptedClient(lambda request: next(script)), parser=parser))

    script = iter(["win", "win", "loss", "cheat", "mumble"])
    engine = RolloutEngine(env_registry={"coin": Coin}, protocol_registry={"single": protocol})
    requests = [RolloutRequest(env=EnvSpec("coin"), protocol=ProtocolSpec("single")) for _ in range(5)]
    _, metrics = await run_eval(engine, requests, concurrency=1)
    rates = [metrics[f"{name}_rate"] for name in ("win", "draw", "loss", "illegal_move", "parse_error")]
    assert rates == [0.4, 0.0, 0.2, 0.2, 0.2]
    assert metrics["win_rate_low"] < 0.4 < metrics["win_rate_high"]
    assert metrics["mean_reward"] == pytest.approx((1 + 1 + 0 - 1 + 0) / 5)


async def test_a_duel_is_one_sample_and_reports_each_player(caplog):
    def protocol() -> MultiAgentProtocol:
        def first_free(request) -> str:
            text = ByteTemplate().decode(request.prompt_token_ids)
            return text.rsplit("Free moves: ", 1)[1].split(",")[0].split("\n")[0].strip()

        return MultiAgentProtocol({m: make_agent(ScriptedClient(first_free), parser=raw_parser) for m in players})

    players = TicTacToeDuel().agent_ids
    engine = RolloutEngine(protocol_registry={"duel": protocol})
    requests = [
        RolloutRequest(env=EnvSpec("tic_tac_toe_duel"), protocol=ProtocolSpec("duel"), env_seed=s) for s in (1, 2)
    ]
    report = await evaluate(engine, requests, max_steps=9)
    metrics = report.metrics
    assert (metrics["num_tasks"], metrics["num_samples"], len(report.outcomes)) == (2, 2, 4)
    assert metrics["win_rate"] == metrics["loss_rate"] == 0.5
    assert metrics["mean_turns"] == 7  # the first free move wins after seven, of both players
    assert metrics["mean_reward"] == np.mean([metrics[f"{player}/mean_reward"] for player in players])
    assert abs(metrics[f"{players[0]}/mean_reward"]) == 1
    assert not [name for name in metrics if "pass@" in name or "majority@" in name]
    assert "pass@2" not in (await evaluate(engine, requests, grading=Grading(pass_k=(2,)), max_steps=9)).metrics
    assert "several roles" in caplog.text


# --- the evaluator a trainer holds ---


async def test_an_evaluator_asks_for_its_requests_and_takes_a_callers_settings():
    engine = quiz_engine(lambda question: "<a>yes</a>")
    evaluator = EngineEvaluator(engine, lambda: questions(FOUR))
    records, metrics = await evaluator.eval()
    assert len(records) == 4 and metrics["accuracy"] == 1
    records, metrics = await evaluator.eval(requests=questions(FOUR[:2]), concurrency=1, timeout_s=5.0)
    assert metrics["num_tasks"] == 2


async def test_every_evaluation_plays_the_same_episodes():
    requests = [RolloutRequest(env=EnvSpec("tic_tac_toe"), protocol=ProtocolSpec("single")) for _ in range(6)]
    seeds = []

    def remembering(request) -> str:
        seeds.append(request.seed)
        return "<a>a1</a>"

    engine = RolloutEngine(
        protocol_registry={"single": lambda: SingleAgentProtocol(make_agent(ScriptedClient(remembering)))}
    )
    evaluator = EngineEvaluator(engine, lambda: requests, max_steps=5)
    first, _ = await evaluator.eval(concurrency=1)
    num_calls = len(seeds)
    second, _ = await evaluator.eval(concurrency=1)
    assert seeds[:num_calls] == seeds[num_calls:]
    assert [r["opponent_move"] for r in first] == [r["opponent_move"] for r in second]


async def test_run_eval_sync_runs_inside_an_event_loop():
    """As in a notebook."""
    records, _ = run_eval_sync(quiz_engine(lambda question: "<a>yes</a>"), questions(FOUR))
    assert len(records) == len(FOUR)


def test_run_eval_sync_runs_without_an_event_loop():
    records, metrics = run_eval_sync(quiz_engine(lambda question: "<a>yes</a>"), questions(FOUR))
    assert metrics["accuracy"] == 1 and json.loads(json.dumps(records)) == records


async def test_on_rollouts_is_called_for_every_episode():
    seen: list[int] = []
    await evaluate(
        quiz_engine(lambda question: "<a>yes</a>"),
        questions(FOUR),
        on_rollouts=lambda rollouts: seen.append(len(rollouts)),
    )
    assert seen == [1] * 4


async def test_an_interrupted_evaluation_can_be_continued(tmp_path):
    path, asked = tmp_path / "rollouts.jsonl", []

    def answers(limit: int = 100):
        def answer(question: str) -> str:
            if len(asked) == limit:
                raise RuntimeError("the server is gone")
            asked.append(question)
            return "<a>yes</a>" if question != "q3" else "?"

        return answer

    dies = quiz_engine(answers(limit=2), jsonl_path=path, max_retries=0, max_failed_share=0)
    with pytest.raises(TooManyFailures):
        await evaluate(dies, questions(FOUR), concurrency=1)
    report = await evaluate(quiz_engine(answers(), jsonl_path=path, resume=True), questions(FOUR), concurrency=1)
    assert asked == ["q0", "q1", "q2", "q3"], "what was in the file is not played again"
    whole = await evaluate(quiz_engine(answers()), questions(FOUR), concurrency=1)
    assert report.metrics == whole.metrics


async def test_an_evaluation_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least one task"):
        await run_eval(quiz_engine(lambda question: ""), [])


def _won(role: str, episode: str) -> Rollout:
    meta = {"task_id": episode, "agent_id": role, "engine": {"episode_run": episode}}
    step = EnvironmentStep(
        id=f"{episode}.{role}", index=0, prev_obs="", action="", parsed_action="", next_obs="", source_agent_step_id="", agent_step_ids=[],
        reward=1.0, truncated=False, terminated=True, info={"correct": True},
    )  # fmt: skip
    return Rollout(id=f"{episode}.{role}", meta=meta, steps=[step])


def test_an_episode_that_failed_before_it_had_roles_counts_for_each_role():
    failed = Rollout.failed(RuntimeError("no"), meta={"task_id": "b", "engine": {"episode_run": "b"}})
    metrics = make_report([_won("X", "a"), _won("O", "a"), failed]).metrics
    assert (metrics["num_samples"], metrics["num_failed"], metrics["failed_rate"]) == (2, 1, 0.5)
    assert metrics["X/accuracy"] == metrics["O/accuracy"] == 0.5


def test_a_failure_after_an_episode_of_one_role_does_not_make_two_roles_of_it():
    failed = Rollout.failed(RuntimeError("on closing"), meta={"task_id": "a", "engine": {"episode_run": "a"}})
    metrics = make_report([failed, _won("X", "a"), _won("X", "b"), _won("X", "b")], Grading(pass_k=(1,))).metrics
    assert "pass@1" in metrics and "X/accuracy" not in metrics
