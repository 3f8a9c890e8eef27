"""Formats in a thread whose arithmetic reads and writes subnormals as 0."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
import torch
from test_formats import NUMPY, SCALED, codes, oracle
from workbench.kernels.formats import FORMATS, quantise, sqnr_db


@contextmanager
def flushing() -> Iterator[None]:
    """Float arithmetic of this thread reads and writes subnormals as 0; the oracle's must not."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the mode is a thread's own
    try:
        assert (torch.tensor([2.0**-126]) * 0.5).item() == 0
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def edges() -> np.ndarray:
    """[n, 32] float32: blocks whose largest value lies at each exponent, the others anywhere."""
    rng = np.random.default_rng(8)
    top = rng.uniform(1, 2, (276, 1)) * np.exp2(np.arange(-148, 128))[:, None]
    x = top * np.exp2(rng.uniform(-30, 0, (276, 32))) * rng.choice([-1, 1], (276, 32))
    x[:, 3] = top[:, 0]
    x[:, 4:8] = [0.0, -0.0, 2.0**-149, -(2.0**-131)]
    return np.clip(x, -3.4e38, 3.4e38).astype(np.float32)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("most", [2.0**-130, 2.0**-120, 2.0**-100, 3.4e38])
def test_subnormals_count_where_arithmetic_flushes_them(name: str, most: float) -> None:
    x = edges()
    x = x[np.abs(x).max(1) <= np.float32(most)]  # so that NVFP4's tensor scale is subnormal too
    with flushing():
        got = quantise(torch.from_numpy(x), name)
        exact, narrow = got.dequantise(torch.float64), got.dequantise()
        bf16, half = got.dequantise(torch.bfloat16), got.dequantise(torch.float16)
    data, scale, g = oracle(x, name, (1,))
    np.testing.assert_array_equal(codes(got.scale_codes), scale)
    np.testing.assert_array_equal(codes(got.data), data)
    spec = FORMATS[name]
    dtype = ml_dtypes.float8_e8m0fnu if spec.scale == "e8m0" else ml_dtypes.float8_e4m3fn
    value = data.view(NUMPY[spec.element]).astype(np.float64)
    value *= scale.view(dtype).astype(np.float64).repeat(spec.block, axis=1) * g
    np.testing.assert_array_equal(exact.numpy(), value)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(narrow.numpy(), value.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(narrow.numpy()), np.signbit(value))
    if name == "nvfp4":
        assert got.tensor_scale is not None
        assert got.tensor_scale.item() == g
    assert bf16.equal(narrow.bfloat16())
    assert half.equal(narrow.half())


def test_bf16_and_sqnr_count_subnormals_where_arithmetic_flushes_them() -> None:
    x = torch.tensor([2.0**-130, -(2.0**-133), 2.0**-149, 3.0 * 2.0**-134], dtype=torch.float64)
    narrow = x.float()
    with flushing():
        got = quantise(narrow, "bf16")
        found, back = got.dequantise(torch.float64), got.dequantise()
        noise = sqnr_db(narrow, back)
    rounded = torch.tensor([2.0**-130, -(2.0**-133), 0.0, 2.0**-132], dtype=torch.float64)
    assert found.equal(rounded)
    assert back.equal(rounded.float())
    wanted = 10 * math.log10((x**2).sum() / ((x - rounded) ** 2).sum())
    assert noise == pytest.approx(wanted)
