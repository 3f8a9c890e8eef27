"""The weights of a layer as one value: what a call is given, and what its gradients are."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

_NONE: Mapping[str, Tensor] = MappingProxyType({})


class Weights(NamedTuple):
    """w13 [E, 2F, D] and w2 [E, D, F] of a process's own experts, gate and up in halves of w13;
    and, for a pipeline that runs the shared expert itself, its [2SF, D] and [D, SF], the same on
    every rank. `prepared` has forms of the routed experts' weights that were made before the call,
    such as quantised copies, by name: [E, ...], read by pipelines that know the name and not
    differentiated. As gradients, None stands for what is not wanted."""

    w13_E2FD: Tensor | None
    w2_EDF: Tensor | None
    shared_w13_2SFD: Tensor | None = None
    shared_w2_DSF: Tensor | None = None
    prepared: Mapping[str, Tensor] = _NONE

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What is differentiated: all but the prepared forms."""
        return self[:4]

    def of_rank(self, v: int, experts: int) -> "Weights":
        """Those of the v-th rank that a process hosts: `experts` of the routed ones, and of several
        gradients of the shared expert its own; views."""
        part = slice(v * experts, (v + 1) * experts)
        w13, w2 = (None if w is None else w[part] for w in self[:2])
        shared_w13, shared_w2 = (w if w is None or w.dim() == 2 else w[v] for w in self[2:4])
        prepared = {name: form[part] for name, form in self.prepared.items()}
        return Weights(w13, w2, shared_w13, shared_w2, prepared)

    def summed(self) -> "Weights":
        """Gradients of the call: those of the shared expert summed over the ranks hosted."""
        shared_w13, shared_w2 = (None if g is None else g.sum(0) for g in self[2:4])
        return Weights(self[0], self[1], shared_w13, shared_w2)


NO_WEIGHTS = Weights(None, None)
