"""What the documents show runs: every Python block, in order, and every `make` target."""

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from markdown_it import MarkdownIt

from tests.tuning import starting

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path.relative_to(ROOT)
    for path in [*sorted(ROOT.glob("[ACR]*.md")), ROOT / "examples" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
]
OF_PEERS = [
    Path(f"docs/{name}.md") for name in ("fine-tune", "hugging-face", "long-rows", "trainer")
]  # which train models of transformers
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str, int]]:
    """Return (language, code, number of the code's first line) of every fenced block."""
    return [(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(text)]


def run(text: str, filename: str) -> None:
    """Run the Python blocks of a document in one namespace, under the line numbers of the document.

    A block of plain text that follows one of them is what it prints.
    """
    module = sys.modules["__document__"] = ModuleType("__document__")
    printed = None
    try:
        for language, code, line in blocks(text):
            if language == "text" and printed is not None:
                assert printed == code, f"{filename}:{line}: this is not what the block above prints: {printed}"
                printed = None
            elif language in ("python", "py"):
                if code.lstrip().lower().startswith(("# not run", "# not-run")):
                    raise AssertionError(f"{filename}:{line}: a block that is not run may say anything")
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile("\n" * (line - 1) + code, filename, "exec"), vars(module))
                printed = out.getvalue()
            else:
                printed = None
    finally:
        del sys.modules["__document__"]


def make_targets(text: str) -> set[str]:
    """Return the targets that a document's console blocks and inline code call."""
    shown = [code for language, code, _ in blocks(text) if language not in ("python", "py")]
    shown += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    call = re.compile(r"(?:^|&&)[ ]*(?:\$ +)?make +([a-z][\w-]*)", re.MULTILINE)
    return {target for code in shown for target in call.findall(code)}


# Dynamo reads it of every input, and hides the warning where warnings are no errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path not in OF_PEERS], ids=str)
def test_a_document_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    starting.warm(monkeypatch)
    with torch.random.fork_rng():
        run((ROOT / path).read_text(), str(ROOT / path))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers and peft
@pytest.mark.parametrize("path", OF_PEERS, ids=str)
def test_a_document_about_transformers_runs(path, tmp_path, monkeypatch):
    test_a_document_runs(path, tmp_path, monkeypatch)


@pytest.mark.parametrize("path", OF_PEERS, ids=str)
def test_a_document_about_transformers_is_python_at_least(path):
    code = [code for language, code, _ in blocks((ROOT / path).read_text()) if language == "python"]
    assert len(code) > 5 and all(compile(block, str(path), "exec") for block in code)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=str)
def test_a_sentence_has_at_most_40_words_and_a_line_of_code_84_columns(path):
    table = False
    for token in MarkdownIt("commonmark").enable("table").parse((ROOT / path).read_text()):
        table = (table or token.type == "table_open") and token.type != "table_close"
        line = f"{path}:{token.map[0] + 1 if token.map else '?'}"
        if token.type == "fence" and token.info.startswith("python"):
            assert max(map(len, token.content.split("\n"))) <= 84, line
        elif token.type == "inline":
            words = lambda part: (
                part.content if part.type in ("text", "code_inline") else " " * part.type.endswith("break")
            )
            text = "".join(map(words, token.children or []))
            for sentence in re.split(r"(?<=[.!?;:])\s+" if table else r"(?<=[.!?])\s+", text):  # a cell is a list
                assert len(sentence.split()) <= 40, f"{line}: {sentence}"


DOCUMENT = """\
Call `make train` or

```console
$ make test ARGS="-x"
make lint   # make sure
```
```python
x = 1
```
and then
```python
assert x == {}
```
"""


def test_blocks_share_a_namespace():
    run(DOCUMENT.replace("{}", "1"), "README.md")


def test_a_failing_block_fails_under_its_own_line():
    with pytest.raises(AssertionError) as caught:
        run(DOCUMENT.replace("{}", "2"), "README.md")
    assert (caught.traceback[-1].lineno + 1, str(caught.traceback[-1].path)[-9:]) == (12, "README.md")


def test_what_a_block_prints_is_shown_as_it_is():
    shown = "```python\nprint(1 + 1)\n```\n```text\n{}\n```\n"
    run(shown.format(2), "README.md")
    with pytest.raises(AssertionError, match="not what the block above prints"):
        run(shown.format(3), "README.md")


def test_a_block_may_not_be_left_out():
    with pytest.raises(AssertionError, match="may say anything"):
        run("```python\n# not run: needs a GPU\n1 / 0\n```\n", "README.md")


def test_make_targets_are_read_from_code_only():
    assert make_targets(DOCUMENT + "We\nmake progress.") == {"train", "test", "lint"}
