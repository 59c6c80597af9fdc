"""README.md of an export: Hugging Face's metadata, what was trained and how it went, how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lamella.units import format_count, format_seconds

_LIBRARY = {"mlx": "mlx", "gguf": "gguf"}


def model_card(identity: Mapping[str, Any], receipt: Mapping[str, Any] | None, notes: Sequence[str]) -> str:
    """Markdown with YAML front matter (https://huggingface.co/docs/hub/model-cards).

    Args:
        identity: what `lamella_export.json` holds.
        receipt: of the run; None for adapters of other tools.
        notes: how to start an engine, and what people should know.
    """
    base, adapter = identity["base"], identity["kind"] == "adapter"
    library = _LIBRARY.get(identity["layout"], "peft" if adapter else "transformers")
    front = [f"library_name: {library}", "pipeline_tag: text-generation"]
    if "/" in base["name"] and not base["name"].startswith((".", "/")):
        front.append(f"base_model: {base['name']}")
        front.append(f"base_model_relation: {'adapter' if adapter else 'finetune'}")
    front += ["tags:", "- lamella", *(["- lora"] if adapter else []), f"- {identity['layout']}"]
    lines = ["---", *front, "---", "", f"# {_title(identity, receipt)}", ""]
    what = "LoRA adapter" if adapter else "Model with its LoRA adapter merged in"
    lines += [
        f"{what} for `{base['name']}`" + (f" (revision {base['revision']})" if base["revision"] else "") + ".",
        "",
    ]
    if receipt is not None:
        lines += ["## Training", "", *_training(receipt), ""]
    lines += ["## Loading", ""]
    lines += [f"- {note}" for note in notes] or ["- see the documentation of the engine"]
    lines += ["", "## What belongs together", ""]
    lines += [
        f"- base: `{base['model_type']}`, fingerprint of its weights `{base['fingerprint']}`",
        f"- chat template: sha256 `{identity['chat_template_sha256']}`",
        f"- ids that end an answer: {json.dumps(identity['stop_ids'])}",
    ]
    if identity.get("system"):
        lines.append(f"- system text of training: {json.dumps(identity['system'], ensure_ascii=False)}")
    return "\n".join([*lines, "", f"Made with Lamella {identity['lamella_version']}.", ""])


def _title(identity: Mapping[str, Any], receipt: Mapping[str, Any] | None) -> str:
    name = (receipt or {}).get("name")
    return str(name) if name else f"{identity['kind']} in layout {identity['layout']}"


def _training(receipt: Mapping[str, Any]) -> list[str]:
    """Rows of a table; what a receipt does not tell is left out."""
    figures, config = receipt.get("figures") or {}, receipt.get("config") or {}
    lora, best = config.get("lora") or {}, receipt.get("best") or {}
    trained = sum(row.get("parameters", 0) for row in receipt.get("trainable") or [])
    rows: list[tuple[str, Any]] = [
        ("rows", figures.get("rows")), ("steps", figures.get("steps")), ("label tokens", figures.get("label_tokens")),
        ("rank, alpha", f"{lora['rank']}, {lora['alpha']:g}" if {"rank", "alpha"} <= lora.keys() else None),
        ("trained parameters", format_count(trained) if trained else None),
        ("first loss", _loss(figures.get("first_loss"))), ("final loss", _loss(figures.get("final_loss"))),
        ("best validation", f"{best['value']:.4g} at step {best['step']}" if {"value", "step"} <= best.keys() else None),
        ("time", format_seconds(figures["train_s"]) if figures.get("train_s") else None),
    ]  # fmt: skip
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows if value is not None)]


def _loss(value: Any) -> str | None:
    return None if value is None else f"{value:.4g}"
