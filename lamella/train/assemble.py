"""Opens what a run works with: store, rows, engine, adapter, validation."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash

from lamella.adapter import Adapter, SiteSpec
from lamella.adapter.layouts import LAYOUTS
from lamella.adapter.lora import active_experts
from lamella.adapter.pages import STATE_BYTES
from lamella.adapter.peft_format import load_adapter, load_values
from lamella.checkpoint.facts import num_routed_experts
from lamella.config import RunConfig
from lamella.console import notice, progress
from lamella.data.dataset import EncodedDataset, encode_dataset, iter_label_text
from lamella.data.encode import load_tokenizer
from lamella.data.steps import StepPlanner
from lamella.engine import Engine
from lamella.engine.memory import shape_of
from lamella.engine.weights import is_streamed
from lamella.errors import UserError
from lamella.files import file_checksum
from lamella.models.layout import PackedBatch
from lamella.models.skeleton import Skeleton, load_config
from lamella.ranks.group import Ranks
from lamella.ranks.place import place_of
from lamella.store.reader import Store
from lamella.train.asked import rounded
from lamella.train.limits import check_rows
from lamella.train.parts import Base, Parts, StepRows
from lamella.train.planned import plan_for_run
from lamella.train.spread import SplitRows
from lamella.train.state import check_validation
from lamella.units import format_bytes, parse_bytes

MEASURED = ("loss", "perplexity")


@dataclass(frozen=True)
class Rows:
    """The data set and its plan, as the loop sees them (`parts.TrainData`)."""

    dataset: EncodedDataset
    planner: StepPlanner
    steps: int
    micro_batch_tokens: int

    @cached_property
    def fingerprint(self) -> str:
        """Of all token ids and label masks, in order."""
        digest = xxhash.xxh3_128()
        for row in self.dataset.rows:
            digest.update(f"{row.row_id}:{row.tokens};".encode())
            digest.update(bytes(row.input_ids))
            digest.update(row.label_mask)
        return digest.hexdigest()

    def rows_of(self, step_index: int) -> StepRows:
        step = self.planner.step(step_index)
        return StepRows(step.epoch, step.first, step.rows)

    def tokens(self, row: int) -> int:
        return self.dataset.rows[row].tokens

    def label_tokens(self, row: int) -> int:
        return self.dataset.rows[row].label_tokens

    def pack(self, rows: Sequence[int]) -> list[PackedBatch]:
        return self.dataset.batches(self.micro_batch_tokens, rows)

    def report(self) -> dict[str, Any]:
        return self.dataset.report.to_dict()

    def decoded_labels(self, count: int) -> list[dict[str, Any]]:
        """What the first rows train on, as text; one string per stretch of label tokens."""
        return [
            {
                "row": row.row_id,
                "label_tokens": row.label_tokens,
                "labels": [text for trained, text in iter_label_text(row, self.dataset.encoder) if trained],
            }
            for row in self.dataset.rows[:count]
        ]


def check_metric(config: RunConfig) -> None:
    """Raises `UserError` when `validation.metric` is none that training measures, or there is nothing to measure."""
    check_validation(config.validation)
    if config.validation.data and config.validation.metric not in MEASURED:
        raise UserError(
            f"validation.metric = {config.validation.metric!r} is not measured during training",
            fix=f"choose one of: {', '.join(MEASURED)}",
        )


def _encode(config: RunConfig, tokenizer: Any, paths: Sequence[Path]) -> EncodedDataset:
    dataset = encode_dataset(config.data, tokenizer, paths=paths)
    check_rows(dataset.rows, load_config(config.store), tokenizer)
    return dataset


def open_rows(config: RunConfig, tokenizer: Any) -> Rows:
    """Encode the training data, check that the model can take it, and plan its steps."""
    train = config.train
    dataset = _encode(config, tokenizer, config.data.train)
    planner = dataset.planner(seed=train.seed, rows_per_step=train.rows_per_step, tokens_per_step=train.tokens_per_step)
    steps = train.steps if train.steps is not None else planner.total_steps(train.epochs)
    return Rows(dataset, planner, steps, train.micro_batch_tokens)


@dataclass(frozen=True)
class TrainedAdapter:
    """An adapter and the model it belongs to (`parts.Adapter`).

    Attributes:
        asked: `lora.targets` of the run.
        quantised: names of all 4-bit weights of the layers (`all-linear` means these at least).
        facts: go into `lamella_adapter.json`.
        beside: text files that go with every saved adapter, by name.
    """

    adapter: Adapter
    skeleton: Skeleton
    base: str
    asked: str | tuple[str, ...]
    quantised: frozenset[str]
    facts: dict[str, Any]
    beside: dict[str, str]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self.adapter.parameters()

    def save(self, folder: Path) -> dict[str, str]:
        checksums = self.adapter.save(folder, base=self.base, facts=self.facts)
        for name, text in self.beside.items():
            (folder / name).write_text(text, encoding="utf-8")
        return checksums

    def load_state(self, folder: Path) -> None:
        load_values(self.adapter, folder)

    def settings(self) -> dict[str, Any]:
        return self._settings_of(self.adapter)

    def saved_settings(self, folder: Path) -> dict[str, Any]:
        return self._settings_of(load_adapter(folder, self.skeleton, values=False))

    def _settings_of(self, adapter: Adapter) -> dict[str, Any]:
        return settings_of(adapter) | {
            "lora.targets": targets_of(list(adapter.sites.values()), self.asked, self.quantised)
        }


def settings_of(adapter: Adapter) -> dict[str, Any]:
    """LoRA settings of an adapter under their config names, a list where pairs differ."""
    sites = list(adapter.sites.values())
    linear = [site for site in sites if site.experts is None]
    experts = [site for site in sites if site.experts is not None]
    return {
        "lora.dropout": adapter.dropout,
        "lora.rslora": adapter.rslora,
        "lora.scale": _same({rounded(site.scale) for site in sites}),
        "lora.rank": _same({site.rank for site in linear}),
        "lora.alpha": _same({rounded(site.alpha) for site in linear}),
        "lora.expert_rank": _same({site.rank for site in experts}),
    }


def _same(values: set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else sorted(values)


def targets_of(sites: list[SiteSpec], asked: str | tuple[str, ...], quantised: frozenset[str]) -> Any:
    """`lora.targets` as the pairs show it: as asked when they are exactly those, else what there is in its place.

    `all-linear` is met when every 4-bit weight has a pair; names are met when each has one and no other weight has.
    """
    if isinstance(asked, str):
        without = sorted(quantised - {site.key for site in sites})
        return f"{len(without)} weights without a pair, e.g. {without[0]}" if without else asked
    met = {target for target in asked for site in sites if _is_target(site, target)}
    odd = {site.key for site in sites if not any(_is_target(site, target) for target in asked)}
    return sorted(met | odd)


def _is_target(site: SiteSpec, target: str) -> bool:
    names = [site.key]
    if site.parameter is not None:
        module = site.key.rpartition(".")[0]
        names.append(module)
        if site.parameter == "gate_up_proj":  # the halves that transformers 5 fuses
            names += [f"{module}.gate_proj", f"{module}.up_proj"]
    within = f"layers.{site.layer}.{site.path}" + (f".{site.parameter}" if site.parameter else "")
    return any(f".{name}".endswith(f".{target}") for name in names) or f".{target}".endswith(f".{within}")


def pages_folder(config: RunConfig, parameters: int, ranks: Ranks) -> Path | None:
    """The folder for the adapter's state by `memory.state`; None: RAM.

    Raises:
        UserError: `disk` with several ranks.
    """
    asked, budget = config.memory.state, config.memory.budget
    if ranks.world > 1:
        if asked == "disk":
            raise UserError('memory.state = "disk" with several ranks is not supported', fix='set it to "ram"')
        return None
    large = budget is not None and STATE_BYTES * parameters > parse_bytes(budget) / 2
    if asked == "ram" or (asked == "auto" and not large):
        return None
    notice(f"the adapter's state, {format_bytes(STATE_BYTES * parameters)}, is kept in a file in the run's folder")
    return config.runs_dir / config.name


def _open_adapter(config: RunConfig, skeleton: Skeleton, ranks: Ranks) -> Adapter:
    """A fresh adapter, or `init_adapter`'s values in the shape that `lora` asks for.

    Raises:
        UserError: `init_adapter` has other targets, ranks or scales than `lora`. (Another base: see `Engine.attach`.)
    """
    adapter = Adapter.create(
        skeleton, config.lora, config.train.seed, lambda parameters: pages_folder(config, parameters, ranks)
    )
    if config.init_adapter is None:
        return adapter
    given = Adapter.load(config.init_adapter, skeleton)
    if set(given.sites) != set(adapter.sites):
        odd = sorted(set(given.sites) ^ set(adapter.sites))
        raise UserError(
            f"init_adapter adapts other weights than lora.targets: {len(odd)} differ, e.g. {odd[0]}",
            fix="set lora.targets to the adapter's own",
            path=config.init_adapter,
        )
    uneven = len({site.rank for site in given.sites.values() if site.experts is not None}) > 1
    for key, site in adapter.sites.items():
        theirs = given.sites[key]
        fits = theirs.rank == site.rank or (uneven and site.experts is not None and theirs.rank < site.rank)
        if not fits or not math.isclose(site.scale, theirs.scale, rel_tol=1e-9):
            raise UserError(
                f"{key}: init_adapter has rank {theirs.rank} and scale {theirs.scale:g}, "
                f"lora asks for rank {site.rank} and scale {site.scale:g}",
                fix="set lora.rank, lora.alpha, lora.rslora and lora.expert_rank to the adapter's own (experts of several "
                "ranks: the largest)",
                path=config.init_adapter,
            )
    _take_values(adapter, given)
    adapter.origin, adapter.layout = given.origin, given.layout  # `Engine.attach` compares the base
    return adapter


def _take_values(adapter: Adapter, given: Adapter) -> None:
    """Values of `given`; ranks beyond its own keep their fresh A, and a B of zero: the same model to begin with."""
    with torch.no_grad():
        for key, site in given.sites.items():
            (a, b), (theirs_a, theirs_b) = adapter.pair(key), given.pair(key)
            a[..., : site.rank, :].copy_(theirs_a)
            b[..., : site.rank].copy_(theirs_b)


def _started_from(config: RunConfig, adapter: Adapter) -> dict[str, str] | None:
    """Identity of `init_adapter`, for the receipt."""
    if config.init_adapter is None:
        return None
    weights = next(path for layout in LAYOUTS.values() if (path := config.init_adapter / layout.weights).is_file())
    return {"path": str(config.init_adapter), "layout": adapter.layout, "xxh3_128": file_checksum(weights)}


def expected_parameters(config: RunConfig, model_config: Any, sites: list[SiteSpec]) -> dict[str, tuple[int, str]]:
    """Per class: how many parameters the asked ranks give, and the formula: weights x experts x rank x (in + out)."""
    asked = config.lora.expert_rank
    expert_rank = max(1, config.lora.rank // active_experts(model_config)) if asked == "auto" else asked
    groups: dict[str, Counter[tuple[int, int, int, int]]] = {}
    for site in sites:
        rank = config.lora.rank if site.experts is None else expert_rank
        group = groups.setdefault(site.weight_class, Counter())
        group[(site.experts or 1, rank, site.inputs, site.outputs)] += 1
    result = {}
    for kind, group in groups.items():
        total = sum(n * e * r * (i + o) for (e, r, i, o), n in group.items())
        terms = [f"{n} x {f'{e} x ' if e > 1 else ''}{r} x ({i} + {o})" for (e, r, i, o), n in group.items()]
        result[kind] = (total, " + ".join(terms))
    return result


def router_aux_coef(config: RunConfig, store: Store, ranks: Ranks) -> float:
    """Weight of the balancing loss: as configured, else the model config's when it asks for router logits.

    Raises:
        UserError: asked for on a dense model, or on several ranks (it is not a sum over tokens).
    """
    model = json.loads((store.path / "config.json").read_text(encoding="utf-8"))
    asked = config.train.router_aux_coef
    coefficient = asked
    if coefficient is None:
        coefficient = float(model.get("router_aux_loss_coef") or 0) if model.get("output_router_logits") else 0.0
    if not coefficient:
        return 0.0
    if num_routed_experts(model) is None:
        raise UserError(
            f"train.router_aux_coef is {coefficient:g}, but {model['model_type']} has no router", fix="leave it out"
        )
    if ranks.world > 1:
        raise UserError(
            f"the router balancing loss (coefficient {coefficient:g}) needs the whole step on one rank",
            fix="set train.router_aux_coef = 0, or train in one process",
        )
    if ranks.first:
        notice(
            f"router balancing loss x {coefficient:g}: routers are frozen, so it can only change what adapters "
            "put into the hidden states that routers read"
        )
    return coefficient


@dataclass(frozen=True)
class LossValidation:
    """Mean loss per label token, and its exponential, over held-out rows; ranks share the rows (`parts.Validator`)."""

    engine: Engine
    rows: Rows
    ranks: Ranks
    spread: Spreads
    names: tuple[str, ...] = MEASURED

    def measure(self) -> dict[str, float]:
        numbers = range(len(self.rows.dataset.rows))
        if self.spread.now is not None:
            work = self.spread.now.part_of(numbers, self.rows)
            local = self.engine.evaluate(work) if work is not None else 0.0
        else:
            local = sum(float(sums.sum()) for sums in self.engine.loss_sums(self.rows.pack(numbers)))
        (loss_sum,) = self.ranks.sum_numbers([local])
        loss = loss_sum / sum(row.label_tokens for row in self.rows.dataset.rows)
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


class Spreads:
    """Makes the split of a run once its checkpoint is known, and holds it for validation."""

    def __init__(self, make: Callable[[dict[str, Any] | None], SplitRows]) -> None:
        self._make = make
        self.now: SplitRows | None = None

    def __call__(self, state: dict[str, Any] | None) -> SplitRows:
        self.now = self._make(state)
        return self.now


def _open_engine(config: RunConfig, store: Store, ranks: Ranks) -> Engine:
    place = place_of(config, ranks.rank, ranks.world)
    return Engine.open(
        store, dtype=config.compute.dtype, device=place.device, budget_bytes=place.budget_bytes,
        recompute=config.memory.recompute, threads=place.threads, seed=config.train.seed,
        pace=place.slowdown, ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)) if ranks.world > 1 else 1,
    )  # fmt: skip


def fit_budget(
    engine: Engine, rows: Rows, take: Callable[[Sequence[int]], list[PackedBatch]], most: int = 2000
) -> None:
    """Make the largest step (of the first `most`) fit the budget, or refuse now.

    Args:
        take: this rank's micro-batches of a step's rows.

    Raises:
        UserError: it does not fit; names what it takes.
    """
    if engine.budget_bytes is None:
        return
    steps = (rows.rows_of(k).rows for k in range(min(rows.steps, most)))
    largest = take(max(steps, key=lambda step: sum(map(rows.tokens, step))))
    if largest:
        engine.fit(*shape_of(largest))


def _quantised(engine: Engine) -> frozenset[str]:
    """Names of the layers' weights, whatever their formats: modules, or expert parameters."""
    manifest = engine.store.manifest
    streamed = {r.name: is_streamed(r) for key, _ in manifest.groups() for r in engine.store.records(key)}
    plans = engine.walk.weights.plans.values()
    return frozenset(
        plan.name.removesuffix(".weight")
        for plan in plans
        if plan.layer is not None and streamed[plan.pieces[0].source]
    )


def generation_config(store: Path, stop_ids: Sequence[int]) -> dict[str, Any]:
    """The base's generation config, its eos ids preceded by all that end an answer in the training text.

    Raises:
        UserError: the store's `generation_config.json` is not a JSON object.
    """
    file, config = store / "generation_config.json", {}
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"not valid JSON: {error}", fix="quantize again", path=file) from error
    if not isinstance(config, dict):
        raise UserError("not a JSON object", fix="quantize again", path=file)
    known = config.get("eos_token_id")
    eos = [known] if isinstance(known, int) else list(known or [])
    return {**config, "eos_token_id": list(dict.fromkeys([*stop_ids, *eos]))}


def _beside_adapter(config: RunConfig, rows: Rows) -> dict[str, str]:
    """What inference needs besides the weights: stop ids, and the chat template when it is not the tokenizer's own."""
    generation = generation_config(config.store, rows.dataset.encoder.stop_ids)
    files = {"generation_config.json": json.dumps(generation, indent=2) + "\n"}
    if config.data.chat_template is not None:
        files["chat_template.jinja"] = config.data.chat_template.read_text(encoding="utf-8-sig")
    return files


def _base(engine: Engine, expected: dict[str, tuple[int, str]]) -> Base:
    store, manifest = engine.store, engine.store.manifest
    total = sum(group.nbytes for _, group in manifest.groups())

    def verify() -> list[str]:
        try:
            with progress("verify base", total, "B") as meter:
                return store.verify(meter.advance)
        except OSError as error:
            raise UserError(
                f"the store cannot be read any more: {error.strerror}",
                fix="bring it back as it was, then go on with --resume: the checkpoints are kept",
                path=error.filename or store.path,
            ) from error

    tensors = [
        {"class": row.tensor_class, "format": row.format, "dtype": row.dtype, "count": row.count,
         "parameters": row.parameters, "bytes": row.bytes_store}
        for row in manifest.report
    ]  # fmt: skip
    return Base(manifest.checksum, store.path, tensors, verify, engine.walk.weights.resident_checksum, expected)


def assemble_parts(config: RunConfig, ranks: Ranks, _fresh_start: bool) -> Parts:
    """Open everything; no weight of a layer is read. Data come first: they are the cheapest to be wrong."""
    check_metric(config)
    store = Store.open(config.store)
    aux_coef = router_aux_coef(config, store, ranks)
    tokenizer = load_tokenizer(config.store)
    rows = open_rows(config, tokenizer)
    if ranks.first:
        for line in rows.dataset.report.lines():
            notice(line)
    held_out = _encode(config, tokenizer, config.validation.data) if config.validation.data else None
    engine = _open_engine(config, store, ranks)
    adapter = _open_adapter(config, engine.skeleton, ranks)
    engine.attach(adapter)
    sites = list(adapter.sites.values())
    layers = {f"{site.key}.lora_{x}": site.layer for site in sites for x in "AB"}

    def divide(state: dict[str, Any] | None) -> SplitRows:
        return SplitRows(config, ranks, engine, rows, layers, state, lambda take: fit_budget(engine, rows, take))

    spreads = Spreads(divide)
    if ranks.world == 1:
        fit_budget(engine, rows, rows.pack)
    validation = None
    if held_out is not None:
        micro = config.train.micro_batch_tokens
        validation = LossValidation(engine, Rows(held_out, rows.planner, 0, micro), ranks, spreads)
    classes = {f"{site.key}.lora_{x}": site.weight_class for site in sites for x in "AB"}
    facts = {
        "base_fingerprint": store.manifest.source_fingerprint,
        "store_checksum": store.manifest.checksum,
        "system": config.data.system,
    }
    trained = TrainedAdapter(
        adapter, engine.skeleton, store.manifest.source, config.lora.targets, _quantised(engine), facts,
        _beside_adapter(config, rows),
    )  # fmt: skip
    return Parts(
        engine=engine,
        adapter=trained,
        data=rows,
        base=_base(engine, expected_parameters(config, engine.config, sites)),
        vocab_size=engine.config.vocab_size,
        class_of=classes.__getitem__,
        validator=validation,
        fresh=config.init_adapter is None,
        aux_coef=aux_coef,
        pages=adapter.pages,
        redraw=adapter if config.init_adapter is None else None,
        spread=spreads if ranks.world > 1 else None,
        started_from=_started_from(config, adapter),
        forecast=lambda machine: plan_for_run(config, rows.dataset.rows, engine, ranks.world, machine),
    )
