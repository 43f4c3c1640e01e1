//! The service from outside: real servers, real clients, and clocks that tests move.

mod contract;
mod harness;
mod hostile_input;
mod kill;
mod many_clients;
mod reservations_outlive;
mod scenarios;
