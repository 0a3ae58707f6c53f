"""What docs/python.md shows works."""

import os
import re

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
