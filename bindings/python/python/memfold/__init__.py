"""numpy arrays in compressed memory, larger than the memory they may use.

>>> import memfold
>>> mem = memfold.Memory(limit="256MiB")
>>> a = mem.zeros((1000, 1000))
>>> type(a).__name__, memfold.is_folded(a)
('ndarray', True)
>>> mem.close()

Arrays come from a `Memory`, which compresses cold data to keep its limit. They are ordinary numpy arrays: views, ufuncs, threads,
files, pickling and DLPack work, and their memory is freed with the last view. `install()` does this for all large arrays that numpy
makes. `python -m memfold run --limit 1G -- CMD` does it for a whole program.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

# `python -m memfold` needs only the command. Python imports this file first, and names it "-m" meanwhile.
if sys.argv[:1] != ["-m"] and find_spec("numpy") is None:
    raise ImportError("memfold needs numpy 1.22 or newer for its arrays: pip install numpy (the command memfold works without it)")

from ._default import (
    arange,
    array,
    default,
    empty,
    full,
    install,
    is_folded,
    numpy_allocator,
    ones,
    set_default,
    uninstall,
    zeros,
)
from ._memfold import __version__
from ._memory import Memory, Stats
from ._run import run_limit

__all__ = [
    "Memory",
    "Stats",
    "__version__",
    "arange",
    "array",
    "default",
    "empty",
    "full",
    "install",
    "is_folded",
    "numpy_allocator",
    "ones",
    "run_limit",
    "set_default",
    "uninstall",
    "zeros",
]
