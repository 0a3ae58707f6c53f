"""Orders joined with customers, and sums by region and month, in pandas."""

import contextlib

import numpy as np


def job(memory, nbytes):
    import pandas as pd

    import memfold

    # Whatever pandas does inside: the columns, and what it makes on the way.
    folding = memfold.numpy_allocator(memory) if memory else contextlib.nullcontext()
    with folding:
        rng = np.random.default_rng(5)
        count = nbytes // 64
        customers = pd.DataFrame({"customer": np.arange(count // 20), "region": rng.integers(0, 12, count // 20)})
        orders = pd.DataFrame(
            {
                "customer": rng.integers(0, count // 20, count),
                "month": np.arange(count) * 12 // count,
                "cents": rng.integers(100, 10_000, count),
            }
        )
        joined = orders.merge(customers, on="customer", how="left")
        sums = joined.groupby(["region", "month"])["cents"].agg(["sum", "count", "max"]).reset_index()
        late = joined[joined["month"] == 11].sort_values("cents", kind="stable")
        return [sums.to_numpy().tolist(), late["customer"].iloc[-20:].tolist()]
