"""How the package looks to a type checker; never run."""

import memfold
import numpy as np
from numpy.typing import NDArray

mem: memfold.Memory = memfold.Memory("1GiB", "zstd", swap="/var/tmp", delivery="thread", swap_size="2GiB")
a: NDArray[np.float32] = mem.zeros((3, 4), dtype="float32")
b = memfold.arange(2, 10, dtype=np.int8).reshape(2, 4)
view: memoryview = mem.buffer(10)
left: int = mem.fold(a[1:])
with mem.pinned(a, b), memfold.numpy_allocator(mem, threshold=1 << 20):
    c: bool = memfold.is_folded(b)
stats: memfold.Stats = mem.stats()
used: int = stats["physical_bytes"]
limit: "int | None" = memfold.run_limit()
with memfold.install(limit=1 << 30) as installed:
    installed.fold(b)
