"""Quantising a checkpoint of several GB: rate and peak memory, beside bitsandbytes on tensors of the same files.

    python -m bench.quantize [--gb 6] [--kind moe|dense] [--folder DIR]

Makes a random bf16 checkpoint of real shapes in a folder that it deletes again, runs `lamella quantize` in a
process of its own, and times `bitsandbytes.functional.quantize_4bit` on the tensors of one layer, already in memory.
Prints one JSON line; `bar` is for `peak_rss_bytes`. cpu_s above wall_s shows reading, quantising and writing at once.
Ours is the whole job (read, quantise, write, sync, checksums), bitsandbytes' only its kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_POOL_NUMEL = 128 << 20
VOCABULARY = 50_000
PEAK_RSS_BAR_BYTES = 1.5e9
"""Most that `lamella quantize` may hold in memory, for any size of checkpoint."""


def layer_shapes(kind: str) -> tuple[dict, dict[str, tuple[int, ...]]]:
    """config.json and the shapes of one layer; the largest tensor is 201 MB (moe) or 117 MB (dense)."""
    if kind == "moe":
        sizes = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
                 "num_experts": 32, "moe_intermediate_size": 768, "intermediate_size": 6144}  # fmt: skip
        shapes = {"mlp.gate.weight": (32, 2048), "mlp.experts.gate_up_proj": (32, 1536, 2048),
                  "mlp.experts.down_proj": (32, 2048, 768), "self_attn.q_norm.weight": (128,),
                  "self_attn.k_norm.weight": (128,)}  # fmt: skip
    else:
        sizes = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 14336}  # fmt: skip
        shapes = {"mlp.gate_proj.weight": (14336, 4096), "mlp.up_proj.weight": (14336, 4096),
                  "mlp.down_proj.weight": (4096, 14336)}  # fmt: skip
    hidden = sizes["hidden_size"]
    heads, kv = sizes["num_attention_heads"] * 128, sizes["num_key_value_heads"] * 128
    shapes |= {
        "self_attn.q_proj.weight": (heads, hidden), "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden), "self_attn.o_proj.weight": (hidden, heads),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    return sizes, shapes


def make_checkpoint(folder: Path, kind: str, wanted_bytes: int) -> int:
    """Write a checkpoint of at least `wanted_bytes`, one shard a layer. Returns its bytes of weights."""
    import torch
    from safetensors.torch import save_file

    sizes, shapes = layer_shapes(kind)
    pool = torch.randn(_POOL_NUMEL, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def tensor(shape: tuple[int, ...], seed: int) -> Any:
        """Values of the pool from another place, at another scale: random enough, and quick to make."""
        numel = torch.Size(shape).numel()
        start = seed * 7919 * 64 % (_POOL_NUMEL - numel)
        return (pool[start : start + numel] * (1 + seed % 13 / 16)).view(shape)

    outer = {"model.embed_tokens.weight": tensor((VOCABULARY // 2 if kind == "dense" else VOCABULARY,
                                                  sizes["hidden_size"]), 1),
             "model.norm.weight": tensor((sizes["hidden_size"],), 2)}  # fmt: skip
    weight_map, total, layers, seed = {}, 0, 0, 3

    def write(tensors: dict[str, Any], file: str) -> None:
        nonlocal total
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.numel() * t.element_size() for t in tensors.values())

    write(outer, "outer.safetensors")
    while total < wanted_bytes:
        layer = {}
        for name, shape in shapes.items():
            layer[f"model.layers.{layers}.{name}"] = tensor(shape, seed)
            seed += 1
        write(layer, f"layer-{layers:05d}.safetensors")
        layers += 1
    vocabulary = outer["model.embed_tokens.weight"].shape[0]
    config = {**sizes, "head_dim": 128, "num_hidden_layers": layers, "vocab_size": vocabulary,
              "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def run_ours(source: Path, store: Path) -> tuple[float, float, int, dict]:
    """Wall seconds, CPU seconds, peak RSS in bytes, and the report of `lamella quantize` in its own process."""
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "lamella", "quantize", str(source), "-o", str(store), "--json"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    report = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"lamella quantize ended with {process.returncode}")
    wall_s = time.perf_counter() - start_s
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, json.loads(report)


def run_peer(source: Path, store: Path) -> tuple[float, bool]:
    """Source bytes per second of bitsandbytes on layer 0's weights, and whether our codes and scales equal its own."""
    import bitsandbytes.functional as bnb
    import torch
    from safetensors.torch import load_file

    from lamella.store.reader import Store

    packed = Store.open(store).load(0)
    nbytes, seconds, equal = 0, 0.0, True
    for name, x in load_file(source / "layer-00000.safetensors").items():
        if packed.records[name].format != "nf4":
            continue
        flat = x.view(-1, 1)
        start_s = time.perf_counter()
        codes, state = bnb.quantize_4bit(flat, compress_statistics=True, quant_type="nf4")
        seconds += time.perf_counter() - start_s
        nbytes += x.numel() * x.element_size()
        ours = [packed.part(name, part, torch.uint8) for part in ("codes", "absmax_q", "absmax2", "offset")]
        theirs = [codes, state.absmax, state.state2.absmax, state.offset.view(1)]
        equal &= all(torch.equal(a, b.view(-1).view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))
    return nbytes / seconds, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=6.0, help="size of the checkpoint in GB")
    parser.add_argument(
        "--kind", choices=("moe", "dense"), default="moe", help="fused experts, or large dense matrices"
    )
    parser.add_argument("--folder", type=Path, help="where to make it (needs 1.4 times the size)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lamella-bench-", dir=args.folder) as root:
        source, store = Path(root) / "checkpoint", Path(root) / "store"
        source.mkdir()
        # Linux counts the parent's memory at the fork in a child's ru_maxrss, so this process stays small until then
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            nbytes = pool.submit(make_checkpoint, source, args.kind, int(args.gb * 1e9)).result()
        wall_s, cpu_s, peak, report = run_ours(source, store)
        peer, equal = run_peer(source, store)
        classes = {row["tensor_class"]: row["bytes_per_weight"] for row in report["classes"]}
        print(json.dumps({
            "case": f"quantize-{args.kind}", "unit": "source GB/s", "ours": round(nbytes / wall_s / 1e9, 3),
            "peer": round(peer / 1e9, 3), "ratio": round(nbytes / wall_s / peer, 2), "peer_name": "bitsandbytes",
            "equal_bits": equal, "checkpoint_bytes": nbytes, "store_bytes": report["bytes"],
            "wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1), "peak_rss_bytes": peak, "bar": PEAK_RSS_BAR_BYTES,
            "met": peak <= PEAK_RSS_BAR_BYTES, "bytes_per_weight": classes,
            "cores": len(os.sched_getaffinity(0)),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
