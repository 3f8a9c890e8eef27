"""The systems: what each (backend, pipeline) is, stated once and read everywhere.

A system of one's own is declared in a module that is importable on every rank and named in the
environment variable WORKBENCH_SYSTEMS (several: separated by commas). Its constant SYSTEMS is a
sequence of `System`; its pipeline is another module (see `workbench.moe.pipelines.parts`). It is
then costed, planned, run, recorded and swept as the ones below; without a calibration that holds
it, its time is refused, not guessed.

Sources: the published GB300 study (2026-10-16) for dist_moe and mok; `alltoall` is the unfused
baseline of this project.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from workbench.errors import InputError
from workbench.extensions import declared

MODES = ("inference", "training")

BF16_BYTES = 2.0
MXFP8_BYTES = 33 / 32
"""One byte of data, and one E8M0 scale for each 32 of them."""

WIRE = (BF16_BYTES, BF16_BYTES)


@dataclass(frozen=True, kw_only=True)
class System:
    """One pipeline of one backend. Where a field maps a precision, one that it leaves out has the
    usual value."""

    backend: str
    pipeline: str
    precisions: tuple[str, ...]
    modes: tuple[str, ...] = MODES
    published: bool = False
    """Whether the study measured it, and says what it reserves and how much memory it takes."""
    expert_rows: Mapping[str, int] = field(default_factory=dict)
    """precision -> rows that the rows of each local expert are padded to (1: none)."""
    tile_rows: int = 128
    """Rows of a tile of its grouped products: what their time is proportional to."""
    hidden_multiple: int = 1
    """What D must be divisible by."""
    hides_shared: bool = False
    """Whether the shared expert runs inside the pipeline, behind the dispatch."""
    hides_wgrad: bool = False
    """Whether weight gradients are computed beside the transport of backward."""
    peer_memory: bool = True
    """Whether ranks read and write one another's memory, which hides transport behind compute and
    keeps them in one scale-up domain; else only collectives."""
    keeps: Literal["slot", "rows", "all"] = "slot"
    """What a layer keeps for backward. slot: all that it needs, or its input alone where the slot
    is full, and the rest is recomputed. rows: those of its first rows, and the others are
    replayed. all: everything, whatever it receives."""
    wire: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """(precision, mode) -> bytes per element of a routed row on its way to the expert and back, in
    each pass; BF16 both ways where nothing is said."""
    capacity: tuple[str, ...] = ()
    """Fields of a record's `capacity` that its packing cases in training have."""
    tolerance: Mapping[str, float] = field(default_factory=dict)
    """precision that our layer runs it in -> largest relative error that the gate accepts."""
    module: str = ""
    """The module of our pipeline; empty where there is none yet."""

    @property
    def reserves(self) -> Literal["slot", "rows", "none"]:
        """How the study says that it sets memory aside before it knows the load; none for what
        does not, or of which nobody says."""
        return self.keeps if self.published and self.keeps != "all" else "none"

    @property
    def external(self) -> bool:
        """Whether it is the user's own."""
        return self not in BUILT_IN

    def padding(self, precision: str) -> int:
        return self.expert_rows.get(precision, 1)

    def wire_bytes(self, precision: str, mode: str) -> tuple[float, float]:
        """Bytes per element (to the expert, back from it) in one pass."""
        return self.wire.get((precision, mode), WIRE)


_SLOT_FIELDS = (
    "slotBytes",
    "slotFactor",
    "scratchBytes",
    "scratchFactor",
    "hostScratchBytes",
    "slots",
    "savedRank0Bytes",
    "maxSavedRankBytes",
    "capacityRecomputeFlags",
    "inspectedRankLayers",
)
_MXFP8_INFERENCE = {("mxfp8", "inference"): (MXFP8_BYTES, BF16_BYTES)}

BUILT_IN = (
    System(
        backend="dist_moe",
        pipeline="standard",
        precisions=("bf16",),
        published=True,
        hidden_multiple=64,
        capacity=_SLOT_FIELDS,
        tolerance={"bf16": 1e-2},
        module="workbench.moe.pipelines.standard",
    ),
    System(
        backend="dist_moe",
        pipeline="staged",
        precisions=("mxfp8",),
        published=True,
        expert_rows={"mxfp8": 128},
        hidden_multiple=64,
        wire=_MXFP8_INFERENCE,
        capacity=_SLOT_FIELDS,
    ),
    System(
        backend="dist_moe",
        pipeline="mega",
        precisions=("mxfp8",),
        published=True,
        expert_rows={"mxfp8": 128},
        hidden_multiple=64,
        hides_wgrad=True,
        wire=_MXFP8_INFERENCE,
        capacity=_SLOT_FIELDS,
    ),
    System(
        backend="mok",
        pipeline="native",
        precisions=("bf16", "mxfp8"),
        published=True,
        expert_rows={"bf16": 256, "mxfp8": 256},
        tile_rows=256,
        hides_shared=True,
        keeps="rows",
    ),
    System(
        backend="baseline",
        pipeline="alltoall",
        precisions=("bf16",),
        peer_memory=False,
        keeps="all",
        tolerance={"bf16": 1e-2},
        module="workbench.moe.pipelines.alltoall",
    ),
)


def _by_name() -> dict[str, System]:
    found: dict[str, System] = {}
    for where, systems in (("", BUILT_IN), *declared("SYSTEMS")):
        if not isinstance(systems, tuple | list):
            raise InputError(f"{where} must be a sequence of System")
        for system in systems:
            if not isinstance(system, System):
                raise InputError(f"{where}: {system!r} must be a System")
            if system.pipeline in found:
                raise InputError(f"{where}: pipeline={system.pipeline!r} must not be there already")
            if system.module and system.keeps == "rows":
                raise InputError(
                    f"{where}: {system.pipeline}: keeps='rows' must be 'slot' or 'all', as our"
                    " layer has no retained rows yet"
                )
            for mode in system.modes:
                if mode not in MODES:
                    raise InputError(f"{where}: mode={mode!r} must be one of {', '.join(MODES)}")
            found[system.pipeline] = system
    return found


SYSTEMS: Mapping[str, System] = _by_name()
"""Every system, by its pipeline, in the order of tables and legends."""

PIPELINES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    backend: {s.pipeline: s.precisions for s in SYSTEMS.values() if s.backend == backend}
    for backend in dict.fromkeys(s.backend for s in SYSTEMS.values())
}
"""backend -> pipeline -> precisions it runs in."""

TRIPLES = tuple((s.backend, s.pipeline, p) for s in SYSTEMS.values() for p in s.precisions)
"""(backend, pipeline, precision) of everything there is."""

RUN_HERE = tuple((s.backend, s.pipeline, p) for s in SYSTEMS.values() for p in s.tolerance)
"""(backend, pipeline, precision) of what our own layer runs."""
