//! Tests of all forms of the codec, and of its blocks.
use super::form::Form;
use super::fuzz::{decode_all, round_trip};
use super::layout::{self, PACKED_MAX, ROOM, TAIL};
use super::votes::Scratch;
use super::*;
use memfold_testkit::random::Random;

const WORDS: usize = PAGE_SIZE / 8;

/// Returns a page of one of several kinds: objects, records, text, sparse and random bytes.
fn page(random: &mut Random) -> [u8; PAGE_SIZE] {
    let mut words = [0u64; WORDS];
    let mut any = |below: u64| random.word() % below;
    match any(6) {
        0 => words.iter_mut().for_each(|word| *word = any(u64::MAX)),
        1 => {
            for _ in 0..any(600) {
                let at = any(PAGE_SIZE as u64) as usize;
                words[at / 8] |= any(256) << (8 * (at % 8));
            }
        }
        2 => {
            let values: Vec<u64> = (0..16).map(|_| any(u64::MAX) >> any(64)).collect();
            words.iter_mut().for_each(|word| *word = values[any(16) as usize] ^ any(256));
        }
        3 => {
            let period = 1 + any(300) as usize;
            let record: Vec<u64> = (0..period).map(|_| any(u64::MAX) >> any(64)).collect();
            for (word, value) in words.iter_mut().zip(record.iter().cycle()) {
                *word = value ^ if any(8) == 0 { any(65536) } else { 0 };
            }
        }
        4 => words.iter_mut().for_each(|word| {
            *word = (0..8).fold(0, |word, _| word << 8 | (b'a' as u64 + any(26)));
        }),
        _ => words.iter_mut().enumerate().for_each(|(at, word)| {
            *word = 0x7f31_0000_0000 + 64 * at as u64 + (any(4) << 20);
        }),
    }
    let mut bytes = [0; PAGE_SIZE];
    for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}

#[test]
fn every_form_decodes_what_any_form_encoded() {
    let mut random = Random::new(1);
    let encoders = Form::all().filter(|form| form.encodes()).count();
    let mut packed_pages = 0;
    for _ in 0..3000 {
        packed_pages += round_trip(&page(&mut random)).len();
    }
    assert!(packed_pages >= 1500 * encoders, "only {packed_pages} were small enough");
}

#[test]
fn damaged_pages_are_refused_or_decoded_alike_within_bounds() {
    let mut random = Random::new(2);
    let mut refused_count = 0;
    for _ in 0..3000 {
        for payload in round_trip(&page(&mut random)) {
            let mut damaged = payload.clone();
            if random.word().is_multiple_of(4) {
                damaged.truncate((random.word() as usize) % payload.len());
            }
            for _ in 0..1 + random.word() % 4 {
                // Every second one in the last bytes, which say where the others are.
                let back = if random.word().is_multiple_of(2) { TAIL } else { PACKED_MAX };
                let len = damaged.len().min(back) as u64;
                if len > 0 {
                    let at = damaged.len() - 1 - (random.word() % len) as usize;
                    damaged[at] = random.word() as u8;
                }
            }
            refused_count += decode_all(&damaged).is_none() as usize;
        }
    }
    assert!(refused_count > 1000 || Form::best() == Form::Plain, "only {refused_count}");
}

/// A page of memory between two that can't be touched.
struct GuardedPage(*mut u8);

impl GuardedPage {
    fn new() -> GuardedPage {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice; the page in its middle becomes
        // writable.
        unsafe {
            let none = libc::PROT_NONE;
            let start = libc::mmap(core::ptr::null_mut(), 3 * PAGE_SIZE, none, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            let page = start.cast::<u8>().add(PAGE_SIZE);
            let writable = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(page.cast(), PAGE_SIZE, writable), 0);
            GuardedPage(page)
        }
    }

    /// Copies bytes to the end of the page, or to its start.
    fn put(&mut self, bytes: &[u8], to_end: bool) -> &[u8] {
        let at = if to_end { PAGE_SIZE - bytes.len() } else { 0 };
        // SAFETY: the bytes fit the page, which belongs to this value.
        unsafe {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.add(at), bytes.len());
            core::slice::from_raw_parts(self.0.add(at), bytes.len())
        }
    }
}

/// Decodes damaged payloads with every form, with memory beside payload and page that can't be
/// touched. Returns how many were decoded, and how many of these were refused.
fn decode_damaged(rounds: usize, seed: u64) -> (u64, u64) {
    let mut random = Random::new(seed);
    let (mut input, output) = (GuardedPage::new(), GuardedPage::new());
    let (mut decoded_count, mut refused_count) = (0, 0);
    let mut payloads = Vec::new();
    for round in 0..rounds {
        if round % 1000 == 0 || payloads.is_empty() {
            payloads = (0..20).flat_map(|_| round_trip(&page(&mut random))).collect();
            continue;
        }
        let mut damaged = payloads[round % payloads.len()].clone();
        let word = random.word();
        if word & 7 == 0 {
            damaged.truncate((word >> 8) as usize % damaged.len());
        }
        for change in 0..1 + (word >> 3 & 3) {
            let (len, word) = (damaged.len(), word.rotate_right(12 * change as u32));
            // Every second one in the last bytes, which say where the others are.
            let back = if word & 1 == 0 { TAIL } else { PACKED_MAX };
            if len > 0 {
                damaged[len - 1 - (word >> 20) as usize % len.min(back)] ^= 1 << (word >> 8 & 7);
            }
        }
        let payload = input.put(&damaged, word >> 5 & 1 == 0);
        // SAFETY: the page of `output` is writable, and only this function has it.
        let mut results = Form::all().map(|form| unsafe { form.decode(payload, output.0) });
        let is_whole = results.next().expect("there is one");
        assert!(results.all(|other| other == is_whole), "the forms disagree");
        decoded_count += Form::all().count() as u64;
        refused_count += !is_whole as u64;
    }
    (decoded_count, refused_count)
}

#[test]
fn damaged_payloads_are_decoded_within_their_bounds() {
    let (decoded_count, refused_count) = decode_damaged(20_000, 6);
    assert!(refused_count > 1000 && refused_count * 10 < decoded_count * 9, "{refused_count}");
}

#[test]
#[ignore = "more of the kind: make torture"]
fn a_hundred_million_damaged_payloads_are_decoded_within_their_bounds() {
    let (decoded_count, refused_count) = decode_damaged(34_000_000, 7);
    println!("{decoded_count} decoded, {refused_count} of {} refused", decoded_count / 3);
}

#[test]
fn encoders_stay_within_their_room_and_limit() {
    let mut random = Random::new(3);
    for _ in 0..2000 {
        let page = page(&mut random);
        for form in Form::all() {
            let mut output = [0xa7; ROOM + 64];
            // SAFETY: the page is borrowed; the output has room.
            let size =
                unsafe { form.encode(&mut Scratch::new(), page.as_ptr(), output.as_mut_ptr()) };
            assert!(size.is_none_or(|size| (TAIL..=PACKED_MAX).contains(&size)), "{form:?}");
            assert!(
                output[ROOM..].iter().all(|byte| *byte == 0xa7),
                "{form:?} wrote past its room"
            );
        }
    }
}

#[test]
fn unknown_predictors_are_none() {
    // One word in line 9; distances of 7 words, and of 200, which reaches before the page.
    let mut payload = vec![0xab, 0b10];
    let mut words = [0; 64];
    words[9] = 1;
    payload.extend_from_slice(&words);
    payload.extend_from_slice(&[0x21; 32]);
    payload.extend_from_slice(&[7, 200, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let page = decode_all(&payload).expect("its lengths fit");
    assert!(page.iter().enumerate().all(|(at, byte)| *byte == if at == 577 { 0xab } else { 0 }));
    payload[0] = 1;
    payload.insert(0, 1);
    assert_eq!(decode_all(&payload), None, "a byte that belongs to no word");
}

/// Returns the block of these pages, compressed.
fn encode_block(encoder: &mut dyn Encoder, block: &[u8]) -> Option<Vec<u8>> {
    let mut output = vec![0; block.len() + ROOM];
    // SAFETY: both buffers are borrowed and as long as said.
    let size = unsafe {
        let src = CodecInput { at: block.as_ptr(), len: block.len() };
        encoder.encode(src, CodecOutput::of(&mut output), None)
    };
    size.unwrap().map(|size| output[..size].to_vec())
}

#[test]
fn every_page_of_a_block_can_be_decoded_alone() {
    let mut random = Random::new(4);
    let (mut encoder, mut decoder) = (encoder(0, 16 * PAGE_SIZE), decoder());
    for round in 0..200 {
        let pages = 1 + round % 16;
        let block: Vec<u8> = (0..pages).flat_map(|_| page(&mut random)).collect();
        let payload = encode_block(&mut *encoder, &block).expect("there is room");
        for first in 0..pages {
            let mut back = vec![0xa7; block.len()];
            let last = first + 1 + (random.word() as usize) % (pages - first);
            let part = first * PAGE_SIZE..last * PAGE_SIZE;
            let src = CodecInput { at: payload.as_ptr(), len: payload.len() };
            let dst = CodecOutput::of(&mut back);
            // SAFETY: both buffers are borrowed and as long as said.
            let outcome = unsafe {
                match part.len() == block.len() {
                    true => decoder.decode(src, dst, None),
                    false => decoder.decode_part(src, dst, part.clone(), None),
                }
            };
            outcome.unwrap();
            assert!(
                back[part.clone()] == block[part.clone()],
                "pages {first} to {last} of {pages}"
            );
            if payload[0] == PAGES {
                let others = back[..part.start].iter().chain(&back[part.end..]);
                assert!(others.into_iter().all(|byte| *byte == 0xa7), "other pages were decoded");
            }
        }
    }
}

#[test]
fn block_decodes_where_only_lz4_compresses() {
    let mut random = Random::new(5);
    let mut plain = DeltaEncoder {
        pages: PageEncoder::new(Form::Plain),
        whole: lz4::encoder(1, 4 * PAGE_SIZE),
    };
    let block = [page(&mut random); 4].concat();
    let payload = encode_block(&mut plain, &block).expect("there is room");
    let mut back = vec![0; block.len()];
    let src = CodecInput { at: payload.as_ptr(), len: payload.len() };
    let mut decoder = DeltaDecoder { form: Form::Plain, lz4: lz4::decoder() };
    // SAFETY: both buffers are borrowed and as long as said.
    unsafe { decoder.decode(src, CodecOutput::of(&mut back), None) }.unwrap();
    assert!(back == block);
}

#[test]
fn text_is_left_to_lz4_and_objects_are_not() {
    let text: Vec<u8> =
        (0..4 * PAGE_SIZE / 16).flat_map(|i| format!("line {:011}", i * i).into_bytes()).collect();
    let objects: Vec<u8> =
        (0..4 * WORDS as u64).flat_map(|i| (0x7f31_0000_0000 + i * 48).to_le_bytes()).collect();
    let mut encoder = encoder(0, 4 * PAGE_SIZE);
    assert_eq!(encode_block(&mut *encoder, &text).map(|payload| payload[0]), Some(WHOLE));
    let shape = if Form::best().encodes() { PAGES } else { WHOLE };
    assert_eq!(encode_block(&mut *encoder, &objects).map(|payload| payload[0]), Some(shape));
}

#[test]
fn payloads_of_unknown_versions_and_wrong_tables_are_refused() {
    let block = [7u8; 2 * PAGE_SIZE].map(|byte| byte);
    let mut encoder = encoder(0, 2 * PAGE_SIZE);
    let payload = encode_block(&mut *encoder, &block).expect("there is room");
    let mut back = vec![0; block.len()];
    let mut decode = |payload: &[u8]| {
        let src = CodecInput { at: payload.as_ptr(), len: payload.len() };
        // SAFETY: both buffers are borrowed and as long as said.
        unsafe { decoder().decode(src, CodecOutput::of(&mut back), None) }
    };
    assert_eq!(decode(&payload), Ok(()));
    for first in [0, 2 << 4, VERSION | 2, 0xff] {
        let mut other = payload.clone();
        other[0] = first;
        assert_eq!(decode(&other), Err(DAMAGED));
    }
    assert_eq!(decode(&[]), Err(DAMAGED));
    assert_eq!(decode(&[PAGES, 0, 0, 0]), Err(DAMAGED), "a table that is too short");
    assert_eq!(decode(&[PAGES, 0, 0, 0, 0]), Err(DAMAGED), "a raw page of no bytes");
    assert_eq!(decode(&[PAGES, 1, 0x60, 0, 0, 9]), Err(DAMAGED), "an unknown kind");
    let unequal = [&[PAGES, 111, 0x20, 111, 0x20][..], &[0; 221]].concat();
    assert_eq!(decode(&unequal), Err(DAMAGED), "a byte less than the table says");
    let equal = [&[PAGES, 111, 0x20, 111, 0x20][..], &[0; 222]].concat();
    assert_eq!(decode(&equal), Ok(()));
    assert!(layout::decode(&[0; TAIL], &mut [1; PAGE_SIZE]));
}
