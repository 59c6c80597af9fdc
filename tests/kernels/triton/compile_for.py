"""Compile every Triton kernel as its wrapper launches it, for a GPU that need not be here: `... compile_for 90`.

Prints one JSON line a launch: kernel, shared memory, and how often some instructions stand in the PTX. Run without
TRITON_INTERPRET. Compiling ends with ptxas, so registers and shared memory have been given out.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamella.errors import UserError
from lamella.kernels import reference
from lamella.kernels.triton import grouped, lora, loss, nf4, rows
from lamella.kernels.triton.grouped import Groups, Tiling

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
WATCHED = ("wgmma.mma_async", "mma.sync", "cp.async.cg", "ld.global.v4", "ld.global.b8", "div.rn", "fma.rn.f32")
MODULES = (nf4, grouped, rows, loss)


class Compiles:
    """Stands for a kernel: a launch compiles it for what it is given."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability = kernel, capability

    def __getitem__(self, grid: Any) -> Compiles:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        options = {k: named.pop(k) for k in ("num_warps", "num_stages", "enable_fp_fusion") if k in named}
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for i, (name, parameter) in enumerate(zip(self.kernel.arg_names, self.kernel.params, strict=True)):
            value = values[name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name], attributes[(i,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        counts = {word: made.asm["ptx"].count(word) for word in WATCHED}
        told = {"kernel": self.kernel.__name__, "shared": made.metadata.shared, "warps": options.get("num_warps", 4)}
        print(json.dumps({**told, "bytes": len(made.asm["cubin"]), **counts}), flush=True)


def launch_nf4(dtype: torch.dtype) -> None:
    values = torch.randn(64 * 256 * 4)
    codes, absmax = reference.quantize_nf4(values)
    state = reference.quantize_absmax(absmax)
    for scales in (absmax, state):
        nf4.dequantize_nf4(codes, scales, torch.empty(values.numel(), dtype=dtype))
    with contextlib.suppress(UserError):  # its flags of non-finite values are not written when nothing runs
        nf4.quantize_nf4(values.to(dtype))
    nf4.keep_mask(torch.arange(16), 512, 0.3)


def launch_others(dtype: torch.dtype, tiling: Tiling) -> None:
    experts, inputs, outputs, rank, total = 4, 256, 512, 2, 64
    groups = Groups(torch.tensor([0, 16, 32, 48, 64], dtype=torch.int32), total)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    x, dy, weight = zeros(total, inputs), zeros(total, outputs), zeros(experts, outputs, inputs)
    a, b, low, bias = (
        zeros(experts, rank, inputs),
        zeros(experts, outputs, rank),
        zeros(total, rank),
        zeros(experts, outputs),
    )
    grouped.grouped_linear(x, weight, groups, a, b, 2.0, how="triton", tiling=tiling, bias_EO=bias)
    grouped.grouped_input(dy, weight, groups, how="triton", tiling=tiling)
    grouped.grouped_input(dy, weight, groups, a, low, keep_SI=x, how="triton", tiling=tiling)
    grouped._launch(x, weight.transpose(1, 2), groups, dy, tiling, base=False, low_Sr=low, factor_ErN=b.transpose(1, 2))
    tall = grouped.TALL_FP32 if dtype == torch.float32 else grouped.TALL
    grouped.grouped_outer(x, low, groups, zeros(experts, rank, inputs), keep_SM=x, swapped=True, tiling=tall)
    lora.lora_linear(x, weight[0], zeros(total, 16), zeros(outputs, 16), 1.0, tiling=tiling)
    loss.linear_cross_entropy(x, weight[0], torch.zeros(total, dtype=torch.int64), 1.0, tiling=tiling)
    slot = torch.arange(total).view(8, 8)
    rows.combine(x, slot, zeros(8, 8))
    rows.combine_backward(zeros(8, inputs), x, slot, zeros(8, 8))
    rows.swiglu(x)
    rows.swiglu_backward(x, zeros(total, inputs // 2))


def main() -> None:
    capability = int(sys.argv[1])
    for module in MODULES:
        for name, value in list(vars(module).items()):
            launched = isinstance(value, triton.runtime.JITFunction) and name not in ("_store", "_mix", "_logits")
            if launched and value.__module__ == module.__name__:
                setattr(module, name, Compiles(value, capability))
    wide = (capability // 10, capability % 10) in grouped.WIDE_CAPABILITIES
    launch_nf4(torch.bfloat16)
    launch_others(torch.bfloat16, grouped.WIDE if wide else grouped.NARROW)
    launch_others(torch.float32, grouped.PLAIN)


if __name__ == "__main__":
    main()
