import gc
import subprocess
import sys

import memfold
import pytest

MIB = 1 << 20


@pytest.fixture
def mem():
    """A Memory of 32 MiB, whose structures are verified afterwards."""
    memory = memfold.Memory(limit="32MiB")
    engine = memory._engine
    yield memory
    gc.collect()
    engine.check()


@pytest.fixture
def run_script(tmp_path):
    """Runs a script in a Python of its own; the finished process."""

    def run(text, *arguments, status=0):
        script = tmp_path / "script.py"
        script.write_text(text)
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        return done

    return run
