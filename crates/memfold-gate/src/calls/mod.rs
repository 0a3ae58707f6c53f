//! The call table: what each system call names.
