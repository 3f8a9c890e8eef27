"""Real routing traces, and what a better placement of experts would gain.

A trace has one row per layer and one column per expert: the routed rows that each expert received.
Nothing in a file is ever executed: CSV is text, and .npz is read without pickles.

Legend: L layers, E experts, ep ranks, E_local = E / ep.
"""

import csv
import heapq
import io
import math
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import InputError

Ints = npt.NDArray[np.int64]
MAX_BYTES = 1 << 26
MAX_COUNT = 2**53


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
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path.name}: size={path.stat().st_size} must be at most {MAX_BYTES}")
        return read_trace(path.name, path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def read_trace(name: str, content: bytes) -> Trace:
    """The trace in a file's content; `name` decides how it is read. Raises InputError."""
    readers = {".csv": _read_csv, ".npz": _read_npz}
    suffix = Path(name).suffix.lower()
    if suffix not in readers:
        raise InputError(f"{name}: must end in {' or '.join(readers)}")
    if len(content) > MAX_BYTES:
        raise InputError(f"{name}: size={len(content)} must be at most {MAX_BYTES}")
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
    """Numbers of a CSV file, float64 [L, E]; a head line and a column `layer` are left out."""
    try:
        rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8-sig"))) if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{name}: is not CSV text: {error}") from None
    head = rows[0] if rows and not any(map(_is_number, rows[0])) else None
    start = int(bool(head) and head[0].strip().lower() == "layer") if head else 0
    body = [row[start:] for row in rows[bool(head) :]]
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
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_npz(name: str, content: bytes) -> npt.NDArray[np.float64]:
    """The array `counts`, or the only one, of an .npz file, float64 [L, E]."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            found = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            key = next(iter(found)) if len(found) == 1 else "counts"
            if key not in found:
                held = ", ".join(found) or "none"
                raise InputError(f"{name}: must hold one array, or one named counts; holds {held}")
            if found[key].file_size > MAX_BYTES:
                raise InputError(f"{name}: size={found[key].file_size} must be at most {MAX_BYTES}")
            array = _read_array(archive.read(found[key]))
    except InputError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds for a malformed file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
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
    E_local = len(rows_by_expert) // ep
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
