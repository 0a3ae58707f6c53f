"""Arrays in a default `Memory`, and numpy's own arrays in one."""

from __future__ import annotations

import contextvars
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _memfold
from ._memory import THRESHOLD, Memory, Size, _address, size

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

    from ._memory import Array, Shape

_default: Memory | None = None
# What was in force before each `numpy_allocator` that this context is inside of, the outermost first. As numpy's handler itself it
# is the context's: a thread that is started inside has none, or begins with a copy of both (`sys.flags.thread_inherit_context`).
_outer: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("memfold_outer", default=())


def default() -> Memory:
    """The Memory of `memfold.empty` and its like: made at its first use, with half of the memory there is as its limit."""
    global _default
    if _default is None:
        _default = Memory()
    return _default


def set_default(memory: Memory | None) -> Memory | None:
    """Makes `memory` the default one; None: a new one at the next use. Returns what was the default, if anything."""
    global _default
    previous, _default = _default, memory
    return previous


# A forked child can't use its parent's: it makes its own.
os.register_at_fork(after_in_child=lambda: (set_default(None), None)[1])


def empty(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """`Memory.empty` in the default Memory."""
    return default().empty(shape, dtype, order)


def zeros(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """`Memory.zeros` in the default Memory."""
    return default().zeros(shape, dtype, order)


def ones(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """`Memory.ones` in the default Memory."""
    return default().ones(shape, dtype, order)


def full(shape: Shape, fill_value: Any, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """`Memory.full` in the default Memory."""
    return default().full(shape, fill_value, dtype, order)


def array(values: ArrayLike, dtype: DTypeLike | None = None, order: Any = "K") -> Array:
    """`Memory.array` in the default Memory."""
    return default().array(values, dtype, order)


def arange(*bounds: Any, dtype: DTypeLike | None = None) -> Array:
    """`Memory.arange` in the default Memory."""
    return default().arange(*bounds, dtype=dtype)


def is_folded(array: ArrayLike) -> bool:
    """Whether an array lies in folded memory of this process, whoever made it.

    >>> import numpy
    >>> is_folded(numpy.zeros(3))
    False
    """
    return _memfold.is_folded(_address(array)[0])


class numpy_allocator:
    """Inside a `with` block, numpy's arrays of at least `threshold` bytes are folded: those of pandas and other libraries too.

    It counts for the thread (the context) that enters it, and not for threads that are started inside, unless Python hands its
    context on to them (`sys.flags.thread_inherit_context`, from 3.14 on); `install` is for all. It may be entered several times, one
    inside the other, and by several threads and tasks at once.

    >>> import numpy
    >>> mem = Memory(limit="64MiB")
    >>> with numpy_allocator(mem):
    ...     a = numpy.arange(1_000_000) * 2
    >>> is_folded(a)
    True
    """

    def __init__(self, memory: Memory | None = None, threshold: Size = THRESHOLD) -> None:
        engine = (memory or default())._opened()
        self._handler = _memfold.make_handler(engine, max(1, size(threshold)))

    def __enter__(self) -> None:
        _outer.set((*_outer.get(), _memfold.set_handler(self._handler)))

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not _outer.get():
            raise RuntimeError("this block of numpy_allocator was entered in another thread or context: end it there")
        *outer, previous = _outer.get()
        _outer.set(tuple(outer))
        _memfold.set_handler(previous)


def install(
    limit: Size | None = None, *, memory: Memory | None = None, threshold: Size = THRESHOLD, **settings: Any
) -> Memory:
    """From now on all of numpy's arrays of at least `threshold` bytes are folded, in every thread: those of pandas, scikit-learn and
    other libraries that use numpy's memory too. Returns the Memory: `memory`, or a new one of `limit` and `settings`.

    It replaces the functions of numpy's own memory handler (NEP 49), for the whole process. Arrays of objects are folded too, where
    numpy asks for so many bytes at once: their pointers are, which is right, but what they point to is not.

    Raises RuntimeError if it is installed already, or if numpy doesn't come to it for memory.
    """
    import numpy as np

    if memory is not None and (limit is not None or settings):
        raise TypeError("give a Memory, or settings for a new one, not both")
    memory = memory or Memory(limit, **settings)
    least = max(1, size(threshold))
    _memfold.install(memory._opened(), least)
    if not memory.owns(np.empty(least, "uint8")):
        _memfold.uninstall()
        raise RuntimeError("this numpy doesn't take its memory from its default handler: use memfold.numpy_allocator")
    return memory


def uninstall() -> bool:
    """Ends `install` for new arrays; those that exist stay folded. Whether there was anything to end."""
    return _memfold.uninstall()
