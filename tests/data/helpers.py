"""What the tests of this room share."""

from pathlib import Path

from lamella.config import DataConfig
from lamella.data.dataset import EncodedDataset, encode_dataset
from lamella.data.encode import Encoder, Encoding
from lamella.data.formats import read_conversation
from tests.fixtures import write_jsonl


def encode_rows(tmp_path: Path, rows: list[dict], tokenizer, **settings) -> EncodedDataset:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    return encode_dataset(DataConfig(train=(path,), **settings), tokenizer)


def encode_row(row: dict, tokenizer, **settings) -> Encoding:
    return Encoder(tokenizer, **settings).encode(read_conversation(row)[1])


def label_spans(tokenizer, ids, mask) -> list[str]:
    """Decoded text of each run of label tokens."""
    spans, current = [], []
    for token, label in zip([*ids, None], [*mask, 0], strict=True):
        if label:
            current.append(token)
        elif current:
            spans.append(tokenizer.decode(current, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            current = []
    return spans


def labels(tokenizer, encoding: Encoding) -> list[str]:
    return label_spans(tokenizer, encoding.ids, encoding.mask)


def text(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
