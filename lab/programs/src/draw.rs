//! Draws a program from a seed.
use crate::program::{Action, Argument, List, Program};
use Argument::{Amount, Place, Word};
use memfold_testkit::random::Random;

/// Slots of an owner: SLOTS in `runtime/model.h`. Slot 0 is the region that all share.
const SLOTS: usize = 4;
/// All pages of any region.
const ALL: usize = 9999;
/// Most pages that a program may touch: about a second without memfold.
const PAGES_MAX: usize = 250_000;

/// Draws the program of a seed.
pub fn draw(seed: u64) -> Program {
    let mut random = Random::new(seed);
    loop {
        let is_busy = random.per_mille(400);
        let mut draw = Draw::new(random.fork(), is_busy);
        let (shared_pages, lists) = (draw.shared_pages, draw.lists());
        let program = Program { seed, shared_pages, lists };
        if program.pages() <= PAGES_MAX {
            return program;
        }
    }
}

struct Draw {
    random: Random,
    /// Threads rewrite and check much, while others fork.
    is_busy: bool,
    shared_pages: usize,
    threads: usize,
    children: usize,
    /// The list that is drawn. It runs only lists of higher numbers.
    list: usize,
}

fn action(name: &'static str, arguments: &[Argument]) -> Action {
    Action { name, arguments: arguments.to_vec() }
}

impl Draw {
    fn new(mut random: Random, is_busy: bool) -> Draw {
        let shared_pages = match is_busy {
            true => 2048 + random.below(3072),
            false => 1024 << random.below(3),
        };
        let threads = if is_busy { 1 + random.below(3) } else { random.below(4) };
        let children = 1 + random.below(4);
        Draw { random, is_busy, shared_pages, threads, children, list: 0 }
    }

    /// Draws all lists: that of `main`, those of its threads, and those of children.
    fn lists(&mut self) -> Vec<List> {
        let mut lists = Vec::new();
        for list in 0..1 + self.threads + self.children {
            self.list = list;
            let is_child = list > self.threads;
            let actions = match list {
                0 => self.main_list(),
                _ if is_child => self.child_list(),
                _ => self.thread_list(),
            };
            let most = if list == 0 || is_child { 1 } else { 5 };
            lists.push(List { rounds: 1 + self.random.below(most), actions });
        }
        lists
    }

    fn main_list(&mut self) -> Vec<Action> {
        let kind = if self.is_busy { Word("NOISE") } else { self.kind() };
        let mut actions =
            vec![action("write_pages", &[Place(0), Place(0), Amount(ALL), Word("IN_ORDER"), kind])];
        actions.extend(self.begin());
        for thread in 1..=self.threads {
            let arguments = [Place(thread), Argument::List(thread)];
            actions.push(action("start_thread", &arguments));
        }
        for _ in 0..1 + self.random.below(if self.is_busy { 6 } else { 4 }) {
            actions.push(self.child());
            let count = 1 + self.random.below(if self.is_busy { 3 } else { 8 });
            actions.extend(self.some(count));
            if self.random.per_mille(500) {
                actions.push(action("wait_children", &[]));
            }
        }
        actions
    }

    fn thread_list(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.is_busy {
            let (written, checked) = (self.order(), self.order());
            let kind = if self.random.per_mille(750) { Word("NOISE") } else { self.kind() };
            actions.push(action("write_pages", &[Place(0), Place(0), Amount(ALL), written, kind]));
            actions.push(action("check_pages", &[Place(0), Place(0), Amount(ALL), checked]));
        } else {
            actions.extend(self.begin());
        }
        let count = self.random.below(if self.is_busy { 4 } else { 16 });
        actions.extend(self.some(count));
        actions
    }

    fn child_list(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.random.per_mille(600) {
            let kind = if self.is_busy { Word("NOISE") } else { self.kind() };
            let order = self.order();
            actions.push(action("write_pages", &[Place(0), Place(0), Amount(ALL), order, kind]));
        }
        if self.random.per_mille(250) && self.list < self.threads + self.children {
            let list = self.later_list();
            actions.push(action("start_thread", &[Place(1), Argument::List(list)]));
        }
        let count = self.random.below(8);
        actions.extend(self.some(count));
        actions
    }

    /// Maps and fills regions of this thread's own.
    fn begin(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        for slot in 1..1 + self.random.below(SLOTS) {
            let most_pages = 16 << self.random.below(7);
            let pages = 1 + self.random.below(most_pages);
            let (name, most) =
                if self.random.per_mille(150) { ("map_file", 512) } else { ("map_region", 2048) };
            actions.push(action(name, &[Place(slot), Amount(pages.min(most))]));
            let (order, kind) = (self.order(), self.kind());
            actions.push(action("write_pages", &[Place(slot), Place(0), Amount(ALL), order, kind]));
        }
        actions
    }

    fn some(&mut self, count: usize) -> Vec<Action> {
        (0..count).map(|_| self.any()).collect()
    }

    fn any(&mut self) -> Action {
        match self.random.below(100) {
            0..36 => self.touching(),
            36..66 => self.mapping(),
            66..82 => self.calling(),
            82..90 => self.signalling(),
            _ => self.child(),
        }
    }

    /// The region of all half of the time.
    fn slot(&mut self) -> Argument {
        match self.random.below(2) {
            0 => Place(0),
            _ => self.own_slot(),
        }
    }

    fn own_slot(&mut self) -> Argument {
        Place(1 + self.random.below(SLOTS - 1))
    }

    fn first(&mut self) -> Argument {
        Place(if self.random.per_mille(300) { 0 } else { self.random.below(2048) })
    }

    fn count(&mut self) -> Argument {
        let most = 4 << self.random.below(10);
        if self.random.per_mille(150) { Amount(ALL) } else { Amount(1 + self.random.below(most)) }
    }

    fn order(&mut self) -> Argument {
        Word(self.random.pick(&["IN_ORDER", "SCATTERED"]))
    }

    fn kind(&mut self) -> Argument {
        const KINDS: [&str; 8] =
            ["ZEROS", "NOISE", "NOISE", "NOISE", "QUARTER", "REPEATS", "ALIKE", "LETTERS"];
        Word(self.random.pick(&KINDS))
    }

    /// A list of a child that is drawn later, or the last one.
    fn later_list(&mut self) -> usize {
        let first = (self.list + 1).max(self.threads + 1);
        first + self.random.below(self.threads + self.children + 1 - first)
    }

    fn touching(&mut self) -> Action {
        let (slot, first, count, order) = (self.slot(), self.first(), self.count(), self.order());
        match self.random.below(10) {
            0..4 => {
                let kind = self.kind();
                action("write_pages", &[slot, first, count, order, kind])
            }
            4..6 => action("poke_pages", &[slot, first, count, order]),
            _ => action("check_pages", &[slot, first, count, order]),
        }
    }

    fn mapping(&mut self) -> Action {
        let (slot, other) = (self.own_slot(), self.own_slot());
        let (first, count, order) = (self.first(), self.count(), self.order());
        let pages = Amount(1 + self.random.below(1024));
        let part = |name, last| action(name, &[slot, first, count, Word(last)]);
        match self.random.below(18) {
            0 => action("map_region", &[slot, pages]),
            1 => action("map_file", &[slot, pages]),
            2 => action("unmap_region", &[slot]),
            3 | 4 => {
                let may_move = Place(self.random.below(2));
                action("resize_region", &[slot, pages, may_move])
            }
            5 => action("move_region", &[slot]),
            6 => action("leave_behind", &[slot, other]),
            7 => {
                let gap = Amount(1 + self.random.below(64));
                action("cut_region", &[slot, other, first, gap])
            }
            8 => action("replace_pages", &[slot, first, count]),
            9 => {
                let advice = self.random.pick(&["MADV_DONTNEED", "MADV_FREE"]);
                let slot = self.slot();
                action("discard_each", &[slot, first, count, order, Word(advice)])
            }
            10 => part("discard_pages", self.random.pick(&["MADV_DONTNEED", "MADV_FREE"])),
            11 => {
                const RIGHTS: [&str; 4] =
                    ["PROT_NONE", "PROT_READ", "PROT_READ | PROT_WRITE", "PROT_READ | PROT_WRITE"];
                part("protect_pages", self.random.pick(&RIGHTS))
            }
            12 => part("guard_pages", self.random.pick(&["1", "0"])),
            13 => {
                const ADVICE: [&str; 4] =
                    ["MADV_DONTFORK", "MADV_DOFORK", "MADV_WIPEONFORK", "MADV_KEEPONFORK"];
                part("inherit_pages", self.random.pick(&ADVICE))
            }
            14 => action("touch_pages", &[slot, first, count]),
            15 => {
                let start = Place(1 + self.random.below(256));
                action("move_tail", &[slot, other, start, count])
            }
            _ => {
                const ADVICE: [&str; 8] = [
                    "MADV_COLD",
                    "MADV_PAGEOUT",
                    "MADV_POPULATE_READ",
                    "MADV_POPULATE_WRITE",
                    "MADV_HUGEPAGE",
                    "MADV_NOHUGEPAGE",
                    "MADV_WILLNEED",
                    "MADV_RANDOM",
                ];
                let (slot, advice) = (self.slot(), self.random.pick(&ADVICE));
                action("advise_pages", &[slot, first, count, Word(advice)])
            }
        }
    }

    fn calling(&mut self) -> Action {
        let count = Amount(1 + self.random.below(64));
        let (slot, first, order) = (self.slot(), self.first(), self.order());
        match self.random.below(14) {
            0 => action("stack_pages", &[count]),
            1 => action("heap_pages", &[Amount(1 + self.random.below(600))]),
            2 => action("own_faults", &[count]),
            3 => action("own_filter", &[]),
            4 => action("receive_pages", &[slot, first, count, order]),
            _ => {
                const WAYS: [&str; 8] = [
                    "PIPE",
                    "SOCKET",
                    "MESSAGE",
                    "FILE_VECTOR",
                    "FILE_EACH",
                    "FILE_DIRECT",
                    "PROCESS",
                    "SPLICED",
                ];
                let (way, to) = (Word(self.random.pick(&WAYS)), self.slot());
                let (to_first, to_order) = (self.first(), self.order());
                let arguments = [way, slot, first, order, to, to_first, to_order, count];
                action("copy_pages", &arguments)
            }
        }
    }

    fn signalling(&mut self) -> Action {
        let (slot, first, count) = (self.slot(), self.first(), self.count());
        match self.random.below(4) {
            0 => action("begin_ticks", &[Amount(1 + self.random.below(100))]),
            1 => action("pause_for", &[Amount(1 + self.random.below(3000))]),
            n => {
                let is_alternate = Place(n - 2);
                action("signal_pages", &[slot, first, count, is_alternate])
            }
        }
    }

    fn child(&mut self) -> Action {
        if self.list == self.threads + self.children {
            return self.touching();
        }
        let list = Argument::List(self.later_list());
        match self.random.below(10) {
            0..6 => {
                let heir = Word(self.random.pick(&["TAKES", "CHECKS", "CHECKS"]));
                action("fork_list", &[list, heir])
            }
            6 => {
                let (slot, first, count) = (self.slot(), self.first(), self.count());
                action("vfork_pages", &[slot, first, count])
            }
            _ => {
                let start = Word(self.random.pick(&["SPAWN", "FORK_EXEC", "VFORK_EXEC"]));
                action("execute_list", &[list, start])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn draws_use_each_action_and_repeat() {
        let runtime = concat!(env!("CARGO_MANIFEST_DIR"), "/runtime/");
        let mut names = BTreeSet::new();
        for seed in 0..200 {
            let program = draw(seed);
            assert_eq!(program.source(), draw(seed).source());
            names.extend(program.lists.iter().flat_map(|list| list.actions.iter().map(|a| a.name)));
            for (n, list) in program.lists.iter().enumerate() {
                assert!(list.actions.iter().filter_map(Action::list).all(|inner| inner > n));
                let owners = list.actions.iter().filter(|a| a.name == "start_thread");
                assert!(owners.count() < 4, "more owners than in runtime/model.h");
            }
        }
        let text = ["regions.h", "calls.h", "runtime.h"]
            .map(|name| std::fs::read_to_string(format!("{runtime}{name}")).unwrap())
            .concat();
        assert!(names.iter().all(|name| text.contains(&format!("void {name}("))), "{names:?}");
        assert_eq!(names.len(), 33, "{names:?}");
    }
}
