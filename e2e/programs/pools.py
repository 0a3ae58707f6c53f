"""Tasks, threads and processes make blocks, pass them on, keep them, and verify them, all at once."""
import asyncio
import concurrent.futures
import hashlib
import random
import zlib

BLOCKS, BYTES = 80, 1 << 20


def make(number):
    words = random.Random(number)
    return bytearray(b"".join(b"%08x %d\n" % (words.getrandbits(20), n) for n in range(BYTES // 14)))


def digest(block):
    return hashlib.sha256(zlib.compress(block, 1)).hexdigest()


def elsewhere(number):
    return digest(make(number))


async def produce(queue, numbers, loop, threads):
    for number in numbers:
        await queue.put((number, await loop.run_in_executor(threads, make, number)))
    await queue.put(None)


async def consume(queue, blocks, producers):
    while producers:
        item = await queue.get()
        if item is None:
            producers -= 1
        else:
            blocks[item[0]] = item[1]


async def echo(reader, writer):
    writer.write(await reader.readexactly(BYTES))
    await writer.drain()
    writer.close()


async def through_a_socket(port, block):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = bytes(block[:BYTES]).ljust(BYTES)
    writer.write(sent)
    await writer.drain()
    back = await reader.read()
    writer.close()
    return sent == back


async def main():
    loop, blocks, queue = asyncio.get_running_loop(), {}, asyncio.Queue(4)
    with concurrent.futures.ThreadPoolExecutor(4) as threads, concurrent.futures.ProcessPoolExecutor(2) as processes:
        others = [loop.run_in_executor(processes, elsewhere, n) for n in range(4)]
        shares = [range(start, BLOCKS, 3) for start in range(3)]
        await asyncio.gather(consume(queue, blocks, 3), *(produce(queue, s, loop, threads) for s in shares))
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        same = await asyncio.gather(*(through_a_socket(port, blocks[n]) for n in range(0, BLOCKS, 6)))
        server.close()
        digests = await asyncio.gather(*(loop.run_in_executor(threads, digest, blocks[n]) for n in range(BLOCKS)))
        print(all(same), len(digests), (await asyncio.gather(*others)) == digests[:4])
        print(hashlib.sha256("".join(digests).encode()).hexdigest())


if __name__ == "__main__":
    asyncio.run(main())
