#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

use ludic_foundry::{Bundle, Ingot, Resource, Smelter, StandardStart, Tick};

pub fn user_main(mut tick: Tick, start: StandardStart) -> (Tick, Bundle<Ingot, 6>) {
    let StandardStart { ore, mut mine } = start;
    let mut first = Smelter::build(&tick, ore);
    for _ in 0..2 {
        let one = mine.mine(&mut tick, 1);
        first.load(&tick, one);
    }
    // A second smelter pays: one alone would still be at work at tick 32.
    let mut store = mine.mine(&mut tick, 4);
    let mut second = Smelter::build(&tick, store.take().expect("four were mined"));
    for _ in 0..2 {
        let one = mine.mine(&mut tick, 1);
        second.load(&tick, one);
        let one = mine.mine(&mut tick, 1);
        first.load(&tick, one);
    }
    let mut ingots = Resource::empty();
    loop {
        ingots.add(first.unload(&tick));
        ingots.add(second.unload(&tick));
        match ingots.take() {
            Some(won) => return (tick, won),
            None => tick.advance(1),
        }
    }
}
