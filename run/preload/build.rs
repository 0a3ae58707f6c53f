//! How the preload library is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for arg in [
        // It has threads and handlers in the program: it must never be unloaded.
        "-Wl,-z,nodelete",
        // Every symbol is bound before the constructor runs: binding one later takes the dynamic
        // linker's locks.
        "-Wl,-z,now",
        "-Wl,-soname,libmemfold_preload.so",
        // The kernel can execute it (executed.rs).
        "-Wl,-e,memfold_executed",
        // A library without std names no libc by itself. It must, to get the right versions of
        // symbols and to have its constructor run after libc's.
        "-Wl,--no-as-needed",
        "-lc",
    ] {
        println!("cargo:rustc-cdylib-link-arg={arg}");
    }
}
