"""Which export is loaded in which engine, and the table of what came out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENGINES = Path(__file__).parent.parent.parent / ".engines"


@dataclass(frozen=True)
class Case:
    """An export of the dense or the MoE model, and the engine that is to load it."""

    model: str
    to: str
    engine: str
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.to}-{self.engine}" + ("" if self.dtype == "float32" else f"-{self.dtype}")


TRANSFORMERS = [
    Case(model, to, "transformers") for model in ("dense", "moe") for to in ("peft", "fp32", "bf16", "fp16")
] + [Case("dense", "nf4", "transformers")]
LLAMA_CPP = [
    Case(model, to, "llama.cpp") for model in ("dense", "moe") for to in ("gguf", "gguf-f32", "gguf-f16", "gguf-q8_0")
]
VLLM = [Case("dense", "vllm", "vllm"), Case("dense", "fp32", "vllm"), Case("moe", "fp32", "vllm"),
        Case("dense", "bf16", "vllm", "bfloat16")]  # fmt: skip
MLX = [Case("dense", "mlx", "mlx"), Case("dense", "fp32", "mlx"), Case("moe", "mlx", "mlx")]
CASES = [*TRANSFORMERS, *LLAMA_CPP, *VLLM, *MLX]


def python_of(engine: str) -> Path | None:
    """The engine's own Python, or None: ours."""
    return None if engine == "transformers" else ENGINES / engine / "bin" / "python"
