"""Displays of a Memory."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._memory import Memory, Stats

BAR_COLUMNS = 32


def text_of(nbytes: float) -> str:
    """
    >>> text_of(1536), text_of(3 << 30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _data(stats: Stats) -> int:
    return stats["resident_bytes"] + stats["folded_bytes"]


def line(stats: Stats) -> str:
    """Returns a summary in one line."""
    limit = f" of {text_of(stats['limit_bytes'])}" if stats["limit_bytes"] else ""
    data = f"{text_of(_data(stats))} of data in {text_of(stats['physical_bytes'])}{limit}"
    return f"{data}, {text_of(stats['folded_bytes'])} folded into {text_of(stats['pool_bytes'])}"


def _parts(stats: Stats) -> list[tuple[str, int, str]]:
    """Returns the uses of memory, with a colour for each."""
    uncompressed = stats["resident_bytes"] + stats["frame_bytes"]
    return [
        ("uncompressed", uncompressed, "#4c78a8"),
        ("compressed", stats["pool_bytes"], "#f58518"),
        ("index", stats["index_bytes"], "#999"),
    ]


def bar(stats: Stats) -> str:
    """Returns a bar of characters, as long as the limit: # is uncompressed, + compressed, . free."""
    whole = max(stats["limit_bytes"] or stats["physical_bytes"], stats["physical_bytes"], 1)
    cells = "".join(
        mark * round(BAR_COLUMNS * part / whole)
        for mark, part in (("#", stats["resident_bytes"] + stats["frame_bytes"]), ("+", stats["pool_bytes"]))
    )
    return f"[{cells[:BAR_COLUMNS]:.<{BAR_COLUMNS}}] {line(stats)}"


def html(stats: Stats) -> str:
    """Returns a bar and a line for a notebook."""
    whole = max(stats["limit_bytes"] or stats["physical_bytes"], stats["physical_bytes"], 1)
    cells = "".join(
        f'<div title="{name}: {text_of(part)}" style="background:{colour};width:{100 * part / whole:.2f}%"></div>'
        for name, part, colour in _parts(stats)
    )
    frame = "display:flex;height:14px;width:400px;border:1px solid #999"
    return f'<div style="{frame}">{cells}</div><div>memfold.Memory: {escaped(line(stats))}</div>'


class Watch:
    """Shows a Memory repeatedly inside a `with` block."""

    def __init__(self, memory: Memory, interval_s: float) -> None:
        if not interval_s > 0:
            raise ValueError(f"an interval is a number of seconds above 0, not {interval_s!r}")
        self._memory, self._interval_s = memory, interval_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._ipython: Any = None
        self._display: Any = None

    def __enter__(self) -> Memory:
        if "ipykernel" in sys.modules:
            self._ipython = importlib.import_module("IPython.display")
            page = self._ipython.HTML(html(self._memory.stats()))
            self._display = self._ipython.display(page, display_id=True)
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name="memfold-watch", daemon=True)
        self._thread.start()
        return self._memory

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        if self._display is None:
            print(file=sys.stderr)

    def _run(self) -> None:
        ended = False
        while not ended:
            # A Memory that was closed meanwhile shows nothing.
            with contextlib.suppress(ValueError):
                self._show()
            ended = self._end.wait(self._interval_s)
        with contextlib.suppress(ValueError):
            self._show()

    def _show(self) -> None:
        stats = self._memory.stats()
        if self._display is not None:
            self._display.update(self._ipython.HTML(html(stats)))
        else:
            print(f"\r{bar(stats)}\x1b[K", end="", file=sys.stderr, flush=True)
