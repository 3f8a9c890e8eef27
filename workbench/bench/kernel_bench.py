"""The Triton kernels against their peers on a GPU: grouped product, fused dispatch, whole layer.

Written without a GPU at hand: nothing here has run on one yet.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.kernels.device import Launch, run, target_of
from workbench.kernels.dispatch import dispatch_w13
from workbench.kernels.grouped_gemm import grouped_gemm
from workbench.kernels.ops import Sizes
from workbench.kernels.peers import Kept, Peers
from workbench.kernels.words import DECIDE_WORDS, Decide, aligned
from workbench.moe.autograd import routed_experts
from workbench.moe.config import MoEConfig
from workbench.moe.context import Context, create_context
from workbench.moe.groups.virtual import VirtualGroup
from workbench.moe.weights import Weights

FIGURES = (
    "grouped_gemm_us",
    "torch_grouped_mm_us",
    "cublas_dense_us",
    "grouped_gemm_over_torch",
    "grouped_gemm_over_cublas",
    "dispatch_w13_us",
    "dispatch_over_gemm",
    "layer_standard_us",
    "layer_alltoall_us",
    "layer_standard_over_alltoall",
)
"""Times in microseconds, and ratios of rates: above 1 the first is faster. Goals on an H200:
grouped_gemm_over_torch 0.8, dispatch_over_gemm 0.9."""


def bench_kernels(sizes: Sizes | None = None) -> dict[str, float]:
    """FIGURES by name. Raises InputError where there is no GPU.

    Rows are balanced over the local experts of one rank at EP 64 of the study's shape. What is
    timed was compared with torch just before. Raises RuntimeError where it is wrong.
    """
    if not torch.cuda.is_available():
        raise InputError("bench kernels needs a CUDA device, and torch sees none")
    s = sizes or Sizes()
    scene = _scene(s)
    ours, fused = scene.grouped(), scene.dispatch()
    run(ours)
    theirs = torch._grouped_mm(scene.x_RD, scene.w13.transpose(1, 2), offs=scene.ends_e)
    _check("grouped_gemm", scene.h1_R2F, theirs)
    run(fused)
    _check("dispatch_w13", scene.h1.rows(), theirs)
    dense = scene.w13[0].t()
    gemm = _time_us(lambda: run(ours))
    torch_us = _time_us(
        lambda: torch._grouped_mm(scene.x_RD, scene.w13.transpose(1, 2), offs=scene.ends_e)
    )
    cublas = _time_us(lambda: scene.x_RD @ dense)
    dispatch = _time_us(lambda: run(fused))
    standard, alltoall = _layers_us(s)
    values = (
        gemm,
        torch_us,
        cublas,
        torch_us / gemm,
        cublas / gemm,
        dispatch,
        gemm / dispatch,
        standard,
        alltoall,
        alltoall / standard,
    )
    return dict(zip(FIGURES, values, strict=True))


@dataclass(frozen=True, kw_only=True)
class _Scene:
    """W13's product of one rank whose rows are its own tokens' in route order."""

    x: Peers
    x_RD: Tensor
    h1_R2F: Tensor
    w13: Tensor
    starts_e: Tensor
    ends_e: Tensor
    row_R: Tensor
    decision: Tensor
    x_kept: Kept
    h1: Kept

    def grouped(self) -> list[Launch]:
        return grouped_gemm(
            target_of(self.x_RD.device),
            weights=self.w13,
            weights_NK=True,
            starts_e=self.starts_e,
            decision=self.decision,
            rows=self.row_R.shape[0],
            peers=self.x,
            rank_R=None,
            row_R=self.row_R,
            a=self.x_RD,
            out=self.h1_R2F,
        )

    def dispatch(self) -> list[Launch]:
        return dispatch_w13(
            target_of(self.x_RD.device),
            x=self.x,
            rank_R=None,
            row_R=self.row_R,
            divisor=1,
            starts_e=self.starts_e,
            w13_E2FD=self.w13,
            x_kept=self.x_kept,
            h1=self.h1,
            decision=self.decision,
        )


def _scene(s: Sizes) -> _Scene:
    with torch.device("cuda"):
        x_ND = torch.randn(s.R, s.D).to(s.dtype)
        row_R = torch.randperm(s.R, dtype=torch.int32)
        w13 = (torch.randn(s.e, 2 * s.F, s.D) / s.D**0.5).to(s.dtype)
        starts_e = torch.arange(s.e + 1, dtype=torch.int64) * (s.R // s.e)
        row_bytes_O = torch.tensor([s.bytes(s.D), s.bytes(2 * s.F)])
        arena_B = torch.empty(aligned(s.bytes(s.R, s.D)) + s.bytes(s.R, 2 * s.F), dtype=torch.uint8)
        decision = torch.zeros(DECIDE_WORDS, dtype=torch.int64)
        decision[Decide.OK], decision[Decide.ROWS] = 1, s.R
        x_kept, h1 = (
            Kept(
                arena_B=arena_B,
                decision=decision,
                row_bytes_O=row_bytes_O,
                index=index,
                width=width,
                dtype=s.dtype,
            )
            for index, width in enumerate((s.D, 2 * s.F))
        )
        peers = Peers(all_P=x_ND[None], bases_P=torch.tensor([x_ND.data_ptr()]), offset=0)
        return _Scene(
            x=peers,
            x_RD=x_ND[row_R.long()],
            h1_R2F=torch.empty(s.R, 2 * s.F, dtype=s.dtype),
            w13=w13,
            starts_e=starts_e,
            ends_e=starts_e[1:].to(torch.int32),
            row_R=row_R,
            decision=decision,
            x_kept=x_kept,
            h1=h1,
        )


def _layers_us(s: Sizes) -> list[float]:
    """Forward and backward of one layer of one rank that holds the local experts alone, with
    `standard` and with `alltoall`, which are compared with each other before either is timed."""
    dtype, K = torch.bfloat16, min(s.K, s.e)
    with torch.device("cuda"):
        ids = torch.rand(s.T, s.e).argsort(1)[:, :K].contiguous()
        leaves = [
            torch.randn(s.T, s.D).to(dtype),
            torch.rand(s.T, K),
            (torch.randn(s.e, 2 * s.F, s.D) / s.D**0.5).to(dtype),
            (torch.randn(s.e, s.D, s.F) / s.F**0.5).to(dtype),
        ]
        dy = torch.randn(s.T, s.D).to(dtype)
    x, scores, w13, w2 = (leaf.requires_grad_() for leaf in leaves)

    def step(context: Context) -> tuple[Tensor, ...]:
        y = routed_experts(x, ids, scores, Weights(w13, w2), context)
        # Not `backward`, which would add every gradient to the one before.
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    times, values = [], []
    for pipeline in ("standard", "alltoall"):
        config = MoEConfig(
            T=s.T,
            D=s.D,
            F=s.F,
            E=s.e,
            K=K,
            scratch_factor=1.0,
            slot_factor=1.1,
            pipeline=pipeline,
            executor="triton",
            validate="first",
        )
        with create_context(config, VirtualGroup(1, "cuda")) as context:
            values.append(step(context))
            if pipeline == "alltoall":
                for name, *pair in zip(("y", "dx", "dscores", "dw13", "dw2"), *values, strict=True):
                    _check(name, *pair)
            times.append(_time_us(partial(step, context)))
    return times


def _check(name: str, found: Tensor, right: Tensor) -> None:
    error = float((found.float() - right.float()).norm() / right.float().norm())
    if not error < 1e-2:
        raise RuntimeError(f"{name} is wrong by {error:.2e} of its norm; it is not timed")


def _time_us(call: Callable[[], object], warm: int = 10, repeats: int = 30) -> float:
    """Median microseconds of a call on the current stream."""
    for _ in range(warm):
        call()
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)
