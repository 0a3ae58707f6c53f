//! Fuzz targets: each function takes any bytes and panics if a promise is broken. Built only for
//! tests and fuzzers.
//!
//! `lab/fuzz` runs them with libFuzzer. `store/tests/fuzz.rs` runs them on a few thousand
//! mutations in every test run.
use crate::block::dictionaries::{DecoderSet, DictionarySet};
use crate::block::{self, BlockPacker, EncodeScratch, EncodedBlock};
use crate::codec::delta::fuzz as delta;
use crate::codec::{CODECS, CodecSpec};
use crate::dictionary::Dictionary;
use crate::format;
use crate::pool::budget::PoolBudget;
use crate::pool::entry::ObjectHeader;
use alloc::boxed::Box;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;
use memfold_os::page::PageBuffer;
use memfold_os::units::{Order, PAGE_SIZE};

/// The largest block that is tried: 64 KiB.
const ORDER_MAX: u8 = 4;
const CANARY: u8 = 0xa7;

/// Decodes bytes of a stored object of any format: the result is an error or a block, and no byte
/// beside it is written.
///
/// The first byte is the format. The second is the block's order and whether same-filled pages are
/// listed.
pub fn decode(data: &[u8]) {
    let [format, shape, payload @ ..] = data else { return };
    let order = order(shape % (ORDER_MAX + 1));
    let mut decoders = decoders();
    let header = ObjectHeader {
        len: payload.len() as u32,
        order: order.get(),
        format: format % 32,
        mixed: shape & 0x80 != 0,
        checksum: 0,
    };
    decode_guarded(&mut decoders, header, payload, order);
}

/// Decodes bytes as a page of the codec `delta`, or encodes them as one, with every form that the
/// processor has: all agree, and no byte beside the page is touched.
///
/// The first byte says which. The rest is the payload, or is repeated to fill the page.
pub fn delta(data: &[u8]) {
    let [is_page, rest @ ..] = data else { return };
    if is_page & 1 == 0 || rest.is_empty() {
        let _ = delta::decode_all(rest);
        return;
    }
    let mut page = [0; PAGE_SIZE];
    page.iter_mut().zip(rest.iter().cycle()).for_each(|(to, from)| *to = *from);
    delta::round_trip(&page);
}

/// Encodes and decodes whole pages through every part of the save path: the result is the same
/// bytes.
///
/// The first byte is the codec, the second its level, the third the block's order and whether it is
/// shuffled. The rest is repeated to fill the block. Pages whose bit in the fourth byte is set are
/// filled with one word.
pub fn round_trip(data: &[u8]) {
    let [codec, level, shape, same_bits, rest @ ..] = data else { return };
    let codec = &CODECS[*codec as usize % CODECS.len()];
    let levels = (codec.levels.end() - codec.levels.start()).min(26) + 1;
    let level = codec.levels.start() + *level as i32 % levels;
    let shuffle = if shape & 0x80 != 0 { "+shuffle" } else { "" };
    let spec = if levels == 1 {
        alloc::format!("{}{shuffle}", codec.name)
    } else {
        alloc::format!("{}:{level}{shuffle}", codec.name)
    };
    let spec = CodecSpec::parse(&spec).expect("a name and a level of the table");
    let order = order(shape % 128 % (ORDER_MAX + 1));
    let mut block = PageBuffer::new(order);
    // SAFETY: this function owns the buffer.
    let bytes = unsafe { core::slice::from_raw_parts_mut(block.as_mut_ptr(), order.bytes()) };
    if !rest.is_empty() {
        bytes.iter_mut().zip(rest.iter().cycle()).for_each(|(to, from)| *to = *from);
    }
    for page in (0..order.pages()).filter(|page| same_bits >> (page % 8) & 1 != 0) {
        bytes[page * PAGE_SIZE..][..PAGE_SIZE].fill(page as u8 & same_bits);
    }
    let (mut scratch, mut encoder) = (EncodeScratch::new(order), spec.encoder(order.bytes()));
    // SAFETY: a whole block, page-aligned; scratch and encoder were made for it.
    let block_encoded = unsafe {
        block::encode(
            &mut scratch,
            BlockPacker {
                encoder: &mut *encoder,
                format: spec.format(),
                dictionary: None,
                shuffle: spec.shuffles(),
            },
            bytes.as_ptr(),
            order,
        )
    };
    let EncodedBlock::Object { format, mixed: mixed_bits, head, head_len, body, len, .. } =
        block_encoded.expect("the codec works")
    else {
        assert!(bytes.iter().all(|byte| *byte == 0));
        return;
    };
    // SAFETY: the parts that `encode` says; head and body may be empty.
    let payload = unsafe {
        [core::slice::from_raw_parts(head, head_len), core::slice::from_raw_parts(body, len)]
            .concat()
    };
    assert!(payload.len() <= order.bytes() + 1 + order.pages().div_ceil(8) + 8 * order.pages());
    let header = ObjectHeader {
        len: payload.len() as u32,
        order: order.get(),
        format,
        mixed: mixed_bits,
        checksum: 0,
    };
    let back = decode_guarded(&mut decoders(), header, &payload, order).expect("it decodes");
    assert!(back == bytes, "{spec}, {order:?}");
}

/// Parses text as a codec's name: it is refused, or prints as itself.
pub fn spec(data: &[u8]) {
    let Ok(text) = core::str::from_utf8(data) else { return };
    match CodecSpec::parse(text) {
        Ok(spec) => assert_eq!(CodecSpec::parse(&spec.to_string()), Ok(spec)),
        Err(error) => assert!(error.to_string().contains(text)),
    }
}

/// Parses bytes as a dictionary file: they are refused, or a dictionary that codecs accept.
pub fn dictionary(data: &[u8]) {
    let Ok(dictionary) = Dictionary::from_file(data) else { return };
    assert!(dictionary.to_file() == data);
    for name in ["lz4", "zstd"] {
        let spec = CodecSpec::parse(name).expect("a name of the table");
        let Some(digest) = spec.digest(&dictionary, PAGE_SIZE) else { continue };
        let (mut scratch, mut encoder) = (EncodeScratch::new(Order::PAGE), spec.encoder(PAGE_SIZE));
        let mut block = PageBuffer::new(order(0));
        let len = dictionary.content().len().min(PAGE_SIZE);
        let packer = BlockPacker {
            encoder: &mut *encoder,
            format: spec.format(),
            dictionary: Some((format::CANNED, &digest)),
            shuffle: false,
        };
        // SAFETY: a whole block, page-aligned; scratch and encoder were made for it.
        let block_encoded = unsafe {
            core::ptr::copy_nonoverlapping(dictionary.content().as_ptr(), block.as_mut_ptr(), len);
            block::encode(&mut scratch, packer, block.as_ptr(), order(0))
        };
        assert!(block_encoded.is_ok(), "{name} failed");
    }
}

/// Makes the decoders of a worker whose store has a dictionary for lz4 and one for zstd.
fn decoders() -> DecoderSet {
    let cans = DictionarySet::new(alloc::sync::Arc::new(PoolBudget::new(0, 100)));
    let content: Vec<u8> = (0..2000u32).map(|i| ((i * i) >> 3) as u8).collect();
    let dictionary =
        Dictionary::new(crate::dictionary::DictionaryKind::Raw, content).expect("of a good size");
    for name in ["lz4", "zstd"] {
        let spec = CodecSpec::parse(name).expect("a name of the table");
        cans.install(spec, spec.digest(&dictionary, PAGE_SIZE).expect("takes raw dictionaries"));
    }
    DecoderSet::new(alloc::sync::Arc::new(cans), order(ORDER_MAX).bytes())
}

fn order(n: u8) -> Order {
    Order::new(n).expect("at most ORDER_MAX")
}

/// Decodes into the middle of a buffer and checks the bytes around it.
fn decode_guarded(
    decoders: &mut DecoderSet,
    header: ObjectHeader,
    payload: &[u8],
    order: Order,
) -> Option<Vec<u8>> {
    if payload.is_empty() {
        return None; // `Pool::pin` refuses it
    }
    let mut buffer =
        PageBuffer::new(Order::covering(order.bytes() + 2 * PAGE_SIZE).expect("small"));
    // SAFETY: this function owns the buffer.
    let bytes = unsafe { core::slice::from_raw_parts_mut(buffer.as_mut_ptr(), buffer.len()) };
    bytes.fill(CANARY);
    // The payload has a box of its own length, so that a sanitizer detects a read past it.
    let payload: Box<[u8]> = payload.into();
    // SAFETY: the payload is as long as the header says; the block fits behind the first page of
    // the buffer.
    let outcome = unsafe {
        let dst = bytes.as_mut_ptr().add(PAGE_SIZE);
        block::decode(decoders, header, payload.as_ptr(), dst, order, 0..order.pages())
    };
    let (before, rest) = bytes.split_at(PAGE_SIZE);
    let (block, after) = rest.split_at(order.bytes());
    assert!(
        before.iter().chain(after).all(|byte| *byte == CANARY),
        "bytes beside the block were written"
    );
    outcome.ok().map(|()| block.to_vec())
}

/// Returns inputs of [`delta`]: pages of records, and their payloads.
pub fn delta_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for period in [3u64, 8, 12, 40, 200] {
        let mut page = [0; PAGE_SIZE];
        for (at, to) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let at = at as u64;
            let small = at * at % 251 * (at % 5 / 4);
            *to = (((at % period) << 24) + small).to_le_bytes();
        }
        seeds.extend(delta::round_trip(&page).iter().map(|payload| [&[0], &payload[..]].concat()));
        seeds.push([&[1], &page[..]].concat());
    }
    seeds
}

/// Returns valid payloads as seeds: `decode`'s input for every codec and shape.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    let specs = CODECS
        .iter()
        .flat_map(|codec| [codec.name.to_string(), alloc::format!("{}+shuffle", codec.name)]);
    for spec in specs {
        let spec = CodecSpec::parse(&spec).expect("a name of the table");
        for (shape, pages) in [(0, 1), (2, 4), (0x82, 4), (0x83, 8)] {
            let order = Order::covering(pages * PAGE_SIZE).expect("small");
            let mut block = vec![0u64; order.bytes() / 8];
            let shift = if spec.shuffles() { 1 } else { 40 };
            block
                .iter_mut()
                .enumerate()
                .for_each(|(i, word)| *word = (i as u64 % 97) << (i % shift));
            let mut buffer = PageBuffer::new(order);
            // SAFETY: this function owns the buffer, which is as long as the block.
            unsafe {
                core::ptr::copy_nonoverlapping(
                    block.as_ptr().cast(),
                    buffer.as_mut_ptr(),
                    order.bytes(),
                )
            };
            if shape & 0x80 != 0 {
                // SAFETY: the second page of the buffer.
                unsafe { buffer.as_mut_ptr().add(PAGE_SIZE).write_bytes(shape, PAGE_SIZE) };
            }
            let (mut scratch, mut encoder) =
                (EncodeScratch::new(order), spec.encoder(order.bytes()));
            // SAFETY: a whole block, page-aligned; scratch and encoder were made for it.
            let block_encoded = unsafe {
                block::encode(
                    &mut scratch,
                    BlockPacker {
                        encoder: &mut *encoder,
                        format: spec.format(),
                        dictionary: None,
                        shuffle: spec.shuffles(),
                    },
                    buffer.as_ptr(),
                    order,
                )
            };
            let Ok(EncodedBlock::Object { format, head, head_len, body, len, .. }) = block_encoded
            else {
                continue;
            };
            // SAFETY: the parts that `encode` says.
            let parts = unsafe {
                [
                    core::slice::from_raw_parts(head, head_len),
                    core::slice::from_raw_parts(body, len),
                ]
            };
            seeds.push([&[format, shape][..], parts[0], parts[1]].concat());
        }
    }
    seeds
}
