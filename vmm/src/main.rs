//! The VMM.
fn main() {}
