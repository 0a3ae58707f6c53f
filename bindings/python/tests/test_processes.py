"""fork, spawn, and the end of the interpreter."""

import pytest

POOL = """
import multiprocessing, sys
import memfold, numpy as np

def work(array):
    return int(array.sum())

if __name__ == "__main__":
    mem = memfold.Memory(limit="32MiB")
    parts = [mem.full(200_000, n) for n in range(6)]
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        assert pool.map(work, parts) == [200_000 * n for n in range(6)]
    assert all((part == n).all() for n, part in enumerate(parts))
    big = mem.array(np.arange(8_000_000) // 100)
    assert big[-1] == 79_999 and mem.stats()["folded_bytes"] > 0
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_get_arrays_as_arguments(run_script, method):
    run_script(POOL, method)


def test_fork_touching_its_parents_array_ends_with_a_message(run_script):
    done = run_script("""
import os, signal
import memfold
mem = memfold.Memory(limit="32MiB")
array = mem.ones(100_000)
child = os.fork()
if child == 0:
    array.sum()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, status
assert array.sum() == 100_000
""")
    assert "touched a folded array of its parent" in done.stderr and 'fork="copy"' in done.stderr


def test_another_fault_of_a_fork_says_nothing_of_arrays(run_script):
    done = run_script("""
import ctypes, os, signal
import memfold
mem = memfold.Memory(limit="32MiB")
array = mem.ones(100_000)
child = os.fork()
if child == 0:
    ctypes.string_at(16)
_, status = os.waitpid(child, 0)
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, status
""")
    assert "memfold" not in done.stderr


def test_what_a_fork_may_and_may_not_do(run_script):
    run_script("""
import gc, os
import memfold, numpy as np
mem = memfold.install("32MiB")
array, handler = mem.ones(300_000), memfold.numpy_allocator(mem)
child = os.fork()
if child == 0:
    try:
        for use in (lambda: mem.zeros(3), lambda: mem.fold(array), mem.stats, lambda: memfold.numpy_allocator(mem)):
            try:
                use()
                os._exit(1)
            except RuntimeError as error:
                assert "fork" in str(error), error
        assert "parent" in repr(mem)
        # numpy works on, in ordinary memory, none of which comes to lie where the parent's was.
        plain = [np.ones(1_000_000) for _ in range(50)]
        assert not any(map(memfold.is_folded, plain)) and all(array.sum() == 1_000_000 for array in plain)
        assert not memfold.is_folded(np.ones(1_000_000)) and np.ones(1_000_000).sum() == 1_000_000
        with handler:
            assert not memfold.is_folded(np.ones(1_000_000))
        # What is freed of the parent's does nothing.
        del array
        gc.collect()
        # A Memory of its own works.
        own = memfold.Memory(limit="16MiB")
        mine = own.array(np.arange(4_000_000) // 100)
        assert mine[-1] == 39_999 and own.stats()["folded_bytes"] > 0
        assert memfold.zeros(10).sum() == 0
        os._exit(7)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(2)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert array.sum() == 300_000
""")


def test_a_fork_ends_by_itself_as_any_other(run_script):
    # Through the end of its interpreter, which drops what it has of the parent's.
    done = run_script("""
import os
import memfold
mem = memfold.Memory(limit="32MiB")
arrays = [mem.full(300_000, n) for n in range(5)]
child = os.fork()
if child == 0:
    print("child", flush=True)
    raise SystemExit(3)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 3, status
assert [int(a.sum()) for a in arrays] == [300_000 * n for n in range(5)]
print("parent")
""")
    assert done.stdout == "child\nparent\n"


def test_copies_for_forks(run_script):
    run_script("""
import os
import memfold, numpy as np
mem = memfold.Memory(limit="16MiB", fork="copy")
plain = np.arange(6_000_000) // 100
array, sparse = mem.array(plain), mem.zeros(1 << 33)
assert mem.stats()["folded_bytes"] > 0
sparse[5] = 1
children = []
for n in range(3):
    child = os.fork()
    if child == 0:
        ok = (array == plain).all() and sparse[5] == 1 and sparse[-1] == 0 and sparse[1 << 31] == 0
        array[:] = n
        os._exit(int(ok and (array == n).all()))
    children.append(child)
    array[n] += 1
    plain[n] += 1
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
assert (array == plain).all()
# What children had in common with it can leave as soon as it is private again, in the background.
while mem.stats()["resident_bytes"] > 1 << 20:
    mem.fold(array)
assert (array == plain).all() and mem.stats()["physical_bytes"] < 17 << 20
""")


def test_subprocesses_start_as_ever(run_script):
    run_script("""
import subprocess, sys
import memfold
mem = memfold.Memory(limit="32MiB")
array = mem.ones(300_000)
assert subprocess.check_output(["echo", "hello"]) == b"hello\\n"
assert subprocess.check_output([sys.executable, "-c", "print(1)"], preexec_fn=lambda: None) == b"1\\n"
assert array.sum() == 300_000
""")


@pytest.mark.parametrize("delivery", ["gate", "thread", "signal"])
def test_the_interpreter_ends_with_arrays_alive(run_script, delivery):
    done = run_script(
        """
import sys, threading, builtins
import memfold, numpy as np
mem = memfold.Memory(limit="16MiB", delivery=sys.argv[1])
array = mem.array(np.arange(8_000_000) // 100)
builtins.kept = array[::2]
class Late:
    def __init__(self, array): self.array = array
    def __del__(self): print(self.array[7_999_999], flush=True)
late = Late(array)
cycle = [array]; cycle.append(cycle)
memfold.install(memory=mem)
# With globals of its own, so that this module's are cleared.
exec("def forever(array):\\n  while True: array.sum()", space := {})
threading.Thread(target=space["forever"], args=(array,), daemon=True).start()
""",
        delivery,
    )
    assert done.stdout == "79999\n" and done.stderr == ""
