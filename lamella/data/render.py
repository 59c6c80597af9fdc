"""Chat templates: what a template does, and where each answer stands in the text it renders.

The rendered text of the real messages is the truth. To know where an answer lies in it, the same chat is
rendered once more with a placeholder in place of each assistant text (and of any other text that holds the
spelling of a control token); white space at the ends and `<think>` tags stay, so that a template's `trim`
and `split` do the same. The placeholder rendering gives the template's own text between the placeholders;
put together with the real texts it must give the real rendering, character by character, or the row is
rejected. An answer begins where the generation prompt ends and runs to the end-of-turn token that the
template wrote.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2

from lamella.data.formats import Message, inline_reasoning
from lamella.data.read import RowError
from lamella.data.text import Segment, TextEncoder
from lamella.errors import UserError

# What a jinja template raises on messages it does not foresee.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)

Masker = Callable[[str, bool, int, str], str]  # text, is it an answer's, message index, what it is -> text to render


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant turn in the rendered text, characters [start, end): answer with its terminator.

    Attributes:
        message: index of the message.
        terminator: text of the end-of-turn token; None when the template writes none there.
        prompt_matches: the text before `start` is the generation prompt for the messages before this one.
        dropped_reasoning: reasoning that the template left out.
        dropped_content: an answer text the template left out beside a tool call.
    """

    message: int
    start: int
    end: int
    terminator: str | None
    prompt_matches: bool
    dropped_reasoning: str = ""
    dropped_content: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered chat: its text, who wrote which part, and its assistant turns in order."""

    text: str
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    data_control_text: bool = False


@dataclass
class _Placeholders:
    nonce: str
    has_control_text: Callable[[str], bool]
    texts: dict[str, tuple[str, bool, int, str]] = field(default_factory=dict)

    def __call__(self, text: str, answer: bool, index: int, what: str) -> str:
        core = text.strip()
        if not core or not (answer or self.has_control_text(text)):
            return text
        key = f"{self.nonce}{len(self.texts):06d}z"
        self.texts[key] = (core, answer, index, what)
        lead = len(text) - len(text.lstrip())
        return text[:lead] + key + text[lead + len(core) :]


def _plain(text: str, answer: bool, index: int, what: str) -> str:
    return text


class ChatTemplate:
    """A tokenizer's chat template (or `source` in its place) and the facts probed from it.

    Attributes:
        sha256: of the template text.
        terminators: end-of-turn tokens it writes after assistant turns (last, earlier, after a tool call).
        system: "own" when system turns are rendered, "folded" when their text must go into the first user turn.
        default_system: system text it adds when the chat has none.
        reasoning: "field" (reads `reasoning_content`), "inline" (only as text of the answer) or "dropped".
        tool_arguments: "object" or "text", the spelling it prints right; None when it prints no tool calls.
        added_header: text appended to generation prompts because the template ignores `add_generation_prompt`.
        ends_earlier_turns: assistant turns before the last one get an end-of-turn token too.
        dated: it prints the current date.

    Raises:
        UserError: no template, a template that renders no answer or writes no end-of-turn token.
    """

    def __init__(self, tokenizer: Any, encoder: TextEncoder, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._source = source
        text = source if source is not None else tokenizer.get_chat_template(None)
        self.sha256 = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        self.dated = "strftime_now" in text
        self.added_header = ""
        self.ends_earlier_turns = True
        self.terminators = self._probe_terminators()
        self.system, self.default_system = self._probe_system()
        self.reasoning = self._probe_reasoning()
        self.tool_arguments: Literal["object", "text"] | None
        self.tool_arguments, tool_end = self._probe_tools()
        if tool_end is not None and tool_end not in self.terminators:
            self.terminators = (*self.terminators, tool_end)

    # ---- rendering -------------------------------------------------------------------------------------

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool) -> str:
        """The template's text.

        Raises:
            RowError: the template refuses these messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._source, add_generation_prompt=generation, tokenize=False
            )
        except _TEMPLATE_ERRORS as error:
            raise RowError("template refuses", f"{error}") from error
        return text + self.added_header if generation else text

    def _try(self, messages: list[dict[str, Any]], tools: Any = None, generation: bool = False) -> str | None:
        try:
            return self.render(messages, tools, generation)
        except RowError:
            return None

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Fold a system turn into the first user turn where the template knows none."""
        prepared = list(messages)
        if self.system == "folded" and len(prepared) > 1 and prepared[0].role == "system":
            system, user = prepared[0], prepared[1]
            if user.role == "user":
                text = f"{system.content}\n\n{user.content}" if system.content else user.content
                prepared[:2] = [Message("user", text, name=user.name)]
        return prepared

    def _dicts(self, messages: Sequence[Message], mask: Masker) -> list[dict[str, Any]]:
        return [self._dict(message, i, mask) for i, message in enumerate(messages)]

    def _dict(self, message: Message, i: int, mask: Masker) -> dict[str, Any]:
        answer = message.role == "assistant"
        content = mask(message.content, answer, i, "content")
        made: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning:
            reasoning = mask(message.reasoning, True, i, "reasoning")
            if self.reasoning == "field":
                made["reasoning_content"] = reasoning
            elif self.reasoning == "inline":
                made["content"] = inline_reasoning(reasoning, content)
        if message.name is not None:
            made["name"] = mask(message.name, False, i, "name")
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            if self.tool_arguments is None:
                raise RowError("tools unsupported", f"the chat template does not print tool calls (message {i})")
            made["tool_calls"] = [self._call(call, i, mask) for call in message.tool_calls]
        return made

    def _call(self, call: Any, i: int, mask: Masker) -> dict[str, Any]:
        arguments = _map_strings(call.arguments, lambda text: mask(text, True, i, "call"))
        shown = arguments if self.tool_arguments == "object" else json.dumps(arguments, ensure_ascii=False)
        made = {"type": "function", "function": {"name": mask(call.name, True, i, "call"), "arguments": shown}}
        return made if call.id is None else {"id": call.id, **made}

    # ---- where the answers are --------------------------------------------------------------------------

    def layout(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], generation: bool) -> Layout:
        """Render prepared messages and find every assistant turn.

        Args:
            generation: end with the generation prompt (inference) instead of the last answer (training);
                the ends of the turns are not looked for then.

        Raises:
            RowError: the template refuses the row, or changes or loses a text of it.
        """
        text = self.render(self._dicts(messages, _plain), list(tools) or None, generation)
        for i, tool in enumerate(tools):
            name = tool["function"]["name"]
            if name not in text and json.dumps(name)[1:-1] not in text:
                raise RowError("tools unsupported", f"the chat template does not print tools[{i}] ({name})")
        mask = _Placeholders(self._nonce(text), self._encoder.has_control_text)
        masked = self._dicts(messages, mask)
        masked_tools = [_map_strings(tool, lambda t: mask(t, False, -1, "tools")) for tool in tools] or None
        if not mask.texts:
            return Layout(text, (Segment(0, len(text), "template"),), ())
        skeleton = self.render(masked, masked_tools, generation)
        spots = _Spots(text, skeleton, mask)
        turns = [
            self._turn(i, message, masked, masked_tools, spots, find_end=not generation)
            for i, message in enumerate(messages)
            if message.role == "assistant"
        ]
        data_control = any(not answer for _, answer, _, _ in mask.texts.values())
        return Layout(text, tuple(spots.segments), tuple(turns), data_control)

    @staticmethod
    def _nonce(text: str) -> str:
        nonce, k = "Qz7Lm4Vx", 0
        while nonce in text:
            k += 1
            nonce = f"Qz7Lm{k}Vx"
        return nonce

    def _turn(
        self, i: int, message: Message, masked: list[dict[str, Any]], tools: Any, spots: _Spots, *, find_end: bool
    ) -> Turn:
        found = spots.of_message(i)
        lost = {what for key, what in spots.expected(i) if key not in found}
        if "call" in lost:
            raise RowError("template loses text", f"the chat template does not print the tool call of message {i}")
        if not found or ("content" in lost and not message.tool_calls):
            raise RowError("template loses text", f"the chat template leaves out the answer of message {i}")
        first, last = min(a for a, _ in found.values()), max(b for _, b in found.values())
        start, matches = self._start(i, masked, tools, spots, first)
        end, terminator = last, None
        if find_end:
            limit = spots.next_after(last)
            for match in self._encoder.find_controls(spots.skeleton, last):
                if match.start() >= limit:
                    break
                if match[0] in self.terminators:
                    end, terminator = match.end(), match[0]
                    break
            if not self.ends_earlier_turns and i + 1 < len(masked) and not message.tool_calls:
                end, terminator = last, None
        return Turn(
            i, spots.real(start), spots.real(end), terminator, matches,
            message.reasoning if message.reasoning and ("reasoning" in lost or self.reasoning == "dropped") else "",
            message.content.strip() if "content" in lost else "",
        )  # fmt: skip

    def _start(self, i: int, masked: list[dict[str, Any]], tools: Any, spots: _Spots, first: int) -> tuple[int, bool]:
        """Where generation of message `i` starts in the skeleton, and whether its prompt is what stands before."""
        skeleton = spots.skeleton
        if i == 0:
            raise RowError("no question", "the chat begins with an assistant turn")
        prompt = self.render(masked[:i], tools, True)
        if len(prompt) <= first and skeleton.startswith(prompt):
            return len(prompt), True
        # The template renders the history otherwise once an answer follows (it strips earlier reasoning, or
        # opens <think> in the prompt only): find the header that stands before this answer.
        bare = self.render(masked[:i], tools, False)
        header = prompt[len(bare) :] if prompt.startswith(bare) else ""
        control = next(self._encoder.find_controls(header), None)
        shortest = control.end() if control is not None else min(4, len(header))
        low = max((b for _, b in spots.before(first)), default=0)
        for length in range(len(header), max(shortest, 1) - 1, -1):
            at = skeleton.rfind(header[:length], low, first)
            if at >= 0:
                return at + length, False
        raise RowError("cannot locate answer", f"no generation prompt stands before the answer of message {i}")

    # ---- probes -----------------------------------------------------------------------------------------

    def _first_special(self, text: str) -> str | None:
        return next((m[0] for m in self._encoder.find_controls(text) if m[0] in self._encoder.special), None)

    def _probe_terminators(self) -> tuple[str, ...]:
        user, answer = {"role": "user", "content": "Qprobe1u"}, {"role": "assistant", "content": "Qprobe2a"}
        try:
            whole = self.render([user, answer], None, False)
        except RowError as problem:
            fix = "give another template with data.chat_template"
            raise UserError(
                f"the chat template cannot render a question and an answer: {problem}", fix=fix
            ) from problem
        if "Qprobe2a" not in whole:
            raise UserError("the chat template leaves out the assistant's text", fix="set data.chat_template")
        before, _, tail = whole.partition("Qprobe2a")
        last = self._first_special(tail)
        if last is None:
            eos = self._tokenizer.eos_token
            raise UserError(
                f"the chat template writes no end-of-turn token after an answer (eos {eos!r} never occurs in the "
                f"training text): a model tuned on it would not stop",
                fix="set data.chat_template to a template that ends assistant turns with a stop token",
            )
        prompt, bare = self._try([user], None, True), self._try([user])
        if prompt is not None and prompt == bare and before.startswith(prompt):
            lead = before[len(prompt) :]
            if self._first_special(lead) or "assistant" in lead.lower():
                self.added_header = lead
        more = self._try([user, answer, {"role": "user", "content": "Qprobe3u"}, {**answer, "content": "Qprobe4a"}])
        found = [last]
        if more is not None and "Qprobe2a" in more and "Qprobe3u" in more:
            middle = self._first_special(more[more.index("Qprobe2a") : more.index("Qprobe3u")])
            # without a terminator of its own an earlier turn is followed by the next turn's opening token
            opening = [m[0] for m in self._encoder.find_controls(more[: more.index("Qprobe1u")])][-1:]
            self.ends_earlier_turns = middle is not None and [middle] != opening
            if middle is not None and self.ends_earlier_turns and middle != last:
                found.append(middle)
        return tuple(found)

    def _probe_system(self) -> tuple[Literal["own", "folded"], str]:
        user = {"role": "user", "content": "Qprobe1u"}
        without = self._try([user]) or ""
        with_system = self._try([{"role": "system", "content": "Qprobe5s"}, user])
        if with_system is None or "Qprobe5s" not in with_system:
            return "folded", ""
        head = 0
        while head < min(len(without), len(with_system)) and without[head] == with_system[head]:
            head += 1
        tail = 0
        while tail < min(len(without), len(with_system)) - head and without[-1 - tail] == with_system[-1 - tail]:
            tail += 1
        return "own", without[head : len(without) - tail].strip()

    def _probe_reasoning(self) -> Literal["field", "inline", "dropped"]:
        user = {"role": "user", "content": "Qprobe1u"}
        answer = {"role": "assistant", "content": "Qprobe2a"}
        rendered = self._try([user, {**answer, "reasoning_content": "Qprobe6r"}])
        if rendered is not None and "Qprobe6r" in rendered:
            return "field"
        rendered = self._try([user, {**answer, "content": inline_reasoning("Qprobe6r", "Qprobe2a")}])
        return "inline" if rendered is not None and "Qprobe6r" in rendered else "dropped"

    def _probe_tools(self) -> tuple[Literal["object", "text"] | None, str | None]:
        user = {"role": "user", "content": "Qprobe1u"}
        arguments = {"Qkey": "Qprobe7v"}
        shapes: tuple[tuple[Literal["object", "text"], Any], ...] = (
            ("object", arguments), ("text", json.dumps(arguments)),
        )  # fmt: skip
        for shape, value in shapes:
            call = {"id": "Qcall0001", "type": "function", "function": {"name": "Qprobe8f", "arguments": value}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            rendered = self._try([user, turn])
            if rendered is None or "Qprobe7v" not in rendered or "Qprobe8f" not in rendered:
                continue
            if "'Qkey': 'Qprobe7v'" in rendered or '\\"Qprobe7v' in rendered:
                continue  # a printed Python dict, or JSON escaped twice
            tail = rendered[max(rendered.rindex("Qprobe7v"), rendered.rindex("Qprobe8f")) :]
            specials = [m[0] for m in self._encoder.find_controls(tail) if m[0] in self._encoder.special]
            return shape, specials[-1] if specials else None
        return None, None


class _Spots:
    """Placeholders of a skeleton, aligned with the real text."""

    def __init__(self, text: str, skeleton: str, mask: _Placeholders) -> None:
        self.skeleton = skeleton
        self._mask = mask
        self.segments: list[Segment] = []
        self._places: list[tuple[int, int, str]] = []  # in the skeleton
        self._offsets: list[tuple[int, int]] = [(0, 0)]  # skeleton position of a template part, its real position
        done = cursor = 0
        for match in re.finditer(rf"{mask.nonce}\d{{6}}z", skeleton):
            cursor = self._template(text, skeleton[done : match.start()], cursor)
            core, answer, index, what = mask.texts[match[0]]
            shown = next((form for form in _forms(core) if text.startswith(form, cursor)), None)
            if shown is None:
                raise RowError("template changes text", f"{what} of message {index} is not rendered as it was given")
            self.segments.append(Segment(cursor, cursor + len(shown), "assistant" if answer else "data"))
            cursor += len(shown)
            done = match.end()
            if answer and any(key == match[0] for _, _, key in self._places):
                raise RowError("template changes text", f"{what} of message {index} is printed twice")
            self._places.append((match.start(), done, match[0]))
            self._offsets.append((done, cursor))
        if self._template(text, skeleton[done:], cursor) != len(text):
            raise RowError("template changes text", "its text depends on the messages in a way that is not understood")

    def _template(self, text: str, part: str, cursor: int) -> int:
        if not text.startswith(part, cursor):
            raise RowError("template changes text", f"near {text[cursor : cursor + 40]!r}")
        if part:
            self.segments.append(Segment(cursor, cursor + len(part), "template"))
        return cursor + len(part)

    def expected(self, message: int) -> list[tuple[str, str]]:
        return [(k, what) for k, (_, answer, i, what) in self._mask.texts.items() if answer and i == message]

    def of_message(self, message: int) -> dict[str, tuple[int, int]]:
        wanted = {key for key, _ in self.expected(message)}
        return {key: (a, b) for a, b, key in self._places if key in wanted}

    def before(self, position: int) -> list[tuple[int, int]]:
        return [(a, b) for a, b, _ in self._places if b <= position]

    def next_after(self, position: int) -> int:
        return min((a for a, _, _ in self._places if a >= position), default=len(self.skeleton))

    def real(self, position: int) -> int:
        """Real position of a skeleton position that lies in (or at an end of) text of the template."""
        base, shift = next((s, r) for s, r in reversed(self._offsets) if s <= position)
        return shift + position - base


def _forms(core: str) -> tuple[str, ...]:
    """How a template may print a text: as it is, or inside a JSON string."""
    return core, json.dumps(core, ensure_ascii=False)[1:-1], json.dumps(core)[1:-1]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_strings(inner, change) for inner in value]
    return value
