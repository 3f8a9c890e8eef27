"""The tasks of a grouped product over received rows, as data: gathers, and tiles of the product.

A row tile is up to `block` consecutive rows of one expert. Its rows are gathered by `parts` tasks,
each of which signals the tile's counter; each task that multiplies the tile waits until all parts
have. Tasks need nothing else of each other: within a list they may be started in any order, by any
number of programs, as long as waits hold. Row tiles are taken `group` at a time and a group's
tasks ordered by column, so that weights are read once per group while its rows stay in cache.

Two layouts: one list per role (gathers at 0, products at `products_at`), for a GPU where programs
have roles; or one merged list in which every task comes behind those that it waits for, for the
interpreter, which runs programs one after the other.

Legend: E experts of this rank, R rows received.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import Launch, Target, cdiv, kernel, pointer, word
from .words import Decide


class Task(IntEnum):
    """Index of a word in a task, int32 [TASK_WORDS]."""

    KIND = 0
    """GATHER or PRODUCT."""
    EXPERT = 1
    ROW = 2
    """First row, of all rows received."""
    ROWS = 3
    """Rows from there; may be 0 in a gather."""
    COLUMN = 4
    """Which block of output columns; 0 in a gather."""
    WAIT = 5
    """Index of the counter to wait for, -1 for none."""
    UNTIL = 6
    """What that counter must have reached."""
    SIGNAL = 7
    """Index of the counter to raise, -1 for none."""


TASK_WORDS = 8
GATHER, PRODUCT = 0, 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How rows and columns are cut into tasks. parts = 0: nothing is gathered, nothing waits."""

    block: int
    parts: int
    columns: int
    group: int
    merged: bool

    def tiles(self, rows: int, experts: int) -> int:
        """Most row tiles that `rows` rows of `experts` experts make."""
        return cdiv(rows, self.block) + experts

    def products_at(self, rows: int, experts: int) -> int:
        """Index of the first product's task in a table of lists by role."""
        return 0 if self.merged else self.tiles(rows, experts) * self.parts

    def table(self, rows: int, experts: int) -> int:
        """Tasks that a table must have room for."""
        return self.tiles(rows, experts) * (self.parts + self.columns)


def task_table_torch(
    *, starts_e: Tensor, decision: Tensor, again: bool, rows: int, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """The tasks int32 [table, TASK_WORDS], how many gathers and products there are (int32 [2]; none
    if the call does not run, or with `again` if all rows are kept), and the zeroed counters int32
    [tiles]. `rows` is the most rows."""
    experts = starts_e.shape[0] - 1
    at = shape.products_at(rows, experts)
    tasks = torch.zeros(shape.table(rows, experts), TASK_WORDS, dtype=torch.int32)
    counters = torch.zeros(shape.tiles(rows, experts), dtype=torch.int32)
    words, starts = decision.tolist(), starts_e.tolist()
    if not words[Decide.OK] or (again and words[Decide.KEPT] == words[Decide.ROWS]):
        return tasks, torch.zeros(2, dtype=torch.int32), counters
    tiles = [
        (e, row, min(shape.block, starts[e + 1] - row))
        for e in range(experts)
        for row in range(starts[e], starts[e + 1], shape.block)
    ]
    part_rows = cdiv(shape.block, max(shape.parts, 1))
    until = shape.parts
    gathers, products = [], []
    merged: list[list[int]] = []
    for first in range(0, len(tiles), shape.group):
        group = list(enumerate(tiles))[first : first + shape.group]
        some = [
            [
                GATHER,
                e,
                row + min(p * part_rows, size),
                min((p + 1) * part_rows, size) - min(p * part_rows, size),
                0,
                -1,
                0,
                tile,
            ]
            for tile, (e, row, size) in group
            for p in range(shape.parts)
        ]
        others = [
            [PRODUCT, e, row, size, column, tile if until else -1, until, -1]
            for column in range(shape.columns)
            for tile, (e, row, size) in group
        ]
        gathers += some
        products += others
        merged += some + others
    lists = {0: merged} if shape.merged else {0: gathers, at: products}
    for start, rows_ in lists.items():
        if rows_:
            tasks[start : start + len(rows_)] = torch.tensor(rows_, dtype=torch.int32)
    return tasks, torch.tensor([len(gathers), len(products)], dtype=torch.int32), counters


@kernel
def task_table_kernel(
    starts_at: tl.int64,
    decision_at: tl.int64,
    tasks_at: tl.int64,
    counts_at: tl.int64,
    counters_at: tl.int64,
    experts,
    products,
    AGAIN: tl.constexpr,
    OK: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    MERGED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTS_2: tl.constexpr,
    COLUMNS_2: tl.constexpr,
):
    """Grid: one program per possible row tile. starts: int64 [experts + 1]; the rest as above.

    EXPERTS, PARTS_2, COLUMNS_2: powers of two that hold experts, PARTS and COLUMNS.
    """
    tile = tl.program_id(0)
    starts = pointer(starts_at, tl.int64)
    counts = pointer(counts_at, tl.int32)
    tl.store(pointer(counters_at, tl.int32) + tile, 0)
    runs = word(decision_at, OK) != 0
    if AGAIN:
        runs &= word(decision_at, KEPT) < word(decision_at, ROWS)
    e = tl.arange(0, EXPERTS)
    start = tl.load(starts + e, mask=e < experts, other=0)
    rows = tl.load(starts + e + 1, mask=e < experts, other=0) - start
    tiles_e = ((rows + BLOCK - 1) // BLOCK).to(tl.int32)
    ends_e = tl.cumsum(tiles_e, 0)
    tiles = tl.sum(tiles_e, 0)
    if tile == 0:
        tl.store(counts, tl.where(runs, tiles * PARTS, 0))
        tl.store(counts + 1, tl.where(runs, tiles * COLUMNS, 0))
    if runs & (tile < tiles):
        expert = tl.sum(((ends_e <= tile) & (e < experts)).to(tl.int32), 0)
        mine = e == expert
        within = tile - tl.sum(tl.where(mine, ends_e - tiles_e, 0), 0)
        row = (tl.sum(tl.where(mine, start, 0), 0) + within * BLOCK).to(tl.int32)
        left = tl.sum(tl.where(mine, rows, 0), 0).to(tl.int32) - within * BLOCK
        size = tl.minimum(left, BLOCK)
        # Where the group's tasks begin, and how many row tiles the group has.
        first = tile // GROUP * GROUP
        group = tl.minimum(tiles - first, GROUP)
        if MERGED:
            gathers = first * (PARTS + COLUMNS)
            products_from = gathers + group * PARTS
        else:
            gathers = first * PARTS
            products_from = products + first * COLUMNS
        if PARTS > 0:
            part = tl.arange(0, PARTS_2)
            each: tl.constexpr = (BLOCK + PARTS - 1) // PARTS
            low = tl.minimum(part * each, size)
            task = pointer(tasks_at, tl.int32) + 8 * (gathers + (tile - first) * PARTS + part)
            fits = part < PARTS
            tl.store(task, 0, mask=fits)
            tl.store(task + 1, expert, mask=fits)
            tl.store(task + 2, row + low, mask=fits)
            tl.store(task + 3, tl.minimum(part * each + each, size) - low, mask=fits)
            tl.store(task + 4, 0, mask=fits)
            tl.store(task + 5, -1, mask=fits)
            tl.store(task + 6, 0, mask=fits)
            tl.store(task + 7, tile, mask=fits)
        column = tl.arange(0, COLUMNS_2)
        task = pointer(tasks_at, tl.int32) + 8 * (products_from + column * group + tile - first)
        fits = column < COLUMNS
        tl.store(task, 1, mask=fits)
        tl.store(task + 1, expert, mask=fits)
        tl.store(task + 2, row, mask=fits)
        tl.store(task + 3, size, mask=fits)
        tl.store(task + 4, column, mask=fits)
        tl.store(task + 5, tile if PARTS > 0 else -1, mask=fits)
        tl.store(task + 6, PARTS, mask=fits)
        tl.store(task + 7, -1, mask=fits)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A task table in device memory and the launch that fills it."""

    tasks: Tensor
    counts: Tensor
    counters: Tensor
    products_at: int
    launch: Launch


def task_table(
    target: Target, *, starts_e: Tensor, decision: Tensor, again: bool, rows: int, shape: Shape
) -> Table:
    """The table that `task_table_torch` gives, and the launch that fills it."""
    experts, device = starts_e.shape[0] - 1, starts_e.device
    tiles = shape.tiles(rows, experts)
    tasks = torch.empty(shape.table(rows, experts), TASK_WORDS, dtype=torch.int32, device=device)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    counters = torch.empty(tiles, dtype=torch.int32, device=device)
    at = shape.products_at(rows, experts)
    launch = Launch(
        kernel=task_table_kernel,
        grid=tiles,
        args={
            "starts_at": starts_e,
            "decision_at": decision,
            "tasks_at": tasks,
            "counts_at": counts,
            "counters_at": counters,
            "experts": experts,
            "products": at,
        },
        constants={
            "AGAIN": again,
            "OK": int(Decide.OK),
            "KEPT": int(Decide.KEPT),
            "ROWS": int(Decide.ROWS),
            "BLOCK": shape.block,
            "PARTS": shape.parts,
            "COLUMNS": shape.columns,
            "GROUP": shape.group,
            "MERGED": shape.merged,
            "EXPERTS": triton.next_power_of_2(experts),
            "PARTS_2": triton.next_power_of_2(max(shape.parts, 1)),
            "COLUMNS_2": triton.next_power_of_2(shape.columns),
        },
        num_warps=1,
    )
    return Table(tasks=tasks, counts=counts, counters=counters, products_at=at, launch=launch)


def interleaving(tasks: Tensor, programs: Callable[[int], int], seed: int) -> Iterator[list[int]]:
    """The tasks in a random order that their waits allow, as lists of words.

    `programs(kind)` says how many programs share the tasks of a kind, each taking every so-many-th
    in order; at each step a random one of those whose next task need not wait goes on, by random
    priorities that change now and then, so that some programs lag far behind. Raises RuntimeError
    where all wait.
    """
    chance = random.Random(seed)
    queues: list[list[list[int]]] = []
    for kind in (GATHER, PRODUCT):
        mine = [task for task in tasks.tolist() if task[Task.KIND] == kind]
        count = min(programs(kind), len(mine))
        queues += [mine[p::count][::-1] for p in range(count)]
    counters: dict[int, int] = {}
    chance.shuffle(queues)
    while queues:
        if chance.random() < 0.05:
            chance.shuffle(queues)
        for queue in queues:
            task = queue[-1]
            if task[Task.WAIT] < 0 or counters.get(task[Task.WAIT], 0) >= task[Task.UNTIL]:
                break
        else:
            raise RuntimeError("every program waits: the tasks can never end")
        queue.pop()
        yield task
        if task[Task.SIGNAL] >= 0:
            counters[task[Task.SIGNAL]] = counters.get(task[Task.SIGNAL], 0) + 1
        if not queue:
            queues.remove(queue)
