#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

use ludic_foundry::{Bundle, Ingot, Resource, Smelter, StandardStart, Tick};

pub fn user_main(mut tick: Tick, start: StandardStart) -> (Tick, Bundle<Ingot, 6>) {
    let StandardStart { ore, mut mine } = start;

    todo!("Return the tick and 6 ingots.")
}
