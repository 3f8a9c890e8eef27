"""The torch executor: an op is its twin in `kernels`, called on the spot; and one that only looks.

A launch is (rank, op, what its arguments look like). Pipelines make the same launches for every
routing; `Dry` makes the list without running anything.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.kernels import (
    combine,
    decide,
    dispatch_w13,
    permute,
    publish,
    route_table,
    sum_k,
    swiglu,
    w2_dgrad,
    wgrad,
)
from workbench.kernels.memory import Peers

MODULES = (
    publish, route_table, decide, dispatch_w13, swiglu, combine, w2_dgrad, wgrad, sum_k, permute,
)  # fmt: skip
OPS: dict[str, Callable[..., None]] = {
    name.removesuffix("_torch"): twin
    for module in MODULES
    for name, twin in vars(module).items()
    if name.endswith("_torch")
}
"""Op name -> torch twin."""

Launch = tuple[int, str, tuple[str, ...]]


class TorchExecutor:
    """Runs each op at once. With `log`, notes its launches there."""

    def __init__(self, log: list[Launch] | None = None) -> None:
        self.log = log

    def launch(self, op: str, rank: int, arguments: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.append(describe(op, rank, arguments))
        OPS[op](**arguments)


class Dry:
    """Runs nothing and notes every launch; its tensors may be fake."""

    def __init__(self) -> None:
        self.log: list[Launch] = []

    def launch(self, op: str, rank: int, arguments: dict[str, Any]) -> None:
        self.log.append(describe(op, rank, arguments))


def describe(op: str, rank: int, arguments: dict[str, Any]) -> Launch:
    """The launch as a value that can be compared."""
    return rank, op, tuple(f"{name}={_look(value)}" for name, value in arguments.items())


def _look(value: Any) -> str:
    if isinstance(value, Peers):
        return f"peers {_look(value.all_P)} at {value.offset}"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
