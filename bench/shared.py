"""One copy of the base per host: `python -m bench.shared`.

Several processes (4) take real steps at the same time on one store of random weights (`lamella store synth`, about
200 MB), each with its own sequences. While all hold their layers, the kernel is asked what they hold: proportional set
size (PSS), where a page that n processes map counts 1/n in each. Once with the base in a map that they share, once with
copies of their own. One JSON line: PSS of the store's maps summed over ranks, its ratio to the store's bytes, growth of
the processes' whole PSS since before they opened the store, and whether both ways gave equal gradients.

    python -m bench.shared [--ranks 4] [--layers 24] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.size import ROOT, Case, make_store, qwen3_moe
from lamella.errors import UserError
from lamella.hardware.memory import held_by

_SMALL = {"vocab_size": 2048, "num_experts": 32, "num_experts_per_tok": 4, "head_dim": 64, "max_position_embeddings": 2048,
          "eos_token_id": 2047}  # fmt: skip
LONGEST_S = 600
ROWS, ROW_TOKENS, STEPS = 4, 64, 2


def case_of(layers: int) -> Case:
    """A Qwen3-MoE shape of about 8.4 MB a layer; its vocabulary is small, as only some rows of a table are read."""
    return Case(f"shared-{layers}", qwen3_moe(layers, 512, 8, 288, **_SMALL), 0, "1GB")


def child(store: Path, rank: int, sharers: int) -> None:
    """One rank: opens the store, takes its steps, says what it found, and holds everything until its input ends."""
    import torch
    import xxhash

    from lamella.adapter import Adapter
    from lamella.config import LoraConfig
    from lamella.engine import Engine
    from lamella.models.layout import pack_rows
    from lamella.store.reader import Store

    before = held_by(os.getpid(), store)
    engine = Engine.open(Store.open(store), threads=1, ranks_here=sharers, recompute="always")
    engine.attach(Adapter.create(engine.skeleton, LoraConfig(rank=4), seed=0))
    generator = torch.Generator().manual_seed(rank)
    digest = xxhash.xxh3_128()
    for step in range(STEPS):
        ids = torch.randint(engine.config.vocab_size, (ROWS, ROW_TOKENS), generator=generator).tolist()
        batch = pack_rows([(row, [False] + [True] * (ROW_TOKENS - 1)) for row in ids])
        out = engine.step([batch], step_index=step, label_tokens=ROWS * (ROW_TOKENS - 1))
        digest.update(repr(out.loss_sum).encode())
    assert engine.adapter is not None
    for p in engine.adapter.parameters().values():
        assert p.grad is not None
        digest.update(p.grad.numpy())
    facts = engine.facts()
    found = {"gradients": digest.hexdigest(), "base": facts["base"], "layers": facts["layers_resident"],
             "checksum": engine.walk.weights.resident_checksum(), "pss_before": before.pss}  # fmt: skip
    print(json.dumps(found), flush=True)
    sys.stdin.read()
    engine.close()


def run_ranks(store: Path, ranks: int, sharers: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each rank says, and what all hold together while they live."""
    command = [sys.executable, "-m", "bench.shared", "--child", str(store)]
    children = [
        subprocess.Popen([*command, str(rank), str(sharers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                         cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = []
        for process in children:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise UserError(f"a rank ended with exit code {process.wait(LONGEST_S)}", fix="see its error above")
            said.append(json.loads(line))
        held = [held_by(process.pid, store) for process in children]
    finally:
        for process in children:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(LONGEST_S)
    total = {
        "base": said[0]["base"],
        "store_maps_pss_bytes": sum(h.mapped for h in held),
        "pss_growth_bytes": sum(h.pss for h in held) - sum(s["pss_before"] for s in said),
        "private_bytes_per_rank": max(h.private for h in held),
    }
    return said, total


def measure(folder: Path, ranks: int, layers: int) -> dict[str, Any]:
    """Both ways, side by side."""
    from lamella.store.manifest import read_manifest

    store = make_store(folder.resolve(), case_of(layers))
    store_bytes = sum(group.nbytes for _, group in read_manifest(store).groups())
    shared_said, shared = run_ranks(store, ranks, ranks)
    private_said, private = run_ranks(store, ranks, 1)
    ratio = shared["store_maps_pss_bytes"] / store_bytes
    same = all(
        (a["gradients"], a["checksum"]) == (b["gradients"], b["checksum"])
        for a, b in zip(shared_said, private_said, strict=True)
    )
    return {
        "ranks": ranks, "store_bytes": store_bytes, "layers": layers, "base_pss_bytes": shared["store_maps_pss_bytes"],
        "ratio": round(ratio, 3), "ok": abs(ratio - 1) <= 0.05 and same, "equal_results": same,
        "shared": shared, "private": private,
        "growth_in_stores": {"shared": round(shared["pss_growth_bytes"] / store_bytes, 2),
                             "private": round(private["pss_growth_bytes"] / store_bytes, 2)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24, help="of about 8.4 MB each")
    parser.add_argument("--folder", type=Path, help="keep the store here; default: a temporary folder")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(Path(args.child[0]), int(args.child[1]), int(args.child[2]))
        return
    if args.ranks < 2 or args.layers < 1:
        raise UserError(f"--ranks is {args.ranks}, --layers {args.layers}", fix="take 2 ranks and 1 layer or more")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(folder, args.ranks, args.layers)), flush=True)


if __name__ == "__main__":
    main()
