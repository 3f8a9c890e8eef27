"""The executor of the unfused baseline on a GPU: its grouped products are torch's own, and so are
the gathers and scatters around them; the other ops are our kernels.

Legend: D hidden width, F expert width, E experts of this rank, R rows received, n of the call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from workbench.kernels.ops import Arguments
from workbench.kernels.peers import wide
from workbench.kernels.words import Decide
from workbench.moe.executor_torch import describe
from workbench.moe.executor_triton import TritonExecutor


class LibraryExecutor(TritonExecutor):
    """`words` has each hosted rank's decision, as the host read it in the call at work."""

    name = "triton, grouped products of torch"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.words: dict[int, Sequence[int]] = {}

    def launch(self, op: str, rank: int, arguments: dict[str, Any]) -> None:
        product, words = _PRODUCTS.get(op), self.words.get(rank)
        if product is None or words is None or not words[Decide.OK] or not _fits(arguments):
            super().launch(op, rank, arguments)
            return
        if self.log is not None:
            self.log.append(describe(op, rank, arguments))
        with torch.no_grad():
            product(arguments, words[Decide.ROWS], arguments["starts_e"][1:].to(torch.int32))


def _fits(arguments: Arguments) -> bool:
    """What `grouped_mm` takes: BF16, rows of whole 16-byte words."""
    weights = [v for v in arguments.values() if isinstance(v, Tensor) and v.dim() == 3]
    return all(w.dtype == torch.bfloat16 and not any(n % 8 for n in w.shape[1:]) for w in weights)


def _dispatch_w13(a: Arguments, n: int, ends_e: Tensor) -> None:
    x_nD = a["x_kept"].rows()
    _gather(a, "x", n, x_nD)
    a["h1"].rows().copy_(grouped_mm(x_nD, a["w13_E2FD"].transpose(1, 2), offs=ends_e))


def _w2_dgrad(a: Arguments, n: int, ends_e: Tensor) -> None:
    dy_nD = a["dy_RD"][:n]
    _gather(a, "dy", n, dy_nD)
    a["g_RF"][:n].copy_(grouped_mm(dy_nD, a["w2_EDF"], offs=ends_e))


def _w2_combine(a: Arguments, n: int, ends_e: Tensor) -> None:
    w2_EFD = a["w2_EDF"].transpose(1, 2)
    _scatter(a, n, grouped_mm(a["act_RF"][:n], w2_EFD, offs=ends_e))


def _w13_dgrad_combine(a: Arguments, n: int, ends_e: Tensor) -> None:
    _scatter(a, n, grouped_mm(a["dh1"].rows(), a["w13_E2FD"], offs=ends_e))


def _w2_wgrad(a: Arguments, n: int, ends_e: Tensor) -> None:
    _wgrad(a["dy_RD"][:n], a["act_RF"][:n], ends_e, a["dw2_EDF"])


def _w13_wgrad(a: Arguments, n: int, ends_e: Tensor) -> None:
    _wgrad(a["dh1"].rows(), a["x"].rows(), ends_e, a["dw13_E2FD"])


def _gather(a: Arguments, source: str, n: int, out_nD: Tensor) -> None:
    table_ND, from_n = a[source].find(a["rank_R"], a["row_R"], n, a["divisor"])
    torch.index_select(wide(table_ND), 0, from_n, out=wide(out_nD))


def _scatter(a: Arguments, n: int, out_nD: Tensor) -> None:
    table_ND, to_n = a["out"].find(a["rank_R"], a["row_R"], n)
    wide(table_ND).index_copy_(0, to_n, wide(out_nD))


def _wgrad(a_nM: Tensor, b_nN: Tensor, ends_e: Tensor, out_EMN: Tensor) -> None:
    out_EMN.copy_(grouped_mm(a_nM.t(), b_nN, offs=ends_e))


_PRODUCTS: dict[str, Callable[[Arguments, int, Tensor], None]] = {
    "dispatch_w13": _dispatch_w13,
    "w2_dgrad": _w2_dgrad,
    "w2_combine": _w2_combine,
    "w13_dgrad_combine": _w13_dgrad_combine,
    "w2_wgrad": _w2_wgrad,
    "w13_wgrad": _w13_wgrad,
}
