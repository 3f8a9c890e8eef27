"""HTML pages from the templates beside this file; what a page is given is escaped."""

from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


@lru_cache(maxsize=1)
def _templates() -> Environment:
    loader = PackageLoader("workbench.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def render(template: str, **values: Any) -> str:
    """The page or part of a page `template`.html with `values`."""
    return _templates().get_template(f"{template}.html").render(values)
