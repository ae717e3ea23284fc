"""RL, imitation and distillation in one batch: through the model, the hooks and the trainer."""

from dataclasses import replace

import pytest
import torch

from ludic.batch_gen import MixedBatchSource, MixedPart, ReplayBatchSource, RolloutBatchSource
from ludic.training import (
    CheckpointConfig,
    Objective,
    make_dapo,
    make_grpo,
    make_opd,
    make_ppo,
    make_sft,
    mix_objectives,
)
from ludic.training.credit_assignment import ConstantCredit, EpisodicReturn, RoutedCredit
from ludic.training.learner.gradients import accumulate_gradients, batch_facts
from ludic.training.learner.packing import pack
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import ActorTokenLogps, ConfigError, SampleAttachments, SAWBatch, SAWItem
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.bandit import BanditRequests, bandit_trainer, rollout_engine
from tests.unit.training.hand_made import item, rollout
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow

PARTS = {
    "rl": Objective(algorithm=make_grpo(group_size=4)),
    "sft": Objective(algorithm=make_sft(), weight=0.3),
    "opd": Objective(algorithm=make_opd(), weight=2.0),
}
MIXED = mix_objectives(PARTS, default="rl")


def tagged_items():
    """Samples of the three objectives, in turn; a teacher has read the last kind."""
    tagged = []
    for number, one in enumerate(random_items([5, 9, 9, 17, 30, 2, 12, 7])):
        name = ("sft", "rl", "opd")[number % 3]
        if name == "opd":
            read = replace(one.attachments, teacher_logps=one.actor_logps - 0.1 * number)
            one = replace(one, attachments=read)
        tagged.append(one.with_origin(objective=name))
    return tagged


def mixed_items():
    return MIXED.preprocess(SAWBatch(items=tagged_items())).items


def gradient(loss, items, *, budget=4096, packed=True, shares=None):
    """Of the whole batch; with `shares`, each is computed by itself, as ranks do, and the gradients are summed."""
    model = new_model("llama", seed=0, initializer_range=0.1).requires_grad_(True)
    facts = batch_facts(items)
    for share in shares or [items]:
        accumulate_gradients(
            TrainedPolicy(model, packed=packed), loss, share, micro_token_budget=budget, facts=facts, watch_entropy=True
        )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert found.keys() == expected.keys() and any(float(grad.abs().max()) > 1e-3 for grad in expected.values())
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-5 * max(1.0, float(grad.abs().max()))), name


# --- the gradient ---


def test_the_gradient_is_the_weighted_sum_of_the_gradients_of_separate_batches():
    expected: dict[str, torch.Tensor] = {}
    for name, part in PARTS.items():
        own = SAWBatch(items=[one for one in tagged_items() if one.origin.objective == name])
        for parameter, grad in gradient(part.algorithm.loss, part.algorithm.preprocess(own).items).items():
            expected[parameter] = expected.get(parameter, 0.0) + part.weight * grad
    assert_same(gradient(MIXED.loss, mixed_items()), expected)


@pytest.mark.parametrize("settings", [{"budget": 30}, {"budget": 64}, {"packed": False, "budget": 40}], ids=str)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(settings):
    items = mixed_items()
    assert_same(gradient(MIXED.loss, items, **settings), gradient(MIXED.loss, items))


def test_the_gradient_does_not_depend_on_the_number_of_ranks():
    items = mixed_items()
    by_objective = [[one for one in items if one.origin.objective == name] for name in PARTS]
    for shares in ([items[::2], items[1::2]], by_objective, [items[:1], items[1:4], items[4:]]):
        assert_same(gradient(MIXED.loss, items, shares=shares), gradient(MIXED.loss, items))


def test_log_probs_may_be_missing_in_one_objective_but_not_within_one():
    known, unknown = random_items([6, 6])
    unknown = replace(unknown, attachments=SampleAttachments())
    fields = pack([known.with_origin(objective="rl"), unknown.with_origin(objective="sft")], "cpu").actions
    assert fields.without_old_logps == (1,) and fields.objectives == ("rl", "sft")
    assert fields.old_logp_A.isfinite().sum() == known.num_action_tokens
    with pytest.raises(ValueError, match=r"Samples \[1\] have no actor log-probs"):
        pack([known.with_origin(objective="rl"), unknown.with_origin(objective="rl")], "cpu")


# --- hooks and credit ---


def logps():
    return ActorTokenLogps([-0.5, -0.5])


def test_each_objective_preprocesses_its_own_samples():
    warm = SampleAttachments(actor_logps=logps(), temperature=0.6)
    rl = SAWItem([1, 2, 3], None, [0, 1, 1], 1.0, {}, warm)
    prepared = MIXED.preprocess(SAWBatch(items=[rl, rl.with_origin(objective="sft")], meta={"epoch": 3}))
    first, second = prepared.items
    assert (first.origin.objective, first.attachments.temperature) == ("rl", 0.6) and first.actor_logps is not None
    assert (second.origin.objective, second.attachments.temperature) == ("sft", None) and second.actor_logps is None
    assert prepared.meta == {"epoch": 3, "rl/num_samples": 1, "sft/num_samples": 1}
    with pytest.raises(ValueError, match="actor log-probs"):
        MIXED.preprocess(SAWBatch(items=[item(objective="rl")]))


def test_a_filter_of_one_objective_leaves_the_others_alone_and_reports_under_its_name():
    algo = mix_objectives({"rl": Objective(algorithm=make_dapo()), "sft": Objective(algorithm=make_sft())})
    flat = [item(1.0, logps=logps(), group_id="g", rollout_id=r, objective="rl") for r in "ab"]
    demos = [item(1.0, group_id="g", rollout_id=r, objective="sft") for r in "cd"]
    prepared = algo.preprocess(SAWBatch(items=[*flat, *demos]))
    assert [one.origin.objective for one in prepared.items] == ["sft", "sft"]
    assert prepared.meta["rl/zvp_filter_frac"] == 1.0 and prepared.meta["rl/num_samples"] == 0


def test_a_sample_of_an_unknown_objective_is_refused():
    algo = mix_objectives({"rl": Objective(algorithm=make_grpo())})
    with pytest.raises(ConfigError, match="objective None.*there are rl"):
        algo.preprocess(SAWBatch(items=[item(logps=logps())]))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="has a critic"):
        Objective(algorithm=make_ppo())
    with pytest.raises(ConfigError, match="weight=-1"):
        Objective(algorithm=make_sft(), weight=-1.0)
    with pytest.raises(ConfigError, match="default='x'; there are the objectives rl"):
        mix_objectives({"rl": Objective(algorithm=make_grpo())}, default="x")


def test_credit_follows_the_objective_that_a_request_names():
    credit = RoutedCredit({"rl": EpisodicReturn(), "sft": ConstantCredit(7.0)}, default="rl")
    plain, demo = rollout([3.0]), rollout([3.0])
    demo.meta["request_meta"]["objective"] = "sft"
    weights = credit.compute([plain, demo])
    assert {weights[plain.id, step.index] for step in plain.steps} == {3.0}
    assert {weights[demo.id, step.index] for step in demo.steps} == {7.0}


# --- training ---


def both(source, engine_of):
    """The bandit's rollouts, what earned the reward among others as demonstrations, and some of both once more."""
    demos = RolloutBatchSource(
        engine_of(),
        requests_fn=BanditRequests(32),
        algorithm=make_sft(),
        sample_filter=lambda one: one.origin.total_reward >= 1.0,
        max_steps=1,
        concurrency=64,
    )
    mixed = MixedBatchSource(
        [
            MixedPart(name="played", source=source, share=3, objective="rl"),
            MixedPart(name="demos", source=demos, share=1, objective="sft"),
        ]
    )
    return ReplayBatchSource(mixed, capacity=128, num_replayed=16, max_lag=4, half_life=2.0)


def trainer_of_both(**settings):
    client = []  # the engine is made with the trainer, before the first batch is asked for

    def later():
        class Later:
            rewards = None

            async def run_episodes(self, *arguments, **named):
                return await rollout_engine(client[0]).run_episodes(*arguments, **named)

            def scorer_metrics(self):
                return {}

        return Later()

    sizes = {"group_size": 4, "num_prompts": 12, **settings}
    trainer, engine = bandit_trainer(MIXED, make_source=lambda source: both(source, later), **sizes)
    client.append(engine)
    return trainer, engine


async def test_a_resumed_mixture_is_identical_to_the_bit(tmp_path):
    config = CheckpointConfig(output_dir=str(tmp_path), every_n_steps=3)
    small = {"group_size": 4, "num_prompts": 3}
    straight, engine = trainer_of_both(**small)
    for _ in range(6):
        await straight.train_step()
    engine.close()
    first, engine = trainer_of_both(**small, checkpoint_config=config)
    await first.train(3)
    engine.close()
    second, engine = trainer_of_both(**small, checkpoint_config=config, resume_from="latest")
    await second.train(3)
    engine.close()
    assert second.step == 6
    for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
