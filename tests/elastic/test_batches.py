"""Elastic batches are DeepSpeed's, question by question; where it is wrong they are what was meant, or refused."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import fds
from fds.command_line import main
from fds.config import TrainingConfig
from fds.elastic import Batches
from fds.errors import ConfigError, ElasticityError

ROOT = Path(__file__).parents[2]
CONFIGS = json.loads((ROOT / "tests" / "golden" / "elastic_batches.json").read_text())["configs"]
KEYS = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}


def elastic(**keys: object) -> dict:
    return {"elasticity": {**KEYS, **keys}}


def chosen(keys: dict) -> Batches | None:
    try:
        return fds.elastic.batches({"elasticity": {"enabled": True, **keys}})
    except ElasticityError:
        return None


def answer(batches: Batches | None, ranks: int) -> list | None:
    """Return [rows, numbers of data ranks, microbatch] as DeepSpeed's answers have them, None for a refusal."""
    if batches is None:
        return None
    try:
        batch = batches.at(ranks)
    except ElasticityError:
        return None
    assert batch.rows == batch.microbatch * batch.num_microbatches * batch.data_ranks
    shared = batch.data_ranks in batches.data_ranks
    return [batch.rows, list(batches.data_ranks) if shared else [batch.data_ranks], batch.microbatch]


def test_2000_questions_are_answered_as_by_deepspeed_or_as_was_meant():
    defects = Counter()
    for config in CONFIGS:
        batches = chosen(config["keys"])
        whole = lambda row, lists=config["lists"]: row and [row[0], lists[row[1]], row[2]]
        for ranks, asked, *rest in config["questions"]:
            defect, meant = rest or ("", asked)
            defects[defect] += 1
            assert answer(batches, ranks) == whole(meant), (config["keys"], ranks)
            assert not rest or meant != asked
    assert sum(defects.values()) == 2000 and defects.pop("") == 1697
    page = (ROOT / "docs" / "elastic.md").read_text().partition("## Where DeepSpeed is wrong")[2]
    rows = re.findall(r"^\| (.*?) \|.*\| (\d+) \|$", page, re.MULTILINE)
    assert {name.strip("`"): int(number) for name, number in rows} == defects and "1,697" in page


def test_the_examples_of_its_documentation():
    old = elastic(
        version=0.1, max_train_batch_size=10000, micro_batch_sizes=[8, 12, 16, 17], min_gpus=32, max_gpus=1500
    )
    batches = fds.elastic.batches(old)
    assert (batches.rows, len(batches.ranks), batches.at(64).microbatch) == (9792, 23, 17)
    batch = fds.elastic.batches(elastic(num_gpus_per_node=8, model_parallel_size=2)).at(16)
    assert (batch.rows, batch.microbatch, batch.data_ranks) == (1920, 6, 8)


def test_a_batch_of_millions_is_chosen_at_once():
    batches = fds.elastic.batches(elastic(max_train_batch_size=10**9, max_gpus=10**9))  # DeepSpeed tries all numbers
    assert batches.rows == 12 * 720720 and 720720 in batches.ranks


def test_bounds_are_of_whole_nodes_and_never_lifted():
    with pytest.raises(ElasticityError) as refused:
        fds.elastic.batches(elastic(num_gpus_per_node=8, max_gpus=7))
    assert refused.value.where == "elasticity.min_gpus, elasticity.max_gpus, elasticity.num_gpus_per_node"
    with pytest.raises(ElasticityError, match="whole nodes"):
        fds.elastic.batches(elastic(num_gpus_per_node=8, min_gpus=9, max_gpus=15))
    ranks = fds.elastic.batches(elastic(num_gpus_per_node=8, min_gpus=12, max_gpus=100)).ranks
    assert ranks[0] == 16 and ranks[-1] <= 100 and all(n % 8 == 0 for n in ranks)


def test_ranks_that_share_a_model_are_counted_once():
    both = fds.elastic.batches(elastic(num_gpus_per_node=8, model_parallel_size=2))
    single = fds.elastic.batches(elastic(num_gpus_per_node=4))
    assert both.data_ranks == single.ranks and both.ranks == tuple(2 * n for n in single.ranks)
    assert all(both.at(2 * n) == single.at(n) for n in range(1, 100))
    with pytest.raises(ElasticityError, match="copies of the model") as refused:
        both.at(15)
    assert refused.value.want == "a multiple of 2"


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"min_gpus": 1500, "max_gpus": 1600}, "elasticity.min_gpus, elasticity.max_gpus, elasticity.max_train"),
        ({"min_gpus": 1500, "prefer_larger_batch": False, "version": 0.1}, "elasticity.min_gpus, "),
        ({"num_gpus_per_node": 512}, "elasticity.max_train_batch_size, elasticity.micro_batch_sizes, "),
        ({"enabled": False}, "elasticity.enabled"),
    ],
)  # fmt: skip
def test_what_has_no_batch_is_refused_by_its_keys(keys, where):
    with pytest.raises(ElasticityError) as refused:
        fds.elastic.batches(elastic(**keys))
    assert refused.value.where.startswith(where) and refused.value.want


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({}, "elasticity"),
        ({"elasticity": [1]}, "elasticity"),
        ({"elasticity": {**KEYS, "micro_batch_size": [2]}}, "elasticity.micro_batch_size"),
        ({"elasticity": {**KEYS, "micro_batch_sizes": "auto"}}, "elasticity.enabled, elasticity.micro_batch_sizes"),
        (7, ""),
        ("nowhere.json", "nowhere.json"),
    ],
)  # fmt: skip
def test_what_is_no_elastic_configuration_is_refused_with_its_path(config, where):
    for function in (fds.elastic.batches, fds.elastic.check_unchanged):
        with pytest.raises(ConfigError) as refused:
            function(config)
        assert refused.value.where == where


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "4", None])
def test_what_is_no_number_of_ranks_is_refused(ranks):
    with pytest.raises(ElasticityError, match="not a number of ranks"):
        fds.elastic.batches(elastic()).at(ranks)


def test_a_number_of_ranks_without_a_batch_names_those_that_are_near():
    with pytest.raises(ElasticityError) as refused:
        fds.elastic.batches(elastic(version=0.1)).at(9)
    assert refused.value.got == "9" and refused.value.want.endswith("near: 6, 7, 8, 10")
    with pytest.raises(ElasticityError, match="no batch for this number"):
        fds.elastic.batches(elastic()).at(1001)  # of at least 2 rows each


def test_a_record_a_dict_and_a_file_are_the_same_configuration(tmp_path):
    (path := tmp_path / "ds.json").write_text(json.dumps(elastic()))
    sources = (
        elastic(),
        path,
        str(path),
        TrainingConfig.of(elastic()),
        TrainingConfig.of(elastic()).resolve(world_size=3),
    )
    assert len({(b.rows, b.ranks) for b in map(fds.elastic.batches, sources)}) == 1


@pytest.mark.parametrize("variable", ["FDS_ELASTICITY_CONFIG", "DEEPSPEED_ELASTICITY_CONFIG"])
@pytest.mark.parametrize(
    "changes",
    [
        {"max_train_batch_size": 1000},
        {"micro_batch_sizes": [2, 4]},
        {"version": 0.1},
        {"min_gpus": 2},
        {"max_gpus": 64},
        {"prefer_larger_batch": False},
        {"num_gpus_per_node": 8},
        {"num_gpus_per_node": 2, "model_parallel_size": 2},
    ],
)
def test_a_scheduler_that_was_told_otherwise_is_named_by_its_variable(variable, changes, monkeypatch):
    monkeypatch.setenv(variable, json.dumps({**KEYS, **changes}))
    with pytest.raises(ElasticityError) as refused:
        fds.elastic.check_unchanged(elastic())
    assert refused.value.where == ", ".join(f"elasticity.{name}" for name in changes)
    assert refused.value.want.endswith(f"as {variable} says")
    fds.elastic.check_unchanged(elastic(**changes))


def test_a_scheduler_that_was_told_the_same_or_nothing_is_no_matter():
    said = {"FDS_ELASTICITY_CONFIG": json.dumps({**KEYS, "min_time": 20, "min_gpus": 1})}
    fds.elastic.check_unchanged(elastic(), said)
    fds.elastic.check_unchanged(elastic(), {})


@pytest.mark.parametrize("text", ["", "{nope", "[1]", '{"enabled": 3}', '{"max_batch": 3}'])
def test_what_a_scheduler_left_that_is_no_section_is_refused_with_the_variable(text):
    with pytest.raises(ConfigError) as refused:
        fds.elastic.check_unchanged(elastic(), {"FDS_ELASTICITY_CONFIG": text})
    assert refused.value.where.startswith("FDS_ELASTICITY_CONFIG")


def test_the_command_prints_what_the_function_returns(tmp_path, capsys):
    (path := tmp_path / "ds.json").write_text(json.dumps(elastic(num_gpus_per_node=8, model_parallel_size=2)))
    batches = fds.elastic.batches(path)
    assert main(["elastic", str(path), "--ranks", "32", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == batches.rows and tuple(printed["ranks"]) == batches.ranks
    assert printed["at"] == {"ranks": 32, "rows": 1920, "microbatch": 6, "num_microbatches": 20, "data_ranks": 16}
    assert main(["elastic", str(path)]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == "1920 rows in a batch, of at most 2000"
    assert tuple(map(int, " ".join(lines).split())) == batches.ranks
    assert main(["elastic", str(path), "--ranks", "20"]) == 0
    assert "2000 = 4 rows x 50 microbatches x 10 data ranks, not the 1920" in capsys.readouterr().out
    assert main(["elastic", str(path), "--ranks", "7"]) == 2
    assert "ElasticityError: the ranks cannot be divided" in capsys.readouterr().err
