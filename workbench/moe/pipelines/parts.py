"""What a pipeline is made of: the buffers it wants, what its layers keep, and its phases: what each
rank runs alone, and what happens between.

Imports no torch, as plans are made from it without.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from workbench.moe.config import MoEConfig
from workbench.systems import SYSTEMS

if TYPE_CHECKING:
    from workbench.moe.step import Step


@dataclass(frozen=True)
class Buffer:
    """A region that a pipeline wants in the arena: `shape` in elements of `dtype`. `part` is call
    (one for all layers), layer (one for each layer that can be held) or scratch (of the layer that
    runs). One with `alias` lies in that other one, in the entry of a layer that keeps nothing."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    alias: str | None = None


@dataclass(frozen=True)
class Operand:
    """Rows that a layer keeps for backward: [rows, width] of `dtype`."""

    name: str
    width: int
    dtype: str


@dataclass(frozen=True)
class Phase:
    """Launches of one rank that need no peer to come along."""

    name: str
    run: "Callable[[Step], None]"


@dataclass(frozen=True)
class Barrier:
    """Every rank has ended the phases before."""

    name: str


@dataclass(frozen=True)
class Gather:
    """all[p] of every rank = own of rank p, for each pair of regions (own, all)."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class AllToAll:
    """Rows of region `send` go to the ranks that own their experts and arrive in `receive`; or,
    with `back`, from there to where they came from."""

    send: str
    receive: str
    back: bool = False


Part = Phase | Barrier | Gather | AllToAll


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline as its module states it, in a constant PIPELINE. `operands` are what a layer keeps
    for backward; `regions(config, rows)` what it needs besides, for the most rows of a rank.
    Where its system keeps a slot, backward produces again what did not fit; where it keeps all,
    the slot holds every layer at the most rows."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    operands: Callable[[MoEConfig], tuple[Operand, ...]]
    regions: Callable[[MoEConfig, int], Iterable[Buffer]]


def load_pipeline(name: str) -> Pipeline:
    """The pipeline of a name in `config.PIPELINES`."""
    found: Pipeline = import_module(SYSTEMS[name].module).PIPELINE
    return found
