"""Every golden command in the parsers of the real engines, without a GPU.

Optional: tests/launch/engine_venvs.py says how they are asked for. Each parser runs once, in its own
environment, over all commands; what it makes of them is compared with the settings.
"""

import json
import subprocess
from dataclasses import replace

import pytest

from blockdraft.planner.resolver import with_drafter
from blockdraft.settings.recipe import recipe_names
from tests.launch.engine_venvs import VARIABLE as SGLANG
from tests.launch.engine_venvs import VLLM_VARIABLE as VLLM
from tests.launch.engine_venvs import sglang_python, vllm_parser_python, wants_sglang, wants_vllm_parser
from tests.launch.golden import golden_path, recipe_settings
from tests.launch.test_documents import COMMANDS, command_of
from tests.launch.test_translate import VLLM as VLLM_FLAGS
from tests.launch.test_translate import command

pytestmark = pytest.mark.slow

# Reads [{"argv": [argument, ...], "env": [name, ...]}, ...] and writes what was understood of each, or null
# where it was refused.
VLLM_PARSER = """
import dataclasses, json, sys
from pydantic import TypeAdapter, ValidationError
from vllm import envs
from vllm.config.cache import is_known_kv_cache_dtype
from vllm.config.speculative import SpeculativeConfig
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

TYPES = {field.name: field.type for field in dataclasses.fields(SpeculativeConfig)}
TYPES["attention_backend"] = str  # a name, which a validator of the whole configuration reads

def is_refused(name, value):
    try:
        TypeAdapter(TYPES[name]).validate_python(value)
    except (KeyError, ValidationError):
        return True
    return False

found, parser = [], make_arg_parser(FlexibleArgumentParser())
for command in json.load(sys.stdin):
    try:
        parsed = parser.parse_args(command["argv"])
    except SystemExit:
        found.append(None)
        continue
    config = parsed.speculative_config or {}
    backends = {parsed.attention_backend, config.get("attention_backend")} - {None}
    unknown = [name for name, value in config.items() if is_refused(name, value)]
    named = [name for name in command["env"] if name.startswith("VLLM_")]
    unknown += [name for name in named if name not in envs.environment_variables]
    unknown += [] if is_known_kv_cache_dtype(parsed.kv_cache_dtype) else [parsed.kv_cache_dtype]
    unknown += {parsed.tool_call_parser} - {None, *ToolParserManager.list_registered()}
    unknown += {parsed.reasoning_parser} - {None, "", *ReasoningParserManager.list_registered()}
    found.append({
        "model": parsed.model_tag,
        "num_drafts": config.get("num_speculative_tokens"),
        "drafter": config.get("model"),
        "max_model_len": parsed.max_model_len,
        "rows": parsed.max_num_seqs,
        "share": parsed.gpu_memory_utilization,
        "eager": parsed.enforce_eager,
        "unknown": unknown,
        "backends": all(getattr(b, "name", b) in AttentionBackendEnum.__members__ for b in backends),
    })
print("\\n" + json.dumps(found))
"""
SGLANG_PARSER = """
import argparse, json, sys
from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
from sglang.srt.server_args import ServerArgs

found = []
for command in json.load(sys.stdin):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    try:
        parsed = parser.parse_args(command["argv"])
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


def entry_of(argv, env):
    return {"argv": argv[2:], "env": list(env)}  # without `vllm serve`


def commands(engine):
    """Recipe and command of every golden file's entry, once per card."""
    for name in recipe_names():
        for key, one in json.loads(golden_path(name).read_text()).items():
            if key.startswith(f"{engine} "):
                yield name, entry_of(one["argv"], one["env"])


ON_A_CPU = {"VLLM_TARGET_DEVICE": "cpu"}  # what vLLM's parser would else look for


def parse(python, script, commands, tmp_path):
    done = subprocess.run(
        [python, "-c", script],
        input=json.dumps(commands),
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **ON_A_CPU},
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


ENGINES = [("vllm", wants_vllm_parser(), vllm_parser_python, VLLM_PARSER, VLLM)]
ENGINES += [("sglang", wants_sglang(), sglang_python, SGLANG_PARSER, SGLANG)]
needs_vllm_parser = pytest.mark.skipif(
    not wants_vllm_parser(), reason=f"wants vLLM's parser: set {VLLM}=1, or to a Python that has it"
)


@pytest.mark.parametrize(("engine", "is_wanted", "python", "script", "variable"), ENGINES)
def test_an_engine_understands_every_golden_command(tmp_path, engine, is_wanted, python, script, variable):
    if not is_wanted:
        pytest.skip(f"wants {engine}: set {variable}=1, or to a Python that has it")
    named = list(commands(engine))
    model = ["some/model"] if engine == "vllm" else ["--model-path", "some/model"]
    wrong = {"argv": [*model, "--no-such-flag", "1"], "env": []}
    found, errors = parse(python(), script, [one for _, one in named] + [wrong], tmp_path)
    assert found.pop() is None  # it does refuse what it does not know
    for (name, one), parsed in zip(named, found, strict=True):
        settings, argv = settings_of(name, engine), one["argv"]
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


def printed_commands():
    """What a command is about, and the command: every flag that we write, and those of the documents."""
    nodes = {"num_nodes": 2, "tensor_parallel": 2, "node_rank": 1, "head_address": "10.0.0.1"}
    more = [values for values, _ in VLLM_FLAGS.values()] + [
        *({name: False} for name in ("prefix_cache", "graphs", "overlap")),
        *({"overlap": True}, {"trust_remote_code": True}, {"max_queue": 10, "max_num_seqs": 4}, nodes),
        *(
            {"draft_quantization": "fp8"},
            {"draft_attention_backend": "triton"},
            {"model": "Qwen/Qwen3.5-27B"},
        ),
        *({"kv_dtype": "turboquant_k8v4", "draft": "none"}, {"synthetic_acceptance": "mean:4"}),
        {"draft_config": {"speculators_model_type": "dspark", "block_size": 8}},
        {"engine_args": ("--linear-backend", "marlin", "--moe-backend", "marlin", "--revision", "main")},
    ]
    for values in more:
        yield str(values), command("vllm", **values)
    for entry in COMMANDS:
        if "spec" in entry:
            yield entry["about"], command_of(entry)


@needs_vllm_parser
def test_vllm_understands_every_command_that_is_printed(tmp_path):
    """Also those of older builds, but for what their versions lack."""
    named = [(about, entry_of(one.argv, one.env)) for about, one in printed_commands()]
    found, errors = parse(vllm_parser_python(), VLLM_PARSER, [one for _, one in named], tmp_path)
    for (about, one), parsed in zip(named, found, strict=True):
        assert parsed is not None, (about, one, errors[-2000:])
        assert (parsed["unknown"], parsed["backends"]) == ([], True), (about, one)


WRONG = {
    "method": ["--speculative-config", '{"method": "dflesh"}'],
    "num_tokens": ["--speculative-config", '{"num_tokens": 4}'],
    "tq4": ["--kv-cache-dtype", "tq4"],
    "qwen9": ["--tool-call-parser", "qwen9"],
    "gemma9": ["--reasoning-parser", "gemma9"],
    "VLLM_NO_SUCH_VARIABLE": [],
}


@needs_vllm_parser
def test_what_vllm_does_not_know_is_found(tmp_path):
    entries = [
        {"argv": ["some/model", *words], "env": [] if words else [name]} for name, words in WRONG.items()
    ]
    found, _ = parse(vllm_parser_python(), VLLM_PARSER, entries, tmp_path)
    assert [parsed["unknown"] for parsed in found] == [[name] for name in WRONG]
