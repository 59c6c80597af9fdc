"""The rows a run would train on: how many, how long, how many of their tokens are labels. Imports no torch.

With a tokenizer a seeded sample of rows is encoded by the very code that training encodes with; the other rows' tokens follow
from their bytes by a line through the sample. Without one a token is taken to be `CHARACTERS_PER_TOKEN` characters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lamella.config import DataConfig, TrainConfig
from lamella.data.steps import StepPlanner, pack_lengths
from lamella.errors import UserError
from lamella.plan.costs import RowCost

if TYPE_CHECKING:
    from lamella.data.encode import EncodedRow
    from lamella.data.read import RawRow

CHARACTERS_PER_TOKEN = 4.0
"""Of English text, in round figures."""
SAMPLE_ROWS = 400
SIZED_STEPS = 300
"""Of a run, whose micro-batches are looked at one by one."""
SAMPLE_BYTES = 600_000
SCAN_BYTES = 256 << 20
"""Of all files; rows beyond are counted by the bytes of those before."""
_LEAST_ROWS = 8
_MANY_ROWS = 200_000
"""Beyond these all epochs are taken to have the steps of the first."""


@dataclass(frozen=True)
class Rows:
    """Rows as a plan sees them.

    Attributes:
        lengths, labels: tokens, and label tokens, of each row that would be trained.
        source: where they come from.
        how: counted in every row, in a sample of them, taken from characters, or given.
        encoded: rows whose tokens were counted.
        dropped: rows that would be left out.
        notes: what was assumed.
    """

    lengths: tuple[int, ...]
    labels: tuple[int, ...]
    source: str
    how: Literal["counted", "sampled", "characters", "given"]
    encoded: int = 0
    dropped: int = 0
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def label_tokens(self) -> int:
        return sum(self.labels)

    @cached_property
    def percentiles(self) -> dict[str, int]:
        """Nearest-rank percentiles of the lengths."""
        ordered = sorted(self.lengths)
        ranks = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: ordered[min(int(q * len(ordered)), len(ordered) - 1)] for name, q in ranks.items()}

    def _epoch(self, train: TrainConfig) -> _Epoch:
        return _first_epoch(self.lengths, train.seed, train.rows_per_step, train.tokens_per_step)

    def steps(self, train: TrainConfig) -> int:
        """Optimizer steps of the run."""
        first = len(self._epoch(train).steps)
        if train.steps is not None:
            return train.steps
        if train.epochs <= 1 or len(self.lengths) > _MANY_ROWS:
            return math.ceil(round(train.epochs * first, 9))
        planner = StepPlanner(
            self.lengths, seed=train.seed, rows_per_step=train.rows_per_step, tokens_per_step=train.tokens_per_step
        )
        return planner.total_steps(train.epochs)

    def steps_per_epoch(self, train: TrainConfig) -> int:
        """Of the first epoch."""
        return len(self._epoch(train).steps)

    def run_tokens(self, train: TrainConfig) -> float:
        """Tokens that the whole run passes, epochs of equal steps assumed."""
        return self.tokens * self.steps(train) / self.steps_per_epoch(train)

    def sample_step(self, train: TrainConfig) -> list[RowCost]:
        """The rows of a step of the first epoch whose tokens are nearest to the mean."""
        epoch = self._epoch(train)
        return self._costs(epoch.steps[int(np.argmin(np.abs(epoch.tokens - epoch.tokens.mean())))])

    def largest_step(self, train: TrainConfig) -> list[RowCost]:
        """The rows of the first epoch's step with the most tokens: what memory has to hold."""
        epoch = self._epoch(train)
        return self._costs(epoch.steps[int(np.argmax(epoch.tokens))])

    def micro_batch_sizes(self, train: TrainConfig, multiple: int) -> int:
        """Different sizes of micro-batches, filled up to a `multiple`, in the first epoch's steps (`SIZED_STEPS` at most)."""
        sizes: set[int] = set()
        for step in self._epoch(train).steps[: min(self.steps(train), SIZED_STEPS)]:
            lengths = [self.lengths[i] for i in step]
            for batch in pack_lengths(lengths, train.micro_batch_tokens):
                sizes.add(-(-sum(lengths[i] for i in batch) // multiple))
        return len(sizes)

    def _costs(self, rows: Sequence[int]) -> list[RowCost]:
        return [RowCost(self.lengths[i], self.labels[i]) for i in rows]


@dataclass(frozen=True)
class _Epoch:
    """Rows of each step, and their tokens [steps]."""

    steps: list[tuple[int, ...]]
    tokens: np.ndarray


@lru_cache(maxsize=2)
def _first_epoch(lengths: tuple[int, ...], seed: int, rows_per_step: int | None, tokens_per_step: int) -> _Epoch:
    planner = StepPlanner(lengths, seed=seed, rows_per_step=rows_per_step, tokens_per_step=tokens_per_step)
    steps = [step.rows for step in planner.epoch(0)]
    in_order = np.array(lengths)[np.concatenate([np.array(rows) for rows in steps])]
    starts = np.cumsum([0, *(len(rows) for rows in steps[:-1])])
    return _Epoch(steps, np.add.reduceat(in_order, starts))


def micro_batches_of(rows: Sequence[RowCost], train: TrainConfig) -> list[list[RowCost]]:
    """A step's rows as training packs them into micro-batches."""
    return [[rows[i] for i in batch] for batch in pack_lengths([row.tokens for row in rows], train.micro_batch_tokens)]


def counted_rows(rows: Sequence[EncodedRow]) -> Rows:
    """Rows that training has encoded."""
    names = dict.fromkeys(row.source[0].name for row in rows)
    return Rows(
        tuple(row.tokens for row in rows),
        tuple(row.label_tokens for row in rows),
        ", ".join(names),
        "counted",
        len(rows),
    )


def given_rows(count: int, tokens: int, max_tokens: int) -> Rows:
    """`count` rows of `tokens` tokens each, for which there is no data yet.

    Raises:
        UserError: no row, rows of less than two tokens, rows over `max_tokens`.
    """
    if count < 1:
        raise UserError(f"--rows {count}: nothing would be trained", fix="give the number of rows, such as 3600")
    if tokens < 2:
        raise UserError(f"--tokens {tokens}: a row needs a prompt and an answer", fix="give 2 or more")
    if tokens > max_tokens:
        raise UserError(
            f"--tokens {tokens} is more than data.max_tokens = {max_tokens}",
            fix=f"give data.max_tokens={tokens}, or shorter rows",
        )
    return Rows(
        (tokens,) * count, (tokens - 1,) * count, "rows as given", "given",
        notes=("every token but a row's first is taken to be a label, the most there can be",),
    )  # fmt: skip


def rows_of(config: DataConfig, tokenizer_folder: Path | None, seed: int = 0) -> Rows:
    """Rows of `config.train`.

    Args:
        tokenizer_folder: checkpoint or store; None: no tokenizer at hand.

    Raises:
        UserError: no such file, no rows, rows that training would refuse (of those that were looked at).
    """
    from lamella.data.read import find_files, line_sizes

    files = find_files(config.train)
    lines: list[tuple[Path, int, int]] = []
    unseen_bytes = 0
    for path in files:
        room = SCAN_BYTES - sum(nbytes for _, _, nbytes in lines)
        found, whole = line_sizes(path, room) if room > 0 else ([], False)
        lines += [(path, number, nbytes) for number, nbytes in found]
        unseen_bytes += 0 if whole else path.stat().st_size - sum(nbytes for _, nbytes in found)
    if not lines:
        named = ", ".join(map(str, files[:5]))
        raise UserError(f"0 rows in {named}: every file is empty", fix="give rows with a question and an answer")
    rows = _counted(config, files, lines, tokenizer_folder, seed)
    if unseen_bytes > 0:
        rows = _grown(rows, 1 + unseen_bytes / sum(nbytes for _, _, nbytes in lines))
    return rows


def _choose(lines: Sequence[tuple[Path, int, int]], seed: int) -> list[int]:
    """Positions of the lines to look at: all where they are few, else a seeded sample; ascending."""
    if len(lines) <= SAMPLE_ROWS and sum(nbytes for _, _, nbytes in lines) <= SAMPLE_BYTES:
        return list(range(len(lines)))
    chosen: list[int] = []
    left = SAMPLE_BYTES
    for position in random.Random(seed).sample(range(len(lines)), min(SAMPLE_ROWS, len(lines))):
        if left < lines[position][2] and len(chosen) >= _LEAST_ROWS:
            break
        chosen.append(position)
        left -= lines[position][2]
    return sorted(chosen)


def _counted(
    config: DataConfig, files: Sequence[Path], lines: Sequence[tuple[Path, int, int]], folder: Path | None, seed: int
) -> Rows:
    from lamella.data.light import open_light
    from lamella.data.read import read_rows

    chosen = _choose(lines, seed)
    wanted: dict[Path, set[int]] = {}
    for position in chosen:
        path, number, _ = lines[position]
        wanted.setdefault(path, set()).add(number)
    raws = [raw for path in files if path in wanted for raw in read_rows(path, wanted[path])]
    tokenizer = None if folder is None else open_light(folder)
    named = ", ".join(path.name for path in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    if tokenizer is None:
        where = "no tokenizer at hand" if folder is None else f"no tokenizer.json in {folder}"
        kept = _by_characters(config, raws)
        notes = [f"{where}: {CHARACTERS_PER_TOKEN:g} characters taken for a token"]
    else:
        from lamella.data.dataset import encode_rows

        data = encode_rows(config, tokenizer, files, raws)
        kept = {row.source: (row.tokens, row.label_tokens) for row in data.rows}
        notes = [f"{n} of {len(raws)} rows looked at would be dropped: {why}" for why, n in data.report.dropped.items()]
    if not kept:
        raise UserError(f"0 usable rows of {len(raws)} looked at in {named}",
                        fix="give rows with a question and an answer")  # fmt: skip
    if len(chosen) < len(lines):
        notes.append(f"{len(chosen)} of {len(lines)} rows were looked at; the others' tokens follow from their bytes")
    lengths, labels = _spread(config, lines, set(chosen), kept, notes, seed)
    how: Literal["counted", "sampled", "characters"] = "counted" if len(chosen) == len(lines) else "sampled"
    return Rows(
        tuple(lengths), tuple(labels), named, how if tokenizer is not None else "characters",
        0 if tokenizer is None else len(chosen), len(lines) - len(lengths), tuple(notes),
    )  # fmt: skip


def _by_characters(config: DataConfig, raws: Sequence[RawRow]) -> dict[tuple[Path, int], tuple[int, int]]:
    from lamella.data.formats import read_conversation
    from lamella.data.read import RowError

    kept: dict[tuple[Path, int], tuple[int, int]] = {}
    for raw in raws:
        try:
            if raw.value is None:
                assert raw.problem is not None
                raise raw.problem
            _, row = read_conversation(raw.value, config.format)
        except RowError as problem:
            if config.bad_rows == "refuse":
                raise UserError(
                    str(problem), fix='correct the row, or set data.bad_rows = "drop"',
                    path=raw.path, line=raw.line, column=problem.column,
                ) from problem  # fmt: skip
            continue
        answers = [m for m in row.messages if m.role == "assistant" and m.trained]
        answers = answers[-1:] if config.train_on == "last" else answers
        characters = sum(len(m.content) + len(m.reasoning) for m in row.messages)
        label = sum(len(m.content) + len(m.reasoning) for m in answers)
        tokens = max(2, round(characters / CHARACTERS_PER_TOKEN))
        labels = min(tokens - 1, max(1, round(label / CHARACTERS_PER_TOKEN)))
        kept[raw.path, raw.line] = (tokens, labels)
    return kept


def _spread(
    config: DataConfig, lines: Sequence[tuple[Path, int, int]], looked_at: set[int],
    kept: dict[tuple[Path, int], tuple[int, int]], notes: list[str], seed: int,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Tokens and labels of all rows: those looked at as they are, the others by a line through (bytes, tokens)."""
    known = [(nbytes, *kept[path, number]) for path, number, nbytes in lines if (path, number) in kept]
    nbytes_K, tokens_K, labels_K = np.array(known, dtype=float).T
    slope, base = tokens_K.sum() / nbytes_K.sum(), 0.0
    if len(known) >= _LEAST_ROWS and np.ptp(nbytes_K) > 0:
        fitted_slope, fitted_base = np.polyfit(nbytes_K, tokens_K, 1)
        if fitted_slope > 0:
            slope, base = float(fitted_slope), float(fitted_base)
    share = labels_K.sum() / tokens_K.sum()
    usable = len(known) / len(looked_at)
    chance = random.Random(seed + 1)
    lengths, labels, over = [], [], 0
    for position, (path, number, nbytes) in enumerate(lines):
        if position in looked_at:
            if (path, number) not in kept:
                continue
            tokens, label = kept[path, number]
        else:
            tokens = max(2, round(base + slope * nbytes))
            label = min(tokens - 1, max(1, round(share * tokens)))
            if usable < 1 and chance.random() >= usable:
                continue
        if tokens > config.max_tokens:
            over += 1
            if config.too_long == "drop":
                continue
            tokens, label = config.max_tokens, min(label, config.max_tokens - 1)
        lengths.append(tokens)
        labels.append(label)
    if over:
        does = {"refuse": "training will stop at them; taken as cut here", "drop": "dropped", "cut_prompt": "cut"}
        notes.append(f"about {over} rows are over data.max_tokens = {config.max_tokens}: {does[config.too_long]}")
    if not lengths:
        raise UserError(
            f"all {len(lines)} rows are over data.max_tokens = {config.max_tokens}", fix="raise data.max_tokens"
        )
    return lengths, labels


def _grown(rows: Rows, factor: float) -> Rows:
    """More of the same."""
    count = round(len(rows.lengths) * factor)
    times, rest = divmod(count, len(rows.lengths))
    note = (
        f"the first {SCAN_BYTES >> 20} MiB were read; rows beyond, about {count - len(rows.lengths)}, taken to be alike"
    )
    return replace(
        rows, lengths=rows.lengths * times + rows.lengths[:rest], labels=rows.labels * times + rows.labels[:rest],
        how="characters" if rows.how == "characters" else "sampled", notes=(*rows.notes, note),
    )  # fmt: skip


def check_context(rows: Rows, context: int | None, model: str) -> None:
    """Raises `UserError` when rows are longer than the model was made for."""
    longest = max(rows.lengths)
    if context is not None and longest > context:
        over = sum(length > context for length in rows.lengths)
        raise UserError(
            f"{over} of {len(rows.lengths)} rows do not fit the context of {model}, {context} tokens; "
            f"the longest has {longest} tokens",
            fix=f'set data.max_tokens = {context}, and data.too_long = "drop" or "cut_prompt"; or give shorter rows',
        )
