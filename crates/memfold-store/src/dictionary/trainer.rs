//! Dictionaries made by zstd's own trainer. It allocates with malloc, so only programs that are not
//! folded themselves may call it; of the others `cargo xtask symbols` checks that they have no malloc.
use crate::dictionary::{DICTIONARY_BYTES_MAX, Dictionary, DictionaryKind};
use alloc::vec;
use memfold_sys::units::Order;

/// Sizes that are tried.
const TRAINED_BYTES: [usize; 3] = [DICTIONARY_BYTES_MAX, 32 << 10, 16 << 10];
/// The longest sample that the trainer is given, in bytes.
const SAMPLE_BYTES_MAX: usize = 32 << 10;

/// Dictionaries of several sizes, trained on blocks of `order` that follow each other in `samples`.
/// What the trainer finds too little to learn from gives none.
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
