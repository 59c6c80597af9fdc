"""LoRA parameters and their files."""

from lamella.adapter.lora import Adapter, SiteSpec

__all__ = ["Adapter", "SiteSpec"]
