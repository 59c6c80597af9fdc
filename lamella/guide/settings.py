"""Settings of a configuration tree with their types, defaults and docstrings, read from its source."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Setting:
    """One key.

    Attributes:
        table: dotted name of its table; "" for the top.
        kind: its type in words. default: its TOML text; None: it has no value by default; required: it must be given.
        text: its docstring, on one line. many: it is of each entry of an array of tables.
    """

    table: str
    name: str
    kind: str
    default: str | None
    required: bool
    text: str
    many: bool = False

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name


@cache
def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Attribute -> the docstring below it, also of those that a class takes over from its base."""
    found: dict[str, str] = {}
    for base in model.__bases__:
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= docstrings(base)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(node, ast.ClassDef)
    name = None
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            name = part.target.id
        elif (
            name
            and isinstance(part, ast.Expr)
            and isinstance(part.value, ast.Constant)
            and isinstance(part.value.value, str)
        ):
            found[name] = " ".join(part.value.value.split())
            name = None
    return found


def section_of(annotation: Any) -> tuple[type[BaseModel], bool] | None:
    """(the section, whether there are several) that a field's type is; None for a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    inner = [a for a in get_args(annotation) if a is not Ellipsis and a is not type(None)]
    if get_origin(annotation) in (tuple, list) and len(inner) == 1 and isinstance(inner[0], type):
        return (inner[0], True) if issubclass(inner[0], BaseModel) else None
    if get_origin(annotation) in (Union, types.UnionType) and len(inner) == 1:
        return section_of(inner[0])
    return None


def settings_of(model: type[BaseModel], table: str = "", many: bool = False) -> Iterator[Setting]:
    """Keys of a section in order, values before tables, as TOML wants them."""
    tables = []
    told = docstrings(model)
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            tables.append((name, *inner))
            continue
        default = None if field.is_required() or field.get_default(call_default_factory=True) is None else toml(
            field.get_default(call_default_factory=True)
        )  # fmt: skip
        yield Setting(
            table, name, kind_of(field.annotation, field), default, field.is_required(), told.get(name, ""), many
        )
    for name, inner_model, several in tables:
        yield from settings_of(inner_model, f"{table}.{name}" if table else name, several)


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"TOML has no {type(value).__name__}")


_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", dict: "table"}


def kind_of(annotation: Any, field: FieldInfo | None = None) -> str:
    """A type in words, with its bounds."""
    bounds = []
    for rule in getattr(field, "metadata", ()):
        for mark, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            if (bound := getattr(rule, mark, None)) is not None:
                bounds.append(f"{words} {bound:g}")
    said = _kind(annotation)
    return ", ".join([said, *bounds])


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return " or ".join(json.dumps(v) for v in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(a) for a in inner if a is not type(None)))
    if origin in (tuple, list):
        each = [a for a in inner if a is not Ellipsis]
        return f"list of {_kind(each[0])}" if len(set(each)) == 1 else "[" + ", ".join(_kind(a) for a in each) + "]"
    if origin is dict:
        return f"table of {_kind(inner[1])}"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))
