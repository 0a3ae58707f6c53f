# Child processes of a folded interpreter: spawned and forked workers, and other programs.
import hashlib
import multiprocessing
import os
import subprocess
import sys


def pages(seed):
    return [hashlib.sha256(f"{seed} {i}".encode()).digest() * 128 for i in range(15_000)]


def digest(blocks):
    total = hashlib.sha256()
    for block in blocks:
        total.update(block)
    return total.hexdigest()


def work(seed):
    return digest(pages(seed))


if __name__ == "__main__":
    own = pages(0)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(work, [1, 2]))
    print(digest(own))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(work, [3, 4]))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if digest(own) == work(0) else 1)
    print(os.waitpid(pid, 0)[1], digest(own))
    for i in range(3):
        done = subprocess.run([sys.executable, "-c", f"print({i} + 40)"], capture_output=True, check=True)
        print(done.stdout, subprocess.run(["sh", "-c", f"exit {i}"]).returncode, digest(own))
