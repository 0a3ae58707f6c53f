"""Draws docs/gallery/memory.svg: the memory of a job over time, plainly and under memfold run, with the line of a container's limit.

python docs/gallery/memory.py [--size MIB] [--limit MIB] [--memfold PATH] [--output FILE]

The job is that of `make demo`: an SQLite database in memory, filled with a web shop's log, read, searched, indexed and updated. Both runs are
real, one after the other. Memory is what the limit counts: private memory of the job, compressed or not, sampled 20 times a
second. Neither run is in a container: the second gets the limit that `memfold run` chooses there, seven eighths.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = Path(__file__).with_name("memory.svg")
SAMPLE_S = 0.05
POINTS = 200
# The container's limit, as a part of the memory that the job takes, and the limit that memfold run chooses in such a container.
SHARE = 0.45
DEFAULT_LIMIT = 7 / 8
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 76, 18, 34, 42
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .axis { stroke: #d0d7de; stroke-width: 1 }
  .plain { stroke: #cf222e; fill: none; stroke-width: 2.5 }
  .folded { stroke: #0969da; fill: none; stroke-width: 2.5 }
  .limit { stroke: #24292f; stroke-width: 1.5; stroke-dasharray: 6 4 }
  text.plain { fill: #cf222e; stroke: none } text.folded { fill: #0969da; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .axis { stroke: #3d444d } .limit { stroke: #e6edf3 }
    .plain { stroke: #ff7b72 } .folded { stroke: #58a6ff } text.plain { fill: #ff7b72 } text.folded { fill: #58a6ff }
  }
"""


def memory_mib(pid: int) -> float:
    """Returns the private memory of the job: of this process, or of what `memfold run` has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    status = Path(f"/proc/{children[0] if children else pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")) / 1024


def run(command: list[str]) -> tuple[list[tuple[float, float]], str]:
    """Runs a command. Returns its memory over time, in seconds and MiB, and the digest of its results."""
    samples, start = [], time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None:
            try:
                samples.append((time.monotonic() - start, memory_mib(child.pid)))
            except (FileNotFoundError, ProcessLookupError, StopIteration):
                pass
            time.sleep(SAMPLE_S)
        output = child.stdout.read()
    if child.returncode != 0:
        sys.exit(f"status {child.returncode}: {' '.join(command)}")
    return samples, json.loads(output)["digest"]


def thinned(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most POINTS samples: of each interval the one with the most memory."""
    step = max(1, -(-len(samples) // POINTS))
    return [max(samples[at : at + step], key=lambda one: one[1]) for at in range(0, len(samples), step)]


def picture(plain, folded, limit_mib: int) -> str:
    seconds = max(plain[-1][0], folded[-1][0]) * 1.02
    most = max(mib for _, mib in plain + folded) * 1.08
    x = lambda at: LEFT + at / seconds * (WIDTH - LEFT - RIGHT)
    y = lambda mib: HEIGHT - BOTTOM - mib / most * (HEIGHT - TOP - BOTTOM)
    line = lambda samples: " ".join(f"{x(at):.1f},{y(mib):.1f}" for at, mib in samples)
    parts = [f'<style>{STYLE}</style>']
    for mib in range(0, int(most) + 1, 256):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mib):.1f}" y2="{y(mib):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(mib) + 4:.1f}" text-anchor="end">{mib} MiB</text>')
    step = 5 if seconds < 45 else 10
    for at in range(0, int(seconds) + 1, step):
        parts.append(f'<text x="{x(at):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{at} s</text>')
    parts.append(f'<polyline class="plain" points="{line(plain)}"/>')
    parts.append(f'<polyline class="folded" points="{line(folded)}"/>')
    parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(limit_mib):.1f}" y2="{y(limit_mib):.1f}"/>')
    end = plain[-1][0]
    parts.append(f'<text class="plain" x="{x(end):.1f}" y="{y(max(m for _, m in plain)) + 54:.1f}" text-anchor="end">without memfold, without a limit: done after {end:.0f} s</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{y(limit_mib) - 8:.1f}" text-anchor="end">limit of the container: {limit_mib} MiB</text>')
    parts.append(f'<text class="folded" x="{WIDTH - RIGHT}" y="{y(limit_mib) + 34:.1f}" text-anchor="end">memfold run: the same result after {folded[-1][0]:.0f} s</text>')
    parts.append(f'<text x="{LEFT}" y="18">Memory of one SQLite job over time</text>')
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">\n{body}\n</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="MiB of data, about")
    parser.add_argument("--limit", type=int, help="MiB of the container; 45%% of the plain run by default")
    parser.add_argument("--memfold", default=str(ROOT / "target/release/memfold"))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    job = [sys.executable, str(ROOT / "demo/job.py"), str(options.size)]
    plain, digest = run(job)
    limit_mib = options.limit or round(max(mib for _, mib in plain) * SHARE)
    folded, other = run([options.memfold, "run", "--limit", f"{int(limit_mib * DEFAULT_LIMIT)}M", "--", *job])
    if digest != other:
        sys.exit("the two runs have different results")
    options.output.write_text(picture(thinned(plain), thinned(folded), limit_mib))
    for name, samples in (("plain", plain), ("memfold", folded)):
        print(f"{name:8} {max(mib for _, mib in samples):6.0f} MiB at most, {samples[-1][0]:5.1f} s")
    print(f"limit {limit_mib} MiB, same result; wrote {options.output}")


if __name__ == "__main__":
    main()
