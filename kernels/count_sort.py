"""Device code of a stable counting sort: where each of many items goes, by a small integer key.

Three launches: each block of items counts its keys; a prefix over the blocks of each key; each
block finds the place of its items. Sums of integers in a fixed order, so the same every time.

Legend: P sources of N items each, G = P * blocks per source, KEYS keys.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import Launch, Target, cdiv, kernel, pointer, word


@dataclass(frozen=True, kw_only=True)
class SortChoice:
    """A program counts or places BLOCK items, BK keys at a time; SCAN blocks per prefix step."""

    BLOCK: int
    BK: int
    SCAN: int
    warps: int


def choose_count_sort(target: Target) -> SortChoice:
    """Pure. Items of a block are compared with each other and with BK keys, all in registers."""
    if target.interprets:
        return SortChoice(BLOCK=512, BK=64, SCAN=64, warps=4)
    return SortChoice(BLOCK=128, BK=64, SCAN=1024, warps=4)


@triton.jit
def _keys(bases_at, offset, source, i, N):
    """Keys (int32) of items i of a source; -1 behind the last."""
    base = tl.load(pointer(bases_at, tl.int64) + source) + offset
    return tl.load(pointer(base, tl.int32) + i, mask=i < N, other=-1)


@triton.jit
def _items(decision_at, N, OK: tl.constexpr, ROWS_WORD: tl.constexpr):
    """How many items a source has: N, or what the decision says; 0 where the call does not run."""
    if ROWS_WORD >= 0:
        N = tl.minimum(word(decision_at, ROWS_WORD), N).to(tl.int32)
    if OK >= 0:
        N = tl.where(word(decision_at, OK) != 0, N, 0)
    return N


@kernel
def count_kernel(
    bases_at: tl.int64,
    offset: tl.int64,
    decision_at: tl.int64,
    counts_at: tl.int64,
    N,
    blocks,
    KEYS,
    OK: tl.constexpr,
    ROWS_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    BK: tl.constexpr,
):
    """Grid: G. keys: int32 [N] at each base + offset; counts: int32 [KEYS, G]."""
    g = tl.program_id(0)
    i = g % blocks * BLOCK + tl.arange(0, BLOCK)
    keys = _keys(bases_at, offset, g // blocks, i, _items(decision_at, N, OK, ROWS_WORD))
    for first in range(0, KEYS, BK):
        key = first + tl.arange(0, BK)
        count = tl.sum((keys[:, None] == key[None, :]).to(tl.int32), 0)
        at = key.to(tl.int64) * tl.num_programs(0) + g
        tl.store(pointer(counts_at, tl.int32) + at, count, mask=key < KEYS)


@kernel
def prefix_kernel(
    counts_at: tl.int64,
    totals_at: tl.int64,
    P,
    blocks,
    KEYS,
    TOTALS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Grid: KEYS. counts: int32 [KEYS, G], turned into what lies before each block of the same
    key; totals (with TOTALS): int64 [P, KEYS], items of each source and key. The sum of a key's
    counts is written behind the last: counts has room for KEYS more."""
    key = tl.program_id(0)
    counts = pointer(counts_at, tl.int32) + key.to(tl.int64) * P * blocks
    sums = pointer(counts_at, tl.int32) + tl.num_programs(0).to(tl.int64) * P * blocks
    before = 0
    for source in range(P):
        at_start = before
        for first in range(0, blocks, SCAN):
            block = first + tl.arange(0, SCAN)
            count = tl.load(counts + source * blocks + block, mask=block < blocks, other=0)
            upto = before + tl.cumsum(count, 0) - count
            tl.store(counts + source * blocks + block, upto, mask=block < blocks)
            before += tl.sum(count, 0)
        if TOTALS:
            total = before - at_start + tl.full([], 0, tl.int64)
            tl.store(pointer(totals_at, tl.int64) + source * KEYS + key, total)
    tl.store(sums + key, before)


@kernel
def starts_kernel(
    counts_at: tl.int64,
    starts_at: tl.int64,
    G,
    KEYS,
    first_key: tl.int32,
    keys,
    KEYS_2: tl.constexpr,
):
    """Grid: 1. starts: int64 [keys + 1], first place of each key from first_key on, and the end."""
    key = tl.arange(0, KEYS_2)
    sums = pointer(counts_at, tl.int32) + (tl.full([], 0, tl.int64) + G) * KEYS + first_key
    count = tl.load(sums + key, mask=key < keys, other=0).to(tl.int64)
    ends = tl.cumsum(count, 0)
    starts = pointer(starts_at, tl.int64)
    tl.store(starts + key, ends - count, mask=key < keys)
    tl.store(starts + keys, tl.sum(count, 0))


@kernel
def place_kernel(
    bases_at: tl.int64,
    offset: tl.int64,
    decision_at: tl.int64,
    counts_at: tl.int64,
    starts_at: tl.int64,
    first_at: tl.int64,
    second_at: tl.int64,
    N,
    blocks,
    first_key: tl.int32,
    keys,
    room,
    OK: tl.constexpr,
    ROWS_WORD: tl.constexpr,
    ROUTE: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: G. Items whose key is one of `keys` from first_key on get their place.

    ROUTE: first, second: int32 [room], at each place the item's source and number; places beyond
    room are left out. Else first: int64; at each place the item's number, or with INVERSE at each
    item its place.
    """
    g = tl.program_id(0)
    i = g % blocks * BLOCK + tl.arange(0, BLOCK)
    mine = _keys(bases_at, offset, g // blocks, i, _items(decision_at, N, OK, ROWS_WORD))
    local = mine - first_key
    held = (mine >= 0) & (local >= 0) & (local < keys)
    # Items of the same key that come earlier in the block.
    n = tl.arange(0, BLOCK)
    same = (mine[:, None] == mine[None, :]) & (n[None, :] < n[:, None])
    within = tl.sum(same.to(tl.int32), 1)
    at = mine.to(tl.int64) * tl.num_programs(0) + g
    before = tl.load(pointer(counts_at, tl.int32) + at, mask=held, other=0)
    start = tl.load(pointer(starts_at, tl.int64) + local, mask=held, other=0)
    place = start + before + within
    if ROUTE:
        held &= place < room
        tl.store(pointer(first_at, tl.int32) + place, g // blocks, mask=held)
        tl.store(pointer(second_at, tl.int32) + place, i, mask=held)
    elif INVERSE:
        tl.store(pointer(first_at, tl.int64) + i, place, mask=held)
    else:
        tl.store(pointer(first_at, tl.int64) + place, i.to(tl.int64), mask=held)


def count_sort(
    target: Target,
    *,
    bases_P: Tensor,
    offset: int,
    N: int,
    keys: int,
    starts: Tensor | None = None,
    totals_PK: Tensor | None = None,
    first_key: int = 0,
    held_keys: int | None = None,
    decision: Tensor | None = None,
    ok: int = -1,
    rows_word: int = -1,
    first: Tensor,
    second: Tensor | None = None,
    inverse: bool = False,
) -> list[Launch]:
    """Launches that sort P sources' N int32 keys, below `keys`; see place_kernel."""
    choice = choose_count_sort(target)
    P, device = bases_P.shape[0], bases_P.device
    held = keys if held_keys is None else held_keys
    blocks = cdiv(N, choice.BLOCK)
    G = P * blocks
    counts = torch.empty(keys * G + keys, dtype=torch.int32, device=device)
    if starts is None:
        starts = torch.empty(held + 1, dtype=torch.int64, device=device)
    items: dict[str, int | Tensor | None] = {
        "bases_at": bases_P,
        "offset": offset,
        "decision_at": decision,
        "counts_at": counts,
        "N": N,
        "blocks": blocks,
    }
    when = {"OK": ok, "ROWS_WORD": rows_word, "BLOCK": choice.BLOCK}
    return [
        Launch(
            kernel=count_kernel,
            grid=G,
            args={**items, "KEYS": keys},
            constants={**when, "BK": choice.BK},
            num_warps=choice.warps,
        ),
        Launch(
            kernel=prefix_kernel,
            grid=keys,
            args={
                "counts_at": counts,
                "totals_at": totals_PK,
                "P": P,
                "blocks": blocks,
                "KEYS": keys,
            },
            constants={
                "TOTALS": totals_PK is not None,
                "SCAN": min(choice.SCAN, triton.next_power_of_2(blocks)),
            },
            num_warps=choice.warps,
        ),
        Launch(
            kernel=starts_kernel,
            grid=1,
            args={
                "counts_at": counts,
                "starts_at": starts,
                "G": G,
                "KEYS": keys,
                "first_key": first_key,
                "keys": held,
            },
            constants={"KEYS_2": triton.next_power_of_2(held)},
        ),
        Launch(
            kernel=place_kernel,
            grid=G,
            args={
                **items,
                "starts_at": starts,
                "first_at": first,
                "second_at": second,
                "first_key": first_key,
                "keys": held,
                "room": first.shape[0],
            },
            constants={**when, "ROUTE": second is not None, "INVERSE": inverse},
            num_warps=choice.warps,
        ),
    ]
