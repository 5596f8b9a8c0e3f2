"""Parts of rows for a model of transformers: targets, places and documents of whole rows, cut as ranks have them."""

import pytest
import torch

import fds
from fds.errors import ComposeError, LossError


def test_a_part_has_shifted_targets_and_places_in_whole_rows():
    rows = torch.tensor([[5, 6, 7, 8, 9]])

    def body():
        axis = fds.mesh(sp=2)["sp"]
        return fds.hf.part({"input_ids": rows, "documents": torch.tensor([[0, 0, 0, 1, 1]])}, axis)

    first, second = fds.simulate(body, 2)
    assert first["input_ids"].tolist() == [[5, 6, 7]] and second["input_ids"].tolist() == [[8, 9, 0]]
    assert first["shift_labels"].tolist() == [[6, 7, -100]] and second["shift_labels"].tolist() == [[9, -100, -100]]
    assert first["position_ids"].tolist() == [[0, 1, 2]] and second["position_ids"].tolist() == [[0, 1, 1]]
    assert second["documents"].tolist() == [[1, 1, 2]]


@pytest.mark.parametrize("last", [2**63 - 1, 2**53])
def test_a_row_is_filled_up_whatever_the_numbers_of_its_documents_are(last):
    rows = {"input_ids": torch.tensor([[5, 6, 7]]), "documents": torch.tensor([[3, 3, last]])}
    numbers = fds.simulate(lambda: fds.hf.part(rows, fds.mesh(sp=2)["sp"])["documents"].tolist(), 2)
    assert numbers[0] == [[3, 3]] and numbers[1][0][0] == last != numbers[1][0][1]


def test_zigzag_parts_are_those_of_attention():
    rows = torch.arange(11)[None]

    def body():
        axis = fds.mesh(sp=2)["sp"]
        part = fds.hf.part({"input_ids": rows}, axis, layout="zigzag")
        places = fds.nn.zigzag_positions(12, axis)
        assert torch.equal(part["position_ids"][0], places.clamp(max=10))
        assert part["cut"] == f"part {axis.index} of 2, zigzag"
        return part["shift_labels"][0].tolist()

    assert fds.simulate(body, 2) == [[1, 2, 3, 10, -100, -100], [4, 5, 6, 7, 8, 9]]


def test_integers_of_any_width_are_taken():
    rows = {"input_ids": torch.tensor([[5, 6, 250]], dtype=torch.uint8), "documents": torch.zeros(1, 3).to(torch.int16)}
    part = fds.hf.part(rows, fds.mesh(sp=1)["sp"])
    assert part["shift_labels"].tolist() == [[6, 250, -100]]
    assert {x.dtype for name, x in part.items() if name != "cut"} == {torch.int64}


def test_padding_has_no_targets_and_documents_follow_from_positions():
    axis = fds.mesh(sp=1)["sp"]
    mask = torch.tensor([[1, 1, 1, 0]])
    part = fds.hf.part({"input_ids": torch.tensor([[5, 6, 7, 0]]), "attention_mask": mask}, axis)
    assert part["shift_labels"].tolist() == [[6, 7, -100, -100]] and part["attention_mask"].dtype == torch.bool
    positions = torch.tensor([[0, 1, 0, 1]])
    part = fds.hf.part({"input_ids": torch.tensor([[5, 6, 7, 8]]), "position_ids": positions}, axis)
    assert part["documents"].tolist() == [[0, 0, 1, 1]] and part["shift_labels"].tolist() == [[6, -100, 8, -100]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"tokens": torch.zeros(2, 4, dtype=torch.int64)}, "takes whole rows"),
        ([1], "takes whole rows"),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, "input_ids"),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.complex64)}, "input_ids"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "input_ids"),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64).to_sparse()}, "input_ids"),
        ({"input_ids": torch.zeros(2, 4)}, "input_ids"),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.zeros(2, 3, dtype=torch.int64)}, "labels"),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64), "token_type_ids": torch.zeros(2, 4)}, "token_type_ids"),
    ],
    ids=str,
)
def test_what_is_no_batch_of_whole_rows_is_refused(rows, words):
    with pytest.raises(LossError, match=words):
        fds.hf.part(rows, fds.mesh(sp=1)["sp"])


@pytest.mark.parametrize(
    ("axis", "layout", "words"), [(None, "contiguous", "not an axis"), (..., "zag", "no such layout")]
)
def test_a_bad_argument_is_an_error(axis, layout, words):
    axis = fds.mesh(sp=1)["sp"] if axis is ... else axis
    with pytest.raises(ComposeError, match=words):
        fds.hf.part({"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, axis, layout=layout)
