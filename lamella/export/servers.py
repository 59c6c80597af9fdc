"""How to start an engine so that it takes an exported adapter, from the engines' own sources."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from lamella.adapter.layouts import Layout
from lamella.adapter.lora import SiteSpec
from lamella.export.adapter_base import Base

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank takes."""


def base_name(base: Base) -> str:
    """What to call the base on a command line: the hub id, or the name of its folder."""
    return base.name if not base.name.startswith(("/", ".")) else f"./{Path(base.name).name}"


def server_notes(layout: Layout, sites: Iterable[SiteSpec], rank: int, base: Base, out: Path) -> list[str]:
    """Commands and warnings for people; empty where there is nothing to say."""
    experts = any(site.experts is not None for site in sites)
    model, here = base_name(base), f"./{out.name}"
    if layout.name in ("vllm", "vllm-3d"):
        return _vllm(layout, experts, rank, model, out.name)
    if layout.name == "sglang":
        return [f"start: python -m sglang.launch_server --model-path {model} --enable-lora --max-lora-rank {rank} "
                f"--lora-paths {out.name}={here}"]  # fmt: skip
    if layout.name == "mlx":
        return [f"start: mlx_lm.generate --model {model} --adapter-path {here} --prompt ..."]
    if layout.name == "peft-0.18":
        return ["load: PeftModel.from_pretrained(model, FOLDER) of PEFT 0.17 or 0.18 alone; 0.19 and later read `peft`"]
    if layout.name == "unsloth":
        return [
            "load: FastLanguageModel.from_pretrained(FOLDER); not with PEFT alone, which orders B's columns otherwise"
        ]
    return ["load: PeftModel.from_pretrained(model, FOLDER) of PEFT 0.19 or later"]


def _vllm(layout: Layout, experts: bool, rank: int, model: str, name: str) -> list[str]:
    most = next((r for r in VLLM_RANKS if r >= rank), None)
    module: dict[str, object] = {"name": name, "path": f"./{name}", "base_model_name": model}
    flags = f"vllm serve {model} --enable-lora --max-lora-rank {most or rank}"
    if experts:
        module["is_3d_lora_weight"] = layout.name == "vllm-3d"
        flags += " --enable-mixed-moe-lora-format"
    notes = [f"start: {flags} --lora-modules '{json.dumps(module)}'"]
    if most is None:
        notes.append(f"vLLM's ranks end at {VLLM_RANKS[-1]}, the adapter has {rank}: merge it instead")
    if experts:
        notes.append("vLLM does not look which layout the experts' pairs have: --enable-mixed-moe-lora-format (0.24 and later) "
                     "and is_3d_lora_weight say it, and without them the base's class decides (2-D for most families; 3-D "
                     "for GPT-OSS, Qwen3.5-MoE and others stored fused)")  # fmt: skip
    return notes
