//! Memory of the engine's own: reserved zones, and data structures in them.
pub mod huge;
pub mod zone;
pub mod process_tag;
pub mod secret;
pub mod arena;
pub mod shared;
pub mod descendant_watch;
