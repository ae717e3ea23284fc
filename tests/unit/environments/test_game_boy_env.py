"""The Game Boy env on the built-in game: a real emulator, a real (small) cartridge."""

import asyncio
import pickle
import random
import time
from pathlib import Path

import pytest

from ludic.cli.play import make_env
from ludic.types import ConfigError, Snapshot, UnknownName
from ludic_game_boy import Fact, GameBoyEnv, Kind, Milestone, load_map
from ludic_game_boy.demo_rom import ROOM, demo_rom
from ludic_game_boy.emulator import BUTTONS, Emulator, read_buttons, screen_text
from ludic_game_boy.games import DEMO, POKEMON_RED
from ludic_game_boy.memory_map import Progress
from tests.contract.pages import BLOCK, DOCS


def quick(**settings) -> GameBoyEnv:
    """Few frames per press: the small game needs no more."""
    return GameBoyEnv("demo", hold_frames=2, settle_frames=2, **settings)


def start(env: GameBoyEnv):
    return env.reset(seed=0)["agent_0"]


def act(env: GameBoyEnv, action: str):
    return env.step({"agent_0": action})["agent_0"]


@pytest.fixture(scope="module")
def env():
    made = quick(max_presses=200)
    yield made
    asyncio.run(made.async_close())


# --- playing ---


def test_the_screen_is_read_as_the_room_that_the_cartridge_draws(env):
    obs, info = start(env)
    assert ROOM.strip("\n") in obs
    assert "Facts: x=1, y=1, has_key=0, steps=0" in obs and info["place"] == [1, 1]


def test_buttons_move_the_player_and_walls_stop_it(env):
    start(env)
    outcome = act(env, "right 2 up left a")
    assert outcome.info["track"] == [["right", 2, 1], ["right", 3, 1], ["up", 3, 1], ["left", 2, 1], ["a", 2, 1]]
    assert outcome.info["facts"]["steps"] == 3 and "#.@.#" in outcome.obs
    assert outcome.info["presses_left"] == 195


def test_each_milestone_is_paid_once_and_the_last_one_ends_the_episode(env):
    start(env)
    to_key = act(env, "right 2 down 2 right 2 up 2 right 5")
    assert (to_key.reward, to_key.terminated) == (0.5, False) and to_key.obs.startswith("Milestone: found the key!")
    back = act(env, "left right left")
    assert back.reward == 0 and back.info["num_milestones"] == 1
    out = act(env, "down 2 right down 2 left down 2 right 2 left 3")
    assert (out.reward, out.terminated, out.info["place"]) == (0.5, True, [11, 7])
    assert len(out.info["track"]) == 10, "what stands behind the end is not pressed"


def test_the_door_stays_closed_without_the_key(env):
    start(env)
    # Down the left side, along the bottom corridor and to the door.
    outcome = act(env, "down 4 right 6 down 2 right 4")
    assert outcome.info["place"] == [10, 7] and outcome.reward == 0 and "@D" in outcome.obs


def test_out_of_presses_is_a_truncation_and_bad_actions_cost_one_each():
    env = quick(max_presses=4)
    start(env)
    bad = act(env, "jump")
    assert bad.info["illegal_move"] and bad.info["facts"]["steps"] == 0 and "'jump' is no button" in bad.obs
    too_many = act(env, "right 4")
    assert too_many.info["illegal_move"] and "more than 3 presses" in too_many.obs and not too_many.truncated
    assert act(env, "right 2").truncated
    asyncio.run(env.async_close())


def test_a_snapshot_of_the_middle_goes_on_in_another_env_as_in_the_first(env):
    rng = random.Random(5)
    start(env)
    act(env, "right 2 down")
    stored = Snapshot.from_json(env.snapshot().to_json())
    actions = [" ".join(rng.choices(BUTTONS, k=6)) for _ in range(5)]
    here = [act(env, action) for action in actions]
    other = quick(max_presses=200)
    other.restore(stored)
    copied = pickle.loads(pickle.dumps(other))
    assert [act(other, action) for action in actions] == here
    assert [act(copied, action) for action in actions] == here
    for made in (other, copied):
        asyncio.run(made.async_close())


def test_an_episode_may_begin_in_a_save_state_and_what_it_brings_is_not_paid(env, tmp_path):
    start(env)
    act(env, "right 2 down 2 right 2 up 2 right 5")
    saved = tmp_path / "with_key.state"
    saved.write_bytes(env._running().save())
    later = quick(start_state=saved)
    obs, info = start(later)
    assert info["place"] == [10, 1] and info["num_milestones"] == 1 and "Next milestone: left by the door" in obs
    assert act(later, "left right").reward == 0 and later.full_reward is None
    asyncio.run(later.async_close())


def test_page_makes_a_start_state_of_a_cartridge_file(tmp_path, monkeypatch):
    """Of docs/envs/game_boy.md, with the demo's bytes as the user's file."""
    monkeypatch.chdir(tmp_path)
    Path("my_game.gb").write_bytes(demo_rom())
    section = (DOCS / "envs" / "game_boy.md").read_text().split("## With your own ROM")[1].split("\n## ")[0]
    (code,) = (text for kind, text in BLOCK.findall(section) if kind == "python")
    exec(compile(code, "game_boy.md", "exec"), {})
    env = GameBoyEnv("my_game.gb", start_state="start.state", max_presses=40)
    _, info = start(env)
    assert env.memory_map is DEMO and info["presses_left"] == 40 and info["num_milestones"] == 0
    asyncio.run(env.async_close())


def test_played_cartridge_has_the_usual_frames_and_presses(tmp_path):
    (tmp_path / "my_game.gb").write_bytes(demo_rom())
    env = make_env("game_boy", {"rom": str(tmp_path / "my_game.gb")}, None, 0)
    assert (env.max_presses, env.hold_frames) == (2000, 8), "the example's are for the demo"
    assert make_env("game_boy", {}, None, 0).max_presses == 40


def test_a_cartridge_with_a_clock_is_played_with_the_clock_stopped(tmp_path, monkeypatch):
    rom = bytearray(demo_rom())
    rom[0x147:0x14A] = bytes([0x10, 0x00, 0x02])  # clock, battery and memory
    rom[0x14D] = -sum(byte + 1 for byte in rom[0x134:0x14D]) & 0xFF
    (tmp_path / "clock.gb").write_bytes(rom)
    env = GameBoyEnv(tmp_path / "clock.gb", hold_frames=2, settle_frames=2)
    start(env)
    first = _clock(env)
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 7200)
    act(env, "right")
    assert _clock(env) == first == [0, 0, 0]
    asyncio.run(env.async_close())


def _clock(env: GameBoyEnv) -> list[int]:
    """Seconds, minutes and hours, as a game reads them: open the clock, latch it, choose a register, look."""
    memory = env._running()._boy.memory
    memory[0x0000] = 0x0A
    memory[0x6000], memory[0x6000] = 0, 1
    read = []
    for register in (0x08, 0x09, 0x0A):
        memory[0x4000] = register
        read.append(memory[0xA000])
    return read


# --- mistakes ---


def test_mistakes_are_refused_with_a_hint(tmp_path):
    with pytest.raises(ConfigError, match="Ludic ships no games: give the path of a .gb file"):
        GameBoyEnv(tmp_path / "missing.gb")
    (tmp_path / "short.gb").write_bytes(b"no cartridge")
    with pytest.raises(ConfigError, match="has 12 bytes; a Game Boy ROM has 32 KB or more"):
        GameBoyEnv(tmp_path / "short.gb")
    with pytest.raises(UnknownName, match="Did you mean 'pokemon_red'"):
        GameBoyEnv("demo", game="pokemon_rad")
    with pytest.raises(ConfigError, match="max_presses=0"):
        GameBoyEnv("demo", max_presses=0)
    with pytest.raises(ConfigError, match="Cannot read the save state"):
        start(GameBoyEnv("demo", start_state=tmp_path / "missing.state"))


def test_without_pyboy_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs PyBoy, which is not installed: pip install 'pyboy"):
        GameBoyEnv("demo")


def test_a_state_of_something_else_is_refused():
    emulator = Emulator(demo_rom())
    with pytest.raises(ConfigError, match="cannot be loaded"):
        emulator.load(b"\x00" * 10)
    emulator.close()


def test_a_game_without_a_map_shows_its_tiles_as_numbers(tmp_path):
    rom = bytearray(demo_rom())
    rom[0x134:0x13E] = b"SOMEBODYS\0"
    (tmp_path / "game.gb").write_bytes(rom)
    with pytest.raises(ConfigError, match="cannot run this ROM .'SOMEBODYS', 32768 bytes.: .*checksum"):
        start(GameBoyEnv(tmp_path / "game.gb"))
    rom[0x14D] = -sum(byte + 1 for byte in rom[0x134:0x14D]) & 0xFF
    (tmp_path / "game.gb").write_bytes(rom)
    env = GameBoyEnv(tmp_path / "game.gb", max_presses=10, hold_frames=2, settle_frames=2)
    obs, info = start(env)
    assert obs.split("\n")[2].startswith("23 40 2e 2e 23") and info["facts"] == {} and env.full_reward is None
    assert act(env, "right").obs.split("\n")[2].startswith("23 2e 40 2e 23")
    asyncio.run(env.async_close())


# --- parts ---


@pytest.mark.parametrize(
    ("text", "presses"),
    [
        ("a", ["a"]),
        ("UP 3", ["up"] * 3),
        ("up x2, a; b.", ["up", "up", "a", "b"]),
        ("start\nselect ×2", ["start", "select", "select"]),
    ],
)
def test_actions_are_buttons_with_counts(text, presses):
    assert read_buttons(text, 16) == presses


@pytest.mark.parametrize("text", ["", "jump", "3 up", "up 0", "up 17", "up 99999999999999", "up -1", "a" * 300, "²"])
def test_other_texts_are_refused_with_a_reason(text):
    reason = read_buttons(text, 16)
    assert isinstance(reason, str) and len(reason) < 200


MEMORY = bytes([0x12, 0x34, 0x99, 0b0101_0001, 0x80, 0x81, 0x50, 0x82])


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        (Fact(address=0, length=2), 0x1234),
        (Fact(address=0, length=2, kind=Kind.LITTLE), 0x3412),
        (Fact(address=0, length=3, kind=Kind.DECIMAL), 123499),
        (Fact(address=3, kind=Kind.DECIMAL), 51),
        (Fact(address=3, kind=Kind.BITS), 3),
        (Fact(address=3, kind=Kind.BIT, bit=6), 1),
        (Fact(address=3, kind=Kind.BIT, bit=5), 0),
        (Fact(address=4, length=4, kind=Kind.TEXT), "AB"),
    ],
)
def test_facts_are_read_by_their_kind(fact, value):
    assert fact.value(lambda address, length: MEMORY[address : address + length], POKEMON_RED.letters) == value


def test_pokemon_reds_map_reads_a_memory_filled_by_hand():
    memory = bytearray(0x10000)
    memory[0xD356] = 0b11  # two badges
    memory[0xD347:0xD34A] = bytes.fromhex("012345")
    memory[0xD35E], memory[0xD361], memory[0xD362] = 40, 3, 5
    memory[0xD74B] = 0b0010_0100  # events 0x22 and 0x25
    memory[0xD163] = 1
    memory[0xD16C:0xD16E], memory[0xD18C] = (258).to_bytes(2, "big"), 12
    memory[0xD158:0xD15C] = bytes([0x91, 0x84, 0x83, 0x50])
    facts = POKEMON_RED.read(lambda address, length: bytes(memory[address : address + length]))
    wanted = {
        "badges": 2, "money": 12345, "map": 40, "x": 5, "y": 3, "got_starter": 1, "got_pokedex": 1, "got_parcel": 0,
        "party_size": 1, "pokemon_1_hp": 258, "pokemon_1_level": 12, "player": "RED", "events": 2,
    }  # fmt: skip
    assert {name: facts[name] for name in wanted} == wanted
    progress = Progress(POKEMON_RED.milestones)
    assert [m.name for m in progress.update(facts)] == [
        "chose a first Pokémon",
        "got the Pokédex",
        "badge 1",
        "badge 2",
    ]
    assert progress.update(facts) == [] and progress.next == "followed Oak into the laboratory"


def test_a_text_box_is_shown_as_text_and_the_ground_as_floor_and_walls():
    box = [0x79, 0x7A, 0x7A, 0x7A, 0x7B], [0x7C, 0x87, 0xA8, 0xE7, 0x7C]
    ground = [0x01, 0x02, 0x01, 0x02, 0x01]
    shown = screen_text([ground, *box], POKEMON_RED.letters, sprites={(0, 2)}, walkable={0x01})
    assert shown == ".#@#.\n+---+\n|Hi!|"


def test_a_map_of_ones_own_is_a_json_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(
        '{"facts": {"column": {"address": "0xC000"}}, "letters": {"0x40": "P"}, "place": [],'
        ' "milestones": [{"name": "third column", "fact": "column", "at_least": 3, "reward": 2.0}]}'
    )
    assert load_map(path).milestones == [Milestone(name="third column", fact="column", at_least=3, reward=2.0)]
    env = quick(game=str(path), max_presses=9)
    obs, _ = start(env)
    assert "#P##" in obs and act(env, "right").reward == 0 and act(env, "right").reward == 2.0
    asyncio.run(env.async_close())
    path.write_text('{"milestones": [{"name": "third column", "fact": "colum"}]}')
    with pytest.raises(ConfigError, match="uses the facts \\['colum'\\]"):
        load_map(path)
    path.write_text('{"fakts": {}}')
    with pytest.raises(ConfigError, match="is not a memory map: .*fakts"):
        load_map(path)
