//! Memory of the engine's own: reserved zones, and data structures in them.
pub mod huge;
pub mod zone;
pub mod birthplace;
pub mod secret;
pub mod arena;
pub mod shared;
pub mod witness;
