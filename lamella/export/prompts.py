"""Real prompts to compare models on: rows of a data file, encoded as training encodes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lamella.config import DataConfig
from lamella.data.dataset import encode_dataset
from lamella.data.encode import load_tokenizer
from lamella.errors import UserError
from lamella.eval.encoder import own_system

ROWS, TOKENS = 20, 256
_FIX = "give --prompts FILE.jsonl: rows in any format that training takes"


def prompts_of(
    store: Path, adapter: Path, files: Sequence[Path] = (), rows: int = ROWS, tokens: int = TOKENS
) -> tuple[tuple[int, ...], ...]:
    """Token ids of prompt and answer together: the first `rows` rows, each cut to its first `tokens` tokens.

    Args:
        files: data; none: what the adapter's run was trained on, where its config.json tells and the files are still there.

    Raises:
        UserError: no data to be found, or rows that cannot be used.
    """
    paths = [Path(f) for f in files] or trained_on(adapter)
    template = adapter / "chat_template.jinja"
    config = DataConfig(
        max_tokens=1 << 20, system=own_system(adapter), chat_template=template if template.is_file() else None,
        too_long="drop", bad_rows="drop", max_drop_share=1.0,
    )  # fmt: skip
    encoded = encode_dataset(config, load_tokenizer(store), paths).rows
    found = tuple(tuple(row.input_ids[:tokens]) for row in encoded[:rows])
    if not found:
        raise UserError("no rows to compare models on", fix=_FIX, path=paths[0])
    return found


def trained_on(adapter: Path) -> list[Path]:
    """Data that a run's folder names.

    Raises:
        UserError: it names none, or it is not there any more.
    """
    file = adapter / "config.json"
    try:
        named = json.loads(file.read_text())["data"]["train"] if file.is_file() else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"names no training data: {error}", fix=_FIX, path=file) from error
    found = [Path(name) for name in named]
    if not found:
        raise UserError("the adapter's folder does not tell what it was trained on", fix=_FIX, path=adapter)
    absent = [path for path in found if not path.exists()]
    if absent:
        raise UserError("the adapter's training data is not there", fix=_FIX, path=absent[0])
    return found
