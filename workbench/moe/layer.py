"""`MoELayer`: router, routed experts and shared expert as one torch module.

Legend: T tokens per rank, D hidden, F expert width, E experts in all, K experts per token.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from workbench.errors import InputError
from workbench.moe.autograd import routed_experts
from workbench.moe.context import Context, create_context
from workbench.moe.groups.collective import CollectiveGroup
from workbench.moe.groups.nvlink import NvlinkGroup
from workbench.moe.groups.shared import SharedGroup
from workbench.moe.groups.virtual import VirtualGroup
from workbench.moe.weights import Weights
from workbench.systems import SYSTEMS

__all__ = [
    "CollectiveGroup",
    "Context",
    "MoELayer",
    "NvlinkGroup",
    "SharedGroup",
    "VirtualGroup",
    "Weights",
    "create_context",
    "routed_experts",
]


class SharedExpert(nn.Module):
    """SwiGLU expert that every token passes: w2 @ (silu(gate) * up); weights [2F, D] and [D, F]."""

    def __init__(self, D: int, F: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w13_2FD = nn.Parameter(torch.empty(2 * F, D, dtype=dtype))
        self.w2_DF = nn.Parameter(torch.empty(D, F, dtype=dtype))

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = functional.linear(x_TD, self.w13_2FD).chunk(2, dim=1)
        act_TF = (functional.silu(gate_TF.float()) * up_TF).to(x_TD.dtype)
        return functional.linear(act_TF, self.w2_DF)


class MoELayer(nn.Module):
    """y = routed experts + shared expert, for tokens [..., D] of which a rank has T.

    The router is a float32 softmax over E logits; the K largest are kept, with `renormalise` made
    to sum to 1. Its weight and the shared expert are the same on every rank (replicated: reduce
    their gradients over ranks as for any data-parallel weight); w13 and w2 are the rank's own
    experts, or all of them in the process of a virtual group. Layers of one context share its
    slot. Ids and scores [..., K] can be given instead of routing. Collective like `routed_experts`,
    and raises what it raises. Parameters are drawn from `seed` and do not depend on ep. A deep copy
    has parameters of its own and the same context; pickle and torch.save refuse a layer, not its
    `state_dict`.

    Tokens have any strides. Under autocast those of another float dtype are cast to the layer's
    (and their gradient back), in which all is computed; without it they are refused. Under
    torch.compile the routed part is a graph break (see `routed_experts`) and runs as in eager mode,
    to the bit; router and shared expert are compiled, and rounded as the backend does.
    """

    def __init__(
        self, context: Context, *, shared_experts: int = 1, renormalise: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        if shared_experts < 0:
            raise InputError(f"shared_experts={shared_experts} must not be negative")
        c = context.config
        dtype = getattr(torch, c.dtype)
        self.context, self.renormalise = context, renormalise
        hosted = len(context.group.hosted)
        experts = hosted * c.local_experts
        self.router_ED = nn.Parameter(torch.empty(c.E, c.D, dtype=torch.float32))
        self.w13_E2FD = nn.Parameter(torch.empty(experts, 2 * c.F, c.D, dtype=dtype))
        self.w2_EDF = nn.Parameter(torch.empty(experts, c.D, c.F, dtype=dtype))
        self.shared = SharedExpert(c.D, shared_experts * c.F, dtype) if shared_experts else None
        self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draws all parameters, each expert's from its own stream; std 1 / sqrt(inputs)."""
        c = self.context.config
        first = self.context.group.hosted[0] * c.local_experts
        _draw(self.router_ED, seed, 0)
        for i in range(len(self.w13_E2FD)):
            _draw(self.w13_E2FD[i], seed, 1 + 2 * (first + i))
            _draw(self.w2_EDF[i], seed, 2 + 2 * (first + i))
        if self.shared is not None:
            _draw(self.shared.w13_2FD, seed, 1 + 2 * c.E)
            _draw(self.shared.w2_DF, seed, 2 + 2 * c.E)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k ids int64 [T, K] and scores float32 [T, K]; differentiable in the scores."""
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = functional.linear(x_TD.float(), self.router_ED.float())
        scores_TK, ids_TK = logits_TE.softmax(1).topk(self.context.config.K, dim=1)
        if self.renormalise:
            scores_TK = scores_TK / scores_TK.sum(1, keepdim=True)
        return ids_TK, scores_TK

    def forward(
        self, x: Tensor, topk_ids_TK: Tensor | None = None, topk_scores_TK: Tensor | None = None
    ) -> Tensor:
        c, device = self.context.config, self.context.device
        dtype, tokens = getattr(torch, c.dtype), len(self.context.group.hosted) * c.T
        casts = torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, enabled=False):
            x_TD = _rows(x, dtype if casts else None)
            # Other tokens go on as they are: the group refuses them, so that no rank waits.
            fits = (
                _dense(x_TD)
                and x_TD.device == device
                and x_TD.dtype == dtype
                and tuple(x_TD.shape) == (tokens, c.D)
            )
            ids_TK = _rows(topk_ids_TK, None)
            scores_TK = _rows(topk_scores_TK, torch.float32 if casts else None)
            if ids_TK is None and scores_TK is None and fits:
                ids_TK, scores_TK = self.route(x_TD)
            shared, inside = self.shared, SYSTEMS[c.pipeline].hides_shared
            weights = Weights(self.w13_E2FD, self.w2_EDF)
            if shared is not None and inside:
                weights = weights._replace(
                    shared_w13_2SFD=shared.w13_2FD, shared_w2_DSF=shared.w2_DF
                )
            y_TD = routed_experts(x_TD, ids_TK, scores_TK, weights, self.context)
            if not fits:
                return y_TD
            if shared is not None and not inside:
                y_TD = y_TD + shared(x_TD)
            return y_TD.view(x.shape)


def _dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def _rows(value: Any, cast: torch.dtype | None) -> Any:
    """[..., n] as contiguous rows, of another float dtype if `cast`; what has none as it is."""
    if not _dense(value) or not value.dim():
        return value
    if cast is not None and value.is_floating_point():
        value = value.to(cast)
    return torch.atleast_2d(value).flatten(0, -2).contiguous()


def _draw(weight: Tensor, seed: int, stream: int) -> None:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + stream)
    weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
