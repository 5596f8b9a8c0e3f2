"""Free ranges, against a set of free bytes."""

from hypothesis import given, strategies as st

from fds.media.mapping import Ranges


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 50)), max_size=60))
def test_no_byte_is_taken_twice_and_none_is_lost(orders):
    ranges, free, taken = Ranges(), set(range(40)), []
    ranges.give(0, 40)
    for takes, nbytes, which in orders:
        if takes:
            start = ranges.take(nbytes)
            if start is None:
                assert not any(set(range(i, i + nbytes)) <= free for i in range(40))
            else:
                assert set(range(start, start + nbytes)) <= free
                free -= set(range(start, start + nbytes))
                taken.append((start, nbytes))
        elif taken:
            start, nbytes = taken.pop(which % len(taken))
            ranges.give(start, nbytes)
            free |= set(range(start, start + nbytes))
        found = [i for start, nbytes in ranges for i in range(start, start + nbytes)]
        assert found == sorted(free) and ranges.nbytes == len(free)
        assert all(a + n < b for (a, n), (b, _) in zip([*ranges][:-1], [*ranges][1:], strict=True))


def test_what_is_taken_one_after_another_lies_side_by_side():
    ranges = Ranges()
    ranges.give(0, 10)
    ranges.give(20, 100)
    assert [ranges.take(8), ranges.take(40), ranges.take(2), ranges.take(3)] == [0, 20, 60, 62]
