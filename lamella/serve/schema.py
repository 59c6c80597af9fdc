"""Requests, as they are checked. What would change the answer and is not supported is refused, never ignored. No torch."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from lamella.serve.errors import ApiError

HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip
"""Fields that change nothing in the answer: taken, and not looked at."""

_NOTHING: tuple[Any, ...] = (None, [], {}, "")
_ONLY_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((None, 0), "leave it out, or 0"),
    "frequency_penalty": ((None, 0), "leave it out, or 0"),
    "repetition_penalty": ((None, 1), "leave it out, or 1"),
    "min_p": ((None, 0), "leave it out, or use top_p"),
    "min_tokens": ((None, 0), "leave it out"),
    "logit_bias": (_NOTHING, "leave it out; labels: guided_choice"),
    "best_of": ((None, 1), "leave it out; several answers: n"),
    "suffix": (_NOTHING, "leave it out"),
    "tools": (
        _NOTHING,
        "tool calls are not supported: describe them in the prompt, or hand over to an engine that has them",
    ),
    "tool_choice": ((None, "none", "auto"), "leave it out: tool calls are not supported"),
    "functions": (_NOTHING, "leave it out: tool calls are not supported"),
    "function_call": ((None, "none", "auto"), "leave it out: tool calls are not supported"),
    "modalities": ((None, ["text"]), 'leave it out, or ["text"]'),
    "audio": ((None,), "leave it out: answers are text"),
    "prediction": ((None,), "leave it out"),
    "web_search_options": ((None,), "leave it out"),
    "reasoning_effort": ((None,), "leave it out: how long a model thinks is the adapter's training"),
    "verbosity": ((None, "medium"), "leave it out"),
    "chat_template": ((None,), "leave it out: the adapter's own is used, as in training"),
    "chat_template_kwargs": (_NOTHING, "leave it out: the adapter's template is used as in training"),
    "add_generation_prompt": ((None, True), "leave it out"),
    "continue_final_message": ((None, False), "leave it out"),
    "echo": ((None, False), "leave it out; prompts are scored by /v1/completions"),
    "guided_json": ((None,), "use guided_choice, or response_format with an enum of strings"),
    "guided_regex": ((None,), "use guided_choice"),
    "guided_grammar": ((None,), "use guided_choice"),
    "ignore_eos": ((None, False), "leave it out"),
    "skip_special_tokens": ((None,), "leave it out: special tokens inside answers are shown"),
    "prompt_logprobs": ((None,), "use /v1/completions with echo and logprobs"),
    "refusal": ((None,), "leave it out"),
    "annotations": (_NOTHING, "leave it out"),
    "tool_calls": (_NOTHING, "tool calls are not supported: write them into the text"),
}

Temperature = Annotated[float, Field(ge=0, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Label = Annotated[str, Field(min_length=1, max_length=1000)]


class Body(BaseModel):
    """A request or a part of one: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    harmless: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        kept = {}
        for name, value in tree.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in _ONLY_NEUTRAL:
                neutral, fix = _ONLY_NEUTRAL[name]
                if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral):
                    raise PydanticCustomError(
                        "unsupported", "`{field}` is not supported: {fix}", {"field": name, "fix": fix}
                    )
            elif name not in cls.harmless:
                near = difflib.get_close_matches(str(name)[:64], list(cls.model_fields), n=1, cutoff=0.0)
                raise PydanticCustomError(
                    "unknown_field", "unknown field `{field}`: remove it; nearest known: `{near}`",
                    {"field": str(name)[:64], "near": near[0]},
                )  # fmt: skip
        return kept


class Request(Body):
    """Checks of the whole tree come first."""

    @model_validator(mode="before")
    @classmethod
    def _writable(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        try:
            json.dumps(tree, ensure_ascii=False).encode()
        except RecursionError as error:
            raise PydanticCustomError("depth", "the request is nested too deeply: send flat JSON") from error
        except UnicodeEncodeError as error:
            raise PydanticCustomError("unicode", "half of a surrogate pair in a text: send valid Unicode") from error
        return tree


class Part(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def to_dict(self) -> dict[str, Any]:
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        tree = {"role": self.role, "content": content, "name": self.name, "tool_call_id": self.tool_call_id,
                "reasoning_content": self.reasoning_content}  # fmt: skip
        return {key: value for key, value in tree.items() if value is not None or key == "content"}


class StreamOptions(Body):
    include_usage: bool = False
    harmless = ("include_obfuscation",)


class JsonSchema(Body):
    name: str = "label"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, tree: Any) -> Any:
        return tree  # `schema` is an alias; pydantic's own message for others


class ResponseFormat(Body):
    type: Literal["text", "json_schema", "json_object"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    choice: list[_Label] = Field(min_length=1)


class Sampled(Request):
    """What chat and plain completions share."""

    harmless = HARMLESS
    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: Temperature | None = None
    """None: 1, as OpenAI has it."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: Seed | None = None
    n: int | None = Field(None, ge=1)
    stop: Stop | list[Stop] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported", "`stream_options` without `stream`: leave it out", {"field": "stream_options"}
            )
        return self

    @property
    def stops(self) -> Sequence[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(Sampled):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    guided_choice: list[_Label] | None = Field(None, min_length=1)
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("unsupported", "`top_logprobs` needs `logprobs`: true", {"field": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "unsupported", "`max_tokens` and `max_completion_tokens` differ: give one", {"field": "max_tokens"}
            )
        if self.max_tokens == 0:
            raise PydanticCustomError("unsupported", "`max_tokens` is 0: give 1 or more", {"field": "max_tokens"})
        if self.messages[-1].role not in ("user", "tool"):
            raise PydanticCustomError(
                "unsupported", "an answer is written after a turn of the user or of a tool; the last one is of role "
                "{role}: leave it out", {"field": "messages", "role": self.messages[-1].role},
            )  # fmt: skip
        return self


class CompletionRequest(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    """Text (encoded as the tokenizer does: BOS where it adds one, special tokens read) or token ids."""
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "unsupported", "`max_tokens` is 0 without `echo`: nothing is asked", {"field": "max_tokens"}
            )
        if self.echo and self.stream:
            raise PydanticCustomError("unsupported", "`echo` is not streamed: leave out `stream`", {"field": "echo"})
        return self


class Document(Body):
    text: str
    entity: str = ""
    id: str | int | None = None


class ClassifyRequest(Request):
    harmless = HARMLESS
    model: str
    documents: list[Document] = Field(min_length=1)
    mode: Literal["likelihood", "constrained"] = "likelihood"


class AddAdapter(Request):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    path: str = Field(min_length=1, max_length=4096)
    task: str | None = Field(None, min_length=1, max_length=4096)
    tenant: str | None = None
    replace: bool = False
    """Put it in the place of the adapter of this name; requests in flight keep the old one."""


Choices = tuple[tuple[str, ...], Literal["text", "json", "object"], str]
"""Labels, how the chosen one is written, and the property of "object"."""


def choices_of(request: ChatRequest, most: int) -> Choices | None:
    """The labels that alone may be written; None: any text.

    Raises:
        ApiError: 400: a schema that is no enum of strings, two ways at once, too many.
    """
    named: dict[str, Choices] = {}
    if request.guided_choice is not None:
        named["guided_choice"] = tuple(request.guided_choice), "text", ""
    if request.structured_outputs is not None:
        named["structured_outputs"] = tuple(request.structured_outputs.choice), "text", ""
    if request.response_format is not None and request.response_format.type != "text":
        named["response_format"] = _of_schema(request.response_format)
    if not named:
        return None
    if len(named) > 1:
        raise ApiError(400, f"{' and '.join(named)}: give one of them", param=next(iter(named)))
    (param, found), = named.items()  # fmt: skip
    if len(found[0]) > most or len(set(found[0])) < len(found[0]):
        raise ApiError(400, f"{len(found[0])} choices: give different ones, {most} at most", param=param)
    return found


def _of_schema(asked: ResponseFormat) -> Choices:
    fix = 'give json_schema {"schema": {"type": "string", "enum": [...]}}, or an object with one such property'
    tree: Any = asked.json_schema.schema_ if asked.json_schema is not None else None
    if asked.type != "json_schema" or tree is None:
        raise ApiError(400, f"`response_format` of type {asked.type}: not supported; {fix}", param="response_format")
    properties = tree.get("properties")
    if tree.get("type") == "object" and isinstance(properties, dict) and len(properties) == 1:
        (name, inner), = properties.items()  # fmt: skip
        labels = _enum(inner, ("description", "title"))
        known = set(tree) <= {
            "type",
            "properties",
            "required",
            "additionalProperties",
            "title",
            "description",
            "$schema",
        }
        if labels is not None and known and tree.get("required") == [name]:
            return labels, "object", name
    elif (labels := _enum(tree, ("description", "title", "$schema"))) is not None:
        return labels, "json", ""
    raise ApiError(400, f"`response_format.json_schema` is no enum of strings: {fix}", param="response_format")


def _enum(tree: Any, beside: Sequence[str]) -> tuple[str, ...] | None:
    if not isinstance(tree, dict) or not set(tree) <= {"type", "enum", *beside}:
        return None
    labels = tree.get("enum")
    if tree.get("type", "string") != "string" or not isinstance(labels, list) or not labels:
        return None
    return tuple(labels) if all(isinstance(label, str) and label for label in labels) else None


def written(choices: Choices, label: str) -> str:
    """A chosen label as the caller wants to read it."""
    _, how, name = choices
    return label if how == "text" else json.dumps(label if how == "json" else {name: label}, ensure_ascii=False)
