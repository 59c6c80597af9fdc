"""Text to token ids in which a control token appears only where the chat template wrote it.

A rendered chat is cut into *runs*: at every control token that stands in text of the template, and at
every seam (a place where generation starts). Ordinary runs are encoded by a copy of the tokenizer that
knows no control tokens, so no text of a user can become one; control tokens become their ids directly.
Since seams are cuts, the ids before a seam are the ids of the prompt, whatever follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from lamella.data.read import RowError
from lamella.errors import UserError

Kind = Literal["template", "assistant", "data"]

_MARKUP = re.compile(r"\s*[<\[{(|【｜].*[>\]})|】｜]\s*", re.DOTALL)
_PREFIX_MARKS = ("▁", "Ġ")


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a rendered text, characters [start, end), and who wrote it."""

    start: int
    end: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Run:
    """Characters that are encoded together; `token_id` is set for a control token."""

    start: int
    end: int
    text: str
    token_id: int | None = None


class TextEncoder:
    """Encodes runs for one tokenizer (`transformers` fast tokenizers only).

    Attributes:
        control_ids: ids that ordinary text must never produce.
        special: control texts that end or open turns (`special` in the tokenizer), others may occur in answers.
        prefixes_space: the tokenizer puts a space before a text (SentencePiece manner).
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"{type(tokenizer).__name__} has no fast (Rust) tokenizer", fix="give the store a tokenizer.json"
            )
        self.tokenizer = tokenizer
        named_special = set(tokenizer.all_special_tokens)
        self._control: dict[str, tuple[int, Any]] = {}
        self.special: set[str] = set()
        kept: dict[str, int] = {}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            special = token.special or token.content in named_special
            if special or _MARKUP.fullmatch(token.content):
                self._control[token.content] = (token_id, token)
                if special:
                    self.special.add(token.content)
            else:
                kept[token.content] = token_id
        state = json.loads(backend.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in kept]
        state["post_processor"] = state["truncation"] = state["padding"] = None
        if "dropout" in state["model"]:
            state["model"]["dropout"] = None
        self._bare = Tokenizer.from_str(json.dumps(state))
        self._bare_ids = {
            mine: token_id for text, token_id in kept.items() if (mine := self._bare.token_to_id(text)) != token_id
        }
        self._backend = backend
        self.control_ids = frozenset(token_id for token_id, _ in self._control.values())
        longest_first = sorted(self._control, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        soft = [text for text in longest_first if text not in self.special]
        self._soft = re.compile("|".join(map(re.escape, soft)) or r"(?!)")
        self._normalizer = backend.normalizer
        first = self._bare.encode("a", add_special_tokens=False).tokens
        self.prefixes_space = bool(first) and first[0].startswith(_PREFIX_MARKS)
        self._prefixes_after_control = self.prefixes_space and self._prefix_after_control()

    def _prefix_after_control(self) -> bool:
        if not self._control:
            return True
        tokens = self._backend.encode(next(iter(self._control)) + "a", add_special_tokens=False).tokens
        return len(tokens) > 1 and tokens[1].startswith(_PREFIX_MARKS)

    def has_control_text(self, text: str) -> bool:
        """True when `text` holds the spelling of a control token."""
        return self._any.search(text) is not None

    def control_id(self, text: str) -> int | None:
        """Id of the control token spelt `text`, or None."""
        entry = self._control.get(text)
        return None if entry is None else entry[0]

    def find_controls(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        """Control tokens spelt in `text`, from `start` on."""
        return self._any.finditer(text, start)

    def runs(self, text: str, segments: Sequence[Segment], seams: Sequence[int]) -> list[Run]:
        """Cut a rendered text. `segments` cover it in order; `seams` are character positions."""
        controls: list[tuple[int, int, int, int, int]] = []  # match start, end, id; eaten white space start, end
        for segment in segments:
            if segment.kind == "data":
                continue
            pattern = self._any if segment.kind == "template" else self._soft
            for match in pattern.finditer(text, segment.start, segment.end):
                token_id, token = self._control[match[0]]
                left, right = match.start(), match.end()
                while token.lstrip and left > segment.start and text[left - 1].isspace():
                    left -= 1
                while token.rstrip and right < segment.end and text[right].isspace():
                    right += 1
                controls.append((match.start(), match.end(), token_id, left, right))
        cuts = sorted(set(seams))
        runs: list[Run] = []

        def ordinary(start: int, end: int) -> None:
            edges = [start, *(c for c in cuts if start < c < end), end]
            runs.extend(Run(a, b, text[a:b]) for a, b in pairwise(edges) if a < b)

        done = 0
        for start, end, token_id, left, right in controls:
            ordinary(done, max(left, done))
            runs.append(Run(start, end, text[start:end], token_id))
            done = max(right, end)
        ordinary(done, len(text))
        return runs

    def encode(self, runs: Sequence[Run]) -> list[list[int]]:
        """Token ids of each run."""
        if self.prefixes_space:
            return [self._encode_in_context(runs, i) for i in range(len(runs))]
        return [[run.token_id] if run.token_id is not None else self.encode_text(run.text) for run in runs]

    def encode_text(self, text: str) -> list[int]:
        """Ids of an ordinary text that stands alone."""
        return self._checked(self._bare.encode(text, add_special_tokens=False).ids, text) if text else []

    def _checked(self, ids: list[int], text: str) -> list[int]:
        if self._bare_ids:
            ids = [self._bare_ids.get(i, i) for i in ids]
        if self.control_ids.isdisjoint(ids):
            return ids
        pieces: list[str] = []
        done = 0
        for match in self._any.finditer(text):  # break every look-alike after its first character
            pieces.append(text[done : match.start() + 1])
            done = match.start() + 1
        pieces.append(text[done:])
        ids = [i for piece in pieces for i in self._bare.encode(piece, add_special_tokens=False).ids]
        if not self.control_ids.isdisjoint(ids):
            raise RowError("control token in text", f"{text[:60]!r} cannot be encoded as ordinary text")
        return ids

    def _encode_in_context(self, runs: Sequence[Run], i: int) -> list[int]:
        """For tokenizers that put a space before a text: only where a whole text would have it."""
        run = runs[i]
        if run.token_id is not None:
            return [run.token_id]
        after_control = i > 0 and runs[i - 1].token_id is not None
        if i == 0 or (after_control and self._prefixes_after_control):
            return self.encode_text(run.text)
        anchor = self.encode_text("\n")
        ids = self.encode_text("\n" + run.text)
        if ids[: len(anchor)] != anchor:
            raise RowError("inexact seam", f"{run.text[:40]!r} cannot be encoded apart from what precedes it")
        return ids[len(anchor) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included, nothing cleaned up."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def decodes_to(self, ids: Sequence[int], text: str) -> Literal["same", "normalised", "different"]:
        """Whether ids stand for `text`: exactly, after the tokenizer's own normaliser, or not."""
        got = self.decode(ids)
        if got == text:
            return "same"
        if self.prefixes_space and got.lstrip(" ") == text.lstrip(" "):
            return "same"
        if self._normalizer is not None and not self.prefixes_space:
            pieces = re.split(f"({self._any.pattern})", text)
            if got == "".join(p if self._any.fullmatch(p) else self._normalizer.normalize_str(p) for p in pieces):
                return "normalised"
        return "different"
