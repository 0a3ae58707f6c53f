//! What the command prints, refuses and lets one change.
mod bench;
mod check;
mod control;
mod dict;
mod documentation;
mod documented;
mod ended;
mod environment;
mod explain;
mod metrics;
mod refusal;
mod report;
mod said;
mod status;
mod top;
mod wrap;
