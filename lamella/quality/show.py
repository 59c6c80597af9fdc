"""The report of `lamella quantize --check` as people read it."""

from __future__ import annotations

from rich.table import Table

from lamella.console import out
from lamella.quality.divergence import Divergence
from lamella.quality.gate import FEW_TOKENS, QUALITY_NAME, Quality
from lamella.quality.weights import by_class
from lamella.units import format_count, format_seconds


def print_quality(quality: Quality) -> None:
    """Table by class, worst tensors, verdict and what to do, on stdout."""
    whole, texts = quality.whole, quality.texts
    title = f"store beside its checkpoint: {whole.tokens} positions of {whole.texts} texts, computed in {quality.dtype}"
    table = Table(title=title, title_justify="left")
    for name in ("from the store", "KL, nats", "KL p99", "top-1", "perplexity", "ratio"):
        table.add_column(name, justify="left" if name == "from the store" else "right", no_wrap=True)
    table.add_row("nothing", "0", "0", "100 %", f"{whole.perplexity_a:.3f}", "1")
    for classes, found in sorted(quality.parts.items(), key=lambda item: (len(item[0]), -item[1].kl_mean)):
        table.add_row(" + ".join(sorted(classes)), *_cells(found))
    table.add_section()
    table.add_row("all of it", *_cells(whole))
    out.print(table)
    for name, error in sorted(by_class(quality.errors).items()):
        weights = format_count(quality.parameters[name])
        out.print(
            f"{name}: {weights} weights in {quality.formats[name]}, median relative error {error:.3f}", markup=False
        )
    for worst in quality.worst():
        out.print(f"worst weights: {worst.relative:.3f}  {worst.name} ({worst.format})", markup=False)
    if whole.tokens < FEW_TOKENS:
        out.print(f"only {whole.tokens} positions: the figures are rough; give more text, or a higher --check-tokens")
    for reason, rows in texts.unusable.items():
        out.print(f"passed over: {rows} rows, {reason}", markup=False)
    if texts.cut:
        out.print(f"cut at the end: {texts.cut} texts")
    _print_verdict(quality)
    took = format_seconds(quality.seconds)
    out.print(f"{quality.store / QUALITY_NAME}: these figures and every part's; took {took}", markup=False)


def _cells(found: Divergence) -> list[str]:
    spread = "" if found.kl_error is None else f" ± {found.kl_error:.1g}"
    return [f"{found.kl_mean:.4f}{spread}", f"{found.kl_p99:.3f}", f"{100 * found.top1_agreement:.1f} %",
            f"{found.perplexity_b:.3f}", f"{found.perplexity_ratio:.3f}"]  # fmt: skip


def _print_verdict(quality: Quality) -> None:
    verdict = quality.verdict
    style = {"fine": "bold green", "keep": "bold yellow", "poor": "bold red"}[verdict.level]
    out.print(f"verdict: {verdict.text}", style=style, markup=False)
    for reason in verdict.reasons:
        out.print(f"  {reason}", markup=False)
    if verdict.then is not None:
        then = verdict.then
        out.print(f"  with {' and '.join(verdict.keep)} as in the checkpoint: KL {then.kl_mean:.4f}, same top-1 "
                  f"{100 * then.top1_agreement:.1f} %, perplexity ratio {then.perplexity_ratio:.3f}", markup=False)  # fmt: skip
    if quality.fragment:
        out.print("write this to quantize.toml and quantise again with --formats quantize.toml (another -o STORE):")
        out.print(quality.fragment, markup=False, style="cyan")
