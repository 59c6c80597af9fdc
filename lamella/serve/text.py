"""From tokens to what callers read: text piece by piece, stop strings, reasoning apart. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamella.data.formats import THINK_CLOSE, THINK_OPEN

_INCOMPLETE = "�"


class Detokenizer:
    """Text of a growing list of ids. A character whose bytes are not all there is held back.

    Args:
        decode: ids to text; only a few of the last ids are decoded at a time.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._told = 0  # ids from `start` are decoded; text up to id `told` has been given

    def add(self, token: int) -> str:
        """The text that this id makes certain."""
        self._ids.append(token)
        return self._new(final=False)

    def end(self) -> str:
        """What was held back."""
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._told])
        now = self._decode(self._ids[self._start :])
        if (not final and now.endswith(_INCOMPLETE)) or len(now) <= len(before):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return now[len(before) :]


def _kept_back(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-n:]) for mark in marks if len(mark) > n):
            return n
    return 0


class StopStrings:
    """Ends a text before the first of some strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        if not self._stops or self.found:
            return "" if self.found else text
        text, self._held = self._held + text, ""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.found = True
            return text[: min(places)]
        back = _kept_back(text, self._stops)
        if back:
            text, self._held = text[:-back], text[-back:]
        return text

    def end(self) -> str:
        held, self._held = self._held, ""
        return "" if self.found else held


@dataclass(frozen=True)
class Piece:
    """Some text of an answer."""

    reasoning: str = ""
    content: str = ""


class Reasoning:
    """Takes `<think>..</think>` out of a text. White space at both ends of reasoning, and after it, is left out.

    Args:
        opened: the prompt ends inside an opened `<think>`.
    """

    def __init__(self, opened: bool = False) -> None:
        self.inside = opened
        self._held = ""
        self._space = ""  # white space at the end of reasoning so far, given only when more follows
        self._begins = opened  # nothing but white space since a tag

    def add(self, text: str) -> Piece:
        text, self._held = self._held + text, ""
        reasoning, content = "", ""
        while text:
            mark = THINK_CLOSE if self.inside else THINK_OPEN
            before, found, after = text.partition(mark)
            if not found and (back := _kept_back(before, (mark,))):
                before, self._held = before[:-back], before[-back:]
            if self.inside:
                reasoning += self._of_reasoning(before)
            else:
                content += self._of_content(before)
            if found:
                self.inside, self._begins, self._space = not self.inside, True, ""
            text = after
        return Piece(reasoning, content)

    def end(self) -> Piece:
        held, self._held = self._held, ""
        return Piece(reasoning=self._of_reasoning(held)) if self.inside else Piece(content=self._of_content(held))

    def _of_reasoning(self, text: str) -> str:
        text = self._of_content(self._space + text)
        told = text.rstrip()
        self._space = text[len(told) :]
        return told

    def _of_content(self, text: str) -> str:
        if self._begins:
            text = text.lstrip()
            self._begins = not text
        return text


class AnswerText:
    """All of the above in a row, for one answer."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), *, thinking: bool, opened: bool = False
    ) -> None:
        self._tokens = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._reasoning = Reasoning(opened) if thinking else None

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing after it counts."""
        return self._stops.found

    @property
    def thinks(self) -> bool:
        """It is inside reasoning now."""
        return self._reasoning is not None and self._reasoning.inside

    def add(self, token: int) -> Piece:
        return self._split(self._stops.add(self._tokens.add(token)))

    def end(self) -> Piece:
        """What was held back, when no more tokens come."""
        last = self._split(self._stops.add(self._tokens.end()) + self._stops.end())
        if self._reasoning is None:
            return last
        more = self._reasoning.end()
        return Piece(last.reasoning + more.reasoning, last.content + more.content)

    def _split(self, text: str) -> Piece:
        return self._reasoning.add(text) if self._reasoning is not None else Piece(content=text)
