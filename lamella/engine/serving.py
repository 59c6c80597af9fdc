"""Batches of several adapters, and rows that grow, on one engine.

An adapter's pairs are turned into the compute dtype once, when it is loaded; hanging them into a layer is then a matter of
references. Nobody but requests and the list of adapters refers to a `Resident`, so its memory goes with the last of them.

Shape suffixes: T tokens, S sequences, B rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamella.adapter.lora import is_finite
from lamella.adapter.places import Names, places_of
from lamella.adapter.read import AdapterFile, check_allowed
from lamella.engine.engine import Engine
from lamella.errors import UserError
from lamella.kernels.lora_rows import MOST_ROWS
from lamella.models.attention import Cache
from lamella.models.layout import PackedBatch, pack_rows
from lamella.models.linear import LoraSite
from lamella.models.paged import CacheRow, Form, FormProbe, NextTokens, PagedCache, Prompts
from lamella.models.several import BASE, RowRuns, filled_up
from lamella.models.skeleton import Skeleton

APART_TOKENS = 32
"""Of one adapter's prompts: with experts on a CPU in bf16 more of them are faster as a batch of their own, for the fused expert
kernels take one adapter (twice as fast at 4 x 128 tokens)."""
SMOKE_TOKENS = 32
"""Of the prompt that shows an adapter's effect."""


class Hanger(NamedTuple):
    """A pair and where it is hung: attributes of the module, and the expert parameter's name (None: a linear layer)."""

    attributes: dict[str, Any]
    parameter: str | None
    pair: LoraSite

    def hang(self) -> None:
        """As the only adapter."""
        if self.parameter is None:
            self.attributes["lora"] = self.pair
        else:
            self.attributes.setdefault("lamella_lora", {})[self.parameter] = self.pair

    def hang_among(self, pairs: list[LoraSite | None]) -> None:
        """Among those of several adapters."""
        if self.parameter is None:
            self.attributes["several"] = pairs
        else:
            self.attributes.setdefault("lamella_several", {})[self.parameter] = pairs

    def take_off(self) -> None:
        for name in ("lora", "several", "lamella_lora", "lamella_several"):
            self.attributes.pop(name, None)


class Resident:
    """An adapter's pairs in the compute dtype, by layer. Immutable.

    Attributes:
        name: what it is called.
        file: layout, sites and facts it was read with (no values).
        bytes: of its pairs.
    """

    def __init__(self, name: str, file: AdapterFile, skeleton: Skeleton, device: torch.device) -> None:
        self.name, self.layout, self.facts = name, file.layout.name, dict(file.facts)
        self.sites = len(file.sites)
        self.rank = max(site.rank for site in file.sites.values())
        self.bytes = 0
        self.layers: dict[int, list[Hanger]] = {}
        for key, site in file.sites.items():
            a, b = file.pair(key)
            if not (is_finite(a) and is_finite(b)):
                raise UserError(f"{key} has values that are not finite", path=file.path, fix="train the adapter again")
            a, b = (x.to(device, skeleton.dtype).contiguous() for x in (a, b))
            if site.experts is None and device.type == "cpu":
                b = b.T.contiguous().T  # outputs side by side: see `kernels/lora_rows.py`
            self.bytes += a.nbytes + b.nbytes
            owner = skeleton.layers[site.layer].get_submodule(site.path)
            pair = LoraSite(a, b, site.scale, site=site.index)
            self.layers.setdefault(site.layer, []).append(Hanger(owner.__dict__, site.parameter, pair))


def read_resident(
    engine: Engine, name: str, folder: Path, names: Names | None, allowed: Sequence[str] | None
) -> Resident:
    """Read an adapter folder for an engine. Touches nothing that runs, so any thread may.

    Raises:
        UserError: what `AdapterFile` refuses (among them keys of which not all are in the model), another base, values
            that are not finite, modules outside `allowed`.
    """
    file = AdapterFile(folder, engine.skeleton, names=names)
    engine.check_base(file.facts)
    if allowed is not None:
        check_allowed(file.sites.values(), allowed)
    return Resident(name, file, engine.skeleton, engine.walk.weights.device)


@dataclass(frozen=True)
class Share:
    """A batch and the adapter of each of its sequences (None: the base); sequences of one adapter stand side by side."""

    batch: PackedBatch
    adapters: tuple[Resident | None, ...]
    cache: Cache | None = None


class _Guest:
    """Hangs a share's adapters into each layer in turn."""

    def __init__(self, share: Share, batch: PackedBatch) -> None:
        """`batch`: as it will run, filler included."""
        self.cache = share.cache
        self._adapters: list[Resident] = []
        numbers = []
        for adapter in share.adapters:
            if adapter is not None and not any(adapter is a for a in self._adapters):
                self._adapters.append(adapter)
            numbers.append(BASE if adapter is None else next(n for n, a in enumerate(self._adapters) if a is adapter))
        lengths = torch.tensor(batch.lengths)
        numbers += numbers[-1:] * (len(lengths) - len(numbers))  # filler goes with the last: no run more
        self._few = batch.tokens <= MOST_ROWS
        self.runs = RowRuns(torch.repeat_interleave(torch.tensor(numbers), lengths))

    @contextmanager
    def hung(self, layer: int) -> Iterator[None]:
        if not self._adapters:
            yield
            return
        alone, used = self.runs.alone, []
        try:
            if alone is not None:
                for hanger in self._adapters[alone].layers.get(layer, ()):
                    used.append(hanger)
                    if self._few and hanger.parameter is None:  # by the kernel for a few rows
                        hanger.hang_among([None] * alone + [hanger.pair])
                    else:
                        hanger.hang()
            else:
                by_weight: dict[tuple[int, str | None], list[LoraSite | None]] = {}
                for number, adapter in enumerate(self._adapters):
                    for hanger in adapter.layers.get(layer, ()):
                        key = id(hanger.attributes), hanger.parameter
                        if key not in by_weight:
                            by_weight[key] = [None] * len(self._adapters)
                            used.append(hanger)
                            hanger.hang_among(by_weight[key])
                        by_weight[key][number] = hanger.pair
            with self.runs.use():
                yield
        finally:
            for hanger in used:
                hanger.take_off()


class Serving:
    """Walks shares of work of different adapters through an engine's layers together.

    Args:
        engine: open, without an attached adapter, and used by nobody else.

    Attributes:
        few_shapes: matmuls are filled up so that few different numbers of rows are met.
        apart_tokens: prompts of an adapter with so many tokens are faster as a batch of their own; None: never.
        names: of the model, for `read_resident`.

    Raises:
        UserError: an adapter is attached.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.adapter is not None:
            raise UserError(
                "the engine has an adapter attached", fix="open it without one; each request brings its own"
            )
        self.engine = engine
        walk = engine.walk
        self.few_shapes = walk.compiles_shapes and not any(mixing.mixers for mixing in engine.skeleton.mixing)
        experts = any(hasattr(m, "has_gate") for layer in engine.skeleton.layers for m in layer.modules())
        self.apart_tokens = APART_TOKENS if experts and walk.compiles_shapes else None
        self.names = Names(engine.skeleton, places_of(engine.skeleton))

    def form(self) -> Form:
        """What a token leaves in the cache: seen by a run of a few tokens, which also tries every layer.

        Raises:
            UserError: the model does not run, or leaves nothing that can be kept.
        """
        probe = FormProbe()
        ids = self.smoke_prompt()
        hidden_TH = self.walk([Share(pack_rows([(ids, [])]), (None,), probe)])[0]
        if not bool(torch.isfinite(self.logits(hidden_TH[-1:])).all()):
            raise UserError("the store gives logits that are not finite", fix="check it with `lamella store verify`, or "
                            "compute in fp32")  # fmt: skip
        if not probe.form.token_bytes:
            raise UserError("this model keeps nothing of earlier tokens, so its answers cannot be continued token by token",
                            fix="use `lamella eval` for this family")  # fmt: skip
        return probe.form

    def smoke_prompt(self) -> list[int]:
        vocabulary = int(self.engine.skeleton.config.vocab_size)
        return [(n * 7919 + 11) % vocabulary for n in range(SMOKE_TOKENS)]

    # ---- work ---------------------------------------------------------------------------------------------------

    def prompts(
        self, cache: PagedCache, rows: Sequence[CacheRow], prompts: Sequence[Sequence[int]],
        adapters: Sequence[Resident | None],
    ) -> Share:  # fmt: skip
        """New rows' prompts; the output at each one's end gives its first token."""
        batch = pack_rows([(list(p), []) for p in prompts])
        return Share(batch, tuple(adapters), Prompts(cache, rows, [len(p) for p in prompts]))

    def next_tokens(
        self, cache: PagedCache, rows: Sequence[CacheRow], tokens: Sequence[int], positions: Sequence[int],
        adapters: Sequence[Resident | None],
    ) -> Share:  # fmt: skip
        """One token more for each running row."""
        new = pack_rows([([t], []) for t in tokens])
        batch = replace(new, position_ids=torch.tensor(positions))
        filled = filled_up(len(rows)) if self.few_shapes else len(rows)
        return Share(batch, tuple(adapters), NextTokens(cache, rows, positions, filled))

    def _as_run(self, share: Share) -> PackedBatch:
        """The share's batch with its filler. (Batches without a cache are filled up by the walk.)"""
        if not self.few_shapes:
            return share.batch
        if share.cache is not None and share.cache.decoding:
            return _filled(share.batch, filled_up(share.batch.tokens))
        return share.batch.padded(filled_up(share.batch.tokens))

    def walk(self, shares: Sequence[Share]) -> list[Tensor]:
        """Last boundary of every share, [T, H], all walked through each layer in turn."""
        walk = self.engine.walk
        batches = [self._as_run(share) for share in shares]
        padded = [b if share.cache is not None else b.padded(walk.padded_tokens(b.tokens) if b.tokens else 1)
                  for b, share in zip(batches, shares, strict=True)]  # fmt: skip
        guests = [_Guest(share, b) for share, b in zip(shares, padded, strict=True)]
        found = walk.forward(batches, guests=guests)
        return [h[: share.batch.tokens] for h, share in zip(found, shares, strict=True)]

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """fp32 [B, V] on the CPU of as many rows of the last boundary."""
        chunks = self.engine.walk.head_chunks(hidden_BH.shape[0])
        return torch.cat([self._head(hidden_BH[a:b]).cpu() for a, b in chunks])

    def scores(self, hidden_TH: Tensor, batch: PackedBatch) -> Tensor:
        """fp32 [N] on the CPU: log-probability of each scored pair of a share without a cache, as `Engine.score` gives."""
        position_U, of_N = torch.unique(batch.score_positions, return_inverse=True)
        out_N = torch.empty(batch.score_tokens.numel(), dtype=torch.float32)
        for a, b in self.engine.walk.head_chunks(position_U.numel()):
            logp_UV = torch.log_softmax(self._head(hidden_TH[position_U[a:b].to(hidden_TH.device)]), dim=-1)
            mine = ((of_N >= a) & (of_N < b)).nonzero().flatten()
            at, token = ((x[mine]).to(logp_UV.device) for x in (of_N - a, batch.score_tokens))
            out_N[mine] = logp_UV[at, token].cpu()
        return out_N

    def _head(self, hidden_BH: Tensor) -> Tensor:
        """fp32 [B, V], filled up for the matmul."""
        rows = hidden_BH.shape[0]
        extra = filled_up(rows) - rows if self.few_shapes else 0
        if extra:
            hidden_BH = torch.cat([hidden_BH, hidden_BH.new_zeros(extra, hidden_BH.shape[1])])
        with torch.no_grad():
            return self.engine.skeleton.head(hidden_BH)[:rows].float()

    def likeliest(self, hidden_TH: Tensor, batch: PackedBatch, top: int) -> list[tuple[tuple[int, float], ...]]:
        """Of each scored pair's place: the `top` likeliest tokens with their log-probabilities, likeliest first."""
        position_U, of_N = torch.unique(batch.score_positions, return_inverse=True)
        found: list[tuple[tuple[int, float], ...]] = []
        for a, b in self.engine.walk.head_chunks(position_U.numel()):
            logp_UV = torch.log_softmax(self._head(hidden_TH[position_U[a:b].to(hidden_TH.device)]), dim=-1)
            best = logp_UV.topk(min(top, logp_UV.shape[1]))
            found += [
                tuple(zip(ids, values, strict=True))
                for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        return [found[n] for n in of_N.tolist()]

    def effect(self, adapter: Resident) -> float:
        """Largest |logits(adapter) - logits(base)| on one prompt, both in one batch.

        Raises:
            UserError: there is none, or it is not finite.
        """
        ids = self.smoke_prompt()
        (hidden_TH,) = self.walk([Share(pack_rows([(ids, []), (ids, [])]), (None, adapter))])
        base_TV, own_TV = self.logits(hidden_TH[: len(ids)]), self.logits(hidden_TH[len(ids) :])
        effect = float((own_TV - base_TV).abs().max())
        if not effect > 0 or effect == float("inf"):
            what = "has no effect" if effect == 0 else f"gives logits that are not finite (difference {effect})"
            raise UserError(
                f"adapter {adapter.name!r} {what}: on a prompt of {len(ids)} tokens the logits of its {adapter.sites} pairs "
                "and the base's are the same bits"
                if effect == 0
                else f"adapter {adapter.name!r} {what}",
                fix="its B matrices may be zero: train again, or look at the receipt of its run",
            )
        return effect


def _filled(batch: PackedBatch, tokens: int) -> PackedBatch:
    """Single tokens with as many more of them as filler, each a sequence of its own."""
    extra = tokens - batch.tokens
    if not extra:
        return batch
    end = torch.arange(batch.tokens, tokens)
    zeros = torch.zeros(extra, dtype=torch.int64)
    return replace(
        batch, input_ids=torch.cat([batch.input_ids, zeros]), position_ids=torch.cat([batch.position_ids, zeros]),
        visible_until=torch.cat([batch.visible_until, end + 1]), starts=torch.cat([batch.starts, end + 1]),
        row_ids=(*batch.row_ids, *[-1] * extra),
    )  # fmt: skip
