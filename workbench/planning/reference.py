"""What the two published systems reserve for activations, planned before anything runs.

dist_moe keeps one activation slot that its layers share (a soft bound) and one scratch frame for
the layer that runs (a hard bound). mok keeps a fixed number of rows per layer and replays the
rest in backward. Whole tables are planned by `plan_table.dist_moe_table` and the functions of
`plan_arithmetic`; the plans here are tables of one. Nothing here imports torch.

Legend: T tokens per rank, D hidden, F expert width, E experts, E_local = E / ep, K experts per
token.
"""

import logging
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.planning import arithmetic as pa
from workbench.planning.arithmetic import PlanError
from workbench.planning.reference_table import checked_columns, dist_moe_table

__all__ = [
    "DistMoEConfig",
    "DistMoEPlan",
    "MokConfig",
    "MokPlan",
    "PlanError",
    "plan_dist_moe",
    "plan_mok",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DistMoEConfig:
    """What decides a dist_moe memory plan, in that package's field names.

    `precision` and `pipeline` are bf16 with standard, or mxfp8 with staged or mega. At most one
    slot policy is given: `activation_slot_bytes` (exact), `activation_slot_capacity_factor`
    (1.0 keeps everything at balanced routing), or neither (the minimum: every layer recomputes).
    Raises TypeError for a value of the wrong type and PlanError for one that breaks a rule.
    """

    num_local_input_tokens: int
    hidden_dim: int
    intermediate_dim: int
    top_k: int
    num_experts: int
    max_moe_layers_per_activation_slot: int
    precision: str = "bf16"
    pipeline: str = "standard"
    inference: bool = False
    device_scratch_capacity_factor: float = 1.0
    activation_slot_bytes: int | None = None
    activation_slot_capacity_factor: float | None = None
    num_activation_slots: int = 1

    def __post_init__(self) -> None:
        factor = self.activation_slot_capacity_factor
        if factor is not None and np.isnan(pa.reals("activation_slot_capacity_factor", factor)):
            raise PlanError(f"activation_slot_capacity_factor={factor} must be finite")
        checked_columns(self.columns())

    def columns(self) -> dict[str, Any]:
        """This workload as arguments of `dist_moe_table`, all but the group size."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.activation_slot_bytes is None:
            values["activation_slot_bytes"] = pa.UNSET_BYTES
        if self.activation_slot_capacity_factor is None:
            values["activation_slot_capacity_factor"] = np.nan
        return values

    def saved_bytes(self, rows_per_expert: ArrayLike) -> NDArray[np.int64]:
        """Bytes of each layer on one rank that keeps all: int [..., E_local] -> [...].

        `rows_per_expert` counts the routed rows that the rank's experts receive, unpadded.
        """
        mxfp8 = self.precision == "mxfp8"
        rows = pa.padded_rows(rows_per_expert, pa.DIST_MOE_EXPERT_ROWS if mxfp8 else 1)
        return pa.saved_bytes(
            self.num_local_input_tokens,
            self.hidden_dim,
            self.intermediate_dim,
            self.top_k,
            rows,
            mxfp8,
        )


@dataclass(frozen=True, kw_only=True)
class DistMoEPlan:
    """What dist_moe 0.1.0 reserves on each rank, under that package's own field names.

    Bytes, but for rows and factors. Host overflow scratch is not planned here, so the `total_`
    rows and factor equal the device's, and the `vmm_` fields stay unset.
    """

    balanced_recv_rows: int
    device_scratch_capacity_rows: int
    total_scratch_capacity_rows: int
    device_scratch_capacity_factor: float
    total_scratch_capacity_factor: float
    saved_input_bytes_per_layer: int
    device_scratch_bytes: int
    minimum_activation_slot_bytes: int
    balanced_full_save_activation_slot_bytes: int
    maximum_useful_activation_slot_bytes: int
    activation_slot_bytes: int
    activation_slot_capacity_factor: float | None
    total_activation_bytes: int
    total_device_buffer_bytes: int
    total_virtual_bytes: int
    num_activation_slots: int
    inference: bool
    host_scratch_bytes: int = 0
    vmm_granularity_bytes: int | None = None
    vmm_device_prefix_bytes: int | None = None
    vmm_host_section_bytes: int | None = None
    vmm_device_scratch_section_bytes: int | None = None
    vmm_padding_bytes: int = 0

    @property
    def layers(self) -> int:
        """Layers that share a slot; 0 in inference, which has none."""
        return self.minimum_activation_slot_bytes // self.saved_input_bytes_per_layer

    @property
    def full_save_bytes_per_layer(self) -> int:
        """Bytes one layer keeps at balanced routing when nothing is recomputed."""
        return self.balanced_full_save_activation_slot_bytes // max(self.layers, 1)

    def explain(self) -> str:
        """The plan in words, bytes and GiB, and what happens when a bound is passed."""
        rows = (
            f"Scratch has room for {self.device_scratch_capacity_rows:,} routed rows a rank "
            f"({self.device_scratch_capacity_factor:g} x the balanced "
            f"{self.balanced_recv_rows:,}, padding included): "
            f"{_size(self.device_scratch_bytes)}."
        )
        hard = (
            "More rows than that are fatal: scratch is a hard bound, the step stops and names "
            "the rows required and available."
        )
        total = f"Reserved on the device in all: {_size(self.total_device_buffer_bytes)}."
        if self.inference:
            kept = "Inference keeps nothing for backward, so there is no activation slot."
            return "\n".join((kept, rows, hard, total))
        return "\n".join(
            (
                f"A layer's input is always kept: {_size(self.saved_input_bytes_per_layer)}, so "
                f"{self.layers} layers need a slot of at least "
                f"{_size(self.minimum_activation_slot_bytes)}.",
                f"To recompute nothing at balanced routing a layer keeps "
                f"{_size(self.full_save_bytes_per_layer)}, the slot "
                f"{_size(self.balanced_full_save_activation_slot_bytes)}; beyond "
                f"{_size(self.maximum_useful_activation_slot_bytes)} it serves no purpose.",
                f"The slot {self._policy()} is {_size(self.activation_slot_bytes)}, times "
                f"{self.num_activation_slots}: {_size(self.total_activation_bytes)}.",
                "A layer that does not fit the slot is recomputed in backward: the slot is a "
                "soft bound.",
                rows,
                hard,
                total,
            )
        )

    def _policy(self) -> str:
        if self.activation_slot_capacity_factor is not None:
            return f"at factor {self.activation_slot_capacity_factor:g}"
        if self.activation_slot_bytes == self.minimum_activation_slot_bytes:
            return "at its minimum"
        return "as requested in bytes"


def plan_dist_moe(config: DistMoEConfig, *, ep_size: int) -> DistMoEPlan:
    """What dist_moe reserves on each of `ep_size` ranks, byte for byte.

    A scratch factor above `ep_size` is taken as `ep_size`, with a logged warning: no rank can
    receive more than all rows. Raises PlanError when `num_experts` is not divisible by
    `ep_size`, or the requested slot is below the minimum, and TypeError for a group size that
    is no integer.
    """
    row = dist_moe_table(**config.columns(), ep_size=ep_size)
    plan: dict[str, Any] = {name: column.item() for name, column in row.items()}
    plan["activation_slot_capacity_factor"] = config.activation_slot_capacity_factor
    asked = config.device_scratch_capacity_factor
    if asked > plan["device_scratch_capacity_factor"]:
        logger.warning("device_scratch_capacity_factor=%g is capped at ep_size=%d", asked, ep_size)
    return DistMoEPlan(**plan)


@dataclass(frozen=True, kw_only=True)
class MokConfig:
    """What decides mok's retained rows: capacity over the balanced T*K, in whole minibatches.

    Raises TypeError for a value of the wrong type and PlanError for one that breaks a rule.
    """

    num_local_input_tokens: int
    top_k: int
    requested_capacity_factor: float = 2.5
    minibatch_rows: int = 4096

    def __post_init__(self) -> None:
        for name in ("num_local_input_tokens", "top_k", "minibatch_rows"):
            value = getattr(self, name)
            if pa.integers(name, value) <= 0:
                raise PlanError(f"{name}={value} must be positive")
        factor = pa.reals("requested_capacity_factor", self.requested_capacity_factor)
        if not (np.isfinite(factor) and factor >= 0):
            raise PlanError(
                f"requested_capacity_factor={factor} must be finite and must not be negative"
            )


@dataclass(frozen=True, kw_only=True)
class MokPlan:
    """Rows that mok keeps, schedules and replays on one rank, one entry per layer."""

    balanced_rows: int
    minibatch_rows: int
    requested_rows_per_layer: int
    retained_rows_per_layer: int
    schedule_rows: tuple[int, ...]
    replay_rows: tuple[int, ...]

    @property
    def effective_factor(self) -> float:
        """Retained rows over the balanced T*K."""
        return self.retained_rows_per_layer / self.balanced_rows

    @property
    def total_replay_rows(self) -> int:
        """Rows replayed over all layers of this rank."""
        return sum(self.replay_rows)

    def explain(self) -> str:
        """The plan in words and rows, and what happens to a layer that exceeds it."""
        replayed = [layer for layer, rows in enumerate(self.replay_rows) if rows]
        overflow = (
            f"Layers {', '.join(map(str, replayed))} receive more; their last "
            f"{self.total_replay_rows:,} rows in all are dispatched and computed again in backward."
            if replayed
            else "No layer receives more, so nothing is computed twice."
        )
        return "\n".join(
            (
                f"{self.requested_rows_per_layer:,} rows a layer are requested and "
                f"{self.retained_rows_per_layer:,} kept, whole minibatches of "
                f"{self.minibatch_rows:,}: {self.effective_factor:.2f} x the balanced "
                f"{self.balanced_rows:,}.",
                f"Rows to schedule by layer, each expert padded to {pa.MOK_EXPERT_ROWS}: "
                f"{', '.join(f'{rows:,}' for rows in self.schedule_rows)}.",
                overflow,
            )
        )


def plan_mok(config: MokConfig, rows_per_expert: ArrayLike) -> MokPlan:
    """mok's plan for one rank from the rows its experts receive: int [layers, E_local], unpadded.

    Raises PlanError or TypeError for rows that are negative, no integers, or of another rank.
    """
    if np.ndim(rows_per_expert) != 2:
        raise PlanError(f"rows_per_expert.ndim={np.ndim(rows_per_expert)} must be 2: layer, expert")
    balanced = config.num_local_input_tokens * config.top_k
    requested = int(
        pa.asked_rows(config.requested_capacity_factor, config.num_local_input_tokens, config.top_k)
    )
    retained = pa.mok_retained_rows(requested, config.minibatch_rows)
    schedule = pa.mok_schedule_rows(rows_per_expert)
    return MokPlan(
        balanced_rows=balanced,
        minibatch_rows=config.minibatch_rows,
        requested_rows_per_layer=requested,
        retained_rows_per_layer=int(retained),
        schedule_rows=tuple(schedule.tolist()),
        replay_rows=tuple(pa.mok_replay_rows(schedule, retained).tolist()),
    )


def _size(amount: int) -> str:
    return f"{amount:,} B ({amount / 2**30:.3f} GiB)"
