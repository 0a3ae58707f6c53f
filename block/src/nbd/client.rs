//! A simple client for tests: one request at a time, every byte of the answer verified.
use super::wire::{self, NbdRequest, chunk, command, option, reply};
use std::io::{self, Read, Write};

/// A connection to a server.
pub struct NbdClient<L> {
    pub link: L,
    pub structured: bool,
    cookie: u64,
}

/// The result of a read or a block status.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NbdAnswer {
    /// The protocol's number of the error, 0 for none.
    pub error: u32,
    pub data: Vec<u8>,
    /// Bytes of chunks that declared zeros without sending them.
    pub holes: usize,
    pub chunks: usize,
    /// Length and bits of each run.
    pub runs: Vec<(u32, u32)>,
}

impl<L: Read + Write> NbdClient<L> {
    /// Reads the greeting.
    pub fn greet(mut link: L) -> io::Result<NbdClient<L>> {
        let mut hello = [0; 18];
        link.read_exact(&mut hello)?;
        assert_eq!(hello[..8], wire::GREETING_MAGIC.to_be_bytes());
        assert_eq!(hello[8..16], wire::OPTION_MAGIC.to_be_bytes());
        assert_eq!(hello[16..], [0, 3]);
        link.write_all(&3u32.to_be_bytes())?;
        Ok(NbdClient { link, structured: false, cookie: 0 })
    }

    pub fn send_option(&mut self, number: u32, data: &[u8]) -> io::Result<()> {
        let mut all = wire::OPTION_MAGIC.to_be_bytes().to_vec();
        all.extend(number.to_be_bytes());
        all.extend((data.len() as u32).to_be_bytes());
        all.extend(data);
        self.link.write_all(&all)
    }

    pub fn option_reply(&mut self, number: u32) -> io::Result<(u32, Vec<u8>)> {
        let mut head = [0; 20];
        self.link.read_exact(&mut head)?;
        assert_eq!(head[..8], wire::OPTION_REPLY_MAGIC.to_be_bytes());
        assert_eq!(head[8..12], number.to_be_bytes());
        let mut data = vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
        self.link.read_exact(&mut data)?;
        Ok((u32::from_be_bytes(head[12..16].try_into().unwrap()), data))
    }

    /// Sends an option. Returns all replies up to the last, whose kind comes first.
    pub fn option(&mut self, number: u32, data: &[u8]) -> io::Result<(u32, Vec<Vec<u8>>)> {
        self.send_option(number, data)?;
        let mut all = Vec::new();
        loop {
            let (kind, data) = self.option_reply(number)?;
            if kind == reply::ACK || kind >= 1 << 31 {
                return Ok((kind, all));
            }
            all.push(data);
        }
    }

    /// Negotiates structured replies, `base:allocation`, and GO.
    pub fn go(&mut self, export: &str) -> io::Result<u32> {
        self.structured = self.option(option::STRUCTURED_REPLY, &[])?.0 == reply::ACK;
        let mut query = text(export);
        query.extend(1u32.to_be_bytes());
        query.extend(text("base:allocation"));
        self.option(option::SET_META_CONTEXT, &query)?;
        Ok(self.option(option::GO, &info(export, &[]))?.0)
    }

    pub fn send(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> io::Result<()> {
        self.cookie += 1;
        let request = NbdRequest { flags, command, cookie: self.cookie.to_be_bytes(), offset, len };
        self.link.write_all(&[request.bytes(), payload.to_vec()].concat())
    }

    pub fn request(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> io::Result<NbdAnswer> {
        self.send(command, flags, offset, len, payload)?;
        self.receive(command, offset, len)
    }

    /// Reads the answer to the last request.
    pub fn receive(&mut self, command: u16, offset: u64, len: u32) -> io::Result<NbdAnswer> {
        let mut answer = NbdAnswer::default();
        if command == command::READ {
            answer.data = vec![0xa5; len as usize];
        }
        let mut seen_bytes = vec![false; answer.data.len()];
        loop {
            let magic = u32::from_be_bytes(self.read()?);
            if magic == wire::SIMPLE_MAGIC {
                answer.error = u32::from_be_bytes(self.read()?);
                assert_eq!(u64::from_be_bytes(self.read()?), self.cookie);
                assert!(
                    !self.structured || !matches!(command, command::READ | command::BLOCK_STATUS)
                );
                if answer.error == 0 && command == command::READ {
                    self.link.read_exact(&mut answer.data)?;
                }
                return Ok(answer);
            }
            assert_eq!(magic, wire::CHUNK_MAGIC);
            assert!(self.structured);
            let flags = u16::from_be_bytes(self.read()?);
            let kind = u16::from_be_bytes(self.read()?);
            assert_eq!(u64::from_be_bytes(self.read()?), self.cookie);
            let mut data = vec![0; u32::from_be_bytes(self.read()?) as usize];
            self.link.read_exact(&mut data)?;
            answer.chunks += 1;
            match kind {
                chunk::NONE => assert!(data.is_empty()),
                chunk::OFFSET_DATA | chunk::OFFSET_HOLE => {
                    let at = (u64::from_be_bytes(data[..8].try_into().unwrap()) - offset) as usize;
                    let bytes = match kind {
                        chunk::OFFSET_DATA => data[8..].to_vec(),
                        _ => vec![0; u32::from_be_bytes(data[8..].try_into().unwrap()) as usize],
                    };
                    answer.holes += if kind == chunk::OFFSET_HOLE { bytes.len() } else { 0 };
                    assert!(
                        seen_bytes[at..at + bytes.len()].iter().all(|is_seen| !is_seen),
                        "twice the same byte"
                    );
                    seen_bytes[at..at + bytes.len()].fill(true);
                    answer.data[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                chunk::BLOCK_STATUS => {
                    assert_eq!(data[..4], wire::CONTEXT_ID.to_be_bytes());
                    let runs = data[4..].chunks_exact(8);
                    answer.runs = runs.map(|run| (number(&run[..4]), number(&run[4..]))).collect();
                }
                chunk::ERROR => answer.error = number(&data[..4]),
                _ => panic!("a chunk of kind {kind}"),
            }
            if flags & chunk::DONE != 0 {
                assert!(
                    answer.error != 0 || seen_bytes.iter().all(|is_seen| *is_seen),
                    "a byte is missing"
                );
                return Ok(answer);
            }
        }
    }

    fn read<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.link.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes.try_into().unwrap())
}

/// Returns a text with its length in front.
pub fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

/// Returns the data of INFO and GO.
pub fn info(export: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = text(export);
    data.extend((wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|info| data.extend(info.to_be_bytes()));
    data
}
