"""The small files of a checkpoint folder out of a GGUF model: config.json, tokenizer, chat template, generation config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamella.checkpoint.gguf_header import GgufHeader, read_gguf_header
from lamella.console import notice
from lamella.errors import UserError
from lamella.files import write_json

_GPT2_CUTS = ("gpt-2", "default", "smollm", "starcoder", "granite", "olmo")
"""Rules that cut text as GPT-2's does, or differently where no merge reaches."""


def write_gguf_files(path: Path, config: dict[str, Any], folder: Path) -> None:
    """Write what the metadata says into `folder`.

    The tokenizer is transformers' conversion, told by a notice where its rule for cutting text is not the file's.

    Args:
        path: the model's file, or the first of a split one.
        config: what `checkpoint.gguf` made of the metadata.

    Raises:
        UserError: a tokenizer that transformers cannot make of the metadata.
    """
    header = read_gguf_header(path)
    write_json(folder / "config.json", config, indent=2)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    ends = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    stops = list(dict.fromkeys(i for i in ends if i is not None))
    if len(stops) > 1:
        ids["eos_token_id"] = stops
    write_json(folder / "generation_config.json", ids, indent=2)
    if header.metadata.get("tokenizer.ggml.tokens"):
        _write_tokenizer(header, folder)
    else:
        notice(f"{path.name} has no tokenizer")


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, GGUF_TOKENIZER_TYPES

    first, kind = header.files[0], header.metadata.get("tokenizer.ggml.model")
    if kind not in GGUF_TOKENIZER_TYPES:
        raise UserError(f"has a tokenizer of type {kind!r}, which transformers does not make files of",
                        fix="give the Hugging Face checkpoint", path=first)  # fmt: skip
    cut = header.metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and cut not in GGUF_PRE_TOKENIZER_SPLITS and cut not in _GPT2_CUTS:
        notice(f"{first.name}: text is cut by the rule {cut!r}, which transformers does not know: GPT-2's takes its place; "
               "compare token ids with the original model's tokenizer")  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(first.parent, gguf_file=first.name)
    tokenizer.save_pretrained(folder)
