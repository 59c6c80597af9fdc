"""A tokenizer for counting tokens before a run: read by the `tokenizers` library alone, without transformers or torch.

It has what `Encoder` asks of a transformers tokenizer. Chat templates see the functions and names that Hugging Face documents
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lamella.data.encode import check_json_object
from lamella.errors import UserError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


class LightTokenizer:
    """The tokenizer of a folder with `tokenizer.json`; see `open_light`."""

    def __init__(self, backend: Any, settings: dict[str, Any], chat_template: str | dict[str, str] | None) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = {name: text for name in _NAMED if (text := _text(settings.get(name)))}
        extra = [settings.get(name) for name in _EXTRA]
        listed = [x for found in extra for x in (found.values() if isinstance(found, dict) else found or [])]
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *map(_text, listed)]))
        self.added_tokens_decoder: dict[int, Any] = backend.get_added_tokens_decoder()

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    def _id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    def get_chat_template(self, name: str | None = None, tools: Any = None) -> str:
        """The template for chats with or without tools."""
        if not isinstance(self.chat_template, dict):
            return name or self.chat_template or ""
        chosen = "tool_use" if tools and "tool_use" in self.chat_template else "default"
        return name or self.chat_template[chosen]

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        return {}

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: Any = None, chat_template: str | None = None,
        add_generation_prompt: bool = False, tokenize: bool = False,
    ) -> str:  # fmt: skip
        """The rendered text. Raises what jinja raises."""
        assert not tokenize
        source = self.get_chat_template(chat_template, tools)
        if source not in self._compiled:
            self._compiled[source] = _environment().from_string(source)
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        rendered: str = self._compiled[source].render(
            messages=given, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map,
        )  # fmt: skip
        return rendered


def _text(token: Any) -> str:
    """Special tokens are written as text or as an object with `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _environment() -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model wrote; its text is printed as it stands."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own form

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def open_light(folder: Path) -> LightTokenizer | None:
    """The tokenizer of a checkpoint or store; None: the folder has no `tokenizer.json`.

    Raises:
        UserError: a file of it is broken.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    check_json_object(file)
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:
        if type(error) is not Exception:  # what the tokenizers library raises is a bare one
            raise
        raise UserError(f"no usable tokenizer: {error}", fix="put a whole tokenizer.json there", path=file) from error
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            check_json_object(folder / name)
            settings |= json.loads((folder / name).read_text(encoding="utf-8"))
    return LightTokenizer(backend, settings, _template(folder, settings.get("chat_template")))


def _template(folder: Path, configured: Any) -> str | dict[str, str] | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(configured, list):  # named templates
        return {entry["name"]: entry["template"] for entry in configured}
    return configured if isinstance(configured, str) else None
