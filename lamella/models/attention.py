"""Attention over packed layouts, registered with transformers as `lamella`.

transformers' attention modules call `packed_attention` through `AttentionInterface`; who sees whom
comes from the layout in use (`with layout.use():`), not from masks, so a sequence never attends to its
neighbours. A family that builds a mask of its own is refused rather than computed wrongly.

bf16 on a CPU with AVX-512 goes to the C kernels (`lamella/kernels/attention.py`), which work on the packed
tokens as they stand, trees and windows included; they were faster than torch at every size measured
(`python -m bench.attention`). Everything else (fp32, other devices and CPUs, soft caps, sinks, odd head sizes) goes
to torch: plain sequences are gathered into a few right-padded groups of similar length, for with causal attention the
padding at the right is never seen by a real token, so no mask is needed; trees get a boolean mask.

Shape suffixes: T tokens, H heads, K kv heads, D head size, n sequences of a group, L padded length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from lamella.errors import UserError
from lamella.kernels import attention as kernels
from lamella.models import attention_cuda
from lamella.models.layout import PackedBatch
from lamella.models.padded import Rows, by_length

NAME = "lamella"
SHORT_CPU = 320
"""Up to this many tokens torch on a CPU computes causal attention faster with plain matmuls, forward and backward: 5.3 times at 80
tokens, 1.2 at 320, 0.7 at 1,024 (`python -m bench.attention`, one thread, bf16, 9 heads of 64)."""
PATHS_USED: set[str] = set()
"""What has computed packed attention in this process so far: a kernel's name, or `torch`. For the receipt."""


class AttentionRefused(UserError):
    """This family's attention cannot be computed exactly on packed layouts."""


@dataclass
class Group:
    """Sequences computed together. `rows`: their tokens' slice in the gathered order; masked: tree or not."""

    n: int
    length: int
    first: int
    mask_until: Tensor | None = None
    positions: Tensor | None = None
    masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Boolean [L, L] mask (True: visible), or None where plain causal attention is right."""
        if window is not None and window >= self.length:
            window = None
        if chunk is not None and chunk >= self.length:
            chunk = None
        if self.mask_until is None and window is None and chunk is None:
            return None
        if (window, chunk) not in self.masks:
            index_L = torch.arange(self.length, device=None if self.mask_until is None else self.mask_until.device)
            until_L = self.mask_until if self.mask_until is not None else torch.full_like(index_L, self.length)
            position_L = self.positions if self.positions is not None else index_L
            seen = (index_L[:, None] >= index_L[None, :]) & (index_L[:, None] < until_L[None, :])
            if window is not None:
                seen &= position_L[:, None] - position_L[None, :] < window
            if chunk is not None:
                seen &= position_L[:, None] // chunk == position_L[None, :] // chunk
            self.masks[window, chunk] = seen
        return self.masks[window, chunk]


class AttentionLayout:
    """How the tokens of one `PackedBatch` are grouped for attention, and a KV cache when generating.

    Args:
        batch: the packed batch.
        cache: where keys and values of every layer are kept for later tokens, or None.
        multiple: what rows of other mixers than attention are padded to (`mixers.Rows`).

    Attributes:
        calls, mixed: how many calls attention, and other mixers, had so far.
    """

    current: AttentionLayout | None = None

    def __init__(self, batch: PackedBatch, cache: Cache | None = None, multiple: int = 1) -> None:
        self.cache = cache
        self.calls = self.mixed = 0
        self.multiple = multiple
        self.batch = batch
        device = batch.input_ids.device
        lengths = batch.lengths
        self.plain = not batch.is_tree
        self.starts = batch.starts.int()
        self.longest = max(lengths, default=0)
        starts = batch.starts.tolist()
        order: list[Tensor] = []
        padding: list[Tensor] = []
        self.groups: list[Group] = []
        if batch.is_tree:
            members = [[s] for s in range(len(lengths)) if lengths[s]]
        else:
            members = by_length(lengths)
        offset = 0
        for group in members:
            longest = max(lengths[s] for s in group)
            made = Group(len(group), longest, offset)
            if batch.is_tree:
                a, b = starts[group[0]], starts[group[0] + 1]
                made.mask_until = batch.visible_until[a:b] - a
                made.positions = batch.position_ids[a:b]
            self.groups.append(made)
            for s in group:
                token_L = torch.arange(longest, device=device)
                padding.append(token_L >= lengths[s])
                order.append(starts[s] + token_L.clamp(max=lengths[s] - 1))
            offset += len(group) * longest
        self.order_P = torch.cat(order) if order else torch.zeros(0, dtype=torch.int64, device=device)
        pad_P = torch.cat(padding) if padding else torch.zeros(0, dtype=torch.bool, device=device)
        self.pad_rows = pad_P.nonzero().flatten()
        self.inverse_T = torch.empty(batch.tokens, dtype=torch.int64, device=device)
        real_P = (~pad_P).nonzero().flatten()
        self.inverse_T[self.order_P[real_P]] = real_P
        self.in_order = len(self.pad_rows) == 0 and bool(
            torch.equal(self.order_P, torch.arange(batch.tokens, device=device))
        )

    @cached_property
    def segments(self) -> kernels.Segments:
        """The same for the C kernels."""
        return kernels.Segments.of(self.batch.visible_until, self.batch.position_ids, self.batch.starts)

    @cached_property
    def rows(self) -> Rows:
        """The same for mixers that run along rows."""
        return Rows(self.batch, self.multiple)

    @contextmanager
    def use(self) -> Iterator[AttentionLayout]:
        """Make this the layout that `packed_attention` obeys."""
        before, AttentionLayout.current = AttentionLayout.current, self
        try:
            yield self
        finally:
            AttentionLayout.current = before


class _Split(torch.autograd.Function):
    """[H, T, D] -> one [n, H, L, D] per group. Each token stands in one group, so backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, x_HTD: Tensor, layout: AttentionLayout) -> tuple[Tensor, ...]:
        ctx.layout = layout
        ctx.set_materialize_grads(True)
        x_HPD = x_HTD if layout.in_order else x_HTD.index_select(1, layout.order_P)
        heads, _, size = x_HTD.shape
        return tuple(
            x_HPD[:, g.first : g.first + g.n * g.length]
            .reshape(heads, g.n, g.length, size)
            .transpose(0, 1)
            .contiguous()
            for g in layout.groups
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layout = ctx.layout
        flat = [g.transpose(0, 1).reshape(g.shape[1], -1, g.shape[3]) for g in grads]
        grad_HPD = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        return (grad_HPD if layout.in_order else grad_HPD.index_select(1, layout.inverse_T)), None


class _Join(torch.autograd.Function):
    """One [n, H, L, D] per group -> [T, H, D]; padding rows get zero gradient."""

    @staticmethod
    def forward(ctx: Any, layout: AttentionLayout, *outs: Tensor) -> Tensor:
        ctx.layout = layout
        flat = [o.transpose(1, 2).reshape(-1, o.shape[1], o.shape[3]) for o in outs]
        out_PHD = flat[0] if len(flat) == 1 else torch.cat(flat, dim=0)
        return out_PHD if layout.in_order else out_PHD.index_select(0, layout.inverse_T)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        layout = ctx.layout
        if layout.in_order:
            grad_PHD = grad_THD
        else:
            grad_PHD = grad_THD.index_select(0, layout.order_P)
            grad_PHD[layout.pad_rows] = 0
        heads, size = grad_THD.shape[1:]
        return None, *(
            grad_PHD[g.first : g.first + g.n * g.length].reshape(g.n, g.length, heads, size).transpose(1, 2)
            for g in layout.groups
        )


class _KernelAttention(torch.autograd.Function):
    """[1, H, T, D], [1, K, T, D], [1, K, T, V] -> [1, T, H, V] by the C kernels; keeps its arguments, the result and lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: kernels.Segments, scale: float, window: int | None
    ) -> Tensor:
        out_THV, lse_HT = kernels.forward(q[0], k[0], v[0], segments, scale, window)
        out = out_THV[None]
        ctx.save_for_backward(q, k, v, out, lse_HT)
        ctx.rest = (segments, scale, window)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_HT = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        grads = kernels.backward(grad[0], q[0], k[0], v[0], out[0], lse_HT, *ctx.rest, wanted=wanted)
        return *(x if x is None else x[None] for x in grads), None, None, None


def _explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks_H: Tensor | None
) -> Tensor:
    """Attention with scores written out, for soft caps and sinks. q [n, H, L, D]; k, v have H heads."""
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(v.dtype), v)


def _short_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention with scores written out: the library's CPU backward pads short sequences to its block size.

    q [n, H, L, D]; k, v [n, K, L, D]. The query heads that share a kv head are folded into rows, so k and v are not
    repeated.
    """
    n, heads, length, size = q.shape
    kv_heads = k.shape[1]
    folded = (q * scale).reshape(n, kv_heads, heads // kv_heads * length, size)
    scores = torch.matmul(folded, k.transpose(2, 3)).view(n, heads, length, length)
    ahead = torch.full((length, length), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    weights = torch.softmax(scores + ahead, dim=-1).view(n, kv_heads, heads // kv_heads * length, length)
    return torch.matmul(weights, v).view(n, heads, length, v.shape[3])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks_H: Tensor | None
) -> Tensor:
    plain = softcap is None and sinks_H is None
    if plain and mask is None and q.device.type == "cpu" and q.shape[2] <= SHORT_CPU:
        return _short_attention(q, k, v, scale)
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    if plain:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return _explicit_attention(q, k, v, mask, scale, softcap, sinks_H)


_KNOWN = {"is_causal", "position_ids", "use_cache", "output_attentions", "cache", "past_key_values", "cache_position",
          "position_embeddings", "output_router_logits", "output_hidden_states", "cu_seq_lens_q", "cu_seq_lens_k",
          "max_length_q", "max_length_k", "return_dict", "logits_to_keep"}  # fmt: skip


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' `AttentionInterface`.

    Args:
        query: [1, H, T, D]; key, value: [1, K, T, D], positions already applied.
        attention_mask: must be None: the layout in use says who sees whom.

    Returns:
        [1, T, H, D] and None (no weights).

    Raises:
        AttentionRefused: a mask or an argument this function does not know.
    """
    unknown = {k for k, v in kwargs.items() if v is not None} - _KNOWN
    if attention_mask is not None or unknown or not getattr(module, "is_causal", True):
        why = f"arguments {sorted(unknown)}" if unknown else "a mask of its own or non-causal attention"
        raise AttentionRefused(
            f"{type(module).__name__} asks for {why}, which packed attention does not compute",
            fix="this model family is not supported yet",
        )
    assert dropout == 0.0, "the base runs without attention dropout"
    layout = AttentionLayout.current
    assert layout is not None, "no attention layout in use"
    layout.calls += 1
    chunk = _chunk(module)
    if chunk is not None and chunk >= layout.longest and layout.cache is None:
        chunk = None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if layout.cache is not None:
        index = int(module.layer_idx)  # type: ignore[arg-type]
        layout.cache.write(index, key, value)
        if layout.cache.decoding:
            return layout.cache.attend(index, query, scale, sliding_window, softcap, s_aux, chunk), None
    if query.is_cuda:
        run = partial(_on_cuda, layout=layout, scale=scale, window=sliding_window, softcap=softcap, sinks_H=s_aux,
                      chunk=chunk)  # fmt: skip
        return attention_cuda.fenced(run, query, key, value), None
    if softcap is None and s_aux is None and chunk is None and kernels.takes(query[0], value[0]):
        PATHS_USED.add(kernels.implementation())
        return _KernelAttention.apply(query, key, value, layout.segments, scale, sliding_window), None
    return _in_groups(query, key, value, layout, scale, sliding_window, softcap, s_aux, chunk), None


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float, window: int | None,
    softcap: float | None, sinks_H: Tensor | None, chunk: int | None,
) -> Tensor:  # fmt: skip
    if layout.plain and softcap is None and sinks_H is None and chunk is None:
        out = attention_cuda.varlen(query, key, value, layout.starts, layout.longest, scale, window)
        if out is not None:
            PATHS_USED.add(attention_cuda.kernel(query.device))
            return out
    return _in_groups(query, key, value, layout, scale, window, softcap, sinks_H, chunk)


def _in_groups(
    query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float, sliding_window: int | None,
    softcap: float | None, s_aux: Tensor | None, chunk: int | None,
) -> Tensor:  # fmt: skip
    """[1, T, H, D], sequences of similar length computed together."""
    PATHS_USED.add("torch")
    q_groups = _Split.apply(query[0], layout)
    k_groups = _Split.apply(key[0], layout)
    v_groups = _Split.apply(value[0], layout)
    outs = [
        _attend(q, k, v, group.mask(sliding_window, chunk), scale, softcap, s_aux)
        for group, q, k, v in zip(layout.groups, q_groups, k_groups, v_groups, strict=True)
    ]
    out: Tensor = _Join.apply(layout, *outs)[None]
    return out.contiguous()  # families call `view` on it


class Cache(Protocol):
    """What earlier tokens left for later ones, as the batch at work sees it.

    Attributes:
        decoding: the batch has one new token for each row; else it has whole prompts.
    """

    decoding: bool

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the coming tokens' keys and values, [1, K, T, D], of attention `layer_idx`."""
        ...

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks_H: Tensor | None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """One new token per row, [1, H, B, D] -> [1, B, H, D]."""
        ...

    def remember(self, mixer: int, tensors: Sequence[Tensor]) -> None:
        """Keep the coming tokens' inputs [1, T, ...] of another mixer than attention."""
        ...

    def recall(self, mixer: int) -> tuple[list[Tensor], Tensor]:
        """Its inputs of all rows, each [B, L, ...] with the last one again as padding; and the last one's place [B]."""
        ...

    def filled(self, x_BH: Tensor) -> Tensor:
        """[T, H]: rows' outputs in the batch's tokens, zeros for filler."""
        ...


class KVCache:
    """Keys and values of `rows` sequences in every layer, written where each new token stands.

    Args:
        rows: sequences generated together.
        capacity: longest sequence, prompt and answer, in tokens.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.keys: dict[int, Tensor] = {}  # by attention's `layer_idx`: some layers have two
        self.values: dict[int, Tensor] = {}
        self.inputs: dict[int, list[Tensor]] = {}  # of other mixers than attention
        self.row_T: Tensor = torch.zeros(0, dtype=torch.int64)
        self.position_T: Tensor = torch.zeros(0, dtype=torch.int64)
        self.decoding = False

    def expect(self, row_T: Tensor, position_T: Tensor, decoding: bool) -> None:
        """Say which row and position each of the coming tokens has; decoding: one token per row."""
        self.row_T, self.position_T, self.decoding = row_T, position_T, decoding

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if layer not in self.keys:
            shape = (self.rows, self.capacity, key.shape[1])
            self.keys[layer] = key.new_zeros(*shape, key.shape[3])
            self.values[layer] = value.new_zeros(*shape, value.shape[3])
        self.keys[layer][self.row_T, self.position_T] = key[0].transpose(0, 1)
        self.values[layer][self.row_T, self.position_T] = value[0].transpose(0, 1)

    def remember(self, mixer: int, tensors: Sequence[Tensor]) -> None:
        """Inputs where they stand: one [rows, capacity, ...] for each argument."""
        kept = self.inputs.setdefault(mixer, [])
        if not kept:
            kept += [x.new_zeros(self.rows, self.capacity, *x.shape[2:]) for x in tensors]
        for history, x in zip(kept, tensors, strict=True):
            history[self.row_T, self.position_T] = x[0]

    def recall(self, mixer: int) -> tuple[list[Tensor], Tensor]:
        length_L = torch.arange(int(self.position_T.max()) + 1, device=self.position_T.device)
        token_BL = torch.minimum(length_L, self.position_T[:, None])
        return [h[self.row_T[:, None], token_BL] for h in self.inputs[mixer]], self.position_T

    def filled(self, x_BH: Tensor) -> Tensor:
        return x_BH

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks_H: Tensor | None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """One new token per row, [1, H, B, D] -> [1, B, H, D]."""
        keys, values = self.keys[layer], self.values[layer]
        length = int(self.position_T.max()) + 1
        k = keys[self.row_T, :length].transpose(1, 2)
        v = values[self.row_T, :length].transpose(1, 2)
        index_L = torch.arange(length, device=query.device)
        seen = index_L[None, :] <= self.position_T[:, None]
        if window is not None:
            seen &= self.position_T[:, None] - index_L[None, :] < window
        if chunk is not None:
            seen &= self.position_T[:, None] // chunk == index_L[None, :] // chunk
        q = query[0].transpose(0, 1)[:, :, None, :]
        out = _attend(q, k, v, seen[:, None, None, :], scale, softcap, sinks_H)
        return out[:, :, 0, :][None]


def _chunk(module: nn.Module) -> int | None:
    """Tokens of a chunk, of which a token sees its own only (Llama 4), where this module's layer has such attention."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or not isinstance(index, int) or index >= len(kinds) or kinds[index] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


_MASKS = {"causal_mask_function", "sliding_window_overlay", "chunked_overlay", "packed_sequence_mask_function",
          "remap_positions_for_packed_sequence", "add_offsets_to_mask_function", "and_masks"}  # fmt: skip
"""transformers' functions that say who sees whom and that the layout (packing) and `packed_attention` (windows, chunks)
compute themselves."""


def _rules(mask: Any) -> Iterator[str]:
    """Names of the functions that a mask function is made of."""
    yield mask.__qualname__.partition(".")[0] if mask.__module__ == masking_utils.__name__ else mask.__qualname__
    for cell in mask.__closure__ or ():
        held = cell.cell_contents
        for inner in held if isinstance(held, tuple) else (held,):
            if inspect.isfunction(inner):
                yield from _rules(inner)


def _no_mask(*args: Any, mask_function: Any = masking_utils.causal_mask_function, **kwargs: Any) -> None:
    """The layout says who sees whom; transformers need not build a mask.

    Raises:
        AttentionRefused: the family's rule is another one.
    """
    other = [name for name in _rules(mask_function) if name not in _MASKS]
    if other:
        raise AttentionRefused(
            f"who sees whom is also decided by {other[0]}, which packed attention does not compute",
            fix="this model family is not supported yet, or turn bidirectional attention off in config.json",
        )


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)
