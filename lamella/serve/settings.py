"""`serve.toml`: what is served, to whom, within which bounds. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from lamella.config import Section, Size, checked, read_toml
from lamella.errors import UserError
from lamella.units import parse_bytes

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class EngineConfig(Section):
    """How the model is computed."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Compute dtype; `auto` is bf16 where the device multiplies it natively, else fp32."""
    device: str = "cpu"
    """Torch device."""
    threads: int | None = Field(None, ge=1)
    """CPU threads; None: torch's own choice."""
    budget: Size | None = None
    """Memory for weights and activations, the key/value cache apart; None: no limit of ours."""
    kv_cache: Size = "1GiB"
    """Memory for the key/value cache."""
    max_rows: int = Field(64, ge=1)
    """Answers written at once."""
    max_batch_tokens: int = Field(4096, ge=16)
    """Tokens of one pass of the model: prompts that enter together, or labels scored together."""


class KeyLimits(Section):
    """What one key may ask for; 0 or absent: no limit."""

    requests_per_minute: int = Field(0, ge=0)
    """Requests in any minute."""
    tokens_per_minute: int = Field(0, ge=0)
    """Prompt and answer tokens a minute; a running request is never cut for it, the next one waits."""
    concurrent: int = Field(0, ge=0)
    """Requests at the same time."""


class LimitsConfig(Section):
    """Bounds of one request and of all of them."""

    max_request_bytes: Size = "1MiB"
    """Largest request body."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; None: what the context holds."""
    max_new_tokens: int = Field(1024, ge=1)
    """Longest answer, and the default where a chat request gives no `max_tokens`."""
    max_choices: int = Field(8, ge=1)
    """Largest `n`."""
    max_logprobs: int = Field(20, ge=0)
    """Most `top_logprobs`."""
    max_documents: int = Field(256, ge=1)
    """Documents of one /v1/classify request, prompts of one /v1/completions request, labels of one choice."""
    queue: int = Field(256, ge=1)
    """Requests that wait for the engine; more are refused with 429."""
    timeout_s: float = Field(300.0, gt=0)
    """A request that takes longer ends with 504."""
    body_timeout_s: float = Field(30.0, gt=0)
    """A body must have arrived within this time."""
    drain_s: float = Field(30.0, ge=0)
    """On SIGTERM, running requests get so long to end."""
    max_connections: int = Field(1024, ge=1)
    """Open connections; more get 503."""
    per_key: KeyLimits = KeyLimits()
    """Of keys that have no limits of their own, and of callers without a key."""


class AdapterConfig(Section):
    name: str = Field(pattern=NAME, max_length=128)
    """What callers write in `model`."""
    path: Path
    """Run or adapter folder."""
    task: Path | None = None
    """task.toml, for /v1/classify."""
    tenant: str | None = None
    """Tenant of the task; None: its only one, or the one called as the adapter."""


class ServeConfig(Section):
    store: Path
    """Layer store made by `lamella quantize`."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen at; 0: any free one."""
    keys: Path | None = None
    """File of `lamella serve keys`; None: no keys, on a loopback address alone."""
    base: str = Field("base", pattern=NAME, max_length=128)
    """Model name of the store without an adapter."""
    engine: EngineConfig = EngineConfig()
    """How the model is computed."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds."""
    adapters: tuple[AdapterConfig, ...] = ()
    """Adapters loaded at the start."""

    @model_validator(mode="after")
    def _check(self) -> ServeConfig:
        names = [self.base, *(a.name for a in self.adapters)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two models are called {twice[0]!r}; give each adapter, and `base`, a name of its own")
        return self

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK


def load_serve_config(path: Path, overrides: Mapping[str, Any] | None = None) -> ServeConfig:
    """Read `serve.toml`; its paths are relative to it.

    Args:
        overrides: top-level values that go before those of the file, such as `{"port": 9000}`.

    Raises:
        UserError: no such file, not TOML, unknown keys, bad values; a public address without keys.
    """
    tree = read_toml(path, "serve.toml")
    folder = path.parent
    _anchor(tree, ("store", "keys"), folder)
    entries = tree.get("adapters")
    for entry in entries if isinstance(entries, list) else ():
        _anchor(entry, ("path", "task"), folder)
    tree |= overrides or {}
    config = checked(ServeConfig, tree, path)
    if config.keys is None and not config.is_local:
        raise UserError(
            f"`host` = {config.host!r} is open to others, and there are no keys",
            fix='set `keys = "keys.json"` and make one with `lamella serve keys add`, or listen at 127.0.0.1', path=path,
        )  # fmt: skip
    return config


def _anchor(node: Any, names: tuple[str, ...], folder: Path) -> None:
    for name in names if isinstance(node, dict) else ():
        if isinstance(node.get(name), str):
            node[name] = str(folder / node[name])


def request_bytes(config: ServeConfig) -> int:
    """Largest body in bytes."""
    return parse_bytes(config.limits.max_request_bytes)
