"""Exports of real models in the engines themselves (`make test-engines`): minutes each."""

import pytest

from tests.engines.cases import CASES, python_of
from tests.engines.run import run_case


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.mark.engines
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_engine_says_what_we_say(case, scratch):
    python = python_of(case.engine)
    if python is not None and not python.is_file():
        pytest.skip(f"no .engines/{case.engine}: make engines")
    row = run_case(case, scratch)
    if "same_answers" in row:
        assert row["same_answers"] > max(0.9, row["base_answers"])
    else:
        assert row["differs_from_base"] > 0 and row["top1"] > 0.9
