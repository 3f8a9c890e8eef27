"""What a context of ours allocates: one arena per rank, and where everything lies in it.

Pure arithmetic, without torch. The arena is symmetric: every rank has the same regions at the
same offsets, so a peer's buffer is its arena's base plus our own offset. In order: words, what
each layer keeps, what a call needs, the activation slot (grows upward, shared by the layers, soft:
a layer that does not fit is recomputed), and the scratch frame of the layer that runs (hard).

Legend: T tokens per rank, D hidden, F expert width, E experts, e = E / ep, K experts per token,
P = ep ranks, R rows that a rank can receive, N = T * K.
"""

import math
from dataclasses import dataclass

from workbench.kernels.words import (
    ALIGNMENT_BYTES,
    DECIDE_WORDS,
    HEAD_WORDS,
    PEAK_WORDS,
    TEXT_BYTES,
    aligned,
    operand_offset,
)
from workbench.moe.config import DTYPES, MoEConfig
from workbench.moe.pipelines.parts import Buffer, Operand, load_pipeline
from workbench.systems import SYSTEMS

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
    """The arena of one rank: `regions` by name, the `operands` that a layer keeps, one behind the
    other in the slot or the scratch frame, and the figures that ops are given.

    `entries` counts the layers that can be held at once, plus one for calls without gradient in
    training. A held layer of R rows takes `saved_bytes(R)` of the slot.
    """

    config: MoEConfig
    regions: dict[str, Region]
    operands: tuple[Operand, ...]
    arena_bytes: int
    rows_available: int
    entries: int

    @property
    def slot_bytes(self) -> int:
        return self.regions["slot"].nbytes

    def saved_bytes(self, rows: int) -> int:
        """Bytes of the operands that a layer keeps of `rows` rows."""
        return operand_offset(rows, self.row_bytes)

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of each operand."""
        return tuple(operand.width * ITEM_BYTES[operand.dtype] for operand in self.operands)

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
            f" layers at balanced load ({balanced:,} B each: "
            + ", ".join(operand.name for operand in self.operands)
            + "); what does not fit is recomputed",
        ]
        return "\n".join(lines)


def plan_ours(config: MoEConfig) -> OursPlan:
    """The arena of one rank of a context."""
    c, pipeline = config, load_pipeline(config.pipeline)
    N = c.T * c.K
    R = min(c.ep * c.T * min(c.K, c.local_experts), math.ceil(c.scratch_factor * N))
    entries = c.layers + 1 if c.training else 1
    operands = pipeline.operands(c)
    row_bytes = [operand.width * ITEM_BYTES[operand.dtype] for operand in operands]
    regions: dict[str, Region] = {}
    end = 0

    def add(part: str, buffer: Buffer, entry: str = "", alias: str | None = None) -> None:
        nonlocal end
        offset = end if alias is None else regions[alias].offset
        region = Region(
            name=buffer.name + entry,
            part=part,
            shape=buffer.shape,
            dtype=buffer.dtype,
            offset=offset,
            alias=alias,
        )
        if alias is not None and region.nbytes > regions[alias].nbytes:
            raise AssertionError(f"{region.name} does not fit {alias}")
        regions[region.name] = region
        if alias is None:
            end = aligned(end + region.nbytes)

    for buffer in (
        Buffer("words", "head", (HEAD_WORDS,), "int64"),
        Buffer("words", "text", (TEXT_BYTES,), "uint8"),
        Buffer("words", "first_error", (DECIDE_WORDS,), "int64"),
        Buffer("words", "error_text", (TEXT_BYTES,), "uint8"),
        Buffer("words", "peaks", (PEAK_WORDS,), "int64"),
        Buffer("words", "decisions", (entries, DECIDE_WORDS), "int64"),
    ):
        add("words", buffer)
    wanted = list(pipeline.regions(c, R))
    for buffer in wanted:
        if buffer.part == "call":
            add("call", buffer)
    for i in range(entries):
        # The last entry of a training context keeps nothing: no backward is at work beside it.
        transient = c.training and i == c.layers
        for buffer in wanted:
            if buffer.part == "layer":
                add("layers", buffer, f".{i}", buffer.alias if transient else None)
    held = operand_offset(R, row_bytes)
    if not c.training:
        slot = 0
    elif SYSTEMS[c.pipeline].keeps == "slot":
        slot = math.floor(c.slot_factor * c.layers * operand_offset(N, row_bytes))
    else:
        slot = c.layers * held
    add("slot", Buffer("slot", "slot", (slot,), "uint8"))
    add("scratch", Buffer("scratch", "operands", (held,), "uint8"))
    for buffer in wanted:
        if buffer.part == "scratch":
            add("scratch", buffer)
    # Every peer's rows form one table with a whole number of rows from rank to rank.
    unit = math.lcm(ALIGNMENT_BYTES, c.D * ITEM_BYTES[c.dtype])
    return OursPlan(
        config=c,
        regions=regions,
        operands=operands,
        arena_bytes=-(-end // unit) * unit,
        rows_available=R,
        entries=entries,
    )
