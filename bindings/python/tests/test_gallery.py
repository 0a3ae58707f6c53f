"""The jobs of the gallery give the same folded as plain, and are folded."""

import json
import os
import subprocess
import sys

import pytest

GALLERY = os.environ.get("MEMFOLD_GALLERY", os.path.join(os.path.dirname(__file__), "../../../docs/gallery"))
NEEDS = {"join": ["pandas"], "strings": ["pandas", "pyarrow"]}


def run(*arguments, **environment):
    command = [sys.executable, os.path.join(GALLERY, "run.py"), *arguments, "--size", "64"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("job", ["images", "search", "join", "strings", "simulation"])
def test_job(job, tmp_path):
    for module in NEEDS.get(job, []):
        pytest.importorskip(module)
    done = run(job, "--json", tmp_path / "runs.json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "same result" in done.stdout
    runs = json.loads((tmp_path / "runs.json").read_text())[job]
    # Of 64 MiB there is room for 16, so much of it was folded.
    assert runs["memfold"]["folded_bytes"] > 16 << 20 and runs["plain numpy"]["folded_bytes"] == 0


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    done = run("simulation", "--plot", tmp_path / "{}.svg")
    assert done.returncode == 0, (done.stdout, done.stderr)
    svg = (tmp_path / "simulation.svg").read_text()
    assert svg.rstrip().endswith("</svg>") and "<!-- plain numpy -->" in svg and "<!-- memfold -->" in svg


def test_a_job_that_fails_ends_and_says_why(tmp_path):
    (tmp_path / "pandas.py").write_text("raise ImportError('no such luck')")
    done = run("join", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "no such luck" in done.stderr and "join, plain numpy: failed, as said above" in done.stderr
