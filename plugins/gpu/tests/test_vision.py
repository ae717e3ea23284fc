"""A vision-language model's decoder with pictures: equal to transformers' own forward pass, row by row and from a folder."""

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="the vision extra is not installed")

from ludic.models.kinds import freeze_vision, image_processor_of, is_vision_model
from ludic.models.loading import load_model
from ludic.models.lora import dense_parameters
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_policy, load_tokenizer, make_template
from ludic.types import ConfigError, ImageSpan, content_of
from ludic_envs.picture_grid import draw_grid
from ludic_gpu.tiny_vision import save_tiny_vision, tiny_vision
from ludic_gpu.vision import Pictures, VisionDecoder
from ludic_vllm.publish.transfer import without_values
from tests.tiny_families import family_model


@pytest.fixture(scope="module")
def made():
    return tiny_vision(width=32, seed=1)


def rendered(made, *grids):
    """The tokens and pictures of a dialogue with a picture per turn."""
    template = make_template(made.tokenizer)
    messages = []
    for number, (size, cell) in enumerate(grids):
        messages += [{"role": "assistant", "content": "1"}] if number else []
        messages.append({"role": "user", "content": content_of("Which?", draw_grid(size, 8, cell))})
    return template.apply(messages)


def plain_hidden(model, pictures, ids, images):
    """transformers' own forward pass of one row."""
    ids_BL = torch.from_numpy(np.array(ids)).long()[None]
    pixels = {}
    if images:
        found = [pictures.pixels(span.image) for span in images]
        pixels = {
            "pixel_values": torch.cat([p for p, _ in found]),
            "image_grid_thw": torch.stack([g for _, g in found]),
        }
    kinds = (ids_BL == model.config.image_token_id).int()
    return model.model(input_ids=ids_BL, mm_token_type_ids=kinds, attention_mask=torch.ones_like(ids_BL), **pixels)


@torch.no_grad()
def test_rows_of_different_lengths_and_pictures_equal_transformers_own_forward(made):
    pictures = Pictures(image_processor_of(made.tokenizer))
    decoder = VisionDecoder(made.model, pictures)
    prompts = [rendered(made, (3, 4)), rendered(made, (2, 1), (4, 9), (3, 0)), rendered(made, (4, 15), (2, 0))]
    text = make_template(made.tokenizer).apply([{"role": "user", "content": "No picture here."}])
    rows = [(p.prompt_token_ids, p.images) for p in [*prompts, text]]
    longest = max(len(ids) for ids, _ in rows)
    ids_BL, mask_BL = (
        torch.zeros(len(rows), longest, dtype=torch.long),
        torch.zeros(len(rows), longest, dtype=torch.long),
    )
    for row, (ids, _) in enumerate(rows):
        ids_BL[row, : len(ids)] = torch.from_numpy(np.array(ids))
        mask_BL[row, : len(ids)] = 1
    hidden_BLD = decoder.hidden(ids_BL, mask_BL, [images for _, images in rows])
    for row, (ids, images) in enumerate(rows):
        expected = plain_hidden(made.model, pictures, ids, images).last_hidden_state[0]
        torch.testing.assert_close(hidden_BLD[row, : len(ids)], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_picture_changes_what_follows_it_and_a_sampled_placeholder_is_a_plain_token(made):
    pictures = Pictures(image_processor_of(made.tokenizer))
    decoder = VisionDecoder(made.model, pictures)
    one, other = rendered(made, (3, 4)), rendered(made, (3, 5))
    assert np.array_equal(one.prompt_token_ids, other.prompt_token_ids)
    placeholder = made.model.config.image_token_id
    ids_BL = torch.tensor([[*one.prompt_token_ids.tolist(), placeholder, 7]] * 2)
    hidden_BLD = decoder.hidden(ids_BL, torch.ones_like(ids_BL), [one.images, other.images])
    start, end = one.images[0].start, one.images[0].end
    assert torch.equal(hidden_BLD[0, :start], hidden_BLD[1, :start])
    assert not torch.allclose(hidden_BLD[0, end:], hidden_BLD[1, end:])
    longer = decoder.inputs(ids_BL, [one.images, other.images])[1]
    assert (longer[:, 0, -1] - longer[:, 0, -2] == 1).all()


def test_a_span_that_does_not_fit_its_picture_is_refused(made):
    decoder = VisionDecoder(made.model, Pictures(image_processor_of(made.tokenizer)))
    wrong = ImageSpan(draw_grid(3, 8, 0), 1, 4)
    with pytest.raises(ConfigError, match="9 embeddings, but 4"):
        decoder.inputs(torch.zeros(1, 20, dtype=torch.long), [[wrong]])
    with pytest.raises(ConfigError, match="no image processor"):
        VisionDecoder(made.model, None).inputs(torch.zeros(1, 20, dtype=torch.long), [[wrong]])


def test_a_folder_gives_the_model_its_tokenizer_and_its_image_processor(tmp_path):
    folder = str(save_tiny_vision(tmp_path / "model", width=32, seed=3))
    loaded = load_model(folder, device="cpu", dtype=torch.float32)
    made = tiny_vision(width=32, seed=3)
    assert is_vision_model(loaded.model)
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), made.model.parameters(), strict=True))
    image = draw_grid(3, 8, 4)
    for tokenizer in (loaded.tokenizer, load_tokenizer(ModelSettings(model=folder))):
        pixels, grid = Pictures(image_processor_of(tokenizer)).pixels(image)
        expected = Pictures(image_processor_of(made.tokenizer)).pixels(image)
        assert torch.equal(pixels, expected[0]) and torch.equal(grid, expected[1])


def test_an_adapter_is_put_on_the_language_part_and_the_vision_tower_can_be_frozen(tmp_path):
    pytest.importorskip("peft", reason="the lora extra is not installed")
    folder = str(save_tiny_vision(tmp_path / "model", width=32))
    adapted = load_policy(ModelSettings(model=folder, lora_rank=2, device="cpu")).model
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained and all("language_model" in name for name in trained)
    frozen = load_policy(ModelSettings(model=folder, freeze_vision=True, device="cpu")).model
    fixed = [name for name, parameter in frozen.named_parameters() if not parameter.requires_grad]
    assert fixed and all("visual" in name for name in fixed)
    assert not any("visual" in name for name, p in frozen.named_parameters() if p.requires_grad)
    with pytest.raises(ConfigError, match="no vision tower"):
        freeze_vision(load_model("tiny", device="cpu").model)


def test_a_vllm_worker_expects_the_weights_that_the_trainer_has():
    for trained in (tiny_vision(width=32).model, load_model("tiny", device="cpu").model):
        expected = without_values(trained.config)
        assert type(expected) is type(trained)
        shapes = {name: tuple(weight.shape) for name, weight in expected.named_parameters()}
        assert shapes == {name: tuple(weight.shape) for name, weight in dense_parameters(trained)}
        assert all(weight.is_meta for weight in expected.parameters())


def test_a_vllm_worker_knows_a_config_whose_rope_vllm_has_renamed():
    """vLLM does so in DeepSeek-V3's config."""
    trained = family_model("deepseek_v3")
    renamed = {**trained.config.rope_parameters, "rope_type": "deepseek_yarn"}
    config = copy.copy(trained.config)
    config.rope_parameters = renamed
    expected = without_values(config)
    assert [name for name, _ in expected.named_parameters()] == [name for name, _ in trained.named_parameters()]
    assert config.rope_parameters is renamed, "vLLM goes on to compute with it"
