"""Row formats, all turned into one internal form: typed messages and tools, or a plain prompt and completion.

| format | keys |
|---|---|
| messages | `messages`: list of {role, content, tool_calls, reasoning_content or reasoning, weight}; `system`; `tools` |
| prompt_completion | `prompt`, `completion`: strings, or lists of messages; `system`; `tools` |
| sharegpt | `conversations`: list of {from, value}; `system`; `tools` |
| alpaca | `instruction`, `input`, `output`; `system`; `history`: list of [question, answer] |

Repairs (each one counted in the report): neighbouring turns of one role are joined by a blank line; turns
after the last assistant turn are left out; reasoning written as `<think>..</think>` at the start of an
assistant text becomes the message's reasoning, without the white space around it; `weight: null` is 1. A question
without text is counted too. The old `function_call` of an assistant turn is a tool call. Everything else that does
not fit is a rejected row with its reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamella.data.read import RowError

FORMATS = ("messages", "prompt_completion", "sharegpt", "alpaca")

JOINED = "neighbouring turns of one role joined"
TRAILING = "turns after the last assistant turn left out"
THINK_SPACE = "white space around <think> text dropped"
NULL_WEIGHT = "`weight: null` of an assistant turn read as 1"
NO_QUESTION_TEXT = "user turns without text"

_ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"developer": "system", "function": "tool"}
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "tool": "tool", "observation": "tool", "function_call": "function_call",
}  # fmt: skip
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_THINK = re.compile(rf"\s*{THINK_OPEN}(.*?){THINK_CLOSE}(.*)", re.DOTALL)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of an assistant turn; `arguments` is the decoded JSON object."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `reasoning` and `tool_calls` belong to assistant turns; `trained` is False for `weight: 0`.

    `respaced`: the row wrote its reasoning inline with other white space than `<think>\\n..\\n</think>\\n\\n`.
    `null_weight`: the row gave `weight: null`.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    trained: bool = True
    respaced: bool = False
    null_weight: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A training row. Rows of plain prompt and completion keep both texts in `plain`."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    plain: tuple[str, str] | None = None
    repairs: tuple[str, ...] = ()


def detect_format(row: dict[str, Any]) -> str:
    """The format a row is written in.

    Raises:
        RowError: none fits, or more than one.
    """
    found = [name for name in FORMATS if _fits(row, name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RowError("ambiguous format", f"fits {' and '.join(found)}; set data.format")
    keys = ", ".join(sorted(row)[:8]) or "none"
    raise RowError("wrong format", f"keys are {keys}; none of {', '.join(FORMATS)} fits")


def _fits(row: dict[str, Any], name: str) -> bool:
    def has(*keys: str) -> bool:
        return all(row.get(key) is not None for key in keys)

    if name == "messages":
        if isinstance(row.get("messages"), list):
            return True
        turns = row.get("conversations")
        return isinstance(turns, list) and bool(turns) and all(isinstance(t, dict) and "role" in t for t in turns)
    if name == "sharegpt":
        return isinstance(row.get("conversations"), list) and not _fits(row, "messages")
    if name == "alpaca":
        return has("instruction", "output")
    return has("prompt", "completion")


def read_conversation(row: dict[str, Any], row_format: str = "auto") -> tuple[str, Conversation]:
    """Turn a JSON object into the internal form; returns (format, conversation).

    Raises:
        RowError: the row does not fit its format, or has no usable answer.
    """
    name = detect_format(row) if row_format == "auto" else row_format
    if not _fits(row, name):
        raise RowError("wrong format", f"keys are {', '.join(sorted(row)[:8]) or 'none'}; not {name}")
    plain: tuple[str, str] | None = None
    if name == "messages":
        turns = read_messages(row["messages"] if isinstance(row.get("messages"), list) else row["conversations"])
    elif name == "sharegpt":
        turns = _sharegpt(row["conversations"])
    elif name == "alpaca":
        turns = _alpaca(row)
    else:
        turns, plain = _prompt_completion(row)
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise RowError("bad system", f"`system` must be text, is {type(system).__name__}")
    if system and (not turns or turns[0].role != "system"):
        turns = [Message("system", system), *turns]
    elif system and turns[0].content != system:
        raise RowError("system given twice", "`system` and the first message are different system texts")
    messages, repairs = _repair(turns)
    return name, Conversation(messages, read_tools(row.get("tools")), plain, repairs)


def read_messages(turns: Sequence[Any]) -> list[Message]:
    """Messages as people write them (OpenAI's form and its variants) to typed messages.

    Raises:
        RowError: naming the index of the faulty message.
    """
    return [_message(turn, i) for i, turn in enumerate(turns)]


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """The `tools` array; bare functions are wrapped as {type: function, function: ...}.

    Raises:
        RowError: not a list of functions with names.
    """
    if isinstance(tools, str) and tools.strip():
        tools = _decode(tools, "bad tools", "`tools`")
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise RowError("bad tools", f"`tools` must be a list, is {type(tools).__name__}")
    read = []
    for i, tool in enumerate(tools):
        wrapped = tool if isinstance(tool, dict) and "function" in tool else {"type": "function", "function": tool}
        function = wrapped["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError("bad tools", f"tools[{i}] has no function name")
        read.append(wrapped)
    return tuple(read)


def _message(turn: Any, i: int) -> Message:
    if not isinstance(turn, dict):
        raise RowError("bad message", f"message {i} is not an object")
    role = turn.get("role")
    role = _ROLE_NAMES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise RowError("unknown role", f"message {i} has role {role!r}; known: {', '.join(_ROLES)}")
    _only_of_assistants(turn, role, i)
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise RowError("bad weight", f"`weight` of message {i} is {weight!r}; it must be 0 or 1")
    calls = _tool_calls(_calls_of(turn, i), i) if role == "assistant" else ()
    content = _content(turn.get("content"), role, bool(calls), i)
    name, call_id = turn.get("name"), turn.get("tool_call_id")
    base = Message(
        role, content, tool_calls=calls, name=name if isinstance(name, str) else None,
        tool_call_id=call_id if isinstance(call_id, str) else None, trained=weight is None or weight == 1,
        null_weight=role == "assistant" and "weight" in turn and weight is None,
    )  # fmt: skip
    return _with_reasoning(base, turn, i) if role == "assistant" else base


def _given(value: Any) -> bool:
    """False for what columnar files write in place of nothing."""
    return not (value is None or value == [] or value == {} or (isinstance(value, str) and not value.strip()))


def _only_of_assistants(turn: dict[str, Any], role: str, i: int) -> None:
    keys = () if role == "assistant" else ("tool_calls", "function_call", *_REASONING_KEYS)
    if found := [key for key in keys if _given(turn.get(key))]:
        raise RowError("bad message", f"message {i} ({role}) has `{found[0]}`, which belongs to assistant turns")


def _calls_of(turn: dict[str, Any], i: int) -> Any:
    calls, old = turn.get("tool_calls"), turn.get("function_call")
    if not _given(old):
        return calls
    if _given(calls):
        raise RowError("bad tool call", f"message {i} has both `tool_calls` and `function_call`")
    return [old]


def _decode(text: str, reason: str, what: str) -> Any:
    """A JSON value written as text inside a row."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(reason, f"{what} is not JSON: {error.msg} at {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # an endless integer, endless nesting
        raise RowError(reason, f"{what} cannot be decoded: {error}") from error


def _content(content: Any, role: str, has_calls: bool, i: int) -> str:
    if content is None:
        if has_calls:
            return ""
        raise RowError("null content", f"message {i} ({role}) has no content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type", "text") == "text" else p for p in content]
        texts = [p for p in parts if isinstance(p, str)]
        if len(texts) < len(parts):
            raise RowError("not text", f"message {i} ({role}) has parts that are not text")
        return "".join(texts)
    if role == "tool":
        return json.dumps(content, ensure_ascii=False)
    raise RowError("not text", f"content of message {i} ({role}) is {type(content).__name__}")


def _tool_calls(calls: Any, i: int) -> tuple[ToolCall, ...]:
    if not _given(calls):
        return ()
    if not isinstance(calls, list):
        raise RowError("bad tool call", f"`tool_calls` of message {i} must be a list")
    read = []
    for k, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError("bad tool call", f"message {i}, call {k} has no function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _decode(arguments or "{}", "bad tool call", f"message {i}, call {k}: `arguments`")
        if not isinstance(arguments, dict):
            raise RowError("bad tool call", f"message {i}, call {k}: `arguments` must be an object")
        call_id = call.get("id")
        read.append(ToolCall(function["name"], arguments, call_id if isinstance(call_id, str) else None))
    return tuple(read)


def _with_reasoning(message: Message, turn: dict[str, Any], i: int) -> Message:
    given = {key: turn[key] for key in _REASONING_KEYS if _given(turn.get(key))}
    for key, value in given.items():
        if not isinstance(value, str):
            raise RowError("not text", f"`{key}` of message {i} is {type(value).__name__}")
    fields = set(given.values())
    if len(fields) > 1:
        raise RowError("reasoning given twice", f"message {i} has two different reasoning fields")
    field = next(iter(fields)).strip() if fields else ""
    content, respaced = message.content, False
    if content.lstrip().startswith(THINK_OPEN):
        match = _THINK.fullmatch(content)
        if match is None:
            raise RowError(f"unclosed {THINK_OPEN}", f"message {i} opens {THINK_OPEN} and never closes it")
        inline, content = match[1].strip(), match[2].lstrip()
        if field and inline and field != inline:
            raise RowError("reasoning given twice", f"message {i} has a reasoning field and another <think> text")
        field = field or inline
        respaced = bool(field) and message.content != inline_reasoning(field, content)
    return replace(message, content=content, reasoning=field, respaced=respaced)


def inline_reasoning(reasoning: str, content: str) -> str:
    """Reasoning and answer as one text, for templates that know no reasoning field."""
    return f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{content}"


def _sharegpt(turns: list[Any]) -> list[Message]:
    read: list[Message] = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or "from" not in turn:
            raise RowError("bad message", f"message {i} has no `from`")
        role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise RowError("unknown role", f"message {i} is from {turn['from']!r}; known: {known}")
        rest = {**turn, "role": role, "content": turn.get("value")}
        if role == "function_call":
            rest |= {"role": "assistant", "content": "", "tool_calls": [_call_object(turn.get("value"), i)]}
        read.append(_message(rest, i))
    return read


def _call_object(value: Any, i: int) -> Any:
    return _decode(value, "bad tool call", f"message {i}: the call") if isinstance(value, str) else value


def _alpaca(row: dict[str, Any]) -> list[Message]:
    texts = {key: "" if row.get(key) is None else row[key] for key in ("instruction", "input", "output")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise RowError("not text", f"`{key}` is {type(text).__name__}")
    turns: list[Message] = []
    history = row["history"] if _given(row.get("history")) else []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
            raise RowError("wrong format", "`history` must be a list of [question, answer] texts")
        turns += [Message("user", pair[0]), _with_reasoning(Message("assistant", pair[1]), {}, len(turns) + 1)]
    question = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    if not question.strip():
        raise RowError("no question", "`instruction` and `input` are empty")
    answer = _with_reasoning(Message("assistant", texts["output"]), {}, len(turns) + 1)
    return [*turns, Message("user", question), answer]


def _prompt_completion(row: dict[str, Any]) -> tuple[list[Message], tuple[str, str] | None]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        answer = _with_reasoning(Message("assistant", completion), {}, 1)
        return [Message("user", prompt), answer], (prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return read_messages([*prompt, *completion]), None
    raise RowError("wrong format", "`prompt` and `completion` must be two texts or two lists of messages")


def _repair(turns: list[Message]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Apply the documented repairs and check what no template can make good."""
    if not turns:
        raise RowError("no messages", "the list of messages is empty")
    repairs = [NULL_WEIGHT] if any(turn.null_weight for turn in turns) else []
    if any(turn.role == "user" and not turn.content.strip() for turn in turns):
        repairs.append(NO_QUESTION_TEXT)
    joined = [turns[0]]
    for turn in turns[1:]:
        last = joined[-1]
        same = turn.role == last.role != "tool" and turn.trained == last.trained
        if same and not (last.tool_calls or turn.tool_calls or turn.reasoning):
            joined[-1] = replace(last, content=f"{last.content}\n\n{turn.content}")
            repairs.append(JOINED)
        else:
            joined.append(turn)
    answers = [i for i, turn in enumerate(joined) if turn.role == "assistant"]
    if not answers:
        raise RowError("no answer", "no assistant turn")
    if answers[-1] + 1 < len(joined):
        joined = joined[: answers[-1] + 1]
        repairs.append(TRAILING)
    first = 1 if joined[0].role == "system" else 0
    if joined[first].role != "user":
        raise RowError("no question", f"the chat begins with a turn of role {joined[first].role!r}")
    for i in answers:
        if not joined[i].content.strip() and not joined[i].tool_calls:
            raise RowError("empty answer", f"assistant turn at message {i} has no text")
    if any(turn.respaced for turn in joined):
        repairs.append(THINK_SPACE)
    return tuple(joined), tuple(repairs)
