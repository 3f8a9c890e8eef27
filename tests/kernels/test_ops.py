"""The registry of ops: what is registered is whole, and what is launched is registered."""

import inspect

import pytest
import torch
from workbench.kernels.catalogue import OPS
from workbench.kernels.ops import Sizes, examples
from workbench.kernels.peers import Kept, Peers
from workbench.kernels.words import operand_offset

from workbench.moe.config import MoEConfig
from workbench.moe.context import BACKWARD, FORWARD, dry_run

SIZES = Sizes(T=24, D=16, F=8, E=8, K=2, ep=4)


@pytest.mark.parametrize("name", OPS)
def test_entry_and_twin_take_the_same(name):
    entry = inspect.signature(OPS[name].entry).parameters
    twin = inspect.signature(OPS[name].twin).parameters
    assert next(iter(entry)) == "target"
    assert {n: p.annotation for n, p in entry.items() if n != "target"} == {
        n: p.annotation for n, p in twin.items()
    }


@pytest.mark.parametrize("name", OPS)
def test_what_it_moves_are_arguments_of_it(name):
    known = inspect.signature(OPS[name].twin).parameters
    for buffer, peer in (*OPS[name].pulls, *OPS[name].pushes):
        assert known[buffer].annotation is Peers
        assert peer in known


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
def test_pipelines_launch_registered_ops_with_all_they_take(pipeline):
    config = MoEConfig(T=8, D=16, F=8, E=4, K=2, ep=2, pipeline=pipeline)
    launched = [launch for kind in (FORWARD, BACKWARD) for launch in dry_run(config, kind)]
    assert len({op for _, op, _ in launched}) > 10
    for _, op, arguments in launched:
        given = {text.partition("=")[0] for text in arguments}
        inspect.signature(OPS[op].twin).bind(**dict.fromkeys(given))


def test_examples_launch_and_cost_what_they_must():
    """A second look at the floors: every example has a launch that does the work, and what is read
    and written at least once bounds its bytes from below."""
    found = {example.label: example for example in examples(SIZES)}
    assert {label.partition(",")[0] for label in found} == set(OPS)
    R, D, F, e = 48, 16, 8, 2
    flop = {
        "dispatch_w13": 2 * R * D * 2 * F,
        "w2_combine": 2 * R * F * D,
        "w2_dgrad": 2 * R * D * F,
        "w13_dgrad_combine": 2 * R * 2 * F * D,
        "w2_wgrad": 2 * R * D * F,
        "w13_wgrad": 2 * R * 2 * F * D,
        "w2_wgrad, FP32, accumulating": 2 * R * D * F,
    }
    assert {label: ex.cost.flop for label, ex in found.items() if ex.cost.flop} == flop
    links = {label: ex.cost.link_bytes for label, ex in found.items() if ex.cost.link_bytes}
    assert links == {
        "route_table": 4 * 4 * R,
        "dispatch_w13": 2 * R * D,
        "w2_combine": 2 * R * D,
        "w2_dgrad": 2 * R * D,
        "w13_dgrad_combine": 2 * R * D,
        "swiglu_backward": 4 * R,
        "swiglu_backward, clamped": 4 * R,
    }
    accumulating = found["w2_wgrad, FP32, accumulating"].cost.hbm_bytes
    assert accumulating == 2 * R * (D + F) + 8 * e * D * F


def test_a_kept_operand_lies_behind_those_before_it():
    arena_B = torch.arange(4096, dtype=torch.int32).to(torch.uint8)
    decision = torch.tensor([1, 5, 5, 256, 0])  # 5 rows from byte 256 on
    row_bytes_O = torch.tensor([3, 200, 4])
    kept = Kept(
        arena_B=arena_B,
        decision=decision,
        row_bytes_O=row_bytes_O,
        index=2,
        width=4,
        dtype=torch.uint8,
    )
    assert operand_offset(5, [3, 200]) == 128 + 1024
    at = 256 + 128 + 1024
    assert kept.rows().tolist() == arena_B[at : at + 20].view(5, 4).tolist()
