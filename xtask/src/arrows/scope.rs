//! The local names at some place in the code, and the types of expressions there.

use std::collections::HashMap;

use super::methods::{Tables, segments};
use super::names::{Item, Target};
use super::types::Type;

/// What is known where an expression stands.
#[derive(Clone)]
pub struct Scope<'a> {
    pub tables: &'a Tables<'a>,
    pub module: usize,
    /// What `Self` is.
    pub own: Option<Item>,
    pub generics: Vec<&'a syn::Generics>,
    /// Local names and their types, the innermost block last.
    pub locals: Vec<HashMap<String, Type>>,
}

impl<'a> Scope<'a> {
    pub fn new(tables: &'a Tables<'a>, module: usize) -> Self {
        Scope { tables, module, own: None, generics: Vec::new(), locals: Vec::new() }
    }

    /// The type with the method `name` that is called on a receiver.
    pub fn owner(&self, receiver: &Type, name: &str) -> Option<Item> {
        let found = self.tables.method(receiver, name).map(|(own, _)| own);
        let guess = || {
            self.tables
                .only_owner(name)
                .filter(|_| *receiver == Type::Unknown && !is_common(name))
                .cloned()
        };
        found.or_else(guess)
    }

    /// Where a path leads, `Self` being the type around it.
    pub fn target(&self, names: &[String]) -> Option<Target> {
        match (names, &self.own) {
            ([first, more @ ..], Some(own)) if first == "Self" => {
                Some(Target::Item(own.clone(), more.to_vec()))
            }
            _ => self.tables.names.resolve(self.module, names),
        }
    }

    pub fn local(&self, name: &str) -> Option<&Type> {
        self.locals.iter().rev().find_map(|names| names.get(name))
    }

    pub fn bind_name(&mut self, name: String, as_type: Type) {
        if let Some(names) = self.locals.last_mut() {
            names.insert(name, as_type);
        }
    }

    pub fn convert(&self, written: &syn::Type) -> Type {
        self.tables.convert(self.module, written, self.own.as_ref(), &self.generics)
    }

    /// Gives the names in a pattern the types that they have if the whole is `as_type`.
    pub fn bind(&mut self, pattern: &syn::Pat, as_type: Type) {
        match pattern {
            syn::Pat::Ident(part) => {
                if let Some((_, inner)) = &part.subpat {
                    self.bind(inner, as_type.clone());
                }
                self.bind_name(part.ident.to_string(), as_type);
            }
            syn::Pat::Reference(part) => self.bind(&part.pat, as_type),
            syn::Pat::Paren(part) => self.bind(&part.pat, as_type),
            syn::Pat::Type(part) => self.bind(&part.pat, self.convert(&part.ty)),
            syn::Pat::Or(part) => {
                part.cases.iter().for_each(|case| self.bind(case, as_type.clone()))
            }
            syn::Pat::Slice(part) => {
                part.elems.iter().for_each(|inner| self.bind(inner, as_type.element()))
            }
            syn::Pat::Tuple(part) => {
                for (at, inner) in part.elems.iter().enumerate() {
                    self.bind(inner, tuple_part(&as_type, at));
                }
            }
            syn::Pat::TupleStruct(part) => {
                for (at, inner) in part.elems.iter().enumerate() {
                    self.bind(inner, self.matched(&part.path, &at.to_string(), &as_type));
                }
            }
            syn::Pat::Struct(part) => {
                for field in &part.fields {
                    let name = match &field.member {
                        syn::Member::Named(name) => name.to_string(),
                        syn::Member::Unnamed(index) => index.index.to_string(),
                    };
                    self.bind(&field.pat, self.matched(&part.path, &name, &as_type));
                }
            }
            _ => {}
        }
    }

    /// The type of a field that a pattern takes out of a struct or variant.
    fn matched(&self, path: &syn::Path, field: &str, whole: &Type) -> Type {
        let names = segments(path);
        let last = names.last().map_or("", String::as_str);
        if matches!(last, "Some" | "Ok" | "Err") {
            let Type::Foreign(_, inside) = whole else { return Type::Unknown };
            return inside.get(usize::from(last == "Err")).cloned().unwrap_or(Type::Unknown);
        }
        match self.target(&names) {
            Some(Target::Item(item, more)) => {
                self.tables.part(&item, more.first().map(String::as_str), field)
            }
            _ => Type::Unknown,
        }
    }

    /// The type of an expression.
    pub fn type_of(&mut self, expression: &syn::Expr) -> Type {
        match expression {
            syn::Expr::Reference(part) => self.type_of(&part.expr),
            syn::Expr::Paren(part) => self.type_of(&part.expr),
            syn::Expr::Group(part) => self.type_of(&part.expr),
            syn::Expr::Unary(part) => self.type_of(&part.expr),
            syn::Expr::Cast(part) => self.convert(&part.ty),
            syn::Expr::Try(part) => self.type_of(&part.expr).element(),
            syn::Expr::Tuple(part) => {
                Type::Tuple(part.elems.iter().map(|inner| self.type_of(inner)).collect())
            }
            syn::Expr::Array(part) => {
                let inner = part.elems.first().map_or(Type::Unknown, |inner| self.type_of(inner));
                Type::Foreign("[]".to_owned(), vec![inner])
            }
            syn::Expr::Field(part) => self.type_of_field(part),
            syn::Expr::Index(part) => {
                let whole = self.type_of(&part.expr);
                if matches!(*part.index, syn::Expr::Range(_)) {
                    whole
                } else {
                    self.tables.indexed(&whole)
                }
            }
            syn::Expr::Path(part) => self.type_of_path(&segments(&part.path)),
            syn::Expr::Struct(part) => self.type_of_path(&segments(&part.path)),
            syn::Expr::Call(part) => self.type_of_call(part),
            syn::Expr::MethodCall(part) => self.type_of_method_call(part),
            syn::Expr::Block(part) => self.type_of_block(&part.block),
            syn::Expr::Unsafe(part) => self.type_of_block(&part.block),
            syn::Expr::If(part) => {
                self.locals.push(HashMap::new());
                self.bind_conditions(&part.cond);
                let found = self.type_of_block(&part.then_branch);
                self.locals.pop();
                match &part.else_branch {
                    Some((_, other)) if found == Type::Unknown => self.type_of(other),
                    _ => found,
                }
            }
            syn::Expr::Match(part) => self.type_of_match(part),
            syn::Expr::Closure(part) => {
                Type::Foreign("Fn".to_owned(), vec![self.type_of_closure(part, &Type::Unknown)])
            }
            syn::Expr::Lit(_) | syn::Expr::Binary(_) | syn::Expr::Range(_) => Type::other(),
            _ => Type::Unknown,
        }
    }

    fn type_of_field(&mut self, part: &syn::ExprField) -> Type {
        let whole = self.type_of(&part.base);
        match (&part.member, &whole) {
            (syn::Member::Unnamed(index), Type::Tuple(_)) => {
                tuple_part(&whole, index.index as usize)
            }
            (syn::Member::Unnamed(index), _) => self.tables.field(&whole, &index.index.to_string()),
            (syn::Member::Named(name), _) => self.tables.field(&whole, &name.to_string()),
        }
    }

    fn type_of_path(&self, names: &[String]) -> Type {
        if let [name] = names
            && let Some(known) = self.local(name)
        {
            return known.clone();
        }
        match self.target(names) {
            Some(Target::Item(item, more)) => match more.first() {
                None => self.tables.value(&item),
                Some(name) => {
                    let method = self.tables.methods.get(&(item.clone(), name.clone()));
                    // Else a variant, or a constant, which mostly is of the same type.
                    method.and_then(|method| method.gives.clone()).unwrap_or(Type::Own(item))
                }
            },
            _ => Type::Unknown,
        }
    }

    fn type_of_call(&mut self, part: &syn::ExprCall) -> Type {
        let syn::Expr::Path(function) = &*part.func else {
            return self.type_of(&part.func).element();
        };
        let names = segments(&function.path);
        let last = names.last().map_or("", String::as_str);
        let first_argument = |reader: &mut Self| {
            part.args.first().map_or(Type::Unknown, |inner| reader.type_of(inner))
        };
        match (last, names.iter().rev().nth(1).map(String::as_str)) {
            ("Some", None) => Type::option(first_argument(self)),
            ("Ok", None) => Type::Foreign("Result".to_owned(), vec![first_argument(self)]),
            // `mem::take(x)` and their kind give what they are given.
            ("take" | "replace", Some("mem")) => first_argument(self),
            ("new", Some(head @ ("Box" | "Arc" | "Rc" | "Pin" | "ManuallyDrop"))) => {
                Type::Foreign(head.to_owned(), vec![first_argument(self)])
            }
            _ => match (names.len(), self.local(last)) {
                (1, Some(closure)) => closure.element(),
                _ if self.target(&names).is_none() => Type::other(),
                _ => self.type_of_path(&names),
            },
        }
    }

    fn type_of_method_call(&mut self, part: &syn::ExprMethodCall) -> Type {
        let receiver = self.type_of(&part.receiver);
        let name = part.method.to_string();
        if let Some(own) = self.owner(&receiver, &name) {
            let method = self.tables.methods.get(&(own, name));
            return method.and_then(|method| method.gives.clone()).unwrap_or(Type::Unknown);
        }
        if matches!(receiver, Type::Own(_)) && name == "clone" {
            return receiver;
        }
        let closures = part.args.iter().rev().filter_map(|argument| match argument {
            syn::Expr::Closure(closure) => Some(closure),
            _ => None,
        });
        let gives = closures
            .take(1)
            .map(|closure| self.type_of_closure(closure, &receiver.element()))
            .next();
        receiver.after(&name, &gives.unwrap_or(Type::Unknown))
    }

    /// What a closure gives that is called with `element`.
    fn type_of_closure(&mut self, closure: &syn::ExprClosure, element: &Type) -> Type {
        self.locals.push(HashMap::new());
        self.bind_parameters(closure, element);
        let gives = self.type_of(&closure.body);
        self.locals.pop();
        gives
    }

    fn type_of_block(&mut self, block: &syn::Block) -> Type {
        self.locals.push(HashMap::new());
        let mut found = Type::Unknown;
        for statement in &block.stmts {
            match statement {
                syn::Stmt::Local(local) => self.bind_local(local),
                syn::Stmt::Expr(expression, None) => found = self.type_of(expression),
                _ => {}
            }
        }
        self.locals.pop();
        found
    }

    fn type_of_match(&mut self, part: &syn::ExprMatch) -> Type {
        let whole = self.type_of(&part.expr);
        for arm in &part.arms {
            self.locals.push(HashMap::new());
            self.bind(&arm.pat, whole.clone());
            let found = self.type_of(&arm.body);
            self.locals.pop();
            if found != Type::Unknown {
                return found;
            }
        }
        Type::Unknown
    }

    pub fn bind_local(&mut self, local: &syn::Local) {
        let as_type = local.init.as_ref().map_or(Type::Unknown, |init| self.type_of(&init.expr));
        self.bind(&local.pat, as_type);
    }

    /// Binds what the `let`s of a condition take out.
    fn bind_conditions(&mut self, condition: &syn::Expr) {
        match condition {
            syn::Expr::Let(part) => {
                let as_type = self.type_of(&part.expr);
                self.bind(&part.pat, as_type);
            }
            syn::Expr::Binary(part) => {
                self.bind_conditions(&part.left);
                self.bind_conditions(&part.right);
            }
            syn::Expr::Paren(part) => self.bind_conditions(&part.expr),
            _ => {}
        }
    }

    /// A closure's only parameter is an element of what it is called for; of more than one nothing
    /// is known.
    pub fn bind_parameters(&mut self, closure: &syn::ExprClosure, element: &Type) {
        let known = closure.inputs.len() == 1;
        for input in &closure.inputs {
            self.bind(input, if known { element.clone() } else { Type::Unknown });
        }
    }
}

fn tuple_part(whole: &Type, at: usize) -> Type {
    match whole {
        Type::Tuple(parts) => parts.get(at).cloned().unwrap_or(Type::Unknown),
        _ => Type::Unknown,
    }
}

/// Names that methods of std have too, so that a value of unknown type tells nothing.
const COMMON: &str = "add all any append as_bytes as_mut as_mut_ptr as_ptr as_ref as_slice as_str chain clear clone cmp collect \
    contains copy_from count drain end entry eq expect extend fill filter find first flush fmt get get_mut \
    get_or_init hash index insert into_inner is_empty is_some iter iter_mut join keys last len load lock map max \
    min next or parse peek pop position push read remove replace reserve resize retain rev set sort split \
    split_at start store sub sum swap take truncate try_lock unwrap update values wait wake with write";

fn is_common(name: &str) -> bool {
    COMMON.split(' ').any(|common| common == name)
}
