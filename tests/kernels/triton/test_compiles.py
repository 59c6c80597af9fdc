"""Every kernel compiles for real GPUs, on a machine without one: Triton brings its own ptxas."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[3]
SHARED_BYTES = {89: 99 << 10, 90: 227 << 10}
"""Shared memory a block may have (CUDA programming guide, table of compute capabilities)."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(capability, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compile_for", str(capability)], env=env, cwd=ROOT, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    made = [json.loads(line) for line in run.stdout.splitlines()]
    kernels = {m["kernel"] for m in made}
    assert kernels == {
        "_dequantize", "_quantize", "_keep", "_matmul", "_outer", "_combine", "_combine_backward", "_swiglu",
        "_swiglu_backward", "_statistics", "_residual",
    }  # fmt: skip
    for m in made:
        assert m["bytes"] > 0
        assert m["shared"] <= SHARED_BYTES[capability], m
        if m["kernel"] == "_dequantize":
            assert m["ld.global.b8"] <= 1 and m["ld.global.v4"] >= 1, "code bytes are not loaded 16 at a time"
        if m["kernel"] in ("_dequantize", "_quantize"):
            assert m["fma.rn.f32"] == 0, "fused multiply-adds change bits"
        if m["kernel"] == "_quantize":
            assert m["div.rn"] > 0, "divisions are not exact"
    tensor_cores = "wgmma.mma_async" if capability == 90 else "mma.sync"
    in_bf16 = [m for m in made if m["kernel"] == "_matmul" and m[tensor_cores]]
    assert len(in_bf16) >= 5
    assert any(m["cp.async.cg"] for m in in_bf16), "loads do not run ahead"
