"""Files to an encoded data set with a report of everything that was kept, changed, cut or dropped.

Rows over `data.max_tokens` (prompt, answer and end-of-turn token together) never lose a part of an answer:
- `too_long = "refuse"`: an error before training, with the number of such rows and the longest one;
- `too_long = "drop"`: left out, counted as "too long", and counted towards `max_drop_share`;
- `too_long = "cut_prompt"`: tokens go from the left of the prompt (a BOS stays while two tokens of prompt do); all label
  tokens with their end-of-turn token and at least one token before them stay. A row whose labels leave no room for
  that is unusable: counted as "no label token", and `bad_rows` says whether it stops the run or is dropped.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamella.config import DataConfig
from lamella.data.encode import EncodedRow, Encoder, Encoding
from lamella.data.formats import Conversation, read_conversation
from lamella.data.read import RawRow, RowError, find_files, read_rows
from lamella.data.steps import StepPlanner
from lamella.errors import UserError

if TYPE_CHECKING:
    from lamella.models.layout import PackedBatch

TOO_LONG = "too long"
_SHOWN = 10
_SELF_CHECKS = 8

_FIXES = {
    "wrong format": "rows need `messages`, `prompt` + `completion`, `conversations` or `instruction` + `output`",
    "ambiguous format": "set data.format",
    TOO_LONG: 'raise data.max_tokens, or set data.too_long = "drop" or "cut_prompt"',
    "unknown role": "rename the roles to system, user, assistant, tool",
    "template refuses": "correct the rows, or set data.chat_template",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A row that was not kept."""

    path: Path
    line: int
    reason: str
    detail: str
    column: int | None = None

    def __str__(self) -> str:
        where = ":".join(str(x) for x in (self.path, self.line, self.column) if x is not None)
        return f"{where}: {self.reason}" + (f": {self.detail}" if self.detail else "")


@dataclass
class DataReport:
    """What became of the rows. Counts are rows unless their name says tokens."""

    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """File -> format -> rows read in that format (rows of no format are in `dropped`)."""
    rows_read: int = 0
    rows_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    """Repairs and changes of text -> rows."""
    tokens: int = 0
    label_tokens: int = 0
    cut_rows: int = 0
    cut_tokens: int = 0
    dropped_reasoning_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row that was encoded, as used (rows dropped as too long: their full length)."""
    train_on: str = ""
    system: str = ""
    template_sha256: str | None = None
    terminators: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    warnings: list[str] = field(default_factory=list)

    @property
    def rows_dropped(self) -> int:
        return sum(self.dropped.values())

    def length_percentiles(self) -> dict[str, int]:
        """Nearest-rank percentiles of `lengths` in tokens."""
        ordered = sorted(self.lengths)
        if not ordered:
            return {}
        ranks = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: ordered[min(int(q * len(ordered)), len(ordered) - 1)] for name, q in ranks.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "files": self.files, "rows_read": self.rows_read, "rows_kept": self.rows_kept,
            "dropped": self.dropped, "problems": [str(p) for p in self.problems[:_SHOWN]], "notes": self.notes,
            "tokens": self.tokens, "label_tokens": self.label_tokens,
            "label_share": self.label_tokens / self.tokens if self.tokens else 0.0,
            "cut_rows": self.cut_rows, "cut_tokens": self.cut_tokens,
            "dropped_reasoning_tokens": self.dropped_reasoning_tokens, "length_tokens": self.length_percentiles(),
            "train_on": self.train_on, "system": self.system, "template_sha256": self.template_sha256,
            "terminators": list(self.terminators), "stop_ids": list(self.stop_ids), "warnings": self.warnings,
        }  # fmt: skip

    def drop_table(self) -> str:
        """Dropped rows by reason, most frequent first, each with its first example."""
        lines = []
        for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0])):
            first = next(p for p in self.problems if p.reason == reason)
            lines.append(f"  {count:>8}  {reason}   e.g. {first}")
        return "\n".join(lines)

    def lines(self) -> list[str]:
        """The report as people read it."""
        shown = [f"{path}: {', '.join(f'{n} {name}' for name, n in counts.items()) or 'no row'}"
                 for path, counts in self.files.items()]  # fmt: skip
        shown.append(f"rows: {self.rows_read} read, {self.rows_kept} kept, {self.rows_dropped} dropped")
        if self.dropped:
            shown.append(self.drop_table())
        shown += [f"  {count:>8}  {note}" for note, count in self.notes.items()]
        share = 100 * self.label_tokens / self.tokens if self.tokens else 0.0
        shown.append(f"tokens: {self.tokens}, of which {self.label_tokens} trained ({share:.1f} %)")
        if self.cut_rows:
            shown.append(f"prompts cut from the left: {self.cut_rows} rows, {self.cut_tokens} tokens")
        if self.lengths:
            shown.append("length in tokens: " + ", ".join(f"{k} {v}" for k, v in self.length_percentiles().items()))
        shown += [f"trained: {self.train_on}", f"system: {self.system}"]
        if self.terminators:
            shown.append(f"end of turn: {' '.join(self.terminators)}; template sha256 {str(self.template_sha256)[:12]}")
        return shown + [f"warning: {text}" for text in self.warnings]


@dataclass(frozen=True)
class EncodedDataset:
    """Rows in the order of their files, with the report on them."""

    rows: tuple[EncodedRow, ...]
    report: DataReport
    encoder: Encoder

    def planner(self, *, seed: int, rows_per_step: int | None, tokens_per_step: int) -> StepPlanner:
        """Optimizer steps over these rows."""
        lengths = [row.tokens for row in self.rows]
        return StepPlanner(lengths, seed=seed, rows_per_step=rows_per_step, tokens_per_step=tokens_per_step)

    def batches(self, micro_batch_tokens: int, rows: Sequence[int] | None = None) -> list[PackedBatch]:
        """Micro-batches of the given rows (indices; default all)."""
        from lamella.data.batching import micro_batches

        chosen = self.rows if rows is None else [self.rows[i] for i in rows]
        return micro_batches(chosen, micro_batch_tokens)


def encode_dataset(config: DataConfig, tokenizer: Any, paths: Sequence[Path] | None = None) -> EncodedDataset:
    """Read, check, encode.

    Args:
        paths: files or folders to read in place of `config.train` (validation data).

    Raises:
        UserError: no usable row; bad or too long rows that may not be dropped; more rows dropped than
            `max_drop_share`. The message has counts by reason and file, line and column of examples.
    """
    files = find_files(config.train if paths is None else paths)
    return encode_rows(config, tokenizer, files, (raw for path in files for raw in read_rows(path)))


def encode_rows(config: DataConfig, tokenizer: Any, files: Sequence[Path], rows: Iterable[RawRow]) -> EncodedDataset:
    """Check and encode rows of `files`, in their order. Raises as `encode_dataset` does."""
    source = None if config.chat_template is None else _template_text(config.chat_template)
    encoder = Encoder(tokenizer, chat_template=source, system=config.system, train_on=config.train_on)
    builder = _Builder(config, encoder)
    for path in files:
        builder.start_file(path)
    for raw in rows:
        builder.add(raw)
    return builder.finish(files)


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat template cannot be read: {error}", fix="check data.chat_template", path=path) from error


class _Builder:
    def __init__(self, config: DataConfig, encoder: Encoder) -> None:
        self.config = config
        self.encoder = encoder
        self.report = DataReport()
        self.rows: list[EncodedRow] = []
        self._dropped: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._systems: Counter[str] = Counter()
        self._longest: tuple[int, RawRow] | None = None
        self._checked = 0

    def start_file(self, path: Path) -> None:
        self.report.files.setdefault(str(path), {})

    def add(self, raw: RawRow) -> None:
        row_id = self.report.rows_read
        self.report.rows_read += 1
        try:
            if raw.value is None:
                assert raw.problem is not None
                raise raw.problem
            name, row = read_conversation(raw.value, self.config.format)
            counts = self.report.files[str(raw.path)]
            counts[name] = counts.get(name, 0) + 1
            encoding = self.encoder.encode(row)
            self._self_check(row, encoding)
            cut = self._fit(encoding, raw)
        except RowError as problem:
            self._dropped[problem.reason] += 1
            self.report.problems.append(Problem(raw.path, raw.line, problem.reason, problem.detail, problem.column))
            return
        except UserError as error:
            raise UserError(error.what, fix=error.fix, path=raw.path, line=raw.line) from error
        notes = (*dict.fromkeys(row.repairs), *encoding.notes)
        self._notes.update(notes)
        self._count_system(row)
        self.report.cut_rows += cut > 0
        self.report.cut_tokens += cut
        self.report.dropped_reasoning_tokens += encoding.dropped_reasoning_tokens
        self.report.lengths.append(len(encoding.ids))
        self.report.tokens += len(encoding.ids)
        self.report.label_tokens += encoding.mask.count(1)
        self.rows.append(
            EncodedRow(row_id, array("i", encoding.ids), bytes(encoding.mask), (raw.path, raw.line), notes)
        )

    def _fit(self, encoding: Encoding, raw: RawRow) -> int:
        """Cut to `max_tokens` where asked; returns the tokens cut. Answers are never cut."""
        first_label = encoding.mask.find(1)
        if first_label < 0:
            raise RowError("no label token", "no token of this row would be trained")
        if first_label == 0:
            raise RowError("no question", "nothing stands before the answer to predict its first token")
        length, limit = len(encoding.ids), self.config.max_tokens
        if length <= limit:
            return 0
        if self._longest is None or length > self._longest[0]:
            self._longest = (length, raw)
        if self.config.too_long != "cut_prompt":
            self.report.lengths.append(length)
            raise RowError(TOO_LONG, f"{length} tokens, data.max_tokens is {limit}")
        keep = 1 if encoding.ids[0] == self.encoder.tokenizer.bos_token_id else 0
        cut = length - limit
        if first_label - cut < 1:
            answer = length - first_label
            detail = f"the part from the first answer on has {answer} tokens, data.max_tokens is {limit}"
            raise RowError("no label token", detail + ": cutting the prompt cannot make room")
        if keep and first_label - cut < 2:
            keep = 0
        del encoding.ids[keep : keep + cut]
        del encoding.mask[keep : keep + cut]
        return cut

    def _self_check(self, row: Conversation, encoding: Encoding) -> None:
        """The first rows prove that an inference prompt has the ids of the training prefix."""
        if self._checked >= _SELF_CHECKS or not encoding.prompt_matches:
            return
        self._checked += 1
        if row.plain is not None and self.encoder.template is None:
            prompt = self.encoder.encode_prompt(row.plain[0])
        else:
            last = max(i for i, m in enumerate(row.messages) if m.role == "assistant" and m.trained)
            prompt = self.encoder.encode_prompt(row.messages[:last], row.tools)
        if prompt != encoding.ids[: encoding.prompt_tokens]:
            raise RowError("prompt differs", "training prefix and inference prompt have different ids")

    def _count_system(self, row: Conversation) -> None:
        if row.plain is not None and self.encoder.template is None:
            return
        system = row.messages[0].content if row.messages[0].role == "system" else None
        self._systems["none" if system is None else "own" if system else "empty"] += 1

    # ---- the end ----------------------------------------------------------------------------------------

    def finish(self, files: Sequence[Path]) -> EncodedDataset:
        report = self.report
        report.rows_kept = len(self.rows)
        report.dropped = dict(self._dropped.most_common())
        report.notes = dict(self._notes.most_common())
        report.stop_ids = self.encoder.stop_ids
        report.train_on = {
            "all": "all assistant turns, each with its end-of-turn token",
            "last": "the last assistant turn with its end-of-turn token",
        }[self.config.train_on]
        report.system = self._system_rule()
        if (template := self.encoder.template) is not None:
            report.template_sha256 = template.sha256
            report.terminators = template.terminators
            self._template_warnings()
        elif self.config.system is not None:
            report.warnings.append("data.system is not used: there is no chat template to show it")
        if report.dropped_reasoning_tokens:
            report.warnings.append(
                f"the template leaves out {report.dropped_reasoning_tokens} reasoning tokens; they are not trained"
            )
        self._refuse(files)
        return EncodedDataset(tuple(self.rows), report, self.encoder)

    def _system_rule(self) -> str:
        template = self.encoder.template
        if template is None:
            return "none (plain prompt and completion, no chat template)"
        parts = []
        if own := self._systems["own"]:
            parts.append(f"{own} rows have their own text")
        if empty := self._systems["empty"]:
            parts.append(f"{empty} rows have an empty system turn, rendered as such")
        if none := self._systems["none"]:
            if self.config.system is not None:
                what = f"get data.system {self.config.system[:60]!r}"
            elif template.default_system:
                what = f"get the template's default {template.default_system[:60]!r}"
            else:
                what = "get none"
            parts.append(f"{none} rows without one {what}")
        if template.system == "folded" and (self._systems["own"] or self.config.system):
            parts.append("the template has no system turn: its text is put before the first user turn")
        return "; ".join(parts) or "none"

    def _template_warnings(self) -> None:
        template = self.encoder.template
        assert template is not None
        if template.added_header:
            self.report.warnings.append(
                f"the template ignores add_generation_prompt; {template.added_header!r} is added to prompts"
            )
        if template.dated:
            self.report.warnings.append("the template may print today's date: the text of rows depends on the day")

    def _refuse(self, files: Sequence[Path]) -> None:
        report = self.report
        if not self.rows:
            reasons = report.drop_table() if report.dropped else "  every file is empty or has only blank lines"
            first = next(iter(report.dropped), None)
            named = ", ".join(str(f) for f in files[:5])
            raise UserError(
                f"0 usable rows of {report.rows_read} in {named}; dropped by reason:\n{reasons}",
                fix=_FIXES.get(first or "", "give rows with a question and an answer"),
            )
        bad = report.rows_dropped - report.dropped.get(TOO_LONG, 0)
        if bad and self.config.bad_rows == "refuse":
            first_problem = next(p for p in report.problems if p.reason != TOO_LONG)
            what = first_problem.reason + (f": {first_problem.detail}" if first_problem.detail else "")
            raise UserError(
                f"{what}\n{bad} of {report.rows_read} rows cannot be used:\n{report.drop_table()}",
                fix='correct the rows, or set data.bad_rows = "drop"',
                path=first_problem.path, line=first_problem.line, column=first_problem.column,
            )  # fmt: skip
        if (long := report.dropped.get(TOO_LONG, 0)) and self.config.too_long == "refuse":
            assert self._longest is not None
            length, raw = self._longest
            raise UserError(
                f"{long} of {report.rows_read} rows are over data.max_tokens = {self.config.max_tokens}; "
                f"this one, the longest, has {length} tokens",
                fix=_FIXES[TOO_LONG], path=raw.path, line=raw.line,
            )  # fmt: skip
        if report.rows_dropped > self.config.max_drop_share * report.rows_read:
            share = report.rows_dropped / report.rows_read
            raise UserError(
                f"{report.rows_dropped} of {report.rows_read} rows ({100 * share:.1f} %) would be dropped, "
                f"more than data.max_drop_share = {self.config.max_drop_share:g}:\n{report.drop_table()}",
                fix="correct the rows, or raise data.max_drop_share",
            )


def iter_label_text(row: EncodedRow, encoder: Encoder) -> Iterator[tuple[bool, str]]:
    """(trained, text) pieces of a row in order."""
    start = 0
    ids, mask = row.input_ids, row.label_mask
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            yield bool(mask[start]), encoder.text.decode(ids[start:i])
            start = i
