//! Dictionaries made by zstd's trainer. It allocates with malloc, so only programs that are not
//! folded themselves may call it. `cargo xtask symbols` checks that the others have no malloc.
use crate::dictionary::{DICTIONARY_BYTES_MAX, Dictionary, DictionaryKind};
use alloc::vec;
use memfold_os::units::Order;

/// Sizes to try.
const TRAINED_BYTES: [usize; 3] = [DICTIONARY_BYTES_MAX, 32 << 10, 16 << 10];
/// The longest sample for the trainer, bytes.
const SAMPLE_BYTES_MAX: usize = 32 << 10;

/// Returns dictionaries of several sizes, trained on consecutive blocks of `order` in `samples`;
/// none where the trainer finds too little to learn from.
pub fn trained_dictionaries(samples: &[u8], order: Order) -> impl Iterator<Item = Dictionary> {
    let sample = order.bytes().min(SAMPLE_BYTES_MAX);
    let sizes = vec![sample; samples.len() / sample];
    TRAINED_BYTES.into_iter().filter_map(move |bytes| {
        let mut content = vec![0; bytes];
        let len = zstd_safe::train_from_buffer(&mut content[..], samples, &sizes).ok()?;
        content.truncate(len);
        Dictionary::new(DictionaryKind::Zstd, content).ok()
    })
}
