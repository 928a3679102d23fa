"""The shape of the package: imports point down, `--help` is light, only the command line prints."""

import ast
import subprocess
import sys
from pathlib import Path

import blockdraft

ROOT = Path(blockdraft.__file__).parent
LAYERS = ["kernels", "cache", "models", "drafters", "runtime", "engine"]
# The standard library, and each other.
ALONE = {
    "settings",
    "exposition",
    "errors",
    "machine",
    "cards",
    "nvml",
    "remedies",
    "limits",
    "recipe",
    "acceptance_profile",
    "shipped",
}
LAUNCH_USES = {"launch", "cards", "errors", "machine", "settings", "acceptance_profile", "shipped"}
LAUNCH_BORROWS = {"engine.startup", "models.draft_config"}  # the phases of a start; the size of a block
BENCH_USES = {"blockdraft", "aiohttp", "numpy", "rich", "huggingface_hub", "pyarrow"}
TORCH_FREE = {
    "plan",
    "models.config",
    "models.draft_config",
    "models.families",
    "models.known",
    "cache.spec",
    "engine.request",
}


def modules():
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name, ast.parse(path.read_text())


def imports(tree):
    """Names imported anywhere in the file, without what is only for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module


def own(name):
    return name.removeprefix("blockdraft.") if name.startswith("blockdraft.") else None


def test_imports_point_down():
    for name, tree in modules():
        package = name.split(".")[0]
        for imported in filter(None, map(own, imports(tree))):
            top = imported.split(".")[0]
            if package in LAYERS and top in LAYERS:
                assert LAYERS.index(top) <= LAYERS.index(package), f"{name} imports {imported}"
            if package in LAYERS:
                assert top not in {
                    "cli",
                    "server",
                    "bench",
                    "llm",
                    "doctor",
                    "launch",
                    "planner",
                    "training",
                }, f"{name} imports {imported}"
            if package in ALONE:
                assert top in ALONE, f"{name} imports {imported}"
            if package == "server":
                assert top not in {"cli", "bench", "llm", "doctor", "launch"}, f"{name} imports {imported}"
            if package == "launch":  # it starts engines of others
                assert top in LAUNCH_USES or imported in LAUNCH_BORROWS, f"{name} imports {imported}"
            if package in {"planner", "doctor"}:
                assert top not in {"cli", "server", "bench", "llm"}, f"{name} imports {imported}"
            if package == "bench":  # it sees a server as any client does
                assert top in {"bench", "errors", "machine", "hub", "exposition"}, (
                    f"{name} imports {imported}"
                )
            assert package != "hub", f"{name} imports {imported}"


def test_settings_and_friends_use_the_standard_library_only():
    for name, tree in modules():
        if name in ALONE:
            foreign = {i.split(".")[0] for i in imports(tree)} - set(sys.stdlib_module_names) - {"blockdraft"}
            assert not foreign, f"{name} imports {foreign}"
        if name.split(".")[0] == "bench":
            foreign = {i.split(".")[0] for i in imports(tree)} - set(sys.stdlib_module_names)
            assert foreign <= BENCH_USES, f"{name} imports {foreign}"
        if name in TORCH_FREE:
            assert "torch" not in {i.split(".")[0] for i in imports(tree)}, name


def test_no_engine_of_others_and_no_transformers():
    for name, tree in modules():
        tops = {imported.split(".")[0] for imported in imports(tree)}
        assert not tops & {"vllm", "sglang", "transformers", "pickle"}, name


def test_the_environment_is_read_in_settings_only_and_print_lives_in_the_cli():
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
                assert name == "settings", f"{name} reads the environment"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert name.startswith("cli."), f"{name} prints"


def test_help_does_not_import_torch():
    code = (
        "import sys\n"
        "from blockdraft.cli.main import main\n"
        "try:\n    main(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "import blockdraft.plan\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_public_names_exist():
    for name in blockdraft.__all__:
        assert getattr(blockdraft, name) is not None
