"""The grouped product's kernel given task lists by hand: other orders, and far offsets."""

import mmap
import random
from dataclasses import replace

import pytest
import torch
from group import Group, decided, normal, routed
from workbench.kernels.device import INTERPRETER, run
from workbench.kernels.grouped_gemm import grouped_gemm
from workbench.kernels.memory import Peers
from workbench.kernels.tasks import Shape, Task, task_table
from workbench.kernels.words import Decide

BF16 = torch.bfloat16
FAR = 1 << 31
"""Elements."""
NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap has a name for from 3.14 on."""


def far(shape, dtype):
    """Zeroed memory that costs nothing until it is touched."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype).view(shape)


def gathered(rows, D=40, N=72):
    group = Group(2, nbytes=40 * 72 * 1024)
    x = group.place(160, D, dtype=BF16)
    x.all_P.copy_(normal(2, 160, D, dtype=BF16))
    total = sum(rows)
    a, out = torch.full((total, D), float("nan"), dtype=BF16), torch.full(
        (total, N), float("nan"), dtype=BF16)  # fmt: skip
    weights = normal(len(rows), N, D, dtype=BF16, seed=1)
    route = routed(rows, 2, 160, seed=3)
    return x, a, out, grouped_gemm(
        INTERPRETER, weights=weights, weights_NK=True, decision=decided(total), when=Decide.OK,
        rows=200, peers=x, gather=True, a=a, out=out, **route)  # fmt: skip


def test_merged_lists_in_other_legal_orders_give_equal_bits():
    _, a, out, launches = gathered([70, 0, 33])
    run(launches)
    right = out.clone()
    tasks = launches[1].args["tasks_at"]
    count = int(launches[1].args["counts_at"].sum())
    table = tasks[:count].clone()
    for seed in range(6):
        chance = random.Random(seed)
        left, order, signalled = table.tolist(), [], {}
        while left:
            able = [t for t in left if t[Task.WAIT] < 0
                    or signalled.get(t[Task.WAIT], 0) >= t[Task.UNTIL]]  # fmt: skip
            task = chance.choice(able)
            left.remove(task)
            order.append(task)
            if task[Task.SIGNAL] >= 0:
                signalled[task[Task.SIGNAL]] = signalled.get(task[Task.SIGNAL], 0) + 1
        assert order != table.tolist()
        tasks[:count] = torch.tensor(order, dtype=torch.int32)
        a.fill_(float("nan"))
        out.fill_(float("nan"))
        launches[1].args["counters_at"].zero_()
        run(launches[1:])
        assert torch.equal(out, right)


@pytest.mark.parametrize("early", [0, 40, 100])
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("gather", [True, False])
def test_lists_by_role_as_on_a_gpu_give_equal_bits(early, programs, gather):
    """One program gathers, so that a sequential run can end; the products go round."""
    rows = [70, 0, 133]
    _, a, out, launches = gathered(rows)
    run(launches)
    right, filled = out.clone(), a.clone()
    workers = programs + gather
    shape = Shape(block=64, parts=2 if gather else 0, columns=2, group=2, merged=False)
    starts_e = torch.tensor([0, *rows]).cumsum(0)
    table = task_table(INTERPRETER, starts_e=starts_e, decision=decided(sum(rows)),
                       when=Decide.OK, rows=200, shape=shape)  # fmt: skip
    launch = launches[1]
    launch = replace(
        launch, grid=workers,
        args={**launch.args, "tasks_at": table.tasks, "counts_at": table.counts,
              "counters_at": table.counters, "first_product": table.products_at},
        constants={**launch.constants, "MERGED": False, "GATHERS": gather,
                   "GATHERERS": int(gather), "EARLY": early},
    )  # fmt: skip
    out.fill_(float("nan"))
    a.copy_(torch.full_like(a, float("nan")) if gather else filled)
    run([table.launch, launch])
    assert torch.equal(out, right)


def test_a_consumer_before_its_producer_raises_instead_of_hanging():
    _, _, _, launches = gathered([70])
    run(launches[:1])
    tasks, count = launches[1].args["tasks_at"], int(launches[1].args["counts_at"].sum())
    tasks[:count] = tasks[:count].flip(0)
    with pytest.raises(Exception, match="a task waits for one that is not before it"):
        run(launches[1:])


@pytest.mark.parametrize("K", [64, 33], ids=["tma", "pointers"])
@pytest.mark.parametrize("weights_NK", [True, False])
def test_rows_and_experts_beyond_2_to_31_elements(K, weights_NK):
    N = K
    row, expert = FAR // K + 3, FAR // (N * K) + 2
    a, out = far((row + 64, K), BF16), far((row + 64, N), BF16)
    weights = far((expert + 1, N, K), BF16)
    a[row : row + 5] = normal(5, K, dtype=BF16)
    weights[expert] = normal(N, K, dtype=BF16, seed=1)
    nobody = Peers(all_P=a[None], bases_P=torch.zeros(1, dtype=torch.int64), offset=0)
    small = weights[:1]
    _, launch = grouped_gemm(
        INTERPRETER, weights=small, weights_NK=weights_NK, starts_e=torch.tensor([0, 5]),
        decision=decided(row + 64), when=Decide.OK, rows=64, peers=nobody, rank_R=None,
        row_R=torch.zeros(1, dtype=torch.int32), a=a, out=out)  # fmt: skip
    columns = -(-N // 64)
    for column in range(columns):
        launch.args["tasks_at"][column] = torch.tensor([1, expert, row, 5, column, -1, 0, -1])
    launch.args["counts_at"][:] = torch.tensor([0, columns])
    launch = replace(launch, args={**launch.args, "E": expert + 1})
    run([launch])
    w = weights[expert].double() if not weights_NK else weights[expert].double().T
    exact = a[row : row + 5].double() @ w
    error = torch.linalg.norm(out[row : row + 5].double() - exact) / torch.linalg.norm(exact)
    assert error < 4e-3
    assert not out[row + 5 : row + 64].any()


def test_gathered_rows_beyond_2_to_31_elements():
    D = 64
    row = FAR // D + 3
    a, out, row_R = (
        far((row + 64, D), BF16),
        far((row + 64, D), BF16),
        far((row + 64,), torch.int32),
    )
    source = normal(5, D, dtype=BF16)
    row_R[row : row + 5] = torch.arange(5, dtype=torch.int32).flip(0)
    peers = Peers(all_P=source[None], bases_P=torch.tensor([source.data_ptr()]), offset=0)
    _, launch = grouped_gemm(
        INTERPRETER, weights=torch.eye(D, dtype=BF16)[None], weights_NK=True,
        starts_e=torch.tensor([0, 5]), decision=decided(row + 64), when=Decide.OK, rows=64,
        peers=peers, rank_R=None, row_R=row_R, gather=True, a=a, out=out)  # fmt: skip
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
    peers_all = far((1, places, D), BF16)
    offset = 3 * (1 << 31)
    base = torch.tensor([peers_all.data_ptr() - offset])
    peers = Peers(all_P=peers_all, bases_P=base, offset=offset)
    place = torch.arange(places - rows, places, dtype=torch.int32)
    peers_all[0, -rows:] = normal(rows, D, dtype=BF16)
    a, out = torch.zeros(rows, D, dtype=BF16), torch.zeros(rows, D, dtype=BF16)
    weights = torch.eye(D, dtype=BF16)[None]
    given = {"weights": weights, "weights_NK": True, "starts_e": torch.tensor([0, rows]),
             "decision": decided(rows), "when": Decide.OK, "rows": 64, "peers": peers,
             "rank_R": None, "row_R": place}  # fmt: skip
    run(grouped_gemm(INTERPRETER, **given, gather=True, a=a, out=out))
    assert torch.equal(a, peers_all[0, -rows:])
    assert torch.equal(out, a)
    peers_all[0, -rows:] = 0
    run(grouped_gemm(INTERPRETER, **given, scatter=True, a=a))
    assert torch.equal(peers_all[0, -rows:], a)
