//! A program whose data is larger than its memory and its swap file. The rest goes to a Redis
//! server.
//!
//!     redis-server --port 7000 --save "" &
//!     cargo run --release -p memfold-remote --example library -- redis://127.0.0.1:7000 /var/tmp
use memfold::Memory;
use memfold_remote::{Service, StoreSettings};
use std::error::Error;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const LIMIT: u64 = 32 << 20;
const DATA: usize = 256 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url, swap] = &args[..] else {
        return Err("give the store's URL and a directory for the swap file".into());
    };
    // Only this user may reach the socket, so its directory is closed to others.
    let dir = std::env::temp_dir().join(format!("memfold-library-{}", std::process::id()));
    fs::DirBuilder::new().mode(0o700).create(&dir)?;
    let result = run(url, swap, &dir.join("socket"));
    fs::remove_dir_all(&dir)?;
    result
}

fn run(url: &str, swap: &str, socket: &Path) -> Result<(), Box<dyn Error>> {
    let settings = StoreSettings::parse(url, Duration::from_secs(10))?;
    // The service is made first, so that it is dropped last: then it deletes its keys in the store.
    let _service = Service::start(settings, socket)?;
    let memory = Memory::builder()
        .limit_bytes(LIMIT)
        .set("swap", swap)
        .set("swap-size", "64M")
        .set("remote", url)
        .set("remote-size", "1G")
        .remote_socket(socket.to_str().ok_or("a path that is not text")?)
        .build()?;
    let mut region = memory.region(DATA)?;
    // Numbers that don't compress.
    let number =
        |i: usize| (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(i as u32 % 61);
    for (i, word) in region.as_mut_slice().chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&number(i).to_ne_bytes());
    }
    let right = region
        .as_slice()
        .chunks_exact(8)
        .enumerate()
        .all(|(i, word)| word == number(i).to_ne_bytes());
    let stats = memory.stats();
    let mib = |pages: u64| pages >> 8;
    println!(
        "{} MiB in {} MiB: {}; {} MiB to the swap file, {} on to the store, {} back from there",
        DATA >> 20,
        LIMIT >> 20,
        if right { "all bytes are right" } else { "WRONG BYTES" },
        mib(stats.pswpout.load(Relaxed)),
        mib(stats.remote_out.load(Relaxed)),
        mib(stats.remote_in.load(Relaxed)),
    );
    if right { Ok(()) } else { Err("wrong bytes".into()) }
}
