"""The gate: who may have it, and that a process goes on under it as before."""

import memfold
import pytest

ORDINARY = """
import os, socket, sys, tempfile
import memfold, numpy as np
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
"""


def test_ordinary_user_passes_folded_memory_to_system_calls(run_script):
    run_script(
        ORDINARY
        + """
mem = memfold.Memory(limit="16MiB")
assert mem.delivery == "gate"
plain = np.arange(6_000_000) // 100
folded = mem.array(plain)
assert mem.stats()["folded_bytes"] > 0
with tempfile.TemporaryFile() as file:
    folded.tofile(file)
    file.seek(0)
    read = mem.zeros(len(plain), plain.dtype)
    mem.fold(read)
    assert file.readinto(memoryview(read).cast("B")) == plain.nbytes
    assert (read == plain).all()
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for n in range(0, len(plain) - 2000, 500_000):
    mem.fold(folded), mem.fold(read)
    one.send(folded[n : n + 1000])
    assert other.recv_into(read[n : n + 2000]) == 8000
    assert (read[n : n + 1000] == plain[n : n + 1000]).all()
"""
    )


def test_threads_that_wait_go_on_when_the_process_is_armed(run_script):
    run_script("""
import os, queue, select, signal, socket, threading, time
import numpy as np
import memfold
ticks, done, box = [], [], queue.Queue()
signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
read, write = os.pipe()
never, _ = os.pipe()
one, other = socket.socketpair()
lock = threading.Lock()
lock.acquire()
def waits(of):
    of()
    done.append(of)
waiters = [
    lambda: os.read(read, 1),
    lambda: one.recv(1),
    lambda: box.get(),
    lambda: lock.acquire(),
    lambda: time.sleep(0.3),
    lambda: select.select([never], [], [], 0.3),
]
threads = [threading.Thread(target=waits, args=(of,)) for of in waiters]
[thread.start() for thread in threads]
square = np.ones((300, 300))
expected = square @ square
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
mem = memfold.Memory(limit="16MiB")
assert mem.delivery == "gate", "a thread could not be had"
assert ((square @ square) == expected).all()
os.write(write, b"x"), other.send(b"x"), box.put(1), lock.release()
[thread.join() for thread in threads]
assert len(done) == len(waiters)
before = len(ticks)
folded = mem.array(np.arange(4_000_000) // 100)
while len(ticks) < before + 20:
    assert folded[-1] == 39_999
signal.setitimer(signal.ITIMER_REAL, 0)
""")


def test_a_crash_is_told_by_faulthandler(run_script):
    done = run_script(
        """
import ctypes, faulthandler
import memfold
mem = memfold.Memory(limit="16MiB")
assert mem.delivery == "gate"
faulthandler.enable()
ctypes.string_at(16)
""",
        status=-11,
    )
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_a_region_cannot_be_unmapped_or_emptied_by_the_program(run_script):
    run_script("""
import ctypes, errno
import memfold, numpy as np
mem = memfold.Memory(limit="16MiB")
array = mem.arange(1_000_000)
libc = ctypes.CDLL(None, use_errno=True)
at, length = ctypes.c_void_p(array.ctypes.data & ~4095), ctypes.c_size_t(1 << 20)
DONTNEED, DOFORK = 4, 11
for call in (
    lambda: libc.munmap(at, length),
    lambda: libc.madvise(at, length, DONTNEED),
    lambda: libc.madvise(at, length, DOFORK),
):
    ctypes.set_errno(0)
    assert call() == -1 and ctypes.get_errno() == errno.EINVAL
assert (array == np.arange(1_000_000)).all()
""")


@pytest.mark.parametrize("delivery", ["gate", "signal"])
def test_the_kernel_merges_no_equal_pages_of_folded_arrays(run_script, delivery):
    # That would end the protection by which writes are noticed. A program may inherit it.
    run_script(
        """
import ctypes, errno, re, sys
libc = ctypes.CDLL(None, use_errno=True)
MERGE = 67
if libc.prctl(MERGE, 1, 0, 0, 0):
    raise SystemExit
import memfold
mem = memfold.Memory(limit="16MiB", delivery=sys.argv[1])
array = mem.ones(1_000_000)
for area in re.split("^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.M)[1:]:
    start, end = (int(at, 16) for at in area.split(" ")[0].split("-"))
    if start <= array.ctypes.data < end:
        assert " mg" not in re.search("VmFlags:.*", area).group()
        break
else:
    raise SystemExit("no area")
if sys.argv[1] == "gate":
    assert libc.prctl(MERGE, 1, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EINVAL
""",
        delivery,
    )


def test_children_closing_descriptors_start_from_folded_memory(run_script):
    # What execve is given lies in it, and is read after everything above 2 was closed.
    run_script("""
import ctypes, os
import memfold, numpy as np
mem = memfold.Memory(limit="16MiB")
strings = mem.zeros(1 << 20, "uint8")
strings[: 1 << 18] = 120
text = b"/bin/sh\\0-c\\0exit 7\\0"
strings[500_000 : 500_000 + len(text)] = np.frombuffer(text, "uint8")
at = strings.ctypes.data + 500_000
arguments = (ctypes.c_void_p * 4)(at, at + 8, at + 11, None)
libc = ctypes.CDLL(None)
# The child shares the memory, and its parent waits, as in subprocess.
source = '''
#include <unistd.h>
int start(const char *path, char **arguments) {
    int child = vfork();
    if (!child) {
        for (int fd = 3; fd < 2000; fd++) close(fd);
        execv(path, arguments);
        _exit(99);
    }
    return child;
}
'''
open("start.c", "w").write(source)
if os.system("cc -shared -fPIC -o start.so start.c"):
    raise SystemExit("no C compiler")
start = ctypes.CDLL("./start.so").start
for _ in range(10):
    mem.fold(strings)
    child = start(ctypes.c_void_p(at), arguments)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert strings[5] == 120
""")


def test_what_it_does_not_go_with_is_said(tmp_path):
    with pytest.raises(ValueError, match="swap"):
        memfold.Memory(limit="32MiB", delivery="gate", swap=tmp_path)
