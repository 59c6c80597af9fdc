"""AdamW on the adapter's fp32 parameters, global clipping, and the learning rate as a function of the step.

Nothing here keeps hidden state: the learning rate depends on the step alone, and the moments are handed out
and taken back as a flat dict of tensors, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lamella.config import TrainConfig
from lamella.errors import RunFailed, UserError

_STATE = ("step", "exp_avg", "exp_avg_sq")


def learning_rate(config: TrainConfig, step_index: int, total_steps: int) -> float:
    """Learning rate of step `step_index` (from 0) of `total_steps`.

    Linear warm-up: step k of the first `warmup_steps` has peak * (k + 1) / warmup_steps. Afterwards, with
    t = (steps since warm-up) / (steps left after warm-up): cosine gives peak * (1 + cos(pi t)) / 2, linear
    peak * (1 - t), constant peak. The step after the last one would have 0.
    """
    peak = config.learning_rate
    if step_index < config.warmup_steps:
        return peak * (step_index + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    t = (step_index - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    return peak * (1 + math.cos(math.pi * t)) / 2 if config.schedule == "cosine" else peak * (1 - t)


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019; `torch.optim.AdamW`) over named fp32 parameters.

    Attributes:
        last_step_index: index of the last step that updated the parameters here; None before the first.

    Raises:
        UserError: no parameters.
        RunFailed: a parameter that is not fp32 (half-precision masters lose small updates).
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], config: TrainConfig, total_steps: int) -> None:
        if not parameters:
            raise UserError("the adapter has no parameters: nothing would be trained", fix="check lora.targets")
        wrong = {name: p.dtype for name, p in parameters.items() if p.dtype != torch.float32}
        if wrong:
            name, dtype = next(iter(wrong.items()))
            raise RunFailed(
                f"{len(wrong)} adapter tensors are not fp32, e.g. {name} is {dtype}", fix="keep adapter masters in fp32"
            )
        self.parameters = parameters
        self.config = config
        self.total_steps = total_steps
        self.last_step_index: int | None = None
        self.adamw = torch.optim.AdamW(
            list(parameters.values()), lr=config.learning_rate, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip

    def zero_grad(self) -> None:
        """Forget gradients; a parameter that the next backward does not reach is left with None."""
        for p in self.parameters.values():
            p.grad = None

    def grad_norm(self) -> float:
        """Global L2 norm of all gradients; a missing gradient counts as zero. Non-finite when any element is."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        return float(get_total_norm(grads)) if grads else 0.0

    def step(self, step_index: int, grad_norm: float) -> float:
        """Clip by `grad_norm` (as `grad_norm()` gave it), update, return the learning rate used."""
        if self.config.clip_norm > 0:
            clip_grads_with_norm_(self.parameters.values(), self.config.clip_norm, torch.tensor(grad_norm))
        rate = learning_rate(self.config, step_index, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.last_step_index = step_index
        return rate

    def state_tensors(self) -> dict[str, Tensor]:
        """`<parameter>/<step|exp_avg|exp_avg_sq>` -> tensor; parameters never updated have no entry."""
        return {
            f"{name}/{key}": self.adamw.state[p][key]
            for name, p in self.parameters.items()
            if p in self.adamw.state
            for key in _STATE
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state_tensors` gave.

        Raises:
            UserError: entries for other parameters, or of other shapes.
        """
        self.adamw.state.clear()
        left = dict(tensors)
        for name, p in self.parameters.items():
            entries = {key: left.pop(f"{name}/{key}", None) for key in _STATE}
            if all(value is None for value in entries.values()):
                continue
            state: dict[str, Tensor] = {}
            for key, value in entries.items():
                shape = torch.Size(()) if key == "step" else p.shape
                if value is None or value.shape != shape:
                    seen = "missing" if value is None else f"of shape {tuple(value.shape)}, not {tuple(shape)}"
                    raise UserError(f"optimizer state {name}/{key} is {seen}", fix="start afresh with --fresh")
                device = "cpu" if key == "step" and p.device.type == "cpu" else p.device
                state[key] = value.to(device=device, dtype=torch.float32).clone()
            self.adamw.state[p] = state
        if left:
            raise UserError(
                f"optimizer state for {len(left)} unknown tensors, e.g. {next(iter(left))}",
                fix="start afresh with --fresh",
            )
