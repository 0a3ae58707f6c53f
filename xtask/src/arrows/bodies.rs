//! Reads all code of a crate for what it names and calls in other files.

use std::collections::HashMap;

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::arrow::{Arrow, Found};
use super::methods::{Tables, segments};
use super::modules::in_test;
use super::names::{Item, Target};
use super::scope::Scope;
use super::types::Type;

/// All arrows of a crate, in no order.
pub fn read(tables: &Tables) -> Found {
    let mut found = Found::default();
    for (module, contents) in tables.modules.all.iter().enumerate() {
        let mut reader = Reader::new(Scope::new(tables, module));
        reader.uses();
        contents.items.iter().for_each(|item| reader.visit_item(item));
        found.add(reader.found);
    }
    found
}

/// Reads the code of one module.
struct Reader<'a> {
    scope: Scope<'a>,
    /// What the parameter of the next closure is, if the method that it is given to tells.
    hint: Option<Type>,
    found: Found,
}

impl<'a> Reader<'a> {
    fn new(scope: Scope<'a>) -> Self {
        Reader { scope, hint: None, found: Found::default() }
    }

    /// `use` lines, but for those that only give a name of this module's own inside to others.
    fn uses(&mut self) {
        for used in &self.scope.tables.modules.all[self.scope.module].uses {
            let Some(Target::Item(item, _)) =
                self.scope.tables.names.resolve(self.scope.module, &used.path)
            else {
                continue;
            };
            if !(used.public
                && self.scope.tables.modules.ancestry(item.0).contains(&self.scope.module))
            {
                self.arrow_to_item(&item, used.span);
            }
        }
    }

    fn arrow(&mut self, to: usize, what: String, call: bool, span: Span) {
        let modules = self.scope.tables.modules;
        let other_file = modules.all[to].file != modules.all[self.scope.module].file;
        if other_file && !in_test(modules.source(self.scope.module), span) {
            self.found.arrows.push(Arrow {
                from: self.scope.module,
                to,
                line: span.start().line,
                what,
                call,
            });
        }
    }

    fn arrow_to_item(&mut self, item: &Item, span: Span) {
        // Macros live outside the modules: what is above them in the text sees them.
        if !matches!(self.scope.tables.names.item(item), Some(syn::Item::Macro(_))) {
            self.arrow(item.0, item.1.clone(), false, span);
        }
    }

    fn arrow_to_method(&mut self, own: &Item, name: &str, span: Span) {
        let Some(method) = self.scope.tables.methods.get(&(own.clone(), name.to_owned())) else {
            return;
        };
        for to in method.places.clone() {
            self.arrow(to, format!("{}::{name}", own.1), true, span);
        }
    }

    /// A path that is no local name: its item, and the method that it ends with.
    fn path(&mut self, names: &[String], span: Span) {
        if names.len() == 1 && (names[0] == "Self" || self.scope.local(&names[0]).is_some()) {
            return;
        }
        if let Some(Target::Item(item, more)) = self.scope.target(names) {
            self.arrow_to_item(&item, span);
            if let Some(name) = more.first() {
                self.arrow_to_method(&item, name, span);
            }
        }
    }

    fn call(&mut self, receiver: &Type, name: &str, span: Span) {
        match self.scope.owner(receiver, name) {
            Some(own) => self.arrow_to_method(&own, name, span),
            None if *receiver == Type::Unknown && self.scope.tables.is_method(name) => {
                self.found.skipped.push((self.scope.module, span.start().line, name.to_owned()));
            }
            None => {}
        }
    }

    fn in_function(&mut self, signature: &'a syn::Signature, walk: impl FnOnce(&mut Self)) {
        self.scope.generics.push(&signature.generics);
        self.scope.locals.push(HashMap::new());
        for input in &signature.inputs {
            match input {
                syn::FnArg::Receiver(_) => {
                    let own = self.scope.own.clone().map_or(Type::Unknown, Type::Own);
                    self.scope.bind_name("self".to_owned(), own);
                }
                syn::FnArg::Typed(part) => self.scope.bind(&part.pat, self.scope.convert(&part.ty)),
            }
        }
        walk(self);
        self.scope.locals.pop();
        self.scope.generics.pop();
    }

    fn in_block(&mut self, walk: impl FnOnce(&mut Self)) {
        self.scope.locals.push(HashMap::new());
        walk(self);
        self.scope.locals.pop();
    }

    /// What a macro is given, where it isn't a list of expressions: paths, and calls of `self`'s
    /// methods or by names that only one type has.
    fn tokens(&mut self, tokens: TokenStream) {
        let trees: Vec<TokenTree> = tokens.into_iter().collect();
        let ident = |at: usize| match trees.get(at) {
            Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
            _ => None,
        };
        let punct = |at: usize, wanted: char| matches!(trees.get(at), Some(TokenTree::Punct(p)) if p.as_char() == wanted);
        let mut at = 0;
        while at < trees.len() {
            let span = trees[at].span();
            match &trees[at] {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(first) => {
                    let after_dot = at > 0 && punct(at - 1, '.');
                    let mut names = vec![first.to_string()];
                    while punct(at + 1, ':') && punct(at + 2, ':') && ident(at + 3).is_some() {
                        names.extend(ident(at + 3));
                        at += 3;
                    }
                    let called = matches!(trees.get(at + 1), Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Parenthesis);
                    if !after_dot {
                        self.path(&names, span);
                    } else if called {
                        let of_self = at > 1 && ident(at - 2).is_some_and(|name| name == "self");
                        let receiver =
                            if of_self { self.scope.local("self").cloned() } else { None };
                        self.call(&receiver.unwrap_or(Type::Unknown), &names[0], span);
                    }
                }
                _ => {}
            }
            at += 1;
        }
    }
}

impl<'a> Visit<'a> for Reader<'a> {
    fn visit_item_use(&mut self, _: &'a syn::ItemUse) {}

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        // Those outside functions are modules of their own, see `Modules`.
        if !in_test(self.scope.tables.modules.source(self.scope.module), item.span()) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        let own = match self.scope.tables.convert(
            self.scope.module,
            &item.self_ty,
            None,
            &[&item.generics],
        ) {
            Type::Own(own) => Some(own),
            _ => None,
        };
        let outer = std::mem::replace(&mut self.scope.own, own);
        self.scope.generics.push(&item.generics);
        visit::visit_item_impl(self, item);
        self.scope.generics.pop();
        self.scope.own = outer;
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        let outer = self.scope.own.replace((self.scope.module, item.ident.to_string()));
        self.scope.generics.push(&item.generics);
        visit::visit_item_trait(self, item);
        self.scope.generics.pop();
        self.scope.own = outer;
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        self.in_function(&item.sig, |reader| visit::visit_item_fn(reader, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        self.in_function(&item.sig, |reader| visit::visit_impl_item_fn(reader, item));
    }

    fn visit_trait_item_fn(&mut self, item: &'a syn::TraitItemFn) {
        self.in_function(&item.sig, |reader| visit::visit_trait_item_fn(reader, item));
    }

    fn visit_block(&mut self, block: &'a syn::Block) {
        self.in_block(|reader| visit::visit_block(reader, block));
    }

    fn visit_local(&mut self, local: &'a syn::Local) {
        visit::visit_local(self, local);
        self.scope.bind_local(local);
    }

    fn visit_expr_if(&mut self, part: &'a syn::ExprIf) {
        self.in_block(|reader| {
            reader.visit_expr(&part.cond);
            reader.visit_block(&part.then_branch);
        });
        if let Some((_, other)) = &part.else_branch {
            self.visit_expr(other);
        }
    }

    fn visit_expr_while(&mut self, part: &'a syn::ExprWhile) {
        self.in_block(|reader| visit::visit_expr_while(reader, part));
    }

    fn visit_expr_let(&mut self, part: &'a syn::ExprLet) {
        visit::visit_expr_let(self, part);
        let as_type = self.scope.type_of(&part.expr);
        self.scope.bind(&part.pat, as_type);
    }

    fn visit_expr_for_loop(&mut self, part: &'a syn::ExprForLoop) {
        self.visit_expr(&part.expr);
        let element = self.scope.type_of(&part.expr).element();
        self.in_block(|reader| {
            reader.scope.bind(&part.pat, element);
            reader.visit_pat(&part.pat);
            reader.visit_block(&part.body);
        });
    }

    fn visit_expr_match(&mut self, part: &'a syn::ExprMatch) {
        self.visit_expr(&part.expr);
        let whole = self.scope.type_of(&part.expr);
        for arm in &part.arms {
            self.in_block(|reader| {
                reader.scope.bind(&arm.pat, whole.clone());
                reader.visit_arm(arm);
            });
        }
    }

    fn visit_expr_closure(&mut self, part: &'a syn::ExprClosure) {
        let element = self.hint.take().unwrap_or(Type::Unknown);
        self.in_block(|reader| {
            reader.scope.bind_parameters(part, &element);
            visit::visit_expr_closure(reader, part);
        });
    }

    fn visit_expr_method_call(&mut self, part: &'a syn::ExprMethodCall) {
        self.visit_expr(&part.receiver);
        let receiver = self.scope.type_of(&part.receiver);
        self.call(&receiver, &part.method.to_string(), part.method.span());
        if let Some(arguments) = &part.turbofish {
            self.visit_angle_bracketed_generic_arguments(arguments);
        }
        for argument in &part.args {
            let closure = matches!(argument, syn::Expr::Closure(_));
            self.hint = closure.then(|| receiver.element());
            self.visit_expr(argument);
            self.hint = None;
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.path(&segments(path), path.span());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, part: &'a syn::Macro) {
        let list = Punctuated::<syn::Expr, syn::Token![,]>::parse_terminated;
        // Expressions that are parsed here live no longer than this call, so they are read by a
        // reader of their own.
        match list.parse2(part.tokens.clone()) {
            Ok(expressions) => {
                let mut reader = Reader::new(self.scope.clone());
                expressions.iter().for_each(|inner| reader.visit_expr(inner));
                let found = reader.found;
                self.found.add(found);
            }
            Err(_) => self.tokens(part.tokens.clone()),
        }
    }

    fn visit_attribute(&mut self, _: &'a syn::Attribute) {}
    fn visit_visibility(&mut self, _: &'a syn::Visibility) {}
}
