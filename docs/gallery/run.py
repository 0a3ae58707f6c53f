"""Runs a job of the gallery twice, with numpy's own memory and folded, each in a process of its own, and compares the results.

python run.py images                       one job (or several, or all of them without a name)
python run.py images --size 2048           with about so many MiB of data
python run.py images --plot images.svg     and a plot of memory over time (needs matplotlib)
python run.py images --json images.json    and all that was measured
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import threading
import time

JOBS = ("images", "search", "join", "strings", "simulation")
PLAIN, FOLDED = "plain numpy", "memfold"
SAMPLE_S = 0.02
MIB = 1 << 20
PAGE_BYTES = 4096


def memory_bytes() -> int:
    """What this process has in memory of its own: arrays, and all that memfold needs for them."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def measured(job: str, how: str, size_mib: int) -> dict:
    """Runs a job in this process: its result, its time, and memory over time."""
    module = importlib.import_module(job)
    before = memory_bytes()
    samples, ended, start = [], threading.Event(), time.monotonic()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            samples.append((time.monotonic() - start, (memory_bytes() - before) / MIB))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        memory = None
        if how == FOLDED:
            import memfold

            memory = memfold.Memory(limit=f"{max(16, size_mib // 4)}MiB")
        result = module.job(memory, size_mib * MIB)
        seconds = time.monotonic() - start
    finally:
        # Else the process would wait for the sampler when the job has failed.
        ended.set()
        sampler.join()
    return {
        "result": result,
        "seconds": seconds,
        "samples": samples,
        "mib": max((mib for _, mib in samples), default=0),
        # All that left memory for the compressed pool, from the beginning to the end.
        "folded_bytes": memory.all_stats()["zswpout"] * PAGE_BYTES if memory else 0,
    }


def in_child(job: str, how: str, size_mib: int) -> dict:
    command = [sys.executable, __file__, job, "--size", str(size_mib), "--child", how]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"{job}, {how}: failed, as said above")
    return json.loads(done.stdout)


def plot(path: str, job: str, runs: dict[str, dict]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 2.6))
    for how, run in runs.items():
        axes.plot(*zip(*run["samples"]), label=how)
    axes.set(xlabel="seconds", ylabel="MiB in memory", title=job, ylim=(0, None), xlim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", choices=[*JOBS, []], help="which jobs")
    parser.add_argument("--size", type=int, default=256, help="MiB of data, about")
    parser.add_argument("--plot", metavar="FILE", help="SVG of memory over time; of several jobs {} stands for the name")
    parser.add_argument("--json", metavar="FILE", help="both runs of each job, with samples of memory over time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size < 16:
        parser.error("--size: give at least 16 (MiB)")
    if options.child:
        json.dump(measured(options.jobs[0], options.child, options.size), sys.stdout)
        return
    failed, every = False, {}
    for job in options.jobs or JOBS:
        runs = {how: in_child(job, how, options.size) for how in (PLAIN, FOLDED)}
        every[job] = runs
        plain, folded = runs[PLAIN], runs[FOLDED]
        same = plain["result"] == folded["result"]
        failed |= not same
        print(
            f"{job:11} {plain['mib']:6.0f} MiB in {plain['seconds']:5.2f} s plain, "
            f"{folded['mib']:6.0f} MiB in {folded['seconds']:5.2f} s folded ({folded['folded_bytes'] / MIB:.0f} MiB went out): "
            f"{'same result' if same else 'OTHER RESULT'}"
        )
        if options.plot:
            plot(options.plot.replace("{}", job), job, runs)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(every, file)
    sys.exit(failed)


if __name__ == "__main__":
    main()
