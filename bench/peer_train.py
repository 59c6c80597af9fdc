"""The peer's side of `bench.train`: transformers + PEFT + bitsandbytes on a CPU, in the bench's own environment.

Knows nothing of Lamella. Reads a JSON job from stdin, prints one JSON line. Two verbs:

- `make`: write a random bf16 checkpoint and, with PEFT, the initial adapter that both sides start from;
- `train`: load it in 4-bit, run the given steps, report losses, tokens/s and memory.

The job's `attention`, `experts`, `checkpointing`, `autocast` and `compile` set how it runs; `bench.peer_settings` tries
them one by one. Always: bf16 compute, fp32 adapter, no gradient accumulation, as many threads as cores.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def memory_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process (unlike `ru_maxrss`, not inherited from the parent)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def make(job: dict[str, Any]) -> dict[str, Any]:
    """Write `checkpoint/` (random bf16 weights) and `adapters/<case>/` for each case of the job."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(job["folder"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**job["config"]), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(job["seed"])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:  # norms stay at one
                scale = 0.02 if "embed" in name or "lm_head" in name else p.shape[-1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
    model.save_pretrained(folder / "checkpoint")
    write_tokenizer(folder / "checkpoint", job["config"]["vocab_size"])
    parameters = sum(p.numel() for p in model.parameters())
    for case, experts in job["adapters"].items():
        model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
        torch.manual_seed(job["seed"])
        settings = LoraConfig(
            r=job["rank"], lora_alpha=job["alpha"], target_modules=ATTENTION, task_type="CAUSAL_LM",
            target_parameters=EXPERTS if experts else None,
        )  # fmt: skip
        get_peft_model(model, settings).save_pretrained(folder / "adapters" / case)
    return {"parameters": parameters}


def write_tokenizer(checkpoint: Path, vocab_size: int) -> None:
    """One word per id ("w17" is 17): some peers do not load a model without a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", pad_token="w2")
    fast.save_pretrained(checkpoint)


def quantise_experts(model: Any) -> None:
    """What the plain 4-bit config leaves in bf16: the fused expert matrices."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for module in list(model.modules()):
        if hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")


def adapt_quantised_experts(model: Any, adapter: Path, scale: float) -> list[Any]:
    """LoRA on 4-bit experts as a second torch parametrization after bitsandbytes' own.

    PEFT 0.21 cannot: its `target_parameters` do not find parametrized matrices. The starting values are those of the
    adapter folder, in PEFT's layout (flat axis of lora_A expert-slowest, of lora_B expert-fastest).
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn.utils import parametrize

    class Lora(torch.nn.Module):
        def __init__(self, a_ErI: Any, b_EOr: Any) -> None:
            super().__init__()
            self.a_ErI = torch.nn.Parameter(a_ErI)
            self.b_EOr = torch.nn.Parameter(b_EOr)

        def forward(self, weight_EOI: Any) -> Any:
            return torch.baddbmm(
                weight_EOI, self.b_EOr.to(weight_EOI.dtype), self.a_ErI.to(weight_EOI.dtype), alpha=scale
            )

    saved = load_file(adapter / "adapter_model.safetensors")
    trainable = []
    for name, module in list(model.named_modules()):
        if not name.endswith("mlp.experts"):
            continue
        experts = module.parametrizations["gate_up_proj"][0].quant_state.shape[0]
        # PEFT nests one wrapper per matrix; the outer one's tensors lie under `experts`, the inner under `base_layer`.
        found = [k for k in saved if f".{name.removeprefix('base_model.model.')}." in k and "lora_A" in k]
        for key in found:
            a, b = saved[key].float(), saved[key.replace("lora_A", "lora_B")].float()
            down = b.shape[0] == model.config.hidden_size
            matrix = "down_proj" if down else "gate_up_proj"
            a_ErI = a.reshape(experts, -1, a.shape[1]).clone()
            b_EOr = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1).clone()
            lora = Lora(a_ErI, b_EOr)
            parametrize.register_parametrization(module, matrix, lora, unsafe=True)
            trainable += [lora.a_ErI, lora.b_EOr]
    assert len(trainable) == 4 * model.config.num_hidden_layers, len(trainable)
    return trainable


def open_model(job: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """(model with adapters, its trainable parameters, what is in effect)."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = Path(job["folder"])
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    options = {"experts_implementation": job["experts"]} if job["moe"] else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", quantization_config=four_bit, dtype=torch.bfloat16,
        attn_implementation=job["attention"], **options,
    )  # fmt: skip
    model.config.use_cache = False
    if job["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if job["compile"]:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    if job["quantise_experts"]:
        quantise_experts(model)
    adapter = folder / "adapters" / job["adapter"]
    extra: list[Any] = []
    if job["quantise_experts"] and job["train_experts"]:
        attention = LoraConfig(r=job["rank"], lora_alpha=job["alpha"], target_modules=ATTENTION, task_type="CAUSAL_LM")
        model = get_peft_model(model, attention)
        extra = adapt_quantised_experts(model, adapter, job["alpha"] / job["rank"])
    else:
        model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert all(any(p is q for q in trainable) for p in extra)
    return model, trainable, model_facts(model)


def model_facts(model: Any) -> dict[str, Any]:
    """Bytes by dtype of what is frozen, and number and dtypes of what is trained."""
    frozen: dict[str, int] = {}
    for p in model.parameters():
        if not p.requires_grad:
            frozen[str(p.dtype)] = frozen.get(str(p.dtype), 0) + p.numel() * p.element_size()
    trained = [p for p in model.parameters() if p.requires_grad]
    dtypes = sorted({str(p.dtype) for p in trained})
    return {"frozen_bytes": frozen, "trainable": sum(p.numel() for p in trained), "trainable_dtypes": dtypes}


class Clock:
    """Wall and CPU seconds of each step; `tick` ends one."""

    def __init__(self) -> None:
        self.ticks: list[tuple[float, float]] = []
        self.tick()

    def tick(self) -> None:
        self.ticks.append((time.perf_counter(), time.process_time()))

    def step_s(self, which: int, warmup: int) -> float:
        """Median over the steps after the first `warmup`; 0 for wall, 1 for CPU."""
        spent = [b[which] - a[which] for a, b in itertools.pairwise(self.ticks)]
        return statistics.median(spent[warmup:])


def figures(job: dict[str, Any], tokens: int, clock: Clock, imported: int) -> dict[str, Any]:
    """Rate and CPU time of the median timed step, and memory of this process."""
    return {
        "tokens_per_s": tokens / clock.step_s(0, job["warmup"]),
        "cpu_s_per_step": clock.step_s(1, job["warmup"]),
        "peak_rss_bytes": memory_bytes("VmHWM"),
        "import_rss_bytes": imported,
    }


def dead_tensors(trainable: list[Any], optimizer: Any) -> int:
    """How many trainable tensors never saw a gradient other than zero."""
    return sum(1 for p in trainable if p not in optimizer.state or not optimizer.state[p]["exp_avg"].any())


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run the steps; the first `warmup` of them are not timed."""
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file

    torch.set_num_threads(job["threads"])
    transformers.utils.logging.disable_progress_bar()
    imported = memory_bytes("VmRSS")
    model, trainable, facts = open_model(job)
    model.train()
    optimizer = torch.optim.AdamW(trainable, lr=job["learning_rate"], weight_decay=0.0)
    batches = load_file(Path(job["folder"]) / "batches.safetensors")
    losses, norms = [], []
    clock = Clock()
    for step in range(job["steps"]):
        ids_BT, labels_BT = batches["input_ids"][step], batches["labels"][step]
        with torch.autocast("cpu", torch.bfloat16, enabled=job["autocast"]):
            loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        clock.tick()
    return {
        **figures(job, batches["input_ids"][0].numel(), clock, imported),
        "losses": losses,
        "grad_norms": norms,
        "dead_tensors": dead_tensors(trainable, optimizer),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
        **facts,
    }


if __name__ == "__main__":
    request = json.load(sys.stdin)
    answer = {"make": make, "train": train}[request["verb"]](request)
    print(json.dumps(answer))
