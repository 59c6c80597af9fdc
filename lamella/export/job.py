"""A merge before its first value: the model, where each stored tensor stands in it, and what the adapter adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamella.adapter.read import AdapterFile, describe
from lamella.checkpoint.fingerprint import fingerprint
from lamella.checkpoint.marks import plain_config
from lamella.checkpoint.source import read_json
from lamella.console import notice
from lamella.errors import UserError
from lamella.export.adapter_base import open_base
from lamella.export.adapters import check_base
from lamella.export.base import Base, CheckpointBase, StoreBase
from lamella.export.delta import DeltaOf, PairFile, plan_deltas
from lamella.export.loss import Loss, TensorLoss
from lamella.export.writers import Target
from lamella.models.binding import plan_binding
from lamella.models.pieces import ParamPlan
from lamella.models.skeleton import Skeleton
from lamella.store.manifest import TensorRecord
from lamella.store.reader import Store


class Adapted:
    """`Source` of one stored tensor: base, and what the adapter adds."""

    def __init__(self, name: str, base: Base, delta: DeltaOf | None, pairs: PairFile | None) -> None:
        self.name, self.base, self.delta, self.pairs = name, base, delta, pairs
        self.loss = Loss()
        self._last: tuple[int, Tensor, Tensor] | None = None

    def values(self, first: int, out: Tensor) -> None:
        self.base.values(self.name, first, out)
        if self.delta is not None and self.pairs is not None:
            added = torch.empty(out.numel())
            self.delta.values(self.pairs, first, added)
            self._last = first, out.clone(), added
            out += added

    def stored(self, first: int, got: Tensor) -> None:
        if self.delta is None:
            return
        if self._last is None or self._last[0] != first or self._last[1].numel() != got.numel():
            self.values(first, torch.empty(got.numel()))
        assert self._last is not None
        _, base, delta = self._last
        self._last = None
        self.loss.add(got, base, delta)

    def nf4_parts(self, block_size: int) -> Mapping[str, Tensor] | None:
        return None if self.delta is not None else self.base.nf4_parts(self.name, block_size)


class MergeJob:
    """Everything that is known before the first value; without an adapter there are no `pairs` and no deltas."""

    def __init__(self, store: Store, adapter: Path | None, onto: str | Path, layout: str | None,
                 another_base: bool = False) -> None:  # fmt: skip
        manifest = store.manifest
        self.store, self.adapter, self.of = store, adapter, open_base(store.path)
        self.skeleton = self.of.skeleton
        self.records: dict[str, TensorRecord] = {r.name: r for _, group in manifest.groups() for r in group.tensors}
        self.plans = plan_binding(self.skeleton, self.of.shapes, str(store.path))
        self.pairs: PairFile | None = None
        self.deltas: dict[str, DeltaOf] = {}
        if adapter is not None:
            file = AdapterFile(adapter, self.skeleton, layout)
            check_base(file, self.of, another_base)
            for line in (*(() if file.layout.name == "peft" else (describe(file),)), *file.notes):
                notice(line)
            self.pairs = PairFile(file)
            self.deltas = plan_deltas(self.pairs, self.plans, self.of.shapes, self.skeleton)
        self.of_store = StoreBase(store)
        self.base: Base = self.of_store
        if onto != "store":
            self.base = CheckpointBase(onto, self.of.shapes)
            found = fingerprint(self.base.checkpoint, manifest.tie_word_embeddings)
            if found != manifest.source_fingerprint and not another_base:
                raise UserError(
                    f"is another model: fingerprint {found}, the store was made from {manifest.source_fingerprint}",
                    fix="give the checkpoint the store was made from, or say --another-base when this one is meant",
                    path=self.base.checkpoint.path,
                )
        plain = plain_config(read_json(store.path / "config.json"))
        self.config = with_older_names({**plain, "tie_word_embeddings": manifest.tie_word_embeddings})
        self.targets = _targets(self)

    @property
    def head(self) -> str:
        wanted = self.skeleton.model.get_output_embeddings()
        return next((name for name, module in self.skeleton.model.named_modules() if module is wanted), "lm_head")

    def loss_of(self, name: str, loss: Loss) -> TensorLoss:
        """Of an adapted tensor."""
        site = self.deltas[name].site
        return TensorLoss(name, site.layer, site.weight_class, loss)

    def source(self, name: str) -> Adapted:
        return Adapted(name, self.base, self.deltas.get(name), self.pairs)


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json that also says what transformers 5 renamed, for engines that read only the names before it and would take a
    default without a word (mlx-lm: `rope_theta`)."""
    found = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        found.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            found.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    return found


def said_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _targets(job: MergeJob) -> list[Target]:
    place = {piece.source: (plan, bool(piece.at)) for plan in job.plans.values() for piece in plan.pieces}
    narrow = said_dtype(job.config) in ("bfloat16", "float16")
    found = []
    for name, record in job.records.items():
        plan, part = place.get(name, (None, False))
        module, linear = (None, False) if plan is None else _module_of(plan, part, job.skeleton)
        wide = record.format == "raw" and record.dtype == "float32" and narrow
        found.append(Target(name, tuple(record.shape), record.dtype, record.tensor_class, module, linear, wide))
    return found


def _module_of(plan: ParamPlan, part: bool, skeleton: Skeleton) -> tuple[str | None, bool]:
    """The linear layer or experts' module behind a parameter, and whether a stored tensor of it is a matrix [out, in]."""
    path, _, leaf = plan.name.rpartition(".")
    if plan.layer is None:
        module = skeleton.model.get_submodule(path)
    else:
        module = skeleton.layers[plan.layer].get_submodule(
            path.removeprefix(f"{skeleton.prefix}.{plan.layer}").lstrip(".")
        )
    if isinstance(module, nn.Linear):
        return path, leaf == "weight" and not part
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and len(plan.shape) == 3:
        return path, part and not bool(module.is_transposed)
    return None, False
