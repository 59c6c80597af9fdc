"""`lamella serve`: an OpenAI-compatible server on a store; its keys; the same handed over to another engine."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_KeyFile = Annotated[Path, typer.Option("--keys", help="Key file; `keys` of serve.toml names it.")]
_RUN = "run"


class EngineName(StrEnum):
    lamella = "lamella"
    vllm = "vllm"
    sglang = "sglang"


class _ServeGroup(TyperGroup):
    """`lamella serve SERVE.toml` is `lamella serve run SERVE.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [_RUN, *args])


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        cls=_ServeGroup, help="Serve a store and its adapters (OpenAI-compatible); keys of that server."
    )
    group.command(_RUN)(serve)
    keys = typer.Typer(no_args_is_help=True, help="Keys of a server: make one, list them, make one count no more.")
    keys.command("add")(add)
    keys.command("list")(list_keys)
    keys.command("revoke")(revoke)
    group.add_typer(keys, name="keys")
    app.add_typer(group, name="serve")


def serve(
    serve_file: Annotated[Path, typer.Argument(metavar="SERVE.toml", help="Store, adapters, bounds.")],
    host: Annotated[str | None, typer.Option(help="Address to listen at. Default: the file's.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = None,
    engine: Annotated[
        EngineName,
        typer.Option(help="Who computes: Lamella, or another engine that is started with exported adapters."),
    ] = EngineName.lamella,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything; with another engine: export and write its command.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for another engine's files. Default: serve-ENGINE.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="Python in which the other engine is installed. Default: this one.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="What the other engine loads as base: a checkpoint or hub id. Default: the store, undone to bf16."
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            help='More arguments of the other engine, such as "--tensor-parallel-size 4"; may be given again.'
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when requests are taken.")] = False,
) -> None:
    """Answer OpenAI's requests on a store, with an adapter per tenant, until SIGTERM.

    Keys: `lamella serve keys add|list|revoke`. SIGHUP reads the adapters of SERVE.toml again.
    """
    from lamella.serve.settings import load_serve_config

    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    config = load_serve_config(serve_file, given)
    if engine is not EngineName.lamella:
        from lamella.serve.handover import hand_over

        extra = [word for text in engine_arg or () for word in shlex.split(text)]
        hand_over(config, engine.value, output or Path(f"serve-{engine.value}"), python=python, base=base, extra=extra,
                  start=not dry_run, as_json=as_json)  # fmt: skip
        return
    _refuse_idle({"--output": output, "--python": python, "--base": base, "--engine-arg": engine_arg or None})
    _run(serve_file, config, dry_run, as_json)


def _refuse_idle(given: dict[str, Any]) -> None:
    from lamella.errors import UserError

    named = [name for name, value in given.items() if value is not None]
    if named:
        raise UserError(f"{', '.join(named)}: for another engine", fix="leave it out, or name one with --engine")


def _run(serve_file: Path, config: Any, dry_run: bool, as_json: bool) -> None:
    import os

    from lamella.console import notice
    from lamella.serve.keys import KeyStore
    from lamella.serve.registry import Registry
    from lamella.serve.scheduler import open_backend
    from lamella.serve.server import Adapters, address, listen, run_server
    from lamella.serve.service import Service

    keys = None if config.keys is None else KeyStore(config.keys)
    bound = listen(config.host, config.port)
    backend = open_backend(config)
    try:
        registry = Registry(config.store, backend, config.base)
        adapters = Adapters(serve_file, config, registry)
        adapters.load()

        def started() -> None:
            if keys is None:
                notice(
                    "no keys: every process of this host may ask, nobody may load adapters (`lamella serve keys add`)"
                )
            notice(f"serving {', '.join(registry.models)} at {address(bound)}")
            if as_json:
                typer.echo(json.dumps({"url": address(bound), "models": list(registry.models), "pid": os.getpid(),
                                       "keys": None if keys is None else str(config.keys)}))  # fmt: skip

        if dry_run:
            notice(f"would serve {', '.join(registry.models)} at {address(bound)}")
            if as_json:
                typer.echo(
                    json.dumps({"models": list(registry.models), "config": json.loads(config.model_dump_json())})
                )
            return
        run_server(Service(config, registry, backend, keys), bound, adapters, started)
    finally:
        backend.close()
        bound.close()
    notice("stopped")


def add(
    name: Annotated[str, typer.Argument(help="Whose key it is, for people.")],
    keys: _KeyFile = Path("keys.json"),
    adapter: Annotated[list[str] | None, typer.Option(help='Adapter it reaches; once per adapter; "*": all.')] = None,
    base: Annotated[bool, typer.Option("--base", help="It reaches the store without an adapter.")] = False,
    admin: Annotated[bool, typer.Option("--admin", help="It may load and drop adapters.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="It may read /metrics.")] = False,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0: the server's own limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="0: the server's own limit.")] = 0,
    concurrent: Annotated[int, typer.Option(min=0, help="Requests at once; 0: the server's own limit.")] = 0,
    as_json: _Json = False,
) -> None:
    """Make a key. It is printed once; the file keeps a salted hash of it."""
    from lamella.console import notice
    from lamella.serve.keys import NewKey, add_key
    from lamella.serve.settings import KeyLimits

    limits = KeyLimits(
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, concurrent=concurrent
    )
    new = NewKey(name, tuple(adapter or ()), base, admin, metrics).with_limits(limits)
    record, key = add_key(keys, new)
    if as_json:
        typer.echo(json.dumps({"id": record.id, "name": record.name, "key": key, "keys": str(keys)}))
        return
    typer.echo(key)
    notice(f"key {record.id} of {record.name!r} is in {keys}, as a hash: this is the only time that it is shown")


def list_keys(keys: _KeyFile = Path("keys.json"), as_json: _Json = False) -> None:
    """List keys: whose they are and what they reach; never the keys."""
    from rich.table import Table

    from lamella.console import out
    from lamella.serve.keys import read_keys

    shown = [record.model_dump(exclude={"salt", "hash"}) for record in read_keys(keys).keys]
    if as_json:
        typer.echo(json.dumps({"keys": shown}))
        return
    table = Table("id", "name", "reaches", "limits", "made", "revoked")
    for key in shown:
        reaches = [*key["adapters"], *(word for word in ("base", "admin", "metrics") if key[word])]
        limits = ", ".join(f"{k} {v}" for k, v in (key["limits"] or {}).items() if v) or "the server's"
        table.add_row(key["id"], key["name"], ", ".join(reaches), limits, key["created"], key["revoked"] or "")
    out.print(table)


def revoke(
    which: Annotated[str, typer.Argument(metavar="ID|NAME", help="The key's id, or whose it is.")],
    keys: _KeyFile = Path("keys.json"),
    as_json: _Json = False,
) -> None:
    """Make a key count no more; a running server refuses its next request."""
    from lamella.console import notice
    from lamella.serve.keys import revoke_key

    gone = revoke_key(keys, which)
    if as_json:
        typer.echo(json.dumps({"id": gone.id, "name": gone.name, "revoked": gone.revoked}))
        return
    notice(f"key {gone.id} of {gone.name!r} counts no more")
