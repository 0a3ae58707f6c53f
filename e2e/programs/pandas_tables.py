"""Groups, joins and sorts a table."""
import numpy
import pandas

random = numpy.random.default_rng(4)
n = 600_000
table = pandas.DataFrame({
    "customer": random.integers(0, 5000, n),
    "day": numpy.arange(n) * 365 // n,
    "price": random.integers(100, 100000, n) / 100,
    "name": pandas.Series(random.integers(0, 300, n)).map("product {}".format),
})
customers = pandas.DataFrame({"customer": numpy.arange(5000), "region": numpy.arange(5000) % 7})
sums = table.merge(customers, on="customer").groupby(["region", "name"])["price"].agg(["sum", "count"])
print(sums.round(2).sort_values("sum").head(5), len(sums))
print(table.sort_values(["price", "customer", "day"]).head(5))
