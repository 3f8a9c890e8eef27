"""The weights of a layer as one value: what a call is given, and what its gradients are."""

from typing import NamedTuple

from torch import Tensor


class Weights(NamedTuple):
    """w13 [E, 2F, D] and w2 [E, D, F] of a process's own experts, gate and up in halves of w13;
    and, for a pipeline that runs the shared expert itself, its [2SF, D] and [D, SF], the same on
    every rank. As gradients, None stands for what is not wanted."""

    w13_E2FD: Tensor | None
    w2_EDF: Tensor | None
    shared_w13_2SFD: Tensor | None = None
    shared_w2_DSF: Tensor | None = None

    def of_rank(self, v: int, experts: int) -> "Weights":
        """Those of the v-th rank that a process hosts: `experts` of the routed ones, and of several
        gradients of the shared expert its own; views."""
        own = (None if w is None else w[v * experts : (v + 1) * experts] for w in self[:2])
        shared = (w if w is None or w.dim() == 2 else w[v] for w in self[2:])
        return Weights(*own, *shared)

    def summed(self) -> "Weights":
        """Gradients of the call: those of the shared expert summed over the ranks hosted."""
        shared = (None if g is None else g.sum(0) for g in self[2:])
        return Weights(*self[:2], *shared)


NO_WEIGHTS = Weights(None, None)
