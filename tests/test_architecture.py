"""The shape of the package: who may import whom, what stays light, who prints, how long a function is."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import blockdraft

ROOT = Path(blockdraft.__file__).parent
MAX_FUNCTION = 60
MAX_STEP = 25
LONG_BY_NATURE = ("kernels.triton.", "kernels.llvm.")  # a kernel is one function

# Each room may import the rooms of its own line (its own alone, of several) and of the lines below it.
FLOORS = [
    {"cli"},
    {"training", "doctor", "prove"},
    {"server", "bench", "launch", "llm"},
    {"tool_calls"},
    {"start"},
    {"check"},
    {"engine"},
    {"grammar"},
    {"text", "planner"},
    {"checkpoints", "step"},
    {"models"},
    {"cache"},
    {"kernels"},
]
# The rooms of the server, likewise; its options are for all of them.
SERVER_FLOORS = [{"app"}, {"proxy"}, {"api", "page"}, {"http", "engine_link"}, {"options"}]
ANYONE_USES = {  # importable by all rooms, and what those import in turn, beside the standard library
    "errors": set(),
    "phases": set(),
    "prometheus_text": set(),
    "fp4_kernels": set(),
    "jsonl": set(),
    "settings": {"settings", "machine", "errors"},
    "machine": {"machine", "settings", "errors"},
}
ANYONE = set(ANYONE_USES)
ANYONE_LIBRARIES = {
    "machine.nvml": {"pynvml"},  # imported when a driver is there to be asked
    "machine.versions": {"packaging"},
}
# A server is seen as any client sees it, and other engines are started, not imitated.
BENCH_BORROWS = {"checkpoints.hub"}
LAUNCH_BORROWS = {  # a drafter's block and kind, where its files are, and whether a pair matches and fits
    *(
        "checkpoints.model_folder",
        "checkpoints.read_draft_config",
        "planner.draft_title",
        "planner.external",
        "planner.memory_fit",
        "planner.pair",
        "planner.resolver",
        "planner.stored",
    ),
}
BENCH_LIBRARIES = {"blockdraft", "aiohttp", "numpy", "rich", "huggingface_hub", "pyarrow", "uvloop"}
BENCH_LIBRARIES |= {"pydantic", "typing_extensions"}
TORCH_FREE = {
    *("planner", "settings", "machine", "launch", "bench", "prove"),
    *("errors", "phases", "prometheus_text", "fp4_kernels"),
    *("models.config", "models.draft_config", "models.mtp_config", "cache.spec"),
    *("engine.request", "engine.info", "engine.stats", "engine.streams"),
    *("text", "grammar.structured_output", "tools", "server.app", "server.engine_link.remote_engine"),
    *(
        "checkpoints.config_fields",
        "checkpoints.gguf_config",
        "checkpoints.gguf_header",
        "checkpoints.model_folder",
        "checkpoints.read_model_config",
        "checkpoints.draft_keys",
        "checkpoints.read_draft_config",
        "checkpoints.read_mtp_config",
        "checkpoints.fit_file",
    ),
}


@functools.cache
def modules():
    """The syntax tree of every module of the package by its name; a package's own file has the package's."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for path, name in names.items()}


@functools.cache
def nodes(tree):
    return tuple(ast.walk(tree))


@functools.cache
def imports(tree):
    """Full names of the modules that a file imports; `from package import module` names the module."""
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(inner if inner.removeprefix("blockdraft.") in modules() else node.module)
    return found


def own_imports(tree):
    """Those of our own modules, without "blockdraft."; the package itself is not among them."""
    return {name.removeprefix("blockdraft.") for name in imports(tree) if name.startswith("blockdraft.")}


def room(name):
    return name.split(".")[0]


def floor_of(name):
    return next((number for number, rooms in enumerate(FLOORS) if name in rooms), None)


def forbidden(importer, imported):
    """Why a module may not import another; None: it may."""
    here, there = room(importer), room(imported)
    if here in ("__init__", "__main__"):
        return None
    if here in ANYONE:
        return None if there in ANYONE_USES[here] | {here} else "it is for anyone, and stands on nothing"
    if there in ANYONE or here == there:
        return None
    if here == "bench":
        return None if imported in BENCH_BORROWS else "a benchmark sees a server as any client does"
    if here == "launch":
        return None if imported in LAUNCH_BORROWS else "other engines are started from outside"
    if floor_of(there) is None:
        return f"'{there}' has no floor: give it one"
    return None if floor_of(there) > floor_of(here) else "imports point down"


def test_every_room_has_a_place():
    rooms = {room(name) for name in modules()} - {"__init__", "__main__"}
    assert rooms == ANYONE | set().union(*FLOORS)


def test_imports_point_down():
    for name, tree in modules().items():
        for imported in own_imports(tree):
            reason = forbidden(name, imported)
            assert reason is None, f"{name} imports {imported}: {reason}"


def test_imports_point_down_in_the_server():
    floors = {name: number for number, rooms in enumerate(SERVER_FLOORS) for name in rooms}
    for name, tree in modules().items():
        for imported in own_imports(tree):
            if name.startswith("server.") and imported.startswith("server."):
                here, there = name.split(".")[1], imported.split(".")[1]
                assert here == there or floors[there] > floors[here], f"{name} imports {imported}"


def test_a_module_imported_from_its_package_is_seen():
    for line in ("from blockdraft import llm", "from blockdraft.server import app", "import blockdraft.llm"):
        (imported,) = own_imports(ast.parse(line))
        assert forbidden("engine.engine", imported) == "imports point down", line


def test_there_is_no_circle_of_imports():
    """Imports inside functions count, too, and those for types."""
    edges = {name: own_imports(tree) for name, tree in modules().items()}
    done: set[str] = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(edges.get(name, ())):
                visit(other, [*path, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])


def test_what_must_stay_light_does():
    for name, tree in modules().items():
        tops = {imported.split(".")[0] for imported in imports(tree)}
        if room(name) in ANYONE:
            foreign = tops - set(sys.stdlib_module_names) - {"blockdraft"} - ANYONE_LIBRARIES.get(name, set())
            assert not foreign, f"{name} imports {foreign}"
        if room(name) == "bench":
            assert tops - set(sys.stdlib_module_names) <= BENCH_LIBRARIES, name
        if name in TORCH_FREE or room(name) in TORCH_FREE:
            assert "torch" not in tops, name


def test_no_engine_of_others_and_no_transformers():
    for name, tree in modules().items():
        tops = {imported.split(".")[0] for imported in imports(tree)}
        assert not tops & {"vllm", "sglang", "transformers"}, name
        assert "pickle" not in tops, name


def test_the_environment_is_read_in_settings_only_and_print_lives_in_the_cli():
    for name, tree in modules().items():
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
                assert name == "settings.settings", f"{name} reads the environment"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert name.startswith("cli."), f"{name} prints"


def test_a_server_does_not_import_torch():
    """Its engine is in another process."""
    modules = "blockdraft.server.app, blockdraft.server.engine_link.remote_engine"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_plan_bench_and_doctor_do_not_import_torch():
    code = (
        "import sys\n"
        "from blockdraft.cli.main import main\n"
        "try:\n    main(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "import blockdraft.cli.plan, blockdraft.planner.report\n"
        "import blockdraft.bench.options, blockdraft.doctor.report, blockdraft.doctor.probe\n"
        "sys.exit(not {'torch', 'pynvml', 'huggingface_hub'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_class_has_its_name_for_itself():
    """Whoever searches for a name finds one thing. Each Triton kernel has a Config of its own tiles."""
    places = {}
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "triton" not in name:
                places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_public_names_exist():
    for name in blockdraft.__all__:
        assert getattr(blockdraft, name) is not None


def test_no_start_imports_what_structured_outputs_alone_need():
    """It takes a tenth of a second, and most servers never see a structured output."""
    for name, tree in modules().items():
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        assert "llguidance" not in {imported.partition(".")[0] for imported in imports(top)}, name


def test_settings_are_changed_by_the_resolver_alone():
    """It is where "auto" becomes a value; others ask it for settings with something else asked for."""
    changed = re.compile(r"replace\(\s*(\w+\.)?settings\b")
    found = {
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if changed.search(path.read_text())
    }
    assert found == {"planner/resolver.py"}


def test_few_modules_name_the_settings():
    """Others take the values they need, a Plan or a Case."""
    found = [path for path in ROOT.rglob("*.py") if re.search(r"\bSettings\b", path.read_text())]
    assert len(found) <= 17, sorted(path.relative_to(ROOT).as_posix() for path in found)


def lengths(tree):
    """Name and number of lines of every function."""
    functions = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.name, node.end_lineno - node.lineno + 1) for node in functions]


def test_functions_fit_on_a_screen():
    long = [
        f"{name} {function}: {count}"
        for name, tree in modules().items()
        if not name.startswith(LONG_BY_NATURE)
        for function, count in lengths(tree)
        if count > MAX_FUNCTION
    ]
    assert not long


def test_the_step_stays_the_measure():
    assert dict(lengths(modules()["step.decode"]))["decode_parts"] <= MAX_STEP
