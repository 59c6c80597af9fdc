"""Counter-based dropout masks: parity of the paths, share kept, independence of rows and columns."""

import pytest
import torch

from lamella import kernels
from lamella.kernels import reference
from tests.kernels.test_nf4 import runnable


@pytest.fixture(scope="module", params=runnable())
def backend(request):
    return kernels.resolve(request.param)[1]


def keys(rows: int) -> torch.Tensor:
    made = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(5))
    made[:4] = torch.tensor([0, 1, -1, 2**62])
    return made


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("columns", [0, 1, 31, 1000, 70_001])
def test_every_path_gives_the_reference_bits(backend, p, columns):
    mask = backend.keep_mask(keys(13), columns, p, threads=3)
    assert mask.dtype == torch.bool
    assert mask.shape == (13, columns)
    assert torch.equal(mask, reference.keep_mask(keys(13), columns, p))


def splitmix_and_mix(key: int, column: int) -> int:
    """The hash written once more, with Python's unbounded integers."""
    m64, m32 = (1 << 64) - 1, (1 << 32) - 1
    z = (key + 0x9E3779B97F4A7C15) & m64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & m64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & m64
    z ^= z >> 31
    h = (column + z) & m32
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & m32
    h = ((h ^ (h >> 15)) * 0x846CA68B) & m32
    h = ((h ^ (h >> 16) ^ (z >> 32)) * 0x7FEB352D) & m32
    h = ((h ^ (h >> 15)) * 0x846CA68B) & m32
    return h ^ (h >> 16)


def test_the_hash_is_the_documented_one(backend):
    rows = keys(6)
    for p in (0.1, 0.7):
        expected = [[splitmix_and_mix(k, c) >= round(p * 2**32) for c in range(50)] for k in rows.tolist()]
        assert backend.keep_mask(rows, 50, p).tolist() == expected


def test_rows_depend_on_their_key_alone(backend):
    rows = keys(8)
    whole = backend.keep_mask(rows, 300, 0.3)
    order = torch.tensor([5, 2, 7, 0])
    assert torch.equal(backend.keep_mask(rows[order], 300, 0.3), whole[order])
    assert torch.equal(backend.keep_mask(rows, 200, 0.3), whole[:, :200])


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
def test_share_dropped_and_correlations_are_those_of_chance(p):
    """Consecutive keys, as counters are; bounds are 5 standard deviations."""
    rows, columns = 1000, 1024
    dropped = (~kernels.keep_mask(torch.arange(rows), columns, p)).double()
    n = rows * columns
    assert abs(dropped.mean() - p) < 5 * (p * (1 - p) / n) ** 0.5
    per_column = (p * (1 - p) / rows) ** 0.5
    assert (dropped.mean(0) - p).abs().max() < 5 * per_column
    centred = (dropped - p) / (p * (1 - p)) ** 0.5
    for shifted in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll((1, 1), (0, 1)),
        centred.roll((1, -1), (0, 1)),
    ):
        assert abs((centred * shifted).mean()) < 5 / n**0.5


def test_no_dropout_keeps_everything(backend):
    assert backend.keep_mask(keys(9), 77, 0.0).all()
