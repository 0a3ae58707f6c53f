//! The size of the process, and its share of the limit: its account.
//!
//! What a process has, in bytes. Each term is computed in one place:
//!
//! | term | is | computed by |
//! |---|---|---|
//! | `anonymous` | resident anonymous memory, which the kernel tells | [`process_size::Statm`] |
//! | `managed` | mapped pages of managed memory, and frames | `limits/gauges.rs` |
//! | `stored` | pool, and index | `Limits::stored_bytes` |
//! | `folded` | managed memory that is only in the store, as if it were not folded; without what a fork has inherited | the engine's tally |
//! | `outside` | memory that the engine doesn't manage: `anonymous - managed - stored` | [`share::SizeScale::look`] |
//! | `others` | the part of `anonymous` that counts in the processes that share it after a fork; 0 for a child that is charged with all copies | [`share::SizeLevel::counted_in_others`] |
//! | `stays` | managed memory that is not folded whatever the bound is: what was refused and a floor, or what would cost too much to fold | `Limits::kept_bytes`, `Gauges::least_resident_bytes` |
//!
//! From these follow:
//! ```text
//! held  = managed + stored + outside - others     counts against the limit, is charged and published
//! need  = anonymous - others + folded             is asked of the limit (0 while the process is idle)
//! least = stays + outside + stored - others       can't be folded away
//! share = fair_share::share(limit - memory of processes without a slot, need and least of each process)
//! target = share + others - outside - stored      of managed memory, but at least `stays`
//! ```
//! - Memory is charged before it is taken, and a charge past the limit is refused (`Limits::may_hold`).
//!   So the limit is kept however late a process learns its share. After a refusal the process folds as
//!   much as it takes, until its next share. Each look settles the charge to `held`.
//! - The limit can't be kept when the sum of `least` is above it, and only then is that reported
//!   (`diagnostics/limit.rs`).
pub mod pace;
pub mod sharing;
pub mod process_size;
pub mod share;
