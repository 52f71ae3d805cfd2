"""The size of files and functions, and what may not appear in product code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.rooms import BUDGET, DISTRIBUTIONS, ROOT, Size, budgets, python_files, room_of, sizes

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150

FORBIDDEN_IMPORTS = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "recv_pyobj", "send_pyobj", "torch.save"}


@pytest.fixture(scope="module")
def product() -> dict[Path, ast.Module]:
    """Every product file, by its path from the root."""
    paths = [path.relative_to(ROOT) for path in python_files()]
    return {path: ast.parse((ROOT / path).read_text()) for path in paths if path.parts[0] in DISTRIBUTIONS}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def forbidden(node: ast.AST) -> list[str]:
    """What in this node runs foreign code or hides state."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS]
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FORBIDDEN_IMPORTS:
        return [node.module]
    if isinstance(node, ast.Global):
        return [f"global {', '.join(node.names)}"]
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return [name] if {name, name.split(".")[-1]} & FORBIDDEN_CALLS else []
    return []


def test_there_is_something_to_check(product: dict[Path, ast.Module]) -> None:
    assert len(product) > 50


def test_files_hold_one_idea() -> None:
    counted = {
        path: path.read_text().count("\n") for path in python_files() if room_of(path).split("/")[0] in DISTRIBUTIONS
    }
    long = [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in counted.items() if lines > MAX_FILE_LINES]
    assert not long, f"over {MAX_FILE_LINES} lines"


def test_functions_are_short(product: dict[Path, ast.Module]) -> None:
    long = []
    for path, tree in product.items():
        cap = MAX_KERNEL_LINES if path.parts[0] == "kernels" else MAX_FUNCTION_LINES
        lengths = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions(tree)}
        long += [f"{path}: {name} has {lines} lines" for name, lines in lengths.items() if lines > cap]
    assert not long


def test_nothing_runs_foreign_code_or_hides_state(product: dict[Path, ast.Module]) -> None:
    found = [f"{path}: {what}" for path, tree in product.items() for node in ast.walk(tree) for what in forbidden(node)]
    assert not found


def test_no_package_stands_directly_in_a_distribution() -> None:
    hiding = [name for name in DISTRIBUTIONS if (ROOT / name / "__init__.py").exists()]
    assert not hiding, "they would hide the standard library's modules of these names"


def test_every_docstring_says_what_a_module_is_for(product: dict[Path, ast.Module]) -> None:
    assert not [str(path) for path, tree in product.items() if tree.body and not ast.get_docstring(tree)]


def test_no_bag_of_helpers(product: dict[Path, ast.Module]) -> None:
    bags = re.compile(r"(^|/)(utils?|helpers?|misc|common_utils)(\.py|/)")
    assert not [str(path) for path in product if bags.search(str(path))]


def test_rooms_keep_their_budget() -> None:
    allowed = budgets()
    grown = [
        f"{room}: {size}, its budget is {allowed.get(room)}"
        for room, size in sizes().items()
        if room not in allowed or size.exceeds(allowed[room])
    ]
    assert not grown, f"shrink them, or change {BUDGET.relative_to(ROOT)} on purpose (`make budget`)"


def test_every_budget_has_a_room() -> None:
    assert not budgets().keys() - sizes().keys(), f"these rooms are gone: take them out of {BUDGET.relative_to(ROOT)}"


def test_a_room_may_grow_by_a_fiftieth_and_shrink_at_will() -> None:
    budget = Size(files=50, lines=1000)
    assert not Size(files=51, lines=1020).exceeds(budget)
    assert not Size(files=1, lines=1).exceeds(budget)
    assert Size(files=52, lines=1000).exceeds(budget)
    assert Size(files=50, lines=1021).exceeds(budget)
