"""Heat on a plate. Every state is kept, so that the run can go back to any of them; one is saved to a file and gone on with."""

import os
import tempfile

import numpy as np


def step(state, out):
    out[...] = state
    out[1:-1, 1:-1] += 0.2 * (
        state[:-2, 1:-1] + state[2:, 1:-1] + state[1:-1, :-2] + state[1:-1, 2:] - 4 * state[1:-1, 1:-1]
    )
    out[0, :], out[-1, :] = 100, 0


def job(memory, nbytes):
    side = 512
    steps = max(8, nbytes // (4 * side * side))
    make = memory.zeros if memory else np.zeros
    states = make((steps, side, side), "float32")
    for n in range(1, steps):
        step(states[n - 1], states[n])
    # Back to an early state, from a file, and forward again by another way.
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "state.npy")
        np.save(path, states[steps // 2])
        state = np.load(path)
    for n in range(steps // 2 + 1, steps):
        state, before = np.empty_like(state), state
        step(before, state)
    assert (state == states[-1]).all()
    front = (states > 1).sum(axis=(1, 2))  # how far the heat has come, over all states
    return [int(front[-1]), int(front.sum()), round(float(states[-1].sum(dtype="float64")), 3)]
