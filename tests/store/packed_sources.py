"""GPT-OSS as its makers publish it, tiny and random."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoint.helpers import write_fused
from tests.checkpoint.packed_writers import write_packed


def write_mxfp4(path: Path, config, *, seed: int = 0) -> Path:
    """Experts [E, I, O] as `_blocks` [E, O, I / 32, 16] and `_scales` [E, O, I / 32], all else in bf16."""
    plain = write_fused(path.with_name(f"{path.name}-plain"), config, seed=seed)
    told = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**told, "dtype": "bfloat16"}))
    return write_packed("mxfp4", plain, path).path
