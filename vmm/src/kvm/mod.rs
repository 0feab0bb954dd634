//! KVM behind the ports of device assignment, and what the machine itself needs of it.

pub mod memslots;
pub mod routes;
mod routing_table;
mod sys;
pub mod vcpu;
pub mod vm;
