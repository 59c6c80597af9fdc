"""A first run.toml: what was asked for, and every other setting as a comment with its default."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lamella.config import RunConfig, flat, load_run_config
from lamella.data.formats import detect_format
from lamella.data.read import RowError, read_rows
from lamella.errors import UserError
from lamella.files import write_text
from lamella.guide.settings import Setting, settings_of, toml

WIDTH = 110


@dataclass(frozen=True)
class LookedAt:
    """A data file as far as its rows tell.

    Attributes:
        formats: row format -> rows.
        problems: reason -> rows that cannot be used.
        longest_tokens, mean_tokens: of a row; None where no tokenizer was at hand.
    """

    path: Path
    rows: int
    formats: dict[str, int]
    problems: dict[str, int]
    longest_tokens: int | None = None
    mean_tokens: float | None = None

    def lines(self) -> list[str]:
        """What was found, for the file's head."""
        formats = ", ".join(f"{count:,} {name}" for name, count in self.formats.items())
        said = [f"{self.path.name}: {self.rows:,} rows ({formats or 'none of them usable'})"]
        if self.longest_tokens is not None:
            said.append(f"tokens per row: {self.mean_tokens:,.0f} on average, {self.longest_tokens:,} at most")
        said += [f"{count:,} rows cannot be used: {reason}" for reason, count in self.problems.items()]
        return said


def look_at(path: Path, tokenizer_folder: Path | None = None) -> LookedAt:
    """Read a data file's rows, and their lengths where there is a tokenizer.

    Args:
        tokenizer_folder: a store or checkpoint.

    Raises:
        UserError: no such file, or no row in it.
    """
    formats, problems = Counter[str](), Counter[str]()
    rows = 0
    for raw in read_rows(path):
        rows += 1
        if raw.problem is not None:
            problems[raw.problem.reason] += 1
        if raw.value is None:
            continue
        try:
            formats[detect_format(raw.value)] += 1
        except RowError as error:
            problems[error.reason] += 1
    if not rows:
        raise UserError("holds no rows", fix="write one JSON object per line", path=path)
    longest = mean = None
    if tokenizer_folder is not None:
        from lamella.config import DataConfig
        from lamella.data.dataset import encode_dataset
        from lamella.data.encode import load_tokenizer

        config = DataConfig(train=(path,), max_tokens=1 << 20, bad_rows="drop", max_drop_share=1.0)
        lengths = [row.tokens for row in encode_dataset(config, load_tokenizer(tokenizer_folder)).rows]
        if lengths:
            longest, mean = max(lengths), sum(lengths) / len(lengths)
    return LookedAt(path, rows, dict(formats), dict(problems), longest, mean)


def advised_tokens(longest: int) -> int:
    """`data.max_tokens` for rows up to this length: the next multiple of 64."""
    return max(64, -(-longest // 64) * 64)


def run_toml(asked: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    """The file's text.

    Args:
        asked: dotted key -> value; all other settings stand as comments with their defaults.
        head: lines of the comment at the top.

    Raises:
        UserError: a key that is none.
    """
    settings = list(settings_of(RunConfig))
    unknown = set(asked) - {s.key for s in settings}
    if unknown:
        raise UserError(f"no such setting: {', '.join(sorted(unknown))}", fix="see docs/reference/config.md")
    lines = [f"# {line}" for line in head] + [""] * bool(head)
    for table, group in groupby(settings, key=lambda s: s.table):
        several = list(group)
        if table:
            used = any(s.key in asked for s in several)
            mark = "[[{}]]" if several[0].many else "[{}]"
            lines += ["", ("" if used or not several[0].many else "# ") + mark.format(table)]
        for setting in several:
            lines += _lines(setting, asked)
    return "\n".join(lines) + "\n"


def _lines(setting: Setting, asked: Mapping[str, Any]) -> list[str]:
    told = textwrap.wrap(setting.text, WIDTH - 2)
    if setting.key in asked:
        return [*(f"# {line}" for line in told), f"{setting.name} = {toml(asked[setting.key])}"]
    if setting.default is None:
        return [*(f"# {line}" for line in told), f"# {setting.name} =   # {setting.kind}; no value by default"]
    return [*(f"# {line}" for line in told), f"# {setting.name} = {setting.default}"]


def write_run(path: Path, text: str, force: bool = False) -> RunConfig:
    """Write the file, after it was read as `lamella train` reads it; the settings it gives.

    Raises:
        UserError: it is there already (without `force`), its folder is not, or it would be no valid run.
    """
    if path.exists() and not force:
        raise UserError("is there already", fix="give another --out, or --force to replace it", path=path)
    if not path.parent.is_dir():
        raise UserError("no such folder", fix="make it first, or give another --out", path=path.parent)
    trial = path.parent / f".{path.name}.trial"
    try:
        write_text(trial, text)
        config = load_run_config(trial)
    except UserError as error:
        if error.path == str(trial):  # the file that was asked for, which is not there yet
            raise UserError(error.what, fix=error.fix) from error
        raise
    finally:
        trial.unlink(missing_ok=True)
    write_text(path, text)
    return config


def in_effect(config: RunConfig) -> dict[str, Any]:
    """Dotted settings of a run."""
    return flat(config.model_dump(mode="json"))
