"""The kernel's side of the benchmark: zram swap, and a memory cgroup. All of it is restored, also after Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import struct
import threading
from collections.abc import Iterator

LIBC = ctypes.CDLL(None, use_errno=True)
SWAP_FIRST = 0x8000 | 0x7FFF
RENEWAL_S = 0.01


def read(path: str | pathlib.Path) -> str:
    return pathlib.Path(path).read_text().strip()


def write(path: str | pathlib.Path, value: object) -> None:
    pathlib.Path(path).write_text(f"{value}\n")


def obstacle() -> str | None:
    """Returns why the kernel's rows can't be measured here, if so."""
    if os.geteuid() != 0:
        return "zram and cgroups need root"
    if not os.path.exists("/sys/class/zram-control/hot_add"):
        return "this kernel has no zram"
    return None


def _cgroup_root() -> tuple[pathlib.Path, bool]:
    """Returns where memory cgroups are, and whether they are version 2."""
    for line in read("/proc/self/mounts").splitlines():
        _, root, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return pathlib.Path(root), False
        if kind == "cgroup2" and "memory" in read(f"{root}/cgroup.controllers").split():
            return pathlib.Path(root), True
    raise SystemExit("bench: no memory cgroup controller is mounted")


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[pathlib.Path]:
    """A memory cgroup; write a process's number to its cgroup.procs."""
    root, is_v2 = _cgroup_root()
    place = root / f"memfold-bench-{os.getpid()}"
    place.mkdir()
    ended = threading.Event()

    # The kernel decides by these figures whether to age pages, and renews them only every few seconds unless they are read.
    def renew() -> None:
        while not ended.wait(RENEWAL_S):
            with contextlib.suppress(OSError):
                read(place / "memory.stat")

    thread = threading.Thread(target=renew)
    try:
        write(place / ("memory.max" if is_v2 else "memory.limit_in_bytes"), limit_bytes)
        if not is_v2:
            write(place / "memory.swappiness", 100)
        thread.start()
        yield place
    finally:
        ended.set()
        if thread.ident:
            thread.join()
        place.rmdir()


@contextlib.contextmanager
def zram_swap(disk_bytes: int, codec: str = "lz4") -> Iterator[None]:
    """Swap to zram, before all other swap."""
    unused = (n for n in range(16) if _is_unused(n))
    number = next(unused, None)
    added = number is None
    if added:
        number = int(read("/sys/class/zram-control/hot_add"))
    block, device = f"/sys/block/zram{number}", f"/dev/zram{number}".encode()
    codec_before = read(f"{block}/comp_algorithm").split("[")[1].split("]")[0]
    try:
        write(f"{block}/comp_algorithm", codec)
        write(f"{block}/disksize", disk_bytes)
        page = bytearray(4096)
        struct.pack_into("=II", page, 1024, 1, disk_bytes // 4096 - 1)
        page[-10:] = b"SWAPSPACE2"
        with open(device, "wb", buffering=0) as file:
            file.write(page)
        if LIBC.swapon(device, SWAP_FIRST) != 0:
            raise OSError(ctypes.get_errno(), "swapon")
        yield
    finally:
        LIBC.swapoff(device)
        write(f"{block}/reset", 1)
        if added:
            write("/sys/class/zram-control/hot_remove", number)
        else:
            write(f"{block}/comp_algorithm", codec_before)


def _is_unused(number: int) -> bool:
    try:
        return read(f"/sys/block/zram{number}/initstate") == "0"
    except OSError:
        return False


def end_on_signals() -> None:
    """Makes SIGTERM and SIGHUP end the benchmark as Ctrl-C does: by an exception, which restores everything."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
