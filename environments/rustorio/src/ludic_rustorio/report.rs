//! How a won game is reported: one line with a number that only this program was told, on its standard input.
//!
//! The player's crate has no standard library, so it can neither read the number nor write a line.

pub fn won(ticks: u64) {
    let mut secret = String::new();
    std::io::stdin().read_line(&mut secret).expect("the secret is on standard input");
    println!("\n{} {}", secret.trim(), ticks);
}
