"""Formats against oracles that share no code with them: ml_dtypes, exact comparisons, torchao.

The numpy oracle takes block maxima with `reduceat` (no padding), exponents with frexp in float64,
and decides NVFP4 roundings by comparing with tie * scale, a product float64 holds exactly.
"""

import math
from fractions import Fraction
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from workbench.kernels.formats import FORMATS, FormatError, Quantised, decode, quantise, sqnr_db

NUMPY = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
LARGEST = {"e4m3": 448, "e5m2": 57344, "e2m1": 6}
EMAX = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
MX = [name for name in FORMATS if name.startswith("mx")]
SCALED = [*MX, "nvfp4"]
E4M3_VALUES = np.arange(127, dtype=np.uint8).view(NUMPY["e4m3"]).astype(np.float64)
E2M1_VALUES = np.arange(8, dtype=np.uint8).view(NUMPY["e2m1"]).astype(np.float64)


def codes(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint8).numpy()


def nearest_even(x: np.ndarray, step: np.ndarray | np.float64, values: np.ndarray) -> np.ndarray:
    """Index of the value nearest to x / step, saturating, by comparison with the ties alone."""
    found = np.zeros(x.shape, np.uint8)
    for index, tie in enumerate((values[:-1] + values[1:]) / 2):
        found += (x > tie * step) | ((x == tie * step) & (index % 2 == 1))
    return found


def oracle(x: np.ndarray, name: str, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, float]:
    """(data codes, scale codes, g) of finite float32 `x`."""
    spec = FORMATS[name]
    wide = x.astype(np.float64)
    amax = np.abs(wide)
    for a in axes:
        amax = np.maximum.reduceat(amax, np.arange(0, x.shape[a], spec.block), axis=a)

    def spread(scale: np.ndarray) -> np.ndarray:
        for a in axes:
            scale = np.repeat(scale, spec.block, axis=a).take(range(x.shape[a]), axis=a)
        return scale

    if name == "nvfp4":
        g = max(np.float32(amax.max() / 2688), np.float32(2**-149)).astype(np.float64)
        scale = nearest_even(amax, 6 * g, E4M3_VALUES)
        step = spread(E4M3_VALUES[scale]) * g
        data = np.where(step > 0, nearest_even(np.abs(wide), step, E2M1_VALUES), 0)
        return (data + 8 * np.signbit(x)).astype(np.uint8), scale, float(g)
    largest = LARGEST[spec.element]
    exponent = np.frexp(amax)[1] - 1 - EMAX[spec.element]
    if spec.rule == "rceil":
        exponent += amax > np.ldexp(float(largest), exponent)
    exponent = np.where(amax == 0, -127, np.maximum(exponent, -127))
    scaled = np.clip(np.ldexp(wide, -spread(exponent)), -largest, largest)
    data = scaled.astype(np.float32).astype(NUMPY[spec.element]).view(np.uint8)
    return data, (exponent + 127).astype(np.uint8), 1.0


def assert_matches_oracle(x: np.ndarray, name: str, axes: tuple[int, ...]) -> Quantised:
    axis = axes[0] if len(axes) == 1 else axes
    got = quantise(torch.from_numpy(x), name, axis=axis)  # type: ignore[arg-type]
    data, scale, g = oracle(x, name, axes)
    np.testing.assert_array_equal(codes(got.scale_codes), scale)
    np.testing.assert_array_equal(codes(got.data), data)
    if name == "nvfp4":
        assert got.tensor_scale is not None
        assert got.tensor_scale.item() == g
    return got


def million(seed: int, *, wide: bool) -> np.ndarray:
    """[4096, 256] float32: Gaussian, or blocks anywhere in float32's range, itself 2^-149 up."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4096, 256))
    if wide:
        x *= np.exp2(rng.integers(-148, 126, (4096, 8)).repeat(32, axis=1))
        x *= np.exp2(rng.uniform(-12, 0, x.shape))
        x[rng.random((4096, 8)).repeat(32, axis=1) < 0.02] = 0
    return np.clip(x, -3.4e38, 3.4e38).astype(np.float32)


@pytest.mark.parametrize("element", NUMPY)
def test_every_element_code_decodes_as_ml_dtypes_does(element: str) -> None:
    raw = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}[element]
    got = decode(torch.from_numpy(raw).view(dtype), element).numpy()  # type: ignore[arg-type]
    np.testing.assert_array_equal(got, raw.view(NUMPY[element]).astype(np.float32))


@pytest.mark.parametrize("name", SCALED)
def test_every_scale_code_decodes_as_ml_dtypes_does(name: str) -> None:
    spec = FORMATS[name]
    one = quantise(torch.ones(1), name).data  # a block of one value, times any scale
    value = decode(one, spec.element).double().item()
    scale_dtype = torch.float8_e8m0fnu if spec.scale == "e8m0" else torch.float8_e4m3fn
    raw = np.arange(256, dtype=np.uint8)
    quantised = Quantised(
        data=one.view(torch.uint8).expand(256, 1).clone().view(one.dtype),
        scale=torch.from_numpy(raw).view(scale_dtype).unsqueeze(1),
        tensor_scale=None if spec.scale == "e8m0" else torch.tensor(0.75),
        shape=torch.Size([256, 1]),
        axis=1,
        fmt=spec,
    )
    dtype = ml_dtypes.float8_e8m0fnu if spec.scale == "e8m0" else ml_dtypes.float8_e4m3fn
    expected = raw.view(dtype).astype(np.float64) * value * (1 if spec.scale == "e8m0" else 0.75)
    np.testing.assert_array_equal(quantised.dequantise(torch.float64).squeeze(1), expected)


@pytest.mark.parametrize("name", MX)
def test_every_code_at_every_exponent_survives_the_round_trip(name: str) -> None:
    spec = FORMATS[name]
    raw = np.arange(16 if spec.element == "e2m1" else 256, dtype=np.uint8)
    value = raw.view(NUMPY[spec.element]).astype(np.float64)
    raw, value = raw[np.isfinite(value)], value[np.isfinite(value)]
    exponents = np.arange(-127, 128 - EMAX[spec.element])
    x = np.zeros((len(exponents), len(raw), 32), np.float32)
    x[:, :, 5] = np.ldexp(value, exponents[:, None])
    x[:, :, 31] = np.ldexp(float(LARGEST[spec.element]), exponents[:, None])
    got = quantise(torch.from_numpy(x), name)
    np.testing.assert_array_equal(
        codes(got.scale_codes)[..., 0], np.broadcast_to(exponents[:, None] + 127, x.shape[:2])
    )
    np.testing.assert_array_equal(codes(got.data)[:, :, 5], np.broadcast_to(raw, x.shape[:2]))
    np.testing.assert_array_equal(got.dequantise().numpy(), x)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("wide", [False, True])
def test_a_million_values_bit_for_bit(name: str, wide: bool) -> None:
    x = million(len(name) + wide, wide=wide)
    got = assert_matches_oracle(x, name, (1,))
    assert len(np.unique(codes(got.data))) >= 15  # the data did exercise the codes


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1,), (0,)),
        ((7,), (0,)),
        ((97,), (0,)),
        ((33, 65), (0,)),
        ((33, 65), (1,)),
        ((33, 65), (0, 1)),
        ((64, 96), (0, 1)),
        ((3, 44, 40), (1,)),
        ((3, 44, 40), (1, 2)),
        ((17, 2, 40), (0, 2)),
    ],
)
def test_axes_and_tails(name: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = (np.random.default_rng(3).standard_t(2, shape)).astype(np.float32)
    got = assert_matches_oracle(x, name, axes)
    assert got.data.shape == got.dequantise().shape == x.shape
    rank = len(shape)
    negative = (axes[1] - rank, axes[0] - rank) if len(axes) == 2 else axes[0] - rank
    again = quantise(torch.from_numpy(x), name, axis=negative)
    np.testing.assert_array_equal(codes(again.data), codes(got.data))
    # strides must not matter
    strided = torch.from_numpy(np.repeat(x, 2, axis=-1))[..., ::2]
    again = quantise(strided, name, axis=got.axis)
    np.testing.assert_array_equal(codes(again.data), codes(got.data))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,)])
def test_no_values(name: str, shape: tuple[int, ...]) -> None:
    got = quantise(torch.empty(shape), name)
    assert got.data.shape == got.dequantise().shape == shape
    assert got.scale_codes.numel() == 0


def exact_exponent(amax: float, element: str, rule: str) -> int:
    """The rule by search over rationals."""
    a, largest = Fraction(amax), Fraction(LARGEST[element])
    for e in range(-127, 128):
        if rule == "floor" and a < Fraction(2) ** (e + EMAX[element] + 1):
            return e
        if rule == "rceil" and a <= largest * Fraction(2) ** e:
            return e
    raise AssertionError(amax)


@pytest.mark.parametrize("name", MX)
def test_powers_of_two_and_their_neighbours(name: str) -> None:
    spec = FORMATS[name]
    top = LARGEST[spec.element] / 2.0 ** EMAX[spec.element]
    centre = [np.float32(m * 2.0**k) for k in range(-149, 128) for m in (1.0, top)]
    centre = [c for c in centre if c > 0]
    around = [np.nextafter(c, np.float32(d)) for c in centre for d in (0, np.inf)]
    amax = np.array([v for v in centre + around if 0 < v < np.inf], np.float32)
    x = np.zeros((len(amax), 32), np.float32)
    x[:, 11] = -amax
    got = assert_matches_oracle(x, name, (1,))
    expected = [exact_exponent(float(a), spec.element, spec.rule) + 127 for a in amax]
    assert codes(got.scale_codes)[:, 0].tolist() == expected


def with_neighbours(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32)
    return np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])


@pytest.mark.parametrize("name", MX)
def test_ties_between_codes_and_their_neighbours(name: str) -> None:
    spec = FORMATS[name]
    values = np.arange(8 if spec.element == "e2m1" else 128, dtype=np.uint8)
    values = values.view(NUMPY[spec.element]).astype(np.float64)
    values = values[np.isfinite(values)]
    ties = with_neighbours((values[:-1] + values[1:]) / 2)
    exponents = np.arange(-100, 110, 7)
    x = np.zeros((len(exponents), 2 * len(ties), 32), np.float32)
    x[:, :, 3] = np.ldexp(np.concatenate([ties, -ties]), exponents[:, None])
    x[:, :, 4] = np.ldexp(float(LARGEST[spec.element]), exponents[:, None])
    got = assert_matches_oracle(x, name, (2,))
    at_tie = codes(got.data)[:, : len(values) - 1, 3]
    assert (at_tie % 2 == 0).all()


@pytest.mark.parametrize("g", [1.0, 2.0**-20, 0.3, 1.7e-5, 12345.678])
def test_nvfp4_ties_of_scale_and_data(g: float) -> None:
    """Where float32 arithmetic would round a quotient onto a tie, or off it."""
    amax = np.float32(2688 * g)
    exact_g = float(np.float32(amax / 2688))
    scales = (E4M3_VALUES[1:-1] + E4M3_VALUES[2:]) / 2
    blocks = with_neighbours(np.concatenate([scales, E4M3_VALUES[1:]]) * 6 * exact_g)
    x = np.zeros((len(blocks) + 1, 16), np.float32)
    x[1:, 0] = np.minimum(blocks, amax)
    x[0, 0] = amax
    step = E4M3_VALUES[oracle(x, "nvfp4", (1,))[1][:, 0]] * exact_g
    ties = (E2M1_VALUES[:-1] + E2M1_VALUES[1:]) / 2
    for tie in ties:
        near = (tie * step).astype(np.float32)
        for column, value in enumerate(
            (near, *(np.nextafter(near, np.float32(d)) for d in (0, 9)))
        ):
            x[:, 1 + column] = np.minimum(value, x[:, 0])
        assert_matches_oracle(x, "nvfp4", (1,))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_poisoned_block_is_nan_and_no_other(
    name: str, axis: int | tuple[int, int], poison: float
) -> None:
    x = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    hit = torch.zeros(96, 128, dtype=torch.bool)
    block = FORMATS[name].block
    rows = slice(32, 32 + block) if axis != 1 else slice(40, 41)
    columns = slice(64, 64 + block) if axis != 0 else slice(70, 71)
    hit[rows, columns] = True
    # the largest value must stay outside, or NVFP4's tensor scale changes rightly
    x[0, 0] = x.abs().max() + 1
    clean = quantise(x, name, axis=axis)
    x[40, 70] = poison
    got = quantise(x, name, axis=axis)
    assert got.dequantise().isnan().equal(hit)
    assert got.dequantise()[~hit].equal(clean.dequantise()[~hit])
    assert (codes(got.data)[hit.numpy()] == (0 if got.data.dtype == torch.uint8 else 0x7F)).all()
    nan_code = 255 if FORMATS[name].scale == "e8m0" else 0x7F
    assert (got.scale_codes == nan_code).sum() == 1


@pytest.mark.parametrize("name", SCALED)
def test_zero_blocks(name: str) -> None:
    x = torch.zeros(4, 64)
    x[2, 32:] = 1.0
    got = quantise(x, name)
    empty = (x == 0).numpy()
    assert (codes(got.data)[empty] == 0).all()
    assert (codes(got.scale_codes)[[0, 1, 3]] == 0).all()
    assert got.dequantise().equal(x)
    nothing = quantise(-x * 0, name)
    assert nothing.dequantise().equal(-x * 0)
    assert codes(nothing.scale_codes).max() == 0


@pytest.mark.parametrize("name", MX)
def test_subnormals_are_kept_not_flushed(name: str) -> None:
    smallest = float(np.arange(1, 2, dtype=np.uint8).view(NUMPY[FORMATS[name].element])[0])
    x = torch.zeros(1, 32)
    x[0, 0] = smallest * 2.0**-127  # the smallest data code at the smallest scale
    x[0, 1] = -x[0, 0] * 0.5  # a tie with zero, which is even
    x[0, 2] = x[0, 0] * 1.5  # a tie that goes up to 2
    got = quantise(x, name)
    assert codes(got.scale_codes).tolist() == [[0]]
    assert codes(got.data)[0, [0, 2]].tolist() == [1, 2]
    assert decode(got.data, got.fmt.element)[0, 1] == 0


def test_saturation_belongs_to_floor_alone() -> None:
    x = torch.full((1, 32), 511.0)
    floor, rceil = quantise(x, "mxfp8-e4m3-floor"), quantise(x, "mxfp8-e4m3-rceil")
    assert floor.dequantise().unique().tolist() == [448.0]
    assert rceil.dequantise().unique().tolist() == [512.0]
    assert codes(floor.scale_codes).tolist() == [[127]]
    assert codes(rceil.scale_codes).tolist() == [[128]]


def test_nvfp4_block_too_small_for_its_scale() -> None:
    x = torch.tensor([6.0] + [0.0] * 15 + [-(2.0**-20)] * 16)
    got = quantise(x, "nvfp4")
    assert codes(got.scale_codes).tolist() == [0x7E, 0]  # 448 and 0
    assert got.data.tolist() == [7] + [0] * 15 + [8] * 16  # 6, zeros, and zeros of its sign
    tiny = quantise(torch.full((16,), 2.0**-149), "nvfp4")  # g would underflow to 0
    assert tiny.dequantise().tolist() == [2.0**-149] * 16


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_is_its_float32_value(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = x.clone()
    narrow, wide = quantise(x, name, axis=0), quantise(x.float(), name, axis=0)
    assert narrow.dequantise(torch.float64).equal(wide.dequantise(torch.float64))
    assert narrow.dequantise(dtype).equal(wide.dequantise().to(dtype))
    assert x.equal(before)


def test_bf16_is_torch_rounding_without_scales() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    got = quantise(x, "bf16")
    assert got.dequantise().equal(x.detach().bfloat16().float())
    assert got.scale is None
    with pytest.raises(FormatError, match="fmt='bf16' must be a block-scaled format"):
        _ = got.scale_codes
    already = x.detach().bfloat16()
    quantise(already, "bf16").data.zero_()
    assert already.any()  # the result owns its data


@pytest.mark.parametrize("name", SCALED)
def test_dequantise_float64_is_exact_and_float32_rounds_it(name: str) -> None:
    x = million(5, wide=True)[:512]
    got = quantise(torch.from_numpy(x), name)
    spec = FORMATS[name]
    data, scale, g = oracle(x, name, (1,))
    dtype = ml_dtypes.float8_e8m0fnu if spec.scale == "e8m0" else ml_dtypes.float8_e4m3fn
    value = data.view(NUMPY[spec.element]).astype(np.float64)
    value *= scale.view(dtype).astype(np.float64).repeat(spec.block, axis=1) * g
    np.testing.assert_array_equal(got.dequantise(torch.float64).numpy(), value)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.dequantise().numpy(), value.astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_float32_stays_finite(name: str) -> None:
    top = float(np.finfo(np.float32).max)
    found = quantise(torch.tensor([top, -top]), name).dequantise(torch.float64)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_bf16_saturates_but_for_an_infinity(sign: int) -> None:
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    tie = largest * (1 + 2.0**-9)  # between the largest and the next power of two, as float32
    x = sign * torch.tensor([np.finfo(np.float32).max, tie, largest, 3.3e38, math.inf, math.nan])
    found = quantise(x, "bf16").data
    assert found[:3].tolist() == [sign * largest] * 3
    assert found[3:5].tolist() == x[3:5].bfloat16().tolist()
    assert found[5].isnan()


def test_half_s_largest_value_in_bf16() -> None:
    x = torch.tensor([65504.0, -math.inf, 6e-8], dtype=torch.float16)
    assert quantise(x, "bf16").data.tolist() == x.bfloat16().tolist()


TORCHAO_ELEMENTS = MappingProxyType(
    {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("wide", [False, True])
def test_torchao_agrees_bit_for_bit(name: str, wide: bool) -> None:
    spec = FORMATS[name]
    x = torch.from_numpy(million(11, wide=wide))
    mode = ScaleCalculationMode.FLOOR if spec.rule == "floor" else ScaleCalculationMode.RCEIL
    scale, data = to_mx(x, TORCHAO_ELEMENTS[spec.element], 32, mode)
    if spec.element == "e2m1":
        data = unpack_uint4(data)
    got = quantise(x, name)
    np.testing.assert_array_equal(codes(got.scale_codes), codes(scale))
    # at scale code 0 (2^-127) torchao divides by 2^-126 or 1, so only the scale can be compared
    comparable = codes(scale).repeat(32, axis=1) > 0
    assert comparable.mean() > 0.8
    ours, theirs = codes(got.data.view(torch.uint8)), codes(data.contiguous().view(torch.uint8))
    np.testing.assert_array_equal(ours[comparable], theirs.reshape(x.shape)[comparable])


def test_torchao_agrees_on_nvfp4_but_at_ties() -> None:
    x = torch.from_numpy(million(12, wide=False))
    g = per_tensor_amax_to_scale(x.abs().max())
    scale, data = nvfp4_quantize(x, 16, g)
    got = quantise(x, "nvfp4")
    assert got.tensor_scale is not None
    assert got.tensor_scale.equal(g)
    # its float32 quotients may fall on the other side of a tie: a few in a million, one code off
    away = (got.scale_codes.int() - scale.view(torch.uint8).view(4096, 16).int()).abs()
    assert away.max() <= 1
    assert (away > 0).sum() <= 2
    same = (away == 0).repeat_interleave(16, dim=1)
    away = (got.data.int() - unpack_uint4(data).view(4096, 256).int()).abs()[same]
    assert away.max() <= 1
    assert (away > 0).sum() <= 10


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_expected_sqnr_on_gaussian_data() -> None:
    """31.5 dB for the tensor and 28.5 dB for a GEMM with K=7168, within sampling error."""
    a, b = gaussian(128, 7168, seed=1), gaussian(128, 7168, seed=2)
    exact = a.double() @ b.double().T

    def gemm(name: str) -> tuple[float, float]:
        qa, qb = quantise(a, name).dequantise(), quantise(b, name).dequantise()
        return sqnr_db(a, qa), sqnr_db(exact, qa @ qb.T)

    tensor, product = gemm("mxfp8-e4m3-rceil")
    assert tensor == pytest.approx(31.5, abs=0.1)
    assert product == pytest.approx(28.5, abs=0.2)
    lower = gemm("mxfp8-e4m3-floor")
    assert tensor - lower[0] == pytest.approx(1.0, abs=0.25)
    assert product - lower[1] == pytest.approx(1.0, abs=0.3)


def test_sqnr_db() -> None:
    ref = torch.tensor([3.0, -4.0])
    assert sqnr_db(ref, torch.tensor([3.0, -3.5])) == pytest.approx(20.0)
    assert sqnr_db(ref, ref) == math.inf
    assert sqnr_db(ref * 0, ref) == -math.inf
    assert math.isnan(sqnr_db(ref, ref / 0))
    with pytest.raises(FormatError, match=r"approx\.shape=\(1,\) must be \(2,\)"):
        sqnr_db(ref, ref[:1])


@pytest.mark.parametrize(
    ("x", "fmt", "axis", "message"),
    [
        (torch.ones(4), "mxfp6", 0, "fmt='mxfp6' must be one of bf16, mxfp8-e4m3-rceil"),
        (torch.ones(4, dtype=torch.float64), "mxfp4-floor", 0, "x.dtype=torch.float64 must be one"),
        (torch.ones(4, dtype=torch.int32), "bf16", 0, "x.dtype=torch.int32 must be one"),
        (torch.ones(4), "nvfp4", 1, "axis=1 must be within the 1 dimensions"),
        (torch.tensor(1.0), "nvfp4", 0, "axis=0 must be within the 0 dimensions"),
        (torch.ones(4, 4), "nvfp4", (1, -1), "must be one axis or two different ones"),
        (torch.ones(4, 4), "nvfp4", (), "must be one axis or two different ones"),
    ],
)
def test_bad_input(x: torch.Tensor, fmt: str, axis: int | tuple[int, int], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        quantise(x, fmt, axis=axis)
    assert message in str(caught.value)
    with pytest.raises(FormatError, match=r"dtype=torch\.int8 must be one of"):
        quantise(torch.ones(4), "nvfp4").dequantise(torch.int8)


def test_registry() -> None:
    assert all(name == spec.name for name, spec in FORMATS.items())
    bits = {name: spec.bits_per_value for name, spec in FORMATS.items()}
    assert bits["bf16"] == 16
    assert bits["mxfp8-e4m3-rceil"] == bits["mxfp8-e5m2-floor"] == 8.25
    assert bits["mxfp4-floor"] == 4.25
    assert bits["nvfp4"] == 4.5
    assert {s.element: s.largest for s in FORMATS.values() if s.element != "bf16"} == LARGEST
