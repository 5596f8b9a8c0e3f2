"""What tests of pipelines share: plans of every kind, with stages and layers for them, and how they are trained."""

import random

import attrs
from hypothesis import strategies as st

import fds
from fds import plans
from fds.plans import Action, Op, Plan
from tests.plans.cases import SCHEDULES, TRAINING, sizes

DIVISORS = (1, 2, 3, 4, 6)  # of the rows of a problem, two of which batch norm needs


@attrs.frozen
class Drawn:
    """A schedule that was drawn: a plan under a name, as what `fds.pipeline` takes."""

    __name__: str
    plan: Plan

    def __call__(self, num_ranks: int, num_microbatches: int) -> Plan:
        return self.plan

    def _repr_pretty_(self, printer, cycle):
        printer.text(f"<{self.__name__}\n{self.plan}>")


def user_rows(placement: dict[int, int], num_microbatches: int, seed: int, *, in_order: bool = True) -> Plan:
    """Return a valid plan as nobody would write it: at every point any action that can be done is as likely as another.

    Forwards of a stage keep the order of microbatches, for buffers; with `in_order` sums of gradients do, too.
    """
    draw, stages = random.Random(seed), sorted(placement)
    fused = {(s, i): draw.random() < 0.5 for s in stages for i in range(num_microbatches)}
    rows: list[list[Action]] = [[] for _ in range(1 + max(placement.values()))]
    forward, back, weight = dict.fromkeys(stages, 0), {s: set() for s in stages}, {s: set() for s in stages}
    while True:
        ready = []
        for s in stages:
            if forward[s] < num_microbatches and (s == 0 or forward[s] < forward[s - 1]):
                ready.append(Action(s, Op.FORWARD, forward[s]))
            for i in range(forward[s]):
                due = not in_order or i == len(weight[s])
                if i not in back[s] and (s + 1 == len(stages) or i in back[s + 1]) and (due or not fused[s, i]):
                    ready.append(Action(s, Op.BACKWARD if fused[s, i] else Op.BACKWARD_INPUT, i))
                if i in back[s] and i not in weight[s] and due:
                    ready.append(Action(s, Op.BACKWARD_WEIGHT, i))
        if not ready:
            return plans.validate(Plan.of(rows))
        action = draw.choice(ready)
        s, i = action.stage, action.microbatch
        rows[placement[s]].append(action)
        forward[s] += action.op is Op.FORWARD
        if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            back[s].add(i)
        if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            weight[s].add(i)


@st.composite
def schedules(draw, max_ranks: int, max_stages: int, *, in_order: bool = False, microbatches=DIVISORS) -> Drawn:
    """Draw a schedule for some ranks and microbatches, of those of fds.plans, a searched one, or a user's.

    With `in_order` every stage adds up its gradients in the order of the microbatches.
    """
    ranks = draw(st.integers(1, min(max_ranks, max_stages)))
    name = draw(st.sampled_from([*TRAINING, "searched", "user", "user"]))
    if name in SCHEDULES:
        pairs = [pair for pair in sizes(name, [ranks], microbatches) if SCHEDULES[name](*pair).num_stages <= max_stages]
        if pairs:
            return Drawn(name, SCHEDULES[name](*draw(st.sampled_from(pairs))))
        name = "user"
    m = draw(st.sampled_from(microbatches))
    seed = draw(st.integers(0, 2**16))
    if name == "searched":
        cost = random.Random(seed)
        times = {
            part: [cost.choice([0.5, 1.0, 2.0, 3.0]) for _ in range(ranks)]
            for part in ("forward", "backward_input", "backward_weight")
        }
        bound = draw(st.sampled_from([None, ranks]))
        return Drawn(name, plans.searched(plans.Costs(**times), bound)(ranks, m))
    stages = draw(st.integers(ranks, max_stages))
    homes = [*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(stages - ranks))]
    placement = dict(enumerate(draw(st.permutations(homes))))
    return Drawn(name, user_rows(placement, m, seed, in_order=in_order))


def twins(drawn: Drawn) -> st.SearchStrategy[Drawn]:
    """Draw a schedule with the same stages on the same ranks, which sums in the same order."""
    plan = drawn.plan
    known = []
    for name in TRAINING:
        if (plan.num_ranks, plan.num_microbatches) in sizes(name, [plan.num_ranks], [plan.num_microbatches]):
            other = SCHEDULES[name](plan.num_ranks, plan.num_microbatches)
            if other.placement == plan.placement:
                known.append(Drawn(name, other))
    users = st.integers(0, 2**16).map(
        lambda seed: Drawn("user", user_rows(plan.placement, plan.num_microbatches, seed))
    )
    return st.one_of(st.sampled_from(known), users) if known else users


def partitions(num_layers: int, num_stages: int) -> st.SearchStrategy:
    """Draw a partition: by name, or the boundaries themselves."""
    inner = st.lists(st.integers(1, num_layers - 1), min_size=num_stages - 1, max_size=num_stages - 1, unique=True)
    given = inner.map(lambda cuts: [0, *sorted(cuts), num_layers])
    return st.one_of(st.sampled_from(["uniform", "parameters"]), given) if num_layers > 1 else st.just("uniform")


def pipelined(drawn: Drawn, axis, partition="parameters", **more):
    """Return the transform for a schedule that was drawn, over an axis or so many ranks in one process."""
    return fds.pipeline(
        drawn,
        drawn.plan.num_ranks if axis is None else axis,
        num_microbatches=drawn.plan.num_microbatches,
        partition=partition,
        **more,
    )


def train(step, params, batches, *, key: int = 5):
    """Return all that comes of some steps and an evaluation."""
    state, told = step.init(params, key=key), []
    for batch in batches:
        state, metrics = step(state, batch)
        told.append(metrics)
    shown = step.evaluate(state, batches[-1], outputs=True)
    return {"params": step.params(state), "metrics": told, "evaluated": shown}, state
