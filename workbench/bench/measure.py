"""One case on the ranks of a group, from the context to the record: check, count, time.

Legend: P ranks, W windows, I iterations, E experts in all.
"""

import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.bench import gate, machine
from workbench.bench.case_layers import CaseLayers, SeededInputs
from workbench.bench.job import Settings
from workbench.bench.meter import Meter, between, routed_bytes
from workbench.bench.timing import (
    TRIES,
    Clock,
    Floats,
    make_clock,
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
from workbench.moe.group import PeerGroup
from workbench.records.protocols import NOISY_ABOVE
from workbench.records.record import make_record
from workbench.records.schema import OwnRecord
from workbench.systems import SYSTEMS

GIB = 2**30
EXPECTED = (
    InputError,
    CapacityError,
    gate.GateError,
    MemoryError,
    ImportError,
    torch.OutOfMemoryError,
)
"""What fails a case on every rank alike and leaves the ranks well."""


def measure_case(
    case: Case, group: PeerGroup, settings: Settings, limit_s: float = math.inf
) -> OwnRecord:
    """The record of a case; collective, and complete on rank 0 alone, where others' samples are.
    A noisy case is measured again as far as `limit_s` for all of it allows.

    A case that fails in a way that every rank sees is a record with its reason. Raises PeerError
    or ClosedError where a rank is lost, and whatever else leaves the ranks in doubt.
    """
    started, began = datetime.now(UTC), time.perf_counter()
    found: dict[str, Any]
    try:
        found = _measured(case, group, settings, began + limit_s)
    except (PeerError, ClosedError):
        raise
    except EXPECTED as error:
        found = {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    seconds = {"caseSeconds": round(time.perf_counter() - began, 4)}
    provenance = _provenance(group, settings) | found.pop("provenance", {})
    provenance |= {"started": started.isoformat(timespec="seconds"), **seconds}
    return make_record(case, machine.device_label(settings.device), found, provenance)


def _measured(case: Case, group: PeerGroup, settings: Settings, until: float) -> dict[str, Any]:
    config = MoEConfig.from_case(case, dtype=settings.dtype, validate="first")
    memory = machine.PeakMemory(settings.device)
    memory.reset()
    inputs = SeededInputs(case, settings.seed, settings.device)
    with create_context(config, group) as context:
        layers = CaseLayers(case, context, inputs)
        facts = _checked(case, layers, inputs, context)
        clock = make_clock(settings.device, settings.protocol)
        timing = time.perf_counter()
        tries = _timed(layers, context, clock, settings, until)
        timed = time.perf_counter() - timing
        mine = {"phases": _phases(layers, context), "peak": memory.read()}
        everyone = group.gather_objects(mine)
        if settings.trace_dir:
            _trace(layers, Path(settings.trace_dir) / case.id)
    uneven = [unevenness(samples["iteration"]) for samples in tries]
    used = int(np.argmin(uneven))
    found = facts | _figures(case, tries[used], everyone, facts["provenance"]["traffic"])
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
        "flushedBytes": clock.flushed_bytes,
        "tries": {
            "count": len(tries),
            "used": used,
            "slowestOverMedianWindow": uneven,
            "noisyAbove": NOISY_ABOVE,
        },
        "timedSeconds": round(timed, 4),
        "memory": memory.kind,
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
    case: Case, layers: CaseLayers, inputs: SeededInputs, context: Context
) -> dict[str, Any]:
    """One metered iteration, its gate, and what it did: traffic, launches, memory plan, capacity.
    Raises GateError on every rank where any rank is wrong."""
    group = context.group
    context.log, layers.counts = [], []
    held: tuple[list[int], list[int]] = ([], [0] * case.layers)
    with Meter(context) as meter:
        layers.forward()
        if layers.training:
            held = layers.saved()
            layers.backward()
    launches, context.log = [launch[1] for launch in context.log], None
    counts, layers.counts = [count.numpy() for count in layers.counts], None
    checked = gate.check(layers, inputs)
    mine = {
        "wrong": gate.faults(checked),
        "errors": checked["errors"],
        "held": held,
        "rows": meter.rows_PP,
        "words": meter.words_PP,
        "host": os.uname().nodename,
    }
    everyone = group.gather_objects(mine)
    wrong = [f"rank {p}: {fault}" for p, one in enumerate(everyone) for fault in one["wrong"]]
    rows_PP = np.sum([one["rows"] for one in everyone], axis=0)
    counted_PP = np.sum(
        [
            routed_bytes(case, count, [one["held"][1][layer] for one in everyone])
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
    hosts = [one["host"] for one in everyone]
    worst = {name: max(one["errors"][name] for one in everyone) for name in checked["errors"]}
    words_PP = np.sum([one["words"] for one in everyone], axis=0)
    plan = context.plan
    return {
        "capacity": _capacity(case, plan, everyone),
        "provenance": {
            "checked": checked | {"errors": worst},
            "traffic": between(rows_PP, hosts) | {"besideRows": between(words_PP, hosts)},
            "routeTableRows": [
                count.reshape(case.ep, case.ep, -1).sum(axis=2).tolist() for count in counts
            ],
            "plan": {
                "arenaBytes": plan.arena_bytes,
                "measuredArenaBytes": context.measured_bytes(),
                "rowsAvailable": plan.rows_available,
                **plan.part_bytes(),
            },
            "executor": context.config.executor,
            "launches": launches,
        },
    }


def _capacity(case: Case, plan: Any, everyone: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The study's capacity fields of a packing case, from what the ranks held."""
    fields = SYSTEMS[case.pipeline].capacity
    if case.category != "packing" or case.mode != "training" or not fields:
        return None
    held = [sum(one["held"][0]) for one in everyone]
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
        "capacityRecomputeFlags": sum(sum(one["held"][1]) for one in everyone),
        "inspectedRankLayers": case.ep * case.layers,
    }
    return {name: known[name] for name in fields}


def _figures(
    case: Case,
    samples: Mapping[str, Floats],
    everyone: list[dict[str, Any]],
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
    reserved = [one["peak"][1] for one in everyone]
    return {
        **times,
        "usefulTFPerGPU": float(amounts["usefulFLOP"] / seconds / 1e12),
        "modeledHBMGBps": float(amounts["modeledHBMBytes"] / seconds / 1e9),
        "meanTXGBps": float(sent / seconds / 1e9),
        "meanRXGBps": float(received / seconds / 1e9),
        "peakAllocatedGiB": max(one["peak"][0] for one in everyone) / GIB,
        "peakReservedBytes": None if None in reserved else max(reserved),
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
    """ms of each part of one iteration, apart from the timed windows, by step and part."""
    spent: dict[str, float] = {}
    for step, run in layers.steps().items():

        def note(part: str, seconds: float, step: str = step) -> None:
            spent[f"{step} {part}"] = spent.get(f"{step} {part}", 0.0) + seconds * 1e3

        context.timer = note
        run()
    context.timer = None
    return {name: round(value, 6) for name, value in spent.items()}


def _trace(layers: CaseLayers, folder: Path) -> None:
    """One more iteration under torch's profiler, as a file that Perfetto reads."""
    from torch.profiler import profile

    with profile() as found:
        for run in layers.steps().values():
            run()
    folder.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(folder / f"rank{layers.rank}.trace.json"))


def _provenance(group: PeerGroup, settings: Settings) -> dict[str, Any]:
    return {
        "protocol": asdict(settings.protocol),
        "seed": settings.seed,
        "dtype": settings.dtype,
        "group": group.kind,
        "threadsPerRank": torch.get_num_threads(),
        "deviceKind": settings.device,
        "clockMHz": machine.clock_mhz(settings.device),
        "versions": machine.versions(),
        "git": _git(),
        "host": socket.gethostname(),
    }


_git_state: list[Any] = []


def _git() -> Any:
    if not _git_state:
        _git_state.append(machine.git_state())
    return _git_state[0]
