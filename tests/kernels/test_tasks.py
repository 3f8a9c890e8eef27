"""Task tables: the kernel's against the twin's, and what the twin's hold."""

import pytest
import torch
from group import TARGET
from workbench.kernels.device import run
from workbench.kernels.tasks import (
    GATHER,
    PRODUCT,
    Shape,
    Task,
    interleaving,
    task_table,
    task_table_torch,
)
from workbench.kernels.words import DECIDE_WORDS, Decide

pytestmark = pytest.mark.values

COUNTS = {"none": [0, 0, 0], "one row": [0, 1, 0], "mixed": [7, 0, 97, 1, 16], "hot": [0, 200]}


def starts(counts):
    return torch.tensor([0, *counts]).cumsum(0)


def deciding(rows, **given):
    decision = torch.zeros(DECIDE_WORDS, dtype=torch.int64)
    decision[Decide.OK], decision[Decide.ROWS] = 1, rows
    for name, value in given.items():
        decision[Decide[name]] = value
    return decision


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_kernel_equals_twin(counts, merged, parts):
    shape = Shape(block=16, parts=parts, columns=5, group=4, merged=merged)
    given = {
        "starts_e": starts(counts),
        "decision": deciding(sum(counts)),
        "again": False,
        "rows": 256,
        "shape": shape,
    }
    tasks, numbers, counters = task_table_torch(**given)
    table = task_table(TARGET, **given)
    table.tasks.zero_()
    table.counters.fill_(-1)
    run([table.launch])
    assert torch.equal(table.tasks, tasks)
    assert table.counts.tolist() == numbers.tolist()
    assert torch.equal(table.counters, counters)


def test_no_tasks_where_the_call_does_not_run():
    shape = Shape(block=16, parts=2, columns=5, group=4, merged=True)
    for decision in (deciding(9, OK=0), deciding(9, KEPT=9)):
        given = {
            "starts_e": starts([9]),
            "decision": decision,
            "again": True,
            "rows": 9,
            "shape": shape,
        }
        table = task_table(TARGET, **given)
        run([table.launch])
        assert table.counts.tolist() == [0, 0] == task_table_torch(**given)[1].tolist()


@pytest.mark.parametrize("merged", [False, True])
def test_tasks_cover_every_row_and_column_once(merged):
    counts = COUNTS["mixed"]
    shape = Shape(block=16, parts=3, columns=5, group=4, merged=merged)
    tasks, (gathers, products), _ = task_table_torch(
        starts_e=starts(counts), decision=deciding(sum(counts)), again=False, rows=256, shape=shape
    )
    at = gathers if merged else shape.products_at(256, len(counts))
    tasks = torch.cat([tasks[:gathers], tasks[at : at + products]])
    seen = torch.zeros(2, 5, sum(counts), dtype=torch.int64)
    expert_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    for task in interleaving(tasks, lambda kind: 10**6, 0):
        rows = slice(task[Task.ROW], task[Task.ROW] + task[Task.ROWS])
        seen[task[Task.KIND], task[Task.COLUMN], rows] += 1
        assert (expert_of[rows] == task[Task.EXPERT]).all()
    assert (seen[PRODUCT] == 1).all()
    assert (seen[GATHER, 0] == 1).all()
    assert not seen[GATHER, 1:].any()
    assert (gathers, products) == ((1 + 7 + 1 + 1) * 3, (1 + 7 + 1 + 1) * 5)


def test_merged_list_has_every_producer_before_its_consumers():
    counts = COUNTS["mixed"]
    shape = Shape(block=16, parts=3, columns=5, group=4, merged=True)
    tasks, numbers, _ = task_table_torch(
        starts_e=starts(counts), decision=deciding(sum(counts)), again=False, rows=256, shape=shape
    )
    signalled: dict[int, int] = {}
    for task in tasks[: int(numbers.sum())].tolist():
        assert task[Task.WAIT] < 0 or signalled[task[Task.WAIT]] == task[Task.UNTIL]
        if task[Task.SIGNAL] >= 0:
            signalled[task[Task.SIGNAL]] = signalled.get(task[Task.SIGNAL], 0) + 1


def test_tasks_that_can_never_end_are_noticed():
    wait = torch.tensor([[PRODUCT, 0, 0, 1, 0, 0, 1, -1]])
    with pytest.raises(RuntimeError, match="every program waits"):
        list(interleaving(wait, lambda kind: 1, 0))
