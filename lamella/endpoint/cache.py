"""Answers on disk, by what was asked: a run that is done again, or goes on, asks nothing twice.

One SQLite file: each answer is a transaction of its own, so a kill loses those under way alone.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lamella.errors import UserError


def key_of(asked: Mapping[str, Any]) -> str:
    """sha256 of what decides an answer, whatever the order of its keys."""
    return hashlib.sha256(
        json.dumps(asked, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    ).hexdigest()


class AnswerCache:
    """Answers by key.

    Raises:
        UserError: the file is none of ours, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute(
                "create table if not exists answers (key text primary key, answer text not null) without rowid"
            )
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"cannot be used as a cache: {error}", fix="delete it, or give another --output", path=path
            ) from error

    def get(self, key: str, needed: Collection[str] = ()) -> dict[str, Any] | None:
        """The answer to this, or None. Raises `UserError`: it is damaged, or lacks one of the keys `needed`."""
        try:
            row = self._db.execute("select answer from answers where key = ?", (key,)).fetchone()
            if row is None:
                return None
            answer = json.loads(row[0])
        except (sqlite3.Error, ValueError) as error:
            raise self._damaged(str(error)) from error
        if not isinstance(answer, dict):
            raise self._damaged("an answer is no JSON object")
        missing = [name for name in needed if name not in answer]
        if missing:
            raise self._damaged(f"an answer has no {missing[0]!r}")
        return answer

    def _damaged(self, why: str) -> UserError:
        return UserError(
            f"is damaged: {why}",
            fix="delete it, and its answers are asked again; or give another --output",
            path=self.path,
        )

    def put(self, key: str, answer: Mapping[str, Any]) -> None:
        self._db.execute("insert or replace into answers values (?, ?)", (key, json.dumps(answer)))

    def money(self) -> float:
        """What all answers in it have cost."""
        (total,) = self._db.execute("select coalesce(sum(json_extract(answer, '$.cost')), 0) from answers").fetchone()
        return float(total)

    def __len__(self) -> int:
        return int(self._db.execute("select count(*) from answers").fetchone()[0])

    def close(self) -> None:
        self._db.close()
