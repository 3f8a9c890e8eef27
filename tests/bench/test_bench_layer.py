"""The layer benchmark: what it returns, and that it times nothing wrong."""

import sys
from dataclasses import replace

import pytest
from workbench.kernels.catalogue import OPS

from workbench.bench import layer_bench as bench
from workbench.errors import InputError

SHAPE = {"T": 64, "D": 64, "F": 32, "E": 4, "K": 2}
RATIOS = ("forward_over_floor", "forward_backward_over_floor")
PEER = ("forward_over_transformers", "forward_backward_over_transformers")


def test_figures_of_a_small_shape():
    found = bench.bench_layer(**SHAPE, rounds=3, transformers=False)
    assert all(found[name] > 0 for name in RATIOS)
    assert all(found[name] is None for name in PEER)
    assert found["largest_relative_error"] < 1e-2
    assert found["shape"] == SHAPE
    assert set(found["ms"]) == {"floor", "expert_products", "forward", "forward_backward"}


def test_ratios_are_medians_of_rounds():
    config = bench.MoEConfig(**SHAPE)
    times = {
        "floor": [1.0, 2.0, 4.0],
        "expert_products": [1.0, 3.0, 5.0],
        "forward": [2.0, 3.0, 4.0],
        "forward_backward": [6.0, 9.0, 24.0],
        "transformers_forward": [4.0, 4.0, 4.0],
        "transformers_forward_backward": [12.0, 36.0, 24.0],
    }
    found = bench._figures(times, config)
    assert found["expert_products_over_floor"] == 1.25
    assert found["forward_over_floor"] == 1.5
    assert found["forward_backward_over_floor"] == 2.0
    assert found["forward_over_transformers"] == 0.75
    assert found["forward_backward_over_transformers"] == 0.5
    assert found["ms"]["floor"] == 2000


def test_wrong_values_are_not_timed(monkeypatch):
    right = bench.routed_experts
    monkeypatch.setattr(bench, "routed_experts", lambda *given: right(*given) * 1.02)
    with pytest.raises(RuntimeError, match=r"relative error=0\.02.* must be below 0.01"):
        bench.bench_layer(**SHAPE, rounds=1, transformers=False)


@pytest.mark.parametrize("op", ["w2_wgrad", "w13_wgrad"])
def test_wrong_weight_gradients_are_not_timed(monkeypatch, op):
    name = {"w2_wgrad": "dw2_EDF", "w13_wgrad": "dw13_E2FD"}[op]
    wrong = replace(OPS[op], twin=lambda **given: given[name].fill_(7))
    monkeypatch.setitem(OPS, op, wrong)
    with pytest.raises(RuntimeError, match=r"must be below 0\.01"):
        bench.bench_layer(**SHAPE, rounds=1, transformers=False)


def test_a_peer_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"package=transformers must be installed"):
        bench.bench_layer(**SHAPE, rounds=1)


def test_the_peer_runs():
    found = bench.bench_layer(**SHAPE, rounds=2)
    assert all(found[name] > 0 for name in PEER)
    assert found["transformers_experts"] in bench.EXPERTS
