"""What the config asks for, set against what is in effect: one row per setting, and any difference fails the run."""

from __future__ import annotations

from typing import Any

import torch

from lamella.adapter.lora import scale_of
from lamella.config import RunConfig
from lamella.errors import RunFailed
from lamella.train.optimizer import Optimizer, learning_rate
from lamella.train.parts import Parts
from lamella.units import parse_bytes

NOT_REPORTED = "not reported"


def compare(asked: dict[str, Any], in_effect: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per asked setting. `auto` and None ask for nothing, so any fact is as asked; a missing fact never is."""
    rows = []
    for name, wish in asked.items():
        fact = in_effect.get(name, NOT_REPORTED)
        fits = name in in_effect and (wish in ("auto", None) or wish == fact)
        rows.append({"setting": name, "asked": wish, "in_effect": fact, "ok": fits})
    return rows


def refuse_differences(rows: list[dict[str, Any]]) -> None:
    """Raises `RunFailed` naming every row that is not ok."""
    bad = [row for row in rows if not row["ok"]]
    if bad:
        raise RunFailed(
            "not what was asked: "
            + "; ".join(f"{row['setting']} asked {row['asked']!r}, in effect {row['in_effect']!r}" for row in bad),
            fix="ask for what is in effect, or for auto",
        )


def asked_of_engine(config: RunConfig) -> dict[str, Any]:
    """What the config asks of the engine, in the words of `engine.facts()`."""
    config = config.for_rank(0)  # the receipt is rank 0's
    budget = config.memory.budget
    return {
        "dtype": config.compute.dtype,
        "device": str(torch.device(config.compute.device)),
        "recompute": config.memory.recompute,
        "budget_bytes": None if budget is None else parse_bytes(budget),
        "threads": config.compute.threads,
        "router_aux_coef": config.train.router_aux_coef,
        "state": config.memory.state,
    }


def engine_in_effect(parts: Parts) -> dict[str, Any]:
    """`engine.facts()`, with what the steps so far really did in place of the settings the engine was given."""
    facts = {**parts.engine.facts(), "threads": torch.get_num_threads(), "router_aux_coef": parts.aux_coef,
             "state": "ram" if parts.pages is None else "disk"}  # fmt: skip
    if "steps_kept" not in facts or "steps_recomputed" not in facts:
        facts.pop("recompute", None)  # a setting nobody can check counts as missing
        return facts
    kept, again = facts["steps_kept"], facts["steps_recomputed"]
    if kept and again:
        facts["recompute"] = f"{again} steps recomputed, {kept} kept"
    elif kept or again:
        facts["recompute"] = "always" if again else "never"
    return facts


def asked_of_optimizer(config: RunConfig, optimizer: Optimizer, planned_steps: int) -> dict[str, Any]:
    train, last = config.train, optimizer.last_step_index
    return {
        "optimizer": "AdamW",
        "betas": list(train.betas),
        "eps": train.eps,
        "weight_decay": train.weight_decay,
        "adapter_dtype": "float32",
        "learning_rate": train.learning_rate,
        "schedule": train.schedule,
        "warmup_steps": train.warmup_steps,
        "clip_norm": train.clip_norm,
        "steps": planned_steps if train.steps is None else train.steps,
        "last_learning_rate": None if last is None else learning_rate(train, last, planned_steps),
    }


def optimizer_in_effect(optimizer: Optimizer) -> dict[str, Any]:
    group, used = optimizer.adamw.param_groups[0], optimizer.config
    dtypes = {str(p.dtype).removeprefix("torch.") for p in optimizer.parameters.values()}
    return {
        "optimizer": type(optimizer.adamw).__name__,
        "betas": list(group["betas"]),
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "adapter_dtype": "/".join(sorted(dtypes)),
        "learning_rate": used.learning_rate,
        "schedule": used.schedule,
        "warmup_steps": used.warmup_steps,
        "clip_norm": used.clip_norm,
        "steps": optimizer.total_steps,
        "last_learning_rate": group["lr"],
    }


def rounded(value: float) -> float:
    """To 9 digits: alpha becomes a scale and alpha again, which may cost the last bit."""
    return float(f"{value:.9g}")


def asked_of_adapter(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """LoRA settings by their config names; of rank, alpha and expert rank those that the adapted weights can show."""
    lora = config.lora
    dims = {p.dim() for p in parts.adapter.parameters().values()}
    asked: dict[str, Any] = {
        "lora.targets": "all-linear" if lora.targets == "all-linear" else sorted(lora.targets),
        "lora.dropout": lora.dropout,
        "lora.rslora": lora.rslora,
        "lora.scale": rounded(scale_of(lora.alpha, lora.rank, lora.rslora)),
    }
    if 2 in dims:
        asked |= {"lora.rank": lora.rank, "lora.alpha": rounded(lora.alpha)}
    if 3 in dims:
        asked["lora.expert_rank"] = lora.expert_rank
    return asked
