"""What is measured: the layers of a case on one rank, with inputs that any rank can draw again.

Legend: T tokens per rank, D hidden, F expert width, E experts in all, K experts per token, e of
this rank, S shared experts.
"""

from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.case import Case
from workbench.kernels.words import Decide
from workbench.moe.autograd import routed_experts
from workbench.moe.context import Context
from workbench.moe.layer import SharedExpert
from workbench.moe.weights import Weights
from workbench.routing import Routes, case_routes
from workbench.runtime import find_runtime, to_host
from workbench.systems import SYSTEMS

KEPT = 2**24
"""Elements of all ranks' tokens up to which they are drawn once and kept."""
GRADIENTS = ("x", "scores", "w13", "w2", "shared_w13", "shared_w2")


class SeededInputs:
    """The seeded inputs of a case: the same for a seed wherever they are drawn on one kind of
    device."""

    def __init__(self, case: Case, seed: int, device: str = "cpu") -> None:
        self.case, self.seed, self.runtime = case, seed, find_runtime(device)
        self.device = self.runtime.current()
        self.dtype = torch.bfloat16
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def routes(self, layer: int) -> Routes:
        return case_routes(self.case, layer, self.seed)

    def tokens(self, rank: int) -> tuple[Tensor, Tensor]:
        """x [T, D] and the gradient of the output, dy [T, D]."""
        c = self.case
        if rank in self._kept:
            return self._kept[rank]
        x_TD, dy_TD = (self._normal(1.0, (0, rank, kind), c.T, c.D) for kind in (0, 1))
        if c.ep * c.T * c.D <= KEPT:
            self._kept[rank] = x_TD, dy_TD
        return x_TD, dy_TD

    def expert(self, layer: int, e: int) -> tuple[Tensor, Tensor]:
        """w13 [2F, D] and w2 [D, F] of a routed expert, std 1 / sqrt(inputs)."""
        return self._weights((1, layer, e), self.case.F)

    def shared(self, layer: int) -> tuple[Tensor, Tensor]:
        """w13 [2SF, D] and w2 [D, SF] of the shared expert."""
        return self._weights((2, layer, 0), self.case.sharedExperts * self.case.F)

    def _weights(self, stream: tuple[int, int, int], F: int) -> tuple[Tensor, Tensor]:
        D = self.case.D
        w13_2FD = self._normal(D**-0.5, (*stream, 0), 2 * F, D)
        return w13_2FD, self._normal(F**-0.5, (*stream, 1), D, F)

    def _normal(self, std: float, stream: tuple[int, ...], *shape: int) -> Tensor:
        (word,) = np.random.SeedSequence([self.seed, *stream]).generate_state(1, np.uint64)
        drawn: Tensor = self.runtime.normal(int(word >> np.uint64(1)), shape)
        return drawn.mul_(std).to(self.dtype)


class CaseLayers:
    """The layers of a case on the ranks of this process: `forward` through all, `backward` from the
    last to the first. Every layer has weights, a load and gradients of its own; all take the same
    tokens."""

    def __init__(self, case: Case, context: Context, inputs: SeededInputs) -> None:
        self.case, self.context = case, context
        self.ranks = context.group.hosted
        self.training = case.mode == "training"
        self.shared_inside = SYSTEMS[case.pipeline].hides_shared
        self.local = case.E // case.ep
        own = range(self.ranks[0] * self.local, (self.ranks[-1] + 1) * self.local)
        x_TD, self.dy_TD = map(torch.cat, zip(*map(inputs.tokens, self.ranks), strict=True))
        self.x_TD = x_TD.requires_grad_(self.training)
        self.layers: list[dict[str, Any]] = []
        for number in range(case.layers):
            routes = inputs.routes(number)
            experts = [inputs.expert(number, e) for e in own]
            ids, scores = (
                np.concatenate([part[rank] for rank in self.ranks])
                for part in (routes.ids, routes.scores)
            )
            layer: dict[str, Any] = {
                "ids": torch.from_numpy(ids).to(inputs.device),
                "scores": torch.from_numpy(scores).to(inputs.device),
                "w13": torch.stack([w13 for w13, _ in experts]),
                "w2": torch.stack([w2 for _, w2 in experts]),
                "shared": None,
            }
            if case.sharedExperts:
                layer["shared"] = _shared(*inputs.shared(number))
            for name in ("scores", "w13", "w2"):
                layer[name].requires_grad_(self.training)
            self.layers.append(layer)
        self.y: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.counts: list[Tensor] | None = None

    def expert(self, layer: int, e: int) -> tuple[Tensor, Tensor]:
        """w13 and w2 of an expert of this process, as `SeededInputs.expert` gives them."""
        at = e - self.ranks[0] * self.local
        return self.layers[layer]["w13"][at], self.layers[layer]["w2"][at]

    def found(self, layer: int, rank: int) -> dict[str, Tensor]:
        """What the last iteration left of a rank: y [T, D], and the gradients of its x, scores and
        experts."""
        at, T = rank - self.ranks[0], self.case.T
        tokens, experts = slice(at * T, (at + 1) * T), slice(at * self.local, (at + 1) * self.local)
        found = {"y": self.y[layer][tokens]}
        if self.training:
            gradients = self.gradients[layer]
            found |= {f"d{name}": gradients[name][tokens] for name in ("x", "scores")}
            found |= {f"d{name}": gradients[name][experts] for name in ("w13", "w2")}
        return found

    def steps(self) -> dict[str, Any]:
        steps = {"forward": self.forward}
        return steps | {"backward": self.backward} if self.training else steps

    def forward(self) -> None:
        self.y = []
        with torch.set_grad_enabled(self.training):
            for number, layer in enumerate(self.layers):
                shared, weights = layer["shared"], Weights(layer["w13"], layer["w2"])
                if shared is not None and self.shared_inside:
                    weights = weights._replace(
                        shared_w13_2SFD=shared.w13_2FD, shared_w2_DSF=shared.w2_DF
                    )
                y_TD = routed_experts(
                    self.x_TD, layer["ids"], layer["scores"], weights, self.context
                )
                if shared is not None and not self.shared_inside:
                    y_TD = y_TD + shared(self.x_TD)
                self.y.append(y_TD)
                if self.counts is not None:
                    self.counts.append(self.context.counts(number if self.training else 0))

    def backward(self) -> None:
        self.gradients = [{} for _ in self.layers]
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            wanted = [self.x_TD, layer["scores"], layer["w13"], layer["w2"]]
            if layer["shared"] is not None:
                wanted += [layer["shared"].w13_2FD, layer["shared"].w2_DF]
            found = torch.autograd.grad(self.y[number], wanted, self.dy_TD)
            self.y[number] = self.y[number].detach()
            self.gradients[number] = dict(zip(GRADIENTS, found, strict=False))

    def fingerprints(self) -> list[str]:
        """SHA-256 of every output and gradient of the last iteration, bit for bit. Hashes take no
        memory on the device, which copies to compare with would."""
        held = [*self.y, *(found for layer in self.gradients for found in layer.values())]
        return [
            sha256(to_host(tensor.contiguous().view(torch.uint8)).detach().numpy().data).hexdigest()
            for tensor in held
        ]

    def saved(self, rank: int) -> tuple[list[int], list[int]]:
        """Between forward and backward: (bytes that each layer of a rank holds in the slot, 1 for a
        layer that backward will recompute)."""
        own = to_host(self.context.memory(rank).own("decisions"))
        decisions = own[: len(self.layers)].tolist()
        held = [d[Decide.END] - d[Decide.BASE] if d[Decide.END] else 0 for d in decisions]
        return held, [int(d[Decide.KEPT] < d[Decide.ROWS]) for d in decisions]


def _shared(w13_2FD: Tensor, w2_DF: Tensor) -> SharedExpert:
    expert = SharedExpert(w2_DF.shape[0], w2_DF.shape[1], w2_DF.dtype)
    expert.w13_2FD = torch.nn.Parameter(w13_2FD)
    expert.w2_DF = torch.nn.Parameter(w2_DF)
    return expert
