//! Brings the player's crate and the game together. Nothing in here comes from the player.

#![forbid(unsafe_code)]

mod report;

use ludic_foundry::{play, GameMode, Standard, Tick};

type Start = <Standard as GameMode>::StartingResources;
type Victory = <Standard as GameMode>::VictoryResources;

fn run(tick: Tick, start: Start) -> (Tick, Victory) {
    // Who comes back from here holds the goods that win.
    let (tick, goods) = player::user_main(tick, start);
    report::won(tick.cur());
    (tick, goods)
}

fn main() {
    play::<Standard>(run)
}
