"""Codes: what a message says is within its bound of what was given, and not finite where that was not."""

import pytest
import torch

import fds
from fds import transports
from fds.errors import ComposeError

CODED = [
    transports.cast(torch.bfloat16),
    transports.cast(torch.float16),
    transports.quantized(8),
    transports.quantized(4),
    transports.quantized(8, group=8),
    transports.quantized(8, stochastic=True).seeded(fds.random.key(3)),
    transports.quantized(4, stochastic=True).seeded(fds.random.key(3)),
    transports.onebit(),
    transports.onebit(group=32),
    transports.topk(0.25),
]
NAMES = [str(one) for one in CODED]
LENGTHS = [1, 7, 32, 255, 256, 257, 4095]


def message(one, rows):
    found = torch.full((len(rows), one.code.num_bytes(rows.shape[1])), 7, dtype=torch.uint8)
    one.code.encode(rows, found)
    return found


def decoded(one, rows, dtype=torch.float32):
    out = torch.full(rows.shape, torch.nan, dtype=dtype)
    for line, x in zip(message(one, rows), out, strict=True):
        one.code.decode(line, x)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("one", CODED, ids=NAMES)
def test_an_error_is_within_the_bound_of_the_largest_number(one, dtype):
    generator = torch.Generator().manual_seed(3)
    for n in LENGTHS:
        rows = (torch.randn(3, n, generator=generator) * torch.tensor([[1e-3], [1.0], [1e3]])).to(dtype)
        errors = (decoded(one, rows) - rows).abs().amax(1)
        assert (errors <= one.bound * rows.abs().amax(1).float()).all()


@pytest.mark.parametrize("one", CODED, ids=NAMES)
def test_a_row_is_a_message_of_its_own(one):
    rows = torch.randn(3, 300, generator=torch.Generator().manual_seed(5))
    together = message(one, rows)
    for row, line in zip(rows, together, strict=True):
        assert torch.equal(message(one, row[None])[0], line)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("one", CODED, ids=NAMES)
def test_what_is_not_finite_arrives_as_such(one, bad):
    rows = torch.randn(1, 300, generator=torch.Generator().manual_seed(7))
    rows[0, 290] = bad
    assert not torch.isfinite(decoded(one, rows)).all()


@pytest.mark.parametrize("one", CODED, ids=NAMES)
def test_zeros_arrive_as_zeros(one):
    assert torch.equal(decoded(one, torch.zeros(2, 300)).abs(), torch.zeros(2, 300))


def test_integers_are_rounded_to_the_nearest():
    x = torch.tensor([[127.0, 1.4, 1.6, -2.5, -127.0, 0.0, 63.0, -0.6]])
    assert decoded(transports.quantized(8, group=8), x).tolist() == [[127, 1, 2, -2, -127, 0, 63, -1]]
    x = torch.tensor([[7.0, 1.4, 1.6, -2.4, -7.0, 0.0, 3.0, -0.6]])
    assert decoded(transports.quantized(4, group=8), x).tolist() == [[7, 1, 2, -2, -7, 0, 3, -1]]


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_that_are_rounded_at_random_are_right_on_average(bits):
    rows, calls = torch.randn(1, 4096, generator=torch.Generator().manual_seed(3)), 64
    one = transports.quantized(bits, stochastic=True)
    errors = [decoded(one.seeded(fds.random.key(call)), rows) - rows for call in range(calls)]
    spread = one.bound * rows.abs().max()  # of one error; their variance is at most a quarter of its square
    assert abs(torch.cat(errors).mean()) < 5 * 0.5 * spread / (calls * 4096) ** 0.5
    assert (sum(errors) / calls).abs().max() < 6 * 0.5 * spread / calls**0.5
    assert len({float(one[0, 7]) for one in errors}) == 2  # one level above, or one below


def test_signs_have_the_mean_of_their_group():
    x = torch.cat([torch.full((32,), 2.0), -torch.arange(8.0)])[None]
    want = torch.cat([torch.full((32,), 2.0), torch.tensor([3.5]), torch.full((7,), -3.5)])[None]
    assert torch.equal(decoded(transports.onebit(group=32), x), want)


def test_the_largest_numbers_are_sent_and_no_others():
    x = torch.tensor([[0.1, -3.0, 2.0, 0.5, -0.2, 1.0, 0.3, -4.0]])
    assert decoded(transports.topk(0.25), x).tolist() == [[0, -3, 0, 0, 0, 0, 0, -4]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: transports.quantized(3), "bits=3"),
        (lambda: transports.quantized(8, group=12), "group=12"),
        (lambda: transports.onebit(group=8), "group=8"),
        (lambda: transports.topk(0), "0"),
        (lambda: transports.topk(1.5), "1.5"),
        (lambda: transports.cast(torch.int8), "int8"),
        (lambda: transports.hierarchical("quantized"), "quantized"),
        (lambda: transports.hierarchical(transports.quantized(4), transports.onebit()), "onebit()"),
    ],
)
def test_bad_numbers_are_refused(make, said):
    with pytest.raises(ComposeError) as caught:
        make()
    assert said in caught.value.got
