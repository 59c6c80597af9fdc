"""LoRA parameters and their files. `Adapter` and `SiteSpec` are imported when asked for: `adapter.targets` needs no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamella.adapter.lora import Adapter, SiteSpec

__all__ = ["Adapter", "SiteSpec"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lamella.adapter import lora

    return getattr(lora, name)
