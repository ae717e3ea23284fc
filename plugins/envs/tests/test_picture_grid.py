"""`picture_grid`: the picture shows the marked cell, the text does not; pictures survive workers, snapshots and files."""

import asyncio
from statistics import fmean

import numpy as np
import pytest

from ludic.envs import check_env
from ludic.types import ConfigError, Image, images_in
from ludic.types.messages import text_of
from ludic_envs.picture_grid import PictureGridEnv, draw_grid
from ludic_envs.workers import EnvPool
from ludic_gpu.vision import as_pil


def picture(obs) -> Image:
    (image,) = images_in([{"role": "user", "content": obs}])
    return image


def seen_cell(image: Image, size: int) -> int:
    """What a player with eyes answers."""
    pixels = np.asarray(as_pil(image))
    cells = pixels.reshape(size, len(pixels) // size, size, -1, 3).astype(int)
    redness = (cells[..., 0] - cells[..., 1]).sum(axis=(1, 3))
    return int(redness.argmax()) + 1


@pytest.mark.parametrize("settings", [{}, {"size": 4, "rounds": 3}, {"size": 2, "cell_pixels": 4}, {"blank": True}])
async def test_it_keeps_the_contract_of_environments(settings):
    await check_env(lambda: PictureGridEnv(**settings))


def test_a_player_that_looks_is_always_right_and_one_that_reads_the_text_cannot_know():
    env = PictureGridEnv(size=3)
    rewards, texts = [], set()
    for seed in range(60):
        obs, _ = env.reset(seed=seed)["agent_0"]
        texts.add(" ".join(part["text"] for part in obs if part["type"] == "text"))
        rewards.append(env.step({"agent_0": str(seen_cell(picture(obs), 3))})["agent_0"].reward)
    assert fmean(rewards) == 1.0
    assert len(texts) == 1


def test_blank_pictures_are_all_the_same():
    env = PictureGridEnv(blank=True)
    assert len({picture(env.reset(seed=seed)["agent_0"][0]).sha256 for seed in range(20)}) == 1


def test_every_round_shows_a_new_picture_and_the_rewards_add_up_to_one():
    env = PictureGridEnv(size=3, rounds=4)
    obs, _ = env.reset(seed=5)["agent_0"]
    total, hashes = 0.0, []
    while env.active_agents:
        hashes.append(picture(obs).sha256)
        outcome = env.step({"agent_0": env.reference_action("agent_0")})["agent_0"]
        obs, total = outcome.obs, total + outcome.reward
    assert total == pytest.approx(1.0) and outcome.terminated
    assert len(hashes) == 4 and len(set(hashes)) > 1
    assert outcome.obs == "Right."


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="size=1"):
        PictureGridEnv(size=1)


def test_a_worker_process_sends_the_same_picture():
    async def first_obs():
        async with EnvPool("picture_grid", workers=1) as pool:
            env = await pool.make(size=2)
            opening = await env.async_reset(seed=3)
            await env.async_close()
            return opening["agent_0"][0]

    env = PictureGridEnv(size=2)
    assert asyncio.run(first_obs()) == env.reset(seed=3)["agent_0"][0]


# --- pictures ---


def test_the_same_picture_from_a_path_bytes_an_array_and_pil(tmp_path):
    image = draw_grid(3, 8, 4)
    (tmp_path / "grid.png").write_bytes(image.data)
    pixels = np.asarray(as_pil(image))
    made = [
        Image.of(tmp_path / "grid.png"),
        Image.of(image.data),
        Image.of(pixels),
        Image.of(as_pil(image)),
        Image.of(image),
    ]
    assert all(each == image for each in made)
    assert images_in([{"role": "user", "content": [image.part()]}]) == [image]
    assert text_of([{"type": "text", "text": "See"}, image.part()]) == f"See\n[picture {image.sha256[:12]}]"


def test_a_grey_array_becomes_a_picture():
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    assert np.array_equal(np.asarray(as_pil(Image.of(grey)))[..., 0], grey)


@pytest.mark.parametrize(
    "source, what",
    [
        (b"GIF89a", "PNG or JPEG"),
        (np.zeros((2, 2), dtype=np.float32), "uint8"),
        (3.5, "float"),
        ("no/such/file.png", "cannot be read"),
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(source, what):
    with pytest.raises(ConfigError, match=what):
        Image.of(source)
