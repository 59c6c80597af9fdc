"""One optimizer step of a walk: groups of micro-batches forward and back through this rank's layers.

A rank alone has one group and all layers. In a pipeline the boundary of a micro-batch comes from the rank that holds the
layers before, its gradient from the one that holds the layers after; what comes is expected ahead of its turn, and what goes
is sent beside the next work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamella.engine.stages import BACKWARD_TAG, BARE_TAG, FORWARD_TAG, Peers, Pending, RankWork, Task
from lamella.errors import RunFailed
from lamella.ranks.beats import PULSE
from lamella.trace.recorder import RECORDER

if TYPE_CHECKING:
    from lamella.engine.walk import Item, Walk

AHEAD = 2
"""Actions whose transfers are expected before their turn."""


@dataclass
class StepOutput:
    """What one optimizer step's walk found.

    Attributes:
        loss_sum: cross-entropy summed over the label tokens of these batches (nats).
        label_tokens: how many label tokens these batches hold.
        aux: router balancing loss of these batches' tokens, not multiplied by its coefficient; 0 for dense models.
        peaks: largest |hidden state| after each layer; NaN or infinite where a layer's output was.
        start: loss per label token of the first micro-batch without (`base`) and with the adapter (`adapter`), when it
            was asked for.
        flops: useful floating-point operations of these batches (see `engine.flops`).
    """

    loss_sum: float
    label_tokens: int
    aux: float
    peaks: list[float]
    start: dict[str, float] | None = None
    flops: float = 0.0

    def first_bad_layer(self) -> int | None:
        """First layer whose output was not finite, or None."""
        for i, peak in enumerate(self.peaks):
            if not (peak < float("inf")):
                return i
        return None


@dataclass
class Routing:
    """Expert counts and probability sums over all MoE layers and tokens of the step."""

    count_E: Tensor | None = None
    probability_E: Tensor | None = None
    rows: int = 0

    def add(self, logits: Tensor, top_k: int, chosen_TK: Tensor | None = None) -> None:
        """`chosen_TK`: the experts the router chose; None: those with the largest logits."""
        probability = torch.softmax(logits.detach().float(), dim=-1)
        if chosen_TK is None:
            chosen_TK = probability.topk(top_k, dim=-1).indices
        count = torch.zeros(probability.shape[-1], dtype=torch.float64, device=chosen_TK.device)
        count.scatter_add_(0, chosen_TK.flatten(), torch.ones_like(chosen_TK.flatten(), dtype=torch.float64))
        self.count_E = count if self.count_E is None else self.count_E + count
        summed = probability.double().sum(0)
        self.probability_E = summed if self.probability_E is None else self.probability_E + summed
        self.rows += logits.shape[0]

    def loss(self) -> float:
        """Switch Transformers' balancing loss (Fedus et al. 2021, eq. 4-6) over all layers and tokens together."""
        if self.count_E is None or self.probability_E is None:
            return 0.0
        experts = self.count_E.numel()
        return float(experts * (self.count_E / self.rows) @ (self.probability_E / self.rows))


@dataclass
class _Passing:
    """A task on its way: its micro-batch in the walk, the gradient at its last boundary, and what is expected for it."""

    task: Task
    item: Item
    gradient: Tensor | None = None
    bare: Item | None = None
    coming: dict[int, tuple[Tensor, Pending]] = field(default_factory=dict)


class Transfers:
    """Boundaries and their gradients between this rank and its neighbours.

    On the wire a micro-batch has its own tokens alone: how far it is filled up is each device's own affair.
    """

    def __init__(self, walk: Walk, peers: Peers | None) -> None:
        self._walk, self._peers = walk, peers
        self._sent: list[tuple[Pending, Tensor]] = []
        self._expected: dict[int, tuple[Tensor, Pending]] = {}

    @property
    def peers(self) -> Peers:
        if self._peers is None:
            raise RunFailed(
                "a step with several stages needs several ranks", fix="report this: it is a fault of the engine"
            )
        return self._peers

    def expect(self, task: Task, source: int, kind: int) -> None:
        """Be ready to receive; nothing to do when it is expected already."""
        tag = task.tag(kind)
        if tag not in self._expected:
            config = self._walk.skeleton.config
            shape = (1, task.batch.tokens, int(config.hidden_size))
            out = torch.empty(shape, dtype=self._walk.skeleton.dtype, device=self._walk.weights.device)
            self._expected[tag] = (out, self.peers.receive(out, source, tag))

    def take(self, task: Task, source: int, kind: int, filled_tokens: int) -> Tensor:
        """What was sent, [1, filled_tokens, H], zero beyond the micro-batch's own tokens."""
        self.expect(task, source, kind)
        out, pending = self._expected.pop(task.tag(kind))
        pending.wait()
        if filled_tokens == out.shape[1]:
            return out
        filled = out.new_zeros(1, filled_tokens, out.shape[2])
        filled[:, : out.shape[1]] = out
        return filled

    def give(self, tensor: Tensor, task: Task, ranks: tuple[int, ...], kind: int) -> None:
        """Send [1, T, H] to these ranks beside the next work."""
        own = tensor.detach()[:, : task.batch.tokens].contiguous()
        self._sent += [(self.peers.send(own, rank, task.tag(kind)), own) for rank in ranks]

    def finish(self) -> None:
        """Wait until all has been sent."""
        for pending, _ in self._sent:
            pending.wait()
        self._sent.clear()


class StepRun:
    """A step under way (see `Walk.step` for the arguments)."""

    def __init__(
        self, walk: Walk, work: RankWork, peers: Peers | None, *, step_index: int, label_tokens: int, keep_bytes: int,
        aux_coef: float, beside_base: bool,
    ) -> None:  # fmt: skip
        assert walk.adapter is not None, "no adapter attached"
        self.walk, self.work = walk, work
        self.adapter, self.first_trained = walk.adapter, walk.adapter.first_layer
        self.step_index, self.label_tokens, self.aux_coef = step_index, label_tokens, aux_coef
        self.keep_bytes, self.beside_base = keep_bytes, beside_base
        self.transfers = Transfers(walk, peers)
        self.passing: dict[int, _Passing] = {}
        self.keep: bool | None = None
        self.routing = Routing()
        self.peaks = torch.zeros(len(walk.skeleton.layers), device=walk.weights.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=walk.weights.device)
        self.start: dict[str, float] | None = None
        self.backs_left = sum(action.kind == "B" for action in work.actions)

    @property
    def trains(self) -> bool:
        """Some layer up to this rank's last one has an adapter, so gradients come here."""
        return self.first_trained < self.work.last

    @property
    def sends_back(self) -> bool:
        return self.first_trained < self.work.first

    def run(self) -> StepOutput:
        walk, work = self.walk, self.work
        walk.unhang_all()
        walk.boundaries.clear()
        walk.gradients.clear()
        trained = work.last - max(self.first_trained, work.first)
        tokens = [task.batch.tokens for task in work.tasks]
        self.keep = walk.agreed(walk.keeps(tokens, self.keep_bytes, max(trained, 0)))
        for at, action in enumerate(work.actions):
            for coming in work.actions[at : at + AHEAD]:
                self._expect(coming.kind, coming.group)
            (self._forward if action.kind == "F" else self._backward)(action.group)
        self.transfers.finish()
        walk.gradients.step_done(self.adapter)
        walk.unhang_all()
        walk.steps_kept += bool(self.keep)
        walk.steps_recomputed += not self.keep
        last = work.last == len(walk.skeleton.layers)
        count = sum(int(t.batch.score_tokens.numel()) for t in work.tasks if last and t.speaks)
        return StepOutput(float(self.loss), count, self.routing.loss(), self.peaks.tolist(), self.start)

    def _expect(self, kind: str, group: int) -> None:
        for task in self.work.groups[group]:
            if kind == "F" and task.source is not None:
                self.transfers.expect(task, task.source, FORWARD_TAG)
                if self._is_bare(task):
                    self.transfers.expect(task, task.source, BARE_TAG)
            elif kind == "B" and task.targets and self.trains:
                self.transfers.expect(task, task.targets[0], BACKWARD_TAG)

    def _is_bare(self, task: Task) -> bool:
        """The step's first micro-batch goes through the bare base too, when that is asked for."""
        return self.beside_base and task.number == 0

    def _enter(self, task: Task) -> _Passing:
        with RECORDER.span("compute", "embed"):
            item = self.walk.enter(task.batch, self.step_index)
            item.number = task.number
            passing = _Passing(task, item)
            if self._is_bare(task):
                passing.bare = self.walk.enter(task.batch, None)
        if task.source is not None:
            filled = item.batch.tokens
            item.hidden = self.transfers.take(task, task.source, FORWARD_TAG, filled)
            if passing.bare is not None:
                passing.bare.hidden = self.transfers.take(task, task.source, BARE_TAG, filled)
        return passing

    def _forward(self, group: int) -> None:
        walk, work = self.walk, self.work
        passing = [self._enter(task) for task in work.groups[group]]
        self.passing |= {p.task.number: p for p in passing}
        if not passing:
            walk.weights.pass_by(range(work.first, work.last))
            return
        for i in range(work.first, work.last):
            begin_s = self.walk.pace.clock()
            walk.weights.bind(i)
            PULSE.beat(doing=f"layer {i}, forward")
            with RECORDER.span("compute", f"forward {i}"):
                for p in passing:
                    if p.bare is not None:
                        walk.forward_one(p.bare, i, False, False)
                walk.hang(i, grad=True)
                for p in passing:
                    if self.keep is None and i >= self.first_trained:
                        self.keep = self._measure_and_decide(p.item, i)
                    router = walk.forward_one(p.item, i, i >= self.first_trained, bool(self.keep))
                    if router is not None:
                        self.routing.add(router, walk.top_k, walk.chosen_TK)
                    self.peaks[i] = torch.maximum(self.peaks[i], walk.peak(p.item.hidden))
                if not self.keep and i < work.last - 1:
                    walk.unhang(i)
                walk.pace.stretch(walk.pace.clock() - begin_s)
        for p in passing:
            self._hand_on(p)

    def _measure_and_decide(self, item: Item, layer: int) -> bool:
        self.walk.measure_saved(item, layer)
        trained = self.work.last - max(self.first_trained, self.work.first)
        tokens = [task.batch.tokens for task in self.work.tasks]
        return bool(self.walk.agreed(bool(self.walk.keeps(tokens, self.keep_bytes, trained))))

    def _hand_on(self, p: _Passing) -> None:
        """To the next stage, or to the head for loss and gradient."""
        task = p.task
        if task.targets:
            if task.speaks:
                self.transfers.give(p.item.hidden, task, task.targets, FORWARD_TAG)
                if p.bare is not None:
                    self.transfers.give(p.bare.hidden, task, task.targets, BARE_TAG)
            p.bare = None
            return
        begin_s = self.walk.pace.clock()
        PULSE.beat(doing="head")
        with RECORDER.span("compute", "head"):
            total, p.gradient = self.walk.loss_and_gradient(p.item, self.label_tokens)
            if p.bare is not None:
                labels = max(int(p.bare.batch.score_tokens.numel()), 1)
                base = float(self.walk.loss_and_gradient(p.bare, self.label_tokens)[0])
                self.start = {"base": base / labels, "adapter": float(total) / labels}
                p.bare = None
            if task.speaks:
                self.loss += total
            self.walk.pace.stretch(self.walk.pace.clock() - begin_s)

    def _backward(self, group: int) -> None:
        walk, work = self.walk, self.work
        self.backs_left -= 1
        passing = [self.passing.pop(task.number) for task in work.groups[group]]
        if not self.trains:
            return
        if not passing:
            walk.weights.pass_by(reversed(range(max(work.first, self.first_trained), work.last)))
            return
        for p in passing:
            if p.task.targets:
                p.gradient = self.transfers.take(p.task, p.task.targets[0], BACKWARD_TAG, p.item.batch.tokens)
        for i in reversed(range(max(work.first, self.first_trained), work.last)):
            begin_s = self.walk.pace.clock()
            walk.weights.bind(i)
            PULSE.beat(doing=f"layer {i}, backward")
            with RECORDER.span("compute", f"backward {i}"):
                walk.hang(i, grad=True)
                for p in passing:
                    assert p.gradient is not None
                    p.gradient = walk.backward_one(
                        p.item, i, p.gradient, self.routing, self.aux_coef, i > self.first_trained
                    )
                walk.gradients.layer_done(i)
                if not self.keep or not self.backs_left:  # kept graphs of other groups need the leaves
                    walk.unhang(i)
                walk.pace.stretch(walk.pace.clock() - begin_s)
        for p in passing:
            if p.task.back_to and self.sends_back and p.task.speaks:
                assert p.gradient is not None
                self.transfers.give(p.gradient, p.task, p.task.back_to, BACKWARD_TAG)


def evaluate(walk: Walk, work: RankWork) -> float:
    """Forward passes of a step's groups alone, with the adapter as it is: the summed cross-entropy of the micro-batches
    that end here and that this rank speaks for."""
    transfers = Transfers(walk, walk.peers)
    total = 0.0
    order = [action.group for action in work.actions if action.kind == "F"]
    with torch.no_grad():
        walk.unhang_all()
        for at, group in enumerate(order):
            for coming in order[at : at + AHEAD]:
                for task in work.groups[coming]:
                    if task.source is not None:
                        transfers.expect(task, task.source, FORWARD_TAG)
            tasks = work.groups[group]
            items = [walk.enter(task.batch, None) for task in tasks]
            for task, item in zip(tasks, items, strict=True):
                if task.source is not None:
                    item.hidden = transfers.take(task, task.source, FORWARD_TAG, item.batch.tokens)
            for i in range(work.first, work.last) if tasks else ():
                walk.weights.bind(i)
                walk.hang(i, grad=False)
                for item in items:
                    walk.forward_one(item, i, False, False)
                walk.unhang(i)
            for task, item in zip(tasks, items, strict=True):
                if task.targets and task.speaks:
                    transfers.give(item.hidden, task, task.targets, FORWARD_TAG)
                elif not task.targets and task.speaks:
                    total -= float(walk.log_probabilities(item.hidden[0], item.batch).double().sum())
        transfers.finish()
    return total
