"""`routed_experts`: the layer's routed part as one differentiable function.

Legend: T tokens per rank, D hidden, F expert width, K experts per token, E experts of the
process, V ranks that the process hosts (1, or all of a virtual group).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from workbench.errors import InputError
from workbench.moe.context import BACKWARD, FORWARD, Context, make_step
from workbench.moe.step import Step
from workbench.moe.weights import Weights
from workbench.systems import SYSTEMS

_INTEGERS = (torch.int64, torch.int32, torch.int16)
_SCORES = (torch.float32, torch.bfloat16)


P = ParamSpec("P")
R = TypeVar("R")


def _opaque(function: Callable[P, R]) -> Callable[P, R]:
    """Runs outside what torch.compile traces, at a graph break."""

    # Not `torch.compiler.disable` at once: that imports the compiler, which few calls need.
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        torch._dynamo.graph_break(
            "routed_experts meets its peers, so the compiler must not see it: fullgraph=True and"
            " torch.export cannot hold it"
        )
        outside: Callable[P, R] = torch.compiler.disable(function)
        return outside(*args, **kwargs)

    return call


@_opaque
def routed_experts(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    weights: Weights,
    context: Context,
) -> Tensor:
    """y_TD = sum over k, in k order and FP32, of score * w2[id] @ (silu(gate) * up), with
    gate, up = w13[id] @ x split in half; differentiable in x, scores and weights. A pipeline that
    runs the shared expert itself (`System.hides_shared`) adds that of the weights, if they have it.

    Collective: every rank of the context's group makes the same calls in the same order. x and
    the weights are contiguous and of the config's dtype, ids integers, distinct in a token and
    global; scores are float32 or bfloat16 and computed with in float32. A rank gives its own T
    tokens and the E / ep experts it owns; the one process of a virtual group gives all ranks'
    tokens, ep * T, one rank after the other, and all experts. Inputs are read, never written.

    With gradients on, a training context keeps the layer's rows until backward, which may run
    once. Raises MoEInputError (a bad input on any rank), CapacityError (more rows than the scratch
    frame holds), each on every rank and with the context still usable, where the config's
    `validate` looks; else results are NaN and `check()` raises; PeerError (a peer died or
    was late), after which group and context are closed; ClosedError. torch.func's transforms,
    forward-mode and second derivatives are an InputError.

    Under torch.compile it is a graph break: what it does to its arena and with its peers is no
    function of tensors, so a compiler that saw it as an op could move it, drop it or run it twice
    on one rank alone. It runs as in eager mode, to the bit, and so does its backward;
    fullgraph=True is refused by the compiler.

    The rows are held with the tensors that autograd saves. torch.utils.checkpoint with
    use_reentrant=False lets those go, so that only the forwards of the region that is computed
    again count for `layers`.
    """
    context.memory(context.group.hosted[0])
    _untransformed(x_TD)
    given = (x_TD, topk_scores_TK, *weights.tensors)
    saves = (
        context.config.training
        and torch.is_grad_enabled()
        and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in given)
    )
    y_TD: Tensor = _RoutedExperts.apply(topk_ids_TK, context, saves, weights.prepared, *given)
    return y_TD


def _untransformed(tensor: Tensor) -> None:
    if isinstance(tensor, FakeTensor):
        raise InputError("routed_experts must run on values: torch.export cannot hold it")
    batched = isinstance(tensor, Tensor) and torch._C._functorch.is_legacy_batchedtensor(tensor)
    if batched or torch._C._are_functorch_transforms_active():
        raise InputError(
            "torch.func must not transform routed_experts (grad, vmap, jvp, is_grads_batched):"
            " use backward() or torch.autograd.grad"
        )


class _Held:
    """Holds a layer entry for the graph, or a ticket of it, that needs it."""

    def __init__(self, context: Context, entry: int) -> None:
        self.context, self.entry, self.loan = context, entry, context.loan(entry)

    def __del__(self) -> None:
        self.context.drop_entry(self.entry, self.loan)


class _Ticket(bytearray):
    """Memory of the tensor that is saved for backward, which names the entry and its loan.

    Whoever keeps the saved tensors keeps the rows. Where the graph lives on without them they were
    swapped by a hook: for checkpoint, which computes them again, the rows are of no more use.
    """

    held: _Held

    def __del__(self) -> None:
        self.held.context.part_entry(self.held.entry, self.held.loan)

    @classmethod
    def tensor(cls, held: _Held) -> Tensor:
        ticket = cls(16)
        ticket.held = held
        words = torch.frombuffer(ticket, dtype=torch.int64)
        words[0], words[1] = held.entry, held.loan
        return words


class _RoutedExperts(torch.autograd.Function):
    # A context's memory is written by calls in inference mode and out of it, on any thread.
    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def forward(
        ctx: Any,
        ids_TK: Tensor,
        context: Context,
        saves: bool,
        prepared: Mapping[str, Tensor],
        x_TD: Tensor,
        scores_TK: Tensor,
        *given: Tensor | None,
    ) -> Tensor:
        config, weights = context.config, _weights(given, prepared)
        problem = _problem(context, x_TD, ids_TK, scores_TK, weights)
        entry = context.take_entry(saves)
        if entry is None:
            problem = problem or (
                f"layers={config.layers} must be at least the forwards that await a backward,"
                f" {config.layers + 1}; drop their graphs, run backward, or use no_grad"
            )
            entry, saves = context.plan.entries - 1, False
        held = _Held(context, entry) if saves else None
        steps = _steps(context, entry, saves, weights if problem is None else None)
        with context.expected():
            y_TD = torch.empty(
                len(steps) * config.T,
                config.D,
                dtype=getattr(torch, config.dtype),
                device=context.device,
            )
        for v, step in enumerate(steps):
            step.y_TD = _part(y_TD, v, config.T)
            if problem is None:
                step.x_TD = _part(x_TD, v, config.T)
                step.ids_TK = _part(ids_TK, v, config.T)
                step.scores_TK = _part(scores_TK, v, config.T)
        try:
            context.run(FORWARD, steps, problem)
        except BaseException:
            # At once, as a traceback that is kept would keep the entry.
            if held is not None:
                context.free_entry(entry)
            raise
        ctx.context, ctx.held, ctx.problem = context, held, problem
        ctx.given = None if problem is None else (x_TD, scores_TK, *given)
        ctx.prepared = prepared
        if problem is None:
            ctx.scores_dtype = scores_TK.dtype
        if held is not None:
            ctx.save_for_backward(_Ticket.tensor(held), *given)
        return y_TD

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise InputError("forward-mode tangents must not reach routed_experts: use backward()")

    @staticmethod
    @_opaque
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        context: Context = ctx.context
        held: _Held | None = ctx.held
        config = context.config
        if held is None:
            why = ctx.problem or f"mode={config.mode!r} must be 'training' for a backward"
            raise RuntimeError(why)
        _untransformed(dy_TD)
        if torch.is_grad_enabled():
            # Refused now: a gradient of this one would be taken for zero where dy has none.
            raise InputError(
                "create_graph=True must not reach routed_experts, which has no second derivative"
            )
        ticket, *saved = ctx.saved_tensors
        weights = _weights(saved, ctx.prepared)
        entry, loan = ticket.tolist()
        if context.loan(entry) != loan:
            raise RuntimeError(
                "the rows of this forward of routed_experts are gone: its backward ran before (call"
                " it once), or a hook swapped its saved tensors and a later forward took the entry"
                f" (layers={config.layers} must count it)"
            )
        given = ctx.given
        steps = _steps(context, entry, True, weights if given is None else None)
        T, E = config.T, config.local_experts
        with context.expected():
            dy_TD = dy_TD.contiguous()  # autograd gives any strides: a sum's gradient has none
            dx_TD = torch.empty_like(dy_TD)
            dscores_TK = torch.empty(
                dy_TD.shape[0], config.K, dtype=torch.float32, device=context.device
            )
            gradients = _empty_gradients(context, weights, ctx.needs_input_grad[6:], given is None)
        for v, step in enumerate(steps):
            step.dy_TD, step.dx_TD = _part(dy_TD, v, T), _part(dx_TD, v, T)
            step.dscores_TK = _part(dscores_TK, v, T)
            step.gradients = gradients.of_rank(v, E)
        try:
            context.run(BACKWARD, steps, None)
        finally:
            context.free_entry(entry)
        if given is not None:
            # The call met its peers and did nothing; `check` says why.
            nan = (
                torch.full_like(tensor, torch.nan) if want else None
                for tensor, want in zip(given, ctx.needs_input_grad[4:], strict=True)
            )
            return None, None, None, None, *nan
        dscores_TK = dscores_TK.to(ctx.scores_dtype)
        return None, None, None, None, dx_TD, dscores_TK, *gradients.summed().tensors


def _steps(context: Context, entry: int, saves: bool, weights: Weights | None) -> Sequence[Step]:
    steps = []
    for v, rank in enumerate(context.group.hosted):
        step = make_step(context.config, context.memory(rank), context.executor, rank, entry, saves)
        if weights is not None:
            step.weights = weights.of_rank(v, context.config.local_experts)
        steps.append(step)
    return steps


def _empty_gradients(
    context: Context, weights: Weights, wanted: Sequence[bool], runs: bool
) -> Weights:
    """Uninitialised, of the weights that want one; of the shared expert one for each rank that the
    process hosts."""
    hosted, lend = len(context.group.hosted), context.lender.empty_like
    own = [w if want and runs else None for w, want in zip(weights.tensors, wanted, strict=True)]
    routed = [None if w is None else lend(w) for w in own[:2]]
    shared = [None if w is None else w.new_empty(hosted, *w.shape) for w in own[2:]]
    return _weights([*routed, *shared])


def _weights(
    tensors: Sequence[Tensor | None], prepared: Mapping[str, Tensor] | None = None
) -> Weights:
    w13, w2, shared_w13, shared_w2 = tensors
    return Weights(w13, w2, shared_w13, shared_w2, prepared or {})


def _part(tensor: Tensor, v: int, length: int) -> Tensor:
    return tensor[v * length : (v + 1) * length]


def _problem(
    context: Context,
    x_TD: Tensor,
    ids_TK: Tensor,
    scores_TK: Tensor,
    weights: Weights,
) -> str | None:
    """What is wrong with a rank's own inputs, as far as the host can see; None if nothing is."""
    c, dtype = context.config, getattr(torch, context.config.dtype)
    hosted = len(context.group.hosted)
    tokens, experts = hosted * c.T, hosted * c.local_experts
    rules: tuple[tuple[str, Any, tuple[int, ...], tuple[torch.dtype, ...]], ...] = (
        ("x_TD", x_TD, (tokens, c.D), (dtype,)),
        ("topk_ids_TK", ids_TK, (tokens, c.K), _INTEGERS),
        ("topk_scores_TK", scores_TK, (tokens, c.K), _SCORES),
        ("w13_E2FD", weights.w13_E2FD, (experts, 2 * c.F, c.D), (dtype,)),
        ("w2_EDF", weights.w2_EDF, (experts, c.D, c.F), (dtype,)),
    )
    if weights.shared_w13_2SFD is not None or weights.shared_w2_DSF is not None:
        if not SYSTEMS[c.pipeline].hides_shared:
            return f"shared expert must not be given: pipeline={c.pipeline!r} does not run it"
        width = getattr(weights.shared_w2_DSF, "shape", (c.F,))[-1]
        rules += (
            ("shared_w13_2SFD", weights.shared_w13_2SFD, (2 * width, c.D), (dtype,)),
            ("shared_w2_DSF", weights.shared_w2_DSF, (c.D, width), (dtype,)),
        )
    for name, form in weights.prepared.items():
        if form.shape[:1] != (experts,) or form.device != context.device:
            found = f"shape={list(form.shape)} on {form.device}"
            return f"prepared {name!r} {found} must be [{experts}, ...] on {context.device}"
    for name, value, shape, dtypes in rules:
        if not isinstance(value, Tensor):
            return f"{name}={type(value).__name__} must be a tensor"
        if value.layout is not torch.strided or value.is_nested:
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            return f"{name} layout={layout} must be strided"
        if tuple(value.shape) != shape:
            return f"{name} shape={list(value.shape)} must be {list(shape)}"
        if value.dtype not in dtypes:
            names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            return f"{name} dtype={str(value.dtype).removeprefix('torch.')} must be {names}"
        if value.device != context.device:
            return f"{name} device={value.device} must be {context.device}, as the context's arena"
        if not value.is_contiguous():
            return f"{name} strides={list(value.stride())} must be contiguous"
    return None
