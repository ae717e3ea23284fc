"""Metrics, filters, curricula and evaluation with several threads per episode: a session counts once, with its whole reward."""

import pytest

from ludic.batch_gen import DynamicSampling, OfflineBatchSource, RolloutBatchSource, RolloutEngine
from ludic.batch_gen.build_batch import BatchBuilder
from ludic.batch_gen.episodes import Episode, EpisodePlan, FailureLimit
from ludic.batch_gen.requests.curriculum import UniformCurriculum
from ludic.eval import outcomes_of
from ludic.eval.ratings import matches_of
from ludic.interaction import InteractionProtocol
from ludic.training.credit_assignment import EpisodeCredit, EpisodicReturn, GroupNormalizedReturn
from ludic.training.critic.gae import TokenGAE
from ludic.training.filters import filter_zero_variance_groups, keep_few_per_group, keep_rewarded
from ludic.training.learner.gradients import batch_facts
from ludic.training.learner.metrics import batch_stats
from ludic.types import ConfigError, Rollout, SAWBatch, by_session, save_rollouts
from ludic_serve.gateway.threads import session_rollouts
from plugins.serve.tests.sessions import ask, assistant, make_session, user
from tests.unit.batch_gen.parts import SeededEnv, request
from tests.unit.training.hand_made import rollout, session

GRPO = EpisodeCredit(GroupNormalizedReturn(2))


def episode(rollouts, index=0, group="g"):
    meta = {"group_id": group}
    return Episode(
        plan=EpisodePlan(index=index, request=request(meta=meta), env_seed=0, sampling_seed=0), rollouts=rollouts
    )


def two_sessions():
    """Three threads that earned 1 in all, 0.25 of it by a call of a thread; one that earned 0."""
    return session(0.75, [0, 5], [1, 2], [3], call_rewards={2: 0.25}), session(0.0, [0])


def built(*sessions, credit=GRPO):
    return BatchBuilder(credit_assigner=credit).batch([episode(own, n) for n, own in enumerate(sessions)])


# --- which rollouts are one ---------------------------------------------------------------------------------


def test_a_session_is_its_main_rollout_and_its_threads_whatever_their_order():
    (a, *threads), (b,) = two_sessions()
    assert by_session([threads[1], a, threads[0], b]) == [[a, threads[1], threads[0]], [b]]
    assert all(thread.is_thread and thread.group == a.group for thread in threads) and not a.is_thread


# --- averages and metrics -----------------------------------------------------------------------------------


def test_averages_of_a_batch_are_over_sessions():
    batch = built(*two_sessions())
    # (1 + 0) / 2; calls: 5 and 1; sessions: 2; one item per call
    wanted = {"avg_total_reward": 0.5, "avg_turns": 3.0, "num_rollouts": 2, "num_samples": 6, "num_failed": 0}
    assert {name: batch.meta[name] for name in wanted} == wanted
    assert {item.weight for item in batch.items} == {0.5, -0.5}
    assert not any(name.startswith("gateway/") for name in batch.meta)


def test_kinds_of_calls_are_shares_of_all_calls_of_a_batch():
    first, second = two_sessions()
    first[0].meta["gateway"] = {"calls": 6, "new": 1, "continued": 3, "healed": 1, "forked": 1}
    second[0].meta["gateway"] = {"calls": 2, "new": 1, "healed": 1, "undelivered": 1}
    batch = built(first, second)
    stats = {name: value for name, value in batch_stats(batch.items, batch.meta).items() if name.startswith("gateway/")}
    expected = {"calls": 4.0, "healed_rate": 0.25, "forked_rate": 0.125, "undelivered_rate": 0.125}
    none = dict.fromkeys(("rerendered_rate", "foreign_rate", "retried_rate", "failed_rate", "limited_rate"), 0.0)
    assert stats == {f"gateway/{name}": value for name, value in (expected | none).items()}


def test_the_trainers_statistics_are_over_sessions():
    stats = batch_stats(built(*two_sessions()).items)
    assert (stats["avg_total_reward"], stats["total_reward_std"], stats["num_rollouts"]) == (0.5, 0.5, 2.0)
    assert stats["num_samples"] == 6.0


def test_delegated_sub_tasks_count_as_before():
    child = rollout([0.0], delegate="searcher", parent_step_id="s", engine={"episode_run": "e"}, model="p")
    parent = rollout([1.0], engine={"episode_run": "e"}, model="p")
    batch = built([parent, child], credit=EpisodicReturn())
    assert (batch.meta["avg_total_reward"], batch.meta["num_rollouts"]) == (0.5, 2)
    assert batch_stats(batch.items)["avg_total_reward"] == 0.5


# --- groups without spread ----------------------------------------------------------------------------------


class Recorded(InteractionProtocol):
    """Returns the next of the given sessions."""

    def __init__(self, sessions):
        super().__init__()
        self.sessions = sessions

    async def run(self, **_):
        return self.sessions.pop(0)


@pytest.mark.parametrize(
    ("rewards", "is_kept"),
    [((1.0, 1.0), False), ((0.0, 0.0), False), ((1.0, 0.0), True)],
)
async def test_dynamic_sampling_compares_sessions_not_threads(rewards, is_kept):
    played = [session(reward, [0, 3], [1], run="x") for reward in rewards]
    for own in (thread for threads in played for thread in threads):
        del own.meta["engine"], own.meta["request_meta"]  # the engine writes them
    engine = RolloutEngine(env_registry={"seeded": SeededEnv}, protocol_registry={"single": lambda: Recorded(played)})
    requests = [request(meta={"group_id": "g"}), request(meta={"group_id": "g"})]
    source = RolloutBatchSource(
        engine, requests_fn=lambda: requests, credit_assigner=GRPO, dynamic_sampling=DynamicSampling(max_rounds=1),
        concurrency=1,
    )  # fmt: skip
    batch = await source.next_batch()
    assert batch.meta["num_zero_variance_groups"] == (0 if is_kept else 1)
    assert len(batch.items) == (6 if is_kept else 0)


def test_a_group_is_flat_if_its_sessions_are_and_not_if_two_threads_of_one_are():
    differ = built(session(1.0, [0, 3], [1], [2]), session(0.0, [0]))
    assert len(filter_zero_variance_groups(SAWBatch(items=differ.items)).items) == len(differ.items)
    alike = built(session(1.0, [0, 3], [1], [2]), session(1.0, [0]))
    assert filter_zero_variance_groups(SAWBatch(items=alike.items)).items == []


def test_rejection_goes_by_the_reward_of_the_session():
    batch = built(*two_sessions())
    kept = keep_rewarded(SAWBatch(items=batch.items), min_reward=1.0).items
    assert len(kept) == 5 and {item.weight for item in kept} == {0.5}
    assert keep_few_per_group(SAWBatch(items=batch.items), max_rollouts=1).items == kept


# --- curricula, failures, evaluation ------------------------------------------------------------------------


def test_a_curriculum_counts_a_session_once():
    curriculum = UniformCurriculum([request(), request()], batch_size=1)
    won, lost = two_sessions()
    for own in (*won, *lost):
        own.meta["request_meta"]["task_index"] = 1
    curriculum.observe([*won, *lost])
    assert curriculum.num_seen == [0, 2] and curriculum.success_rates[1] == 0.5


def test_a_failed_session_is_one_failure_and_a_failed_thread_none():
    main, thread = session(1.0, [0], [1])
    limit = FailureLimit(1.0, num_episodes=4)
    limit.count(episode([Rollout.failed(RuntimeError("killed"), meta=main.meta), thread]))
    limit.count(episode([main, Rollout.failed(RuntimeError("cut"), meta=thread.meta)]))
    assert limit.num_failed == 1


def test_evaluation_has_one_outcome_per_session():
    won, lost = two_sessions()
    assert [outcome.rollout_id for outcome in outcomes_of([*won, *lost])] == [won[0].id, lost[0].id]


def test_a_match_is_decided_by_the_main_rollouts():
    x, *thread = session(1.0, [0], [1], run="e", agent_id="X")
    (o,) = session(0.5, [0], run="e", agent_id="O")
    for own in (x, *thread, o):
        own.meta["policies"] = {"X": "a", "O": "b"}
    (match,) = matches_of([x, o, *thread], ("X", "O"))
    assert (match.first, match.second, match.score) == ("a", "b", 1.0)


def test_a_critic_refuses_threads():
    items = built(*two_sessions()).items
    with pytest.raises(ConfigError, match="EpisodeCredit"):
        TokenGAE().credit(items, [[0.0]] * len(items))


# --- as the gateway writes them ---


async def test_threads_of_a_real_session_get_its_advantage_and_weigh_as_one_episode():
    episodes = []
    for number, reward in enumerate([1.0, 0.0]):
        played = make_session(["plan", "look", "answer"])
        reply = await ask(played, user("task"))
        if number == 0:
            await ask(played, user("another task"))  # a sub-agent
        await ask(played, user("task"), assistant(reply), user("go on"))
        meta = {"agent_id": "agent", "request_meta": {"group_id": "g"}, "engine": {"episode_run": f"run {number}"}}
        episodes.append(session_rollouts(played, reward=reward, meta=meta))
    assert [len(threads) for threads in episodes] == [2, 1]
    batch = built(*episodes)
    assert sorted((item.origin.episode, item.weight) for item in batch.items) == [
        ("run 0", 0.5), ("run 0", 0.5), ("run 1", -0.5),
    ]  # fmt: skip
    facts = batch_facts(batch.items)
    assert facts.num_episodes == 2 and facts.num_items == 3
    assert facts.episode_tokens == {"run 0": len(b"planlookanswer") + 3, "run 1": len(b"planlook") + 2}


# --- from a file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "g"])
async def test_a_file_gives_the_threads_of_a_session_together(tmp_path, group):
    won, lost = session(1.0, [0, 3], [1], [2], group=group), session(-1.0, [0], [1], group=group)
    failed = session(5.0, [0], [1], group=group)
    failed[0] = Rollout.failed(RuntimeError("killed"), meta=failed[0].meta)
    save_rollouts([*won, *failed, *lost], tmp_path / "r.jsonl")
    source = OfflineBatchSource(
        tmp_path / "r.jsonl", credit_assigner=EpisodeCredit(EpisodicReturn()), batch_size=6, chunk_rollouts=1
    )
    batch = await source.next_batch()
    assert source.num_rollouts == 5
    assert sorted(item.weight for item in batch.items) == [-1.0, -1.0, 1.0, 1.0, 1.0, 1.0]
