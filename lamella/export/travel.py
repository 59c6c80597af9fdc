"""What goes with every export: tokenizer, chat template, stop ids, the base's identity, receipt, model card.

tokenizer files, chat_template.jinja    those that training used
generation_config.json                  with the ids that end an answer in the training text
lamella_export.json                     base (name, revision, fingerprint), template's sha256, stop ids, system text
receipt.json, README.md                 how it was made; for people
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lamella import __version__
from lamella.data.encode import load_tokenizer, stop_ids
from lamella.errors import UserError
from lamella.export.adapter_base import Base
from lamella.export.card import model_card
from lamella.export.servers import base_name
from lamella.files import write_json, write_text
from lamella.train.assemble import generation_config

IDENTITY = "lamella_export.json"
TEMPLATE, GENERATION, RECEIPT = "chat_template.jinja", "generation_config.json", "receipt.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken",
    "tiktoken.model",
)  # fmt: skip
_LICENCES = ("LICENSE*", "NOTICE*")

__all__ = ["IDENTITY", "base_name", "identity_of", "write"]


def write(
    folder: Path, base: Base, *, source: Path, facts: Mapping[str, Any], kind: Literal["adapter", "merged"], layout: str,
    notes: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Put into `folder` what belongs to an adapter of `source`, or to a model that it was merged into.

    Args:
        base: what it was trained on. source: the run's or adapter's folder: its template, stop ids and receipt come
            first. facts: of `lamella_adapter.json`. layout: of an adapter, or the form of a merged model's weights.
        notes: how to load it, for the card.

    Returns:
        what people should know, such as that there is no tokenizer.

    Raises:
        UserError: unreadable tokenizer, template, generation config or receipt.
    """
    said = _tokenizer(folder, base.path)
    template = _template(folder, source, base)
    generation = _generation(folder, source, base, template)
    receipt = _receipt(folder, source)
    if kind == "merged":
        _copy(folder, base.path, _LICENCES)
    identity = {
        "lamella_version": __version__, "kind": kind, "layout": layout,
        "base": {"name": base_name(base), "revision": base.revision, "fingerprint": base.fingerprint,
                 "model_type": base.skeleton.config.model_type},
        "chat_template_sha256": None if template is None else _sha256(template), "stop_ids": generation.get("eos_token_id"),
        "system": facts.get("system"),
    }  # fmt: skip
    write_json(folder / IDENTITY, identity)
    write_text(folder / "README.md", model_card(identity, receipt, [*notes, *said]))
    return said


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _copy(folder: Path, source: Path, patterns: Sequence[str]) -> list[str]:
    copied = []
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
                copied.append(file.name)
    return copied


def _tokenizer(folder: Path, base: Path) -> list[str]:
    if not _copy(folder, base, TOKENIZER_FILES):
        return ["the base has no tokenizer files, so none travel with this export"]
    return []


def _template(folder: Path, source: Path, base: Base) -> str | None:
    """The template that training used, as a file and in tokenizer_config.json, where some engines look first."""
    own, kept = source / TEMPLATE, base.path / TEMPLATE
    config_file = folder / "tokenizer_config.json"
    config = _object(config_file) if config_file.is_file() else {}
    template = next((_text(path) for path in (own, kept) if path.is_file()), None)
    if template is None:
        inside = config.get("chat_template")
        if not isinstance(inside, str):
            return None
        template = inside
    write_text(folder / TEMPLATE, template)
    if "chat_template" in config and config["chat_template"] != template:
        write_json(config_file, {**config, "chat_template": template})
    return template


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", fix="save the adapter again", path=path) from error


def _object(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot be read: {error}", fix="save the adapter again, or quantize again", path=path
        ) from error
    if not isinstance(tree, dict):
        raise UserError("not a JSON object", fix="save the adapter again, or quantize again", path=path)
    return tree


def _generation(folder: Path, source: Path, base: Base, template: str | None) -> dict[str, Any]:
    """The run's, else the base's with the ids that end an answer of this template."""
    if (source / GENERATION).is_file():
        config = _object(source / GENERATION)
    elif (folder / "tokenizer_config.json").is_file():
        config = generation_config(base.path, stop_ids(load_tokenizer(folder), template))
    elif (base.path / GENERATION).is_file():
        config = _object(base.path / GENERATION)
    else:
        return {}
    write_json(folder / GENERATION, config)
    return config


def _receipt(folder: Path, source: Path) -> dict[str, Any] | None:
    if not (source / RECEIPT).is_file():
        return None
    receipt = _object(source / RECEIPT)
    shutil.copyfile(source / RECEIPT, folder / RECEIPT)
    return receipt


def identity_of(folder: Path) -> dict[str, Any]:
    """What `lamella_export.json` says; nothing for folders that are no export."""
    file = folder / IDENTITY
    return _object(file) if file.is_file() else {}
