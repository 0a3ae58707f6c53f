//! Tests `memfold blk` with common NBD clients.
use crate::common::blk::{Blk, binary, have, path, real_bytes, run, text, works};
use crate::common::{Scratch, memfold};
use memfold_os::thread::stat_field;
use serde_json::json;
use std::fs;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

#[test]
fn files_copied_over_several_connections_come_out_equal() {
    if !have(&["nbdcopy", "nbdinfo", "cmp"]) {
        return;
    }
    let blk = Blk::start(&["--size", "64M", "--limit", "256M"]);
    // Not a multiple of the sector size.
    let bytes = real_bytes(40_000_123);
    let file = blk.scratch.file("file", &bytes, 0o600);
    works("nbdcopy", &["--connections=4", "--requests=16", &file, &blk.uri]);
    let back = blk.scratch.path("back");
    works("nbdcopy", &["--connections=4", &blk.uri, &back]);
    let file_bytes = fs::read(&back).unwrap();
    assert_eq!(file_bytes.len(), 64 << 20);
    assert!(
        file_bytes[..bytes.len()] == bytes
            && file_bytes[bytes.len()..].iter().all(|byte| *byte == 0)
    );
    let map = works("nbdinfo", &["--map", &blk.uri]);
    assert!(map.lines().last().unwrap().ends_with("hole,zero"), "{map}");
    let list = works("nbdinfo", &["--list", "--json", &blk.uri]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let export = &list["exports"][0];
    assert_eq!(
        (&export["export-size"], &export["can_multi_conn"]),
        (&json!(64 << 20), &json!(true)),
        "{list}"
    );
    let stat = blk.stat();
    assert!(
        stat["mm_stat"]["mem_used_total"].as_u64().unwrap() < 36 << 20,
        "it is compressed: {stat}"
    );
    let scratch = blk.stop();
    assert!(!scratch.0.join("sock").exists(), "the socket is gone");
}

#[test]
fn fio_verifies_what_it_wrote_in_mixed_sizes_at_512_bytes() {
    if !have(&["fio"]) {
        return;
    }
    let blk = Blk::start(&["--size", "32M", "--codec", "zstd:1"]);
    let uri = format!("--uri={}", blk.uri);
    let common = [
        "--ioengine=nbd",
        &uri,
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--randseed=7",
        "--buffer_compress_percentage=60",
    ];
    for own in [
        &[
            "--name=random",
            "--rw=randwrite",
            "--bsrange=512-64k",
            "--blockalign=512",
            "--iodepth=16",
            "--size=16M",
        ][..],
        &[
            "--name=mixed",
            "--rw=randrw",
            "--bs=4k",
            "--iodepth=8",
            "--size=16M",
            "--offset=16M",
            "--verify_backlog=64",
        ],
        &["--name=trimmed", "--rw=trimwrite", "--bs=8k", "--size=8M"],
    ] {
        works("fio", &[&common[..], own].concat());
    }
    let stat = blk.stat();
    let counters = &stat["exports"][0]["counters"];
    assert!(
        counters["partial_writes"].as_u64().unwrap() > 100
            && counters["zeroings"].as_u64().unwrap() > 100,
        "{stat}"
    );
    assert_eq!(stat["io_stat"]["failed_writes"], 0);
}

#[test]
fn qemu_finds_its_patterns_also_across_discards_and_zeros() {
    if !have(&["qemu-io", "qemu-img"]) {
        return;
    }
    let blk = Blk::start(&["--size", "16M", "--export", "fixed=1M,ro"]);
    let io = |uri: &str, commands: &[&str]| {
        let mut arguments = vec!["-f", "raw", "--cache=none"];
        commands.iter().for_each(|command| arguments.extend(["-c", command]));
        works("qemu-io", &[&arguments[..], &[uri]].concat())
    };
    let output = io(
        &blk.uri,
        &[
            "write -P 0x11 0 1M",
            "write -P 0x22 512 1k",
            "read -P 0x11 0 512",
            "read -P 0x22 512 1k",
            "read -P 0x11 1536 4k",
            "discard 4k 8k",
            "read -P 0 4k 8k",
            "write -z 100k 100k",
            "read -P 0 100k 100k",
            "read -P 0x11 200k 64k",
            "write -z -u 300k 4k",
            "read -P 0 300k 4k",
            "write -f -P 0x33 700k 12345",
            "read -P 0x33 700k 12345",
            "flush",
        ],
    );
    assert!(
        !output.contains("Pattern verification failed") && !output.contains("failed:"),
        "{output}"
    );
    let map = works("qemu-img", &["map", "--output=json", "-f", "raw", &blk.uri]);
    assert!(map.contains("\"data\": false"), "{map}");
    let refusal = run("qemu-io", &["-f", "raw", "-c", "write 0 512", &blk.export("fixed")]);
    assert!(
        !refusal.status.success()
            && String::from_utf8_lossy(&refusal.stderr).contains("Permission denied")
    );
}

#[test]
fn a_client_killed_while_it_writes_leaves_a_server_that_goes_on() {
    if !have(&["nbdcopy", "fio"]) {
        return;
    }
    let blk = Blk::start(&["--size", "64M", "--connections", "4"]);
    let bytes = real_bytes(8 << 20);
    let file = blk.scratch.file("file", &bytes, 0o600);
    let uri = format!("--uri={}", blk.uri);
    let flags = [
        "--name=w",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bs=64k",
        "--iodepth=16",
        "--offset=16M",
        "--size=32M",
    ];
    for _ in 0..3 {
        // In one process, so that one kill ends it.
        let endless = ["--thread", "--time_based", "--runtime=600"];
        let mut fio =
            Command::new("fio").args(flags).args(endless).stdout(Stdio::null()).spawn().unwrap();
        let before = || blk.stat()["exports"][0]["counters"]["writes"].as_u64().unwrap();
        let start = before();
        while before() < start + 50 {
            assert!(fio.try_wait().unwrap().is_none());
        }
        fio.kill().unwrap();
        fio.wait().unwrap();
        // All four connections are free again.
        works("nbdcopy", &["--connections=4", &file, &blk.uri]);
        let back = blk.scratch.path("back");
        works("nbdcopy", &[&blk.uri, &back]);
        assert!(fs::read(&back).unwrap()[..bytes.len()] == bytes);
    }
    blk.stop();
}

#[test]
fn flushed_data_survives_a_kill_and_all_data_a_clean_end() {
    if !have(&["qemu-io", "nbdcopy"]) {
        return;
    }
    let flags = |image: &str| ["--size", "32M", "--persist", image].map(str::to_string);
    let start = |scratch: Scratch| {
        let flags = flags(&scratch.path("image"));
        Blk::start_in(scratch, &flags.each_ref().map(String::as_str))
    };
    let io = |blk: &Blk, commands: &[&str]| {
        let mut arguments = vec!["-f", "raw", "--cache=none"];
        commands.iter().for_each(|command| arguments.extend(["-c", command]));
        let output = works("qemu-io", &[&arguments[..], &[&blk.uri]].concat());
        assert!(!output.contains("failed"), "{output}");
    };
    let mut blk = start(Scratch::new());
    // Each round kills the server after a flush, or after a write with FUA.
    for round in 1..5u32 {
        let at = round * 300;
        let write = match round % 2 {
            0 => format!("write -f -P {round} {at}k 70k"),
            _ => format!("write -P {round} {at}k 70k"),
        };
        let commands = [write.as_str(), "flush"];
        io(&blk, &commands[..1 + round as usize % 2]);
        blk = start(blk.kill());
        let reads: Vec<String> =
            (1..=round).map(|n| format!("read -P {n} {}k 70k", n * 300)).collect();
        io(&blk, &reads.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let bytes = real_bytes(16 << 20);
    let file = blk.scratch.file("file", &bytes, 0o600);
    works("nbdcopy", &[&file, &blk.uri]);
    blk = start(blk.stop());
    let back = blk.scratch.path("back");
    works("nbdcopy", &[&blk.uri, &back]);
    assert!(fs::read(&back).unwrap()[..bytes.len()] == bytes);
    assert!(blk.stat()["exports"][0]["image_bytes"].as_u64().unwrap() > 1 << 20);
    // A new server takes over the socket of a killed server, but not the image of a running one.
    let image = blk.scratch.path("image");
    let output =
        memfold(&binary(), &["blk", "--persist", &image, "--tcp", "127.0.0.1:0"]).output().unwrap();
    crate::common::assert_refused(
        &output,
        125,
        &["--persist", "another memfold blk uses the image"],
    );
    blk.stop();
}

#[test]
fn an_image_is_saved_and_loaded_with_all_its_devices() {
    if !have(&["nbdcopy", "nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("image");
    let flags = ["--size", "16M", "--export", "b=1M", "--save", &image, "--codec", "delta"];
    let blk = Blk::start(&flags);
    let bytes = real_bytes(8 << 20);
    let file = scratch.file("file", &bytes, 0o600);
    works("nbdcopy", &[&file, &blk.uri]);
    let b = scratch.file("b", [7; 1000], 0o600);
    works("nbdcopy", &[&b, &blk.export("b")]);
    blk.stop();
    assert!(fs::metadata(&image).unwrap().len() < 7 << 20);
    // Sizes come from the image. It can be loaded with another codec and block size.
    let blk = Blk::start(&["--load", &image, "--read-only", "--codec", "zstd:1", "--block", "64K"]);
    let back = scratch.path("back");
    works("nbdcopy", &[&blk.uri, &back]);
    let file_bytes = fs::read(&back).unwrap();
    assert!(file_bytes.len() == 16 << 20 && file_bytes[..bytes.len()] == bytes);
    works("nbdcopy", &[&blk.export("b"), &back]);
    assert_eq!(fs::read(&back).unwrap()[..1000], [7; 1000]);
    assert!(works("nbdinfo", &[&blk.uri]).contains("is_read_only: true"));
    assert!(
        works("nbdinfo", &["--map", &blk.uri]).contains("hole,zero"),
        "holes come back as holes"
    );
    blk.stop();
}

#[test]
fn excess_data_goes_to_a_file_and_a_full_file_is_no_room() {
    if !have(&["nbdcopy", "fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let directory = scratch.path("");
    let blk = Blk::start(&["--size", "64M", "--limit", "16M", "--writeback", &directory]);
    let bytes = real_bytes(60 << 20);
    let file = scratch.file("file", &bytes, 0o600);
    works("nbdcopy", &[&file, &blk.uri]);
    let back = scratch.path("back");
    works("nbdcopy", &[&blk.uri, &back]);
    assert!(fs::read(&back).unwrap()[..bytes.len()] == bytes);
    let stat = blk.stat();
    assert!(
        stat["mm_stat"]["mem_used_total"].as_u64().unwrap() <= (16 << 20) + (64 << 10),
        "{stat}"
    );
    assert!(
        stat["bd_stat"]["bd_count"].as_u64().unwrap() > 1000
            && stat["bd_stat"]["bd_reads"].as_u64().unwrap() > 1000
    );
    blk.stop();
    let flags =
        ["--size", "64M", "--limit", "8M", "--writeback", &directory, "--writeback-size", "4M"];
    let blk = Blk::start(&flags);
    let full = run("nbdcopy", &[&file, &blk.uri]);
    assert!(
        !full.status.success() && String::from_utf8_lossy(&full.stderr).contains("No space left")
    );
    assert!(blk.stat()["writeback"]["error"].as_str().unwrap().contains("full"));
    // The server keeps the data that it accepted. Discards make room for new data.
    let uri = format!("--uri={}", blk.uri);
    works("fio", &["--name=t", "--ioengine=nbd", &uri, "--rw=trim", "--bs=1M", "--size=64M"]);
    let part = scratch.file("part", &bytes[..4 << 20], 0o600);
    works("nbdcopy", &[&part, &blk.uri]);
    works("nbdcopy", &[&blk.uri, &back]);
    assert!(fs::read(&back).unwrap()[..4 << 20] == bytes[..4 << 20]);
    blk.stop();
}

#[test]
fn limit_below_what_is_held_is_named_as_not_kept() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let blk = Blk::start(&["--size", "64M", "--limit", "128M"]);
    works("nbdcopy", &[&scratch.file("file", real_bytes(60 << 20), 0o600), &blk.uri]);
    let answer = blk.asked(&["set", "--limit", "8M"]);
    let words =
        "is held, which is above the limit: nothing is dropped, and writes of new data fail";
    assert!(answer.contains("limit 8.0 MiB") && answer.contains(words), "{answer}");
    let answer = blk.asked(&["set", "--limit", "128M"]);
    assert!(!answer.contains("above the limit"), "{answer}");
    blk.stop();
}

#[test]
fn it_is_asked_and_told_while_it_serves() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let blk = Blk::start(&["--size", "64M", "--limit", "64M", "--writeback", &scratch.path("")]);
    let bytes = real_bytes(24 << 20);
    let file = scratch.file("file", &bytes, 0o600);
    works("nbdcopy", &[&file, &blk.uri]);
    let answer = blk.asked(&["stat"]);
    assert!(
        answer.contains("export \"\": 64.0 MiB")
            && answer.contains("mm_stat: ")
            && answer.contains("bd_stat: "),
        "{answer}"
    );
    let figure = |group: &str, name: &str| blk.stat()[group][name].as_u64().unwrap();
    let compressed_bytes = figure("mm_stat", "compr_data_size");
    let answer: serde_json::Value =
        serde_json::from_str(&blk.asked(&["recompress", "--pick", "all", "--codec", "zstd:9"]))
            .unwrap();
    assert!(answer["smaller"].as_u64().unwrap() > 100, "{answer}");
    assert_eq!(
        compressed_bytes - figure("mm_stat", "compr_data_size"),
        answer["gained_bytes"].as_u64().unwrap()
    );
    blk.asked(&["idle"]);
    let states = blk.asked(&["stat", "--block-state"]);
    assert!(
        states.lines().count() > 1000 && states.lines().all(|line| line.contains('i')),
        "{}",
        &states[..200]
    );
    let answer: serde_json::Value = serde_json::from_str(&blk.asked(&["writeback"])).unwrap();
    assert!(answer["written_bytes"].as_u64().unwrap() > 20 << 20, "{answer}");
    assert!(blk.asked(&["stat", "--block-state"]).lines().all(|line| line.contains('w')));
    blk.asked(&["compact"]);
    assert!(figure("mm_stat", "mem_used_total") < 8 << 20);
    assert_eq!(
        blk.asked(&["set", "--limit", "32M", "--writeback-limit", "none"]),
        "limit 32.0 MiB, writeback limit none\n"
    );
    assert_eq!(figure("mm_stat", "mem_limit"), 32 << 20);
    blk.asked(&["flush"]);
    let back = scratch.path("back");
    works("nbdcopy", &[&blk.uri, &back]);
    assert!(fs::read(&back).unwrap()[..bytes.len()] == bytes);
    for (arguments, words) in [
        (&["set"][..], &["--limit"][..]),
        (&["set", "--limit", "1M"], &["1048576", "too small"]),
        (&["set", "--limit", "lots"], &["--limit", "lots"]),
        (&["recompress", "--codec", "lzma"], &["lzma"]),
        (&["recompress", "--pick", "some"], &["some", "idle"]),
        (&["idle", "--older", "x"], &["--older"]),
        (&["stat", "--block-state", "--export", "none"], &["none"]),
        (&["stat", "1"], &["Process 1"]),
        (&["stat", "--control", "/nowhere/x"], &["/nowhere/x", "no server answers"]),
    ] {
        crate::common::assert_refused(&blk.ask(arguments), 125, words);
    }
    let pid = blk.child.id().to_string();
    // Without a PID, `stat` finds the user's only server, or lists all of them.
    let output = memfold(&binary(), &["blk", "stat"])
        .env("XDG_RUNTIME_DIR", &blk.scratch.0)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(String::from_utf8_lossy(&text).contains(&pid), "{}", String::from_utf8_lossy(&text));
    let scratch = blk.stop();
    let mut question = memfold(&binary(), &["blk", "stat", &pid]);
    crate::common::assert_refused(
        &question.env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap(),
        125,
        &[&pid, "no memfold blk"],
    );
}

#[test]
fn a_socket_that_systemd_gives_is_served() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let socket = scratch.path("given");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut command = Command::new("sh");
    let script = r#"LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" blk --size 1M"#;
    command.args(["-c", script]).arg(binary().join("memfold")).stdin(Stdio::null());
    let fd = listener.as_raw_fd();
    // SAFETY: `dup2` is async-signal-safe; the copy has no close-on-exec flag.
    unsafe {
        command.pre_exec(move || {
            // `dup2` of a descriptor to itself would keep its close-on-exec flag.
            if libc::dup2(fd, 3) != 3 || libc::fcntl(3, libc::F_SETFD, 0) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        })
    };
    let blk = Blk::spawn(scratch, command);
    assert!(blk.uri.ends_with(&socket), "{}", blk.uri);
    assert!(works("nbdinfo", &["--size", &blk.uri]).contains("1048576"));
    let scratch = blk.stop();
    assert!(scratch.0.join("given").exists(), "it is systemd's");
}

#[test]
fn a_file_system_made_and_filled_on_it_is_found_clean() {
    if !have(&["nbdfuse", "mke2fs", "e2fsck", "debugfs", "fusermount3"]) {
        return;
    }
    if !fs::exists("/dev/fuse").unwrap() {
        eprintln!("SKIPPED, NOTHING WAS TESTED: no /dev/fuse");
        return;
    }
    let blk = Blk::start(&["--size", "64M", "--limit", "32M"]);
    let bytes = real_bytes(20 << 20);
    let files = blk.scratch.path("files");
    fs::create_dir(&files).unwrap();
    (0..20)
        .for_each(|n| fs::write(format!("{files}/{n}"), &bytes[n << 20..(n + 1) << 20]).unwrap());
    let mount_point = blk.scratch.path("mounted");
    fs::create_dir(&mount_point).unwrap();
    let disk = format!("{mount_point}/nbd");
    let child = Command::new("nbdfuse").args([&mount_point, &blk.uri]).spawn().unwrap();
    let mut fuse = Fuse { child, mounted: mount_point };
    while !fs::exists(&disk).unwrap_or(false) {
        if fuse.child.try_wait().unwrap().is_some() {
            eprintln!("SKIPPED, NOTHING WAS TESTED: nbdfuse can't mount here");
            return;
        }
    }
    works("mke2fs", &["-q", "-t", "ext4", "-d", &files, &disk]);
    works("e2fsck", &["-f", "-n", &disk]);
    let back = blk.scratch.path("back");
    works("debugfs", &["-R", &format!("dump 7 {back}"), &disk]);
    assert!(fs::read(&back).unwrap() == bytes[7 << 20..8 << 20]);
    drop(fuse);
    blk.stop();
}

/// A mounted disk. Dropping it unmounts the disk, also when the test fails.
struct Fuse {
    child: std::process::Child,
    mounted: String,
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let _ = Command::new("fusermount3").args(["-u", &self.mounted]).status();
        let _ = self.child.wait();
    }
}

#[test]
fn swap_safe_is_locked_in_memory_and_never_waits_for_its_own_io() {
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: locking memory needs root");
        return;
    }
    if !have(&["nbdcopy"]) {
        return;
    }
    let blk = Blk::start(&["--size", "64M", "--limit", "64M", "--swap-safe"]);
    let file = blk.scratch.file("file", real_bytes(8 << 20), 0o600);
    works("nbdcopy", &[&file, &blk.uri]);
    let pid = blk.child.id();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let locked_size = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap().trim();
    assert_ne!(locked_size, "0 kB");
    // PF_MEMALLOC_NOIO must be set on every thread if this user may set it (CAP_SYS_RESOURCE).
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    let has_right = u64::from_str_radix(capabilities, 16).unwrap() >> 24 & 1;
    let right_bit = has_right * 0x8_0000;
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let stat = fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        let flags: u64 =
            stat.rsplit_once(')').unwrap().1.split_whitespace().nth(6).unwrap().parse().unwrap();
        assert_eq!(flags & 0x8_0000, right_bit, "{stat}");
    }
    // The server still frees memory.
    let held_bytes = || blk.stat()["mm_stat"]["mem_used_total"].as_u64().unwrap();
    let full = held_bytes();
    let zeros = blk.scratch.file("zeros", vec![0; 8 << 20], 0o600);
    works("nbdcopy", &["--destination-is-zero", "--allocated", &zeros, &blk.uri]);
    blk.asked(&["compact"]);
    assert!(held_bytes() < full / 2, "{full} -> {}", held_bytes());
    blk.stop();
}

/// Returns the processor time that a process has used, in nanoseconds.
fn cpu_ns(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let ticks =
        |number: usize| stat_field(stat.as_bytes(), number).unwrap().parse::<u64>().unwrap();
    // SAFETY: the call has no preconditions.
    (ticks(14) + ticks(15)) * 1_000_000_000 / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64
}

#[test]
fn a_server_without_descriptors_sleeps_until_there_are_some() {
    let blk = Blk::start(&["--size", "1M"]);
    let pid = blk.child.id();
    let set_limit = |count| {
        let limit = libc::rlimit { rlim_cur: count, rlim_max: 1024 };
        // SAFETY: the limit is a local variable, and the process is a child of this one.
        let set = unsafe {
            libc::prlimit(pid as i32, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut())
        };
        assert_eq!(set, 0);
    };
    set_limit(3);
    let control = blk.scratch.path(&format!("memfold/{pid}.blk"));
    let waits = UnixStream::connect(control).unwrap();
    let before = cpu_ns(pid);
    let start_ns = memfold_os::thread::cpu_ns();
    while memfold_os::thread::cpu_ns() - start_ns < 300_000_000 {}
    let cpu_time = cpu_ns(pid) - before;
    assert!(cpu_time < 75_000_000, "{cpu_time} ns in which a thread that spins gets 300 ms");
    set_limit(1024);
    drop(waits);
    assert!(blk.stat()["exports"].is_array());
    blk.stop();
}

#[test]
fn help_names_every_flag_and_subcommand() {
    let help = text(&memfold(&binary(), &["blk", "--help"]).output().unwrap());
    for word in [
        "--size",
        "--limit",
        "--unix",
        "--persist",
        "--writeback",
        "recompress",
        "stat",
        "Exit status",
    ] {
        assert!(help.contains(word), "{word}: {help}");
    }
    let mut all = String::new();
    Command::new(binary().join("memfold"))
        .args(["blk", "stat", "--help"])
        .env("PATH", path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
        .stdout
        .unwrap()
        .read_to_string(&mut all)
        .unwrap();
    assert!(all.contains("--block-state"));
}
