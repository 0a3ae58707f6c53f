//! `memfold bench policy`: the policy lab. It replays page traces of programs on the engine's own
//! policy and on others.

mod trace;
mod record;
mod counts;
mod memory;
mod candidates;
mod replay;
mod measure;
#[cfg(test)]
mod tests;

pub use measure::{CostsArgs, costs};

/// Arguments of `memfold bench policy`.
#[derive(clap::Args, Debug, Clone)]
pub struct PolicyArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand, Debug, Clone)]
enum Action {
    /// Runs a program on qemu's emulator, and writes its page trace to a file
    Record(record::RecordArgs),
    /// Replays traces, and compares memfold's policy with others
    Replay(replay::ReplayArgs),
}

/// Records or replays page traces.
pub fn policy(args: PolicyArgs) -> anyhow::Result<i32> {
    match args.action {
        Action::Record(args) => record::record(&args).map(|()| 0),
        Action::Replay(args) => replay::replay(&args),
    }
}
