"""A machine as plans see it: its devices, memory, rates and links, measured by `lamella probe`, taken from the catalogue of
known devices, or written by hand. Imports no torch.

All rates are per second and all sizes in bytes. What is not known is None, never a guess.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lamella.config import Section

FORMAT_VERSION = 1

ProductForm = Literal["forward", "backward", "narrow", "widen", "narrow_back", "widen_back", "gradient"]
RowKind = Literal["norm", "norm_back", "rotate", "rotate_back", "gated", "gated_back", "add", "copy", "cast", "accumulate",
                  "peak", "loss", "router", "router_back", "balance", "spread", "dequantise"]  # fmt: skip
FixedWork = Literal["forward", "backward", "backward_again", "bind", "head", "prologue", "update"]


class MatmulPoint(Section):
    """One measured product of [rows, inner] and [inner, columns] in bf16 (2 rows inner columns FLOPs).

    `form` says how the second matrix lies in memory, and so which product of a step it is:

        forward     x W^T, W [columns, inner]: a linear layer
        backward    dy W, W [inner, columns]: its input's gradient
        narrow      x A^T, A [columns, inner] with few columns: LoRA's first product
        widen       xa B^T, B [columns, inner] with a small inner size: LoRA's second
        narrow_back dy B, B [inner, columns]: gradient between LoRA's two
        widen_back  dxa A, A [inner, columns]: LoRA's part of the input's gradient
        gradient    dxa^T x, rows = rank, inner = tokens: gradient of A or B
    """

    form: ProductForm = "forward"
    rows: int
    inner: int
    columns: int
    flops_per_s: float


class ExpertPoint(Section):
    """One measured run of the expert kernels: `rows` (token, expert) pairs shared evenly by `experts` experts."""

    rows: int
    experts: int
    hidden: int
    inner: int
    rank: int
    """Of LoRA on gate, up and down; 0: none."""
    forward_flops_per_s: float
    backward_flops_per_s: float


class AttentionPoint(Section):
    """One measured run of attention: sequences of `length` tokens, causal; FLOPs of visible pairs alone."""

    length: int
    heads: int
    head_dim: int
    forward_flops_per_s: float
    backward_flops_per_s: float


class RowPoint(Section):
    """One measured pass over `values` numbers, by what it is for.

    norm, norm_back      RMS norm of rows: values of the input
    rotate, rotate_back  norm and rotary positions of heads: values of all heads
    gated, gated_back    act(gate) * up, and backward with the product again: values of the output
    add, copy            residual sum; a copy
    cast, accumulate     fp32 masters to bf16; bf16 gradients added to fp32 ones
    peak                 largest |value|
    loss                 cross-entropy of bf16 logits and its gradient
    router, router_back  softmax and choice of experts, and backward: tokens x experts
    balance              the step's counts of choices: tokens x experts
    spread               routing weights and sum of a token's experts: rows x hidden
    """

    kind: RowKind
    values: int
    values_per_s: float


class FixedCost(Section):
    """What a small model's step was seen to take beyond the time of its kernels: interpreter, dispatch and autograd, with the
    caches as the kernels leave them.

        forward                   one layer and micro-batch
        backward, backward_again  its backward pass, from what was kept and with the forward pass again
        bind                      a layer's turn: finding its bytes, hanging them into its modules
        head, prologue            a micro-batch
        update                    a trained tensor
    """

    work: FixedWork
    experts: bool = False
    """Of a layer with routed experts."""
    everywhere: bool = False
    """LoRA on more than attention."""
    seconds: float


class KernelRates(Section):
    """What a step's time is made of, measured at real shapes with the threads that training uses."""

    threads: int
    matmul: tuple[MatmulPoint, ...]
    experts: tuple[ExpertPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    rows: tuple[RowPoint, ...] = ()
    row_bytes_per_s: float
    """Norms, rotary, activations and sums where `rows` has no figure: bytes read and written."""
    call_s: float
    """Of one small operation (dispatch, autograd) among others of its kind, caches warm."""
    uneven_rows: float | None = Field(None, exclude=True)
    """Stands in files of before December 2026 and is not used: batches of all models are filled up since then."""
    fixed: tuple[FixedCost, ...] = ()
    update_parameters_per_s: float
    """Trained parameters that the optimizer passes: gradient norm and update."""


class Price(Section):
    """What an hour costs."""

    usd_per_hour: float
    source: str
    date: str
    """ISO date of the price."""


class DeviceFacts(Section):
    """One device that computes: a GPU, or the host's cores together."""

    name: str
    kind: Literal["cpu", "cuda"]
    host: int = 0
    """Index into `Machine.hosts`."""
    memory_bytes: int
    """Total; of a CPU the RAM that this process may use (cgroup limits included)."""
    free_bytes: int | None = None
    matmul_flops_per_s: float
    """Of a large product in `dtype`, dense: measured, or from the data sheet."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    reached: float = 1.0
    """Share of `matmul_flops_per_s` that training reaches where `kernels` says nothing finer."""
    dequantise_bytes_per_s: float
    """16-bit bytes written from NF4."""
    memory_bytes_per_s: float
    """Copying within the device's own memory, read and written bytes together."""
    threads: int | None = None
    """Of a CPU."""
    kernels: KernelRates | None = None
    price: Price | None = None
    details: dict[str, str | int | float] = Field(default_factory=dict)
    """What the driver says: compute capability, PCI bus, NUMA node, PCIe generation and width, driver version."""


class HostLink(Section):
    """Between a device's memory and its host's. Rates of one direction; `together`: with all devices of the host copying at
    once."""

    device: int
    to_device_bytes_per_s: float
    from_device_bytes_per_s: float
    to_device_together_bytes_per_s: float | None = None
    from_device_together_bytes_per_s: float | None = None
    pageable_bytes_per_s: float | None = None
    latency_s: float = 1e-5
    kind: str = "pcie"


class PeerLink(Section):
    """Between two devices, one direction at a time."""

    a: int
    b: int
    bytes_per_s: float
    latency_s: float = 1e-5
    kind: str = "pcie"
    """nvlink, pcie, host (through its memory), network."""


class Collective(Section):
    """A measured exchange of tensors of `nbytes` among ranks: one rank a device; several on a CPU have its number each."""

    devices: tuple[int, ...]
    nbytes: int
    seconds: float
    backend: str
    op: Literal["all_reduce", "send"] = "all_reduce"
    """`send`: from the first device to the second."""


class Disk(Section):
    """Where the store lies."""

    path: str
    read_bytes_per_s: float
    """Sequential, past the page cache."""
    write_bytes_per_s: float | None = None
    free_bytes: int | None = None
    kind: str = "unknown"


class Host(Section):
    """One computer."""

    name: str
    cores: int
    ram_bytes: int
    limit_bytes: int
    """The smallest of RAM and the limits of cgroups."""
    free_bytes: int | None = None
    pinned_bytes: int | None = None
    """RAM that may be page-locked; None: no limit known."""
    numa_nodes: int = 1
    memory_bytes_per_s: float | None = None
    """Copying in RAM with all cores."""
    import_bytes: int | None = None
    """Resident set of a process that has imported what training imports."""
    disk: Disk | None = None
    price: Price | None = None


class Machine(Section):
    """Everything a plan needs to know of where it is to run."""

    format_version: int = FORMAT_VERSION
    name: str
    source: Literal["measured", "catalogue", "file"]
    taken: str
    """ISO date and time of the measurement, or date of the catalogue."""
    hosts: tuple[Host, ...]
    devices: tuple[DeviceFacts, ...]
    host_links: tuple[HostLink, ...] = ()
    peer_links: tuple[PeerLink, ...] = ()
    collectives: tuple[Collective, ...] = ()
    network_bytes_per_s: float | None = None
    """Between hosts."""
    network_latency_s: float = 5e-5
    notes: tuple[str, ...] = ()
    """What could not be measured, and why; what is assumed."""
