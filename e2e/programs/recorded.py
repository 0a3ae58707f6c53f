"""Loads folded memory in two functions, one of which is called by a built-in function."""
import random
import sys


def build_table(count):
    return {n: "value %d of a table " % n * 3 for n in range(count)}


class Index:
    def __init__(self, table):
        self.table = table

    def look_up(self, keys):
        return sum(map(self.length_of, keys))

    def length_of(self, key):
        return len(self.table[key])


def main(count):
    table = build_table(count)
    keys = random.Random(1)
    index = Index(table)
    print(index.look_up([keys.randrange(count) for _ in range(count // 4)]))


main(int(sys.argv[1]))
