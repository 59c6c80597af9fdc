"""What a run costs on a machine with known prices."""

from __future__ import annotations

from lamella.config import Section
from lamella.errors import UserError
from lamella.forecast.number import Number
from lamella.hardware.machine import DeviceFacts, Host, Machine


class Money(Section):
    """Costs in US dollars; None: a price is not known."""

    usd_per_hour: float | None
    prices: tuple[str, ...]
    """Where the price comes from, one entry per kind of device or host; or what has none."""
    hours: float
    usd: float | None
    """Of the whole run."""
    usd_per_epoch: float | None
    usd_per_million_tokens: float | None

    def line(self) -> str:
        """`0.91 h at $9.96 an hour: $9.06`, or that no price is known."""
        if self.usd is None or self.usd_per_hour is None:
            return f"{format_hours(self.hours)}; no price known (give --price-per-hour)"
        return f"{format_hours(self.hours)} at {format_usd(self.usd_per_hour)} an hour: {format_usd(self.usd)}"


def format_hours(hours: float) -> str:
    """Hours as `26 h`, `1.6 h`, `0.91 h`, or minutes and seconds below a tenth of an hour."""
    if hours < 1 / 60:
        return f"{hours * 3600:.2g} s"
    return f"{hours * 60:.2g} min" if hours < 0.1 else f"{hours:.3g} h"


def format_usd(usd: float) -> str:
    """Dollars with three figures: `$9.06`, `$1,240`, `$0.0031`."""
    if usd >= 100:
        return f"${usd:,.0f}"
    return f"${usd:.2f}" if usd >= 0.1 or usd == 0 else f"${usd:.2g}"


def price_of(machine: Machine, given: float | None = None) -> tuple[float | None, tuple[str, ...]]:
    """US dollars an hour and where they come from: `given`; else what hosts and devices cost together. A host's price covers
    its devices that have none of their own, and devices that all have one cover their host.

    Raises:
        UserError: a price that is not positive.
    """
    if given is not None:
        if not given > 0:
            raise UserError(f"--price-per-hour {given:g} is not positive", fix="give US dollars an hour, such as 12.5")
        return given, (f"{format_usd(given)} an hour, as given",)
    total = 0.0
    lines: dict[str, int] = {}
    missing: dict[str, int] = {}
    for number, host in enumerate(machine.hosts):
        devices = [device for device in machine.devices if device.host == number]
        parts: list[Host | DeviceFacts] = [host, *devices]
        for part in parts:
            if part.price is not None:
                total += part.price.usd_per_hour
                text = f"{part.name} {format_usd(part.price.usd_per_hour)} an hour ({part.price.source}, {part.price.date})"
                lines[text] = lines.get(text, 0) + 1
        if host.price is None:
            for name in [d.name for d in devices if d.price is None] or ([] if devices else [host.name]):
                missing[name] = missing.get(name, 0) + 1
    shown = tuple(f"{count} x {text}" if count > 1 else text for text, count in lines.items())
    if missing:
        return None, (*shown, f"no price known of {', '.join(missing)} (give --price-per-hour)")
    return total, shown


def money_of(machine: Machine, hours: float, tokens: float, epochs: float, given: float | None = None) -> Money:
    """Costs of a run.

    Args:
        hours: of the run.
        tokens: that it passes; epochs: passes over the data that these are.
        given: US dollars an hour, in place of the machine's own.
    """
    hourly, prices = price_of(machine, given)
    usd = None if hourly is None else hours * hourly
    return Money(
        usd_per_hour=hourly, prices=prices, hours=hours, usd=usd,
        usd_per_epoch=None if usd is None else usd / epochs,
        usd_per_million_tokens=None if usd is None else usd / (tokens / 1e6),
    )  # fmt: skip


def money_numbers(money: Money, tokens: float, epochs: float) -> list[Number]:
    """The figures with their formulas; none without a price."""
    if money.usd is None or money.usd_per_hour is None:
        return []
    assert money.usd_per_epoch is not None and money.usd_per_million_tokens is not None
    return [
        Number(name="money.run", value=money.usd, unit="USD", formula="hours * usd_per_hour",
               inputs={"hours": money.hours, "usd_per_hour": money.usd_per_hour}),
        Number(name="money.epoch", value=money.usd_per_epoch, unit="USD", formula="run / epochs",
               inputs={"run": money.usd, "epochs": epochs}),
        Number(name="money.million_tokens", value=money.usd_per_million_tokens, unit="USD", formula="run / tokens * 1e6",
               inputs={"run": money.usd, "tokens": tokens}),
    ]  # fmt: skip
