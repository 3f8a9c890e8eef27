"""The memory plan of cases: what dist_moe or mok reserves, keeps, recomputes and replays.

Joins the routing of a case table with the two systems' plans. Rows follow `routing`: even over a
rank's experts, rank 0 hot. The unfused baseline reserves nothing in advance; its rows hold NaN.
`plan_case` gives one case's plan whole: what the published system reserves, and what ours does.

Legend: N cases, L layers, T tokens per GPU, K experts per token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from workbench.case import Case
from workbench.moe.arena import OursPlan, plan_ours
from workbench.moe.config import MoEConfig, runs
from workbench.planning import arithmetic as pa
from workbench.planning.arithmetic import IntArray
from workbench.planning.reference import (
    DistMoEConfig,
    DistMoEPlan,
    MokConfig,
    MokPlan,
    plan_dist_moe,
    plan_mok,
)
from workbench.planning.reference_table import dist_moe_table
from workbench.routing import Workloads, rows_by_expert
from workbench.systems import SYSTEMS


@dataclass(frozen=True, kw_only=True)
class CasePlans(Workloads):
    """Plans of a table; what only some systems have may be asked for if all cases are of such.
    Arrays are [N], or [N, L] where said, 0 beyond a case's own layers. Raises InputError for what
    cannot be planned."""

    def padded(self, rows: IntArray) -> IntArray:
        """`rows` [N, L] as the systems pad them per expert."""
        multiple = np.ones(len(self.table), np.int64)
        systems = self.table.groupby(["pipeline", "precision"], observed=True).indices
        for (pipeline, precision), chosen in systems.items():
            multiple[chosen] = SYSTEMS[pipeline].padding(precision)
        experts = self.ints("E") // self.ints("ep")
        return pa.evenly_padded_rows(rows, experts[:, None], multiple[:, None])

    @cached_property
    def dist_moe(self) -> dict[str, Any]:
        """`dist_moe_table` of the cases: slotFactor sizes the slot, scratchFactor the scratch."""
        return dist_moe_table(
            num_local_input_tokens=self.ints("T"),
            hidden_dim=self.ints("D"),
            intermediate_dim=self.ints("F"),
            top_k=self.ints("K"),
            num_experts=self.ints("E"),
            max_moe_layers_per_activation_slot=self.ints("layers"),
            ep_size=self.ints("ep"),
            precision=self.table["precision"].to_numpy(str),
            pipeline=self.table["pipeline"].to_numpy(str),
            inference=~self.training,
            device_scratch_capacity_factor=self.table["scratchFactor"].to_numpy(float),
            activation_slot_capacity_factor=np.where(
                self.training, self.table["slotFactor"].to_numpy(float), np.nan
            ),
        )

    @cached_property
    def saved(self) -> tuple[IntArray, IntArray, Any]:
        """(bytes that rank 0 keeps, bytes that the fullest other rank keeps, recomputed), each
        [N, L]: dist_moe's slot, filled in layer order.

        A layer is kept only if it fits on the fullest rank beside the inputs of the layers that
        follow; else every rank keeps its input alone and recomputes it in backward. Inference
        keeps nothing.
        """
        T, D, F, K = (self.ints(name)[:, None] for name in ("T", "D", "F", "K"))
        full0, full1 = (
            pa.saved_bytes(T, D, F, K, self.padded(rows), self.mxfp8[:, None])
            for rows in (self.rows.rank0, self.rows.others_max)
        )
        slot = self.dist_moe["activation_slot_bytes"]
        x_bytes = self.dist_moe["saved_input_bytes_per_layer"]
        used0, used1 = np.zeros_like(slot), np.zeros_like(slot)
        recomputed = np.zeros(self.in_layers.shape, bool)
        for layer in range(full0.shape[1]):
            real = self.in_layers[:, layer] & self.training
            after = x_bytes * (self.ints("layers") - 1 - layer)
            fullest = np.maximum(used0 + full0[:, layer], used1 + full1[:, layer])
            recomputed[:, layer] = real & (fullest + after > slot)
            for full, used in ((full0, used0), (full1, used1)):
                kept = np.where(recomputed[:, layer], x_bytes, full[:, layer])
                full[:, layer] = np.where(real, kept, 0)
                used += full[:, layer]
        return full0, full1, recomputed

    @cached_property
    def requested_rows(self) -> IntArray:
        """Rows per layer that mok is asked to keep, [N]: slotFactor times the balanced T*K."""
        factor = self.table["slotFactor"].to_numpy(float)
        return pa.asked_rows(factor, self.ints("T"), self.ints("K"))

    @cached_property
    def retained_rows(self) -> IntArray:
        """Rows per layer that mok keeps, [N]: the requested ones in whole minibatches."""
        return pa.mok_retained_rows(self.requested_rows, MokConfig.minibatch_rows)

    @cached_property
    def replay_rows(self) -> IntArray:
        """Rows of rank 0 that mok replays in backward, [N, L]; none in inference."""
        replay = pa.mok_replay_rows(self.padded(self.rows.rank0), self.retained_rows[:, None])
        return np.where(self.in_layers & self.training[:, None], replay, 0)

    def bounds(self, reserves: str) -> dict[str, Any]:
        """Those of PLAN_COLUMNS that systems which set aside a slot, or rows, have; each [N]."""
        found: dict[str, Any] = {
            "busiestPaddedRows": self.padded(self.rows.busiest).max(axis=1, initial=0)
        }
        if reserves == "slot":
            saved0, saved1, recomputed = self.saved
            return found | {
                "slotBytes": self.dist_moe["activation_slot_bytes"],
                "minimumSlotBytes": self.dist_moe["minimum_activation_slot_bytes"],
                "scratchBytes": self.dist_moe["device_scratch_bytes"],
                "scratchRows": self.dist_moe["device_scratch_capacity_rows"],
                "savedRank0Bytes": saved0.sum(axis=1),
                "maxSavedRankBytes": np.maximum(saved0.sum(axis=1), saved1.sum(axis=1)),
                "recomputedLayers": recomputed.sum(axis=1),
            }
        return found | {
            "requestedRowsPerLayer": self.requested_rows,
            "retainedRowsPerLayer": self.retained_rows,
            "totalReplayRows": self.replay_rows.sum(axis=1),
        }


PLAN_COLUMNS = (
    "slotBytes",
    "minimumSlotBytes",
    "scratchBytes",
    "scratchRows",
    "busiestPaddedRows",
    "savedRank0Bytes",
    "maxSavedRankBytes",
    "recomputedLayers",
    "requestedRowsPerLayer",
    "retainedRowsPerLayer",
    "totalReplayRows",
)


def plan_table(table: pd.DataFrame) -> pd.DataFrame:
    """The plan of each case, by the table's index; NaN where it does not apply.

    Columns named as the published `capacity` fields hold the same quantity. `scratchRows` is the
    hard bound of dist_moe on `busiestPaddedRows`, the most rows of any rank and layer.
    """
    planned = {name: np.full(len(table), np.nan) for name in PLAN_COLUMNS}
    for reserves, chosen in reserving(table["pipeline"]).items():
        for name, values in CasePlans(table=table.iloc[chosen]).bounds(reserves).items():
            planned[name][chosen] = values
    return pd.DataFrame(planned, index=table.index)


def reserving(pipelines: Iterable[str]) -> dict[str, IntArray]:
    """Positions of the cases that set aside a slot and of those that set aside rows, by which."""
    kinds = np.array([SYSTEMS[pipeline].reserves for pipeline in pipelines])
    return {kind: np.flatnonzero(kinds == kind) for kind in ("slot", "rows")}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A case's memory plan. `reference` is what the published system reserves, None for a system
    that reserves nothing, or of which nobody says; `ours` is what our own layer allocates for it,
    None for a pipeline and precision that it does not run."""

    reference: DistMoEPlan | MokPlan | None
    ours: OursPlan | None

    def explain(self) -> str:
        """Both plans in words and bytes."""
        said = {"The published system": self.reference, "Our layer": self.ours}
        return "\n\n".join(f"{who}:\n{plan.explain()}" for who, plan in said.items() if plan)


def plan_case(case: Case) -> Plan:
    """The plan of one case. Raises InputError for what its system refuses."""
    ours = plan_ours(MoEConfig.from_case(case)) if runs(case) else None
    reserves = SYSTEMS[case.pipeline].reserves
    if reserves == "none":
        return Plan(reference=None, ours=ours)
    plan = _plan_mok if reserves == "rows" else _plan_dist_moe
    return Plan(reference=plan(case), ours=ours)


def _plan_mok(case: Case) -> MokPlan:
    shape = {"T": case.T, "K": case.K, "E": case.E, "ep": case.ep}
    local = case.E // case.ep
    rows = [rows_by_expert(**shape, factor=f)[:local] for f in case.factors]
    config = MokConfig(
        num_local_input_tokens=case.T, top_k=case.K, requested_capacity_factor=case.slotFactor
    )
    return plan_mok(config, np.stack(rows))


def _plan_dist_moe(case: Case) -> DistMoEPlan:
    inference = case.mode == "inference"
    config = DistMoEConfig(
        num_local_input_tokens=case.T,
        hidden_dim=case.D,
        intermediate_dim=case.F,
        top_k=case.K,
        num_experts=case.E,
        max_moe_layers_per_activation_slot=case.layers,
        precision=case.precision,
        pipeline=case.pipeline,
        inference=inference,
        device_scratch_capacity_factor=case.scratchFactor,
        activation_slot_capacity_factor=None if inference else case.slotFactor,
    )
    return plan_dist_moe(config, ep_size=case.ep)
