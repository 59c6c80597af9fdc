"""ms-swift's side of `bench.train`, in its own environment: its own supervised training (`SwiftSft`) on the same rows.

Knows nothing of Lamella. Reads a JSON job from stdin, prints one JSON line. Its 4-bit load leaves fused experts in bf16.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))


from bench.peer_train import Clock, dead_tensors, figures, memory_bytes, model_facts


def arguments(job: dict[str, Any], rows: int, steps: int, length: int, scratch: str) -> list[str]:
    """The command line of `swift sft` for this job."""
    folder = Path(job["folder"])
    family = json.loads((folder / "checkpoint" / "config.json").read_text())["model_type"]
    settings = {
        "model": folder / "checkpoint", "model_type": {"llama": "llama", "qwen3_moe": "qwen3_moe"}[family],
        "template": "dummy", "tuner_type": "lora", "adapters": folder / "adapters" / job["adapter"],
        "load_args": "false", "torch_dtype": "bfloat16", "quant_method": "bnb", "quant_bits": 4,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": "true", "bnb_4bit_compute_dtype": "bfloat16",
        "attn_impl": "sdpa", "gradient_checkpointing": "false", "dataset": scratch + "/rows.jsonl",
        "split_dataset_ratio": 0, "max_length": length, "per_device_train_batch_size": rows, "max_steps": steps,
        "gradient_accumulation_steps": 1, "learning_rate": job["learning_rate"], "lr_scheduler_type": "constant",
        "warmup_ratio": 0, "weight_decay": 0, "adam_beta2": 0.999, "max_grad_norm": 1.0, "optim": "adamw_torch",
        "bf16": "true", "use_cpu": "true", "save_strategy": "no", "report_to": "none", "logging_steps": 1000,
        "train_dataloader_shuffle": "false", "dataloader_num_workers": 0, "output_dir": scratch, "seed": 0,
        "router_aux_loss_coef": 0,
    }  # fmt: skip
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def train(job: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Run the steps; the first `warmup` of them are not timed."""
    import peft
    import swift
    import torch
    import transformers
    from safetensors.torch import load_file
    from swift.pipelines import SwiftSft

    torch.set_num_threads(job["threads"])
    imported = memory_bytes("VmRSS")
    batches = load_file(Path(job["folder"]) / "batches.safetensors")
    steps, rows, length = batches["input_ids"][: job["steps"]].shape
    ids, labels = (batches[name][:steps].reshape(-1, length).tolist() for name in ("input_ids", "labels"))
    encoded = [
        {"input_ids": i, "labels": wanted, "length": length, "lengths": [length]}
        for i, wanted in zip(ids, labels, strict=True)
    ]
    clock = Clock()
    losses: list[float] = []

    class Timed(transformers.TrainerCallback):
        def on_train_begin(self, *_args: Any, **_more: Any) -> None:
            clock.ticks.clear()
            clock.tick()

        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            clock.tick()

    class Sft(SwiftSft):  # type: ignore[misc]
        """The given rows instead of a data set of texts; the rest is its own."""

        def _prepare_dataset(self) -> Any:
            return encoded, None

        def train(self, trainer: Any) -> Any:
            inner = trainer.training_step

            def training_step(*args: Any, **more: Any) -> Any:
                loss = inner(*args, **more)
                losses.append(float(loss))
                return loss

            trainer.training_step = training_step
            trainer.add_callback(Timed())
            self.trainer = trainer
            return super().train(trainer)

    Path(scratch, "rows.jsonl").write_text("")
    run = Sft(arguments(job, rows, steps, length, scratch))
    run.main()
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    optimizer = getattr(run.trainer.optimizer, "optimizer", run.trainer.optimizer)
    return {
        **figures(job, rows * length, clock, imported),
        "losses": losses,
        "dead_tensors": dead_tensors(trainable, optimizer),
        "versions": {m.__name__: m.__version__ for m in (torch, swift, transformers, peft)},
        **model_facts(run.model),
    }


if __name__ == "__main__":
    request = json.load(sys.stdin)
    # it prints much; the answer must be the last line
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as made:
        answer = train(request, made)
    print(json.dumps(answer))
