"""AdamW on the adapter's fp32 parameters, global clipping, and the learning rate as a function of the step.

Nothing here keeps hidden state: the learning rate depends on the step alone, and the moments are handed out
and taken back as a flat dict of tensors, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lamella.adapter.pages import Slot, StatePages
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

    With `pages` the moments lie there too, and every pass goes layer by layer; the bits are the same.

    Attributes:
        last_step_index: index of the last step that updated the parameters here; None before the first.

    Raises:
        UserError: no parameters.
        RunFailed: a parameter that is not fp32 (half-precision masters lose small updates).
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        config: TrainConfig,
        total_steps: int,
        pages: StatePages | None = None,
    ) -> None:
        if not parameters:
            raise UserError("the adapter has no parameters: nothing would be trained", fix="check lora.targets")
        handles = dict(zip(parameters, parameters.values(), strict=True))  # no value is looked at
        wrong = {name: p.dtype for name, p in handles.items() if p.dtype != torch.float32}
        if wrong:
            name, dtype = next(iter(wrong.items()))
            raise RunFailed(
                f"{len(wrong)} adapter tensors are not fp32, e.g. {name} is {dtype}", fix="keep adapter masters in fp32"
            )
        self.parameters = parameters
        self.config = config
        self.total_steps = total_steps
        self.last_step_index: int | None = None
        self.pages = pages
        self.groups = [list(parameters)] if pages is None else pages.groups()
        self.parts = [
            torch.optim.AdamW(
                [handles[name] for name in names], lr=config.learning_rate, betas=config.betas, eps=config.eps,
                weight_decay=config.weight_decay, fused=True,
            )
            for names in self.groups
        ]  # fmt: skip
        self._part_of = {name: part for names, part in zip(self.groups, self.parts, strict=True) for name in names}

    @property
    def adamw(self) -> torch.optim.AdamW:
        """One of the group's optimizers; their settings are equal."""
        return self.parts[0]

    def zero_grad(self) -> None:
        """Forget gradients; a parameter that the next backward does not reach is left with None."""
        for p in self.parameters.values():
            p.grad = None

    def grad_norm(self) -> float:
        """Global L2 norm of all gradients; a missing gradient counts as zero. Non-finite when any element is."""
        if self.pages is None:
            grads = [p.grad for p in self.parameters.values() if p.grad is not None]
            return float(get_total_norm(grads)) if grads else 0.0
        norms = [torch.linalg.vector_norm(p.grad) for _, p in self.parameters.items() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def step(self, step_index: int, grad_norm: float) -> float:
        """Clip by `grad_norm` (as `grad_norm()` gave it), update, return the learning rate used."""
        rate = learning_rate(self.config, step_index, self.total_steps)
        norm = torch.tensor(grad_norm)
        for names, part in zip(self.groups, self.parts, strict=True):
            if self.pages is not None:
                self._place_moments(names)
            if self.config.clip_norm > 0:
                clip_grads_with_norm_([self.parameters[name] for name in names], self.config.clip_norm, norm)
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
        self.last_step_index = step_index
        return rate

    def _place_moments(self, names: list[str]) -> None:
        """Give parameters that are about to have their first update moments in the pages (zero there)."""
        assert self.pages is not None
        for name in names:
            p = self.parameters[name]
            if p.grad is not None and p not in self._part_of[name].state:
                self._part_of[name].state[p] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": self.pages.view(name, "exp_avg"),
                    "exp_avg_sq": self.pages.view(name, "exp_avg_sq"),
                }

    def tensors_of(self, name: str, moments: bool) -> list[Tensor]:
        """The parameter, and with `moments` its step count and moments (zeros before its first update)."""
        p = self.parameters[name]
        if not moments:
            return [p]
        if p not in self._part_of[name].state:
            device = "cpu" if p.device.type == "cpu" else p.device
            self._part_of[name].state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }
        return [p, *(self._part_of[name].state[p][key] for key in _STATE)]

    def state_tensors(self) -> dict[str, Tensor]:
        """`<parameter>/<step|exp_avg|exp_avg_sq>` -> tensor; parameters never updated have no entry."""
        return {
            f"{name}/{key}": self._part_of[name].state[p][key]
            for name, p in self.parameters.items()
            if p in self._part_of[name].state
            for key in _STATE
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave; asks for one parameter's tensors at a time.

        Raises:
            UserError: entries for other parameters, or of other shapes.
        """
        for part in self.parts:
            part.state.clear()
        left = set(tensors)
        for name, p in self.parameters.items():
            keys = {key: f"{name}/{key}" for key in _STATE}
            if not left & set(keys.values()):
                continue
            state: dict[str, Tensor] = {}
            for key, full in keys.items():
                value = tensors[full] if full in left else None
                left.discard(full)
                shape = torch.Size(()) if key == "step" else p.shape
                if value is None or value.shape != shape:
                    seen = "missing" if value is None else f"of shape {tuple(value.shape)}, not {tuple(shape)}"
                    raise UserError(f"optimizer state {name}/{key} is {seen}", fix="start afresh with --fresh")
                if self.pages is not None and key != "step":
                    slot: Slot = "exp_avg" if key == "exp_avg" else "exp_avg_sq"
                    state[key] = self.pages.view(name, slot).copy_(value)
                    continue
                device = "cpu" if key == "step" and p.device.type == "cpu" else p.device
                state[key] = value.to(device=device, dtype=torch.float32).clone()
            self._part_of[name].state[p] = state
        if left:
            raise UserError(
                f"optimizer state for {len(left)} unknown tensors, e.g. {min(left)}",
                fix="start afresh with --fresh",
            )
