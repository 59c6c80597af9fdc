"""Data flows one way: a folder of the package imports only from those before it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lamella"
ORDER = ["errors", "units", "config", "console", "files", "trace", "track", "hardware", "ranks", "kernels", "checkpoint",
         "store", "models", "adapter", "data", "plan", "forecast", "engine", "quality", "probe", "train",
         "launch", "eval", "export", "endpoint", "compare", "serve", "loadtest", "decide", "report", "guide", "demo",
         "commands", "cli", "__main__"]  # fmt: skip


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            module = node.module or ""
            found |= {f"{module}.{a.name}" for a in node.names} if module == "lamella" else {module}
    return {name.split(".")[1] for name in found if name.startswith("lamella.") and name != "lamella.__version__"}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_follow_the_flow(file):
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in ORDER, f"{room} has no place in the flow"
    later = {name for name in imports_of(file) if ORDER.index(name) > ORDER.index(room)}
    assert not later, f"{file} imports against the flow: {later}"


def test_files_and_functions_stay_small():
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        assert len(file.read_text().splitlines()) <= 1000, file
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno <= 100, f"{file}: {node.name} is over 100 lines"


HANDED_ON = {("launch/supervise.py", "verdict.text")}  # a rank's own error, which says what to do


def test_every_error_says_what_to_do():
    silent = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                not isinstance(node, ast.Call)
                or getattr(node.func, "id", getattr(node.func, "attr", "")) != "UserError"
            ):
                continue
            told = {k.arg for k in node.keywords}  # None: a mapping of keywords
            said = (str(file.relative_to(PACKAGE)), ast.unparse(node.args[0]) if node.args else "")
            if not told & {"fix", None} and said not in HANDED_ON:
                silent.append(f"{file}:{node.lineno}")
    assert not silent
