"""`python -m memfold ...` runs the `memfold` command of this package."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator


def _places() -> Iterator[str]:
    """Yields directories where pip may have put the command, the likeliest first."""
    yield sysconfig.get_path("scripts")
    yield sysconfig.get_path("scripts", f"{os.name}_user")
    # pip install --target DIR, and --prefix DIR.
    package = os.path.dirname(os.path.abspath(__file__))
    yield os.path.join(os.path.dirname(package), "bin")
    yield os.path.join(os.path.dirname(package), *[os.pardir] * 3, "bin")


def find_command() -> str:
    """Returns the path of the command.

    Raises FileNotFoundError if this package came without it.
    """
    for place in _places():
        path = os.path.normpath(os.path.join(place, "memfold"))
        beside = os.path.join(os.path.dirname(os.path.dirname(path)), "lib", "memfold", "libmemfold_preload.so")
        if os.access(path, os.X_OK) and os.path.exists(beside):
            return path
    raise FileNotFoundError(
        "the memfold command is not beside this package: reinstall it (pip install --force-reinstall memfold)"
    )


def main() -> None:
    try:
        path = find_command()
    except FileNotFoundError as error:
        sys.exit(f"memfold: {error}")
    os.execv(path, ["memfold", *sys.argv[1:]])


if __name__ == "__main__":
    main()
