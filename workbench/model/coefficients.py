"""The parameters of the time model: what each means, its unit, who shares it, its prior.

A parameter has one value per *slot*; groups that share a slot share the physics. A group is a
(backend, precision, pipeline). A prior (mean, deviation) is a physical expectation stated before
the fit. It weighs as much as one measurement that is off by one residual, so it decides only
what the data do not.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from workbench.systems import SYSTEMS, TRIPLES, System


class Group(NamedTuple):
    """One system in one precision and pipeline: what a set of parameters belongs to."""

    backend: str
    precision: str
    pipeline: str

    def __str__(self) -> str:
        return " ".join(self)


class Coefficient(NamedTuple):
    """`scope` maps a group to the slot that it uses; a group without one uses `otherwise`."""

    unit: str
    meaning: str
    mean: float
    deviation: float
    scope: Mapping[Group, str]
    otherwise: float = 0.0
    upper: float = float("inf")


GROUPS = tuple(Group(backend, precision, pipeline) for backend, pipeline, precision in TRIPLES)
STANDARD = Group("dist_moe", "bf16", "standard")
STAGED = Group("dist_moe", "mxfp8", "staged")
MEGA = Group("dist_moe", "mxfp8", "mega")
MOK_BF16 = Group("mok", "bf16", "native")
MOK_MXFP8 = Group("mok", "mxfp8", "native")


def _each(*groups: Group) -> dict[Group, str]:
    return {group: str(group) for group in groups}


def _by_backend(holds: Callable[[System], bool] = lambda _: True) -> dict[Group, str]:
    """One slot for each backend, for the systems that `holds` says."""
    return {group: group.backend for group in GROUPS if holds(SYSTEMS[group.pipeline])}


_ALL = dict.fromkeys(GROUPS, "all")
_FUSED_SAVE = "all but mega and mok bf16"

PARAMETERS: Mapping[str, Coefficient] = {
    "flop_efficiency": Coefficient(
        "fraction of the dense peak",
        "rate of the routed experts' GEMMs, forward, on rows padded per expert",
        0.6,
        0.2,
        _each(*GROUPS),
        upper=2.0,
    ),
    "backward_work": Coefficient(
        "forward GEMM times",
        "GEMM time of backward over that of forward: 2 by FLOP; mok spends fewer SMs on "
        "communication in backward (28 for 40), so less than 2",
        1.8,
        0.2,
        _each(MOK_BF16, MOK_MXFP8),
        otherwise=2.0,
    ),
    "layer_ms": Coefficient(
        "ms per layer",
        "fixed time of a layer's forward: route exchange, barriers, launches",
        0.25,
        0.15,
        _each(*GROUPS) | _by_backend(lambda system: system.keeps == "slot"),
    ),
    "start_ms": Coefficient(
        "ms",
        "fixed time of a forward pass, once for all layers",
        0.2,
        0.1,
        _each(MOK_BF16, MOK_MXFP8),
    ),
    "layer_backward_ms": Coefficient(
        "ms per layer", "fixed time of a layer's backward", 0.15, 0.1, _ALL
    ),
    "start_backward_ms": Coefficient(
        "ms", "fixed time of a backward pass, once for all layers", 0.15, 0.1, _ALL
    ),
    "weight_exposed": Coefficient(
        "fraction of the HBM time",
        "share of reading the local experts' weights that the forward GEMMs do not hide",
        0.3,
        0.2,
        _by_backend(),
    ),
    "grad_bytes": Coefficient(
        "bytes per local parameter",
        "HBM traffic per local weight in backward that the GEMMs do not hide: "
        "weights read, gradients written",
        3.0,
        0.5,
        _each(*GROUPS),
    ),
    "save_bytes": Coefficient(
        "bytes per row and column of F",
        "extra HBM traffic of a training forward: gate and up kept, operands quantised",
        12.0,
        8.0,
        {STANDARD: _FUSED_SAVE, STAGED: _FUSED_SAVE, MOK_MXFP8: _FUSED_SAVE, MEGA: "mega"},
    ),
    "expert_walk": Coefficient(
        "fraction of the GEMM time per local expert",
        "cost of walking the local experts per row tile of the BF16 grouped GEMM",
        0.0025,
        0.003,
        _each(STANDARD),
    ),
    "shared_exposed": Coefficient(
        "fraction of its time at the BF16 peak",
        "share of the shared expert that runs beside nothing; mok hides it behind the dispatch",
        0.8,
        0.3,
        _by_backend(lambda system: not system.hides_shared),
    ),
    "link_efficiency": Coefficient(
        "fraction of the link peak",
        "rate of dispatch and combine, one after the other, over the slower of the two levels",
        0.85,
        0.15,
        _ALL,
        upper=2.0,
    ),
    "link_fill_ms": Coefficient(
        "ms per dispatch and combine in BF16",
        "filling and draining the transport pipeline; smaller rows fill it in proportion",
        0.2,
        0.15,
        _ALL,
    ),
    "overlap_loss": Coefficient(
        "fraction",
        "extra time where transport and compute take equally long and should hide each other",
        0.12,
        0.02,
        {g: "all" for g in GROUPS if SYSTEMS[g.pipeline].peer_memory},
        otherwise=1.0,
    ),
    "balanced_slowdown": Coefficient(
        "fraction at F = 3072, growing with its square root",
        "GEMM time lost when all ranks compute at once: the slowest of many counts",
        0.05,
        0.05,
        _ALL,
    ),
    "skew_ms": Coefficient(
        "ms",
        "exit skew between ranks that forwardMS counts and iterationMS does not (last layer)",
        0.25,
        0.2,
        _each(STAGED, MEGA),
    ),
    "skew_balanced_ms": Coefficient(
        "ms", "the same, seen under balanced load only", 0.2, 0.2, _each(STANDARD)
    ),
    "replay_ms": Coefficient(
        "ms per minibatch of 4,096 rows",
        "time of replaying one minibatch in mok's backward",
        0.5,
        0.3,
        _by_backend(lambda system: system.keeps == "rows"),
    ),
    "gap_ms": Coefficient(
        "ms", "iterationMS - forwardMS of an inference iteration", 0.002, 0.005, _ALL
    ),
}

CONSTANTS: Mapping[str, float] = {
    "reference_rows": 12288.0,
    "reference_D": 7168.0,
    "reference_F": 3072.0,
    "balanced_below": 1.1,
    "slowdown_exponent": 0.5,
    "skew_onset": 0.5,
    "skew_growth": 1.2,
    "minibatch_rows": 4096.0,
}
"""Structure that is chosen, not fitted; kept in the calibration file.

`reference_...` is the study's balanced layer, whose FLOP are load 1. Load is balanced where the
busiest rank has less than `balanced_below` times the mean; the loss then grows as
(F/reference_F)**`slowdown_exponent` (chosen on the data; no mechanism is known). The exit skew is
1 - exp(-`skew_growth` * (load - `skew_onset`)) of its parameter."""


def slots(groups: Iterable[Group]) -> list[tuple[str, str]]:
    """(parameter, slot) of everything that the groups need, in a fixed order."""
    chosen = set(groups)
    found = {
        (name, slot): None
        for name, parameter in PARAMETERS.items()
        for group, slot in parameter.scope.items()
        if group in chosen
    }
    return list(found)
