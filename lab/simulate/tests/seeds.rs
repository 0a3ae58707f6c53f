//! A fixed set of seeds, bounded by its steps. `make simulate` draws new ones.
use std::process::{Command, Output};

/// Seeds of the fixed set.
const SEEDS: u64 = 200;

fn simulate(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfold-simulate"));
    command.args(arguments).output().expect("the simulation runs")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn c1_engine_keeps_every_byte_in_the_fixed_seeds() {
    let output = simulate(&["hunt", "--from=1", &format!("--seeds={SEEDS}"), "--whole"]);
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn seed_repeats_its_run_exactly() {
    for seed in ["3", "14", "159"] {
        let (first, second) = (simulate(&["run", seed]), simulate(&["run", seed]));
        assert!(first.status.success(), "{}", text(&first));
        assert_eq!(text(&first), text(&second), "seed {seed}");
    }
}
