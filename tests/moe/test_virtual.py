"""The layer in one process: values against the oracle, memory, bits, launches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_cases import (
    LIMIT,
    as_float64,
    errors,
    experts,
    fill_with_nan,
    random_config,
    run,
    workload,
)

from workbench.case import PROFILES
from workbench.moe.arena import plan_ours
from workbench.moe.config import MoEConfig
from workbench.moe.context import BACKWARD, FORWARD, create_context, dry_run
from workbench.moe.groups.virtual import VirtualGroup
from workbench.moe.oracle import oracle, relative_error
from workbench.routing import route, rows_by_expert

SMALL = MoEConfig(T=23, D=40, F=24, E=8, K=3, ep=4, layers=4, scratch_factor=4)


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_values_of_random_cases(ep, dtype, pipeline):
    for seed in range(6):
        config, empty = random_config(seed, ep, dtype=dtype, pipeline=pipeline)
        work = workload(config, seed, empty_rank=empty)
        with create_context(config, VirtualGroup(ep)) as context:
            found = run(work, context)
        for name, error in errors(found, work.exact()).items():
            assert error < LIMIT[dtype], (seed, name, config)


@pytest.mark.parametrize("T", [1, 7, 97])
@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
def test_one_hot_expert_and_experts_without_rows(T, pipeline):
    config = MoEConfig(T=T, D=33, F=96, E=8, K=1, ep=4, scratch_factor=4, pipeline=pipeline)
    ids = np.full((4 * T, 1), 3)
    work = workload(config, 0, ids=ids)
    with create_context(config, VirtualGroup(4)) as context:
        found = run(work, context)
    for name, error in errors(found, work.exact()).items():
        assert error < LIMIT["bfloat16"], name
    others = [e for e in range(8) if e != 3]
    assert not found[3][others].any()
    assert not found[4][others].any()


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
@pytest.mark.parametrize("scores", [0.0, -1.0])
def test_score_gradient_where_scores_are_zero_or_negative(scores, pipeline):
    config = replace(SMALL, layers=1, pipeline=pipeline, dtype="float32")
    work = workload(config, 5)
    work.scores.fill_(scores)
    with create_context(config, VirtualGroup(4)) as context:
        found = run(work, context)
    exact = work.exact()
    assert np.linalg.norm(exact[2]) > 1
    for name, error in errors(found, exact).items():
        assert error < LIMIT["float32"], name


@pytest.mark.parametrize("factor", sorted({1.0, 4.0, 8.0, *PROFILES["A"], *PROFILES["B"]}))
def test_ep_64_with_the_routing_of_the_study(factor):
    config = MoEConfig(T=16, D=24, F=16, E=384, K=6, ep=64, slot_factor=2.5, scratch_factor=8)
    routes = route(T=16, K=6, E=384, ep=64, factor=factor, seed=2)
    work = workload(config, 2, ids=routes.ids)
    with create_context(config, VirtualGroup(64)) as context:
        found = run(work, context)
        counts = context.counts(0).sum(0).numpy()
        rows = [peak["rows"] for peak in context.peaks().values()]
    wanted = rows_by_expert(T=16, K=6, E=384, ep=64, factor=factor)
    assert (counts == wanted).all()
    assert rows == wanted.reshape(64, -1).sum(1).tolist()
    for name, error in errors(found, work.exact()).items():
        assert error < LIMIT["bfloat16"], name


def _stack(config, work, slot_factor, *, poison=True):
    """y and all gradients of four layers in a row, with the layers' peaks."""
    config = replace(config, slot_factor=slot_factor)
    leaves = [work.leaves() for _ in range(config.layers)]
    with create_context(config, VirtualGroup(config.ep)) as context:
        x = leaves[0][0]
        hidden = x
        for _, scores, w13, w2 in leaves:
            if poison:
                fill_with_nan(context)
            hidden = experts(hidden, work.ids, scores, w13, w2, context)
        hidden.backward(work.dy)
        peaks = context.peaks()
    grads = [leaf.grad for layer in leaves for leaf in layer[1:]]
    return [hidden.detach(), x.grad, *grads], peaks


def test_same_bits_with_and_without_recomputation():
    work = workload(SMALL, 11)
    whole, peaks = _stack(SMALL, work, 4.0)
    assert all(p["recomputed"] == 0 and p["saved"] == 4 for p in peaks.values())
    seen = set()
    for slot_factor in (0.0, 0.26, 0.5, 0.75, 1.0, 1.3):
        part, peaks = _stack(SMALL, work, slot_factor)
        assert all(torch.equal(a, b) for a, b in zip(whole, part, strict=True)), slot_factor
        assert all(p["saved"] + p["recomputed"] == 4 for p in peaks.values())
        seen |= {p["recomputed"] for p in peaks.values()}
        slot = plan_ours(replace(SMALL, slot_factor=slot_factor)).slot_bytes
        assert all(p["slot_bytes"] <= slot for p in peaks.values())
    assert seen == {0, 1, 2, 3, 4}


def test_only_a_layer_that_was_not_saved_is_produced_again():
    """Backward reads a saved layer from the slot: spoilt there, it is spoilt in the result."""
    config = replace(SMALL, layers=1)
    work = workload(config, 4)
    for slot_factor, spoilt in ((4.0, True), (0.0, False)):
        leaves = work.leaves()
        with create_context(replace(config, slot_factor=slot_factor), VirtualGroup(4)) as context:
            y = experts(leaves[0], work.ids, *leaves[1:], context)
            for rank in range(4):
                context.memory(rank).own("slot").fill_(0xFF)
                context.memory(rank).own("operands").fill_(0xFF)  # NaN in BF16
            y.backward(work.dy)
        assert bool(leaves[0].grad.isnan().any()) == spoilt


def test_same_bits_in_20_runs():
    work = workload(SMALL, 12)
    first, _ = _stack(SMALL, work, 0.6)
    for _ in range(19):
        again, _ = _stack(SMALL, work, 0.6)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
def test_measured_bytes_are_the_planned_ones(pipeline, mode):
    config = replace(SMALL, pipeline=pipeline, mode=mode)
    plan = plan_ours(config)
    assert sum(plan.part_bytes().values()) == plan.arena_bytes
    work = workload(config, 1)
    leaves = work.leaves()
    with create_context(config, VirtualGroup(4)) as context:
        assert context.measured_bytes() == plan.arena_bytes
        most = [0, 0, 0, 0]
        held = []
        for _ in range(2 if mode == "training" else 0):
            held.append(experts(leaves[0], work.ids, *leaves[1:], context))
            per_rank = context.counts(0).view(4, 4, 2).sum((0, 2)).tolist()
            saved = [plan.saved_bytes(rows) for rows in per_rank]
            # All layers' in one slot, or each in a part of its own.
            most = saved if pipeline == "alltoall" else np.add(most, saved).tolist()
            found = [peak["slot_bytes"] for peak in context.peaks().values()]
            assert found == most


def test_nothing_outside_the_plan_is_kept_for_backward():
    work = workload(SMALL, 1)
    kept = []
    with (
        create_context(SMALL, VirtualGroup(4)) as context,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        x, scores, w13, w2 = work.leaves()
        experts(x, work.ids, scores, w13, w2, context)
    addresses = {t.data_ptr(): t for t in kept}
    del addresses[w13.data_ptr()], addresses[w2.data_ptr()]
    assert [t.nbytes for t in addresses.values()] == [16]  # which entry, and which loan of it


def test_no_grad_and_inference_save_nothing_and_give_the_same_bits():
    work = workload(SMALL, 3)
    given = (work.x, work.ids, work.scores, work.w13, work.w2)
    leaves = work.leaves()
    with create_context(SMALL, VirtualGroup(4)) as context:
        trained = experts(leaves[0], work.ids, *leaves[1:], context)
        slot = {rank: peak["slot_bytes"] for rank, peak in context.peaks().items()}
        with torch.no_grad():
            for _ in range(9):
                fill_with_nan(context)
                free = experts(*given, context)
        assert not free.requires_grad
        assert {rank: p["slot_bytes"] for rank, p in context.peaks().items()} == slot
        trained.backward(work.dy)
    inference = replace(SMALL, mode="inference")
    assert plan_ours(inference).arena_bytes < plan_ours(SMALL).arena_bytes
    with create_context(inference, VirtualGroup(4)) as context:
        served = experts(*given, context)
    assert torch.equal(trained.detach(), free)
    assert torch.equal(free, served.detach())


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
def test_layers_are_given_back_by_backward_by_dropping_the_graph_and_in_any_order(pipeline):
    work = workload(replace(SMALL, slot_factor=1.0), 4)
    leaves = work.leaves()
    exact = work.exact()
    with create_context(replace(SMALL, pipeline=pipeline), VirtualGroup(4)) as context:

        def forward():
            return experts(leaves[0], work.ids, *leaves[1:], context)

        for _ in range(6):
            graphs = [forward() for _ in range(4)]
            for i in (1, 3, 0):
                leaves[0].grad = None
                graphs[i].backward(work.dy)
                assert relative_error(as_float64(leaves[0].grad), exact[1]) < 1e-2
            del graphs  # the third layer's graph goes without a backward
        with pytest.raises(ValueError, match=r"layers=4 must be at least the forwards that await"):
            assert len([forward() for _ in range(5)]) == 0


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
def test_backwards_in_the_order_of_their_forwards(pipeline):
    """As in a pipeline of stages: three in flight, each with inputs of its own, and others between
    that keep nothing but use the scratch frame."""
    works = [workload(replace(SMALL, dtype="float32", pipeline=pipeline), s) for s in range(8)]
    flying = []
    with create_context(works[0].config, VirtualGroup(4)) as context:
        for work in [*works, None, None, None]:
            if len(flying) == 3 or work is None:
                done, leaves, y = flying.pop(0)
                y.backward(done.dy)
                found = (y.detach(), *(leaf.grad for leaf in leaves))
                for name, error in errors(found, done.exact()).items():
                    assert error < 1e-5, name
            if work is not None:
                leaves = work.leaves()
                flying.append((work, leaves, experts(leaves[0], work.ids, *leaves[1:], context)))
                with torch.no_grad():
                    experts(work.dy, work.ids, work.scores, work.w13, work.w2, context)
        peaks = context.peaks().values()
    assert pipeline == "standard" or not any(peak["recomputed"] for peak in peaks)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inside", ["call", "context"])
def test_inference_mode_and_training_after_it(threads, inside):
    work = workload(SMALL, 5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(inside == "context"):
            context = create_context(SMALL, VirtualGroup(4))
        with context:
            with torch.inference_mode():
                given = (work.x.clone(), work.ids, work.scores, work.w13, work.w2)
                served = experts(*given, context)
            found = run(work, context)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(served, found[0])
    for name, error in errors(found, work.exact()).items():
        assert error < LIMIT["bfloat16"], name


def test_a_backward_of_an_inference_context_says_so():
    work = workload(SMALL, 4)
    leaves = work.leaves()
    with create_context(replace(SMALL, mode="inference"), VirtualGroup(4)) as context:
        y = experts(leaves[0], work.ids, *leaves[1:], context)
        with pytest.raises(RuntimeError, match="mode='inference' must be 'training'"):
            y.backward(work.dy)


def test_backward_runs_once():
    work = workload(SMALL, 4)
    leaves = work.leaves()
    with create_context(SMALL, VirtualGroup(4)) as context:
        y = experts(leaves[0], work.ids, *leaves[1:], context)
        y.backward(work.dy, retain_graph=True)
        with pytest.raises(RuntimeError, match="ran before"):
            y.backward(work.dy)


def test_frozen_weights_cost_no_gradient():
    work = workload(SMALL, 4)
    x, scores, w13, w2 = work.leaves()
    with create_context(SMALL, VirtualGroup(4)) as context:
        context.log = []
        y = experts(x, work.ids, scores, w13.detach(), w2.detach(), context)
        y.backward(work.dy)
        assert "w13_wgrad" not in {op for _, op, _ in context.log}
    assert relative_error(as_float64(x.grad), work.exact()[1]) < 1e-2


@pytest.mark.parametrize("pipeline", ["standard", "alltoall"])
def test_launches_do_not_depend_on_the_routing(pipeline):
    config = replace(SMALL, layers=1, pipeline=pipeline, slot_factor=0.9)
    wanted = [sorted(dry_run(config, kind)) for kind in (FORWARD, BACKWARD)]
    hot = np.tile(np.array([0, 1, 2]), (92, 1))
    spread = route(T=23, K=3, E=8, ep=4, factor=1.0).ids
    rows = set()
    for ids, saved in itertools.product((hot, spread), (0, 1)):
        work = workload(config, saved, ids=ids)
        leaves = work.leaves()
        with create_context(config, VirtualGroup(4)) as context:
            context.log = []
            y = experts(leaves[0], work.ids, *leaves[1:], context)
            forward, context.log = context.log, []
            y.backward(work.dy)
            assert [sorted(forward), sorted(context.log)] == wanted
            rows |= {(p["rows"], p["recomputed"]) for p in context.peaks().values()}
    assert len(rows) > 3


def test_order_of_launches_within_a_rank_is_that_of_the_dry_run():
    config = replace(SMALL, layers=1)
    work = workload(config, 0)
    with create_context(config, VirtualGroup(4)) as context:
        context.log = []
        run(work, context, poison=False)
        for rank in range(4):
            ops = [launch for launch in context.log if launch[0] == rank]
            dry = [*dry_run(config, FORWARD), *dry_run(config, BACKWARD)]
            assert ops == [launch for launch in dry if launch[0] == rank]


def test_bfloat16_scores_get_a_bfloat16_gradient():
    config = replace(SMALL, layers=1)
    work = workload(config, 0)
    work.scores = work.scores.bfloat16()
    with create_context(config, VirtualGroup(4)) as context:
        found = run(work, context)
    assert found[2].dtype == torch.bfloat16
    for name, error in errors(found, work.exact()).items():
        assert error < LIMIT["bfloat16"], name


def test_oracle_of_slices_is_the_oracle_of_the_whole():
    work = workload(SMALL, 8)
    given = [as_float64(t) for t in (work.scores[:5], work.w13, work.w2)]
    y, _ = oracle(as_float64(work.x[:5]), work.ids[:5].numpy(), *given)
    np.testing.assert_allclose(y, work.exact()[0][:5], rtol=1e-12, atol=1e-14)
