"""`Memory`: an engine, and the arrays in it."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Union, cast

from . import _memfold, _show

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    Array = NDArray[Any]
    Shape = Union[int, "tuple[int, ...]"]

Size = Union[int, str]

PAGE_BYTES = 4096
# The smallest array that numpy_allocator and install fold: smaller ones are many and short-lived.
THRESHOLD = "1MiB"
_BY_SIGNAL = (
    'memfold uses delivery="signal", because this user may not use userfaultfd for system calls: give an array to files, sockets and '
    'other system calls only inside `with mem.pinned(array):`. delivery="signal" ends this warning; `memfold check` says which '
    "permission ends the need"
)


class Stats(TypedDict):
    """Memory use of a `Memory` in bytes, and counts since it was made."""

    limit_bytes: int
    """limit of all physical memory; 0 if only `resident` was given"""
    physical_bytes: int
    """all physical memory: resident, frames, pool and index"""
    allocated_bytes: int
    """address space of its arrays, touched or not"""
    resident_bytes: int
    """data of arrays that is resident, uncompressed"""
    frame_bytes: int
    """uncompressed pages that are being evicted or loaded"""
    pool_bytes: int
    """memory of compressed data"""
    index_bytes: int
    """memory of the index and other metadata"""
    folded_bytes: int
    """data of arrays that is only compressed (or in the swap file), before compression"""
    swap_bytes: int
    """space used in the swap file"""
    peak_bytes: int
    """peak of physical_bytes"""
    faults: int
    """page faults: touches of memory that was not resident"""
    loads: int
    """page faults that loaded folded data"""
    over_limit: int
    """times that the limit was exceeded, because nothing more could be folded"""


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()


class Memory:
    """Memory for arrays, which keeps cold data compressed.

    Args:
        limit: bytes of physical memory for everything: uncompressed data, compressed data, and the index. A number, text such
            as "2GiB", or a share of the machine's memory such as "25%". Default: half of the machine's memory.
        codec: "zstd+shuffle" (the default) splits numbers into planes of their bytes, which blosc calls a shuffle, and compresses
            with zstd. A level may follow the name: "zstd:3". "lz4+shuffle" is faster for data that is not numbers.
        swap: a directory for data that does not fit or compress. The file is unnamed and encrypted, and ends with the process.
        resident: bytes of uncompressed memory, instead of `limit` or with it.
        delivery: how touches of folded memory are handled. "gate", the default where available: in the touching thread. From the
            first Memory on, every system call of the process passes memfold, which makes its memory resident. "thread", the
            default elsewhere: in another thread. It is slower and needs a permission. "signal": in the touching thread, but an
            array may be given to files, sockets and other system calls only inside `with mem.pinned(array):`. It is the default
            where the others are unavailable, with a RuntimeWarning.
        fork: what a forked child gets of the arrays. "refuse": nothing, and a touch ends the child with a message. "copy": all of
            them, as ordinary memory. Each fork then first loads everything, past the limit if need be.
        settings: any other flag of `memfold run`, with underscores: swap_size="64GiB", block="64K".

    Raises:
        ValueError: a setting is wrong; the text names it and the valid values.
        PermissionError: the system does not let this user have what `delivery` needs; the text says what to do.

    >>> mem = Memory(limit="64MiB", codec="zstd+shuffle")
    >>> a = mem.zeros((4096, 4096), dtype="float32")        # 64 MiB, no memory yet
    >>> a[:] = 1
    >>> float(a.sum())
    16777216.0
    >>> mem.fold(a) > 0
    True
    >>> mem.close()
    """

    def __init__(
        self,
        limit: Size | None = None,
        codec: str = "zstd+shuffle",
        swap: str | os.PathLike[str] | None = None,
        *,
        resident: Size | None = None,
        delivery: str | None = None,
        fork: str = "refuse",
        **settings: Any,
    ) -> None:
        if fork not in ("refuse", "copy"):
            raise ValueError(f'fork is "refuse" or "copy", not {fork!r}')
        if limit is None and resident is None:
            limit = _memory_bytes() // 2
        settings = {"limit": limit, "resident": resident, "codec": codec, "swap": swap, "delivery": delivery, **settings}
        texts = [(name.replace("_", "-"), _text(name, value)) for name, value in settings.items() if value is not None]
        self._engine: _memfold.Engine | None = _memfold.Engine(texts)
        if delivery is None and self._engine.delivery() == "signal":
            warnings.warn(_BY_SIGNAL, RuntimeWarning, stacklevel=2)
        self._handler = _memfold.make_handler(self._engine, 0)
        self._fork = fork
        self._limit = 0 if limit is None else size(limit)
        self._most = min(size(bound) for bound in (limit, resident) if bound is not None)
        _memories.add(self)

    # Arrays

    def empty(self, shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
        """A new array, as `numpy.empty`. Here its elements are zeros.

        Args:
            shape: the length of its axis, or a tuple of the lengths of all axes; 0 is allowed.
            dtype: the type of its elements, with a fixed size; None: float64.
            order: "C" (rows lie together) or "F" (columns do).

        Returns:
            A `numpy.ndarray` of that shape. It takes shape times itemsize bytes of address space, and memory as it is touched.

        Raises:
            TypeError: the dtype holds Python objects, or is none; the shape isn't made of integers.
            ValueError: a length is negative, the bytes can't be counted in 64 bits, or the Memory is closed.
            MemoryError: so many bytes of address space are not to be had.
            RuntimeError: this is a forked child, and the Memory its parent's.
        """
        import numpy as np

        self._check(dtype)
        with self._allocating():
            return np.empty(shape, dtype, order)

    def zeros(self, shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
        """A new array of zeros, as `numpy.zeros`. It takes no memory until it is touched.

        Args:
            shape: the length of its axis, or a tuple of the lengths of all axes; 0 is allowed.
            dtype: the type of its elements, with a fixed size; None: float64.
            order: "C" (rows lie together) or "F" (columns do).

        Returns:
            A `numpy.ndarray` of that shape.

        Raises:
            TypeError: the dtype holds Python objects, or is none; the shape isn't made of integers.
            ValueError: a length is negative, the bytes can't be counted in 64 bits, or the Memory is closed.
            MemoryError: so many bytes of address space are not to be had.
            RuntimeError: this is a forked child, and the Memory its parent's.
        """
        import numpy as np

        self._check(dtype)
        with self._allocating():
            return np.zeros(shape, dtype if dtype is not None else float, order)

    def ones(self, shape: Shape, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
        """A new array of ones, as `numpy.ones`.

        Args:
            shape: the length of its axis, or a tuple of the lengths of all axes; 0 is allowed.
            dtype: the type of its elements, with a fixed size; None: float64.
            order: "C" (rows lie together) or "F" (columns do).

        Returns:
            A `numpy.ndarray` of that shape.

        Raises:
            TypeError: the dtype holds Python objects, or is none; the shape isn't made of integers.
            ValueError: a length is negative, the bytes can't be counted in 64 bits, or the Memory is closed.
            MemoryError: so many bytes of address space are not to be had.
            RuntimeError: this is a forked child, and the Memory its parent's.
        """
        import numpy as np

        self._check(dtype)
        with self._allocating():
            return np.ones(shape, dtype, order)

    def full(self, shape: Shape, fill_value: Any, dtype: DTypeLike | None = None, order: Any = "C") -> Array:
        """A new array of one value, as `numpy.full`.

        Args:
            shape: the length of its axis, or a tuple of the lengths of all axes; 0 is allowed.
            fill_value: what all elements are; an array of values is broadcast to the shape.
            dtype: the type of its elements, of a fixed size; None: that of `fill_value`.
            order: "C" (rows lie together) or "F" (columns do).

        Returns:
            A `numpy.ndarray` of that shape.

        Raises:
            TypeError: the dtype holds Python objects, or is none; the shape isn't made of integers.
            ValueError: a length is negative, the bytes can't be counted in 64 bits, or the Memory is closed.
            MemoryError: so many bytes of address space are not to be had.
            RuntimeError: this is a forked child, and the Memory its parent's.

        >>> mem = Memory(limit="64MiB")
        >>> mem.full((2, 3), 7)
        array([[7, 7, 7],
               [7, 7, 7]])
        """
        import numpy as np

        self._check(np.asarray(fill_value).dtype if dtype is None else dtype)
        with self._allocating():
            return np.full(shape, fill_value, dtype, order)

    def array(self, values: ArrayLike, dtype: DTypeLike | None = None, order: Any = "K") -> Array:
        """A copy of `values`, as `numpy.array`.

        Args:
            values: an array, or numbers or text in lists in lists.
            dtype: the type of its elements, of a fixed size; None: that of `values`.
            order: "C" (rows lie together), "F" (columns do), or "K", as in `values`.

        Returns:
            A `numpy.ndarray` of the shape of `values`.

        Raises:
            TypeError: the dtype holds Python objects, or is none; the shape isn't made of integers.
            ValueError: a length is negative, the bytes can't be counted in 64 bits, or the Memory is closed.
            MemoryError: so many bytes of address space are not to be had.
            RuntimeError: this is a forked child, and the Memory its parent's.

        >>> mem = Memory(limit="64MiB")
        >>> mem.array([[1, 2], [3, 4]], dtype="int16").T
        array([[1, 3],
               [2, 4]], dtype=int16)
        """
        import numpy as np

        self._check(dtype)
        with self._allocating():
            made = np.array(values, dtype=dtype, order=order)
        self._check(made.dtype)
        return made

    def arange(self, *bounds: Any, dtype: DTypeLike | None = None) -> Array:
        """Evenly spaced values, as `numpy.arange(stop)` or `numpy.arange(start, stop[, step])`.

        Args:
            bounds: stop; or start and stop; or start, stop and step. The stop is no value of the array.
            dtype: the type of its elements; None: that of the bounds.

        Returns:
            A `numpy.ndarray` of shape `(ceil((stop - start) / step),)`.

        Raises:
            TypeError: there are no bounds, or more than three; the dtype holds Python objects, or is none.
            ValueError: there are too many values to count, or the Memory is closed.
            ZeroDivisionError: the step is 0.
            MemoryError: so many bytes of address space are not to be had.
            RuntimeError: this is a forked child, and the Memory its parent's.

        >>> Memory(limit="64MiB").arange(2, 10, 3)
        array([2, 5, 8])
        """
        import numpy as np

        self._check(dtype)
        with self._allocating():
            return np.arange(*bounds, dtype=dtype)

    def buffer(self, nbytes: int) -> memoryview:
        """Makes `nbytes` zero bytes, for anything that takes a writable buffer: `readinto`, `recv_into`, `struct.pack_into`.

        Args:
            nbytes: how many bytes; 0 is allowed.

        Returns:
            A memoryview of format "B" and shape `(nbytes,)`, which keeps its memory.

        Raises:
            As `zeros`.

        >>> view = Memory(limit="64MiB").buffer(8)
        >>> view[2:4] = b"ab"
        >>> bytes(view)
        b'\\x00\\x00ab\\x00\\x00\\x00\\x00'
        """
        return memoryview(self.zeros(nbytes, "uint8"))  # type: ignore[arg-type]

    def arrow(self, table: Any) -> Any:
        """Makes a copy of a pyarrow Table or RecordBatch whose columns all lie in this memory.

        pyarrow takes no allocator from Python, but it can read its IPC format in place. So the table is written to a folded
        buffer, and the result refers to that.

        Args:
            table: a pyarrow.Table or pyarrow.RecordBatch, of any number of rows.

        Returns:
            A pyarrow.Table of the same schema, rows and values. It keeps its memory.

        Raises:
            ModuleNotFoundError: pyarrow is not installed.
            AttributeError: `table` is neither.
            ValueError, MemoryError, RuntimeError: as `zeros`.
        """
        pa: Any = importlib.import_module("pyarrow")
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        counting = pa.MockOutputStream()
        _write_arrow(pa, counting, table)
        folded = self.zeros(counting.size(), "uint8")
        with pa.FixedSizeBufferWriter(pa.py_buffer(folded)) as out:
            _write_arrow(pa, out, table)
        return pa.ipc.open_stream(pa.py_buffer(folded)).read_all()

    # Hints

    def fold(self, array: ArrayLike) -> int:
        """Folds an array (or a slice of one) now.

        Args:
            array: an array in this memory, or a view of one. A slice with gaps counts from its first byte to its last.

        Returns:
            Bytes that were evicted. Parts of pages (4096 bytes) at its ends stay resident, and so do pinned pages.

        Raises:
            ValueError: the array isn't in this memory, or the Memory is closed.
            RuntimeError: this is a forked child, and the Memory its parent's.
        """
        return self._opened().fold(*self._bounds(array)) * PAGE_BYTES

    def cold(self, array: ArrayLike) -> None:
        """Makes an array (or a slice of one) the first to be folded when memory is needed. It stays resident until then.

        Args:
            array: an array in this memory, or a view of one. A slice with gaps counts from its first byte to its last.

        Raises:
            ValueError: the array isn't in this memory, or the Memory is closed.
            RuntimeError: this is a forked child, and the Memory its parent's.
        """
        self._opened().cold(*self._bounds(array))

    def prefetch(self, array: ArrayLike) -> None:
        """Loads the folded part of an array (or a slice of one), in larger steps than touches would.

        Args:
            array: an array in this memory, or a view of one. A slice with gaps counts from its first byte to its last.

        Raises:
            ValueError: the array isn't in this memory, or the Memory is closed.
            RuntimeError: this is a forked child, and the Memory its parent's.
        """
        self._opened().prefetch(*self._bounds(array))

    @contextlib.contextmanager
    def pinned(self, *arrays: ArrayLike) -> Iterator[None]:
        """Keeps arrays (or slices) resident inside a `with` block, in huge pages where available. They are then as fast as plain
        numpy arrays.

        Args:
            arrays: arrays in this memory, or views of them. Together they may take as many bytes as the limit.

        Raises:
            ValueError: they aren't in this memory, or are larger than its limit together, or the Memory is closed.
            RuntimeError: this is a forked child, and the Memory its parent's.

        >>> mem = Memory(limit="64MiB")
        >>> a = mem.ones(1000)
        >>> with mem.pinned(a):
        ...     mem.fold(a)
        0
        """
        engine = self._opened()
        bounds = [self._bounds(array) for array in arrays]
        wanted = sum(nbytes for _, nbytes in bounds)
        if wanted > self._most:
            raise ValueError(
                f"pinning {_show.text_of(wanted)} needs more than the limit of {_show.text_of(self._most)}: "
                "pin a part at a time, or raise the limit"
            )
        with contextlib.ExitStack() as pins:
            for address, nbytes in bounds:
                engine.pin(address, nbytes)
                pins.callback(engine.unpin, address, nbytes)
            yield

    def owns(self, array: ArrayLike) -> bool:
        """Returns whether an array lies in this memory.

        Args:
            array: any array. Other objects are converted to an array first, which lies elsewhere.

        Raises:
            Nothing of its own. A closed Memory owns no array.
        """
        return self._engine is not None and self._engine.owns(_address(array)[0])

    # Counters

    def stats(self) -> Stats:
        """Returns memory use in bytes, and counts since it was made. `Stats` explains each.

        Raises:
            ValueError: the Memory is closed.
            RuntimeError: this is a forked child, and the Memory its parent's.

        >>> mem = Memory(limit="64MiB")
        >>> a = mem.ones(1_000_000)
        >>> mem.stats()["resident_bytes"] >= a.nbytes
        True
        """
        figures = self._opened().stats()
        parts = ("resident_bytes", "frame_bytes", "pool_bytes", "index_bytes")
        figures["physical_bytes"] = sum(figures[part] for part in parts)
        figures["limit_bytes"] = self._limit
        figures["loads"] = figures["pgmajfault"]
        return cast(Stats, {name: figures[name] for name in Stats.__annotations__})

    def all_stats(self) -> dict[str, int]:
        """Returns every counter of the engine by name; `memfold._memfold.figures()` explains each.

        Raises:
            ValueError, RuntimeError: as `stats`.
        """
        return self._opened().stats()

    def watch(self, interval_s: float = 0.5) -> _show.Watch:
        """Shows a bar of resident and folded memory inside a `with` block: in a notebook, or on stderr.

        Args:
            interval_s: seconds between updates.

        Raises:
            ValueError: the interval isn't above 0.
        """
        return _show.Watch(self, interval_s)

    @property
    def delivery(self) -> str:
        """How touches of folded memory are handled: "gate", "thread" or "signal".

        Raises:
            ValueError, RuntimeError: as `stats`.
        """
        return self._opened().delivery()

    @property
    def limit(self) -> int:
        """Its limit in bytes, 0 if only `resident` was given."""
        return self._limit

    def __repr__(self) -> str:
        if self._engine is None:
            return "<memfold.Memory, closed>"
        if not self._engine.is_at_home():
            return "<memfold.Memory of the parent process>"
        return f"<memfold.Memory {_show.line(self.stats())}>"

    def _repr_html_(self) -> str:
        if self._engine is None or not self._engine.is_at_home():
            return _show.escaped(repr(self))
        return _show.html(self.stats())

    # Its end

    def close(self) -> None:
        """Makes no more arrays. Existing ones stay valid, and the engine ends with the last of them. It may be closed twice."""
        self._engine = None
        self._handler = None

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Memory can't be pickled, because it belongs to its process: make one in each process")

    # Inside

    def _opened(self) -> _memfold.Engine:
        if self._engine is None:
            raise ValueError("this Memory is closed: make a new one")
        if not self._engine.is_at_home():
            raise RuntimeError("this Memory belongs to the parent of this forked process: make a new one here")
        return self._engine

    @contextlib.contextmanager
    def _allocating(self) -> Iterator[None]:
        self._opened()
        previous = _memfold.set_handler(self._handler)
        try:
            yield
        except MemoryError as error:
            fix = "take a smaller shape, free some arrays, or raise the limit of ulimit -v, if there is one"
            raise MemoryError(f"{error}: {fix}") from error
        finally:
            _memfold.set_handler(previous)

    @staticmethod
    def _check(dtype: DTypeLike | None) -> None:
        import numpy as np

        if dtype is not None and np.dtype(dtype).hasobject:
            raise TypeError(
                f"an array of {np.dtype(dtype)} can't be folded, because it holds pointers to objects that would not be folded: "
                'use a dtype of fixed size (numbers, "S20", "U20", structured), or encode the values'
            )

    def _bounds(self, array: ArrayLike) -> tuple[int, int]:
        address, nbytes = _address(array)
        if nbytes > 0 and not self._opened().owns(address):
            raise ValueError("this array is not in this Memory: make it there, with mem.array(...) or under numpy_allocator(mem)")
        return address, nbytes


def _address(array: ArrayLike) -> tuple[int, int]:
    """Returns the first byte of an array, and the number of bytes up to its last."""
    import numpy as np

    view = np.asarray(array)
    low = high = view.__array_interface__["data"][0]
    if view.size == 0:
        return low, 0
    for length, stride in zip(view.shape, view.strides):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return low, high + view.itemsize - low


def size(value: Size) -> int:
    """Returns the bytes of a size: a number, or text such as "2GiB".

    >>> size("1.5k"), size(4096)
    (1536, 4096)
    """
    if isinstance(value, str):
        return _memfold.parse_size(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f'a size is a number of bytes or text such as "2GiB", not {value!r}')
    if value.__index__() < 0:
        raise ValueError(f"a size can't be negative: {value!r}")
    return value.__index__()


def _text(name: str, value: Any) -> str:
    if name in ("limit", "resident") and not isinstance(value, str):
        return str(size(value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _memory_bytes() -> int:
    """Returns the memory of the machine, or of this process's cgroup (v2)."""
    memory = _memfold.parse_size("100%")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/self/cgroup") as lines:
            path = next(line.split(":", 2)[2].strip() for line in lines if line.startswith("0::"))
        with open(f"/sys/fs/cgroup{path}/memory.max") as limit:
            memory = min(memory, int(limit.read()))
    return memory


def _write_arrow(pa: Any, out: Any, table: Any) -> None:
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)


def _before_fork() -> None:
    for memory in list(_memories):
        if memory._fork == "copy" and memory._engine is not None and memory._engine.is_at_home():
            memory._engine.lend()


def _after_fork_in_parent() -> None:
    for memory in list(_memories):
        if memory._engine is not None:
            memory._engine.take_back()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_memfold.after_fork_in_child,
)
