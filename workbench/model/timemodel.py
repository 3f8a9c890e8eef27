"""Time of a case from the roofline's floors on the busiest rank and a few parameters.

All ranks wait for the busiest one, so a layer takes what that rank takes. For each layer, with
the floors at the device's peaks (compute of the padded rows G, shared expert H, link there and
back X, HBM time of the weights W):

- work C = (G/e*(1 + walk*E_local) + shared*H + save) * (1 + slowdown if balanced) + exposed*W
- forward layer = layer_ms + overlap(C, X/link + fill)
- backward layer = layer_backward_ms + dgrad and wgrad of W2 and W13 in turn, where only the two
  dgrads carry rows: dgrad W2 hides the gather, dgrad W13 the scatter. `mega` runs dgrad and
  wgrad of a projection in one launch, so both hide the transport. mok replays, minibatch by
  minibatch, what it has not kept.
- overlap(a, b) = (a + b + sqrt((a - b)**2 + 4*loss**2*a*b)) / 2: the larger of the two, (1 + loss)
  times as long where they are equal, and their sum at loss 1, as in the unfused baseline.

iteration = forward + backward (+ gap in inference). All times in ms.

Legend: T tokens per GPU, D hidden width, F expert width, E experts, K experts per token, N cases,
M layers of all cases, B sets of parameters evaluated at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.hardware import Hardware
from workbench.model.cost import BF16_BYTES, MXFP8_BYTES, expert_flop, hbm_bytes
from workbench.model.parameters import MEGA, Group
from workbench.model.roofline import FLOORS, link_ms
from workbench.moe import plan_arithmetic as pa
from workbench.moe.case_plan import CasePlans
from workbench.routing import rank_rows

Array = npt.NDArray[Any]
Values = Mapping[str, Array | float]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a group's cases must do, per layer [M] unless [N] is said; ms at the device's peaks.

    start, last       [N] index of each case's first and last layer
    training          [N]
    gemm, shared      forward compute of the routed (padded) rows, and of the shared expert
    there, back       link time of the rows to the busiest rank and back from it, BF16 unless
                      inference dispatches MXFP8; `fill` the bytes of both over BF16's
    weights, params   HBM time of the local experts' weights, and of one byte for each of them
    columns           HBM time of one byte per padded row and column of F
    balanced          F over the reference to the slowdown's exponent where load is balanced, or 0
    load              [N] routed FLOP of the last layer over those of the reference layer
    minibatches       replayed in backward; `recompute` 1 where dist_moe's slot overflows
    floors            [N] compute, HBM and link floors of the busiest rank, rows unpadded
    factor            [N] largest load of any rank in any layer, over the mean
    """

    group: Group
    start: Array
    last: Array
    training: Array
    gemm: Array
    shared: Array
    there: Array
    back: Array
    fill: Array
    weights: Array
    params: Array
    columns: Array
    experts: Array
    balanced: Array
    load: Array
    minibatches: Array
    recompute: Array
    floors: dict[str, Array]
    factor: Array


def layer_factors(table: pd.DataFrame) -> tuple[Array, Array]:
    """(case index [M], imbalance factor [M]) of every layer of every case, in order."""
    layers = table["layers"].to_numpy(np.int64)
    case = np.repeat(np.arange(len(table)), layers)
    factor = np.repeat(table["imbalance"].to_numpy(np.float64), layers)
    several = (layers > 1) | table["profile"].notna().to_numpy()
    if several.any():
        codes, tuples = pd.factorize(table["factors"].to_numpy()[several])
        flat = np.concatenate([np.asarray(t, np.float64) for t in tuples])
        first = np.cumsum([0, *map(len, tuples)])[codes]
        within = np.arange(len(case)) - np.repeat(np.cumsum(layers) - layers, layers)
        chosen = several[case]
        where = np.zeros(len(table), np.int64)
        where[several] = first
        factor[chosen] = flat[where[case[chosen]] + within[chosen]]
    return case, factor


def layer_terms(
    table: pd.DataFrame, group: Group, hardware: Hardware, constants: Mapping[str, float]
) -> Terms:
    """Terms of the cases of one group. Raises InputError if the device has no such peak."""
    ints = {n: table[n].to_numpy(np.int64) for n in ("T", "D", "F", "E", "K", "ep", "layers")}
    S = table["sharedExperts"].to_numpy(np.int64)
    T, D, F, K, ep, layers = (ints[n] for n in ("T", "D", "F", "K", "ep", "layers"))
    experts = ints["E"] // ep
    training = (table["mode"] == "training").to_numpy()
    mxfp8 = group.precision == "mxfp8"
    case, factor = layer_factors(table)
    start = np.cumsum(layers) - layers

    rows = rank_rows(T=T[case], K=K[case], ep=ep[case], factor=factor)
    busiest = rows.busiest
    tile = pa.MOK_EXPERT_ROWS if group.backend == "mok" else pa.DIST_MOE_EXPERT_ROWS
    padded = pa.evenly_padded_rows(busiest, experts[case], tile)
    relative = busiest / (T * K)[case]

    peak, bf16 = hardware.peak_tflops(group.precision), hardware.peak_tflops("bf16")
    hbm = hardware.hbm_tb_s * 1e9
    flop_per_row = (6.0 * D * F)[case]
    quantised = mxfp8 & (group.backend == "dist_moe") & ~training
    there_bytes = np.where(quantised, MXFP8_BYTES, BF16_BYTES)
    back_bytes = busiest * (1 - 1 / ep[case]) * (D * BF16_BYTES)[case]
    back = link_ms(back_bytes, ep[case], hardware)
    ratio = (there_bytes / BF16_BYTES)[case]
    params = experts * 3.0 * D * F / hbm
    weight_bytes = MXFP8_BYTES if mxfp8 else BF16_BYTES
    wide = (F / constants["reference_F"]) ** constants["slowdown_exponent"]
    last = start + layers - 1
    reference = expert_flop(
        constants["reference_rows"], constants["reference_D"], constants["reference_F"]
    )
    shared = expert_flop(S * T, D, F) / (bf16 * 1e9)
    minibatches, recompute = _beyond_capacity(table, group, case, rows.rank0, experts)
    passes = np.where(training, 3, 1)
    total = np.add.reduceat(busiest, start) if len(start) else np.zeros(0)
    hbm_total = hbm_bytes(
        R=total / layers, T=T, D=D, F=F, E_local=experts, K=K, S=S, weight_bytes=weight_bytes,
        active=1,
    )  # fmt: skip
    # A rank's own rows that go elsewhere leave once per layer whatever it receives.
    wire = (layers * T * K - total / ep) * there_bytes + total * (1 - 1 / ep) * BF16_BYTES
    floors = {
        "compute": passes * (total * 6.0 * D * F / (peak * 1e9) + layers * shared),
        "HBM": passes * layers * hbm_total / hbm,
        "link": link_ms(wire * D * np.where(training, 2, 1), ep, hardware),
    }
    return Terms(
        group=group,
        start=start,
        last=last,
        training=training,
        gemm=padded * flop_per_row / (peak * 1e9),
        shared=shared[case],
        there=back * ratio,
        back=back,
        fill=(1 + ratio) / 2,
        weights=(params * weight_bytes)[case],
        params=params[case],
        columns=padded * (training * F / hbm)[case],
        experts=experts[case].astype(np.float64),
        balanced=np.where(relative < constants["balanced_below"], wide[case], 0.0),
        load=busiest[last] * flop_per_row[last] / reference,
        minibatches=minibatches / constants["minibatch_rows"],
        recompute=recompute,
        floors=floors,
        factor=np.maximum.reduceat(relative, start) if len(start) else np.zeros(0),
    )


def _beyond_capacity(
    table: pd.DataFrame, group: Group, case: Array, rank0: Array, experts: Array
) -> tuple[Array, Array]:
    """(rows that mok replays, whether dist_moe recomputes) in backward, per layer [M].

    A single layer has room for scratchFactor times the balanced rows, as in the study, whose
    single layers at imbalance 8 replay and recompute nothing; only several layers share
    slotFactor's room.
    """
    none = np.zeros(len(case))
    several = ((table["layers"] > 1) & (table["mode"] == "training")).to_numpy()
    training = (table["mode"] == "training").to_numpy()
    if group.backend == "mok":
        factor = np.where(several, table["slotFactor"], table["scratchFactor"])
        asked = np.floor(factor * table["T"].to_numpy() * table["K"].to_numpy() + 0.5)
        kept = pa.mok_retained_rows(asked.astype(np.int64), 4096)
        padded = pa.evenly_padded_rows(rank0, experts[case], pa.MOK_EXPERT_ROWS)
        return np.where(training[case], pa.mok_replay_rows(padded, kept[case]), 0), none
    if group.backend == "dist_moe" and several.any():
        plans = CasePlans(table=table[several], backend="dist_moe")
        again = none.copy()
        again[several[case]] = plans.saved[2][plans.in_layers]
        return none, again
    return none, none


def overlap(work: Array, transport: Array, loss: Array | float) -> Array:
    """Time of two things that run at once: the larger, plus what they lose to each other."""
    both = (work - transport) ** 2 + (4.0 * loss**2) * (work * transport)
    return 0.5 * (work + transport + np.sqrt(both))


class Times(NamedTuple):
    """Times in ms, [..., N]; backward is NaN in inference."""

    iteration: Array
    forward: Array
    backward: Array


def predict_times(p: Values, terms: Terms, constants: Mapping[str, float]) -> Times:
    """Times of a group's cases. `p` holds a scalar or a [B, 1] array per parameter."""
    slow = 1 + p["balanced_slowdown"] * terms.balanced
    link = 1 / p["link_efficiency"]
    loss = p["overlap_loss"]
    gemm = terms.gemm * ((1 + p["expert_walk"] * terms.experts) / p["flop_efficiency"])
    shared = p["shared_exposed"] * terms.shared

    work = (gemm + shared + p["save_bytes"] * terms.columns) * slow
    work = work + p["weight_exposed"] * terms.weights
    transport = (terms.there + terms.back) * link + p["link_fill_ms"] * terms.fill
    forward = p["start_ms"] + _sum(p["layer_ms"] + overlap(work, transport, loss), terms)

    # Half of backward's work is dgrad, half wgrad; of each a third is W2's and two thirds W13's.
    grad = p["backward_work"] * gemm
    weight = p["grad_bytes"] * terms.params
    one_way = terms.back * link + p["link_fill_ms"] / 2
    dgrad = (grad / 2 + 2 * shared) * slow
    wgrad = grad / 2 * slow + weight
    if terms.group == MEGA:
        layer = overlap((dgrad + wgrad) / 3, one_way, loss)
        layer = layer + overlap((dgrad + wgrad) * (2 / 3), one_way, loss)
    else:
        layer = overlap(dgrad / 3, one_way, loss) + overlap(dgrad * (2 / 3), one_way, loss) + wgrad
    layer = layer + p["layer_backward_ms"] + p["replay_ms"] * terms.minibatches
    if terms.recompute.any():  # dispatch and W13 again, two thirds of the forward's work
        layer = layer + terms.recompute * overlap(work * (2 / 3), one_way, loss)
    backward = p["start_backward_ms"] + _sum(layer, terms)

    growth = np.maximum(terms.load - constants["skew_onset"], 0) * constants["skew_growth"]
    even = terms.balanced[terms.last] > 0
    skew = p["skew_ms"] + p["skew_balanced_ms"] * even
    iteration = forward + np.where(terms.training, backward, p["gap_ms"])
    forward = forward + skew * (1 - np.exp(-growth)) * terms.training
    return Times(iteration, forward, np.where(terms.training, backward, np.nan))


def _sum(layers: Array, terms: Terms) -> Array:
    if layers.shape[-1] == len(terms.start):
        return layers
    return np.add.reduceat(layers, terms.start, axis=-1)


def binding(floors: Mapping[str, Array]) -> Array:
    """Index into FLOORS of the largest floor, [N]."""
    return np.stack([floors[name] for name in FLOORS]).argmax(axis=0)
