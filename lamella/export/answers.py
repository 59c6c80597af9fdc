"""Servers that tell no log-probabilities: their greedy answers to real chats, beside Lamella's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lamella.adapter import Adapter
from lamella.data.formats import read_conversation
from lamella.data.read import find_files, read_rows
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.eval.encoder import StoreEncoder
from lamella.export.engines.seen import Asked
from lamella.export.engines.server import TransformersServe
from lamella.export.prompts import ROWS, trained_on
from lamella.store.reader import Store

Chat = list[dict[str, Any]]
NEW_TOKENS = 16


@dataclass(frozen=True)
class Answered:
    """What came out.

    Attributes:
        engine: with its version; chats: how many were asked.
        same: share of its answers that are Lamella's, adapter on base, to the letter; base: share that are the bare base's.
        failures: why it does not pass; empty when it does.
    """

    engine: str
    dtype: str
    chats: int
    same: float
    base: float
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def chats_of(adapter: Path, files: Sequence[Path] = (), most: int = ROWS) -> list[Chat]:
    """The chats of a data file up to where an answer begins.

    Raises:
        UserError: no data to be found, or no row that is a chat.
    """
    paths = find_files(list(files) or trained_on(adapter))
    found: list[Chat] = []
    for path in paths:
        for raw in read_rows(path):
            if raw.value is None or len(found) == most:
                continue
            _, row = read_conversation(raw.value)
            if row.plain is None and row.messages[-1].role == "assistant":
                found.append([{"role": m.role, "content": m.content} for m in row.messages[:-1]])
    if not found:
        raise UserError(
            "no chats to compare answers to", fix="give --prompts FILE.jsonl with `messages`", path=paths[0]
        )
    return found


def verify_answers(
    server: TransformersServe, model: Path, *, store: Path, adapter: Path, chats: Sequence[Chat], python: Path | None,
    dtype: str = "float32", threads: int = 2,
) -> Answered:  # fmt: skip
    """Ask a server that holds the merged model, and compare.

    Raises:
        UserError: the server is not installed. RunFailed: it stopped or answered otherwise than agreed.
    """
    engine = Engine.open(Store.open(store), dtype="fp32" if dtype == "float32" else "auto")
    encoder = StoreEncoder.open(store, adapter)
    prompts = [encoder.prompt_ids(chat) for chat in chats]
    ours = []
    for attached in (None, Adapter.load(adapter, engine.skeleton)):
        engine.attach(attached)
        made = engine.generate(prompts, NEW_TOKENS, encoder.stop_ids)
        ours.append([encoder.decode(one.ids) for one in made])
    engine.close()
    system = [] if encoder.system is None else [{"role": "system", "content": encoder.system}]
    whole = [chat if chat[0]["role"] == "system" else [*system, *chat] for chat in chats]
    asked = Asked(model, None, (), 0, dtype, threads)
    version, answers = server.texts(asked, whole, NEW_TOKENS, python)
    return judge_answers(version, dtype, answers, tuned=ours[1], base=ours[0])


def judge_answers(
    version: str, dtype: str, answers: Sequence[str], tuned: Sequence[str], base: Sequence[str]
) -> Answered:
    """Of greedy answers nine in ten must be ours: rounding may turn a close choice."""
    shares = [
        sum(a.strip() == b.strip() for a, b in zip(answers, other, strict=True)) / len(answers)
        for other in (tuned, base)
    ]
    failures = []
    if shares[0] < 0.9:
        failures.append(f"{shares[0]:.0%} of its answers are Lamella's, such as {answers[0]!r} for {tuned[0]!r}")
    if list(tuned) == list(base):
        failures.append("the adapter changes none of these answers: ask other ones")
    elif shares[1] >= shares[0]:
        failures.append(f"{shares[1]:.0%} of its answers are those of the base: the adapter has no effect there")
    return Answered(version, dtype, len(answers), shares[0], shares[1], tuple(failures))
