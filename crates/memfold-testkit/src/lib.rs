//! memfold-testkit
