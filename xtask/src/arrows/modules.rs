//! The module tree of a crate: its files parsed, with what each module declares, in order. Tests
//! are left out.

use std::collections::HashMap;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::finding::Finding;
use crate::source::Source;
use crate::tree::Crate;

/// A module: a file, or a part of one between braces.
pub struct Module {
    /// Names from the crate's root; empty for the root itself.
    pub path: Vec<String>,
    /// The module around it.
    pub parent: Option<usize>,
    /// Modules that it declares, in the order of their `mod` lines.
    pub children: Vec<usize>,
    /// Index of its file in the crate's sources.
    pub file: usize,
    /// What else it declares.
    pub items: Vec<syn::Item>,
    /// What its `use` lines bring in, those in function bodies included.
    pub uses: Vec<Use>,
}

/// One name of a `use` line.
pub struct Use {
    /// The path as written, without the name it is given here.
    pub path: Vec<String>,
    /// The name here; `*` for all names of a module.
    pub name: String,
    /// Others see it here too.
    pub public: bool,
    /// Where it stands.
    pub span: proc_macro2::Span,
}

/// All modules of a crate, the root first.
pub struct Modules<'a> {
    pub krate: &'a Crate,
    pub all: Vec<Module>,
}

impl<'a> Modules<'a> {
    /// Parses a crate from its `lib.rs`, or its `main.rs` if it has no other.
    ///
    /// # Errors
    /// A file that isn't Rust, or a `mod` line without a file.
    pub fn read(krate: &'a Crate) -> Result<Option<Self>, Finding> {
        let roots =
            ["src/lib.rs", "src/main.rs"].map(|path| format!("{}{path}", krate.directory()));
        let Some(root) = roots.iter().find_map(|path| position(krate, path)) else {
            return Ok(None);
        };
        let mut modules = Modules { krate, all: Vec::new() };
        modules.add_file(root, Vec::new(), None)?;
        Ok(Some(modules))
    }

    /// The file of a module.
    pub fn source(&self, module: usize) -> &'a Source {
        &self.krate.sources[self.all[module].file]
    }

    /// A file's path from the crate's `src`.
    pub fn file_name(&self, file: usize) -> &'a str {
        let path = self.krate.sources[file].path.as_str();
        path.strip_prefix(self.krate.directory())
            .and_then(|path| path.strip_prefix("src/"))
            .unwrap_or(path)
    }

    /// The child of `module` that is called `name`.
    pub fn child(&self, module: usize, name: &str) -> Option<usize> {
        let named = |child: &usize| self.all[*child].path.last().is_some_and(|last| last == name);
        self.all[module].children.iter().copied().find(named)
    }

    /// `module` and those around it, from the root inwards.
    pub fn ancestry(&self, module: usize) -> Vec<usize> {
        let mut line: Vec<usize> =
            std::iter::successors(Some(module), |&inner| self.all[inner].parent).collect();
        line.reverse();
        line
    }

    fn add_file(
        &mut self,
        file: usize,
        path: Vec<String>,
        parent: Option<usize>,
    ) -> Result<usize, Finding> {
        let source = &self.krate.sources[file];
        let parsed = syn::parse_file(&source.text).map_err(|error| {
            Finding::error(&source.path, error.span().start().line, format!("not Rust: {error}"))
        })?;
        self.add(file, path, parent, parsed.items)
    }

    fn add(
        &mut self,
        file: usize,
        path: Vec<String>,
        parent: Option<usize>,
        items: Vec<syn::Item>,
    ) -> Result<usize, Finding> {
        let own = self.all.len();
        let source = &self.krate.sources[file];
        let (mods, items): (Vec<_>, Vec<_>) = items
            .into_iter()
            .filter(|item| !in_test(source, item.span()))
            .partition(|item| matches!(item, syn::Item::Mod(_)));
        let uses = uses(source, &items);
        self.all.push(Module { path, parent, children: Vec::new(), file, items, uses });
        for item in mods {
            let syn::Item::Mod(item) = item else { continue };
            let path = [self.all[own].path.clone(), vec![item.ident.to_string()]].concat();
            let child = match item.content {
                Some((_, items)) => self.add(file, path, Some(own), items)?,
                None => {
                    self.add_file(self.find_file(source, &item.ident, &path)?, path, Some(own))?
                }
            };
            self.all[own].children.push(child);
        }
        Ok(own)
    }

    fn find_file(
        &self,
        source: &Source,
        ident: &syn::Ident,
        path: &[String],
    ) -> Result<usize, Finding> {
        let base = format!("{}src/{}", self.krate.directory(), path.join("/"));
        [format!("{base}.rs"), format!("{base}/mod.rs")]
            .iter()
            .find_map(|path| position(self.krate, path))
            .ok_or_else(|| {
                Finding::error(
                    &source.path,
                    ident.span().start().line,
                    format!("no file for mod {ident}"),
                )
            })
    }
}

/// Whether something that begins at `span` exists only in tests or models.
pub fn in_test(source: &Source, span: proc_macro2::Span) -> bool {
    source.in_test(span.byte_range().start)
}

fn position(krate: &Crate, path: &str) -> Option<usize> {
    krate.sources.iter().position(|source| source.path == path)
}

fn uses(source: &Source, items: &[syn::Item]) -> Vec<Use> {
    let mut collector = UseCollector { source, found: Vec::new() };
    items.iter().for_each(|item| collector.visit_item(item));
    collector.found
}

struct UseCollector<'a> {
    source: &'a Source,
    found: Vec<Use>,
}

impl<'ast> Visit<'ast> for UseCollector<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !in_test(self.source, item.span()) {
            let public = !matches!(item.vis, syn::Visibility::Inherited);
            expand(&item.tree, &mut Vec::new(), public, &mut self.found);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !in_test(self.source, item.span()) {
            visit::visit_item_mod(self, item);
        }
    }
}

/// Every name of a `use` tree: `a::{b, c as d}` gives `a::b` and `a::c` as `d`.
fn expand(tree: &syn::UseTree, path: &mut Vec<String>, public: bool, found: &mut Vec<Use>) {
    let mut add = |mut path: Vec<String>, last: Option<String>, name: String, span| {
        path.extend(last.filter(|last| last != "self"));
        let name = if name == "self" { path.last().cloned().unwrap_or_default() } else { name };
        found.push(Use { path, name, public, span });
    };
    match tree {
        syn::UseTree::Path(part) => {
            path.push(part.ident.to_string());
            expand(&part.tree, path, public, found);
            path.pop();
        }
        syn::UseTree::Name(part) => {
            add(
                path.clone(),
                Some(part.ident.to_string()),
                part.ident.to_string(),
                part.ident.span(),
            );
        }
        syn::UseTree::Rename(part) => {
            add(
                path.clone(),
                Some(part.ident.to_string()),
                part.rename.to_string(),
                part.ident.span(),
            );
        }
        syn::UseTree::Glob(part) => add(path.clone(), None, "*".to_owned(), part.span()),
        syn::UseTree::Group(group) => {
            group.items.iter().for_each(|tree| expand(tree, path, public, found))
        }
    }
}

/// The names that a module declares itself, without its child modules.
pub fn declared(items: &[syn::Item]) -> HashMap<String, &syn::Item> {
    items.iter().filter_map(|item| Some((item_name(item)?.to_string(), item))).collect()
}

fn item_name(item: &syn::Item) -> Option<&syn::Ident> {
    Some(match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::TraitAlias(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    })
}
