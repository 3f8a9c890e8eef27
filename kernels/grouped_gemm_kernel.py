"""The kernel of the grouped products: one persistent grid that gathers, multiplies and scatters."""

import triton
import triton.language as tl

from .device import kernel, matmul, operand, peer_rows, pointer, rounded, signal, wait, word


@triton.jit
def _gather(
    task,
    a,
    bases_at,
    offset,
    rank_at,
    row_at,
    divisor,
    K,
    EACH: tl.constexpr,
    GK: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    RANKED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """a[row : row + rows] = the rows' copies, pulled from their owners; up to EACH rows."""
    row = tl.load(task + 2)
    rows = tl.load(task + 3)
    r = tl.arange(0, EACH)
    size: tl.constexpr = DTYPE.primitive_bitwidth // 8
    from_at = peer_rows(
        bases_at, offset, rank_at, row_at, row + r, r < rows, divisor, K * size, ROW, RANKED
    )
    source = pointer(from_at, DTYPE, VECTOR)
    to = a + (row + r).to(tl.int64) * K
    for k in range(0, K, GK):
        column = k + tl.arange(0, GK)
        mask = (r < rows)[:, None] & (column < K)[None, :]
        value = tl.load(source[:, None] + column[None, :], mask=mask)
        tl.store(to[:, None] + column[None, :], value, mask=mask)


@triton.jit
def _product(
    task,
    a,
    b,
    a_rows,
    bases_at,
    offset,
    rank_at,
    row_at,
    out,
    a_tiles,
    b_tiles,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    B_NK: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    SCATTER: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    RANKED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One tile of the product, stored where its rows belong."""
    expert = tl.load(task + 1)
    row = tl.load(task + 2)
    rows = tl.load(task + 3)
    first = tl.load(task + 4) * BN
    r = tl.arange(0, BM)
    column = first + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    # Rows of a tile's tail belong to the next expert; each stays in its own row of the result.
    a_row = a + (row + r).to(tl.int64) * K
    b_expert = b + expert.to(tl.int64) * N * K
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES, warp_specialize=SPECIALIZE):
        k_in = k + inner < K
        if A_TMA:
            a_tile = a_tiles.load([row, k])
        else:
            a_tile = tl.load(
                a_row[:, None] + (k + inner)[None, :],
                other=0.0,
                mask=(row + r < a_rows)[:, None] & k_in[None, :],
            )
        if B_TMA and B_NK:
            b_tile = b_tiles.load([expert, first, k]).reshape(BN, BK).T
        elif B_TMA:
            b_tile = b_tiles.load([expert, k, first]).reshape(BK, BN)
        else:
            mask = k_in[:, None] & (column < N)[None, :]
            if B_NK:
                at = column.to(tl.int64)[None, :] * K + (k + inner)[:, None]
            else:
                at = (k + inner).to(tl.int64)[:, None] * N + column[None, :]
            b_tile = tl.load(b_expert + at, mask=mask, other=0.0)
        acc = matmul(a_tile, b_tile, acc, DTYPE)
    if SCATTER:
        size: tl.constexpr = DTYPE.primitive_bitwidth // 8
        to_at = peer_rows(
            bases_at, offset, rank_at, row_at, row + r, r < rows, 1, N * size, ROW, RANKED
        )
        to = pointer(to_at, DTYPE, VECTOR)
    else:
        to = out + (row + r).to(tl.int64) * N
    mask = (r < rows)[:, None] & (column < N)[None, :]
    tl.store(to[:, None] + column[None, :], rounded(acc, DTYPE), mask=mask)


@kernel
def grouped_gemm_kernel(
    arena_at: tl.int64,
    row_bytes_at: tl.int64,
    decision_at: tl.int64,
    a_at: tl.int64,
    b_at: tl.int64,
    out_at: tl.int64,
    bases_at: tl.int64,
    offset: tl.int64,
    rank_at: tl.int64,
    row_at: tl.int64,
    divisor,
    tasks_at: tl.int64,
    counts_at: tl.int64,
    counters_at: tl.int64,
    first_product,
    E,
    N,
    K,
    A_INDEX: tl.constexpr,
    OUT_INDEX: tl.constexpr,
    ROWS_WORD: tl.constexpr,
    GATHERS: tl.constexpr,
    SCATTER: tl.constexpr,
    MERGED: tl.constexpr,
    B_NK: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    VECTOR: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    RANKED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    EACH: tl.constexpr,
    GK: tl.constexpr,
    GATHERERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: programs that run at the same time, of which the first GATHERERS gather first.

    a: DTYPE [R, K], at a_at or, with A_INDEX >= 0, where the layer keeps that operand; b: DTYPE
    [E, N, K] if B_NK, else [E, K, N]; out: DTYPE [R, N], found like a, or with SCATTER the peers'
    buffer at `offset` from bases (int64 [P]); rank: int32 [R], row: ROW [R]. With GATHERS a is
    filled first, from the peers' buffer. Tasks, counts, counters: as in tasks.py.
    """
    a = operand(a_at, arena_at, decision_at, row_bytes_at, A_INDEX, DTYPE, VECTOR)
    out = operand(out_at, arena_at, decision_at, row_bytes_at, OUT_INDEX, DTYPE, VECTOR)
    b = pointer(b_at, DTYPE, VECTOR)
    rows = word(decision_at, ROWS_WORD).to(tl.int32)
    counts = pointer(counts_at, tl.int32)
    counters = pointer(counters_at, tl.int32)
    tasks = pointer(tasks_at, tl.int32, True)
    gathers = tl.load(counts)
    products = tl.load(counts + 1)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if GATHERS and not MERGED:  # noqa: SIM102 (this one is decided by the compiler)
        if program < GATHERERS:
            for i in range(program, gathers, GATHERERS):
                task = tasks + i * 8
                _gather(
                    task,
                    a,
                    bases_at,
                    offset,
                    rank_at,
                    row_at,
                    divisor,
                    K,
                    EACH,
                    GK,
                    DTYPE,
                    ROW,
                    RANKED,
                    VECTOR,
                )
                signal(counters + tl.load(task + 7), "gpu")
    if products > 0:
        if A_TMA:
            a_tiles = tl.make_tensor_descriptor(a, [rows, K], [K.to(tl.int64), 1], [BM, BK])
        else:
            a_tiles = a
        if B_TMA and B_NK:
            b_tiles = tl.make_tensor_descriptor(
                b, [E, N, K], [K.to(tl.int64) * N, K.to(tl.int64), 1], [1, BN, BK]
            )
        elif B_TMA:
            b_tiles = tl.make_tensor_descriptor(
                b, [E, K, N], [N.to(tl.int64) * K, N.to(tl.int64), 1], [1, BK, BN]
            )
        else:
            b_tiles = b
        if MERGED:
            for i in range(program, gathers + products, programs):
                task = tasks + i * 8
                waits = tl.load(task + 5)
                if waits >= 0:
                    wait(counters + waits, tl.load(task + 6), "gpu")
                if tl.load(task) == 0:
                    _gather(
                        task,
                        a,
                        bases_at,
                        offset,
                        rank_at,
                        row_at,
                        divisor,
                        K,
                        EACH,
                        GK,
                        DTYPE,
                        ROW,
                        RANKED,
                        VECTOR,
                    )
                else:
                    _product(
                        task,
                        a,
                        b,
                        rows,
                        bases_at,
                        offset,
                        rank_at,
                        row_at,
                        out,
                        a_tiles,
                        b_tiles,
                        N,
                        K,
                        BM,
                        BN,
                        BK,
                        STAGES,
                        SPECIALIZE,
                        B_NK,
                        A_TMA,
                        B_TMA,
                        SCATTER,
                        DTYPE,
                        ROW,
                        RANKED,
                        VECTOR,
                    )
                signals = tl.load(task + 7)
                if signals >= 0:
                    signal(counters + signals, "gpu")
        else:
            # The early products go round the programs that do not gather, the others round all.
            early = products * EARLY // 100
            workers = programs - GATHERERS
            worker = program - GATHERERS
            own = (tl.maximum(early - worker, 0) + workers - 1) // workers
            own_early = tl.where(program < GATHERERS, 0, own)
            own_late = (tl.maximum(products - early - program, 0) + programs - 1) // programs
            for n in tl.range(0, own_early + own_late):
                late = early + program + (n - own_early) * programs
                i = tl.where(n < own_early, worker + n * workers, late)
                task = tasks + (first_product + i) * 8
                if GATHERS:
                    wait(counters + tl.load(task + 5), tl.load(task + 6), "gpu")
                _product(
                    task,
                    a,
                    b,
                    rows,
                    bases_at,
                    offset,
                    rank_at,
                    row_at,
                    out,
                    a_tiles,
                    b_tiles,
                    N,
                    K,
                    BM,
                    BN,
                    BK,
                    STAGES,
                    SPECIALIZE,
                    B_NK,
                    A_TMA,
                    B_TMA,
                    SCATTER,
                    DTYPE,
                    ROW,
                    RANKED,
                    VECTOR,
                )
