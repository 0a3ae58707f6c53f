//! What a path means: the module and the name that it leads to, through `use` lines and re-exports.

use std::collections::HashMap;

use super::modules::{Modules, declared};

/// Something that a module declares: the module's number and the name.
pub type Item = (usize, String);

/// Where a path leads within the crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Module(usize),
    /// An item, and the names that follow it in the path: a method, a variant.
    Item(Item, Vec<String>),
}

/// Resolves the paths of one crate.
pub struct Names<'a> {
    modules: &'a Modules<'a>,
    declared: Vec<HashMap<String, &'a syn::Item>>,
}

/// Re-exports that are followed one after the other before a path is given up as a circle of `use`
/// lines.
const HOPS_MAX: usize = 16;

impl<'a> Names<'a> {
    pub fn new(modules: &'a Modules<'a>) -> Self {
        Names {
            modules,
            declared: modules.all.iter().map(|module| declared(&module.items)).collect(),
        }
    }

    /// The item itself.
    pub fn item(&self, item: &Item) -> Option<&'a syn::Item> {
        self.declared[item.0].get(&item.1).copied()
    }

    /// Where `path`, written in `module`, leads; `None` if that is another crate or a local name.
    pub fn resolve(&self, module: usize, path: &[String]) -> Option<Target> {
        self.follow(module, path, HOPS_MAX)
    }

    fn follow(&self, module: usize, path: &[String], hops: usize) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" | "$crate" => self.within(Target::Module(0), rest, hops),
            "self" => self.within(Target::Module(module), rest, hops),
            "super" => self.within(Target::Module(self.modules.all[module].parent?), rest, hops),
            _ => self.within(self.lookup(module, first, !rest.is_empty(), hops)?, rest, hops),
        }
    }

    fn within(&self, start: Target, path: &[String], hops: usize) -> Option<Target> {
        let Some((first, rest)) = path.split_first() else { return Some(start) };
        match start {
            Target::Module(module) if first == "super" => {
                self.within(Target::Module(self.modules.all[module].parent?), rest, hops)
            }
            Target::Module(module) => {
                // A name that is made by a macro is taken for the module's own.
                let found = self.lookup(module, first, !rest.is_empty(), hops);
                self.within(
                    found.unwrap_or(Target::Item((module, first.clone()), Vec::new())),
                    rest,
                    hops,
                )
            }
            Target::Item(item, mut more) => {
                more.extend(path.iter().cloned());
                Some(Target::Item(item, more))
            }
        }
    }

    /// A name in a module's scope; `leads_on` says that a path goes on from it, so a module is
    /// meant if there is one.
    fn lookup(&self, module: usize, name: &str, leads_on: bool, hops: usize) -> Option<Target> {
        let child = self.modules.child(module, name).map(Target::Module);
        if leads_on && child.is_some() {
            return child;
        }
        if self.declared[module].contains_key(name) {
            return Some(Target::Item((module, name.to_owned()), Vec::new()));
        }
        let hops = hops.checked_sub(1)?;
        let uses = &self.modules.all[module].uses;
        let named = uses.iter().filter(|used| used.name == name);
        let named = named.filter_map(|used| self.follow_use(module, &used.path, name, hops)).next();
        let globs = uses.iter().filter(|used| used.name == "*");
        named.or(child).or_else(|| {
            globs.filter_map(|used| self.in_glob(module, &used.path, name, hops)).next()
        })
    }

    /// A `use` line's path. Its first name is never the one that the line itself brings in.
    fn follow_use(
        &self,
        module: usize,
        path: &[String],
        name: &str,
        hops: usize,
    ) -> Option<Target> {
        let own = path.len() == 1 || path[0] == name && self.modules.child(module, name).is_none();
        (!own).then(|| self.follow(module, path, hops)).flatten()
    }

    fn in_glob(&self, module: usize, path: &[String], name: &str, hops: usize) -> Option<Target> {
        match self.follow(module, path, hops)? {
            Target::Module(other) if other != module => self.lookup(other, name, false, hops),
            Target::Item(item, _) if self.has_variant(&item, name) => {
                Some(Target::Item(item, vec![name.to_owned()]))
            }
            _ => None,
        }
    }

    fn has_variant(&self, item: &Item, name: &str) -> bool {
        match self.item(item) {
            Some(syn::Item::Enum(item)) => {
                item.variants.iter().any(|variant| variant.ident == name)
            }
            _ => false,
        }
    }
}
