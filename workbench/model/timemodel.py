"""Time of a case from the roofline's floors on the busiest rank and a few parameters.

All ranks wait for the busiest one, so a layer takes what that rank takes. For each layer, with
the floors at the device's peaks (compute of the padded rows G, shared expert H, link there and
back X, HBM time of the weights W of the experts that receive a row):

- work C = (G/e*(1 + walk*E_local) + shared*H + save) * (1 + slowdown if balanced) + exposed*W
- forward layer = layer_ms + overlap(C, X/link + fill)
- backward layer = layer_backward_ms + dgrad and wgrad of W2 and W13 in turn, where only the two
  dgrads carry rows: dgrad W2 hides the gather, dgrad W13 the scatter. `mega` runs dgrad and
  wgrad of a projection in one launch, so both hide the transport. mok replays, minibatch by
  minibatch, what it has not kept.
- overlap(a, b) = (a + b + sqrt((a - b)**2 + 4*loss**2*a*b)) / 2: the larger of the two, (1 + loss)
  times as long where they are equal, and their sum at loss 1, as in the unfused baseline.

What a pass takes beyond its fixed times is never less than its share of the largest floor.
iteration = forward + backward (+ gap in inference). All times in ms.

Legend: T tokens per GPU, D hidden width, F expert width, E experts, K experts per token, N cases,
M layers of all cases, B sets of parameters evaluated at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.hardware import Hardware
from workbench.model.coefficients import Group
from workbench.model.cost import (
    BF16_BYTES,
    MXFP8_BYTES,
    expert_flop,
    experts_read,
    hbm_bytes,
    passes,
    wire_row_bytes,
)
from workbench.model.roofline import link_ms
from workbench.planning import arithmetic as pa
from workbench.planning.case_plan import CasePlans
from workbench.planning.reference import MokConfig
from workbench.routing import rank_rows
from workbench.systems import SYSTEMS

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
    weights, params   HBM time of the weights of the local experts that receive a row, and of one
                      byte for each of those weights
    columns           HBM time of one byte per padded row and column of F
    balanced          F over the reference to the slowdown's exponent where load is balanced, or 0
    load              [N] routed FLOP of the last layer over those of the reference layer
    minibatches       replayed in backward; `recompute` 1 where dist_moe's slot overflows
    floors            [N] compute, HBM and link floors of the busiest rank, rows unpadded; NaN
                      without a peak or a link
    least             [N] of forward, and of backward: its share of the largest floor
    factor            [N] largest load of any rank in any layer, over the mean
    scratch_rows      [N] most rows of any rank in any layer, as dist_moe's scratch holds them
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
    least: tuple[Array, Array]
    factor: Array
    scratch_rows: Array


@dataclass(frozen=True, kw_only=True)
class CaseArrays:
    """What a time depends on, as arrays [N] taken from a case table once."""

    T: Array
    D: Array
    F: Array
    E: Array
    K: Array
    ep: Array
    layers: Array
    sharedExperts: Array
    imbalance: Array
    slotFactor: Array
    scratchFactor: Array
    training: Array
    packing: Array
    table: pd.DataFrame
    row: Array

    @classmethod
    def of(cls, table: pd.DataFrame) -> "CaseArrays":
        whole = ("T", "D", "F", "E", "K", "ep", "layers", "sharedExperts")
        real = ("imbalance", "slotFactor", "scratchFactor")
        return cls(
            **{name: table[name].to_numpy(np.int64) for name in whole},
            **{name: table[name].to_numpy(np.float64) for name in real},
            training=(table["mode"] == "training").to_numpy(),
            packing=(table["category"] == "packing").to_numpy(),
            table=table,
            row=np.arange(len(table)),
        )

    def take(self, rows: Array) -> "CaseArrays":
        """The cases of `rows`, int or bool."""
        picked = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "table"}
        return CaseArrays(table=self.table, **picked)

    def frame(self) -> pd.DataFrame:
        """These cases as rows of the table."""
        return self.table.iloc[self.row]

    def layer_factors(self) -> tuple[Array, Array]:
        """(case index [M], imbalance factor [M]) of every layer of every case, in order."""
        layers = self.layers
        case = np.repeat(np.arange(len(layers)), layers)
        factor = self.imbalance[case]
        several = self.packing | (layers > 1)
        if several.any():
            codes, tuples = pd.factorize(self.table["factors"].to_numpy()[self.row[several]])
            flat = np.concatenate([np.asarray(t, np.float64) for t in tuples])
            first = np.zeros(len(layers), np.int64)
            first[several] = np.cumsum([0, *map(len, tuples)])[codes]
            within = np.arange(len(case)) - (np.cumsum(layers) - layers)[case]
            chosen = several[case]
            factor[chosen] = flat[first[case[chosen]] + within[chosen]]
        return case, factor


def layer_terms(
    cases: CaseArrays,
    group: Group,
    hardware: Hardware,
    constants: Mapping[str, float],
    plan: bool = True,
) -> Terms:
    """Terms of the cases of one group; what needs a peak that the device does not have is NaN.

    Without `plan` nothing is replayed or recomputed: for the floors of what cannot be planned.
    """
    T, D, F, K, ep, layers = (cases.T, cases.D, cases.F, cases.K, cases.ep, cases.layers)
    S, training, experts = cases.sharedExperts, cases.training, cases.E // cases.ep
    mxfp8 = group.precision == "mxfp8"
    case, factor = cases.layer_factors()
    start = np.cumsum(layers) - layers
    last = start + layers - 1
    single = len(case) == len(layers)

    def each(of_case: Array) -> Array:
        """[N] -> [M]: a case's value for each of its layers."""
        return of_case if single else of_case[case]

    rows = rank_rows(T=each(T), K=each(K), ep=each(ep), factor=factor)
    busiest = rows.busiest
    system = SYSTEMS[group.pipeline]
    padded = pa.evenly_padded_rows(busiest, each(experts), system.tile_rows)
    relative = busiest / each(T * K)
    total = busiest if single else np.add.reduceat(busiest, start)

    peak, bf16 = hardware.peak_or_nan(group.precision), hardware.peak_tflops("bf16")
    hbm = hardware.hbm_tb_s * 1e9
    row_ms = 6.0 * D * F / (peak * 1e9)
    shared = expert_flop(S * T, D, F) / (bf16 * 1e9)
    read = experts_read(busiest, each(experts))
    params = read * each(3.0 * D * F / hbm)
    weight_bytes = MXFP8_BYTES if mxfp8 else BF16_BYTES

    there_bytes, back_bytes = wire_row_bytes(
        group.pipeline, group.precision, D=D, training=training
    )
    ratio = each(there_bytes / back_bytes)
    remote = (1 - 1 / ep) * D * BF16_BYTES
    back = link_ms(busiest * each(remote), each(ep), hardware)

    wide = (F / constants["reference_F"]) ** constants["slowdown_exponent"]
    reference = expert_flop(
        constants["reference_rows"], constants["reference_D"], constants["reference_F"]
    )
    largest = np.maximum.reduceat(relative, start)
    minibatches, recompute = np.zeros(len(case)), np.zeros(len(case))
    if plan:
        minibatches, recompute = _beyond_capacity(cases, group, case, rows.rank0, experts, largest)
    all_read = read if single else np.add.reduceat(read, start)
    hbm_total = hbm_bytes(
        R=total / layers,
        T=T,
        D=D,
        F=F,
        K=K,
        S=S,
        weight_bytes=weight_bytes,
        experts=all_read / layers,
    )
    # A rank's own rows that go elsewhere leave it whatever it receives.
    wire = (layers * T * K - total / ep) * there_bytes + total * (1 - 1 / ep) * back_bytes
    times, ways = passes(training), np.where(training, 2, 1)
    floors = {
        "compute": times * (total * row_ms + layers * shared),
        "HBM": times * layers * hbm_total / hbm,
        "link": link_ms(wire, ep, hardware),
    }
    forward, backward = (
        np.maximum(
            np.maximum(floors["compute"], floors["HBM"]) * of_passes, floors["link"] * of_ways
        )
        for of_passes, of_ways in ((1 / times, 1 / ways), (1 - 1 / times, 1 - 1 / ways))
    )
    fullest = padded if mxfp8 else busiest
    return Terms(
        group=group,
        start=start,
        last=last,
        training=training,
        gemm=padded * each(row_ms),
        shared=each(shared),
        there=back * ratio,
        back=back,
        fill=(1 + ratio) / 2,
        weights=params * weight_bytes,
        params=params,
        columns=padded * each(training * F / hbm),
        experts=each(experts).astype(np.float64),
        balanced=np.where(relative < constants["balanced_below"], each(wide), 0.0),
        load=busiest[last] * (6.0 * D * F) / reference,
        minibatches=minibatches / constants["minibatch_rows"],
        recompute=recompute,
        floors=floors,
        least=(forward, backward),
        factor=largest,
        scratch_rows=fullest if single else np.maximum.reduceat(fullest, start),
    )


def _beyond_capacity(
    cases: CaseArrays, group: Group, case: Array, rank0: Array, experts: Array, load: Array
) -> tuple[Array, Array]:
    """(rows that are replayed, whether the layer is recomputed) in backward, per layer [M]; `load`
    [N] is the largest load of any rank in any layer, over the mean."""
    none = np.zeros(len(case))
    system = SYSTEMS[group.pipeline]
    if system.reserves == "rows":
        asked = pa.asked_rows(cases.slotFactor, cases.T, cases.K)
        kept = pa.mok_retained_rows(asked, MokConfig.minibatch_rows)
        padded = pa.evenly_padded_rows(rank0, experts[case], system.padding(group.precision))
        replayed = pa.mok_replay_rows(padded, kept[case])
        return np.where(cases.training[case], replayed, 0), none
    # One layer whose load is within a slot of at least 1 fits; only the others need a plan.
    fits = (cases.layers == 1) & (cases.slotFactor >= np.maximum(load, 1))
    planned = cases.training & ~fits
    if system.reserves == "slot" and planned.any():
        plans = CasePlans(table=cases.take(planned).frame())
        again = none.copy()
        again[planned[case]] = plans.saved[2][plans.in_layers]
        return none, again
    return none, none


def overlap(work: Array, transport: Array, loss: Array | float) -> Array:
    """Time of two things that run at once: the larger, plus what they lose to each other."""
    both = (work - transport) ** 2 + (4.0 * loss**2) * (work * transport)
    return 0.5 * (work + transport + np.sqrt(both))


class Times(NamedTuple):
    """Times in ms, [..., N]; backward is NaN in inference. `fixed` is the part of iteration that
    stays however little there is to do."""

    iteration: Array
    forward: Array
    backward: Array
    fixed: Array


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
    layers = terms.last - terms.start + 1
    least, least_backward = terms.least
    fixed = p["start_ms"] + p["layer_ms"] * layers
    forward = fixed + np.maximum(_sum(overlap(work, transport, loss), terms), least)

    # Half of backward's work is dgrad, half wgrad; of each a third is W2's and two thirds W13's.
    grad = p["backward_work"] * gemm
    weight = p["grad_bytes"] * terms.params
    one_way = terms.back * link + p["link_fill_ms"] / 2
    dgrad = (grad / 2 + 2 * shared) * slow
    wgrad = grad / 2 * slow + weight
    if SYSTEMS[terms.group.pipeline].hides_wgrad:
        layer = overlap((dgrad + wgrad) / 3, one_way, loss)
        layer = layer + overlap((dgrad + wgrad) * (2 / 3), one_way, loss)
    else:
        layer = overlap(dgrad / 3, one_way, loss) + overlap(dgrad * (2 / 3), one_way, loss) + wgrad
    layer = layer + p["replay_ms"] * terms.minibatches
    if terms.recompute.any():  # dispatch and W13 again, two thirds of the forward's work
        layer = layer + terms.recompute * overlap(work * (2 / 3), one_way, loss)
    fixed_backward = p["start_backward_ms"] + p["layer_backward_ms"] * layers
    backward = fixed_backward + np.maximum(_sum(layer, terms), least_backward)

    growth = np.maximum(terms.load - constants["skew_onset"], 0) * constants["skew_growth"]
    even = terms.balanced[terms.last] > 0
    skew = p["skew_ms"] + p["skew_balanced_ms"] * even
    iteration = forward + np.where(terms.training, backward, p["gap_ms"])
    forward = forward + skew * (1 - np.exp(-growth)) * terms.training
    fixed = fixed + np.where(terms.training, fixed_backward, p["gap_ms"])
    return Times(iteration, forward, np.where(terms.training, backward, np.nan), fixed)


def _sum(layers: Array, terms: Terms) -> Array:
    if layers.shape[-1] == len(terms.start):
        return layers
    return np.add.reduceat(layers, terms.start, axis=-1)
