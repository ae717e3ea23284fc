"""`ludic train picture_grid`: one update of a small vision-language model, and its checkpoint as the model of another run."""

import pytest
import torch

pytest.importorskip("PIL", reason="the vision extra is not installed")

from ludic.models.kinds import image_processor_of
from ludic.run import build
from ludic.run.config.model import ModelSettings
from ludic.run.dry_run import num_parameters
from ludic.run.model import load_policy, make_template
from ludic.types import ConfigError, content_of, load_rollouts
from ludic_envs.picture_grid import draw_grid
from ludic_gpu.tiny_vision import save_tiny_vision
from ludic_gpu.vision import VisionTemplate

pytestmark = pytest.mark.slow


def test_an_update_changes_the_weights_and_the_checkpoint_keeps_the_image_processor(tmp_path):
    folder = save_tiny_vision(tmp_path / "model", width=32)
    run = build(
        env="picture_grid",
        set={"size": 2, "cell_pixels": 8},
        model=str(folder),
        runs=tmp_path,
        name="looks",
        steps=1,
        rollouts_per_update=8,
        group_size=4,
        max_tokens=1,
        lr=1e-2,
        logger=(),
        checkpoint_every=1,
        entropy_bonus=0.1,  # a gradient also where no reply is right
        algo="reinforce",
    )
    with run:
        run.train()
    (file,) = (tmp_path / "looks" / "rollouts").iterdir()
    rollouts = list(load_rollouts(file))
    assert len(rollouts) == 8 and all(len(step.trace.images) == 1 for r in rollouts for step in r.agent_steps)
    before = load_policy(ModelSettings(model=str(folder), device="cpu"))
    after = load_policy(ModelSettings(model=str(tmp_path / "looks"), device="cpu"))
    assert image_processor_of(after.tokenizer) is not None
    template = make_template(after.tokenizer)
    assert isinstance(template, VisionTemplate)
    assert template.apply([{"role": "user", "content": content_of(draw_grid(2, 8, 0))}]).images[0].length == 4
    changed = [
        name
        for (name, a), b in zip(before.model.named_parameters(), after.model.parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    assert any("visual" in name for name in changed) and any("language_model" in name for name in changed)


def test_a_dry_run_counts_the_parameters_of_the_vision_tower_too(tmp_path):
    folder = save_tiny_vision(tmp_path / "model", width=32)
    model = load_policy(ModelSettings(model=str(folder), device="cpu")).model
    number = f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
    assert num_parameters(ModelSettings(model=str(folder))) == number


@pytest.mark.slow
def test_a_dry_run_of_a_model_that_writes_no_text_says_so(tmp_path):
    folder = save_tiny_vision(tmp_path / "model", width=32)
    (folder / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match=r"Cannot make a model of .*: Unrecognized configuration class"):
        num_parameters(ModelSettings(model=str(folder)))


@pytest.mark.parametrize("name", ["Mistral3Config", "Qwen3VLConfig", "Glm4vConfig", "SmolVLMConfig"])
def test_a_family_whose_pictures_are_unknown_is_refused_in_one_sentence(name, tmp_path):
    import transformers

    folder = save_tiny_vision(tmp_path / "model", width=32)
    config = getattr(transformers, name)()
    config.save_pretrained(folder)
    said = f"does not know how a model of type '{config.model_type}' takes pictures; it knows qwen2_vl and qwen2_5_vl"
    for work in (num_parameters, lambda settings: load_policy(settings)):
        with pytest.raises(ConfigError, match=said):
            work(ModelSettings(model=str(folder), device="cpu"))
