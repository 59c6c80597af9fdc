"""Ray as launcher, with two workers on this machine; needs `lamella[ray]`."""

import json

import pytest

from lamella.config import load_run_config
from lamella.errors import UserError
from lamella.launch.ray import train_with_ray

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray = pytest.importorskip("ray", reason="needs lamella[ray]")
    ray.init(num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


def test_two_workers_train(command):
    train_with_ray(load_run_config(command.folder / "run.toml", []), "fresh")
    assert command.steps() == [1, 2, 3]
    assert json.loads((command.run_dir / "receipt.json").read_text())["status"] == "ok"


def test_bad_input_ends_at_once(command, capsys):
    (command.folder / "bad.jsonl").write_text('{"messages": 3}\n')
    config = load_run_config(command.folder / "run.toml", [f'data.train=["{command.folder / "bad.jsonl"}"]'])
    with pytest.raises(UserError, match=r"bad\.jsonl") as caught:
        train_with_ray(config)
    assert caught.value.exit_code == 2
    assert "starting all ranks again" not in capsys.readouterr().err


def test_as_many_workers_as_devices(command):
    with pytest.raises(UserError, match=r"2 entries in \[\[devices\]\], but 3 ranks"):
        train_with_ray(load_run_config(command.folder / "run.toml", []), workers=3)
