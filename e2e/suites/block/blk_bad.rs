//! `memfold blk` with invalid arguments, and TLS with valid and invalid certificates.
use crate::common::blk::{Blk, binary, have, run, works};
use crate::common::{Scratch, assert_refused, memfold};
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::Stdio;

fn refused(arguments: &[&str], words: &[&str]) {
    let mut command = memfold(&binary(), &[&["blk"], arguments].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    // A server that starts prints its address and would run forever.
    if !line.is_empty() {
        child.kill().unwrap();
    }
    assert_refused(&child.wait_with_output().unwrap(), 125, words);
}

#[test]
fn bad_settings_are_refused_and_overwrite_nothing() {
    let scratch = Scratch::new();
    let sock = scratch.path("sock");
    let unix = ["--unix", sock.as_str()];
    let with = |flags: &[&str], words: &[&str]| refused(&[flags, &unix].concat(), words);
    with(&[], &["--size"]);
    with(&["--size", "0"], &["--size", "0 bytes"]);
    with(&["--size", "1000"], &["--size", "multiple of 512"]);
    with(&["--size", "99999T"], &["--size", "at most"]);
    with(&["--size", "x"], &["--size", "\"x\""]);
    with(&["--size", "1M", "--limit", "1M"], &["--limit", "at least 8M"]);
    with(&["--size", "1M", "--limit", "900T"], &["--limit", "more than the memory"]);
    with(&["--size", "60T", "--limit", "8M"], &["--size", "Raise the limit"]);
    with(&["--size", "1M", "--block", "5K"], &["--block", "\"5K\""]);
    with(&["--size", "1M", "--codec", "lzma"], &["--codec", "lzma"]);
    with(&["--size", "1M", "--recompress", "lzma"], &["--recompress", "lzma"]);
    with(&["--size", "1M", "--sector", "1024"], &["--sector"]);
    with(&["--size", "1M", "--connections", "0"], &["--connections"]);
    with(&["--export", "a"], &["--export", "NAME=SIZE"]);
    with(&["--export", "a=1M", "--export", "a=2M"], &["--export", "twice"]);
    with(&["--export", "a=0"], &["--export", "0 bytes"]);
    with(&["--size", "1M", "--writeback", "/nowhere/x"], &["--writeback", "/nowhere/x"]);
    with(&["--size", "1M", "--writeback-size", "1M"], &["--writeback-size", "--writeback DIR"]);
    with(&["--size", "1M", "--tls-cert", "x"], &["--tls-key"]);
    with(&["--size", "1M", "--what"], &["--what"]);
    refused(&["--size", "1M"], &["--unix PATH, --tcp"]);
    refused(&["--size", "1M", "--tcp", "nonsense"], &["--tcp", "nonsense"]);
    refused(&["--size", "1M", "--tcp", "0.0.0.0:0"], &["TLS is required"]);
    refused(&["--size", "1M", "--unix", "/nowhere/sock"], &["--unix", "/nowhere/sock"]);
    refused(&["--size", "1M", "--unix", &"x".repeat(200)], &["--unix"]);
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    refused(
        &["--size", "1M", "--tcp", &busy.local_addr().unwrap().to_string()],
        &["--tcp", "in use"],
    );
    let file = scratch.file("file", "precious", 0o644);
    refused(&["--size", "1M", "--unix", &file], &["--unix", "not a socket"]);
    with(&["--size", "1M", "--save", &file], &["--save", "no image"]);
    with(&["--size", "1M", "--save", "/nowhere/image"], &["--save", "directory"]);
    with(&["--size", "1M", "--persist", &file], &["--persist", "no image"]);
    with(&["--load", &file], &["--load", "no image"]);
    with(&["--load", "/nowhere/image"], &["--load", "No such file"]);
    with(&["--persist", &scratch.path("new")], &["--persist", "--size"]);
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    assert!(!fs::exists(&sock).unwrap(), "a server that does not start leaves no socket");
}

#[test]
fn another_servers_socket_and_image_are_left_alone() {
    let scratch = Scratch::new();
    let image = scratch.path("image");
    let blk = Blk::start(&["--size", "1M", "--persist", &image]);
    let sock = blk.scratch.path("sock");
    refused(&["--size", "1M", "--unix", &sock], &["--unix", "another server uses this socket"]);
    let other = scratch.path("other");
    refused(&["--persist", &image, "--unix", &other], &["--persist", "another memfold blk"]);
    blk.stop();
    let unix = ["--unix", other.as_str()];
    let with = |flags: &[&str], words: &[&str]| refused(&[flags, &unix].concat(), words);
    with(&["--size", "2M", "--persist", &image], &["--persist", "1048576"]);
    with(&["--size", "2M", "--load", &image], &["--load", "1048576"]);
    with(&["--persist", &image, "--load", &image], &["--load", "Leave --load out"]);
    let good = fs::read(&image).unwrap();
    for (name, at, words) in
        [("version", 16, "newer memfold"), ("damaged", 21, "damaged"), ("record", 4100, "image")]
    {
        let mut bytes = good.clone();
        bytes[at] ^= 0x40;
        let path = scratch.file(name, &bytes, 0o600);
        with(&["--persist", &path], &["--persist", words]);
        with(&["--load", &path], &["--load", words]);
        assert_eq!(fs::read(&path).unwrap(), bytes, "{name}");
    }
}

/// Makes a certificate authority, and certificates signed by it.
fn certificates(scratch: &Scratch, name: &str) -> String {
    let directory = scratch.path(name);
    fs::create_dir(&directory).unwrap();
    let at = |file: &str| format!("{directory}/{file}");
    let (key, ca) = (at("ca-key.pem"), at("ca-cert.pem"));
    let new = ["req", "-newkey", "rsa:2048", "-nodes", "-batch"];
    works(
        "openssl",
        &[&new[..], &["-x509", "-days", "2", "-subj", "/CN=ca", "-keyout", &key, "-out", &ca]]
            .concat(),
    );
    for (who, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let (own, request, certificate) =
            (at(&format!("{who}-key.pem")), at("request"), at(&format!("{who}-cert.pem")));
        let extension = scratch.file(
            "ext",
            format!("subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage={usage}\n"),
            0o600,
        );
        works(
            "openssl",
            &[&new[..], &["-subj", "/CN=localhost", "-keyout", &own, "-out", &request]].concat(),
        );
        let sign = [
            "x509",
            "-req",
            "-days",
            "2",
            "-CAcreateserial",
            "-in",
            &request,
            "-out",
            &certificate,
        ];
        works(
            "openssl",
            &[&sign[..], &["-CA", &ca, "-CAkey", &key, "-extfile", &extension]].concat(),
        );
    }
    directory
}

#[test]
fn tls_lets_in_whom_it_should_and_nobody_else() {
    if !have(&["openssl", "nbdinfo", "nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let (good, other) = (certificates(&scratch, "good"), certificates(&scratch, "other"));
    let at = |directory: &str, file: &str| format!("{directory}/{file}");
    let (cert, key, ca) =
        (at(&good, "server-cert.pem"), at(&good, "server-key.pem"), at(&good, "ca-cert.pem"));
    let refused_with = |flags: &[&str], words: &[&str]| {
        refused(&[&["--size", "1M", "--tcp", "127.0.0.1:0"], flags].concat(), words)
    };
    refused_with(
        &["--tls-cert", &cert, "--tls-key", &at(&other, "server-key.pem")],
        &["TLS", "does not match"],
    );
    refused_with(&["--tls-cert", &key, "--tls-key", &key], &["TLS", "no certificate"]);
    refused_with(&["--tls-cert", &cert, "--tls-key", &cert], &["TLS", "no private key"]);
    refused_with(&["--tls-cert", "/nowhere/x", "--tls-key", &key], &["TLS", "/nowhere/x"]);

    let serve = |address: &str, more: &[&str]| {
        let base =
            ["blk", "--size", "8M", "--tcp", address, "--tls-cert", &cert, "--tls-key", &key];
        Blk::spawn(Scratch::new(), memfold(&binary(), &[&base[..], more].concat()))
    };
    let port = |blk: &Blk| blk.uri.trim_end_matches('/').rsplit(':').next().unwrap().to_string();
    let info = |scheme: &str, blk: &Blk, directory: &str| {
        let uri = format!("{scheme}://localhost:{}/?tls-certificates={directory}", port(blk));
        run("nbdinfo", &[&uri])
    };
    // A server on a public address requires TLS.
    let blk = serve("0.0.0.0:0", &[]);
    assert!(
        info("nbds", &blk, &good).status.success(),
        "{}",
        String::from_utf8_lossy(&info("nbds", &blk, &good).stderr)
    );
    assert!(
        !info("nbds", &blk, &other).status.success(),
        "the server's certificate is of an authority that is not trusted"
    );
    assert!(!info("nbd", &blk, &good).status.success(), "without TLS");
    let bytes = crate::common::blk::real_bytes(5_000_000);
    let (file, back) = (scratch.file("file", &bytes, 0o600), scratch.path("back"));
    let uri = format!("nbds://localhost:{}/?tls-certificates={good}", port(&blk));
    works("nbdcopy", &["--connections=2", &file, &uri]);
    works("nbdcopy", &[&uri, &back]);
    assert!(fs::read(&back).unwrap()[..bytes.len()] == bytes);
    blk.stop();
    // A server on loopback offers TLS but does not require it.
    let blk = serve("127.0.0.1:0", &[]);
    assert!(
        info("nbds", &blk, &good).status.success() && info("nbd", &blk, &good).status.success()
    );
    blk.stop();
    // Only clients with a certificate signed by the authority may connect.
    let blk = serve("0.0.0.0:0", &["--tls-client-ca", &ca]);
    assert!(info("nbds", &blk, &good).status.success());
    let nobody = scratch.path("nobody");
    fs::create_dir(&nobody).unwrap();
    fs::copy(at(&good, "ca-cert.pem"), at(&nobody, "ca-cert.pem")).unwrap();
    assert!(!info("nbds", &blk, &nobody).status.success(), "no certificate");
    for file in ["client-cert.pem", "client-key.pem"] {
        fs::copy(at(&other, file), at(&nobody, file)).unwrap();
    }
    assert!(!info("nbds", &blk, &nobody).status.success(), "another authority's");
    blk.stop();
}
