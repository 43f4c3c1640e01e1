//! The acceptance scenarios, one test each, under their names.

mod a_admission;
mod c_plans;
mod d_signals;
mod e_store;
mod g_reads;
mod replicas;
mod t_second_set;
