"""One case on the ranks of a group, from the context to the record: check, count, time.

Legend: P ranks, W windows, I iterations, E experts in all.
"""

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from workbench.bench import gate, machine
from workbench.bench.case_layers import CaseLayers, SeededInputs
from workbench.bench.job import Settings
from workbench.bench.meter import Meter, between, routed_bytes
from workbench.bench.monitor import Monitor
from workbench.bench.timing import (
    TRIES,
    Clock,
    Floats,
    measure,
    prepare,
    slowest,
    statistics,
    unevenness,
)
from workbench.case import Case, case_table
from workbench.errors import InputError
from workbench.model.cost import cost_table
from workbench.moe.config import MoEConfig
from workbench.moe.context import Context, create_context
from workbench.moe.failures import CapacityError, ClosedError, PeerError
from workbench.moe.groups.peers_group import PeerGroup
from workbench.records.protocols import NOISY_ABOVE
from workbench.records.record import make_record
from workbench.records.schema import OwnRecord
from workbench.runtime import find_runtime, to_host
from workbench.systems import SYSTEMS

GIB = 2**30
T = TypeVar("T")


class StageError(Exception):
    """What one rank's part of a case failed with; raised on every rank, with its kind."""


EXPECTED = (
    StageError,
    InputError,
    CapacityError,
    gate.GateError,
    MemoryError,
    ImportError,
    torch.OutOfMemoryError,
)
"""What fails a case on every rank alike and leaves the ranks well."""


def measure_case(
    case: Case,
    group: PeerGroup,
    settings: Settings,
    limit_s: float = math.inf,
    domains: Sequence[int] | None = None,
) -> OwnRecord:
    """The record of a case; collective, and complete on rank 0 alone, where others' samples are.
    A noisy case is measured again as far as `limit_s` for all of it allows. `domains` has the
    number of each rank's peer-access domain; by default all are in one.

    A case that fails in a way that every rank sees is a record with its reason. Raises PeerError
    or ClosedError where a rank is lost, and whatever else leaves the ranks in doubt.
    """
    started, began = datetime.now(UTC), time.perf_counter()
    found: dict[str, Any]
    try:
        found = _measured(case, group, settings, began + limit_s, domains or [0] * case.ep)
    except (PeerError, ClosedError):
        raise
    except EXPECTED as error:
        found = {"status": "failed", "reason": _reason(error)}
    seconds = {"caseSeconds": round(time.perf_counter() - began, 4)}
    provenance = _provenance(group, settings) | found.pop("provenance", {})
    provenance |= {"started": started.isoformat(timespec="seconds"), **seconds}
    return make_record(case, find_runtime(settings.device).label(), found, provenance)


def _reason(error: BaseException) -> str:
    kind = "" if isinstance(error, StageError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0]


def _together(group: PeerGroup, make: Callable[[], T]) -> T:
    """What `make` gives, which meets no peer; StageError on every rank where it fails on one, which
    would leave its peers alone in the next collective."""
    made, problem = None, None
    try:
        made = make()
    except EXPECTED as error:
        problem = _reason(error)
    for p, found in enumerate(group.gather_objects(problem)):
        if found is not None:
            del made
            raise StageError(f"{found} (rank {p})")
    assert made is not None
    return made


def _measured(
    case: Case, group: PeerGroup, settings: Settings, until: float, domains: Sequence[int]
) -> dict[str, Any]:
    runtime, protocol = group.runtime, settings.protocol
    config = MoEConfig.from_case(
        case, dtype=settings.dtype, validate="first", executor=runtime.executor
    )
    runtime.reset_peak()
    inputs = SeededInputs(case, settings.seed, settings.device)
    with create_context(config, group) as context:
        layers = _together(group, lambda: CaseLayers(case, context, inputs))
        facts = _checked(case, layers, inputs, context, domains)
        # what exchanges rows by collectives reads counts on the host, which no graph can hold
        graphs = protocol.graphs and SYSTEMS[case.pipeline].peer_memory
        clock = _together(group, lambda: Clock(group, graphs=graphs, flush_l2=protocol.flush_l2))
        timing = time.perf_counter()
        with Monitor(runtime) as monitor:
            tries = _timed(layers, context, clock, settings, until)
        timed = time.perf_counter() - timing
        mine = {"phases": _phases(layers, context), "telemetry": monitor.summary()}
        everyone = group.gather_objects(mine)
        if settings.trace_dir:
            _trace(layers, Path(settings.trace_dir) / case.id)
    uneven = [unevenness(samples["iteration"]) for samples in tries]
    used = int(np.argmin(uneven))
    peaks = facts["provenance"]["memory"]
    found = facts | _figures(case, tries[used], peaks, facts["provenance"]["traffic"])
    if settings.protocol.windows > 1:
        found["noisy"] = uneven[used] > NOISY_ABOVE
    found["samples"]["otherTries"] = [
        {name: np.round(values, 6).tolist() for name, values in samples.items()}
        for n, samples in enumerate(tries)
        if n != used
    ]
    found["provenance"] = facts["provenance"] | {
        "clock": clock.name,
        "graphs": clock.captured,
        "captured": list(layers.steps()) if clock.captured else [],
        "flushedBytes": clock.flushed_bytes,
        "synchronised": "ranks meet before each window"
        + (" and, on the device, before each iteration" if settings.device != "cpu" else ""),
        "tries": {
            "count": len(tries),
            "used": used,
            "slowestOverMedianWindow": uneven,
            "noisyAbove": NOISY_ABOVE,
        },
        "timedSeconds": round(timed, 4),
        "telemetry": [one["telemetry"] for one in everyone],
        "phasesMS": [one["phases"] for one in everyone],
    }
    return found


def _timed(
    layers: CaseLayers, context: Context, clock: Clock, settings: Settings, until: float
) -> list[dict[str, Floats]]:
    """Samples [P, W, I] of each step, of every try; another follows a noisy one where all ranks
    have the time for it until `until`. Raises GateError on every rank where any rank's last timed
    iteration left other outputs or gradients than those that were checked."""
    group, tries = context.group, list[dict[str, Floats]]()
    right = layers.fingerprints()
    prepared = prepare(layers.steps(), clock, settings.protocol)
    while True:
        began = time.perf_counter()
        times = measure(prepared, clock, settings.protocol, group.barrier)
        context.check()
        # before anything else runs: what is looked at is what the last timed iteration left
        same = layers.fingerprints() == right
        now = time.perf_counter()
        left = until - now - 2 * (now - began)
        everyone = group.gather_objects({"times": times, "same": same, "left": left})
        ranks = [p for p, one in enumerate(everyone) if not one["same"]]
        if ranks:
            raise gate.GateError(f"outputs of ranks {ranks} changed while they were timed")
        tries.append({name: np.stack([one["times"][name] for one in everyone]) for name in times})
        quiet = unevenness(tries[-1]["iteration"]) <= NOISY_ABOVE
        if quiet or len(tries) == TRIES or min(one["left"] for one in everyone) < 0:
            return tries


def _checked(
    case: Case,
    layers: CaseLayers,
    inputs: SeededInputs,
    context: Context,
    domains: Sequence[int],
) -> dict[str, Any]:
    """One metered iteration, its gate, and what it did: traffic, launches, memory plan and peak,
    capacity. Raises GateError on every rank where any rank is wrong."""
    group = context.group
    context.log, layers.counts = [], []
    held: list[tuple[list[int], list[int]]] = [([], [0] * case.layers) for _ in layers.ranks]
    with Meter(context) as meter:
        layers.forward()
        if layers.training:
            held = [layers.saved(rank) for rank in layers.ranks]
            layers.backward()
    group.settle("the end of an iteration")
    allocated, reserved, kind = group.runtime.peak()
    launches, context.log = [launch[1] for launch in context.log], None
    counts, layers.counts = [to_host(count).numpy() for count in layers.counts], None
    checked = _together(group, lambda: gate.check(layers, inputs))
    mine = {
        "wrong": gate.faults(checked),
        "errors": checked["errors"],
        "held": held,
        "rows": meter.rows_PP,
        "words": meter.words_PP,
        "peak": (allocated, reserved),
    }
    everyone = group.gather_objects(mine)
    held = [one for process in everyone for one in process["held"]]
    wrong = [f"rank {p}: {fault}" for p, one in enumerate(everyone) for fault in one["wrong"]]
    rows_PP = np.sum([one["rows"] for one in everyone], axis=0)
    counted_PP = np.sum(
        [
            routed_bytes(case, count, [one[1][layer] for one in held])
            for layer, count in enumerate(counts)
        ],
        axis=0,
    )
    for moved_PP in (rows_PP, counted_PP):
        np.fill_diagonal(moved_PP, 0)  # a rank's own rows do not travel
    if (rows_PP != counted_PP).any():
        wrong.append(
            f"bytes moved {rows_PP.tolist()} must be those of the route table,"
            f" {counted_PP.tolist()}"
        )
    if wrong:
        raise gate.GateError("; ".join(wrong))
    worst = {name: max(one["errors"][name] for one in everyone) for name in checked["errors"]}
    words_PP = np.sum([one["words"] for one in everyone], axis=0)
    plan = context.plan
    return {
        "capacity": _capacity(case, plan, held),
        "provenance": {
            "checked": checked | {"errors": worst},
            "traffic": between(rows_PP, domains) | {"besideRows": between(words_PP, domains)},
            "domains": list(domains),
            "routeTableRows": [
                count.reshape(case.ep, case.ep, -1).sum(axis=2).tolist() for count in counts
            ],
            "plan": {
                "arenaBytes": plan.arena_bytes,
                "measuredArenaBytes": context.measured_bytes(),
                "rowsAvailable": plan.rows_available,
                **plan.part_bytes(),
            },
            "memory": {
                "counts": kind,
                "allocatedBytes": [one["peak"][0] for one in everyone],
                "reservedBytes": [one["peak"][1] for one in everyone],
                "arenaBesideBytes": 0 if group.arena_in_allocator else plan.arena_bytes,
            },
            "executor": context.executor.name,
            "launches": launches,
        },
    }


def _capacity(
    case: Case, plan: Any, ranks: Sequence[tuple[list[int], list[int]]]
) -> dict[str, Any] | None:
    """The study's capacity fields of a packing case, from what the ranks held."""
    fields = SYSTEMS[case.pipeline].capacity
    if case.category != "packing" or case.mode != "training" or not fields:
        return None
    held = [sum(one[0]) for one in ranks]
    scratch = sum(r.nbytes for r in plan.regions.values() if r.part == "scratch" and not r.alias)
    known = {
        "slotBytes": plan.slot_bytes,
        "slotFactor": case.slotFactor,
        "scratchBytes": scratch,
        "scratchFactor": case.scratchFactor,
        "hostScratchBytes": 0,
        "slots": 1,
        "savedRank0Bytes": held[0],
        "maxSavedRankBytes": max(held),
        "capacityRecomputeFlags": sum(sum(one[1]) for one in ranks),
        "inspectedRankLayers": case.ep * case.layers,
    }
    return {name: known[name] for name in fields}


def _figures(
    case: Case,
    samples: Mapping[str, Floats],
    peaks: Mapping[str, Any],
    traffic: Mapping[str, Any],
) -> dict[str, Any]:
    """The study's metrics from samples [P, W, I] in ms."""
    found = {name: statistics(values) for name, values in samples.items()}
    times = {
        f"{name}MS": found[name]["p50"] if name in found else None
        for name in ("iteration", "forward", "backward")
    }
    seconds = found["iteration"]["p50"] / 1e3
    amounts = cost_table(case_table([case])).iloc[0]
    sent, received = (
        np.mean(np.add(traffic[f"{way}ScaleUp"], traffic[f"{way}ScaleOut"]))
        for way in ("sent", "received")
    )
    beside, reserved = peaks["arenaBesideBytes"], peaks["reservedBytes"]
    return {
        **times,
        "usefulTFPerGPU": float(amounts["usefulFLOP"] / seconds / 1e12),
        "modeledHBMGBps": float(amounts["modeledHBMBytes"] / seconds / 1e9),
        "meanTXGBps": float(sent / seconds / 1e9),
        "meanRXGBps": float(received / seconds / 1e9),
        "peakAllocatedGiB": (max(peaks["allocatedBytes"]) + beside) / GIB,
        "peakReservedBytes": None if None in reserved else max(reserved) + beside,
        "sharedSchedule": "sequential",
        "samples": {
            "unit": "ms",
            "axes": ["rank", "window", "iteration"],
            **{name: np.round(values, 6).tolist() for name, values in samples.items()},
            "slowestRank": {name: slowest(v).round(6).tolist() for name, v in samples.items()},
            "statistics": found,
        },
    }


def _phases(layers: CaseLayers, context: Context) -> dict[str, float]:
    """ms of each part of one iteration by step and part, between marks on the device; apart from
    the timed windows, and not captured."""
    marks: list[tuple[str, Any]] = []
    for step, run in layers.steps().items():

        def note(part: str, step: str = step) -> None:
            mark = context.group.runtime.event()
            mark.record()
            marks.append((part and f"{step} {part}", mark))

        context.timer = note
        run()
    context.timer = None
    context.group.settle("the end of an iteration")
    spent: dict[str, float] = {}
    for (_, before), (name, mark) in pairwise(marks):
        if name:
            spent[name] = spent.get(name, 0.0) + mark.ms_since(before)
    return {name: round(value, 6) for name, value in spent.items()}


def _trace(layers: CaseLayers, folder: Path) -> None:
    """One more iteration under torch's profiler, as a file that Perfetto reads."""
    from torch.profiler import profile

    with profile() as found:
        for run in layers.steps().values():
            run()
    folder.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(folder / f"rank{layers.ranks[0]}.trace.json"))


def _provenance(group: PeerGroup, settings: Settings) -> dict[str, Any]:
    return {
        "protocol": asdict(settings.protocol),
        "seed": settings.seed,
        "dtype": settings.dtype,
        "group": group.kind,
        "threadsPerRank": torch.get_num_threads(),
        "deviceKind": settings.device,
        "versions": machine.versions(),
        "git": _git(),
        "host": socket.gethostname(),
    }


_git_state: list[Any] = []


def _git() -> Any:
    if not _git_state:
        _git_state.append(machine.git_state())
    return _git_state[0]
