"""Functions fit on a screen, and the step is shorter still."""

import ast

from tests.test_architecture import ROOT

MAX_FUNCTION = 60
MAX_STEP = 25
LONG_BY_NATURE = ("kernels/triton/", "kernels/llvm/")  # a kernel is one function


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_functions_fit_on_a_screen():
    long = [
        f"{path.relative_to(ROOT)} {name}: {count}"
        for path in ROOT.rglob("*.py")
        if not str(path.relative_to(ROOT)).startswith(LONG_BY_NATURE)
        for name, count in functions(path)
        if count > MAX_FUNCTION
    ]
    assert not long


def test_the_step_stays_the_measure():
    assert dict(functions(ROOT / "step/decode.py"))["decode_parts"] <= MAX_STEP
