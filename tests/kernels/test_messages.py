"""Messages: kernels give the bits of their references, whatever the numbers, lengths, groups and strides.

Scales of signs alone are sums in each one's own order: they agree within 2^-20.
"""

import pytest
import torch
from hypothesis import example, given, strategies as st

from fds.errors import KernelError
from fds.kernels import only, pack_signs, quantize, sum_messages, sums
from tests.bits import assert_same_bits
from tests.kernels.accuracy import DTYPES, random, strided

# NumPy, which interprets, warns where inf meets inf, and cannot tell that this is meant
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

AWKWARD = [0.0, -0.0, 1e-45, -1e-40, 2.0**-121, 127.0, 2.5, -3.4e38, torch.nan, torch.inf, -torch.inf]
NUMBERS = st.lists(st.sampled_from(AWKWARD), max_size=4)
SHAPES = st.tuples(st.integers(1, 3), st.integers(0, 150))
SEEDS = st.none() | st.integers(-(2**63), 2**63 - 1)


def rows(shape, dtype, some=(), seed=0):
    """Return random numbers, each row of another size, with some of one's own at random places."""
    x = random(*shape, seed=seed) * torch.tensor([1e-3, 1.0, 1e3])[: shape[0], None]
    for place, number in zip(random(len(some), seed=seed + 1), some, strict=True):
        x.view(-1)[int(place.abs() * 1e4) % x.numel()] = number
    return x.to(dtype)


def written(write, x, *, bits, group, kept=None, **options):
    """Return the messages that a function writes, and what it then keeps."""
    messages = torch.full((len(x), -(-x.shape[1] // group) * (4 + group * bits // 8)), 7, dtype=torch.uint8)
    kept = None if kept is None else kept.clone()
    if bits > 1:
        options["bits"] = bits
    write(x, messages, group=group, kept=kept, **options)
    return messages, kept


def assert_same_messages(got, want, n, *, bits, group):
    """Check all codes, if there are any, and scales; of a group whose scale is NaN the codes say nothing."""
    assert got.shape == want.shape
    if not n:
        return
    (a, codes), (b, wanted) = (sums.opened(x, n, group=group, bits=bits) for x in (got, want))
    torch.testing.assert_close(a, b, rtol=2.0**-20 if bits == 1 else 0, atol=0, equal_nan=True)
    assert torch.equal(codes[~a.isnan()], wanted[~a.isnan()])


def compare(x, *, bits, group, kept=None, **options):
    write = pack_signs if bits == 1 else quantize
    want, wanted_kept = written(write, x, bits=bits, group=group, kept=kept, **options)
    with only("triton"):
        got, got_kept = written(write, x, bits=bits, group=group, kept=kept, **options)
    assert_same_messages(got, want, x.shape[1], bits=bits, group=group)
    if kept is not None and x.numel():
        assert_kept(got, x, kept, got_kept, bits=bits, group=group)
        assert_kept(want, x, kept, wanted_kept, bits=bits, group=group)
    return want, wanted_kept


def assert_kept(messages, x, before, after, *, bits, group):
    """Check that what each message lost, decoded, is what was added to what was kept."""
    for message, given_, then, now in zip(messages, x, before, after, strict=True):
        sent = torch.empty_like(then)
        sums.reference(message[None], sent, bits=bits, group=group)
        torch.testing.assert_close(now, then + (given_ - sent), rtol=0, atol=0, equal_nan=True)


@given(SHAPES, st.sampled_from([8, 24, 40, 64]), st.sampled_from([8, 4]), st.sampled_from(DTYPES), NUMBERS, SEEDS)
@example((3, 0), 8, 8, torch.float32, [], None)
def test_integers_are_those_of_the_reference(shape, group, bits, dtype, some, seed):
    x = rows(shape, dtype, some if shape[1] else ())
    compare(x, bits=bits, group=group, seed=seed, kept=random(*shape, seed=2))


@given(SHAPES, st.sampled_from([32, 96]), st.sampled_from(DTYPES), NUMBERS)
@example((2, 0), 32, torch.float32, [])
def test_signs_are_those_of_the_reference(shape, group, dtype, some):
    compare(rows(shape, dtype, some if shape[1] else ()), bits=1, group=group, kept=random(*shape, seed=2))


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_numbers_may_lie_anyhow_and_groups_be_long(bits):
    x, kept = strided(random(3, 257)), strided(random(3, 257, seed=1))
    compare(x, bits=bits, group=64, kept=kept)
    compare(random(2, 4100), bits=bits, group=2048, **({} if bits == 1 else {"seed": 5}))


@given(
    st.integers(1, 4), st.integers(0, 150), st.sampled_from([(8, 8), (8, 40), (4, 24), (4, 64), (1, 32), (1, 96)]),
    st.sampled_from(DTYPES), NUMBERS, st.integers(-1, 3),
)  # fmt: skip
@example(3, 150, (8, 40), torch.float32, [-0.0, torch.nan], 0)
def test_sums_have_the_bits_of_the_reference(k, n, code, dtype, some, index):
    bits, group = code
    x = torch.cat([rows((1, n), torch.float32, some if n else (), seed=r) for r in range(k)])
    messages, _ = written(pack_signs if bits == 1 else quantize, x, bits=bits, group=group)
    own = x[index].to(dtype) if 0 <= index < k else None
    want = torch.empty(n, dtype=dtype)
    sum_messages(messages, want, bits=bits, group=group, own=own, index=index)
    got = torch.full((2 * n,), 7.0, dtype=dtype)[::2]
    with only("triton"):
        sum_messages(messages, got, bits=bits, group=group, own=own, index=index)
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(3), want.nan_to_num(3)
    if dtype == torch.bfloat16:  # the interpreter cuts off what a GPU rounds
        assert ((got - want).abs() <= 2.0**-7 * want.abs()).all()
    else:
        assert_same_bits(got, want)


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_a_sum_is_that_of_numbers_one_after_the_other(bits):
    """Against a loop over whole messages, each decoded by arithmetic on bytes."""
    group, n, k = 32, 100, 3
    x = random(k, n)
    messages, _ = written(pack_signs if bits == 1 else quantize, x, bits=bits, group=group)
    total = None
    for line in messages:
        scales, codes = line[:16].view(torch.float32), line[16:].view(4, -1).tolist()
        integers = []
        for some in codes:
            if bits == 8:
                integers += [[byte - 256 * (byte > 127) for byte in some]]
            elif bits == 4:
                integers += [[byte % 16 - 8 for byte in some] + [byte // 16 - 8 for byte in some]]
            else:
                integers += [[1 if byte & 1 << i else -1 for byte in some for i in range(8)]]
        numbers = (torch.tensor(integers).float() * scales[:, None]).view(-1)[:n]
        total = numbers if total is None else total + numbers
    for kind in ("triton", "reference"):
        out = torch.empty(n)
        with only(kind):
            sum_messages(messages, out, bits=bits, group=group)
        assert torch.equal(out, total)


def test_blocks_of_the_reference_are_seams_without_a_trace(monkeypatch):
    x, kept = random(2, 1000), random(2, 1000, seed=1)
    for bits, options in ((8, {"seed": 3}), (4, {}), (1, {})):
        whole = compare(x, bits=bits, group=32, kept=kept, **options)
        with monkeypatch.context() as patch:
            patch.setattr("fds.kernels.groups.BLOCK", 128)
            parts = compare(x, bits=bits, group=32, kept=kept, **options)
            assert all(map(torch.equal, whole, parts))
            outs = torch.empty(2, 1000)
            sums.reference(parts[0], outs[0], bits=bits, group=32, own=x[1], index=1)
        sums.reference(whole[0], outs[1], bits=bits, group=32, own=x[1], index=1)
        assert torch.equal(*outs)


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_a_group_beyond_a_block_is_left_to_the_reference(bits):
    write = pack_signs if bits == 1 else quantize
    x = random(1, 100)
    with only("triton"), pytest.raises(KernelError, match="exceeds a block") as caught:
        written(write, x, bits=bits, group=2**14)
    assert caught.value.where == "group" and caught.value.want == "at most 8192"


@pytest.mark.parametrize(("bits", "group"), [(8, 6), (4, 12), (1, 8), (1, 0)])
def test_groups_of_whole_words_alone_are_taken(bits, group):
    for call in (
        lambda: sum_messages(torch.zeros(1, 64, dtype=torch.uint8), torch.empty(8), bits=bits, group=group),
        lambda: written(pack_signs if bits == 1 else quantize, torch.ones(1, 8), bits=bits, group=group or 1),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.where == "group"


def test_a_message_of_another_size_is_refused():
    with pytest.raises(KernelError) as caught:
        sum_messages(torch.zeros(1, 64, dtype=torch.uint8), torch.empty(8), bits=8, group=8)
    assert caught.value.where == "messages" and caught.value.want.startswith("12 bytes for 8 numbers")


def test_halves_are_rounded_to_even_integers_as_by_the_reference():
    compare(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]]), bits=8, group=8)


def test_a_negative_zero_of_one_s_own_stays_one():
    messages, _ = written(quantize, torch.ones(1, 8), bits=8, group=8)
    for kind in ("triton", "reference"):
        out = torch.ones(8)
        with only(kind):
            sum_messages(messages, out, bits=8, group=8, own=torch.full((8,), -0.0), index=0)
        assert_same_bits(out, torch.full((8,), -0.0))
