"""Real routing traces, and what a better placement of experts would gain.

A trace has one row per layer and one column per expert: the routed rows that each expert received.
Nothing in a file is ever executed: CSV is text, and .npz is read without pickles.

Legend: L layers, E experts, ep ranks, E_local = E / ep.
"""

import csv
import heapq
import io
import math
import re
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import InputError, check_whole, shortened
from workbench.files import read_file

Ints = npt.NDArray[np.int64]
MAX_BYTES = 1 << 26
MAX_COUNT = 2**53
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf(inity)?)", re.A | re.I)
_INDEX_NAMES = (
    "",
    "layer",
    "layers",
    "layeridx",
    "layerindex",
    "layerid",
    "index",
    "idx",
    "id",
    "unnamed:0",
)
_CONVERT = {
    ".npy": "np.savez('trace.npz', counts=np.load('{}'))",
    ".pt": "np.savez('trace.npz', counts=torch.load('{}').numpy())",
    ".pth": "np.savez('trace.npz', counts=torch.load('{}').numpy())",
    ".json": "np.savez('trace.npz', counts=np.array(json.load(open('{}'))))",
    ".tsv": "pandas.read_csv('{}', sep='\\t').to_csv('trace.csv', index=False)",
    ".parquet": "pandas.read_parquet('{}').to_csv('trace.csv', index=False)",
}
"""Suffix -> the line of Python that makes a trace of such a file."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Rows per layer and expert, as a tuple per layer; `name` is the file's."""

    name: str
    counts: tuple[tuple[int, ...], ...]

    @property
    def layers(self) -> int:
        return len(self.counts)

    @property
    def experts(self) -> int:
        return len(self.counts[0])


def load_trace(path: str | Path) -> Trace:
    """The trace in a .csv or .npz file. Raises InputError naming file, place, value and rule."""
    return read_trace(Path(path).name, read_file(path, MAX_BYTES))


def read_trace(name: str, content: bytes) -> Trace:
    """The trace in a file's content; `name` decides how it is read. Raises InputError.

    An .npz holds one array [layers, experts], or one named `counts`. A .csv has a line for each
    layer, its counts separated by commas; what stands beside the counts is told apart like this:

    - Line 1 is a head if none of its cells is a number, or if it begins with an index's name and
      the others count up. The names of experts differ; if one ends in a number, all are the same
      word with numbers that count up: `expert_0,expert_1`.
    - Column 1 is an index if the head calls it `layer`, `index` or the like, or nothing. Its values
      differ, and numbers in it grow.
    - Numbers alone could be either, so a line 1 that counts up and has no name in it is refused,
      and so is a column 1 that does from 0 where no head says what it is.

    Numbers count up if they go on by one from 0, or from 1 where there are at least four.
    """
    readers = {".csv": _read_csv, ".npz": _read_npz}
    suffix = Path(name).suffix.lower()
    if suffix not in readers:
        how = _CONVERT.get(suffix)
        shown = f"; to convert: {how.format(name)}" if how else ""
        raise InputError(f"{name}: must end in {' or '.join(readers)}{shown}")
    if len(content) > MAX_BYTES:
        raise InputError(f"{name}: must have at most {MAX_BYTES} bytes")
    values = readers[suffix](name, content)
    if not values.size:
        raise InputError(f"{name}: shape={values.shape} must hold at least one layer and expert")
    for bad, rule in (
        (~np.isfinite(values), "must be finite"),
        (values < 0, "must not be negative"),
        (values != np.floor(values), "must be a whole number"),
        (values >= MAX_COUNT, "must be below 2**53"),
    ):
        if bad.any():
            layer, expert = np.argwhere(bad)[0]
            value = f"{values[layer, expert]:g}"
            raise InputError(f"{name}: layer {layer}, expert {expert}: count={value} {rule}")
    empty = np.flatnonzero(values.sum(axis=1) == 0)
    if empty.size:
        raise InputError(f"{name}: layer {empty[0]}: counts must not all be zero")
    return Trace(name=name, counts=tuple(map(tuple, values.astype(np.int64).tolist())))


def _read_csv(name: str, content: bytes) -> npt.NDArray[np.float64]:
    """Numbers of a CSV file, float64 [L, E], without its head and index."""
    rows = _cells(name, content)
    has_head, has_index = _head_and_index(name, rows) if rows else (False, False)
    body = rows[has_head:]
    if has_index:
        _check_index(name, [row[0].strip() for row in body])
        body = [row[1:] for row in body]
    if not body or not body[0]:
        raise InputError(f"{name}: must hold a line of counts for each layer")
    values = np.empty((len(body), len(body[0])))
    for layer, row in enumerate(body):
        if len(row) != len(body[0]):
            rule = f"must be {len(body[0])}, as in layer 0"
            raise InputError(f"{name}: layer {layer}: experts={len(row)} {rule}")
        for expert, text in enumerate(row):
            if not _is_number(text):
                place = f"layer {layer}, expert {expert}"
                raise InputError(f"{name}: {place}: count={text.strip()!r} must be a number")
        values[layer] = [float(text) for text in row]
    if has_head and len(rows[0]) != len(rows[1]):
        raise InputError(f"{name}: line 1 names {len(rows[0])} columns, layer 0 has {len(rows[1])}")
    return values


def _cells(name: str, content: bytes) -> list[list[str]]:
    """The lines of a CSV file that are not blank, as cells."""
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        for character, rule in (
            ("\r", "lines must end in \\n or \\r\\n, not in a bare \\r"),
            (
                "\t",
                "must be separated by commas, not tabs: pandas.read_csv(name, sep='\\t')"
                ".to_csv(new, index=False)",
            ),
            (
                ";",
                "must be separated by commas, not semicolons: pandas.read_csv(name, sep=';')"
                ".to_csv(new, index=False)",
            ),
        ):
            if character in text:
                line = text[: text.index(character)].count("\n") + 1
                raise InputError(f"{name}: line {line}: {rule}")
        return [row for row in csv.reader(io.StringIO(text), strict=True) if row]
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: is not CSV text: byte {error.start} is not UTF-8") from None
    except csv.Error as error:
        raise InputError(f"{name}: is not CSV text: {error}") from None


def _head_and_index(name: str, rows: list[list[str]]) -> tuple[bool, bool]:
    """Whether line 1 is a head and column 1 an index; InputError where that cannot be told."""
    first = [cell.strip() for cell in rows[0]]
    column = [row[0].strip() for row in rows[1:]]
    if all(map(_is_number, first)):
        if _counts_up(first):
            raise InputError(
                f"{name}: line 1 counts up from {first[0]}: if it is a head, name the columns"
                " (expert_0, expert_1, ...); if it is a layer, put such a head above it"
            )
        _check_plain_column(name, [first[0], *column])
        return False, False
    index = re.sub(r"[ _-]", "", first[0].lower()) in _INDEX_NAMES
    experts = first[index:]
    if any(map(_is_number, experts)):
        if not index or not _counts_up(experts, few=True):
            return False, False  # counts, one of which is no number
        return True, True
    ends = [re.fullmatch(r"(.*?)(\d{1,9})", cell) for cell in experts]
    if any(ends):
        stems = {end[1] for end in ends if end}
        numbers = [end[2] for end in ends if end]
        if not all(ends) or len(stems) > 1 or not _counts_up(numbers, few=True):
            raise InputError(
                f"{name}: line 1: names of experts must be one word with numbers that count up"
                f" (expert_0, expert_1, ...), after a column `layer` or none; found"
                f" {', '.join(experts)}"
            )
    elif len(set(experts)) < len(experts):
        twice = next(cell for cell in experts if experts.count(cell) > 1)
        raise InputError(f"{name}: line 1: column {twice!r} must not be there twice")
    elif not index:
        _check_plain_column(name, column)
    return True, index


def _check_plain_column(name: str, column: list[str]) -> None:
    if len(column) > 1 and all(map(_is_number, column)) and _counts_up(column, from_one=False):
        raise InputError(
            f"{name}: column 1 counts the lines from 0: if it is an index, give the file a head"
            " that calls it `layer`; if it holds counts, one with expert_0, expert_1, ..."
        )


def _check_index(name: str, labels: list[str]) -> None:
    last = -math.inf
    seen: set[str] = set()
    for line, label in enumerate(labels):
        if label in seen:
            raise InputError(
                f"{name}: layer={label!r} must not be there twice: a line for each layer, a column"
                " for each expert"
            )
        seen.add(label)
        if _is_number(label):
            if not float(label) > last:
                raise InputError(f"{name}: line {line}: layer={label} must be above {last:g}")
            last = float(label)


def _counts_up(texts: list[str], *, few: bool = False, from_one: bool = True) -> bool:
    """Whether the numbers go on by one from 0, or from 1 where they are four, or may be `few`."""
    try:
        found = [float(text) for text in texts]
    except ValueError:
        return False
    starts = [0] + [1] * (from_one and (few or len(found) > 3))
    return any(found == [start + n for n in range(len(found))] for start in starts)


def _is_number(text: str) -> bool:
    # float() also takes 1_000 and the digits of other scripts
    return _NUMBER.fullmatch(text.strip()) is not None


def _read_npz(name: str, content: bytes) -> npt.NDArray[np.float64]:
    """The array `counts`, or the only one, of an .npz file, float64 [L, E]."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = [m.filename.removesuffix(".npy") for m in archive.infolist()]
            key = names[0] if len(names) == 1 else "counts"
            if names.count(key) != 1:
                held = ", ".join(names) or "none"
                raise InputError(f"{name}: must hold one array, or one named counts; holds {held}")
            member = archive.infolist()[names.index(key)]
            with archive.open(member) as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise InputError(f"{name}: {key} must have at most {MAX_BYTES} bytes")
            array = _read_array(data)
    except InputError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds for a malformed file
        reason = shortened(next(iter(str(error).splitlines()), type(error).__name__), 160)
        raise InputError(f"{name}: must hold one plain array: {reason}") from None
    if array.dtype.kind not in "iuf":
        raise InputError(f"{name}: dtype={array.dtype} must be a number type")
    if array.ndim != 2:
        raise InputError(f"{name}: ndim={array.ndim} must be 2: layers, experts")
    return array.astype(np.float64)


def _read_array(member: bytes) -> npt.NDArray[Any]:
    """An .npy member; refused before memory is taken if its header claims more than it holds."""
    stream = io.BytesIO(member)
    major = np.lib.format.read_magic(stream)[0]
    read = (
        np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    if math.prod(shape) * dtype.itemsize > len(member):
        raise ValueError(f"its header claims shape {shape}, more than the file holds")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def scaled_counts(trace: Trace, rows: int) -> Ints:
    """The trace's shares of `rows` routed rows per layer, int64 [L, E]; each layer adds up exactly
    (largest remainders first)."""
    check_whole("rows", rows, 0, MAX_COUNT)
    counts = np.array(trace.counts, np.float64)
    share = counts / counts.sum(axis=1, keepdims=True) * rows
    whole = np.floor(share).astype(np.int64)
    for layer, missing in enumerate(rows - whole.sum(axis=1)):
        order = np.argsort(-(share[layer] - whole[layer]), kind="stable")
        whole[layer, order[:missing]] += 1
    return whole


@lru_cache(maxsize=256)
def placed_rows(rows_by_expert: tuple[int, ...], ep: int) -> tuple[int, ...]:
    """Rows per rank [ep] after placing the experts anew, longest processing time first.

    Experts are taken from the fullest down, each to the emptiest rank that still has room for one:
    a rank holds E/ep experts, as before. If that ends with a busier rank than experts in order
    give, the order stays: a placement is only changed for a gain.
    """
    ep, E = check_whole("ep", ep), len(rows_by_expert)
    if not E or E % ep:
        raise InputError(f"E={E} must be divisible by ep={ep}")
    E_local = E // ep
    ranks = [(0, rank) for rank in range(ep)]
    held, rows = [0] * ep, [0] * ep
    for load in sorted(rows_by_expert, reverse=True):
        total, rank = heapq.heappop(ranks)
        rows[rank] = total + load
        held[rank] += 1
        if held[rank] < E_local:
            heapq.heappush(ranks, (rows[rank], rank))
    in_order = np.reshape(rows_by_expert, (ep, E_local)).sum(axis=1)
    return tuple(rows) if max(rows) <= in_order.max() else tuple(in_order.tolist())
