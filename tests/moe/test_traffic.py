import numpy as np
import pytest

from workbench.moe.config import MoEConfig
from workbench.moe.traffic import traffic
from workbench.routing import route


def _counts(config, factor):
    ids = route(T=config.T, K=config.K, E=config.E, ep=config.ep, factor=factor).ids
    return np.stack([np.bincount(own.ravel(), minlength=config.E) for own in ids])


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("factor", [0.6, 1.0, 4.0, 7.5, 8.0])
def test_mean_is_the_wire_model_of_the_study(factor, mode):
    """layers * T*K*(1 - 1/ep) * row_bytes, with 2D + 2D for inference and 4*2D for training."""
    config = MoEConfig(T=2048, D=7168, F=3072, E=384, K=6, ep=8, mode=mode)
    found = traffic(config, _counts(config, factor))
    rows = 2048 * 6 * (1 - 1 / 8)
    model = rows * (4 * 7168 if mode == "inference" else 8 * 7168)
    assert found.sent_P.mean() == pytest.approx(model, rel=5e-3)
    assert found.sent_P.sum() == found.received_P.sum()


def test_bytes_route_by_route():
    config = MoEConfig(T=5, D=16, F=8, E=6, K=2, ep=3)
    counts = np.arange(18).reshape(3, 6)
    sent, received = np.zeros((2, 3), int)
    for source in range(3):
        for expert in range(6):
            home = expert // 2
            if home == source:
                continue
            for _ in range(counts[source, expert]):
                for _ in ("x", "dy"):
                    sent[source] += 32
                    received[home] += 32
                for size in (32, 32, 4):  # y, dx, score gradient
                    sent[home] += size
                    received[source] += size
                if home == 1:  # fetches x again
                    sent[source] += 32
                    received[home] += 32
    found = traffic(config, counts, recomputed_P=[False, True, False])
    assert found.sent_P.tolist() == sent.tolist()
    assert found.received_P.tolist() == received.tolist()


def test_one_rank_sends_nothing():
    config = MoEConfig(T=5, D=16, F=8, E=6, K=2)
    assert traffic(config, np.ones((1, 6))).sent_P.tolist() == [0]
