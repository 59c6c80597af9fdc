"""API keys: shown once, kept as salted hashes, each with the adapters it reaches. Imports no torch.

A key is `lam-ID-SECRET`; ID (8 hex digits) finds the record, SECRET has 256 random bits, so that one round of a salted
SHA-256 is enough: there is nothing to guess from. Records carry neither.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError

from lamella.config import Section, explain_validation
from lamella.errors import UserError
from lamella.files import write_json
from lamella.serve.settings import KeyLimits

_KEY = re.compile(r"lam-([0-9a-f]{8})-([A-Za-z0-9_-]{43})")
_EVERYTHING = "*"


class KeyRecord(Section):
    """One key as the file keeps it."""

    id: str = Field(pattern=r"^[0-9a-f]{8}$")
    """Public part of the key."""
    name: str = Field(min_length=1, max_length=128)
    """Whose it is, for people."""
    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Hex."""
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Hex SHA-256 of salt and secret."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that it reaches; "*": all."""
    base: bool = False
    """It reaches the store without an adapter."""
    admin: bool = False
    """It may load and drop adapters, and read the metrics."""
    metrics: bool = False
    """It may read the metrics."""
    limits: KeyLimits | None = None
    """None: the server's `limits.per_key`."""
    created: str
    """Date and time, UTC."""
    revoked: str | None = None
    """Date and time since which it does not count."""


class KeyFile(Section):
    version: int = Field(1, ge=1, le=1)
    """Of this format."""
    keys: tuple[KeyRecord, ...] = ()
    """All keys ever made."""


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        id: of the key; "": no keys are used here.
        adapters: names it reaches, "*" for all.
    """

    id: str
    adapters: frozenset[str]
    base: bool
    admin: bool
    metrics: bool
    limits: KeyLimits | None

    def reaches(self, name: str | None) -> bool:
        """`name` of an adapter; None: the base."""
        if name is None:
            return self.base
        return name in self.adapters or _EVERYTHING in self.adapters


ANYONE = Caller("", frozenset([_EVERYTHING]), base=True, admin=False, metrics=True, limits=None)
"""The caller where no keys are used: a process of this host. It cannot load adapters."""


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode("utf-8", "replace")).hexdigest()


class KeyStore:
    """The key file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._records: dict[str, KeyRecord] = {}
        self._nobody = secrets.token_hex(16)
        self.refresh()

    def refresh(self) -> None:
        """Raises `UserError`: the file is gone or broken."""
        try:
            stat = self.path.stat()
        except OSError as error:
            raise UserError(
                f"cannot be read: {error.strerror}", fix="make a key with `lamella serve keys add`", path=self.path
            ) from error
        if stat.st_mode & 0o022:
            raise UserError(
                "others may write to it, and so make keys of their own", fix=f"chmod 600 {self.path}", path=self.path
            )
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen != self._seen:
            self._records = {record.id: record for record in read_keys(self.path).keys}
            self._seen = seen

    def caller(self, key: str) -> Caller | None:
        """Whose key it is; None: nobody's, or a revoked one. The hash is compared in constant time, also for ids that do
        not exist.

        Raises:
            UserError: as `refresh`.
        """
        self.refresh()
        match = _KEY.fullmatch(key)
        record = self._records.get(match[1]) if match else None
        salt, wanted = (record.salt, record.hash) if record is not None else (self._nobody, "0" * 64)
        same = hmac.compare_digest(_digest(salt, match[2] if match else key[:128]), wanted)
        if record is None or not same or record.revoked is not None:
            return None
        return Caller(
            record.id,
            frozenset(record.adapters),
            record.base,
            record.admin,
            record.admin or record.metrics,
            record.limits,
        )


def read_keys(path: Path) -> KeyFile:
    """Raises `UserError`: unreadable, or no key file."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", fix="make a key with `lamella serve keys add`", path=path
        ) from error
    except ValidationError as error:
        told = explain_validation(error, path, KeyFile)
        raise UserError(
            told.what.split("\n")[0][:200], fix="it is written by `lamella serve keys`", path=path
        ) from error


@contextmanager
def _alone(path: Path) -> Iterator[KeyFile]:
    """The file's content while nobody else changes it."""
    if not path.parent.is_dir():
        raise UserError("no such folder", fix="make it first", path=path.parent)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield read_keys(path) if path.exists() else KeyFile()


def _write(path: Path, keys: KeyFile) -> None:
    old = os.umask(0o077)
    try:
        write_json(path, json.loads(keys.model_dump_json()))
    finally:
        os.umask(old)


def add_key(path: Path, record: NewKey) -> tuple[KeyRecord, str]:
    """Make a key; its text is in the second value and nowhere else.

    Raises:
        UserError: it would reach nothing, a name that a living key has already, a broken file.
    """
    if not record.name.strip() or not all(a.strip() for a in record.adapters):
        raise UserError("a key and the adapters that it reaches need names", fix="give a NAME, and --adapter NAME")
    if not (record.adapters or record.base or record.admin or record.metrics):
        raise UserError("the key would reach nothing", fix="give --adapter NAME, --base, --admin or --metrics")
    with _alone(path) as file:
        if any(k.name == record.name and k.revoked is None for k in file.keys):
            raise UserError(f"a key called {record.name!r} exists", fix="revoke it first, or choose another name")
        taken = {k.id for k in file.keys}
        key_id = next(i for i in iter(lambda: secrets.token_hex(4), None) if i not in taken)
        secret, salt = secrets.token_urlsafe(32), secrets.token_hex(16)
        made = KeyRecord(
            id=key_id, name=record.name, salt=salt, hash=_digest(salt, secret), adapters=record.adapters,
            base=record.base, admin=record.admin, metrics=record.metrics, limits=record.limits, created=_now(),
        )  # fmt: skip
        _write(path, KeyFile(keys=(*file.keys, made)))
    return made, f"lam-{key_id}-{secret}"


@dataclass(frozen=True)
class NewKey:
    """What `add_key` is to make."""

    name: str
    adapters: tuple[str, ...] = ()
    base: bool = False
    admin: bool = False
    metrics: bool = False
    limits: KeyLimits | None = None

    def with_limits(self, limits: KeyLimits) -> NewKey:
        return replace(self, limits=limits if limits != KeyLimits() else None)


def revoke_key(path: Path, which: str) -> KeyRecord:
    """Make a key, by its id or name, count no more; a running server sees it with the next request.

    Raises:
        UserError: no such file, no living key of this id or name.
    """
    read_keys(path)
    with _alone(path) as file:
        found = next((k for k in file.keys if which in (k.id, k.name) and k.revoked is None), None)
        if found is None:
            living = ", ".join(f"{k.id} ({k.name})" for k in file.keys if k.revoked is None) or "none"
            raise UserError(f"no key {which!r} that counts", fix=f"keys: {living}", path=path)
        gone = found.model_copy(update={"revoked": _now()})
        _write(path, KeyFile(keys=tuple(gone if k.id == found.id else k for k in file.keys)))
    return gone


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
