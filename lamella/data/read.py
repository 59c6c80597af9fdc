"""Strict streaming JSONL reader: physical line numbers, nothing guessed, nothing invented."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.errors import UserError

SUFFIXES = (".jsonl", ".ndjson")

_UTF8_BOM = b"\xef\xbb\xbf"
_BOMS = (
    (b"\xff\xfe\x00\x00", "UTF-32-LE"),
    (b"\x00\x00\xfe\xff", "UTF-32-BE"),
    (b"\xff\xfe", "UTF-16-LE"),
    (b"\xfe\xff", "UTF-16-BE"),
)
_COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"PK\x03\x04", "zip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"))
_SURROGATE = re.compile("[\ud800-\udfff]")


class RowError(Exception):
    """A row that cannot be used.

    Attributes:
        reason: short class of the fault; counts are kept per reason.
        detail: what exactly was seen.
        column: column in the row's line, from 1, where known.
    """

    def __init__(self, reason: str, detail: str = "", column: int | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.column = column


@dataclass(frozen=True, slots=True)
class RawRow:
    """One line of a file: its JSON object, or why there is none.

    Attributes:
        line: physical line, from 1; blank lines count.
    """

    path: Path
    line: int
    value: dict[str, Any] | None
    problem: RowError | None = None


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Files as given; folders become their `.jsonl` and `.ndjson` files (sorted, with subfolders).

    Raises:
        UserError: no path given, a missing path, a folder without such files.
    """
    if not paths:
        raise UserError("no data file is given", fix="set data.train to a JSONL file or a folder of them")
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
            if not files:
                raise UserError(f"no {' or '.join(SUFFIXES)} file in this folder", fix="name the files", path=path)
            found += files
        elif path.exists():
            found.append(path)
        else:
            raise UserError("no such file", fix="check data.train (relative to the run.toml)", path=path)
    return found


def read_rows(path: Path, only: Container[int] | None = None) -> Iterator[RawRow]:
    """Stream the rows of one JSONL file.

    UTF-8 with or without byte order mark; LF or CRLF; blank lines are skipped and counted.

    Args:
        only: lines (from 1) to decode; the others are passed over.

    Raises:
        UserError: another encoding, a compressed file, one JSON array instead of lines, an unreadable file.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            _check_head(head, path)
            file.seek(len(_UTF8_BOM) if head.startswith(_UTF8_BOM) else 0)
            first = True
            for number, raw in enumerate(file, 1):
                body = raw.rstrip(b"\r\n")
                if not body.strip(b" \t\r"):
                    continue
                if first and body.lstrip(b" \t").startswith(b"["):
                    raise UserError(
                        "the file holds one JSON array, not one JSON object a line",
                        fix="write one object a line (for example with `jq -c '.[]'`)", path=path, line=number,
                    )  # fmt: skip
                first = False
                if only is None or number in only:
                    yield _row(path, number, body)
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", fix="give a JSONL file that you may read", path=path
        ) from error


def line_sizes(path: Path, most_bytes: int) -> tuple[list[tuple[int, int]], bool]:
    """(line from 1, bytes) of each line that is not blank, as far as `most_bytes` of the file reach; whether that is all of it.

    Raises:
        UserError: an unreadable file.
    """
    found, left = [], most_bytes
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    found.append((number, len(raw)))
                left -= len(raw)
                if left <= 0:
                    return found, not file.read(1)
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", fix="give a JSONL file that you may read", path=path
        ) from error
    return found, True


def _check_head(head: bytes, path: Path) -> None:
    encoding = next((name for bom, name in _BOMS if head.startswith(bom)), None)
    if encoding is None and len(head) >= 4:
        even, odd = head[0::2], head[1::2]
        if odd.count(0) > 0.4 * len(odd) and even.count(0) < 0.1 * len(even):
            encoding = "UTF-16-LE (no byte order mark)"
        elif even.count(0) > 0.4 * len(even) and odd.count(0) < 0.1 * len(odd):
            encoding = "UTF-16-BE (no byte order mark)"
    if encoding is not None:
        fix = f"convert it: iconv -f {encoding.split(' ')[0]} -t UTF-8"
        raise UserError(f"encoding is {encoding}; only UTF-8 is read", fix=fix, path=path)
    for magic, name in _COMPRESSED:
        if head.startswith(magic):
            raise UserError(f"the file is compressed ({name})", fix="unpack it first", path=path)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowError("broken JSON", f"key {twice!r} occurs twice in one object")
    return made


def _constant(name: str) -> Any:
    raise RowError("broken JSON", f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _row(path: Path, number: int, body: bytes) -> RawRow:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"byte 0x{body[error.start]:02x} at byte {error.start + 1} of the line"
        return RawRow(path, number, None, RowError("not UTF-8", detail, error.start + 1))
    if body[0] == 0:
        return RawRow(path, number, None, RowError("broken JSON", "the line begins with NUL bytes", 1))
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        return RawRow(path, number, None, RowError("broken JSON", error.msg, error.colno))
    except ValueError as error:  # an integer of more digits than Python converts
        return RawRow(path, number, None, RowError("broken JSON", str(error).partition(";")[0]))
    except RecursionError:
        return RawRow(path, number, None, RowError("broken JSON", "nested too deeply"))
    except RowError as problem:
        return RawRow(path, number, None, problem)
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", type(None): "null"}.get(type(value), "a number or boolean")
        return RawRow(path, number, None, RowError("not an object", f"the line is {kind}"))
    try:
        where = _lone_surrogate(value, "") if "\\u" in text else None
    except RecursionError:
        return RawRow(path, number, None, RowError("broken JSON", "nested too deeply"))
    if where:
        code = f"at {where.lstrip('.')}: such text has no UTF-8 form"
        return RawRow(path, number, None, RowError("lone surrogate", code))
    return RawRow(path, number, value)


def _lone_surrogate(value: Any, where: str) -> str | None:
    """Path of the first string that holds half of a surrogate pair (`\\ud83d` alone), or None."""
    if isinstance(value, str):
        return where if _SURROGATE.search(value) else None
    if isinstance(value, dict):
        for key, inner in value.items():
            if _SURROGATE.search(key):
                return f"{where} (a key)"
            if found := _lone_surrogate(inner, f"{where}.{key}"):
                return found
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            if found := _lone_surrogate(inner, f"{where}[{i}]"):
                return found
    return None
