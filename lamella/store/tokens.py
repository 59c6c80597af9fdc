"""A tokenizer for stores that have none: every byte is a token, and so is every made-up word up to the vocabulary's size.

Ids: the 256 bytes, then words (a space and letters, `word(i)`), then `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`. So
any text can be encoded, and text of a given number of tokens, over the whole vocabulary, can be written.
"""

from __future__ import annotations

import json
from pathlib import Path

from lamella.console import notice
from lamella.files import write_text

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LETTERS = 5
FIRST_WORD = 256
"""Id of the first word; the last one is `vocab_size - 4`."""


def word(index: int) -> str:
    """The letters of token `FIRST_WORD + index` (0 <= index < 26 ** 5); the token begins with a space."""
    letters = ""
    for _ in range(_LETTERS):
        index, digit = divmod(index, 26)
        letters = chr(97 + digit) + letters
    return letters


def write_tokenizer(folder: Path, vocab_size: int) -> list[Path]:
    """tokenizer.json and tokenizer_config.json; none, with a notice, when the vocabulary is too small for them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if vocab_size < FIRST_WORD + len(_SPECIAL):
        least = FIRST_WORD + len(_SPECIAL)
        notice(f"no tokenizer is made: the vocabulary has {vocab_size} tokens, it needs {least}; training needs one")
        return []
    space = "\u0120"  # the byte-level alphabet's letter for a space
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = min(vocab_size - len(alphabet) - len(_SPECIAL), 26**_LETTERS)
    vocab = {token: i for i, token in enumerate(alphabet)} | {space + word(i): FIRST_WORD + i for i in range(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "chat_template": _CHATML, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    return [
        write_text(folder / "tokenizer.json", tokenizer.to_str()),
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n"),
    ]
