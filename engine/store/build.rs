//! Links the libdeflate that the crate libdeflate-sys built.
//!
//! That crate's Rust part needs std, which the preload library can't have, because it has its own
//! panic handler. So no code names the crate. Its bindings are in `codec/deflate.rs`, and only the
//! C library is taken from the output of its build script.

fn main() {
    let root = std::env::var("DEP_LIBDEFLATE_ROOT")
        .expect("libdeflate-sys says where it built libdeflate");
    println!("cargo::rustc-link-search=native={root}/lib");
    println!("cargo::rustc-link-lib=static=deflate");
    println!("cargo::rerun-if-changed=build.rs");
}
