"""The cycle collector while a command starts."""

import gc
import subprocess
import sys

import pytest

from lamella.hardware import collector


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_a_start_collects_seldom_and_long_work_as_before(thresholds):
    before = gc.get_threshold()
    collector.quiet_start()
    assert gc.get_threshold() == collector.STARTING and gc.isenabled()
    collector.settle()
    assert gc.get_threshold() == before == collector.DEFAULTS


def test_thresholds_of_a_program_of_its_own_stay(thresholds):
    gc.set_threshold(123, 4, 5)
    collector.settle()
    assert gc.get_threshold() == (123, 4, 5)


def test_importing_the_command_changes_nothing():
    code = "import gc; before = gc.get_threshold(); import lamella.cli; assert gc.get_threshold() == before"
    subprocess.run([sys.executable, "-c", code], check=True)
