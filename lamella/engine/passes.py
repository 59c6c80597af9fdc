"""Several models side by side, layer by layer, in the memory of one layer.

All models share one weightless skeleton (models of other configurations get one each). Layer i is bound to the values of the
first model and all micro-batches pass through it; then to those of the second; and so on; then comes layer i + 1. So what is
in memory is one layer in the compute dtype, hidden states of every model, and at the two ends the embeddings and heads,
those that are equal once. Experts of a layer that would take more than `hold_bytes` are read one at a time as tokens come.

Shape suffixes: T tokens, H hidden, N positions, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from lamella.adapter import Adapter
from lamella.engine.values import Values
from lamella.engine.walk import PAD_TOKENS, run_layer
from lamella.engine.weights import bind_tensor, dtype_of
from lamella.errors import UserError
from lamella.models.attention import AttentionLayout
from lamella.models.binding import plan_binding
from lamella.models.layout import PackedBatch
from lamella.models.linear import FrozenLinear, LoraSite
from lamella.models.pieces import ParamPlan
from lamella.models.skeleton import LayerCall, Skeleton, load_config

HOLD_BYTES = 1 << 30
"""A layer of more bytes in the compute dtype has its experts read one at a time."""

_NOT_STRUCTURE = ("dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path")


@dataclass
class Room:
    """What all models take turns in: the buffer of the layer at work, and the tensors outside the layers.

    Attributes:
        hold_bytes: see `HOLD_BYTES`.
        buffer: values of the layer at work, compute dtype.
        bound: lets go of the layer at work; None: there is none.
    """

    dtype: torch.dtype
    hold_bytes: int = HOLD_BYTES
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))
    bound: Callable[[], None] | None = None
    _outer: dict[str, list[Tensor]] = field(default_factory=dict)

    def take(self, numel: int) -> Tensor:
        """Place for a layer's values. The layer that had it is let go."""
        self.let_go()
        if self.buffer.numel() < numel or self.buffer.dtype != self.dtype:
            self.buffer = torch.empty(0)  # before the new one, not after
            self.buffer = torch.empty(numel, dtype=self.dtype)
        return self.buffer[:numel]

    def let_go(self) -> None:
        if self.bound is not None:
            self.bound()
            self.bound = None

    def once(self, name: str, tensor: Tensor) -> Tensor:
        """This tensor outside the layers, or one equal to it that another model has."""
        known = self._outer.setdefault(name, [])
        for other in known:
            if other.dtype == tensor.dtype and torch.equal(other, tensor):
                return other
        known.append(tensor)
        return tensor

    def forget_outer(self) -> None:
        self._outer.clear()


class Frame:
    """A skeleton, and where its parameters hang."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in skeleton.model.modules():
            for key, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((module, key))
        named = skeleton.model.state_dict(keep_vars=True)
        self._places = {name: places[id(tensor)] for name, tensor in named.items()}
        self._weightless = {name: tensor.detach() for name, tensor in named.items()}
        self._outer_of: object = None

    def bind_outer(self, owner: object, tensors: Mapping[str, Tensor] | None) -> None:
        """Bind an owner's tensors outside the layers, unless they are there; None: none."""
        if self._outer_of is owner:
            return
        for name, tensor in (self._weightless if tensors is None else tensors).items():
            first, *others = self._places[name]
            bind_tensor(*first, tensor)
            for module, key in others:  # a tied head stays the same object
                module._parameters[key] = first[0]._parameters[first[1]]
        self._outer_of = owner

    def layer_place(self, plan: ParamPlan) -> tuple[nn.Module, str]:
        """Module that holds a layer's parameter, and its name there."""
        path, _, key = plan.name.removeprefix(f"{self.skeleton.prefix}.{plan.layer}.").rpartition(".")
        return self.skeleton.layers[plan.layer or 0].get_submodule(path), key


@dataclass
class ExpertValues:
    """The expert parameters of one module: in the place of `models.packed.ExpertBytes`, without its kernels."""

    plans: dict[str, ParamPlan]
    values: Values
    first: int = 0
    table_sizes: None = None

    def for_kernels(self) -> None:
        """The fused kernels want NF4: none here, so that all models take one way."""

    def parameter(self, name: str, dtype: torch.dtype) -> ExpertParameter:
        return ExpertParameter(self.values, self.plans[name], dtype)


@dataclass
class ExpertParameter:
    """Stands for a [E, O, I] parameter: indexing reads one expert, into memory of its own."""

    values: Values
    plan: ParamPlan
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.plan.shape

    def __getitem__(self, expert: int) -> Tensor:
        out = torch.empty(self.plan.shape[1:], dtype=self.dtype)
        for piece in self.plan.pieces:
            if not piece.at:
                self.values.fill(piece.source, expert * out.numel(), out)
            elif piece.at[0] == expert:
                self.values.fill(piece.source, 0, out[piece.at[1] : piece.at[2]] if len(piece.at) == 3 else out)
        return out


class LayerSource:
    """Brings one model's values, and its adapter, into the skeleton.

    Args:
        name: for messages.
        values: where they come from.
        adapter: folder of a PEFT adapter, or None.

    Raises:
        UserError: tensors that do not fit the skeleton, an adapter of another base.
    """

    def __init__(self, name: str, values: Values, frame: Frame, room: Room, adapter: Path | None = None) -> None:
        self.name, self.values, self.frame, self.room = name, values, frame, room
        self.skeleton = frame.skeleton
        self.plans: dict[int | None, list[ParamPlan]] = {}
        for plan in plan_binding(self.skeleton, values.shapes, str(values.path)).values():
            self.plans.setdefault(plan.layer, []).append(plan)
        self.adapter = None if adapter is None else self._adapter(adapter)
        self._outer: dict[str, Tensor] | None = None

    def _adapter(self, folder: Path) -> Adapter:
        adapter = Adapter.load(folder, self.skeleton)
        trained_on = adapter.origin.get("base_fingerprint")
        if trained_on not in (None, self.values.fingerprint):
            raise UserError(f"was trained on a base with fingerprint {trained_on}, {self.values.path} has "
                            f"{self.values.fingerprint}", fix="compare it on the base it was trained on", path=folder)  # fmt: skip
        return adapter

    def outer(self) -> None:
        """Bind embeddings, last norm and head; they are read at the first call after `forget_outer`."""
        if self._outer is None:
            self.values.enter("outer")
            self._outer = {}
            for plan in self.plans.get(None, []):
                tensor = torch.empty(plan.shape, dtype=dtype_of(self.skeleton, plan.name))
                for piece in plan.pieces:
                    self.values.fill(piece.source, 0, piece.view(tensor))
                self._outer[plan.name] = self.room.once(plan.name, tensor)
            self.values.enter(None)
        self.frame.bind_outer(self, self._outer)

    def forget_outer(self) -> None:
        """Let go of the tensors outside the layers; other models' may be kept."""
        self._outer = None
        self.frame.bind_outer(None, None)

    def layer_bytes(self, i: int) -> int:
        """A layer's, in the compute dtype."""
        return sum(torch.Size(p.shape).numel() for p in self.plans.get(i, [])) * self.room.dtype.itemsize

    def _by_expert(self, i: int) -> dict[nn.Module, ExpertValues]:
        """Modules whose experts are read one at a time."""
        found: dict[nn.Module, ExpertValues] = {}
        if self.layer_bytes(i) <= self.room.hold_bytes:
            return found
        for plan in self.plans.get(i, []):
            module, key = self.frame.layer_place(plan)
            if len(plan.shape) == 3 and hasattr(module, "has_gate"):
                found.setdefault(module, ExpertValues({}, self.values)).plans[key] = plan
        return found

    def layer(self, i: int) -> None:
        """Bind decoder layer `i`, in the place of the layer at work, whichever model's."""
        streamed = self._by_expert(i)
        held = [
            (plan, module, key)
            for plan in self.plans.get(i, [])
            for module, key in [self.frame.layer_place(plan)]
            if module not in streamed or key not in streamed[module].plans
        ]
        flat = self.room.take(sum(torch.Size(plan.shape).numel() for plan, _, _ in held))
        self.values.enter(i)
        before: list[tuple[nn.Module, str, Tensor]] = []
        start = 0
        for plan, module, key in held:
            numel = torch.Size(plan.shape).numel()
            tensor = flat[start : start + numel].view(plan.shape)
            start += numel
            dtype = dtype_of(self.skeleton, plan.name)
            if dtype != self.room.dtype:
                tensor = torch.empty(plan.shape, dtype=dtype)
            for piece in plan.pieces:
                self.values.fill(piece.source, 0, piece.view(tensor))
            old = module._parameters[key] if key in module._parameters else module._buffers[key]
            assert old is not None
            before.append((module, key, old))
            bind_tensor(module, key, tensor)
        for module, experts in streamed.items():
            module.__dict__["lamella_packed"] = experts
        hung = self._hang(i)

        def release() -> None:
            for module, key, old in before:
                bind_tensor(module, key, old)
            for module in streamed:
                del module.__dict__["lamella_packed"]
            for undo in hung:
                undo()
            self.values.enter(None)

        self.room.bound = release

    def _hang(self, i: int) -> list[Callable[[], None]]:
        """Hang the adapter's pairs of layer `i` into its modules; gives what takes them out again."""
        undo: list[Callable[[], None]] = []
        for site in self.adapter.layer_sites(i) if self.adapter is not None else ():
            assert self.adapter is not None
            a, b = (p.detach().to(self.room.dtype) for p in self.adapter.pair(site.key))
            hung = LoraSite(a, b, site.scale, 0.0, site.index)
            owner = self.skeleton.layers[i].get_submodule(site.path)
            if site.parameter is None:
                assert isinstance(owner, FrozenLinear)
                owner.lora = hung
                undo.append(lambda owner=owner: setattr(owner, "lora", None))  # type: ignore[misc]
            else:
                owner.__dict__.setdefault("lamella_lora", {})[site.parameter] = hung
                undo.append(lambda owner=owner: owner.__dict__.pop("lamella_lora", None))  # type: ignore[misc]
        return undo

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V] of boundary outputs of the last layer."""
        self.outer()
        return self.skeleton.head(hidden_NH)


class SideBySide:
    """Models to be compared: `add` them, then `hidden`, then `logits` of each source.

    Args:
        dtype: that layers compute in.
        hold_bytes: a layer of more bytes has its experts read one at a time.
    """

    def __init__(self, dtype: torch.dtype, hold_bytes: int = HOLD_BYTES) -> None:
        self.room = Room(dtype, hold_bytes)
        self.sources: list[LayerSource] = []
        self._frames: dict[str, Frame] = {}

    def add(self, name: str, values: Values, adapter: Path | None = None) -> LayerSource:
        """One more model. Raises `UserError` as `LayerSource` and `load_config` do."""
        config = load_config(values.path, values.tied)
        structure = {key: value for key, value in config.to_dict().items() if key not in _NOT_STRUCTURE}
        key = json.dumps(structure, sort_keys=True, default=str)
        if key not in self._frames:
            self._frames[key] = Frame(Skeleton(config, self.room.dtype))
        source = LayerSource(name, values, self._frames[key], self.room, adapter)
        if self.sources:
            first = self.sources[0].skeleton
            for what in ("vocab_size", "num_hidden_layers"):
                here, there = getattr(source.skeleton.config, what), getattr(first.config, what)
                if here != there:
                    raise UserError(f"{name} has {what} {here}, {self.sources[0].name} has {there}",
                                    fix="compare models of one architecture", path=values.path)  # fmt: skip
        self.sources.append(source)
        return source

    @torch.no_grad()
    def hidden(
        self, batches: Sequence[PackedBatch], on_work: Callable[[int], None] = lambda _: None
    ) -> list[list[Tensor]]:
        """Last boundary of every micro-batch, [T, H], for every source.

        Args:
            on_work: called with the tokens of each micro-batch that has passed a layer of a source.

        Raises:
            UserError: a token beyond the vocabulary, values that are not finite (with model, layer and range).
        """
        multiple = PAD_TOKENS if self.room.dtype == torch.bfloat16 else 1
        padded = [batch.padded(multiple) for batch in batches]
        layouts = [AttentionLayout(batch) for batch in padded]
        calls: list[list[list[LayerCall]]] = []
        hidden: list[list[Tensor]] = []
        for source in self.sources:
            _check_ids(source, padded)
            source.outer()
            entered = [source.skeleton.prologue(batch.input_ids, batch.position_ids) for batch in padded]
            hidden.append([h for h, _ in entered])
            calls.append([c for _, c in entered])
        self._forget_outer()
        for i in range(len(self.sources[0].skeleton.layers)):
            for source, states, called in zip(self.sources, hidden, calls, strict=True):
                source.layer(i)
                for k, layout in enumerate(layouts):
                    before = states[k]
                    states[k] = run_layer(source.skeleton, layout, i, before, called[k][i])
                    _check_finite(source, i, before, states[k])
                    on_work(batches[k].tokens)
            self.room.let_go()
        return [[h[0, : batch.tokens] for h, batch in zip(states, batches, strict=True)] for states in hidden]

    def _forget_outer(self) -> None:
        for source in self.sources:
            source.forget_outer()
        self.room.forget_outer()

    def close(self) -> None:
        self.room.let_go()
        self._forget_outer()
        for source in self.sources:
            source.values.close()


def _check_ids(source: LayerSource, batches: Sequence[PackedBatch]) -> None:
    largest = max(int(batch.input_ids.max()) for batch in batches)
    vocabulary = int(source.skeleton.config.vocab_size)
    if largest >= vocabulary:
        raise UserError(f"token id {largest} is beyond the vocabulary of {vocabulary} of {source.name}",
                        fix="the tokenizer does not belong to this model", path=source.values.path)  # fmt: skip


def _check_finite(source: LayerSource, i: int, before: Tensor, after: Tensor) -> None:
    low, high = after.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        least, most = (float(x) for x in before.aminmax())
        raise UserError(
            f"{source.name}: layer {i} ({source.skeleton.prefix}.{i}) gives values that are not finite in "
            f"{str(source.room.dtype).removeprefix('torch.')}; its input is from {least:.4g} to {most:.4g}",
            fix="look for broken weights in that layer (`lamella store verify`), or compute in fp32", path=source.values.path,
        )  # fmt: skip
