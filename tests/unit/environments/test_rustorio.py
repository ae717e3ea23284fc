"""Rustorio with a real compiler and a real sandbox, on the small game that is built in."""

import asyncio
import os
import pickle
import shutil
from pathlib import Path

import pytest

from ludic.types import ConfigError, Snapshot, UnknownName
from ludic_rustorio import RustorioEnv
from ludic_rustorio.env import source_of
from ludic_rustorio.game import DEMO, read_game
from ludic_rustorio.judge import verdict_of
from ludic_rustorio.source_rules import refusal
from ludic_rustorio.toolchain import find_toolchain
from ludic_sandbox import CommandResult, CompileResult, CompileStatus, RunStatus

pytestmark = pytest.mark.slow

GAME = read_game("demo")
HEAD = "#![no_std]\n#![forbid(unsafe_code)]\n\nextern crate alloc;\n\nuse ludic_foundry::*;\n"

needs_rust = pytest.mark.skipif(
    shutil.which("rustc") is None or shutil.which("bwrap") is None,
    reason="needs a Rust toolchain and bubblewrap (apt-get install cargo bubblewrap)",
)


def program(body: str, items: str = "") -> str:
    return f"{HEAD}{items}\npub fn user_main(mut tick: Tick, start: StandardStart) -> (Tick, Bundle<Ingot, 6>) {{{body}}}\n"


SLOW = program(
    """
    let mut mine = start.mine;
    let mut smelter = Smelter::build(&tick, start.ore);
    let ore = mine.mine(&mut tick, 6);
    smelter.load(&tick, ore);
    tick.advance(88);
    let six = smelter.unload(&tick).take().unwrap();
    (tick, six)
    """
)


async def attempts(*sources: str, **settings):
    """The outcomes of one program after the other in one episode."""
    env = RustorioEnv(run_timeout_s=2, max_attempts=len(sources) + 1, **settings)
    await env.async_reset(seed=0)
    return [(await env.async_step({"agent_0": source}))["agent_0"] for source in sources]


# --- playing ---


@needs_rust
async def test_compiler_errors_are_observations_until_the_program_wins():
    borrowed_twice = program(
        "let mut mine = start.mine; Smelter::build(&tick, start.ore).load(&tick, mine.mine(&mut tick, 1)); todo!()"
    )
    wrong, panics, wins = await attempts(borrowed_twice, GAME.template, GAME.solution)
    assert wrong.info == {"status": "compile_error", "ticks": None, "won": False, "attempts_left": 3}
    assert "error[E0502]: cannot borrow `tick` as mutable" in wrong.obs and "player.rs:" in wrong.obs
    assert panics.info["status"] == "panicked" and "not yet implemented: Return the tick and 6 ingots." in panics.obs
    assert wins.obs.startswith("You won in 26 ticks.") and wins.terminated
    assert [o.reward for o in (wrong, panics, wins)] == [0.0, 0.0, 1.0]


@needs_rust
async def test_fewer_ticks_earn_more_where_that_is_asked_for():
    (slow,) = await attempts(SLOW, par_ticks=26, tick_weight=0.5)
    assert slow.info["ticks"] == 100 and slow.reward == pytest.approx(0.5 + 0.5 * 26 / 100)
    (fast,) = await attempts(GAME.solution, par_ticks=50, tick_weight=0.5)
    assert fast.reward == 1.0, "better than par is not paid"


@needs_rust
async def test_out_of_attempts_is_a_loss_and_a_copy_of_the_middle_goes_on():
    env = RustorioEnv(max_attempts=2)
    await env.async_reset(seed=0)
    await env.async_step({"agent_0": "no program"})
    copied, restored = pickle.loads(pickle.dumps(env)), RustorioEnv(max_attempts=2)
    restored.restore(Snapshot.from_json(env.snapshot().to_json()))
    outcomes = [(await one.async_step({"agent_0": "still none"}))["agent_0"] for one in (env, copied, restored)]
    assert outcomes[0].terminated and not outcomes[0].truncated and outcomes[0].info["status"] == "refused"
    assert outcomes[1] == outcomes[0] == outcomes[2] and not env.active_agents


# --- cheating ---

CHEATS = {
    "unsafe code": (program("unsafe { core::mem::zeroed() }"), "compile_error"),
    "allowing unsafe code again": (program("todo!()", "#[allow(unsafe_code)] fn f() {}"), "compile_error"),
    "leaving by the standard library": (program("std::process::exit(0)"), "compile_error"),
    "printing a victory": (program('println!("You won in 1 ticks!"); loop {}'), "compile_error"),
    "taking the place of main": (program("todo!()", "#[no_mangle] pub fn main() {}"), "compile_error"),
    "running before main": (
        program("todo!()", '#[link_section = ".init_array"] pub static F: fn() = f; fn f() {}'),
        "compile_error",
    ),
    "making up goods": (program("(tick, Bundle { kind: core::marker::PhantomData })"), "compile_error"),
    "starting capital again": (
        program("todo!()", "fn f<M: GameMode>() -> M::StartingResources { M::start() }"),
        "compile_error",
    ),
    "another game inside the game": (program("play::<Standard>(user_main)"), "panicked"),
    "never ending": (program("loop {}"), "run_limit"),
    "all the memory": (
        program("let mut v = alloc::vec::Vec::new(); loop { v.push([1u8; 1 << 20]); tick.advance(v.len() as u64); }"),
        "run_limit",
    ),
}


@needs_rust
async def test_no_cheat_wins():
    async def status(source: str) -> tuple[str, float]:
        (outcome,) = await attempts(source)
        return outcome.info["status"], outcome.reward

    found = await asyncio.gather(*(status(source) for source, _ in CHEATS.values()))
    assert dict(zip(CHEATS, found, strict=True)) == {name: (wanted, 0.0) for name, (_, wanted) in CHEATS.items()}


@pytest.mark.parametrize(
    ("status", "stdout", "wanted"),
    [
        (RunStatus.SUCCESS, "You won in 3 ticks!\nSECRET 7\nYou won in 5 ticks!\n", ("won", 7)),
        (RunStatus.SUCCESS, "You won in 3 ticks!\n", ("panicked", None)),
        (RunStatus.SUCCESS, "secret 7\n", ("panicked", None)),
        (RunStatus.SUCCESS, "SECRET 7 and more\n", ("panicked", None)),
        (RunStatus.RUNTIME_ERROR, "SECRET 7\n", ("panicked", None)),
        (RunStatus.TIMEOUT, "SECRET 7\n", ("run_limit", None)),
    ],
)
def test_only_the_report_of_our_own_main_counts(status, stdout, wanted):
    ran = CommandResult(
        compile_result=CompileResult(status=CompileStatus.SUCCESS), run_status=status, stdout=stdout, outputs={}
    )
    verdict = verdict_of(ran, "SECRET")
    assert (verdict.status, verdict.ticks) == wanted


@pytest.mark.parametrize(
    "source",
    [
        "",
        GAME.solution.replace("#![no_std]\n", ""),
        GAME.solution.replace("forbid", "deny"),
        GAME.solution.replace("#![forbid(unsafe_code)]", "// #![forbid(unsafe_code)]"),
        GAME.solution.replace("#![no_std]\n", "#![no_std] /*\n").replace("extern", "*/ extern"),
        GAME.solution.replace("#![no_std]", "// comment \r#![no_std]"),  # one line to Rust, two to Python
        GAME.solution.replace("#![no_std]", "//! doc\n#![no_std]"),
        "/*\n" + GAME.solution + "*/",
    ],
)
def test_the_first_lines_must_stay_as_they_are(source):
    assert "must begin with these lines" in refusal(source, GAME.head)


@pytest.mark.parametrize(
    "line",
    [
        "extern crate std;",
        "macro_rules! m { ($a:ident) => { extern crate $a; } }",
        "#![feature(rustc_private)]",
        "# /* in between */ ! [feature(x)]",
        'include!("/etc/passwd");',
        'const S: &str = include_str!("main.rs");',
        '#[cfg_attr(all(), path = "/usr/x.rs")] mod x;',
        # Text that looks like the beginning of a comment or a string, and is none.
        """const C: char = '"'; extern crate std; const D: char = '"';""",
        r"""const C: char = '\''; const Q: &str = "\\"; extern crate std; // " """,
        'const S: &str = "/*"; extern crate std; /* */',
        'const S: &str = r#"a " b"#; extern crate std; const T: &str = "";',
        """m!('r#"x" extern crate std; "y"#);""",
        "/* a /* b */ c */ extern crate std;",
        "/* never closed; extern crate std;",
    ],
)
def test_ways_around_the_first_lines_are_refused(line):
    assert "is not allowed here" in refusal(f"{HEAD}{line}\n", GAME.head)


# Both are accepted by the compiler and win: known holes in what it takes for safe.
MADE_OF_NOTHING = """
trait Object<U> { type Output; }
impl<T: ?Sized, U> Object<U> for T { type Output = U; }
fn exchange<T: ?Sized, U>(x: <T as Object<U>>::Output) -> U { x }
fn transmute<T, U>(x: T) -> U { exchange::<dyn Object<U, Output = T>, U>(x) }
"""
MADE_TO_LAST = """
fn translate<'a, 'b, T: ?Sized>(_: &'a &'b (), x: &'b mut T) -> &'a mut T { x }
fn expand<'a, 'b, T: ?Sized>(x: &'a mut T) -> &'b mut T {
    let f: for<'x> fn(_, &'x mut T) -> &'b mut T = translate;
    f(&&(), x)
}
"""


@pytest.mark.parametrize(("items", "why"), [(MADE_OF_NOTHING, "`dyn`"), (MADE_TO_LAST, "a named lifetime")])
def test_known_holes_of_the_compiler_are_refused(items, why):
    assert f"The program has {why}" in refusal(program("(tick, transmute(()))", items), GAME.head)


def test_an_honest_program_is_not_refused():
    assert refusal(GAME.solution, GAME.head) is None
    assert refusal("// my plan\r\n" + GAME.solution.replace("\n", "\r\n"), GAME.head) is None
    words = """// don't include extern, dyn or 'static things /*
    fn f(x: &'static str, y: &'_ str) -> char { if x == "extern crate 'a" { '\\'' } else { 'a' } } /* path = /* "#!" */ */
    // dyn"""
    assert refusal(HEAD + words, GAME.head) is None
    assert "at most 100000" in refusal("x" * 100_001, GAME.head)


def test_the_program_is_the_last_block_of_a_reply():
    assert source_of("First\n```rust\na\n```\nbetter:\n```rs\nb\n```\n") == "b\n"
    assert source_of("fn main() {}") == "fn main() {}"


# --- setting up ---


def test_mistakes_are_refused_with_a_hint(tmp_path):
    with pytest.raises(ConfigError, match="no Cargo.toml.*give the folder of the game's crate"):
        RustorioEnv(tmp_path)
    (tmp_path / "Cargo.toml").write_text("")
    with pytest.raises(ConfigError, match="A game needs main.rs, player.rs and RULES.md"):
        RustorioEnv(tmp_path)
    shutil.copytree(DEMO / "ludic", tmp_path / "ludic")
    (tmp_path / "ludic" / "player.rs").write_text("#![forbid(unsafe_code)]\n")
    with pytest.raises(ConfigError, match="does not begin with #!.no_std.. Without it"):
        RustorioEnv(tmp_path)
    with pytest.raises(ConfigError, match="edition='2018'"):
        RustorioEnv(edition="2018")
    with pytest.raises(ConfigError, match="tick_weight=2"):
        RustorioEnv(tick_weight=2)
    with pytest.raises(ConfigError, match="run_timeout_s=0.*every limit must be above 0"):
        RustorioEnv(run_timeout_s=0)
    with pytest.raises(UnknownName, match=r"'max_atempts'. Did you mean 'max_attempts'.* Known: .*run_timeout_s"):
        RustorioEnv(max_atempts=3)


async def test_without_a_toolchain_it_says_how_to_get_one(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="There is no .*bin/cargo.*apt-get install cargo"):
        await RustorioEnv(toolchain=tmp_path).async_reset(seed=0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no rustc on the PATH"):
        await RustorioEnv().async_reset(seed=0)


@needs_rust
async def test_a_game_that_cargo_cannot_build_shows_what_cargo_says(tmp_path):
    game = tmp_path / "game"
    shutil.copytree(DEMO, game)
    (game / "src" / "lib.rs").write_text("pub fn broken( {}")
    with pytest.raises(ConfigError, match="cargo cannot build the game in .*game:\n(?s:.*)error"):
        await RustorioEnv(game).async_reset(seed=0)


@needs_rust
async def test_a_game_of_ones_own_may_use_other_crates_and_be_played_from_another_folder(tmp_path):
    """As with Rustorio itself: a crate with a dependency, and the harness beside it."""
    game, harness = tmp_path / "game", tmp_path / "harness"
    shutil.copytree(DEMO, tmp_path / "foundry", ignore=shutil.ignore_patterns("ludic"))
    (game / "src").mkdir(parents=True)
    (game / "Cargo.toml").write_text(
        '[package]\nname = "own-game"\nversion = "0.1.0"\nedition = "2021"\n[workspace]\n'
        '[dependencies]\nludic_foundry = { path = "../foundry" }\n'
    )
    (game / "src" / "lib.rs").write_text("pub use ludic_foundry::*;\n")
    shutil.copytree(DEMO / "ludic", harness)
    for file in harness.glob("*.rs"):
        file.write_text(file.read_text().replace("ludic_foundry", "own_game"))
    env = RustorioEnv(game, harness=harness)
    await env.async_reset(seed=0)
    outcome = (await env.async_step({"agent_0": env.reference_action("agent_0")}))["agent_0"]
    assert outcome.info["ticks"] == 26


@needs_rust
def test_the_toolchain_is_the_real_one_behind_the_name_on_the_path():
    found = find_toolchain(None, DEMO)
    assert (found.sysroot / "lib" / "rustlib").is_dir() and not Path(found.linker).is_symlink()
    assert os.access(found.cargo, os.X_OK)
