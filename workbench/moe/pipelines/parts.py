"""What a pipeline is made of: phases that each rank runs alone, and what happens between them."""

from collections.abc import Callable
from dataclasses import dataclass

from workbench.moe.step import Step


@dataclass(frozen=True)
class Phase:
    """Launches of one rank that need no peer to come along."""

    name: str
    run: Callable[[Step], None]


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
Pipeline = tuple[Part, ...]
