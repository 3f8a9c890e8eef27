"""Route table and the baseline's row orders: integers, so bit for bit, and against plain Python."""

import pytest
import torch
from group import TARGET, Group, decided, normal, seeded
from workbench.kernels.device import run
from workbench.kernels.permute import (
    pack,
    pack_torch,
    receive_order,
    receive_order_torch,
    send_order,
    send_order_torch,
    unpack,
    unpack_torch,
)
from workbench.kernels.route_table import route_table, route_table_torch

pytestmark = pytest.mark.values


def ids_of(P, T, K, E, kind):
    g = seeded(T)
    ids = torch.rand(P * T, E, generator=g).argsort(1)[:, :K].to(torch.int32).view(P, T, K)
    if kind == "hot":
        ids[:] = torch.arange(E - K, E, dtype=torch.int32)
    elif kind == "garbage":
        ids[0, ::3] = -5
        ids[P - 1, 1::4] = E
    return ids


@pytest.mark.parametrize(("P", "T", "K", "E"), [(1, 1, 1, 1), (2, 7, 3, 8), (4, 97, 6, 12)])
@pytest.mark.parametrize("kind", ["mixed", "hot", "garbage"])
@pytest.mark.parametrize("room", ["all", "some"])
def test_route_table(P, T, K, E, kind, room):
    group = Group(P, nbytes=9 << 12)
    ids = group.place(T, K, dtype=torch.int32)
    ids.all_P.copy_(ids_of(P, T, K, E, kind))
    e = E // P
    R = P * T * K if room == "all" else max(1, T * K // 2)
    for rank in range(P):
        results = []
        for how in ("kernel", "twin"):
            table = {
                "rank_R": torch.full((R,), -1, dtype=torch.int32),
                "slot_R": torch.full((R,), -1, dtype=torch.int32),
                "starts_e": torch.full((e + 1,), -1),
                "counts_PE": torch.full((P, E), -1),
            }
            if how == "kernel":
                run(route_table(TARGET, ids=ids, rank=rank, **table))
            else:
                route_table_torch(ids=ids, rank=rank, **table)
            results.append(table)
        wanted = [
            (p, t * K + k)
            for expert in range(rank * e, rank * e + e)
            for p in range(P)
            for t in range(T)
            for k in range(K)
            if ids.all_P[p, t, k] == expert
        ]
        rows = list(zip(results[0]["rank_R"].tolist(), results[0]["slot_R"].tolist(), strict=True))
        assert rows[: len(wanted)] == wanted[:R]
        assert rows[len(wanted) :] == [(-1, -1)] * max(0, R - len(wanted))
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("ok", [0, 1])
@pytest.mark.parametrize(("T", "K", "E"), [(1, 1, 2), (7, 3, 8), (97, 6, 12)])
def test_send_order(T, K, E, ok):
    ids = ids_of(1, T, K, E, "mixed")[0]
    orders = torch.full((2, T * K), -1)
    given = {"ids_TK": ids, "decision": decided(0, OK=ok), "num_experts": E}
    run(send_order(TARGET, order_N=orders[0], **given))
    send_order_torch(order_N=orders[1], **given)
    assert torch.equal(orders[0], orders[1])
    flat = ids.flatten().tolist()
    wanted = sorted(range(T * K), key=lambda i: flat[i]) if ok else [-1] * (T * K)
    assert orders[0].tolist() == wanted


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_receive_order(rows):
    g = seeded(rows)
    rank = torch.randint(0, 5, (310,), generator=g, dtype=torch.int32)
    positions = torch.full((2, 310), -1)
    given = {"rank_R": rank, "decision": decided(rows), "ranks": 5}
    run(receive_order(TARGET, position_R=positions[0], **given))
    receive_order_torch(position_R=positions[1], **given)
    assert torch.equal(positions[0], positions[1])
    order = sorted(range(rows), key=lambda r: int(rank[r]))
    assert [positions[0, r] for r in order] == list(range(rows))
    assert (positions[0, rows:] == -1).all()


@pytest.mark.parametrize("ok", [0, 1])
@pytest.mark.parametrize(
    ("D", "dtype"), [(33, torch.bfloat16), (72, torch.bfloat16), (1, torch.float32)]
)
def test_pack_and_unpack(D, dtype, ok):
    N, K = 97, 3
    order = torch.randperm(N, generator=seeded(D))
    decision = decided(0, OK=ok)
    outs = torch.full((4, N, D), float("nan"), dtype=dtype)
    rows = normal(N, D, dtype=dtype)
    run(pack(TARGET, rows_ND=rows, order_N=order, divisor=K, decision=decision, send_ND=outs[0]))
    pack_torch(rows_ND=rows, order_N=order, divisor=K, decision=decision, send_ND=outs[1])
    run(unpack(TARGET, received_ND=rows, order_N=order, decision=decision, out_ND=outs[2]))
    unpack_torch(received_ND=rows, order_N=order, decision=decision, out_ND=outs[3])
    if not ok:
        assert torch.isnan(outs).all()
        return
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], rows[order // K])
    assert torch.equal(outs[2], outs[3])
    assert torch.equal(outs[2][order], rows)
