"""Rows of attention's launch tables are tried, refused by name, timed, and printed as the code has them."""

import torch

from benchmarks import attention_tables
from benchmarks.attention_tables import TABLES, candidates, taken, tuned, written
from benchmarks.children import Pool
from benchmarks.kernel_timing import Clock
from fds.kernels.flash_blocks import blocks
from fds.kernels.language import fitting

CPU = torch.device("cpu")
KEY = (64, 2, "masked")


def test_the_best_of_the_rows_that_compute_attention_is_written_as_the_table_has_it():
    good, other, bad = blocks(64, 64, 8, 2, tma=True), blocks(128, 64, 8, 2), blocks(64, 24, 8, 2, tma=True)
    pool = Pool(1)
    try:
        found = tuned("LAUNCH", KEY, pool, Clock(CPU, 1 << 10), (1, 16, 1), [good, other, bad])
    finally:
        pool.end()
    assert set(found["ms"]) == {written(good), written(other)} and list(found["refused"]) == [written(bad)]
    (line,) = eval("{" + found["line"] + "}", {"blocks": blocks}).items()
    assert line == (KEY, {227: min((good, other), key=lambda row: found["ms"][written(row)])})


def test_every_entry_has_candidates_and_all_are_taken_as_they_are():
    for name, table in TABLES.items():
        for key, rows in table.items():
            some = list(candidates(name, key))
            assert some[: len(rows)] == list(rows.values()) and len({written(row) for row in some}) == len(some) > 8
            with taken(name, key, some[-1]):
                assert fitting(table[key], CPU) == some[-1]
            assert table[key] is rows


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention_tables.main([]) == 1 and "No GPU" in capsys.readouterr().out
