"""Prompts and answers as training encodes them: a thin view of `lamella.data.encode`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamella.adapter.peft_format import FACTS, read_facts
from lamella.data.encode import Encoder, load_tokenizer
from lamella.data.formats import Conversation, Message
from lamella.data.read import RowError
from lamella.errors import UserError


class StoreEncoder:
    """The `PromptEncoder` of a store or checkpoint folder.

    Args:
        encoder: encodes chats; its chat template says where an answer begins and what ends it, its system text goes
            before chats that have none.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.system = encoder.system
        self.stop_ids = set(encoder.stop_ids)

    @classmethod
    def open(cls, folder: Path, adapter: Path | None = None) -> StoreEncoder:
        """The tokenizer of `folder`, with the chat template and the system text that travel with `adapter`, if any.

        Raises:
            UserError: no usable tokenizer, an unreadable template or system text.
        """
        template = system = None
        if adapter is not None:
            template, system = own_template(adapter / "chat_template.jinja"), own_system(adapter)
        return cls(Encoder(load_tokenizer(folder), chat_template=template, system=system))

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids up to where the answer begins: the training prefix of the same messages."""
        try:
            return self._encoder.encode_prompt(messages)
        except RowError as error:
            raise UserError(
                f"a prompt cannot be encoded: {error}", fix="see `prompt` and `system` of the task"
            ) from error

    def answer_ids(self, text: str) -> list[int]:
        """Label tokens of a training row with this answer: the answer and its terminator."""
        row = Conversation((Message("user", "?"), Message("assistant", text)))
        try:
            encoding = self._encoder.encode(row)
        except RowError as error:
            raise UserError(f"label {text!r} cannot be encoded: {error}", fix="rename the label") from error
        return [token for token, label in zip(encoding.ids, encoding.mask, strict=True) if label]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included, so that nothing the model wrote is hidden from the parser."""
        return self._encoder.text.decode(list(ids))


def own_template(path: Path) -> str | None:
    """The chat template in a file; None where there is no such file."""
    if not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat template cannot be read: {error}", fix="save the adapter again", path=path) from error


def own_system(adapter: Path) -> str | None:
    """`data.system` of the adapter's training; None for adapters that carry none."""
    system = read_facts(adapter).get("system")
    if system is not None and not isinstance(system, str):
        raise UserError(
            f"`system` must be text or null, is {system!r}", fix="save the adapter again", path=adapter / FACTS
        )
    return system
