"""Fills a memcached from several threads, replaces random values, and reads every value back."""
import random
import socket
import sys
import threading

PATH, KEYS = sys.argv[1], 50_000


def value(key, version):
    word = b"%d of key %d " % (version, key)
    return (word * (1000 // len(word) + 1))[:1000]


def connect():
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(30)
    stream.connect(PATH)
    return stream


def store(stream, wanted):
    wanted = list(wanted)
    for at in range(0, len(wanted), 20):
        part = wanted[at:at + 20]
        stream.sendall(b"".join(b"set %d 0 0 1000\r\n%s\r\n" % (key, value(key, version)) for key, version in part))
        answers = b""
        while len(answers) < 8 * len(part):
            answers += stream.recv(4096)
        assert answers == b"STORED\r\n" * len(part), answers


def worker(number):
    stream, mine = connect(), range(number, KEYS, 4)
    store(stream, ((key, 1) for key in mine))
    changed = random.Random(number).sample(mine, 3000)
    store(stream, ((key, 2) for key in changed))
    versions = dict.fromkeys(mine, 1) | dict.fromkeys(changed, 2)
    reader = stream.makefile("rb")
    for key, version in versions.items():
        stream.sendall(b"get %d\r\n" % key)
        assert reader.readline() == b"VALUE %d 0 1000\r\n" % key, key
        assert reader.read(1002) == value(key, version) + b"\r\n" and reader.readline() == b"END\r\n", key
    right.append(number)


right = []
threads = [threading.Thread(target=worker, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("right" if len(right) == 4 else "wrong")
