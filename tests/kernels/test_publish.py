"""Publish: kernel against the twin, bit for bit; faults by hand."""

import pytest
import torch
from group import TARGET, normal, seeded
from workbench.kernels.device import run
from workbench.kernels.publish import publish, publish_grad, publish_grad_torch, publish_torch
from workbench.kernels.words import HEAD_WORDS, Code, Head

pytestmark = pytest.mark.values

E = 16


def given(T, K, *, ids_dtype=torch.int64, scores_dtype=torch.float32, dtype=torch.bfloat16):
    g = seeded(T)
    ids = torch.rand(T, E, generator=g).argsort(1)[:, :K].contiguous()
    return {
        "x_TD": normal(T, 33, dtype=dtype),
        "ids_TK": ids.to(ids_dtype),
        "scores_TK": normal(T, K, dtype=scores_dtype, seed=1),
    }


def published(inputs, how, code=0):
    T, K = inputs["ids_TK"].shape
    head = torch.zeros(HEAD_WORDS, dtype=torch.int64)
    head[Head.KIND], head[Head.CALL], head[Head.CODE] = 1, 7, code
    outs = {
        "x_out_TD": torch.full_like(inputs["x_TD"], float("nan")),
        "ids_out_TK": torch.full((T, K), -9, dtype=torch.int32),
        "scores_out_TK": torch.full((T, K), float("nan")),
        "head": head,
    }
    if how == "twin":
        publish_torch(**inputs, **outs, num_experts=E)
    else:
        run(publish(TARGET, **inputs, **outs, num_experts=E))
    return outs


def same(a, b):
    assert all(torch.equal(x.view(torch.uint8), b[name].view(torch.uint8)) for name, x in a.items())


@pytest.mark.parametrize("T", [1, 7, 97])
@pytest.mark.parametrize("K", [1, 6])
@pytest.mark.parametrize("ids_dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("scores_dtype", [torch.bfloat16, torch.float32])
def test_good_input_is_copied(T, K, ids_dtype, scores_dtype):
    inputs = given(T, K, ids_dtype=ids_dtype, scores_dtype=scores_dtype)
    found = published(inputs, "kernel")
    same(found, published(inputs, "twin"))
    assert torch.equal(found["x_out_TD"], inputs["x_TD"])
    assert torch.equal(found["ids_out_TK"].long(), inputs["ids_TK"].long())
    assert found["head"][Head.CODE] == Code.OK


@pytest.mark.parametrize(
    ("faults", "code", "a", "b"),
    [
        ({"ids": [(70, 2, E)]}, Code.ID_RANGE, 70, E),
        ({"ids": [(80, 1, -1), (70, 3, 999), (70, 4, -5)]}, Code.ID_RANGE, 70, 999),
        ({"ids": [(9, 0, 3), (9, 5, 3), (4, 1, 7), (4, 2, 7)]}, Code.ID_REPEATED, 4, 7),
        ({"ids": [(9, 0, 3), (9, 5, 3), (90, 1, 77)]}, Code.ID_RANGE, 90, 77),
        ({"scores": [(96, 3, float("nan")), (95, 5, float("inf"))]}, Code.SCORE, 95, 5),
        ({"scores": [(0, 3, float("-inf"))], "ids": [(1, 1, -7)]}, Code.ID_RANGE, 1, -7),
    ],
)
def test_faults_are_noted(faults, code, a, b):
    inputs = given(97, 6)
    for token in {place[0] for place in faults.get("ids", [])}:
        inputs["ids_TK"][token] = torch.tensor([0, 10, 11, 12, 13, 14])
    for token, k, value in faults.get("ids", []):
        inputs["ids_TK"][token, k] = value
    for token, k, value in faults.get("scores", []):
        inputs["scores_TK"][token, k] = value
    found = published(inputs, "kernel")
    assert found["head"][:3].tolist() == [code, a, b]
    same(found, published(inputs, "twin"))


def test_nothing_is_published_where_the_host_found_a_fault():
    inputs = given(97, 6)
    inputs["ids_TK"][3, 3] = -1
    found = published(inputs, "kernel", code=int(Code.HOST))
    assert found["head"][:3].tolist() == [Code.HOST, 0, 0]
    assert torch.isnan(found["x_out_TD"]).all()
    assert (found["ids_out_TK"] == -9).all()


@pytest.mark.parametrize("code", [0, 1])
def test_publish_grad(code):
    head = torch.zeros(HEAD_WORDS, dtype=torch.int64)
    head[Head.CODE] = code
    dy, outs = normal(97, 33, dtype=torch.bfloat16), torch.zeros(2, 97, 33, dtype=torch.bfloat16)
    run(publish_grad(TARGET, dy_TD=dy, dy_out_TD=outs[0], head=head))
    publish_grad_torch(dy_TD=dy, dy_out_TD=outs[1], head=head)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], dy) == (code == 0)
