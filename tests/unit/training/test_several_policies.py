"""Two policies on one base: neither sees the other, each learns from its own games, and the run can be stopped and resumed."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("peft", reason="the lora extra is not installed")

from ludic.models.lora import adapters_on
from ludic.training import TrainerConfig, common_step, train_policies
from ludic.types import ConfigError, RequestsExhausted, ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic.util.stop import StopSignal
from tests.unit.training.bandit import tiny_llama
from tests.unit.training.two_players import players, trained_weights

pytestmark = pytest.mark.slow


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def sample(server, num: int = 3) -> list:
    """Tokens and log-probs of fixed requests."""

    async def ask() -> list:
        found = []
        for seed in range(num):
            request = TokenCompletionRequest(
                model="any",
                prompt_token_ids=np.array([120, 121, 5 + seed], dtype=np.int32),
                sampling=SamplingParams(temperature=1.0, max_tokens=8),
                return_=ReturnSpec.for_rl(),
                seed=seed,
            )
            response, _ = await server.complete_tokens(request)
            found.append((response.completion_token_ids.tolist(), response.completion_logprobs.tolist()))
        return found

    return asyncio.run(ask())


# --- one base ---


def test_policies_share_one_base_and_have_separate_adapters():
    base = tiny_llama()
    where = {p.data_ptr() for p in base.parameters()}
    with players(base=base) as table:
        for name, model in table.models.items():
            for server_model in (model, table.servers[name].model):
                frozen = {p.data_ptr() for p in server_model.parameters() if not p.requires_grad}
                assert frozen == where
        own = [{p.data_ptr() for p in m.parameters() if p.requires_grad} for m in table.models.values()]
        assert own[0] and own[1] and not own[0] & own[1]
        past = table.league.client(0).engine.model
        assert {p.data_ptr() for p in past.parameters() if not p.requires_grad} == where


def test_initial_adapter_values_depend_on_seed_and_position_only():
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules="all-linear")
    made = []
    for noise in (1, 2):
        base = tiny_llama()
        torch.manual_seed(noise)
        made.append({name: trained_weights(m) for name, m in adapters_on(base, ("a", "b"), config, seed=7).items()})
    assert same(made[0]["a"], made[1]["a"]) and same(made[0]["b"], made[1]["b"])
    assert not same(made[0]["a"], made[0]["b"])


def test_base_with_an_adapter_and_duplicate_names_are_refused():
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules="all-linear")
    base = tiny_llama()
    wrapped = adapters_on(base, ("a",), config)["a"]
    with pytest.raises(ConfigError, match="already has an adapter"):
        adapters_on(wrapped, ("b",), config)
    with pytest.raises(ConfigError, match="different names"):
        adapters_on(base, ("b", "b"), config)


# --- each policy sees only its own side ---


def test_training_one_policy_leaves_the_others_and_the_base_unchanged():
    base = tiny_llama()
    base_before = {name: p.detach().clone() for name, p in base.named_parameters()}
    with players(base=base) as table:
        weights, said = trained_weights(table.models["bob"]), sample(table.servers["bob"])
        ann_before, ann_said = trained_weights(table.models["ann"]), sample(table.servers["ann"])
        for _ in range(3):
            asyncio.run(table.trainers["ann"].train_step())
        assert same(trained_weights(table.models["bob"]), weights)
        assert same(dict(base.named_parameters()), base_before)
        assert sample(table.servers["bob"]) == said  # tokens and log-probs, bit for bit
        assert not same(trained_weights(table.models["ann"]), ann_before)
        assert sample(table.servers["ann"]) != ann_said
        assert (table.servers["ann"].version, table.servers["bob"].version) == (3, 0)


def test_training_one_policy_does_not_change_the_samples_of_another():
    with players() as table:
        alone = sample(table.servers["bob"])
        done = threading.Event()

        def train() -> None:
            for _ in range(4):
                asyncio.run(table.trainers["ann"].train_step())
            done.set()

        trainer = threading.Thread(target=train)
        trainer.start()
        meanwhile = []
        while not done.is_set() or not meanwhile:
            meanwhile.append(sample(table.servers["bob"]))
        trainer.join()
        assert all(said == alone for said in meanwhile)


def test_tokens_have_the_version_of_their_policy():
    with players() as table:
        for _ in range(2):
            asyncio.run(table.trainers["ann"].train_step())

        async def next_batches():
            return [await table.trainers[name].batch_source.next_batch() for name in ("ann", "bob")]

        ann, bob = asyncio.run(next_batches())
        assert {item.oldest_version for item in ann.items} == {2}
        assert {item.oldest_version for item in bob.items} == {0}


# --- together ---


def test_frozen_policys_turns_are_not_trained_on():
    seatings = [{"left": "ann", "right": "past"}]
    with players(seatings=seatings) as table:
        before = trained_weights(table.models["bob"])
        alone = {"ann": table.trainers["ann"]}
        stats = asyncio.run(train_policies(alone, 2))
        assert stats["ann/train/num_rollouts"] == 16  # 4 groups of 4 games, one seat each
        assert same(trained_weights(table.models["bob"]), before)


# --- a league ---


def test_league_keeps_versions_unchanged_and_drops_the_oldest():
    with players(league_every=1, league_size=2) as table:
        said = {0: sample(table.league.client(0))}
        for version in (1, 2, 3):
            asyncio.run(train_policies(table.trainers, 1))
            said[version] = sample(table.servers["bob"])
        assert table.league.versions == [2, 3]
        for version in (1, 2, 3):  # 1 has just gone, and may be in the middle of a game
            assert sample(table.league.client(version)) == said[version]
            assert table.league.client(version).version == version
        with pytest.raises(ConfigError, match=r"no member of version 0; it has \[2, 3\]"):
            table.league.client(0)
        assert said[3] != said[0]


def test_games_against_a_league_record_the_version():
    with players(seatings=[{"left": "ann", "right": "past"}], groups=20) as table:
        table.league.add(2)
        batch = asyncio.run(table.trainers["ann"].batch_source.next_batch())
        met = {item.meta["request_meta"]["policies"]["right"] for item in batch.items}
        assert met == {"past@0", "past@2"}
        assert {item.origin.policy for item in batch.items} == {"ann"}


def test_league_member_is_never_replaced():
    with players() as table, pytest.raises(ConfigError, match="already has a member of version 0"):
        table.league.add(0)


@pytest.mark.parametrize(("every", "max_size"), [(0, 1), (1, 0)])
def test_league_size_below_1_is_refused(every, max_size):
    from ludic.inference.local.snapshot import League

    with pytest.raises(ConfigError, match="at least 1"):
        League(None, every=every, max_size=max_size)


# --- stop and resume ---


def test_stop_during_games_ends_all_trainers_at_one_step(tmp_path):
    with players(folder=tmp_path) as table:
        stop = StopSignal()
        run = table.shared.run_round
        rounds = []

        async def run_round() -> None:
            rounds.append(1)
            if len(rounds) == 3:
                stop.set("in the middle")
            await run()

        table.shared.run_round = run_round
        asyncio.run(train_policies(table.trainers, 10, stop=stop))
        assert [trainer.step for trainer in table.trainers.values()] == [2, 2]
    assert common_step([tmp_path / "ann", tmp_path / "bob"]) == 2


class BrokenEvaluator:
    """An evaluator in the background that fails."""

    def take_snapshot(self, version: int) -> None:
        pass

    async def eval(self, **settings):
        raise OSError("the evaluation is broken")


@pytest.mark.parametrize("best_metric", [None, "eval/mean_reward"])
@pytest.mark.slow
def test_failed_last_evaluation_is_raised_after_all_policies_are_saved(tmp_path, best_metric):
    cfg = TrainerConfig(eval_every_n_steps=1, eval_in_background=True)
    with players(folder=tmp_path) as table:
        for trainer in table.trainers.values():
            saves = trainer.checkpointer
            saves.config = replace(saves.config, best_metric=best_metric)
        with pytest.raises(OSError, match="evaluation is broken"):
            asyncio.run(train_policies(table.trainers, 1, evaluator=BrokenEvaluator(), cfg=cfg))
    assert common_step([tmp_path / "ann", tmp_path / "bob"]) == 1


def test_run_killed_between_two_saves_resumes_at_the_common_step(tmp_path):
    with players(folder=tmp_path, every_n_steps=1) as table:
        asyncio.run(train_policies(table.trainers, 2))
        asyncio.run(table.trainers["ann"].train_step())  # and bob is killed before its step
    assert common_step([tmp_path / "ann", tmp_path / "bob"]) == 2
    with players(folder=tmp_path, every_n_steps=1, resume_from=2) as table:
        asyncio.run(train_policies(table.trainers, 1))
        assert [trainer.step for trainer in table.trainers.values()] == [3, 3]


def test_requests_that_run_out_within_a_round_are_reported(caplog):
    """Bob is at the table in every third game, and one game is a round: in its last one it is not, and there is no more."""
    seatings = [{"left": "ann", "right": "bob"}, *[{"left": "ann", "right": "past"}] * 2]
    with players(seatings=seatings, groups=1) as table:
        run, rounds = table.shared.run_round, []

        async def run_round() -> None:
            rounds.append(1)
            if len(rounds) > 9:
                raise RequestsExhausted("no more games")
            await run()

        table.shared.run_round = run_round
        asyncio.run(train_policies(table.trainers, 40))
        steps = {name: trainer.step for name, trainer in table.trainers.items()}
    assert steps["ann"] == steps["bob"] + 1
    assert f"ended at different steps, {steps}" in caplog.text


# --- mistakes ---


def test_trainers_at_different_steps_are_refused():
    with players() as table:
        asyncio.run(table.trainers["ann"].train_step())
        with pytest.raises(ConfigError, match=r"'ann': 1, 'bob': 0.*common_step"):
            asyncio.run(train_policies(table.trainers, 1))


def test_trainers_set_to_evaluate_are_refused():
    with players() as table:
        table.trainers["bob"].cfg = TrainerConfig(eval_every_n_steps=2)
        with pytest.raises(ConfigError, match="trainer of 'bob' is set to evaluate"):
            asyncio.run(train_policies(table.trainers, 1))


def test_train_policies_without_trainers_is_refused():
    with pytest.raises(ConfigError, match="at least one trainer"):
        asyncio.run(train_policies({}, 1))
