"""Measures what the Python package must reach, against numpy, blosc2 and the kernel: medians of several runs, taken in turn.

bench.py [--runs 5] [--mib 1024] [--only WORD] [--wheel FILE]

Every row is checked: all peers must come to the same result. The exit status is 1 if one doesn't, or breaks off, and
with --check also if a row falls short. The rows of the kernel need root; without it they are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import kernel

MIB = 1 << 20
HERE = os.path.dirname(os.path.abspath(__file__))
ZRAM = "zram"
IMPORT_MS_MAX = 30
WHEEL_MIB_MAX = 6


@dataclass
class Row:
    """A peer's time over memfold's must be at least this."""

    name: str
    work: str
    peer: str
    at_least: float
    # The limit is the data divided by this.
    share: int = 4


ROWS = [
    Row("resident sum, of numpy's speed", "resident sum", "numpy", 0.98),
    Row("resident add, of numpy's speed", "resident add", "numpy", 0.98),
    Row("resident matmul, of numpy's speed", "resident matmul", "numpy", 0.98),
    Row("resident fancy indexing, of numpy's speed", "resident fancy indexing", "numpy", 0.98),
    Row("random reads of a cold array, of blosc2's", "random reads", "blosc2", 4),
    Row("sum of int64 indexes, of blosc2's", "sum of indexes", "blosc2", 1.5),
    Row("sum of float32 embeddings, of blosc2's", "sum of embeddings", "blosc2", 1.5),
    Row("sum of int64 indexes, of numpy on zram", "sum of indexes", ZRAM, 2),
    Row("sum of float32 embeddings, of numpy on zram", "sum of embeddings", ZRAM, 2),
    Row("rows of a plane, of np.memmap", "rows", "memmap", 3),
    Row("columns of a plane, of np.memmap", "columns", "memmap", 1),
    Row("pandas merge and group-by, of pandas on zram", "pandas", ZRAM, 1.3, share=3),
]


class Failure(Exception):
    """A measurement failed."""


def run_child(row: Row, peer: str, mib: int) -> dict:
    """Runs one peer once."""
    limit_mib = mib // row.share
    arguments = [row.work, "numpy" if peer == ZRAM else peer, str(mib), str(limit_mib)]
    with contextlib.ExitStack() as around:
        procs = None
        if peer in (ZRAM, "memmap"):
            if peer == ZRAM:
                around.enter_context(kernel.zram_swap(4 * mib * MIB))
            procs = str(around.enter_context(kernel.cgroup(limit_mib * MIB)) / "cgroup.procs")
        done = subprocess.run(
            [sys.executable, os.path.join(HERE, "work.py"), *arguments],
            stdout=subprocess.PIPE,
            # The child on a file makes that first, and goes into the cgroup by itself.
            preexec_fn=(lambda: kernel.write(procs, os.getpid())) if peer == ZRAM else None,
            env={**os.environ, "MEMFOLD_BENCH_PROCS": procs or ""},
        )
    if done.returncode != 0:
        raise Failure(f"{row.work}, {peer}: status {done.returncode}")
    return json.loads(done.stdout)


def same(one: object, other: object) -> bool:
    """Returns whether two results are equal: each peer adds floats in another order."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-3)
    return one == other


def measure(row: Row, mib: int, runs: int) -> tuple[float, float, float]:
    """Returns medians of the seconds of memfold and the peer, and of their ratios, run by run."""
    pairs = []
    for _ in range(runs):
        ours, theirs = run_child(row, "memfold", mib), run_child(row, row.peer, mib)
        if not same(ours["check"], theirs["check"]):
            raise Failure(f"{row.work}: memfold came to {ours['check']}, {row.peer} to {theirs['check']}")
        pairs.append((ours["seconds"], theirs["seconds"]))
    return (
        statistics.median(ours for ours, _ in pairs),
        statistics.median(theirs for _, theirs in pairs),
        statistics.median(theirs / ours for ours, theirs in pairs),
    )


def import_ms(runs: int) -> float:
    """Returns how much longer it takes to import memfold too."""

    def once(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return 1000 * (time.perf_counter() - start)

    both = "import numpy, memfold"
    once(both)
    return statistics.median(once(both) - once("import numpy") for _ in range(3 * runs))


def line(name: str, figures: str, target: str, passed: bool) -> bool:
    print(f"| {name} | {figures} | {target} | {'pass' if passed else 'SHORT'} |", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each peer")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of data; the limit is a quarter")
    parser.add_argument("--only", default="", help="only rows with this word in their name")
    parser.add_argument("--wheel", help="the wheel, to be weighed")
    parser.add_argument("--check", action="store_true", help="fail if a row falls short")
    options = parser.parse_args()
    if options.mib < 256 or options.runs < 1:
        parser.error("give at least --mib 256 and --runs 1")
    kernel.end_on_signals()
    obstacle = kernel.obstacle()
    passed, broken = [], []
    print("| row | memfold, peer: ratio | target | |\n|---|---|---|---|")
    for row in ROWS:
        if options.only not in row.name:
            continue
        if obstacle and row.peer in (ZRAM, "memmap"):
            print(f"| {row.name} | - | >= {row.at_least} | not run: {obstacle} |")
            continue
        try:
            ours, theirs, ratio = measure(row, options.mib, options.runs)
            figures = f"{1000 * ours:.4g} ms, {1000 * theirs:.4g} ms: {ratio:.3f}"
            passed.append(line(row.name, figures, f">= {row.at_least}", ratio >= row.at_least))
        except (Failure, OSError) as failure:
            broken.append(row.name)
            print(f"| {row.name} | {failure} | >= {row.at_least} | BROKE OFF |", flush=True)
    if options.only in "import memfold":
        ms = import_ms(options.runs)
        passed.append(line("import memfold, over import numpy", f"{ms:.1f} ms", f"<= {IMPORT_MS_MAX} ms", ms <= IMPORT_MS_MAX))
    if options.wheel:
        mib = os.path.getsize(options.wheel) / MIB
        passed.append(line("wheel", f"{mib:.2f} MiB", f"<= {WHEEL_MIB_MAX} MiB", mib <= WHEEL_MIB_MAX))
    return int(bool(broken) or (options.check and not all(passed)))


if __name__ == "__main__":
    sys.exit(main())
