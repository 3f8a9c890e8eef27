"""What a parameters cell declares, how texts become values, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import nbformat
import pytest
from pydantic import BaseModel, Field

from workbench.errors import InputError
from workbench.runner.parameters import grid, notebook_parameters, parameters, split_values

CELL = """\
ep = 8  # ranks
rate = 1e-3
name = "a = b"
fast = True
sizes = [1, 2]
mixed = [1, 2.5]
free = None
rows: int | None = None
link = None  # type: str | None
mode: Literal["a", "b"] = "a"
table = {
    "x": 1,
}
"""


def write(path: Path, *cells: str, tags: tuple[str, ...] = ("parameters",)) -> Path:
    made = [nbformat.v4.new_code_cell(source) for source in cells]
    for cell, tag in zip(made, tags, strict=False):
        cell.metadata["tags"] = [tag]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return write(tmp_path / "n.ipynb", CELL, "print(ep)")


def test_declared(notebook: Path) -> None:
    known = notebook_parameters(notebook)
    assert {name: p.default for name, p in known.items()} == {
        "ep": 8,
        "rate": 1e-3,
        "name": "a = b",
        "fast": True,
        "sizes": [1, 2],
        "mixed": [1, 2.5],
        "free": None,
        "rows": None,
        "link": None,
        "mode": "a",
        "table": {"x": 1},
    }
    assert known["ep"].help == "ranks"
    assert known["sizes"].kind_name == "list[int]"
    assert known["rows"].kind_name == "int | None"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ep", "16", 16),
        ("ep", " -1 ", -1),
        ("ep", 16, 16),
        ("rate", "1e-3", 1e-3),
        ("rate", "2", 2.0),
        ("rate", ".5", 0.5),
        ("rate", 2, 2.0),
        ("rate", "inf", math.inf),
        ("name", "8", "8"),
        ("name", "true", "true"),
        ("name", "none", "none"),
        ("name", '"quoted, text"', "quoted, text"),
        ("name", 'a"b', 'a"b'),
        ("name", "", ""),
        ("fast", "false", False),
        ("fast", "False", False),
        ("fast", "true", True),
        ("sizes", "8,16", [8, 16]),
        ("sizes", "[8, 16]", [8, 16]),
        ("sizes", "8", [8]),
        ("sizes", "[]", []),
        ("sizes", (3, 4), [3, 4]),
        ("mixed", "1,2.5", [1.0, 2.5]),
        ("free", "8", 8),
        ("free", "text", "text"),
        ("free", "none", None),
        ("rows", "none", None),
        ("rows", "null", None),
        ("rows", "7", 7),
        ("rows", None, None),
        ("link", "none", None),
        ("link", '"none"', "none"),
        ("link", "7", "7"),
        ("mode", "b", "b"),
        ("table", '{"y": [1, 2]}', {"y": [1, 2]}),
    ],
)
def test_converted(notebook: Path, name: str, text: Any, value: Any) -> None:
    got = notebook_parameters(notebook)[name].convert(text)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("ep", "8.0", "int"),
        ("ep", "1e3", "int"),
        ("ep", "x", "int"),
        ("ep", "true", "int"),
        ("ep", "", "int"),
        ("ep", "none", "int"),
        ("ep", "[8]", "int"),
        ("ep", 8.0, "int"),
        ("rate", "fast", "float"),
        ("rate", "true", "float"),
        ("rate", None, "float"),
        ("name", 8, "str"),
        ("fast", "yes", "bool"),
        ("fast", "1", "bool"),
        ("fast", 1, "bool"),
        ("sizes", "1,x", "list[int]"),
        ("sizes", "[1, 2.5]", "list[int]"),
        ("rows", "1.5", "int | None"),
        ("mode", "c", "Literal['a', 'b']"),
        ("table", "[1]", "dict"),
    ],
)
def test_wrong_type(notebook: Path, name: str, text: Any, rule: str) -> None:
    with pytest.raises(InputError) as error:
        notebook_parameters(notebook)[name].convert(text)
    assert str(error.value) == f"{name}={text!r} must be {rule}"


def test_texts_in_a_list_stay_texts(tmp_path: Path) -> None:
    known = notebook_parameters(write(tmp_path / "n.ipynb", "names = ['a']"))
    assert known["names"].convert("8,true, svg") == ["8", "true", "svg"]
    assert known["names"].convert("[svg,png]") == ["svg", "png"]


@pytest.mark.parametrize(
    ("cells", "tags", "told"),
    [
        (["a = 1"], (), "exactly one code cell tagged 'parameters', has 0"),
        (["a = 1", "b = 1"], ("parameters", "parameters"), "has 2"),
        (["a = 1", "a = 2"], ("parameters", "injected-parameters"), "is an executed notebook"),
        (["a = 1\nb = a"], ("parameters",), "line 2: b must be a literal, not code"),
        (["a = {1}"], ("parameters",), "line 1: a must be a literal"),
        (["import os"], ("parameters",), "line 1: must be a plain `name = literal`"),
        (["a = b = 1"], ("parameters",), "must be a plain"),
        (["a = 1\na = 2"], ("parameters",), "line 2: a is declared twice"),
        (["a = ("], ("parameters",), "line 1"),
        (["a: Path = 'x'"], ("parameters",), "type Path must be made of bool"),
        (["a: int = 'x'"], ("parameters",), "default a='x' must be int"),
    ],
)
def test_refused_cells(tmp_path: Path, cells: list[str], tags: tuple[str, ...], told: str) -> None:
    path = write(tmp_path / "n.ipynb", *cells, tags=tags)
    with pytest.raises(InputError) as error:
        notebook_parameters(path)
    assert str(error.value).startswith(f"{path}: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not JSON"),
        ("[]", "no list of cells"),
        (json.dumps({"cells": [], "metadata": {"kernelspec": {"language": "R"}}}), "language='R'"),
    ],
)
def test_no_notebook(tmp_path: Path, content: str | None, told: str) -> None:
    path = tmp_path / "n.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=told):
        notebook_parameters(path)


def test_a_tag_that_papermill_would_find_first_is_refused(tmp_path: Path) -> None:
    made = [nbformat.v4.new_markdown_cell("# x"), nbformat.v4.new_code_cell("x = 1")]
    for cell in made:
        cell.metadata["tags"] = ["parameters"]
    path = tmp_path / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    told = "cell 1 is a markdown cell tagged 'parameters'; only the code cell may have that tag"
    with pytest.raises(InputError, match=told):
        notebook_parameters(path)
    made[0].metadata["tags"] = ["injected-parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    with pytest.raises(InputError, match="is an executed notebook"):
        notebook_parameters(path)
    content = nbformat.v4.new_notebook(cells=made[1:])
    content.cells[0].metadata["tags"] = "parameters"
    path.write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=r"is not a notebook: cells.0.metadata.tags: .* valid list"
    ):
        notebook_parameters(path)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int | str", "5", 5),
        ("int | str", "five", "five"),
        ("int | str", '"5"', "5"),
        ("int | str", "5.0", "5.0"),
        ("float | str", "5", 5.0),
        ("bool | str", "true", True),
        ("str | None", "5", "5"),
        ("str", "5", "5"),
        ("int | str", "true", "true"),
        ('Literal["5", "six"]', "5", "5"),
    ],
)
def test_a_text_of_a_union_is_the_number_that_it_says(
    tmp_path: Path, kind: str, text: str, value: Any
) -> None:
    default = '"5"' if "Literal" in kind or kind == "str" else '"" ' if "str" in kind else "0"
    path = write(tmp_path / "n.ipynb", f"u: {kind} = {default}")
    found = notebook_parameters(path)["u"].convert(text)
    assert (found, type(found)) == (value, type(value))


def test_split() -> None:
    assert split_values('8,16,[1,[2,3]],"a,b",{"x":1,"y":2},') == [
        "8",
        "16",
        "[1,[2,3]]",
        '"a,b"',
        '{"x":1,"y":2}',
        "",
    ]
    assert split_values('5",6"') == ['5"', '6"']


def test_grid(notebook: Path) -> None:
    known = notebook_parameters(notebook)
    assert grid(notebook, known, []) == [{}]
    assert grid(notebook, known, ["ep=8,16", "name=x,y", "sizes=1,2"]) == [
        {"ep": ep, "name": name, "sizes": [1, 2]} for ep in (8, 16) for name in ("x", "y")
    ]
    assert grid(notebook, known, ["sizes=[8],[8,16]"]) == [{"sizes": [8]}, {"sizes": [8, 16]}]
    assert grid(notebook, known, ["ep=8", "ep=8,9"]) == [{"ep": 8}, {"ep": 9}]
    assert grid(notebook, known, ['name="a,b",c=d']) == [{"name": "a,b"}, {"name": "c=d"}]


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("nope=1", "nope='1' is not a parameter (known parameters: ep (int), rate (float), "),
        ("ep=8,x", "ep='x' must be int (known parameters: ep (int)"),
        ("ep=8,", "ep='' must be int"),
        ("ep", "-p 'ep' must read NAME=VALUE"),
        ("=1", "must read NAME=VALUE"),
    ],
)
def test_grid_refuses(notebook: Path, assignment: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        grid(notebook, notebook_parameters(notebook), [assignment])
    assert str(error.value).startswith(f"{notebook}: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


class Model(BaseModel):
    ep: int = Field(ge=1)
    rate: float = 0.5
    fast: bool = False
    name: str = "x"
    mode: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    file: Path | None = None


def test_model_reads_what_papermill_passes() -> None:
    # papermill: an int stays one, `false` and YAML's 1e-3 are texts, a tuple is a text
    given = {"ep": 8, "rate": "1e-3", "fast": "false", "sizes": "(1, 2)", "file": "a/b", "os": 1}
    assert parameters(Model, given) == Model(
        ep=8, rate=1e-3, fast=False, sizes=(1, 2), file=Path("a/b")
    )
    assert parameters(Model, {"ep": 8, "sizes": "1,2"}).sizes == (1, 2)
    assert parameters(Model, {"ep": 8, "name": "8", "file": None}).name == "8"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ep": 8.0}, "ep=8.0: Input should be a valid integer"),
        ({"ep": "x"}, "ep='x': Input should be a valid integer"),
        ({"ep": 0}, "ep=0: Input should be greater than or equal to 1"),
        ({"ep": "0"}, "ep='0': Input should be greater than or equal to 1"),
        ({}, "ep: Field required"),
        ({"ep": 8, "fast": 1}, "fast=1: Input should be a valid boolean"),
        ({"ep": 8, "fast": "yes"}, "fast='yes': Input should be a valid boolean"),
        ({"ep": 8, "name": 8}, "name=8: Input should be a valid string"),
        ({"ep": 8, "mode": "c"}, "mode='c': Input should be 'a' or 'b'"),
        ({"ep": {1}}, "must be literals"),
        ({"ep": 8, "epp": 9, "In": ["", "ep = 8", "# Parameters\nepp = 9\n"]}, "epp=9 is not a"),
    ],
)
def test_model_refuses(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        parameters(Model, given)
    assert told in str(error.value)
    assert "known parameters: ep, rate, fast, name, mode, sizes, file" in str(error.value)
    assert "\n" not in str(error.value)
