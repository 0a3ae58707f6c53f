//! A program as lists of actions, and its C source. Each action is a call of a function in
//! `runtime/`, and each does nothing where the program's memory doesn't allow it. So a program from
//! which any action is left out is a right program too.
use std::fmt::{self, Display, Formatter, Write};

/// An argument of an action.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// A number of pages, microseconds or signals, which shrinking may halve.
    Amount(usize),
    /// A place, which shrinking leaves.
    Place(usize),
    /// A constant of C.
    Word(&'static str),
    /// A list that the action runs.
    List(usize),
}

impl Display for Argument {
    fn fmt(&self, to: &mut Formatter) -> fmt::Result {
        match self {
            Argument::Amount(n) | Argument::Place(n) | Argument::List(n) => n.fmt(to),
            Argument::Word(word) => word.fmt(to),
        }
    }
}

/// A call of a function in `runtime/`.
#[derive(Clone, Debug)]
pub struct Action {
    /// The function.
    pub name: &'static str,
    /// Its arguments.
    pub arguments: Vec<Argument>,
}

impl Action {
    /// Returns the list that it runs.
    pub fn list(&self) -> Option<usize> {
        self.arguments.iter().find_map(|argument| match argument {
            Argument::List(n) => Some(*n),
            _ => None,
        })
    }

    /// Returns how many pages it may touch, without those of the list that it runs.
    fn pages(&self, shared_pages: usize) -> usize {
        let amount = |argument: &Argument| match argument {
            Argument::Amount(n) => (*n).min(shared_pages),
            _ => 0,
        };
        let inherited = matches!(self.name, "fork_list") as usize * 2 * shared_pages;
        inherited + self.arguments.iter().map(amount).max().unwrap_or(0)
    }
}

impl Display for Action {
    fn fmt(&self, to: &mut Formatter) -> fmt::Result {
        let arguments: Vec<String> = self.arguments.iter().map(Argument::to_string).collect();
        write!(to, "{}({});", self.name, arguments.join(", "))
    }
}

/// Actions that are run one after the other, several times. They run only lists of higher numbers.
#[derive(Clone, Debug)]
pub struct List {
    /// How often they are run.
    pub rounds: usize,
    /// The actions.
    pub actions: Vec<Action>,
}

/// A program. The main thread runs list 0.
#[derive(Clone, Debug)]
pub struct Program {
    /// The seed that drew it.
    pub seed: u64,
    /// Pages of the region that all threads share.
    pub shared_pages: usize,
    /// The lists.
    pub lists: Vec<List>,
}

impl Program {
    /// Returns how many pages it touches at most.
    pub fn pages(&self) -> usize {
        let mut costs = vec![0; self.lists.len()];
        for (n, list) in self.lists.iter().enumerate().rev() {
            let cost = |action: &Action| {
                action.pages(self.shared_pages) + action.list().map_or(0, |inner| costs[inner])
            };
            costs[n] = list.rounds * list.actions.iter().map(cost).sum::<usize>();
        }
        costs[0]
    }

    /// Returns how many actions it has.
    pub fn len(&self) -> usize {
        self.lists.iter().map(|list| list.actions.len()).sum()
    }

    /// Returns the lists that are run.
    fn reached(&self) -> Vec<bool> {
        let mut is_reached = vec![false; self.lists.len()];
        is_reached[0] = true;
        for (n, list) in self.lists.iter().enumerate() {
            if is_reached[n] {
                list.actions.iter().filter_map(Action::list).for_each(|n| is_reached[n] = true);
            }
        }
        is_reached
    }

    /// Removes the actions of lists that are not run.
    pub fn prune(&mut self) {
        let is_reached = self.reached();
        let unreached = self.lists.iter_mut().zip(is_reached).filter(|(_, reached)| !reached);
        unreached.for_each(|(list, _)| list.actions.clear());
    }

    /// Writes it in C.
    pub fn source(&self) -> String {
        let mut text = format!("/* Drawn by seed {}. */\n#include \"runtime.h\"\n", self.seed);
        for (n, list) in self.lists.iter().enumerate().rev() {
            writeln!(text, "\nstatic void list_{n}(void) {{").expect("memory");
            list.actions.iter().for_each(|action| writeln!(text, "    {action}").expect("memory"));
            text.push_str("}\n");
        }
        text.push_str("\nstatic const struct list all[] = {\n");
        for (n, list) in self.lists.iter().enumerate() {
            writeln!(text, "    {{list_{n}, {}}},", list.rounds).expect("memory");
        }
        text.push_str("};\n\nint main(int argc, char **argv) {\n");
        writeln!(text, "    return run_program(argc, argv, all, {});\n}}", self.shared_pages)
            .expect("memory");
        text
    }
}
