"""Which export is loaded in which engine, and the table of what came out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENGINES = Path(__file__).parent.parent.parent / ".engines"


@dataclass(frozen=True)
class Case:
    """An export of the dense or the MoE model, and the engine that is to load it.

    `max_loss`: what rounding may lose of so young an adapter; by default bf16 is refused here (54 % of attention's change).
    """

    model: str
    to: str
    engine: str
    dtype: str = "float32"
    max_loss: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-{self.to}-{self.engine}" + ("" if self.dtype == "float32" else f"-{self.dtype}")


TRANSFORMERS = [
    *(Case(model, to, "transformers") for model in ("dense", "moe") for to in ("peft", "fp32", "fp16")),
    *(Case(model, "bf16", "transformers", max_loss=1.0) for model in ("dense", "moe")),
    Case("dense", "nf4", "transformers", max_loss=1.0),
]
LLAMA_CPP = [
    Case(model, to, "llama.cpp") for model in ("dense", "moe") for to in ("gguf", "gguf-f32", "gguf-f16", "gguf-q8_0")
]
VLLM = [Case("dense", "vllm", "vllm"), Case("dense", "fp32", "vllm"), Case("moe", "fp32", "vllm"),
        Case("dense", "bf16", "vllm", "bfloat16", max_loss=1.0)]  # fmt: skip
MLX = [Case("dense", "mlx", "mlx"), Case("dense", "fp32", "mlx"), Case("moe", "mlx", "mlx")]
SERVE = [Case("dense", "fp32", "transformers-serve"), Case("moe", "fp32", "transformers-serve")]
CASES = [*TRANSFORMERS, *SERVE, *LLAMA_CPP, *VLLM, *MLX]


def python_of(engine: str) -> Path | None:
    """The engine's own Python, or None: ours."""
    return None if engine == "transformers" else ENGINES / engine / "bin" / "python"
