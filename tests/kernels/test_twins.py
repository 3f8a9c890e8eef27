"""The torch twins one by one, against plain Python or float64."""

import itertools
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from workbench.kernels.combine import w2_combine_torch
from workbench.kernels.decide import decide_torch, release_torch
from workbench.kernels.peers import Peers, for_experts, wide
from workbench.kernels.route_table import route_table_torch
from workbench.kernels.sum_k import sum_k_torch
from workbench.kernels.words import (
    DECIDE_WORDS,
    HEAD_WORDS,
    PEAK_WORDS,
    TEXT_BYTES,
    Code,
    Decide,
    Head,
)

from workbench.case import PROFILES
from workbench.routing import route, rows_by_expert


def peers(all_P: torch.Tensor) -> Peers:
    return Peers(all_P=all_P, bases_P=torch.zeros(len(all_P), dtype=torch.int64), offset=0)


def route_table(ids_PTK: torch.Tensor, E: int, rank: int, room: int):
    P = len(ids_PTK)
    rank_R, slot_R = torch.full((2, room), -7, dtype=torch.int32).unbind()
    starts_e = torch.empty(E // P + 1, dtype=torch.int64)
    counts_PE = torch.empty(P, E, dtype=torch.int64)
    route_table_torch(
        ids=peers(ids_PTK),
        rank=rank,
        rank_R=rank_R,
        slot_R=slot_R,
        starts_e=starts_e,
        counts_PE=counts_PE,
    )
    return rank_R.tolist(), slot_R.tolist(), starts_e.tolist(), counts_PE


@pytest.mark.parametrize("T", [1, 7, 97])
@pytest.mark.parametrize("P", [1, 3])
def test_route_table_is_in_order_of_expert_rank_token_k(T, P):
    E, K = 6, 3
    ids = torch.rand(P, T, E, generator=torch.Generator().manual_seed(T)).argsort(2)[..., :K]
    ids = ids.to(torch.int32).contiguous()
    for rank in range(P):
        wanted = sorted(
            (int(ids[p, t, k]), p, t * K + k)
            for p, t, k in itertools.product(range(P), range(T), range(K))
            if int(ids[p, t, k]) // (E // P) == rank
        )
        room = len(wanted) + 2
        rank_R, slot_R, starts_e, counts_PE = route_table(ids, E, rank, room)
        assert list(zip(rank_R, slot_R, strict=True))[:-2] == [route[1:] for route in wanted]
        assert rank_R[-2:] == slot_R[-2:] == [-7, -7]  # what is not needed is not written
        rows = [sum(r[0] == rank * (E // P) + e for r in wanted) for e in range(E // P)]
        assert starts_e == [0, *itertools.accumulate(rows)]
        for p in range(P):
            assert counts_PE[p].tolist() == np.bincount(ids[p].flatten(), minlength=E).tolist()


def test_route_table_leaves_out_what_has_no_room_and_ids_out_of_range():
    ids = torch.tensor([[[0, 1], [1, 0], [-1, 9]]], dtype=torch.int32)
    rank_R, slot_R, starts_e, counts_PE = route_table(ids, 2, 0, 3)
    assert slot_R == [0, 3, 1]
    assert rank_R == [0, 0, 0]
    assert starts_e == [0, 2, 4]
    assert counts_PE.tolist() == [[2, 2]]


@pytest.mark.parametrize("factor", sorted({1.0, 4.0, 8.0, *PROFILES["A"], *PROFILES["B"]}))
def test_rows_of_the_study_at_ep_64(factor):
    T, K, E, ep = 2048, 6, 384, 64
    ids = torch.from_numpy(route(T=T, K=K, E=E, ep=ep, factor=factor).ids)
    wanted = rows_by_expert(T=T, K=K, E=E, ep=ep, factor=factor).reshape(ep, -1)
    assert wanted[0].sum() == round(Fraction(str(factor)) * T * K)
    for rank in (0, 63):
        *_, starts_e, counts_PE = route_table(ids, E, rank, int(wanted[rank].sum()))
        assert np.diff(starts_e).tolist() == wanted[rank].tolist()
        # a rank keeps 1/ep of its rows at home at any factor, to within a row per expert
        home = counts_PE[rank].view(ep, -1)[rank].sum()
        assert abs(int(home) - wanted[rank].sum() / ep) <= E // ep


class Decision:
    """A rank's words, and decisions made on them."""

    def __init__(self, P: int = 2, entries: int = 4) -> None:
        self.heads = torch.zeros(P, HEAD_WORDS, dtype=torch.int64)
        self.texts = torch.zeros(P, TEXT_BYTES, dtype=torch.uint8)
        self.decisions = torch.full((entries, DECIDE_WORDS), 0, dtype=torch.int64)
        self.error = torch.zeros(DECIDE_WORDS, dtype=torch.int64)
        self.text = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        self.peaks = torch.zeros(PEAK_WORDS, dtype=torch.int64)

    def make(self, entry: int, rows: list[int], *, rank: int = 0, saves: bool = True) -> list[int]:
        """A decision with one expert per rank; x rows of 100 bytes, h1 rows of 200."""
        P = len(self.heads)
        counts_PE = torch.zeros(P, P, dtype=torch.int64)
        counts_PE[0] = torch.tensor(rows)
        decide_torch(
            heads=peers(self.heads),
            counts_PE=counts_PE,
            decisions_L=self.decisions,
            entry=entry,
            rank=rank,
            rows_available=50,
            slot_at=1000,
            slot_bytes=10_000,
            saves=saves,
            row_bytes_O=torch.tensor([100, 200]),
            scratch_at=77,
            texts=peers(self.texts),
            first_error=self.error,
            error_text=self.text,
            peaks=self.peaks,
        )
        return self.decisions[entry].tolist()


def test_decision_saves_what_fits_and_sends_the_rest_to_scratch():
    d = Decision()
    first = d.make(0, [10, 5])
    assert first[: Decide.CODE] == [1, 10, 10, 1000, 4072]  # 1000, 2000 up to 128s
    second = d.make(1, [20, 5])
    assert second[: Decide.CODE] == [1, 20, 20, 4072, 10216]
    third = d.make(2, [10, 5])
    assert third[: Decide.CODE] == [1, 10, 0, 77, 0]  # 3072 more than 11000 - 10216
    release_torch(decision=d.decisions[1])
    assert d.make(2, [10, 5])[Decide.BASE] == 4072
    assert d.make(3, [10, 5], saves=False)[: Decide.CODE] == [1, 10, 0, 77, 0]
    assert d.peaks.tolist() == [20, 9216, 3, 1]


def test_decision_of_an_empty_rank_holds_nothing():
    d = Decision()
    assert d.make(0, [5, 0], rank=1)[: Decide.CODE] == [1, 0, 0, 1000, 1000]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_conclude_the_same_from_an_overflow(rank):
    d = Decision()
    found = d.make(0, [20, 51], rank=rank)
    assert found[Decide.OK] == found[Decide.END] == 0
    assert found[Decide.CODE :][:4] == [Code.OVERFLOW, 1, 51, 50]
    assert d.error.tolist() == found


def test_the_first_error_stays_and_heads_go_before_counts():
    d = Decision()
    d.heads[1, Head.CODE], d.heads[1, Head.A], d.texts[1, 0] = Code.HOST, 3, 65
    assert d.make(0, [20, 51])[Decide.CODE :][:4] == [Code.HOST, 1, 3, 0]
    assert d.text[0] == 65
    d.heads.zero_()
    assert d.make(0, [1, 1])[Decide.OK] == 1
    assert d.error[Decide.CODE] == Code.HOST
    d.heads[1, Head.ENTRY] = 1
    assert d.make(0, [1, 1])[Decide.CODE :][:2] == [Code.MISMATCH, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("T", [1, 7, 97, 300])
def test_sum_is_in_float32_and_in_order_of_k(T, weighted, dtype):
    g = torch.Generator().manual_seed(T)
    sizes = 10.0 ** torch.randint(-3, 4, (T, 6, 1), generator=g)
    rows = (torch.randn(T, 6, 96, generator=g) * sizes).to(dtype)
    scores = torch.randn(T, 6, generator=g) if weighted else None
    out = torch.full((T, 96), float("nan"), dtype=dtype)
    decision = torch.ones(DECIDE_WORDS, dtype=torch.int64)
    sum_k_torch(rows_TKD=rows, scores_TK=scores, decision=decision, out_TD=out)
    values = rows.double() if scores is None else rows.double() * scores.double()[..., None]
    orders = []
    for order in (range(6), reversed(range(6))):
        total = torch.zeros(T, 96, dtype=torch.float64)
        for k in order:
            total = (total + values[:, k]).float().double()
        orders.append(total.float().to(dtype))
    if weighted:  # a product may be rounded before it is added, or not
        torch.testing.assert_close(
            out, orders[0], rtol=2.0**-8 if rounded(dtype) else 1e-6, atol=1e-3
        )
    else:
        assert torch.equal(out, orders[0])
        assert T < 97 or rounded(dtype) or not torch.equal(out, orders[1])  # the order can be told


def rounded(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16


def test_combine_writes_the_rows_of_its_routes_and_no_others():
    P, N, D, F = 3, 5, 12, 8
    arenas = torch.full((P, 4 * N * D), float("nan"))
    out = arenas[:, : N * D].unflatten(1, (N, D))
    g = torch.Generator().manual_seed(0)
    act, w2 = torch.randn(4, F, generator=g), torch.randn(2, D, F, generator=g)
    to_rank, to_row = torch.tensor([0, 2, 1, 2]), torch.tensor([4, 0, 3, 2])
    decision = torch.zeros(DECIDE_WORDS, dtype=torch.int64)
    given = {
        "act_RF": act,
        "w2_EDF": w2,
        "starts_e": torch.tensor([0, 3, 4]),
        "decision": decision,
        "rank_R": to_rank,
        "row_R": to_row,
        "out": Peers(all_P=out, bases_P=torch.zeros(P), offset=0),
    }
    w2_combine_torch(**given)
    assert out.isnan().all()  # not OK: nothing happens
    decision[Decide.OK], decision[Decide.ROWS] = 1, 4
    w2_combine_torch(**given)
    for r in range(4):
        exact = w2[0 if r < 3 else 1].double() @ act[r].double()
        torch.testing.assert_close(out[to_rank[r], to_row[r]].double(), exact, rtol=1e-5, atol=1e-5)
        out[to_rank[r], to_row[r]] = float("nan")
    assert arenas.isnan().all()


def test_experts_run_on_threads_of_their_own_and_leave_torch_s_as_they_were():
    before, seen, done = torch.get_num_threads(), [], []
    torch.set_num_threads(3)
    try:

        def work(e: int, start: int, end: int) -> None:
            seen.append((torch.get_num_threads(), torch.is_grad_enabled(), threading.get_ident()))
            done.append((e, start, end))

        for_experts(work, [0, 4, 4, 9, 10])
        assert sorted(done) == [(0, 0, 4), (2, 4, 9), (3, 9, 10)]
        assert {threads for threads, *_ in seen} == {1}
        assert not any(grad for _, grad, _ in seen)
        assert threading.get_ident() not in {ident for *_, ident in seen}
        assert torch.get_num_threads() == 3
        done.clear()
        for_experts(work, [0, 4, 4, 9, 10], empty=True)
        assert sorted(done)[1] == (1, 4, 4)

        def fails(e: int, start: int, end: int) -> None:
            raise MemoryError(f"of expert {e}")

        with pytest.raises(MemoryError, match="of expert"):
            for_experts(fails, [0, 4, 9])
    finally:
        torch.set_num_threads(before)


def test_wide_rows_are_the_same_bytes():
    rows = torch.arange(24, dtype=torch.bfloat16).view(3, 8)
    assert wide(rows).dtype == torch.int64
    assert torch.equal(wide(rows).view(torch.bfloat16), rows)
    assert wide(rows[:, :6]).dtype == torch.bfloat16  # 12 bytes
    assert wide(rows.view(-1)[2:18].view(2, 8)).dtype == torch.bfloat16  # begins at byte 4
