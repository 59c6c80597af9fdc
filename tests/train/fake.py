"""A small language model of plain torch modules behind the engine's signatures: embedding, one adapted linear layer,
four adapted experts chosen by token id, head. Runs in milliseconds, so the loop can be killed and resumed at will.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from lamella.config import RunConfig, build_run_config
from lamella.errors import UserError
from lamella.models.layout import pack_rows
from lamella.ranks.group import Ranks
from lamella.train.loop import train_run
from lamella.train.parts import Base, Parts, StepRows
from lamella.units import parse_bytes

BASE_ROW = {"class": "attention", "format": "nf4", "dtype": "bfloat16", "count": 1, "parameters": 64, "bytes": 36}
VOCAB, HIDDEN, EXPERTS, RANK = 32, 8, 4, 2


@dataclass(frozen=True)
class Out:
    loss_sum: float
    aux: float
    label_tokens: int
    flops: float = 1e6

    def first_bad_layer(self) -> int | None:
        return None if math.isfinite(self.loss_sum) else 0


@dataclass
class Options:
    """What goes wrong, and where."""

    nan_rows: list[int] = field(default_factory=list)  # rows whose loss is NaN
    inf_grad_rows: list[int] = field(default_factory=list)  # rows that give an infinite gradient
    cut: list[str] = field(default_factory=list)  # parameters cut from autograd
    dead: list[str] = field(default_factory=list)  # parameters whose gradient is zero
    skip_expert: int = -1  # expert that never gets a token
    leak: bool = False  # the fresh adapter changes the loss
    spoil_saved: str = ""  # what is wrong with the saved adapter: "nan" or "other"
    no_label_rows: list[int] = field(default_factory=list)
    sleep_s: float = 0.0
    full_at_save: int = 0  # save in which the disk is full
    kill_in_save: int = 0  # save in which the process dies after its first file
    fail_rank: int = -1  # rank that raises in its third step
    scale_head: float = 1.0
    facts: dict = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # facts that the engine does not tell
    spoil_base_at: int = -1  # step (from 0) in which the base changes in memory
    stop_at: int = -1  # step (from 0) in which the process dies
    stuck_rank: int = -1  # rank that never ends its third step
    dropout: float = 0.0
    rows: int = 60
    label_counts: list[int] = field(default_factory=list)  # label tokens of each row, in place of 1 to 10
    row_losses: list[float] = field(default_factory=list)  # loss of each label token, by row
    hang_rank: int = -1  # rank that dies without a word in its third step
    verify: list[str] = field(default_factory=list)  # frozen tensors reported as changed
    seen: list[tuple[int, ...]] = field(default_factory=list)  # row ids of each step, as the engine saw them
    values: dict[str, list[float]] = field(default_factory=dict)  # scripted validation


class FakeAdapter:
    def __init__(self, config: RunConfig, kill_in_save: int = 0) -> None:
        self.config = config
        self.spoil, self.full_at_save = "", 0
        self.saves, self.kill_in_save = 0, kill_in_save
        g = torch.Generator().manual_seed(config.train.seed)

        def new(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=g) * 0.3)

        zero = torch.nn.Parameter
        self.p = {
            "attn.lora_A": new(RANK, HIDDEN),
            "attn.lora_B": zero(torch.zeros(HIDDEN, RANK)),
            "experts.lora_A": new(EXPERTS, RANK, HIDDEN),
            "experts.lora_B": zero(torch.zeros(EXPERTS, HIDDEN, RANK)),
        }

    def parameters(self):
        return self.p

    def save(self, folder: Path) -> None:
        tensors = {n: p.detach().clone() for n, p in self.p.items()}
        if self.spoil and folder.name == ".adapter.partial":
            tensors["attn.lora_A"][0, 0] = float("nan") if self.spoil == "nan" else 5.0
        save_file(tensors, folder / "adapter_model.safetensors")
        self.saves += 1
        if self.saves == self.kill_in_save:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.saves == self.full_at_save:
            raise OSError(errno.ENOSPC, "No space left on device")
        (folder / "adapter_config.json").write_text(json.dumps({"r": RANK}))

    def load_state(self, folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            for name, p in self.p.items():
                p.copy_(tensors[name])

    def settings(self):
        lora = self.config.lora
        return {
            "lora.rank": RANK, "lora.expert_rank": RANK, "lora.alpha": lora.alpha, "lora.scale": lora.alpha / lora.rank,
            "lora.dropout": lora.dropout, "lora.rslora": lora.rslora, "lora.targets": lora.targets,
        }  # fmt: skip

    def saved_settings(self, folder: Path):
        return self.settings() | {"lora.rank": json.loads((folder / "adapter_config.json").read_text())["r"]}


class FakeEngine:
    def __init__(self, config: RunConfig, options: Options, ranks: Ranks) -> None:
        self.config = config
        g = torch.Generator().manual_seed(7)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=g)
        self.w = torch.randn(HIDDEN, HIDDEN, generator=g) * 0.3
        self.head = torch.randn(VOCAB, HIDDEN, generator=g) * options.scale_head
        self.options, self.ranks = options, ranks
        self.adapter: FakeAdapter | None = None
        self.calls = 0

    def losses(self, batch, step_index: int | None) -> torch.Tensor:
        p = self.adapter.p if self.adapter else None
        x = self.embed[batch.input_ids]
        if self.options.dropout and step_index is not None:
            for s, row in enumerate(batch.row_ids):
                g = torch.Generator().manual_seed(step_index * 1000 + row)
                a, b = int(batch.starts[s]), int(batch.starts[s + 1])
                keep = torch.rand((b - a, HIDDEN), generator=g) >= self.options.dropout
                x[a:b] *= keep / (1 - self.options.dropout)
        h = x @ self.w.T
        expert = batch.input_ids % EXPERTS
        if self.options.skip_expert >= 0:
            expert = torch.where(expert == self.options.skip_expert, (expert + 1) % EXPERTS, expert)
        if p is not None:
            used = {n: t.detach() if n in self.options.cut else t for n, t in p.items()}
            h = h + x @ used["attn.lora_A"].T @ used["attn.lora_B"].T
            down = torch.einsum("th,trh->tr", x, used["experts.lora_A"][expert])
            h = h + torch.einsum("tr,thr->th", down, used["experts.lora_B"][expert])
        z = torch.tanh(h) @ self.head.T
        return torch.nn.functional.cross_entropy(z[batch.score_positions], batch.score_tokens, reduction="none")

    def step(self, batches, *, step_index: int, label_tokens: int, aux_coef: float) -> Out:
        self.calls += 1
        if self.options.fail_rank == self.ranks.rank and step_index == 2:
            raise UserError("the disk of this rank is gone")
        if self.options.hang_rank == self.ranks.rank and step_index == 2:
            time.sleep(0.3)  # its last beat is on its way
            os.kill(os.getpid(), signal.SIGKILL)
        if self.options.stop_at == step_index:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.options.spoil_base_at == step_index:
            self.w[3, 3] += 1
        if self.options.stuck_rank == self.ranks.rank and step_index == 2:
            time.sleep(600)
        time.sleep(self.options.sleep_s)
        total, counted = 0.0, 0
        for batch in batches:
            losses = self.losses(batch, step_index)
            if self.options.row_losses:
                owner = torch.bucketize(batch.score_positions, batch.starts[1:], right=True)
                fixed = torch.tensor([self.options.row_losses[row] for row in batch.row_ids])
                losses = losses - losses.detach() + fixed[owner]
            loss = losses.sum()
            if set(batch.row_ids) & set(self.options.nan_rows):
                loss = loss * float("nan")
            if loss.requires_grad:
                (loss / label_tokens).backward()
            total += float(loss.detach())
            counted += batch.score_tokens.numel()
            if set(batch.row_ids) & set(self.options.inf_grad_rows):
                self.adapter.p["attn.lora_B"].grad[0, 0] = float("inf")
        for name in self.options.dead:
            self.adapter.p[name].grad.zero_()
        self.options.seen.append(tuple(row for batch in batches for row in batch.row_ids))
        return Out(total, 0.0, counted)

    def loss_sums(self, batches):
        with torch.no_grad():
            result = []
            for batch in batches:
                sums = torch.zeros(len(batch.row_ids), dtype=torch.float64)
                owner = torch.bucketize(batch.score_positions, batch.starts[1:], right=True)
                result.append(sums.index_add_(0, owner, self.losses(batch, None).double()))
            return result

    def matmul_rate(self):
        return SimpleNamespace(best=1e12)

    def expert_load(self):
        return {"layer.experts": [self.calls, 0]}

    def close(self) -> None:
        self.closed = True

    def facts(self):
        budget = self.config.memory.budget
        facts = {"dtype": "fp32", "device": "cpu", "recompute": self.config.memory.recompute, "kernels": "torch",
                 "budget_bytes": None if budget is None else parse_bytes(budget), "steps_kept": self.calls,
                 "steps_recomputed": 0, **self.options.facts}  # fmt: skip
        return {name: value for name, value in facts.items() if name not in self.options.left_out}

    def in_memory(self) -> str:
        return f"{float(self.w.sum())!r}"


class FakeData:
    """Rows of 4 to 14 tokens with 1 to 10 labels at the end."""

    def __init__(self, config: RunConfig, options: Options) -> None:
        self.config, self.options = config, options
        rng = random.Random(3)
        self.encoded = []
        counts = options.label_counts or [1 + (row * 7) % 10 for row in range(options.rows)]
        for row, count in enumerate(counts):
            labels = 0 if row in options.no_label_rows else count
            ids = [rng.randrange(VOCAB) for _ in range(4 + labels)]
            self.encoded.append((ids, [False] * 4 + [True] * labels))
        self.per_step = config.train.rows_per_step or 4
        self.per_epoch = -(-len(self.encoded) // self.per_step)
        self.steps = config.train.steps or round(config.train.epochs * self.per_epoch)
        self.fingerprint = f"fake-{options.rows}"

    def rows_of(self, step_index: int) -> StepRows:
        epoch, k = divmod(step_index, self.per_epoch)
        order = list(range(len(self.encoded)))
        random.Random(self.config.train.seed * 1000 + epoch).shuffle(order)
        start = k * self.per_step
        return StepRows(epoch, start, tuple(order[start : start + self.per_step]))

    def tokens(self, row: int) -> int:
        return len(self.encoded[row][0])

    def label_tokens(self, row: int) -> int:
        return sum(self.encoded[row][1])

    def pack(self, rows):
        batches, group = [], []
        for row in rows:
            if group and sum(map(self.tokens, [*group, row])) > self.config.train.micro_batch_tokens:
                batches.append(group)
                group = []
            group.append(row)
        return [pack_rows([self.encoded[r] for r in g], g) for g in [*batches, group] if g]

    def report(self):
        return {"rows": len(self.encoded)}

    def decoded_labels(self, count: int):
        return [
            {"row": r, "label_tokens": self.label_tokens(r), "labels": [str(self.encoded[r][0][4:])]}
            for r in range(min(count, len(self.encoded)))
        ]


class Scripted:
    """Validation whose values are given, by step."""

    def __init__(self, values: dict[str, list[float]]) -> None:
        self.values = {name: list(v) for name, v in values.items()}
        self.names = tuple(values)

    def measure(self):
        return {name: v.pop(0) for name, v in self.values.items()}


class LossValidation:
    names = ("loss",)

    def __init__(self, engine: FakeEngine, data: FakeData) -> None:
        self.engine, self.data = engine, data

    def measure(self):
        rows = range(8)
        sums = self.engine.loss_sums(self.data.pack(list(rows)))
        return {"loss": float(sum(s.sum() for s in sums)) / sum(self.data.label_tokens(r) for r in rows)}


def assembler(options: Options):
    def assemble(config: RunConfig, ranks: Ranks, fresh: bool) -> Parts:
        engine, data = FakeEngine(config, options, ranks), FakeData(config, options)
        adapter = FakeAdapter(config, options.kill_in_save)
        start = {}
        if fresh:
            batch = data.pack(data.rows_of(0).rows)[:1]
            n = max(batch[0].score_tokens.numel(), 1)
            start["base"] = float(engine.loss_sums(batch)[0].sum()) / n
        engine.adapter = adapter
        if options.leak:
            adapter.p["attn.lora_B"].data.fill_(0.1)
        adapter.spoil, adapter.full_at_save = options.spoil_saved, options.full_at_save
        if fresh:
            start["adapter"] = float(engine.loss_sums(batch)[0].sum()) / n
        validator = None
        if config.validation.data:
            validator = Scripted(options.values) if options.values else LossValidation(engine, data)
        return Parts(
            engine=engine, adapter=adapter, data=data, vocab_size=VOCAB, validator=validator, start=start,
            base=Base("store-1", Path("store"), [BASE_ROW], lambda: options.verify, engine.in_memory),
            class_of=lambda name: "experts" if name.startswith("experts") else "attention",
        )  # fmt: skip

    return assemble


def make_config(runs_dir: Path, **sections) -> RunConfig:
    tree = {"store": "store", "runs_dir": str(runs_dir), "lora": {"rank": RANK}, **sections}
    tree["train"] = {"rows_per_step": 4, "warmup_steps": 2, "learning_rate": 0.01, **sections.get("train", {})}
    return build_run_config(tree)


def run(runs_dir: Path, options: Options | None = None, mode: str = "auto", **sections):
    return train_run(make_config(runs_dir, **sections), mode, assembler(options or Options()))
