"""What goes from stage to stage: every kind of activation comes through as it was, on ranks as in one process."""

import functools

import pytest
import torch
from torch import nn

import fds
from fds import plans, tree
from fds.errors import BatchError, LossError
from tests.bits import assert_rounding, assert_same_bits

WIDTH, ROWS, MICROBATCHES = 4, 8, 4


@tree.record
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def ended(body) -> Exception | None:
    """Return what a call raised, so that every rank can show its own error."""
    try:
        body()
    except Exception as error:
        return error
    return None


def batch(seed: int = 0, rows: int = ROWS):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=g), torch.randn(rows, WIDTH, generator=g)


def loss_of(pack, unpack) -> fds.Layers:
    """Linear, then `pack` as a layer, a border, `unpack`, and linear layers with another border."""
    linear = lambda: fds.LayerSpec(nn.Linear, WIDTH, WIDTH)
    return fds.Layers([linear(), pack, unpack, linear(), linear(), torch.tanh], nn.MSELoss())


BORDERS = (0, 2, 4, 6)  # the first border has what `pack` returned


def trained(loss, *transforms, steps: int = 3, batch_of=batch):
    step = fds.compose(*transforms, fds.sgd(0.1))(loss)
    state = step.init(loss.init, key=1)
    for i in range(steps):
        state, metrics = step(state, batch_of(i))
    odd = tree.map(lambda x: x[:7], batch_of(9))  # in one piece: it does not divide
    return step.params(state), metrics["loss"], step.evaluate(state, odd, outputs=True)


def piped(loss, ranks, schedule=plans.one_f_one_b, **options):
    axis = fds.mesh(pp=3)["pp"] if ranks else 3
    return fds.pipeline(schedule, axis, num_microbatches=MICROBATCHES, partition=BORDERS, **options)


def every_way(loss, schedule=plans.one_f_one_b, batch_of=batch, **options):
    """Hold that one process and three ranks train as accumulation does, bit for bit."""
    want = trained(loss, fds.accumulate(MICROBATCHES), batch_of=batch_of)
    assert all(x.isfinite().all() for x in tree.leaves(want))
    assert_same_bits(trained(loss, piped(loss, False, schedule, **options), batch_of=batch_of), want)
    ranks = lambda: trained(loss, piped(loss, True, schedule, **options), batch_of=batch_of)
    for found in fds.simulate(ranks, 3):
        assert_same_bits(found, want)


def _first(x):
    return x[0]


PACKS = {
    "nested": (lambda x: {"a": (x, [x * 2]), "b": {"c": x.exp()}}, lambda t: t["a"][0] + t["a"][1][0] * t["b"]["c"]),
    "record": (lambda x: Pair(x, x.sin()), lambda t: t.left * t.right),
    "bfloat16": (lambda x: x.bfloat16(), lambda x: x.float()),
    "float16": (lambda x: (x, x.half()), lambda t: t[0] + t[1].float()),
    "float64": (lambda x: x.double(), lambda x: x.float()),
    "truth values": (lambda x: (x, x > 0), lambda t: t[0].where(t[1], t[0] * 0.1)),
    "integers": (lambda x: (x, x.argmax(1)), lambda t: t[0] + t[0].gather(1, t[1][:, None])),
    "bytes": (lambda x: (x, (x > 0).byte()), lambda t: t[0] * (t[1] + 1)),
    "complex": (lambda x: torch.complex(x, x.sin()), lambda z: z.real * z.imag),
    "a lazy conjugate": (lambda x: torch.complex(x, x.sin()).conj(), lambda z: z.real * z.imag),
    "a lazy negative": (lambda x: (x, torch.complex(x, x).conj().imag), lambda t: t[0] + t[1]),
    "a scalar": (lambda x: (x, x.sum()), lambda t: t[0] * t[1].sigmoid()),
    "no elements": (lambda x: (x, x[:, :0]), lambda t: t[0] + t[1].sum()),
    "no elements alone want a gradient": (lambda x: (x.detach(), x[:, :0]), lambda t: t[0] + t[1].sum()),
    "expanded": (lambda x: (x, x[:, :1].expand(-1, WIDTH)), lambda t: t[0] + t[1].cos()),
    "every second": (lambda x: (x, x[:, ::2]), lambda t: t[0] + t[1].repeat(1, 2)),
    "the same twice": (lambda x: (x, x), lambda t: t[0] * t[1]),
    "no gradient wanted": (lambda x: (x, x.detach().cos()), lambda t: t[0] * t[1]),
    "nothing wants a gradient": (lambda x: x.detach(), lambda x: x),
    "unused": (lambda x: (x, x.exp()), _first),
    "half used": (lambda x: {"x": x, "none": None}, lambda t: t["x"]),
    "numbers": (lambda x: (x, 2, 0.5, True, "word", None), lambda t: t[0] * t[1] + t[2] * t[3] + len(t[4])),
    "odd numbers": (lambda x: (x, float("inf"), -1e300, 2**80), lambda t: t[0] * (t[3] > t[1]) + t[0]),
    "names that are not ASCII": (lambda x: {"größe": x, "": x.sin(), "a.b": "ü"}, lambda t: t["größe"] + t[""]),
    "a tuple of one": (lambda x: (x,), _first),
}


@pytest.mark.parametrize("kind", PACKS)
def test_every_kind_of_activation_comes_through(kind):
    every_way(loss_of(*PACKS[kind]))


VIEWS = {  # which arrive contiguous, and whose gradients are added up in another order
    "strides": (lambda x: x.T, lambda x: x.T),
    "views of one another": (lambda x: (x, x[:, 1:], x.view(-1)), lambda t: t[0] + t[1].sum() + t[2].mean()),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_come_through_to_rounding(kind):
    loss = loss_of(*VIEWS[kind])
    want = trained(loss, fds.accumulate(MICROBATCHES))
    largest = max(1.0, *(float(x.abs().max()) for x in want[0].values()))
    bounds = {"additions": 3 * ROWS * WIDTH * WIDTH, "scale": largest}
    found = [trained(loss, piped(loss, False)), *fds.simulate(lambda: trained(loss, piped(loss, True)), 3)]
    for one in found:
        assert_rounding(one, want, **bounds)
    for one in found[2:]:
        assert_same_bits(one, found[1])


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", [plans.gpipe, plans.zb_h1, plans.zb_h2], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["nested", "complex", "integers", "no gradient wanted", "the same twice", "unused"])
def test_activations_come_through_every_schedule(kind, schedule):
    every_way(loss_of(*PACKS[kind]), schedule)


def odd_microbatch(x) -> bool:
    """Whether the rows are those of an odd microbatch: `numbered` writes the number in their first column."""
    return bool(x[0, 0].round().long() % 2)


def numbered(seed: int):
    """A batch whose first column is the number of the microbatch, which no layer may learn to change."""
    x, y = batch(seed)
    x[:, 0] = torch.arange(ROWS) // (ROWS // MICROBATCHES)
    return x, y


class Trim(nn.Module):
    """Cut off what is padding in every row of the microbatch: (B, T) becomes (B, t), t <= T."""

    def forward(self, x):
        return x[:, : int(x.ne(0).any(0).sum())]


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, tokens):
        return self.table(tokens)


def texts(seed: int, *, even: bool = False):
    """Rows of 2 to 5 words and padding, of one length in a microbatch; `even`: in the whole batch."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 9, (ROWS, 5), generator=g)
    for i in range(ROWS):
        tokens[i, 2 + (seed if even else seed + i // 2) % MICROBATCHES :] = 0
    return tokens, torch.randn(ROWS, WIDTH, generator=g)


def trimming() -> fds.Layers:
    mean = lambda x: x.mean(1)
    spec = fds.LayerSpec
    layers = [Trim(), spec(Embed), spec(nn.Linear, WIDTH, WIDTH), torch.tanh, spec(nn.Linear, WIDTH, WIDTH), mean]
    return fds.Layers(layers, nn.MSELoss())


@pytest.mark.parametrize(
    "schedule", [plans.gpipe, plans.one_f_one_b, plans.zb_h1, plans.zb_h2], ids=lambda f: f.__name__
)
def test_lengths_may_differ_between_microbatches_where_declared(schedule):
    every_way(trimming(), schedule, texts, dynamic_shapes=True)


def test_lengths_may_differ_from_step_to_step_undeclared():
    every_way(trimming(), batch_of=functools.partial(texts, even=True))


def test_lengths_that_differ_undeclared_are_refused_on_every_rank_and_the_state_lives_on():
    def job(stumbles: bool):
        loss = trimming()
        step = fds.compose(piped(loss, True), fds.sgd(0.1))(loss)
        state, _ = step(step.init(loss.init, key=1), texts(0, even=True))
        error = ended(lambda: step(state, texts(0))) if stumbles else None
        state, _ = step(state, texts(1, even=True))
        return error, step.params(state)

    want = fds.simulate(lambda: job(False), 3)[0][1]
    for error, params in fds.simulate(lambda: job(True), 3):
        assert isinstance(error, BatchError)
        assert "stage 0, output of microbatch 1" in error.where
        assert error.got == "float32 (2, 3, 4)" and error.want.startswith("float32 (2, 2, 4)")
        assert "dynamic_shapes=True" in error.hint
        assert_same_bits(params, want)


CHANGES = {
    "a number": (lambda x: (x, 3 if odd_microbatch(x) else 2), lambda t: t[0] * t[1]),
    "a type": (lambda x: x.double() if odd_microbatch(x) else x, lambda x: x.float()),
    "a structure": (lambda x: [x] if odd_microbatch(x) else (x,), _first),
    "a key": (lambda x: {"odd": x} if odd_microbatch(x) else {"even": x}, lambda t: next(iter(t.values()))),
    "whether a gradient is wanted": (lambda x: x.detach() if odd_microbatch(x) else x, lambda x: x),
    "whether there is a tensor": (
        lambda x: (x, None if odd_microbatch(x) else x.sin()),
        lambda t: t[0] if t[1] is None else t[0] * t[1],
    ),
}


def learned(kind: str) -> fds.Layers:
    """Layers of which the first leaves the first column alone, and the second changes with it."""
    pack, unpack = CHANGES[kind]

    class Rest(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH - 1)

        def forward(self, x):
            return torch.cat((x[:, :1], self.linear(x)), 1)

    linear = lambda: fds.LayerSpec(nn.Linear, WIDTH, WIDTH)
    return fds.Layers([fds.LayerSpec(Rest), pack, unpack, linear(), linear(), torch.tanh], nn.MSELoss())


@pytest.mark.parametrize("kind", CHANGES)
def test_anything_may_change_between_microbatches_where_declared(kind):
    every_way(learned(kind), batch_of=numbered, dynamic_shapes=True)


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_between_microbatches_undeclared_is_shown_by_every_rank(kind):
    loss = learned(kind)
    step = lambda: fds.compose(piped(loss, True), fds.sgd(0.1))(loss)

    def job():
        made = step()
        state = made.init(loss.init, key=1)
        return ended(lambda: made(state, numbered(0)))

    for error in fds.simulate(job, 3):
        assert isinstance(error, BatchError)
        assert "stage 0, output of microbatch 1" in error.where
        assert error.got not in error.want, f"a reader sees no difference: {error}"


def test_a_number_that_is_no_number_is_the_same_in_every_microbatch():
    every_way(loss_of(lambda x: (x, float("nan")), _first))


class Opaque:
    """A value that no message can carry."""


REFUSED = {
    "an object": (lambda x: (x, Opaque()), "Opaque"),
    "a function": (lambda x: (x, torch.sin), "sin"),
    "a sparse tensor": (lambda x: (x, x.detach().to_sparse()), "sparse_coo"),
    "a complex number": (lambda x: (x, 2j), "2j"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_sent_is_refused_by_every_rank(kind):
    pack, word = REFUSED[kind]
    loss = loss_of(pack, _first)

    def job():
        step = fds.compose(piped(loss, True), fds.sgd(0.1))(loss)
        state = step.init(loss.init, key=1)
        return ended(lambda: step(state, batch())), ended(lambda: step.evaluate(state, batch()))

    for errors in fds.simulate(job, 3):
        for error in errors:
            assert isinstance(error, LossError)
            assert "stage 0, output of microbatch 0" in error.where
            assert word in error.got and error.want


def rows_of(t):
    """A layer of which one input gets a sparse gradient."""
    return nn.functional.embedding(torch.arange(len(t[0])), t[0], sparse=True) + t[1]


GRADIENTS = {
    "sparse": (lambda x: (x, x), rows_of),
    "expanded": (lambda x: (x, x.sum(1, keepdim=True)), lambda t: t[0] + t[1]),
    "transposed": (lambda x: x, lambda x: (x.T * 2).T),
    "a lazy conjugate": (lambda x: torch.complex(x, x.sin()), lambda z: (z.conj() * z).real),
    "of another type": (lambda x: x.bfloat16(), lambda x: x.float() * 3),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_every_kind_of_gradient_comes_back(kind):
    every_way(loss_of(*GRADIENTS[kind]))


SHOWN = {
    "a dict": lambda x: {"out": x, "sure": x > 0, "n": 3},
    "a tuple": lambda x: (x, [x.sin()], None),
    "a record": lambda x: Pair(x, x.cos()),
    "bfloat16": lambda x: x.bfloat16(),
    "strides": lambda x: x.unsqueeze(-1).expand(-1, -1, 2).transpose(1, 2),
    "no elements": lambda x: (x, x[:, :0]),
    "a scalar": lambda x: (x, torch.tensor(2.0)),
}


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("rows", [8, 7, 3, 1])
def test_evaluate_shows_every_kind_of_output_on_every_rank(kind, rows):
    linear = lambda: fds.LayerSpec(nn.Linear, WIDTH, WIDTH)
    first = lambda out: out if isinstance(out, torch.Tensor) else tree.leaves(out)[0]
    criterion = lambda out, y: (first(out).float() - (y[:, :1, None] if first(out).dim() == 3 else y)).square().mean()
    loss = fds.Layers([linear(), torch.tanh, linear(), torch.tanh, linear(), SHOWN[kind]], criterion)
    shown = lambda step: step.evaluate(step.init(loss.init, key=1), batch(rows=rows), outputs=True)
    want = shown(fds.compose(fds.sgd(0.1))(loss))["outputs"]
    for found in fds.simulate(lambda: shown(fds.compose(piped(loss, True), fds.sgd(0.1))(loss)), 3):
        assert tree.parts(found["outputs"])[1] == tree.parts(want)[1]
        for x, y in zip(tree.leaves(found["outputs"]), tree.leaves(want), strict=True):
            if isinstance(y, torch.Tensor):
                assert (x.shape, x.dtype) == (y.shape, y.dtype)
                assert torch.allclose(
                    x.float(),
                    y.float(),
                    rtol=0,
                    atol=8 * torch.finfo(torch.float32).eps if y.dtype is not torch.bfloat16 else 2**-7,
                )
            else:
                assert x == y
