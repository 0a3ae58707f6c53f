"""The jobs of the gallery give the same folded as plain."""

import os
import subprocess
import sys

import pytest

GALLERY = os.environ.get("MEMFOLD_GALLERY", os.path.join(os.path.dirname(__file__), "../../../docs/gallery"))
NEEDS = {"join": ["pandas"], "strings": ["pandas", "pyarrow"]}


@pytest.mark.parametrize("job", ["images", "search", "join", "strings", "simulation"])
def test_job(job):
    for module in NEEDS.get(job, []):
        pytest.importorskip(module)
    script = os.path.join(GALLERY, "run.py")
    done = subprocess.run([sys.executable, script, job, "--size", "64"], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "same result" in done.stdout
