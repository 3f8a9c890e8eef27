"""The precision study against autograd, against a layer written out again, and on hostile files."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from workbench.kernels.formats import FORMATS, quantise, sqnr_db

from workbench.explore import precision_study as ps
from workbench.explore.precision_study import Study, StudyError, load_tensor, sqnr, sqnr_table

SMALL: dict[str, Any] = {"T": 40, "D": 96, "F": 48, "gemm_rows": 8, "gemm_k": 160}


def test_expected_sqnr_of_the_layer() -> None:
    """23.6 dB at the MLP's output, 23.4 for dX, 23.2 for dW, floor about 1 dB lower."""
    seeds = [sqnr(Study(seed=s), "mxfp8-e4m3-rceil") for s in range(3)]
    mean = {m: sum(v[m] for v in seeds) / 3 for m in ps.METRICS}
    assert mean["tensor"] == pytest.approx(31.5, abs=0.1)
    assert mean["gemm"] == pytest.approx(28.5, abs=0.2)
    assert mean["mlp"] == pytest.approx(23.6, abs=0.3)
    assert mean["dx"] == pytest.approx(23.4, abs=0.3)
    assert mean["dw13"] == pytest.approx(23.2, abs=0.4)
    assert mean["dw2"] == pytest.approx(23.2, abs=0.7)
    floor = sqnr(Study(), "mxfp8-e4m3-floor")
    for metric in ps.METRICS:
        assert seeds[0][metric] - floor[metric] == pytest.approx(0.95, abs=0.25)


def test_exact_layer_is_what_autograd_differentiates() -> None:
    study = Study(**SMALL, kind="student_t")
    data, w = ps._data(study), ps._operands_of(study)
    x, w13, w2 = (t.double().requires_grad_() for t in (data.x_TD, w.w13_2FD, w.w2_DF))
    gate, up = (x @ w13.T).chunk(2, dim=1)
    y = (nnf.silu(gate) * up) @ w2.T
    y.backward(w.dy_TD.double())
    exact = ps._exact(study)
    for metric, expected in (("mlp", y), ("dx", x.grad), ("dw13", w13.grad), ("dw2", w2.grad)):
        torch.testing.assert_close(exact[metric], expected, rtol=1e-12, atol=1e-12)
    expected = data.sample_MK.double() @ w.b_NK.double().T * data.unit
    torch.testing.assert_close(exact["gemm"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_layer_written_out_again(name: str) -> None:
    """Each operand along its own contraction axis, weights in squares, all from the masters."""
    study = Study(**SMALL, kind="outlier_channel", seed=2)
    data, w, exact = ps._data(study), ps._operands_of(study), ps._exact(study)

    def q(x: Tensor, axis: int | tuple[int, int]) -> Tensor:
        return quantise(x.float(), name, axis=axis).dequantise(torch.float64)

    w13, w2 = q(w.w13_2FD, (0, 1)), q(w.w2_DF, (0, 1))
    h1 = (q(data.x_TD, 1) @ w13.T).bfloat16().double().requires_grad_()
    gate, up = h1.chunk(2, dim=1)
    h = nnf.silu(gate) * up
    h.backward((q(w.dy_TD, 1) @ w2).bfloat16().double())
    assert h1.grad is not None
    approx = {
        "tensor": q(data.sample_MK, 1),
        "gemm": q(data.sample_MK, 1) @ q(w.b_NK, 1).T * data.unit,
        "mlp": q(h.detach(), 1) @ w2.T,
        "dx": q(h1.grad, 1) @ w13,
        "dw13": q(h1.grad, 0).T @ q(data.x_TD, 0),
        "dw2": q(w.dy_TD, 0).T @ q(h.detach(), 0),
    }
    got = sqnr(study, name)
    for metric in ps.METRICS:
        # float32 sums move a few roundings; 0.05 dB is 1 % of the noise
        assert got[metric] == pytest.approx(sqnr_db(exact[metric], approx[metric]), abs=0.05)


def test_seeded_and_cached_by_value() -> None:
    first = sqnr(Study(**SMALL, seed=5), "nvfp4")
    ps._sqnr.cache_clear()
    ps._data.cache_clear()
    assert sqnr(Study(**SMALL, seed=5), "nvfp4") == first
    assert sqnr(Study(**SMALL, seed=6), "nvfp4") != first
    x = torch.randn(16, 64)
    given = Study(kind="tensor", tensor=x)
    assert given == Study(kind="tensor", tensor=x.clone())
    before = sqnr(given, "mxfp4-floor")
    x[0, 0] = 1e6  # the study keeps its own copy
    assert given != Study(kind="tensor", tensor=x)
    ps._sqnr.cache_clear()
    ps._data.cache_clear()
    assert sqnr(given, "mxfp4-floor") == before


def test_data_kinds_differ_as_they_should() -> None:
    """Kurtosis of a Gaussian is 3; the tails raise it; outliers sit in whole channels."""
    samples = {k: ps._data(Study(kind=k)).sample_MK.double() for k in ps.KINDS[:3]}
    kurtosis = {k: float((x**4).mean() / (x**2).mean() ** 2) for k, x in samples.items()}
    assert kurtosis["gaussian"] == pytest.approx(3, abs=0.1)
    assert kurtosis["student_t"] > 10
    rms = samples["outlier_channel"].square().mean(0).sqrt()
    assert int((rms > 15).sum()) == 7168 // ps.OUTLIER_EVERY


def test_scale_histogram_counts_every_block_once() -> None:
    study = Study(kind="tensor", tensor=torch.tensor([[1.0] * 32 + [4.0] * 32 + [0.0] * 32] * 3))
    table = ps.scale_histogram(study, list(FORMATS))
    assert set(table.fmt) == set(FORMATS) - {"bf16"}

    def counts(name: str) -> dict[int, int]:
        rows = table[table.fmt == name]
        return dict(zip(rows.exponent.tolist(), rows.blocks.tolist(), strict=True))

    assert counts("mxfp8-e4m3-floor") == {-8: 3, -6: 3, -127: 3}
    assert counts("mxfp8-e4m3-rceil") == {-8: 3, -6: 3, -127: 3}
    assert counts("mxfp4-rceil") == {-2: 3, 0: 3, -127: 3}
    # 1/6 and 4/6 with the tensor scale multiplied in
    assert counts("nvfp4") == {-3: 6, -1: 6, -127: 6}
    gaussian = ps.scale_histogram(Study(), ["mxfp8-e5m2-rceil"])
    assert gaussian.blocks.sum() == 48 * 7168 // 32
    assert ps.scale_histogram(Study(), []).empty


def test_table_has_a_row_per_format_and_metric() -> None:
    table = sqnr_table(Study(**SMALL), ["bf16", "nvfp4"])
    assert table.fmt.tolist() == ["bf16"] * 6 + ["nvfp4"] * 6
    assert table.metric.tolist() == list(ps.METRICS) * 2
    assert table.bits_per_value.unique().tolist() == [16.0, 4.5]
    assert table.sqnr_db.tolist()[6:] == list(sqnr(Study(**SMALL), "nvfp4").values())


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (5000,), (3, 1), (1, 3), (300, 900), (2, 3, 4, 33)]
)
@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e36])
def test_any_tensor_gives_a_table(shape: tuple[int, ...], scale: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    table = sqnr_table(Study(kind="tensor", tensor=x, **SMALL), list(FORMATS))
    assert not table.sqnr_db.isna().any()
    assert (table.sqnr_db > 0).all()


def test_threads_are_given_back() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        sqnr(Study(**SMALL, seed=9), "bf16")
        with pytest.raises(ValueError, match="fmt='mxfp6'"):
            sqnr(Study(**SMALL), "mxfp6")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "cauchy"}, "kind='cauchy' must be one of gaussian, student_t"),
        ({"kind": "tensor"}, "kind='tensor' must be 'tensor' just when a tensor is given"),
        ({"tensor": torch.ones(3)}, "kind='gaussian' must be 'tensor' just when"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"T": 0}, "T=0 must be at least 1"),
        ({"kind": "tensor", "tensor": torch.ones(3, dtype=torch.int8)}, "tensor dtype=torch.int8"),
    ],
)
def test_bad_study(changes: dict[str, object], message: str) -> None:
    with pytest.raises(StudyError) as caught:
        Study(**changes)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_load_tensor_files(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(6, 5).to(dtype)
    torch.save(torch.nn.Parameter(x), tmp_path / "x.pt")
    assert load_tensor(tmp_path / "x.pt").equal(x.float())
    if dtype != torch.bfloat16:
        np.save(tmp_path / "x.npy", np.asfortranarray(x.numpy()))
        assert load_tensor(str(tmp_path / "x.npy")).equal(x.float())
        np.save(tmp_path / "big.npy", x.numpy().astype(x.numpy().dtype.newbyteorder(">")))
        assert load_tensor(tmp_path / "big.npy").equal(x.float())


class _Runs:
    """Unpickling this would create the file `ran`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    pickled = pickle.dumps(_Runs(ran))
    pickle.loads(pickled)
    assert ran.exists()  # the payload works
    ran.unlink()
    torch.save(_Runs(ran), tmp_path / "zip.pt")
    torch.save(_Runs(ran), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"x": torch.ones(3), "y": _Runs(ran)}, tmp_path / "hidden.pth")
    np.save(tmp_path / "object.npy", np.array([_Runs(ran)], object), allow_pickle=True)
    (tmp_path / "bare.npy").write_bytes(pickled)
    (tmp_path / "bare.pt").write_bytes(pickled)
    paths = [p for p in tmp_path.iterdir() if p.suffix]
    assert len(paths) == 6
    for path in paths:
        with pytest.raises(StudyError) as caught:
            load_tensor(path)
        assert str(caught.value).startswith(f"path={path.name!r} must hold one plain tensor: ")
        assert "\n" not in str(caught.value)
        assert not ran.exists()


def test_files_that_hold_no_usable_tensor(tmp_path: Path) -> None:
    def npy(name: str, array: object) -> None:
        np.save(tmp_path / f"{name}.npy", np.asarray(array))

    npy("integer", [1, 2])
    npy("boolean", [True])
    npy("complex", [1j])
    npy("text", ["a"])
    npy("empty", np.empty((0, 4)))
    npy("nan", [1.0, math.nan])
    npy("infinite", [1.0, math.inf])
    npy("overflow", [1e300])
    npy("zero", np.zeros(4))
    np.savez(tmp_path / "archive.npz", x=np.ones(3))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    np.save(tmp_path / "whole.npy", np.ones(1000))
    whole = (tmp_path / "whole.npy").read_bytes()
    (tmp_path / "whole.npy").unlink()
    (tmp_path / "cut.npy").write_bytes(whole[:-8])
    claims = whole.replace(b"(1000,), }" + b" " * 12, b"(1000000000000000,), }")
    assert claims != whole
    (tmp_path / "claims.npy").write_bytes(claims)
    (tmp_path / "nothing.npy").write_bytes(b"")
    (tmp_path / "nothing.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("not a tensor")
    (tmp_path / "folder.pt").mkdir()
    saved = {
        "pt_integer": torch.arange(3),
        "pt_complex": torch.ones(3, dtype=torch.complex64),
        "pt_empty": torch.empty(0, 3),
        "pt_nan": torch.tensor([math.nan]),
        "pt_zero": torch.zeros(2, 2),
        "pt_sparse": torch.eye(3).to_sparse(),
        "pt_meta": torch.empty(3, device="meta"),
        "pt_dict": {"weight": torch.ones(3)},
        "pt_list": [torch.ones(3)],
        "pt_number": 3.0,
        "pt_endless": torch.ones(1).expand(10**12),  # four bytes in the file
    }
    for name, value in saved.items():
        torch.save(value, tmp_path / f"{name}.pt")
    expected = {
        "integer.npy": "dtype=int64 must be a floating-point type",
        "boolean.npy": "dtype=bool must be a floating-point type",
        "complex.npy": "dtype=complex128 must be a floating-point type",
        "text.npy": "dtype=<U1 must be a floating-point type",
        "empty.npy": "shape=(0, 4) must hold 1 to 268435456 values",
        "nan.npy": "values must be finite in float32",
        "infinite.npy": "values must be finite in float32",
        "overflow.npy": "values must be finite in float32",
        "zero.npy": "values must not all be zero",
        "archive.npy": "must hold one array, not an archive",
        "cut.npy": "must hold one plain tensor",
        "claims.npy": "must hold one plain tensor: mmap length is greater than file size",
        "nothing.npy": "must hold one plain tensor",
        "nothing.pt": "must hold one plain tensor",
        "text.pt": "must hold one plain tensor",
        "folder.pt": "must be an existing file",
        "pt_integer.pt": "dtype=torch.int64 must be a floating-point type",
        "pt_complex.pt": "dtype=torch.complex64 must be a floating-point type",
        "pt_empty.pt": "shape=(0, 3) must hold 1 to 268435456 values",
        "pt_nan.pt": "values must be finite in float32",
        "pt_zero.pt": "values must not all be zero",
        "pt_sparse.pt": "must be dense, with its data",
        "pt_meta.pt": "must be dense, with its data",
        "pt_dict.pt": "must hold one tensor, not a dict",
        "pt_list.pt": "must hold one tensor, not a list",
        "pt_number.pt": "must hold one tensor, not a float",
        "pt_endless.pt": "must hold 1 to 268435456 values",
    }
    assert {p.name for p in tmp_path.iterdir()} == set(expected)
    expected |= {"missing.npy": "must be an existing file", "x.safetensors": "must end in .npy"}
    for name, message in expected.items():
        with pytest.raises(StudyError) as caught:
            load_tensor(tmp_path / name)
        assert str(caught.value).startswith(f"path={name!r} ")
        assert message in str(caught.value), name
