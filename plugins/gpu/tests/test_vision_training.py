"""Training on samples with pictures: padded rows give the loss and the gradient of one sample at a time."""

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="the vision extra is not installed")

from ludic.models.kinds import freeze_vision, image_processor_of
from ludic.run.model import make_template
from ludic.training.learner.gradients import accumulate_gradients, batch_facts
from ludic.training.learner.packing import fit_length
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import ActorTokenLogps, ConfigError, SampleAttachments, SAWItem, content_of
from ludic_envs.picture_grid import draw_grid
from ludic_gpu.tiny_vision import tiny_vision
from tests.unit.inference.local.tiny_models import new_model


def samples(made) -> list[SAWItem]:
    """Dialogues of one to three pictures of different sizes, and one without any."""
    template, rng = make_template(made.tokenizer), np.random.default_rng(0)
    items = []
    for number, grids in enumerate([[(3, 4)], [(2, 1), (3, 0)], [], [(4, 7), (2, 2), (3, 8)]]):
        messages = [{"role": "user", "content": "Begin."}]
        for size, cell in grids:
            picture = {"role": "user", "content": content_of("Which?", draw_grid(size, 8, cell))}
            messages += [{"role": "assistant", "content": "5"}, picture]
        prompt = template.apply(messages)
        reply = rng.integers(5, 60, size=3 + number)
        ids = np.concatenate([prompt.prompt_token_ids, reply]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt.prompt_token_ids)
        attached = SampleAttachments(
            actor_logps=ActorTokenLogps(rng.uniform(-5, -4.5, size=len(reply)).astype(np.float32)), images=prompt.images
        )
        items.append(SAWItem(ids, None, mask, float(rng.normal()), attachments=attached))
    return items


def gradient(items, *, budget: int, frozen: bool = False, model=None):
    made = tiny_vision(width=32, seed=2)
    if frozen:
        freeze_vision(made.model)
    policy = TrainedPolicy(made.model.train(), images=image_processor_of(made.tokenizer))
    facts = batch_facts(items)
    sums = accumulate_gradients(policy, TokenClippedSurrogateLoss(), items, micro_token_budget=budget, facts=facts)
    return {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}, sums.means()


def test_padded_rows_have_the_loss_and_gradient_of_one_sample_at_a_time():
    items = samples(tiny_vision(width=32))
    together, stats = gradient(items, budget=4096)
    single, single_stats = gradient(items, budget=max(len(item.input_ids) for item in items))
    assert stats["loss"] == pytest.approx(single_stats["loss"], rel=1e-5)
    assert together.keys() == single.keys() and any("visual" in name for name in together)
    for name, grad in together.items():
        torch.testing.assert_close(grad, single[name], rtol=1e-4, atol=1e-7, msg=name)


def test_a_frozen_vision_tower_gets_no_gradient_and_the_rest_the_same():
    items = samples(tiny_vision(width=32))
    whole, _ = gradient(items, budget=4096)
    frozen, _ = gradient(items, budget=4096, frozen=True)
    assert frozen.keys() == {name for name in whole if "visual" not in name}
    assert all(torch.equal(grad, whole[name]) for name, grad in frozen.items())


def test_a_cut_sample_keeps_whole_pictures_only():
    item = samples(tiny_vision(width=32))[3]
    item = SAWItem(
        item.input_ids,
        None,
        np.arange(len(item.input_ids)) % 2 == 1,
        1.0,
        attachments=SampleAttachments(images=item.attachments.images),
    )
    second = item.attachments.images[1]
    for length in (second.start + 1, second.end - 1):
        (cut,) = fit_length([item], length, "truncate").items
        assert len(cut.input_ids) == second.start and cut.attachments.images == item.attachments.images[:1]
    (cut,) = fit_length([item], second.end, "truncate").items
    assert len(cut.input_ids) == second.end and len(cut.attachments.images) == 2


def test_padding_before_a_sample_moves_its_pictures():
    item = samples(tiny_vision(width=32))[0]
    padded = SAWItem(
        np.concatenate([np.zeros(4, dtype=np.int32), item.input_ids]),
        np.arange(len(item.input_ids) + 4) >= 4,
        np.concatenate([np.zeros(4, dtype=bool), item.action_mask]),
        1.0,
        attachments=SampleAttachments(images=tuple(span.moved(4) for span in item.attachments.images)),
    )
    (found,) = fit_length([padded], 4096).items
    assert found.attachments.images == item.attachments.images


def test_a_model_of_text_refuses_samples_with_pictures():
    with pytest.raises(ConfigError, match="takes text only"):
        TrainedPolicy(new_model("llama")).batch(samples(tiny_vision(width=32)))
