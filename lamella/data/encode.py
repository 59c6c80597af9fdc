"""Conversations to token ids and label masks; the same code makes the prompts for inference."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lamella.data.formats import Conversation, Message, read_messages, read_tools
from lamella.data.read import RowError
from lamella.data.render import ChatTemplate, Layout
from lamella.data.text import Run, Segment, TextEncoder
from lamella.errors import UserError

NOT_TEMPLATE = "text that looks like a control token encoded as ordinary text"
NORMALISED = "text changed by the tokenizer's own normaliser (such as NFC)"
LOSSY = "text before an answer that its tokens do not give back (unknown characters)"
TRIMMED = "white space at the ends of an answer trimmed by the template"
REASONING_DROPPED = "reasoning of an assistant turn left out by the template"
CONTENT_DROPPED = "text beside a tool call left out by the template"
OTHER_PROMPT = "text before an answer differs from the prompt the template gives at inference"

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tiktoken.model", "tekken.json",
)  # fmt: skip
_TOKENIZER_FIX = "put the tokenizer's files into the checkpoint and quantise again"


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row ready for packing.

    Attributes:
        row_id: stable index of the row among all rows read (kept or not).
        input_ids: token ids, int32 array [T].
        label_mask: one byte a token [T]; 1 where the token is a target (never at position 0).
        source: (file, physical line).
        notes: what was done to the row, each counted in the report.
    """

    row_id: int
    input_ids: array[int]
    label_mask: bytes
    source: tuple[Path, int]
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    @property
    def label_tokens(self) -> int:
        return self.label_mask.count(1)


@dataclass
class Encoding:
    """Ids and mask of one conversation, before any cut to length."""

    ids: list[int]
    mask: bytearray
    notes: list[str] = field(default_factory=list)
    dropped_reasoning_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens before the last trained answer."""
    prompt_matches: bool = True
    """The tokens before the last answer are those of `encode_prompt` for the same messages."""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a store or checkpoint folder; nothing is fetched.

    Raises:
        UserError: the folder has no tokenizer that transformers can read, or files of one that are broken.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            "no usable tokenizer: no tokenizer.json, nor files of another kind", fix=_TOKENIZER_FIX, path=folder
        )
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        if file.is_file():
            check_json_object(file)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        # The tokenizers library raises bare `Exception`; whatever else is not named here is a bug.
        if type(error) is not Exception and not isinstance(error, OSError | ValueError | KeyError | TypeError):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"no usable tokenizer: {first}", fix=_TOKENIZER_FIX, path=folder) from error


def check_json_object(file: Path) -> None:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"broken JSON: {error.msg}", fix=_TOKENIZER_FIX, path=file, line=error.lineno, column=error.colno
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", fix=_TOKENIZER_FIX, path=file) from error
    if not isinstance(tree, dict):
        raise UserError("must hold a JSON object", fix=_TOKENIZER_FIX, path=file)


class Encoder:
    """Encodes rows and prompts for one tokenizer and chat template.

    Args:
        tokenizer: a transformers fast tokenizer.
        chat_template: jinja text to use in place of the tokenizer's own.
        system: system text for chats without a system message.
        train_on: label all assistant turns, or the last one.

    Attributes:
        template: None when there is no chat template (then only plain prompt/completion rows can be encoded).
        stop_ids: ids that end an answer: the template's end-of-turn tokens and the tokenizer's eos.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: str | None = None, system: str | None = None,
        train_on: Literal["all", "last"] = "all",
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.text = TextEncoder(tokenizer)
        self.system = system
        self.train_on = train_on
        known = chat_template is not None or tokenizer.chat_template
        self.template = ChatTemplate(tokenizer, self.text, chat_template) if known else None
        ids = [self._control(t) for t in (self.template.terminators if self.template else ())]
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
            ids.append(tokenizer.eos_token_id)
        self.stop_ids: tuple[int, ...] = tuple(ids)
        self._plain_prefix = [] if self.template else self._leading_specials()

    def _control(self, text: str) -> int:
        found = self.text.control_id(text)
        assert found is not None, text
        return found

    def _leading_specials(self) -> list[int]:
        """What the tokenizer's post-processor puts before a text: BOS, or nothing.

        Raises:
            UserError: the text cannot be found in what it makes of it, so what stands before it is unknown.
        """
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        for start in range(len(full) - len(bare) + 1 if bare else 0):
            if full[start : start + len(bare)] == bare:
                return list(full[:start])
        raise UserError(
            f"cannot tell what the tokenizer puts before a text: 'a' is {bare} without and {full} with special tokens",
            fix="correct post_processor in tokenizer.json, or set data.chat_template",
        )

    # ---- prompts ----------------------------------------------------------------------------------------

    def encode_prompt(
        self, messages: str | Sequence[Any], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of the prompt for the next assistant turn: exactly the training prefix of the same messages.

        Args:
            messages: message objects (or dicts), or a plain text when there is no chat template.
            tools: tool schemas.

        Raises:
            RowError: messages that the template refuses.
            UserError: messages without a chat template.
        """
        if isinstance(messages, str):
            if self.template is None:
                runs = self.text.runs(messages, (Segment(0, len(messages), "data"),), ())
                return [*self._plain_prefix, *(i for ids in self.text.encode(runs) for i in ids)]
            messages = [Message("user", messages)]
        typed = [m for m in messages if isinstance(m, Message)]
        if len(typed) != len(messages):
            typed = read_messages(messages)
        layout = self._layout(typed, read_tools(list(tools) if tools else None), add_generation_prompt)
        seams = [turn.start for turn in layout.turns]
        return [i for ids in self.text.encode(self.text.runs(layout.text, layout.segments, seams)) for i in ids]

    def _layout(self, messages: Sequence[Message], tools: tuple[dict[str, Any], ...], generation: bool) -> Layout:
        if self.template is None:
            raise UserError(
                "rows are chats, and the tokenizer has no chat template", fix="set data.chat_template to a jinja file"
            )
        if self.system is not None and messages and messages[0].role != "system":
            messages = [Message("system", self.system), *messages]
        return self.template.layout(self.template.prepare(messages), tools, generation)

    # ---- training rows ----------------------------------------------------------------------------------

    def encode(self, row: Conversation) -> Encoding:
        """Ids and label mask of a training row, checked: decoded labels are the answers with their terminators.

        Raises:
            RowError: the row cannot be encoded exactly.
            UserError: a chat without a chat template.
        """
        if row.plain is not None and self.template is None:
            if row.tools or row.messages[0].role == "system":
                what = "`tools`" if row.tools else "`system`"
                raise RowError("no chat template", f"{what} cannot be shown without one; set data.chat_template")
            return self._encode_plain(*row.plain)
        if row.plain is not None and not row.plain[0].strip():
            raise RowError("no question", "`prompt` is empty")
        layout = self._layout(row.messages, row.tools, generation=False)
        shift = _index_shift(row.messages, self)
        trained = [t for t in layout.turns if row.messages[t.message - shift].trained]
        trained = trained[-1:] if self.train_on == "last" else trained
        if not trained:
            raise RowError("no answer", "every assistant turn has weight 0")
        encoding = self._encode_layout(layout, trained)
        for turn in layout.turns:
            message = row.messages[turn.message - shift]
            if turn.dropped_reasoning:
                encoding.notes.append(REASONING_DROPPED)
                encoding.dropped_reasoning_tokens += len(self.text.encode_text(turn.dropped_reasoning))
            if turn.dropped_content:
                encoding.notes.append(CONTENT_DROPPED)
            elif turn in trained and message.content not in layout.text[turn.start : turn.end]:
                encoding.notes.append(TRIMMED)
            if turn in trained and not turn.prompt_matches:
                encoding.notes.append(OTHER_PROMPT)
        encoding.prompt_matches = trained[-1].prompt_matches
        if layout.data_control_text:
            encoding.notes.append(NOT_TEMPLATE)
        encoding.notes = sorted(set(encoding.notes))
        return encoding

    def _encode_layout(self, layout: Layout, trained: Sequence[Any]) -> Encoding:
        cuts = [turn.start for turn in layout.turns] + [turn.end for turn in trained]
        runs = self.text.runs(layout.text, layout.segments, cuts)
        encoded = self.text.encode(runs)
        ids: list[int] = []
        mask = bytearray()
        notes: list[str] = []
        spans = iter(trained)
        span = next(spans)
        prompt_tokens = first_label = 0
        label_text: list[str] = []
        for run, run_ids in zip(runs, encoded, strict=True):
            while span is not None and run.start >= span.end:
                span = next(spans, None)
            label = span is not None and run.start >= span.start
            if label and not label_text:
                first_label = prompt_tokens = len(ids)
            if not label:
                notes += self._prompt_notes(run, run_ids)
            ids += run_ids
            mask += (b"\1" if label else b"\0") * len(run_ids)
            if label:
                label_text.append(run.text)
            if span is not None and label_text and run.end >= span.end:
                notes += self._check_labels(ids[first_label:], "".join(label_text), span)
                label_text = []
        return Encoding(ids, mask, notes, prompt_tokens=prompt_tokens)

    def _prompt_notes(self, run: Run, ids: list[int]) -> list[str]:
        """What is to be said of text before an answer that its ids do not stand for exactly."""
        if run.token_id is not None:
            return []
        same = self.text.decodes_to(ids, run.text)
        return [] if same == "same" else [NORMALISED if same == "normalised" else LOSSY]

    def _check_labels(self, ids: list[int], text: str, turn: Any) -> list[str]:
        if turn.terminator is None or not text.rstrip().endswith(turn.terminator):
            raise RowError("no terminator", f"no end-of-turn token after the answer of message {turn.message}")
        same = self.text.decodes_to(ids, text)
        if same == "different":
            got = self.text.decode(ids)
            raise RowError("labels do not decode", f"message {turn.message}: wanted {text[:60]!r}, got {got[:60]!r}")
        return [NORMALISED] if same == "normalised" else []

    def _encode_plain(self, prompt: str, completion: str) -> Encoding:
        """Prompt and completion encoded apart and joined by ids, then eos."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise UserError("the tokenizer has no eos token to end a completion with", fix="set data.chat_template")
        text = prompt + completion
        segments = (Segment(0, len(prompt), "data"), Segment(len(prompt), len(text), "assistant"))
        runs = self.text.runs(text, segments, (len(prompt),))
        encoded = self.text.encode(runs)
        before = [i for run, ids in zip(runs, encoded, strict=True) if run.start < len(prompt) for i in ids]
        after = [i for run, ids in zip(runs, encoded, strict=True) if run.start >= len(prompt) for i in ids]
        before = [*self._plain_prefix, *before]
        if not before:
            raise RowError("no question", "empty prompt and no BOS: nothing predicts the answer")
        same = self.text.decodes_to(after, completion)
        if same == "different":
            raise RowError("labels do not decode", f"wanted {completion[:60]!r}, got {self.text.decode(after)[:60]!r}")
        notes = [NORMALISED] if same == "normalised" else []
        for run, ids in zip(runs, encoded, strict=True):
            if run.start < len(prompt):
                notes += self._prompt_notes(run, ids)
        notes = sorted(set(notes))
        if self.text.has_control_text(text):
            notes.append(NOT_TEMPLATE)
        mask = bytearray(len(before)) + b"\1" * (len(after) + 1)
        return Encoding([*before, *after, eos], mask, notes, prompt_tokens=len(before))


def _index_shift(messages: Sequence[Message], encoder: Encoder) -> int:
    """How much later a message stands in the rendered chat than in the row (system added or folded)."""
    prepared: Sequence[Message] = messages
    if encoder.system is not None and messages[0].role != "system":
        prepared = [Message("system", encoder.system), *messages]
    assert encoder.template is not None
    return len(encoder.template.prepare(prepared)) - len(messages)


def stop_ids(tokenizer: Any, chat_template: str | None = None) -> tuple[int, ...]:
    """Ids that end an answer: end-of-turn tokens found in rendered text, then the tokenizer's eos."""
    return Encoder(tokenizer, chat_template=chat_template).stop_ids
