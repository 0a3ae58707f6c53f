"""Every public function says what its arguments are, in which units, and what it raises."""

import inspect
import re

import memfold
import pytest

NAMES = [name for name in memfold.__all__ if name != "__version__"]
METHODS = [name for name in vars(memfold.Memory) if not name.startswith("_")]
PUBLIC = [(name, getattr(memfold, name)) for name in NAMES if name != "Stats"]
PUBLIC += [(f"Memory.{name}", inspect.getattr_static(memfold.Memory, name)) for name in METHODS]
# What can't go wrong in any way.
NEVER_RAISE = {"Memory.close", "Memory.limit"}
ARRAYS = {"empty", "zeros", "ones", "full", "array", "arange", "buffer"}
# Arguments that are bytes, or a time.
UNITS = {"limit": "bytes", "resident": "bytes", "nbytes": "bytes", "threshold": "bytes", "arrays": "bytes", "interval_s": "seconds"}


def sections(text):
    """The sections of a docstring by name: those that begin with a word and a colon alone on a line."""
    found = re.split(r"^(Args|Returns|Raises):$", inspect.cleandoc(text), flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2]))


def function_of(thing):
    return thing.fget if isinstance(thing, property) else thing


@pytest.mark.parametrize(("name", "thing"), PUBLIC, ids=[name for name, _ in PUBLIC])
def test_docstring(name, thing):
    text = function_of(thing).__doc__
    assert text and text.strip().split("\n\n")[0].endswith((".", ".\n")), "it begins with sentences"
    parts = sections(text)
    wanted = [parameter for parameter in inspect.signature(function_of(thing)).parameters if parameter != "self"]
    said = dict(re.findall(r"^    (\w+): (.+(?:\n     .+)*)", parts.get("Args", ""), re.MULTILINE))
    assert list(said) == wanted
    for argument in set(wanted) & set(UNITS):
        assert UNITS[argument] in said[argument], f"{argument}: in {UNITS[argument]}"
    if name not in NEVER_RAISE:
        assert parts["Raises"].strip()
    if name.split(".")[-1] in ARRAYS:
        assert "shape" in text


def test_every_figure_of_stats_is_told_of():
    lines = inspect.getsource(memfold.Stats).splitlines()
    for name in memfold.Stats.__annotations__:
        at = lines.index(f"    {name}: int")
        assert lines[at + 1].strip().startswith('"""'), name
