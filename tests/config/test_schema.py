"""The JSON Schema takes what the records take, and refuses what they refuse of a single value."""

import json
import math
import warnings
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, strategies as st

from fds.config import TrainingConfig
from fds.config.field import EDITIONS, flat_keys, keys, same
from fds.config.keys import optimizer
from fds.config.record import Config, record_of
from fds.config.schema import options, schema
from fds.errors import ConfigError

WHOLE = schema()
VALIDATOR = jsonschema.Draft202012Validator(WHOLE)
SHAPES = sorted((Path(__file__).parent / "shapes").glob("*.json"))
OF_ONE_VALUE = {  # refusals that a schema can say; others are of several keys together
    "a value has the wrong type",
    "a number is out of range",
    "there is no such key",
    "a group of keys is a JSON object",
    "a key is given in two spellings",
    "the scheduler lacks required parameters",
}
PROBES = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    -1,
    -2,
    0.5,
    1.5,
    5e8,
    2.0,
    1e30,
    math.inf,
    "auto",
    "AUTO",
    "",
    "x",
    "fp32",
    "none",
    [],
    {},
    [1],
    [0.9, 0.999],
    [0.9, 0.999, 0.5],
    [1.5],
    ["a"],
    [["a"]],
    [None],
    [{}],
    ["auto"],
    {"a": 1},
    {"a": {}},
    {"a": "b"},
    {"a": None},
    {"nobody": 1},
]


def records(cls: type[Config], found: dict) -> dict[str, type[Config]]:
    """Return all records by name, those of parameters too."""
    found.setdefault(cls.__name__, cls)
    for type_, _ in flat_keys(cls).values():
        below = [record_of(type_), *(record_of(one) for one in getattr(type_, "__args__", ()))]
        for one in below:
            if one is not None and one.__name__ not in found:
                records(one, found)
    return found


RECORDS = records(TrainingConfig, {})
for parameters in [*optimizer.OPTIMIZERS.values(), *optimizer.SCHEDULERS.values()]:
    records(parameters, RECORDS)
TOP = {type_.__name__: type_ for type_, about in keys(TrainingConfig).values() if about.flat}  # beside the groups


def validator_of(name: str) -> jsonschema.Draft202012Validator:
    if name == "TrainingConfig" or name in TOP:
        return VALIDATOR
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": WHOLE["$defs"]})


def refusal(cls: type[Config], data: object) -> str | None:
    """Return what a record says against this JSON; None where it takes it, "" where keys contradict each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            cls.from_dict(data)
        except ConfigError as error:
            return error.what if error.what in OF_ONE_VALUE else ""
    return None


def assert_agree(cls: type[Config], data: object, validator: jsonschema.Draft202012Validator) -> None:
    told = refusal(cls, data)
    if told != "":
        assert validator.is_valid(data) is (told is None), f"{cls.__name__} of {data}: {told}"


def values_of(type_: object, about) -> list:
    """Return what a key may tell apart: its words, its bounds and their neighbours, its default."""
    words = [word for one in options(type_) for word in one.get("enum", ())]
    bounds = [edge + by for edge in (about.low, about.high, about.over) if edge is not None for by in (-1, 0, 1)]
    default = [] if callable(about.default) else [json.loads(json.dumps(about.default))]
    return [*words, *bounds, *default]


def test_it_is_a_schema_of_its_draft():
    jsonschema.Draft202012Validator.check_schema(WHOLE)
    assert json.loads(json.dumps(WHOLE, allow_nan=False)) == WHOLE


def test_every_record_is_in_it_and_nothing_else():
    assert set(WHOLE["$defs"]) == set(RECORDS) - {"TrainingConfig"}
    assert set(flat_keys(TrainingConfig)) <= set(WHOLE["properties"])


@pytest.mark.parametrize("name", [*RECORDS, *TOP])
def test_a_key_takes_what_its_record_takes_and_refuses_what_it_refuses(name):
    cls, validator = (RECORDS | TOP)[name], validator_of(name)
    for key, (type_, about) in keys(cls).items():
        few = name == "TrainingConfig"  # of a group: its record has the rest
        for value in [None, True, 1, "auto", [], {}] if few else [*PROBES, *values_of(type_, about)]:
            if not about.flat:
                assert_agree(cls, {key: value}, validator)


@pytest.mark.parametrize("name", RECORDS)
def test_a_key_that_is_not_known_is_refused_in_every_object(name):
    assert not validator_of(name).is_valid({"graidient_clipping": 1.0})
    assert not validator_of(name).is_valid([])


def old_spellings() -> list[tuple[str, str, str, bool]]:
    return [
        (name, old, key, turn is same)
        for name, cls in RECORDS.items()
        for key, (_, about) in flat_keys(cls).items()
        for old, turn in about.old.items()
        if old not in flat_keys(cls)
    ]


@pytest.mark.parametrize(("name", "old", "key", "is_same"), old_spellings())
def test_an_old_spelling_is_marked_and_not_taken_beside_the_new(name, old, key, is_same):
    cls, validator = RECORDS[name], validator_of(name)
    properties = (WHOLE if name == "TrainingConfig" else WHOLE["$defs"][name])["properties"]
    assert properties[old]["deprecated"] is True and key in properties[old]["description"]
    for value in PROBES if is_same else (True, False):
        assert_agree(cls, {old: value}, validator)
    both = {old: is_same, key: is_same}
    assert refusal(cls, both) == "a key is given in two spellings"
    assert not validator.is_valid(both)


@pytest.mark.parametrize("zero", [True, False, {}, {"stage": 2}, {"stage": 4}, 1, "auto", None])
def test_zero_may_be_true_or_false_as_it_once_was(zero):
    assert_agree(TrainingConfig, {"zero_optimization": zero}, VALIDATOR)


KINDS = [("optimizer", kind, record) for kind, record in optimizer.OPTIMIZERS.items()]
KINDS += [("scheduler", kind, record) for kind, record in optimizer.SCHEDULERS.items()]


@pytest.mark.parametrize(("group", "kind", "record"), KINDS, ids=[kind for _, kind, _ in KINDS])
def test_parameters_follow_the_type(group, kind, record):
    needed = {name: 1 for name in ("total_num_steps", "cycle_min_lr", "cycle_max_lr") if name in flat_keys(record)}
    for type_ in (kind, optimizer.SPELLED.get(kind, kind), kind.upper()):
        for params in (
            {},
            needed,
            {**needed, "nobody": 1},
            {**needed, "lr": 1},
            {**needed, "total_num_steps": 0.5},
            {"lr": -1.0},
            {"lr": "auto"},
            {"warmup_num_steps": 0},
            "auto",
            None,
            [],
        ):
            assert_agree(TrainingConfig, {group: {"type": type_, "params": params}}, VALIDATOR)
    assert not VALIDATOR.is_valid({group: {"type": kind, "params": {**needed, "nobody": 1}}})


def test_a_scheduler_needs_what_it_has_no_default_for():
    assert not VALIDATOR.is_valid({"scheduler": {"type": "WarmupDecayLR"}})
    assert not VALIDATOR.is_valid({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}})
    assert VALIDATOR.is_valid({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})


def test_parameters_of_a_type_that_is_not_known_are_free():
    for data in (
        {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}},
        {"optimizer": {"params": {"alpha": 1}}},
        {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}},
    ):
        assert_agree(TrainingConfig, data, VALIDATOR)
        assert VALIDATOR.is_valid(data)


@pytest.mark.parametrize("edition", EDITIONS)
def test_the_defaults_themselves_are_valid(edition):
    full = TrainingConfig.of({}, defaults=edition).to_dict(full=True)
    VALIDATOR.validate(json.loads(json.dumps(full)))


@given(st.data())
def test_whatever_a_configuration_takes_is_valid(data):
    """Keys of several groups at once, old and new, each with a value that it may or may not take."""
    names = data.draw(st.lists(st.sampled_from(sorted(WHOLE["properties"])), max_size=4, unique=True))
    whole = {}
    for name in names:
        record = record_of(flat_keys(TrainingConfig).get(name, (None,))[0])
        if record is None:
            whole[name] = data.draw(st.sampled_from(PROBES))
        else:
            below = st.dictionaries(st.sampled_from(list(flat_keys(record))), st.sampled_from(PROBES), max_size=2)
            whole[name] = data.draw(below)
    assert_agree(TrainingConfig, whole, VALIDATOR)


def test_what_people_write_is_valid_where_a_configuration_takes_it():
    assert SHAPES
    for path in SHAPES:
        assert_agree(TrainingConfig, json.loads(path.read_text()), VALIDATOR)


@pytest.mark.parametrize("name", RECORDS)
def test_every_key_is_described_and_says_its_default(name):
    properties = (WHOLE if name == "TrainingConfig" else WHOLE["$defs"][name])["properties"]
    for key, (type_, about) in flat_keys(RECORDS[name]).items():
        assert about.doc[1:] in properties[key]["description"] and str(about.unit) in properties[key]["description"]
        assert about.meaning is None or str(about.meaning).removeprefix("not yet: ") in properties[key]["description"]
        assert ("default" in properties[key]) or record_of(type_) is not None, key
