"""`step.weights` hands out what the state was made of, whole, on every rank, whatever a consumer does with it."""

import pytest
import torch
from torch import nn

import fds
from fds import plans, tree
from fds.errors import DonatedStateError, StateError
from fds.step import fill, transform
from tests.bits import assert_same_bits
from tests.memory import peak_bytes
from tests.storage.test_export import layers
from tests.storage.topologies import Stages
from tests.traffic import counted_for

DRAWN = torch.Generator().manual_seed(0)
PARAMS = {
    "embed.weight": torch.randn(9, 6, generator=DRAWN),
    "h.0.up.weight": torch.randn(10, 6, generator=DRAWN),
    "h.0.up.bias": torch.randn(10, generator=DRAWN),
    "h.0.down.weight": torch.randn(6, 10, generator=DRAWN),
    "h.1.none": torch.zeros(0, 3),
    "head": torch.randn(6, generator=DRAWN),
    "scale": torch.randn((), generator=DRAWN),
}


def loss(params, rows):
    return sum(x.square().sum() for x in params.values()) * rows.mean()


def compose(*transforms):
    return fds.compose(*transforms, fds.sgd(0.1))(loss)


def shard(stage, bucket_bytes=300, **more):
    return fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=bucket_bytes, **more)


def collected(weights):
    """Return all weights, and check that what is held is not written over."""
    held = dict(weights)
    assert list(held) == list(weights.likes)
    for name, like in weights.likes.items():
        assert (held[name].shape, held[name].dtype) == (like.shape, like.dtype)
    return held


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_bytes", [200, 2**20])
@pytest.mark.parametrize("size", [1, 3])
def test_every_stage_hands_out_all_weights(stage, num_bytes, size):
    def body():
        step = compose(shard(stage))
        return collected(step.weights(step.init(PARAMS), bucket_bytes=num_bytes))

    orders = set()
    for got in fds.simulate(body, size):
        assert_same_bits({name: got[name] for name in PARAMS}, PARAMS)
        orders.add(tuple(got))
    assert len(orders) == 1


def test_without_ranks_they_come_in_the_users_order_and_the_state_is_not_theirs_to_change():
    step = compose()
    state = step.init(PARAMS)
    for (name, x), want in zip(step.weights(state), PARAMS, strict=True):
        assert name == want
        x.zero_()
    assert_same_bits(state.params, PARAMS)


PLACES = {
    "pp2": Stages(2, plans.gpipe),
    "pp2 x dp2, stage 3": Stages(2, plans.gpipe, 2, 3),
    "pp2 x dp2, stage 1": Stages(2, plans.one_f_one_b, 2, 1),
}


@pytest.mark.sweep
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("num_bytes", [64, 2**20])
def test_every_rank_gets_the_weights_of_all_stages_tied_ones_once(place, num_bytes):
    want = fds.compose(fds.sgd(0.1))(layers())
    state = want.init(want.loss.init, key=1)
    params = {**tree.paths(state.params), **state.buffers}

    def body():
        step = fds.compose(*place.transforms(), fds.sgd(0.1))(layers())
        state = step.init(step.loss.init, key=1)
        return list(step.weights(state, bucket_bytes=num_bytes))

    for got in place.run(body):
        assert len(got) == len(dict(got)) and dict(got).keys() == params.keys()
        assert_same_bits({name: dict(got)[name] for name in params}, params)


@pytest.mark.parametrize("stage", [None, 3])
@pytest.mark.parametrize("num_bytes", [64, 2**20])
def test_pieces_of_a_tensor_axis_are_put_together(stage, num_bytes):
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    apply, params, _ = fds.functional(model)

    def body():
        mesh = fds.mesh(dp=-1, tp=2)
        sharded = [] if stage is None else [fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=100)]
        divided = fds.tensor_parallel(mesh["tp"], {"0": "column", "2": "row"})
        step = fds.compose(divided, *sharded, fds.sgd(0.1))(lambda p, x: apply(p, x).square().mean())
        state = step.init(params)
        return dict(step.weights(state, bucket_bytes=num_bytes)), dict(step.weights(state, dtype=torch.bfloat16))

    for got, low in fds.simulate(body, 2 if stage is None else 4):
        assert_same_bits({name: got[name] for name in params}, {n: x.detach() for n, x in params.items()})
        assert all(torch.equal(low[name], x.detach().bfloat16()) for name, x in params.items())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_masters_that_live_elsewhere_are_read(stage, to, tmp_path):
    def body():
        where = to if to == "host" else fds.disk(tmp_path)
        step = compose(shard(stage), fds.offload(masters=where, moments="device"))
        state = step.init(PARAMS)
        small = dict(step.weights(state, names=["h.*", "scale"], bucket_bytes=64))
        return {**collected(step.weights(state)), **small}

    for got in fds.simulate(body, 2):
        assert_same_bits({name: got[name] for name in PARAMS}, PARAMS)


def test_a_dtype_casts_what_is_floating_point():
    params = {**PARAMS, "count": torch.arange(3)}
    step = fds.compose(fds.sgd(0.1))(lambda p, rows: p["head"].sum())
    got = dict(step.weights(step.init(params), dtype=torch.float16))
    assert got["count"].dtype is torch.int64 and torch.equal(got["count"], params["count"])
    assert all(torch.equal(got[name], x.half()) for name, x in PARAMS.items())


def test_module_buffers_come_last():
    apply, params, buffers = fds.functional(nn.BatchNorm1d(3))

    def with_buffers(p, x, buffers):
        out, buffers = apply.with_buffers(p, buffers, x)
        return out.square().mean(), {}, buffers

    step = fds.compose(fds.sgd(0.1))(fds.with_buffers(with_buffers, buffers))
    state = step.init(params)
    assert list(dict(step.weights(state))) == [*params, *buffers]
    assert list(dict(step.weights(state, names="weight"))) == ["weight"]


NAMES = {
    "a pattern": ("h.*.weight", ["h.0.up.weight", "h.0.down.weight"]),
    "several": (["head", "scale"], ["head", "scale"]),
    "a prefix": ({"h.*": "model.layers.*"}, ["model.layers.0.up.weight", "model.layers.0.up.bias"]),
    "stars in turn": ({"h.*.up.*": "*_*"}, ["0_weight", "0_bias"]),
    "tied": ({"head": ["head", "lm_head"]}, ["head", "lm_head"]),
    "all but one": ({"head": None, "*": "*"}, [name for name in PARAMS if name != "head"]),
    "a function": ({"h.0.up.weight": lambda x: {"q": x[:4], "k": x[4:]}}, ["q", "k"]),
}


@pytest.mark.parametrize(("names", "want"), NAMES.values(), ids=NAMES)
def test_names_choose_and_rename(names, want):
    def body():
        step = compose(shard(3))
        return dict(step.weights(step.init(PARAMS), names=names))

    for got in fds.simulate(body, 2):
        assert [*got][: len(want)] == want
    if "q" in got:
        assert torch.equal(torch.cat([got["q"], got["k"]]), PARAMS["h.0.up.weight"])
    if "lm_head" in got:
        assert torch.equal(got["lm_head"], PARAMS["head"]) and torch.equal(got["head"], PARAMS["head"])


def test_what_is_not_asked_for_is_not_sent():
    def body(names):
        step = compose(shard(3))
        state = step.init(PARAMS)
        list(step.weights(state, names="scale"))  # what ranks ask each other the first time
        with counted_for("gather") as sent:
            list(step.weights(state, names=names))
        return sent.bytes_sent

    some, everything = map(sum, zip(*fds.simulate(lambda: (body("scale"), body(None)), 2), strict=True))
    assert some == 4 and everything >= sum(x.nbytes for x in PARAMS.values())  # to one other rank


# --- What the loss computes with


@transform
def doubled():
    return lambda step: fill(step, view=lambda x, leaf, call: 2 * x if x.dim() > 1 else x)


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_a_view_hands_out_what_the_loss_sees(stage):
    def body():
        sharded = [] if stage is None else [shard(stage)]
        step = compose(doubled(), fds.precision(torch.bfloat16), *sharded)
        state = step.init(PARAMS)
        return dict(step.weights(state)), dict(step.weights(state, view=True, bucket_bytes=100))

    for masters, seen in fds.simulate(body, 1 if stage is None else 2):
        assert_same_bits({name: masters[name] for name in PARAMS}, PARAMS)
        for name, x in PARAMS.items():
            assert torch.equal(seen[name], x.bfloat16() * (2 if x.dim() > 1 else 1)), name


@pytest.mark.parametrize("form", ["layer", "view"])
@pytest.mark.parametrize("stage", [None, 3])
def test_adapters_are_in_the_weights_of_a_view(form, stage):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    apply, params, _ = fds.functional(model)
    rows = torch.randn(4, 6, generator=DRAWN)

    def body():
        sharded = [] if stage is None else [shard(stage)]
        lora = fds.lora("0.weight", rank=2, alpha=6, form=form)
        step = fds.compose(lora, *sharded, fds.sgd(0.5))(lambda p, x: apply(p, x).square().mean())
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, rows)
        return dict(step.weights(state)), dict(step.weights(state, view=True, bucket_bytes=64))

    for held, merged in fds.simulate(body, 1 if stage is None else 2):
        a, b = held["0.lora_A.default.weight"], held["0.lora_B.default.weight"]
        assert b.abs().max() > 0 and torch.equal(held["0.weight"], params["0.weight"])
        assert merged.keys() == params.keys()
        torch.testing.assert_close(merged["0.weight"], (params["0.weight"] + 3 * b @ a).detach())
        assert all(torch.equal(merged[name], params[name]) for name in ("0.bias", "2.weight", "2.bias"))


@pytest.mark.parametrize("view", [False, True])
def test_weights_that_are_held_in_codes_come_in_numbers(view):
    params = {"w": torch.randn(8, 64, generator=DRAWN), "b": torch.zeros(8)}

    def body():
        transforms = fds.quantize_frozen(bits=4), fds.freeze("w"), shard(3)
        step = fds.compose(*transforms, fds.sgd(0.1))(lambda p, x: (x @ p["w"].T + p["b"]).square().mean())
        state = step.init(params)
        return dict(step.weights(state, view=view)), step.params(state)

    for got, whole in fds.simulate(body, 2):
        assert got["w"].shape == (8, 64) and torch.equal(got["w"], whole["w"])
        assert (got["w"] - params["w"]).abs().max() <= 0.16 * params["w"].abs().max()


# --- Consumers


def leave(weights, how):
    """Take two weights and go: `how` says in which way."""
    if how == "never begins":
        return weights.close()
    if how == "lets go of it":
        return None
    for i, _ in enumerate(weights):
        if i == 1 and how == "breaks":
            break
        if i == 1 and how == "raises":
            raise KeyError("a consumer")
    return None


@pytest.mark.parametrize("how", ["never begins", "lets go of it", "breaks", "raises"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_consumer_that_goes_leaves_no_rank_waiting(how, stage):
    def body():
        axis = fds.mesh(dp=-1)["dp"]
        step = compose(shard(stage))
        state = step.init(PARAMS)
        if axis.index == 1:
            try:
                leave(step.weights(state, bucket_bytes=64), how)
            except KeyError:
                pass
            got = None
        else:
            got = dict(step.weights(state, bucket_bytes=64))
        return got, step(state, torch.ones(2))[1]["loss"]

    (got, first), (_, other) = fds.simulate(body, 2)
    assert_same_bits({name: got[name] for name in PARAMS}, PARAMS)
    assert first == other


@pytest.mark.parametrize("then", ["step", "save", "params"])
def test_what_all_ranks_do_next_ends_one_that_is_open(then, tmp_path):
    def body():
        axis = fds.mesh(dp=-1)["dp"]
        step = compose(shard(3))
        state = step.init(PARAMS)
        weights = step.weights(state, bucket_bytes=64)
        name, first = next(weights)
        if axis.index == 0:
            assert len(list(weights)) == len(PARAMS) - 1
        calls = {"step": lambda: step(state, torch.ones(2)), "params": lambda: step.params(state)}
        calls.get(then, lambda: fds.save(tmp_path, state, step))()
        assert torch.equal(first, PARAMS[name])
        if axis.index == 1:
            with pytest.raises(StateError, match="nothing more to be had"):
                next(weights)
        assert not step.runtime.under_way

    fds.simulate(body, 2)


def test_a_function_of_names_that_fails_later_leaves_no_rank_waiting():
    def body():
        axis = fds.mesh(dp=-1)["dp"]
        step = compose(shard(3))
        state = step.init(PARAMS)

        def late(x):
            if axis.index == 1 and not x.is_meta:
                raise RuntimeError("of this rank")
            return {"q": x}

        try:
            return len(list(step.weights(state, names={"h.0.up.weight": late, "*": "*"}, bucket_bytes=64)))
        except RuntimeError as error:
            return str(error)

    assert fds.simulate(body, 2) == [len(PARAMS), "of this rank"]


def test_a_state_that_is_given_up_meanwhile_is_refused():
    step = compose(fds.donate())
    state = step.init(PARAMS)
    weights = step.weights(state, bucket_bytes=1)
    next(weights)
    step(state, torch.ones(2))
    with pytest.raises(DonatedStateError):
        list(weights)


# --- Memory


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_no_more_than_the_bucket_is_in_memory(stage):
    params = {f"{i}.weight": torch.randn(64, 64) for i in range(16)}  # of 16 KiB each
    bound = 2 * 2**15

    def consume(step, state):
        for _, x in step.weights(state, bucket_bytes=bound):
            x.sum()

    def body():
        axis = fds.mesh(dp=-1)["dp"]
        sharded = [] if stage is None else [fds.shard_optimizer(axis, stage=stage, bucket_bytes=2**17)]
        step = fds.compose(*sharded, fds.sgd(0.1))(lambda p, x: sum(w.square().sum() for w in p.values()))
        state = step.init(params)
        return axis, step, state

    (prepared,) = fds.simulate(body, 1)
    peak = peak_bytes(lambda: consume(*prepared[1:]))
    assert 2**14 < peak <= bound + 2**12  # sums, and what ranks ask each other


# --- Arguments

BAD = {
    "no state": (lambda step, state: step.weights(state.params), "this is not a state"),
    "no dtype": (lambda step, state: step.weights(state, dtype=torch.int8), "no such dtype"),
    "no size": (lambda step, state: step.weights(state, bucket_bytes=0), "not a size"),
    "no view": (lambda step, state: step.weights(state, view="yes"), "not a boolean"),
    "no names": (lambda step, state: step.weights(state, names=3), "these are no names"),
    "no patterns": (lambda step, state: step.weights(state, names=[3]), "these are no names"),
    "nothing matches": (lambda step, state: step.weights(state, names="hed"), "matches no parameter"),
    "no new name": (lambda step, state: step.weights(state, names={"head": 3}), "this is no name"),
    "an empty one": (lambda step, state: step.weights(state, names={"head": []}), "this is no name"),
    "other stars": (lambda step, state: step.weights(state, names={"h.*": "*.*"}), "other stars"),
    "one name for two": (lambda step, state: step.weights(state, names={"*": "x"}), "two have one name"),
    "no tensors": (lambda step, state: step.weights(state, names={"head": lambda x: 3}), "returns tensors by name"),
}


@pytest.mark.parametrize(("call", "what"), BAD.values(), ids=BAD)
def test_bad_arguments_of_one_rank_are_refused_on_all(call, what):
    def body():
        step = compose(shard(3))
        state = step.init(PARAMS)
        bad = fds.mesh(dp=-1)["dp"].index == 1
        with pytest.raises(StateError) as caught:
            call(step, state) if bad else step.weights(state)
        assert len(dict(step.weights(state))) == len(PARAMS)  # and all is well
        return str(caught.value)

    other, mine = fds.simulate(body, 2)
    assert what in mine and "rank 1" in other and what in other


@pytest.mark.parametrize("more", [{"dtype": torch.bfloat16}, {"names": "head"}, {"bucket_bytes": 5}, {"view": True}])
def test_ranks_that_ask_for_different_weights_are_refused(more):
    def body():
        step = compose(shard(3))
        state = step.init(PARAMS)
        with pytest.raises(StateError, match="ranks ask for different ones"):
            step.weights(state, **(more if fds.mesh(dp=-1)["dp"].index else {}))

    fds.simulate(body, 2)


def test_a_view_of_what_is_rounded_on_its_way_is_refused():
    def body():
        step = compose(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3, weights=fds.transports.quantized(8)))
        state = step.init(PARAMS)
        with pytest.raises(StateError, match="rounded on its way"):
            step.weights(state, view=True)
        assert_same_bits({n: x for n, x in step.weights(state) if n in PARAMS}, PARAMS)

    fds.simulate(body, 2)
