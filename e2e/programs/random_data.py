"""Random, incompressible bytes, several times the limit: filled, read, changed, read backwards."""
import hashlib
import random
import sys
import time

mib, after = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "end"
source = random.Random(1)
chunks, sums = [], []


def digest(chunk):
    return hashlib.blake2b(chunk, digest_size=16).digest()


for _ in range(mib):
    chunk = bytearray(source.randbytes(1 << 20))
    chunks.append(chunk)
    sums.append(digest(chunk))
for i in range(mib):
    assert digest(chunks[i]) == sums[i], f"chunk {i}"
for i in range(0, mib, 7):
    chunks[i][5000:5100] = bytes(100)
    sums[i] = digest(chunks[i])
for i in reversed(range(mib)):
    assert digest(chunks[i]) == sums[i], f"chunk {i}, backwards"
print("right", flush=True)
if after == "wait":
    time.sleep(600)
