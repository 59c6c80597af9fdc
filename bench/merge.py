"""Merges of models larger than memory, under a hard limit: `python -m bench.merge`.

For a Qwen3-30B-A3B-shaped store of random weights (`lamella store synth`, its layers sharing one file) and a synthetic adapter on
attention and on experts, B not zero, each case merges into one form in a process of its own under a memory limit that the kernel
enforces: 2 GB. One JSON line per case: seconds, weights/s, GB/s written, peak resident set (VmHWM), the limit and what held it,
bytes read and written, and by class what is kept of the adapter.

    python -m bench.merge [--case fp8] [--folder DIR] [--layers N] [--keep-files]

Each weight file is checked (header and size, some tensors read back: finite, not all zero) and taken away as soon as it is
whole, so that 57 GB of bf16 need room for two files; `--keep-files` keeps them. `--layers` makes the store
shallower. `--folder` keeps store and adapter for the next time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.size import CASES, ROOT, Case, limited, make_store, read_bytes
from lamella.errors import UserError
from lamella.hardware.allocator import restart_tuned
from lamella.hardware.limit import memory_limit

BAR_BYTES = 2 * 10**9
FORMS = ("bf16", "fp8", "nf4")
RANK, EXPERT_RANK = 16, 2
DELTA = 5e-4
"""Mean magnitude of what the adapter adds; weights are 0.02 or less."""


def make_adapter(folder: Path, store: Path) -> Path:
    """LoRA r=16 on attention and r=2 on every expert, A and B drawn; written a layer at a time."""
    out = folder / f"{store.stem}.adapter"
    if (out / "adapter_config.json").is_file():
        return out
    command = [sys.executable, "-m", "bench.merge", "--make-adapter", str(store), str(out)]
    subprocess.run(command, check=True, cwd=ROOT)
    return out


def write_adapter(store: Path, out: Path) -> None:
    """What `make_adapter` has done in a process of its own: `Adapter.create`, B drawn, saved."""
    import torch

    from lamella.adapter import Adapter
    from lamella.config import LoraConfig
    from lamella.models.skeleton import Skeleton, load_config
    from lamella.store.reader import Store

    opened = Store.open(store)
    skeleton = Skeleton(load_config(store, opened.manifest.tie_word_embeddings), torch.float32)
    lora = LoraConfig(rank=RANK, alpha=2 * RANK, targets="all-linear", expert_rank=EXPERT_RANK)
    adapter = Adapter.create(skeleton, lora, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, site in adapter.sites.items():
            a, b = adapter.pair(key)
            # a sum of r products of independent values: its mean magnitude is that of a normal of this deviation
            deviation = DELTA / (math.sqrt(2 / math.pi) * site.scale * math.sqrt(site.rank) * float(a.std()))
            b.normal_(0, deviation, generator=generator)
    adapter.save(out, base=opened.manifest.source, facts={"base_fingerprint": opened.manifest.source_fingerprint})


def check_shard(file: Path) -> int:
    """Tensors of a finished file: its header is whole, values of a few tensors are read and finite; gives how many it holds.

    Raises:
        UserError: what `read_header` refuses; a value that is not finite.
    """
    import torch
    from safetensors import safe_open

    from lamella.checkpoint.header import read_header

    infos = read_header(file)
    rng = random.Random(file.name)
    with safe_open(file, "pt") as opened:
        for name in rng.sample(sorted(infos), min(16, len(infos))):
            if infos[name].nbytes <= 64 << 20 and infos[name].dtype in ("BF16", "F16", "F32", "F8_E4M3"):
                values = opened.get_tensor(name).float()
                if not bool(torch.isfinite(values).all()) or not bool(values.any()):
                    raise UserError(f"{name} holds no values, or some that are not finite", path=file)
    return len(infos)


def child(store: Path, adapter: Path, out: Path, form: str, keep: bool) -> None:
    """What runs under the limit: one merge, and its figures on the last line of stdout."""
    from lamella.export.loss import by_class
    from lamella.export.merge import merge
    from lamella.hardware.memory import peak_rss_bytes

    seen = {"files": 0, "tensors": 0, "bytes": 0}

    def finished(file: Path) -> None:
        seen["files"] += 1
        seen["bytes"] += file.stat().st_size
        seen["tensors"] += check_shard(file)
        if not keep:
            file.unlink()

    begin_s, cpu_s = time.perf_counter(), time.process_time()
    merged = merge(store, adapter, out, form, max_loss=100.0, experts_4bit=True, finished=finished, shard_bytes=2 << 30)
    seconds = time.perf_counter() - begin_s
    losses = by_class(merged.losses)
    figures = {
        "seconds": round(seconds, 1), "cpu_s": round(time.process_time() - cpu_s, 1), "bytes_written": seen["bytes"],
        "gb_per_s": round(seen["bytes"] / seconds / 1e9, 3), "files": seen["files"], "tensors_written": seen["tensors"],
        "tensors": merged.tensors, "adapted": merged.adapted, "adapter_tensors": merged.adapter_tensors,
        "unchanged": len(merged.unchanged), "bytes_read": read_bytes(), "peak_rss_bytes": peak_rss_bytes(),
        "error": {name: round(loss.error, 4) for name, loss in losses.items()},
        "kept": {name: round(loss.kept, 4) for name, loss in losses.items()},
        "mean_delta": {name: float(f"{loss.mean_delta:.3g}") for name, loss in losses.items()},
    }  # fmt: skip
    print(json.dumps(figures))


def measure(case: Case, form: str, folder: Path, keep: bool) -> dict[str, Any]:
    """Make the inputs, merge under the limit, and put the figures together."""
    store = make_store(folder, case)
    adapter = make_adapter(folder, store)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, memory_limit(BAR_BYTES) as limit:
        command = [sys.executable, "-m", "bench.merge", "--child", str(store), str(adapter), f"{scratch}/out", form]
        done = limited([*command, "--keep-files"] if keep else command, limit)
        common = {
            "case": f"{case.name} {form}", "layers": case.config["num_hidden_layers"], "bar_bytes": BAR_BYTES,
            "limit": limit.kind, "group_peak_bytes": limit.peak_bytes(),
            "store_bytes": sum(f.stat().st_size for f in store.rglob("*") if f.is_file()),
            "adapter_bytes": sum(f.stat().st_size for f in adapter.iterdir()),
        }  # fmt: skip
        if done.returncode:
            return {**common, "ok": False, "exit_code": done.returncode}
        figures = json.loads(done.stdout.splitlines()[-1])
        return {**common, **figures, "ok": figures["peak_rss_bytes"] <= BAR_BYTES and not figures["unchanged"]}


def shallower(case: Case, layers: int | None) -> Case:
    """The case with so many layers; its name says so, and keeps stores apart."""
    case = replace(case, shared=True)
    if layers is None:
        return case
    return replace(case, name=f"{case.name}-{layers}-layers", config={**case.config, "num_hidden_layers": layers})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", default="", help="only forms whose name contains this")
    parser.add_argument("--folder", type=Path, help="keep store and adapter here; default: a temporary folder")
    parser.add_argument("--layers", type=int, help="of the store; default: all 48")
    parser.add_argument("--keep-files", action="store_true", help="keep every weight file until the case is done")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--make-adapter", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make_adapter is not None:
        write_adapter(*map(Path, args.make_adapter))
        return
    if args.child is not None:
        store, adapter, out = map(Path, args.child[:3])
        child(store, adapter, out, args.child[3], args.keep_files)
        return
    wanted = [form for form in FORMS if args.case in form]
    if not wanted:
        raise UserError(f"no form has {args.case!r} in its name", fix=f"take one of {', '.join(FORMS)}")
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        for form in wanted:
            case = shallower(CASES[0], args.layers)
            print(json.dumps(measure(case, form, args.folder or Path(scratch), args.keep_files)), flush=True)


if __name__ == "__main__":
    restart_tuned()
    main()
