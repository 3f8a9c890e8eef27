"""What a context of ours allocates: one arena per rank, and where everything lies in it.

Pure arithmetic, without torch. The arena is symmetric: every rank has the same regions at the
same offsets, so a peer's buffer is its arena's base plus our own offset. In order: words, what
each layer keeps, what a call needs, the activation slot (grows upward, shared by the layers, soft:
a layer that does not fit is recomputed), and the scratch frame of the layer that runs (hard).

Legend: T tokens per rank, D hidden, F expert width, E experts, e = E / ep, K experts per token,
P = ep ranks, R rows that a rank can receive, N = T * K.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.kernels.words import DECIDE_WORDS, HEAD_WORDS, PEAK_WORDS, TEXT_BYTES
from workbench.moe.config import DTYPES, MoEConfig

ALIGNMENT_BYTES = 128
ITEM_BYTES = {"uint8": 1, "int32": 4, "int64": 8, **DTYPES}


@dataclass(frozen=True, kw_only=True)
class Region:
    """A buffer in the arena. `offset` in bytes; `shape` in elements of `dtype`.

    `part` is words, layers, call, slot or scratch. A region with `alias` lies in that other one.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    alias: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class OursPlan:
    """The arena of one rank: `regions` by name, and the figures that ops are given.

    `entries` counts the layers that can be held at once, plus one for calls without gradient in
    training. A held layer of R rows takes `saved_bytes(R)` of the slot.
    """

    config: MoEConfig
    regions: dict[str, Region]
    arena_bytes: int
    rows_available: int
    entries: int

    @property
    def slot_bytes(self) -> int:
        return self.regions["slot"].nbytes

    def saved_bytes(self, rows: int) -> int:
        """Slot bytes of a layer that received `rows` rows: gathered x, and gate and up output."""
        return saved_bytes(self.config, rows)

    def part_bytes(self) -> dict[str, int]:
        """Bytes per part, aliases not counted twice, padding as its own; sums to the arena."""
        parts: dict[str, int] = {}
        for region in self.regions.values():
            if region.alias is None:
                parts[region.part] = parts.get(region.part, 0) + region.nbytes
        return parts | {"padding": self.arena_bytes - sum(parts.values())}

    def explain(self) -> str:
        """The arena as text: regions with offsets and sizes, then what the bounds mean."""
        c = self.config
        lines = [
            f"{r.offset:>14,} {r.nbytes:>14,} B  {r.part:<8} {r.name} {list(r.shape)} {r.dtype}"
            + (f" (in {r.alias})" if r.alias else "")
            for r in self.regions.values()
        ]
        balanced = self.saved_bytes(c.T * c.K)
        lines += [
            f"arena {self.arena_bytes:,} B per rank; rows available {self.rows_available:,}"
            f" (scratch_factor={c.scratch_factor:g} of T*K={c.T * c.K:,})",
            f"slot {self.slot_bytes:,} B holds {self.slot_bytes / balanced:.2f} of {c.layers}"
            f" layers at balanced load ({balanced:,} B each); what does not fit is recomputed",
        ]
        return "\n".join(lines)


def saved_bytes(config: MoEConfig, rows: int) -> int:
    """Slot bytes of a layer of `rows` rows in training: x [rows, D] and h1 [rows, 2F]."""
    item = DTYPES[config.dtype]
    return _aligned(rows * config.D * item) + _aligned(rows * 2 * config.F * item)


def plan_ours(config: MoEConfig) -> OursPlan:
    """The arena of one rank of a context."""
    c = config
    item = DTYPES[c.dtype]
    N, e, P = c.T * c.K, c.local_experts, c.ep
    most = P * c.T * min(c.K, e)
    R = min(most, math.ceil(c.scratch_factor * N))
    entries = c.layers + 1 if c.training else 1
    plan: dict[str, Region] = {}
    end = 0

    def add(
        part: str, name: str, shape: Iterable[int], dtype: str, alias: str | None = None
    ) -> None:
        nonlocal end
        offset = end if alias is None else plan[alias].offset
        region = Region(name=name, part=part, shape=tuple(shape), dtype=dtype,
                        offset=offset, alias=alias)  # fmt: skip
        if alias is not None and region.nbytes > plan[alias].nbytes:
            raise AssertionError(f"{name} does not fit {alias}")
        plan[name] = region
        if alias is None:
            end = _aligned(end + region.nbytes)

    add("words", "head", [HEAD_WORDS], "int64")
    add("words", "text", [TEXT_BYTES], "uint8")
    add("words", "first_error", [DECIDE_WORDS], "int64")
    add("words", "error_text", [TEXT_BYTES], "uint8")
    add("words", "peaks", [PEAK_WORDS], "int64")
    add("words", "decisions", [entries, DECIDE_WORDS], "int64")
    add("call", "ids_TK", [c.T, c.K], "int32")
    add("call", "rows_TKD", [N, c.D], c.dtype)
    if c.training:
        add("call", "dy_TD", [c.T, c.D], c.dtype)
        add("call", "dscores_N1", [N, 1], "float32")
    for i in range(entries):
        # The last entry of a training context keeps nothing: no backward is at work beside it.
        transient = c.training and i == c.layers
        add("layers", f"x_TD.{i}", [c.T, c.D], c.dtype, "dy_TD" if transient else None)
        add("layers", f"scores_N1.{i}", [N, 1], "float32")
        add("layers", f"rank_R.{i}", [R], "int32")
        add("layers", f"slot_R.{i}", [R], "int32")
        add("layers", f"starts_e.{i}", [e + 1], "int64")
        add("layers", f"counts_PE.{i}", [P, c.E], "int64")
    if c.pipeline == "alltoall":
        add("call", "heads_PH", [P, HEAD_WORDS], "int64")
        add("call", "texts_PB", [P, TEXT_BYTES], "uint8")
        add("call", "ids_PTK", [P, c.T, c.K], "int32")
        add("call", "send_ND", [N, c.D], c.dtype)
        add("call", "send_N1", [N, 1], "float32")
        add("call", "received_RD", [R, c.D], c.dtype)
        add("call", "received_R1", [R, 1], "float32")
        for i in range(entries):
            add("layers", f"scores_PN1.{i}", [P, N, 1], "float32")
            add("layers", f"order_N.{i}", [N], "int64")
            add("layers", f"position_R.{i}", [R], "int64")
    if not c.training:
        slot = 0
    elif c.pipeline == "alltoall":
        slot = c.layers * saved_bytes(c, R)
    else:
        slot = math.floor(c.slot_factor * c.layers * saved_bytes(c, N))
    add("slot", "slot", [slot], "uint8")
    add("scratch", "x_RD", [R, c.D], c.dtype)
    add("scratch", "h1_R2F", [R, 2 * c.F], c.dtype)
    add("scratch", "act_RF", [R, c.F], c.dtype)
    if c.training:
        add("scratch", "g_RF", [R, c.F], c.dtype)
        add("scratch", "rows_RD", [R, c.D], c.dtype)
    # Every peer's rows form one table with a whole number of rows from rank to rank.
    unit = math.lcm(ALIGNMENT_BYTES, c.D * item)
    return OursPlan(
        config=c, regions=plan, arena_bytes=-(-end // unit) * unit, rows_available=R,
        entries=entries,
    )  # fmt: skip


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
