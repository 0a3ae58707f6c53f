//! Tables of a crate: where each method is defined, and the types of fields, functions and what
//! methods return.

use std::collections::{HashMap, HashSet};

use syn::spanned::Spanned;

use super::modules::{Modules, in_test};
use super::names::{Item, Names, Target};
use super::types::Type;

/// A method's definitions; several if they are chosen by `cfg`.
#[derive(Default)]
pub struct Method {
    /// The modules that hold them.
    pub places: Vec<usize>,
    pub gives: Option<Type>,
}

/// What a crate defines, by name.
pub struct Tables<'a> {
    pub modules: &'a Modules<'a>,
    pub names: Names<'a>,
    /// Methods of types in `impl` blocks of their own, and of traits.
    pub methods: HashMap<(Item, String), Method>,
    /// What `Deref` and `Index` lead to, by the trait's name.
    targets: HashMap<(Item, &'static str), Type>,
    /// Types that have a method of this name.
    owners: HashMap<String, HashSet<Item>>,
}

impl<'a> Tables<'a> {
    pub fn new(modules: &'a Modules<'a>) -> Self {
        let names = Names::new(modules);
        let (methods, targets, owners) = Default::default();
        let mut tables = Tables { modules, names, methods, targets, owners };
        for (module, contents) in modules.all.iter().enumerate() {
            for item in &contents.items {
                match item {
                    syn::Item::Impl(item) => tables.add_impl(module, item),
                    syn::Item::Trait(item) => tables.add_trait(module, item),
                    _ => {}
                }
            }
        }
        tables
    }

    fn add_trait(&mut self, module: usize, item: &syn::ItemTrait) {
        let own = (module, item.ident.to_string());
        for part in &item.items {
            if let syn::TraitItem::Fn(function) = part {
                self.add(module, &own, &function.sig, &[&item.generics], function.span());
            }
        }
    }

    fn add_impl(&mut self, module: usize, item: &syn::ItemImpl) {
        let Type::Own(own) = self.convert(module, &item.self_ty, None, &[&item.generics]) else {
            return;
        };
        let of = item.trait_.as_ref().map(|(_, path, _)| path);
        // A method of a trait of this crate is found at the trait.
        if of.is_some_and(|path| self.names.resolve(module, &segments(path)).is_some()) {
            return;
        }
        for part in &item.items {
            match part {
                syn::ImplItem::Fn(function) => {
                    self.add(module, &own, &function.sig, &[&item.generics], function.span())
                }
                syn::ImplItem::Type(part)
                    if matches!(part.ident.to_string().as_str(), "Target" | "Output") =>
                {
                    let name = if part.ident == "Target" { "Deref" } else { "Index" };
                    let target = self.convert(module, &part.ty, Some(&own), &[&item.generics]);
                    self.targets.insert((own.clone(), name), target);
                }
                _ => {}
            }
        }
    }

    fn add(
        &mut self,
        module: usize,
        own: &Item,
        signature: &syn::Signature,
        generics: &[&syn::Generics],
        span: proc_macro2::Span,
    ) {
        if in_test(self.modules.source(module), span) {
            return;
        }
        let gives = self.returned(module, signature, Some(own), generics);
        let name = signature.ident.to_string();
        self.owners.entry(name.clone()).or_default().insert(own.clone());
        let method = self.methods.entry((own.clone(), name)).or_default();
        method.places.push(module);
        method.gives = Some(gives);
    }

    fn returned(
        &self,
        module: usize,
        signature: &syn::Signature,
        own: Option<&Item>,
        generics: &[&syn::Generics],
    ) -> Type {
        let generics = [generics, &[&signature.generics]].concat();
        match &signature.output {
            syn::ReturnType::Default => Type::Tuple(Vec::new()),
            syn::ReturnType::Type(_, gives) => self.convert(module, gives, own, &generics),
        }
    }

    /// What a free function, constant, static or tuple struct gives when it is named and called.
    pub fn value(&self, item: &Item) -> Type {
        match self.names.item(item) {
            Some(syn::Item::Fn(function)) => self.returned(item.0, &function.sig, None, &[]),
            Some(syn::Item::Const(constant)) => self.convert(item.0, &constant.ty, None, &[]),
            Some(syn::Item::Static(constant)) => self.convert(item.0, &constant.ty, None, &[]),
            Some(syn::Item::Struct(_) | syn::Item::Enum(_) | syn::Item::Union(_)) => {
                Type::Own(item.clone())
            }
            _ => Type::Unknown,
        }
    }

    /// The method `name` of a value, looked for where a dot looks: the type itself, then what it
    /// leads to.
    pub fn method(&self, of: &Type, name: &str) -> Option<(Item, &Method)> {
        self.along(of, |own| {
            Some((own.clone(), self.methods.get(&(own.clone(), name.to_owned()))?))
        })
    }

    /// The only type that has a method of this name.
    pub fn only_owner(&self, name: &str) -> Option<&Item> {
        self.owners.get(name).filter(|owners| owners.len() == 1)?.iter().next()
    }

    pub fn is_method(&self, name: &str) -> bool {
        self.owners.contains_key(name)
    }

    /// The type of a field of a value.
    pub fn field(&self, of: &Type, name: &str) -> Type {
        let found = self.along(of, |own| match self.names.item(own)? {
            syn::Item::Struct(item) => self.field_of(own, &item.fields, &item.generics, name),
            syn::Item::Union(item) => self.named_field(own, &item.fields, &item.generics, name),
            _ => None,
        });
        found.unwrap_or(Type::Unknown)
    }

    /// The type of a field of an enum's variant, or of a struct if `variant` is `None`.
    pub fn part(&self, own: &Item, variant: Option<&str>, name: &str) -> Type {
        let found = match (self.names.item(own), variant) {
            (Some(syn::Item::Enum(item)), Some(variant)) => {
                let variant = item.variants.iter().find(|known| known.ident == variant);
                variant
                    .and_then(|variant| self.field_of(own, &variant.fields, &item.generics, name))
            }
            (Some(syn::Item::Struct(item)), _) => {
                self.field_of(own, &item.fields, &item.generics, name)
            }
            _ => None,
        };
        found.unwrap_or(Type::Unknown)
    }

    fn field_of(
        &self,
        own: &Item,
        fields: &syn::Fields,
        generics: &syn::Generics,
        name: &str,
    ) -> Option<Type> {
        match fields {
            syn::Fields::Named(fields) => self.named_field(own, fields, generics, name),
            syn::Fields::Unnamed(fields) => {
                let field = fields.unnamed.iter().nth(name.parse().ok()?)?;
                Some(self.convert(own.0, &field.ty, Some(own), &[generics]))
            }
            syn::Fields::Unit => None,
        }
    }

    fn named_field(
        &self,
        own: &Item,
        fields: &syn::FieldsNamed,
        generics: &syn::Generics,
        name: &str,
    ) -> Option<Type> {
        let field = fields
            .named
            .iter()
            .find(|field| field.ident.as_ref().is_some_and(|ident| ident == name))?;
        Some(self.convert(own.0, &field.ty, Some(own), &[generics]))
    }

    /// What indexing a value gives.
    pub fn indexed(&self, of: &Type) -> Type {
        match of {
            Type::Own(own) => {
                self.targets.get(&(own.clone(), "Index")).cloned().unwrap_or(Type::Unknown)
            }
            _ => of.target().map_or_else(|| of.element(), |target| self.indexed(&target)),
        }
    }

    /// The first find on the way that a dot goes.
    fn along<T>(&self, of: &Type, find: impl Fn(&Item) -> Option<T>) -> Option<T> {
        let mut at = of.clone();
        // Deeper than any chain of guards and boxes.
        for _ in 0..8 {
            let next = match &at {
                Type::Own(own) => {
                    if let Some(found) = find(own) {
                        return Some(found);
                    }
                    self.targets.get(&(own.clone(), "Deref"))?.clone()
                }
                _ => at.target()?,
            };
            at = next;
        }
        None
    }

    /// A written type. `own` is what `Self` stands for, `generics` are those in force.
    pub fn convert(
        &self,
        module: usize,
        written: &syn::Type,
        own: Option<&Item>,
        generics: &[&syn::Generics],
    ) -> Type {
        let inner = |written: &syn::Type| self.convert(module, written, own, generics);
        match written {
            syn::Type::Reference(part) => inner(&part.elem),
            syn::Type::Paren(part) => inner(&part.elem),
            syn::Type::Group(part) => inner(&part.elem),
            syn::Type::Ptr(part) => Type::Foreign("*".to_owned(), vec![inner(&part.elem)]),
            syn::Type::Slice(part) => Type::Foreign("[]".to_owned(), vec![inner(&part.elem)]),
            syn::Type::Array(part) => Type::Foreign("[]".to_owned(), vec![inner(&part.elem)]),
            syn::Type::Tuple(part) => Type::Tuple(part.elems.iter().map(inner).collect()),
            syn::Type::ImplTrait(part) => self.bound(module, &part.bounds, own, generics),
            syn::Type::TraitObject(part) => self.bound(module, &part.bounds, own, generics),
            syn::Type::Path(part) if part.qself.is_none() => {
                self.convert_path(module, &part.path, own, generics)
            }
            _ => Type::Unknown,
        }
    }

    fn convert_path(
        &self,
        module: usize,
        path: &syn::Path,
        own: Option<&Item>,
        generics: &[&syn::Generics],
    ) -> Type {
        let names = segments(path);
        if names == ["Self"] {
            return own.cloned().map_or(Type::Unknown, Type::Own);
        }
        if let [name] = &names[..]
            && let Some(bounds) = generics.iter().find_map(|generics| bounds(generics, name))
        {
            return self.bound(module, bounds, own, generics);
        }
        match self.names.resolve(module, &names) {
            Some(Target::Item(item, more)) if more.is_empty() => match self.names.item(&item) {
                Some(syn::Item::Type(alias)) => {
                    self.convert(item.0, &alias.ty, None, &[&alias.generics])
                }
                _ => Type::Own(item),
            },
            Some(_) => Type::Unknown,
            None => self.foreign(module, path, own, generics),
        }
    }

    fn foreign(
        &self,
        module: usize,
        path: &syn::Path,
        own: Option<&Item>,
        generics: &[&syn::Generics],
    ) -> Type {
        let Some(last) = path.segments.last() else { return Type::Unknown };
        let inner = |written: &syn::Type| self.convert(module, written, own, generics);
        let arguments = match &last.arguments {
            syn::PathArguments::AngleBracketed(list) => list
                .args
                .iter()
                .filter_map(|argument| match argument {
                    syn::GenericArgument::Type(written) => Some(inner(written)),
                    syn::GenericArgument::AssocType(bound) => Some(inner(&bound.ty)),
                    _ => None,
                })
                .collect(),
            syn::PathArguments::Parenthesized(list) => match &list.output {
                syn::ReturnType::Type(_, gives) => vec![inner(gives)],
                syn::ReturnType::Default => Vec::new(),
            },
            syn::PathArguments::None => Vec::new(),
        };
        Type::Foreign(last.ident.to_string(), arguments)
    }

    /// A value of which only bounds are known: the first trait of this crate among them, or the
    /// first of another one.
    fn bound(
        &self,
        module: usize,
        bounds: &Bounds,
        own: Option<&Item>,
        generics: &[&syn::Generics],
    ) -> Type {
        let traits = bounds.iter().filter_map(|bound| match bound {
            syn::TypeParamBound::Trait(bound) => Some(&bound.path),
            _ => None,
        });
        let types: Vec<Type> =
            traits.map(|path| self.convert_path(module, path, own, generics)).collect();
        let first_own = types.iter().find(|found| matches!(found, Type::Own(_)));
        first_own.or(types.first()).cloned().unwrap_or(Type::Unknown)
    }
}

type Bounds = syn::punctuated::Punctuated<syn::TypeParamBound, syn::Token![+]>;

/// The bounds of a type parameter where it is declared; those of a `where` clause are not looked
/// at.
fn bounds<'a>(generics: &&'a syn::Generics, name: &str) -> Option<&'a Bounds> {
    generics
        .type_params()
        .find(|parameter| parameter.ident == name)
        .map(|parameter| &parameter.bounds)
}

/// The names of a path.
pub fn segments(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}
