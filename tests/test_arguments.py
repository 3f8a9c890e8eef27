"""Constructors and functions called from Python: what is no such value is one line that says so."""

import math
from typing import Any

import numpy as np
import pytest

from workbench.case import Case, check_factor, local_matrix, parse_id, scaled_profile
from workbench.errors import InputError
from workbench.explore.trace import Trace, placed_rows, scaled_counts
from workbench.hardware import load_hardware, match_device
from workbench.moe.config import MoEConfig
from workbench.routing import case_routes, route, rows_by_expert, rows_by_rank

CASE: dict[str, Any] = {
    "backend": "dist_moe",
    "mode": "training",
    "ep": 8,
    "precision": "bf16",
    "pipeline": "standard",
}
CONFIG: dict[str, Any] = {"T": 8, "D": 16, "F": 16, "E": 8, "K": 2, "ep": 2}
ROUTE: dict[str, Any] = {"T": 8, "K": 2, "E": 8, "ep": 2, "factor": 1.0}
RANKS = {name: value for name, value in ROUTE.items() if name != "E"}
NO_COUNT = (None, "8", "", math.nan, math.inf, True, 0, -1, 8.0, 8.5, [8], (8,), 10**400, 1j, b"8")
NO_NUMBER = (None, "1", math.nan, math.inf, True, [1.0], 1j, -1.0, 10**400)
NO_NAME = (None, 1, math.nan, True, [], ["training"], {}, "", "x" * 10_000, "a\nb", b"training")
MADE = [
    (Case, CASE, ("ep", "F", "T", "D", "E", "K"), NO_COUNT),
    (Case, CASE, ("sharedExperts", "layers"), tuple(v for v in NO_COUNT if v != 0)),
    (Case, CASE, ("imbalance", "scratchFactor"), NO_NUMBER),
    (Case, CASE, ("slotFactor",), tuple(v for v in NO_NUMBER if v == v)),
    (Case, CASE, ("backend", "mode", "precision", "pipeline", "category"), NO_NAME),
    (Case, CASE, ("profile",), NO_NAME[1:]),
    (Case, CASE, ("factors",), (None, 1.0, "1", True, [None], ["1"], [math.nan], [1.0, 99.0])),
    (MoEConfig, CONFIG, ("T", "D", "F", "E", "K", "ep", "layers"), NO_COUNT),
    (MoEConfig, CONFIG, ("slot_factor", "scratch_factor"), NO_NUMBER),
    (MoEConfig, CONFIG, ("mode", "pipeline", "dtype", "executor", "validate"), NO_NAME),
    (route, ROUTE, ("T", "K", "E", "ep"), NO_COUNT),
    (route, ROUTE, ("seed",), tuple(v for v in NO_COUNT if v != 0)),
    (rows_by_expert, ROUTE, ("T", "K", "E", "ep"), NO_COUNT),
    (rows_by_rank, RANKS, ("T", "K", "ep"), NO_COUNT),
    (check_factor, {"ep": 2, "E": 8, "K": 2, "factor": 1.0}, ("ep", "E", "K"), NO_COUNT),
]
FACTORS = [
    (function, given)
    for function, given in ((route, ROUTE), (rows_by_expert, ROUTE), (rows_by_rank, RANKS))
]


def refused(make: Any, given: dict[str, Any], name: str, value: Any) -> str:
    with pytest.raises(InputError) as error:
        make(**given | {name: value})
    message = str(error.value)
    assert len(message) <= 480
    assert message.isprintable()
    return message


@pytest.mark.parametrize(("make", "given", "names", "values"), MADE)
def test_a_value_of_another_kind_is_refused_by_name(
    make: Any, given: dict[str, Any], names: tuple[str, ...], values: tuple[Any, ...]
) -> None:
    for name in names:
        for value in values:
            message = refused(make, given, name, value)
            said = ("imbalance",) if name == "factors" and value == [1.0, 99.0] else (name,)
            # what does not go together may be told by the other: `profile` by `category`
            assert any(word in message for word in said), (name, value, message)
            assert "must" in message


@pytest.mark.parametrize(("make", "given"), FACTORS)
@pytest.mark.parametrize("value", NO_NUMBER)
def test_a_load_that_is_no_number(make: Any, given: dict[str, Any], value: Any) -> None:
    assert "imbalance=" in refused(make, given, "factor", value)


TRACE = Trace(name="t", counts=((1, 2), (3, 4)))
ONE: list[tuple[Any, str, tuple[Any, ...]]] = [
    (lambda ep: scaled_profile("A", ep), "ep", NO_COUNT),
    (lambda name: scaled_profile(name, 2), "profile", NO_NAME),
    (local_matrix, "ep", NO_COUNT),
    (
        lambda ep: placed_rows((1, 2, 3, 4), ep),
        "ep",
        (*(v for v in NO_COUNT if not isinstance(v, list)), 3, 10**9),
    ),
    (lambda rows: scaled_counts(TRACE, rows), "rows", tuple(v for v in NO_COUNT if v != 0)),
    (load_hardware, "hardware", NO_NAME),
    (match_device, "device", NO_NAME),
]


@pytest.mark.parametrize(("call", "name", "values"), ONE)
def test_other_functions_refuse_by_name_too(call: Any, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InputError, match=f"{name}="):
            call(value)


def test_numpy_s_numbers_are_plain_ones() -> None:
    case = Case(**CASE | {"ep": np.int64(8), "imbalance": np.float32(2), "factors": np.ones(3)})
    assert case == Case(**CASE, imbalance=2.0, factors=(1.0, 1.0, 1.0))
    assert {type(value) for value in (case.ep, case.imbalance, case.factors[0])} == {int, float}
    assert type(MoEConfig(**CONFIG | {"T": np.int32(8)}).T) is int


@pytest.mark.parametrize(
    "text",
    [
        None,
        1,
        b"x",
        "",
        "x" * 100_000,
        "dist_moe-training-ep" + "8" * 5000 + "-bf16-a-b-A-F1",
        "dist_moe-training-ep\u0668-bf16-standard-single_layer-i1-F3072",
        "dist_moe-training-ep8-bf16-standard-single_layer-i1-F3072-T5.5",
        "dist_moe-training-ep8-bf16-standard-single_layer-i1-F3072-T5-T6",
    ],
)
def test_what_is_no_id(text: Any) -> None:
    with pytest.raises(InputError, match=r"^id="):
        parse_id(text)


def test_layers_and_sizes_beyond_what_there_is() -> None:
    case = Case(**CASE)
    for layer in (1, -1, None, "0"):
        with pytest.raises(InputError, match="layer="):
            case_routes(case, layer=layer)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"ep\*T\*K=.* must be below 2\*\*31"):
        route(T=2**30, K=2, E=8, ep=2, factor=1.0)
    with pytest.raises(InputError, match=r"ep\*T\*K=.* must be below 2\*\*53"):
        rows_by_expert(T=2**31 - 1, K=2**20, E=2**20, ep=2**20, factor=1.0)
