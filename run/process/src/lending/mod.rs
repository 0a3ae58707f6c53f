//! Memory that processes of a run lend one another for system calls: `process_vm_readv` and
//! `process_vm_writev` on another process, as between the ranks of an MPI program. The kernel can't
//! load what that process has folded, so its own engine does, and holds it until the call is over.
//! run/run/src/table/lending.rs describes the requests.
mod lender;
pub mod borrower;
