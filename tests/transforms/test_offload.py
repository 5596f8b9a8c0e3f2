"""`offload`: what it refuses, what it stands beside, what `describe` says of it."""

import math
import warnings
from pathlib import Path

import pytest
import torch

import fds
from fds import tree
from fds.errors import ComposeError, FdsError, StateError
from fds.media import medium_of
from tests.bits import assert_same_bits
from tests.laws import problems

WRONG = {
    "nothing": ({}, "no argument", 'moments="host"'),
    "a word with a mistake": ({"moments": "hots"}, "'hots'", "did you mean 'host'?"),
    "another's word for the host": ({"moments": "cpu"}, "'cpu'", "did you mean 'host'?"),
    "a device of torch": ({"masters": torch.device("cuda:0")}, "device(type='cuda', index=0)", "'device'"),
    "a word for a disk": ({"moments": "nvme"}, "'nvme'", "fds.disk(directory)"),
    "a directory": ({"moments": "/local_nvme"}, "'/local_nvme'", "fds.disk('/local_nvme')"),
    "a path": ({"gradients": Path("/local_nvme")}, "PosixPath", "fds.disk('/local_nvme')"),
    "a function": ({"averages": fds.disk}, "function disk", "it is to be called"),
    "a number": ({"moments": 1}, "1", "fds.disk(directory)"),
    "no patterns": ({"moments": {}}, "{}", '"*": "host"'),
    "patterns that are no words": ({"moments": {0: "host"}}, "{0: 'host'}", '"*": "host"'),
    "a pattern of no medium": ({"moments": {"*": "hist"}}, "'hist'", "did you mean 'host'?"),
    "a ratio above 1": ({"moments": "host", "ratio": 1.5}, "1.5", "from 0 to 1"),
    "a ratio below 0": ({"moments": "host", "ratio": -0.1}, "-0.1", "from 0 to 1"),
    "a ratio that is none": ({"moments": "host", "ratio": math.nan}, "nan", "from 0 to 1"),
    "a ratio that is a word": ({"moments": "host", "ratio": "0.3"}, "'0.3'", "from 0 to 1"),
    "a ratio that is a boolean": ({"moments": "host", "ratio": True}, "True", "from 0 to 1"),
    "speculation of a word": ({"moments": "host", "speculate": "yes"}, "'yes'", "True or False"),
    "speculation with nothing elsewhere": ({"moments": "device", "speculate": True}, "on the device", 'moments="host"'),
}


@pytest.mark.parametrize(("arguments", "got", "word"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_with_what_would_do(arguments, got, word):
    with pytest.raises(ComposeError) as caught:
        fds.offload(**arguments)
    assert got in caught.value.got and word in f"{caught.value.want} {caught.value.hint}" and caught.value.want


def network(*parts, optimizer=None, width=6):
    """Return a composition over a small network, with its problem."""
    problem = problems.layers(5, torch.float32, 0.3, False)
    return problem, fds.compose(*parts, optimizer or fds.adamw(0.01))(problem.loss)


def test_a_pattern_that_matches_nothing_is_refused_before_there_is_a_state():
    problem, step = network(fds.offload({"embed.*": "device", "*": "host"}))
    with pytest.raises(StateError, match="offload: a pattern matches no parameter") as caught:
        step.init(problem.params)
    assert caught.value.got == "'embed.*'"


def test_a_pattern_may_match_parameters_of_another_stage():
    problem = problems.layers(5, torch.float32, 0.0, False)

    def body():
        mesh = fds.mesh(pp=2)
        pipeline = fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2)
        step = fds.compose(pipeline, fds.offload({"0.*": "host"}), fds.adamw(0.01))(problem.loss)
        step.init(problem.params)

    fds.simulate(body, 2)


def test_two_of_them_are_refused_with_one_that_says_what_both_do():
    with pytest.raises(ComposeError, match="the station 'place' is already filled by offload") as caught:
        network(fds.offload("host"), fds.offload(masters="host", ratio=0.5))
    assert caught.value.want.startswith("compose(offload(moments='host', masters='host', ratio=0.5), adamw(")
    with pytest.raises(ComposeError) as caught:  # of which each says something about moments
        network(fds.offload("host"), fds.offload("device", masters="host"))
    assert caught.value.want.startswith("compose(offload('device', masters='host'), adamw(")


def test_a_directory_that_is_not_there_or_is_a_file_is_refused_when_there_is_a_state(tmp_path):
    file = tmp_path / "file"
    file.write_text("")

    def begin(path):
        problem, step = network(fds.offload(fds.disk(path)))
        step.init(problem.params)

    for path in (file, tmp_path / "nowhere"):
        with pytest.raises(FdsError) as caught:
            begin(path)
        assert str(path) in f"{caught.value.where} {caught.value.got}"


def test_a_cuda_graph_refuses_what_lives_elsewhere():
    with pytest.raises(ComposeError, match="a CUDA graph cannot capture this step") as caught:
        network(fds.offload("host"), fds.donate(), fds.cuda_graph())
    assert "host" in caught.value.got and caught.value.want == "all leaves on the device"


def everywhere(tmp_path):
    """Return the transform that sends every kind of leaf to another medium."""
    disk = fds.disk(tmp_path, buffer_bytes=4096)
    return fds.offload({"*.weight": disk, "*": "host"}, masters=disk, averages="host")


def test_gradients_are_clipped_by_the_norm_of_all_of_them(tmp_path):
    """What users of FSDP2's CPUOffloadPolicy say fails (pytorch #148532)."""
    clip = lambda: (fds.clip_by_value(0.2), fds.clip_by_global_norm(1e-3), fds.ema(0.9))
    problem, plain = network(*clip())
    _, placed = network(everywhere(tmp_path), *clip())
    (a, said), (b, told) = (step(step.init(problem.params), problem.batch) for step in (plain, placed))
    assert_same_bits((b, told), (a, said))
    assert float(told["grad_norm"]) > 1e-3


@pytest.mark.sweep
@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("way", ["save", "save_async"])
def test_a_run_goes_on_from_its_save_and_so_does_one_with_leaves_elsewhere(tmp_path, way, donated):
    more = [fds.ema(0.9), *[fds.donate()] * donated]
    problem, plain = network(*more)
    _, placed = network(everywhere(tmp_path), *more)
    want = plain.init(problem.params)
    for _ in range(4):
        want, _ = plain(want, problem.batch)
    for i, (first, second) in enumerate(((placed, placed), (placed, plain), (plain, placed))):
        state = first.init(problem.params)
        for _ in range(2):
            state, _ = first(state, problem.batch)
        saving = getattr(fds, way)(tmp_path / f"run{i}", state, first)
        if way == "save_async":
            saving.wait()
        state, _ = fds.load(tmp_path / f"run{i}", second, problem.params)
        for _ in range(2):
            state, _ = second(state, problem.batch)
        assert_same_bits(state, want)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which Dynamo reads
def test_a_compiled_loss_and_computing_again_change_nothing(tmp_path):
    parts = lambda: [fds.compile(backend="aot_eager"), fds.checkpoint_activations(), fds.accumulate(3)]
    problem, plain = network(*parts())
    _, placed = network(everywhere(tmp_path), *parts())
    a, b = plain.init(problem.params), placed.init(problem.params)
    for _ in range(2):
        a, b = plain(a, problem.batch)[0], placed(b, problem.batch)[0]
    assert_same_bits(b, a)


def test_a_state_elsewhere_is_a_value(tmp_path):
    problem, step = network(everywhere(tmp_path), fds.ema(0.9))
    first = step.init(problem.params)
    second, _ = step(first, problem.batch)
    kept = tree.map(torch.clone, first)
    third, _ = step(second, problem.batch)
    again, _ = step(tree.map(lambda x: x.clone(), second), problem.batch)  # ordinary tensors, on the device
    assert_same_bits(first, kept)
    assert_same_bits(again, third)


@pytest.mark.parametrize(
    ("slices", "where", "want"),  # how many slices, of 12 bytes an element, a buffer has room for
    [
        (5, {}, [[0, 1, 2, 3, 4]]),
        (2, {}, [[0, 1], [2, 3], [4]]),
        (0.7, {}, [[0], [1], [2], [3], [4]]),  # a block is never cut
        (1.4, {"masters": "host"}, [[0, 1], [2, 3], [4]]),  # of which 8 bytes an element are on the disk
        (0.7, {"moments": "host", "masters": {"3": "disk"}}, [[0, 1, 2, 3, 4]]),  # what is not there takes no room
    ],
)
def test_a_chunk_is_as_many_slices_as_a_buffer_has_room_for(tmp_path, slices, where, want):
    disk, params = fds.disk(tmp_path, buffer_bytes=int(slices * 12_000)), {str(i): torch.zeros(1000) for i in range(5)}
    told = {"moments": "disk", "masters": "disk", **where}
    told = tree.map(lambda one: disk if one == "disk" else one, told)
    step = fds.compose(fds.offload(**told), fds.adamw())(lambda params, batch: params["0"].sum())
    chunks = step.chunks(step.structure_of(params)[0])
    assert [[x.index for x in chunk] for chunk in chunks] == want and all(x.whole for chunk in chunks for x in chunk)


@pytest.mark.parametrize(("optimizer", "cuts"), [(fds.adamw(), True), (fds.lamb(), False)])
def test_a_slice_larger_than_a_buffer_is_visited_in_pieces_of_whole_blocks(tmp_path, optimizer, cuts):
    disk, params = fds.disk(tmp_path, buffer_bytes=100_000), {"a": torch.zeros(10), "b": torch.zeros(30_000)}
    step = fds.compose(fds.offload(disk), optimizer)(lambda params, batch: params["a"].sum())
    chunks = step.chunks(step.structure_of(params)[0])
    pieces = [[(x.index, x.start, x.end) for x in chunk] for chunk in chunks]
    cut = [[(0, 0, 10), (1, 0, 12288)], [(1, 12288, 24576)], [(1, 24576, 30000)]]
    assert pieces == (cut if cuts else [[(0, 0, 10), (1, 0, 30_000)]])


@pytest.mark.parametrize("stage", [0, 3])
def test_describe_says_the_bytes_of_each_medium_before_a_step_runs(tmp_path, stage):
    """Against what the media hold of the state."""
    params = {str(i): torch.randn(64, 64) for i in range(8)}

    def body():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=16384)
        place = fds.offload(
            {"3": fds.disk(tmp_path), "*": "host"}, masters={"[4-7]": "host"}, averages=fds.disk(tmp_path)
        )
        step = fds.compose(shard, place, fds.ema(0.9), fds.adamw())(
            lambda params, batch: params["0"].sum() * batch.sum()
        )
        state = step.init(params)
        found = dict[str, int]()
        for x in tree.leaves(state):
            where = medium_of(x)
            name = "device" if where is None else "host" if where.name == "host" else f"disk {tmp_path}"
            found[name] = found.get(name, 0) + x.nbytes
        return step.describe(state), found

    whole = 8 * 64 * 64 * 4 // (2 if stage else 1)
    for told, found in fds.simulate(body, 2):
        found["device"] -= 8 + 8 + 16  # step, calls and key
        assert {place: n for place, n in told.places.items() if n} == found
        assert found == {f"disk {tmp_path}": whole * 5 // 4, "host": whole * 9 // 4, "device": whole // 2}
        assert told.lives == {"opt": f"host, disk {tmp_path}", "params": "device, host", "slots": f"disk {tmp_path}"}
        assert f"\ndisk {tmp_path}" in str(told) and " bytes of the state" in str(told)


@pytest.mark.parametrize("donated", [False, True], ids=["pure", "donated"])
def test_a_loss_on_the_cpu_reads_masters_on_the_host_where_they_are(donated):
    params, seen = {"w": torch.randn(64, 64), "b": torch.randn(64)}, list[int]()

    def loss(params, batch):
        seen.extend(x.data_ptr() for x in params.values())
        return sum(x.square().sum() for x in params.values()) * batch.sum()

    step = fds.compose(fds.offload(masters="host"), *[fds.donate()] * donated, fds.adamw())(loss)
    state = step.init(params)
    told = step.describe(state)
    assert "low" not in told.num_bytes and "read" not in told.num_bytes and told.lives == {"params": "host"}
    for _ in range(2):
        places = [x.data_ptr() for x in state.params.values()]
        seen.clear()
        state, _ = step(state, torch.ones(2))
        assert seen == places and all(medium_of(x) is not None for x in state.params.values())


def test_parameters_that_live_elsewhere_than_patterns_say_are_named():
    params = {str(i): torch.ones(64) for i in range(3)}
    loss = lambda params, batch: sum((params[name] * batch).sum() for name in params)

    def body(patterns):
        place = fds.offload(dict.fromkeys(patterns, "host"))
        step = fds.compose(place, fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=1), fds.adamw())(loss)
        step(step.init(params), torch.ones(()))

    with pytest.warns(UserWarning, match="1 of the parameters live elsewhere than patterns say, .* a bucket: 2$"):
        fds.simulate(lambda: body(["[01]"]), 2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fds.simulate(lambda: body(["[01]", "2"]), 2)  # of which all are on the host
    assert not warned
