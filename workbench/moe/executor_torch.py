"""The torch executor: an op is its twin in `kernels`, called on the spot; and one that only looks.

A logged launch is (rank, op, what its arguments look like). Pipelines make the same launches for
every routing; `Dry` makes the list without running anything.
"""

from typing import Any

from torch import Tensor

from workbench.kernels.catalogue import OPS
from workbench.kernels.peers import Kept, Peers

Logged = tuple[int, str, tuple[str, ...]]


class TorchExecutor:
    """Runs each op at once. With `log`, notes its launches there."""

    name = "torch"

    def __init__(self, log: list[Logged] | None = None) -> None:
        self.log = log

    def launch(self, op: str, rank: int, arguments: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.append(describe(op, rank, arguments))
        OPS[op].twin(**arguments)


class Dry:
    """Runs nothing and notes every launch; its tensors may be fake."""

    def __init__(self) -> None:
        self.log: list[Logged] = []

    def launch(self, op: str, rank: int, arguments: dict[str, Any]) -> None:
        self.log.append(describe(op, rank, arguments))


def describe(op: str, rank: int, arguments: dict[str, Any]) -> Logged:
    """The launch as a value that can be compared."""
    return rank, op, tuple(f"{name}={_look(value)}" for name, value in arguments.items())


def _look(value: Any) -> str:
    if isinstance(value, Peers):
        return f"peers {_look(value.all_P)} at {value.offset}"
    if isinstance(value, Kept):
        return f"kept {value.index} {value.dtype}[{value.width}]"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
