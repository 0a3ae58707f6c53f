//! Tasks of the program: they take one step after another.
use crate::oracle::{Claim, Oracle};
use crate::step::{Content, Step, Strike};
use crate::world::Machine;
use memfold_engine::Delivery;
use memfold_engine::mappings::calls::RemapCall;
use memfold_os::thread::pass_ns;
use memfold_os::transfer::Direction;
use memfold_os::uffd::space::Space;
use memfold_os::units::PAGE_SIZE;
use memfold_store::InjectedFault;
use memfold_testkit::disk::DiskTrouble;
use memfold_testkit::remote::{Ask, RemoteTrouble};
use std::collections::HashMap;
use std::iter::once;
use std::ops::Range;

/// A task of the program.
pub struct ProgramTask<'a> {
    /// Its number, which no other task has.
    pub number: usize,
    /// The engine and its fakes.
    pub machine: &'a Machine,
    /// What the program should see.
    pub oracle: &'a Oracle,
}

impl ProgramTask<'_> {
    /// Takes a step.
    pub fn take(&self, step: &Step) {
        let machine = self.machine;
        match step {
            Step::Read(page) => self.touch(*page..page + 1, None, false),
            Step::Write(page, content) => self.touch(*page..page + 1, Some(*content), false),
            Step::ReadAll(range, up) => self.touch(range.clone(), None, !up),
            Step::WriteAll(range, content) => self.touch(range.clone(), Some(*content), false),
            Step::Call(range, content) => self.call(range, *content),
            Step::Discard(range) => self.discard(range),
            Step::Unmap(range) => self.unmap(range),
            Step::Map(range) => self.map(range),
            Step::Remap(from, to, keeps_source) => self.remap(from, *to, *keeps_source),
            Step::Fork(reaches) => self.fork(*reaches),
            Step::Fold(range) => _ = machine.pager.mappings().page_out_at(self.addrs(range)),
            Step::Cool(range) => machine.pager.mappings().cool_at(self.addrs(range)),
            Step::Need(range) => machine.pager.mappings().need_at(self.addrs(range)),
            _ => self.circumstance(step),
        }
    }

    /// Changes what is around the engine.
    fn circumstance(&self, step: &Step) {
        let machine = self.machine;
        match step {
            Step::Bounds(limit, resident) => {
                let bytes = |kib: u64| if kib == 0 { u64::MAX } else { kib << 10 };
                machine.pager.gauges().set_bounds(bytes(*limit), bytes(*resident), bytes(*limit));
            }
            Step::Outside(kib) => machine.pager.gauges().set_unmanaged_bytes(kib << 10),
            Step::Trouble(per_mille) => {
                machine.troubles.strike_at_random(*per_mille, *per_mille as u64)
            }
            Step::FailWrite(strike) => {
                let kinds = [DiskTrouble::Full, DiskTrouble::Failed, DiskTrouble::Short];
                machine.disk.strike(Direction::Write, strike.0, kinds[strike.1]);
            }
            Step::FailRemote((nth, kind)) => {
                let kinds = [RemoteTrouble::Away, RemoteTrouble::Silent, RemoteTrouble::Half];
                // The service repeats a failed read.
                let asks = [Ask::Put, Ask::Put, Ask::Delete];
                machine.remote.strike(asks[*nth as usize % 3], *nth, kinds[*kind]);
            }
            Step::FailStore(strike) => self.fail_store(strike),
            Step::Pass(us) => {
                pass_ns(us * 1000);
                machine.pager.gauges().judge_cost();
                machine.pager.gauges().publish();
                machine.pager.store().tick();
                // The children have ended by then.
                machine.pager.fork().note_private();
            }
            _ => unreachable!("{step:?} is a step of the program"),
        }
    }

    fn fail_store(&self, (nth, kind): &Strike) {
        let faults = self.machine.pager.store().faults();
        match kind {
            0 => faults.strike_at(InjectedFault::Codec, *nth),
            1 => faults.strike_at(InjectedFault::PoolFull, *nth),
            // Nothing else finds that.
            _ if self.machine.pager.config().verify => {
                faults.strike_at(InjectedFault::Compressed, *nth)
            }
            _ => {}
        }
    }

    fn addrs(&self, pages: &Range<usize>) -> Range<usize> {
        let program = &self.machine.program;
        program.page(pages.start)..program.page(pages.end)
    }

    /// Reads pages, or writes them.
    fn touch(&self, pages: Range<usize>, content: Option<Content>, down: bool) {
        for at in pages.clone() {
            let page = if down { pages.end - 1 - (at - pages.start) } else { at };
            if !self.oracle.enter(&(page..page + 1), content.is_some()) {
                continue;
            }
            match content {
                None => self.machine.program.read(page, |bytes| self.oracle.check(page, bytes)),
                Some(content) => self.machine.program.write(page, |bytes| {
                    self.change(page, content, bytes);
                }),
            }
            self.oracle.leave(&(page..page + 1));
        }
    }

    fn change(&self, page: usize, content: Content, bytes: &mut [u8]) {
        self.oracle.check(page, bytes);
        content.put(bytes);
        self.oracle.note(page, bytes);
    }

    /// Makes a system call that reads or writes the pages.
    fn call(&self, pages: &Range<usize>, content: Option<Content>) {
        // What a call holds and another thread discards stays, and is overwritten with zeros. That is
        // done outside of the engine.
        if !self.oracle.enter(pages, true) {
            return;
        }
        let pager = &self.machine.pager;
        if pager.config().delivery == Delivery::Gate {
            let mut building = pager.holds().begin(self.number);
            building.push(self.addrs(pages), content.is_some());
            let hold = building.publish().expect("room for a hold").expect("a range");
            pager.holds().wait(hold);
            pager.gauges().note_held();
            self.bring(pages, content.is_some());
            self.access_as_kernel(pages, content);
            pager.holds().release(hold);
        } else {
            pager.mappings().pin_at(self.addrs(pages));
            self.bring(pages, true);
            self.access_as_kernel(pages, content);
            pager.mappings().unpin_at(self.addrs(pages));
        }
        self.oracle.leave(pages);
    }

    /// Touches pages as the gate does before a call, which changes nothing.
    fn bring(&self, pages: &Range<usize>, writes: bool) {
        for page in pages.clone() {
            match writes {
                true => self.machine.program.write(page, |bytes| self.oracle.check(page, bytes)),
                false => self.machine.program.read(page, |bytes| self.oracle.check(page, bytes)),
            }
        }
    }

    /// Reads or writes pages as the kernel does, which takes no fault.
    fn access_as_kernel(&self, pages: &Range<usize>, content: Option<Content>) {
        let space = &self.machine.space;
        for page in pages.clone() {
            let addr = self.machine.program.page(page);
            let outcome = match content {
                None => space.read(addr, |bytes| self.oracle.check(page, bytes)),
                Some(content) => space.write(addr, |bytes| self.change(page, content, bytes)),
            };
            assert!(outcome.is_ok(), "a call fails, because page {page} isn't there: {outcome:?}");
        }
    }

    fn discard(&self, pages: &Range<usize>) {
        let _change = self.machine.changes.lock();
        if !self.oracle.claim(pages, Claim::Discard, true) {
            return;
        }
        let (pager, addrs) = (&self.machine.pager, self.addrs(pages));
        if pager.config().delivery == Delivery::Gate {
            let _leaving = pager.holds().mark_leaving(once(addrs.clone()));
            let make = || {
                self.hide(&addrs);
                addrs
                    .clone()
                    .step_by(PAGE_SIZE)
                    .for_each(|page| _ = self.machine.space.punch(page));
                0
            };
            pager.mappings().discard_with(std::slice::from_ref(&addrs), make, |result| result == 0);
        } else {
            // SAFETY: other tasks at most read the pages, through the fake page table.
            unsafe { pager.mappings().discard_at(addrs) };
        }
        self.oracle.settle(pages, true);
    }

    /// Hides a range where memory is hidden, before a call that makes its pages missing.
    fn hide(&self, addrs: &Range<usize>) {
        let space = &self.machine.space;
        if space.hides() {
            space.protect(addrs.start, addrs.len(), true).expect("the fake refuses nothing");
        }
    }

    fn unmap(&self, pages: &Range<usize>) {
        let _change = self.machine.changes.lock();
        if !self.oracle.claim(pages, Claim::Mapping, true) {
            return;
        }
        let addrs = self.addrs(pages);
        let make = || {
            self.machine.space.unmap(addrs.clone());
            0
        };
        self.machine.pager.mappings().end_with(addrs.clone(), make, |result| result == 0);
        self.oracle.settle(pages, false);
    }

    /// Maps the unmapped pages of a range.
    fn map(&self, pages: &Range<usize>) {
        for page in pages.clone() {
            let (_change, one) = (self.machine.changes.lock(), page..page + 1);
            if self.oracle.claim(&one, Claim::Mapping, false) {
                let addrs = self.addrs(&one);
                self.machine.space.map(addrs.clone());
                self.machine.pager.mappings().manage_empty(addrs.start, addrs.end);
                self.oracle.settle(&one, true);
            }
        }
    }

    fn remap(&self, from: &Range<usize>, to: usize, keeps_source: bool) {
        let _change = self.machine.changes.lock();
        let target = to..to + from.len();
        if from.start < target.end && target.start < from.end {
            return;
        }
        if !self.oracle.claim(from, Claim::Mapping, true) {
            return;
        }
        let is_claimed = self.oracle.claim(&target, Claim::Mapping, true)
            || self.oracle.claim(&target, Claim::Mapping, false);
        if !is_claimed {
            return self.oracle.give_back(from);
        }
        let (source, target) = (self.addrs(from), self.addrs(&target));
        let pager = &self.machine.pager;
        let leaving = [source.clone(), target.clone()];
        let _leaving = pager.holds().mark_leaving(leaving.into_iter());
        let call = RemapCall {
            from: source.clone(),
            len: source.len(),
            to: Some(target.start),
            keeps_source,
        };
        let make = || {
            self.hide(&source);
            self.machine.space.remap(source.clone(), target.start, keeps_source);
            target.start as isize
        };
        pager.mappings().remap_with(&call, make);
        self.oracle.relocate(from, to, keeps_source);
    }

    /// Brings the engine to rest as for a copy of the process, and checks what a child without an
    /// engine would have.
    fn fork(&self, reaches: bool) {
        let machine = self.machine;
        if machine.pager.config().delivery != Delivery::Gate {
            return;
        }
        let _change = machine.changes.lock();
        let fork = machine.pager.fork();
        fork.begin_copy(|| reaches, |_| {});
        fork.set_alone(true);
        let mut away = HashMap::new();
        // SAFETY: the engine is at rest. This thread is the only one that reads its scratch, and it
        // changes nothing.
        unsafe {
            fork.each_away(|addr, bytes| {
                away.insert(addr, std::slice::from_raw_parts(bytes, PAGE_SIZE).to_vec());
            });
        }
        for page in (0..self.oracle.pages()).filter(|page| self.oracle.is_mapped(*page)) {
            let addr = machine.program.page(page);
            let is_there = machine.space.peek(addr, |bytes| self.oracle.check(page, bytes));
            if !is_there {
                let zeros = vec![0; PAGE_SIZE];
                self.oracle.check(page, away.get(&addr).unwrap_or(&zeros));
            }
        }
        fork.set_alone(false);
        // SAFETY: `begin_copy` has returned above, and both are called once for it.
        unsafe {
            fork.allow_requests();
            fork.end_copy(false);
        }
    }
}
