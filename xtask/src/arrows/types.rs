//! What is known of a value's type: which type of the crate it is, or what lies in a container of
//! another crate.

/// A type as far as it matters for finding a method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// A struct, enum, union or trait of this crate.
    Own(super::names::Item),
    /// Any other type, by its last name, with its arguments. Slices and arrays are `[]`, closures
    /// `Fn` of what they return.
    Foreign(String, Vec<Type>),
    Tuple(Vec<Type>),
    Unknown,
}

/// What these hold is reached by a dot.
const TRANSPARENT: &[&str] = &[
    "Arc",
    "Rc",
    "Box",
    "Pin",
    "ManuallyDrop",
    "Cow",
    "Ref",
    "RefMut",
    "MutexGuard",
    "RwLockReadGuard",
    "RwLockWriteGuard",
    "ReadGuard",
    "WriteGuard",
    "LazyLock",
    "LazyCell",
    "CachePadded",
];
/// Methods that give the same container, or one with the same elements.
const SAME: &[&str] = &[
    "iter",
    "iter_mut",
    "into_iter",
    "drain",
    "rev",
    "skip",
    "take",
    "take_while",
    "skip_while",
    "filter",
    "chain",
    "copied",
    "cloned",
    "peekable",
    "step_by",
    "inspect",
    "by_ref",
    "as_ref",
    "as_mut",
    "as_deref",
    "as_deref_mut",
    "clone",
    "to_owned",
    "to_vec",
    "as_slice",
    "as_mut_slice",
    "or",
    "or_else",
    "ok",
    "ok_or",
    "ok_or_else",
    "map_err",
    "retain",
    "values",
    "values_mut",
    "into_values",
    "into_boxed_slice",
    "collect",
    "borrow",
    "borrow_mut",
    "split_off",
    "get_unchecked",
];
/// Methods that give one element, or none.
const ONE_OR_NONE: &[&str] = &[
    "get",
    "get_mut",
    "first",
    "first_mut",
    "last",
    "last_mut",
    "pop",
    "pop_front",
    "pop_back",
    "front",
    "front_mut",
    "back",
    "back_mut",
    "next",
    "next_back",
    "nth",
    "peek",
    "peek_mut",
    "find",
    "min_by_key",
    "max_by_key",
    "min_by",
    "max_by",
    "min",
    "max",
    "reduce",
    "get_or_init",
    "try_lock",
];
/// Methods that give what is inside.
const INSIDE: &[&str] = &[
    "unwrap",
    "expect",
    "unwrap_or",
    "unwrap_or_else",
    "unwrap_or_default",
    "unwrap_unchecked",
    "lock",
    "read",
    "write",
    "get_or_insert_with",
    "insert",
    "into_inner",
    "remove",
    "swap_remove",
    "deref",
    "deref_mut",
    "leak",
];
/// Methods that put what their closure gives into the same container.
const MAPPED: &[&str] =
    &["map", "filter_map", "flat_map", "find_map", "map_or", "map_or_else", "scan", "map_while"];

impl Type {
    /// A type that is not of this crate, of which no more is known.
    pub fn other() -> Type {
        Type::Foreign("?".to_owned(), Vec::new())
    }

    pub fn option(inside: Type) -> Type {
        Type::Foreign("Option".to_owned(), vec![inside])
    }

    /// What is inside a container: a map's values, an `Option`'s or `Result`'s good case.
    pub fn element(&self) -> Type {
        match self {
            Type::Foreign(head, _) if head == "?" => self.clone(),
            Type::Foreign(head, inside) => {
                let place = usize::from(head.contains("Map") && inside.len() > 1);
                inside.get(place).cloned().unwrap_or(Type::Unknown)
            }
            _ => Type::Unknown,
        }
    }

    /// What a dot reaches if the type itself doesn't have the name.
    pub fn target(&self) -> Option<Type> {
        match self {
            Type::Foreign(head, _) if TRANSPARENT.contains(&head.as_str()) => Some(self.element()),
            _ => None,
        }
    }

    /// What a method of another crate's type gives; `closure` is what the last closure among its
    /// arguments gives.
    pub fn after(&self, method: &str, closure: &Type) -> Type {
        let Type::Foreign(head, _) = self else { return Type::Unknown };
        let transparent = self.target().filter(|_| method != "clone");
        match method {
            _ if let Some(target) = transparent => target.after(method, closure),
            "enumerate" => self.with(Type::Tuple(vec![Type::Unknown, self.element()])),
            "and_then" | "then" => closure.clone(),
            "call" | "with" => closure.clone(),
            _ if MAPPED.contains(&method) => match closure {
                Type::Foreign(kind, inside) if method != "map" && kind == "Option" => {
                    self.with(inside.first().cloned().unwrap_or(Type::Unknown))
                }
                _ => self.with(closure.clone()),
            },
            "take" if matches!(head.as_str(), "Cell" | "RefCell") => self.element(),
            _ if SAME.contains(&method) => self.clone(),
            _ if ONE_OR_NONE.contains(&method) => Type::option(self.element()),
            _ if INSIDE.contains(&method) => self.element(),
            _ => Type::other(),
        }
    }

    fn with(&self, element: Type) -> Type {
        match self {
            Type::Foreign(head, _) if head == "Option" || head == "Result" => {
                Type::Foreign(head.clone(), vec![element])
            }
            _ => Type::Foreign("Iterator".to_owned(), vec![element]),
        }
    }
}
