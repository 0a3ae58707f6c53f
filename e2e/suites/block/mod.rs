//! Block devices.
mod blk;
mod blk_bad;
mod blk_vhost;
