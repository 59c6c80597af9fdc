"""What people read: the verdict first, all of it within 80 columns, every figure explained."""

import io
from dataclasses import replace

from rich.console import Console

from lamella.forecast.document import PlanFile, PlannedRows, now, planned_model
from lamella.forecast.figures import numbers_of
from lamella.forecast.money import money_numbers, money_of
from lamella.forecast.outcome import Change
from lamella.forecast.present import explained, short, verdict, whole
from lamella.forecast.serving import catalogue_devices, preview, serving_numbers
from tests.forecast import numbers
from tests.forecast.machines import gpu, machine
from tests.forecast.outcomes import forecast_of, question_of, rank_of


def document_of(question, found, price=None, **changes):
    rows = question.rows
    serving = preview(question.shape, question.machine, catalogue_devices(), 4096, found.sites)
    money = money_of(question.machine, found.run_s / 3600, found.run_tokens, 1.0, price)
    figures = [
        *numbers_of(question, found),
        *money_numbers(money, found.run_tokens, 1.0),
        *serving_numbers(question.shape, serving),
    ]
    made = PlanFile(
        made=now(), lamella="0", model=planned_model(question.shape, "config", None), machine=question.machine,
        rows=PlannedRows(source=rows.source, how=rows.how, rows=len(rows.lengths), tokens=rows.tokens,
                         label_tokens=rows.label_tokens, lengths=rows.percentiles, encoded=0, dropped=0),
        asked={}, settled=found.settled, fits=found.fits, figures={}, money=money, serving=serving, numbers=tuple(figures),
        notes=found.notes,
    )  # fmt: skip
    return made.model_copy(update=changes)


def shown(question, found, **more):
    text = io.StringIO()
    console = Console(file=text, width=80, highlight=False)
    for part in whole(document_of(question, found, **more), question, found):
        console.print(part)
    return text.getvalue()


def test_the_verdict_of_like_devices():
    question = question_of()
    found = forecast_of(question)
    (line,) = verdict(document_of(question, found), found)
    assert line == "fits: 32.2 of 80 GB on each of 4 x G80; 4.76 h and $47.58 for 3,600 rows"


def test_the_verdict_of_unlike_devices_and_without_a_price():
    question = question_of()
    question.machine = machine(gpu(price=None), gpu("T16", price=None))
    ranks = [rank_of(0), rank_of(1, name="rank 1 (T16)", need=int(9e9), have=int(16e9))]
    found = forecast_of(question, ranks)
    (line,) = verdict(document_of(question, found), found)
    assert line == "fits: 32.2 of 80 GB on G80, 9 of 16 GB on T16; 4.76 h for 3,600 rows"


def test_what_does_not_fit_says_need_have_and_the_smallest_change():
    question = question_of()
    ranks = [rank_of(0, need=int(9e10)), rank_of(1, need=int(9e10)), rank_of(2)]
    lack = ("rank 0 (G80): need 90 GB, have 80 GB: base 90 GB",)
    found = forecast_of(question, ranks, fits=False, shortfall=lack, changes=(Change("lora.rank=8"),))
    lines = verdict(document_of(question, found), found)
    assert lines[0] == "does not fit on test machine: 2 x G80: need 90 of 80 GB"
    assert lines[1].strip() == lack[0] and lines[2].endswith("smallest change that would: lora.rank=8")
    assert shown(question, found).startswith(f"{lines[0]}\n\nModel")
    lack = ("box: disk: need 9 TB, have 4 TB: store 9 TB",)
    full = forecast_of(question, fits=False, shortfall=lack, changes=())
    assert (
        verdict(document_of(question, full), full)[0] == "does not fit on test machine: box: disk: need 9 TB, have 4 TB"
    )


def test_all_of_it_within_80_columns():
    question = question_of()
    text = shown(question, forecast_of(question))
    assert text.startswith("fits: 32.2 of 80 GB")
    assert max(map(len, text.splitlines())) <= 80
    for wanted in ("235 B", "attention", "experts at rank r", "ranks 0-3 (G80)", "adapter state", "store 123 GB", "peer 0-1",
                   "95% compute of rank 0", "stages", "idle in turn", "would help: NVLink: 1.2x", "KV cache: 193 kB a token",
                   "4 x G80 (here)", "routing is taken to be even", "$10.00 an hour", "layers recomputed"):  # fmt: skip
        assert wanted in " ".join(text.split()), wanted


def test_many_unlike_ranks_get_a_line_each():
    question = question_of()
    ranks = [rank_of(k, parts={"base": 10**9 * (k + 1)}, need=10**9 * (k + 1)) for k in range(6)]
    text = shown(question, forecast_of(question, ranks))
    assert "rank 5 (G80): need 6 GB, have 80 GB: base 6 GB" in text


def test_the_short_form():
    question = question_of()
    found = forecast_of(question)
    lines = short(document_of(question, found), found)
    assert 4 <= len(lines) <= 8 and lines[0].startswith("plan: fits: ")
    assert any("450 steps" in line or f"{found.steps} steps" in line for line in lines)
    rough = document_of(question, found)
    rough = rough.model_copy(
        update={"machine": rough.machine.model_copy(update={"notes": ("rough: run `lamella probe`",)})}
    )
    assert "lamella probe" in short(rough, found)[-1]


def test_formulas_give_their_figures():
    question = question_of()
    document = document_of(question, forecast_of(question))
    assert numbers.check(document.numbers) > 60
    names = [number.name for number in document.numbers]
    assert len(names) == len(set(names))
    for start in ("model.parameters.experts", "trained.", "data.tokens", "memory.rank 0.base", "step.seconds", "run.hours",
                  "link.", "money.run", "serving.kv", "host box.RAM"):  # fmt: skip
        assert any(name.startswith(start) for name in names), start
    text = "\n".join(explained(document.numbers))
    assert "    = 94 * 128 * 3072 * 4096 + 94 * 128 * 4096 * 1536" in text
    assert "    = layers that stay, as stored" in text and "steps * step_s + start_s" in text


def test_a_figure_that_is_wrong_is_found():
    question = question_of()
    document = document_of(question, forecast_of(question))
    wrong = [replace_value(n) if n.name == "run.seconds" else n for n in document.numbers]
    try:
        numbers.check(wrong)
    except AssertionError:
        return
    raise AssertionError("a wrong figure passed")


def replace_value(number):
    return number.model_copy(update={"value": number.value * 1.01})


def test_one_device_is_named_without_a_rank():
    question = question_of()
    found = forecast_of(question, [replace(rank_of(0), name="G80", share=1.0)])
    assert "on G80;" in verdict(document_of(question, found), found)[0]
