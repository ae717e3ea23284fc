//! Foundry: a factory game in which the rules are types. Mine ore, build a smelter, deliver ingots.
//!
//! Time is a `Tick`, which can neither be copied nor turned back; goods are values that can neither be copied nor made up.
//! A player's function gets both at the start and has to return the tick and the goods that win.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

mod sealed {
    pub trait Sealed {}

    /// Only this crate can make one, so only this crate can begin a game.
    pub struct Key(());

    impl Key {
        pub(crate) fn new() -> Key {
            Key(())
        }
    }
}

/// A kind of goods.
pub trait Good: sealed::Sealed {}

/// What a mine gives.
pub enum Ore {}
/// What a smelter makes of ore.
pub enum Ingot {}

impl sealed::Sealed for Ore {}
impl sealed::Sealed for Ingot {}
impl Good for Ore {}
impl Good for Ingot {}

/// The clock. What takes `&mut Tick` takes time; what takes `&Tick` only looks at it.
pub struct Tick(u64);

impl Tick {
    /// Ticks since the start of the game.
    pub fn cur(&self) -> u64 {
        self.0
    }

    /// Wait.
    pub fn advance(&mut self, ticks: u64) {
        self.0 = self.0.checked_add(ticks).expect("the end of time");
    }
}

/// Any amount of one kind of goods.
pub struct Resource<G: Good> {
    amount: u32,
    kind: PhantomData<G>,
}

impl<G: Good> Resource<G> {
    fn new(amount: u32) -> Self {
        Resource { amount, kind: PhantomData }
    }

    /// Nothing, to begin a store with.
    pub fn empty() -> Self {
        Self::new(0)
    }

    /// How much it is.
    pub fn amount(&self) -> u32 {
        self.amount
    }

    /// Put more to it.
    pub fn add(&mut self, other: Resource<G>) {
        self.amount += other.amount;
    }

    /// Take a fixed amount out of it; `None`, and nothing is taken, if there is not as much.
    pub fn take<const N: u32>(&mut self) -> Option<Bundle<G, N>> {
        self.amount = self.amount.checked_sub(N)?;
        Some(Bundle { kind: PhantomData })
    }
}

/// Exactly `N` of one kind of goods, as the compiler knows.
pub struct Bundle<G: Good, const N: u32> {
    kind: PhantomData<G>,
}

impl<G: Good, const N: u32> Bundle<G, N> {
    /// The same goods, loose.
    pub fn loose(self) -> Resource<G> {
        Resource::new(N)
    }
}

/// Ticks to mine one ore by hand.
pub const MINING_TICKS: u64 = 2;
/// Ticks that a smelter needs for one ingot.
pub const SMELTING_TICKS: u64 = 5;

/// Where ore comes from.
pub struct Mine(());

impl Mine {
    /// Mine by hand: 2 ticks per ore.
    pub fn mine(&mut self, tick: &mut Tick, amount: u32) -> Resource<Ore> {
        tick.advance(MINING_TICKS * u64::from(amount));
        Resource::new(amount)
    }
}

/// Turns ore into ingots by itself, one after the other, 5 ticks each.
pub struct Smelter {
    waiting: u32,
    done: u32,
    busy_until: u64,
}

impl Smelter {
    /// A smelter costs 4 ore.
    pub fn build(tick: &Tick, _cost: Bundle<Ore, 4>) -> Smelter {
        Smelter { waiting: 0, done: 0, busy_until: tick.cur() }
    }

    /// Ore to be smelted; the work goes on while time passes elsewhere.
    pub fn load(&mut self, tick: &Tick, ore: Resource<Ore>) {
        self.work(tick);
        if self.waiting == 0 {
            self.busy_until = self.busy_until.max(tick.cur());
        }
        self.waiting += ore.amount;
    }

    /// All ingots that are done by now.
    pub fn unload(&mut self, tick: &Tick) -> Resource<Ingot> {
        self.work(tick);
        Resource::new(std::mem::take(&mut self.done))
    }

    fn work(&mut self, tick: &Tick) {
        while self.waiting > 0 && self.busy_until + SMELTING_TICKS <= tick.cur() {
            self.busy_until += SMELTING_TICKS;
            self.waiting -= 1;
            self.done += 1;
        }
    }
}

/// What a game begins with and what wins it.
pub trait GameMode: sealed::Sealed {
    /// Handed to the player at tick 0.
    type StartingResources;
    /// What the player has to return.
    type VictoryResources;

    /// The goods of tick 0.
    fn start(key: sealed::Key) -> Self::StartingResources;
}

/// The only mode: 4 ore and a mine; deliver 6 ingots.
pub enum Standard {}

/// What `Standard` begins with.
pub struct StandardStart {
    /// Enough for a smelter.
    pub ore: Bundle<Ore, 4>,
    /// Inexhaustible.
    pub mine: Mine,
}

impl sealed::Sealed for Standard {}
impl GameMode for Standard {
    type StartingResources = StandardStart;
    type VictoryResources = Bundle<Ingot, 6>;

    fn start(_key: sealed::Key) -> StandardStart {
        StandardStart { ore: Bundle { kind: PhantomData }, mine: Mine(()) }
    }
}

static PLAYED: AtomicBool = AtomicBool::new(false);

/// Play: once per program, so that no program plays two games to merge their goods.
pub fn play<M: GameMode>(main: fn(Tick, M::StartingResources) -> (Tick, M::VictoryResources)) -> ! {
    assert!(!PLAYED.swap(true, Ordering::SeqCst), "a program plays only once");
    let (tick, _goods) = main(Tick(0), M::start(sealed::Key::new()));
    println!("You won in {} ticks!", tick.cur());
    std::process::exit(0)
}
