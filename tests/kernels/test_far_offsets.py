"""Rows, experts and counts beyond 2**31 elements, in memory that costs nothing until it is touched.

Only the program that works there is run, so these are tests of the interpreter alone.
"""

import mmap
from dataclasses import replace

import pytest
import torch
from group import LIMIT, TARGET, decided, keeps, normal
from workbench.kernels.count_sort import count_kernel, place_kernel, prefix_kernel, starts_kernel
from workbench.kernels.device import Launch, run
from workbench.kernels.grouped_gemm import grouped_gemm
from workbench.kernels.peers import Peers
from workbench.kernels.permute import pack, unpack
from workbench.kernels.publish import publish
from workbench.kernels.sum_k import sum_k, take_dscores
from workbench.kernels.swiglu import swiglu
from workbench.kernels.swiglu_backward import swiglu_backward
from workbench.kernels.wgrad import w2_wgrad, w13_wgrad
from workbench.kernels.words import HEAD_WORDS, Code, Head

BF16, FP32, I64, I32 = torch.bfloat16, torch.float32, torch.int64, torch.int32
FAR = 1 << 31
"""Elements."""
NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap has a name for from 3.14 on."""


def far(*shape, dtype=BF16):
    """Zeroed memory that costs nothing until it is touched."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype).view(shape)


def run_one(launch: Launch, program: int, programs: int | None = None) -> None:
    """Runs one program of the grid, which is that of the launch or of `programs`."""
    from triton.runtime import interpreter

    class Builder(type(interpreter.interpreter_builder)):
        def set_grid_dim(self, *_):
            super().set_grid_dim(launch.grid if programs is None else programs, 1, 1)

        def set_grid_idx(self, *_):
            super().set_grid_idx(program, 0, 0)

    builder, kind = interpreter.interpreter_builder, type(interpreter.interpreter_builder)
    builder.__class__ = Builder
    try:
        replace(launch, grid=1).run()
    finally:
        builder.__class__ = kind


def last_block(launch, rows, columns=1):
    """Runs the last of as many programs as there are blocks of rows and columns."""
    blocks = -(-rows // launch.constants["BR"]) * columns
    run_one(launch, blocks - 1, blocks)


def same(found, exact, dtype=BF16):
    error = torch.linalg.norm(found.double() - exact) / torch.linalg.norm(exact)
    assert error < LIMIT[dtype]


def parts(h1):
    gate, up = h1.double().chunk(2, 1)
    return gate * torch.sigmoid(gate) * up, gate, up


def test_swiglu():
    F = 64
    rows, at = FAR // F + 21, 1 << 33
    arena_B, act = far(at + rows * 2 * F * 2, dtype=torch.uint8), far(rows, F)
    h1 = arena_B[at:].view(BF16).view(rows, 2 * F)
    h1[-5:] = normal(5, 2 * F, dtype=BF16)
    decision = decided(rows, BASE=at)
    (kept,) = keeps(arena_B, decision, BF16, 2 * F)
    (launch,) = swiglu(TARGET, h1=kept, decision=decision, act_RF=act)
    last_block(launch, rows)
    same(act[-5:], parts(h1[-5:])[0])


def test_swiglu_backward():
    F, N = 64, 40
    rows, at = FAR // F + 21, 1 << 33
    arena_B, act, g = far(at + rows * 2 * F * 2, dtype=torch.uint8), far(rows, F), far(rows, F)
    h1 = arena_B[at:].view(BF16).view(rows, 2 * F)
    h1[-5:], g[-5:] = normal(5, 2 * F, dtype=BF16), normal(5, F, dtype=BF16, seed=1)
    value, gate, up = parts(h1[-5:])
    rank_R, row_R = far(rows, dtype=I32), far(rows, dtype=I32)
    row_R[-5:] = torch.arange(30, 35, dtype=I32)
    scores, dscores = normal(N, 1, dtype=FP32, seed=2), torch.zeros(N, 1)
    s = scores[30:35].double()
    decision = decided(rows, BASE=at)
    (kept,) = keeps(arena_B, decision, BF16, 2 * F)
    (launch,) = swiglu_backward(
        TARGET,
        h1=kept,
        decision=decision,
        rank_R=rank_R,
        row_R=row_R,
        scores=near(scores),
        g_RF=g,
        dscores=near(dscores),
        back_rank_R=rank_R,
        back_row_R=row_R,
        act_RF=act,
    )
    last_block(launch, rows)
    same(act[-5:], value * s)
    same(dscores[30:35, 0], (value * g[-5:].double()).sum(1), FP32)
    sigmoid = torch.sigmoid(gate)
    dgate = sigmoid * (1 + gate * (1 - sigmoid)) * up
    same(h1[-5:], torch.cat([dgate, gate * sigmoid], 1) * (g[-5:].double() * s).repeat(1, 2))


def near(tensor):
    """The buffer of the one rank."""
    return Peers(all_P=tensor[None], bases_P=torch.tensor([tensor.data_ptr()]), offset=0)


def test_sum_k():
    K, D = 3, 64
    T = FAR // D + 5  # the sums are beyond too
    rows, scores, out = far(T, K, D), far(T, K, dtype=FP32), far(T, D)
    rows[-5:], scores[-5:] = normal(5, K, D, dtype=BF16), normal(5, K, dtype=FP32, seed=1)
    (launch,) = sum_k(TARGET, rows_TKD=rows, scores_TK=scores, decision=decided(1), out_TD=out)
    run_one(launch, launch.grid - 1)
    same(out[-5:], torch.einsum("tkd,tk->td", rows[-5:].double(), scores[-5:].double()))


def test_take_dscores():
    T, K = FAR // 8 + 3, 8
    dscores, out = far(T, K, dtype=FP32), far(T, K, dtype=FP32)
    dscores[-3:] = normal(3, K, dtype=FP32)
    (launch,) = take_dscores(TARGET, dscores_TK=dscores, decision=decided(1), out_TK=out)
    run_one(launch, launch.grid - 1)
    assert torch.equal(out[-3:], dscores[-3:])


@pytest.mark.parametrize("D", [64, 33], ids=["words of 16 bytes", "odd"])
def test_pack_and_unpack(D):
    count = FAR // D // 64 * 64 + 73  # the last block of 64 rows has 9
    rows, out, order = far(count, D), far(count, D), far(count, dtype=I64)
    some = normal(9, D, dtype=BF16)
    # The last rows come from, or go to, the first and the last in turn.
    places = torch.tensor([0, count - 1, 1, count - 2, 2, count - 3, 3, count - 4, 4])
    order[-9:] = places
    rows[places] = some
    (launch,) = pack(
        TARGET, rows_ND=rows, order_N=order, divisor=1, decision=decided(1), send_ND=out
    )
    run_one(launch, launch.grid - 1)
    assert torch.equal(out[-9:], rows[places])
    rows, out = far(count, D), far(count, D)
    rows[-9:] = some
    (launch,) = unpack(TARGET, received_ND=rows, order_N=order, decision=decided(1), out_ND=out)
    run_one(launch, launch.grid - 1)
    assert torch.equal(out[places], some)


def test_publish():
    T, K = FAR // 6 + 11, 6
    x, x_out = far(T, 8), far(T, 8)
    ids, ids_out = far(T, K, dtype=torch.int16), far(T, K, dtype=I32)
    scores, scores_out = far(T, K), far(T, K, dtype=FP32)
    ids[-70:] = torch.arange(K, dtype=torch.int16)
    ids[-4, 2] = 99
    x[-2:], scores[-2:] = normal(2, 8, dtype=BF16), normal(2, K, dtype=BF16)
    head = torch.zeros(HEAD_WORDS, dtype=I64)
    *copies, check, note = publish(
        TARGET,
        x_TD=x,
        ids_TK=ids,
        scores_TK=scores,
        x_out_TD=x_out,
        ids_out_TK=ids_out,
        scores_out_TK=scores_out,
        head=head,
        num_experts=8,
    )
    for launch in copies:
        run_one(launch, launch.grid - 1)
    assert torch.equal(x_out[-2:], x[-2:])
    assert torch.equal(ids_out[-2:], ids[-2:].to(I32))
    assert torch.equal(scores_out[-2:], scores[-2:].float())
    found = torch.tensor([1 << 62])
    block = check.grid - 1
    at_block = found.data_ptr() - block * found.itemsize
    run_one(replace(check, args=check.args | {"found_at": at_block}), block)
    run([replace(note, args=note.args | {"found_at": found, "blocks": 1})])
    assert head[:3].tolist() == [Code.ID_RANGE, T - 4, 99]
    assert Head.CODE == 0


@pytest.mark.parametrize("M", [64, 33], ids=["tma", "pointers"])
@pytest.mark.parametrize("which", ["rows", "expert"])
def test_wgrads(M, which):
    N, few = M, 37  # a whole block of 32 and a tail
    rows = FAR // M + 40 if which == "rows" else few
    experts = FAR // (M * N) + 2 if which == "expert" else 1
    a, b, out = far(rows, M), far(rows, N), far(experts, M, N)
    a[-few:], b[-few:] = normal(few, M, dtype=BF16), normal(few, N, dtype=BF16, seed=1)
    starts_e = far(experts + 1, dtype=I64)
    starts_e[-2:] = torch.tensor([rows - few, rows])
    (launch,) = w2_wgrad(
        TARGET, dy_RD=a, act_RF=b, starts_e=starts_e, decision=decided(rows), dw2_EDF=out
    )
    tiles = experts * (-(-M // launch.constants["BM"])) * (-(-N // launch.constants["BN"]))
    run_one(launch, tiles - 1, tiles)
    same(out[-1], a[-few:].double().T @ b[-few:].double())


def test_wgrad_far_into_an_arena():
    M, N, few = 64, 40, 5
    x_at = 3 << 32
    decision = decided(few, BASE=x_at)
    arena_B = far(x_at + 512 + few * M * 2, dtype=torch.uint8)
    x_kept, dh1_kept = keeps(arena_B, decision, BF16, N, M)
    x, dh1 = normal(few, N, dtype=BF16), normal(few, M, dtype=BF16, seed=1)
    arena_B[x_at:].view(BF16)[: few * N].view(few, N).copy_(x)
    arena_B[x_at + 512 :].view(BF16).view(few, M).copy_(dh1)  # 400 bytes of x up to 128s
    out = torch.zeros(1, M, N, dtype=BF16)
    run(
        w13_wgrad(
            TARGET,
            x=x_kept,
            dh1=dh1_kept,
            starts_e=torch.tensor([0, few]),
            dw13_E2FD=out,
            decision=decision,
        )
    )
    same(out[0], dh1.double().T @ x.double())


def test_counting_sort():
    """Counts are [keys, blocks]: many blocks of few keys, and many keys of few blocks."""
    when = {"OK": -1, "ROWS_WORD": -1, "BLOCK": 512}
    keys, sources, N = 64, FAR // 64 + 3, 5
    mine = torch.tensor([63, 7, 63, 63, 7], dtype=I32)
    bases, counts = far(sources, dtype=I64), far(keys, sources, dtype=I32)
    bases[-1] = mine.data_ptr()
    items = {
        "bases_at": bases,
        "offset": 0,
        "decision_at": None,
        "counts_at": counts,
        "N": N,
        "blocks": 1,
    }
    run_one(
        Launch(
            kernel=count_kernel,
            grid=sources,
            args={**items, "KEYS": keys},
            constants={**when, "BK": 64},
        ),
        sources - 1,
    )
    assert counts[:, -1].nonzero()[:, 0].tolist() == [7, 63]
    assert counts[[7, 63], -1].tolist() == [2, 3]
    counts[7, -1], counts[63, -1] = 100, 200  # as a prefix would leave them
    starts, places = torch.zeros(keys + 1, dtype=I64), torch.full((2, 999), -1, dtype=I32)
    starts[63] = 500
    run_one(
        Launch(
            kernel=place_kernel,
            grid=sources,
            args={
                **items,
                "starts_at": starts,
                "first_at": places[0],
                "second_at": places[1],
                "first_key": 0,
                "keys": keys,
                "room": 999,
            },
            constants={**when, "ROUTE": True, "INVERSE": False},
        ),
        sources - 1,
    )
    at = torch.tensor([100, 101, 700, 701, 702])
    assert places[1, at].tolist() == [1, 4, 0, 2, 3]
    assert (places[0, at] == sources - 1).all()

    keys, G = FAR // 64 + 3, 64
    counts, totals = far(keys * G + keys, dtype=I32), far(keys, dtype=I64)
    counts[(keys - 1) * G : keys * G] = torch.arange(1, 65, dtype=I32)
    run_one(
        Launch(
            kernel=prefix_kernel,
            grid=keys,
            args={"counts_at": counts, "totals_at": totals, "P": 1, "blocks": G, "KEYS": keys},
            constants={"TOTALS": True, "SCAN": 64},
        ),
        keys - 1,
    )
    upto = torch.arange(1, 65).cumsum(0)
    assert counts[(keys - 1) * G : keys * G].tolist() == [0, *upto[:-1].tolist()]
    assert totals[-1] == counts[-1] == 2080
    counts[-3] = 5
    starts = torch.zeros(4, dtype=I64)
    run(
        [
            Launch(
                kernel=starts_kernel,
                grid=1,
                args={
                    "counts_at": counts,
                    "starts_at": starts,
                    "G": G,
                    "KEYS": keys,
                    "first_key": keys - 3,
                    "keys": 3,
                },
                constants={"KEYS_2": 4},
            )
        ]
    )
    assert starts.tolist() == [0, 5, 5, 2085]


@pytest.mark.parametrize("K", [64, 33], ids=["tma", "pointers"])
@pytest.mark.parametrize("weights_NK", [True, False])
def test_rows_and_experts_beyond_2_to_31_elements(K, weights_NK):
    N = K
    row, expert = FAR // K + 3, FAR // (N * K) + 2
    a, out = far(row + 64, K), far(row + 64, N)
    weights = far(expert + 1, N, K)
    a[row : row + 5] = normal(5, K, dtype=BF16)
    weights[expert] = normal(N, K, dtype=BF16, seed=1)
    nobody = Peers(all_P=a[None], bases_P=torch.zeros(1, dtype=I64), offset=0)
    small = weights[:1]
    _, launch = grouped_gemm(
        TARGET,
        weights=small,
        weights_NK=weights_NK,
        starts_e=torch.tensor([0, 5]),
        decision=decided(row + 64),
        rows=64,
        peers=nobody,
        rank_R=None,
        row_R=torch.zeros(1, dtype=I32),
        a=a,
        out=out,
    )
    columns = -(-N // 64)
    for column in range(columns):
        launch.args["tasks_at"][column] = torch.tensor([1, expert, row, 5, column, -1, 0, -1])
    launch.args["counts_at"][:] = torch.tensor([0, columns])
    launch = replace(launch, args={**launch.args, "E": expert + 1})
    run([launch])
    w = weights[expert].double() if not weights_NK else weights[expert].double().T
    exact = a[row : row + 5].double() @ w
    same(out[row : row + 5], exact)
    assert not out[row + 5 : row + 64].any()


def test_gathered_rows_beyond_2_to_31_elements():
    D = 64
    row = FAR // D + 3
    a, out, row_R = far(row + 64, D), far(row + 64, D), far(row + 64, dtype=I32)
    source = normal(5, D, dtype=BF16)
    row_R[row : row + 5] = torch.arange(5, dtype=I32).flip(0)
    peers = Peers(all_P=source[None], bases_P=torch.tensor([source.data_ptr()]), offset=0)
    _, launch = grouped_gemm(
        TARGET,
        weights=torch.eye(D, dtype=BF16)[None],
        weights_NK=True,
        starts_e=torch.tensor([0, 5]),
        decision=decided(row + 64),
        rows=64,
        peers=peers,
        rank_R=None,
        row_R=row_R,
        gather=True,
        a=a,
        out=out,
    )
    launch.args["tasks_at"][0] = torch.tensor([0, 0, row, 5, 0, -1, 0, 0])
    launch.args["tasks_at"][1] = torch.tensor([1, 0, row, 5, 0, 0, 1, -1])
    launch.args["counts_at"][:] = torch.tensor([1, 1])
    launch.args["counters_at"].zero_()
    run([launch])
    assert torch.equal(out[row : row + 5], source.flip(0))
    assert not out[row + 5 :].any()


def test_peers_rows_beyond_2_to_31_elements():
    D, rows = 64, 5
    places = FAR // D + 1000
    peers_all = far(1, places, D)
    offset = 3 * (1 << 31)
    base = torch.tensor([peers_all.data_ptr() - offset])
    peers = Peers(all_P=peers_all, bases_P=base, offset=offset)
    place = torch.arange(places - rows, places, dtype=I32)
    peers_all[0, -rows:] = normal(rows, D, dtype=BF16)
    a, out = torch.zeros(rows, D, dtype=BF16), torch.zeros(rows, D, dtype=BF16)
    weights = torch.eye(D, dtype=BF16)[None]
    given = {
        "weights": weights,
        "weights_NK": True,
        "starts_e": torch.tensor([0, rows]),
        "decision": decided(rows),
        "again": False,
        "rows": 64,
        "peers": peers,
        "rank_R": None,
        "row_R": place,
    }
    run(grouped_gemm(TARGET, **given, gather=True, a=a, out=out))
    assert torch.equal(a, peers_all[0, -rows:])
    assert torch.equal(out, a)
    peers_all[0, -rows:] = 0
    run(grouped_gemm(TARGET, **given, scatter=True, a=a))
    assert torch.equal(peers_all[0, -rows:], a)
