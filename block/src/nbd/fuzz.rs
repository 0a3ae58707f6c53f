//! Fuzz targets: each function takes any bytes and panics if a promise is broken. Built only for
//! tests and fuzzers.
//!
//! `lab/fuzz` runs them with libFuzzer. `tests_fuzz.rs` runs them on some thousand
//! mutations in every test run.
use super::negotiate::{self, AgreedOptions, NegotiationEnd, TlsPolicy};
use super::session::NbdSession;
use crate::device::{Device, DeviceMemory, MemorySettings, ZeroPolicy};
use crate::export::Export;
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Bytes of the device that a session may change.
const SIZE: u64 = (64 << 10) + 512;
/// Content of the device that a session has not chosen; nothing else has these bytes.
const SECRET: &[u8; 16] = b"\x9e\x37secret\x79\xb9\x7f\x4a\x7c\x15\xf3\x9c";
/// Most bytes that a client gets for each byte that it sends: the longest read, for a request.
const GAIN_MAX: usize = (SIZE as usize + 512) / 28 + 64;

/// A client that sends all its bytes before it reads an answer.
struct Link<'a> {
    from: &'a [u8],
    sent: usize,
    /// The last bytes that were sent, to find the secret across writes.
    tail: Vec<u8>,
    leaked: bool,
}

impl Read for Link<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.from.read(to)
    }
}

impl Write for Link<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.sent += bytes.len();
        self.tail.extend(bytes);
        self.leaked |= self.tail.windows(SECRET.len()).any(|window| window == SECRET);
        let keep = self.tail.len().saturating_sub(SECRET.len() - 1);
        self.tail.drain(..keep);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn exports() -> Vec<Arc<Export>> {
    let backing = DeviceMemory::new(&MemorySettings { pools: 1, ..MemorySettings::default() })
        .expect("defaults");
    let secret = Device::new(&backing, 32 << 10).expect("small");
    secret.write(&mut secret.io(), 0, &SECRET.repeat(2048)).expect("no limit");
    let own = Device::new(&backing, SIZE).expect("small");
    // The secret is removed, because it must not be sent later.
    own.write(&mut own.io(), 4096, &SECRET.repeat(2048)).expect("no limit");
    own.zero(&mut own.io(), 0, SIZE, ZeroPolicy::Hole).expect("no limit");
    vec![
        Arc::new(Export::new("", own, false, 512)),
        Arc::new(Export::new("secret", secret, true, 512)),
    ]
}

fn check(exports: &[Arc<Export>], link: &Link, len: usize, chosen: Option<&str>) {
    assert!(chosen == Some("secret") || !link.leaked, "bytes of another device");
    assert!(link.sent <= 4096 + len * GAIN_MAX, "{} bytes for {len}", link.sent);
    let mut objects = 0;
    for export in exports {
        objects += export.device().check().expect("intact").0;
    }
    assert_eq!(objects, exports[0].device().backing().stats().store.objects);
}

/// Runs a whole session, from the client's first byte on.
pub fn session(data: &[u8]) {
    let exports = exports();
    let mut link = Link { from: data, sent: 0, tail: Vec::new(), leaked: false };
    let mut export_name = None;
    if let Ok(no_zeroes) = negotiate::greet(&mut link)
        && let Ok(NegotiationEnd::Transmit(options)) =
            negotiate::negotiate(&mut link, &exports, TlsPolicy::Offered, no_zeroes)
    {
        export_name = Some(options.export.name().to_string());
        let _ = NbdSession::new(&mut link, &options).run();
    }
    check(&exports, &link, data.len(), export_name.as_deref());
}

/// Runs requests without negotiation. The first byte says what was negotiated.
pub fn requests(data: &[u8]) {
    let [option_bits, data @ ..] = data else { return };
    let exports = exports();
    let options = AgreedOptions {
        export: exports[0].clone(),
        structured: option_bits & 1 != 0,
        allocation: option_bits & 3 == 3,
    };
    let mut link = Link { from: data, sent: 0, tail: Vec::new(), leaked: false };
    let _ = NbdSession::new(&mut link, &options).run();
    check(&exports, &link, data.len(), Some(""));
}

/// Returns valid sessions and requests as seeds.
pub fn seeds() -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    use super::wire::{self, NbdRequest, command, flag, option};
    let request = |command, flags, offset, len, payload: &[u8]| {
        let request = NbdRequest { flags, command, cookie: *b"a cookie", offset, len };
        [request.bytes(), payload.to_vec()].concat()
    };
    let requests = [
        request(command::WRITE, flag::FUA, 512, 5000, &[7; 5000]),
        request(command::READ, 0, 0, SIZE as u32, &[]),
        request(command::BLOCK_STATUS, 0, 0, SIZE as u32, &[]),
        request(command::TRIM, 0, 4096, 8192, &[]),
        request(command::WRITE_ZEROES, flag::NO_HOLE | flag::FAST_ZERO, 1000, 20_000, &[]),
        request(command::WRITE, 0, 16384, 16384, &[9; 16384]),
        request(command::READ, flag::DF, 16384, 4096, &[]),
        request(command::CACHE, 0, 0, 4096, &[]),
        request(command::FLUSH, 0, 0, 0, &[]),
        request(command::DISCONNECT, 0, 0, 0, &[]),
    ];
    let option = |number: u32, data: &[u8]| {
        let mut all = wire::OPTION_MAGIC.to_be_bytes().to_vec();
        all.extend(number.to_be_bytes());
        all.extend((data.len() as u32).to_be_bytes());
        all.extend(data);
        all
    };
    let text = |text: &[u8]| [&(text.len() as u32).to_be_bytes()[..], text].concat();
    let context = [text(b""), 1u32.to_be_bytes().to_vec(), text(wire::CONTEXT)].concat();
    let hello = 3u32.to_be_bytes().to_vec();
    let modern = [
        hello.clone(),
        option(option::STRUCTURED_REPLY, &[]),
        option(option::LIST, &[]),
        option(option::LIST_META_CONTEXT, &context),
        option(option::SET_META_CONTEXT, &context),
        option(option::INFO, &[text(b"secret"), vec![0, 2, 0, 1, 0, 3]].concat()),
        option(option::GO, &[text(b""), vec![0, 0]].concat()),
        requests.concat(),
    ];
    let old = [hello.clone(), option(option::EXPORT_NAME, b""), requests.concat()];
    let tls = [hello, option(option::STARTTLS, &[]), option(option::ABORT, &[])];
    let streams = [0, 1, 3].map(|bits| [&[bits][..], &requests.concat()].concat());
    (vec![modern.concat(), old.concat(), tls.concat()], streams.to_vec())
}
