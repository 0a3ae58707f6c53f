"""The command that comes with the package."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

SCRIPT = """
import memfold
from memfold import run_limit
print(run_limit())
import numpy
array = numpy.arange(4_000_000) // 100
mem = memfold.Memory(limit="16MiB")
array = mem.array(array)
mem.fold(array)
assert array[-1] == 39_999 and array.sum() == sum(n * 100 for n in range(40_000))
"""

CHANGED = """
import os, subprocess, sys, time
from memfold import run_limit
print(run_limit())
for limit in ("--limit=150M", "--limit=none --resident=100M"):
    before = run_limit()
    subprocess.check_call([*sys.argv[1:], "set", str(os.getpid()), *limit.split()], stdout=subprocess.DEVNULL)
    while run_limit() == before:
        time.sleep(0.001)
    print(run_limit())
"""


def run(*arguments, **options):
    return subprocess.run(arguments, capture_output=True, text=True, **options)


@pytest.fixture(params=["command", "module"])
def command(request):
    if request.param == "module":
        return [sys.executable, "-m", "memfold"]
    return [os.path.join(sysconfig.get_path("scripts"), "memfold")]


def test_it_is_there(command):
    assert shutil.which("memfold", path=sysconfig.get_path("scripts"))
    done = run(*command, "--version")
    assert done.returncode == 0 and done.stdout.startswith("memfold ")


def test_module_without_numpy_says_what_to_install():
    without = "import sys; sys.modules['numpy'] = None; import memfold"
    done = run(sys.executable, "-c", without)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: memfold needs numpy 1.22 or newer")


def test_script_under_a_limit_can_use_the_module(command, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run(*command, "run", "--limit", "200M", "--", sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{200 << 20}\n"
    # The module's own memory is the module's.
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["warning"]
    assert "userfaultfd" in done.stderr and "is not folded" in done.stderr
    done = run(*command, "run", "--resident", "200M", "--", sys.executable, "-c", "import memfold; print(memfold.run_limit())")
    assert done.stdout == "None\n", done.stderr


def test_another_limit_is_seen_in_the_script(command):
    done = run(*command, "run", "--limit", "200M", "--", sys.executable, "-c", CHANGED, *command, timeout=120)
    assert done.returncode == 0 and done.stdout == f"{200 << 20}\n{150 << 20}\nNone\n", done.stderr


def test_memory_is_folded_under_it(command):
    count = "x = ['%09d' % n for n in range(1_500_000)]; print(len(x), x[-1])"
    done = run(*command, "run", "--limit", "48M", "--summary", "--", sys.executable, "-c", count)
    assert done.returncode == 0 and done.stdout == "1500000 001499999\n", done.stderr
    assert "folded" in done.stderr


def test_a_mistake_is_told_as_by_the_command(command):
    done = run(*command, "run", "--limit", "1K", "true")
    assert done.returncode == 125 and done.stderr.startswith("memfold: --limit: ")


def test_without_the_command_the_module_says_so(tmp_path, monkeypatch):
    from memfold import __main__

    monkeypatch.setattr(__main__, "_places", lambda: iter([str(tmp_path)]))
    with pytest.raises(FileNotFoundError, match="reinstall"):
        __main__.find_command()


def test_it_is_found_without_importing_numpy():
    done = run(sys.executable, "-X", "importtime", "-c", "import memfold, memfold.__main__")
    assert done.returncode == 0 and "numpy" not in done.stderr
