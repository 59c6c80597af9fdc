"""config.json read with care: the family's default for a key that is not there, and an error for a value that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamella.checkpoint.facts import ACTIVE_EXPERTS_KEYS, NUM_EXPERTS_KEYS
from lamella.errors import UserError

_FIX = "correct config.json, or download it again"


class Keys:
    """Values of config.json.

    Args:
        config: its decoder's part (see `facts.text_config`).
        defaults: of the family, for keys that are absent; a `null` in the file counts as said.
        path: named in errors.

    Attributes:
        assumed: keys that took a default, and the default.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], path: Path | None = None) -> None:
        self.config, self.defaults, self.path = config, defaults, path
        self.assumed: dict[str, Any] = {}

    def error(self, what: str, fix: str = _FIX) -> UserError:
        return UserError(what, fix=fix, path=self.path)

    def get(self, name: str) -> Any:
        if name in self.config:
            return self.config[name]
        value = self.defaults.get(name)
        if value is not None:
            self.assumed[name] = value
        return value

    def size(self, name: str, least: int = 1) -> int:
        """A whole number.

        Raises:
            UserError: absent, no whole number, or below `least`.
        """
        value = self.get(name)
        if value is None:
            raise self.error(f"does not say `{name}`")
        if type(value) is not int or value < least:
            raise self.error(f"`{name}` is {value!r}, not a whole number of {least} or more")
        return value

    def maybe(self, name: str) -> int | None:
        """A whole number of 1 or more, or None where it is absent or null."""
        return None if self.get(name) is None else self.size(name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"`{name}` is {value!r}, neither true nor false")
        return bool(value)

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(n) is not int for n in value):
            raise self.error(f"`{name}` is {value!r}, not a list of whole numbers")
        return value

    def _first(self, names: tuple[str, ...]) -> int | None:
        name = next((n for n in names if n in self.config), None) or next(
            (n for n in names if n in self.defaults), None
        )
        return None if name is None else self.maybe(name)

    def experts(self) -> int | None:
        """Routed experts of a layer that has some."""
        return self._first(NUM_EXPERTS_KEYS)

    def active(self) -> int:
        """Experts that a token passes.

        Raises:
            UserError: more than there are.
        """
        active, experts = self._first(ACTIVE_EXPERTS_KEYS), self.experts()
        if experts is None or active is None:
            return 1
        if active > experts:
            names = [next(n for n in keys if n in {**self.defaults, **self.config})
                     for keys in (ACTIVE_EXPERTS_KEYS, NUM_EXPERTS_KEYS)]  # fmt: skip
            raise self.error(f"`{names[0]}` is {active}, more than `{names[1]}`, {experts}")
        return active

    def layers(self) -> int:
        return self.size("num_hidden_layers")

    def heads(self) -> tuple[int, int]:
        """Query heads and key/value heads.

        Raises:
            UserError: the one is no multiple of the other.
        """
        heads = self.size("num_attention_heads")
        kv_heads = self.maybe("num_key_value_heads") or heads
        if heads % kv_heads:
            raise self.error(f"`num_attention_heads` is {heads}, no multiple of `num_key_value_heads`, {kv_heads}")
        return heads, kv_heads

    def head_dim(self) -> int:
        """Of queries, keys and values.

        Raises:
            UserError: not said, and the hidden size is no multiple of the heads.
        """
        said = self.maybe("head_dim")
        if said is not None:
            return said
        hidden, heads = self.size("hidden_size"), self.heads()[0]
        if hidden % heads:
            raise self.error(f"`hidden_size` is {hidden}, no multiple of `num_attention_heads`, {heads}")
        return hidden // heads

    def by_layer(self, name: str) -> list[str] | None:
        """A list with one word for each layer, or None.

        Raises:
            UserError: of another length.
        """
        value, layers = self.get(name), self.layers()
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(word, str) for word in value):
            raise self.error(f"`{name}` is {value!r}, not a list of words")
        if len(value) != layers:
            raise self.error(f"`{name}` has {len(value)} entries, `num_hidden_layers` is {layers}")
        return value
