"""Documents and splits. Rows of one text are one document: they lie on the same side, and are resampled together."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import xxhash

from lamella.errors import UserError


class LabelledRow(Protocol):
    """What a split looks at."""

    @property
    def tenant(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def entity(self) -> str: ...
    @property
    def label(self) -> str: ...


Row = TypeVar("Row", bound=LabelledRow)


@lru_cache(maxsize=1 << 16)
def document_key(text: str) -> str:
    """Identity of a document: hash of its text in NFC, with runs of white space as one blank."""
    return _digest(" ".join(unicodedata.normalize("NFC", text).split()))


def stable_order(key: str, seed: int) -> str:
    """Sort key that shuffles reproducibly and does not depend on the order of rows."""
    return _digest(f"{seed}:{key}")


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class Split(Generic[Row]):
    """Result of `split_rows`.

    Attributes:
        train, test: rows in their given order.
        duplicates: rows dropped because tenant, text and entity came before.
        conflicts: those among them whose label differed from the first one's.
        missing: (tenant, label, side) for each label without rows on a side.
    """

    train: list[Row]
    test: list[Row]
    duplicates: int
    conflicts: int
    missing: tuple[tuple[str, str, str], ...]

    def notes(self) -> list[str]:
        """Lines for people: what was dropped, which label has no rows where."""
        lines = []
        if self.duplicates:
            lines.append(f"{self.duplicates} duplicate rows dropped, {self.conflicts} of them with another label")
        lines += [f"tenant {tenant}: label `{label}` has 0 rows in {side}" for tenant, label, side in self.missing]
        return lines


def split_rows(rows: Sequence[Row], test_share: float, seed: int = 0) -> Split[Row]:
    """Split by document, stratified by tenant and label, deduplicated.

    All rows of one text, of whatever tenant, lie on one side. Labels are served from the rarest to the most
    frequent: each sends documents, in the order of a seeded hash of their text, to the test side until it has its
    share there; a label found in two documents or more asks for one test row and leaves one document to train on.
    The outcome does not depend on the order of the rows (except for which of two duplicates is kept: the first).

    Raises:
        UserError: `test_share` is not between 0 and 1.
    """
    if not 0 < test_share < 1:
        raise UserError(f"test share must lie between 0 and 1, got {test_share}", fix="give a share such as 0.2")
    kept: dict[tuple[str, str, str], Row] = {}
    conflicts = 0
    for row in rows:
        first = kept.setdefault((row.tenant, document_key(row.text), row.entity), row)
        conflicts += first.label != row.label
    documents_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    rows_in: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for (tenant, document, _), row in kept.items():
        documents_of[tenant, row.label].add(document)
        rows_in[document][tenant, row.label] += 1
    total = Counter[tuple[str, str]]()
    for counts in rows_in.values():
        total.update(counts)

    side: dict[str, str] = {}
    in_test = Counter[tuple[str, str]]()
    for stratum in sorted(total, key=lambda s: (total[s], s)):
        wanted = round(test_share * total[stratum])
        documents = sorted(documents_of[stratum], key=lambda d: stable_order(d, seed))
        if len(documents) > 1:
            wanted = max(wanted, 1)
        free = [d for d in documents if d not in side]
        in_train = any(side.get(d) == "train" for d in documents)
        for n, document in enumerate(free):
            last = n == len(free) - 1
            if in_test[stratum] < wanted and not (last and not in_train):
                side[document] = "test"
                in_test.update(rows_in[document])
            else:
                side[document] = "train"
                in_train = True

    train = [row for (_, document, _), row in kept.items() if side[document] == "train"]
    test = [row for (_, document, _), row in kept.items() if side[document] == "test"]
    missing = tuple(
        (tenant, label, name)
        for tenant, label in sorted(total)
        for name, part in (("train", train), ("test", test))
        if not any(r.tenant == tenant and r.label == label for r in part)
    )
    return Split(train, test, len(rows) - len(kept), conflicts, missing)
