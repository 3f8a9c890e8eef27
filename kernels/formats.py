"""Block-scaled number formats: MXFP8, MXFP4 and NVFP4, bit-exact, in torch.

Sources: OCP Microscaling Formats (MX) v1.0 for the elements, E8M0 and the `floor` scale rule;
NVIDIA's cuBLAS "block scaling" and Transformer Engine documentation for `rceil` and NVFP4.

Every result is defined in exact arithmetic and computed without `log2`: scales come from the bits
of the block's largest magnitude (`amax`), data are rounded to nearest, ties to even, saturating.
Subnormals are read and written by their bits, so that `torch.set_flush_denormal` changes nothing.

- MX scale 2^e: `floor` e = floor(log2 amax) - emax (values above the largest saturate);
  `rceil` e = the smallest with amax <= largest * 2^e. E8M0 code = e + 127, at least 0.
- NVFP4: float32 g = tensor amax / (6 * 448), E4M3 scale s = round(block amax / 6 / g), data
  x / (s * g). A block so small that s rounds to 0 has data 0.
- BF16 has no scale: infinities and NaN stay what they are, finite values saturate.
- An all-zero block: scale code 0, data 0 (a negative zero keeps its sign).
- A block with a NaN or an infinity: its scale is NaN, so all of it decodes to NaN; FP8 data are
  0x7f, FP4 data 0. Other blocks are untouched: g is taken over the finite blocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

Element = Literal["bf16", "e4m3", "e5m2", "e2m1"]
Axis = int | tuple[int, int]

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUTPUT_DTYPES = (torch.float64, *INPUT_DTYPES)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIN_FLOAT32 = 2.0**-149
_MIN_NORMAL, _MAGNITUDE = 0x0080_0000, 0x7FFF_FFFF  # of float32, as bits


@dataclass(frozen=True, kw_only=True)
class _ElementSpec:
    largest: float
    bits: int
    dtype: torch.dtype  # of `Quantised.data`; E2M1 is one code 0..15 a byte

    @property
    def emax(self) -> int:
        """Exponent of the largest value: floor(log2(largest))."""
        return math.frexp(self.largest)[1] - 1

    @property
    def top_mantissa(self) -> int:
        """The largest value's mantissa field, as float32 would hold it."""
        return int((self.largest / 2.0**self.emax - 1) * 2**23)


_ELEMENTS: Mapping[Element, _ElementSpec] = {
    "bf16": _ElementSpec(largest=torch.finfo(torch.bfloat16).max, bits=16, dtype=torch.bfloat16),
    "e4m3": _ElementSpec(largest=448.0, bits=8, dtype=torch.float8_e4m3fn),
    "e5m2": _ElementSpec(largest=57344.0, bits=8, dtype=torch.float8_e5m2),
    "e2m1": _ElementSpec(largest=6.0, bits=4, dtype=torch.uint8),
}


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """One number format. `block` is values per scale along the contraction axis (1: no scale)."""

    name: str
    label: str
    element: Element
    scale: Literal["none", "e8m0", "e4m3"] = "none"
    rule: Literal["none", "floor", "rceil", "nvfp4"] = "none"
    block: int = 1

    @property
    def bits_per_value(self) -> float:
        """Storage in bits, one scale per `block` values; NVFP4's tensor scale is left out."""
        return _ELEMENTS[self.element].bits + (8 / self.block if self.scale != "none" else 0.0)

    @property
    def largest(self) -> float:
        """Largest finite value of the element type."""
        return _ELEMENTS[self.element].largest


def _mx(name: str, label: str, element: Element, rule: Literal["floor", "rceil"]) -> FormatSpec:
    return FormatSpec(
        name=f"{name}-{rule}",
        label=f"{label} ({rule})",
        element=element,
        scale="e8m0",
        rule=rule,
        block=32,
    )


FORMATS: Mapping[str, FormatSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            FormatSpec(name="bf16", label="BF16", element="bf16"),
            _mx("mxfp8-e4m3", "MXFP8 E4M3", "e4m3", "rceil"),
            _mx("mxfp8-e4m3", "MXFP8 E4M3", "e4m3", "floor"),
            _mx("mxfp8-e5m2", "MXFP8 E5M2", "e5m2", "rceil"),
            _mx("mxfp8-e5m2", "MXFP8 E5M2", "e5m2", "floor"),
            _mx("mxfp4", "MXFP4", "e2m1", "rceil"),
            _mx("mxfp4", "MXFP4", "e2m1", "floor"),
            FormatSpec(
                name="nvfp4", label="NVFP4", element="e2m1", scale="e4m3", rule="nvfp4", block=16
            ),
        )
    }
)


class FormatError(ValueError):
    """Input that no format can take; the message gives field, value and rule."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantised:
    """A quantised tensor; owns its tensors, on the device of the input.

    data: `shape`; bfloat16, float8_e4m3fn, float8_e5m2, or uint8 holding one E2M1 code (0..15,
        bit 3 the sign) a byte. Tails are padded inside and cut off again.
    scale: `shape` with every blocked axis divided by the block, rounded up; float8_e8m0fnu,
        float8_e4m3fn (NVFP4), or None (BF16).
    tensor_scale: float32 scalar g of NVFP4, never 0; otherwise None.
    axis: the blocked axis, or the two axes of square blocks; non-negative.
    """

    data: Tensor
    scale: Tensor | None
    tensor_scale: Tensor | None
    shape: torch.Size
    axis: Axis
    fmt: FormatSpec

    @property
    def scale_codes(self) -> Tensor:
        """The scales' uint8 codes, in the shape of `scale`; FormatError where there are none."""
        if self.scale is None:
            raise FormatError(f"fmt={self.fmt.name!r} must be a block-scaled format")
        return self.scale.view(torch.uint8)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values in `shape`. float64 holds every value exactly.

        In float32 an MX value is exact too, unless rounding up carried it past the largest float32
        (it is an infinity then); an NVFP4 value is rounded once. bfloat16 and float16 are rounded
        from float32.
        """
        if dtype not in OUTPUT_DTYPES:
            raise FormatError(f"dtype={dtype} must be one of {OUTPUT_DTYPES}")
        values = decode(self.data, self.fmt.element)
        if self.scale is None:
            return _widen(values) if dtype == torch.float64 else values.to(dtype)
        # data * s has at most 6 significant bits and g 24, so float64 holds the product
        scale = _widen(self.scale.float())
        if self.tensor_scale is not None:
            scale = scale * _widen(self.tensor_scale)
        blocked = _to_blocks(values.double(), self.axis, self.fmt.block)
        blocked.mul_(_blocked_scale(scale, self.axis))
        exact = _from_blocks(blocked, self.axis, self.shape)
        return exact if dtype == torch.float64 else _narrow(exact).to(dtype)


def quantise(x: Tensor, fmt: str | FormatSpec, *, axis: Axis = -1) -> Quantised:
    """Quantise `x` with one scale per block of `fmt.block` values along `axis`.

    x: float32, bfloat16 or float16, one or more dimensions, any strides, any sizes, 0 included;
        not changed, and its gradient is not tracked.
    fmt: a name in `FORMATS`, or a spec.
    axis: the contraction axis (last for rows, first or -2 for columns), or two axes for square
        blocks with one scale each, so that a weight has the same codes along both.
    Raises FormatError for an unknown format, dtype or axis.
    """
    spec = resolve(fmt)
    axis = _check(x, axis)
    element = _ELEMENTS[spec.element]
    if spec.scale == "none":
        data, scale, tensor_scale = _bf16(x.detach()), None, None
    else:
        blocks = _to_blocks(x.detach().float(), axis, spec.block)
        # magnitudes are in the order of their bits, infinity and then NaN last
        magnitude = blocks.view(torch.int32) & _MAGNITUDE
        amax = magnitude.amax(dim=_block_dims(axis), keepdim=True).view(torch.float32)
        bad = ~torch.isfinite(amax)
        if spec.rule == "nvfp4":
            scale, tensor_scale, scaled = _nvfp4_scale(blocks, amax, bad)
        else:
            scale, scaled = _e8m0_scale(blocks, amax, bad, element, spec.rule)
            tensor_scale = None
        data = _from_blocks(_encode(scaled, spec.element, bad), axis, x.shape)
        scale = scale.squeeze(_block_dims(axis))
    return Quantised(
        data=data, scale=scale, tensor_scale=tensor_scale, shape=x.shape, axis=axis, fmt=spec
    )


def decode(data: Tensor, element: Element) -> Tensor:
    """Element codes as float32 values, without scales; same shape."""
    if element != "e2m1":
        return data.float()
    values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=data.device)
    return values[data.long()]


def resolve(fmt: str | FormatSpec) -> FormatSpec:
    """The spec of a format's name; FormatError if there is none."""
    if isinstance(fmt, FormatSpec):
        return fmt
    if fmt not in FORMATS:
        raise FormatError(f"fmt={fmt!r} must be one of {', '.join(FORMATS)}")
    return FORMATS[fmt]


def sqnr_db(reference: Tensor, approx: Tensor) -> float:
    """Signal to quantisation noise, 10 log10(sum ref^2 / sum (ref - approx)^2), in dB.

    Computed in float64. Infinite where the two are equal; NaN where a value of either is not
    finite. FormatError if the shapes differ.
    """
    if reference.shape != approx.shape:
        raise FormatError(f"approx.shape={tuple(approx.shape)} must be {tuple(reference.shape)}")
    ref = _widen(reference.detach())
    noise = torch.linalg.vector_norm(ref - _widen(approx.detach())).item()
    signal = torch.linalg.vector_norm(ref).item()
    if not (math.isfinite(noise) and math.isfinite(signal)):
        return math.nan
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def _check(x: Tensor, axis: Axis) -> Axis:
    """`axis` made non-negative and ascending."""
    if x.dtype not in INPUT_DTYPES:
        raise FormatError(f"x.dtype={x.dtype} must be one of {INPUT_DTYPES}")
    axes = axis if isinstance(axis, tuple) else (axis,)
    if any(not -x.ndim <= a < x.ndim for a in axes):
        raise FormatError(f"axis={axis} must be within the {x.ndim} dimensions of x")
    found = sorted(a % x.ndim for a in axes)
    if len(set(found)) != len(axes) or len(axes) not in (1, 2):
        raise FormatError(f"axis={axis} must be one axis or two different ones")
    return found[0] if len(found) == 1 else (found[0], found[1])


def _axes(axis: Axis) -> tuple[int, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def _block_dims(axis: Axis) -> tuple[int, ...]:
    """Where `_to_blocks` puts the within-block dimensions: every split before shifts by one."""
    return tuple(a + i + 1 for i, a in enumerate(_axes(axis)))


def _to_blocks(x: Tensor, axis: Axis, block: int) -> Tensor:
    """Split each blocked axis n into (ceil(n / block), block), padded with zeros."""
    for a in reversed(_axes(axis)):
        tail = -x.shape[a] % block
        if tail:
            x = nnf.pad(x, [0, 0] * (x.ndim - 1 - a) + [0, tail])
        x = x.unflatten(a, (x.shape[a] // block, block))
    return x


def _from_blocks(blocks: Tensor, axis: Axis, shape: torch.Size) -> Tensor:
    for a in _axes(axis):
        blocks = blocks.flatten(a, a + 1).narrow(a, 0, shape[a])
    return blocks.contiguous()


def _blocked_scale(scale: Tensor, axis: Axis) -> Tensor:
    for dim in _block_dims(axis):
        scale = scale.unsqueeze(dim)
    return scale


def _e8m0_scale(
    blocks: Tensor, amax: Tensor, bad: Tensor, element: _ElementSpec, rule: str
) -> tuple[Tensor, Tensor]:
    """E8M0 scales of float32 `amax`, and the blocks divided by them (exactly)."""
    bits = amax.view(torch.int32)
    if rule == "rceil":
        # carries into the exponent just when amax's mantissa is above the largest value's
        bits = bits + (0x7FFFFF - element.top_mantissa)
    # a subnormal amax has exponent field 0 or 1 here, which ends at code 0 as it should
    code = ((bits >> 23) - element.emax).clamp(min=0).masked_fill(bad, 255)
    # code <= 253 for a finite amax, so 2^(127 - code) is a normal float32
    inverse = ((254 - code) << 23).view(torch.float32).masked_fill(bad, math.nan)
    scaled = blocks * inverse
    bits = blocks.view(torch.int32)
    small = ((bits & _MAGNITUDE) < _MIN_NORMAL) & (bits & _MAGNITUDE != 0)
    if small.any():
        # a subnormal is its mantissa times 2^-149; under a scale above 2^-22 it rounds to 0
        step = ((105 - code).clamp(min=0) << 23).view(torch.float32)
        exact = ((bits & (_MIN_NORMAL - 1)) * step).copysign(blocks)
        scaled = torch.where(small & ~bad, exact, scaled)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu), scaled


def _nvfp4_scale(blocks: Tensor, amax: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 scales, the tensor scale, and the blocks divided by both, in float64.

    float64 makes the rounding decisions exact: the products below are exact in it, and a quotient
    of two numbers of at most 31 bits cannot come nearer to a tie than float64 resolves.
    """
    finite = amax.masked_fill(bad, 0.0)
    top = _widen(finite).amax() if finite.numel() else finite.new_zeros((), dtype=torch.float64)
    # clamped so that a tensor of the smallest subnormals does not divide by 0
    g = _narrow((top / (6.0 * 448.0)).clamp(min=_MIN_FLOAT32))
    ratio = _to_grid(_widen(amax) / (6.0 * _widen(g)), 448.0, mantissa=3, emin=-6)
    scale = ratio.masked_fill(bad, math.nan).float().to(torch.float8_e4m3fn)
    step = scale.double() * _widen(g)
    # where the scale is 0 the block's data are 0: dividing by infinity keeps the sign
    scaled = _widen(blocks) / step.masked_fill(step == 0, math.inf)
    return scale, g, scaled


def _bf16(x: Tensor) -> Tensor:
    """Rounded to nearest even; only an infinity becomes one. A tensor of its own."""
    rounded = x.to(torch.bfloat16, copy=True)
    largest = torch.full_like(rounded, _ELEMENTS["bf16"].largest).copysign(rounded)
    return torch.where(rounded.isinf() & ~x.isinf(), largest, rounded)


def _widen(x: Tensor) -> Tensor:
    """float64 of the same values, float32's subnormals too where arithmetic flushes them."""
    if x.dtype == torch.float64:
        return x
    x = x.float()
    wide, bits = x.double(), x.view(torch.int32)
    small = ((bits & _MAGNITUDE) < _MIN_NORMAL) & (bits & _MAGNITUDE != 0)
    if small.any():
        exact = ((bits & (_MIN_NORMAL - 1)).double() * _MIN_FLOAT32).copysign(x)
        wide = torch.where(small, exact, wide)
    return wide


def _narrow(x: Tensor) -> Tensor:
    """float32 of float64 values, rounded to nearest even, subnormals as well."""
    narrow, small = x.float(), (x.abs() < 2.0**-126) & (x != 0)
    if small.any():
        bits = torch.round(x.abs() / _MIN_FLOAT32)
        bits = torch.where(small, bits, 0).int().view(torch.float32)
        narrow = torch.where(small, bits.copysign(narrow), narrow)
    return narrow


def _to_grid(x: Tensor, largest: float, *, mantissa: int, emin: int) -> Tensor:
    """Round to nearest even, saturating, onto a small float's values; in the dtype of x."""
    x = x.clamp(-largest, largest)
    exponent = torch.frexp(x).exponent - 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=emin) - mantissa)
    return torch.round(x / step) * step


def _encode(scaled: Tensor, element: Element, bad: Tensor) -> Tensor:
    spec = _ELEMENTS[element]
    if element == "e2m1":
        return _e2m1_codes(scaled).masked_fill_(bad, 0)
    codes = scaled.clamp_(-spec.largest, spec.largest).to(spec.dtype).view(torch.uint8)
    return codes.masked_fill_(bad, 0x7F).view(spec.dtype)


def _e2m1_codes(scaled: Tensor) -> Tensor:
    """uint8 codes 0..15 of float32 or float64 values; a NaN gives a code without meaning."""
    integer, mantissa, bias = (
        (torch.int32, 23, 127) if scaled.dtype == torch.float32 else (torch.int64, 52, 1023)
    )
    magnitude = scaled.abs().clamp_(max=6.0)
    # below 1 the codes count halves; torch.round takes a tie to the even one
    below_one = torch.round(magnitude * 2).to(torch.uint8)
    # above, exponent and one mantissa bit are the code, rounded to nearest even by the carry
    code = magnitude.view(integer) >> (mantissa - 1)
    code.bitwise_and_(1).add_(magnitude.view(integer)).add_((1 << (mantissa - 2)) - 1)
    code = code.bitwise_right_shift_(mantissa - 1).sub_(2 * bias - 2).to(torch.uint8)
    code = torch.where(magnitude < 1, below_one, code)
    return code.add_(torch.signbit(scaled), alpha=8)
