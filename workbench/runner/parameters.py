"""A notebook's parameters: what its tagged cell declares, and strict conversion of what is given.

A parameterised notebook has exactly one code cell tagged `parameters`, which holds nothing but
`name = literal` lines. A parameter's type is that of its default, or a type stated beside it:
`rows: int | None = None`, or `rows = None  # type: int | None`, which plain papermill also reads.
"""

import ast
import io
import json
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from workbench.errors import InputError
from workbench.files import read_json

_WORDS = {
    "true": True,
    "false": False,
    "none": None,
    "null": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
}
_TYPE_NAMES = {t.__name__: t for t in (bool, int, float, str, list, dict)} | {
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
    "Any": Any,
}
_OPEN, _CLOSE = "([{", ")]}"

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a notebook. `kind` is a type that pydantic understands: `list[int]`."""

    name: str
    default: Any
    kind: Any
    help: str = ""

    @property
    def kind_name(self) -> str:
        return (
            getattr(self.kind, "__name__", "")
            if isinstance(self.kind, type) and not get_args(self.kind)
            else str(self.kind).replace("typing.", "")
        )

    def convert(self, value: Any) -> Any:
        """`value` as this parameter's type; a str is read as on a command line. Raises InputError.

        Nothing is rounded or guessed: 8.0 is no int, 1 is no bool, `yes` is no bool. `none` and
        `null` mean None where None is allowed; JSON quotes keep a text as it is: `"none"`.
        """
        values = [value]
        if isinstance(value, str):
            text = value.strip()
            read = _read(self.kind, text)
            if text.startswith('"') and isinstance(read, str):
                values = [read]
            elif read is None or self.kind is Any:
                values = [read, value]
            elif _is_list(self.kind) and not text.startswith("["):
                values = [read, [part.strip() for part in split_values(text)]]
            elif isinstance(read, str):
                values = [value, read]
            else:  # a number or the like: the text it is written as only where it fits nothing else
                values = [read, value]
        for candidate in values:
            try:
                # strict JSON is strict about numbers and text, and takes any sequence for a list
                return TypeAdapter(self.kind).validate_json(json.dumps(candidate), strict=True)
            except (ValidationError, TypeError, ValueError, RecursionError):
                continue
        raise InputError(f"{self.name}={value!r} must be {self.kind_name}")


def notebook_parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters that `notebook` declares, by name, in their order.

    Raises InputError for what is no Python notebook, was already executed by papermill, lacks the
    parameters cell, has more than one, or has one with anything but assignments of literals.
    """
    cells = _read_notebook(notebook).cells
    if any("injected-parameters" in cell.metadata.tags for cell in cells):
        raise InputError(f"{notebook}: is an executed notebook; give the one it was made from")
    tagged = [(n, cell) for n, cell in enumerate(cells, 1) if "parameters" in cell.metadata.tags]
    for n, cell in tagged:
        # papermill writes the values after the first cell that has the tag, of whatever type; the
        # code cell would then set them back
        if cell.cell_type != "code":
            raise InputError(
                f"{notebook}: cell {n} is a {cell.cell_type} cell tagged 'parameters'; "
                "only the code cell may have that tag"
            )
    if len(tagged) != 1:
        raise InputError(
            f"{notebook}: must have exactly one code cell tagged 'parameters', has {len(tagged)}"
        )
    source = tagged[0][1].source
    return _declared(str(notebook), source if isinstance(source, str) else "".join(source))


class _Metadata(BaseModel):
    tags: list[str] = []


class _Cell(BaseModel):
    cell_type: Literal["code", "markdown", "raw"]
    metadata: _Metadata = _Metadata()
    source: str | list[str] = ""


class _Kernel(BaseModel):
    language: str = "python"


class _NotebookMetadata(BaseModel):
    kernelspec: _Kernel = _Kernel()


class _Notebook(BaseModel):
    """What we ask of a notebook of format 4; the rest is papermill's."""

    metadata: _NotebookMetadata = _NotebookMetadata()
    cells: list[_Cell]


def _read_notebook(notebook: Path) -> _Notebook:
    content = read_json(notebook)
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise InputError(f"{notebook}: is not a notebook of format 4 (it has no list of cells)")
    try:
        found = _Notebook.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{notebook}: is not a notebook: {where}: {first['msg']}") from None
    language = found.metadata.kernelspec.language
    if language != "python":
        raise InputError(f"{notebook}: language={language!r} must be python")
    return found


def _declared(place: str, source: str) -> dict[str, Parameter]:
    # papermill's own inspection skips a line with two '=' and everything it cannot match
    try:
        body = ast.parse(source, type_comments=True).body
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
    except SyntaxError as error:
        raise InputError(f"{place}: parameters cell, line {error.lineno}: {error.msg}") from error
    except (ValueError, tokenize.TokenError, RecursionError, MemoryError) as error:
        reason = str(error) or "nested too deeply"
        raise InputError(f"{place}: parameters cell: {reason}") from None
    found: dict[str, Parameter] = {}
    for node in body:
        where = f"{place}: parameters cell, line {node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        target: ast.expr | None = None
        stated: ast.expr | None = None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if node.type_comment:
                try:
                    stated = ast.parse(node.type_comment, mode="eval").body
                except SyntaxError:
                    raise InputError(f"{where}: type {node.type_comment} must be a type") from None
        elif isinstance(node, ast.AnnAssign):
            target, stated = node.target, node.annotation
        value = getattr(node, "value", None)
        if not isinstance(target, ast.Name) or value is None:
            raise InputError(f"{where}: must be a plain `name = literal`")
        try:
            default = ast.literal_eval(value)
            json.dumps(default)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise InputError(f"{where}: {target.id} must be a literal, not code") from error
        if target.id in found:
            raise InputError(f"{where}: {target.id} is declared twice")
        kind = _kind_of(default) if stated is None else _kind_stated(where, stated)
        comment = comments.get(node.end_lineno or 0, "")
        found[target.id] = Parameter(
            name=target.id,
            default=default,
            kind=kind,
            help="" if comment.startswith("type:") else comment,
        )
        try:
            found[target.id].convert(default)
        except InputError as error:
            raise InputError(f"{where}: default {error}") from error
    return found


def _kind_of(default: Any) -> Any:
    if default is None:
        return Any
    if isinstance(default, list | tuple):
        kinds = {type(item) for item in default}
        if kinds == {int, float}:
            kinds = {float}
        plain = len(kinds) == 1 and kinds <= {bool, int, float, str}
        return list[kinds.pop()] if plain else list[Any]  # type: ignore[misc]
    return type(default)


def _kind_stated(where: str, node: ast.expr) -> Any:
    text = ast.unparse(node)
    try:
        kind = eval(text, {"__builtins__": {}}, dict(_TYPE_NAMES))
        TypeAdapter(kind)  # not all that can be written here is a type: ["a", "b"]
        return kind
    except Exception as error:
        raise InputError(
            f"{where}: type {text} must be made of {', '.join(_TYPE_NAMES)} and None"
        ) from error


def _is_list(kind: Any) -> bool:
    if get_origin(kind) in (list, tuple) or kind in (list, tuple):
        return True
    return any(_is_list(part) for part in get_args(kind)) and get_origin(kind) is not dict


def _read(kind: Any, text: str) -> Any:
    """What `text` says as a literal of Python or JSON; for a list also `a,b`; else text itself."""
    if text.lower() in _WORDS and (text.lower() not in ("none", "null") or _takes_none(kind)):
        return _WORDS[text.lower()]
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return [value] if _is_list(kind) and not isinstance(value, list | tuple) else value
    if _is_list(kind):
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return [_read(Any, part.strip()) for part in split_values(inner)]
    return text


def _takes_none(kind: Any) -> bool:
    return kind is Any or type(None) in get_args(kind)


def split_values(text: str) -> list[str]:
    """`text` cut at its commas, but not inside quotes or brackets: `[8,16],[32]` gives two."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and not depth and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char == '"' and not parts[-1].strip():
            quote = char  # a quote opens only where a value begins, or 5" would open one
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth = max(0, depth - 1)
        parts[-1] += char
    return parts


def convert_all(
    notebook: Path, known: Mapping[str, Parameter], given: Mapping[str, Any]
) -> dict[str, Any]:
    """`given` in the types of `known`; raises InputError with notebook, parameter, value, rule."""
    rule = "known parameters: " + ", ".join(f"{p.name} ({p.kind_name})" for p in known.values())
    for name, value in given.items():
        if name not in known:
            raise InputError(f"{notebook}: {name}={value!r} is not a parameter ({rule})")
    try:
        return {name: known[name].convert(value) for name, value in given.items()}
    except InputError as error:
        raise InputError(f"{notebook}: {error} ({rule})") from error


def grid(
    notebook: Path, known: Mapping[str, Parameter], assignments: Sequence[str]
) -> list[dict[str, Any]]:
    """Every combination of the values in `assignments` (`NAME=VALUE[,VALUE...]`), converted.

    For a list parameter, `a,b` without brackets is one list; `[a,b]` is one list for any
    parameter, and `[a],[a,b]` are two values. A name given again adds values. Duplicates are
    dropped. No assignment gives one point with the notebook's defaults.
    """
    values: dict[str, list[Any]] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InputError(f"{notebook}: -p {assignment!r} must read NAME=VALUE")
        one_list = name in known and _is_list(known[name].kind) and not text.startswith("[")
        texts = [text] if one_list else [part.strip() for part in split_values(text)]
        for part in texts:
            value = convert_all(notebook, known, {name: part})[name]
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def parameters(model: type[M], namespace: Mapping[str, Any]) -> M:
    """The notebook's parameters as a checked `model`; call it right after the parameters cell.

        from workbench.runner.notebook import parameters
        p = parameters(ReportParameters, globals())

    Plain papermill checks nothing: `-p x false` and YAML's `1e-3` arrive as text, an unknown
    parameter only makes a warning. Here a text is read by its field's type as on our command
    line, everything else must already have that type (pydantic, strict), and a name that
    papermill injected but `model` lacks is refused. Raises InputError, one line; so the cell
    fails, and the run with it.
    """
    known = "known parameters: " + ", ".join(model.model_fields)
    for cell in namespace.get("In", []):
        if cell.startswith("# Parameters\n"):  # papermill's heading of the cell it injects
            names = [
                n.id
                for n in ast.walk(ast.parse(cell))
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
            for name in names:
                if name not in model.model_fields:
                    raise InputError(f"{name}={namespace.get(name)!r} is not a parameter ({known})")
    values = {name: namespace[name] for name in model.model_fields if name in namespace}
    try:
        try:
            return model.model_validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            places = {str(e["loc"][0]) for e in error.errors() if e["loc"]}
            texts = {name: values[name] for name in places if isinstance(values.get(name), str)}
            if not texts:
                raise
            for name, text in texts.items():
                values[name] = _read(model.model_fields[name].annotation, text.strip())
            return model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        subject = f"{name}={namespace[name]!r}" if name in namespace else name or "parameters"
        raise InputError(f"{subject}: {first['msg']} ({known})") from None
    except TypeError as error:
        raise InputError(f"parameters must be literals: {error} ({known})") from None
