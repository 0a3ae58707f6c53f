# A database in memory, with an index, an update and a sort.
import sqlite3

db = sqlite3.connect(":memory:")
db.execute("create table t(id integer primary key, a text, b real, c blob)")
rows = ((i, f"name {i * 7919 % 100_003}", i * 0.25, bytes([i % 251]) * 100) for i in range(200_000))
db.executemany("insert into t values (?, ?, ?, ?)", rows)
db.execute("create index by_a on t(a)")
db.execute("update t set b = b + 1, c = c || c where id % 5 = 0")
db.execute("delete from t where id % 7 = 0")
print(db.execute("select count(*), sum(b), sum(length(c)) from t").fetchone())
print(db.execute("select a, id from t order by c desc, a, id limit 5").fetchall())
print(db.execute("select count(*) from t where a between 'name 2' and 'name 3'").fetchone())
print(db.execute("pragma integrity_check").fetchone())
