//! `memfold blk --vhost`: the sockets for virtual machines. memfold-block tests the protocol, and
//! `scripts/guest-test` runs a virtual machine.
use crate::common::blk::{Blk, binary};
use crate::common::{Scratch, assert_refused, memfold};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

/// Gets the features as a VMM does, with the protocol's first request.
fn features(path: &str) -> (UnixStream, u64) {
    let mut stream = UnixStream::connect(path).unwrap();
    let (get_features, version, bytes) = (1_u32, 1_u32, 0_u32);
    stream.write_all(&[get_features, version, bytes].map(u32::to_le_bytes).concat()).unwrap();
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).unwrap();
    (stream, u64::from_le_bytes(answer[12..].try_into().unwrap()))
}

const READ_ONLY: u64 = 1 << 5;

fn command(scratch: &Scratch, flags: &[&str]) -> Command {
    let mut command = memfold(&binary(), &[&["blk"], flags].concat());
    command.env("XDG_RUNTIME_DIR", &scratch.0);
    command
}

#[test]
fn each_device_has_a_socket_of_its_own_until_the_server_ends() {
    let scratch = Scratch::new();
    let [first, second] = ["first", "second"].map(|name| scratch.path(name));
    let by_name = format!("b={second}");
    let flags = ["--size", "1M", "--export", "b=2M,ro", "--vhost", &first, "--vhost", &by_name];
    let mut blk = Blk::start_in(scratch, &flags);
    for path in [&first, &second] {
        let mut line = String::new();
        blk.out.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), format!("vhost-user-blk:{path}"));
    }
    let (feature_set, offer) = features(&first);
    assert_eq!(offer & READ_ONLY, 0);
    assert_eq!(features(&second).1 & READ_ONLY, READ_ONLY);
    let _scratch = blk.stop();
    assert!(!fs::exists(&first).unwrap() && !fs::exists(&second).unwrap(), "sockets are left");
    drop(feature_set);
}

#[test]
fn a_vmm_that_makes_no_sense_costs_a_line_and_no_disk() {
    let scratch = Scratch::new();
    let path = scratch.path("disk");
    let mut command = command(&scratch, &["--size", "1M", "--vhost", &path]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    UnixStream::connect(&path).unwrap().write_all(&[0xff; 64]).unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(
        line.contains("--vhost") && line.contains(&path) && line.contains("protocol"),
        "{line:?}"
    );
    // The server survives a closed stderr.
    UnixStream::connect(&path).unwrap().write_all(&[0xff; 64]).unwrap();
    features(&path);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn unusable_sockets_are_refused_and_overwrite_nothing() {
    let scratch = Scratch::new();
    let file = scratch.file("file", "precious", 0o644);
    let socket = scratch.path("sock");
    let nobody = format!("nobody={socket}");
    let with = |flags: &[&str], words: &[&str]| {
        let output = command(&scratch, &[&["--size", "1M"], flags].concat()).output().unwrap();
        assert_refused(&output, 125, words);
    };
    with(&["--vhost", &nobody], &["--vhost", "nobody", "--export"]);
    with(&["--vhost", ""], &["--vhost", "no path"]);
    with(&["--vhost", "a="], &["--vhost", "no path"]);
    with(&["--vhost", "/nowhere/sock"], &["--vhost", "/nowhere/sock"]);
    with(&["--vhost", &file], &["--vhost", "not a socket"]);
    with(&["--vhost", &socket, "--vhost", &socket], &["--vhost", "another server"]);
    assert_eq!(fs::read(&file).unwrap(), b"precious");
}
