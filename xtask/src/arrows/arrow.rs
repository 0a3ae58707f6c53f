//! What is found in the code of a crate.

/// One use of an item or method in another file.
pub struct Arrow {
    /// The module with the use.
    pub from: usize,
    /// The module with the item.
    pub to: usize,
    /// Line in the file of `from`.
    pub line: usize,
    /// Name of the item, or type and method.
    pub what: String,
    /// It is a call of a method, or of a function that belongs to a type.
    pub call: bool,
}

/// What the code of a crate leads to.
#[derive(Default)]
pub struct Found {
    pub arrows: Vec<Arrow>,
    /// Calls that may go to another file, by module, line and name: the receiver's type is not
    /// known.
    pub skipped: Vec<(usize, usize, String)>,
}

impl Found {
    pub fn add(&mut self, other: Found) {
        self.arrows.extend(other.arrows);
        self.skipped.extend(other.skipped);
    }
}
