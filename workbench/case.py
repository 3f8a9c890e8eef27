"""A case: one MoE workload on one system; the id grammar; the matrix of the published study.

Legend: T tokens per GPU, D hidden width, E routed experts in all, K experts per token (top-k),
F expert width, ep expert-parallel degree, E_local = E / ep. Field names are those of the
published result file, so a case, a record and a table row say the same thing with the same word.

An id is `{backend}-{mode}-ep{ep}-{precision}-{pipeline}-{category}-{label}-F{F}`, where label is
`i<imbalance>` or the name of a load profile. What the published grammar leaves out is appended
where it differs from the study: `-T512`, `-D1024`, `-E32`, `-K2`, `-S0`, `-slot1`, `-scratch4`.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from workbench.errors import InputError, check_number, check_whole, one_line
from workbench.systems import MODES, PIPELINES, RUN_HERE, SYSTEMS, TRIPLES

STUDY_SHAPE: Mapping[str, int] = {"T": 2048, "D": 7168, "E": 384, "K": 6, "sharedExperts": 1}
"""Shape of the published GB300 study (2026-10-16); every one of its cases has it."""

PROFILES: Mapping[str, tuple[float, ...]] = {
    "A": (7.5, 2.5, 4.5, 0.6, 1.8, 0.9, 2.2, 0.7, 1.6, 0.8),
    "B": (0.7, 5.8, 1.2, 0.6, 3.6, 1, 7.2, 0.8, 2.3, 0.7),
}
"""Imbalance factor of each of 10 layers in the study's packing cases."""

PACKING_SLOT_FACTOR = 2.5
"""slotFactor of the study's packing cases."""

LOCAL_SHAPE: Mapping[str, int] = {"T": 128, "D": 128, "E": 8, "K": 2, "sharedExperts": 1}
"""Shape of the local matrix: small enough for two CPU cores."""

CATEGORIES = ("single_layer", "width", "packing")

_SUFFIXES = {
    "T": "T",
    "D": "D",
    "E": "E",
    "K": "K",
    "S": "sharedExperts",
    "slot": "slotFactor",
    "scratch": "scratchFactor",
}
_ID = re.compile(
    r"(?P<backend>\w+)-(?P<mode>\w+)-ep(?P<ep>\d{1,18})-(?P<precision>\w+)-(?P<pipeline>\w+)"
    r"-(?P<category>\w+)-(?:i(?P<imbalance>\d+(?:\.\d+)?)|(?P<profile>[A-Za-z]\w*))"
    r"-F(?P<F>\d{1,18})(?P<rest>(?:-(?:(?:T|D|E|K|S)\d{1,18}|(?:slot|scratch)\d+(?:\.\d+)?))*)",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload on one system. Checked when built; raises InputError.

    `imbalance` is the load of rank 0 over the mean load and applies to a case without a profile.
    `factors` has one such factor per layer and `layers` is their number; both follow from
    `profile` (a name in PROFILES) or `imbalance`, and are given only with a profile of the
    user's own. `slotFactor` and `scratchFactor` size the activation slot and the scratch frame
    of dist_moe in training, and the rows that mok retains (slotFactor), as multiples of the
    balanced load. By default slotFactor is 2.5 with a profile, as in the study's packing, and
    scratchFactor without, so that a layer keeps all that it can receive: by their peak memory and
    backward time the study's single layers do.
    """

    backend: str
    mode: str
    ep: int
    precision: str
    pipeline: str
    category: str = "single_layer"
    F: int = 3072
    imbalance: float = 1.0
    profile: str | None = None
    layers: int = 0
    factors: tuple[float, ...] = ()
    T: int = STUDY_SHAPE["T"]
    D: int = STUDY_SHAPE["D"]
    E: int = STUDY_SHAPE["E"]
    K: int = STUDY_SHAPE["K"]
    sharedExperts: int = STUDY_SHAPE["sharedExperts"]
    slotFactor: float = math.nan
    scratchFactor: float = 8.0

    def __post_init__(self) -> None:
        self._set_types()
        _one_of("backend", self.backend, PIPELINES)
        _one_of(f"pipeline of {self.backend}", self.pipeline, PIPELINES[self.backend])
        allowed = PIPELINES[self.backend][self.pipeline]
        _one_of(f"precision of {self.backend} {self.pipeline}", self.precision, allowed)
        _one_of("mode", self.mode, MODES)
        _one_of(f"mode of {self.pipeline}", self.mode, SYSTEMS[self.pipeline].modes)
        _one_of("category", self.category, CATEGORIES)
        _check(self.scratchFactor > 0, "scratchFactor", self.scratchFactor, "must be positive")
        if math.isnan(self.slotFactor):
            object.__setattr__(self, "slotFactor", self._default("slotFactor"))
        _check(self.slotFactor >= 0, "slotFactor", self.slotFactor, "must not be negative")
        _check(self.E % self.ep == 0, "E", self.E, f"must be divisible by ep={self.ep}")
        _check(self.K <= self.E, "K", self.K, f"must be at most E={self.E}")
        rows = self.ep * self.T * self.K
        _check(rows < 2**53, "ep*T*K", rows, "must be below 2**53")
        _check(
            (self.profile is not None) == (self.category == "packing"),
            "profile",
            self.profile,
            f"must {'' if self.category == 'packing' else 'not '}be given for {self.category}",
        )
        if not self.factors:
            if self.profile is None:
                factors: tuple[float, ...] = (float(self.imbalance),)
            else:
                _one_of("profile (or give its factors)", self.profile, PROFILES)
                factors = PROFILES[self.profile]
            object.__setattr__(self, "factors", factors)
        if not self.layers:
            object.__setattr__(self, "layers", len(self.factors))
        _check(
            self.layers == len(self.factors),
            "layers",
            self.layers,
            f"must be the number of layer factors, {len(self.factors)}",
        )
        for factor in self.factors:
            check_factor(factor, ep=self.ep, E=self.E, K=self.K)

    def _set_types(self) -> None:
        """Plain Python numbers and a tuple, whatever gave them; raises InputError."""
        plain: dict[str, Any] = {}
        for name in ("ep", "F", "T", "D", "E", "K"):
            plain[name] = check_whole(name, getattr(self, name))
        for name in ("sharedExperts", "layers"):
            plain[name] = check_whole(name, getattr(self, name), 0)
        for name in ("imbalance", "scratchFactor"):
            plain[name] = check_number(name, getattr(self, name))
        if not (isinstance(self.slotFactor, float) and math.isnan(self.slotFactor)):
            plain["slotFactor"] = check_number("slotFactor", self.slotFactor)
        for name in ("slotFactor", "scratchFactor"):
            _check(plain.get(name, 0) <= 1e6, name, plain.get(name), "must be at most 1e6")
        if self.profile is not None and not isinstance(self.profile, str):
            raise InputError(f"profile={one_line(repr(self.profile), 80)} must be a text or None")
        if isinstance(self.factors, str) or not isinstance(self.factors, Iterable):
            shown = one_line(repr(self.factors), 80)
            raise InputError(f"factors={shown} must be a sequence of numbers")
        plain["factors"] = tuple(
            check_number(f"factors[{n}]", factor) for n, factor in enumerate(self.factors)
        )
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @property
    def label(self) -> str:
        return self.profile if self.profile is not None else f"i{self.imbalance:g}"

    @property
    def id(self) -> str:
        head = (
            f"{self.backend}-{self.mode}-ep{self.ep}-{self.precision}-{self.pipeline}"
            f"-{self.category}-{self.label}-F{self.F}"
        )
        return head + "".join(
            f"-{short}{getattr(self, name):g}"
            for short, name in _SUFFIXES.items()
            if getattr(self, name) != self._default(name)
        )

    def _default(self, name: str) -> Any:
        if name == "slotFactor":
            return self.scratchFactor if self.profile is None else PACKING_SLOT_FACTOR
        return _DEFAULTS[name]

    @classmethod
    def from_id(cls, text: str, **given: Any) -> "Case":
        """The case that `text` names; `given` supplies fields that an id does not state
        (the shape, a profile's own factors). Raises InputError on text that is no id."""
        return cls(**{**given, **parse_id(text)})


_DEFAULTS = {f.name: f.default for f in fields(Case)}


def parse_id(text: str) -> dict[str, Any]:
    """The fields that an id states, by name, unchecked. Raises InputError on text that is no id."""
    match = _ID.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(
            f"id={one_line(repr(text), 160)} must read {{backend}}-{{mode}}-ep{{ep}}-"
            "{precision}-{pipeline}-{category}-{i<imbalance>|<profile>}-F{F}"
        )
    stated: dict[str, Any] = {k: v for k, v in match.groupdict().items() if v is not None}
    for part in stated.pop("rest").split("-")[1:]:
        short, number = re.fullmatch(r"([A-Za-z]+)([\d.]+)", part).groups()  # type: ignore[union-attr]
        if _SUFFIXES[short] in stated:
            raise InputError(f"id={one_line(repr(text), 160)} must state {short} once")
        stated[_SUFFIXES[short]] = float(number) if short in ("slot", "scratch") else int(number)
    for name in ("ep", "F"):
        stated[name] = int(stated[name])
    if "imbalance" in stated:
        stated["imbalance"] = float(stated["imbalance"])
    return stated


def check_factor(factor: float, *, ep: int, E: int, K: int) -> None:
    """Raises InputError unless a rank of `ep` can receive `factor` times the mean load.

    A token's K experts are distinct, so at most min(K, E/ep) of them lie on one rank.
    """
    ep, E, K = (check_whole(name, value) for name, value in (("ep", ep), ("E", E), ("K", K)))
    check_number("imbalance", factor)
    largest = ep * min(K, E // ep) / K
    if ep == 1:
        _check(factor == 1, "imbalance", factor, "must be 1 at ep=1")
    rule = f"must lie between 0 and {largest:g}, ep*min(K, E/ep)/K at ep={ep}, E={E}, K={K}"
    _check(0 <= factor <= largest, "imbalance", factor, rule)


def case_table(cases: Iterable[Case]) -> pd.DataFrame:
    """One row per case with every field of Case and its id as columns."""
    names = [f.name for f in fields(Case)]
    rows = [{"id": case.id} | {name: getattr(case, name) for name in names} for case in cases]
    return pd.DataFrame(rows, columns=["id", *names])


def reference_matrix() -> list[Case]:
    """The 110 cases of the published GB300 study, in the order of its file."""
    cases = []
    for mode, eps, width_ep in (("inference", (8, 16), 16), ("training", (32, 64), 64)):
        for ep in eps:
            for backend, pipeline, precision in TRIPLES:
                if not SYSTEMS[pipeline].published:
                    continue
                system: dict[str, Any] = {
                    "backend": backend,
                    "mode": mode,
                    "ep": ep,
                    "precision": precision,
                    "pipeline": pipeline,
                }
                cases += [Case(**system, imbalance=float(i)) for i in (1, 4, 8)]
                if ep == width_ep:
                    cases += [Case(**system, category="width", F=F) for F in (1536, 3072, 6144)]
                if mode == "training":
                    cases += [
                        Case(**system, category="packing", profile=profile) for profile in PROFILES
                    ]
    return sorted(
        cases, key=lambda c: (c.mode, str(c.ep), c.precision, c.pipeline, c.category, c.label, c.F)
    )


def scaled_profile(name: str, ep: int) -> tuple[float, ...]:
    """A profile of the study for a small EP: 1 stays 1 and factor 8, its hottest load, becomes ep,
    on a straight line, to 3 decimals."""
    _one_of("profile", name, PROFILES)
    check_whole("ep", ep)
    return tuple(round(1 + (factor - 1) * (ep - 1) / 7, 3) for factor in PROFILES[name])


def local_matrix(ep: int = 2, systems: Iterable[tuple[str, str, str]] = RUN_HERE) -> list[Case]:
    """What runs on any machine: per system (backend, pipeline, precision) and mode, imbalance 1 and
    `ep` and two widths; in training 10 layers with the study's profiles scaled to `ep`, in a slot
    of factor 2.5 and again in one that is too small, for a system that has a slot; then a few
    cases at EP 1, without which no model can be calibrated."""
    check_whole("ep", ep)
    cases = []
    for backend, pipeline, precision in systems:
        has_slot = SYSTEMS[pipeline].keeps == "slot"
        for mode in SYSTEMS[pipeline].modes:
            system: dict[str, Any] = {
                "backend": backend,
                "mode": mode,
                "ep": ep,
                "precision": precision,
                "pipeline": pipeline,
                "F": 128,
                **LOCAL_SHAPE,
            }
            cases += [Case(**system, imbalance=float(i)) for i in dict.fromkeys((1, ep))]
            cases += [Case(**system | {"F": F}, category="width") for F in (64, 128)]
            if mode == "training":
                slots = (2.5, 0.5) if has_slot else (2.5,)
                cases += [
                    Case(
                        **system,
                        category="packing",
                        profile=f"{name}{ep}",
                        slotFactor=slot,
                        factors=scaled_profile(name, ep),
                    )
                    for slot in slots
                    for name in PROFILES
                ]
            if has_slot and ep > 1:
                cases += [Case(**system | {"ep": 1, "F": F}, category="width") for F in (64, 128)]
    return sorted(cases, key=lambda case: case.ep)


def _check(ok: bool, field: str, value: object, rule: str) -> None:
    if not ok:
        raise InputError(f"{field}={value} {rule}")


def _one_of(field: str, value: str, known: Collection[str]) -> None:
    found = isinstance(value, str) and value in known
    shown = one_line(repr(value), 80)
    _check(found, field, shown, f"must be one of {', '.join(known)}")
