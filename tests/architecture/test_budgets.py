"""The size of files and functions, and what may not appear in product code."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPONENTS = ("protocol", "kernels", "text", "engine", "router", "operator")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150

FORBIDDEN_IMPORTS = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "recv_pyobj", "send_pyobj", "torch.save"}


def product_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *(f"{name}/*.py" for name in COMPONENTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).exists()]


FILES = product_files()


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_and_function_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, "split the file: one idea per file"
    cap = MAX_KERNEL_LINES if path.is_relative_to(ROOT / "kernels") else MAX_FUNCTION_LINES
    long = [
        f"{f.name} ({f.end_lineno - f.lineno + 1} lines)"
        for f in functions(ast.parse(text))
        if f.end_lineno is not None and f.end_lineno - f.lineno + 1 > cap
    ]
    assert not long


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_that_runs_foreign_code_or_hides_state(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_IMPORTS]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FORBIDDEN_IMPORTS:
            found.append(node.module)
        elif isinstance(node, ast.Global):
            found.append(f"global {', '.join(node.names)}")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name.split(".")[-1] in {"recv_pyobj", "send_pyobj"}:
                found.append(name)
    assert not found


@pytest.mark.parametrize("component", COMPONENTS)
def test_no_package_stands_directly_in_a_distribution(component: str) -> None:
    assert not (ROOT / component / "__init__.py").exists(), "it would hide the standard library's module of that name"


def test_every_docstring_says_what_a_module_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in FILES
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_no_bag_of_helpers() -> None:
    bags = re.compile(r"(^|/)(utils?|helpers?|misc|common_utils)(\.py|/)")
    assert not [str(p) for p in FILES if bags.search(str(p.relative_to(ROOT)))]
