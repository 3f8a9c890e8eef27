"""The layer as layers are used: compiled, saved, checkpointed, under autocast, differentiated."""

import io
import itertools
import pickle
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.errors import InputError
from workbench.moe.config import MoEConfig
from workbench.moe.context import Context
from workbench.moe.failures import MoEInputError
from workbench.moe.layer import MoELayer, VirtualGroup, create_context

CONFIG = MoEConfig(T=21, D=32, F=16, E=8, K=3, ep=2, dtype="float32", scratch_factor=2)


@pytest.fixture
def context() -> Iterator[Context]:
    with create_context(CONFIG, VirtualGroup(2)) as made:
        yield made


class Model(nn.Module):
    def __init__(self, *contexts: Context) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.layers = nn.ModuleList(MoELayer(c, seed=i) for i, c in enumerate(contexts))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


def tokens(seed: int = 2) -> Tensor:
    return torch.randn(42, 32, generator=torch.Generator().manual_seed(seed))


def trained(
    run: Any, module: nn.Module, x: Tensor, autocast: torch.dtype | None = None, without: str = ""
) -> list[Tensor]:
    """Output and gradients of x and of every parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = run(x)
    y.backward(tokens(9).to(y.dtype).view_as(y))
    named = module.named_parameters()
    return [y.detach(), x.grad, *(p.grad.clone() for name, p in named if name != without)]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("which", ["layer", "model"])
def test_compiled_is_eager_to_the_bit(context, backend, which):
    torch.compiler.reset()
    module = MoELayer(context) if which == "layer" else Model(context)
    wanted = trained(module, module, tokens())
    compiled = torch.compile(module, backend=backend)
    for _ in range(2):
        assert equal(trained(compiled, module, tokens()), wanted)
    with torch.no_grad():
        assert torch.equal(compiled(tokens()), wanted[0])
    assert equal(trained(module, module, tokens()), wanted)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++, which is not here")
def test_the_routed_part_is_eager_to_the_bit_under_inductor(context):
    torch.compiler.reset()
    module = MoELayer(context, shared_experts=0)
    ids, scores = (t.detach() for t in module.route(tokens()))

    def call(x: Tensor) -> Tensor:
        return module(x, ids, scores)

    wanted = trained(call, module, tokens(), without="router_ED")
    compiled = torch.compile(call, backend="inductor")
    assert equal(trained(compiled, module, tokens(), without="router_ED"), wanted)


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "compiled autograd"])
def test_a_compiled_step_runs_its_backward_outside_the_compiler(context, ahead):
    torch.compiler.reset()
    module = Model(context)

    def forward_and_backward(x: Tensor) -> Tensor:
        y = module(x)
        (y * tokens(9)).sum().backward()
        context.check()
        return y

    def gradients(step: Any) -> list[Tensor]:
        module.zero_grad()
        x = tokens().requires_grad_()
        y = step(x)
        return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]

    wanted = gradients(forward_and_backward)
    compiled = torch.compile(forward_and_backward, backend="eager")
    with torch._dynamo.config.patch(compiled_autograd=ahead):
        assert equal(gradients(compiled), wanted)
    assert equal(gradients(forward_and_backward), wanted)


def test_what_cannot_hold_a_graph_break_says_why_and_loses_nothing(context):
    torch.compiler.reset()
    layer = MoELayer(context)
    wanted = layer(tokens()).detach()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="meets its peers"):
        torch.compile(layer, backend="eager", fullgraph=True)(tokens())
    for strict in (True, False):
        with pytest.raises((torch._dynamo.exc.Unsupported, InputError), match="cannot hold it"):
            torch.export.export(layer, (tokens(),), strict=strict)
    assert torch.equal(layer(tokens()).detach(), wanted)


@pytest.mark.parametrize("save", [pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
@pytest.mark.parametrize("make", [MoELayer, Model, lambda context: context])
def test_a_whole_layer_is_not_pickled(context, save, make):
    with pytest.raises(InputError) as caught:
        save(make(context))
    text = str(caught.value)
    assert text.startswith("a context and a layer on it must not be pickled")
    assert "state_dict" in text
    assert "\n" not in text


@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_a_state_dict_comes_back_in_another_context(tmp_path, how):
    config = replace(CONFIG, dtype="bfloat16")
    with create_context(config, VirtualGroup(2)) as one, torch.no_grad():
        saved = MoELayer(one, seed=7)
        wanted = saved(tokens().bfloat16())
        if how == "torch":
            torch.save(saved.state_dict(), tmp_path / "layer")
        else:
            save_file(saved.state_dict(), tmp_path / "layer")
        before = {name: p.clone() for name, p in saved.named_parameters()}
    assert (tmp_path / "layer").stat().st_size < 2 * sum(p.nbytes for p in before.values()) + 8192
    with create_context(replace(config, ep=4, T=11), VirtualGroup(4)) as other, torch.no_grad():
        read = torch.load(tmp_path / "layer") if how == "torch" else load_file(tmp_path / "layer")
        layer = MoELayer(other, seed=8)
        assert not torch.equal(layer.w2_EDF, before["w2_EDF"])
        layer.load_state_dict(read)
        assert sorted(read) == sorted(before)
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, before[name]), name
        x = torch.cat([tokens(), torch.zeros(2, 32)]).bfloat16()
        # Products of other sizes may sum in another order.
        torch.testing.assert_close(layer(x)[:42], wanted, rtol=2e-2, atol=2e-2)


STRIDES = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "batch second": lambda x: x.view(2, 21, 32).transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand(42, 32),
}


@pytest.mark.parametrize("name", STRIDES)
def test_tokens_of_any_strides(context, name):
    layer = MoELayer(context)
    x = STRIDES[name](tokens())
    assert not x.is_contiguous()
    wanted = trained(layer, layer, x.contiguous())
    layer.zero_grad()
    leaf = x.contiguous().requires_grad_()
    # Not a clone, which would be contiguous where strides overlap.
    given = leaf if name == "expanded" else STRIDES[name](leaf)
    y = layer(given) if name != "batch second" else layer(given.view_as(x))
    y.backward(tokens(9).view_as(y))
    assert torch.equal(y.detach().view(42, 32), wanted[0].view(42, 32))
    if name != "expanded":  # whose rows' gradients are summed
        assert torch.equal(leaf.grad, wanted[1].view_as(leaf.grad))
    ids, scores = layer.route(tokens())
    wide = torch.cat([ids, ids], 1)[:, :3], scores.t().contiguous().t()
    with torch.no_grad():
        assert torch.equal(layer(tokens(), *wide), layer(tokens()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("under", [torch.bfloat16, torch.float16])
def test_under_autocast_tokens_are_cast_to_the_layer_s_dtype(dtype, given, under):
    own = getattr(torch, dtype)
    with create_context(replace(CONFIG, dtype=dtype), VirtualGroup(2)) as context:
        layer = MoELayer(context)
        x = tokens().to(given)
        wanted = trained(layer, layer, x.to(own))
        found = trained(layer, layer, x, under)
        assert found[0].dtype == own
        assert found[1].dtype == given
        assert torch.equal(found[1], wanted[1].to(given))
        del found[1], wanted[1]
        assert equal(found, wanted)
        ids, scores = layer.route(x.to(own))
        with torch.no_grad(), torch.autocast("cpu", under):
            half = layer(x, ids, scores.half())
        torch.testing.assert_close(half, wanted[0], rtol=2e-2, atol=2e-2)
        if given != own:
            name = str(given).removeprefix("torch.")
            with pytest.raises(MoEInputError) as caught:
                layer(x)
            assert str(caught.value) == f"rank 0: x_TD dtype={name} must be {dtype}"


def test_half_precision_is_refused_in_a_line(context):
    with pytest.raises(InputError, match=r"^dtype='float16' must be one of bfloat16, float32$"):
        replace(CONFIG, dtype="float16")
    layer = MoELayer(context)
    with pytest.raises(MoEInputError, match=r"^rank 0: x_TD dtype=float16 must be float32$"):
        layer(tokens().half())
    ids, scores = layer.route(tokens())
    wanted = r"^rank 0: topk_scores_TK dtype=float16 must be float32, bfloat16$"
    with pytest.raises(MoEInputError, match=wanted):
        layer(tokens(), ids, scores.half())
    layer.half()
    for autocast in (nullcontext(), torch.autocast("cpu", torch.float16)):
        with autocast, pytest.raises(MoEInputError) as caught:
            layer(tokens())
        assert str(caught.value) == "rank 0: w13_E2FD dtype=float16 must be float32"


NO_TOKENS = {
    "no dimension": (lambda: torch.tensor(1.0), "x_TD shape=[] must be [42, 32]"),
    "empty": (lambda: torch.zeros(0), "x_TD shape=[1, 0] must be [42, 32]"),
    "no width": (lambda: torch.zeros(42, 0), "x_TD shape=[42, 0] must be [42, 32]"),
    "no rows": (lambda: torch.zeros(2, 0, 32), "x_TD shape=[0, 32] must be [42, 32]"),
    "nothing": (lambda: None, "x_TD=NoneType must be a tensor"),
    "a list": (lambda: [[0.0] * 32] * 42, "x_TD=list must be a tensor"),
    "sparse": (lambda: tokens().to_sparse(), "x_TD layout=sparse_coo must be strided"),
    "nested": (lambda: torch.nested.nested_tensor([tokens()]), "x_TD layout=nested must be"),
    "elsewhere": (lambda: tokens().to("meta"), "x_TD device=meta must be cpu"),
    "integers": (lambda: tokens().int(), "x_TD dtype=int32 must be float32"),
}


def _refused(layer: MoELayer, x: Any) -> None:
    assert layer(x).isnan().all()
    layer.context.check()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("name", "validate"),
    # torch itself refuses a graph over nested tensors
    [
        case
        for case in itertools.product(NO_TOKENS, ("always", "never"))
        if case != ("nested", "never")
    ],
)
def test_what_are_no_tokens_is_refused_by_the_group(name, validate):
    make, text = NO_TOKENS[name]
    with create_context(replace(CONFIG, validate=validate), VirtualGroup(2)) as context:
        layer = MoELayer(context)
        with pytest.raises(MoEInputError) as caught:
            _refused(layer, make())
        assert str(caught.value).startswith(f"rank 0: {text}")
        assert "\n" not in str(caught.value)
        assert layer(tokens()).isfinite().all()


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("whole", [False, True], ids=["each", "all in one"])
def test_checkpoint_needs_the_entries_of_the_region_that_is_computed_again(layers, whole):
    needs = layers if whole else 1

    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            if whole:
                return checkpoint(super().forward, x, use_reentrant=False)
            for layer in self.layers:
                x = checkpoint(
                    lambda x, layer: x + layer(self.norm(x)), x, layer, use_reentrant=False
                )
            return x

    def contexts(n: int) -> Context:
        return create_context(replace(CONFIG, layers=n, slot_factor=2), VirtualGroup(2))

    with contexts(layers) as enough, contexts(needs) as few:
        plain = Model(*[enough] * layers)
        wanted = trained(plain, plain, tokens())
        module = Checkpointed(*[few] * layers)
        for _ in range(3):
            assert equal(trained(module, module, tokens()), wanted)
        y = module(tokens())
        del y  # a graph that is dropped gives back what it held
        assert equal(trained(module, module, tokens()), wanted)
    if needs > 1:
        with contexts(needs - 1) as none:
            module = Checkpointed(*[none] * layers)
            with pytest.raises(MoEInputError) as caught:
                trained(module, module, tokens())
            assert str(caught.value) == (
                f"rank 0: layers={needs - 1} must be at least the forwards that await a backward,"
                f" {needs}; drop their graphs, run backward, or use no_grad"
            )


def test_rows_whose_saved_tensors_were_copied_are_kept_while_there_is_room(context):
    """A hook may copy what is saved, or let it go as checkpoint does: neither is told from the
    other, so the rows stay until a forward has no entry else."""
    layer = MoELayer(context, shared_experts=0)
    wanted = trained(layer, layer, tokens())
    with torch.autograd.graph.save_on_cpu():
        assert equal(trained(layer, layer, tokens()), wanted)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda tensor: tensor):
        assert equal(trained(layer, layer, tokens()), wanted)
        y = layer(tokens())
        again = layer(tokens())
    again.sum().backward()
    again = None
    with pytest.raises(
        RuntimeError, match=r"are gone: .* a later forward took the entry \(layers="
    ):
        y.sum().backward()
    assert equal(trained(layer, layer, tokens()), wanted)


def test_kept_graphs_give_back_their_entries(context):
    layer = MoELayer(context, shared_experts=0)
    for _ in range(3):
        layer(tokens())
    y = layer(tokens())
    with pytest.raises(MoEInputError, match=r"layers=1 must be at least .* 2; drop their graphs"):
        layer(tokens())
    y.sum().backward()
    layer(tokens()).sum().backward()


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "jacrev", "hessian"])
def test_torch_func_is_refused_in_a_line(context, transform):
    layer = MoELayer(context)
    wanted = layer(tokens()).detach()
    x = tokens()

    def loss(x: Tensor) -> Tensor:
        return layer(x).sum()

    func = torch.func
    calls = {
        "grad": lambda: func.grad(loss)(x),
        "vjp": lambda: func.vjp(loss, x),
        "jvp": lambda: func.jvp(loss, (x,), (x,)),
        "vmap": lambda: func.vmap(layer)(x.expand(2, 42, 32)),
        "jacrev": lambda: func.jacrev(loss)(x),
        "hessian": lambda: func.hessian(loss)(x),
    }
    with pytest.raises(InputError) as caught:
        calls[transform]()
    assert str(caught.value) == (
        "torch.func must not transform routed_experts (grad, vmap, jvp, is_grads_batched): use"
        " backward() or torch.autograd.grad"
    )
    assert torch.equal(layer(tokens()), wanted)
    parameters = dict(layer.named_parameters())
    assert torch.equal(func.functional_call(layer, parameters, (tokens(),)), wanted)


def test_forward_mode_and_batched_gradients_are_refused_in_a_line(context):
    layer = MoELayer(context, shared_experts=0)
    forward = torch.autograd.forward_ad
    with forward.dual_level(), pytest.raises(InputError, match=r"^forward-mode tangents must not"):
        layer(forward.make_dual(tokens(), tokens()))
    x = tokens().requires_grad_()
    y = layer(x)
    with pytest.raises(InputError, match=r"torch\.func must not transform"):
        torch.autograd.grad(y, x, tokens().expand(2, 42, 32), is_grads_batched=True)
    (found,) = torch.autograd.grad(y, x, tokens(9))
    assert torch.equal(found, trained(layer, layer, tokens())[1])


@pytest.mark.parametrize("dy_has_gradient", [False, True])
def test_a_second_derivative_is_refused_in_a_line(context, dy_has_gradient):
    """Also where it would silently be none: dx of a sum has no gradient of its own."""
    layer = MoELayer(context, shared_experts=0)
    x = tokens().requires_grad_()
    y = layer(x)
    loss = (y**2 if dy_has_gradient else y).sum()
    with pytest.raises(InputError) as caught:
        torch.autograd.grad(loss, x, create_graph=True)
    assert str(caught.value) == (
        "create_graph=True must not reach routed_experts, which has no second derivative"
    )
    (found,) = torch.autograd.grad(loss, x)  # the rows are still there
    assert found.isfinite().all()
    assert found.any()


def test_entries_of_interleaved_graphs_are_their_own():
    """Every order of dropping and of going backward leaves the right rows for the rest."""
    with create_context(replace(CONFIG, layers=3, slot_factor=2), VirtualGroup(2)) as context:
        layer = MoELayer(context)
        wanted = [trained(layer, layer, tokens(i))[1] for i in range(3)]
        for order in itertools.permutations(range(3)):
            leaves = [tokens(i).requires_grad_() for i in range(3)]
            graphs: list[Tensor | None] = [layer(x) for x in leaves]
            graphs[order[0]] = None
            fresh = tokens(order[0]).requires_grad_()
            graphs[order[0]], leaves[order[0]] = layer(fresh), fresh
            for i in order:
                found = graphs[i]
                assert found is not None
                (dx,) = torch.autograd.grad(found, leaves[i], tokens(9))
                assert torch.equal(dx, wanted[i])
