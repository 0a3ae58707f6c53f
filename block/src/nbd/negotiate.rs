//! The first phase of a connection: the choice of an export and of the protocol's options.
use super::wire::{self, export, handshake, info, option, reply};
use crate::device::SECTOR_BYTES;
use crate::export::{Export, NAME_BYTES_MAX};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Longer options are refused. This is enough for a name and some queries.
const OPTION_BYTES_MAX: u32 = NAME_BYTES_MAX as u32 + 4096;
/// A longer option ends the connection, because no client sends one.
const SKIPPED_BYTES_MAX: u32 = 1 << 20;

/// What a connection may do about encryption.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// TLS is unavailable.
    None,
    /// The client may request TLS.
    Offered,
    /// TLS is required before any option about exports.
    Demanded,
    /// TLS is active.
    Spoken,
}

/// The result of the negotiation.
pub struct AgreedOptions {
    /// The export.
    pub export: Arc<Export>,
    /// Replies are structured.
    pub structured: bool,
    /// `base:allocation` was chosen.
    pub allocation: bool,
}

/// How a successful negotiation ended.
pub enum NegotiationEnd {
    /// Requests follow.
    Transmit(AgreedOptions),
    /// TLS follows, and then a negotiation of the options.
    StartTls,
    /// The client has left, or was disconnected.
    End,
}

/// The client's choices so far.
#[derive(Default)]
struct ChosenOptions {
    structured: bool,
    /// The export that it chose `base:allocation` for.
    allocation: Option<String>,
}

/// Sends the greeting and reads the client's answer. Returns whether the client can do without 124
/// zero bytes.
///
/// # Errors
/// The connection's, or it is no NBD client.
pub fn greet(link: &mut (impl Read + Write)) -> io::Result<bool> {
    let flags = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
    let mut hello = wire::GREETING_MAGIC.to_be_bytes().to_vec();
    hello.extend(wire::OPTION_MAGIC.to_be_bytes());
    hello.extend(flags.to_be_bytes());
    link.write_all(&hello)?;
    link.flush()?;
    let answer = u32::from_be_bytes(read(link)?);
    if answer & !u32::from(flags) != 0 || answer & u32::from(handshake::FIXED_NEWSTYLE) == 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(answer & u32::from(handshake::NO_ZEROES) != 0)
}

/// Answers options until one of them ends the phase.
///
/// # Errors
/// The connection's, or what came makes no sense.
pub fn negotiate(
    link: &mut (impl Read + Write),
    exports: &[Arc<Export>],
    security: TlsPolicy,
    no_zeroes: bool,
) -> io::Result<NegotiationEnd> {
    let mut options =
        OptionState { link, exports, security, no_zeroes, chosen: ChosenOptions::default() };
    loop {
        if let Some(outcome) = options.next()? {
            return Ok(outcome);
        }
    }
}

struct OptionState<'a, L> {
    link: &'a mut L,
    exports: &'a [Arc<Export>],
    security: TlsPolicy,
    no_zeroes: bool,
    chosen: ChosenOptions,
}

impl<L: Read + Write> OptionState<'_, L> {
    /// Answers one option. Returns the outcome, if the option ends the phase.
    fn next(&mut self) -> io::Result<Option<NegotiationEnd>> {
        if u64::from_be_bytes(read(self.link)?) != wire::OPTION_MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let number = u32::from_be_bytes(read(self.link)?);
        let len = u32::from_be_bytes(read(self.link)?);
        if len > OPTION_BYTES_MAX {
            if len > SKIPPED_BYTES_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            io::copy(&mut self.link.take(len.into()), &mut io::sink())?;
            return self.answer(number, reply::TOO_BIG, b"The option is too long").map(|()| None);
        }
        let mut data = vec![0; len as usize];
        self.link.read_exact(&mut data)?;
        self.option(number, &data)
    }

    fn option(&mut self, number: u32, data: &[u8]) -> io::Result<Option<NegotiationEnd>> {
        let is_free = matches!(number, option::ABORT | option::STARTTLS);
        if self.security == TlsPolicy::Demanded && !is_free {
            if number == option::EXPORT_NAME {
                return Ok(Some(NegotiationEnd::End));
            }
            return self
                .answer(number, reply::TLS_REQD, b"This server requires TLS")
                .map(|()| None);
        }
        match number {
            option::EXPORT_NAME => return self.export_name(data).map(Some),
            option::ABORT => {
                return self.answer(number, reply::ACK, &[]).map(|()| Some(NegotiationEnd::End));
            }
            option::STARTTLS => return self.start_tls(data),
            option::INFO | option::GO => return self.info(number, data),
            option::LIST => self.list(data)?,
            option::STRUCTURED_REPLY => self.structured_reply(data)?,
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(number, data)?,
            _ => self.answer(number, reply::UNSUP, b"")?,
        }
        Ok(None)
    }

    /// Selects an export in the oldest way. It has no error reply; the end of the connection means
    /// that there is no such export.
    fn export_name(&mut self, data: &[u8]) -> io::Result<NegotiationEnd> {
        let Some(export) = self.find(data) else { return Ok(NegotiationEnd::End) };
        let mut all = export.device().size().to_be_bytes().to_vec();
        all.extend(flags(&export, self.chosen.structured).to_be_bytes());
        if !self.no_zeroes {
            all.extend([0; 124]);
        }
        self.link.write_all(&all)?;
        self.link.flush()?;
        Ok(NegotiationEnd::Transmit(self.agreed(export)))
    }

    fn start_tls(&mut self, data: &[u8]) -> io::Result<Option<NegotiationEnd>> {
        let number = option::STARTTLS;
        match self.security {
            _ if !data.is_empty() => self.answer(number, reply::INVALID, b"")?,
            TlsPolicy::None => self.answer(
                number,
                reply::POLICY,
                b"This server has no certificate, so it has no TLS",
            )?,
            TlsPolicy::Spoken => self.answer(number, reply::INVALID, b"TLS is active already")?,
            TlsPolicy::Offered | TlsPolicy::Demanded => {
                self.answer(number, reply::ACK, &[])?;
                return Ok(Some(NegotiationEnd::StartTls));
            }
        }
        Ok(None)
    }

    fn info(&mut self, number: u32, data: &[u8]) -> io::Result<Option<NegotiationEnd>> {
        let mut parts = OptionParts(data);
        let request = (|| {
            let name = parts.text()?;
            let count = parts.u16()?;
            let names: Option<Vec<u16>> = (0..count).map(|_| parts.u16()).collect();
            names.filter(|_| parts.0.is_empty()).map(|names| (name, names))
        })();
        let Some((name, names)) = request else {
            return self.answer(number, reply::INVALID, b"").map(|()| None);
        };
        let Some(export) = self.find(name) else {
            return self.answer(number, reply::UNKNOWN, b"There is no such export").map(|()| None);
        };
        let mut about = info::EXPORT.to_be_bytes().to_vec();
        about.extend(export.device().size().to_be_bytes());
        about.extend(flags(&export, self.chosen.structured).to_be_bytes());
        self.answer(number, reply::INFO, &about)?;
        if names.contains(&info::NAME) {
            let name = [&info::NAME.to_be_bytes()[..], export.name().as_bytes()].concat();
            self.answer(number, reply::INFO, &name)?;
        }
        if names.contains(&info::DESCRIPTION) {
            let text =
                [&info::DESCRIPTION.to_be_bytes()[..], b"memfold: compressed memory"].concat();
            self.answer(number, reply::INFO, &text)?;
        }
        let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
        // Any alignment works. A client that kept to a minimum could not copy a file that is not
        // whole sectors.
        let minimum =
            if export.sector_bytes() == SECTOR_BYTES as u32 { 1 } else { export.sector_bytes() };
        for bytes in [minimum, export.preferred_bytes(), wire::PAYLOAD_MAX] {
            sizes.extend(bytes.to_be_bytes());
        }
        self.answer(number, reply::INFO, &sizes)?;
        self.answer(number, reply::ACK, &[])?;
        Ok((number == option::GO).then(|| NegotiationEnd::Transmit(self.agreed(export))))
    }

    fn list(&mut self, data: &[u8]) -> io::Result<()> {
        if !data.is_empty() {
            return self.answer(option::LIST, reply::INVALID, b"");
        }
        for export in self.exports {
            let name = export.name().as_bytes();
            let entry = [&(name.len() as u32).to_be_bytes()[..], name].concat();
            self.answer(option::LIST, reply::SERVER, &entry)?;
        }
        self.answer(option::LIST, reply::ACK, &[])
    }

    fn structured_reply(&mut self, data: &[u8]) -> io::Result<()> {
        let number = option::STRUCTURED_REPLY;
        if !data.is_empty() {
            return self.answer(number, reply::INVALID, b"");
        }
        self.chosen.structured = true;
        self.answer(number, reply::ACK, &[])
    }

    fn contexts(&mut self, number: u32, data: &[u8]) -> io::Result<()> {
        let mut parts = OptionParts(data);
        let request = (|| {
            let name = parts.text()?;
            let count = parts.u32()?;
            // The option bounds the number of queries, whatever number it states.
            let queries: Option<Vec<&[u8]>> = (0..count).map(|_| parts.text()).collect();
            queries.filter(|_| parts.0.is_empty()).map(|queries| (name, queries))
        })();
        let Some((name, queries)) = request else {
            return self.answer(number, reply::INVALID, b"");
        };
        if !self.chosen.structured {
            return self.answer(number, reply::INVALID, b"Request structured replies first");
        }
        let is_set = number == option::SET_META_CONTEXT;
        if is_set {
            self.chosen.allocation = None;
        }
        let Some(export) = self.find(name) else {
            return self.answer(number, reply::UNKNOWN, b"There is no such export");
        };
        let lists = |query: &&[u8]| **query == *wire::CONTEXT || !is_set && **query == *b"base:";
        if queries.iter().any(lists) || !is_set && queries.is_empty() {
            let id = if is_set { wire::CONTEXT_ID } else { 0 };
            let context = [&id.to_be_bytes()[..], wire::CONTEXT].concat();
            self.answer(number, reply::META_CONTEXT, &context)?;
            if is_set {
                self.chosen.allocation = Some(export.name().to_string());
            }
        }
        self.answer(number, reply::ACK, &[])
    }

    fn find(&self, name: &[u8]) -> Option<Arc<Export>> {
        self.exports.iter().find(|export| export.name().as_bytes() == name).cloned()
    }

    fn agreed(&self, export: Arc<Export>) -> AgreedOptions {
        let allocation = self.chosen.allocation.as_deref() == Some(export.name());
        AgreedOptions { export, structured: self.chosen.structured, allocation }
    }

    fn answer(&mut self, number: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let mut all = wire::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        all.extend(number.to_be_bytes());
        all.extend(kind.to_be_bytes());
        all.extend((data.len() as u32).to_be_bytes());
        all.extend(data);
        self.link.write_all(&all)?;
        self.link.flush()
    }
}

/// Returns the flags of an export.
fn flags(of: &Export, structured: bool) -> u16 {
    let mut flags =
        export::HAS_FLAGS | export::SEND_FLUSH | export::SEND_FUA | export::CAN_MULTI_CONN;
    flags |= export::SEND_CACHE;
    flags |= if structured { export::SEND_DF } else { 0 };
    flags
        | if of.is_read_only() {
            export::READ_ONLY
        } else {
            export::SEND_TRIM | export::SEND_WRITE_ZEROES | export::SEND_FAST_ZERO
        }
}

/// The parts of an option, in order; `None` where it ends too early.
struct OptionParts<'a>(&'a [u8]);

impl<'a> OptionParts<'a> {
    fn u16(&mut self) -> Option<u16> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*first))
    }

    fn u32(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*first))
    }

    /// Returns bytes with their length in front.
    fn text(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()? as usize;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(text)
    }
}

fn read<const N: usize>(link: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    link.read_exact(&mut bytes)?;
    Ok(bytes)
}
