"""The verdict is a function of figures; its advice is a quantize.toml."""

import tomllib
from dataclasses import replace

import pytest

from lamella.quality.divergence import Divergence
from lamella.quality.verdict import FINE, POOR, formats_fragment, judge, subsets

GOOD = Divergence(texts=9, tokens=4000, kl_mean=0.02, kl_error=0.001, kl_p99=0.3, top1_agreement=0.93, perplexity_a=8.0,
                  perplexity_b=8.1, largest_logit_difference=2.0)  # fmt: skip
WORSE = replace(GOOD, kl_mean=0.1, perplexity_b=8.7, top1_agreement=0.85)
BROKEN = replace(GOOD, kl_mean=1.5, perplexity_b=30.0, top1_agreement=0.4)
DENSE = {"attention": 20, "mlp": 80}
MOE = {"attention": 20, "mlp": 10, "experts": 900}


def parts(**found):
    return {frozenset(names.split("_")): d for names, d in found.items()}


def test_fine_needs_nothing():
    verdict = judge(GOOD, parts(attention=GOOD, mlp=GOOD), DENSE)
    assert (verdict.level, verdict.keep, verdict.reasons, verdict.text) == ("fine", (), (), "fine")
    assert formats_fragment(verdict, {"attention": "nf4", "mlp": "nf4"}, ["a.weight"]) == ""


@pytest.mark.parametrize(
    "change",
    [{"kl_mean": FINE.kl_mean * 1.01}, {"perplexity_b": 8.0 * 1.051}, {"top1_agreement": FINE.top1_agreement - 0.01}],
)
def test_each_limit_counts_alone(change):
    verdict = judge(replace(GOOD, **change), parts(attention=GOOD, mlp=GOOD), DENSE)
    assert verdict.level == "keep"
    assert len(verdict.reasons) == 1


def test_the_class_to_blame_is_kept():
    verdict = judge(BROKEN, parts(attention=BROKEN, mlp=GOOD), DENSE)
    assert (verdict.level, verdict.keep) == ("keep", ("attention",))
    assert verdict.then == GOOD
    assert verdict.text == "keep attention at higher precision"


def test_fewest_weights_are_kept():
    """Attention, and attention with the small MLP, and the experts would each do."""
    measured = parts(
        experts_mlp=GOOD, experts=GOOD, attention_mlp=GOOD, attention=WORSE, mlp=GOOD, attention_experts=WORSE
    )
    assert judge(WORSE, measured, MOE).keep == ("attention",)
    del measured[frozenset({"experts", "mlp"})]
    assert judge(WORSE, measured, MOE).keep == ("attention", "mlp")


def test_where_no_choice_is_fine():
    bad = parts(attention=WORSE, mlp=WORSE)
    verdict = judge(WORSE, bad, DENSE)
    assert (verdict.level, verdict.keep, verdict.then) == ("keep", ("attention", "mlp"), None)
    verdict = judge(BROKEN, bad, DENSE)
    assert (verdict.level, verdict.keep) == ("poor", ("attention", "mlp"))
    assert verdict.text.startswith("poor")
    assert POOR.beyond(BROKEN)
    assert len(verdict.reasons) == 3


def test_one_class_alone():
    assert subsets({"mlp": 3}) == []
    assert judge(BROKEN, {}, {"mlp": 3}).keep == ("mlp",)


def test_advice_is_toml_for_quantize():
    verdict = judge(BROKEN, parts(attention=BROKEN, mlp=GOOD), DENSE)
    text = formats_fragment(verdict, {"attention": "nf4", "mlp": "mxfp4"}, ["model.layers.0.mlp.down_proj.weight"])
    assert tomllib.loads(text) == {
        "classes": {"attention": "int8", "mlp": "mxfp4"},
        "names": [{"match": "model.layers.0.mlp.down_proj.weight", "format": "bf16"}],
    }
    again = formats_fragment(verdict, {"attention": "int8", "mlp": "nf4"}, [])
    assert tomllib.loads(again) == {"classes": {"attention": "bf16"}}
