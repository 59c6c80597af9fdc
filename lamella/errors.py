"""Errors meant for people.

Everything a user can cause is a `UserError`: the command line prints it in one piece and
exits with its code, without a traceback. Anything else is a bug and propagates.
"""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """One clear message: what is wrong, which value it had, what to do.

    Args:
        what: what is wrong, with the value seen.
        fix: what the user can do about it.
        path: file concerned; printed as `path:line:column` as far as known.
        line: physical line in `path`, counted from 1.
        column: column in that line, counted from 1.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        fix: str = "",
        path: str | Path | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        self.what = what
        self.fix = fix
        self.path = None if path is None else str(path)
        self.line = line
        self.column = column
        super().__init__(self.render())

    def render(self) -> str:
        where = ""
        if self.path is not None:
            numbers = [str(n) for n in (self.line, self.column) if n is not None]
            where = ":".join([self.path, *numbers]) + ": "
        return where + self.what + (f"\n  fix: {self.fix}" if self.fix else "")


class DoesNotFit(UserError):
    """A plan that the machine has no room for."""

    exit_code = 3


class RunFailed(UserError):
    """A run that started properly but whose result must not be trusted (NaN loss, dead adapter)."""

    exit_code = 1


class RankLost(RunFailed):
    """Other ranks are gone or silent: all started again from the last checkpoint may well go on."""
