"""A small group for tests of kernels: poisoned arenas, a random route table, weights, a decision.

Everything lies on DEVICE: the CPU, where Triton interprets kernels; with `pytest -m gpu`, the GPU.

Legend: P ranks, N rows of a peer's buffer, R rows received, E experts of the rank, D hidden.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from workbench.kernels.device import INTERPRET, target_of
from workbench.kernels.peers import Kept, Peers
from workbench.kernels.words import DECIDE_WORDS, Decide

DEVICE = torch.device("cpu" if INTERPRET.value else "cuda")
TARGET = target_of(DEVICE)
ROWS = {"none": [0, 0], "one": [0, 1, 0], "tails": [7, 0, 97, 33, 1], "hot": [0, 150]}
"""Rows per expert."""
LIMIT = {torch.bfloat16: 4e-3, torch.float32: 2e-6}
"""Relative error against float64 of FP32 sums rounded once: half an ulp is 2e-3 and 3e-8."""


@dataclass
class Group:
    """Arenas [P, B] filled with NaN, laid out by `place`."""

    ranks: int
    nbytes: int = 1 << 20
    end: int = 0
    arenas_PB: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.arenas_PB = torch.full((self.ranks, self.nbytes), 0xFF, dtype=torch.uint8)

    def place(self, *shape: int, dtype: torch.dtype = torch.float32) -> Peers:
        """A buffer at the same place in every arena, of NaN (or -1)."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        at = self.end
        # Rank strides are whole rows of the buffer, as the plan provides: see `unit`.
        assert self.nbytes % (shape[-1] * dtype.itemsize) == 0
        self.end += -(-nbytes // 128) * 128
        assert self.end <= self.nbytes, "the test's arena is too small"
        all_P = self.arenas_PB[:, at : at + nbytes].view(dtype).view(self.ranks, *shape)
        stride = self.arenas_PB.stride(0)
        bases_P = self.arenas_PB.data_ptr() + torch.arange(self.ranks) * stride
        return Peers(all_P=all_P, bases_P=bases_P, offset=at)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def routed(rows: list[int], ranks: int, places: int, seed: int) -> dict[str, Tensor]:
    """A route table: starts_e, and for each row a source rank and a place of its own there."""
    total = sum(rows)
    g = seeded(seed)
    everywhere = torch.randperm(ranks * places, generator=g)[:total]
    return {
        "starts_e": torch.tensor([0, *rows]).cumsum(0),
        "rank_R": torch.cat([everywhere // places, torch.full((9,), -7)]).to(torch.int32),
        "row_R": torch.cat([everywhere % places, torch.full((9,), -7)]).to(torch.int32),
    }


def decided(rows: int, **words: int) -> Tensor:
    """A decision that lets the call run, with `words` by name on top."""
    decision = torch.zeros(DECIDE_WORDS, dtype=torch.int64)
    decision[Decide.OK], decision[Decide.ROWS] = 1, rows
    for name, value in words.items():
        decision[Decide[name]] = value
    return decision


def keeps(arena_B: Tensor, decision: Tensor, dtype: torch.dtype, *widths: int) -> list[Kept]:
    """Operands of these widths, one behind the other from the decision's BASE on."""
    row_bytes_O = torch.tensor([width * dtype.itemsize for width in widths])
    return [
        Kept(
            arena_B=arena_B,
            decision=decision,
            row_bytes_O=row_bytes_O,
            index=i,
            width=width,
            dtype=dtype,
        )
        for i, width in enumerate(widths)
    ]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    g = seeded(seed)
    return (torch.randn(shape, generator=g) * scale).to(dtype)


def expert_of(rows: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))


def close(found: Tensor, exact: Any, dtype: torch.dtype) -> None:
    """Relative Frobenius error within LIMIT, and nothing left unwritten."""
    found64, exact64 = found.double(), torch.as_tensor(exact).double()
    assert found64.shape == exact64.shape
    assert torch.isfinite(found64).all()
    error = torch.linalg.norm(found64 - exact64)
    assert error <= LIMIT[dtype] * torch.linalg.norm(exact64) + 1e-30, float(error)
