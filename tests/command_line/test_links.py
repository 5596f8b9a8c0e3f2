"""`fds doctor --ranks`: links of real ranks, what is said of numbers that are far off, and who does not come."""

import contextlib
import io
import json
import os
import socket
import time
from unittest import mock

import pytest

from fds.collectives import measuring
from fds.command_line import main
from fds.command_line.doctor import links as doctor
from fds.command_line.doctor.links import Links, LinkSpeed, RankSpeed, findings, table
from tests import ranks
from tests.collectives.cases import axis

FAST, SLOW, CABLE = LinkSpeed(1e-5, 1e9), LinkSpeed(1e-5, 4e8), LinkSpeed(1e-4, 1e8)


def measured(slow=(), *, nodes="aabb", flops=(1e9,) * 4, missing=()) -> Links:
    """Return links of four ranks on two machines; a slow one has two fifths of what it should have."""
    speeds = {}
    for pair in [(i, j) for i in range(4) for j in range(i + 1, 4)]:
        link = FAST if nodes[pair[0]] == nodes[pair[1]] else CABLE
        speeds[pair] = LinkSpeed(link.latency, 0.4 * link.bandwidth) if pair in slow else link
    rows = tuple(RankSpeed(node, 1, number) for node, number in zip(nodes, flops, strict=True))
    return Links(rows, {pair: link for pair, link in speeds.items() if pair not in missing}, FAST)


def problems(links: Links) -> list[str]:
    return [finding.what for finding in findings(links) if finding.level == "problem"]


def test_links_are_compared_with_their_kind():
    assert problems(measured()) == []
    assert problems(measured(slow=[(1, 2)])) == ["link 1-2"]
    late = with_latency(measured(), (0, 3), 5e-4)
    assert problems(late) == ["link 0-3"]


def with_latency(links: Links, pair, latency: float) -> Links:
    return Links(links.ranks, {**links.pairs, pair: LinkSpeed(latency, links.pairs[pair].bandwidth)}, links.all_reduce)


def test_a_rank_whose_links_are_slow_is_named_in_their_place():
    slow = [(0, 1), (0, 2), (0, 3)]
    [finding] = [x for x in findings(measured(slow, nodes="aaaa")) if x.level == "problem"]
    assert finding.what == "rank 0" and "its 3 links on one machine have" in finding.found


@pytest.mark.parametrize("rank", range(3))
def test_of_three_ranks_the_one_on_a_slow_cable_is_named(rank):
    """Two of the three links are its, so that the median of all is slow."""
    slow = [pair for pair in [(0, 1), (0, 2), (1, 2)] if rank in pair]
    links = measured(slow, nodes="abcd", missing=[(i, 3) for i in range(3)])
    of_three = Links(links.ranks[:3], links.pairs, FAST)
    assert problems(of_three) == [f"rank {rank}"]
    assert problems(Links(links.ranks[:3], {**links.pairs, slow[0]: CABLE}, FAST)) == [
        f"link {slow[1][0]}-{slow[1][1]}"
    ]


def test_two_ranks_on_slow_cables_are_named_among_five():
    pairs = {(i, j): SLOW if j > 2 else FAST for i in range(5) for j in range(i + 1, 5)}
    rows = tuple(RankSpeed(node, 1, 1e9) for node in "abcde")
    assert problems(Links(rows, pairs, FAST)) == ["rank 3", "rank 4"]


def test_a_rank_that_computes_slowly_is_named():
    [finding] = [x for x in findings(measured(flops=(1e9, 4e8, 1e9, 1e9))) if x.level == "problem"]
    assert finding.what == "rank 1" and "0.4 GFLOP/s" in finding.found and "the others have 1.0" in finding.advice


def test_what_was_not_measured_is_a_note_and_a_question_mark():
    links = measured(missing=[(1, 3)])
    assert [x.found for x in findings(links) if x.level == "note"] == ["5 of 6 measured"]
    assert table(links).count("?") == 4  # both ways in both matrices
    assert table(Links(links.ranks * 5, links.pairs, FAST)) == ""


def run_doctor(*arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = main(["doctor", "--ranks", *arguments])
    return code, out.getvalue()


def be_measured() -> list:
    """Measure the links between the ranks of the pool, and one whose messages take 20 ms each way."""
    world = {"RANK": str(axis().index), "WORLD_SIZE": str(axis().size), "LOCAL_RANK": "0"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where they have met already
    with mock.patch.dict(os.environ, world), mock.patch.object(doctor, "PAIR", 0.002):
        said = [run_doctor(), run_doctor("--json")]
    start = axis().start_send
    with mock.patch.object(type(axis()), "start_send", lambda self, *args: (time.sleep(0.02), start(*args))[1]):
        slow = measuring.time_link(axis(), (axis().index + 1) % 2, 4, 0.001).seconds if axis().index < 2 else 0.0
    return [*said, slow]


def test_ranks_measure_every_link_between_them_and_the_first_reports():
    first, *others = ranks.run(be_measured, world_size=3)
    (code, text), (json_code, report), slow = first
    assert code in (0, 1) and json_code in (0, 1)  # other work on this machine may make links slow
    assert "rank 2" in text and "3 links on one machine: median" in text and "latency (us)" in text and "?" not in text
    [kind] = [x for x in json.loads(report)["checks"]["ranks"] if x["what"] == "links"]
    assert [row[:2] for row in kind["values"]["links"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(latency > 0 and bandwidth > 0 for _, _, latency, bandwidth in kind["values"]["links"])
    assert all((code, text) == (first[0][0], "") for (code, text), _, _ in others)
    assert 0.02 <= slow < 0.04


def test_a_rank_that_does_not_come_is_named_and_one_alone_is_told_how_to_start_others(monkeypatch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    code, text = run_doctor("--limit", "1")
    assert code == 2 and "rank 1 did not arrive within 1 s" in text
    for name in world:
        monkeypatch.delenv(name)
    code, text = run_doctor()
    assert code == 2 and "torchrun --nproc-per-node 2 -m fds doctor --ranks" in text


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "soon", "1e300"])
def test_what_is_no_limit_is_refused(limit, capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--ranks", "--limit", limit])
    assert "not a number of seconds above 0" in capsys.readouterr().err


def test_bytes_follow_the_speed_of_a_link():
    assert doctor._large(doctor.SMALL, 10.0) == doctor.SMALL
    assert doctor._large(doctor.SMALL, 1e-6) == doctor.LARGE
    assert doctor._large(doctor.SMALL, 0.005) == 8 * doctor.SMALL
