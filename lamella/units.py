"""Bytes, seconds and rates, read and written the way people write them."""

from __future__ import annotations

import re

from lamella.errors import UserError

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": 1 << 10,
    "m": 1000**2, "mb": 1000**2, "mib": 1 << 20,
    "g": 1000**3, "gb": 1000**3, "gib": 1 << 30,
    "t": 1000**4, "tb": 1000**4, "tib": 1 << 40,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """`"2GiB"` -> 2147483648; decimal units are powers of 1000, binary ones of 1024.

    Raises:
        UserError: not a number with a known byte unit, or not positive.
    """
    if isinstance(text, int):
        value = text
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
        if not match or match[2].lower() not in _BYTE_UNITS:
            raise UserError(f"not a size: {text!r}", fix='write a number and a unit, such as "2GiB" or "800MB"')
        value = int(float(match[1]) * _BYTE_UNITS[match[2].lower()])
    if value <= 0:
        raise UserError(f"size must be positive, got {text!r}", fix='write a size such as "2GiB"')
    return value


def parse_rate(text: str) -> float:
    """`"7GB/s"` -> 7e9 bytes per second.

    Raises:
        UserError: not a size and `/s`, or not positive.
    """
    size, slash, per = text.partition("/")
    if not slash or per.strip().lower() not in ("s", "sec"):
        raise UserError(f"not a rate: {text!r}", fix='write a size per second, such as "7GB/s" or "800MB/s"')
    try:
        return float(parse_bytes(size))
    except UserError as error:
        raise UserError(f"not a rate: {text!r}", fix='write a size per second, such as "7GB/s" or "800MB/s"') from error


def format_bytes(n: float) -> str:
    """Bytes with a decimal unit and three figures, e.g. `1.28 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Seconds as `0.42 s`, `37 s`, `4 min 10 s` or `3 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {s:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_count(n: float) -> str:
    """Counts with k/M/B, three figures: `134 M`."""
    for unit in ("", " k", " M"):
        if abs(n) < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g} B"
