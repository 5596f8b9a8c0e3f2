"""A teacher: asked by the loss, wherever it is held and however the student is trained, and by nobody kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import distill, plans, tree
from fds.errors import ComposeError, FdsError, StateError
from tests.bits import assert_same_bits

WORDS, WIDTH, ROWS, S, CALLS = 16, 16, 8, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(S), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.mix(self.norm(x))))


def network(blocks, norm=True):
    torch.manual_seed(blocks)
    parts = [Block() for _ in range(blocks)]
    for block in parts:
        if norm:
            block.norm.running_var.uniform_(0.5, 2)
        else:
            block.norm = nn.LayerNorm(WIDTH)
            block.drop = nn.Identity()
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Sequential(*parts), nn.Linear(WIDTH, WORDS))


LARGE = network(4)  # in training mode, with dropout and statistics, of which a teacher shows nothing
APPLY, PARAMS, _ = fds.functional(LARGE)
SMALL = network(2, norm=False)
STUDENT, FIRST, _ = fds.functional(SMALL)


def by_hand(tokens):
    with torch.no_grad():
        return torch.func.functional_call(network(4).eval(), PARAMS, tokens)


def batch(call):
    tokens = torch.randint(0, WORDS, (ROWS, S + 1), generator=torch.Generator().manual_seed(call))
    return tokens[:, :-1], tokens[:, 1:]


def loss_with(asked):
    def loss(params, rows):
        tokens, targets = rows
        logits = STUDENT(params, tokens)
        soft = distill.logits(logits, asked(tokens), temperature=2.0)
        hard = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return fds.Mean(0.5 * soft.total + 0.5 * hard, soft.weight), {"hard": hard / soft.weight}

    return loss


def train(*transforms, asked):
    step = fds.compose(*transforms, fds.sgd(lr=0.5))(loss_with(asked))
    state = step.init(FIRST, key=1)
    data, metrics = step.dimensions.data, {}
    for call in range(CALLS):
        rows = batch(call)
        state, metrics = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return step.params(state), metrics


def test_a_student_is_the_one_of_a_loop_in_torch_bit_for_bit():
    student = network(2, norm=False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for call in range(CALLS):
        optimizer.zero_grad()
        for tokens, targets in zip(*(x.chunk(2) for x in batch(call)), strict=True):
            logits = student(tokens)
            soft = distill.logits(
                logits, by_hand(tokens), temperature=2.0
            )  # tests/distill/test_losses.py has its formula
            hard = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            ((0.5 * soft.total + 0.5 * hard) / (ROWS * S)).backward()
        optimizer.step()
    params, _ = train(fds.accumulate(2), asked=distill.teacher(APPLY, PARAMS))
    assert_same_bits(params, {name: x.detach() for name, x in student.named_parameters()})


HOLD = {
    "whole": lambda axis, tmp: [],
    "stage 1": lambda axis, tmp: [fds.shard_optimizer(axis, stage=1)],
    "stage 3": lambda axis, tmp: [fds.shard_optimizer(axis, stage=3)],
    "stage 3, no prefetch": lambda axis, tmp: [fds.shard_optimizer(axis, stage=3, prefetch=0)],
    "stage 3, disk": lambda axis, tmp: [fds.shard_optimizer(axis, stage=3), fds.offload(masters=fds.disk(tmp))],
    "host": lambda axis, tmp: [fds.offload(masters="host")],
}
STUDENTS = {
    "stage 0": lambda axis: [fds.shard_optimizer(axis, stage=0), fds.accumulate(2)],
    "stage 1": lambda axis: [fds.shard_optimizer(axis, stage=1), fds.accumulate(2), fds.donate()],
    "stage 2": lambda axis: [fds.shard_optimizer(axis, stage=2), fds.accumulate(2), fds.checkpoint_activations()],
    "stage 3": lambda axis: [fds.shard_optimizer(axis, stage=3), fds.accumulate(2)],
    "stage 3, recomputed": lambda axis: [fds.shard_optimizer(axis, stage=3), fds.checkpoint_activations()],
}


@pytest.mark.parametrize("student", STUDENTS)
def test_it_is_the_model_in_eval_mode_wherever_it_is_held(student, tmp_path):
    def run(hold):
        axis = fds.mesh(dp=-1)["dp"]
        asked = by_hand if hold is None else distill.teacher(APPLY, PARAMS, *HOLD[hold](axis, str(tmp_path)))
        return train(*STUDENTS[student](axis), asked=asked)

    want = fds.simulate(lambda: run(None), 2)
    for hold in HOLD if student == "stage 3" else ["stage 3"]:
        assert_same_bits(fds.simulate(lambda hold=hold: run(hold), 2), want)


def test_of_a_sharded_one_each_rank_holds_its_part():
    wide = {f"{i}.weight": torch.randn(256, 256) for i in range(4)}

    def forward(params, x):
        for w in params.values():
            x = torch.tanh(x @ w)
        return x

    def run():
        asked = distill.teacher(forward, wide, fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3))
        x = torch.ones(2, 256)
        return tree.num_bytes(asked.state), asked(x), forward(wide, x)

    for held, out, want in fds.simulate(run, 4):
        assert tree.num_bytes(wide) / 4 <= held < tree.num_bytes(wide) / 4 + 1024
        assert torch.equal(out, want)


def test_it_says_no_gradient_and_is_in_no_state(tmp_path):
    asked = distill.teacher(APPLY, PARAMS)
    tokens = batch(0)[0]
    assert not asked(tokens).requires_grad
    step = fds.compose(fds.adamw(1e-3))(loss_with(asked))
    plain = fds.compose(fds.adamw(1e-3))(loss_with(by_hand))
    state, _ = step(step.init(FIRST), batch(0))
    assert tree.paths(state).keys() == tree.paths(plain.init(FIRST)).keys()
    before = tree.map(torch.clone, asked.state)
    fds.save(tmp_path, state, step)
    assert_same_bits(fds.load(tmp_path, plain, FIRST)[0], state)  # which knows no teacher
    assert_same_bits(step.evaluate(state, batch(1)), plain.evaluate(state, batch(1)))
    assert_same_bits(asked.state, before)


def test_the_last_stage_of_a_pipeline_asks_it():
    small = network(2, norm=False)
    layers = [small[0], *small[1], small[2]]

    def criterion_of(asked):
        def criterion(logits, targets):
            tokens, words = targets
            hard = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="sum")
            soft = distill.logits(logits, asked(tokens))
            return fds.Mean(soft.total + hard, soft.weight)

        return criterion

    def run(hold):
        mesh = fds.mesh(pp=2, dp=2)
        asked = by_hand if hold is None else distill.teacher(APPLY, PARAMS, *HOLD[hold](mesh["dp"], None))
        loss = fds.Layers(layers, criterion_of(asked))
        shared = (
            fds.shard_optimizer(mesh["dp"], stage=2),
            fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=2),
        )
        step = fds.compose(*shared, fds.sgd(0.5))(loss)
        state = step.init(loss.init, key=1)
        for call in range(2):
            tokens, words = (x.chunk(2)[mesh["dp"].index] for x in batch(call))
            state, metrics = step(state, (tokens, (tokens, words)))
        return step.params(state), metrics

    want = fds.simulate(lambda: run(None), 4)
    for hold in ("whole", "stage 3"):
        assert_same_bits(fds.simulate(lambda hold=hold: run(hold), 4), want)


def test_what_is_done_to_the_modules_of_a_loss_is_not_done_to_it():
    asked = distill.teacher(APPLY, PARAMS)
    kept = [fds.random_ltd([0, 1], lambda t: 2)]  # of the one list of blocks that the loss shows
    assert_same_bits(train(*kept, asked=asked), train(*kept, asked=by_hand))


def test_codes_and_16_bits_are_those_that_a_step_computes_with():
    tokens = batch(0)[0]
    coded = distill.teacher(APPLY, PARAMS, fds.quantize_frozen())
    numbers = coded.step.params(coded.state)
    assert torch.equal(coded(tokens), torch.func.functional_call(network(4).eval(), numbers, tokens))
    assert tree.num_bytes(coded.state.params) < tree.num_bytes(PARAMS) / 2
    assert not torch.equal(coded(tokens), by_hand(tokens))
    transforms = fds.precision(torch.bfloat16), fds.freeze("0.*")
    step = fds.compose(*transforms, fds.sgd(0.1))(lambda params, x: APPLY(params, x).float().mean())
    want = step.evaluate(step.init(PARAMS), tokens, outputs=True)["outputs"]
    assert_same_bits(distill.teacher(APPLY, PARAMS, fds.precision(torch.bfloat16))(tokens), want)


@pytest.mark.parametrize(
    "make",
    [
        lambda: distill.teacher(LARGE, PARAMS),
        lambda: distill.teacher(nn.Linear, PARAMS),
        lambda: distill.teacher(APPLY, PARAMS, fds.adamw(1e-3)),
        lambda: distill.teacher(APPLY, PARAMS, fds.accumulate(2)),
        lambda: distill.teacher(APPLY, PARAMS, fds.ema(0.9)),
        lambda: distill.teacher(APPLY, PARAMS, fds.clip_by_global_norm(1.0)),
        lambda: distill.teacher(APPLY, PARAMS, "stage 3"),
        lambda: distill.teacher(APPLY, PARAMS, fds.shard_optimizer),
    ],
)
def test_what_is_no_teacher_is_refused(make):
    with pytest.raises(ComposeError) as caught:
        make()
    assert caught.value.want


def test_parameters_that_are_none_are_refused():
    with pytest.raises(StateError):
        distill.teacher(APPLY, {"a": torch.tensor(float("nan"))})
    with pytest.raises(FdsError):
        distill.teacher(APPLY, {"a": torch.ones(2)})(batch(0)[0])
