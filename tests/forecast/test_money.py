import pytest

from lamella.errors import UserError
from lamella.forecast.money import format_hours, format_usd, money_numbers, money_of, price_of
from tests.forecast import numbers
from tests.forecast.machines import gpu, machine


def test_devices_cost_together():
    money = money_of(machine(gpu(), gpu()), hours=0.5, tokens=2e6, epochs=2.0)
    assert money.usd_per_hour == 5.0 and money.usd == 2.5
    assert money.usd_per_epoch == 1.25 and money.usd_per_million_tokens == 1.25
    assert money.prices == ("2 x G80 $2.50 an hour (a list, 2026-11-01)",)
    assert money.line() == "0.5 h at $5.00 an hour: $2.50"
    assert numbers.check(money_numbers(money, 2e6, 2.0)) == 3


def test_a_host_covers_devices_without_a_price_and_adds_to_those_with_one():
    assert price_of(machine(gpu(price=None), host_price=4.0))[0] == 4.0
    assert price_of(machine(gpu(price=2.5), gpu(price=None), host_price=4.0))[0] == 6.5


def test_one_unknown_price_leaves_the_sum_unknown():
    money = money_of(machine(gpu(), gpu("X", price=None)), hours=30.0, tokens=1e6, epochs=1.0)
    assert money.usd is None and money.usd_per_million_tokens is None
    assert "no price known of X" in money.prices[-1] and "G80 $2.50" in money.prices[0]
    assert money.line() == "30 h; no price known (give --price-per-hour)"
    assert money_numbers(money, 1e6, 1.0) == []


def test_a_given_price_takes_the_place_of_all_others():
    money = money_of(machine(gpu(price=None)), hours=2.0, tokens=1e6, epochs=1.0, given=3.0)
    assert money.usd == 6.0 and money.prices == ("$3.00 an hour, as given",)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="not positive"):
            price_of(machine(gpu()), wrong)


def test_figures_for_people():
    assert [format_usd(x) for x in (0.0, 0.0031, 0.456, 9.06, 1240.4)] == [
        "$0.00",
        "$0.0031",
        "$0.46",
        "$9.06",
        "$1,240",
    ]
    assert [format_hours(x) for x in (26.0, 0.912, 0.05, 0.001)] == ["26 h", "0.912 h", "3 min", "3.6 s"]
