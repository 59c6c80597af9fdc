"""Which layer of a family attends how, where config.json has no `layer_types`."""

from __future__ import annotations

from collections.abc import Callable

from lamella.checkpoint.keys import Keys

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
KindRule = Callable[[Keys], list[str]]


def all_full(k: Keys) -> list[str]:
    return [FULL] * k.layers()


def window_everywhere(k: Keys) -> list[str]:
    return [FULL if k.maybe("sliding_window") is None else SLIDING] * k.layers()


def window_if_used(k: Keys) -> list[str]:
    return [SLIDING if k.flag("use_sliding_window") and k.maybe("sliding_window") else FULL] * k.layers()


def window_above(k: Keys) -> list[str]:
    """Qwen: layers from `max_window_layers` on, where windows are used at all."""
    used = k.flag("use_sliding_window") and k.maybe("sliding_window")
    return [SLIDING if used and i >= k.size("max_window_layers", 0) else FULL for i in range(k.layers())]


def dots1(k: Keys) -> list[str]:
    used = k.maybe("sliding_window") is not None
    return [SLIDING if used and i >= k.size("max_window_layers", 0) else FULL for i in range(k.layers())]


def qwen2_moe(k: Keys) -> list[str]:
    used = k.flag("use_sliding_window") and k.maybe("sliding_window")
    return [SLIDING if used and i % 2 == 0 and i < k.size("max_window_layers", 0) else FULL for i in range(k.layers())]


def every(period: int, key: str = "", last: str = FULL, others: str = SLIDING) -> KindRule:
    """Every `period`-th layer is `last` (the number is `key`'s where that is said)."""

    def rule(k: Keys) -> list[str]:
        n = k.maybe(key) if key and k.get(key) is not None else period
        return [last if n and (i + 1) % n == 0 else others for i in range(k.layers())]

    return rule


def full_first(k: Keys) -> list[str]:
    """One layer of four sees all, from the first on (CWM)."""
    return [FULL if i % 4 == 0 else SLIDING for i in range(k.layers())]


def exaone(k: Keys) -> list[str]:
    return all_full(k) if k.maybe("sliding_window") is None else every(4, "sliding_window_pattern")(k)


def without_rope(k: Keys) -> list[int]:
    """One number a layer, 0 where it has no rotary embedding."""
    said = k.numbers("no_rope_layers")
    if said and len(said) != k.layers():
        raise k.error(f"`no_rope_layers` has {len(said)} entries, `num_hidden_layers` is {k.layers()}")
    return said or [int((i + 1) % k.size("no_rope_layer_interval") != 0) for i in range(k.layers())]


def smollm3(k: Keys) -> list[str]:
    used = k.flag("use_sliding_window") and k.maybe("sliding_window")
    return [SLIDING if used and not rope else FULL for rope in without_rope(k)]


def llama4(k: Keys) -> list[str]:
    chunked = k.maybe("attention_chunk_size") is not None
    return [CHUNKED if rope and chunked else FULL for rope in without_rope(k)]


def minimax(k: Keys) -> list[str]:
    return [LINEAR if (i + 1) % 2 == 0 else FULL for i in range(k.layers())]
