"""Batches: what is sliced, what is whole, and what is refused."""

from collections import namedtuple

import numpy as np
import pytest
import torch

import fds
from fds import tree
from fds.errors import BatchError
from fds.step.batch import checksums
from tests.bits import assert_same_bits, snapshot
from tests.unit.step.problem import BATCH, make, make_params

Pair = namedtuple("Pair", "x y")


def seen_by_the_loss(batch, n):
    """The microbatches that a loss is called with."""
    seen = []

    def loss(params, batch):
        seen.append(batch)
        return params["w"].sum()

    step = make(fds.accumulate(n), loss=loss)
    step(step.init({"w": torch.ones(2)}), batch)
    return seen


@pytest.mark.parametrize(
    "batch",
    [
        lambda x, y: {"x": x, "y": y},
        lambda x, y: [x, y],
        lambda x, y: (x, {"deep": [y]}),
        lambda x, y: Pair(x, y),
        lambda x, y: {"pair": Pair(x, (y,)), 3: [x]},
    ],
)
def test_every_container_is_sliced(batch):
    x, y = torch.arange(8.0), torch.arange(16.0).view(8, 2)
    got = seen_by_the_loss(batch(x, y), 4)
    want = [batch(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4, 6)]
    assert [type(b) for b in got] == [type(b) for b in want]
    assert_same_bits(got, want)


def test_what_is_no_row_goes_whole_to_each_microbatch():
    table, scalar, marker = torch.randn(5, 2), torch.tensor(2.0), object()
    batch = {"x": torch.ones(4), "table": fds.whole(table), "scalar": scalar, "none": None, "name": "n", "o": marker}
    for part in seen_by_the_loss(batch, 2):
        assert part["table"] is table
        assert part["o"] is marker
        assert (part["scalar"].item(), part["none"], part["name"], len(part["x"])) == (2.0, None, "n", 2)


ROWS = torch.ones(4)
UNCUT = {
    "text": (ROWS, ["a", "b", "c", "d"]),
    "1.text": [ROWS, {"text": ("a", "b", "c", "d")}],
    "ids": {"x": ROWS, "ids": [1, 2, 3, 4]},
    "lengths": {"x": ROWS, "lengths": np.arange(4)},
    "1.0": (ROWS, ([object()] * 4, None)),
    "tokens": {"x": ROWS, "tokens": [[1, 2], [3], [4, 5], []]},
}


@pytest.mark.parametrize("path", UNCUT)
def test_what_has_an_entry_for_each_row_and_cannot_be_cut_is_refused(path):
    where = "batch.1" if path == "text" else f"batch.{path}"
    with pytest.raises(BatchError, match="each of the 4 rows, and is not cut") as error:
        seen_by_the_loss(UNCUT[path], 2)
    assert error.value.where == where
    assert len(seen_by_the_loss(UNCUT[path], 1)) == 1, "nothing is to be cut"
    marked = {"x": ROWS, "marked": fds.whole(UNCUT[path])}
    assert len(seen_by_the_loss(marked, 2)) == 2


def test_what_has_another_length_or_is_a_size_is_not_taken_for_rows():
    batch = {
        "x": ROWS,
        "names": ["a", "b"],
        "size": (3, 224, 224, 1.0),
        "table": np.ones((3, 4)),
        "none": [],
        "word": "four",
        "tensors": [ROWS] * 4,
    }
    for part in seen_by_the_loss(batch, 2):
        assert all(part[name] is batch[name] or part[name] == batch[name] for name in batch.keys() - {"x", "tensors"})


@pytest.mark.parametrize("n", [1, 2])
def test_a_marked_leaf_reaches_the_loss_unmarked(n):
    batch = [torch.ones(4), fds.whole({"any": 3})]
    assert [b[1] for b in seen_by_the_loss(batch, n)] == [{"any": 3}] * n


def test_a_marked_leaf_reaches_eval_unmarked():
    step = make(loss=lambda p, b: (b["x"] * b["w"]).sum() * p["w"].sum())
    metrics = step.evaluate(step.init({"w": torch.ones(2)}), {"x": torch.ones(4, 1), "w": fds.whole(torch.ones(3))})
    assert metrics["loss"] == 24.0


@pytest.mark.parametrize("batch", [None, 3, torch.tensor(1.0), {}])
def test_a_batch_without_rows_is_passed_as_it_is(batch):
    (got,) = seen_by_the_loss(batch, 1)
    assert got is batch or got == batch


@pytest.mark.parametrize("batch", [None, {"x": torch.tensor(1.0)}, fds.whole(torch.ones(4)), {}])
def test_a_batch_without_rows_does_not_split(batch):
    with pytest.raises(BatchError, match="no rows"):
        seen_by_the_loss(batch, 2)


def test_leaves_that_disagree_are_refused_by_both_paths_and_numbers():
    batch = {"x": torch.ones(8, 3), "deep": [torch.ones(8), torch.ones(7, 2)]}
    for n in (1, 2):
        with pytest.raises(BatchError, match="disagree") as caught:
            seen_by_the_loss(batch, n)
        assert caught.value.where == "batch.deep.1"
        assert "7 rows" in caught.value.got
        assert "8 at batch.x" in caught.value.got


def test_leaves_that_do_not_divide_are_refused_by_path_and_both_numbers():
    with pytest.raises(BatchError, match="into 3 microbatches") as caught:
        seen_by_the_loss({"s": torch.tensor(1.0), "x": torch.ones(8, 3)}, 3)
    assert caught.value.where == "batch.x"
    assert "8 rows" in caught.value.got
    assert "multiple of 3" in caught.value.want


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_of_no_rows_is_refused(n):
    with pytest.raises(BatchError) as caught:
        seen_by_the_loss(torch.ones(0, 3), n)
    assert "0 rows" in caught.value.got
    assert caught.value.where == "batch"


def test_fewer_rows_than_microbatches_are_refused():
    with pytest.raises(BatchError):
        seen_by_the_loss(torch.ones(2, 3), 4)


def test_evaluating_takes_the_batch_in_one_piece():
    step = make(fds.accumulate(8))
    state = step.init(make_params())
    rows = tree.map(lambda x: x[:3], BATCH)
    assert_same_bits(step.evaluate(state, rows)["loss"], make().evaluate(state, rows)["loss"])
    with pytest.raises(BatchError, match="disagree"):
        step.evaluate(state, {"x": BATCH["x"], "y": BATCH["y"][:3]})


def test_a_refused_batch_leaves_a_donated_state_usable():
    step = make(fds.accumulate(3), fds.donate())
    state = step.init(make_params())
    before = snapshot(state)
    with pytest.raises(BatchError):
        step(state, BATCH)
    assert_same_bits(state, before)
    step(state, tree.map(lambda x: x[:6], BATCH))


def test_the_containers_of_the_batch_are_not_the_losses_to_change():
    def loss(params, batch):
        batch.pop("y")
        batch["z"] = params.pop("w")
        return batch["z"].sum()

    step, batch = make(loss=loss), {"x": torch.ones(4), "y": torch.ones(4)}
    state = step.init({"w": torch.ones(2)})
    for _ in range(2):
        step(state, batch)
        step.evaluate(state, batch)
    assert set(batch) == {"x", "y"}
    assert set(state.params) == {"w"}


class Opaque:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("batch", [Opaque(torch.ones(4)), {"y": torch.ones(4), "z": [Opaque([torch.ones(4)])]}])
def test_a_leaf_that_hides_tensors_is_refused_by_whatever_reads_leaves(batch):
    with pytest.raises(BatchError, match="hides tensors") as caught:
        seen_by_the_loss(batch, 2)
    assert caught.value.got == "Opaque"
    assert caught.value.where in ("batch", "batch.z.0")
    cast = make(fds.precision(torch.bfloat16))
    for whole in (lambda x: x, fds.whole):
        with pytest.raises(BatchError, match="hides tensors"):
            cast(cast.init(make_params()), whole(batch))


def test_a_marked_object_reaches_every_microbatch():
    it = Opaque(torch.ones(4))
    assert all(b["it"] is it for b in seen_by_the_loss({"x": torch.ones(2), "it": fds.whole(it)}, 2))


def sparse_loss(params, batch):
    return torch.sparse.mm(batch["x"], params["w"]).square().mean()


def dense_loss(params, batch):
    return (batch["x"] @ params["w"]).square().mean()


def test_sparse_rows_are_cut_as_dense_ones():
    x, found = torch.eye(4, 3), []
    for loss, batch in ((sparse_loss, {"x": x.to_sparse()}), (dense_loss, {"x": x})):
        step = make(fds.accumulate(2), loss=loss)
        found.append(step(step.init({"w": torch.ones(3, 2)}), batch)[0].params)
    torch.testing.assert_close(*found)


def test_layouts_without_slices_are_refused_and_taken_whole():
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    step = make(fds.accumulate(2), loss=sparse_loss)
    state = step.init({"w": torch.ones(3, 2)})
    with pytest.raises(BatchError, match="has no slices") as caught:
        step(state, {"x": ragged})
    assert caught.value.where == "batch.x"
    step(state, {"x": fds.whole(torch.eye(4, 3).to_sparse()), "y": torch.ones(2)})


def test_a_checksum_reads_elements_on_a_gpu_only_where_it_may_wait():
    from tests import pretending

    with pretending.pretended():
        one, other = (torch.arange(10.0).add(i).to(pretending.DEVICE) for i in (0, 1))
        assert checksums(one) == checksums(other)
        assert checksums(one, waits=True) == checksums(torch.arange(10.0)) != checksums(other, waits=True)


X, LONG = torch.arange(12.0).view(3, 4), torch.zeros(64, 1024)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X.t(), X.t() + 1),  # not contiguous
        (X.to(torch.complex64), X * 1j),
        (LONG, torch.cat([LONG[:32], LONG[32:] + 1])),  # far from the first elements
        ({"x": X, "rate": 0.1}, {"x": X, "rate": 0.2}),
        ([fds.whole(X)], [fds.whole(X + 1)]),
    ],
)
def test_a_checksum_is_of_all_that_a_loss_may_read(one, other):
    assert checksums(one) != checksums(other) and checksums(one)[0] == checksums(other)[0]
    assert checksums(one) == checksums(fds.tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, one))
