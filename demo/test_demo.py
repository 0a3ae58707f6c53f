"""Tests of the demo itself: the job is deterministic and of the promised size, and the comparison sees a difference.

    python3 -m unittest discover -s demo
"""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path

import demo

HERE = Path(__file__).resolve().parent
SIZE_MIB = 8


def outcome(digest="aa", peak_mib=100):
    return demo.Outcome({"digest": digest, "steps": {"fill": 1.0}, "peak_bytes": 0}, 2.0, peak_mib * demo.MIB)


class Job(unittest.TestCase):
    def test_its_peak_is_about_the_size_asked_for(self):
        command = [sys.executable, HERE / "job.py", "200"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300, check=True)
        peak_mib = demo.read_report(done.stdout)["peak_bytes"] / demo.MIB
        self.assertTrue(190 <= peak_mib <= 260, peak_mib)


class Compare(unittest.TestCase):
    def test_same_result_within_the_limit_is_no_problem(self):
        self.assertEqual(demo.compare(outcome(), outcome(peak_mib=30), 25 * demo.MIB), [])

    def test_another_digest_is_a_problem(self):
        problems = demo.compare(outcome(), outcome(digest="bb", peak_mib=20), 25 * demo.MIB)
        self.assertEqual(len(problems), 1)
        self.assertIn("results differ", problems[0])

    def test_a_peak_over_the_limit_is_a_problem(self):
        problems = demo.compare(outcome(), outcome(peak_mib=100), 25 * demo.MIB)
        self.assertEqual(len(problems), 1)
        self.assertIn("limit was not kept", problems[0])


class Table(unittest.TestCase):
    def test_it_shows_times_peaks_result_and_counters(self):
        stats = {"total": {"stored_bytes": 300 << 20, "pool_bytes": 100 << 20}, "peak_folded_bytes": 310 << 20}
        stats["faults"] = 1234
        text = demo.table(outcome(), outcome(peak_mib=25), 25 * demo.MIB, stats)
        for expected in ("2.0 s", "1.00x", "100 MiB", "25 MiB", "25%", "same", "310 MiB", "3.00x", "1,234"):
            self.assertIn(expected, text)

    def test_it_says_when_results_differ_and_does_without_counters(self):
        text = demo.table(outcome(), outcome(digest="bb"), demo.MIB, {})
        self.assertIn("DIFFERENT", text)
        self.assertNotIn("ratio", text)


class Report(unittest.TestCase):
    def test_output_that_is_no_report_fails(self):
        for output in (b"", b"not json", b"[]", b'{"digest": "aa"}'):
            with self.assertRaises(demo.Failure):
                demo.read_report(output)


class Runs(unittest.TestCase):
    """Whole runs, with a script instead of memfold."""

    def run_demo(self, script):
        with tempfile.TemporaryDirectory() as directory:
            memfold = Path(directory) / "memfold"
            memfold.write_text(f"#!{sys.executable}\n" + textwrap.dedent(script))
            memfold.chmod(0o755)
            # A share of 1, because this memfold only runs the job.
            command = [sys.executable, HERE / "demo.py", "--size", str(SIZE_MIB), "--share", "1", "--memfold", memfold]
            command += ["--", "--codec", "zstd:1"]
            return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def test_the_job_is_deterministic(self):
        done = self.run_demo(
            """
            import os, sys
            command = sys.argv[sys.argv.index("--") + 1:]
            assert sys.argv[1] == "run" and "--limit" in sys.argv and "--codec" in sys.argv, sys.argv
            open(sys.argv[sys.argv.index("--stats-file") + 1], "w").write('{"faults": 77}')
            os.execv(command[0], command)
            """
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("same", done.stdout)
        self.assertIn("77", done.stdout)

    def test_a_wrong_result_exits_1(self):
        done = self.run_demo("""print('{"digest": "bad", "steps": {}, "peak_bytes": 1}')""")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("DIFFERENT", done.stdout)
        self.assertIn("results differ", done.stderr)

    def test_a_failing_run_exits_2(self):
        done = self.run_demo("import sys; sys.exit(125)")
        self.assertEqual(done.returncode, 2)
        self.assertIn("exit status 125", done.stderr)

    def test_a_missing_memfold_exits_2(self):
        command = [sys.executable, HERE / "demo.py", "--memfold", "/nonexistent"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 2)
        self.assertIn("make build", done.stderr)

    def test_interrupt_and_termination_end_the_child_too(self):
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)):
            with self.subTest(number):
                command = [sys.executable, HERE / "demo.py", "--size", "4000", "--memfold", "/bin/true"]
                # Ignored where these tests run in the background; Python then raises no KeyboardInterrupt.
                heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
                running = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=heed)
                child = only_child(running.pid)
                running.send_signal(number)
                self.assertEqual(running.wait(timeout=20), status)
                self.assertFalse(os.path.exists(f"/proc/{child}"))


def only_child(pid):
    """Returns the process that `pid` started, as soon as it exists: it may not run its program yet."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return children[0]
    raise AssertionError("no child was started")


if __name__ == "__main__":
    unittest.main()
