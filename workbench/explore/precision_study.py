"""Quantisation error of a small real SwiGLU MLP, forward and backward: pure functions, no widgets.

T tokens, D model width, F expert width, K contraction length of the single GEMM; a suffix on a
tensor is its shape. The data kind shapes the activations; weights and the output gradient are
Gaussian. What a mixed-precision expert does is followed in the order it does it:

- forward: x and h quantised along rows, the weights in square blocks (one set of codes serves
  forward and dgrad), gate and up kept in BF16, SwiGLU in float32;
- backward: dy and dh1 along rows for dgrad, x, h, dy and dh1 along columns for wgrad.

The reference is the same layer in float64 on the same unquantised inputs.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.kernels.formats import Axis, FormatSpec, Quantised, quantise, resolve, sqnr_db

Kind = Literal["gaussian", "student_t", "outlier_channel", "tensor"]
KINDS: tuple[Kind, ...] = get_args(Kind)
METRICS = ("tensor", "gemm", "mlp", "dx", "dw13", "dw2")

STUDENT_DOF = 3
OUTLIER_EVERY = 128
OUTLIER_GAIN = 30.0
MAX_ELEMENTS = 1 << 28
ROWS, COLUMNS = -1, 0
SQUARE = (0, 1)
E8M0_BIAS = 127


class StudyError(InputError):
    """A study or a tensor file that cannot be used; the message gives field, value and rule."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One layer on one kind of data; equal studies (the tensor's content included) are one.

    T, D, F: layer sizes. gemm_rows, gemm_k: the tensor whose own error is given, which is also the
    left operand of the single GEMM (gemm_rows x gemm_k by gemm_k x gemm_rows).
    tensor: for kind "tensor" only: float32, finite, not all zero; its last axis is the width, and
    evenly spaced rows and the first columns are used where it is larger than the study; where it is
    smaller, the study shrinks. A vector is folded into rows first.
    Raises StudyError.
    """

    kind: Kind = "gaussian"
    seed: int = 0
    T: int = 128
    D: int = 512
    F: int = 256
    gemm_rows: int = 48
    gemm_k: int = 7168
    tensor: Tensor | None = field(default=None, compare=False, repr=False)
    digest: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise StudyError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")
        if self.seed < 0:
            raise StudyError(f"seed={self.seed} must not be negative")
        for name in ("T", "D", "F", "gemm_rows", "gemm_k"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name}={getattr(self, name)} must be at least 1")
        if (self.kind == "tensor") != (self.tensor is not None):
            raise StudyError(f"kind={self.kind!r} must be 'tensor' just when a tensor is given")
        if self.tensor is not None:
            # a copy, so that what is cached under the digest cannot change
            own = check_tensor(self.tensor, "tensor").clone(memory_format=torch.contiguous_format)
            object.__setattr__(self, "tensor", own)
            content, shape = own.numpy(), repr(tuple(own.shape)).encode()
            object.__setattr__(
                self, "digest", hashlib.sha256(shape + content.tobytes()).hexdigest()
            )


def sqnr(study: Study, fmt: str | FormatSpec) -> dict[str, float]:
    """SQNR in dB by metric (`METRICS`) of one format; cached. Infinite where nothing is lost."""
    with _one_thread():
        return dict(_sqnr(study, resolve(fmt)))


def sqnr_table(study: Study, formats: Sequence[str]) -> pd.DataFrame:
    """One row per format and metric: fmt, label, bits_per_value, metric, sqnr_db."""
    rows = [
        (spec.name, spec.label, spec.bits_per_value, metric, value)
        for spec in map(resolve, formats)
        for metric, value in sqnr(study, spec).items()
    ]
    return pd.DataFrame(rows, columns=["fmt", "label", "bits_per_value", "metric", "sqnr_db"])


def scale_histogram(study: Study, formats: Sequence[str]) -> pd.DataFrame:
    """Blocks per scale exponent of the study's tensor, along rows: fmt, label, exponent, blocks.

    The exponent is floor(log2 scale), NVFP4's with the tensor scale in it. Scales of 0 (NVFP4)
    count at -127, where E8M0 puts an all-zero block. A format without scales has no rows.
    """
    with _one_thread():
        counts = [(spec, *_scale_counts(study, spec)) for spec in map(resolve, formats)]
    frames = [
        pd.DataFrame({"fmt": s.name, "label": s.label, "exponent": exponents, "blocks": blocks})
        for s, exponents, blocks in counts
    ]
    columns = ["fmt", "label", "exponent", "blocks"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def load_tensor(path: str | Path) -> Tensor:
    """The float32 tensor of a .npy or .pt file. No code in the file can run.

    Raises StudyError for a missing file, another suffix, anything but one real floating-point
    tensor or array, an object pickle, no elements or over 2^28, NaN, infinity, or zeros only.
    """
    path = Path(path)
    readers = {".npy": _read_npy, ".pt": _read_pt, ".pth": _read_pt}
    if path.suffix not in readers:
        raise StudyError(f"path={path.name!r} must end in {', '.join(readers)}")
    if not os.path.isfile(path):  # False for a name that no file system takes
        raise StudyError(f"path={path.name!r} must be an existing file")
    try:
        loaded = readers[path.suffix](path)
    except StudyError:
        raise
    except Exception as error:  # the readers raise a dozen kinds for a malformed file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StudyError(f"path={path.name!r} must hold one plain tensor: {reason}") from error
    return check_tensor(loaded, f"path={path.name!r}")


def check_tensor(x: Tensor, name: str) -> Tensor:
    """`x` as dense float32 on the CPU, or StudyError; `name` begins the message."""
    if not x.is_floating_point():
        raise StudyError(f"{name} dtype={x.dtype} must be a floating-point type")
    if x.layout != torch.strided or x.device.type == "meta":
        raise StudyError(f"{name} layout={x.layout} on {x.device} must be dense, with its data")
    if not 0 < x.numel() <= MAX_ELEMENTS:
        raise StudyError(f"{name} shape={tuple(x.shape)} must hold 1 to {MAX_ELEMENTS} values")
    values = x.detach().cpu().float()
    if not torch.isfinite(values).all():
        raise StudyError(f"{name} values must be finite in float32: it holds NaN or infinity")
    if not values.any():
        raise StudyError(f"{name} values must not all be zero")
    return values


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on one thread inside: the operations are small, and a busy second core stalls them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read_npy(path: Path) -> Tensor:
    # mapped, so that a header that claims more than the file holds is refused before memory is
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise StudyError(f"path={path.name!r} must hold one array, not an archive")
    if array.dtype.kind != "f":
        raise StudyError(f"path={path.name!r} dtype={array.dtype} must be a floating-point type")
    if array.size > MAX_ELEMENTS:
        raise StudyError(f"path={path.name!r} shape={array.shape} must hold at most {MAX_ELEMENTS}")
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))


def _read_pt(path: Path) -> Tensor:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Tensor):
        raise StudyError(f"path={path.name!r} must hold one tensor, not a {type(loaded).__name__}")
    return loaded


@dataclass(frozen=True, kw_only=True, eq=False)
class _Operands:
    """Weights and output gradient: what stays when the data kind changes. Read only."""

    b_NK: Tensor
    w13_2FD: Tensor
    w2_DF: Tensor
    dy_TD: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _Data:
    """Activations: the sample as given, the power of two that brings it near 1, layer input."""

    sample_MK: Tensor
    unit: float
    x_TD: Tensor


@lru_cache(maxsize=8)
def _data(study: Study) -> _Data:
    if study.tensor is not None:
        sample_MK = _crop(study.tensor, study.gemm_rows, study.gemm_k)
        x_TD = _crop(study.tensor, study.T, study.D)
    else:
        rng = np.random.default_rng([study.seed, 0])
        sample_MK = _draw(rng, study.kind, study.gemm_rows, study.gemm_k)
        x_TD = _draw(rng, study.kind, study.T, study.D)
    # unit mean square, as the norm before the layer makes it, so that SwiGLU works in its range
    x_TD = (x_TD.double() / _rms(x_TD)).float()
    unit = 2.0 ** -math.floor(math.log2(_rms(sample_MK)))
    return _Data(sample_MK=sample_MK, unit=unit, x_TD=x_TD)


@lru_cache(maxsize=8)
def _operands(seed: int, T: int, D: int, F: int, N: int, K: int) -> _Operands:
    rng = np.random.default_rng([seed, 1])
    return _Operands(
        b_NK=_draw(rng, "gaussian", N, K),
        w13_2FD=_draw(rng, "gaussian", 2 * F, D) * D**-0.5,
        w2_DF=_draw(rng, "gaussian", D, F) * F**-0.5,
        dy_TD=_draw(rng, "gaussian", T, D),
    )


def _operands_of(study: Study) -> _Operands:
    data = _data(study)
    (T, D), (N, K) = data.x_TD.shape, data.sample_MK.shape
    return _operands(study.seed, T, D, study.F, N, K)


@lru_cache(maxsize=128)
def _rounded_weights(weights: _Operands, spec: FormatSpec) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _rounded(weights.b_NK, spec, ROWS),
        _rounded(weights.w13_2FD, spec, SQUARE),
        _rounded(weights.w2_DF, spec, SQUARE),
    )


@lru_cache(maxsize=8)
def _exact(study: Study) -> dict[str, Tensor]:
    data, w = _data(study), _operands_of(study)
    sample_MK = data.sample_MK.double()
    b_NK, w13_2FD, w2_DF = w.b_NK.double(), w.w13_2FD.double(), w.w2_DF.double()
    return {
        "tensor": sample_MK,
        "gemm": sample_MK * data.unit @ b_NK.T,
        **_layer(data.x_TD.double(), w13_2FD, w2_DF, w.dy_TD.double(), spec=None),
    }


@lru_cache(maxsize=128)
def _sqnr(study: Study, spec: FormatSpec) -> tuple[tuple[str, float], ...]:
    data, w, exact = _data(study), _operands_of(study), _exact(study)
    b_NK, w13_2FD, w2_DF = _rounded_weights(w, spec)
    sample_MK = _quantised_sample(study, spec).dequantise()
    approx = {
        "tensor": sample_MK,
        # a power of two, so only the range changes: no sum below overflows whatever the tensor
        "gemm": sample_MK * data.unit @ b_NK.T,
        **_layer(data.x_TD, w13_2FD, w2_DF, w.dy_TD, spec=spec),
    }
    return tuple((metric, sqnr_db(exact[metric], approx[metric])) for metric in METRICS)


def _layer(
    x_TD: Tensor, w13_2FD: Tensor, w2_DF: Tensor, dy_TD: Tensor, *, spec: FormatSpec | None
) -> dict[str, Tensor]:
    """The MLP forward and backward on rounded weights; `spec` None: exact in the inputs' dtype."""

    def q(x: Tensor, axis: Axis) -> Tensor:
        return x if spec is None else _rounded(x, spec, axis)

    def stored(x: Tensor) -> Tensor:
        return x if spec is None else x.bfloat16().float()

    gate_TF, up_TF = stored(q(x_TD, ROWS) @ w13_2FD.T).chunk(2, dim=1)
    sigmoid_TF = torch.sigmoid(gate_TF)
    silu_TF = gate_TF * sigmoid_TF
    h_TF = silu_TF * up_TF
    y_TD = q(h_TF, ROWS) @ w2_DF.T

    dh_TF = stored(q(dy_TD, ROWS) @ w2_DF)
    dgate_TF = dh_TF * up_TF * (sigmoid_TF + silu_TF * (1 - sigmoid_TF))
    dh1_T2F = torch.cat([dgate_TF, dh_TF * silu_TF], dim=1)
    return {
        "mlp": y_TD,
        "dx": q(dh1_T2F, ROWS) @ w13_2FD,
        "dw13": q(dh1_T2F, COLUMNS).T @ q(x_TD, COLUMNS),
        "dw2": q(dy_TD, COLUMNS).T @ q(h_TF, COLUMNS),
    }


def _rounded(x: Tensor, spec: FormatSpec, axis: Axis) -> Tensor:
    return quantise(x, spec, axis=axis).dequantise()


@lru_cache(maxsize=32)
def _quantised_sample(study: Study, spec: FormatSpec) -> Quantised:
    return quantise(_data(study).sample_MK, spec, axis=ROWS)


@lru_cache(maxsize=128)
def _scale_counts(study: Study, spec: FormatSpec) -> tuple[np.ndarray, np.ndarray]:
    quantised = _quantised_sample(study, spec)
    if quantised.scale is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if quantised.tensor_scale is None:
        exponents = quantised.scale_codes.long() - E8M0_BIAS
    else:
        scale = quantised.scale.double() * quantised.tensor_scale.double()
        exponents = (torch.frexp(scale).exponent - 1).masked_fill(scale == 0, -E8M0_BIAS)
    return np.unique(exponents.numpy(), return_counts=True)


def _draw(rng: np.random.Generator, kind: Kind, rows: int, columns: int) -> Tensor:
    """[rows, columns] float32."""
    if kind == "student_t":
        values = rng.standard_t(STUDENT_DOF, (rows, columns)).astype(np.float32)
    else:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
    if kind == "outlier_channel":
        outliers = max(1, columns // OUTLIER_EVERY)
        values[:, rng.choice(columns, outliers, replace=False)] *= OUTLIER_GAIN
    return torch.from_numpy(values)


def _crop(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """At most [rows, columns] of a tensor: evenly spaced rows, the first columns."""
    x = tensor
    if x.ndim < 2:
        flat = x.reshape(-1)
        width = min(columns, flat.numel())
        x = flat[: flat.numel() // width * width].reshape(-1, width)
    x = x.reshape(-1, x.shape[-1])
    picked = torch.linspace(0, x.shape[0] - 1, min(rows, x.shape[0])).round().long()
    return x[picked, :columns].contiguous()


def _rms(x: Tensor) -> float:
    """Root mean square in float64; 1 where x is all zero."""
    return x.double().square().mean().sqrt().item() or 1.0
