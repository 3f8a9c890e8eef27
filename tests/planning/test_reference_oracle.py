"""The dist_moe plan against package dist-moe 0.1.0, on random configurations."""

import dataclasses
import itertools
import math
from typing import Any

import dist_moe
import numpy as np
import pytest

from workbench.planning.arithmetic import UNSET_BYTES
from workbench.planning.reference import DistMoEConfig, plan_dist_moe
from workbench.planning.reference_table import dist_moe_table

ACCEPTED = 3000
REFUSED = 1500
FIELDS = [field.name for field in dataclasses.fields(dist_moe.MemoryPlan)]
POLICIES = ("minimum", "factor", "bytes")


def package_plan(values: dict[str, Any], ep_size: int) -> dist_moe.MemoryPlan:
    """The oracle's plan; a group that does not divide E is refused where it is created."""
    values = dict(values)
    precision, pipeline = values.pop("precision"), values.pop("pipeline")
    policy = dist_moe.BlockScaledConfig(pipeline=pipeline) if precision == "mxfp8" else None
    return dist_moe.plan_memory(dist_moe.Config(**values, block_scaled=policy), ep_size=ep_size)


def random_case(rng: np.random.Generator, mode: str, pipeline: str, policy: str) -> Any:
    """One configuration that the package accepts, and its group size."""
    ep = int(rng.integers(1, 73))
    E = ep * int(rng.choice([1, 2, 3, 5, 8, 12, 31]))
    mxfp8 = pipeline != "standard"
    step = 32 if mxfp8 else 1
    width = int(rng.choice([step, 97 * step, *(step * rng.integers(1, 8192 // step, 6))]))
    values: dict[str, Any] = {
        "num_local_input_tokens": int(rng.choice([1, 7, 97, 2048, *rng.integers(1, 9000, 8)])),
        "hidden_dim": 64 * int(rng.integers(1, 129)),
        "intermediate_dim": width,
        "top_k": int(rng.integers(1, min(E, 12) + 1)),
        "num_experts": E,
        "max_moe_layers_per_activation_slot": int(rng.integers(1, 62)),
        "precision": "mxfp8" if mxfp8 else "bf16",
        "pipeline": pipeline,
        "inference": mode == "inference",
        "device_scratch_capacity_factor": float(
            rng.choice([1.0, 8.0, 0.5, 1000.0, rng.uniform(0.001, 80), 1e-9])
        ),
        "num_activation_slots": int(rng.integers(mode == "training", 9)),
    }
    if policy == "factor":
        values["activation_slot_capacity_factor"] = rng.choice(
            [0.0, 1.0, 2.5, rng.uniform(0, 9)]
        ).item()
    if policy == "bytes":
        T, D = values["num_local_input_tokens"], values["hidden_dim"]
        least = math.ceil(2 * T * D / 128) * 128 * values["max_moe_layers_per_activation_slot"]
        values["activation_slot_bytes"] = least + int(rng.choice([0, 1, rng.integers(1, 10**11)]))
    return values, ep


def accepted_cases() -> list[tuple[dict[str, Any], int]]:
    rng = np.random.default_rng(20261016)
    kinds = [
        (mode, pipeline, policy)
        for mode, pipeline, policy in itertools.product(
            ("training", "inference"), ("standard", "staged", "mega"), POLICIES
        )
        if mode == "training" or policy == "minimum"
    ]
    return [random_case(rng, *kinds[n % len(kinds)]) for n in range(ACCEPTED)]


def test_plan_equals_package_field_by_field() -> None:
    differing = []
    for values, ep in accepted_cases():
        theirs = package_plan(values, ep)
        ours = plan_dist_moe(DistMoEConfig(**values), ep_size=ep)
        got = [(getattr(ours, name), getattr(theirs, name)) for name in FIELDS]
        if any(a != b or type(a) is not type(b) for a, b in got):
            differing.append((values, ep, got))
    assert differing == []


def test_table_of_all_cases_equals_package() -> None:
    cases = accepted_cases()
    columns: dict[str, Any] = {"ep_size": np.array([ep for _, ep in cases])}
    for field in dataclasses.fields(DistMoEConfig):
        unset = UNSET_BYTES if field.name == "activation_slot_bytes" else math.nan
        given = [values.get(field.name, field.default) for values, _ in cases]
        columns[field.name] = np.array([unset if value is None else value for value in given])
    table = dist_moe_table(**columns)
    theirs = [package_plan(values, ep) for values, ep in cases]
    for name, column in table.items():
        want = [getattr(plan, name) for plan in theirs]
        want = [math.nan if value is None else value for value in want]
        np.testing.assert_array_equal(column, want, err_msg=name)


BREAKAGES: dict[str, list[Any]] = {
    "num_local_input_tokens": [0, -1, "7"],
    "hidden_dim": [0, -64, 1, 63, 65, 96],
    "intermediate_dim": [0, -5],
    "top_k": [0, -1, 10**6],
    "num_experts": [0, -8],
    "max_moe_layers_per_activation_slot": [0, -3],
    "device_scratch_capacity_factor": [0.0, -1.0, math.nan, math.inf, "8"],
    "activation_slot_bytes": [-1, 0, 1, 1.0, True, "1"],
    "activation_slot_capacity_factor": [-0.5, math.nan, math.inf, True, "2"],
    "num_activation_slots": [-1],
    "pipeline": ["fused", "Mega"],
}


def error_of(call: Any) -> type[Exception] | None:
    try:
        call()
    except (TypeError, ValueError) as error:
        return TypeError if isinstance(error, TypeError) else ValueError
    return None


def test_refuses_what_package_refuses() -> None:
    rng = np.random.default_rng(7)
    refused = 0
    names = list(BREAKAGES)
    while refused < REFUSED:
        mode = str(rng.choice(["training", "inference"]))
        pipeline = str(rng.choice(["standard", "staged", "mega"]))
        policy = str(rng.choice(POLICIES)) if mode == "training" else "minimum"
        values, ep = random_case(rng, mode, pipeline, policy)
        name = names[int(rng.integers(len(names)))]
        if name == "pipeline" and pipeline == "standard":
            continue
        values[name] = BREAKAGES[name][int(rng.integers(len(BREAKAGES[name])))]
        theirs = error_of(lambda v=values, n=ep: package_plan(v, n))
        if theirs is None:  # e.g. an exact slot of 0 bytes replaced by a legal one
            continue
        refused += 1
        ours = error_of(lambda v=values, n=ep: plan_dist_moe(DistMoEConfig(**v), ep_size=n))
        assert ours is theirs, (values, ep)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_dim": 100}, "hidden_dim=100 must be divisible by 64"),
        ({"top_k": 65}, "top_k=65 must be at most num_experts=64"),
        ({"intermediate_dim": 48}, "intermediate_dim=48 must be divisible by 32"),
        ({"num_activation_slots": 0}, "num_activation_slots=0 must be at least 1"),
        # one byte below 3 layers of 40 * 64 * 2
        ({"activation_slot_bytes": 15359}, "=15359 must be at least .*_slot_bytes=15360"),
        ({"activation_slot_bytes": 10**6, "activation_slot_capacity_factor": 1.0}, "exclude each"),
        ({"inference": True, "activation_slot_capacity_factor": 1.0}, "inference saves nothing"),
        ({"inference": True, "activation_slot_bytes": 10**6}, "inference saves nothing"),
        ({"inference": True, "num_activation_slots": -1}, "num_activation_slots=-1 must not be"),
    ],
)
def test_every_rule_of_the_package_is_ours(changes: dict[str, Any], message: str) -> None:
    values = {
        "num_local_input_tokens": 40,
        "hidden_dim": 64,
        "intermediate_dim": 32,
        "top_k": 2,
        "num_experts": 64,
        "max_moe_layers_per_activation_slot": 3,
        "precision": "mxfp8",
        "pipeline": "staged",
    } | changes
    with pytest.raises(ValueError, match=r".+"):
        package_plan(values, 8)
    with pytest.raises(ValueError, match=message):
        plan_dist_moe(DistMoEConfig(**values), ep_size=8)


@pytest.mark.parametrize("ep_size", [0, -1, 128])
def test_refuses_the_group_sizes_that_the_package_refuses(ep_size: int) -> None:
    values = {
        "num_local_input_tokens": 40,
        "hidden_dim": 64,
        "intermediate_dim": 97,
        "top_k": 2,
        "num_experts": 64,
        "max_moe_layers_per_activation_slot": 3,
        "precision": "bf16",
        "pipeline": "standard",
    }
    with pytest.raises(ValueError, match=r"must|requires"):
        package_plan(values, ep_size)
    with pytest.raises(ValueError, match=f"ep_size={ep_size}"):
        plan_dist_moe(DistMoEConfig(**values), ep_size=ep_size)
