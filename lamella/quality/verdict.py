"""Whether a store is good enough to train on, and what to keep at higher precision. Pure; limits: docs/quality.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from lamella.quality.divergence import Divergence

Classes = frozenset[str]
Level = Literal["fine", "keep", "poor"]


@dataclass(frozen=True)
class Limits:
    """Worst values that are still within: nats per token, ratio of perplexities, share of positions."""

    kl_mean: float
    perplexity_ratio: float
    top1_agreement: float

    def beyond(self, found: Divergence) -> list[str]:
        """What of a divergence is worse, with both values."""
        checks = (
            (found.kl_mean > self.kl_mean, f"KL {found.kl_mean:.3g} nats per token, limit {self.kl_mean:g}"),
            (
                found.perplexity_ratio > self.perplexity_ratio,
                f"perplexity {found.perplexity_ratio:.3f} times the base's, limit {self.perplexity_ratio:g}",
            ),
            (
                found.top1_agreement < self.top1_agreement,
                f"top-1 agreement {100 * found.top1_agreement:.1f} %, limit {100 * self.top1_agreement:g} %",
            ),
        )
        return [text for worse, text in checks if worse]


FINE = Limits(kl_mean=0.06, perplexity_ratio=1.05, top1_agreement=0.88)
"""Twice the KL that 4 bit costs a healthy model that is hard to quantise (LLaMA 3 8B)."""
POOR = Limits(kl_mean=0.4, perplexity_ratio=1.5, top1_agreement=0.72)
"""About what it loses with 2 bit."""


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    level: "fine"; "keep": good with `keep` at higher precision; "poor": not in this form.
    keep: classes to keep, those with fewest weights that do.
    reasons: what is beyond the limits.
    then: divergence measured with these classes from the checkpoint; None where nothing, or everything, is kept.
    """

    level: Level
    keep: tuple[str, ...]
    reasons: tuple[str, ...]
    then: Divergence | None = None

    @property
    def text(self) -> str:
        names = " and ".join(self.keep)
        if self.level == "fine":
            return "fine"
        if self.level == "poor":
            return "poor: not with so few bits"
        return f"keep {names} at higher precision"


def subsets(classes: Iterable[str]) -> list[Classes]:
    """Proper, non-empty ones."""
    names = sorted(classes)
    return [frozenset(c) for n in range(1, len(names)) for c in combinations(names, n)]


def judge(whole: Divergence, parts: Mapping[Classes, Divergence], parameters: Mapping[str, int]) -> Verdict:
    """The verdict on a store.

    Args:
        whole: the store's divergence from its checkpoint.
        parts: classes that are the store's -> divergence with all others from the checkpoint, as far as measured.
        parameters: weights of each quantised class.
    """
    reasons = FINE.beyond(whole)
    if not reasons:
        return Verdict("fine", (), ())
    every = frozenset(parameters)
    for stored in sorted(parts, key=lambda s: (sum(parameters[c] for c in every - s), sorted(s))):
        if stored != every and not FINE.beyond(parts[stored]):
            return Verdict("keep", tuple(sorted(every - stored)), tuple(reasons), parts[stored])
    return Verdict("poor" if POOR.beyond(whole) else "keep", tuple(sorted(every)), tuple(reasons))


def formats_fragment(verdict: Verdict, formats: Mapping[str, str], names: Iterable[str]) -> str:
    """`quantize.toml` that does what the verdict says; "" where there is nothing to do.

    Args:
        formats: each quantised class's format now.
        names: single tensors to keep as they are in the checkpoint.
    """
    if verdict.level == "fine":
        return ""
    lines = ["[classes]"]
    for name, now in sorted(formats.items()):
        if name in verdict.keep:
            lines.append(f'{name} = "{"bf16" if now == "int8" else "int8"}"')
        elif now != "nf4":
            lines.append(f'{name} = "{now}"')
    for name in names:
        lines += ["", "[[names]]", f'match = "{name}"', 'format = "bf16"']
    return "\n".join(lines) + "\n"
