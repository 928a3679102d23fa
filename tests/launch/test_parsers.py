"""Every golden command in the parsers of the real engines, without a GPU.

Optional: tests/bench/vllm_venv.py and tests/launch/engine_venvs.py say how they are asked for. Each parser
runs once, in its own environment, over all commands; what it makes of them is compared with the settings.
"""

import json
import subprocess
from dataclasses import replace

import pytest

from blockdraft.planner.resolver import with_drafter
from blockdraft.settings.recipe import recipe_names
from tests.bench.vllm_venv import VARIABLE as VLLM
from tests.bench.vllm_venv import is_wanted as wants_vllm
from tests.bench.vllm_venv import vllm_python
from tests.launch.engine_venvs import VARIABLE as SGLANG
from tests.launch.engine_venvs import sglang_python, wants_sglang
from tests.launch.golden import golden_path, recipe_settings
from tests.launch.test_documents import COMMANDS, command_of

pytestmark = pytest.mark.slow

# Reads [[argument, ...], ...] and writes, for each, what was understood, or null where it was refused.
VLLM_PARSER = """
import dataclasses, json, sys
from vllm.config.speculative import SpeculativeConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

FIELDS = {field.name for field in dataclasses.fields(SpeculativeConfig)}
found = []
for argv in json.load(sys.stdin):
    try:
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    except SystemExit:
        found.append(None)
        continue
    config = parsed.speculative_config or {}
    backends = {parsed.attention_backend, config.get("attention_backend")} - {None}
    found.append({
        "model": parsed.model_tag,
        "num_drafts": config.get("num_speculative_tokens"),
        "drafter": config.get("model"),
        "max_model_len": parsed.max_model_len,
        "rows": parsed.max_num_seqs,
        "share": parsed.gpu_memory_utilization,
        "eager": parsed.enforce_eager,
        "unknown": sorted(config.keys() - FIELDS),
        "backends": all(getattr(b, "name", b) in AttentionBackendEnum.__members__ for b in backends),
    })
print("\\n" + json.dumps(found))
"""
SGLANG_PARSER = """
import argparse, json, sys
from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
from sglang.srt.server_args import ServerArgs

found = []
for argv in json.load(sys.stdin):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    try:
        parsed = parser.parse_args(argv)
    except SystemExit:
        found.append(None)
        continue
    draft_backend = parsed.speculative_draft_attention_backend
    found.append({
        "model": parsed.model_path,
        "width": parsed.speculative_num_draft_tokens,
        "drafter": parsed.speculative_draft_model_path,
        "max_model_len": parsed.context_length,
        "rows": parsed.max_running_requests,
        "share": parsed.mem_fraction_static,
        "eager": parsed.disable_cuda_graph,
        "algorithm": parsed.speculative_algorithm,
        "backends": draft_backend is None or draft_backend in DRAFT_ATTENTION_BACKEND_CHOICES,
    })
print("\\n" + json.dumps(found))
"""


def commands(engine):
    """Recipe, card and arguments after `vllm serve` or `sglang serve`, of every golden file."""
    for name in recipe_names():
        for key, command in json.loads(golden_path(name).read_text()).items():
            if key.startswith(f"{engine} "):
                yield name, command["argv"][2:]


def parse(python, script, commands, tmp_path):
    done = subprocess.run(
        [python, "-c", script],
        input=json.dumps(commands),
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stderr


def settings_of(name, engine):
    """As asked, but that there is a drafter by name or none."""
    found = with_drafter(next(one for one in recipe_settings(name) if one.engine == engine))
    return replace(found, draft=None) if found.draft == "none" else found


def expected(settings):
    return {
        "model": settings.model,
        "drafter": settings.draft,
        "max_model_len": settings.max_model_len,
        "rows": None if settings.max_num_seqs == "auto" else settings.max_num_seqs,
        "eager": not settings.graphs,
        "backends": True,
    }


ENGINES = [("vllm", wants_vllm(), vllm_python, VLLM_PARSER, VLLM)]
ENGINES += [("sglang", wants_sglang(), sglang_python, SGLANG_PARSER, SGLANG)]


@pytest.mark.parametrize(("engine", "is_wanted", "python", "script", "variable"), ENGINES)
def test_an_engine_understands_every_golden_command(tmp_path, engine, is_wanted, python, script, variable):
    if not is_wanted:
        pytest.skip(f"wants {engine}: set {variable}=1, or to a Python that has it")
    named = list(commands(engine))
    model = ["some/model"] if engine == "vllm" else ["--model-path", "some/model"]
    wrong = [*model, "--no-such-flag", "1"]
    found, errors = parse(python(), script, [argv for _, argv in named] + [wrong], tmp_path)
    assert found.pop() is None  # it does refuse what it does not know
    for (name, argv), parsed in zip(named, found, strict=True):
        settings = settings_of(name, engine)
        assert parsed is not None, (name, argv, errors[-2000:])
        share, has_drafter = settings.gpu_memory_utilization, bool(settings.draft)
        algorithm = "DSPARK" if has_drafter and "DSpark" in settings.draft else "DFLASH"
        own = {
            "width": settings.width if has_drafter else None,
            "share": None if share == 0.9 else share,
            "algorithm": algorithm if has_drafter else None,
        }
        if engine == "vllm":  # on unified memory its share is less
            share = float(argv[argv.index("--gpu-memory-utilization") + 1])
            drafts = settings.width - 1 if has_drafter else None
            own = {"num_drafts": drafts, "share": share, "unknown": []}
        assert parsed == expected(settings) | own


@pytest.mark.skipif(not wants_vllm(), reason=f"wants vLLM: set {VLLM}=1, or to a Python that has it")
def test_vllm_understands_the_commands_of_the_documents(tmp_path):
    """Also those of older builds, but for what their versions lack."""
    named = [(entry["about"], command_of(entry).argv[2:]) for entry in COMMANDS if "spec" in entry]
    found, errors = parse(vllm_python(), VLLM_PARSER, [argv for _, argv in named], tmp_path)
    assert len(named) == 6
    for (about, argv), parsed in zip(named, found, strict=True):
        assert parsed is not None, (about, argv, errors[-2000:])
        assert parsed["unknown"] == []
