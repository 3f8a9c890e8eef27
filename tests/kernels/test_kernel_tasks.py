"""The grouped product's kernel given task lists by hand: other orders of its tasks."""

import random
from dataclasses import replace

import pytest
import torch
from group import TARGET, Group, decided, normal, routed
from workbench.kernels.device import run
from workbench.kernels.grouped_gemm import grouped_gemm
from workbench.kernels.tasks import Shape, Task, task_table

BF16 = torch.bfloat16


def gathered(rows, D=40, N=72):
    group = Group(2, nbytes=40 * 72 * 1024)
    x = group.place(160, D, dtype=BF16)
    x.all_P.copy_(normal(2, 160, D, dtype=BF16))
    total = sum(rows)
    a, out = (
        torch.full((total, D), float("nan"), dtype=BF16),
        torch.full((total, N), float("nan"), dtype=BF16),
    )
    weights = normal(len(rows), N, D, dtype=BF16, seed=1)
    route = routed(rows, 2, 160, seed=3)
    return (
        x,
        a,
        out,
        grouped_gemm(
            TARGET,
            weights=weights,
            weights_NK=True,
            decision=decided(total),
            again=False,
            rows=200,
            peers=x,
            gather=True,
            a=a,
            out=out,
            **route,
        ),
    )


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
            able = [
                t
                for t in left
                if t[Task.WAIT] < 0 or signalled.get(t[Task.WAIT], 0) >= t[Task.UNTIL]
            ]
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
    table = task_table(
        TARGET, starts_e=starts_e, decision=decided(sum(rows)), again=False, rows=200, shape=shape
    )
    launch = launches[1]
    launch = replace(
        launch,
        grid=workers,
        args={
            **launch.args,
            "tasks_at": table.tasks,
            "counts_at": table.counts,
            "counters_at": table.counters,
            "first_product": table.products_at,
        },
        constants={
            **launch.constants,
            "MERGED": False,
            "GATHERS": gather,
            "GATHERERS": int(gather),
            "EARLY": early,
        },
    )
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
