"""What the other rooms see of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lamella.adapter import Adapter
from lamella.engine.device import activation_room, prepare
from lamella.engine.flops import FlopCounter
from lamella.engine.gather import Peers as GatherPeers
from lamella.engine.memory import predict
from lamella.engine.pace import Pace
from lamella.engine.stages import RankWork, whole_work
from lamella.engine.step import StepOutput, evaluate
from lamella.engine.walk import Walk
from lamella.engine.weights import LayerWeights
from lamella.errors import UserError
from lamella.forecast.peak import MemoryPlan
from lamella.forecast.residency import least_bytes
from lamella.hardware.allocator import is_tuned
from lamella.hardware.matmul import MatmulRate, matmul_rate, native_dtype
from lamella.hardware.memory import memory_limit_bytes
from lamella.kernels import backend, cuda_backend, rows
from lamella.models import attention, experts
from lamella.models.attention import KVCache
from lamella.models.divided import Group, divide
from lamella.models.layout import PackedBatch, pack_rows
from lamella.models.skeleton import Skeleton, load_config
from lamella.store.reader import Store
from lamella.units import format_bytes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Generation:
    """One generated answer: token ids without the stop token, and why it ended ("stop" or "length")."""

    ids: list[int]
    finish: str


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bf16 where the device multiplies it natively, else fp32.

    Raises:
        UserError: fp16 on a CPU (its range is too small to train in without loss scaling, and it is slow there).
    """
    if name == "auto":
        return native_dtype(device)
    if name == "fp16" and device.type == "cpu":
        raise UserError("compute.dtype is fp16 on a CPU", fix="use bf16 or fp32 there")
    return DTYPES[name]


class Engine:
    """A model from a store on one device, with or without an adapter.

    Attributes:
        skeleton: the weightless model (for `Adapter.create` and `Adapter.load`).
        store: where the weights are.
        adapter: the adapter in use, or None.
    """

    def __init__(
        self,
        store: Store,
        skeleton: Skeleton,
        walk: Walk,
        *,
        keep_bytes: int,
        recompute: str,
        budget_bytes: int | None = None,
    ) -> None:
        self.store, self.skeleton, self.walk = store, skeleton, walk
        self.keep_bytes, self.recompute, self.budget_bytes = keep_bytes, recompute, budget_bytes
        self.plan: MemoryPlan | None = None

    @classmethod
    def open(
        cls, store: Store, adapter: Adapter | None = None, *, dtype: str = "auto", device: str = "cpu",
        budget_bytes: int | None = None, recompute: str = "auto", threads: int | None = None, seed: int = 0,
        fused: bool = True, ranks_here: int = 1, sharers: int | None = None,
        pace: float | Sequence[tuple[int, float]] = 1.0,
    ) -> Engine:  # fmt: skip
        """Build the model of a store.

        Args:
            dtype: "auto", "bf16", "fp16" or "fp32"; what layers compute in.
            budget_bytes: for base weights and kept activations, and after `fit` for all that steps take; None: all packed
                layers in memory, and up to half the machine's memory for kept activations. On CUDA it is device memory,
                None is a share of what is free, and half of what weights leave of it is for boundary activations: the
                others go to host memory.
            recompute: "always" recomputes each layer going back, "never" keeps all activations, "auto" keeps them when
                they fit the budget.
            threads: CPU threads; None: torch's own choice (all cores, or OMP_NUM_THREADS).
            seed: of dropout.
            ranks_here: ranks of the run on this host; each counts on its part of the host's memory.
            sharers: those of them that hold the same layers: above 1 they read one copy of the base, and each counts its
                part of that (bytes / sharers) in its budget; None: all.
            fused: let fused kernels stand in for the family's modules that they are proven to equal (on a CPU that has
                the instructions).
            pace: how many times as long computing is to take (see `Pace`).

        Raises:
            UserError: unknown device, family or dtype, a store that does not fit the model, too small a budget.
        """
        try:
            where = torch.device(device)
        except RuntimeError as error:
            raise UserError(f"compute.device {device!r} is not a device", fix='use "cpu" or "cuda"') from error
        if where.type not in ("cpu", "cuda") or (where.type == "cpu" and where.index):
            raise UserError(f"compute.device {device!r} is not supported", fix='use "cpu" or "cuda"')
        if where.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"compute.device is {device!r}, but torch sees no CUDA device", fix='use "cpu"')
        where = prepare(where)
        if threads is not None:
            torch.set_num_threads(threads)
        config = load_config(store.path, store.manifest.tie_word_embeddings)
        skeleton = Skeleton(config, resolve_dtype(dtype, where))
        if fused and where.type == "cpu" and rows.supported():
            skeleton.fuse()
        weights = LayerWeights(store, skeleton, where, budget_bytes, ranks_here=ranks_here, sharers=sharers)
        boundary_bytes = None
        if where.type == "cuda":
            room = activation_room(where) if budget_bytes is None else budget_bytes - weights.residency.total_bytes
            boundary_bytes = room = max(room, 0) // 2
        elif budget_bytes is None:
            room = memory_limit_bytes() // (2 * ranks_here)
        else:
            room = budget_bytes - weights.residency.total_bytes
        keep = {"always": 0, "never": 1 << 62, "auto": max(room, 0)}[recompute]
        engine = cls(store, skeleton, Walk(skeleton, weights, seed, boundary_bytes), keep_bytes=keep, recompute=recompute,
                     budget_bytes=budget_bytes)  # fmt: skip
        engine.walk.pace = Pace(pace)
        if adapter is not None:
            engine.attach(adapter)
        return engine

    @property
    def config(self) -> PretrainedConfig:
        return self.skeleton.config

    @property
    def adapter(self) -> Adapter | None:
        return self.walk.adapter

    def attach(self, adapter: Adapter | None) -> None:
        """Use this adapter from now on; None: the bare base.

        Raises:
            UserError: the adapter was trained on another base (its files name the base's fingerprint).
        """
        if adapter is not None:
            self.check_base(adapter.origin)
        self.walk.attach(adapter)
        self._flops = FlopCounter(self.skeleton, adapter.sites.values() if adapter is not None else ())

    def check_base(self, facts: Mapping[str, Any]) -> None:
        """See that an adapter with these facts (of its `lamella_adapter.json`) was trained on this base, where they say so.

        Raises:
            UserError: it was not.
        """
        trained_on, here = facts.get("base_fingerprint"), self.store.manifest.source_fingerprint
        if trained_on is not None and trained_on != here:
            raise UserError(
                f"the adapter was trained on a base with fingerprint {trained_on}, the store's is {here}",
                fix="use the store it was trained on; to try it anyway, remove base_fingerprint from lamella_adapter.json",
            )

    def divide(self, group: Group | None, shares: Sequence[float] = ()) -> None:
        """Hold and compute a part of every layer from now on, with the other ranks of a group.

        All ranks of the group divide at the same time and then take the same steps (and evaluate the same batches). What
        all of them find alike (loss, label tokens, balancing loss) counts where a task `speaks`: in a step of plain
        batches on the group's first rank. Each rank's gradients are its part of the sum over the group, zero where others
        hold the weight.

        Args:
            group: this rank's (`ranks.group.Group`); None: undo. The same as before: nothing to do.
            shares: of the work, one for each rank of the group.

        Raises:
            UserError: shares that are not one positive or zero number for each rank.
        """
        now = self.walk.division
        if now is None and group is None:
            return
        if now is not None and group is not None and (now.group.members, now.shares) == (group.members, tuple(shares)):
            return
        if group is not None and (len(shares) != len(group.members) or min(shares) < 0 or not sum(shares) > 0):
            raise UserError(f"split.shares {list(shares)} do not fit a group of {len(group.members)} ranks",
                            fix="give one share for each rank, none below 0 and not all 0")  # fmt: skip
        if now is not None:
            now.undo()
        division = None
        if group is not None:
            division = divide(self.skeleton.layers, self.skeleton.prefix, group, shares)
        self.walk.weights.divide({} if division is None else division.cuts, () if division is None else division.absent)
        self.walk.divide(division)

    def fit(self, lengths: Sequence[Sequence[int]], positions: Sequence[int]) -> MemoryPlan | None:
        """Make steps of these micro-batches fit the budget (as `memory.predict` takes them), or refuse before the first.

        The budget is for all that the process holds beyond imports and libraries: what a step takes besides packed layers
        is set aside, as many layers as fit the rest are held, and what is left may keep activations. A layer in a map that
        ranks of this host share counts with this rank's part. None without a budget, and on a device, where the budget is
        the device's.

        Raises:
            UserError: not even with every layer streamed do these steps fit; names the parts.
        """
        budget, weights = self.budget_bytes, self.walk.weights
        if budget is None or self.adapter is None or weights.device.type != "cpu":
            return None
        plan = predict(self.walk, lengths, positions, kept=self.recompute == "never", imports_bytes=0,
                       state_on_disk=self.adapter.pages is not None, tuned_heap=is_tuned())  # fmt: skip
        sizes = weights.layer_bytes()
        fixed = weights.residency.fixed_bytes
        self.plan = plan
        aside = plan.beyond_program_bytes - weights.residency.total_bytes
        least = least_bytes(aside, fixed, sizes, weights.sharers)
        if least > budget:
            raise UserError(
                f"memory.budget is {format_bytes(budget)}, but a step of {sum(map(sum, lengths))} tokens in "
                f"{len(lengths)} micro-batches takes {format_bytes(least)} beyond the program itself, with every layer "
                "streamed; at its peak (" + plan.moment + ") the parts are\n    " + "\n    ".join(plan.lines()),
                fix=f"set memory.budget to {format_bytes(least * 1.05)} or more, or lower train.micro_batch_tokens, "
                "train.tokens_per_step or lora.rank",
            )
        weights.limit(budget - aside)
        if self.recompute == "auto":
            self.keep_bytes = max(budget - aside - weights.residency.total_bytes, 0)
        return plan

    def matmul_rate(self) -> MatmulRate:
        """What this device multiplies in the compute dtype, measured once per process: utilisation is a share of it."""
        return matmul_rate(self.walk.weights.device, self.skeleton.dtype)

    def assign(self, first: int, last: int, sharers: int | None = None) -> None:
        """Hold layers [first, last) from now on (a stage of a pipeline); nothing to do when they are held already.

        Args:
            sharers: ranks of this host that hold these layers; None: as many as before.
        """
        weights = self.walk.weights
        if weights.layers != range(first, last):
            weights.assign(range(first, last), self.budget_bytes, sharers)

    def step(
        self, given: Sequence[PackedBatch] | RankWork, *, step_index: int, label_tokens: int, aux_coef: float = 0.0,
        beside_base: bool = False,
    ) -> StepOutput:  # fmt: skip
        """All micro-batches through all layers and back; or this rank's part of that (`stages.RankWork`).

        The loss is the summed cross-entropy divided by `label_tokens` (the whole step's, over all devices).
        Gradients are added to the adapter parameters' `.grad`, fp32. With `beside_base` the first micro-batch's loss
        with and without the adapter comes back too, for one more forward pass of it and no further reading of layers.
        """
        if self.skeleton.dtype == torch.float16:
            raise UserError("compute.dtype fp16 cannot train: its gradients underflow without loss scaling",
                            fix="use bf16 or fp32")  # fmt: skip
        division = self.walk.division
        speaks = division is None or division.first
        work = given if isinstance(given, RankWork) else whole_work(given, len(self.skeleton.layers), speaks)
        weights = self.walk.weights
        nothing = not isinstance(given, RankWork) and not given
        if nothing and self.walk.adapter is not None:
            for name, p in self.walk.adapter.parameters().items():
                self.walk.adapter.add_gradient(name, torch.zeros_like(p))
        if nothing and weights.gather is None:
            return StepOutput(0.0, 0, 0.0, [])
        self.walk.pace.begin_step(step_index)
        again = self.walk.steps_recomputed
        with weights.together():
            out = self.walk.step(
                work, step_index=step_index, label_tokens=label_tokens, keep_bytes=self.keep_bytes, aux_coef=aux_coef,
                beside_base=beside_base,
            )  # fmt: skip
        layers = range(work.first, work.last)
        recomputed = range(max(self._flops.first, work.first), work.last) if self.walk.steps_recomputed > again else ()
        batches = [task.batch for task in work.tasks if task.speaks or division is not None]
        flops = self._flops.step(batches, recomputed, layers).total
        if division is None:
            return replace(out, flops=flops)
        return replace(out, flops=flops * division.share, aux=out.aux if division.first else 0.0)

    def evaluate(self, work: RankWork) -> float:
        """Summed cross-entropy over the label tokens of the micro-batches whose last stage is this rank's, forward only."""
        return evaluate(self.walk, work)

    def gather_with(self, peers: GatherPeers) -> None:
        """Read streamed layers together with these ranks from the next step on; all of them call it, after `fit`."""
        self.walk.weights.gather_with(peers)

    def score(self, batches: Sequence[PackedBatch], on_layer: Callable[[int], None] | None = None) -> list[Tensor]:
        """Log-probability of every scored pair: fp32 [N] per batch. `on_layer` is called after each layer."""
        hidden = self.walk.forward(batches, on_layer=on_layer)
        return [
            self.walk.log_probabilities(h, b.to(self.walk.weights.device)).cpu()
            for h, b in zip(hidden, batches, strict=True)
        ]

    def loss_sums(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Cross-entropy summed per sequence: fp64 [S] per batch."""
        sums = []
        for batch, logp_N in zip(batches, self.score(batches), strict=True):
            sequence_N = torch.searchsorted(batch.starts, batch.score_positions, right=True) - 1
            sums.append(
                torch.zeros(len(batch.row_ids), dtype=torch.float64).index_add_(0, sequence_N, -logp_N.double())
            )
        return sums

    def logits(self, batch: PackedBatch, positions: Tensor | Sequence[int] | None = None) -> Tensor:
        """fp32 [n, V]: logits at these positions of the batch (default: all)."""
        (hidden_TH,) = self.walk.forward([batch])
        if positions is not None:
            hidden_TH = hidden_TH[torch.as_tensor(positions, device=hidden_TH.device)]
        with torch.no_grad():
            chunks = [self.skeleton.head(hidden_TH[a:b]).float() for a, b in self.walk.head_chunks(hidden_TH.shape[0])]
        return torch.cat(chunks).cpu()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: set[int],
        on_token: Callable[[int], None] | None = None,
    ) -> list[Generation]:  # fmt: skip
        """Greedy decoding of all prompts together, with a KV cache; each step walks all layers once.

        Args:
            prompts: token ids, none empty.
            stop_ids: ids that end an answer (they are not part of it).
            on_token: called after each step with the number of rows still generating.
        """
        rows = len(prompts)
        if rows == 0:
            return []
        cache = KVCache(rows, max(len(p) for p in prompts) + max_new_tokens)
        device = self.walk.weights.device
        batch = pack_rows([(list(p), []) for p in prompts])
        row_T = torch.repeat_interleave(torch.arange(rows), batch.starts[1:] - batch.starts[:-1])
        cache.expect(row_T.to(device), batch.position_ids.to(device), decoding=False)
        hidden_TH = self.walk.forward([batch], cache)[0][(batch.starts[1:] - 1).to(device)]
        answers: list[list[int]] = [[] for _ in range(rows)]
        finish = ["length"] * rows
        alive = list(range(rows))
        for _ in range(max_new_tokens):
            with torch.no_grad():
                chosen = torch.cat([self.skeleton.head(hidden_TH[a:b]).float().argmax(-1)
                                    for a, b in self.walk.head_chunks(hidden_TH.shape[0])]).tolist()  # fmt: skip
            survivors = []
            for row, token in zip(alive, chosen, strict=True):
                if token in stop_ids:
                    finish[row] = "stop"
                else:
                    answers[row].append(token)
                    survivors.append(row)
            alive = survivors
            if on_token is not None:
                on_token(len(alive))
            if not alive or len(answers[alive[0]]) >= max_new_tokens:
                break
            new = pack_rows([([answers[r][-1]], []) for r in alive])
            position = torch.tensor([len(prompts[r]) + len(answers[r]) - 1 for r in alive])
            step = PackedBatch(new.input_ids, position, new.visible_until, new.starts, new.score_positions, new.score_tokens,
                               new.row_ids)  # fmt: skip
            cache.expect(torch.tensor(alive, device=device), position.to(device), decoding=True)
            hidden_TH = self.walk.forward([step], cache)[0]
        return [Generation(ids, why) for ids, why in zip(answers, finish, strict=True)]

    def facts(self) -> dict[str, Any]:
        """What is in effect, for the receipt."""
        residency, device = self.walk.weights.residency, self.walk.weights.device
        cuda = device.type == "cuda"
        names = {v: k for k, v in DTYPES.items()}
        return {
            "device": str(self.walk.weights.device), "dtype": names[self.skeleton.dtype], "threads": torch.get_num_threads(),
            "kernels": cuda_backend() if cuda else backend(), "attention": attention.NAME,
            "attention_paths": sorted(attention.PATHS_USED), "experts": experts.NAME, "base_dropout": 0.0,
            "loss": "positions" if self.walk.head_weight is None else "vocabulary",
            "mixers": self.skeleton.mixer_facts(),
            "layers_pinned": len(residency.pinned), "boundary_bytes_spilled": self.walk.boundaries.spilled_bytes,
            "fused": {**self.skeleton.fused_facts(), "head": self.walk.head_is_plain},
            "layers_resident": len(residency.resident), "layers_streamed": len(residency.streamed),
            "fixed_bytes": residency.fixed_bytes, "packed_bytes": residency.packed_bytes, "slot_bytes": residency.slot_bytes,
            "base": self.walk.weights.base, "ranks_per_copy": self.walk.weights.sharers,
            "gather": self.walk.weights.gather.facts() if self.walk.weights.gather is not None else None,
            "budget_bytes": self.budget_bytes,
            "predicted_bytes": self.plan.beyond_program_bytes if self.plan is not None else None,
            "recompute": self.recompute, "steps_kept": self.walk.steps_kept,
            "steps_recomputed": self.walk.steps_recomputed, "saved_bytes_per_token_and_layer": self.walk.saved_bytes_per_token,
            "split": self._split_facts(),
            "tie_word_embeddings": self.store.manifest.tie_word_embeddings,
        }  # fmt: skip

    def _split_facts(self) -> dict[str, Any] | None:
        """How layers are divided among ranks, and what of their packed bytes this rank reads."""
        weights = self.walk.weights
        if self.walk.division is None:
            return None
        whole = sum(self.store.group_bytes(i) for i in weights.layers)
        return {**self.walk.division.facts(), "layer_bytes_read": sum(weights.layer_bytes()), "layer_bytes": whole}

    def expert_load(self) -> dict[str, list[int]]:
        """Tokens that each expert has seen since the adapter was attached: module -> a count per expert."""
        return {name: counts for name, counts in self.walk.expert_hits().items() if any(counts)}

    def close(self) -> None:
        self.walk.weights.close()
