"""One measurement in its own process: work.py ROW PEER MIB LIMIT_MIB. Prints {"seconds": ..., "check": ...}."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MIB = 1 << 20
MEMFOLD, NUMPY, BLOSC2, MEMMAP = "memfold", "numpy", "blosc2", "memmap"


def indexes(nbytes: int) -> np.ndarray:
    """int64: sorted numbers of rows, as a join or a sparse matrix has them. In chunks, so that little else is in memory."""
    rng = np.random.default_rng(1)
    gaps = rng.integers(0, 64, nbytes // 8, dtype="int8")
    return np.cumsum(gaps, dtype="int64")


def embeddings(nbytes: int) -> np.ndarray:
    """float32 that were eight-bit numbers, as quantised models give them."""
    rng = np.random.default_rng(2)
    out = rng.integers(-64, 64, nbytes // 4, dtype="int8").astype("float32")
    out /= 127
    return out


DATA: dict[str, Callable[[int], np.ndarray]] = {"indexes": indexes, "embeddings": embeddings}


def made(peer: str, data: np.ndarray, limit: int) -> Any:
    """Returns the data as a peer stores it."""
    if peer == MEMFOLD:
        import memfold

        memory = memfold.Memory(limit=limit, delivery=os.environ.get("MEMFOLD_BENCH_DELIVERY"))
        array = memory.array(data)
        memory.fold(array)
        return array
    if peer == BLOSC2:
        import blosc2

        return blosc2.asarray(data)
    return data


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def random_reads(peer: str, nbytes: int, limit: int) -> tuple[float, Any]:
    """Returns the seconds for one random element."""
    array = made(peer, indexes(nbytes), limit)
    picks = np.random.default_rng(3).integers(0, nbytes // 8, 4000).tolist()
    seconds, total = timed(lambda: sum(int(array[pick]) for pick in picks))
    return seconds / len(picks), total


def sequential(kind: str) -> Callable[[str, int, int], tuple[float, Any]]:
    def work(peer: str, nbytes: int, limit: int) -> tuple[float, Any]:
        array = made(peer, DATA[kind](nbytes), limit)
        # blosc2 uses the faster of its two ways: its own reduction, or its chunks one by one.
        kind_of_sum = "int64" if kind == "indexes" else "float64"
        ways = [lambda: array.sum(dtype=kind_of_sum)]
        if peer == BLOSC2:
            step = array.chunks[0]
            ways.append(lambda: sum(array[i : i + step].sum(dtype=kind_of_sum) for i in range(0, array.shape[0], step)))
        results = [timed(way) for way in ways]
        return min(seconds for seconds, _ in results), np.asarray(results[0][1]).item()

    return work


def plane(peer: str, nbytes: int, limit: int) -> np.ndarray:
    columns = 4096
    data = indexes(nbytes).reshape(-1, columns)
    if peer != MEMMAP:
        return made(peer, data, limit)
    place = tempfile.mkdtemp(dir=os.environ.get("MEMFOLD_BENCH_DIR"))
    path = os.path.join(place, "plane")
    data.tofile(path)
    # Out of memory, and from here on within the limit, of which nothing is used yet.
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shape, dtype = data.shape, data.dtype
    del data
    with open(os.environ["MEMFOLD_BENCH_PROCS"], "w") as procs:
        procs.write(str(os.getpid()))
    mapped = np.memmap(path, dtype, "r", shape=shape)
    os.unlink(path)
    os.rmdir(place)
    return mapped


def rows(peer: str, nbytes: int, limit: int) -> tuple[float, Any]:
    array = plane(peer, nbytes, limit)
    return timed(lambda: int(sum(int(array[i, :].sum()) for i in range(len(array)))))


def columns(peer: str, nbytes: int, limit: int) -> tuple[float, Any]:
    array = plane(peer, nbytes, limit)
    return timed(lambda: int(sum(int(array[:, j].sum()) for j in range(0, array.shape[1], array.shape[1] // 8))))


def pandas_job(peer: str, nbytes: int, limit: int) -> tuple[float, Any]:
    import pandas as pd

    if peer == MEMFOLD:
        import memfold

        memfold.install(limit)
    rng = np.random.default_rng(5)
    count = nbytes // 24

    def work() -> Any:
        customers = pd.DataFrame({"customer": np.arange(count // 20), "region": rng.integers(0, 12, count // 20)})
        orders = pd.DataFrame(
            {
                "customer": rng.integers(0, count // 20, count),
                "month": np.arange(count) * 12 // count,
                "cents": rng.integers(100, 10_000, count),
            }
        )
        joined = orders.merge(customers, on="customer", how="left")
        sums = joined.groupby(["region", "month"])["cents"].agg(["sum", "count", "max"])
        return sums.to_numpy().tolist()

    return timed(work)


def resident(what: str) -> Callable[[str, int, int], tuple[float, Any]]:
    """Returns the seconds of an operation on resident arrays (pinned with memfold): the best of several."""

    def work(peer: str, nbytes: int, _: int) -> tuple[float, Any]:
        count = nbytes // 16 // 8
        rng = np.random.default_rng(6)
        plain = [rng.random(count) for _ in range(3)]
        memory = None
        if peer == MEMFOLD:
            import memfold

            memory = memfold.Memory(limit=nbytes)
            plain = [memory.array(one) for one in plain]
        a, b, out = plain
        side = int((count // 8) ** 0.5)
        squares = [one[: side * side].reshape(side, side) for one in plain]
        picks = rng.integers(0, count, count // 4)
        if peer == MEMFOLD:
            picks = memory.array(picks)
        operations = {
            "sum": lambda: a.sum(),
            "add": lambda: np.add(a, b, out=out)[-1],
            "matmul": lambda: np.matmul(squares[0], squares[1], out=squares[2])[-1, -1],
            "fancy indexing": lambda: np.take(a, picks, out=out[: len(picks)], mode="clip")[-1],
        }
        with memory.pinned(a, b, out, picks) if memory else contextlib.nullcontext():
            results = [timed(operations[what]) for _ in range(15)]
        return min(seconds for seconds, _ in results[1:]), float(results[0][1])

    return work


WORK: dict[str, Callable[[str, int, int], tuple[float, Any]]] = {
    "resident sum": resident("sum"),
    "resident add": resident("add"),
    "resident matmul": resident("matmul"),
    "resident fancy indexing": resident("fancy indexing"),
    "random reads": random_reads,
    "sum of indexes": sequential("indexes"),
    "sum of embeddings": sequential("embeddings"),
    "rows": rows,
    "columns": columns,
    "pandas": pandas_job,
}

if __name__ == "__main__":
    row, peer, mib, limit_mib = sys.argv[1:]
    seconds, check = WORK[row](peer, int(mib) * MIB, int(limit_mib) * MIB)
    json.dump({"seconds": seconds, "check": check}, sys.stdout)
