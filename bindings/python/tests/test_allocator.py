"""numpy's own arrays in folded memory: in a block, or everywhere."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import memfold
import numpy as np
import pytest

LARGE = 1 << 18  # int64s, 2 MiB


@pytest.fixture
def installed():
    memory = memfold.install("32MiB")
    yield memory
    assert memfold.uninstall()


def test_a_block_folds_large_arrays_and_no_others(mem):
    with memfold.numpy_allocator(mem):
        large, small = np.arange(LARGE) * 2, np.arange(10)
        text = np.array(["x" * 500_000])
    assert memfold.is_folded(large) and memfold.is_folded(text) and not memfold.is_folded(small)
    assert not memfold.is_folded(np.arange(LARGE))
    assert large[-1] == 2 * (LARGE - 1)


def test_blocks_nest_and_may_be_entered_again(mem):
    other = memfold.Memory(limit="16MiB")
    outer, inner = memfold.numpy_allocator(mem), memfold.numpy_allocator(other, threshold="64KiB")
    with outer:
        with inner, outer, inner:
            assert other.owns(np.zeros(LARGE))
        assert mem.owns(np.zeros(LARGE))
    assert not memfold.is_folded(np.zeros(LARGE))


def test_a_block_ends_when_its_body_fails(mem):
    with pytest.raises(ZeroDivisionError), memfold.numpy_allocator(mem):
        1 / 0
    assert not memfold.is_folded(np.zeros(LARGE))


def test_context_applies_to_its_thread_and_inheritors(mem):
    # From 3.14 on Python may hand the context on to a thread that is started inside.
    inherits = bool(getattr(sys.flags, "thread_inherit_context", 0))
    with memfold.numpy_allocator(mem), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: memfold.is_folded(np.zeros(LARGE))).result() == inherits


def test_context_of_two_threads_restores_each(mem):
    outer, shared = memfold.Memory(limit="16MiB"), memfold.numpy_allocator(mem)
    step = threading.Barrier(2, timeout=60)

    def first():
        with memfold.numpy_allocator(outer):
            with shared:
                step.wait()  # it is inside, then the second is too
                step.wait()
                inside = mem.owns(np.zeros(LARGE))
            after = outer.owns(np.zeros(LARGE))
            step.wait()  # it has left, and the second goes on inside
        return inside, after

    def second():
        step.wait()
        with shared:
            step.wait()
            step.wait()
            inside = mem.owns(np.zeros(LARGE))
        return inside, not memfold.is_folded(np.zeros(LARGE))

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(work) for work in (first, second)]
        assert [result.result() for result in results] == [(True, True), (True, True)]


def test_context_of_two_tasks_restores_each(mem):
    outer, shared = memfold.Memory(limit="16MiB"), memfold.numpy_allocator(mem)

    async def both():
        entered, left = asyncio.Event(), asyncio.Event()

        async def first():
            with memfold.numpy_allocator(outer):
                with shared:
                    await entered.wait()
                    inside = mem.owns(np.zeros(LARGE))
                after = outer.owns(np.zeros(LARGE))
                left.set()
            return inside, after

        async def second():
            with shared:
                entered.set()
                await left.wait()
                inside = mem.owns(np.zeros(LARGE))
            return inside, not memfold.is_folded(np.zeros(LARGE))

        return await asyncio.gather(first(), second())

    assert asyncio.run(both()) == [(True, True), (True, True)]
    assert not memfold.is_folded(np.zeros(LARGE))


def test_a_block_that_was_entered_elsewhere_is_not_ended_here(mem):
    block = memfold.numpy_allocator(mem)
    with block, ThreadPoolExecutor(1) as pool:
        if not getattr(sys.flags, "thread_inherit_context", 0):
            with pytest.raises(RuntimeError, match="another thread"):
                pool.submit(block.__exit__, None, None, None).result()
        assert mem.owns(np.zeros(LARGE))


def test_arrays_that_grow_become_folded(mem):
    with memfold.numpy_allocator(mem):
        grown = np.fromiter(range(LARGE), "int64")
        assert memfold.is_folded(grown) and (grown == np.arange(LARGE)).all()
        plain = np.arange(100)
        plain.resize(LARGE, refcheck=False)
        assert memfold.is_folded(plain) and plain[99] == 99 and not plain[100:].any()


def test_empty_arrays_come_and_go(mem):
    # numpy frees another size of them than it asked for.
    with memfold.numpy_allocator(mem, threshold=1):
        for shape in (0, (0, 5), (5, 0)):
            assert np.empty(shape).size == 0 and np.zeros(shape).size == 0
    for _ in range(100):
        assert mem.zeros((3, 0)).size == 0
    assert mem.stats()["allocated_bytes"] == 0


def test_installed_it_counts_for_every_thread(installed):
    def work(seed):
        array = np.full(LARGE, seed)
        assert installed.owns(array) and installed.owns(array + 1)
        return int((array + 1).sum())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(20))) == [(seed + 1) * LARGE for seed in range(20)]
    thread = threading.Thread(target=work, args=(1,))
    thread.start()
    thread.join()
    assert not memfold.is_folded(np.zeros(10))


def test_installed_more_than_the_limit_is_right(installed):
    arrays = [np.arange(LARGE) // 10 + n for n in range(64)]
    assert all((array == np.arange(LARGE) // 10 + n).all() for n, array in enumerate(arrays))
    assert installed.stats()["folded_bytes"] > 80 << 20
    sorted_ = np.concatenate(arrays)
    sorted_.sort(kind="stable")
    assert sorted_[0] == 0 and (np.diff(sorted_) >= 0).all()


def test_arrays_are_freed_by_their_own_allocator():
    before = np.zeros(LARGE)
    first = memfold.install("16MiB")
    during = np.ones(LARGE)
    del before
    assert memfold.uninstall() and not memfold.uninstall()
    after = np.ones(LARGE)
    assert memfold.is_folded(during) and not memfold.is_folded(after)
    second = memfold.install("16MiB")
    again = np.ones(LARGE)
    assert second.owns(again) and first.owns(during)
    during.resize(2 * LARGE, refcheck=False)
    assert first.owns(during) and during.sum() == LARGE
    del during
    assert first.stats()["allocated_bytes"] == 0
    memfold.uninstall()
    del again, after
    assert second.stats()["allocated_bytes"] == 0


def test_it_can_be_installed_once(installed):
    with pytest.raises(RuntimeError, match="uninstall"):
        memfold.install("16MiB")
    with pytest.raises(TypeError, match="not both"):
        memfold.install("16MiB", memory=installed)


def test_object_arrays_of_numpy_itself_are_right(installed):
    objects = np.array([str(n) for n in range(LARGE)], dtype=object)
    assert memfold.is_folded(objects)
    installed.fold(objects)
    assert objects[1234] == "1234" and "".join(objects[:5]) == "01234"


def test_the_default_memory_is_made_once_and_can_be_set(mem):
    previous = memfold.set_default(mem)
    try:
        assert memfold.default() is mem
        for made in (memfold.empty(3), memfold.zeros(3), memfold.ones(3), memfold.full(3, 1), memfold.array([1])):
            assert mem.owns(made)
        assert mem.owns(memfold.arange(4))
    finally:
        memfold.set_default(previous)
