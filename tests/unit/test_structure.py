"""The design's structural rules: sizes, error handling, who may import whom, and what stays free of torch."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "pellucid"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 800, 120

BASE = {"errors", "types", "console", "plugins", "devices", "process_guard", "seeding", "stages", "threads"}
"""The modules beside the rooms; all of them may use each other."""
ROOMS = {"config", "tasks", "data", "reward", "algo", "training", "roles", "rollout", "agents", "ranks", "observe", "precision", "metrics", "files"}
RUN = {
    "loop", "schedules", "stream", "produce", "learn", "validation", "run", "build", "engine_maker", "fsdp_engines",
    "megatron_engines", "engines", "loading", "run_state", "interrupt", "failures", "sft",
}  # fmt: skip
"""What makes a run and drives it, above the rooms."""
API = {"api", "harness", "session", "trained"}
"""What the command line and scripts call, above a run."""
MAY_IMPORT = {
    "algo": {"config.schema"},
    "config": {"errors", "stages", "algo.catalog"},
    "observe": BASE | ROOMS | RUN,
    "precision": {"errors", "stages", "types", "files", "config.schema"},
    "tasks": {"errors", "types"},
    "data": {"errors", "types", "plugins", "tasks", "config.schema"},
    "reward": BASE | {"tasks", "algo", "config.schema", "observe.spans"},
    "metrics": BASE | {"files", "config.schema"},
    "files": BASE,
    "training": {"errors", "types", "threads", "stages"},
    "roles": {"errors", "types", "seeding", "plugins", "training", "algo", "config.schema"},
    # training: the native engine runs on the actor's own model
    "rollout": {"errors", "types", "seeding", "process_guard", "training", "stages", "config.schema"},
    "agents": BASE | {"tasks", "rollout", "config.schema"},
    "ranks": BASE | ROOMS | RUN,
    "view": BASE | {"metrics", "files", "observe", "precision", "config"},
    "doctor": BASE | ROOMS | RUN,
    "cli": BASE | ROOMS | RUN | API | {"doctor", "view"},
    **dict.fromkeys(API, BASE | ROOMS | RUN | API),
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(RUN, BASE | ROOMS | RUN),
}
"""room → other rooms, modules beside them, or `room.module`, that it may import; the table of the architecture page."""

OBSERVERS = {"observe", "precision"}
NEVER = {"algo": OBSERVERS, "training": OBSERVERS, "roles": OBSERVERS, "rollout": OBSERVERS, "agents": OBSERVERS}
"""room → rooms that it may not import, whatever the table above says: observers attach from outside."""
BUDGETS = {
    ("loop", *sorted(RUN - {"loop"})): 3370,
    tuple(sorted(BASE)): 1025,
    ("algo",): 1235,
    ("config",): 5325,
    tuple(sorted(API)): 835,
    ("tasks", "data", "reward"): 1615,
    ("training",): 4395,
    ("roles",): 590,
    ("rollout",): 4400,
    ("agents",): 2770,
    ("ranks",): 1890,
    ("observe",): 4860,
    ("precision",): 3485,
    ("metrics", "files"): 1795,
    ("cli", "doctor"): 2225,
    ("view",): 880,
}
"""Rooms, and modules beside them, and how many lines they may have together, docstrings and blank lines included.

A ceiling and not an aim; raising one is a decision for which a commit message argues.
"""
MAX_LINES = 40_580
"""Of all the source, with engines, agents, Megatron and dashboard in."""
MAX_COLUMNS = 120
SHARED_NAMES = {"schema", "validate", "tools", "cli"}
"""Folders in which a file is called as its section, tool or command is, though another folder may have the same name."""

MARKERS = re.compile("|".join(["NotImplemented" + "Error", "TO" + "DO", "FIX" + "ME", r"\bXX" + r"X\b", r"\bHA" + r"CK\b"]))
REGISTRY_HOSTS = re.compile("|".join(name + r"\." + end for name, end in (
    ("pypi", "org"), ("pythonhosted", "org"), (r"registry\.npmjs", "org"), (r"deb\.debian", "org"))))  # fmt: skip

sources = sorted(PACKAGE.rglob("*.py"))
all_python = sources + sorted(path for folder in ("tests", "benchmarks", "examples", "recipes") for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_name(node: ast.AST | None, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def is_broad(node: ast.ExceptHandler) -> bool:
    types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or is_name(kind, "Exception", "BaseException") for kind in types)


def swallows(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and is_broad(node) and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))


def defaulting_getattr(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and is_name(node.func, "getattr") and len(node.args) == 3


def prints(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and is_name(node.func, "print")


def long_function(node: ast.AST) -> bool:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and node.end_lineno is not None and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text)))


def findings(text: str, rule: Callable[[ast.AST], bool]) -> list[int]:
    """Return the lines at which `rule` holds."""
    return [node.lineno for node in nodes_of(text) if rule(node)]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("rule", [swallows, defaulting_getattr, prints, long_function], ids=lambda rule: rule.__name__)
def test_source_follows(rule):
    assert not [f"{name_of(path)}:{line}" for path in sources for line in findings(path.read_text(), rule)]


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (swallows, "try: f()\nexcept Exception: pass", "try: f()\nexcept Exception as e: raise ValueError from e"),
        (swallows, "try: f()\nexcept: pass", "try: f()\nexcept OSError: pass"),
        (swallows, "try: f()\nexcept (OSError, Exception): pass", "try: f()\nexcept (OSError, ValueError): pass"),
        (defaulting_getattr, "getattr(a, 'b', None)", "getattr(a, 'b')"),
        (prints, "print(1)", "console.print(1)"),
        (long_function, "def f():\n" + "    x = 1\n" * 120, "def f():\n" + "    x = 1\n" * 119),
    ],
)
def test_the_rules_find_what_they_are_for(rule, bad, good):
    assert findings(bad, rule) and not findings(good, rule)


def test_no_file_is_too_long():
    assert not [name_of(path) for path in all_python if len(path.read_text().splitlines()) > MAX_FILE_LINES]


def test_no_function_is_too_long_anywhere():
    assert not [f"{name_of(path)}:{line}" for path in all_python for line in findings(path.read_text(), long_function)]


def test_nothing_is_left_unfinished():
    assert not [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MARKERS.search(line)
    ]


def text_files() -> Iterator[Path]:
    for path in ROOT.rglob("*"):
        hidden = {".venv", ".venv-vllm", ".venv-sglang", ".git", "outputs", "models", "build", "node_modules"} & set(path.relative_to(ROOT).parts)
        if not hidden and path.is_file() and path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".cfg", ".json", ""}:
            yield path


def test_no_file_names_the_host_of_a_package_registry():
    assert not [name_of(path) for path in text_files() if REGISTRY_HOSTS.search(path.read_text(errors="replace"))]


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the pellucid modules that a file imports, wherever in it, without the leading `pellucid.`."""
    for node in nodes_of(path.read_text()):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            modules = [f"pellucid.{alias.name}" for alias in node.names] if node.module == "pellucid" else [node.module or ""]
        else:
            continue
        yield from ((module.removeprefix("pellucid."), node.lineno) for module in modules if module.startswith("pellucid."))


def test_every_room_imports_only_what_the_table_allows():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources} - {"__init__"}
    assert rooms == set(MAY_IMPORT), "a room or a module beside the rooms is not in the table"
    violations = []
    for path in sources:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module, line in imports_of(path):
            target = module.split(".")[0]
            allowed = {"api", "threads"} if room == "__init__" else MAY_IMPORT.get(room, set())
            if target != room and target not in allowed and ".".join(module.split(".")[:2]) not in allowed:
                violations.append(f"{name_of(path)}:{line}: {room} imports {module}")
    assert not violations


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def over_budget() -> list[str]:
    lines: Counter[str] = Counter()
    for path in sources:
        lines[room_of(path)] += path.read_text().count("\n")
    sums = {rooms: sum(lines[room] for room in rooms) for rooms in BUDGETS}
    return [f"{', '.join(rooms[:3])}: {sums[rooms]} of {limit} lines" for rooms, limit in BUDGETS.items() if sums[rooms] > limit]


def whole() -> list[str]:
    lines = sum(path.read_text().count("\n") for path in sources)
    return [f"{lines} of {MAX_LINES} lines"] * (lines > MAX_LINES)


def forbidden_arrows() -> list[str]:
    return [
        f"{name_of(path)}:{line}: {room_of(path)} imports {module}"
        for path in sources
        for module, line in imports_of(path)
        if module.split(".")[0] in NEVER.get(room_of(path), set())
    ]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def edges_of(path: Path) -> set[str]:
    """Return the modules of the package that a file imports; a name taken for types alone still ties two files together."""
    found: set[str] = set()
    for node in nodes_of(path.read_text()):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("pellucid.") for name in found} - {module_name(path)}


def circles() -> list[str]:
    """Return the files of each circle of imports, of two files or of more."""
    edges = {module_name(path): edges_of(path) for path in sources if path.stem != "__init__"}
    left = {name: targets & edges.keys() for name, targets in edges.items()}
    while ends := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in ends}
    # What is left leads into a circle; of these, a circle's are those that can be reached from themselves.
    return [f"{name} imports itself by way of {', '.join(sorted(left[name] & left.keys()))}" for name in left if name in reached(left, name)]


def reached(edges: dict[str, set[str]], start: str) -> set[str]:
    found, fresh = set[str](), {start}
    while fresh:
        fresh = {target for name in fresh for target in edges.get(name, set())} - found
        found |= fresh
    return found


def shared_names() -> list[str]:
    stems = [path.stem for path in sources if path.stem != "__init__" and path.parent.name not in SHARED_NAMES]
    return [f"{count} files are called {stem}.py" for stem, count in Counter(stems).items() if count > 1]


def wide_lines() -> list[str]:
    return [
        f"{name_of(path)}:{number}: {len(line)} columns"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]


RULES = {"budgets": over_budget, "whole": whole, "arrows": forbidden_arrows, "circles": circles, "names": shared_names, "columns": wide_lines}


def test_every_room_has_a_budget():
    assert sorted(room for rooms in BUDGETS for room in rooms) == sorted(MAY_IMPORT), "a room in none of them, or in two"


@pytest.mark.parametrize("rule", RULES)
def test_the_layout_follows(rule):
    assert not RULES[rule]()


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert [name for name in edges if name in reached(edges, name)] == ["a", "b", "c"]


def modules_after(code: str, *arguments: str, status: int = 0) -> set[str]:
    """Run code in a new process, check its exit status and return the top-level modules it ended with."""
    report = "\nfinally:\n    import sys; sys.stdout.write('MODULES ' + ' '.join(m for m in sys.modules if '.' not in m))"
    body = "try:\n" + "\n".join(f"    {line}" for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", body + report, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return set(done.stdout.partition("MODULES ")[2].split())


@pytest.mark.processes
def test_the_config_room_imports_no_torch():
    modules = modules_after("import pellucid.config, pellucid.config.describe, pellucid.config.compat")
    assert not {"torch", "transformers", "numpy"} & modules


@pytest.mark.parametrize("command", [["train"], ["sft"], ["config", "check"], ["doctor"]])
@pytest.mark.processes
def test_a_config_error_is_reported_without_torch(command, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {train_size: 3}\n")
    modules = modules_after("from pellucid.cli.main import main\nmain()", *command, str(recipe), status=2)
    assert "hydra" in modules and not {"torch", "transformers"} & modules


@pytest.mark.processes
def test_help_imports_no_torch():
    assert not {"torch", "transformers", "hydra"} & modules_after("from pellucid.cli.main import main\nmain()", "--help")
