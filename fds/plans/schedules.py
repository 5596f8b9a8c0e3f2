"""Schedules: pure functions of the numbers of ranks p and of microbatches m to a plan.

For each: its bubble (the times tF, tB, tW are those of a stage), the microbatches that are live on rank r, its source.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

import attrs

from fds.errors import PlanError, is_int
from fds.plans.plan import Action, Op, Plan

F, B, W, BW = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD


class Row:
    """The actions of one rank so far; the next microbatch of each operation is counted here.

    Gradients are summed by W and BW. Every schedule does them in the order 0, 1, 2, ... at every stage, so that all
    schedules are bit-equal.

    >>> Row().do(3, F, F, BW, B, W).actions
    [3F0, 3F1, 3BW0, 3B1, 3W1]
    """

    def __init__(self):
        self.actions: list[Action] = []
        self._counts: Counter[tuple[int, Op]] = Counter()

    def do(self, stage: int, *ops: Op) -> Row:
        """Append these operations of a stage, each for its next microbatch."""
        for op in ops:
            if op is BW:
                microbatch = self._take(stage, W)
                assert microbatch == self._take(stage, B), "a W is pending: BW would sum gradients out of order"
            else:
                microbatch = self._take(stage, op)
            self.actions.append(Action(stage, op, microbatch))
        return self

    def count(self, stage: int, op: Op) -> int:
        """Return the number of microbatches of a stage for which this operation is in the row."""
        return self._counts[stage, op]

    def _take(self, stage: int, op: Op) -> int:
        microbatch = self._counts[stage, op]
        self._counts[stage, op] = microbatch + 1
        return microbatch


def check_sizes(schedule: str, num_ranks: object, num_microbatches: object, *, least: int = 1) -> None:
    """Raise `PlanError` unless these are counts, with at least `least` microbatches."""
    _check_count(schedule, "num_ranks", num_ranks)
    _check_count(schedule, "num_microbatches", num_microbatches)
    if isinstance(num_microbatches, int) and num_microbatches < least:
        raise PlanError(
            "too few microbatches for this schedule",
            where=schedule,
            got=f"num_ranks={num_ranks}, num_microbatches={num_microbatches}",
            want=f"num_microbatches >= {least}",
        )


def _check_count(schedule: str, name: str, value: object) -> None:
    if not is_int(value, 1):
        raise PlanError("not a count", where=schedule, got=f"{name}={value!r}", want=f"{name} >= 1")


def data_parallel(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of one stage: a forward and its backward, microbatch by microbatch. Raises `PlanError`.

    Bubble: none
    Live:   one microbatch
    Source: none: gradient accumulation, written as a plan

    >>> data_parallel(1, 3)
    0: 0F0 0BW0 0F1 0BW1 0F2 0BW2
    """
    check_sizes("data_parallel", num_ranks, num_microbatches)
    if num_ranks != 1:
        raise PlanError(
            "data parallelism has one stage",
            where="data_parallel",
            got=f"num_ranks={num_ranks}",
            want="num_ranks=1",
            hint="a schedule of several stages: one_f_one_b",
        )
    return Plan.of([Row().do(0, *[F, BW] * num_microbatches).actions])


def inference(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of all forwards and no backward. Raises `PlanError`.

    Bubble: (p - 1) tF
    Live:   one microbatch on every rank
    Source: none: a chain of ranks

    >>> inference(2, 3)
    0: 0F0 0F1 0F2
    1: 1F0 1F1 1F2
    """
    check_sizes("inference", num_ranks, num_microbatches)
    return Plan.of(Row().do(rank, *[F] * num_microbatches).actions for rank in range(num_ranks))


def forwards_of(placement: Mapping[int, int], num_microbatches: int) -> Plan:
    """Return the plan of all forwards for stages placed on these ranks (stage -> rank).

    Every rank does them in the order of microbatch + stage, so that none waits for a later one.

    >>> forwards_of({0: 0, 1: 1, 2: 1, 3: 0}, 2)
    0: 0F0 0F1 3F0 3F1
    1: 1F0 1F1 2F0 2F1
    """
    rows: list[list[Action]] = [[] for _ in range(max(placement.values()) + 1)]
    stages = range(len(placement))
    for _, stage, i in sorted((i + stage, stage, i) for stage in stages for i in range(num_microbatches)):
        rows[placement[stage]].append(Action(stage, F, i))
    return Plan.of(rows)


def gpipe(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of all forwards, then all backwards (GPipe). Raises `PlanError`.

    Bubble: (p - 1)(tF + tB + tW): (p - 1) / (m + p - 1) of the whole
    Live:   m microbatches on every rank
    Source: Huang et al. 2019, arXiv:1811.06965, section 2.3

    >>> gpipe(2, 3)
    0: 0F0 0F1 0F2 0BW0 0BW1 0BW2
    1: 1F0 1F1 1F2 1BW0 1BW1 1BW2
    """
    check_sizes("gpipe", num_ranks, num_microbatches)
    ops = [*[F] * num_microbatches, *[BW] * num_microbatches]
    return Plan.of(Row().do(rank, *ops).actions for rank in range(num_ranks))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan in which a forward and a backward alternate after a warm-up. Raises `PlanError`.

    1F1B (PipeDream-flush): the memory of a microbatch is freed early.

    Bubble: (p - 1)(tF + tB + tW), as GPipe
    Live:   min(m, p - r) microbatches on rank r
    Source: Narayanan et al. 2021, arXiv:2006.09503, section 3.2; arXiv:2104.04473, section 2.2.1

    >>> one_f_one_b(2, 3)
    0: 0F0 0F1 0BW0 0F2 0BW1 0BW2
    1: 1F0 1BW0 1F1 1BW1 1F2 1BW2
    """
    check_sizes("one_f_one_b", num_ranks, num_microbatches)
    rows = [Row() for _ in range(num_ranks)]
    for rank, row in enumerate(rows):
        warm_up = min(num_microbatches, num_ranks - rank - 1)
        row.do(rank, *[F] * warm_up, *[F, BW] * (num_microbatches - warm_up), *[BW] * warm_up)
    return Plan.of(row.actions for row in rows)


@attrs.frozen(repr=False)
class Interleaved:
    """The schedule of this many chunks a rank: stage chunk * p + r on rank r."""

    chunks: int

    def __call__(self, num_ranks: int, num_microbatches: int) -> Plan:
        check_sizes(repr(self), num_ranks, num_microbatches)
        if num_microbatches % num_ranks:
            raise PlanError(
                "the number of microbatches is not a multiple of the number of ranks",
                where=repr(self),
                got=f"num_ranks={num_ranks}, num_microbatches={num_microbatches}",
                want=f"a multiple of {num_ranks} microbatches",
            )
        return Plan.of(self._row(rank, num_ranks, num_microbatches).actions for rank in range(num_ranks))

    def _row(self, rank: int, num_ranks: int, num_microbatches: int) -> Row:
        row, total = Row(), self.chunks * num_microbatches
        per_rank_behind = 2 if self.chunks > 1 else 1  # with one chunk as in 1F1B
        warm_up = min(total, (self.chunks - 1) * num_ranks + per_rank_behind * (num_ranks - rank - 1))
        chunk = lambda turn: turn // num_ranks % self.chunks  # a round takes p microbatches through a chunk
        for turn in range(total + warm_up):
            if turn < total:
                row.do(chunk(turn) * num_ranks + rank, F)
            if turn >= warm_up:
                row.do((self.chunks - 1 - chunk(turn - warm_up)) * num_ranks + rank, BW)
        return row

    def __repr__(self) -> str:
        return f"interleaved({self.chunks})"


def interleaved(chunks: int) -> Interleaved:
    """Return the schedule of 1F1B over `chunks` stages a rank, so that ranks wait for one chunk only.

    The number of microbatches must be a multiple of p. With one chunk it is 1F1B. Raises `PlanError`.

    Bubble: (p - 1)(tF + tB + tW): with v chunks a v-th of 1F1B's
    Live:   min(vm, (v - 1)p + 2(p - r - 1) + 1) (stage, microbatch)s on rank r, each a v-th of 1F1B's; v > 1
    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2

    >>> interleaved(2)(2, 2)
    0: 0F0 0F1 2F0 2F1 2BW0 2BW1 0BW0 0BW1
    1: 1F0 1F1 3F0 3BW0 3F1 3BW1 1BW0 1BW1
    """
    _check_count("interleaved", "chunks", chunks)
    return Interleaved(chunks)


def zb_h1(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of 1F1B with W r microbatches behind B on rank r. Raises `PlanError`.

    ZB-H1: weight gradients are delayed to the end, where 1F1B is idle.

    Bubble: (p - 1)(tF + tB - tW), a third of 1F1B's where the three are equal and m >= p
    Live:   min(m, p) microbatches on every rank, which 1F1B has on its first; up to their B min(m, p - r), as 1F1B
    Source: Qi et al. 2023, arXiv:2401.10241, section 2.1

    >>> zb_h1(2, 3)
    0: 0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2
    1: 1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2
    """
    check_sizes("zb_h1", num_ranks, num_microbatches)
    row = lambda r: late_weights(r, num_microbatches, ahead=num_ranks - r - 1, behind=r)
    return Plan.of(row(rank).actions for rank in range(num_ranks))


def zb_h2(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan with 2(p - r) - 1 forwards before the first backward on rank r. Raises `PlanError`.

    ZB-H2: forwards instead of the first wait, weight gradients instead of the last: no bubble, for twice the memory.

    Bubble: none where tF = tB = tW and m >= 2p - 1, counted on a rank from its own first start to its own last end
    Live:   min(m, 2p - 1) microbatches on every rank; up to their B min(m, 2(p - r) - 1) on rank r
    Source: Qi et al. 2023, arXiv:2401.10241, section 2.2

    >>> zb_h2(2, 3)
    0: 0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2
    1: 1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2
    """
    check_sizes("zb_h2", num_ranks, num_microbatches)
    row = lambda r: late_weights(r, num_microbatches, ahead=2 * (num_ranks - r - 1), behind=2 * r)
    return Plan.of(row(rank).actions for rank in range(num_ranks))


def late_weights(stage: int, num_microbatches: int, *, ahead: int, behind: int) -> Row:
    """Return the row F, B, W, F, B, W, ... in which F is `ahead` microbatches before B, and W `behind` after it.

    >>> late_weights(0, 4, ahead=1, behind=1).actions
    [0F0, 0F1, 0B0, 0F2, 0B1, 0W0, 0F3, 0B2, 0W1, 0B3, 0W2, 0W3]
    """
    row = Row()
    for turn in range(-ahead, num_microbatches + behind):
        if turn + ahead < num_microbatches:
            row.do(stage, F)
        if 0 <= turn < num_microbatches:
            row.do(stage, B)
        if 0 <= turn - behind < num_microbatches:
            row.do(stage, W)
    return row


def zb_v(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of stages r and 2p - 1 - r on rank r, one F, B and W of each in turn. Raises `PlanError`.

    ZB-V: the stages are laid out as a V, so that the first backward begins on the rank of the last forward.

    Bubble: none where tF = tB = tW and m >= 2p - 1, counted on a rank from its own first start to its own last end
    Live:   2p (stage, microbatch)s on a rank, or fewer, each half of 1F1B's: what 1F1B has on its first rank
    Source: Qi et al. 2024, arXiv:2405.15362; 2023, arXiv:2401.10241, section 6

    >>> zb_v(1, 2)
    0: 0F0 1F0 1B0 1W0 0F1 0B0 0W0 1F1 1B1 1W1 0B1 0W1
    """
    check_sizes("zb_v", num_ranks, num_microbatches)
    full = max(num_microbatches, 2 * num_ranks - 1)  # enough to fill the V; the excess is dropped below
    rows = (_zb_v_row(rank, num_ranks, full).actions for rank in range(num_ranks))
    return Plan.of([a for a in row if a.microbatch < num_microbatches] for row in rows)  # type: ignore[operator]


def _zb_v_row(rank: int, num_ranks: int, num_microbatches: int) -> Row:
    down, up = rank, 2 * num_ranks - 1 - rank  # the two stages: on the way to the last rank, and on the way back
    row, below = Row(), num_ranks - rank
    row.do(down, *[F] * (2 * below - 1))
    for _ in range(rank):
        row.do(up, F).do(down, F)
    row.do(up, *[F, B, W] * below)
    while row.count(up, F) < num_microbatches:
        row.do(down, *[F, B, W] if row.count(down, F) < num_microbatches else [B, W])
        row.do(up, F, B, W)
    for _ in range(rank):
        row.do(down, B).do(up, B)
    row.do(down, *[B, W] * below)
    row.do(up, *[W] * (num_microbatches - row.count(up, W)))
    return row.do(down, *[W] * (num_microbatches - row.count(down, W)))


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of stages r and 2p - 1 - r on rank r with pairs of forward and backward. Raises `PlanError`.

    DualPipeV ("cut in half"): forwards alternate with backwards of the rank's other stage. A forward and a BW that
    follow each other are of different microbatches and stages: an interpreter may run them at the same time, so that
    one computes while the other communicates. Here they are two separate actions.

    Bubble: (p - 1) tF where tF = tB = tW; published for pairs that run as one, in tFB: (p - 1)(tFB + tB - 2tW)
    Live:   2p + 1 (stage, microbatch)s on a rank, each half of 1F1B's
    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; cut in half by Qi et al. (README of deepseek-ai/DualPipe)

    >>> dualpipe_v(1, 2)
    0: 0F0 1F0 0F1 1BW0 1F1 0BW0 1BW1 0B1 0W1
    """
    check_sizes("dualpipe_v", num_ranks, num_microbatches, least=2 * num_ranks if isinstance(num_ranks, int) else 1)
    return Plan.of(_dualpipe_v_row(rank, num_ranks, num_microbatches).actions for rank in range(num_ranks))


def _dualpipe_v_row(rank: int, num_ranks: int, num_microbatches: int) -> Row:
    down, up = rank, 2 * num_ranks - 1 - rank  # the two stages: on the way to the last rank, and on the way back
    row, below = Row(), num_ranks - rank - 1
    row.do(down, *[F] * (2 * below))
    for _ in range(rank + 1):
        row.do(down, F).do(up, F)
    row.do(up, *[B, W, F] * below)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        row.do(down, F).do(up, BW, F).do(down, BW)
    for _ in range(below):
        row.do(up, BW, F).do(down, BW)
    # the last backwards: BW first, then B, whose W, the oldest pending one first, fills the wait for the others
    pending = deque[int]()
    for last in range(2 * (rank + 1)):
        stage = down if last % 2 else up
        row.do(stage, B if last > rank else BW)
        if last > rank:
            pending.append(stage)
    for _ in range(below):
        row.do(pending.popleft(), W).do(down, B)
        pending.append(down)
    for stage in pending:
        row.do(stage, W)
    return row
