"""What docs/python.md shows works."""

import os
import re

import pytest

DOCS = os.environ.get("MEMFOLD_DOCS", os.path.join(os.path.dirname(__file__), "../../../docs/python.md"))


def test_the_first_example(capsys):
    with open(DOCS) as file:
        [code] = re.findall(r"<!-- test:first -->\n```python\n(.*?)```", file.read(), re.DOTALL)
    assert len(code.splitlines()) <= 11
    exec(compile(code, DOCS, "exec"), {})
    assert "of data in" in capsys.readouterr().out


def test_every_public_name_is_told_of():
    import memfold

    with open(DOCS) as file:
        text = file.read()
    names = [name for name in memfold.__all__ if name not in ("__version__", "Stats")]
    names += [name for name in vars(memfold.Memory) if not name.startswith("_") and name not in ("close", "all_stats", "owns")]
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("name", ["pyarrow"])
def test_arrow_tables_lie_in_folded_memory(name):
    pa = pytest.importorskip(name)
    import memfold

    mem = memfold.Memory(limit="16MiB")
    table = pa.table({"n": list(range(100_000)), "text": [f"row {n}" for n in range(100_000)]})
    folded = mem.arrow(table)
    assert folded.equals(table)
    for column in folded.columns:
        for chunk in column.chunks:
            assert all(memfold._memfold.is_folded(buffer.address) for buffer in chunk.buffers() if buffer)
    assert memfold.is_folded(folded["n"].chunk(0).to_numpy())
