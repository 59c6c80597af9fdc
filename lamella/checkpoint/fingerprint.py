"""Identity of a model's weights: equal for equal weights wherever and however sharded they lie."""

from __future__ import annotations

import json

import xxhash

from lamella.checkpoint.packing import parts_of
from lamella.checkpoint.source import Checkpoint

_SAMPLE_BYTES = 512


def fingerprint(checkpoint: Checkpoint, tied: bool) -> str:
    """32 hex digits: xxh3_128 over config facts, names, shapes, dtypes and two samples of every tensor, or of its packed
    parts.

    Two samples of 512 bytes (at a third and at two thirds) tell apart any two trainings of one architecture
    without reading the weights; a checksum of everything is in the store's manifest.
    """
    facts = checkpoint.facts
    digest = xxhash.xxh3_128()
    told = [facts.model_type, facts.hidden_size, facts.num_layers, facts.vocab_size, facts.num_experts, tied]
    digest.update(json.dumps(told).encode())
    buffer = bytearray(_SAMPLE_BYTES)
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        for part in parts_of(tensor):
            for third in (1, 2):
                start = max(0, min(part.nbytes * third // 3, part.nbytes - _SAMPLE_BYTES))
                view = memoryview(buffer)[: min(_SAMPLE_BYTES, part.nbytes)]
                checkpoint.read_into(part, start, view)
                digest.update(view)
    return digest.hexdigest()
