"""Random cases of the layer and what the oracle says of them; used by tests and by their ranks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workbench.moe.autograd import routed_experts
from workbench.moe.config import MoEConfig
from workbench.moe.context import Context
from workbench.moe.oracle import oracle, relative_error
from workbench.moe.pages import Lender
from workbench.moe.weights import Weights

NAMES = ("y", "x", "scores", "w13", "w2")
LIMIT = {"bfloat16": 1e-2, "float32": 1e-5}


@dataclass
class Workload:
    """One call of a group: all ranks' tokens [ep * T, ...] and all experts."""

    config: MoEConfig
    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    dy: torch.Tensor

    def of_rank(self, rank: int) -> "Workload":
        c = self.config
        tokens = slice(rank * c.T, (rank + 1) * c.T)
        experts = slice(rank * c.local_experts, (rank + 1) * c.local_experts)
        return Workload(
            c,
            self.x[tokens],
            self.ids[tokens],
            self.scores[tokens],
            self.w13[experts],
            self.w2[experts],
            self.dy[tokens],
        )

    def to(self, device: torch.device | str) -> "Workload":
        tensors = (self.x, self.ids, self.scores, self.w13, self.w2, self.dy)
        return Workload(self.config, *(tensor.to(device) for tensor in tensors))

    def leaves(self) -> list[torch.Tensor]:
        return [
            t.detach().clone().requires_grad_() for t in (self.x, self.scores, self.w13, self.w2)
        ]

    def exact(self) -> tuple[np.ndarray, ...]:
        given = [as_float64(t) for t in (self.scores, self.w13, self.w2, self.dy)]
        y, grads = oracle(as_float64(self.x), self.ids.numpy(), *given)
        assert grads is not None
        return (y, *grads)


def as_float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def workload(
    config: MoEConfig, seed: int, *, empty_rank: bool = False, ids: np.ndarray | None = None
) -> Workload:
    """Random inputs; some scores are 0 and half are negative; with `empty_rank` the last rank's
    experts get nothing (needs K experts elsewhere)."""
    c = config
    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, c.dtype)
    N = c.ep * c.T

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    if ids is None:
        keys = torch.rand(N, c.E, generator=g)
        if empty_rank:
            keys[:, (c.ep - 1) * c.local_experts :] += 2
        chosen = keys.argsort(1)[:, : c.K].contiguous()
    else:
        chosen = torch.from_numpy(ids.reshape(N, c.K).astype(np.int64))
    scores = normal(N, c.K)
    scores[torch.rand(N, c.K, generator=g) < 0.1] = 0
    return Workload(
        c,
        normal(N, c.D).to(dtype),
        chosen,
        scores,
        (normal(c.E, 2 * c.F, c.D) / c.D**0.5).to(dtype),
        (normal(c.E, c.D, c.F) / c.F**0.5).to(dtype),
        normal(N, c.D).to(dtype),
    )


def random_config(seed: int, ep: int, dtype: str, **given: Any) -> tuple[MoEConfig, bool]:
    """Sizes drawn log-uniformly up to T=257, D=F=384, E=48; every other case has an empty rank
    where it can have one. Whether it does is returned too.

    In bfloat16 D and F are at least 8 and there are at least 64 routes: a result of one or two
    numbers can cancel to less than the rounding of what it is summed from. Float32 goes down to 1.
    """
    random = np.random.default_rng(seed)
    rounded = dtype == "bfloat16"

    def size(most: int, least: int = 1) -> int:
        return int(np.exp(random.uniform(np.log(least), np.log(most + 1))))

    e = size(48 // ep)
    E = ep * e
    empty = ep > 1 and seed % 2 == 0
    K = min(size(8), E - e if empty else E)
    T = size(257, -(-64 // (ep * K)) if rounded else 1)
    config = MoEConfig(
        T=T,
        D=size(384, 8 if rounded else 1),
        F=size(384, 8 if rounded else 1),
        E=E,
        K=K,
        ep=ep,
        slot_factor=float(random.choice([0.0, 0.5, 1.0, 3.0])),
        scratch_factor=float(ep),
        dtype=dtype,
        **given,
    )
    return config, empty


class Poisoned(Lender):
    """Lends tensors of NaN, so that a gradient that is not written is seen."""

    def empty_like(self, model: torch.Tensor) -> torch.Tensor:
        return super().empty_like(model).fill_(float("nan"))


def experts(x: Any, ids: Any, scores: Any, w13: Any, w2: Any, context: Context) -> torch.Tensor:
    return routed_experts(x, ids, scores, Weights(w13, w2), context)


def fill_with_nan(context: Context) -> None:
    """Fills all of the hosted ranks' arenas but words and what awaits a backward with NaN."""
    held = [entry for entry in range(context.plan.entries) if context.loan(entry)]
    kept = [
        region
        for name, region in context.plan.regions.items()
        if region.part == "words"
        or (region.part == "slot" and held)
        or any(name.endswith(f".{entry}") for entry in held)
    ]
    for rank in context.group.hosted:
        arena_B = context.memory(rank).arena_B
        before_B = arena_B.clone()
        arena_B.fill_(0xFF)
        for region in kept:
            part = slice(region.offset, region.offset + region.nbytes)
            arena_B[part] = before_B[part]


def run(mine: Workload, context: Any, *, poison: bool = True) -> tuple[torch.Tensor, ...]:
    """y and the gradients of x, scores, w13, w2 of a rank, through a poisoned arena."""
    leaves = mine.leaves()
    if poison:
        context.lender = Poisoned()
        fill_with_nan(context)
        context.group.barrier("poisoned")
    y = experts(leaves[0], mine.ids, *leaves[1:], context)
    if poison:
        context.group.barrier("forward over")
        fill_with_nan(context)
        context.group.barrier("poisoned")
    y.backward(mine.dy)
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    return (y.detach(), *grads)  # type: ignore[arg-type]


def errors(found: tuple[torch.Tensor, ...], exact: tuple[np.ndarray, ...]) -> dict[str, float]:
    """Relative error of the output and of each gradient, which must not be silently zero."""
    return {
        name: relative_error(as_float64(tensor), right)
        for name, tensor, right in zip(NAMES, found, exact, strict=True)
    }


def sliced(exact: tuple[np.ndarray, ...], rank: int, config: MoEConfig) -> tuple[np.ndarray, ...]:
    """A rank's part of all ranks' exact values."""
    T, e = config.T, config.local_experts
    tokens, experts = slice(rank * T, (rank + 1) * T), slice(rank * e, (rank + 1) * e)
    return tuple(
        a[tokens if name in ("y", "x", "scores") else experts]
        for name, a in zip(NAMES, exact, strict=True)
    )
