"""The seconds of calls by hand: who waits for whom, what hides behind arithmetic, and what is recorded of a rank."""

from collections import Counter

import pytest

import fds
from fds.collectives.traffic import MessageKind, Traffic, counting
from fds.tuning import Space, rehearsal
from fds.tuning.problem import Problem
from fds.tuning.replay import Cost, Course, Message, replay
from tests.tuning.problem import batch, layers, recipe

SUM = Message("all_reduce", "dp", 4000, (0, 1))
HAND = [Message("send", "pp", 400, (i, i + 1), (i, i + 1)) for i in range(3)]


def stage(index, num_stages, microbatches, seconds):
    """Return the course of a stage that receives, computes and sends each microbatch, forward alone."""
    messages, events, spent = [], [], []

    def swap(message, before):
        messages.append(message)
        events.extend([len(messages) - 1] * 2)
        spent.extend([before, 0.0])

    left = 0.0
    for _ in range(microbatches):
        if index:
            swap(HAND[index - 1], left)
            left = 0.0
        left += seconds
        if index < num_stages - 1:
            swap(HAND[index], left)
            left = 0.0
    return Course(tuple(messages), tuple(events), (*spent, left))


# Huang et al. 2019, arXiv:1811.06965, section 2.3: the bubble of m microbatches and p stages is p - 1 of them
@pytest.mark.parametrize(("num_stages", "microbatches"), [(2, 1), (2, 5), (4, 8)])
def test_a_pipeline_takes_as_long_as_its_microbatches_and_its_bubble(num_stages, microbatches):
    courses = [stage(i, num_stages, microbatches, 2.0) for i in range(num_stages)]
    assert replay(courses, {}) == pytest.approx(2.0 * (microbatches + num_stages - 1))


def test_stages_that_share_one_core_take_as_long_as_their_work():
    courses = [stage(i, 4, 8, 2.0) for i in range(4)]
    assert replay(courses, {}, cores=1, ranks_of_machine=4) == pytest.approx(2.0 * 4 * 8)


def test_ranks_share_the_cores_of_their_own_machine():
    alone = [Course((), (), (seconds,)) for seconds in (1.0, 1.0, 1.0, 1.0)]
    assert replay(alone, {}, cores=1, ranks_of_machine=2) == pytest.approx(2.0)
    assert replay(alone, {}, cores=2, ranks_of_machine=4) == pytest.approx(2.0)
    uneven = [Course((), (), (seconds,)) for seconds in (1.0, 3.0, 0.0, 0.0)]
    assert replay(uneven, {}, cores=1, ranks_of_machine=2) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (Cost(0.5), 3.0),  # behind the second that a rank computes meanwhile
        (Cost(4.0), 6.0),
        (Cost(0.5, busy=0.5), 3.5),  # which a core cannot do beside
        (Cost(4.0, busy=1.0), 6.0),
        (Cost(0.5, line=4.0), 6.0),  # by the rate of the line
        (Cost(0.5, line=4.0, credit=1.0), 5.0),  # of which it has saved some
        (Cost(0.5, line=4.0, credit=9.0), 4.0),  # since the call began
        (Cost(0.5, late=0.2), 3.0),
        (Cost(0.5, late=0.7), 3.2),  # for the core that would send it computes
        (Cost(0.5, late=9.0), 3.5),  # until the rank waits
    ],
)
def test_a_message_hides_behind_arithmetic_as_far_as_no_core_is_busy_with_it(cost, seconds):
    """The slower rank comes to it after 2 s; both compute 1 s before they wait for it."""
    courses = [Course((SUM,), (0, 0), (before, 1.0, 0.0)) for before in (1.0, 2.0)]
    assert replay(courses, {SUM: cost}) == pytest.approx(seconds)


def test_messages_follow_each_other_on_a_link_and_pass_each_other_on_its_two_ways():
    both = [Course((SUM, SUM), (0, 1, 0, 1), (0.0,) * 5)] * 2
    assert replay(both, {SUM: Cost(2.0)}) == pytest.approx(4.0)
    back = Message("send", "pp", 400, (1, 0), (1, 0))
    here = [Course((HAND[0], back), (0, 1, 0, 1), (0.0,) * 5)] * 2
    assert replay(here, {HAND[0]: Cost(2.0), back: Cost(2.0)}) == pytest.approx(2.0)


def test_who_sends_is_done_once_a_message_is_in_the_buffers_of_a_line():
    """The other has it after 2 s."""
    sender, receiver = (Course((HAND[0],), (0, 0), (0.0, 0.0, after)) for after in (1.5, 0.0))
    for buffered, seconds in ((0.0, 3.5), (0.5, 3.0), (9.0, 2.0)):
        assert replay([sender, receiver], {HAND[0]: Cost(0.1, line=2.0, buffered=buffered)}) == pytest.approx(seconds)


def test_a_small_message_leaves_a_line_what_it_has_saved():
    small = Message("all_gather", "dp", 64, (0, 1))
    courses = [Course((small, SUM), (0, 0, 1, 1), (1.0, 0.0, 0.0, 0.0, 0.0))] * 2
    assert replay(courses, {SUM: Cost(0.1, line=1.5, credit=1.0)}) == pytest.approx(1.5)


def test_a_call_finds_saved_what_the_one_before_it_has_not_sent():
    """In its last second a call sends nothing, so the first message of the next is 0.7 s ahead of the rate: 0.3 s."""
    late = Message("all_gather", "dp", 4000, (0, 1))
    courses = [Course((SUM, late), (0, 0, 1, 1), (0.0, 0.0, 2.0, 0.0, 1.0))] * 2
    costs = {SUM: Cost(0.1, line=1.0, credit=0.7), late: Cost(0.1, line=0.5, credit=0.7)}
    assert replay(courses, costs) == pytest.approx(0.3 + 2.0 + 0.1 + 1.0)


def test_nobody_waits_for_a_part_that_is_never_started_nor_for_ever():
    other = Message("all_gather", "dp", 40, (0, 1))
    courses = [Course((other,), (0, 0), (1.0, 0.0, 1.0)), Course((), (), (5.0,))]
    assert replay(courses, {other: Cost(0.5)}) == pytest.approx(5.0)
    crossed = [Course((SUM, other), events, (0.0,) * 5) for events in ((0, 0, 1, 1), (0, 0, 1, 1))]
    turned = Course((other, SUM), (0, 0, 1, 1), (0.0,) * 5)
    assert replay([crossed[0], turned], {SUM: Cost(1.0), other: Cost(1.0)}) < 10.0


class Sent(Traffic):
    """What a rank starts, by kind."""

    def add(self, collective, axis):
        kind = MessageKind.of(collective, axis.size)
        key = "send" if kind.op == "recv" else kind.op, kind.num_bytes
        self.counts[key] = self.counts.get(key, 0) + 1


@pytest.mark.parametrize(("axes", "kind"), [({"dp": 2}, "whole"), ({"dp": 2}, "sharded"), ({"pp": 2}, "piped")])
def test_a_rehearsed_rank_starts_the_messages_of_a_real_call(axes, kind):
    """Save for what a rank that hears of news in each call says of them, in a pipeline."""
    space = Space(recipe, axes, {"kind": [kind], "microbatches": [2]})
    problem, (candidate,) = Problem(space, layers(), layers().init, batch()), space

    def run():
        mesh, sent = fds.mesh(**axes), Sent()
        step = problem.step(candidate, mesh)
        state, share = problem.init(step), problem.share(candidate, mesh)
        for _ in range(3):
            state, _ = step(state, share)
        with counting(sent):
            step(state, share)
        return sent.counts

    for rank, counts in enumerate(fds.simulate(run, 2)):
        part = rehearsal.Part.of(problem, candidate, rank)
        assert part.begin() > 0
        course, other = rehearsal._courses(part.record(2))
        assert (course.messages, course.events) == (other.messages, other.events)
        recorded = Counter((message.op, message.num_bytes) for message in course.messages)
        small = 256 if kind == "piped" else 0  # headers, and words about them
        large = lambda counted, small=small: {key: n for key, n in counted.items() if key[1] > small}
        assert large(recorded) == large(counts)
        assert len(course.events) == 2 * len(course.messages) == len(course.seconds) - 1
        assert min(course.seconds) > 0 and {m.ranks for m in course.messages} <= {(0, 1), (1, 0)}
