"""What a layer's context is made for; checked once, when it is built. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any

from workbench.case import Case
from workbench.errors import InputError, check_number, check_whole, one_line
from workbench.systems import MODES, SYSTEMS

PIPELINES = tuple(s.pipeline for s in SYSTEMS.values() if s.module)
"""Those that our layer has."""
DTYPES = {"bfloat16": 2, "float32": 4}
"""Bytes of an element; float32 is there for tests."""
VALIDATE = ("always", "first", "never")
EXECUTORS = ("torch", "triton")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shape, policy and limits of a group's MoE layers. Raises InputError.

    T tokens per rank (the same on every rank), D hidden width, F expert width, E experts in all,
    K experts per token, ep ranks, `layers`: forwards that can await their backward at once, and
    share the slot (under checkpoint those of one region). `slot_factor` times the full save
    at balanced load is held for activations, the rest is recomputed in backward; `scratch_factor`
    times the balanced T*K rows is the most that a rank can receive (`alltoall` always holds every
    layer at that many rows, as it has no recomputation). `validate` says when a call ends with a
    look at its status: after each, after the first forward and backward, or only in `check()`.
    """

    T: int
    D: int
    F: int
    E: int
    K: int
    ep: int = 1
    layers: int = 1
    mode: str = "training"
    pipeline: str = "standard"
    dtype: str = "bfloat16"
    executor: str = "torch"
    slot_factor: float = 1.0
    scratch_factor: float = 8.0
    validate: str = "always"

    def __post_init__(self) -> None:
        for name in ("T", "D", "F", "E", "K", "ep", "layers"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name)))
        for name, known in (
            ("mode", MODES),
            ("pipeline", PIPELINES),
            ("dtype", DTYPES),
            ("executor", EXECUTORS),
            ("validate", VALIDATE),
        ):
            value = getattr(self, name)
            found = isinstance(value, str) and value in known
            _check(found, name, one_line(repr(value), 80), f"must be one of {', '.join(known)}")
        for name in ("slot_factor", "scratch_factor"):
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        _check(self.E % self.ep == 0, "E", self.E, f"must be divisible by ep={self.ep}")
        _check(self.K <= self.E, "K", self.K, f"must be at most E={self.E}")
        _check(
            0 <= self.slot_factor < 1e6,
            "slot_factor",
            self.slot_factor,
            "must not be negative, and below 1e6",
        )
        _check(
            0 < self.scratch_factor < 1e6,
            "scratch_factor",
            self.scratch_factor,
            "must be positive and below 1e6",
        )
        routes = self.ep * self.T * self.K
        _check(routes < 2**31, "ep*T*K", routes, "must fit 31 bits, as a route is one int32")

    @property
    def local_experts(self) -> int:
        return self.E // self.ep

    @property
    def training(self) -> bool:
        return self.mode == "training"

    @classmethod
    def from_case(cls, case: Case, **given: Any) -> "MoEConfig":
        """The context that runs a BF16 case of one of PIPELINES; `given` overrides."""
        _check(case.precision == "bf16", "precision", case.precision, "must be bf16 here")
        config = cls(
            T=case.T,
            D=case.D,
            F=case.F,
            E=case.E,
            K=case.K,
            ep=case.ep,
            layers=case.layers,
            mode=case.mode,
            pipeline=case.pipeline,
            slot_factor=case.slotFactor,
            scratch_factor=case.scratchFactor,
        )
        return replace(config, **given)


def runs(case: Case) -> bool:
    """Whether our layer runs a case's pipeline in its precision."""
    return case.precision in SYSTEMS[case.pipeline].tolerance


def _check(ok: bool, field: str, value: object, rule: str) -> None:
    if not ok:
        raise InputError(f"{field}={value} {rule}")
