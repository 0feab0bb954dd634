//! The guest's architecture: everything that is a pure function of the configuration.
#![forbid(unsafe_code)]
