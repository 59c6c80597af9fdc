"""The running process: listens, reads `serve.toml` again on SIGHUP, drains on SIGTERM."""

from __future__ import annotations

import errno
import math
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from lamella.console import notice
from lamella.errors import UserError
from lamella.serve.app import create_app
from lamella.serve.service import Models, Service
from lamella.serve.settings import AdapterConfig, ServeConfig, load_serve_config


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `UserError`: the address is not this host's, or in use."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        fix = "choose another `port`, or stop what listens there" if error.errno == errno.EADDRINUSE else "check `host`"
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror or error}", fix=fix) from error


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Adapters:
    """The adapters of a `serve.toml`, and what became of the file since.

    Args:
        path: of the file; config: as it was read.
    """

    def __init__(self, path: Path, config: ServeConfig, models: Models) -> None:
        self._path = path
        self._config = config
        self._models = models
        self._served: dict[str, AdapterConfig] = {}
        self._one = threading.Lock()

    def load(self) -> None:
        """Load all. Raises `UserError`, naming the adapter."""
        for entry in self._config.adapters:
            try:
                self._add(entry)
            except UserError as error:
                raise UserError(
                    f"adapter {entry.name!r}: {error.what}", fix=error.fix, path=error.path, line=error.line
                ) from error

    def _add(self, entry: AdapterConfig) -> None:
        made = self._models.add(entry.name, entry.path, entry.task, entry.tenant, replace=entry.name in self._served)
        for line in made.notes:
            notice(f"warning: {entry.name}: {line}")
        self._served[entry.name] = entry

    def reload(self) -> None:
        """Read the file again: new and changed adapters are loaded, absent ones dropped. Those of the admin endpoint stay.
        What is wrong is told, and the rest goes on."""
        with self._one:
            try:
                config = load_serve_config(self._path)
            except UserError as error:
                notice(f"warning: serve.toml is not read again: {error.render()}")
                return
            other = [name for name in ServeConfig.model_fields
                     if name != "adapters" and getattr(config, name) != getattr(self._config, name)]  # fmt: skip
            if other:
                notice(f"warning: changed in serve.toml, in effect after a restart: {', '.join(other)}")
            wanted = {entry.name: entry for entry in config.adapters}
            for name in [name for name in self._served if name not in wanted]:
                self._try(name, lambda name=name: self._models.remove(name))  # type: ignore[misc]
                del self._served[name]
            for name, entry in wanted.items():
                if self._served.get(name) != entry:
                    self._try(name, lambda entry=entry: self._add(entry))  # type: ignore[misc]
            notice(f"serve.toml was read again; models: {', '.join(self._models.models)}")

    def _try(self, name: str, change: Callable[[], object]) -> None:
        try:
            change()
        except UserError as error:
            notice(f"warning: adapter {name!r}: {error.render()}")


def run_server(service: Service, bound: socket.socket, adapters: Adapters, started: Callable[[], None]) -> None:
    """Answer requests until SIGTERM (then what runs is finished, up to `limits.drain_s`) or Ctrl-C.

    Args:
        bound: the socket to listen at.
        started: called when requests are taken.
    """
    limits = service.config.limits
    config = uvicorn.Config(
        create_app(service), log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False,
        proxy_headers=False, limit_concurrency=limits.max_connections, timeout_keep_alive=30,
        timeout_graceful_shutdown=math.ceil(limits.drain_s),
    )  # fmt: skip
    server = _Server(config, started)
    service.stopping = lambda: server.should_exit
    handlers = {
        signal.SIGTERM: lambda *_: None,  # uvicorn raises it again after a drain: that ended well
        signal.SIGHUP: lambda *_: threading.Thread(target=adapters.reload, daemon=True).start(),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        server.run(sockets=[bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        service.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell()
