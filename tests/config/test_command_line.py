"""`fds config`, `fds explain`: what a file comes to, the schema and the table."""

import base64
import json
import re
import subprocess
import sys

import jsonschema
import pytest

from fds.command_line import main
from fds.config import TrainingConfig
from fds.config.schema import schema, table

JSON = {
    "train_batch_size": 32,
    "zero_optimization": {"stage": 3, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "steps_per_print": 10,
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(JSON))
    return path


def called(capsys, *arguments):
    """Return exit code, output and errors of the command."""
    code = main(["config", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def explained(axes, **options) -> str:
    config = TrainingConfig.of(JSON, defaults=options.pop("defaults", "0.19.6"))
    return config.explain(axes, **options).rstrip("\n") + "\n"


@pytest.mark.parametrize(
    ("arguments", "axes", "options"),
    [
        ([], {"dp": 1}, {}),
        (["--world-size", 8], {"dp": 8}, {}),
        (["--world-size", 8, "--mesh", "pp=2,dp=4"], {"pp": 2, "dp": 4}, {}),
        (["--world-size", 8, "--mesh", "pp=2"], {"pp": 2, "dp": 4}, {}),
        (["--world-size", 8, "--mesh", "replicate=2, dp=-1"], {"replicate": 2, "dp": 4}, {}),
        (["--mesh", "pp=2,dp=4"], {"pp": 2, "dp": 4}, {}),
        (["--mesh", "pp=2"], {"pp": 2, "dp": 1}, {}),
        (["--world-size", 8, "--parameters", "7e9"], {"dp": 8}, {"num_parameters": 7_000_000_000}),
        (["--world-size", 8, "--defaults", "docs"], {"dp": 8}, {"defaults": "docs"}),
    ],
)
def test_explain_prints_what_explain_says(file, capsys, arguments, axes, options):
    code, out, err = called(capsys, "explain", file, *arguments)
    assert (code, err) == (0, "") and out == explained(axes, **options)


def test_explain_prints_json_with_the_same_program_and_numbers(file, capsys):
    code, out, err = called(capsys, "explain", file, "--world-size", 8, "--parameters", 1000, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and explained({"dp": 8}).startswith(found["program"])
    assert found["batch"] == {"train_batch_size": 32, "rows": 4, "microbatches": 1, "data_ranks": 8}
    assert found["memory"][0]["bytes"] == 1000 * 12 / 8 == 1000 * found["memory"][0]["bytes_per_parameter"]
    assert found["not_applicable"] == {"zero_optimization.contiguous_gradients": True}
    assert found["elsewhere"]["steps_per_print"] == 10
    assert found["reasons"].keys() == {*found["not_applicable"], *found["elsewhere"]}


def test_what_explain_prints_is_a_program(file, capsys):
    _, out, _ = called(capsys, "explain", file, "--world-size", 8)
    compile(out, "explained", "exec")
    assert "fds.adamw(0.0003" in out and "train_batch_size 32" in out and "contiguous_gradients" in out


def test_json_in_base64_is_taken(capsys):
    text = base64.urlsafe_b64encode(json.dumps(JSON).encode()).decode()
    assert called(capsys, "explain", text, "--world-size", 8) == (0, explained({"dp": 8}), "")


def test_an_old_spelling_is_told_beside_the_explanation(tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**JSON, "bfloat16": {"enabled": False}}))
    code, out, err = called(capsys, "explain", path, "--world-size", 8)
    assert code == 0 and "adamw" in out and err == "FutureWarning: 'bfloat16' is an old spelling: write 'bf16'\n"


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (None, [], "cannot be read"),
        ("{", [], "ConfigError: not valid JSON"),
        (
            '{"graidient_clipping": 1}',
            [],
            "did you mean 'gradient_clipping'? Or leave it out with a warning: --unknown warn",
        ),
        ('{"train_batch_size": "5"}', [], "where: train_batch_size"),
        ('{"train_batch_size": 5}', ["--world-size", 2], "do not multiply"),
        ('{"train_batch_size": 4}', ["--world-size", 4, "--mesh", "pp=2,dp=4"], "MeshError: the axes of the mesh"),
        ('{"train_batch_size": 4}', ["--world-size", 1, "--mesh", "pp=2"], "MeshError: the axes of the mesh"),
    ],
)
def test_what_is_refused_is_told_in_its_own_words_and_without_a_traceback(tmp_path, capsys, text, arguments, words):
    path = tmp_path / "ds_config.json"
    if text is not None:
        path.write_text(text)
    code, out, err = called(capsys, "explain", path, *arguments)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err
    assert re.match(r"(Config|Mesh)Error: ", err)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--world-size", "0"),
        ("--world-size", "2.5"),
        ("--world-size", "many"),
        ("--parameters", "nan"),
        ("--mesh", "pp"),
        ("--mesh", "pp=0"),
        ("--mesh", "pp=-1"),
        ("--mesh", "pp=2,pp=2"),
        ("--mesh", "=2"),
        ("--defaults", "0.19.8"),
    ],
)
def test_a_bad_option_is_refused_by_name(file, capsys, option, value):
    with pytest.raises(SystemExit) as ended:
        main(["config", "explain", str(file), option, value])
    assert ended.value.code == 2 and f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize(("size", "instead"), [("7B", "7e9"), ("1.5b", "1.5e9"), ("350 M", "350e6")])
def test_a_number_of_parameters_with_a_unit_is_refused_with_what_to_write(file, capsys, size, instead):
    with pytest.raises(SystemExit):
        main(["config", "explain", str(file), "--parameters", size])
    assert f"write {instead}" in capsys.readouterr().err


def test_values_of_auto_are_given_beside_the_file(tmp_path, capsys):
    (tmp_path / "auto.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
                "bf16": {"enabled": "auto"},
            }
        )
    )
    assert main(["config", "explain", str(tmp_path / "auto.json"), "--world-size", "2"]) == 2
    told = capsys.readouterr().err
    assert '"auto" without a value: train_micro_batch_size_per_gpu, ' in told and "optimizer.params.lr" in told
    assert "; pass --auto KEY=VALUE for each" in told and "auto={" not in told
    given = ["train_micro_batch_size_per_gpu=4", "optimizer.params.lr=0.5", "bf16.enabled=true"]
    assert (
        main(
            [
                "config",
                "explain",
                str(tmp_path / "auto.json"),
                "--world-size",
                "2",
                *(word for one in given for word in ("--auto", one)),
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "fds.adamw(0.5, weight_decay=0.0)" in told and "fds.precision(torch.bfloat16" in told
    assert "train_batch_size 8 = 4 rows x 1 microbatches x 2 data ranks" in told


def test_schema_prints_the_schema(capsys):
    code, out, err = called(capsys, "schema")
    assert (code, err) == (0, "") and json.loads(out) == json.loads(json.dumps(schema()))
    jsonschema.Draft202012Validator(json.loads(out)).validate(JSON)


def test_table_prints_the_page(capsys):
    assert called(capsys, "table") == (0, table(), "")


def test_it_is_a_program(file):
    """Of its own process: its exit code and its streams."""
    done = subprocess.run(
        [sys.executable, "-m", "fds", "explain", str(file.with_name("absent.json"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("ConfigError: ")
