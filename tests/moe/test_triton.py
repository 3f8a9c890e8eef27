"""Executor `triton`: both pipelines, against executor `torch` and the oracle.

In the interpreter, or with `pytest -m gpu` on the GPU; executor `torch` runs on the CPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_cases import LIMIT, as_float64, errors, experts, random_config, run, workload
from workbench.kernels.device import INTERPRET

from workbench.errors import InputError
from workbench.moe.config import MoEConfig
from workbench.moe.context import create_context
from workbench.moe.groups.virtual import VirtualGroup
from workbench.moe.oracle import relative_error

DEVICE = {"triton": "cpu" if INTERPRET.value else "cuda:0", "torch": "cpu"}
values = pytest.mark.values
CASES = [(seed, ep) for ep in (1, 2, 4) for seed in range(7)][:20]


def both(config, work):
    """What executors triton and torch find, through poisoned arenas."""
    found = []
    for executor, device in DEVICE.items():
        group = VirtualGroup(config.ep, device)
        with create_context(replace(config, executor=executor), group) as context:
            found.append(tuple(t.cpu() for t in run(work.to(device), context)))
    return found


@values
@pytest.mark.parametrize(("seed", "ep"), CASES)
def test_random_cases(seed, ep):
    dtype = "bfloat16" if seed % 3 else "float32"
    pipeline = "standard" if seed % 4 else "alltoall"
    config, empty = random_config(seed, ep, dtype=dtype, pipeline=pipeline)
    config = replace(config, T=min(config.T, 49), D=min(config.D, 97), F=min(config.F, 72))
    work = workload(config, seed, empty_rank=empty)
    triton, torch_ = both(config, work)
    for name, error in errors(triton, work.exact()).items():
        assert error < LIMIT[dtype], (name, config)
    for name, a, b in zip(["y", "x", "scores", "w13", "w2"], triton, torch_, strict=True):
        error = relative_error(as_float64(a), as_float64(b))
        assert error < LIMIT[dtype], (name, config)


SMALL = MoEConfig(T=23, D=40, F=24, E=8, K=3, ep=2, layers=2, scratch_factor=2)


@values
def test_same_bits_saved_and_recomputed_and_run_after_run():
    work = workload(SMALL, 4).to(DEVICE["triton"])
    found = []
    for slot_factor in (2.0, 0.0, 2.0):
        config = replace(SMALL, executor="triton", slot_factor=slot_factor)
        with create_context(config, VirtualGroup(2, DEVICE["triton"])) as context:
            found.append(run(work, context))
            peaks = context.peaks()
        assert all(p["recomputed"] == (slot_factor == 0) for p in peaks.values())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@values
@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
@pytest.mark.parametrize("dy", ["transposed", "of a sum"])
def test_output_gradients_of_any_strides(dy, pipeline):
    config = replace(SMALL, dtype="float32", pipeline=pipeline)
    work = workload(config, 6)
    work.dy = work.dy.t().contiguous().t() if dy == "transposed" else torch.ones(1).expand(46, 40)
    for found in both(config, work):
        for name, error in errors(found, work.exact()).items():
            assert error < LIMIT["float32"], name


@values
@pytest.mark.parametrize("fault", ["id", "score", "rows", "shape"])
def test_errors_are_those_of_executor_torch(fault):
    config = replace(SMALL, scratch_factor=1.2 if fault == "rows" else 2.0)
    work = workload(config, 4)
    if fault == "id":
        work.ids[30, 1] = 8
    elif fault == "score":
        work.scores[5, 2] = float("nan")
    elif fault == "rows":
        work.ids[:] = torch.tensor([0, 1, 2])
    elif fault == "shape":
        work.x = work.x[:, :-1]
    messages = []
    fine = workload(config, 5, ids=np.arange(46)[:, None] * 3 % 8 + np.array([0, 1, 2]))
    fine.ids %= 8
    for executor, device in DEVICE.items():
        group = VirtualGroup(2, device)
        with create_context(replace(config, executor=executor), group) as context:
            mine = work.to(device)
            with pytest.raises((ValueError, RuntimeError)) as caught:
                experts(mine.x, mine.ids, mine.scores, mine.w13, mine.w2, context)
            messages.append((type(caught.value), str(caught.value)))
            # The context is still good.
            assert torch.isfinite(run(fine.to(device), context)[0]).all()
    assert messages[0] == messages[1]


def test_without_gpu_or_interpreter_the_context_says_what_to_do(monkeypatch):
    from workbench.kernels import device

    monkeypatch.setattr(device, "INTERPRET", device.tl.constexpr(False))
    with pytest.raises(InputError, match="TRITON_INTERPRET=1 before Python starts"):
        create_context(replace(SMALL, executor="triton"), VirtualGroup(2))
