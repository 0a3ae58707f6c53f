//! Programs that are managed: what they read, print and find stays as without memfold.
mod copied;
mod early;
mod fork;
mod gate;
mod inherited;
mod kernel;
mod programs;
mod real;
mod recorded;
mod servers;
mod static_programs;
mod stress;
mod tracers;
mod unbounded;
