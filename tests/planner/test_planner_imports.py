"""The planner stands beside the engine, not on it: nothing that it imports needs torch."""

from tests.test_architecture import imports, modules

BELOW = {
    "acceptance_profile",
    "cache",
    "cards",
    "errors",
    "hub",
    "machine",
    "models",
    "plan",
    "planner",
    "settings",
    "shipped",
}
FOREIGN = {"torch", "numpy", "tokenizers", "safetensors"}


def test_the_planner_imports_only_what_is_below_it():
    seen = 0
    for name, tree in modules():
        if not name.startswith("planner."):
            continue
        seen += 1
        for imported in imports(tree):
            package, _, rest = imported.partition(".")
            assert package not in FOREIGN, f"{name} imports {imported}"
            if package == "blockdraft":
                assert rest.split(".")[0] in BELOW, f"{name} imports {imported}"
    assert seen > 8
