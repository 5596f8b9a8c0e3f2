"""Dropout's masks: known answers, the same bits in kernels as in the reference, the right rate, no two alike."""

import pytest
import torch
from hypothesis import given, strategies as st

from fds.errors import KernelError
from fds.kernels import philox
from fds.kernels.language import cdiv, jit, tl
from tests.devices import DEVICE

WORD = 0xFFFFFFFF

# key, counter, words: known-answer vectors of philox4x32, ten rounds (Random123, kat_vectors)
KNOWN = {
    "zeros": ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((WORD, WORD), (WORD, WORD, WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@jit(do_not_specialize=["offset", "threshold", "first_row", "first_column"])
def _mask_kernel(
    mask_ptr,
    seed_ptr,
    offset,
    threshold,
    first_row,
    first_column,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the mask of (rows, columns) elements, of which the first is (first_row, first_column)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    keep = philox.keep(tl.load(seed_ptr), offset, first_row + row, first_column + first, threshold, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(mask_ptr + row[:, None] * columns + column[None, :], keep.to(tl.int8), mask=inside)


def mask(seed, offset, rows, columns, threshold, *, first_row=0, first_column=0, ROWS=2, COLUMNS=32):
    """Return the mask that a kernel sees."""
    out = torch.full((rows, columns), 77, dtype=torch.int8)
    seed = philox.as_seed(seed, out.device)
    _mask_kernel[(cdiv(rows, ROWS), cdiv(columns, COLUMNS))](
        out, seed, offset, threshold, first_row, first_column, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS
    )
    assert ((out == 0) | (out == 1)).all()
    return out.bool()


def signed(n):
    return n - 2**64 if n >= 2**63 else n


@pytest.mark.parametrize("name", KNOWN)
def test_the_words_are_those_of_philox(name):
    (k0, k1), counter, words = KNOWN[name]
    got = philox.philox4x32(*(torch.tensor(n) for n in (k0, k1, *counter)))
    assert tuple(int(w) for w in got) == words


@pytest.mark.parametrize("name", KNOWN)
def test_kernels_compare_those_words(name):
    (k0, k1), (c0, c1, c2, c3), words = KNOWN[name]
    where = {"first_row": c1, "first_column": 4 * c0}
    for i, word in enumerate(words):
        for least, kept in ((word, True), (word + 1, False)):
            got = mask(signed(k1 << 32 | k0), signed(c3 << 32 | c2), 1, 4, least, **where, ROWS=1, COLUMNS=4)
            assert bool(got[0, i]) is kept


@given(
    rows=st.integers(0, 5),
    columns=st.integers(0, 70),
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(-(2**63), 2**63 - 1),
    p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.75, 1 - 1e-12]),
    block=st.sampled_from([(4, 4), (2, 16), (8, 8), (4, 64), (1, 256)]),
)
def test_kernels_draw_the_reference_bit_for_bit_whatever_the_blocks(rows, columns, seed, offset, p, block):
    want = philox.reference(torch.tensor(seed), offset, rows, columns, p)
    got = mask(seed, offset, rows, columns, philox.threshold(p), ROWS=block[0], COLUMNS=block[1])
    assert want.shape == (rows, columns) and torch.equal(got, want)


def test_a_mask_starts_with_the_mask_of_fewer_columns_and_rows():
    seed = torch.tensor(3)
    big = philox.reference(seed, 1, 12, 431, 0.3)
    assert torch.equal(philox.reference(seed, 1, 7, 123, 0.3), big[:7, :123])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_right(p):
    keep = philox.reference(torch.tensor(11), 0, 250, 4000, p).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(float(keep.mean()) - (1 - p)) < 5 * sigma / 1000
    assert (keep.mean(0) - (1 - p)).abs().max() < 6 * sigma / 250**0.5  # each column and row, of thousands
    assert (keep.mean(1) - (1 - p)).abs().max() < 6 * sigma / 4000**0.5


def test_nothing_is_dropped_at_zero_and_nearly_all_at_nearly_one():
    assert philox.reference(torch.tensor(1), 0, 4, 4096, 0.0).all()
    assert not philox.reference(torch.tensor(1), 0, 4, 4096, 1 - 1e-12).any()


def correlation(a, b):
    a, b = a.double().flatten(), b.double().flatten()
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


def test_seeds_offsets_rows_and_columns_are_independent():
    draw = lambda seed=5, offset=0: philox.reference(torch.tensor(seed), offset, 200, 1000, 0.5)
    first = draw()
    others = [draw(seed=6), draw(seed=5 + 2**32), draw(seed=-5), draw(offset=1), draw(offset=2**32), draw(offset=-1)]
    pairs = [(first, other) for other in others]
    pairs += [(first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first[:, 4:], first[:, :-4])]
    for a, b in pairs:
        assert abs(correlation(a, b)) < 5 / a.numel() ** 0.5


def test_rows_are_told_apart_up_to_32_bits():
    """Beyond 2^31 elements, and beyond 2^31 rows."""
    k0 = torch.tensor(9)
    for first_row in (2**21 + 5, 2**31 - 1, 2**31, 2**32 - 2):
        got = mask(9, 2, 2, 64, philox.threshold(0.5), first_row=first_row)
        row = first_row + torch.arange(2)[:, None].expand(2, 16)
        group = torch.arange(16).expand(2, 16)
        words = philox.philox4x32(k0, k0 * 0, group, row, torch.full_like(row, 2), torch.zeros_like(row))
        assert torch.equal(got, torch.stack(words, -1).reshape(2, 64) >= 2**31)


def test_a_seed_is_an_integer_or_a_tensor_of_one_on_the_device():
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        made = philox.as_seed(seed, DEVICE)
        assert made.dtype == torch.int64 and made.shape == () and int(made) == seed
    held = torch.tensor(3)
    assert philox.as_seed(held, DEVICE) is held
    for bad in (None, 1.0, True, 2**63, "1", torch.tensor([1]), torch.tensor(1.0), torch.tensor(1, device="meta")):
        with pytest.raises(KernelError) as caught:
            philox.as_seed(bad, DEVICE)
        assert caught.value.where == "seed" and caught.value.hint
