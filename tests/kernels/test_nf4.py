"""Every kernel path against its torch twin and against bitsandbytes, bit for bit."""

import pytest
import torch
from bitsandbytes import functional as bnb

from lamella import kernels
from lamella.errors import UserError
from lamella.kernels import layout, reference
from lamella.kernels.library import ISAS, CpuKernels, load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 31, 63, 64, 65, 111, 640, 64 * 256 * 2 + 64, 64 * 1100 + 17, 300_001)
EVERY_BLOCK_SIZE = layout.BLOCK_SIZES


def runnable() -> list[str]:
    lib = load(kernels.build.find() or kernels.build.build())
    return [name for name in kernels.BACKENDS if name == "torch" or CpuKernels.supported(lib, name)]


@pytest.fixture(scope="module", params=runnable())
def backend(request):
    return kernels.resolve(request.param)[1]


def values(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Weights as models have them, with a block of zeros, some tiny values and an outlier where n allows."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.05
    x[64:128] = 0
    x[128:192] *= 1e-30
    x[200:201] = 1e4
    return x.to(dtype)


def codes_of(packed: torch.Tensor, n: int) -> torch.Tensor:
    return torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).view(-1)[:n].long()


def dequantized(codes, absmax, n, dtype, block_size, backend=reference):
    return backend.dequantize_nf4(codes, absmax, torch.full((n,), 7.0, dtype=dtype), block_size)


def test_this_machine_resolves_to_its_widest_kernels():
    assert kernels.resolve()[0] == runnable()[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", EVERY_BLOCK_SIZE)
def test_quantize_gives_the_bits_of_bitsandbytes(backend, dtype, block_size):
    for n in COUNTS:
        x = values(n, dtype, seed=n)
        theirs, state = bnb.quantize_4bit(x, blocksize=block_size, quant_type="nf4")
        codes, absmax = backend.quantize_nf4(x, block_size)
        assert torch.equal(codes, theirs.view(-1)), n
        assert torch.equal(absmax, state.absmax), n


def test_quantize_at_every_midpoint_follows_bitsandbytes(backend):
    """Ties and their neighbours, one and two units in the last place away."""
    table = torch.tensor(layout.NF4_TABLE)
    midpoints = (table[:-1] + table[1:]) / 2
    near = torch.cat([(midpoints.view(torch.int32) + d).view(torch.float32) for d in range(-2, 3)])
    for scale in (1.0, 3.0, 0.0123, 1e-20, 1e30):
        for tail in (0, 5):  # a partial last block divides where whole blocks multiply
            blocks = torch.cat([torch.ones(64, 1), near[torch.randperm(75)][:63].expand(64, 63)], 1)
            x = torch.cat([blocks.view(-1), torch.ones(1), near])[: 64 * 64 + tail * 10] * scale
            theirs, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4")
            codes, absmax = backend.quantize_nf4(x, 64)
            assert torch.equal(codes, theirs.view(-1)), (scale, tail)
            assert torch.equal(absmax, state.absmax), (scale, tail)


@pytest.mark.parametrize("n", COUNTS)
def test_double_quantisation_gives_the_bits_of_bitsandbytes(backend, n):
    x = values(n, torch.float32, seed=n)
    _, theirs = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    state = backend.quantize_absmax(backend.quantize_nf4(x, 64)[1])
    assert torch.equal(state.q, theirs.absmax)
    assert torch.equal(state.code, theirs.state2.code)
    assert torch.equal(state.absmax2, theirs.state2.absmax)
    assert torch.equal(state.offset, theirs.offset)
    expected = bnb.dequantize_blockwise(theirs.absmax, theirs.state2) + theirs.offset
    assert torch.equal(backend.dequantize_absmax(state), expected)
    assert torch.equal(backend.dequantize_absmax(state, out=torch.full_like(expected, 7.0)), expected)


def test_double_quantisation_of_scales_at_bin_borders(backend):
    bins = torch.arange(0, 65535, dtype=torch.float64) + 0.5
    edges = (bins / 65535 * 2 - 1).float()
    for d in (-1, 0, 1):
        near = (edges.view(torch.int32) + d).view(torch.float32)
        near = near[near.isfinite() & (near.abs() <= 1)]
        absmax = near + 4.0
        offset = absmax.mean()
        theirs, state2 = bnb.quantize_blockwise(absmax - offset, blocksize=256)
        ours = backend.quantize_absmax(absmax)
        assert torch.equal(ours.q, theirs)
        assert torch.equal(ours.absmax2, state2.absmax)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", EVERY_BLOCK_SIZE)
def test_dequantize_gives_the_bits_of_bitsandbytes(backend, dtype, block_size):
    """Flat, even counts: 2-D rows that are a multiple of 16 but not of the block get wrong scales in bitsandbytes
    0.50 (its AVX-512 path), and odd counts go through torch.compile there; see test_case_b43.py for those."""
    for n in (n for n in COUNTS if n % 2 == 0):
        x = values(n, torch.float32, seed=n)
        for double in (False, True):
            codes, state = bnb.quantize_4bit(x, blocksize=block_size, quant_type="nf4", compress_statistics=double)
            state.dtype = dtype
            scales = state.absmax
            if double:
                scales = kernels.AbsmaxState(state.absmax, state.state2.code, state.state2.absmax, state.offset)
            expected = dequantized(codes, scales, n, dtype, block_size)
            if block_size < 2048:  # from there on bitsandbytes compiles
                assert torch.equal(bnb.dequantize_4bit(codes, state).view(-1), expected)
            for stream in (False, True):
                out = torch.full((n,), 7.0, dtype=dtype)
                backend.dequantize_nf4(codes, scales, out, block_size, stream=stream)
                assert torch.equal(out, expected), (n, double, stream)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_odd_counts_and_unaligned_outputs_write_only_their_part(backend, dtype):
    for n in COUNTS:
        codes, absmax = reference.quantize_nf4(values(n, torch.float32), 64)
        around = torch.full((n + 2,), 7.0, dtype=dtype)
        backend.dequantize_nf4(codes, absmax, around[1:-1], 64, stream=True)
        assert torch.equal(around[1:-1], dequantized(codes, absmax, n, dtype, 64)), n
        assert around[0] == around[-1] == 7.0


@pytest.mark.parametrize("scale", [1e-38, 3e-39, 1e-40, 1e-45, 1e-7, 3e-5, 65504.0, 70000.0, 3e38])
def test_dequantize_rounds_subnormals_and_overflow_as_torch_does(backend, scale):
    """bitsandbytes turns bf16 subnormals into zero where the machine has AVX512-BF16; here they are rounded."""
    codes = torch.arange(256, dtype=torch.uint8)
    absmax = torch.full((8,), scale)
    table = torch.tensor(layout.NF4_TABLE)
    for dtype in DTYPES:
        expected = (table[codes_of(codes, 512)] * torch.tensor(scale)).to(dtype)
        out = backend.dequantize_nf4(codes, absmax, torch.empty(512, dtype=dtype), 64)
        assert torch.equal(out, expected), dtype


def test_every_fp16_value_is_read_right(backend):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16)
    finite = bits[bits.isfinite()]
    for x in (finite, finite[:-7], finite.flip(0)[1:]):
        codes, absmax = backend.quantize_nf4(x, 32)
        expected_codes, expected_absmax = reference.quantize_nf4(x.float(), 32)
        assert torch.equal(codes, expected_codes)
        assert torch.equal(absmax, expected_absmax)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_do_not_change_a_bit(backend, threads):
    n = 64 * 5000 + 11
    x = values(n, torch.bfloat16)
    codes, absmax = backend.quantize_nf4(x, threads=threads)
    expected_codes, expected_absmax = reference.quantize_nf4(x)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(absmax, expected_absmax)
    out = torch.empty(n, dtype=torch.bfloat16)
    backend.dequantize_nf4(codes, absmax, out, threads=threads)
    assert torch.equal(out, dequantized(codes, absmax, n, torch.bfloat16, 64))


def test_buffers_are_filled_in_place_and_shape_and_strides_do_not_matter(backend):
    x = values(60 * 70, torch.float32).view(60, 70).t()
    codes, absmax = torch.empty(2100, dtype=torch.uint8), torch.empty(66)
    made = backend.quantize_nf4(x, 64, codes=codes, absmax=absmax)
    assert made[0] is codes
    assert made[1] is absmax
    expected = reference.quantize_nf4(x.contiguous().view(-1))
    assert torch.equal(codes, expected[0])
    assert torch.equal(absmax, expected[1])
    out = torch.empty(70, 60)
    assert backend.dequantize_nf4(codes, absmax, out) is out


def test_parts_that_do_not_fit_are_refused(backend):
    codes, absmax = backend.quantize_nf4(values(640, torch.float32))
    state = backend.quantize_absmax(absmax)
    out = torch.empty(640)
    with pytest.raises(UserError, match="absmax must be 10"):
        backend.dequantize_nf4(codes, absmax[:9], out)
    with pytest.raises(UserError, match="absmax must be 5"):
        backend.dequantize_nf4(codes, absmax, out, 128)
    with pytest.raises(UserError, match="codes must be 320"):
        backend.dequantize_nf4(codes[:-1], absmax, out)
    with pytest.raises(UserError, match="not contiguous"):
        backend.dequantize_nf4(codes, absmax, torch.empty(640, 2)[:, 0])
    broken = kernels.AbsmaxState(state.q, state.code, state.absmax2.repeat(2), state.offset)
    with pytest.raises(UserError, match="absmax2 must be 1"):
        backend.dequantize_nf4(codes, broken, out)
    with pytest.raises(UserError, match="block size 48"):
        backend.quantize_nf4(out, 48)
    with pytest.raises(UserError, match="float64"):
        backend.quantize_nf4(out.double())
    with pytest.raises(UserError, match="empty"):
        backend.quantize_nf4(torch.empty(0))
    with pytest.raises(UserError, match="codes must be 320"):
        backend.quantize_nf4(out.zero_(), codes=codes[:-1])


def test_isas_are_backends():
    assert set(ISAS) < set(kernels.BACKENDS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tensors_of_a_buffer_in_one_call(backend, dtype):
    """Plain and double-quantised scales, in any order and with gaps, give the bits of one call each."""
    counts, parts, jobs, wanted = (64 * 300, 640, 64 * 256 * 2 + 64), [], [], []
    position, at = 0, 32

    def put(tensor):
        nonlocal position
        data = tensor.contiguous().view(-1).view(torch.uint8)
        filled = torch.zeros(-(-data.numel() // 64) * 64 + 64, dtype=torch.uint8)
        filled[: data.numel()] = data
        parts.append(filled)
        position += filled.numel()
        return position - filled.numel()

    for k, n in enumerate(counts):
        codes, absmax = backend.quantize_nf4(values(n, torch.float32, seed=k))
        if k % 2:
            jobs.append([put(codes), put(absmax), -1, -1, -1, -1, at, n])
        else:
            state = backend.quantize_absmax(absmax)
            nested = [put(x) for x in (state.q, state.code, state.absmax2, state.offset)]
            jobs.append([put(codes), -1, *nested, at, n])
            absmax = state
        wanted.append((at, dequantized(codes, absmax, n, dtype, 64)))
        at += n + 64
    out = torch.full((at,), 7.0, dtype=dtype)
    backend.dequantize_nf4_many(torch.cat(parts), torch.tensor(jobs[::-1]), out)
    untouched = torch.ones(at, dtype=torch.bool)
    for first, values_of in wanted:
        assert torch.equal(out[first : first + len(values_of)], values_of)
        untouched[first : first + len(values_of)] = False
    assert bool((out[untouched] == 7).all())
