"""Errors: five fields, one picture."""

import inspect
import pickle

import pytest

import fds
from fds import errors
from fds.config import TrainingConfig
from fds.config.field import flat_keys
from fds.errors import FdsError, did_you_mean, escaped, nearest

FAMILY = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, FdsError)]


def test_the_text_shows_five_fields_in_order():
    error = FdsError("it broke", where="0.weight", got="7", want="8", hint="try 8")
    assert str(error).splitlines() == ["it broke", "  where: 0.weight", "  got:   7", "  want:  8", "  hint:  try 8"]


def test_empty_fields_are_not_shown():
    assert str(FdsError("it broke", want="8")) == "it broke\n  want:  8"


def test_a_field_of_several_lines_is_indented_under_itself():
    lines = str(FdsError("it broke", got="first\nsecond")).splitlines()
    assert lines[2].index("second") == lines[1].index("first")


def test_the_fields_are_attributes():
    error = FdsError("it broke", where="a", got="b", want="c", hint="d")
    assert (error.what, error.where, error.got, error.want, error.hint) == ("it broke", "a", "b", "c", "d")


@pytest.mark.parametrize("kind", FAMILY)
def test_every_error_survives_pickling(kind):
    error = pickle.loads(pickle.dumps(kind("it broke", where="a", got="b\nc", want="d", hint="e")))
    assert type(error) is kind
    assert str(error) == str(kind("it broke", where="a", got="b\nc", want="d", hint="e"))
    assert error.got == "b\nc"


@pytest.mark.parametrize("kind", FAMILY)
def test_every_error_is_a_value_error(kind):
    assert issubclass(kind, ValueError)
    assert issubclass(kind, fds.FdsError)


def test_a_donated_state_is_a_state_error():
    assert issubclass(errors.DonatedStateError, errors.StateError)


def test_a_near_word_is_suggested():
    assert did_you_mean("wieght", ["bias", "weight"]) == "did you mean 'weight'?"


NEAR = [  # word, known words, the nearest; empty: none is near
    ("graidient_clipping", list(flat_keys(TrainingConfig)), "gradient_clipping"),
    ("grad_clip", list(flat_keys(TrainingConfig)), "gradient_clipping"),
    ("zero_optimisation", list(flat_keys(TrainingConfig)), "zero_optimization"),
    ("zero", list(flat_keys(TrainingConfig)), "zero_optimization"),
    ("batch_size", list(flat_keys(TrainingConfig)), "train_batch_size"),
    ("accumulation_steps", list(flat_keys(TrainingConfig)), "gradient_accumulation_steps"),
    ("cuda_visible_devices", list(flat_keys(TrainingConfig)), ""),
    ("max_grad_norm", list(flat_keys(TrainingConfig)), ""),
    ("learning_rate", list(flat_keys(TrainingConfig)), ""),
    ("num_gpus", list(flat_keys(TrainingConfig)), ""),
    ("epochs", list(flat_keys(TrainingConfig)), ""),
    ("seed", list(flat_keys(TrainingConfig)), ""),
    ("lr", list(flat_keys(TrainingConfig)), ""),
    ("pin", ["device", "pin_memory"], "pin_memory"),
    ("cuda", ["cpu", "disk"], ""),
    ("sp", ["dp", "tp"], ""),
    ("zero_optimization.stge", ["zero_optimization.stage", "zero_optimization.cpu_offload"], "zero_optimization.stage"),
    ("zero_optimization.cuda", ["zero_optimization.stage", "zero_optimization.sub_group_size"], ""),
    ("blocks.0.norm.weight", ["blocks.0.attention.weight", "blocks.0.mlp.weight"], ""),
    ("blocks.0.atention.weight", ["blocks.0.mlp.weight", "blocks.0.attention.weight"], "blocks.0.attention.weight"),
    ("layer.weight", ["buffers.mean", "params.layer.weight"], "params.layer.weight"),
    ("", ["a"], ""),
    ("x", [], ""),
]


@pytest.mark.parametrize(("word", "known", "near"), NEAR)
def test_a_word_that_is_far_is_not_suggested(word, known, near):
    assert nearest(word, known) == (f"did you mean {near!r}?" if near else "")


def test_without_a_near_word_the_known_ones_are_listed():
    assert did_you_mean("xyzzy", iter(["bias", "weight"])) == "known: bias, weight"


def test_a_long_list_of_known_words_is_cut():
    assert did_you_mean("?", [f"name{i:03}" for i in range(1000)]).count(",") == 19


def test_what_a_terminal_would_obey_is_escaped():
    assert escaped("\x1b[2Ja\u202eb") == r"\x1b[2Ja\u202eb" and escaped("größer") == "größer"
