//! memfold-bench: the corpus and the walk, the same work for memfold and for its peers.
//!
//! `memfold bench corpus` builds a file of real and realistic bytes. `memfold bench walk` runs one workload over it in
//! memfold's regions, under `memfold run` and, as root, on the kernel's own zram swap, in one invocation, and prints
//! how they compare. Each run of the workload is a child process (`memfold bench walk-child`). `memfold bench store`
//! measures the compressed store, `memfold bench swap` the swap file, `memfold bench apps` well-known programs,
//! `memfold bench usemem` several processes at once. `memfold bench report` runs all of them and says where every
//! requirement stands.

// Bottom first: a module imports only from modules listed above it.
mod trainer;

mod common;
mod corpus;
mod host;
mod harness;
mod walk;
mod store;
mod apps;
mod swap;
mod usemem;
mod report;

pub use apps::{AppsArgs, apps};
pub use common::refusal::Refusal;
pub use corpus::{CorpusArgs, corpus};
pub use harness::brief::BriefArgs;
pub use report::{ReportArgs, report};
pub use store::{StoreArgs, blocks, peers, pools, store};
pub use swap::{SwapArgs, swap};
pub use trainer::trained_dictionaries;
pub use usemem::{UsememArgs, UsememChildArgs, usemem, usemem_child};
pub use walk::{WalkArgs, WalkChildArgs, walk, walk_child};
