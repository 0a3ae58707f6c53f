"""Impossible requests are refused with a message that says what to do."""

import pickle

import memfold
import numpy as np
import pytest


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"limit": "1MiB"}, ValueError, "limit: .* too small to work with. Give at least 8"),
        ({"limit": 0}, ValueError, "too small"),
        ({"limit": -5}, ValueError, "can't be negative"),
        ({"limit": "900T"}, ValueError, "more than the memory of this machine"),
        ({"limit": 1 << 80}, ValueError, "size"),
        ({"limit": "many"}, ValueError, "not a size. Write for example"),
        ({"limit": 2.5}, TypeError, "number of bytes or text"),
        ({"limit": True}, TypeError, "number of bytes or text"),
        ({"limit": "32M", "codec": "zip"}, ValueError, "unknown codec.*zstd"),
        ({"limit": "32M", "codec": "zstd:99"}, ValueError, "zstd"),
        ({"limit": "32M", "codec": "zstd+shuffel"}, ValueError, r"\+shuffle"),
        ({"limit": "32M", "color": "red"}, ValueError, "not a setting"),
        ({"limit": "32M", "delivery": "pigeon"}, ValueError, "delivery"),
        ({"limit": "32M", "fork": "maybe"}, ValueError, "refuse"),
        ({"limit": "32M", "swap": "/no/such/directory"}, ValueError, "/no/such/directory: .* there is no such directory"),
        ({"limit": "32M", "swap": "/proc"}, ValueError, "/proc"),
        ({"limit": "32M", "block": "4M"}, ValueError, "block"),
    ],
)
def test_settings(settings, error, words):
    with pytest.raises(error, match=words) as caught:
        memfold.Memory(**settings)
    assert "\n" not in str(caught.value) and "--" not in str(caught.value)


def test_shapes(mem):
    with pytest.raises(ValueError, match="negative"):
        mem.zeros(-1)
    for make in (mem.zeros, mem.empty):
        with pytest.raises(MemoryError, match="Unable to allocate .*: take a smaller shape, .*ulimit -v"):
            make(1 << 55)
        with pytest.raises(ValueError, match="too big|Maximum allowed"):
            make((1 << 62, 1 << 62))
    with pytest.raises(TypeError):
        mem.zeros("many")
    with pytest.raises(TypeError):
        mem.zeros(3, dtype="no such type")
    assert mem.zeros(0).shape == (0,)


def test_objects(mem):
    for dtype in (object, [("a", object)]):
        with pytest.raises(TypeError, match="pointers"):
            mem.zeros(3, dtype)
    with pytest.raises(TypeError, match="pointers"):
        mem.array([object()])
    with pytest.raises(TypeError, match="pointers"):
        mem.full(3, None)
    if hasattr(getattr(np, "dtypes", None), "StringDType"):
        with pytest.raises(TypeError, match="pointers"):
            mem.zeros(3, np.dtypes.StringDType())
    assert mem.stats()["allocated_bytes"] == 0


def test_foreign_arrays(mem):
    other = memfold.Memory(limit="16MiB")
    for foreign in (np.zeros(10), other.zeros(10)):
        for ask in (mem.fold, mem.cold, mem.prefetch):
            with pytest.raises(ValueError, match=r"mem\.array"):
                ask(foreign)
        with pytest.raises(ValueError, match=r"mem\.array"), mem.pinned(foreign):
            pass


def test_pins_past_the_limit(mem):
    array = mem.zeros(40 << 20, "uint8")
    with pytest.raises(ValueError, match=r"pinning 40.0 MiB needs more than the limit of 32.0 MiB"), mem.pinned(array):
        pass
    # A pin that fails leaves none of its like behind.
    with pytest.raises(ValueError), mem.pinned(array[:100], np.zeros(3)):
        pass
    assert mem.all_stats()["resident_bytes"] == 0


def test_a_closed_memory():
    with memfold.Memory(limit="16MiB") as mem:
        array = mem.ones(1000)
    for use in (lambda: mem.zeros(3), lambda: mem.fold(array), mem.stats, lambda: memfold.numpy_allocator(mem)):
        with pytest.raises(ValueError, match="closed"):
            use()
    mem.close()
    assert "closed" in repr(mem) and "closed" in mem._repr_html_() and not mem.owns(array) and array.sum() == 1000


def test_a_memory_is_not_pickled(mem):
    with pytest.raises(TypeError, match="each process"):
        pickle.dumps(mem)


def test_no_address_space(run_script):
    run_script("""
import memfold, numpy, resource
mem = memfold.Memory(limit="32MiB")
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
small = mem.ones(1000)
assert memfold.is_folded(small)
try:
    mem.ones(1 << 30)
    raise SystemExit("it was to be refused")
except MemoryError as error:
    assert "Unable to allocate" in str(error) and "raise the limit of ulimit -v" in str(error), error
""")


def test_without_permission_it_says_what_to_do(run_script):
    run_script("""
import os, sys, warnings
import memfold, numpy
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
if open("/proc/sys/vm/unprivileged_userfaultfd").read().strip() == "1" or os.access("/dev/userfaultfd", os.R_OK | os.W_OK):
    sys.exit()
try:
    memfold.Memory(limit="32MiB", delivery="thread")
    raise SystemExit("it was to be refused")
except PermissionError as error:
    assert "sysctl vm.unprivileged_userfaultfd=1" in str(error) and 'delivery="signal"' in str(error), error
# delivery="signal" needs no userfaultfd. It is the default where the gate does not work, as with a swap file.
plain = numpy.arange(8_000_000) // 100
os.chdir("/tmp")
for settings, warns in (({"delivery": "signal"}, 0), ({"swap": "/tmp", "swap_keep_free": 0}, 1)):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mem = memfold.Memory(limit="16MiB", **settings)
    assert mem.delivery == "signal" and len(caught) == warns, (mem.delivery, caught)
    assert all("mem.pinned" in str(one.message) and one.filename == __file__ for one in caught), caught
    folded = mem.array(plain)
    assert (folded == plain).all() and mem.stats()["folded_bytes"] > 0
""")


@pytest.mark.parametrize("gone", ["_ARRAY_API", "the whole module"])
def test_old_numpy_is_named(run_script, gone):
    run_script(
        """
import sys, types
import numpy
import memfold
# Under both of its names, of numpy 2 and of numpy 1.
for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
    sys.modules[name] = types.ModuleType("fake") if sys.argv[1] == "_ARRAY_API" else None
try:
    memfold.Memory(limit="16MiB").zeros(3)
    raise SystemExit("it was to be refused")
except RuntimeError as error:
    assert str(error) == f"memfold needs numpy 1.22 or newer, not {numpy.__version__}: pip install --upgrade numpy", error
    assert error.__cause__ is not None
""",
        gone,
    )


def test_a_swap_directory_that_is_full_or_goes_away(run_script, tmp_path):
    # The file may take 8 MiB; of noise, which doesn't shrink, there is more. Then memory goes past the limit, which is told.
    done = run_script(
        """
import os, sys
import memfold, numpy as np
noise = np.random.default_rng(2).integers(0, 256, 64 << 20, "uint8")
os.mkdir("swap")
mem = memfold.Memory(limit="16MiB", swap="swap", swap_size="8MiB", swap_keep_free="1MiB")
os.rmdir("swap")
folded = mem.array(noise)
assert (folded == noise).all()
stats = mem.stats()
assert 0 < stats["swap_bytes"] <= 8 << 20 and stats["over_limit"] > 0 and stats["physical_bytes"] > 16 << 20, stats
"""
    )
    assert "can't be kept" in done.stderr and len(done.stderr.splitlines()) <= 3, done.stderr


def test_a_full_file_system_and_a_directory_of_somebody_else(run_script):
    # A small file system of its own, in a mount namespace that ends with the process. Only root may.
    done = run_script(
        """
import ctypes, errno, os, sys
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
libc = ctypes.CDLL(None, use_errno=True)
os.mkdir("swap")
if os.geteuid() != 0 or libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) or libc.mount(
    b"none", b"swap", b"tmpfs", 0, b"size=24M"
):
    print("not root")
    sys.exit()
import memfold, numpy as np
noise = np.random.default_rng(2).integers(0, 256, 64 << 20, "uint8")
mem = memfold.Memory(limit="16MiB", swap="swap", swap_size="1GiB", swap_keep_free=0)
folded = mem.array(noise)
assert 0 < mem.stats()["swap_bytes"] <= 24 << 20, mem.stats()
with open("swap/other", "wb", buffering=0) as other:
    try:
        while True:
            other.write(bytes(1 << 16))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
folded ^= 0x55
noise ^= 0x55
assert (folded == noise).all()
# What is changed leaves the swap file, and for a while after a write has failed none is tried.
stats = mem.stats()
assert stats["swap_bytes"] <= 24 << 20 and stats["over_limit"] > 0 and stats["physical_bytes"] > 16 << 20, stats
# Somebody else's directory.
os.chmod("swap", 0o755)
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    memfold.Memory(limit="16MiB", swap="swap", delivery="signal")
    raise SystemExit("it was to be refused")
except ValueError as error:
    assert str(error) == "swap: swap: no swap file can be made there: this user may not write there", error
"""
    )
    if done.stdout == "not root\n":
        pytest.skip("only root may mount")
    assert "can't be kept" in done.stderr and len(done.stderr.splitlines()) <= 3, done.stderr


def test_hard_limit_ends_the_process_with_a_message(run_script):
    done = run_script(
        """
import memfold, numpy as np
mem = memfold.Memory(limit="16MiB", on_full="stop")
mem.array(np.random.default_rng(2).integers(0, 256, 64 << 20, "uint8"))
print("not reached")
""",
        status=-6,
    )
    assert done.stdout == "" and "limit" in done.stderr, done.stderr
