//! A device over vhost-user, end to end: clients connect to the socket as a VMM does, and act as a
//! guest's driver.

mod client;
mod connections;
mod frontend;
mod nonsense;
mod operations;
mod served;
