"""The triton executor: an op is the launches that its host entry in `kernels` returns, in order.

On a GPU they are queued on the current stream; with TRITON_INTERPRET=1 they run in Triton's
interpreter, which needs no GPU and is for tests.
"""

from typing import Any

import torch

from workbench.errors import InputError
from workbench.kernels.catalogue import OPS
from workbench.kernels.device import target_of
from workbench.moe.executor_torch import Logged, describe
from workbench.runtime import find_runtime

_INPUTS = ("x_TD", "w13_E2FD", "w2_EDF")


class TritonExecutor:
    """Runs each op on `device`. With `log`, notes its launches there. Raises InputError where
    kernels cannot run."""

    name = "triton"

    def __init__(self, device: torch.device, log: list[Logged] | None = None) -> None:
        self.log = log
        self.device, self.runtime = device, find_runtime(device.type)
        try:
            self.target = target_of(device)
        except ValueError as error:
            raise InputError(f"executor='triton': {error}") from error

    def launch(self, op: str, rank: int, arguments: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.append(describe(op, rank, arguments))
        # Where the host refused the input there is none, and every op would be a no-op.
        if all(arguments.get(name, arguments) is not None for name in _INPUTS):
            self.runtime.launch(self.device, OPS[op].entry(self.target, **arguments))
