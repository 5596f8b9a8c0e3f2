"""Ranks that name different tags: fail, warn, or take the first one's."""

import itertools
import linecache
import os
import warnings

import pytest
import torch

import fds
from fds.errors import StorageError
from fds.storage.disk import folders
from tests.pairs import covering
from tests.storage.test_pipelines import make
from tests.storage.topologies import Stages, Topology

PARAMS = torch.arange(100.0)


def sharded(topology):
    return fds.compose(topology.shard(), fds.sgd(0.1))(lambda params, batch: (params * batch).sum())


def told(topology, dir, *, begin=fds.save, tags=("zero", "one", "two", "three"), **kwargs):
    """Return what each rank returns or raises, and the texts of all warnings with the line that they point to."""

    def body():
        rank = fds.mesh(all=-1).rank
        step = make(topology) if isinstance(topology, Stages) else sharded(topology)
        state = step.init(step.loss.init if isinstance(topology, Stages) else PARAMS)
        try:
            found = begin(dir, state, step, tags[rank], **kwargs)
            return found.wait() if begin is fds.save_async else found
        except StorageError as error:
            return error

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        return topology.run(body), [(str(one.message), linecache.getline(one.filename, one.lineno)) for one in seen]


TOPOLOGIES = {
    "stage 1": Topology(3, 1),
    "stage 3, copies": Topology(4, 3, replicas=2),
    "pp2": Stages(2),
    "pp2 x dp2, stage 3": Stages(2, data=2, stage=3),
}


@pytest.mark.sweep
@pytest.mark.parametrize("begin", [fds.save, fds.save_async])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_different_tags_are_refused_unless_somebody_says_otherwise(tmp_path, topology, begin):
    for options in ({}, {"tag_validation": "fail"}):
        errors, seen = told(topology, tmp_path, begin=begin, **options)
        assert not seen and len({str(error) for error in errors}) == 1
        assert errors[0].what == "the ranks do not agree on the tag"
        assert (errors[0].where, errors[0].got) == ("rank 1", "one")
    assert not os.listdir(tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "begin", "validation"),
    covering(itertools.product(TOPOLOGIES, [fds.save, fds.save_async], ["warn", "ignore"])),
)
def test_the_first_rank_names_it_and_all_are_warned_or_none(tmp_path, name, begin, validation):
    topology = TOPOLOGIES[name]
    paths, seen = told(topology, tmp_path, begin=begin, tag_validation=validation)
    assert set(paths) == {tmp_path / "zero"} and folders.tags(tmp_path) == ["zero"]
    assert len(seen) == (topology.ranks if validation == "warn" else 0)
    for text, line in seen:
        assert text.startswith("the ranks passed different tags, one") and text.endswith(": saved as zero")
        assert "found = begin(dir, state, step" in line
    _, seen = told(topology, tmp_path, tags=["same"] * 4, tag_validation=validation)
    assert not seen


def test_what_is_no_tag_is_refused_in_any_case(tmp_path):
    for validation in ("fail", "warn", "ignore"):
        errors, _ = told(TOPOLOGIES["stage 1"], tmp_path, tags=("a", "../b", "c"), tag_validation=validation)
        assert len({str(error) for error in errors}) == 1 and errors[0].what == "rank 1: not a tag"
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("validation", ["Fail", "", None, True, 3, ["warn"]])
def test_another_way_is_refused(tmp_path, validation):
    errors, _ = told(TOPOLOGIES["stage 1"], tmp_path, tag_validation=validation)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].where == "tag_validation" and errors[0].got == repr(validation)
    assert not os.listdir(tmp_path)


def test_one_rank_has_nobody_to_disagree_with(tmp_path):
    step = fds.compose(fds.sgd(0.1))(lambda params, batch: (params * batch).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for validation in ("fail", "warn", "ignore"):
            assert fds.save(tmp_path, step.init(PARAMS), step, "one", tag_validation=validation) == tmp_path / "one"
