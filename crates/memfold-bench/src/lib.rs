//! memfold-bench: the corpus and the walk, the same work for memfold and for its peers.
//!
//! `memfold bench corpus` builds a file of real and realistic bytes. `memfold bench walk` runs one workload over it in
//! memfold's regions, under `memfold run` and, as root, on the kernel's own zram swap, in one invocation, and prints
//! how they compare. Each run of the workload is a child process (`memfold bench walk-child`). `memfold bench store`
//! measures the compressed store, `memfold bench swap` the swap file, `memfold bench apps` well-known programs,
//! `memfold bench usemem` several processes at once. `memfold bench report` runs all of them and says where every
//! requirement stands.

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
mod output;
mod targets;
mod report;
mod walk;
mod store_row;
mod trainer;
mod store_pool;
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
mod swap_kernel;
mod swap_load;
mod swap_index;
mod swap_read;
mod swap_wait;
mod swap_remote;
mod swap;
mod brief;
mod bench_blocks;
mod bench_pools;
mod bench_peers;
mod usemem_child;
mod usemem_peer;
mod usemem;
mod evidence_rows;
mod evidence_gather;
mod evidence_state;
mod evidence_plot;
mod evidence_charts;
mod evidence;
mod evidence_text;
mod evidence_html;
mod evidence_run;

pub use apps::{AppsArgs, apps};
pub use bench_blocks::blocks;
pub use bench_peers::peers;
pub use bench_pools::pools;
pub use brief::BriefArgs;
pub use child::{WalkChildArgs, walk_child};
pub use corpus::{CorpusArgs, corpus};
pub use evidence_run::{ReportArgs, report};
pub use refusal::Refusal;
pub use store::{StoreArgs, store};
pub use swap::{SwapArgs, swap};
pub use trainer::trained_dictionaries;
pub use usemem::{UsememArgs, usemem};
pub use usemem_child::{UsememChildArgs, usemem_child};
pub use walk::{WalkArgs, walk};
