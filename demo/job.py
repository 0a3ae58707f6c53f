#!/usr/bin/env python3
"""A real job for real memory: the log of a web shop in an SQLite database in memory, searched, updated, read back.

Nothing here knows of memfold. The records are structured logs as log shippers write them, with messages and
tracebacks drawn from Python's own library sources. The seed is fixed, so two runs on one machine do the same work
and must print the same digest; the digest covers every row and every result.

    job.py [SIZE_MIB]      prints one JSON object: digest, seconds of each step, peak resident memory
"""

import argparse
import hashlib
import json
import random
import signal
import sqlite3
import sys
import sysconfig
import time
import zlib
from pathlib import Path

SEED = 20261121
ROWS_PER_MIB = 512  # makes the peak of resident memory about SIZE_MIB (and some 40 MiB for Python at small sizes)
TEXT_BYTES_MAX = 12 << 20
LOOKUPS_PER_MIB = 40
PODS = 48
SERVICES = ["checkout", "catalogue", "payment", "search", "stock", "shipping", "accounts", "reviews"]
AGENTS = [
    "Mozilla/5.0 (X11; Linux x86_64; rv:125.0) Gecko/20100101 Firefox/125.0",
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/124.0 Safari/537.36",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 17_4 like Mac OS X) AppleWebKit/605.1.15 Version/17.4 Mobile/15E148",
    "okhttp/4.12.0",
]
SEARCHED = ["%memoryview%", "%items/4242_,%", "%lambda%"]


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, also inside a long query
    arguments = argparse.ArgumentParser(description="fill, search and update an in-memory SQLite database")
    arguments.add_argument("size_mib", nargs="?", type=int, default=1024, metavar="SIZE_MIB")
    size_mib = arguments.parse_args().size_mib
    if size_mib < 1:
        arguments.error("SIZE_MIB must be at least 1")
    print(json.dumps(run(size_mib)), flush=True)


def run(size_mib):
    """Does the whole job and returns its report."""
    rows = size_mib * ROWS_PER_MIB
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.execute("PRAGMA temp_store = MEMORY")
    report = Report()
    with report.step("collect text"):
        lines = library_lines()
    with report.step("fill", rows) as progress:
        fill(database, lines, rows, progress)
    del lines
    with report.step("index"):
        index(database)
    with report.step("read all", rows) as progress:
        report.result("rows", read_all(database, progress))
    with report.step("search", len(SEARCHED)) as progress:
        report.result("search", search(database, progress))
    with report.step("aggregate"):
        report.result("aggregate", aggregate(database))
    with report.step("look up", size_mib * LOOKUPS_PER_MIB) as progress:
        report.result("look up", look_up(database, rows, size_mib * LOOKUPS_PER_MIB, progress))
    with report.step("update"):
        report.result("update", update(database))
    with report.step("read again", rows) as progress:
        report.result("rows after update", read_all(database, progress))
    return report.finish(size_mib, rows)


def library_lines():
    """Returns lines of Python's library, each with its file and number, for tracebacks and log messages."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "encodings", "__pycache__"}
    lines, total = [], 0
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if skipped.isdisjoint(name.parts):
            text = path.read_text("ascii", errors="ignore")
            numbered = enumerate(text.split("\n"), 1)
            lines += [(str(name), number, line.strip()) for number, line in numbered if len(line.strip()) > 20]
            total += len(text)
            if total >= TEXT_BYTES_MAX:
                break
    return lines


def fill(database, lines, rows, progress):
    database.executescript(
        """
        CREATE TABLE pod (id INTEGER PRIMARY KEY, service TEXT NOT NULL, name TEXT NOT NULL, node TEXT NOT NULL);
        CREATE TABLE event (
            id INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, pod INTEGER NOT NULL, request TEXT NOT NULL,
            level TEXT NOT NULL, status INTEGER NOT NULL, seconds REAL NOT NULL, message TEXT NOT NULL,
            detail TEXT NOT NULL);
        """
    )
    chance = random.Random(SEED)
    pods = make_pods(chance)
    database.execute("BEGIN")
    database.executemany("INSERT INTO pod VALUES (?, ?, ?, ?)", (pod[:4] for pod in pods))
    events = make_events(chance, pods, lines, rows, progress)
    database.executemany("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", events)
    database.execute("COMMIT")


def make_pods(chance):
    """Returns the machines of a fictional shop: number, service, name, node, and the constant part of its log records."""
    pods = []
    for number in range(PODS):
        service = SERVICES[number % len(SERVICES)]
        template = f"{zlib.crc32(service.encode()):08x}"
        name = f"{service}-{template}-{chance.getrandbits(20):05x}"
        node = f"ip-10-0-{number % 7}-{chance.randrange(256)}.eu-central-1.compute.internal"
        labels = {"app": service, "pod-template-hash": template, "tier": "backend", "team": service[:3]}
        origin = {
            "service": {"name": service, "version": f"4.{number % 3}.{len(service)}", "environment": "production"},
            "kubernetes": {"namespace": "shop", "pod": {"name": name}, "node": {"name": node}, "labels": labels},
            "agent": {"type": "filebeat", "version": "8.13.2", "id": f"{chance.getrandbits(64):016x}"},
            "ecs": {"version": "8.11.0"},
        }
        pods.append((number, service, name, node, json.dumps(origin)[1:-1]))
    return pods


def make_events(chance, pods, lines, rows, progress):
    """Yields log records in order of time, several for each request; sometimes an incident with its tracebacks."""
    uniform = chance.random
    templates = [chance.choice(lines)[2][:80] for _ in range(600)]
    traces = [traceback(chance, lines) for _ in range(200)]
    at_ms, left, request, agent, client, pod, trace = 1_772_000_000_000, 0, "", "", "", pods[0], traces[0]
    for number in range(rows):
        if not left:
            left = 1 + int(uniform() * 6)
            request, agent = f"{chance.getrandbits(64):016x}", AGENTS[int(uniform() ** 2 * len(AGENTS))]
            client = f"{int(uniform() * 90) + 10}.{int(uniform() * 256)}.{int(uniform() * 256)}.7"
            pod = pods[int(uniform() ** 1.5 * PODS)]
        left -= 1
        if number % 5000 == 0:
            trace = traces[int(uniform() * len(traces))]
        failed = number % 5000 < 400 and uniform() < 0.4
        at_ms += int(uniform() * 20)
        seconds, status = round(0.002 + uniform() ** 8 * 3, 4), 500 if failed else 200 if uniform() < 0.95 else 404
        template = int(uniform() ** 3 * 600)
        message = f"{templates[template]} order={int(uniform() * 1e6)}"
        error = f', "error": {{"type": "InternalError", "stack_trace": {trace}}}' if failed else ""
        path = f"/api/v2/{pod[1]}/{template}/items/{int(uniform() * 1e5)}"
        yield number, at_ms, pod[0], request, "ERROR" if failed else "INFO", status, seconds, message, (
            f'{{"@timestamp": {at_ms}, "log": {{"logger": "shop.{pod[1]}.api.handlers", "sequence": {number}}}, '
            f'{pod[4]}, "http": {{"version": "1.1", "request": {{"method": "GET", "id": "{request}", '
            f'"headers": {{"accept": "application/json", "accept-encoding": "gzip, deflate, br"}}}}, '
            f'"response": {{"status_code": {status}, "bytes": {int(1e5 * uniform() ** 3)}, '
            f'"mime_type": "application/json"}}}}, "url": {{"domain": "shop.example.org", "path": "{path}"}}, '
            f'"client": {{"ip": "{client}"}}, "user_agent": "{agent}", "event": {{"duration": {seconds}}}{error}}}'
        )
        if number % 4096 == 0:
            progress(number)


def traceback(chance, lines):
    """Returns a traceback through real lines of the library, as a JSON string."""
    frames = (chance.choice(lines) for _ in range(4 + chance.randrange(12)))
    text = "".join(f'  File "/usr/lib/python3/{name}", line {number}\n    {line}\n' for name, number, line in frames)
    return json.dumps("Traceback (most recent call last):\n" + text)


def index(database):
    database.execute("CREATE INDEX event_request ON event (request)")
    database.execute("CREATE INDEX event_status ON event (status, seconds)")


def read_all(database, progress):
    """Returns one SHA-256 of every byte of every row, in order."""
    digest = hashlib.sha256()
    for row in database.execute("SELECT * FROM event ORDER BY id"):
        digest.update(repr(row).encode())
        if row[0] % 4096 == 0:
            progress(row[0])
    return digest.hexdigest()


def search(database, progress):
    found = []
    for number, pattern in enumerate(SEARCHED):
        query = "SELECT count(*), sum(id), max(length(detail)) FROM event WHERE message LIKE ? OR detail LIKE ?"
        found.append(database.execute(query, (pattern, pattern)).fetchone())
        progress(number + 1)
    return found


def aggregate(database):
    by_service = database.execute(
        """WITH figure AS MATERIALIZED (
            SELECT pod, level, seconds, json_extract(detail, '$.http.response.bytes') AS bytes FROM event)
        SELECT service, level, count(*), round(avg(seconds), 6), sum(bytes)
        FROM figure JOIN pod ON pod.id = figure.pod GROUP BY service, level ORDER BY service, level"""
    ).fetchall()
    slowest = database.execute(
        """SELECT pod.name, count(*), max(seconds), min(message) FROM event JOIN pod ON pod.id = event.pod
        WHERE status = 200 AND seconds > 2 GROUP BY pod.id ORDER BY count(*) DESC, pod.id LIMIT 100"""
    ).fetchall()
    return [by_service, slowest]


def look_up(database, rows, lookups, progress):
    """Looks up single requests by number, through the index: half of them anywhere, half among the newest tenth."""
    chance, digest = random.Random(SEED + 1), hashlib.sha256()
    for number in range(lookups):
        wanted = int(chance.random() * rows) if number % 2 else rows - 1 - int(chance.random() * rows / 10)
        (request,) = database.execute("SELECT request FROM event WHERE id = ?", (wanted,)).fetchone()
        events = database.execute("SELECT * FROM event WHERE request = ? ORDER BY id", (request,)).fetchall()
        digest.update(repr(events).encode())
        if number % 512 == 0:
            progress(number)
    return digest.hexdigest()


def update(database):
    """Rewrites every fifth run of rows, gives some rows longer records, and deletes one kind in some."""
    return [
        database.execute(statement).rowcount
        for statement in (
            "UPDATE event SET seconds = round(seconds * 1000, 1), level = lower(level) WHERE id / 500 % 5 = 0",
            "UPDATE event SET detail = json_set(detail, '$.reviewed', message) WHERE id % 97 = 0",
            "DELETE FROM event WHERE status = 404 AND id / 500 % 5 = 1",
        )
    ]


class Report:
    """Times the steps, shows them on stderr, and collects the results."""

    def __init__(self):
        self.steps = {}
        self.results = []

    def step(self, name, total=0):
        return Step(self.steps, name, total)

    def result(self, name, value):
        self.results.append([name, value])

    def finish(self, size_mib, rows):
        return {
            "digest": hashlib.sha256(json.dumps(self.results).encode()).hexdigest(),
            "size_mib": size_mib,
            "rows": rows,
            "seconds": round(sum(self.steps.values()), 3),
            "steps": self.steps,
            "peak_bytes": peak_bytes(),
        }


class Step:
    """One timed step; called with a count, it moves the bar (on a terminal only)."""

    WIDTH = 30

    def __init__(self, steps, name, total):
        self.steps, self.name, self.total = steps, name, total
        self.terminal = sys.stderr.isatty()

    def __enter__(self):
        self.start = time.monotonic()
        self.shown = 0.0
        self(0)
        return self

    def __call__(self, done):
        now = time.monotonic()
        if self.terminal and now - self.shown > 0.1:
            self.shown = now
            filled = min(self.WIDTH, self.WIDTH * done // self.total) if self.total else 0
            bar = "#" * filled + "." * (self.WIDTH - filled)
            print(f"\r  {self.name:<14}[{bar}] {now - self.start:6.1f} s ", end="", file=sys.stderr, flush=True)

    def __exit__(self, kind, value, trace):
        seconds = time.monotonic() - self.start
        self.steps[self.name] = round(seconds, 3)
        if kind is None:
            before, bar = ("\r", f"[{'#' * self.WIDTH}] ") if self.terminal else ("", "")
            print(f"{before}  {self.name:<14}{bar}{seconds:6.1f} s ", file=sys.stderr, flush=True)


def peak_bytes():
    """Returns the peak of this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
