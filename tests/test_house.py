"""The house rules that can be counted: imports, sizes, laziness, words. Each exception carries its reason."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "twinreel"
MODULES = sorted(SRC.rglob("*.py"))
EVERY_FILE = MODULES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))

# Rooms from the ground up; a room imports only from its own floor or from floors below it.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "ops", "parallel"),
    (
        "spec",
        "sources",
        "watch",
        "beside",
        "machine",
        "precision",
        "small_files",
        "scratch",
        "unfinished",
        "plain",
        "launch",
        "line",
        "stopping",
    ),
    ("models", "weights", "config", "ranks"),
    ("limits", "wording", "complaint", "policy_options", "policy_windows"),
    ("request", "request_json", "schema", "plan", "media"),
    ("presentation", "memory", "topology"),
    ("layout", "schedule", "noise", "policy", "policies", "calibration"),
    ("denoise", "conditioning", "parts", "output", "decoding"),
    ("pipeline", "finish"),
    ("demo",),
    ("engine",),
    (
        "planner",
        "doctor",
        "flags",
        "flag_words",
        "flag_errors",
        "tool_flags",
        "progress",
        "outlets",
        "rank",
    ),
    ("cli", "serve", "tools"),
    ("__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
STANDS_ALONE = {"ops", "parallel"}  # they import nothing of ours, so that they can be lifted out
# No GPU code.
PURE = {
    "errors",
    "spec",
    "sources",
    "limits",
    "wording",
    "schema",
    "request",
    "request_json",
    "plan",
    "layout",
    "schedule",
    "noise",
    "denoise",
}
# Reached by `import twinreel` or by --help.
NO_TORCH = {
    "complaint",
    "errors",
    "spec",
    "sources",
    "limits",
    "wording",
    "request",
    "request_json",
    "plan",
    "config",
    "watch",
    "output",
}
NO_TORCH |= {
    "memory",
    "planner",
    "presentation",
    "policy_options",
    "policy_windows",
    "calibration",
    "flags",
    "flag_words",
    "flag_errors",
    "small_files",
    "tool_flags",
    "outlets",
    "progress",
    "cli",
}
NEVER = {"torchvision", "torchaudio", "diffusers"}  # they lock torch to one version, or are only the oracle
NEVER_EXCEPTIONS = {"tools/oracle.py": "`validate --against diffusers` holds ours against it, in functions only"}
LAZY = {"av", "tyro", "rich", "transformers"}
LAZY_EXCEPTIONS = dict.fromkeys(
    ("flags.py", "tool_flags.py", "serve/flags.py"),
    "flags are tyro annotations; only cli.main imports these files, inside a function",
)
# Where an unforeseen error becomes a message and exit code 1, or ends a server's job with its cause.
PROCESS_EDGES = {"cli.py:run", "serve/worker.py:main", "rank.py:main", "tools/workers.py:_carry_out"}
PROCESS_EDGES |= {"serve/dispatch.py:Dispatcher._loop"}  # of its thread: `/ready` tells the cause
# between ranks: what one raises, all raise; and an error of a foreign class may do anything when it is sent
PROCESS_EDGES |= {"tools/bench_scaling.py:serve", "parallel/team.py:attempt", "parallel/team.py:portable"}
ENVIRONMENT = {"launch.py": "reads the launcher's RANK and WORLD_SIZE"}
UNWANTED = re.compile(r"manager|handler|helper|util|context|^minimaxh3|^enable_", re.IGNORECASE)

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_PARAMETERS: dict[str, str] = {}


@lru_cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def room(path: Path) -> str:
    """The first part of a module's path in the package: `models/dit.py` is in room `models`."""
    parts = path.relative_to(SRC).parts
    return parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return path.relative_to(SRC if path.is_relative_to(SRC) else ROOT).as_posix()


def walk_outside_type_checking(node: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if not inside_functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from walk_outside_type_checking(child, inside_functions)


def imports(path: Path, inside_functions: bool = True) -> Iterator[str]:
    """Absolute dotted names that a module imports at run time; relative imports are resolved."""
    package = ["twinreel", *path.relative_to(SRC).parts[:-1]] if path.is_relative_to(SRC) else []
    for node in walk_outside_type_checking(tree_of(path), inside_functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield prefix
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def our_rooms(path: Path) -> set[str]:
    known = {room(module) for module in MODULES}
    parts = [name.split(".") for name in imports(path) if name.split(".")[0] == "twinreel"]
    return {second[1] for second in parts if len(second) > 1 and second[1] in known}


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """(`file.py:Class.name`, node, is a method) of every function in a file."""

    def visit(node: ast.AST, prefix: str, in_class: bool) -> Iterator[tuple[str, ast.FunctionDef, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child, in_class
                yield from visit(child, f"{prefix}{child.name}.", False)
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.", True)
            else:
                yield from visit(child, prefix, in_class)

    yield from visit(tree_of(path), f"{name_of(path)}:", False)


def test_every_room_has_a_floor():
    strangers = {room(path) for path in MODULES if room(path) != "__init__"} - set(FLOOR)
    assert not strangers, f"give these rooms a floor in FLOORS and a line in docs/structure.md: {sorted(strangers)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path):
    here = room(path)
    if here == "__init__":
        return
    if here in STANDS_ALONE:
        assert our_rooms(path) <= {here}, f"{here} imports nothing of ours"
    upward = {other for other in our_rooms(path) - {here} if FLOOR.get(other, 0) > FLOOR.get(here, 0)}
    assert not upward, f"{name_of(path)} imports upward: {sorted(upward)}"


def test_rooms_have_no_import_cycle():
    edges = {name: set[str]() for name in FLOOR}
    for path in MODULES:
        if room(path) in edges:
            edges[room(path)] |= our_rooms(path) - {room(path)}
    while edges:
        leaves = [name for name, targets in edges.items() if not targets & set(edges)]
        assert leaves, f"cycle among {sorted(edges)}"
        for name in leaves:
            del edges[name]


@pytest.mark.parametrize("path", [path for path in MODULES if room(path) in PURE], ids=name_of)
def test_pure_rooms_hold_no_gpu_code(path: Path):
    assert not re.search(r"\bcuda\b|\btriton\b", path.read_text(encoding="utf-8")), f"{name_of(path)} is to be pure"
    assert not our_rooms(path) & {"ops", "parallel", "models"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_heavy_imports_are_lazy_or_absent(path: Path):
    first = {name.split(".")[0] for name in imports(path)}
    early = {name.split(".")[0] for name in imports(path, inside_functions=False)}
    never = (early if name_of(path) in NEVER_EXCEPTIONS else first) & NEVER
    assert not never, f"{name_of(path)} imports {sorted(never)}"
    if name_of(path) not in LAZY_EXCEPTIONS:
        assert not early & LAZY, f"import {sorted(early & LAZY)} inside the function that needs it"
    if room(path) in NO_TORCH:
        assert "torch" not in early, f"{name_of(path)} is reached by `import twinreel` or --help"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_environment_and_broad_excepts(path: Path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute | ast.Name) and name_of(path) not in ENVIRONMENT:
            word = node.attr if isinstance(node, ast.Attribute) else node.id
            assert word not in {"environ", "getenv", "putenv"}, f"{name_of(path)}:{node.lineno} reads the environment"
            # files of the working folder would be run; `launch.module` says how else
            assert word != "executable", f"{name_of(path)}:{node.lineno} starts Python for itself"
    edges = [node for label, node, _ in functions(path) if label in PROCESS_EDGES]
    allowed = {id(inner) for edge in edges for inner in ast.walk(edge)}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler) and id(node) not in allowed:
            caught = ast.unparse(node.type) if node.type else "BaseException"
            wide = re.search(r"\b(Base)?Exception\b", caught)
            assert not wide, f"{name_of(path)}:{node.lineno} catches {caught}"


@pytest.mark.parametrize("path", EVERY_FILE, ids=name_of)
def test_sizes(path: Path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= 400 or name_of(path) in LONG_FILES, f"{name_of(path)} has {lines} lines"
    for label, node, is_method in functions(path):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        assert length <= 60 or label in LONG_FUNCTIONS, f"{label} has {length} lines"
        positional = len(node.args.posonlyargs) + len(node.args.args)
        static = any(ast.unparse(mark) == "staticmethod" for mark in node.decorator_list)
        positional -= 1 if is_method and not static else 0
        # Triton passes a kernel its pointers, strides and constants one by one: no records, no keyword-only parameters
        kernel = any(ast.unparse(mark) == "triton.jit" for mark in node.decorator_list)
        if path in MODULES and not kernel:
            assert positional <= 6 or label in MANY_PARAMETERS, f"{label} has {positional} positional parameters"


def test_exceptions_are_still_needed():
    """An exception whose cause is gone is removed, so that the lists above stay short and true."""
    known = {name_of(path) for path in EVERY_FILE}
    for name in [*LONG_FILES, *LAZY_EXCEPTIONS, *NEVER_EXCEPTIONS]:
        assert name in known, f"{name} is gone"
    labels = {label: node for path in EVERY_FILE for label, node, _ in functions(path)}
    for label in LONG_FUNCTIONS:
        assert (labels[label].end_lineno or 0) - labels[label].lineno + 1 > 60, f"{label} is short now"
    for label in MANY_PARAMETERS:
        assert len(labels[label].args.args) + len(labels[label].args.posonlyargs) > 6, f"{label} has few now"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_words(path: Path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX)\b|NotImplementedError", text), f"{name_of(path)} is not finished"
    assert "save_file" not in text, "safetensors makes its files 0600, whatever the umask; write what `save` returns"
    if room(path) == "models":
        assert not re.search("fused", text, re.IGNORECASE), "a block does not know which table of ops it was given"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert not UNWANTED.search(node.name), f"{name_of(path)}: {node.name}"
    assert not UNWANTED.search(path.stem), path.stem


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_public_things_say_what_they_are(path: Path):
    module = tree_of(path)
    assert ast.get_docstring(module), f"{name_of(path)} has no docstring"
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name_of(path)}:{node.name} has no docstring"


def test_cited_sections_exist():
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^## (\d+)\.", page, re.MULTILINE)) | set(re.findall(r"\*\*(\d+\.\d+)\*\*", page))
    number = r"\d+(?:\.\d+)?"
    for path in EVERY_FILE:
        for cited in re.findall(
            rf"\bSPEC ({number}(?:(?:, | and | to |-){number})*)", path.read_text(encoding="utf-8")
        ):
            missing = set(re.findall(number, cited)) - known
            assert not missing, f"{name_of(path)} cites SPEC {cited}; docs/numerics.md has no {sorted(missing)}"


def test_structure_page_names_every_module():
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", page))
    missing = [name_of(path) for path in MODULES if path.stem not in words | {"__init__", "__main__"}]
    assert not missing, f"docs/structure.md does not name {missing}"


def loaded_by(code: str) -> set[str]:
    script = f"import json, sys\n{code}\nprint(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_loads_no_torch():
    loaded = loaded_by("import twinreel; twinreel.Request, twinreel.EngineConfig, twinreel.RequestError")
    assert "twinreel" in loaded
    assert not loaded & {"torch", "transformers", "av", "tyro", "rich", "diffusers", "PIL"}


def test_help_loads_no_torch():
    loaded = loaded_by(
        "from twinreel import cli\n"
        "for words in (['--help'], ['generate', '--help'], ['doctor', '--help'], ['verify', '--help']):\n"
        "    assert cli.main(words) == 0, words"
    )
    assert "tyro" in loaded
    assert not loaded & {"torch", "transformers", "av", "diffusers"}
