"""Other libraries work on folded arrays. Those that are not installed are left out."""

import memfold
import numpy as np
import pytest


@pytest.fixture
def installed():
    memory = memfold.install("32MiB")
    yield memory
    assert memfold.uninstall()


def test_pandas_has_its_columns_in_folded_memory(installed):
    pd = pytest.importorskip("pandas")
    count = 2_000_000
    frame = pd.DataFrame({"key": np.arange(count) // 100, "value": np.arange(count) % 7})
    names = pd.DataFrame({"key": np.arange(count // 100), "name": np.arange(count // 100) % 5})
    assert all(memfold.is_folded(frame[name].to_numpy()) for name in frame)
    joined = frame.merge(names, on="key")
    assert memfold.is_folded(joined["value"].to_numpy())
    sums = joined.groupby("name")["value"].sum()
    keys, values = np.arange(count) // 100, np.arange(count) % 7
    assert sums.tolist() == [int(values[keys % 5 == name].sum()) for name in range(5)]
    assert installed.stats()["folded_bytes"] > 0


def test_scikit_learn_fits_folded_arrays_as_plain_ones(installed):
    linear_model = pytest.importorskip("sklearn.linear_model")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    rows = (np.arange(4_000_000) * 7919 % 251).astype("float64").reshape(-1, 4)
    want = rows @ [1.0, -2.0, 3.0, 0.5] + 4
    scaled = preprocessing.StandardScaler().fit_transform(rows)
    assert memfold.is_folded(scaled) and abs(scaled.mean()) < 1e-9
    model = linear_model.LinearRegression().fit(rows, want)
    assert np.allclose(model.coef_, [1, -2, 3, 0.5]) and np.isclose(model.intercept_, 4)


def test_torch_tensors_share_a_folded_array(mem):
    torch = pytest.importorskip("torch")
    array = mem.array(np.arange(4_000_000, dtype="float32") // 1000)
    tensor = torch.from_numpy(array)
    assert memfold._memfold.is_folded(tensor.data_ptr())
    mem.fold(array)
    assert float(tensor[3_999_999]) == 3999 and float(tensor.double().sum()) == float(array.sum(dtype="float64"))
    tensor += 1
    del array
    assert float(tensor[0]) == 1 and memfold._memfold.is_folded(torch.from_dlpack(mem.ones(1000)).data_ptr())


def test_arrow_tables_lie_in_folded_memory(mem):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"n": list(range(100_000)), "text": [f"row {n}" for n in range(100_000)]})
    folded = mem.arrow(table)
    assert folded.equals(table)
    for column in folded.columns:
        for chunk in column.chunks:
            assert all(memfold._memfold.is_folded(buffer.address) for buffer in chunk.buffers() if buffer)
    assert memfold.is_folded(folded["n"].chunk(0).to_numpy())
    shared = pa.array(mem.arange(1000))
    assert memfold._memfold.is_folded(shared.buffers()[1].address)
