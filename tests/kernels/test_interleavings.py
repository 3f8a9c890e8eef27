"""Task tables run by the twin in any order that their waits allow: equal bits on poisoned buffers.

And a mutation test: with any one wait deleted, some order gives other bits.
"""

import os
from dataclasses import replace

import pytest
import torch
from group import decided, normal
from workbench.kernels.aot import TARGETS
from workbench.kernels.device import INTERPRETER, cdiv
from workbench.kernels.grouped_gemm import choose_grouped_gemm, grouped_gemm_tasks_torch
from workbench.kernels.tasks import GATHER, PRODUCT, Shape, Task, interleaving, task_table_torch

ROWS = [7, 0, 40, 33, 1]
D, N = 24, 48
SEEDS = int(os.environ.get("WORKBENCH_INTERLEAVINGS", "80"))
"""Interleavings of the tiles that are really chosen, on each target; 200 and more by hand."""
SHAPE = Shape(block=16, parts=3, columns=3, group=2, merged=False)


def table(shape=SHAPE, rows=ROWS):
    starts_e = torch.tensor([0, *rows]).cumsum(0)
    tasks, (gathers, products), _ = task_table_torch(
        starts_e=starts_e, decision=decided(sum(rows)), again=False, rows=512, shape=shape
    )
    at = shape.products_at(512, len(rows))
    return torch.cat([tasks[:gathers], tasks[at : at + products]])


def outcome(tasks, seed, programs=None, shape=SHAPE, rows=ROWS, N=N):
    """The bits that an order leaves in buffers of NaN."""
    total = sum(rows)
    a, out = torch.full((total, D), float("nan")), torch.full((total, N), float("nan"))
    grouped_gemm_tasks_torch(
        tasks=tasks,
        shape=shape,
        seed=seed,
        programs=programs,
        weights_EKN=normal(len(rows), D, N, dtype=torch.float32, seed=1),
        a_RK=a,
        source_RK=normal(total, D, dtype=torch.float32, seed=2),
        out_RN=out,
    )
    return torch.cat([a, out], 1).view(torch.int32)


def test_200_interleavings_give_equal_bits():
    tasks = table()
    first = outcome(tasks, 0)
    assert not torch.isnan(first.view(torch.float32)).any()
    orders = set()
    for seed in range(200):
        programs = None if seed % 2 else {GATHER: 1 + seed % 3, PRODUCT: 1 + seed % 5}
        shares = programs or {GATHER: len(tasks), PRODUCT: len(tasks)}
        order = [tuple(task) for task in interleaving(tasks, shares.get, seed)]
        assert sorted(order) == sorted(map(tuple, tasks.tolist()))
        orders.add(tuple(order))
        assert torch.equal(outcome(tasks, seed, programs), first)
    assert len(orders) > 150  # one program of each kind leaves few orders


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("target", [INTERPRETER, *TARGETS.values()], ids=["interpreter", *TARGETS])
def test_interleavings_of_the_real_choices_give_equal_bits(target, tma):
    rows, width = [300, 0, 129, 1], 600
    choice = choose_grouped_gemm(target, N=width, K=D, itemsize=2, gather=True, tma=tma)
    shape = Shape(
        block=choice.BM,
        parts=choice.parts,
        columns=cdiv(width, choice.BN),
        group=choice.group,
        merged=False,
    )
    tasks = table(shape, rows)
    first = outcome(tasks, 0, shape=shape, rows=rows, N=width)
    assert not torch.isnan(first.view(torch.float32)).any()
    for seed in range(1, SEEDS):
        assert torch.equal(outcome(tasks, seed, shape=shape, rows=rows, N=width), first)


def test_a_product_that_gathers_nothing_waits_for_nothing():
    for target in (INTERPRETER, *TARGETS.values()):
        choice = choose_grouped_gemm(target, N=N, K=D, itemsize=2, gather=False, tma=True)
        shape = replace(SHAPE, block=choice.BM, parts=choice.parts, group=choice.group)
        assert (table(shape)[:, Task.WAIT] == -1).all()


def test_deleting_any_one_wait_is_noticed():
    tasks = table()
    waiting = (tasks[:, Task.WAIT] >= 0).nonzero()[:, 0].tolist()
    right = outcome(tasks, 0)
    assert len(waiting) == (1 + 3 + 3 + 1) * 3
    for index in waiting:
        mutant = tasks.clone()
        mutant[index, Task.WAIT] = -1
        assert any(not torch.equal(outcome(mutant, seed), right) for seed in range(50)), index


def test_lowering_what_any_one_wait_waits_for_is_noticed():
    tasks = table()
    right = outcome(tasks, 0)
    waiting = (tasks[:, Task.WAIT] >= 0).nonzero()[:, 0].tolist()
    # A tile's last part may be empty; one that holds rows cannot be done without.
    full = [i for i in waiting if tasks[i, Task.ROWS] > 2 * 6]
    assert len(full) == 4 * 3  # of each expert of 40 and 33 rows two whole tiles, in three columns
    for index in full:
        mutant = tasks.clone()
        mutant[index, Task.UNTIL] -= 1
        assert any(not torch.equal(outcome(mutant, seed), right) for seed in range(200)), index


def test_a_deleted_signal_hangs_and_is_noticed():
    tasks = table()
    gather = int((tasks[:, Task.SIGNAL] >= 0).nonzero()[0, 0])
    tasks[gather, Task.SIGNAL] = -1
    with pytest.raises(RuntimeError, match="every program waits"):
        outcome(tasks, 0)
