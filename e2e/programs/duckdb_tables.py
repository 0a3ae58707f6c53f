"""Groups, joins and sorts tables in memory with DuckDB. The argument is the directory of its package."""
import sys

sys.path.insert(0, sys.argv[1])
import duckdb  # noqa: E402

db = duckdb.connect(":memory:")
for statement in [
    "SET threads = 2",
    """CREATE TABLE t AS SELECT i, i * 7919 % 10007 AS k, 'text ' || (i * 104729 % 1000003) AS s
       FROM range(1500000) r(i)""",
    "SELECT count(*), sum(k), max(s) FROM t",
    "SELECT k, count(*), min(s), max(s) FROM t GROUP BY k ORDER BY k LIMIT 5",
    "SELECT count(*), sum(a.i + b.i) FROM t a JOIN t b ON a.i = b.k + 10 WHERE a.k < 5000",
    "SELECT md5(string_agg(s, ',')) FROM (SELECT s FROM t ORDER BY s DESC, i LIMIT 200000)",
    "UPDATE t SET s = s || ' ' || k WHERE i % 10 = 0",
    "SELECT sum(length(s)), max(s) FROM t",
]:
    print(db.execute(statement).fetchall())
