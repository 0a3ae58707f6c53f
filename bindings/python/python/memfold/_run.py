"""What a script can learn about `memfold run`."""

from __future__ import annotations

import os
import struct

from . import _memfold

_NO_LIMIT = 2**64 - 1


def run_limit() -> int | None:
    """Returns the limit in bytes of the `memfold run` that this process belongs to, or None outside of a run.

    It is the present limit, also after `memfold set`. A run with only --resident has none.

    Raises:
        Nothing.

    >>> run_limit() is None
    True
    """
    order = _memfold.run_order()
    if not order or os.environ.get("MEMFOLD_DISABLE") == "1":
        return None
    settings = dict(part.partition("=")[::2] for part in order.split(";"))
    try:
        with open(settings["bounds"], "rb") as bounds:
            version, _, _, limit = struct.unpack("<QQQQ", bounds.read(32))
        if version == _memfold.LAYOUT_VERSION:
            return None if limit == _NO_LIMIT else int(limit)
    except (KeyError, OSError, struct.error):
        pass
    given = settings.get("limit")
    return int(given) if given else None
