"""Fills, sorts and multiplies arrays, and changes them in place."""
import hashlib
import numpy

random = numpy.random.default_rng(3)
counts = random.integers(0, 1000, 4_000_000)
prices = numpy.cumsum(random.integers(-5, 6, 2_000_000)) / 4
counts[::3] += 7
matrix = (counts[:640_000] % 50).reshape(800, 800)
product = matrix @ matrix.T
counts.sort()
print(product.trace(), prices.sum(), counts[::100_000].tolist())
print(hashlib.sha256(counts.tobytes() + prices.tobytes()).hexdigest())
