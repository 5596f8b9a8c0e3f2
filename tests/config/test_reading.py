"""Where a configuration is read from, and what stands in it that is no key: comments, typing errors, keys of others."""

import base64
import json
import warnings

import jsonschema
import pytest

import fds
from fds.command_line import main
from fds.config import TrainingConfig
from fds.config.schema import schema
from fds.errors import ConfigError, NotSupportedError

HJSON = """\
# comments as scripts have them
{
    train_batch_size: 4  // and as C has them
    /* of several lines,
       too */
    "gradient_clipping": 0.5,
    zero_optimization: {stage: 2,},
}
"""
MEANT = {"train_batch_size": 4, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}


def written(path, text: str, encoding: str = "utf-8"):
    path.write_text(text, encoding=encoding)
    return path


def test_a_file_may_be_hjson(tmp_path):
    assert TrainingConfig.of(written(tmp_path / "a.hjson", HJSON)).to_dict() == MEANT
    encoded = base64.urlsafe_b64encode(json.dumps(MEANT).encode()).decode()
    assert TrainingConfig.of(encoded).to_dict() == MEANT


def test_a_mark_of_the_byte_order_is_no_part_of_the_json(tmp_path):
    assert TrainingConfig.of(written(tmp_path / "a.json", json.dumps(MEANT), "utf-8-sig")).to_dict() == MEANT


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("", "the configuration is empty", ""),
        ("\n \n", "the configuration is empty", ""),
        ('{"fp16": {"enabled": True}}', "not valid JSON", "JSON writes true"),
        ('{"optimizer": None}', "not valid JSON", "JSON writes null"),
        ('{"gradient_clipping": 1.0', "not valid JSON", ""),
    ],
)
def test_what_is_no_json_is_refused_with_what_to_write(tmp_path, text, what, hint):
    with pytest.raises(ConfigError) as error:
        TrainingConfig.of(written(tmp_path / "a.json", text))
    assert (error.value.what, error.value.hint) == (what, hint)


@pytest.mark.parametrize(
    "text", ['{"x": {"b": 1, "a": 1, "b": 2, "a": 2, "c": 3}}', "{x: {b: 1, a: 1, b: 2, a: 2, c: 3}}"]
)
def test_keys_that_stand_twice_in_one_object_are_named(tmp_path, text):
    with pytest.raises(ConfigError, match="a key is given twice") as error:
        TrainingConfig.of(written(tmp_path / "a.json", text))
    assert error.value.where.endswith("a.json: a, b") and (error.value.got, error.value.want) == ("5 keys", "once")


@pytest.mark.parametrize(
    ("text", "line", "want"),
    [
        ("# a comment\n{\n  fp16: {enabled: true\n}", 4, "Bad key name"),
        ('{\n  // a comment\n  "fp16": {"enabled" true}\n}', 3, "':'"),
        ("{\n  train_batch_size: 4\n  zero_optimization: [1\n}", 4, "punctuator"),
    ],
)
def test_a_mistake_in_hjson_is_not_told_as_one_of_json(tmp_path, text, line, want):
    with pytest.raises(ConfigError) as error:
        TrainingConfig.of(written(tmp_path / "a.hjson", text))
    assert error.value.what == "not valid HJSON" and error.value.where.endswith(f"line {line}")
    assert want in error.value.want and "double quotes" not in error.value.want


@pytest.mark.parametrize("unknown", ["error", "warn"])
def test_the_schema_that_an_editor_reads_is_no_key(unknown):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = TrainingConfig.of({"$schema": "schema.json", **MEANT}, unknown=unknown)
    assert found.to_dict() == MEANT
    jsonschema.Draft202012Validator(schema()).validate({"$schema": "schema.json", **MEANT})


def test_without_the_package_the_hint_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hjson", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        TrainingConfig.of(written(tmp_path / "a.json", HJSON))
    assert "pip install hjson" in error.value.hint and error.value.where.endswith("line 1")


def test_keys_that_begin_with_an_underscore_are_comments():
    data = {
        "_why": "a test",
        "zero_optimization": {"_stage": 3, "stage": 2},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "_": {}, "params": {"lr": 0.5, "_lr": "was 1"}},
    }
    config = TrainingConfig.of({**data, "train_batch_size": 4})
    assert config["zero_optimization.stage"] == 2 and config.optimizer.arguments.lr == 0.5


NOBODYS = {
    "flops": 1,
    "zero_optimization": {"stage": 2, "stge": 3},
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}, "lr": 1.0},
    "bfloat16": {"enabled": True, "x": 1},
    "compression_training": {"weight_quantization": {"different_groups": {"g": {"modul": []}}}},
}
NAMES = [
    "flops",
    "zero_optimization.stge",
    "optimizer.lr",
    "bfloat16.x",
    "compression_training.weight_quantization.different_groups.g.modul",
]


def test_unknown_keys_are_left_out_where_that_is_asked_for_each_with_a_warning():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config = TrainingConfig.of(NOBODYS, unknown="warn")
    said = [str(one.message).split()[0] for one in told if one.category is UserWarning]
    assert sorted(said) == sorted(NAMES)
    assert config.optimizer.params == {"lr": 0.5} and config.zero_optimization.to_dict() == {"stage": 2}


@pytest.mark.parametrize("unknown", ["error", "warn"])
@pytest.mark.parametrize(
    ("group", "type_", "name", "value"),
    [
        ("optimizer", "AdamW", "beta", 0.9),
        ("optimizer", "SGD", "max_grad_norm", 1.0),
        ("optimizer", "OneBitLamb", "maximize", True),
        ("scheduler", "WarmupLR", "warmup_steps", 3),
    ],
)
def test_parameters_of_optimizers_and_schedulers_are_never_left_out(group, type_, name, value, unknown):
    data = {"train_batch_size": 4, group: {"type": type_, "params": {name: value}}}
    with pytest.raises(ConfigError) as error:
        TrainingConfig.of(data, unknown=unknown)
    assert error.value.where == f"{group}.params.{name}" and "warn" not in error.value.hint


@pytest.mark.parametrize("type_", ["AdamW", "Adam", "Adagrad", "SGD"])
def test_maximizing_is_refused_by_its_name(type_):
    data = {"train_batch_size": 4, "optimizer": {"type": type_, "params": {"maximize": True}}}
    with pytest.raises(NotSupportedError, match="return the negative loss"):
        TrainingConfig.of(data, unknown="warn").transforms(fds.mesh(dp=1))


@pytest.mark.filterwarnings("ignore:.*old spelling:FutureWarning")
def test_they_are_refused_otherwise_and_the_hint_names_the_option():
    with pytest.raises(ConfigError, match="no such key") as error:
        TrainingConfig.of(NOBODYS)
    assert 'unknown="warn"' in error.value.hint
    with pytest.raises(ConfigError, match="not a way"):
        TrainingConfig.of({}, unknown="ignore")


def test_initialize_and_the_command_pass_the_option_on(tmp_path, capsys):
    data = {"train_batch_size": 4, "zero_optimisation": {}, "optimizer": {"type": "AdamW", "params": {}}}
    layers = fds.Layers([lambda x: x], lambda out, target: out)
    with pytest.raises(ConfigError, match="no such key"):
        fds.initialize(layers, config=data)
    with pytest.warns(UserWarning, match="zero_optimisation is not known and is left out"):
        config = TrainingConfig.of(data, unknown="warn")
    assert config.to_dict().keys() == {"train_batch_size", "optimizer"}
    file = str(written(tmp_path / "a.json", json.dumps(data)))
    assert main(["config", "explain", file]) == 2
    assert main(["config", "explain", file, "--unknown", "warn"]) == 0
    assert "did you mean 'zero_optimization'?" in capsys.readouterr().err


def test_keys_of_other_releases_inside_compile_pass():
    with pytest.warns(UserWarning, match=r"compile\.(backend|kwargs) is a key of another release") as told:
        config = TrainingConfig.of({"compile": {"backend": "inductor", "kwargs": {}, "deepcompile": False}})
    assert config.compile.to_dict() == {"deepcompile": False} and len(told) == 2
