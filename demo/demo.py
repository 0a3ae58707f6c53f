#!/usr/bin/env python3
"""Runs demo/job.py plainly, then with `memfold run` in a quarter of the memory it needed, and compares the two.

Exit status: 0 when both runs gave the same result and the limit was kept, 1 when not, 2 when a run failed,
130 on Ctrl-C.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
# Memory that --limit does not cover: the program's code, libraries and stacks, and memory from before memfold started.
UNMANAGED_BYTES = 32 * MIB
# The keys of the job's only line of output; anything else on stdout is an error.
REPORT_KEYS = {"digest", "steps", "peak_bytes"}


def main():
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(demo(arguments))
    except Failure as failure:
        sys.exit(complain(failure))
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        sys.exit(130)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="data of the job (default 1024)")
    parser.add_argument("--share", type=float, default=0.25, help="limit as a share of the plain peak (default 0.25)")
    parser.add_argument("--memfold", type=Path, default=HERE.parent / "target/release/memfold", metavar="PATH")
    # A quarter of the memory holds everything, also the compressed pool, so the data must compress well below that.
    parser.add_argument("options", nargs="*", help="options for memfold run, after -- (default -- --codec zstd:1 --block 64K)")
    arguments = parser.parse_args()
    arguments.options = arguments.options or ["--codec", "zstd:1", "--block", "64K"]
    if arguments.size < 1:
        parser.error("--size must be at least 1")
    if not 0 < arguments.share <= 1:
        parser.error("--share must be above 0 and at most 1")
    return arguments


def demo(arguments):
    """Runs the job twice and prints the table. Returns the exit status."""
    if not os.access(arguments.memfold, os.X_OK):
        raise Failure(f"{arguments.memfold} is not there: run `make build` first")
    job = [sys.executable, str(HERE / "job.py"), str(arguments.size)]
    say(f"A web shop's log in an SQLite database in memory, about {arguments.size} MiB, without memfold:")
    plain = run(job)
    limit_mib = max(1, round(plain.peak_bytes * arguments.share / MIB))
    say(f"The same program, unchanged, with memfold run {' '.join(['--limit', f'{limit_mib}M', *arguments.options])}:")
    with tempfile.TemporaryDirectory(prefix="memfold-demo-") as directory:
        stats_file = Path(directory) / "stats.json"
        options = ["--limit", f"{limit_mib}M", "--summary", "--stats-file", str(stats_file), *arguments.options]
        folded = run([str(arguments.memfold), "run", *options, "--", *job])
        stats = read_stats(stats_file)
    say("")
    print(table(plain, folded, limit_mib * MIB, stats), flush=True)
    problems = compare(plain, folded, limit_mib * MIB)
    for problem in problems:
        complain(problem)
    return 1 if problems else 0


class Failure(Exception):
    """A run that failed."""


class Outcome:
    """The result and the cost of one run of the job."""

    def __init__(self, report, seconds, peak_bytes):
        self.report = report
        self.seconds = seconds
        self.peak_bytes = peak_bytes


def run(command):
    """Runs the job to its end; its stderr passes through. The peak includes memfold's own memory."""
    start = time.monotonic()
    # Signals are blocked while the child starts: an interrupt inside Popen would leave an unknown child.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    heed = lambda: signal.pthread_sigmask(signal.SIG_SETMASK, held)
    child = None
    try:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=heed)
        finally:
            heed()
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    except BaseException:
        if child:
            stop(child)
        raise
    seconds = time.monotonic() - start
    if child.returncode != 0:
        raise Failure(f"{ended(child.returncode)}: {' '.join(command)}")
    report = read_report(output)
    return Outcome(report, seconds, max(usage.ru_maxrss * 1024, report["peak_bytes"]))


def read_report(output):
    try:
        report = json.loads(output)
    except ValueError:
        raise Failure(f"the job printed no report but {output[:200]!r}") from None
    if not isinstance(report, dict) or not REPORT_KEYS <= report.keys():
        raise Failure(f"the job's report lacks {', '.join(sorted(REPORT_KEYS))}: {output[:200]!r}")
    return report


def stop(child):
    """Ends the child: first as Ctrl-C does, after three seconds with SIGKILL."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if child.returncode is None and child.poll() is None:
            child.send_signal(number)
            try:
                child.wait(timeout=3)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                continue


def ended(code):
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def read_stats(path):
    """Returns memfold's counters; without the file the table has none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        complain(f"no statistics: {error}")
        return {}


def counter(stats, *names):
    """Returns the first of these counters that exists, at any depth; else None."""
    for name in names:
        level = [stats]
        while level:
            for found in level:
                if isinstance(found.get(name), (int, float)):
                    return found[name]
            level = [value for found in level for value in found.values() if isinstance(value, dict)]
    return None


def compare(plain, folded, limit_bytes):
    """Returns every problem as one line; empty if there is none."""
    problems = []
    if plain.report["digest"] != folded.report["digest"]:
        problems.append(f"results differ: {plain.report['digest']} plain, {folded.report['digest']} folded")
    if folded.peak_bytes > limit_bytes + UNMANAGED_BYTES:
        problems.append(f"the limit was not kept: peak {mib(folded.peak_bytes)} under a limit of {mib(limit_bytes)}")
    return problems


def table(plain, folded, limit_bytes, stats):
    same = "same" if plain.report["digest"] == folded.report["digest"] else "DIFFERENT"
    rows = [("", "plain", "memfold", "")]
    for name, seconds in plain.report["steps"].items():
        there = folded.report["steps"].get(name, 0.0)
        rows.append((f"  {name}", f"{seconds:.1f} s", f"{there:.1f} s", times(there, seconds)))
    rows += [
        ("time", f"{plain.seconds:.1f} s", f"{folded.seconds:.1f} s", times(folded.seconds, plain.seconds)),
        ("limit", "none", mib(limit_bytes), ""),
        ("peak memory", mib(plain.peak_bytes), mib(folded.peak_bytes), f"{folded.peak_bytes / plain.peak_bytes:.0%}"),
        ("result", plain.report["digest"][:12], folded.report["digest"][:12], same),
    ]
    rows += [("  " + name, "", value, "") for name, value in engine_rows(stats)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
        for row in rows
    )


def engine_rows(stats):
    """Returns memfold's own report: its peak, the bytes folded and the compression ratio."""
    stored, pool = counter(stats, "stored_bytes"), counter(stats, "pool_bytes")
    ratio = counter(stats, "ratio") or (stored / pool if stored and pool else None)
    peak = counter(stats, "peak_bytes")
    folded = counter(stats, "peak_folded_bytes", "folded_bytes")
    faults, loads = counter(stats, "faults"), counter(stats, "pgmajfault")
    return [
        (name, text)
        for name, value, text in (
            ("peak by memfold's count", peak, mib(peak or 0)),
            ("folded at most", folded, mib(folded or 0)),
            ("compression ratio", ratio, f"{ratio or 0:.2f}x"),
            ("faults", faults, f"{faults or 0:,}"),
            ("of them loads", loads, f"{loads or 0:,}"),
        )
        if value is not None
    ]


def times(this, other):
    return f"{this / other:.2f}x" if other else ""


def mib(size):
    return f"{size / MIB:.0f} MiB"


def say(text):
    print(text, file=sys.stderr, flush=True)


def complain(text):
    """Prints an error in one line. Returns the exit status of a failed run."""
    print(f"demo: {text}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    main()
