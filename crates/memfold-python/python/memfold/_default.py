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
    """The Memory of `memfold.empty` and its like: made at its first use, with half of the memory there is as its limit.

    Raises:
        PermissionError: it can't be made, as the system gives this user no userfaultfd; the text says what to do.
    """
    global _default
    if _default is None:
        _default = Memory()
    return _default


def set_default(memory: Memory | None) -> Memory | None:
    """Makes another Memory the default one.

    Args:
        memory: the Memory; None: a new one at the next use.

    Returns:
        What was the default, if anything.

    Raises:
        Nothing. Arrays of the one before stay good.
    """
    global _default
    previous, _default = _default, memory
    return previous


# A forked child can't use its parent's: it makes its own.
os.register_at_fork(after_in_child=lambda: (set_default(None), None)[1])


def empty(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """A new array in the default Memory, as `Memory.empty`: of zeros, here.

    Args:
        shape: the length of its axis, or a tuple of the lengths of all; 0 is a length too.
        dtype: the type of its elements, of a fixed size; None: float64.
        order: "C" (rows lie together) or "F" (columns do).

    Raises:
        As `Memory.empty`, and the first time as `default`.
    """
    return default().empty(shape, dtype, order)


def zeros(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """A new array of zeros in the default Memory, as `Memory.zeros`.

    Args:
        shape: the length of its axis, or a tuple of the lengths of all; 0 is a length too.
        dtype: the type of its elements, of a fixed size; None: float64.
        order: "C" (rows lie together) or "F" (columns do).

    Raises:
        As `Memory.zeros`, and the first time as `default`.
    """
    return default().zeros(shape, dtype, order)


def ones(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """A new array of ones in the default Memory, as `Memory.ones`.

    Args:
        shape: the length of its axis, or a tuple of the lengths of all; 0 is a length too.
        dtype: the type of its elements, of a fixed size; None: float64.
        order: "C" (rows lie together) or "F" (columns do).

    Raises:
        As `Memory.ones`, and the first time as `default`.
    """
    return default().ones(shape, dtype, order)


def full(shape: Shape, fill_value: Any, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """A new array of one value in the default Memory, as `Memory.full`.

    Args:
        shape: the length of its axis, or a tuple of the lengths of all; 0 is a length too.
        fill_value: what all elements are; an array of values is broadcast to the shape.
        dtype: the type of its elements, of a fixed size; None: that of `fill_value`.
        order: "C" (rows lie together) or "F" (columns do).

    Raises:
        As `Memory.full`, and the first time as `default`.
    """
    return default().full(shape, fill_value, dtype, order)


def array(values: ArrayLike, dtype: DTypeLike | None = None, order: Any = "K") -> Array:
    """A copy of `values` in the default Memory, of the same shape, as `Memory.array`.

    Args:
        values: an array, or numbers or text in lists in lists.
        dtype: the type of its elements, of a fixed size; None: that of `values`.
        order: "C" (rows lie together), "F" (columns do), or "K", as in `values`.

    Raises:
        As `Memory.array`, and the first time as `default`.
    """
    return default().array(values, dtype, order)


def arange(*bounds: Any, dtype: DTypeLike | None = None) -> Array:
    """Evenly spaced values in the default Memory, of shape `(ceil((stop - start) / step),)`, as `Memory.arange`.

    Args:
        bounds: stop; or start and stop; or start, stop and step. The stop is no value of the array.
        dtype: the type of its elements; None: that of the bounds.

    Raises:
        As `Memory.arange`, and the first time as `default`.
    """
    return default().arange(*bounds, dtype=dtype)


def is_folded(array: ArrayLike) -> bool:
    """Whether an array lies in folded memory of this process, whoever made it.

    Args:
        array: any array, or a view of one; what is none becomes one, in ordinary memory.

    Raises:
        Nothing of its own.

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

    Args:
        memory: the Memory that they are to lie in; None: the default one.
        threshold: the bytes of the smallest array that is folded: a number, or text such as "64KiB".

    Raises:
        ValueError: the Memory is closed, or the threshold is no size.
        RuntimeError: this is a forked child, and the Memory its parent's; or a block is ended where it wasn't entered.

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
    other libraries that use numpy's memory too.

    It replaces the functions of numpy's own memory handler (NEP 49), for the whole process. Arrays of objects are folded too, where
    numpy asks for so many bytes at once: their pointers are, which is right, but what they point to is not.

    Args:
        limit: bytes of physical memory of a new Memory, as `Memory` takes it.
        memory: a Memory that there is, in place of `limit` and `settings`.
        threshold: the bytes of the smallest array that is folded: a number, or text such as "64KiB".
        settings: what else `Memory` takes.

    Returns:
        The Memory: `memory`, or the new one.

    Raises:
        TypeError: both a Memory and settings for a new one are given.
        RuntimeError: it is installed already, or numpy doesn't come to it for memory.
        ValueError, PermissionError: as `Memory`.
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
    """Ends `install` for new arrays; those that exist stay folded. Whether there was anything to end.

    Raises:
        Nothing.
    """
    return _memfold.uninstall()
