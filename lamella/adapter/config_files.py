"""The JSON files beside an adapter's weights: PEFT's and mlx-lm's configuration, and our facts."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamella.errors import UserError

CONFIG, FACTS = "adapter_config.json", "lamella_adapter.json"
_PLAIN_INIT = ("gaussian", "eva", "orthogonal")
_REFUSED = ("use_dora", "modules_to_save", "lora_bias", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens",
            "use_qalora", "trainable_token_indices", "arrow_config", "use_bdlora")  # fmt: skip


def read_object(file: Path, fix: str) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read: {error}", path=file, fix=fix) from error
    if not isinstance(tree, dict):
        raise UserError(f"must hold a JSON object, not {json.dumps(tree)[:60]}", path=file, fix=fix)
    return tree


def read_facts(folder: Path) -> dict[str, Any]:
    """What `lamella_adapter.json` says; nothing for adapters of other tools, which have none.

    Raises:
        UserError: the file cannot be read or holds no JSON object, or a dropout outside 0 to 1.
    """
    file, fix = folder / FACTS, "save the adapter again"
    if not file.exists():
        return {}
    facts = read_object(file, fix)
    dropout = facts.get("dropout", 0.0)
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise UserError(f"dropout is {dropout!r}, not a number from 0 to 1", path=file, fix=fix)
    sites = facts.get("sites", {})
    if not isinstance(sites, dict) or not all(isinstance(v, list) and len(v) == 3 for v in sites.values()):
        raise UserError("sites is not an object of [rank, alpha, factor]", path=file, fix=fix)
    return facts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Settings:
    """What a configuration says of ranks and scales.

    Attributes:
        rank, alpha: of pairs that no pattern names. rank None: tensors say it (mlx-lm gives a scale, here alpha / 1).
    """

    rank: int | None
    alpha: float
    rslora: bool
    dropout: float
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    peft_version: tuple[int, int] | None = None
    unsloth: bool = False

    def rank_of(self, key: str, there: int) -> int:
        """Rank that the scale of a pair is made with; `there`: of its tensors."""
        found = _pattern_value(self.rank_pattern, key, there if self.rank is None else self.rank)
        return int(found)

    def alpha_of(self, key: str) -> float:
        return float(_pattern_value(self.alpha_pattern, key, self.alpha))


def _pattern_value(patterns: dict[str, Any], key: str, default: float) -> float:
    """PEFT's rule: a pattern matches the end of a name, or is a regular expression for it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return float(value)
    return default


def read_peft_config(folder: Path) -> Settings:
    """Raises `UserError` for what is no LoRA, has no positive rank and alpha, or trains more than pairs."""
    file = folder / CONFIG
    if folder.suffix == ".gguf" or (not file.exists() and any(folder.glob("*.gguf"))):
        raise UserError(
            "GGUF adapters are not read", fix="give the run's folder, or an adapter of another layout", path=folder
        )
    if not file.exists():
        what = (
            f"holds no {CONFIG}"
            if folder.is_dir()
            else "is a file, not a folder"
            if folder.exists()
            else "no such folder"
        )
        raise UserError(what, fix="give a run's or an adapter's folder", path=folder)
    config = read_object(file, "give a PEFT adapter folder")
    if config.get("peft_type") != "LORA":
        raise UserError(f"peft_type is {config.get('peft_type')!r}", path=file, fix="only LoRA adapters are supported")
    for key in ("r", "lora_alpha"):
        if not _is_number(config.get(key)) or config[key] <= 0:
            raise UserError(f"{key} is {config.get(key)!r}", path=file, fix=f"{key} must be a positive number")
    if config["r"] != int(config["r"]):
        raise UserError(f"r is {config['r']!r}", path=file, fix="r must be a whole number")
    alphas = _patterns(config, "alpha_pattern", file)
    ranks = _patterns(config, "rank_pattern", file)
    dropout = config.get("lora_dropout") or 0.0
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise UserError(f"lora_dropout is {dropout!r}", path=file, fix="lora_dropout must be a number from 0 to 1")
    for key in _REFUSED:
        if config.get(key):
            raise UserError(
                f"{key} is set ({str(config[key])[:60]}), which is more than LoRA pairs", path=file, fix=MERGE
            )
    if config.get("bias", "none") != "none":
        raise UserError(f"bias is {config['bias']!r}: biases were trained too", path=file, fix=MERGE)
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init not in _PLAIN_INIT:
        raise UserError(f"init_lora_weights is {init!r}, which changes the base's weights", path=file,
                        fix="convert it with PEFT (save_pretrained(..., path_initial_model_for_weight_conversion=...))")  # fmt: skip
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or ""))
    mapping = config.get("auto_mapping")
    return Settings(
        int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora")), float(dropout),
        {name: int(value) for name, value in ranks.items()}, alphas, (int(version[1]), int(version[2])) if version else None,
        isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed")),
    )  # fmt: skip


MERGE = ("merge it into the 16-bit base with the tool that trained it (PEFT: merge_and_unload), then `lamella quantize` "
         "the result")  # fmt: skip


def _patterns(config: dict[str, Any], name: str, file: Path) -> dict[str, float]:
    patterns = config.get(name)
    fix = f"{name} must be an object of names (or regular expressions) and positive numbers"
    if patterns is not None and not isinstance(patterns, dict):
        raise UserError(f"{name} is {patterns!r}", path=file, fix=fix)
    for pattern, value in (patterns or {}).items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{name} {pattern!r}: {error}", path=file, fix=fix) from error
        if not _is_number(value) or value <= 0:
            raise UserError(f"{name} {pattern!r} is {value!r}", path=file, fix=fix)
    return patterns or {}


def read_mlx_config(folder: Path) -> Settings:
    """mlx-lm's: one rank (the tensors' own) and one scale for all."""
    file = folder / CONFIG
    config = read_object(file, "give an mlx-lm adapter folder")
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise UserError(f"fine_tune_type is {kind!r}", path=file, fix="only LoRA adapters are supported")
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if not _is_number(scale) or scale <= 0:  # type: ignore[operator]
        raise UserError(f"lora_parameters.scale is {scale!r}", path=file, fix="it must be a positive number")
    rank = parameters.get("rank")  # type: ignore[union-attr]
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise UserError(f"lora_parameters.rank is {rank!r}", path=file, fix="it must be 1 or more")
    return Settings(rank, float(scale) * rank, False, 0.0)  # type: ignore[arg-type]
