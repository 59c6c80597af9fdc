"""JSON objects as tables for people."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lamella.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Table:
    """A table of strings; `numeric` holds the columns set to the right; `facts` marks name-value pairs."""

    rows: list[list[str]]
    head: list[str] = field(default_factory=list)
    numeric: frozenset[int] = frozenset()
    facts: bool = False
    caption: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"head": self.head, "rows": self.rows, "numeric": sorted(self.numeric), "facts": self.facts,
                "caption": self.caption}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A titled piece of a nested JSON value."""

    title: str
    tables: list[Table]


def say(name: str, value: Any) -> str:
    """A value for people, by the unit in its name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int | float):
        if name.endswith("bytes") or name == "rss":
            return f"{format_bytes(float(value))} ({value:,} bytes)"
        if name.endswith("_s") and not name.endswith("per_s"):
            return format_seconds(float(value))
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
        return ", ".join(say("", v) for v in value) or "none"
    return json.dumps(value, ensure_ascii=False)


def words(name: str) -> str:
    for ending in ("_bytes_per_s", "_per_s", "_bytes", "_s"):
        if name.endswith(ending) and name != ending:
            name = name.removesuffix(ending) + (" per second" if ending.endswith("per_s") else "")
            break
    return name.replace("_", " ")


def rows_table(rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = frozenset(
        i
        for i, c in enumerate(columns)
        if all(isinstance(r.get(c), int | float | None) and not isinstance(r.get(c), bool) for r in rows)
    )

    def cell(row: dict[str, Any], column: str) -> str:
        value = row.get(column)
        if column.endswith("bytes") and isinstance(value, int | float):
            return format_bytes(float(value))
        return say(column, value)

    return Table([[cell(r, c) for c in columns] for r in rows], [words(c) for c in columns], numeric)


def parts_of(tree: dict[str, Any], title: str = "") -> list[Part]:
    """A nested JSON object as titled tables: plain values first, then each inner object and list of objects.

    Empty texts are left out.
    """
    facts = []
    inner: list[Part] = []
    for key, value in tree.items():
        if value == "":
            continue
        name = f"{title} / {words(key)}" if title else words(key)
        if isinstance(value, dict) and value:
            plain = all(not isinstance(v, dict | list) for v in value.values())
            same = all(isinstance(v, dict) and v for v in value.values())
            if same and len({tuple(v) for v in value.values() if isinstance(v, dict)}) == 1 and len(value) > 1:
                inner.append(Part(name, [rows_table([{"name": k, **v} for k, v in value.items()])]))
            elif plain and len(value) <= 2 and title:
                facts.append([words(key), ", ".join(f"{words(k)} {say(k, v)}" for k, v in value.items())])
            else:
                inner += parts_of(value, name)
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            inner.append(Part(name, [rows_table(value)]))
        else:
            facts.append([words(key), say(key, value)])
    own = [Part(title, [Table(facts, facts=True)])] if facts else []
    return own + inner
