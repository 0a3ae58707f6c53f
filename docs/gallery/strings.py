"""A data frame of strings: pyarrow's columns, in folded memory, which pandas works on where they lie."""

import numpy as np


def table(count, pa):
    numbers = np.arange(count)
    words = np.array(["north", "south", "east", "west"])[numbers % 4]
    return pa.table(
        {
            "url": pa.array([f"https://example.org/{word}/item-{n // 3:08d}?page={n % 7}" for n, word in zip(numbers, words)]),
            "agent": pa.array([f"Browser/{n % 50}.0 (System {n % 11}; like Other)" for n in numbers]),
        }
    )


def job(memory, nbytes):
    import pandas as pd
    import pyarrow as pa

    parts = []
    for _ in range(max(1, nbytes // (16 << 20))):
        part = table(160_000, pa)
        # Each part is written to folded memory; the ordinary one goes.
        parts.append(memory.arrow(part) if memory else part)
    frame = pd.DataFrame({name: pd.arrays.ArrowExtensionArray(pa.concat_tables(parts)[name]) for name in ("url", "agent")})
    pages = frame["url"].str.endswith("page=3").sum()
    south = frame.loc[frame["url"].str.contains("/south/"), "agent"].value_counts().sort_index()
    longest = int(frame["url"].str.len().max())
    return [int(pages), south.head(5).to_dict(), longest]
