"""What a case must compute, move and send: FLOP, HBM bytes, wire bytes, routed rows.

The formulas are those of the published GB300 study (2026-10-16): useful FLOP and modelled HBM
bytes equal its 110 records to 1e-12 relative; its link counters lie within 4 % of the wire bytes.
Every function takes scalars or arrays that broadcast. All amounts are per GPU and for the whole
iteration (all layers; forward and backward in training).

Legend: T tokens per GPU, D hidden width, F expert width, E experts, K experts per token,
S shared experts, ep ranks, R routed rows that a rank receives in one layer, N cases.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.errors import InputError
from workbench.extensions import added
from workbench.routing import Workloads
from workbench.systems import BF16_BYTES, MXFP8_BYTES, SYSTEMS

Array = npt.NDArray[Any]
Num = float | Array


def passes(training: Num) -> Array:
    """Passes over the weights: forward, and in training dgrad and wgrad."""
    return np.where(training, 3, 1)


def expert_flop(rows: Num, D: Num, F: Num) -> Array:
    """FLOP of one forward pass of `rows` rows through a SwiGLU expert: gate, up and down."""
    return np.asarray(rows, np.float64) * 6 * D * F


def hbm_bytes(
    *, R: Num, T: Num, D: Num, F: Num, K: Num, S: Num, weight_bytes: Num, experts: Num
) -> Array:
    """Modelled HBM bytes of one pass of one layer, as the study counts them.

    `experts` are the local experts that receive a row, whose weights are read: `experts_read` of
    one rank, or its mean over ranks with R = T*K.
    """
    D = np.asarray(D, np.float64)
    weights = experts * 3 * D * F * weight_bytes
    shared_weights = S * 3 * D * F * BF16_BYTES
    hidden = (R + S * T) * F * 4
    # The study counts K + 3 rows of D per token; K of them are the routed rows, 3 the token's own.
    rows = (R + 3 * T) * D * BF16_BYTES
    ids = T * K * 4
    return weights + shared_weights + hidden + rows + ids


def experts_read(rows: Num, E_local: Num) -> Array:
    """Local experts that receive at least one of a rank's rows, which the routing spreads evenly:
    only their weights are read, by the floors and by the time model alike."""
    return np.minimum(rows, E_local)


def wire_row_bytes(pipeline: str, precision: str, *, D: Num, training: Num) -> tuple[Array, Array]:
    """(to the expert, back from it): bytes that a routed row of a system sends in one iteration:
    what the system says of a pass, in training for backward too."""
    D = np.asarray(D, np.float64)
    ways = np.where(training, 2, 1)
    in_inference, in_training = (
        SYSTEMS[pipeline].wire_bytes(precision, mode) for mode in ("inference", "training")
    )
    there, back = (
        np.where(training, *pair) for pair in zip(in_training, in_inference, strict=True)
    )
    return ways * D * there, ways * D * back


@dataclass(frozen=True, kw_only=True)
class Work(Workloads):
    """Amounts of a table's cases, each [N] and computed once, on first use."""

    @cached_property
    def weight_bytes(self) -> Array:
        """Bytes per routed weight, [N]."""
        return np.where(self.mxfp8, MXFP8_BYTES, BF16_BYTES)

    @cached_property
    def routed_flop(self) -> Array:
        """Useful FLOP of the routed experts on the mean rank, [N]."""
        per_layer = expert_flop(self.balanced_rows, self.shape["D"], self.shape["F"])
        return self.layers * passes(self.training) * per_layer

    @cached_property
    def shared_flop(self) -> Array:
        """Useful FLOP of the shared expert, which is BF16 and local to each rank, [N]."""
        rows = self.shape["S"] * self.shape["T"]
        per_layer = expert_flop(rows, self.shape["D"], self.shape["F"])
        return self.layers * passes(self.training) * per_layer

    @cached_property
    def hbm(self) -> Array:
        """Modelled HBM bytes on the mean rank, [N]."""
        E_local, others = self.shape["E_local"][:, None], self.ep[:, None] - 1
        rest = (self.ep * self.balanced_rows)[:, None] - self.rows.rank0
        few, extra = np.divmod(rest, np.maximum(others, 1))
        read = experts_read(self.rows.rank0, E_local) + extra * experts_read(few + 1, E_local)
        read = read + (others - extra) * experts_read(few, E_local)
        mean = np.where(self.in_layers, read, 0).sum(axis=1) / self.ep
        per_pass = self._hbm_bytes(self.balanced_rows, mean / self.layers)
        return self.layers * passes(self.training) * per_pass

    @cached_property
    def busiest_rows(self) -> Array:
        """Rows of each layer's busiest rank, summed over layers, [N]. All ranks wait for that
        rank, and FLOP, HBM and wire bytes are linear in its rows."""
        return self.rows.busiest.sum(axis=1)

    @cached_property
    def busiest_flop(self) -> Array:
        """FLOP of the routed experts on each layer's busiest rank, summed over layers, [N]."""
        one_pass = expert_flop(self.busiest_rows, self.shape["D"], self.shape["F"])
        return passes(self.training) * one_pass

    @cached_property
    def busiest_hbm(self) -> Array:
        """Modelled HBM bytes on each layer's busiest rank, summed over layers, [N]."""
        read = experts_read(self.rows.busiest, self.shape["E_local"][:, None]).sum(axis=1)
        per_pass = self._hbm_bytes(self.busiest_rows / self.layers, read / self.layers)
        return self.layers * passes(self.training) * per_pass

    def _hbm_bytes(self, R: Array, experts: Array) -> Array:
        sizes = {name: self.shape[name] for name in ("T", "D", "F", "K", "S")}
        return hbm_bytes(R=R, experts=experts, weight_bytes=self.weight_bytes, **sizes)

    @cached_property
    def wire_rows(self) -> tuple[Array, Array]:
        """(to the expert, back from it) bytes per routed row, [N]."""
        there, back = np.zeros(len(self.table)), np.zeros(len(self.table))
        systems = self.table.groupby(["pipeline", "precision"], observed=True).indices
        for (pipeline, precision), rows in systems.items():
            there[rows], back[rows] = wire_row_bytes(
                pipeline, precision, D=self.shape["D"][rows], training=self.training[rows]
            )
        return there, back

    @cached_property
    def wire(self) -> Array:
        """Bytes that the mean rank sends to its peers, [N]; 1/ep of the rows stay local."""
        there, back = self.wire_rows
        return self.layers * self.balanced_rows * (1 - 1 / self.ep) * (there + back)

    @cached_property
    def busiest_wire(self) -> Array:
        """Bytes that each layer's busiest rank sends, summed over layers, [N].

        Every source sends the same share to a rank, so of the R rows that it receives R/ep are
        its own: R*(1 - 1/ep) come in and, once computed, go out; of its own T*K rows T*K - R/ep
        go out and come back. It receives no more than it sends, because R is at least T*K and a
        row on its way back is at least as large as on its way there.
        """
        there, back = self.wire_rows
        as_source = self.layers * self.balanced_rows - self.busiest_rows / self.ep
        return as_source * there + self.busiest_rows * (1 - 1 / self.ep) * back


def cost_table(table: pd.DataFrame) -> pd.DataFrame:
    """Amounts of each case, by the table's index: FLOP, bytes and rows, mean and busiest rank; and
    METRICS of the user's own.

    `usefulFLOP`, `modeledHBMBytes` and `wireBytes` are the study's; `busiest...` are the sums
    over layers of the busiest rank's, which bound the time because all ranks wait for it.
    """
    work = Work(table=table)
    columns = {
        "usefulFLOP": work.routed_flop + work.shared_flop,
        "routedFLOP": work.routed_flop,
        "sharedFLOP": work.shared_flop,
        "busiestRoutedFLOP": work.busiest_flop,
        "modeledHBMBytes": work.hbm,
        "busiestHBMBytes": work.busiest_hbm,
        "wireBytes": work.wire,
        "busiestWireBytes": work.busiest_wire,
        "balancedRows": work.balanced_rows,
        "busiestRows": work.rows.busiest.max(axis=1, initial=0),
        "rank0Rows": work.rows.rank0.sum(axis=1),
    }
    for name in METRICS.keys() & columns.keys():
        raise InputError(f"WORKBENCH_METRICS: {name!r} must not be there already")
    columns |= {name: metric(work) for name, metric in METRICS.items()}
    return pd.DataFrame(columns, index=table.index)


METRICS: Mapping[str, Callable[[Work], Array]] = added("METRICS", {})
"""Further columns of `cost_table`, of the user's own: name -> function of the table's Work, [N]."""
