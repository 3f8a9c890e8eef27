"""MoELayer: router and shared expert beside the routed experts."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from workbench.moe.config import MoEConfig
from workbench.moe.failures import MoEInputError
from workbench.moe.layer import MoELayer, VirtualGroup, create_context

CONFIG = MoEConfig(T=21, D=32, F=16, E=8, K=3, ep=2, dtype="float32", scratch_factor=2)


def _dense(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """The same layer, every expert on every token, in float64."""
    weight = {name: p.detach().double() for name, p in layer.named_parameters()}
    leaves = {name: w.requires_grad_() for name, w in weight.items()}
    scores = functional.linear(x, leaves["router_ED"]).softmax(1)
    kept, ids = scores.topk(3, dim=1)
    kept = kept / kept.sum(1, keepdim=True)
    gates = torch.zeros_like(scores).scatter(1, ids, kept)

    def swiglu(w13, w2):
        gate, up = (x @ w13.T).chunk(2, dim=1)
        return (functional.silu(gate) * up) @ w2.T

    y = swiglu(leaves["shared.w13_2FD"], leaves["shared.w2_DF"])
    for e in range(CONFIG.E):
        y = y + gates[:, e, None] * swiglu(leaves["w13_E2FD"][e], leaves["w2_EDF"][e])
    return y, leaves


def test_layer_and_all_its_gradients_equal_the_dense_computation():
    x = torch.randn(42, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    dy = torch.randn(42, 32, generator=torch.Generator().manual_seed(1))
    with create_context(CONFIG, VirtualGroup(2)) as context:
        layer = MoELayer(context, seed=3)
        y = layer(x.view(2, 21, 32))
        assert y.shape == (2, 21, 32)
        y.backward(dy.view_as(y))
    exact_x = x.detach().double().requires_grad_()
    exact, leaves = _dense(layer, exact_x)
    exact.backward(dy.double())
    torch.testing.assert_close(
        y.detach().view(42, 32).double(), exact.detach(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in layer.named_parameters():
        assert leaves[name].grad.norm() > 1e-3, name
        torch.testing.assert_close(
            parameter.grad.double(), leaves[name].grad, rtol=1e-3, atol=1e-5, msg=name
        )


def test_parameters_do_not_depend_on_the_ranks():
    one = MoEConfig(T=42, D=32, F=16, E=8, K=3, dtype="float32")
    with (
        create_context(one, VirtualGroup(1)) as whole,
        create_context(CONFIG, VirtualGroup(2)) as split,
    ):
        a, b = MoELayer(whole, seed=5), MoELayer(split, seed=5)
        for (name, mine), (_, other) in zip(
            a.named_parameters(), b.named_parameters(), strict=True
        ):
            assert torch.equal(mine, other), name
        x = torch.randn(42, 32, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(a(x), b(x), rtol=1e-5, atol=1e-6)
        assert not torch.equal(a.w2_EDF, MoELayer(whole, seed=6).w2_EDF)
        assert not torch.equal(a.w2_EDF[0], a.w2_EDF[1])


def test_layers_without_shared_expert_take_given_routes():
    with create_context(CONFIG, VirtualGroup(2)) as context, torch.no_grad():
        layer = MoELayer(context, shared_experts=0)
        x = torch.randn(42, 32)
        ids = torch.arange(42 * 3).view(42, 3) % 8
        zero = layer(x, ids, torch.zeros(42, 3))
        assert not zero.any()
        assert layer(x, ids, torch.ones(42, 3)).any()
        for given, missing in (((ids,), "topk_scores_TK"), ((None, x[:, :3]), "topk_ids_TK")):
            with pytest.raises(MoEInputError, match=f"rank 0: {missing}=NoneType must be a tensor"):
                layer(x, *given)
    with pytest.raises(ValueError, match="shared_experts=-1 must not be negative"):
        MoELayer(context, shared_experts=-1)


def test_training_lowers_a_loss():
    torch.manual_seed(0)
    with create_context(CONFIG, VirtualGroup(2)) as context:
        layer = MoELayer(context, seed=1)
        optimiser = torch.optim.Adam(layer.parameters(), lr=3e-3)
        x, target = torch.randn(42, 32), torch.randn(42, 32)
        losses = []
        for _ in range(30):
            optimiser.zero_grad()
            loss = functional.mse_loss(layer(x), target)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("shape", [(42, 31), (41, 32), (2, 21, 16), (0, 32)])
def test_tokens_of_another_shape_are_refused_by_the_group(shape):
    """Not by the router on one rank, which would leave the others waiting."""
    with create_context(CONFIG, VirtualGroup(2)) as context, torch.no_grad():
        layer = MoELayer(context)
        rows = torch.Size(shape).numel() // shape[-1]
        with pytest.raises(MoEInputError) as caught:
            layer(torch.zeros(shape))
        assert str(caught.value) == f"rank 0: x_TD shape=[{rows}, {shape[-1]}] must be [42, 32]"
        assert torch.isfinite(layer(torch.randn(42, 32))).all()


def test_a_deep_copy_has_its_own_parameters_and_the_same_context():
    x = torch.randn(42, 32, generator=torch.Generator().manual_seed(2))
    with create_context(CONFIG, VirtualGroup(2)) as context, torch.no_grad():
        layer = MoELayer(context, seed=4)
        twin = copy.deepcopy(layer)
        assert twin.context is context
        assert torch.equal(twin(x), layer(x))
        twin.w2_EDF.zero_()
        assert not torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("how", ["autocast", "default dtype", "module"])
def test_precision_is_the_layer_s_own(how):
    """Autocast, torch's default dtype and `Module.bfloat16` change no sum from FP32 to BF16."""
    config = replace(CONFIG, dtype="bfloat16")
    with create_context(config, VirtualGroup(2)) as context, torch.no_grad():
        layer = MoELayer(context, shared_experts=0, seed=2)
        layer.router_ED.copy_(layer.router_ED.bfloat16())
        x = torch.randn(42, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
        ids, scores = layer.route(x)
        y = layer(x)
        if how == "module":
            layer.bfloat16()
        try:
            if how == "default dtype":
                torch.set_default_dtype(torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                again, found = layer.route(x), layer(x)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(again[0], ids)
    assert torch.equal(again[1], scores)
    assert torch.equal(found, y)
