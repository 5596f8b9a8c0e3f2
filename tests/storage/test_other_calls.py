"""Ranks that are in different calls say so at once, each naming both; nobody takes what another call sent."""

import itertools

import pytest
import torch

import fds
from fds.errors import RankError
from tests import ranks

PARAMS = {"w": torch.ones(4)}
CALLS = {
    "init": lambda dir, step, state: step.init(PARAMS),
    "load": lambda dir, step, state: fds.load(dir, step, PARAMS),
    "save": lambda dir, step, state: fds.save(dir, state, step),
    "save_async": lambda dir, step, state: fds.save_async(dir, state, step).wait(),
    "export_weights": lambda dir, step, state: fds.export_weights(state, f"{dir}/weights", step=step),
    "import_weights": lambda dir, step, state: fds.import_weights(f"{dir}/weights", step, PARAMS),
}


def made():
    sharding = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=2)
    return fds.compose(sharding, fds.sgd(0.1))(lambda p, b: (p["w"] * b).sum())


def told(call, *arguments) -> str:
    try:
        call(*arguments)
    except RankError as error:
        return str(error)
    return "nothing"


def call_differently(dir: str, check: bool) -> list:
    fds.init_distributed(check=check)
    step = made()
    state, index = step.init(PARAMS), step.everyone.index
    pairs = list(itertools.pairwise([*CALLS, "init"]))
    return [(pair, told(CALLS[pair[index]], dir, step, state)) for pair in pairs]


@pytest.mark.parametrize("check", [False, True])
def test_ranks_in_different_calls_are_named_with_what_they_do(tmp_path, check):
    step = fds.compose(fds.sgd(0.1))(lambda p, b: (p["w"] * b).sum())
    fds.save(tmp_path, step.init(PARAMS), step)
    fds.export_weights(tmp_path, tmp_path / "weights")
    results = ranks.run(call_differently, str(tmp_path), check)
    for (pair, first), (_, second) in zip(*results, strict=True):
        for text in (first, second):
            assert text.startswith("the ranks started different collectives"), (pair, text)
            assert all(f"rank {rank}: exchange ({name})" in text for rank, name in enumerate(pair)), (pair, text)


def restart_as_documented(dir: str) -> str:
    """One rank sees the directory and another does not."""
    step = made()
    return told(CALLS[("load", "init")[step.everyone.index]], dir, step, None)


def test_ranks_that_see_a_directory_differently_are_told_at_once(tmp_path):
    step = fds.compose(fds.sgd(0.1))(lambda p, b: (p["w"] * b).sum())
    fds.save(tmp_path, step.init(PARAMS), step)
    for text in ranks.run(restart_as_documented, str(tmp_path)):
        assert "the ranks started different collectives" in text and "rank 0: exchange (load)" in text


def leave_a_save(dir: str) -> None:
    step = made()
    fds.save_async(dir, step.init(PARAMS), step, "left")


def save_on_one_rank_and_load_on_the_other(dir: str) -> str:
    step = made()
    state = step.init(PARAMS)
    return told(CALLS[("load", "save")[step.everyone.index]], dir, step, state)


def test_a_save_that_an_earlier_process_group_left_is_not_waited_for_by_its_ranks(tmp_path):
    ranks.run(leave_a_save, str(tmp_path))
    for text in ranks.run(save_on_one_rank_and_load_on_the_other, str(tmp_path)):
        assert text.startswith("the ranks started different collectives"), text
