"""The layer on one GPU: run with `pytest -m gpu`. Nothing here is run where there is none."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "moe"))

from layer_cases import LIMIT, errors, experts, fill_with_nan, random_config, run, workload

from workbench.bench.kernel_bench import bench_kernels
from workbench.moe.config import MoEConfig
from workbench.moe.context import create_context
from workbench.moe.groups.virtual import VirtualGroup

pytestmark = pytest.mark.gpu


def on_host(tensors):
    return tuple(tensor.cpu() for tensor in tensors)


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_values_of_random_cases(ep, dtype, pipeline):
    for seed in range(20):
        config, empty = random_config(seed, ep, dtype, pipeline=pipeline, executor="triton")
        work = workload(config, seed, empty_rank=empty)
        with create_context(config, VirtualGroup(ep, "cuda:0")) as context:
            found = on_host(run(work.to("cuda:0"), context))
        for name, error in errors(found, work.exact()).items():
            assert error < LIMIT[dtype], (seed, name, config)


LARGE = MoEConfig(T=512, D=1024, F=512, E=32, K=6, ep=2, scratch_factor=2, executor="triton")


def test_same_bits_in_20_runs_at_sizes_that_fill_tiles():
    work = workload(LARGE, 3)
    there = work.to("cuda:0")
    with create_context(LARGE, VirtualGroup(2, "cuda:0")) as context:
        first = run(there, context)
        for _ in range(19):
            assert all(torch.equal(a, b) for a, b in zip(first, run(there, context), strict=True))
    for name, error in errors(on_host(first), work.exact()).items():
        assert error < LIMIT["bfloat16"], name


def test_a_training_step_is_captured_in_a_graph():
    """Each replay has other inputs and a poisoned arena: nothing of the one before can help."""
    config = replace(LARGE, validate="never")
    works = [workload(config, seed) for seed in (4, 5, 6)]
    static = works[0].to("cuda:0")
    with create_context(config, VirtualGroup(2, "cuda:0")) as context:
        leaves = static.leaves()

        def step():
            y = experts(leaves[0], static.ids, *leaves[1:], context)
            return (y.detach(), *torch.autograd.grad(y, leaves, static.dy))

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # compiles
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for work in works:
            given = work.to("cuda:0")
            with torch.no_grad():
                for mine, new in zip(
                    (*leaves, static.ids, static.dy),
                    (*given.leaves(), given.ids, given.dy),
                    strict=True,
                ):
                    mine.copy_(new)
            fill_with_nan(context)
            graph.replay()
            for name, error in errors(on_host(found), work.exact()).items():
                assert error < LIMIT["bfloat16"], name
            context.check()


def test_goals_of_the_kernels():
    figures = bench_kernels()
    assert float(figures["grouped_gemm_over_torch"]) >= 0.8
    assert float(figures["dispatch_over_gemm"]) >= 0.9
