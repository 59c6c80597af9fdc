"""The layer-major walk.

All micro-batches of an optimizer step pass through layer i before layer i + 1 is touched; then the walk
turns around on the layer it holds and goes back the same way. Each layer's packed bytes are thus needed
twice per step, however many micro-batches there are, and are dequantised once per pass. Going back, a layer
is recomputed from its boundary input, or its kept graph is used; both give the same bits.

Memory: the dequantised buffer of one layer, one layer's activations for one micro-batch (or, kept, all of
them), and one boundary activation [T, H] per layer and micro-batch.

Shape suffixes: T tokens, H hidden, N scored pairs, V vocabulary, S sequences, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lamella.adapter import Adapter, SiteSpec
from lamella.engine.boundary import Boundaries, GradientSums
from lamella.engine.device import CudaCopier
from lamella.engine.head import vocabulary_head, vocabulary_loss
from lamella.engine.mixing import MixingTest
from lamella.engine.pace import Pace
from lamella.engine.stages import Peers, RankWork
from lamella.engine.step import Routing, StepOutput, StepRun
from lamella.engine.weights import LayerWeights
from lamella.errors import UserError
from lamella.kernels import rows
from lamella.models.attention import AttentionLayout, AttentionRefused, Cache
from lamella.models.divided import Division
from lamella.models.layout import PackedBatch, pack_rows
from lamella.models.linear import DropoutClock, FrozenLinear, LoraSite
from lamella.models.mixers import Kept
from lamella.models.pieces import Cut
from lamella.models.skeleton import LayerCall, PlainHead, Skeleton

LOGITS_BYTES = 64 << 20
"""Largest block of fp32 logits alive at once; more positions pass the head in chunks (16 positions at least)."""

HEAD_ROWS = 256
"""Positions whose logits are alive at once where the gradient takes their place: more gains the matmuls nothing."""

PAD_TOKENS = 32
"""On a CPU in bf16, batches are filled up to a multiple of this: oneDNN compiles a kernel for every new number of rows (1 to
3 ms and 0.7 MB each, kept), which with rows of real data is every step. The filler goes through no expert."""


@dataclass
class Item:
    """A micro-batch on its way through the layers."""

    batch: PackedBatch
    layout: AttentionLayout
    hidden: Tensor
    calls: list[LayerCall]
    row_keys_T: Tensor | None
    number: int = 0
    graphs: dict[int, tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=dict)


class Guest(Protocol):
    """A batch's own adapters and cache in a walk without an attached adapter (see `serving.py`)."""

    cache: Cache | None

    def hung(self, layer: int) -> AbstractContextManager[None]:
        """Inside, its adapters are hung into the layer."""
        ...


def _tensors(given: Any) -> list[Tensor]:
    """Tensors in nested tuples, lists and dicts."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = tuple(given.values())
    return [t for part in given for t in _tensors(part)] if isinstance(given, tuple | list) else []


def _mixed(value: int) -> int:
    """64-bit product wrapped into int64."""
    wrapped = value & 0xFFFFFFFFFFFFFFFF
    return wrapped - (1 << 64) if wrapped >= 1 << 63 else wrapped


def run_layer(skeleton: Skeleton, layout: AttentionLayout, layer: int, hidden: Tensor, call: LayerCall) -> Tensor:
    """One bound layer on the hidden states [1, T, H] of one micro-batch.

    Raises:
        AttentionRefused: the layer does not go once through the attention interface and each of its other mixers.
    """
    mixing = skeleton.mixing[layer]
    calls, mixed, mixers = layout.calls, layout.mixed, len(mixing.mixers)
    with layout.use():
        out = skeleton.run_layer(layer, hidden, call)
    attended = layout.calls - calls
    if layout.mixed - mixed != mixers or attended > max(mixing.attentions, 1) or not (attended or mixing.tested):
        raise AttentionRefused(
            f"layer {layer} ({type(skeleton.layers[layer]).__name__}) goes {attended} times through the attention "
            f"interface and {layout.mixed - mixed} times through its {mixers} other mixers, not once through each",
            fix="this model family is not supported yet",
        )
    return out


class Walk:
    """Drives a skeleton's layers with borrowed weights.

    Args:
        skeleton: weightless model; its prologue and head already have weights.
        weights: dequantises a layer into the place its modules look at.
        seed: of dropout.
        boundary_bytes: of boundary activations that stay on a GPU; the others go to host memory. None: all stay.
    """

    def __init__(
        self, skeleton: Skeleton, weights: LayerWeights, seed: int = 0, boundary_bytes: int | None = None
    ) -> None:
        self.skeleton, self.weights, self.seed = skeleton, weights, seed
        self.adapter: Adapter | None = None
        self.division: Division | None = None
        self.peers: Peers | None = None
        self.pace = Pace()
        self.leaves: dict[str, tuple[Tensor, Tensor]] = {}
        self._sites: dict[int, list[SiteSpec]] = {}
        self._hits: dict[str, Tensor] = {}
        self.saved_bytes_per_token: float | None = None
        self.logits_bytes = LOGITS_BYTES
        self.steps_kept = self.steps_recomputed = 0
        self.head_is_plain: bool | None = None
        self._head: PlainHead | None = None
        cuda = weights.device.type == "cuda"
        make_copier = (lambda: CudaCopier(weights.device)) if cuda else None
        self.boundaries = Boundaries(make_copier, boundary_bytes, pin=cuda)
        self.gradients = GradientSums(make_copier() if make_copier is not None else None, pin=cuda)
        self.head_weight = vocabulary_head(skeleton, weights.device)
        self._captured: list[Tensor] = []
        self._blank = False  # a layer's weights may be zeros: it is run for its memory alone
        self.chosen_TK: Tensor | None = None
        self.mixing = MixingTest(skeleton)
        self._routers = skeleton.routers()
        for module, which in self._routers.values():
            module.register_forward_hook(lambda _m, _a, out, which=which: self._capture(out, which))
        onednn = weights.device.type == "cpu" and skeleton.dtype == torch.bfloat16
        self._multiple = self._head_multiple = PAD_TOKENS if onednn else 1
        self.compiles_shapes = onednn
        self.top_k = int(getattr(skeleton.config, "num_experts_per_tok", 0) or 0)

    # ---- adapters -------------------------------------------------------------------------------

    def _owner(self, site: SiteSpec) -> Any:
        return self.skeleton.layers[site.layer].get_submodule(site.path)

    def attach(self, adapter: Adapter | None) -> None:
        """Make this the adapter of all further passes; None: the bare base."""
        if self.adapter is not None:
            for site in self.adapter.sites.values():
                owner = self._owner(site)
                if site.parameter is None:
                    owner.lora = None
                else:
                    owner.__dict__.pop("lamella_lora", None)
                    owner.__dict__.pop("lamella_hits", None)
        self.adapter = adapter
        self.leaves = {}
        self._sites = {}
        self._hits = {}
        self.gradients.cuts.clear()
        if adapter is not None:
            for site in adapter.sites.values():
                self._sites.setdefault(site.layer, []).append(site)
                held = self._held(site)
                if held is not None:
                    named = zip("AB", held, strict=True)
                    self.gradients.cuts.update({f"{site.key}.lora_{x}": cut for x, cut in named if cut is not None})
                if site.parameter is not None:
                    owner = self._owner(site)
                    owner.__dict__.setdefault("lamella_lora", {})
                    hits = torch.zeros(int(site.experts or 0), dtype=torch.int64, device=self.weights.device)
                    self._hits[site.key.rpartition(".")[0]] = hits
                    cut = held[0] if held is not None else None
                    owner.__dict__["lamella_hits"] = hits if cut is None else cut.of(hits)
        self._count_others()

    def _count_others(self) -> None:
        """Count the tokens of experts without an adapter too, where they are whole here."""
        if self.division is not None:
            return
        for i, layer in enumerate(self.skeleton.layers):
            for path, module in layer.named_modules():
                name = f"{self.skeleton.prefix}.{i}.{path}"
                if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and name not in self._hits:
                    self._hits[name] = torch.zeros(
                        int(module.num_experts), dtype=torch.int64, device=self.weights.device
                    )
                    module.__dict__["lamella_hits"] = self._hits[name]

    def divide(self, division: Division | None) -> None:
        """Drive a rank's part of every layer from now on (its modules and weights are divided already); None: all of it."""
        self.unhang_all()
        self.division = division
        self.saved_bytes_per_token = None
        self.attach(self.adapter)

    def _held(self, site: SiteSpec) -> tuple[Cut | None, Cut | None] | None:
        """Parts of a pair's A and B on this rank; None where its weight is whole."""
        return None if self.division is None else self.division.site_cuts(site.key, site.parameter)

    def _counts(self, site: SiteSpec) -> bool:
        """Whether this rank's gradient of a pair is a part of its sum: what all ranks compute alike counts on the first."""
        return self.division is None or self.division.first or self._held(site) is not None

    def agreed(self, keep: bool | None) -> bool | None:
        """Whether activations are kept, alike in all ranks of a divided group: not unless all can; None: to be measured."""
        if self.division is None:
            return keep
        order = (False, None, True)
        return order[self.division.least(order.index(keep), len(order))]

    def expert_hits(self) -> dict[str, list[int]]:
        """Tokens each expert module has seen so far, forward and recomputed: module name -> count per expert (zero for another
        rank's)."""
        return {name: hits.tolist() for name, hits in self._hits.items()}

    def hang(self, layer: int, grad: bool) -> None:
        """Hang compute-dtype leaves of a layer's masters into its modules, unless they are there (of a kept graph)."""
        device = self.weights.device
        for site in self._sites.get(layer, ()):
            if site.key in self.leaves:
                continue
            assert self.adapter is not None
            held = self._held(site) or (None, None)
            a, b = (
                (p.detach() if cut is None else cut.of(p.detach())).to(device, self.skeleton.dtype).requires_grad_(grad)
                for p, cut in zip(self.adapter.pair(site.key), held, strict=True)
            )
            self.leaves[site.key] = (a, b)
            inputs = held[0] if site.parameter is None else None
            hung = LoraSite(a, b, site.scale, self.adapter.dropout if grad else 0.0, site.index, inputs)
            owner = self._owner(site)
            if site.parameter is None:
                assert isinstance(owner, FrozenLinear)
                owner.lora = hung
            else:
                owner.__dict__["lamella_lora"][site.parameter] = hung

    def unhang(self, layer: int) -> None:
        for site in self._sites.get(layer, ()):
            if self.leaves.pop(site.key, None) is not None:
                owner = self._owner(site)
                if site.parameter is None:
                    owner.lora = None
                else:
                    owner.__dict__["lamella_lora"].pop(site.parameter, None)

    def unhang_all(self) -> None:
        """Leaves of an earlier pass (one that failed half-way) must not serve the next: masters have moved on."""
        for layer in self._sites:
            self.unhang(layer)

    # ---- one layer ------------------------------------------------------------------------------

    def enter(self, batch: PackedBatch, step_index: int | None, cache: Cache | None = None) -> Item:
        vocab_size = int(self.skeleton.config.vocab_size)
        if batch.tokens and int(batch.input_ids.max()) >= vocab_size:
            raise UserError(f"token id {int(batch.input_ids.max())} is beyond the model's vocabulary of {vocab_size}",
                            fix="the tokenizer does not belong to this model")  # fmt: skip
        batch = batch.to(self.weights.device)
        if cache is None:
            batch = batch.padded(self._multiple)
        with torch.no_grad():
            hidden, calls = self.skeleton.prologue(batch.input_ids, batch.position_ids)
        keys = None
        if step_index is not None and self.adapter is not None and self.adapter.dropout > 0:
            keys = self._row_keys(batch, step_index)
        return Item(batch, AttentionLayout(batch, cache, self._multiple), hidden, calls, keys)

    def _row_keys(self, batch: PackedBatch, step_index: int) -> Tensor:
        row_S = torch.tensor(batch.row_ids, dtype=torch.int64, device=batch.input_ids.device)
        row_T = torch.repeat_interleave(row_S, batch.starts[1:] - batch.starts[:-1])
        key = row_T * _mixed(0x9E3779B97F4A7C15) + batch.position_ids * _mixed(0xC2B2AE3D27D4EB4F)
        return key + _mixed((step_index + 1) * 0x165667B19E3779F9 + (self.seed + 1) * 0x27D4EB2F165667C5)

    def _run(self, item: Item, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """One layer on one micro-batch: output, and router logits where the layer has a router."""
        if not self._blank and self.mixing.wanted(layer):
            self.mixing.run(layer, self.weights.device)
        self._captured.clear()
        DropoutClock.row_keys_T = item.row_keys_T
        out = run_layer(self.skeleton, item.layout, layer, hidden, item.calls[layer])
        DropoutClock.row_keys_T = None
        if not self._captured:
            return out, None
        real = item.batch.real_tokens
        self.chosen_TK = None if self.chosen_TK is None else self.chosen_TK[:real]
        return out, self._captured[0].reshape(-1, self._captured[0].shape[-1])[:real]

    def _capture(self, out: Any, which: int) -> None:
        """A router's logits, and the experts it chose where it tells them."""
        outputs = out if isinstance(out, tuple) else (out,)
        self._captured.append(outputs[which if isinstance(out, tuple) else 0])
        told = [
            x for x in outputs if isinstance(x, Tensor) and x.dtype == torch.int64 and x.shape[-1:] == (self.top_k,)
        ]
        self.chosen_TK = told[0].reshape(-1, self.top_k) if len(told) == 1 else None

    @staticmethod
    def peak(x: Tensor) -> Tensor:
        """Largest |value|, NaN where one is."""
        if rows.takes(x):
            return torch.tensor(rows.peak(x))
        low, high = x.detach().aminmax()
        return torch.maximum(-low, high).float()

    def forward(
        self, batches: Sequence[PackedBatch], cache: Cache | None = None,
        on_layer: Callable[[int], None] | None = None, guests: Sequence[Guest] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Last boundary of every batch, [T, H], without gradients.

        Args:
            guests: what each batch brings of its own, in the place of the attached adapter and the cache.
        """
        with torch.no_grad():
            self.unhang_all()
            caches = [cache] * len(batches) if guests is None else [guest.cache for guest in guests]
            items = [self.enter(b, None, own) for b, own in zip(batches, caches, strict=True)]
            for i in range(len(self.skeleton.layers)):
                self.weights.bind(i)
                self.hang(i, grad=False)
                for at, item in enumerate(items):
                    with nullcontext() if guests is None else guests[at].hung(i):
                        item.hidden, _ = self._run(item, i, item.hidden)
                self.unhang(i)
                if on_layer is not None:
                    on_layer(i)
            return [item.hidden[0, : b.tokens] for item, b in zip(items, batches, strict=True)]

    # ---- probes (engine/memory.py) --------------------------------------------------------------

    def padded_tokens(self, tokens: int) -> int:
        """Tokens that a micro-batch of this many is filled up to."""
        return -(-tokens // self._multiple) * self._multiple

    def probe(self, batch: PackedBatch, layer: int) -> Callable[[], tuple[Tensor, list[Tensor]]]:
        """One layer on random hidden states of a batch, to be run under a ledger: output, and what has gradients."""
        assert self.adapter is not None
        self.unhang_all()
        self.weights.blank(layer)
        self.hang(layer, grad=True)
        item = self.enter(batch, 0)
        generator = torch.Generator(self.weights.device).manual_seed(0)
        noise = torch.randn(item.hidden.shape, generator=generator, device=self.weights.device)
        leaves = [leaf for s in self._sites.get(layer, []) for leaf in self.leaves[s.key]]
        hidden = noise.to(item.hidden.dtype).requires_grad_()
        modules = self.skeleton.layers[layer].modules()
        counts = [m.__dict__["lamella_hits"] for m in modules if "lamella_hits" in m.__dict__]

        def run() -> tuple[Tensor, list[Tensor]]:
            before = [hits.clone() for hits in counts]
            self._blank = True
            with nullcontext() if self.division is None else self.division.alone():
                out, _ = self._run(item, layer, hidden)
            self._blank = False
            for hits, old in zip(counts, before, strict=True):
                hits.copy_(old)
            return out, [hidden, *leaves]

        return run

    def probe_head(self, positions: int) -> Callable[[], Tensor]:
        """Loss and gradient of as many label tokens, to be run under a ledger."""
        batch = pack_rows([([0] * (positions + 1), [False] + [True] * positions)]).to(self.weights.device)
        hidden = torch.zeros(1, positions + 1, int(self.skeleton.config.hidden_size), dtype=self.skeleton.dtype,
                             device=self.weights.device)  # fmt: skip
        item = Item(batch, AttentionLayout(batch), hidden, [], None)
        return lambda: self._whole_loss_and_gradient(item, positions)[1]

    def head_chunk_rows(self) -> int:
        """Most positions whose logits are alive at once in a step."""
        if self._plain_head() is not None and self.weights.device.type == "cpu":
            return self.head_chunks(1 << 16, self.skeleton.dtype.itemsize, HEAD_ROWS)[0][1]
        return self.head_chunks(1 << 16)[0][1]

    # ---- the head -------------------------------------------------------------------------------

    def _filled(self, rows: int) -> int:
        """Rows of the head's matmuls for so many positions."""
        return -(-rows // self._head_multiple) * self._head_multiple

    def head_chunks(self, positions: int, logit_bytes: int = 4, most: int = 1 << 30) -> list[tuple[int, int]]:
        """Ranges of positions whose logits are alive at once."""
        size = max(16, min(most, self.logits_bytes // (logit_bytes * self.skeleton.config.vocab_size)))
        size = size // self._head_multiple * self._head_multiple or size
        return [(a, min(a + size, positions)) for a in range(0, positions, size)]

    def log_probabilities(self, hidden_TH: Tensor, batch: PackedBatch) -> Tensor:
        """fp32 [N]: log p of each scored pair."""
        position_U, of_N = torch.unique(batch.score_positions, return_inverse=True)
        out_N = torch.empty(batch.score_tokens.numel(), dtype=torch.float32, device=hidden_TH.device)
        with torch.no_grad():
            for a, b in self.head_chunks(position_U.numel()):
                logp_UV = torch.log_softmax(self.skeleton.head(hidden_TH[position_U[a:b]]).float(), dim=-1)
                mine = ((of_N >= a) & (of_N < b)).nonzero().flatten()
                out_N[mine] = logp_UV[of_N[mine] - a, batch.score_tokens[mine]]
        return out_N

    def _plain_head(self) -> PlainHead | None:
        if self.head_is_plain is None:
            self._head = self.skeleton.plain_head()
            self.head_is_plain = self._head is not None
        return self._head

    def _plain_loss_and_gradient(self, item: Item, label_tokens: int, head: PlainHead) -> tuple[Tensor, Tensor]:
        """As `loss_and_gradient`; the gradient takes the place of the logits, and only one chunk of these is alive."""
        batch, hidden_TH, weight_VH = item.batch, item.hidden[0], head.linear.weight.detach()
        norm, positions_N = head.norm, batch.score_positions
        chunks = self.head_chunks(positions_N.numel(), weight_VH.element_size(), HEAD_ROWS)
        total = torch.zeros((), dtype=torch.float64)
        grad_TH = torch.zeros_like(hidden_TH)
        largest = max((self._filled(b - a) for a, b in chunks), default=0)
        logits_NV = hidden_TH.new_empty(largest, weight_VH.shape[0])
        for a, b in chunks:
            filled = self._filled(b - a)
            x_NH = hidden_TH.new_zeros(filled, hidden_TH.shape[1])
            torch.index_select(hidden_TH, 0, positions_N[a:b], out=x_NH[: b - a])
            y_NH, rstd_N = rows.rms_norm(x_NH, norm.weight, norm.eps, norm.offset)
            torch.mm(y_NH, weight_VH.T, out=logits_NV[:filled])
            total += rows.cross_entropy_(logits_NV[: b - a], batch.score_tokens[a:b], 1 / label_tokens).sum()
            logits_NV[b - a : filled] = 0
            dy_NH = torch.mm(logits_NV[:filled], weight_VH)
            dx_NH = rows.rms_norm_backward(dy_NH, x_NH, norm.weight, rstd_N, norm.offset)
            grad_TH.index_add_(0, positions_N[a:b], dx_NH[: b - a])
        return total, grad_TH[None]

    def loss_and_gradient(self, item: Item, label_tokens: int) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy (fp64) and the gradient of sum / label_tokens at the last boundary [1, T, H].

        In a divided group each rank takes its share of the positions.
        """
        if self.division is None:
            return self._whole_loss_and_gradient(item, label_tokens)
        a, b = self.division.range_of(item.batch.score_tokens.numel())
        total = torch.zeros((), dtype=torch.float64, device=item.hidden.device)
        gradient = torch.zeros_like(item.hidden)
        if b > a:
            batch = replace(
                item.batch, score_positions=item.batch.score_positions[a:b], score_tokens=item.batch.score_tokens[a:b]
            )
            total, gradient = self._whole_loss_and_gradient(replace(item, batch=batch), label_tokens)
        (total,) = self.division.summed([total])
        (gradient,) = self.division.summed([gradient])
        return total, gradient

    def _whole_loss_and_gradient(self, item: Item, label_tokens: int) -> tuple[Tensor, Tensor]:
        if self.head_weight is not None:
            return vocabulary_loss(self.skeleton, self.head_weight, item.hidden[0], item.batch, label_tokens)
        head = self._plain_head()
        if head is not None and rows.takes(item.hidden):
            return self._plain_loss_and_gradient(item, label_tokens, head)
        batch, hidden_TH = item.batch, item.hidden[0]
        total = torch.zeros((), dtype=torch.float64, device=hidden_TH.device)
        grad_TH = torch.zeros_like(hidden_TH)
        for a, b in self.head_chunks(batch.score_tokens.numel()):
            position = batch.score_positions[a:b]
            leaf = hidden_TH[position].detach().requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(self.skeleton.head(leaf).float(), batch.score_tokens[a:b], reduction="sum")
                (grad,) = torch.autograd.grad(loss / label_tokens, leaf)
            total += loss.detach()
            grad_TH.index_add_(0, position, grad)
        return total, grad_TH[None]

    # ---- a step ---------------------------------------------------------------------------------

    def step(
        self, work: RankWork, *, step_index: int, label_tokens: int, keep_bytes: int, aux_coef: float,
        beside_base: bool = False,
    ) -> StepOutput:  # fmt: skip
        """Forward and backward of all micro-batches; adds into the adapter parameters' `.grad` (fp32).

        Args:
            work: this device's part of the step.
            step_index: seeds dropout.
            label_tokens: label tokens of the whole step, over all devices; the loss is divided by it.
            keep_bytes: activations of all layers are kept when they take at most this; else recomputed.
            aux_coef: weight of the router balancing loss.
            beside_base: also run the first micro-batch through the bare base, for `StepOutput.start`.
        """
        run = StepRun(self, work, self.peers, step_index=step_index, label_tokens=label_tokens, keep_bytes=keep_bytes,
                      aux_coef=aux_coef, beside_base=beside_base)  # fmt: skip
        return run.run()

    def keeps(self, tokens: Sequence[int], keep_bytes: int, layers: int) -> bool | None:
        """Whether activations of these micro-batches in so many layers may be kept; None: not measured yet."""
        if keep_bytes <= 0:
            return False
        if self.saved_bytes_per_token is None:
            return None
        return self.saved_bytes_per_token * sum(tokens) * layers <= keep_bytes

    def measure_saved(self, item: Item, layer: int) -> None:
        """Run one layer once to see how many bytes autograd keeps per token."""
        seen: dict[int, int] = {}
        module, call = self.skeleton.layers[layer], item.calls[layer]
        shared = [*module.parameters(), *module.buffers(), *_tensors(call.args), *_tensors(call.kwargs)]
        given = {t.untyped_storage().data_ptr() for t in shared}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if not (t.is_leaf and t.requires_grad) and storage.data_ptr() not in given:
                seen[storage.data_ptr()] = storage.nbytes()
            return t

        hidden = item.hidden.detach().requires_grad_()
        Kept.watch = pack
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                self._run(item, layer, hidden)
        finally:
            Kept.watch = None
        self.saved_bytes_per_token = (sum(seen.values()) + hidden.nbytes) / max(item.batch.tokens, 1)

    def forward_one(self, item: Item, i: int, trains: bool, keep: bool) -> Tensor | None:
        if not trains:
            with torch.no_grad():
                item.hidden, router = self._run(item, i, item.hidden)
        elif keep:
            hidden = item.hidden.detach().requires_grad_()
            with torch.enable_grad():
                out, router = self._run(item, i, hidden)
            item.graphs[i] = (hidden, out, router)
            item.hidden = out.detach()
        else:
            self.boundaries.put(i, item.number, item.hidden)
            with torch.no_grad():
                item.hidden, router = self._run(item, i, item.hidden)
        return router

    def backward_one(
        self, item: Item, i: int, grad_out: Tensor, routing: Routing, aux_coef: float, needs_input: bool
    ) -> Tensor:
        """Gradient at the layer's input; adapter gradients are added to the masters."""
        assert self.adapter is not None
        if i in item.graphs:
            hidden, out, router = item.graphs.pop(i)
        else:
            hidden = self.boundaries.get(i, item.number, self.weights.device)
            hidden = hidden.detach().requires_grad_(needs_input)
            with torch.enable_grad():
                out, router = self._run(item, i, hidden)
        sites = self._sites.get(i, [])
        leaves = [leaf for s in sites for leaf in self.leaves[s.key]]
        wanted = ([hidden] if needs_input else []) + leaves
        outputs, grads = [out], [grad_out]
        if aux_coef and router is not None and routing.count_E is not None and router.requires_grad:
            weight_E = (routing.count_E * (aux_coef * routing.count_E.numel() / routing.rows**2)).float()
            with torch.enable_grad():
                outputs.append(torch.softmax(router.float(), dim=-1).sum(0) @ weight_E)
            grads.append(torch.ones_like(outputs[-1]))
        if not wanted or not out.requires_grad:
            return grad_out
        found = list(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        grad_in = found.pop(0) if needs_input else grad_out
        for site, a, b in zip(sites, found[::2], found[1::2], strict=True):
            for x, grad in (("A", a), ("B", b)):
                name = f"{site.key}.lora_{x}"
                if grad is not None and not self._counts(site):
                    self.adapter.add_gradient(name, None)
                elif grad is not None:
                    self.gradients.add(self.adapter, name, grad)
        return grad_in
