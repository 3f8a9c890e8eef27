"""Seeded damage to valid inputs: to what a document says, to its text and to its bytes."""

import copy
import json
import random
import re
from typing import Any

EXTREMES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    0.5,
    -0.0,
    1e-308,
    1e308,
    2**31,
    2**53 + 1,
    2**63,
    -(2**63),
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x",
    "5",
    "NaN",
    "\n",
    "\x00",
    "\ud800",
    "é\u2028" * 9,
    "x" * 3000,
    [],
    {},
    [1],
    [None],
    {"a": 1},
    [[[[]]]],
    [1, 0.5, "x"],
)
TOKENS = (
    "",
    "0",
    "-1",
    "1e999",
    "nan",
    "9" * 400,
    "1_0",
    "0x10",
    "\t",
    ";",
    ",",
    "\r",
    "\n",
    '"',
    "'",
    "[",
    "]",
    "{",
    "}",
    ":",
    "=",
    "#",
    "&a",
    "*a",
    "<<",
    "!!python/object:os.system",
    "true",
    "null",
    "é",
    "\u0661",
    "\x00",
    "\ufeff",
    "layer",
    "expert_0",
    "x" * 600,
    "2020-99-99",
    "[" * 300,
    "[" * 20_000,
)


def document(rng: random.Random, valid: Any) -> Any:
    """A copy of a document of lists and dicts with one to three of its parts changed."""
    made = {"": copy.deepcopy(valid)}
    for _ in range(rng.randint(1, 3)):
        places = list(_places(made))
        holder, key = rng.choice(places)
        change = rng.randrange(8)
        if change == 0 and holder is not made:
            del holder[key]
        elif change == 1 and isinstance(holder, dict) and holder is not made:
            holder[rng.choice(["", "x", "é", "id", key + "s"])] = holder.pop(key)
        elif change == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif change == 3:
            other, there = rng.choice(places)
            holder[key] = (
                copy.deepcopy(other[there])
                if there in range(len(other)) or (isinstance(other, dict) and there in other)
                else None
            )
        elif change == 4 and isinstance(holder[key], int | float):
            try:
                holder[key] = holder[key] * rng.choice([-1, 0, 10, 1e6, 1e300, 0.5])
            except OverflowError:
                holder[key] = None
        elif change == 5:
            holder[key] = rng.choice([str(holder[key])[:200], [holder[key]], {"x": holder[key]}])
        else:
            holder[key] = copy.deepcopy(rng.choice(EXTREMES))
    return made[""]


def _places(value: Any) -> Any:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def text(rng: random.Random, valid: str) -> str:
    """A text with one to three of its words, signs or lines changed, dropped or given twice."""
    made = valid
    for _ in range(rng.randint(1, 3)):
        parts = (
            made.splitlines(keepends=True)
            if rng.random() < 0.3
            else re.findall(r"[A-Za-z_]+|[\d.]+|\s+|.", made, re.S)
        )
        if not parts:
            return rng.choice(TOKENS)
        at = rng.randrange(len(parts))
        change = rng.randrange(5)
        if change == 0:
            del parts[at]
        elif change == 1:
            parts.insert(at, parts[at])
        elif change == 2:
            other = rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif change == 3:
            parts.insert(at, rng.choice(TOKENS))
        else:
            parts[at] = rng.choice(TOKENS)
        made = "".join(parts)
    return made


def content(rng: random.Random, valid: bytes) -> bytes:
    """Bytes cut short, changed, added to, in another encoding, or not of this kind at all."""
    change = rng.randrange(9)
    at = rng.randrange(len(valid) + 1)
    if change == 0:
        return valid[:at]
    if change == 1:
        return valid[:at] + rng.randbytes(rng.randint(1, 20)) + valid[at:]
    if change == 2:
        return valid[:at] + valid[at + rng.randint(1, 40) :]
    if change == 3:
        return valid.decode("utf-8", "replace").encode(
            rng.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]), "replace"
        )
    if change == 4:
        return rng.randbytes(rng.randint(0, 200))
    if change == 5:
        return valid[:at] + b"9" * rng.choice([20, 5000]) + valid[at:]
    if change == 6:
        return valid[:at] + valid[at // 2 :]
    made = bytearray(valid)
    for _ in range(rng.randint(1, 8)):
        if made:
            made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made)


def as_json(rng: random.Random, valid: Any) -> bytes:
    """A document that was changed, as JSON; sometimes with a key twice, or changed as text too."""
    kind = rng.random()
    if kind < 0.2:
        return content(rng, json.dumps(valid).encode())
    made = json.dumps(document(rng, valid))
    if kind < 0.35:
        made = re.sub(r'"(\w+)": ', r'"\1": 1, "\1": ', made, count=1)
    elif kind < 0.5:
        made = text(rng, made)
    return made.encode("utf-8", "surrogatepass")


def as_text(rng: random.Random, valid: str) -> bytes:
    """A text that was changed, as UTF-8, or its bytes changed."""
    if rng.random() < 0.2:
        return content(rng, valid.encode())
    return text(rng, valid).encode("utf-8", "surrogatepass")


def arguments(rng: random.Random, valid: dict[str, list[Any]]) -> dict[str, Any]:
    """Arguments by name: one of the valid values each, but one to three of them anything."""
    given = {name: rng.choice(values) for name, values in valid.items()}
    for name in rng.sample(list(given), rng.randint(1, min(3, len(given)))):
        given[name] = rng.choice(EXTREMES)
    return given
