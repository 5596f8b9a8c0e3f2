"""What `load` reads and what it makes afresh: slots, strict, params_only, without_optimizer, without_schedule, verify.

Every option gives, on every topology, the leaves of the save where it reads, and elsewhere what `step.init` makes of
the parameters that were loaded.
"""

import linecache
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fds
from fds import plans, tree
from fds.errors import FdsError, StorageError, StorageWarning
from tests.bits import assert_same_bits
from tests.laws.problems import token_mean
from tests.storage import test_pipelines as pipelines
from tests.storage.topologies import Stages, Topology, plain

TOPOLOGIES = {
    "plain": None,
    "stage 3": Topology(3, 3, 300),
    "stage 1, copies": Topology(4, 1, 300, replicas=2),
    "pp2": Stages(2),
    "pp2 x dp2, stage 3": Stages(2, plans.one_f_one_b, 2, 3),
}
SOME = ("plain", "stage 1, copies", "pp2 x dp2, stage 3")
each = pytest.mark.parametrize("topology", [TOPOLOGIES[name] for name in SOME], ids=SOME)
ADAM, EMA, SCALE = fds.adam(0.01, eps=0.1), fds.ema(0.9), fds.loss_scale(2.0**5)


def make(topology, *more, loss=None):
    if isinstance(topology, Topology):
        return fds.compose(topology.shard(), *more)(loss or pipelines.layers())
    return pipelines.make(topology, *more, loss=loss)


def on_each_rank(topology, body):
    """Return what `body()` returns on every rank; one message for what it raises, the same on all."""
    return [body()] if topology is None else topology.run(body)


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Give directories of saves after two calls of a pipeline, by what was composed."""
    dir = tmp_path_factory.mktemp("saves")
    kept = {
        "all": (ADAM, EMA, SCALE),
        "sgd": (fds.sgd(0.1), SCALE),
        "momentum": (fds.sgd(0.1, momentum=0.9), EMA, SCALE),
    }
    for name, more in kept.items():
        pipelines.saved(dir / name, Stages(2, plans.one_f_one_b, 2, 1), 2, *more)
    return dir


def held(dir) -> dict:
    """Return all leaves of the last save."""
    (folder,) = Path(dir).glob("step*")
    source = fds.storage.opening.open_source(dir, folder.name)
    found = {}
    for name, leaf in source.leaves.items():
        flat = fds.storage.source.blank_like(leaf, torch.Size(leaf.shape).numel())
        source.read(name, 0, flat)
        found[name] = flat.view(leaf.shape)
    return found


def loaded(dir, topology, *more, loss=None, params=None, **options) -> dict:
    """Return the plain leaves of what is loaded; nobody is warned of anything."""

    def body():
        step = make(topology, *more, loss=loss)
        state, extra = fds.load(dir, step, step.loss.init if params is None else params, **options)
        assert extra == {"position": 2}
        assert tree.structure(state) == tree.structure(step.init(step.loss.init))
        return plain(state, step)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pipelines.in_order(pipelines.joined(on_each_rank(topology, body)))


def reported(dir, topology, *more, loss, params=None) -> tuple[dict, list[warnings.WarningMessage]]:
    """Return the plain leaves of what is loaded, not strictly, and the report of every rank."""

    def body():
        step = make(topology, *more, loss=loss())
        state, _ = fds.load(dir, step, step.loss.init if params is None else params, strict=False)
        return plain(state, step)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = pipelines.in_order(pipelines.joined(on_each_rank(topology, body)))
    reports = [one for one in seen if one.category is StorageWarning]
    assert len(reports) == (1 if topology is None else topology.ranks)
    assert all("state, _ = fds.load(" in linecache.getline(one.filename, one.lineno) for one in reports)
    return found, reports


def begun(params: dict, *more, loss=None) -> dict:
    """Return the leaves of the plain state that `step.init` makes of parameters by name."""
    step = make(None, *more, loss=loss)
    return tree.paths(step.init({name.removeprefix("params."): x for name, x in params.items()}))


def of(leaves: dict, *kinds: str) -> dict:
    return {name: x for name, x in leaves.items() if name.partition(".")[0] in kinds}


def told(dir, topology, *more, error=StorageError, loss=None, params=None, **options):
    """Return what every rank raises, the same text on all; no file is changed."""
    before = {path: path.read_bytes() for path in Path(dir).rglob("*") if path.is_file()}

    def body():
        step = make(topology, *more, loss=loss)
        with pytest.raises(error) as caught:
            fds.load(dir, step, step.loss.init if params is None else params, **options)
        return caught.value

    errors = on_each_rank(topology, body)
    assert len({str(one) for one in errors}) == 1, errors
    assert {path: path.read_bytes() for path in Path(dir).rglob("*") if path.is_file()} == before
    return errors[0]


@each
def test_slots_that_the_save_lacks_are_made_of_the_loaded_parameters(saves, topology):
    more = (ADAM, EMA, SCALE)
    error = told(saves / "sgd", topology, *more)
    assert "this save is of another composition: opt.exp_avg." in error.what and "slots='init'" in error.hint
    have = held(saves / "sgd")
    want = begun(of(have, "params"), *more) | have
    assert torch.equal(want["slots.ema.5.norm.weight"], have["params.5.norm.weight"]) and want["calls"] == 2
    assert_same_bits(loaded(saves / "sgd", topology, *more, slots="init"), pipelines.in_order(want))


@each
def test_slots_that_the_step_lacks_are_left_alone(saves, topology):
    more = (fds.sgd(0.1), SCALE)
    error = told(saves / "all", topology, *more)
    assert "this save is of another composition: " in error.what and "slots='drop'" in error.hint
    have = held(saves / "all")
    want = {name: x for name, x in have.items() if not name.startswith(("opt.", "slots.ema."))}
    assert_same_bits(loaded(saves / "all", topology, *more, slots="drop"), pipelines.in_order(want))


@each
def test_another_optimizer_needs_both(saves, topology):
    more = (ADAM, EMA, SCALE)
    for slots in ("init", "drop", ["init"], ()):
        told(saves / "momentum", topology, *more, slots=slots)
    have = held(saves / "momentum")
    want = begun(of(have, "params"), *more) | {n: x for n, x in have.items() if not n.startswith("opt.")}
    for slots in (("init", "drop"), ["drop", "init"], {"init", "drop"}):
        assert_same_bits(loaded(saves / "momentum", topology, *more, slots=slots), pipelines.in_order(want))


@each
def test_slots_of_one_transform_among_others_are_made_afresh(saves, topology):
    """What the save has of optimizer and transforms is read all the same."""
    more = (fds.sgd(0.1, momentum=0.9), EMA, SCALE, fds.freeze("6.*"))
    have = held(saves / "momentum")
    want = {n: x for n, x in have.items() if not n.startswith("opt.momentum_buffer.6.")}
    assert_same_bits(loaded(saves / "momentum", topology, *more, slots="drop"), pipelines.in_order(want))


@each
def test_parameters_only_begin_a_new_run(saves, topology):
    more = (fds.adamw(0.1), fds.ema(0.5))  # nothing that the save remembers matters
    have = held(saves / "momentum")
    want = begun(of(have, "params"), *more) | of(have, "params", "buffers")
    assert want["step"] == want["calls"] == 0 and torch.equal(want["key"], fds.random.key(0))
    assert not torch.equal(want["buffers.3.running_mean"], torch.zeros(4))
    assert_same_bits(loaded(saves / "momentum", topology, *more, params_only=True), pipelines.in_order(want))
    error = told(saves / "momentum", topology, *more, loss=pipelines.layers(8), params_only=True)
    assert error.what.endswith("this is a save of another model: params.embed.weight")


@each
def test_without_optimizer_its_memory_is_made_afresh_and_all_else_is_read(saves, topology):
    have = held(saves / "momentum")
    want = begun(of(have, "params"), ADAM, EMA, SCALE) | {n: x for n, x in have.items() if not n.startswith("opt.")}
    found = loaded(saves / "momentum", topology, ADAM, EMA, SCALE, without_optimizer=True)
    assert_same_bits(found, pipelines.in_order(want))
    assert found["step"] == found["calls"] == 2
    error = told(saves / "sgd", topology, ADAM, EMA, SCALE, without_optimizer=True)
    assert error.what.endswith("another composition: slots.ema.embed.weight")


@each
def test_without_schedule_updates_are_counted_from_zero(saves, topology):
    have = held(saves / "all")
    want = have | {"step": torch.tensor(0)}
    found = loaded(saves / "all", topology, ADAM, EMA, SCALE, without_schedule=True)
    assert_same_bits(found, pipelines.in_order(want))
    fresh = loaded(saves / "momentum", topology, ADAM, EMA, SCALE, without_schedule=True, without_optimizer=True)
    assert fresh["step"] == 0 and fresh["calls"] == 2 and not fresh["opt.exp_avg.embed.weight"].any()


def other_layers() -> fds.Layers:
    """Layers of which 2 has a wider inside, 4 is new, 5 has no parameters any more."""
    first = pipelines.layers().layers
    return fds.Layers(
        [*first[:2], nn.Linear(6, 6, bias=False), first[3], nn.LayerNorm(6), torch.tanh, *first[6:]], token_mean
    )


@each
def test_what_is_not_strict_reports_exactly_what_differs(saves, topology):
    have = held(saves / "all")
    assert tree.paths(pipelines.layers().init.trace()).keys() == {n[7:] for n in of(have, "params")}
    more = (ADAM, fds.ema(0.5))  # without loss_scale, whose slot is then unexpected

    def layers():
        torch.manual_seed(5)
        return other_layers()

    found, reports = reported(saves / "all", topology, *more, loss=layers)
    first = tree.paths((step := make(None, *more, loss=layers())).init(step.loss.init, key=0))
    alike = {name for name in first if name in have and have[name].shape == first[name].shape}
    missing = {name for name in first if name not in have}
    mismatched = {name for name in first if name in have} - alike
    unexpected = {name for name in have if name not in first}
    assert missing and unexpected and any("loss_scale" in name for name in unexpected)
    params = {name: have[name] if name in alike else x for name, x in of(first, "params").items()}
    fresh = begun(params, *more, loss=layers())
    want = fresh | {name: have[name] for name in alike}
    assert_same_bits(found, pipelines.in_order(want))
    for one in reports:
        told = one.message
        assert (set(told.missing), set(told.unexpected), set(told.mismatched)) == (missing, unexpected, mismatched)
        assert len(told.missing + told.unexpected + told.mismatched) == len(missing | unexpected | mismatched)
        assert all(name in str(told) for name in missing | unexpected | mismatched)


@each
def test_another_shape_or_dtype_is_mismatched_and_keeps_what_init_made(saves, topology):
    have = held(saves / "all")
    dtypes = {"params.6.weight": torch.float64}
    kept = tree.paths(make(None, ADAM, EMA, SCALE).init(pipelines.layers().init, key=0))
    trees = {
        name[7:]: torch.full_like(x, 0.5, dtype=dtypes.get(name)) if name != "params.6.bias" else torch.full((6,), 0.25)
        for name, x in of(kept, "params").items()
    }
    assert trees["6.weight"].dtype == torch.float64

    found, reports = reported(saves / "all", topology, ADAM, EMA, SCALE, loss=pipelines.layers, params=trees)
    assert (found["params.6.weight"] == 0.5).all() and found["params.6.weight"].dtype == torch.float64
    assert (found["slots.ema.6.weight"] == 0.5).all()
    assert_same_bits(found["params.6.bias"], have["params.6.bias"])
    names = ("params", "opt.exp_avg", "opt.exp_avg_sq", "slots.ema")
    for one in reports:
        assert not one.message.missing and not one.message.unexpected
        assert set(one.message.mismatched) == {f"{name}.6.weight" for name in names}


def test_nothing_is_said_where_all_is_there(saves):
    for topology in TOPOLOGIES.values():  # any warning would be an error in loaded()
        assert_same_bits(
            loaded(saves / "all", topology, ADAM, EMA, SCALE, strict=False), pipelines.in_order(held(saves / "all"))
        )


@each
def test_only_structure_is_read_unless_parameters_are_missing(saves, topology):
    """`meta` tensors suffice wherever every parameter is in the save."""
    meta = {name[7:]: x.to("meta") for name, x in of(held(saves / "all"), "params").items()}
    for options in ({"slots": "init"}, {"params_only": True}, {"without_optimizer": True}, {"strict": False}):
        got = loaded(saves / "all", topology, ADAM, EMA, SCALE, params=meta, **options)
        assert_same_bits(got, loaded(saves / "all", topology, ADAM, EMA, SCALE, **options))
    more = {**meta, "6.bias": torch.empty(9, device="meta")}
    told(saves / "all", topology, ADAM, EMA, SCALE, params=more, strict=False, error=(FdsError, StorageWarning))


@pytest.mark.parametrize("slots", ["both", "INIT", ("init", "x"), 3, None, [None]], ids=repr)
def test_another_way_to_treat_slots_is_refused(saves, slots):
    for name in ("plain", "stage 3"):
        assert told(saves / "all", TOPOLOGIES[name], ADAM, EMA, SCALE, slots=slots).where == "slots"


def test_ranks_that_would_read_other_leaves_are_refused(saves):
    def body():
        step = make(TOPOLOGIES["stage 3"], ADAM, EMA, SCALE)
        with pytest.raises(StorageError) as error:
            fds.load(saves / "all", step, step.loss.init, without_optimizer=fds.mesh(dp=-1).rank == 1)
        return str(error.value)

    texts = fds.simulate(body, 3)
    assert len(set(texts)) == 1 and "the ranks do not agree on the leaves that they read" in texts[0]


@each
def test_a_flipped_byte_passes_unverified_and_a_cut_file_does_not(saves, topology, tmp_path):
    step = make(None, ADAM, EMA, SCALE)
    folder = fds.save(tmp_path, step.init(step.loss.init), step, "one", {"position": 2})
    path = folder / "rank0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "was changed after it was written" in told(tmp_path, topology, ADAM, EMA, SCALE).what
    before = tree.paths(step.init(step.loss.init))
    found = loaded(tmp_path, topology, ADAM, EMA, SCALE, verify=False)
    assert [name for name in before if not torch.equal(before[name], found[name])] == [_last(folder)]
    for content in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(content)
        error = told(tmp_path, topology, ADAM, EMA, SCALE, verify=False)
        assert error.where == str(path) and "cannot be read" in error.what


def _last(folder: Path) -> str:
    leaves = fds.storage.format.manifest.read_manifest(folder).leaves
    return max((leaf.chunks[-1].offset, name) for name, leaf in leaves.items() if leaf.chunks)[1]


@each
def test_a_refused_load_leaves_the_parameters_that_it_was_given(saves, topology):
    """The tensors that say what to load are only read, in every way to load."""
    params = {name[7:]: x + 1 for name, x in of(held(saves / "all"), "params").items()}
    kept = tree.map(torch.clone, params)
    ways = ({}, {"params_only": True}, {"slots": ("init", "drop")}, {"strict": False}, {"without_optimizer": True})
    for options in ways:
        got = loaded(saves / "all", topology, ADAM, EMA, SCALE, params=params, **options)
        assert_same_bits(of(got, "params"), of(held(saves / "all"), "params"))
        assert_same_bits(params, kept)
    wider = {**params, "6.bias": torch.ones(7)}
    told(saves / "all", topology, ADAM, EMA, SCALE, params=wider, error=FdsError)
    assert_same_bits(params, kept)


def test_a_run_goes_on_with_what_was_made_afresh(saves):
    """Loaded for another optimizer, all ranks and one process go on alike."""

    def after(topology):
        step = make(topology, ADAM, EMA, SCALE)
        state, _ = fds.load(saves / "sgd", step, step.loss.init, slots="init")
        state = pipelines.train(step, state, 2)
        return {name: x for name, x in plain(state, step).items() if not name.startswith("buffers.")}

    want = pipelines.in_order(after(None))
    found = pipelines.in_order(pipelines.joined(Stages(2).run(lambda: after(Stages(2)))))
    pipelines.assert_rounding(found, want, additions=2 * 4096)


def test_what_another_optimizer_remembered_is_not_read_by_halves(tmp_path):
    loss = lambda params, batch: (params * batch).sum()
    lion, adam = fds.compose(fds.lion(0.1))(loss), fds.compose(fds.adamw(0.1))(loss)
    state, _ = lion(lion.init(torch.ones(3)), torch.ones(3))
    fds.save(tmp_path, state, lion)
    loaded, _ = fds.load(tmp_path, adam, torch.ones(3), slots=("init", "drop"))
    assert not any(x.any() for slot in loaded.opt.values() for x in slot.values()) and int(loaded.step) == 1
    with pytest.raises(StorageError, match=r"slots='init'"):
        fds.load(tmp_path, adam, torch.ones(3))


def test_missing_parameters_without_values_are_refused(tmp_path):
    step = fds.compose(fds.sgd(0.1))(lambda params, batch: sum(x.sum() for x in params.values()) * batch)
    fds.save(tmp_path, step.init({"a": torch.ones(3)}), step)
    with pytest.warns(StorageWarning), pytest.raises(StorageError, match="has no values"):
        fds.load(tmp_path, step, {"a": torch.empty(3, device="meta"), "b": torch.empty(2, device="meta")}, strict=False)


def test_a_warning_of_many_names_counts_them():
    names = [f"opt.exp_avg.{i}" for i in range(20)]
    warning = StorageWarning("run", names, ["params.a", "params.b"], [])
    assert "missing: opt.exp_avg.* (20)" in str(warning) and "params.a, params.b" in str(warning)
    assert warning.missing == names
