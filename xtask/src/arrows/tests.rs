//! Small crates with arrows that must be found, and some that are none.

use super::*;
use crate::source::Source;

/// A crate of these files, by path in `src`; `xtask` is a layered one.
fn krate(name: &str, files: &[(&str, &str)]) -> Crate {
    let source = |(path, text): &(&str, &str)| Source::new(&format!("x/src/{path}"), text, false);
    let sources = files.iter().map(source).collect();
    Crate {
        name: name.to_owned(),
        manifest_path: "x/Cargo.toml".to_owned(),
        manifest: String::new(),
        sources,
    }
}

/// What is found in a layered crate, as `file:line`; circles have line 0.
fn found(files: &[(&str, &str)]) -> Vec<String> {
    let mut findings = check_crate(&krate("xtask", files));
    findings.sort();
    findings.dedup();
    findings
        .iter()
        .map(|finding| format!("{}:{}", finding.path.replace("x/src/", ""), finding.line))
        .collect()
}

/// What the file `from` uses of `to`.
fn uses(files: &[(&str, &str)], from: &str, to: &str) -> Vec<String> {
    let text = list(&Tree { crates: vec![krate("xtask", files)], others: Vec::new() }, "xtask")
        .expect("it is a crate");
    let start = format!("  {from} -> {to}: ");
    let line = text.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_default();
    line.split(", ").map(str::to_owned).filter(|name| !name.is_empty()).collect()
}

const LIB: &str = "//! mod comment;\nmod low;\npub mod middle;\npub(crate) mod high;\n#[cfg(test)]\nmod tests;\n\
    pub use high::{Engine, inner::{Part as Piece, *}};\npub use low::Unit;\n";
const INNER: &str = "pub struct Part; pub struct Other;";

/// What is found in one file of a crate of three modules.
fn found_in(path: &str, text: &str) -> Vec<String> {
    let mut files = vec![("lib.rs", LIB), ("high/inner.rs", INNER)];
    for (file, own) in [
        ("low.rs", "pub struct Unit; pub struct A;"),
        ("middle.rs", "pub struct B;"),
        ("high/mod.rs", "pub mod inner; pub struct Engine; pub struct C;"),
    ] {
        files.push((file, if file == path { text } else { own }));
    }
    found(&files)
}

#[test]
fn a_module_may_use_what_is_listed_above_it() {
    assert!(
        found_in("middle.rs", "use crate::low::A;\nuse crate::middle::B;\nuse crate::{low, Unit};")
            .is_empty()
    );
    assert!(
        found_in(
            "high/mod.rs",
            "pub mod inner;\nuse crate::{low::{A, high}, middle};\nfn f() { middle::f() }"
        )
        .is_empty()
    );
}

#[test]
fn a_module_may_not_use_what_is_listed_below_it() {
    assert_eq!(found_in("middle.rs", "use crate::low::A;\nuse crate::high::C;"), ["middle.rs:2"]);
    assert_eq!(
        found_in("low.rs", "use crate::{\n    middle::B,\n    high::C,\n};"),
        ["low.rs:2", "low.rs:3"]
    );
    assert_eq!(found_in("low.rs", "fn f() {\n    crate::middle::g()\n}"), ["low.rs:2"]);
    assert_eq!(found_in("low.rs", "use super::high::C;"), ["low.rs:1"]);
    assert_eq!(found_in("low.rs", "use crate::high;\nfn f() {\n    high::C;\n}"), ["low.rs:3"]);
    assert_eq!(
        found_in("low.rs", "fn f() {\n    assert!(crate::high::is_good(), \"x\");\n}"),
        ["low.rs:2"]
    );
}

#[test]
fn a_re_exported_name_counts_as_its_module() {
    let text = "use crate::Engine;\nuse crate::Piece;\nuse crate::Other;\nuse crate::Unit;";
    assert_eq!(found_in("middle.rs", text), ["middle.rs:1", "middle.rs:2", "middle.rs:3"]);
}

#[test]
fn tests_comments_and_macros_are_free() {
    assert!(
        found_in("low.rs", "// crate::high\n#[cfg(test)]\nmod tests { use crate::high::C; }")
            .is_empty()
    );
    assert!(found_in("low.rs", "#[test]\nfn f() { crate::high::C; }").is_empty());
    assert_eq!(
        found(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "fn f() { m!() }"),
            ("b.rs", "macro_rules! m { () => {} }")
        ]),
        [""; 0]
    );
}

#[test]
fn folders_have_an_order_of_their_own_and_are_one_module_to_others() {
    let files = |upper: &'static str, lower: &'static str| {
        [
            ("lib.rs", "mod parts; mod walk;"),
            ("parts/mod.rs", "mod small; mod large;"),
            ("parts/small.rs", lower),
            ("parts/large.rs", "pub struct Large;"),
            ("walk.rs", upper),
        ]
    };
    assert!(found(&files("use crate::parts::large::Large;", "pub struct Small;")).is_empty());
    assert_eq!(found(&files("pub struct Walk;", "use super::large::Large;")), ["parts/small.rs:1"]);
    assert_eq!(found(&files("pub struct Walk;", "\nuse crate::walk::Walk;")), ["parts/small.rs:2"]);
}

#[test]
fn a_folder_may_be_made_of_its_modules_or_they_of_it_but_not_both() {
    let made_of = [
        ("lib.rs", "mod a;"),
        ("a/mod.rs", "mod b; pub use b::B; struct A { b: B }"),
        ("a/b.rs", "pub struct B;"),
    ];
    assert!(found(&made_of).is_empty());
    let grown = [
        ("lib.rs", "mod a;"),
        ("a/mod.rs", "mod b; pub use b::B; struct A;"),
        ("a/b.rs", "use super::A; pub struct B(A);"),
    ];
    assert!(found(&grown).is_empty());
    let both = [
        ("lib.rs", "mod a;"),
        ("a/mod.rs", "mod b; pub use b::B; struct A(B);"),
        ("a/b.rs", "use super::A; pub struct B(A);"),
    ];
    assert_eq!(found(&both), ["a/mod.rs:0"]);
}

#[test]
fn a_circle_of_folders_without_a_circle_of_files_is_found() {
    let files = |inner: &'static str| {
        [
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod b;\nuse b::d::D;\npub struct A(D);"),
            ("a/b/mod.rs", "pub mod c; pub mod d;"),
            ("a/b/c.rs", inner),
            ("a/b/d.rs", "pub struct D;"),
        ]
    };
    assert!(found(&files("pub struct C;")).is_empty());
    assert_eq!(found(&files("use crate::a::A;")), ["a/mod.rs:0"]);
}

const PAGER: &str = "pub struct Pager { store: Store, areas: Mutex<Vec<Area>> }\npub struct Store;\npub struct Area;\n\
    impl Pager {\n pub fn fault(&self) {\n  self.load();\n }\n}";
const SPREAD: &str = "use crate::pager::*;\nimpl Pager {\n pub fn load(&self) {}\n pub fn evict(&self) { self.fault() }\n}";

#[test]
fn a_call_through_self_to_a_floor_above_is_found() {
    let files = [
        ("lib.rs", "mod pager; mod walk;"),
        ("pager.rs", PAGER),
        ("walk.rs", "use crate::pager::Pager; impl Pager { pub fn load(&self) {} }"),
    ];
    // Upward by the call, and the whole is a circle, as the block of the walk names the type.
    assert_eq!(found(&files), ["pager.rs:0", "pager.rs:6"]);
}

#[test]
fn a_circle_by_method_calls_alone_is_found() {
    let split = |above: &'static str, below: &'static str| {
        [
            ("lib.rs", "mod pager; mod one; mod two;"),
            ("pager.rs", "pub struct Pager;"),
            ("one.rs", below),
            ("two.rs", above),
        ]
    };
    let one = "use crate::pager::Pager;\nimpl Pager {\n pub fn reclaim(&self) {\n  self.save();\n }\n pub fn is_still(&self) {}\n}";
    let two =
        "use crate::pager::Pager;\nimpl Pager {\n pub fn save(&self) {\n  self.is_still();\n }\n}";
    assert_eq!(found(&split(two, one)), ["one.rs:0", "one.rs:4"]);
    let calm = "use crate::pager::Pager;\nimpl Pager {\n pub fn reclaim(&self) {}\n pub fn is_still(&self) {}\n}";
    assert!(found(&split(two, calm)).is_empty());
}

#[test]
fn crates_that_are_not_layered_answer_for_paths_between_outermost_modules() {
    let files = [("lib.rs", "mod pager; mod walk;"), ("pager.rs", PAGER), ("walk.rs", SPREAD)];
    assert_eq!(check_crate(&krate("other", &files)), []);
    let files = [
        ("lib.rs", "mod pager; mod walk;"),
        ("pager.rs", "use crate::walk::W;"),
        ("walk.rs", "pub struct W;"),
    ];
    assert_eq!(check_crate(&krate("other", &files)).len(), 1);
    let files = [
        ("lib.rs", "mod a;"),
        ("a/mod.rs", "mod b; mod c;"),
        ("a/b.rs", "use super::c::C;"),
        ("a/c.rs", "struct C;"),
    ];
    assert_eq!(check_crate(&krate("other", &files)), []);
}

/// What a function body in `user.rs` calls of `parts.rs`.
fn calls(body: &str) -> Vec<String> {
    let parts = "pub struct Pool { pub spans: Vec<Span>, pub lock: Mutex<Table>, pub next: Option<Box<Pool>> }\n\
        pub struct Span; pub struct Table; pub struct Guard; pub enum Way { In(Span), Out { table: Table } }\n\
        impl core::ops::Deref for Guard { type Target = Table; fn deref(&self) -> &Table { todo() } }\n\
        impl Span { pub fn len(&self) -> usize { 0 } pub fn rare(&self) {} pub const NONE: Span = Span; }\n\
        impl Table { pub fn len(&self) -> usize { 0 } pub fn spans(&self) -> Vec<Span> { todo() } }\n\
        impl Pool { pub fn new() -> Self { todo() } pub fn guard(&self) -> Guard { todo() } pub fn way(&self) -> Result<Way, ()> { todo() } }";
    let user = format!("use crate::parts::*;\nfn f(pool: &Pool, other: Foreign) {{ {body} }}");
    let files = [("lib.rs", "mod parts; mod user;"), ("parts.rs", parts), ("user.rs", &user)];
    let names = uses(&files, "user.rs", "parts.rs").into_iter();
    names.filter_map(|name| name.split_once("()").map(|(name, _)| name.to_owned())).collect()
}

#[test]
fn the_type_of_a_receiver_is_worked_out() {
    assert_eq!(calls("pool.spans[0].len();"), ["Span::len"]);
    assert_eq!(calls("for span in pool.spans.iter().rev() { span.len(); }"), ["Span::len"]);
    assert_eq!(calls("pool.lock.lock().len();"), ["Table::len"]);
    assert_eq!(calls("let table = pool.lock.lock(); drop(table.len());"), ["Table::len"]);
    assert_eq!(calls("pool.guard().len();"), ["Pool::guard", "Table::len"]);
    assert_eq!(calls("if let Some(next) = &pool.next { next.guard(); }"), ["Pool::guard"]);
    assert_eq!(
        calls(
            "match pool.way() { Ok(Way::In(x)) => x.len(), Ok(Way::Out { table }) => table.len(), _ => 0 };"
        ),
        ["Pool::way", "Span::len", "Table::len"]
    );
    assert_eq!(calls("pool.spans.iter().map(|span| span.len()).sum();"), ["Span::len"]);
    assert_eq!(
        calls("assert!(pool.lock.lock().spans()[1].len() > 0, \"text\");"),
        ["Span::len", "Table::spans"]
    );
    assert_eq!(
        calls("let p = Pool::new(); let all = p.lock.lock().spans(); all.first().unwrap().len();"),
        ["Pool::new", "Span::len", "Table::spans"]
    );
}

#[test]
fn a_receiver_of_unknown_type_counts_only_if_the_name_tells() {
    assert_eq!(calls("unknown.rare();"), ["Span::rare"]);
    assert_eq!(calls("unknown.len();"), [""; 0]);
    assert_eq!(calls("other.rare();"), [""; 0], "a type of another crate is known to be one");
}

#[test]
fn the_list_names_files_methods_lines_and_circles() {
    let files = [("lib.rs", "mod pager; mod walk;"), ("pager.rs", PAGER), ("walk.rs", SPREAD)];
    assert_eq!(uses(&files, "pager.rs", "walk.rs"), ["Pager::load() 6"]);
    assert_eq!(uses(&files, "walk.rs", "pager.rs"), ["Pager 2", "Pager::fault() 4"]);
    let text = list(&Tree { crates: vec![krate("xtask", &files)], others: Vec::new() }, "xtask")
        .expect("it is a crate");
    assert!(text.contains("a circle of 2 files: pager.rs, walk.rs"), "{text}");
    assert!(text.ends_with("2 arrows between files, 1 upward, 1 circles\n"), "{text}");
}

#[test]
fn what_is_no_crate_is_told() {
    assert!(list(&Tree { crates: vec![], others: Vec::new() }, "xtask").is_err());
    let broken = krate("xtask", &[("lib.rs", "mod gone;")]);
    assert_eq!(check_crate(&broken)[0].message, "no file for mod gone");
    assert!(check_crate(&krate("xtask", &[("lib.rs", "fn (")]))[0].message.starts_with("not Rust"));
}
