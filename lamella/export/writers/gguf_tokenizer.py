"""tokenizer.json as GGUF metadata.

Byte-level BPE is `tokenizer.ggml.model` "gpt2": tokens, their types, merges, and the name of the rule that cuts text before
merging ("pre"). SentencePiece BPE is "llama": tokens, types and scores; llama.cpp joins the pair whose result has the highest
score, so a score is minus the rank of the merge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lamella.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_FIX = "export in another form"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_metadata(files: Mapping[str, Path], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Keys (`tokenizer.*`) and values of a model's tokenizer, and notices.

    Args:
        files: name -> file: tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json.
        config: the model's, with all defaults.

    Raises:
        UserError: a tokenizer that is neither byte-level nor SentencePiece BPE, or that cuts text in a way llama.cpp has
            no name for.
    """
    if "tokenizer.json" not in files:
        return {"tokenizer.ggml.model": "none"}, ["no tokenizer.json beside the model: the GGUF has no tokenizer"]
    tree = _read(files["tokenizer.json"])
    model = tree.get("model") or {}
    if model.get("type") != "BPE":
        raise UserError(f"a tokenizer of type {model.get('type')!r} is not written as GGUF", fix=_FIX)
    tokens, types = _tokens(tree, int(config["vocab_size"]))
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [m if isinstance(m, list) else m.split(" ") for m in model.get("merges") or ()]
    if _is_byte_level(tree):
        found["tokenizer.ggml.model"] = "gpt2"
        found["tokenizer.ggml.pre"] = _pre(tree)
        found["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    else:
        found["tokenizer.ggml.model"] = "llama"
        found["tokenizer.ggml.pre"] = "default"
        found["tokenizer.ggml.scores"] = _scores(tokens, merges)
        found["tokenizer.ggml.add_space_prefix"] = _prepends(tree)
        for i, token in enumerate(tokens):
            if types[i] == NORMAL and _BYTE.fullmatch(token):
                types[i] = BYTE
            elif token == model.get("unk_token"):
                types[i] = UNKNOWN
    return found | _special(files, config, tokens), []


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", fix="repair the tokenizer's files", path=file) from error
    return tree if isinstance(tree, dict) else {}


def _tokens(tree: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    by_id = {int(i): token for token, i in tree["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, NORMAL)
    for added in tree.get("added_tokens") or ():
        by_id[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    if by_id and max(by_id) >= size:
        raise UserError(
            f"the tokenizer has id {max(by_id)}, the model {size} rows", fix="give the model's own tokenizer"
        )
    return [by_id.get(i, f"[PAD{i}]") for i in range(size)], [types.get(i, UNUSED) for i in range(size)]


def _steps(tree: Mapping[str, Any], name: str, inner: str) -> Iterator[Mapping[str, Any]]:
    """A tokenizer.json's part, or the parts of a sequence of them."""
    part = tree.get(name)
    if isinstance(part, dict):
        yield from part[inner] if part.get("type") == "Sequence" else [part]


def _is_byte_level(tree: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(tree, "pre_tokenizer", "pretokenizers"))


def _pre(tree: Mapping[str, Any]) -> str:
    """llama.cpp's name of the rule that cuts text into words."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    steps = list(_steps(tree, "pre_tokenizer", "pretokenizers"))
    level, others = steps[-1], steps[:-1]
    if level["type"] == "ByteLevel" and level.get("use_regex", True):
        if not others:
            return "gpt-2"
        if len(others) == 1 and others[0]["type"] == "Digits" and others[0].get("individual_digits"):
            return "smollm"
    if level["type"] == "ByteLevel" and len(others) == 1 and others[0]["type"] == "Split":
        said = (others[0].get("pattern") or {}).get("Regex")
        names = [name for name, rule in GGUF_PRE_TOKENIZER_SPLITS.items() if rule == said]
        if names:
            return "llama-bpe" if "llama-bpe" in names else names[0]
    raise UserError("llama.cpp has no name known here for the way this tokenizer cuts text: "
                    f"{json.dumps(steps)[:200]}", fix=_FIX)  # fmt: skip


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    return [-float(ranks[token]) if token in ranks else 0.0 for token in tokens]


def _prepends(tree: Mapping[str, Any]) -> bool:
    """Whether a space is put before the text."""
    if any(step["type"] == "Prepend" for step in _steps(tree, "normalizer", "normalizers")):
        return True
    metaspace = [s for s in _steps(tree, "pre_tokenizer", "pretokenizers") if s["type"] == "Metaspace"]
    return bool(metaspace) and metaspace[0].get("prepend_scheme", "always") != "never"


def _special(files: Mapping[str, Path], config: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files["tokenizer.json"].parent)
    found: dict[str, Any] = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        value = getattr(tokenizer, f"{name}_token_id", None)
        if value is None:
            value = config.get(f"{name}_token_id")
        if isinstance(value, list):
            value = value[0] if value else None
        if value is not None and 0 <= value < len(tokens):
            found[f"tokenizer.ggml.{key}_token_id"] = int(value)
    eos = found.get("tokenizer.ggml.eos_token_id")
    said = _read(files["generation_config.json"]).get("eos_token_id") if "generation_config.json" in files else None
    others = [i for i in (said if isinstance(said, list) else [said]) if isinstance(i, int) and i != eos]
    if others:
        found["tokenizer.ggml.eot_token_id"] = others[0]
    ids = tokenizer("a").input_ids
    bos = found.get("tokenizer.ggml.bos_token_id")
    found["tokenizer.ggml.add_bos_token"] = bool(ids) and bos is not None and ids[0] == bos
    found["tokenizer.ggml.add_eos_token"] = bool(ids) and eos is not None and ids[-1] == eos
    if isinstance(tokenizer.chat_template, str):
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found
