"""What serving the result would take: weights and KV cache in memory, and tokens per second that no engine can exceed.

Bounds of a decode step of b sequences at length L on n equal devices that divide every tensor (tensor parallel):

    bytes    weights that the b tokens touch + b x KV(L) + adapter      over n x memory rate
    FLOPs    2 x active parameters x b + attention over L               over n x reached matmul rate
    tokens/s b / max(bytes, FLOPs)

Of E experts of which each token takes k, b tokens touch E (1 - (1 - k/E)^b), if routing is even and independent. Links between
devices, dequantising and scheduling are left out: engines stay below. Pure arithmetic; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lamella.config import Section
from lamella.forecast.number import Number
from lamella.forecast.shape import Core, LayerShape, Matrix, ModelShape, Site
from lamella.hardware.machine import DeviceFacts, Machine
from lamella.plan.costs import visible_pairs

Format = Literal["bf16", "fp8", "nf4"]
FORMATS: tuple[Format, ...] = ("bf16", "fp8", "nf4")
USABLE_SHARE = 0.9
"""Of a device's memory: vLLM's default (`gpu_memory_utilization`), which leaves the rest to its program and activations."""
KV_BYTES = 2
"""Of a cached element: bf16."""
STATE_BYTES = 4
"""Of an element of linear attention's state: fp32."""
FP8_SCALE = 1 / (128 * 128 / 4)
"""Bytes of fp32 scales per element, one for 128 x 128 of them as in DeepSeek-V3."""
MOST_SEQUENCES = 256
LEAST_LENGTH = 1024


class DecodeRate(Section):
    """A bound on generating."""

    sequences: int
    """At once."""
    length: int
    """Tokens that each has so far."""
    tokens_per_s: float
    """Of all of them."""
    bound: Literal["bandwidth", "compute"]
    usd_per_million_tokens: float | None


class Serve(Section):
    """The model in one format on one group of equal devices."""

    format: Format
    machine: str
    """Such as 2 x H100-80."""
    devices: int
    memory_bytes: int
    """Usable, of all devices."""
    weight_bytes: int
    adapter_bytes: int
    """Beside the weights; 0: merged into them."""
    sequences: dict[int, int]
    """Sequence length -> how many fit at once."""
    decode: tuple[DecodeRate, ...]
    prefill_tokens_per_s: float
    """Of one prompt of `length` tokens."""
    length: int
    usd_per_hour: float | None


class Serving(Section):
    """A preview of serving."""

    kv_bytes_per_token: int
    """Of layers whose cache grows with every token."""
    kv_bytes: dict[int, int]
    """Sequence length -> bytes of one sequence, windows and linear state counted."""
    weights: dict[Format, int]
    here: tuple[Serve, ...]
    """On the machine at hand; formats that do not fit are left out."""
    smallest: tuple[Serve, ...]
    """For each format the cheapest machine of the catalogue that holds it with one sequence of `length`."""
    nowhere: tuple[Format, ...]
    """Formats that no machine looked at holds."""
    notes: tuple[str, ...]


# ---- sizes ----------------------------------------------------------------------------------------------


def _bytes_per_parameter(layer: LayerShape, quantised: bool, form: Format) -> float:
    if not quantised or form == "bf16":
        return 2.0
    if form == "fp8":
        return 1 + FP8_SCALE
    return (layer.store_bytes - layer.raw_bytes) / layer.quantised_parameters


def _raw_parameters(layer: LayerShape) -> int:
    return sum(m.parameters for m in layer.matrices if not m.quantised) + layer.other_parameters


def weight_bytes(shape: ModelShape, form: Format) -> int:
    """Bytes of all weights (those beyond the last layer apart) in a format: bf16 everywhere, or the layers' matrices in FP8 with
    block scales, or the 4-bit store as it is."""
    if form == "nf4":
        return shape.store_bytes
    outer = shape.embedding_parameters + shape.head_parameters + shape.outer_parameters
    layers = sum(
        layer.quantised_parameters * _bytes_per_parameter(layer, True, form) + 2 * _raw_parameters(layer)
        for layer in shape.layers
    )
    return round(layers + 2 * outer)


def _is_latent(core: Core) -> bool:
    """MLA: one latent for all heads is cached."""
    return core.kind != "linear" and core.kv_elements < core.kv_heads * (core.head_dim + core.value_dim)


def _copies(core: Core, devices: int) -> float:
    """How often all devices together hold a layer's cache: heads are divided as far as there are any, a latent is not."""
    if core.kind == "linear":
        return 1.0
    return float(devices) if _is_latent(core) else max(1.0, devices / core.kv_heads)


def kv_bytes(shape: ModelShape, length: int, devices: int = 1) -> int:
    """Bytes cached for one sequence, on all devices together."""
    total = 0.0
    for layer in shape.layers:
        core = layer.core
        if core is None:
            continue
        if core.kind == "linear":
            total += core.heads * core.head_dim * core.value_dim * STATE_BYTES
            continue
        tokens = length if core.window is None else min(length, core.window)
        total += tokens * core.kv_elements * KV_BYTES * _copies(core, devices)
    return round(total)


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Bytes that every further token adds, of layers without a window or a state of fixed size."""
    cores = [layer.core for layer in shape.layers if layer.core is not None]
    return sum(core.kv_elements * KV_BYTES for core in cores if core.kind == "full" and core.window is None)


def lengths_of(shape: ModelShape) -> tuple[int, ...]:
    """1k, 4k, 16k ... up to the longest sequence of the model (128k where that is not said)."""
    most = shape.max_tokens or 131072
    found, length = [], LEAST_LENGTH
    while length < most:
        found.append(length)
        length *= 4
    return (*found, most)


# ---- rates ----------------------------------------------------------------------------------------------


def touched_experts(experts: int, active: int, tokens: int) -> float:
    """Experts that some of `tokens` tokens are routed to, on average, if routing is even and independent."""
    return experts * (1 - (1 - active / experts) ** tokens)


def _passed(matrix: Matrix, tokens: int) -> float:
    """Copies of a matrix that a step reads."""
    if matrix.experts == 1 or matrix.active == matrix.experts:
        return matrix.experts
    return touched_experts(matrix.experts, matrix.active, tokens)


def _head_parameters(shape: ModelShape) -> int:
    return shape.head_parameters or shape.hidden * shape.vocab


def read_bytes(shape: ModelShape, form: Format, tokens: int) -> float:
    """Bytes of weights that one decode step of `tokens` sequences reads, the head with them."""
    total = 2.0 * _head_parameters(shape)
    for layer in shape.layers:
        for matrix in layer.matrices:
            size = matrix.outputs * matrix.inputs * _bytes_per_parameter(layer, matrix.quantised, form)
            total += size * _passed(matrix, tokens)
        total += 2 * layer.other_parameters
    return total


def _token_flops(shape: ModelShape) -> float:
    """2 x the parameters that a token passes, embeddings apart, the head with them."""
    layers = sum(m.active_parameters for layer in shape.layers for m in layer.matrices)
    return 2.0 * (layers + _head_parameters(shape))


def _decode_attention(shape: ModelShape, length: int) -> float:
    """FLOPs of one new token against its cache."""
    total = 0.0
    for layer in shape.layers:
        core = layer.core
        if core is None:
            continue
        visible = core.head_dim if core.kind == "linear" else min(length, core.window or length)
        total += 2.0 * core.heads * (core.head_dim + core.value_dim) * visible
    return total


def _prefill_flops(shape: ModelShape, length: int) -> float:
    """Of a prompt: all tokens through the layers, the last one through the head."""
    total = length * _token_flops(shape) - 2.0 * (length - 1) * _head_parameters(shape)
    for layer in shape.layers:
        core = layer.core
        if core is None:
            continue
        pairs = length * core.head_dim if core.kind == "linear" else visible_pairs(length, core.window)
        total += 2.0 * core.heads * (core.head_dim + core.value_dim) * pairs
    return total


class Devices:
    """`count` equal devices that share the model."""

    def __init__(self, device: DeviceFacts, count: int) -> None:
        self.name, self.count = f"{count} x {device.name}", count
        self.memory_bytes = int(count * USABLE_SHARE * device.memory_bytes)
        self.bytes_per_s = count * device.memory_bytes_per_s
        self.flops_per_s = count * device.matmul_flops_per_s * device.reached
        self.usd_per_hour = None if device.price is None else count * device.price.usd_per_hour


def devices_of(machine: Machine) -> Devices:
    """The machine's devices of the kind with the most memory together (engines want equal ones)."""
    kinds: dict[str, list[DeviceFacts]] = {}
    for device in machine.devices:
        kinds.setdefault(device.name, []).append(device)
    group = max(kinds.values(), key=lambda same: sum(device.memory_bytes for device in same))
    return Devices(group[0], len(group))


def catalogue_devices() -> list[Devices]:
    """One, two, four and eight of each known device."""
    from lamella.hardware.catalogue import catalogue

    known = catalogue()
    return [Devices(known.facts(device), count) for device in known.devices for count in (1, 2, 4, 8)]


def serve(
    shape: ModelShape, form: Format, devices: Devices, length: int, adapter: Sequence[Site] = (), merged: bool = False
) -> Serve | None:
    """The model in a format on these devices; None when not even one sequence of `length` fits.

    Args:
        adapter: LoRA pairs in bf16 beside the weights, unless `merged`.
    """
    pairs = () if merged else adapter
    beside = 2 * sum(site.parameters for site in pairs)
    weights = weight_bytes(shape, form)
    room = devices.memory_bytes - weights - beside
    fits = {n: max(0, room) // max(1, kv_bytes(shape, n, devices.count)) for n in lengths_of(shape)}
    most = max(0, room) // max(1, kv_bytes(shape, length, devices.count))
    if most < 1:
        return None
    batches = sorted({1, min(8, most), min(MOST_SEQUENCES, most)})
    prefill_s = max(
        _prefill_flops(shape, length) / devices.flops_per_s,
        read_bytes(shape, form, length) / devices.bytes_per_s,
    )
    return Serve(
        format=form, machine=devices.name, devices=devices.count, memory_bytes=devices.memory_bytes,
        weight_bytes=weights, adapter_bytes=beside, sequences=fits,
        decode=tuple(_decode(shape, form, devices, n, length, pairs) for n in batches),
        prefill_tokens_per_s=length / prefill_s, length=length, usd_per_hour=devices.usd_per_hour,
    )  # fmt: skip


def _decode(
    shape: ModelShape, form: Format, devices: Devices, sequences: int, length: int, adapter: Sequence[Site]
) -> DecodeRate:
    nbytes = read_bytes(shape, form, sequences) + sequences * kv_bytes(shape, length, devices.count)
    flops = sequences * (_token_flops(shape) + _decode_attention(shape, length))
    for site in adapter:
        size = site.rank * (site.matrix.inputs + site.matrix.outputs)
        nbytes += 2 * size * _passed(site.matrix, sequences)
        flops += 2.0 * sequences * size * site.matrix.active
    reading_s, computing_s = nbytes / devices.bytes_per_s, flops / devices.flops_per_s
    rate = sequences / max(reading_s, computing_s)
    usd = None if devices.usd_per_hour is None else devices.usd_per_hour / 3600 / rate * 1e6
    return DecodeRate(
        sequences=sequences, length=length, tokens_per_s=rate,
        bound="bandwidth" if reading_s >= computing_s else "compute", usd_per_million_tokens=usd,
    )  # fmt: skip


def preview(
    shape: ModelShape, machine: Machine, candidates: Sequence[Devices], length: int, adapter: Sequence[Site] = ()
) -> Serving:
    """What serving takes, on the machine at hand and on the smallest of the candidates.

    Args:
        candidates: such as `catalogue_devices()`; of those with a price the cheapest counts, else the one with least memory.
        length: of a sequence that has to fit.
        adapter: pairs that are served beside the weights.
    """
    notes = [
        f"{USABLE_SHARE:.0%} of a device's memory is used, as vLLM does by default; KV cache in bf16",
        "tokens/s are bounds by memory rate and arithmetic alone; engines stay below",
        "an adapter is served beside any format; merged it adds nothing in bf16, and has to be quantised again in FP8 and 4-bit",
    ]
    at_hand = devices_of(machine)
    if at_hand.count < len(machine.devices):
        notes.append(
            f"of {len(machine.devices)} devices here the {at_hand.name} alone are looked at: engines want equal ones"
        )
    here = [serve(shape, form, at_hand, length, adapter) for form in FORMATS]
    weights = {form: weight_bytes(shape, form) for form in FORMATS}
    smallest = {form: _smallest(shape, form, weights[form], candidates, length, adapter) for form in FORMATS}
    return Serving(
        kv_bytes_per_token=kv_bytes_per_token(shape), kv_bytes={n: kv_bytes(shape, n) for n in lengths_of(shape)},
        weights=weights, here=tuple(found for found in here if found is not None),
        smallest=tuple(found for found in smallest.values() if found is not None),
        nowhere=tuple(form for form, found in smallest.items() if found is None), notes=tuple(notes),
    )  # fmt: skip


def _smallest(
    shape: ModelShape, form: Format, weights: int, candidates: Sequence[Devices], length: int, adapter: Sequence[Site]
) -> Serve | None:
    beside = 2 * sum(site.parameters for site in adapter)
    kv = {count: kv_bytes(shape, length, count) for count in {devices.count for devices in candidates}}
    fitting = [d for d in candidates if d.memory_bytes >= weights + beside + kv[d.count]]
    if not fitting:
        return None
    return serve(shape, form, min(fitting, key=_expense), length, adapter)


def _expense(devices: Devices) -> tuple[float, int]:
    return (math.inf if devices.usd_per_hour is None else devices.usd_per_hour, devices.memory_bytes)


def serving_numbers(shape: ModelShape, serving: Serving) -> list[Number]:
    """The figures with their formulas."""
    quantised = sum(layer.quantised_parameters for layer in shape.layers)
    raw = shape.total_parameters - quantised
    found = [
        Number(name="serving.weights.bf16", value=serving.weights["bf16"], unit="B", formula="2 * parameters",
               inputs={"parameters": quantised + raw}),
        Number(name="serving.weights.fp8", value=serving.weights["fp8"], unit="B",
               formula="floor(matrices * (1 + scale) + 2 * others + 0.5)",
               inputs={"matrices": quantised, "scale": FP8_SCALE, "others": raw}),
        Number(name="serving.weights.nf4", value=serving.weights["nf4"], unit="B", formula="layers + outer",
               inputs={"layers": shape.store_bytes - shape.outer_store_bytes, "outer": shape.outer_store_bytes}),
        Number(name="serving.kv.token", value=serving.kv_bytes_per_token, unit="B", formula="elements * bytes_each",
               inputs={"elements": serving.kv_bytes_per_token / KV_BYTES, "bytes_each": KV_BYTES}),
    ]  # fmt: skip
    for length, nbytes in serving.kv_bytes.items():
        growing = length * serving.kv_bytes_per_token
        found.append(
            Number(name=f"serving.kv.{length}", value=nbytes, unit="B", formula="length * token + windows_and_states",
                   inputs={"length": length, "token": serving.kv_bytes_per_token,
                           "windows_and_states": nbytes - growing})
        )  # fmt: skip
    for where, serves in (("here", serving.here), ("smallest", serving.smallest)):
        for entry in serves:
            for length, count in entry.sequences.items():
                found.append(
                    _sequences_number(shape, f"serving.{where}.{entry.format}.sequences.{length}", entry, length, count)
                )
            found += [_decode_number(shape, f"serving.{where}.{entry.format}.decode.{rate.sequences}", entry, rate)
                      for rate in entry.decode]  # fmt: skip
    return found


def _sequences_number(shape: ModelShape, name: str, entry: Serve, length: int, count: int) -> Number:
    inputs: dict[str, float | str] = {
        "memory": entry.memory_bytes, "weights": entry.weight_bytes, "adapter": entry.adapter_bytes,
        "kv": kv_bytes(shape, length, entry.devices),
    }  # fmt: skip
    formula = "max(0, memory - weights - adapter) // max(1, kv)"
    return Number(name=name, value=count, unit="sequences", formula=formula, inputs=inputs)


def _decode_number(shape: ModelShape, name: str, entry: Serve, rate: DecodeRate) -> Number:
    inputs: dict[str, float | str] = {
        "sequences": rate.sequences, "weights read": read_bytes(shape, entry.format, rate.sequences),
        "KV of each": kv_bytes(shape, rate.length, entry.devices), "bound": rate.bound, "machine": entry.machine,
    }  # fmt: skip
    words = "sequences / max((weights read + sequences x KV + adapter) / memory rate, FLOPs / reached matmul rate)"
    return Number(name=name, value=rate.tokens_per_s, unit="tokens/s", formula=words, inputs=inputs)
