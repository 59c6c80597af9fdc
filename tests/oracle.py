"""Independent oracle: plain transformers + PEFT in float32 on the dequantised base of a store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from lamella.store.reader import Store


def write_dequantised(store: Store, folder: Path) -> Path:
    """The store as a plain fp32 HF folder under the checkpoint's own names."""
    folder.mkdir(parents=True)
    tensors = {}
    for key, _ in store.manifest.groups():
        packed = store.load(key)
        for record in store.records(key):
            tensors[record.name] = packed.dequantize(record.name, torch.empty(record.shape, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in store.path.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja") and file.name != "manifest.json":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    config["tie_word_embeddings"] = store.manifest.tie_word_embeddings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_reference(folder: Path, attention: str = "eager"):
    """transformers' own model, fp32, eager attention, no missing or unexpected keys."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, experts_implementation="eager",
        output_loading_info=True, local_files_only=True,
    )  # fmt: skip
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()


def peft_model(model, folder: Path):
    """PEFT's model with the adapter of `folder`, trainable, fp32."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def label_loss(model, rows: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """Summed cross-entropy over label tokens divided by their number, sequence by sequence, no packing."""
    total, count = torch.zeros(()), 0
    for ids, mask in rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0].float()
        for t, wanted in enumerate(mask):
            if wanted:
                total = total - torch.log_softmax(logits[t - 1], dim=-1)[ids[t]]
                count += 1
    return total / count


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in the Frobenius norm; |a| where b is zero."""
    norm = b.double().norm()
    return float((a.double() - b.double()).norm() / (norm if norm > 0 else 1.0))
