"""Arrays in folded memory are numpy's own, whatever is done with them."""

import gc
import io
import os
import pickle
import socket
import sys
import threading
import types

import memfold
import numpy as np
import pytest

MIB = 1 << 20


def large(mem, dtype="int32"):
    """An array of four times the fixture's limit, that compresses well, and the same in plain memory."""
    plain = (np.arange(128 * MIB // np.dtype(dtype).itemsize) // 1000).astype(dtype)
    return mem.array(plain), plain


def test_results_are_numpy_arrays_in_folded_memory(mem):
    makers = [
        mem.empty((3, 4)),
        mem.zeros((3, 4), "int8"),
        mem.ones(5, dtype=complex),
        mem.full((2, 2), 7.5),
        mem.array([[1, 2], [3, 4]], "float32"),
        mem.arange(10),
        mem.zeros((4, 5), order="F"),
        mem.zeros(0),
        mem.zeros(()),
        mem.zeros(4, "S20"),
        mem.zeros(4, [("a", "i4"), ("b", "f8", (2,))]),
    ]
    for made in makers:
        assert type(made) is np.ndarray and made.flags.owndata and made.base is None and made.flags.writeable
        assert memfold.is_folded(made) and mem.owns(made)
    assert not memfold.is_folded(np.zeros(10)) and not mem.owns(np.zeros(10))
    assert makers[6].flags.f_contiguous


@pytest.mark.parametrize(
    ("made", "want"),
    [
        (lambda m: m.full((2, 3), 7), np.full((2, 3), 7)),
        (lambda m: m.full(3, 2.5, "float32"), np.full(3, 2.5, "float32")),
        (lambda m: m.arange(3, 20, 4), np.arange(3, 20, 4)),
        (lambda m: m.arange(1.5, dtype="float32"), np.arange(1.5, dtype="float32")),
        (lambda m: m.array(["ab", "cde"]), np.array(["ab", "cde"])),
        (lambda m: m.array(np.arange(12).reshape(3, 4)[:, ::2]), np.arange(12).reshape(3, 4)[:, ::2]),
        (lambda m: m.ones((2, 2), bool), np.ones((2, 2), bool)),
    ],
)
def test_values_and_types_are_those_of_numpy(mem, made, want):
    got = made(mem)
    assert got.dtype == want.dtype and got.shape == want.shape and (got == want).all()


def test_more_than_the_limit_is_kept_to_the_byte(mem):
    folded, plain = large(mem)
    assert (folded == plain).all()
    folded[::1000] += 1
    plain[::1000] += 1
    assert (folded == plain).all() and folded.sum() == plain.sum()
    picks = np.random.default_rng(1).integers(0, len(plain), 20_000)
    assert (folded[picks] == plain[picks]).all()
    stats = mem.stats()
    assert stats["folded_bytes"] > 90 * MIB and stats["loads"] > 0
    assert stats["physical_bytes"] <= stats["limit_bytes"]


def test_views_keep_the_memory_and_the_last_gives_it_back(mem):
    array = mem.ones((1000, 1000))
    view = array[::2, 5:100].T
    del array
    gc.collect()
    assert mem.stats()["allocated_bytes"] >= 8_000_000 and view.sum() == 500 * 95
    thread = threading.Thread(target=lambda: view.sum())
    thread.start()
    thread.join()
    holder = [view]
    del view
    # From a thread that did not make it.
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert mem.stats()["allocated_bytes"] == 0


def test_arrays_outlive_the_memory_object():
    mem = memfold.Memory(limit="16MiB")
    array = mem.arange(1_000_000)
    mem.close()
    del mem
    gc.collect()
    assert array.sum() == 499_999_500_000 and memfold.is_folded(array)


def test_threads_work_on_it_at_once(mem):
    folded, plain = large(mem)
    results = {}

    def work(part):
        mine = slice(part, None, 4)
        folded[mine] *= 3
        results[part] = int(folded[mine].sum())

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {part: int(plain[part::4].sum()) * 3 for part in range(4)}


def test_files_take_folded_arrays(mem, tmp_path):
    folded, plain = large(mem)
    mem.fold(folded)
    folded.tofile(tmp_path / "raw")
    assert (np.fromfile(tmp_path / "raw", plain.dtype) == plain).all()
    mem.fold(folded)
    np.save(tmp_path / "a.npy", folded)
    assert (np.load(tmp_path / "a.npy") == plain).all()
    # Into folded memory: the kernel writes where nothing is.
    into = mem.zeros(len(plain), plain.dtype)
    mem.fold(into)
    with open(tmp_path / "raw", "rb", buffering=0) as file:
        done = 0
        while done < into.nbytes:
            done += file.readinto(memoryview(into).cast("B")[done:])
    assert (into == plain).all()


def test_sockets_take_folded_arrays(mem):
    plain = (np.arange(4 * MIB) // 7).astype("int16")
    folded, into = mem.array(plain), mem.zeros(len(plain), "int16")
    mem.fold(folded)
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=left.sendall, args=(folded,))
        sender.start()
        view = memoryview(into).cast("B")
        while len(view):
            view = view[right.recv_into(view) :]
        sender.join()
    assert (into == plain).all()


def test_pickling_copies(mem):
    folded = mem.arange(100_000)
    mem.fold(folded)
    for protocol in (2, 5):
        again = pickle.loads(pickle.dumps(folded, protocol))
        assert (again == folded).all() and not memfold.is_folded(again)
    buffers = []
    outside = pickle.dumps(folded, 5, buffer_callback=buffers.append)
    assert memfold.is_folded(pickle.loads(outside, buffers=buffers)), "out of band it is the same memory"


def test_dlpack_and_the_buffer_protocol_share_the_memory(mem):
    folded = mem.arange(1000)
    # In numpy 1.22 it was a trial yet.
    from_dlpack = getattr(np, "from_dlpack", None) or np._from_dlpack
    other = from_dlpack(folded)
    assert memfold.is_folded(other) and (other == folded).all()
    view = memoryview(folded)
    assert view.nbytes == folded.nbytes and view.format == "l" and np.shares_memory(np.asarray(view), folded)
    raw = mem.buffer(100)
    assert io.BytesIO(b"abc").readinto(raw[10:13]) == 3 and bytes(raw[9:14]) == b"\0abc\0"
    del folded
    gc.collect()
    assert other[999] == 999


def test_hints_do_what_they_say(mem):
    folded = mem.array(np.arange(2 * MIB) // 500)
    want = folded.copy()
    assert mem.fold(folded) > 0
    # What the engine is busy with in that moment stays.
    while mem.stats()["resident_bytes"] > MIB:
        mem.fold(folded)
    mem.prefetch(folded[: MIB // 2])
    assert mem.stats()["resident_bytes"] >= 4 * MIB
    with mem.pinned(folded[: MIB // 2], folded[MIB:]):
        mem.fold(folded)
        assert mem.stats()["resident_bytes"] >= 12 * MIB
    assert mem.fold(folded) > 0
    mem.cold(folded)
    assert (folded == want).all()
    mem.fold(folded[::-1][5:10]), mem.prefetch(folded[:0]), mem.fold(mem.zeros(()))


def test_pinned_arrays_are_right_in_huge_pages_and_after(mem):
    plain = np.arange(MIB) // 30
    folded = mem.array(plain)
    with mem.pinned(folded):
        others = [mem.full(MIB, n) for n in range(8)]
        assert (folded == plain).all()
        folded += 1
    assert all((other == n).all() for n, other in enumerate(others))
    mem.fold(folded)
    assert (folded == plain + 1).all()


def test_resize_in_place(mem):
    array = mem.arange(1000)
    array.resize(3_000_000, refcheck=False)
    assert memfold.is_folded(array) and array[999] == 999 and not array[1000:].any()
    array.resize(10, refcheck=False)
    assert list(array) == list(range(10))


def test_swap_holds_what_does_not_shrink(tmp_path):
    noise = np.random.default_rng(2).integers(0, 256, 64 * MIB, "uint8")
    mem = memfold.Memory(limit="24MiB", swap=tmp_path, swap_size="1GiB", swap_keep_free="1MiB")
    folded = mem.array(noise)
    assert (folded == noise).all()
    stats = mem.stats()
    assert stats["swap_bytes"] > 20 * MIB and os.listdir(tmp_path) == []


def test_signal_delivery_needs_pins_around_system_calls():
    mem = memfold.Memory(limit="16MiB", delivery="signal")
    folded = mem.array(np.arange(MIB) // 100)
    mem.fold(folded)
    read, write = os.pipe()
    try:
        with pytest.raises(OSError, match="Bad address"):
            os.write(write, folded[:100])
        with mem.pinned(folded[:100]):
            assert os.write(write, folded[:100]) == 800
        assert os.read(read, 800) == (np.arange(100) // 100).tobytes()
    finally:
        os.close(read)
        os.close(write)


def test_a_memory_shows_itself(mem):
    array = mem.zeros(4 * MIB, "uint8")
    array[:] = 3
    assert repr(mem).startswith("<memfold.Memory 4.0 MiB of data in ") and "of 32.0 MiB" in repr(mem)
    html = mem._repr_html_()
    assert html.count("<div") == html.count("</div>") == 5 and "uncompressed: 4" in html


def test_the_bar_lives_as_long_as_its_block(mem, capsys):
    with mem.watch(0.001) as shown:
        assert shown is mem
        before = threading.active_count()
    assert threading.active_count() == before - 1
    assert "\r[" in capsys.readouterr().err


def test_in_a_notebook_the_bar_is_one_display_that_changes(mem, capsys, monkeypatch):
    shown, changed = [], threading.Event()

    class Display:
        def update(self, page):
            shown.append(page)
            changed.set()

    def display(page, *, display_id):
        assert display_id is True
        shown.append(page)
        return Display()

    pages = types.ModuleType("IPython.display")
    pages.HTML, pages.display = str, display
    for name, module in (("ipykernel", types.ModuleType("ipykernel")), ("IPython", types.ModuleType("IPython")), (pages.__name__, pages)):
        monkeypatch.setitem(sys.modules, name, module)
    with mem.watch(0.001):
        array = mem.ones(MIB)
        assert changed.wait(60)
    assert len(shown) > 2 and "0 bytes of data" in shown[0] and "8.0 MiB of data" in shown[-1]
    assert all(page.count("<div") == page.count("</div>") == 5 for page in shown)
    out, err = capsys.readouterr()
    assert array[5] == 1 and out == err == ""


def test_stats_have_the_types_they_declare(mem):
    stats = mem.stats()
    assert list(stats) == list(memfold.Stats.__annotations__)
    assert all(type(value) is int for value in stats.values())
    assert set(mem.all_stats()) >= {name for name, _ in memfold._memfold.figures()}
