#!/usr/bin/env python3
"""Makes program_pages.zst: pages of the heaps of eight programs that hold data made up here.

Each program makes its data, prints READY and waits. Twelve aligned blocks of four present pages of its
anonymous memory are copied, the same ones for the same layout. Needs php, perl, luajit, node, java,
redis-server, and zstd, and the right to read the programs' memory (as root, or as their parent).
"""
import os, random, shutil, subprocess, sys, tempfile

PAGE, BLOCK_PAGES, BLOCKS = 4096, 4, 12

PROGRAMS = {
    "php": ["php", "-d", "memory_limit=-1", "-r", """
        mt_srand(1); $rows = [];
        for ($i = 0; $i < 60000; $i++)
            $rows[] = ['id' => $i, 'key' => mt_rand(), 'name' => 'row ' . mt_rand(), 'price' => mt_rand() / 1000.0, 'tags' => [$i % 7, $i % 11]];
        usort($rows, fn($a, $b) => $a['key'] <=> $b['key']);
        echo "READY\\n"; sleep(60);"""],
    "perl": ["perl", "-e", """
        srand 1; $| = 1; my %rows;
        $rows{"key$_"} = {id => $_, value => rand(), name => "string $_", at => [map {int rand 1000} 1..4]} for 1..40000;
        print "READY\\n"; sleep 60;"""],
    "luajit": ["luajit", "-e", """
        math.randomseed(1); local rows, by_name = {}, {}
        for i = 1, 100000 do
            local row = {id = i, name = 'row ' .. i, x = math.random(), y = math.random(1000), link = rows[math.random(1, i)]}
            rows[i], by_name[row.name] = row, row
        end
        print('READY') io.stdout:flush() io.read()"""],
    "python": [sys.executable, "-c", """
import random, time
random.seed(1)
class Row:
    def __init__(self, number):
        self.number, self.name, self.value, self.tags = number, f'row {number}', random.random(), [number % 7, number % 11]
rows = [Row(number) for number in range(60000)]
by_name = {row.name: row for row in rows}
pairs = sorted((row.value, row.number) for row in rows)
print('READY', flush=True); time.sleep(60)"""],
    "node": ["node", "-e", """
        const rows = [], byName = new Map(); let seed = 1;
        const next = () => seed = seed * 1103515245 % 2147483648;
        for (let i = 0; i < 120000; i++) {
            const row = {id: i, name: 'row ' + i, value: next() / 7, tags: [i % 7, i % 11], next: rows[next() % (i + 1)]};
            rows.push(row); byName.set(row.name, row);
        }
        console.log('READY'); setTimeout(() => console.log(rows.length + byName.size), 60000)"""],
    "java": ["java", "-Xmx300m", "Rows.java"],
    "sqlite": [sys.executable, "-c", """
import random, sqlite3, time
random.seed(1)
base = sqlite3.connect(':memory:')
base.execute('create table rows(id integer primary key, name text, number int, value real)')
words = 'the quick brown fox jumps over a lazy dog and runs away from it again'.split()
text = lambda number: ' '.join(random.choices(words, k=6)) + f' {number}'
base.executemany('insert into rows(name, number, value) values(?, ?, ?)',
                 ((text(n), random.randrange(10**6), random.random()) for n in range(120000)))
base.execute('create index names on rows(name)')
print('READY', flush=True); time.sleep(60)"""],
    "redis": ["sh", "-c", """
        redis-server --port 7399 --save '' --appendonly no >/dev/null & server=$!
        trap 'kill $server; exit' TERM; sleep 1
        i=0; while [ $i -lt 60000 ]; do i=$((i + 1))
            echo "set key:$i value-$i-$((i * 7919 % 100003))"; echo "hset hash:$((i / 20)) field:$i $((i * 31 % 1009))"
        done | redis-cli -p 7399 --pipe >/dev/null; echo READY; wait"""],
}

JAVA = """
import java.util.*;
public class Rows {
    static class Row { String name; int id; double value; long when; Row next; List<Integer> at = new ArrayList<>(); }
    public static void main(String[] arguments) throws Exception {
        Random random = new Random(1); List<Row> rows = new ArrayList<>(); Map<String, Row> byName = new HashMap<>();
        for (int i = 0; i < 150000; i++) {
            Row row = new Row(); row.name = "row " + i; row.id = i; row.value = random.nextDouble(); row.when = 77L * i;
            row.next = rows.isEmpty() ? null : rows.get(random.nextInt(rows.size())); row.at.add(i % 11);
            rows.add(row); byName.put(row.name, row);
        }
        System.out.println("READY"); Thread.sleep(60000); System.out.println(rows.size() + byName.size());
    }
}
"""


def target_of(pid, name):
    """Returns the process to read: the server behind the shell, or the program itself."""
    if name != "redis":
        return pid
    children = subprocess.run(["pgrep", "-P", str(pid), "redis-server"], capture_output=True, text=True)
    return int(children.stdout.split()[0])


def blocks_of(pid):
    """Returns the addresses of aligned blocks that are present in private anonymous memory."""
    found = []
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for line in open(f"/proc/{pid}/maps"):
            fields = line.split(None, 5)
            start, end = (int(part, 16) for part in fields[0].split("-"))
            name = fields[5].strip() if len(fields) > 5 else ""
            if fields[1] != "rw-p" or fields[4] != "0" or name.startswith(("[stack", "[v", "/")) or end - start < 1 << 16:
                continue
            pagemap.seek(start // PAGE * 8)
            entries = pagemap.read((end - start) // PAGE * 8)
            block = PAGE * BLOCK_PAGES
            for at in range(-(-start // block) * block, end - block + 1, block):
                first = (at - start) // PAGE
                if all(entries[8 * page + 7] & 0x80 for page in range(first, first + BLOCK_PAGES)):
                    found.append(at)
    return found


def pages_of(name, command, folder):
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, text=True)
    try:
        while "READY" not in program.stdout.readline():
            if program.poll() is not None:
                sys.exit(f"{name} has ended")
        pid = target_of(program.pid, name)
        addresses = blocks_of(pid)
        random.Random(1).shuffle(addresses)
        chosen = bytearray()
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for address in addresses:
                memory.seek(address)
                block = memory.read(PAGE * BLOCK_PAGES)
                # A page of one word is found by the store itself.
                pages = [block[at:at + PAGE] for at in range(0, len(block), PAGE)]
                if all(page != page[:8] * (PAGE // 8) for page in pages) and len(chosen) < BLOCKS * len(block):
                    chosen += block
        return bytes(chosen)
    finally:
        program.terminate()
        program.wait()


def main():
    output = os.path.join(os.path.dirname(os.path.abspath(__file__)), "program_pages")
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "Rows.java"), "w") as java:
        java.write(JAVA)
    try:
        with open(output, "wb") as pages:
            for name, command in PROGRAMS.items():
                pages.write(pages_of(name, command, folder))
        subprocess.run(["zstd", "-q", "-f", "--rm", "-19", output, "-o", output + ".zst"], check=True)
    finally:
        shutil.rmtree(folder)


main()
