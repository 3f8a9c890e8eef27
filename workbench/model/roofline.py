"""Three floors under the time of a case: compute, HBM and link, from peaks and amounts.

A floor is what the amounts of `cost` would take at the device's peak with everything else free.
Compute adds the routed experts in their own precision and the shared expert in BF16. The floors
are given for the mean rank and for the busiest rank, which is the one that all ranks wait for.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.hardware import Hardware
from workbench.model.cost import Work

Array = npt.NDArray[Any]
FLOORS = {"compute": "ComputeFloorMS", "HBM": "HbmFloorMS", "link": "LinkFloorMS"}
"""Floor -> its column for the busiest rank, after `busiest`; without, for the mean rank."""


def roofline_table(table: pd.DataFrame, hardware: Hardware) -> pd.DataFrame:
    """Floors of each case in ms, by the table's index.

    `computeFloorMS`, `hbmFloorMS`, `linkFloorMS` of the mean rank; `floorMS` the largest of the
    three and `binds` its name in FLOORS. `busiestComputeFloorMS` and so on of each layer's busiest
    rank, summed over layers. `floorFraction` and `busiestFloorFraction`: floor over the measured
    iterationMS, NaN where the table has no times (1 would be the peak). `ceilingFraction`: the
    busiest rank's compute at the best BF16 and FP8 products that were measured on the device,
    over iterationMS, NaN where no such measurement is known.

    Raises InputError where the device has no peak for a precision in the table.
    """
    work = Work(table=table)
    peaks = {p: hardware.peak_tflops(p) for p in {"bf16", *table["precision"]}}
    routed_peak = table["precision"].map(peaks).to_numpy(np.float64)
    columns: dict[str, Any] = {}
    for rank, routed, hbm, wire in (
        ("", work.routed_flop, work.hbm, work.wire),
        ("busiest", work.busiest_flop, work.busiest_hbm, work.busiest_wire),
    ):
        floors = {
            "compute": routed / (routed_peak * 1e9) + work.shared_flop / (peaks["bf16"] * 1e9),
            "HBM": hbm / (hardware.hbm_tb_s * 1e9),
            "link": link_ms(wire, work.ep, hardware),
        }
        stacked = np.stack([floors[name] for name in FLOORS])
        found = dict(zip(FLOORS.values(), stacked, strict=True))
        found |= {"FloorMS": stacked.max(axis=0)}
        found |= {"Binds": np.array(list(FLOORS))[stacked.argmax(axis=0)]}
        columns |= {_camel(rank + name): values for name, values in found.items()}
    measured = table["iterationMS"].to_numpy() if "iterationMS" in table else np.nan
    ceilings = {"bf16": hardware.measured_bf16_tflops, "mxfp8": hardware.measured_fp8_tflops}
    routed_ceiling = table["precision"].map(ceilings).to_numpy(np.float64)
    shared_ceiling = np.float64(hardware.measured_bf16_tflops or np.nan)
    reached = work.busiest_flop / (routed_ceiling * 1e9) + work.shared_flop / (shared_ceiling * 1e9)
    columns |= {
        "floorFraction": columns["floorMS"] / measured,
        "busiestFloorFraction": columns["busiestFloorMS"] / measured,
        "ceilingFraction": reached / measured,
    }
    return pd.DataFrame(columns, index=table.index)


def _camel(name: str) -> str:
    return name[0].lower() + name[1:]


def link_ms(wire_bytes: Array, ep: Array, hardware: Hardware) -> Array:
    """Time in ms for a rank to send `wire_bytes` to the ep - 1 others, evenly.

    Inside one peer-access domain they cross the scale-up link. Beyond it the share for the
    ep - domain ranks outside crosses the NIC at the same time, and the slower of the two counts;
    NaN where that is needed and the device has no NIC figure.
    """
    ranks = np.asarray(ep, np.float64)
    others = np.maximum(ranks - 1, 1)
    outside = np.maximum(ranks - hardware.scale_up_domain, 0) / others
    scale_up = wire_bytes * (1 - outside) / (hardware.scale_up_gb_s * 1e6)
    nic = np.nan if hardware.nic_gbit_s is None else hardware.nic_gbit_s / 8 * 1e6
    scale_out = np.where(outside > 0, wire_bytes * outside / nic, 0.0)
    return np.maximum(scale_up, scale_out)


def attainable_tflops(intensity: Array, *, peak_tflops: float, hardware: Hardware) -> Array:
    """The roofline itself: TFLOP/s that a kernel of `intensity` FLOP per HBM byte can reach."""
    return np.minimum(peak_tflops, np.asarray(intensity) * hardware.hbm_tb_s)
