"""Folders and files that appear under their name only when complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamella.files import write_text


@contextmanager
def appear(target: Path) -> Iterator[Path]:
    """Give a fresh folder to fill; it takes the name `target` when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """One JSON object per line, UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
