"""`workbench bench layer`: the layer against the products it is made of, and against a peer.

The floor of a forward is the two dense products [T*K, D] x [D, 2F] and [T*K, F] x [F, D] in one
torch matmul each; that of a training step is three of them. The peer is the DeepSeek-V3 MoE block
of transformers, with the faster of its experts implementations. All run in turn, round after
round, so that whatever else the machine does falls on all of them; a figure is the median of the
rounds' ratios. The layer is timed only after its values were checked in float64: one expert's
gradients, and all that its tokens have.

With AMX the dense product gains more than small ones, and rows are moved no faster than without, so
the ratios to the floor are larger there. ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment
compares as on cores without it.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.moe.autograd import routed_experts
from workbench.moe.config import MoEConfig
from workbench.moe.context import create_context
from workbench.moe.groups.virtual import VirtualGroup
from workbench.moe.oracle import oracle, relative_error
from workbench.moe.weights import Weights
from workbench.routing import route

Run = Callable[[], Any]
EXPERTS = ("eager", "grouped_mm")
"""Experts implementations of transformers that fit in memory; `batched_mm` copies a weight per
route."""


def bench_layer(
    *,
    T: int = 2048,
    D: int = 1024,
    F: int = 512,
    E: int = 32,
    K: int = 6,
    rounds: int = 15,
    transformers: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Figures by name; times in ms, medians of `rounds` rounds. BF16, EP 1, balanced routing.

    `expert_products_over_floor` is what E weights in place of one cost by themselves: the same
    products with nothing around them, and so a bound for a layer made of them. The layer's ratios
    are `forward_over_floor`, `forward_backward_over_floor`, `forward_over_transformers` and
    `forward_backward_over_transformers` (the last two None without `transformers`). Raises
    InputError if that package is wanted and not there, and RuntimeError if the layer's values are
    wrong.
    """
    config = MoEConfig(T=T, D=D, F=F, E=E, K=K, scratch_factor=1.0, slot_factor=1.1)
    generator = torch.Generator().manual_seed(seed)
    routes = route(T=T, K=K, E=E, ep=1, factor=1.0, seed=seed)
    ids, scores = torch.from_numpy(routes.ids[0]).long(), torch.from_numpy(routes.scores[0])

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    x, w13, w2, dy = normal(T, D), normal(E, 2 * F, D), normal(E, D, F), normal(T, D)
    leaves = [t.detach().requires_grad_() for t in (x, scores, w13, w2)]
    with create_context(config, VirtualGroup(1)) as context:

        def layer(*given: Tensor) -> Tensor:
            return routed_experts(given[0], ids, given[1], Weights(given[2], given[3]), context)

        worst = _check(leaves, ids, dy, layer)
        runs: dict[str, Run] = {
            "floor": _products(1, T * K, D, F),
            "expert_products": _products(E, T * K, D, F),
            "forward": _forward(layer, leaves),
            "forward_backward": _step(layer, leaves, dy),
        }
        if transformers:
            peers = {name: _peer_runs(config, leaves, ids, dy, name) for name in EXPERTS}
            once = _in_turn({name: pair["forward_backward"] for name, pair in peers.items()}, 1, 1)
            best = min(once, key=lambda name: once[name][0])
            runs |= {f"transformers_{kind}": run for kind, run in peers[best].items()}
        else:
            best = None
        times = _in_turn(runs, rounds, 2)
    return _figures(times, config) | {"transformers_experts": best, "largest_relative_error": worst}


def _figures(times: dict[str, list[float]], config: MoEConfig) -> dict[str, Any]:
    def ratio(part: str, whole: str, by: float = 1) -> float:
        return statistics.median(
            a / (by * b) for a, b in zip(times[part], times[whole], strict=True)
        )

    figures: dict[str, Any] = {
        "expert_products_over_floor": ratio("expert_products", "floor"),
        "forward_over_floor": ratio("forward", "floor"),
        "forward_backward_over_floor": ratio("forward_backward", "floor", 3),
    }
    for kind in ("forward", "forward_backward"):
        peer = f"transformers_{kind}"
        figures[f"{kind}_over_transformers"] = ratio(kind, peer) if peer in times else None
    flop = 6 * config.T * config.K * config.D * config.F
    medians = {name: statistics.median(values) for name, values in times.items()}
    return figures | {
        "ms": {name: 1e3 * value for name, value in medians.items()},
        "floor_tflops": flop / medians["floor"] / 1e12,
        "threads": torch.get_num_threads(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "torch": torch.__version__,
        "shape": {name: getattr(config, name) for name in "TDFEK"},
        "origin": "measured",
    }


def _products(weights: int, rows: int, D: int, F: int) -> Run:
    """The forward's two products over `rows` rows, with so many weights in equal shares."""
    w13, w2 = torch.randn(weights, 2 * F, D).bfloat16(), torch.randn(weights, D, F).bfloat16()
    x, act = torch.randn(rows, D).bfloat16(), torch.randn(rows, F).bfloat16()
    h1, y = x.new_empty(rows, 2 * F), x.new_empty(rows, D)
    shares = [tensor.tensor_split(weights) for tensor in (x, act, h1, y)]

    def run() -> None:
        for e, (x_RD, act_RF, h1_R2F, y_RD) in enumerate(zip(*shares, strict=True)):
            torch.mm(x_RD, w13[e].t(), out=h1_R2F)
            torch.mm(act_RF, w2[e].t(), out=y_RD)

    return run


def _forward(layer: Callable[..., Tensor], given: list[Tensor]) -> Run:
    def run() -> None:
        with torch.no_grad():
            layer(*given)

    return run


def _step(layer: Callable[..., Tensor], given: list[Tensor], dy: Tensor) -> Run:
    def run() -> None:
        for leaf in given:
            leaf.grad = None
        layer(*given).backward(dy)

    return run


def _in_turn(runs: dict[str, Run], rounds: int, warm_up: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm_up + rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number >= warm_up:
                times[name].append(time.perf_counter() - began)
    return times


def _check(leaves: list[Tensor], ids: Tensor, dy: Tensor, layer: Callable[..., Tensor]) -> float:
    """Largest relative error against float64 of the first expert's gradients, and of y, dx and
    dscores of its tokens."""
    sample = (ids == 0).any(1).nonzero()[:, 0]
    y = layer(*leaves)
    y.backward(dy)
    found = [y, leaves[0].grad, leaves[1].grad, leaves[2].grad, leaves[3].grad]
    x, scores, w13, w2 = (t.detach().double().numpy() for t in leaves)
    at = sample.numpy()
    exact, grads = oracle(x[at], ids.numpy()[at], scores[at], w13, w2, dy.double().numpy()[at])
    assert grads is not None
    worst = 0.0
    for place, (mine, right) in enumerate(zip(found, (exact, *grads), strict=True)):
        assert mine is not None
        part, wanted = (mine[sample], right) if place < 3 else (mine[0], right[0])
        error = relative_error(part.detach().double().numpy(), wanted)
        worst = error if np.isnan(error) else max(worst, error)
    if not worst < 1e-2:
        raise RuntimeError(
            f"relative error={worst:.3g} must be below 0.01 before anything is timed"
        )
    return worst


def _peer_runs(
    config: MoEConfig, leaves: list[Tensor], ids: Tensor, dy: Tensor, experts: str
) -> dict[str, Run]:
    """Forward and step of the experts of transformers' DeepSeek-V3 block, with our weights, ids
    and scores (in its own dtype); router and shared expert are left out as on our side."""
    block = _peer(config, leaves[2].detach(), leaves[3].detach(), experts)
    given = [leaves[0], leaves[1], *block.parameters()]

    def layer(x_TD: Tensor, scores_TK: Tensor, *_: Tensor) -> Tensor:
        y_TD: Tensor = block(x_TD, ids, scores_TK.to(x_TD.dtype))
        return y_TD

    return {"forward": _forward(layer, given), "forward_backward": _step(layer, given, dy)}


def _peer(config: MoEConfig, w13: Tensor, w2: Tensor, experts: str) -> Any:
    """The experts of transformers' DeepSeek-V3 block with our weights."""
    try:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as model
    except ImportError as error:
        raise InputError(
            f"package={error.name} must be installed for the comparison: pip install transformers"
        ) from error
    settings = DeepseekV3Config(
        hidden_size=config.D,
        moe_intermediate_size=config.F,
        n_routed_experts=config.E,
        num_experts_per_tok=config.K,
        n_group=1,
        topk_group=1,
    )
    settings._experts_implementation = experts
    block = model.DeepseekV3MoE(settings).bfloat16().experts
    with torch.no_grad():
        block.gate_up_proj.copy_(w13)
        block.down_proj.copy_(w2)
    return block
