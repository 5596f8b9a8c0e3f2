"""The page of all keys is made from the records, and is as it would be made now."""

import re
from pathlib import Path

from fds.config import TrainingConfig
from fds.config.decisions import CONTRADICTIONS, INTENDED
from fds.config.field import Argument, keys
from fds.config.keys import optimizer
from fds.config.schema import _cell, every_key, parameters, table

PAGE = Path(__file__).parents[2] / "docs" / "config-keys.md"
TABLE = table()
LINES = TABLE.splitlines()


def rows_of(title: str) -> list[list[str]]:
    """Return the cells of the tables below a title of the second or third level."""
    start = next(i for i, line in enumerate(LINES) if re.fullmatch(f"#+ {re.escape(title)}", line))
    level = LINES[start].split()[0]
    ends = [i for i, line in enumerate(LINES) if i > start and re.match(f"#{{1,{len(level)}}} ", line)]
    tables = [line for line in LINES[start : ends[0] if ends else None] if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in tables]


def test_the_page_in_docs_is_this_one():
    again = "make it again: fds config table > docs/config-keys.md"
    assert PAGE.read_text(encoding="utf-8") == TABLE, again


def test_every_key_has_one_row_with_its_default_unit_and_words():
    rows = {row[0]: row for row in rows_of("All keys")}
    paths = [path for path, _, _ in every_key(TrainingConfig)]
    assert len(paths) == len(set(paths)) and {f"`{path}`" for path in paths} - set(rows) == {
        f"`{name}`" for name, (_, known) in keys(TrainingConfig).items() if not known.flat
    }
    assert rows["`zero_optimization.stage3_prefetch_bucket_size`"] == [
        "`zero_optimization.stage3_prefetch_bucket_size`",
        "integer, ≥ 0",
        "`50000000`",
        "`500000000`",
        "elements",
        "elements gathered ahead of use",
        "`fds.shard_optimizer(prefetch=)`: as whole buckets, rounded up",
    ]
    assert rows["`zero_optimization.stage`"][1:3] == ["`0` or `1` or `2` or `3`", "`0`"]
    assert rows["`zero_optimization.offload_param`"][1:3] == ["object or null", "`null`"]
    group = "`compression_training.weight_quantization.different_groups.*.modules`"
    assert rows[group][1:3] == ["list of string or string", '`"*"`']


def test_rows_have_as_many_cells_as_their_header():
    header = None
    for line in LINES:
        if line.startswith("|"):
            cells = len(re.split(r"(?<!\\)\|", line))
            header = header or cells
            assert cells == header, line
        else:
            header = None


def test_every_section_and_every_group_of_the_top_level_has_a_title():
    for name, (_, known) in keys(TrainingConfig).items():
        title = known.doc[0].upper() + known.doc[1:] if known.flat else f"`{name}`: {known.doc}"
        assert f"### {title}" in LINES


def test_every_type_has_its_parameters():
    for group, types in parameters().items():
        rows = rows_of(f"`{group}.params`, by type")
        for name, record in types:
            title = next(line for line in LINES if line.startswith("### ") and f"`{name}`" in line)
            below = rows_of(title.removeprefix("### "))
            assert [row[0] for row in below[1:]] == [f"`{group}.params.{one}`" for one in keys(record)]
            assert all(row in rows for row in below)
    assert {record for _, record in parameters()["optimizer"]} == set(optimizer.OPTIMIZERS.values())
    assert {record for _, record in parameters()["scheduler"]} == set(optimizer.SCHEDULERS.values())


def test_every_old_spelling_names_the_new_one():
    old = dict(row for row in rows_of("Old spellings"))
    assert old["`aio.thread_count`"] == "`aio.intra_op_parallelism`"
    assert old["`zero_optimization.cpu_offload`"] == "`zero_optimization.offload_optimizer`, as its object"
    assert old["`training_batch_size`"] == "`train_batch_size`" and old["`bfloat16`"] == "`bf16`"
    count = sum(len(known.old) for _, _, known in every_key(TrainingConfig))
    assert len(old) == count + 2  # the header, and zero_optimization as it once was


def test_every_contradiction_and_every_intended_difference_is_told_with_its_test():
    for one in (*CONTRADICTIONS, *INTENDED):
        assert any(f"`{one.test}`" in line for line in LINES)
    assert len(rows_of("Where fds differs from DeepSpeed, and means to")) == len(INTENDED) + 1


def test_a_bar_ends_no_cell():
    assert _cell("a|b\n`c|d*`") == "a\\|b `c\\|d*`"


def test_code_is_left_as_it_is_and_stars_outside_of_it_are_no_emphasis():
    for line in LINES:
        for i, text in enumerate(line.split("`")):
            assert ("\\*" not in text) if i % 2 else not re.search(r"(?<!\\)\*\w[^*]*\w(?<!\\)\*.*\|", text)


def test_what_becomes_an_argument_is_told_as_a_call():
    rows = {row[0]: row[-1] for row in rows_of("All keys")}
    for path, _, known in every_key(TrainingConfig):
        if isinstance(known.meaning, Argument):
            assert f"`fds.{known.meaning.of[0]}(" in rows[f"`{path}`"]
