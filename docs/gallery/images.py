"""A stack of camera images: background, brightest pixels, and how each frame differs from the mean."""

import numpy as np


def frames(count, height, width):
    """Sixteen-bit images of slow waves with a little noise, one by one."""
    rng = np.random.default_rng(7)
    y, x = np.mgrid[:height, :width]
    noise = rng.integers(0, 4, (height, width))
    for n in range(count):
        wave = 1000 + 50 * np.sin(x / 97 + n / 5) + 50 * np.cos(y / 71 - n / 9)
        yield (wave.astype("uint16") // 8 * 8 + np.roll(noise, n)).astype("uint16")


def job(memory, nbytes):
    height = width = 512
    count = max(2, nbytes // (2 * height * width))
    make = memory.empty if memory else np.empty
    stack = make((count, height, width), "uint16")
    for n, frame in enumerate(frames(count, height, width)):
        stack[n] = frame
    background = stack.min(axis=0)
    brightest = stack.max(axis=0)
    mean = stack.mean(axis=0)
    odd = [float(np.abs(frame - mean).max()) for frame in stack]
    crop = stack[::3, 100:200, 100:200].sum()
    return [int(background.sum()), int(brightest.sum()), round(max(odd), 6), int(crop)]
