"""Stored rollouts with other rewards, and training on them."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from ludic.batch_gen import GRPORequestStrategy, OfflineBatchSource
from ludic.rewards import Rewards, as_scorer
from ludic.types import ConfigError, load_rollouts
from ludic_judges.rescoring import Rescored, RescoredRollout, rescore
from tests.unit.batch_gen.parts import TotalReward, make_engine, request


def says_odd(rollout) -> float:
    return float("odd" in rollout.steps[0].action)


def rank(rollouts) -> list[float]:
    """The place among the siblings."""
    return [float(place) for place, _ in enumerate(rollouts)]


async def play(path: Path, **settings) -> None:
    requests = GRPORequestStrategy(4, seed=3).expand([request() for _ in range(5)])
    await make_engine(jsonl_path=path, max_retries=0, **settings).generate_rollouts(
        [*requests, request(env={"fail_on": 1})], max_steps=1
    )


async def test_the_new_file_has_the_same_episodes_with_other_rewards(tmp_path: Path):
    old, new = tmp_path / "old.jsonl.gz", tmp_path / "rescored" / "new.jsonl.gz"
    await play(old)
    text, seen = old.read_bytes(), []
    rewards = Rewards([as_scorer(says_odd)], {"env": 0.0, "parser": 0.0, "says_odd": 2.0})
    found = await rescore([old], new, rewards, chunk_rollouts=3, on_progress=lambda *n: seen.append(n))
    before, after = list(load_rollouts(old)), list(load_rollouts(new))
    assert old.read_bytes() == text and seen[-1] == (21, 21) and len(seen) > 2
    assert {r.id for r in before} == {r.id for r in after} and [r.id for r in after if r.failure] == [before[-1].id]
    groups = list(dict.fromkeys(r.group_id for r in before))
    assert [r.id for r in after] == [r.id for r in sorted(before, key=lambda r: groups.index(r.group_id))]
    for rollout in after[:-1]:
        assert rollout.total_reward == 2.0 * says_odd(rollout) and rollout.scores["says_odd"] == says_odd(rollout)
        assert rollout.engine_facts["request_key"] is None
    assert (len(found.rollouts), found.num_failed, found.num_skipped) == (20, 0, 1)
    assert found.before == pytest.approx(sum(r.total_reward for r in before[:-1]) / 20)
    assert found.after == pytest.approx(sum(2 * says_odd(r) for r in before[:-1]) / 20)
    assert [path.name for path in new.parent.iterdir()] == ["new.jsonl.gz"]


async def test_scores_of_an_earlier_run_are_removed(tmp_path: Path):
    first, second, third = (tmp_path / f"{number}.jsonl" for number in range(3))
    await play(first)
    await rescore([first], second, Rewards([as_scorer(says_odd)], {"env": 0.5}))
    await rescore([second], third, Rewards([as_scorer(rank)]))
    plain = {r.id: r.total_reward for r in load_rollouts(first)}
    places: dict[str, int] = {}
    for rollout in load_rollouts(third):
        if rollout.failure is None:
            place = places[rollout.group_id] = places.get(rollout.group_id, -1) + 1
            assert rollout.total_reward == plain[rollout.id] + place
            assert "rank" in rollout.scores and "says_odd" not in rollout.scores


async def test_a_scorer_that_raises_fails_its_rollouts_and_nothing_else(tmp_path: Path):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    await play(old)

    def picky(rollout) -> float:
        if says_odd(rollout):
            raise RuntimeError("I do not like odd.")
        return 1.0

    found = await rescore([old], new, Rewards([as_scorer(picky)]))
    odd = {r.id for r in load_rollouts(old) if r.steps and says_odd(r) and r.failure is None}
    failed = {r.id for r in load_rollouts(new) if r.failure is not None and "odd" in r.failure.message}
    assert (
        odd == failed
        and found.num_failed == len(odd)
        and found.failures == {"RuntimeError: I do not like odd.": len(odd)}
    )
    assert OfflineBatchSource(new, credit_assigner=TotalReward()).num_rollouts == 20 - len(odd)
    groups = Counter(r.group_id for r in load_rollouts(new) if r.failure is None)
    whole = OfflineBatchSource(new, credit_assigner=TotalReward(), group_size=2)
    assert whole.num_rollouts == 2 * list(groups.values()).count(2) > 0, "incomplete groups are left out"
    with pytest.raises(ConfigError, match="No group of the rollouts has group_size = 9"):
        OfflineBatchSource(new, credit_assigner=TotalReward(), group_size=9)


async def test_what_is_stopped_in_the_middle_leaves_the_old_result(tmp_path: Path):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    await play(old)
    new.write_text("an earlier result\n")

    async def slow(rollout) -> float:
        await asyncio.sleep(60)
        return 0.0

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rescore([old], new, Rewards([as_scorer(slow)])), 0.1)
    assert new.read_text() == "an earlier result\n"
    await rescore([old], new, Rewards([as_scorer(says_odd)]))
    assert len(list(load_rollouts(new))) == 21
    with pytest.raises(ConfigError, match="no file"):
        await rescore([tmp_path / "none.jsonl"], new, Rewards([]))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no rollouts"):
        await rescore([tmp_path / "empty.jsonl"], new, Rewards([]))


def test_the_numbers_are_what_is_worked_out_by_hand():
    def one(group, before, after):
        return RescoredRollout(group=group, before=before, after=after, correct=None, scores={})

    found = Rescored(
        [one("g", 0.0, 0.1), one("g", 1.0, 0.9), one("g", 0.0, 0.2), one("h", 1.0, 0.3), one("h", 0.0, 0.4)]
    )
    assert found.before == pytest.approx(0.4) and found.after == pytest.approx(0.38)
    assert found.same_order == (2, 3)  # in g two of two (the third pair is tied before), in h none of one
    assert found.correlation == pytest.approx(0.64483, abs=1e-4)
    assert Rescored([one("g", 1.0, 0.1), one("g", 1.0, 0.9)]).correlation is None


async def test_an_update_on_rescored_rollouts_has_other_gradients(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="the train extra is not installed")
    from ludic.training import Trainer, TrainerConfig, make_grpo
    from tests.unit.training.bandit import tiny_llama

    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    await play(old)
    await rescore([old], new, Rewards([as_scorer(says_odd)], {"env": 0.0, "parser": 0.0}))
    changes = []
    for path in (old, new, new):
        model, algorithm = tiny_llama(), make_grpo(group_size=4)
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        source = OfflineBatchSource(path, algorithm=algorithm, batch_size=20, seed=0)
        trainer = Trainer(model=model, algo=algorithm, batch_source=source, cfg=TrainerConfig(lr=1e-2, eps=1.0))
        await trainer.train(1)
        changes.append(
            torch.cat([(value.detach() - start[name]).flatten() for name, value in model.named_parameters()])
        )
    assert all(change.norm() > 0 for change in changes)
    assert torch.equal(changes[1], changes[2]) and not torch.allclose(changes[0], changes[1])
