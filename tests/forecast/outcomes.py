"""Forecasts written by hand, for what shows and saves them."""

from dataclasses import replace
from types import SimpleNamespace

from lamella.config import LoraConfig, TrainConfig
from lamella.forecast.events import LinkUse, Part, Played
from lamella.forecast.outcome import Change, Forecast, HostForecast, RankForecast, Rejected
from lamella.forecast.rows import given_rows
from lamella.forecast.trainable import sites_of
from lamella.plan.split import Split, Stage
from tests.forecast import shapes
from tests.forecast.machines import gpu, machine

PARTS = {"base": 30_000_000_000, "adapter state": 200_000_000, "activations": 1_500_000_000, "context": 500_000_000}


def rank_of(k, **changes):
    made = RankForecast(
        rank=k, name=f"rank {k} (G80)", device=k, host=0, first=0, last=94, share=0.25, parts=dict(PARTS),
        formulas={"base": "layers that stay, as stored"}, need=sum(PARTS.values()), have=80_000_000_000, on_device=94,
        in_host=0, on_disk=0, keeps=False, state_on_disk=False, read_bytes=0, busy=0.9,
        seconds={"forward": 2.0, "backward": 6.0, "reduce": 0.5}, causes={"experts": 6.0, "attention": 2.0},
        wait_s={"rank 1": 0.4},
    )  # fmt: skip
    return replace(made, **changes)


def question_of(shape=None, rows=None, **settings):
    """What `Forecaster` is asked, as far as showing needs it."""
    shape = shape or shapes.qwen_235b()
    lora = LoraConfig(**settings.pop("lora", {}))
    return SimpleNamespace(
        shape=shape, rows=rows or given_rows(3600, 4096, 4096), lora=lora, train=TrainConfig(**settings),
        machine=machine(*[gpu()] * 4),
    )  # fmt: skip


def forecast_of(question, ranks=None, **changes):
    ranks = ranks or [rank_of(k) for k in range(4)]
    links = {"peer 0-1": LinkUse(400_000_000, 0.4, 0.04), "host 0": LinkUse(0, 0.0, 0.0)}
    played = Played(
        start_s=(0.0,), end_s=(9.5,), step_s=9.5, seconds={r.rank: r.seconds for r in ranks},
        causes={r.rank: r.causes for r in ranks}, wait_s={r.rank: r.wait_s for r in ranks},
        busy={r.rank: r.busy for r in ranks}, links=links, path=(0,),
        bottleneck=(Part("compute of rank 0", 9.0, 0.947), Part("link of rank 1", 0.5, 0.053)),
    )  # fmt: skip
    host = HostForecast("box", {"programs": 8_000_000_000}, 512_000_000_000, {}, None, {"store": 123_000_000_000}, None,
                        {"shard": 10_000_000_000})  # fmt: skip
    steps = question.rows.steps(question.train)
    made = Forecast(
        fits=True, shortfall=(), changes=(), sites=tuple(sites_of(question.shape, question.lora)), dtype="bf16",
        split=Split((Stage(0, 94, (0, 1, 2, 3), (0.25,) * 4, "experts"),)), plan=None, played=played, ranks=tuple(ranks),
        hosts=(host,), step_tokens=8192.0, step_s=9.5, flops=1.3e15, tokens_per_s=8192 / 9.5, utilisation=0.31,
        steps=steps, run_tokens=float(question.rows.tokens), run_s=steps * 9.5 + 30, start_s=30.0, quantise_s=600.0,
        reasons=("every device holds a quarter of each layer",), rejected=(Rejected("stages", 14.0, "idle in turn"),),
        helps=(Change("NVLink", 1.2, 8.0),), settled={"split": {"kind": "experts"}, "memory": {"recompute": "always"}},
        notes=("routing is taken to be even",),
    )  # fmt: skip
    return replace(made, **changes)
