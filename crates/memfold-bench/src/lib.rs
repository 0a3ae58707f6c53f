//! memfold-bench: the corpus and the walk, the same work for memfold and for its peers.
//!
//! `memfold bench corpus` builds a file of real and realistic bytes. `memfold bench walk` runs one workload over it in
//! memfold's regions, under `memfold run` and, as root, on the kernel's own zram swap, in one invocation, and prints
//! how they compare. Each run of the workload is a child process (`memfold bench walk-child`). `memfold bench store`
//! measures the compressed store, `memfold bench apps` well-known programs.

// Bottom first: a module imports only from modules listed above it.
mod refusal;
mod size;
mod random;
mod latency;
mod corpus_file;
mod parts;
mod corpus;
mod page;
mod workload;
mod plain;
#[cfg(feature = "engine")]
mod area;
mod message;
mod child;
mod journal;
mod guard;
mod folio;
mod zram;
mod cgroup;
mod machine;
mod peer;
mod runner;
mod kernel_run;
mod summary;
mod table;
mod targets;
mod report;
mod walk;
mod store_row;
mod trainer;
mod store_pool;
#[cfg(feature = "engine")]
mod store_engine;
mod store_canned;
mod store_kernel;
mod store_many;
mod store_batch;
mod store;
mod app_pipe;
mod app_run;
mod app_server;
mod app_case;
mod apps;

pub use apps::{AppsArgs, apps};
pub use child::{WalkChildArgs, walk_child};
pub use corpus::{CorpusArgs, corpus};
pub use refusal::Refusal;
pub use store::{StoreArgs, store};
pub use trainer::trained_dictionaries;
pub use walk::{WalkArgs, walk};
