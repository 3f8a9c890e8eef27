"""Configs, groups and contexts that are refused; the plan's text; memory that is lent."""

import itertools
from dataclasses import replace

import pytest
import torch
from workbench.kernels.words import DECIDE_WORDS, Code, Decide

from workbench.case import Case
from workbench.errors import InputError
from workbench.moe.arena import plan_ours
from workbench.moe.config import MoEConfig
from workbench.moe.context import create_context
from workbench.moe.failures import ClosedError, failure
from workbench.moe.groups.nvlink import NvlinkGroup
from workbench.moe.groups.shared import SharedGroup
from workbench.moe.groups.virtual import VirtualGroup
from workbench.moe.pages import Lender

GOOD = {"T": 8, "D": 16, "F": 8, "E": 8, "K": 2, "ep": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"E": 9}, "E=9 must be divisible by ep=2"),
        ({"K": 9}, "K=9 must be at most E=8"),
        ({"T": 0}, "T=0 must be at least 1"),
        ({"D": 1.5}, "D=1.5 must be an integer of at least 1"),
        ({"mode": "serve"}, "mode='serve' must be one of inference, training"),
        ({"pipeline": "ring"}, "pipeline='ring' must be one of standard, alltoall"),
        ({"dtype": "float16"}, "dtype='float16' must be one of bfloat16, float32"),
        ({"validate": "no"}, "validate='no' must be one of always, first, never"),
        ({"executor": "cuda"}, "executor='cuda' must be one of torch"),
        ({"slot_factor": -1.0}, "slot_factor=-1.0 must not be negative, and below 1e6"),
        ({"scratch_factor": 0.0}, "scratch_factor=0.0 must be positive and below 1e6"),
        ({"T": 2**30}, r"ep\*T\*K=4294967296 must fit 31 bits"),
    ],
)
def test_bad_configs(change, message):
    with pytest.raises(InputError, match=message):
        MoEConfig(**{**GOOD, **change})


def test_config_of_a_case():
    case = Case(
        backend="baseline",
        mode="training",
        ep=2,
        precision="bf16",
        pipeline="alltoall",
        T=8,
        D=16,
        F=8,
        E=8,
        K=2,
        slotFactor=2.5,
    )
    found = MoEConfig.from_case(case, validate="never")
    assert found == MoEConfig(**GOOD, pipeline="alltoall", slot_factor=2.5, validate="never")
    quantised = Case(backend="dist_moe", mode="training", ep=8, precision="mxfp8", pipeline="mega")
    with pytest.raises(InputError, match="precision=mxfp8 must be bf16"):
        MoEConfig.from_case(quantised)


def test_groups_that_cannot_be():
    with pytest.raises(InputError, match="size=0 must be at least 1"):
        VirtualGroup(0)
    with pytest.raises(InputError, match="group='shared' needs torch"):
        SharedGroup()
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="group='nvlink' needs a CUDA device"):
            NvlinkGroup()


def test_context_that_does_not_fit_its_group():
    with pytest.raises(InputError, match="ep=2 must be the size of the group, 4"):
        create_context(MoEConfig(**GOOD), VirtualGroup(4))
    blind = VirtualGroup(2)
    blind.sees_peers = False  # as a group over collectives alone
    with pytest.raises(InputError, match="pipeline='standard' must have a group that sees"):
        create_context(MoEConfig(**GOOD), blind)


def test_a_closed_context_says_so():
    context = create_context(MoEConfig(**GOOD), VirtualGroup(2))
    context.close()
    context.close()
    with pytest.raises(ClosedError, match="context is closed: it was closed"):
        context.check()


def test_plan_explains_itself():
    config = MoEConfig(**GOOD, layers=3, slot_factor=0.5, scratch_factor=2)
    plan = plan_ours(config)
    text = plan.explain()
    for region in plan.regions.values():
        assert f"{region.offset:,}" in text
        assert region.name in text
    assert f"arena {plan.arena_bytes:,} B per rank; rows available 32" in text
    assert "holds 1.50 of 3 layers" in text


def test_plan_by_hand():
    """The figures of a shape that needs no padding, from the definitions."""
    T, D, F, E, K, ep, layers = 64, 128, 64, 8, 2, 2, 3
    config = MoEConfig(
        T=T, D=D, F=F, E=E, K=K, ep=ep, layers=layers, slot_factor=1, scratch_factor=2
    )
    plan, N, R = plan_ours(config), T * K, 2 * T * K
    parts = plan.part_bytes()
    assert plan.rows_available == R
    assert parts["slot"] == layers * N * (2 * D + 4 * F)
    assert parts["scratch"] == R * (2 * D + 4 * F + 2 * F + 2 * F + 2 * D)
    assert parts["call"] == N * 4 + N * 2 * D + T * 2 * D + N * 4
    # x but for the entry without gradient, scores, two words per route, counts, starts
    per_entry = N * 4 + 2 * R * 4 + ep * E * 8 + 5 * 8
    assert parts["layers"] == layers * T * 2 * D + (layers + 1) * per_entry
    assert plan_ours(config).saved_bytes(R) == R * (2 * D + 4 * F)
    served = plan_ours(replace(config, mode="inference")).part_bytes()
    assert served["slot"] == 0
    assert served["scratch"] == R * (2 * D + 4 * F + 2 * F)


def test_regions_do_not_overlap():
    for pipeline in ("standard", "alltoall"):
        for mode in ("training", "inference"):
            plan = plan_ours(MoEConfig(**GOOD, layers=2, pipeline=pipeline, mode=mode))
            regions = sorted(
                (r for r in plan.regions.values() if r.alias is None), key=lambda r: r.offset
            )
            for before, after in itertools.pairwise(regions):
                assert before.offset + before.nbytes <= after.offset, (before, after)
                assert after.offset % 128 == 0
            assert regions[-1].offset + regions[-1].nbytes <= plan.arena_bytes


def test_rows_available_never_exceed_what_can_come():
    config = MoEConfig(T=8, D=16, F=8, E=8, K=4, ep=8, scratch_factor=100)
    assert plan_ours(config).rows_available == 8 * 8  # one local expert: a token comes once


def test_lent_memory_comes_back_when_the_last_view_is_gone():
    lender = Lender()
    model = torch.empty(3, 5, dtype=torch.bfloat16)
    first = lender.empty_like(model)
    assert first.shape == model.shape
    assert first.dtype == model.dtype
    address, view = first.data_ptr(), first[1:].detach()
    del first
    second = lender.empty_like(model)
    assert second.data_ptr() != address  # the view still holds it
    view.fill_(7)
    second.fill_(8)
    assert view.eq(7).all()
    del view
    assert lender.empty_like(model).data_ptr() == address


@pytest.mark.parametrize(
    ("rows", "factor"),
    [(3_000_001, "1.01"), (3_000_000, "1"), (30_000_000, "10"), (3_100_000, "1.04")],
)
def test_the_factor_that_would_fit_does(rows, factor):
    config = MoEConfig(T=500_000, D=8, F=8, E=8, K=6, scratch_factor=1)
    words = [0] * DECIDE_WORDS
    words[Decide.CODE], words[Decide.A], words[Decide.B] = Code.OVERFLOW, rows, 3_000_000
    assert str(failure(words, "", config)).endswith(f"; scratch_factor={factor} would fit")
