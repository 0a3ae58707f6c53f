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
# The handlers that were in force before each `numpy_allocator` around this context, the outermost first. Like numpy's handler they
# belong to the context: a new thread has none, or begins with a copy of both (`sys.flags.thread_inherit_context`).
_outer: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("memfold_outer", default=())


def default() -> Memory:
    """Returns the Memory of `memfold.empty`, `zeros` and so on. Its first use makes it, with half of the machine's memory as limit.

    Raises:
        PermissionError: the system lets this user have no userfaultfd; the text says what to do.
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
        The former default, if there was one.

    Raises:
        Nothing. Arrays of the former default stay valid.
    """
    global _default
    previous, _default = _default, memory
    return previous


# A forked child can't use its parent's Memory, so it makes its own.
os.register_at_fork(after_in_child=lambda: (set_default(None), None)[1])


def empty(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """Makes an array in the default Memory, like `Memory.empty`. Its elements are zeros.

    Args:
        shape: the length of its axis, or a tuple of the lengths of all axes; 0 is allowed.
        dtype: the type of its elements, with a fixed size; None: float64.
        order: "C" (rows lie together) or "F" (columns do).

    Raises:
        As `Memory.empty`, and the first time as `default`.
    """
    return default().empty(shape, dtype, order)


def zeros(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """Makes an array of zeros in the default Memory, like `Memory.zeros`.

    Args:
        shape: the length of its axis, or a tuple of the lengths of all axes; 0 is allowed.
        dtype: the type of its elements, with a fixed size; None: float64.
        order: "C" (rows lie together) or "F" (columns do).

    Raises:
        As `Memory.zeros`, and the first time as `default`.
    """
    return default().zeros(shape, dtype, order)


def ones(shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """Makes an array of ones in the default Memory, like `Memory.ones`.

    Args:
        shape: the length of its axis, or a tuple of the lengths of all axes; 0 is allowed.
        dtype: the type of its elements, with a fixed size; None: float64.
        order: "C" (rows lie together) or "F" (columns do).

    Raises:
        As `Memory.ones`, and the first time as `default`.
    """
    return default().ones(shape, dtype, order)


def full(shape: Shape, fill_value: Any, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
    """Makes an array of one value in the default Memory, like `Memory.full`.

    Args:
        shape: the length of its axis, or a tuple of the lengths of all axes; 0 is allowed.
        fill_value: the value of all elements; an array of values is broadcast to the shape.
        dtype: the type of its elements, of a fixed size; None: that of `fill_value`.
        order: "C" (rows lie together) or "F" (columns do).

    Raises:
        As `Memory.full`, and the first time as `default`.
    """
    return default().full(shape, fill_value, dtype, order)


def array(values: ArrayLike, dtype: DTypeLike | None = None, order: Any = "K") -> Array:
    """Makes a copy of `values` in the default Memory, with their shape, like `Memory.array`.

    Args:
        values: an array, or numbers or text in lists in lists.
        dtype: the type of its elements, of a fixed size; None: that of `values`.
        order: "C" (rows lie together), "F" (columns do), or "K", as in `values`.

    Raises:
        As `Memory.array`, and the first time as `default`.
    """
    return default().array(values, dtype, order)


def arange(*bounds: Any, dtype: DTypeLike | None = None) -> Array:
    """Makes evenly spaced values in the default Memory, of shape `(ceil((stop - start) / step),)`, like `Memory.arange`.

    Args:
        bounds: stop; or start and stop; or start, stop and step. The array does not contain stop.
        dtype: the type of its elements; None: that of the bounds.

    Raises:
        As `Memory.arange`, and the first time as `default`.
    """
    return default().arange(*bounds, dtype=dtype)


def is_folded(array: ArrayLike) -> bool:
    """Returns whether an array lies in folded memory of this process, however it was made.

    Args:
        array: any array, or a view of one. Other objects are converted to an array in ordinary memory.

    Raises:
        Nothing of its own.

    >>> import numpy
    >>> is_folded(numpy.zeros(3))
    False
    """
    return _memfold.is_folded(_address(array)[0])


class numpy_allocator:
    """Folds all numpy arrays of at least `threshold` bytes inside a `with` block, also those of pandas and other libraries.

    It applies to the thread (the context) that enters it. A thread that is started inside inherits it only where Python passes on
    the context (`sys.flags.thread_inherit_context`, from 3.14 on); `install` applies to all threads. Blocks may be nested, and
    several threads and tasks may enter them at once.

    Args:
        memory: the Memory for the arrays; None: the default one.
        threshold: the bytes of the smallest array that is folded: a number, or text such as "64KiB".

    Raises:
        ValueError: the Memory is closed, or the threshold is not a size.
        RuntimeError: this is a forked child and the Memory is its parent's, or a block ends in another thread than it began.

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
    """Folds all numpy arrays of at least `threshold` bytes from now on, in every thread, also those of pandas, scikit-learn and
    other libraries that use numpy's memory.

    It replaces the functions of numpy's own memory handler (NEP 49), for the whole process. Large arrays of objects are folded too.
    This folds their pointers, which is correct, but not the objects.

    Args:
        limit: bytes of physical memory of a new Memory, as `Memory` takes it.
        memory: an existing Memory, instead of `limit` and `settings`.
        threshold: the bytes of the smallest array that is folded: a number, or text such as "64KiB".
        settings: other arguments of `Memory`.

    Returns:
        The Memory: `memory`, or the new one.

    Raises:
        TypeError: both a Memory and settings for a new one are given.
        RuntimeError: it is installed already, or numpy does not use its default handler.
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
        raise RuntimeError("this numpy does not use its default memory handler: use memfold.numpy_allocator")
    return memory


def uninstall() -> bool:
    """Ends `install` for new arrays; existing ones stay folded. Returns whether there was anything to end.

    Raises:
        Nothing.
    """
    return _memfold.uninstall()
