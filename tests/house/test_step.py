"""A step is read on one screen: `Step.work` has no branch, and names no feature."""

import ast
import re
from pathlib import Path

from tests.house.parsed import trees

ROOT = Path(__file__).parents[2]
MOST_LINES = 25
# what a step may hold, is not there in most, and is a null object or another class's business where it is read
FEATURES = re.compile(
    "residency|disk|offload|chunk|speculat|ahead|notes|kept|scale|transport|axis|data|stage|pipeline|tensor|sequence|"
    "expert|commit|synchronize|average|ema|exchange|phases|donate|captured|compiled|view|microbatch"
)


def function(path: str, owner: str, name: str) -> ast.FunctionDef:
    tree = ast.parse((ROOT / path).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)


def faults(work: ast.FunctionDef) -> list[str]:
    """List what makes this function more than a straight line of names."""
    body = work.body[1:] if isinstance(work.body[0], ast.Expr) else work.body
    found = []
    lines = body[-1].end_lineno - body[0].lineno + 1
    if lines > MOST_LINES:
        found.append(f"{lines} lines")
    for node in (inner for statement in body for inner in ast.walk(statement)):
        match node:
            case ast.If() | ast.IfExp() | ast.Match() | ast.BoolOp() | ast.Try():
                found.append(f"line {node.lineno}: a branch")
            case ast.Compare():
                found.append(f"line {node.lineno}: a comparison")
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found += [f"line {node.lineno}: {word}" for word in FEATURES.findall(name)]
    return found


def test_a_step_is_a_straight_line_of_names_without_a_feature():
    work = function("fds/step/program.py", "Step", "work")
    assert not faults(work), "\n".join(faults(work))


def test_the_page_on_the_program_shows_the_step_as_it_is():
    work = function("fds/step/program.py", "Step", "work")
    shown = (ROOT / "docs/design/program.md").read_text().split("```Python\n")[1].split("```")[0]
    assert ast.unparse(ast.parse(shown)) == "\n".join(map(ast.unparse, work.body[1:]))


def test_this_test_sees_a_branch_a_comparison_and_a_feature():
    text = (
        "class Step:\n def work(self):\n  '''Say.'''\n  x = self.ema if self.ahead is None else 0\n" + "  y = 1\n" * 25
    )
    work = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    kinds = [fault.split(": ")[-1] for fault in faults(work)]
    assert set(kinds) == {"26 lines", "a branch", "a comparison", "ema", "ahead"}


STEP = {path: tree for path, tree in trees().items() if path.is_relative_to(ROOT / "fds/step")}
OF_USERS = {"Adds", "After", "Synchronize"}  # protocols of what users write: one of ours each is enough
MOST_BY_POSITION = 8
PHASES = "fds.optim.exchange"


def names_of(node: ast.ClassDef) -> set[str]:
    """Return the methods and attributes that a class names in its body."""
    names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    names |= {inner.target.id for inner in node.body if isinstance(inner, ast.AnnAssign)}
    targets = [target for inner in node.body if isinstance(inner, ast.Assign) for target in inner.targets]
    return names | {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def test_no_record_of_the_step_is_made_of_more_than_eight_values_by_position():
    calls = ((path, node) for path, tree in STEP.items() for node in ast.walk(tree) if isinstance(node, ast.Call))
    long = [f"{path.name}:{node.lineno}" for path, node in calls if len(node.args) > MOST_BY_POSITION]
    assert not long


def test_a_protocol_of_the_step_has_more_than_one_class_or_is_for_users():
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = [names_of(node) for node in classes if not is_protocol(node)]
    protocols = [node for tree in STEP.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len([node for node in protocols if is_protocol(node)]) > 5
    alone = {node.name for node in protocols if is_protocol(node) and sum(names_of(node) <= kind for kind in kinds) < 2}
    assert alone <= OF_USERS


def test_a_step_has_a_type_wherever_it_is_given():
    arguments = ((path, node) for path, tree in STEP.items() for node in ast.walk(tree) if isinstance(node, ast.arg))
    given = [(path, node) for path, node in arguments if node.arg == "step" and node.annotation is not None]
    assert len(given) > 50
    assert not [f"{path.name}:{node.lineno}" for path, node in given if ast.unparse(node.annotation) == "Any"]


def test_the_stage_of_zero_is_asked_for_in_one_place():
    compared = ((path, node) for path, tree in STEP.items() for node in ast.walk(tree) if isinstance(node, ast.Compare))
    asking = {path.name for path, node in compared if re.search(r"\bstage\b.*\d", ast.unparse(node))}
    assert asking == {"shard.py"}


def test_one_file_of_the_step_knows_that_an_optimizer_has_phases():
    nodes = [(path.name, node) for path, tree in STEP.items() for node in ast.walk(tree)]
    reading = {name for name, node in nodes if isinstance(node, ast.Attribute) and node.attr == "phases"}
    importing = {name for name, node in nodes if isinstance(node, ast.ImportFrom) and node.module == PHASES}
    assert reading == importing == {"reduce.py"}
