"""Views that ops share: a buffer that every rank has at the same offset, rows inside an arena.

Legend: P ranks (peers), B bytes of one rank's arena, R rows received, E experts of this rank.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from threading import Barrier

import torch
from torch import Tensor

from .words import Decide, operand_offset


@dataclass(frozen=True, kw_only=True)
class Peers:
    """One buffer on each rank: `offset` bytes into each rank's arena, of the same shape and dtype.

    A kernel adds `offset` to the base address of a peer's arena; a twin indexes `all_P`.
    """

    all_P: Tensor
    """[P, *shape], one row per rank; strided, and not a copy."""
    bases_P: Tensor
    """int64 [P], base address of each rank's arena as this process sees it."""
    offset: int

    def table(self) -> tuple[Tensor, int]:
        """The buffer as one 2-D table and the rows from one rank to the next.

        Row i of rank p is row p * step + i of the table. The rank stride must be a multiple of
        the row stride, which the plan provides for.
        """
        view = self.all_P
        width = view.shape[-1]
        per_rank = view[0].numel() // max(width, 1)
        if view.shape[0] == 1:
            return view.reshape(per_rank, width), per_rank
        step = view.stride(0) // width
        rows = (view.shape[0] - 1) * step + per_rank
        return view.as_strided((rows, width), (width, 1)), step

    def find(
        self, rank_R: Tensor | None, row_R: Tensor, rows: int, divisor: int = 1
    ) -> tuple[Tensor, Tensor]:
        """The buffer as one 2-D table, and in it the place of row row_R[r] // divisor of rank
        rank_R[r] (0 if None) for the first `rows` of r; int32 or int64 in, int64 [rows] out."""
        table, step = self.table()
        place_R = row_R[:rows].to(torch.int64)
        if divisor != 1:
            place_R = torch.div(place_R, divisor, rounding_mode="floor")
        if rank_R is not None and self.all_P.shape[0] > 1:
            place_R = place_R + rank_R[:rows].to(torch.int64) * step
        return table, place_R


@dataclass(frozen=True, kw_only=True)
class Kept:
    """An operand that a layer keeps for backward: [ROWS, width] of `dtype`, where `decision` (int64
    [DECIDE_WORDS]) says. `row_bytes_O` (int64 [O], on the device) has the bytes per row of all the
    layer's operands in order, of which this is number `index`; `arena_B` (uint8) is the rank's own.
    """

    arena_B: Tensor
    decision: Tensor
    row_bytes_O: Tensor
    index: int
    width: int
    dtype: torch.dtype
    place: tuple[int, int] | None = None
    """Byte in the arena and number of rows, where the host knows them."""

    def rows(self) -> Tensor:
        """The operand as a view; reads the decision on the host unless `place` is known."""
        if self.place is not None:
            return rows_at(self.arena_B, *self.place, self.width, self.dtype)
        words = self.decision.tolist()
        before = operand_offset(words[Decide.ROWS], self.row_bytes_O[: self.index].tolist())
        at = words[Decide.BASE] + before
        return rows_at(self.arena_B, at, words[Decide.ROWS], self.width, self.dtype)


def rows_at(arena_B: Tensor, at: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The `rows` x `width` matrix of `dtype` that starts `at` bytes into a uint8 arena; a view."""
    nbytes = rows * width * dtype.itemsize
    return arena_B[at : at + nbytes].view(dtype).view(rows, width)


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def for_experts(
    work: Callable[[int, int, int], None], starts: Sequence[int], *, empty: bool = False
) -> None:
    """Calls work(expert, first row, row behind the last) for each expert that has rows.

    With `empty`, for those without rows too. Experts are independent, so they run on as many
    threads as torch has, each op inside on one: small products gain nothing from being split, and
    a thread that waits for a split product's other half waits for whatever else runs on that core.
    Values do not depend on the number of threads.
    """
    tasks = [
        (expert, start, end)
        for expert, (start, end) in enumerate(pairwise(starts))
        if empty or end > start
    ]
    threads = torch.get_num_threads()
    if threads == 1 or len(tasks) < 2:
        with torch.no_grad():
            for task in tasks:
                work(*task)
        return
    # Longest first, so that the threads end together.
    queue = sorted(tasks, key=lambda task: task[1] - task[2])
    queue.reverse()

    def drain() -> None:
        with torch.no_grad():
            while queue:
                try:
                    task = queue.pop()
                except IndexError:
                    return
                work(*task)

    pool = _pool(threads)
    futures = [pool.submit(drain) for _ in range(threads)]
    wait(futures)
    for future in futures:
        future.result()


def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads on each of which torch's ops run alone; made once per process and size."""
    key = (os.getpid(), threads)
    if key not in _pools:
        _pools.clear()
        ready = Barrier(threads + 1)

        def alone() -> None:
            torch.get_num_threads()  # a thread's first look sets its number, so look before
            torch.set_num_threads(1)
            ready.wait()

        pool = ThreadPoolExecutor(threads, "experts", initializer=alone)
        for _ in range(threads):
            pool.submit(int)
        ready.wait()
        # What holds for one thread only in part holds for all (MKL's number, and that of threads
        # to come): set it back, now that each of ours has its own.
        torch.set_num_threads(threads)
        _pools[key] = pool
    return _pools[key]


def wide(tensor: Tensor) -> Tensor:
    """The same rows as int64 words where they divide into them: moved, not computed with."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    starts = (
        tensor.storage_offset() * tensor.element_size(),
        tensor.stride(0) * tensor.element_size(),
    )
    if row_bytes % 8 or any(start % 8 for start in starts):
        return tensor
    return tensor.view(torch.int64)
