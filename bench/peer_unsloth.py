"""Unsloth's side of `bench.train`, in its own environment: its CPU backend (stock transformers, PEFT and TRL with a
chunked loss, fused AdamW and bf16) through its own SFTTrainer.

Knows nothing of Lamella. Reads a JSON job from stdin, prints one JSON line. `UNSLOTH_CPU_COMPILE=1` has it compile the
decoder layers. Its 4-bit load leaves fused experts in bf16.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))


from bench.peer_train import ATTENTION, EXPERTS, Clock, dead_tensors, figures, memory_bytes, model_facts


def open_model(job: dict[str, Any]) -> tuple[Any, Any]:
    """(model with the starting adapter, tokenizer)."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from unsloth import FastLanguageModel

    folder = Path(job["folder"])
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder / "checkpoint"), max_seq_length=2048, load_in_4bit=True,
        use_gradient_checkpointing=job.get("checkpointing", False),
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=job["rank"], lora_alpha=job["alpha"], target_modules=ATTENTION,
        target_parameters=EXPERTS if job["train_experts"] else None,
        use_gradient_checkpointing=job.get("checkpointing", False),
    )  # fmt: skip
    found = set_peft_model_state_dict(
        model, load_file(folder / "adapters" / job["adapter"] / "adapter_model.safetensors")
    )
    missing = [name for name in found.missing_keys if "lora_" in name]
    if missing or found.unexpected_keys:
        raise RuntimeError(f"starting adapter: {len(missing)} missing, unexpected: {found.unexpected_keys[:3]}")
    return model, tokenizer


def train(job: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Run the steps; the first `warmup` of them are not timed."""
    import unsloth  # first: it changes what is imported after it  # isort: skip
    import peft
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from safetensors.torch import load_file

    torch.set_num_threads(job["threads"])
    imported = memory_bytes("VmRSS")
    model, tokenizer = open_model(job)
    batches = load_file(Path(job["folder"]) / "batches.safetensors")
    steps, rows, length = batches["input_ids"][: job["steps"]].shape
    data = Dataset.from_dict(
        {name: batches[name][:steps].reshape(-1, length).tolist() for name in ("input_ids", "labels")}
    )

    class Trainer(trl.SFTTrainer):
        losses: list[float] = []  # noqa: RUF012

        def _get_train_sampler(self, *_args: Any, **_more: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **more: Any) -> Any:
            loss = super().training_step(*args, **more)
            self.losses.append(float(loss))
            return loss

    class Timed(transformers.TrainerCallback):
        def on_train_begin(self, *_args: Any, **_more: Any) -> None:
            self.clock = Clock()

        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            self.clock.tick()

    timed = Timed()

    settings = trl.SFTConfig(
        output_dir=scratch, per_device_train_batch_size=rows, max_steps=steps, learning_rate=job["learning_rate"],
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch",
        adam_beta1=0.9, adam_beta2=0.999, logging_strategy="no", save_strategy="no", report_to="none", bf16=True,
        gradient_checkpointing=job.get("checkpointing", False), max_length=length, packing=False, seed=0,
        dataset_kwargs={"skip_prepare_dataset": True}, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[timed])
    trainer.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {
        **figures(job, rows * length, timed.clock, imported),
        "losses": Trainer.losses,
        "dead_tensors": dead_tensors(trainable, optimizer),
        "versions": {m.__name__: m.__version__ for m in (torch, unsloth, transformers, trl, peft)},
        **model_facts(model),
    }


if __name__ == "__main__":
    request = json.load(sys.stdin)
    # it prints on import; the answer must be the last line
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as made:
        answer = train(request, made)
    print(json.dumps(answer))
