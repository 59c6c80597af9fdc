"""One system measured on one task: `evaluate` -> `SystemResult`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from torch import Tensor

from lamella.console import progress
from lamella.data.formats import THINK_CLOSE, THINK_OPEN
from lamella.errors import UserError
from lamella.eval.labels import parse_generation
from lamella.eval.metrics import Metrics, Prediction, measure
from lamella.eval.scoring import Ids, score_prompts
from lamella.eval.task import Task, TaskRow
from lamella.eval.trie import LabelTrie
from lamella.models.layout import PackedBatch

Mode = Literal["likelihood", "constrained", "generate"]

_VOCABULARY_FIX = "put the tokenizer that belongs to the model into the checkpoint and quantise again"


class PromptEncoder(Protocol):
    """Messages to token ids, the way training encodes them: prompt and answer apart, then joined."""

    @property
    def system(self) -> str | None:
        """System text it adds to chats without a system turn, as the adapter's training did."""
        ...

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end an answer."""
        ...

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> Sequence[int]:
        """The prompt up to where the answer begins."""
        ...

    def answer_ids(self, text: str) -> Sequence[int]:
        """An answer with its terminator."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        ...


class Generated(Protocol):
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def finish(self) -> str: ...


class EvalEngine(Protocol):
    """What evaluation needs of the engine."""

    @property
    def config(self) -> Any: ...
    def score(self, batches: Sequence[PackedBatch]) -> list[Tensor]: ...
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: set[int]
    ) -> Sequence[Generated]: ...


@dataclass(frozen=True)
class SystemResult:
    """One system's answers and figures."""

    name: str
    mode: str
    shots: int
    predictions: tuple[Prediction, ...]
    metrics: Metrics
    seconds: float
    notes: tuple[str, ...] = ()
    """What sets its prompts apart from those of the other systems, or from its training."""

    @property
    def warnings(self) -> list[str]:
        """All that people must be told beside the figures."""
        return [*self.notes, *self.metrics.warnings]

    @property
    def seconds_per_row(self) -> float:
        return self.seconds / len(self.predictions)


def summarise(
    task: Task, name: str, predictions: Sequence[Prediction], *, mode: str, shots: int = 0, start_s: float, seed: int,
    resamples: int, notes: Sequence[str] = (),
) -> SystemResult:  # fmt: skip
    """Measure predictions; `start_s` is the `time.monotonic()` at which the system began."""
    seconds = time.monotonic() - start_s
    metrics = measure(predictions, task.labels, resamples=resamples, seed=seed)
    return SystemResult(name, mode, shots, tuple(predictions), metrics, seconds, tuple(notes))


@dataclass(frozen=True)
class Questions:
    """Questions of one system, encoded and checked before any is asked; made by `encode_questions`.

    Attributes:
        tenants: per tenant its rows, their prompts, and its labels (None in mode "generate").
        seconds: time taken.
    """

    tenants: tuple[tuple[list[TaskRow], list[Ids], LabelTrie | None], ...]
    seconds: float


def encode_questions(
    task: Task, config: Any, encoder: PromptEncoder, *, mode: Mode = "likelihood", shots: int = 0, seed: int = 0,
    max_new_tokens: int | None = None,
) -> Questions:  # fmt: skip
    """Encode every test row's prompt, and the labels. Arguments as in `evaluate`; `config` is the model's.

    Raises:
        UserError: unknown mode, a prompt beyond the model's context, a token beyond its vocabulary, too few training
            rows for the shots, labels that cannot be told apart.
    """
    if mode not in get_args(Mode):
        raise UserError(f"unknown mode {mode!r}", fix=f"use one of {', '.join(get_args(Mode))}")
    start_s = time.monotonic()
    limit = max_new_tokens or task.config.max_new_tokens
    config = getattr(config, "text_config", None) or config
    done: list[tuple[list[TaskRow], list[Ids], LabelTrie | None]] = []
    for tenant in task.tenants:
        rows, labels = task.rows_of(tenant), task.labels[tenant]
        examples = task.choose_shots(tenant, shots, seed)
        prompts = [_prompt_ids(task, encoder, r, examples) for r in rows]
        for row, ids in zip(rows, prompts, strict=True):
            if what := _beyond_vocabulary(config, encoder, ids):
                raise _row_error(row, what, _VOCABULARY_FIX)
        if mode == "generate":
            _check_context(config, rows, prompts, limit)
            done.append((rows, prompts, None))
            continue
        answers = [encoder.answer_ids(label) for label in labels]
        for label, answer in zip(labels, answers, strict=True):
            if what := _beyond_vocabulary(config, encoder, answer):
                raise UserError(f"label {label!r} of tenant {tenant!r}: {what}", fix=_VOCABULARY_FIX)
        trie = LabelTrie(labels, answers)
        _check_context(config, rows, prompts, max(map(len, trie.paths)) - 1)
        check_thinking(encoder, prompts[0], mode)
        done.append((rows, prompts, trie))
    return Questions(tuple(done), time.monotonic() - start_s)


def evaluate(
    task: Task,
    engine: EvalEngine,
    encoder: PromptEncoder,
    *,
    questions: Questions | None = None,
    notes: Sequence[str] = (),
    mode: Mode = "likelihood",
    shots: int = 0,
    name: str | None = None,
    batch_tokens: int = 4096,
    walk_tokens: int = 65536,
    length_normalise: bool = False,
    max_new_tokens: int | None = None,
    seed: int = 0,
    resamples: int = 1000,
) -> SystemResult:
    """Ask the model for every test row's label.

    Args:
        questions: made before with the same task, encoder, mode, shots, seed and limit; None: made here.
        notes: what else the reader of the figures must know of this system.
        mode: "likelihood": the label whose tokens and terminator are likeliest; "constrained": what greedy decoding
            writes when it may write labels only; "generate": greedy decoding without limits, then parsed.
        shots: few-shot examples per prompt, from the tenant's training rows.
        batch_tokens: token budget of a micro-batch (of all rows generating together in "generate"). In fp32 it changes
            memory and speed alone; in bf16 and fp16 scores move by rounding too (1e-2 to 1e-1 nats), so labels that are
            nearly tied may change.
        walk_tokens: token budget of all micro-batches that are scored in one walk through the layers.
        length_normalise: compare log-probabilities per label token ("likelihood" only).
        max_new_tokens: limit of "generate"; None: the task's.
        seed: chooses few-shot examples and resamples.

    Raises:
        UserError: what `encode_questions` refuses.
    """
    if questions is None:
        questions = encode_questions(
            task, engine.config, encoder, mode=mode, shots=shots, seed=seed, max_new_tokens=max_new_tokens
        )
    start_s = time.monotonic() - questions.seconds
    name = name or (f"{shots}-shot" if shots else "zero-shot")
    limit = max_new_tokens or task.config.max_new_tokens
    predictions: list[Prediction] = []
    with progress(f"eval {name}", len(task.test), "rows") as meter:
        for rows, prompts, trie in questions.tenants:
            if trie is None:
                predictions += generate_rows(task, engine, encoder, rows, prompts, limit, batch_tokens, meter.advance)
                continue
            edges_NE = score_prompts(
                engine, prompts, trie, batch_tokens=batch_tokens, walk_tokens=walk_tokens, on_rows=meter.advance
            )
            predictions += label_predictions(rows, trie, edges_NE, mode, length_normalise)
    return summarise(
        task, name, predictions, mode=mode, shots=shots, start_s=start_s, seed=seed, resamples=resamples,
        notes=[*notes, *_system_notes(task, encoder.system)],
    )  # fmt: skip


def _system_notes(task: Task, trained: str | None) -> list[str]:
    """What there is to say when an adapter brings a system text (`data.system` of its training)."""
    if trained is None:
        return []
    if task.config.system is None:
        return [f"its prompts begin with the system text of the adapter's training, {trained[:60]!r}"]
    other = [tenant for tenant in task.tenants if task.system_text(tenant) != trained]
    if not other:
        return []
    return [
        f"the task's `system` is not the text the adapter was trained with ({trained[:60]!r}) for {', '.join(other)}; "
        "the task's is used"
    ]


def _row_error(row: TaskRow, what: str, fix: str) -> UserError:
    path, line = row.place or (None, None)
    return UserError(f"row {row.id!r} of tenant {row.tenant!r}: {what}", fix=fix, path=path, line=line)


def _prompt_ids(task: Task, encoder: PromptEncoder, row: TaskRow, examples: Sequence[TaskRow]) -> Ids:
    try:
        return tuple(encoder.prompt_ids(task.messages(row, examples)))
    except UserError as error:
        raise _row_error(row, error.what, error.fix) from error


def _beyond_vocabulary(config: Any, encoder: PromptEncoder, ids: Sequence[int]) -> str | None:
    size = getattr(config, "vocab_size", None)
    if size is None or not ids or max(ids) < size:
        return None
    token = next(i for i in ids if i >= size)
    return f"it needs the token {encoder.decode([token])!r} with id {token}, but the model's vocab_size is {size}"


def _check_context(config: Any, rows: Sequence[TaskRow], prompts: Sequence[Ids], answer_tokens: int) -> None:
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        return
    for row, ids in zip(rows, prompts, strict=True):
        if len(ids) + answer_tokens > context:
            raise _row_error(
                row,
                f"{len(ids)} prompt tokens and up to {answer_tokens} answer tokens do not fit the model's context of "
                f"{context}",
                "use fewer few-shot examples, a shorter prompt, or leave the row out",
            )


def thinking_opened(encoder: PromptEncoder, prompt: Ids) -> bool:
    """Whether the prompt ends inside an opened `<think>`."""
    text = encoder.decode(prompt[-8:])
    return text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)


def check_thinking(encoder: PromptEncoder, prompt: Ids, mode: str) -> None:
    """Raises `UserError`: labels would be scored where the template lets reasoning begin."""
    if thinking_opened(encoder, prompt):
        raise UserError(
            f"the chat template opens {THINK_OPEN} where the answer begins, so mode {mode!r} would score reasoning",
            fix="use --mode generate, or a chat template without reasoning",
        )


def label_predictions(
    rows: Sequence[TaskRow], trie: LabelTrie, edges_NE: np.ndarray, mode: Mode, length_normalise: bool
) -> list[Prediction]:
    """Labels of rows from the log-probabilities of the trie's edges after each row's prompt."""
    scores_NL = trie.likelihoods(edges_NE, length_normalise=length_normalise and mode == "likelihood")
    found = []
    for n, row in enumerate(rows):
        scores_L = scores_NL[n]
        best = trie.greedy(edges_NE[n]) if mode == "constrained" else int(np.argmax(scores_L))  # first of equals
        weights_L = np.exp(scores_L - scores_L.max())
        ranked = np.sort(scores_L)
        assert row.id is not None
        found.append(
            Prediction(
                row.tenant,
                row.id,
                row.document,
                row.label,
                trie.labels[best],
                scores=dict(zip(trie.labels, map(float, scores_L), strict=True)),
                probabilities=dict(zip(trie.labels, map(float, weights_L / weights_L.sum()), strict=True)),
                margin=float(ranked[-1] - ranked[-2]),
            )
        )
    return found


def _runs(prompts: Sequence[Ids], limit: int, batch_tokens: int) -> Iterator[slice]:
    """Prompts generated together: rows x (longest prompt + limit) stays within the budget, one row at least."""
    first = longest = 0
    for n, ids in enumerate(prompts):
        longest_with = max(longest, len(ids) + limit)
        if n > first and (n - first + 1) * longest_with > batch_tokens:
            yield slice(first, n)
            first, longest_with = n, len(ids) + limit
        longest = longest_with
    yield slice(first, len(prompts))


def generate_rows(
    task: Task, engine: EvalEngine, encoder: PromptEncoder, rows: Sequence[TaskRow], prompts: Sequence[Ids], limit: int,
    batch_tokens: int, on_rows: Callable[[int], None],
) -> list[Prediction]:  # fmt: skip
    """Greedy answers to rows of one tenant, parsed; `limit`: new tokens, `batch_tokens`: of all rows together."""
    found: list[Prediction] = []
    parser = task.parser_of(rows[0].tenant)
    for run in _runs(prompts, limit, batch_tokens):
        outputs = engine.generate(prompts[run], max_new_tokens=limit, stop_ids=encoder.stop_ids)
        for row, prompt, output in zip(rows[run], prompts[run], outputs, strict=True):
            assert output.finish in ("stop", "length"), output.finish
            assert row.id is not None
            ids = list(output.ids)
            while ids and ids[-1] in encoder.stop_ids:
                ids.pop()
            read = parse_generation(
                encoder.decode(ids), stopped=output.finish == "stop", parser=parser,
                thinking_opened=thinking_opened(encoder, prompt),
            )  # fmt: skip
            found.append(
                Prediction(row.tenant, row.id, row.document, row.label, read.label, read.status, output=read.answer,
                           reasoning=read.reasoning or None)
            )  # fmt: skip
        on_rows(run.stop - run.start)
    return found
