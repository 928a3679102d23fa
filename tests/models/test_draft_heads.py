"""Heads that know the drafts before a draft, against tests/reference.py on the same weights in float64."""

import copy
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from blockdraft.cache.rows import RowSampling
from blockdraft.errors import ModelError
from blockdraft.kernels.noise import gumbel
from blockdraft.step.chain import ChainDrafter
from blockdraft.step.lattice import LatticeDrafter
from blockdraft.step.refined import RefinedDrafter
from tests import tiny
from tests.fixtures import make_pair
from tests.matrix import slow_but
from tests.models.checkpoints import load, write_draft
from tests.models.test_dflash import (
    HIDDEN,
    VOCAB,
    Drafting,
    random_chunks,
    random_features,
    write_small_target,
)
from tests.reference import (
    block_hidden,
    block_logits,
    domino_walk,
    lattice_walk,
    refined,
    refiner_bias,
    rms,
)

REDUCED = torch.tensor([0, 2, 3, 11, 12, 30, 31, 50, 60, 63])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return folder, write_small_target(folder)


def xpress_speculators(config, weights):
    """The same drafter as speculators writes it."""
    own = {
        "speculators_model_type": "xpress",
        "xpress_rank": config["xpress_rank"],
        "xpress_mlp_ratio": config["xpress_mlp_hidden"] // config["xpress_rank"],
        "num_jacobi_passes": config["xpress_num_passes"],
        "xpress_topc": config["xpress_topc"],
        "sample_from_anchor": config["sample_from_anchor"],
    }
    kept = {key: value for key, value in config.items() if not key.startswith("xpress_")}
    names = {"w1": "token_embed", "w2": "readout", "mix.L": "mix_l", "mlp.gate_proj": "mlp_gate"}
    names |= {"mlp.up_proj": "mlp_up", "mlp.down_proj": "mlp_down"}
    weights = {name.replace("xpress_head.", "refiner_head."): weight for name, weight in weights.items()}
    for old, new in names.items():
        old, new = f"refiner_head.{old}", f"refiner_head.{new}"
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    return tiny.to_speculators(kept, own), weights


def domino_specforge(config, weights):
    """The same drafter as SpecForge writes it."""
    return config | {"architectures": ["DominoDraftModel"]}, weights


def domino_old(config, weights):
    """The same drafter as SpecForge wrote it at first."""
    heads = ("prefix_gru.", "embed_proj.")
    named = {f"logit_head.{name}" if name.startswith(heads) else name: one for name, one in weights.items()}
    return domino_specforge(config, named)


def write(folder, config, *, to_layout=lambda *both: both, reduced=None, more=(), drop=()):
    """A random drafter. Returns its configuration and weights as the reference reads them, all rows of each.

    `reduced`: the tokens that the drafter's own head has.
    """
    generator = torch.Generator().manual_seed(8)
    names, own = (*config, *config["dflash_config"]), config["dflash_config"]
    kind = next(kind for key, kind in NAMED_BY.items() if key in names)
    plain = config | {"dflash_config": {key: own[key] for key in ("mask_token_id", "target_layer_ids")}}
    weights = make_pair.draft_weights(plain, generator) | WEIGHTS[kind](config, generator)
    stored = dict(weights)
    if reduced is not None:
        stored["xpress_head.w2.weight"] = weights["xpress_head.w2.weight"][reduced]
        stored["lm_head.weight"] = torch.randn(len(reduced), HIDDEN, generator=generator) * 0.2
        stored["d2t"] = reduced - torch.arange(len(reduced))
        weights["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
        weights["lm_head.weight"][reduced] = stored["lm_head.weight"]
    stored = {name: weight for name, weight in (stored | dict(more)).items() if name not in drop}
    written, stored = to_layout(config, stored)
    if reduced is not None:
        written["draft_vocab_size"] = len(reduced)
    write_draft(folder, written, stored)
    return config, {name: weight.double() for name, weight in weights.items()}


class Heads(Drafting):
    """A loaded pair, beside the reference's idea of it."""

    def __init__(self, target, folder, config, weights, reduced=None):
        super().__init__((target[0], folder))
        self.config, self.weights, self.reduced = config, weights, reduced
        self.embedding = target[1].get_input_embeddings().weight.detach().double()
        own = target[1].get_output_embeddings().weight.detach().double()
        self.head = weights.get("lm_head.weight", own)

    def expected(self, features, row, *, temperature=0.0, seed=0):
        """The reference's drafts after the anchor 3 + row, and those by the logits alone."""
        dflash, is_xpress = self.config["dflash_config"], "xpress_rank" in self.config
        is_shifted = self.config["sample_from_anchor"] if is_xpress else dflash.get("shift_label", False)
        config = self.config | {"dflash_config": dflash | {"sample_from_anchor": is_shifted}}
        hidden = block_hidden(self.weights, config, self.embedding, features, 3 + row)
        logits = block_logits(self.weights, config, self.embedding, self.head, features, 3 + row)
        logits = logits[: self.drafter.block - 1]
        if self.reduced is not None:
            missing = torch.ones(VOCAB, dtype=torch.bool)
            missing[self.reduced] = False
            logits[:, missing] = float("-inf")
        positions = len(features) + 1 + torch.arange(len(logits))[None]
        noise = gumbel(torch.tensor([seed]), positions, VOCAB, torch.float64)[0]

        def choose(logits, first=0):
            own = noise[first : first + len(logits)]
            return (logits / temperature + own if temperature else logits).argmax(-1)

        if "lilicorr_num_heads" in dflash:
            context = torch.zeros(HIDDEN, dtype=torch.float64)
            if len(features):
                fused = features[-1] @ self.weights["fc.weight"].T
                context = rms(fused, self.weights["hidden_norm.weight"], config["rms_norm_eps"])
            raw = hidden[1:] @ self.head.T
            drafts = lattice_walk(self.weights, config, hidden[1:], raw, context, self.embedding, choose)
        elif is_xpress:
            drafts = refined(self.weights, config, hidden, logits, 3 + row, choose)
        else:
            columns = hidden if is_shifted else hidden[1:]
            drafts = domino_walk(self.weights, config, columns, logits, 3 + row, self.embedding, choose)
        return drafts, choose(logits).tolist()

    @torch.inference_mode()
    def drafts(self, features, width, temperature=0.0):
        bench = self.absorb(features, random_chunks())
        rows = bench.rows
        for row, context in enumerate(features):
            sampling = RowSampling(temperature=temperature, seed=9 + row)
            rows.place(row, [0] * len(context) + [3 + row], len(context), sampling)
        rows.activate(range(len(features)))
        return self.drafter.draft(rows, bench.cache, bench.cache.view(rows, width), width)


AS_SPECULATORS = {"to_layout": xpress_speculators, "config": {"xpress_mlp_hidden": 12}}
XPRESS = {
    "candidates": {},
    "all tokens": {"config": {"xpress_topc": 0}},
    "all tokens by their number": {"config": {"xpress_topc": VOCAB}},
    "one pass": {"config": {"xpress_num_passes": 1}},
    "more passes than drafts": {"config": {"xpress_num_passes": 20}},
    "speculators": AS_SPECULATORS,
    "speculators from the anchor": AS_SPECULATORS
    | {"config": {"sample_from_anchor": True, "xpress_mlp_hidden": 12}},
    "reduced": AS_SPECULATORS | {"reduced": REDUCED},
    "reduced, all tokens": AS_SPECULATORS
    | {"reduced": REDUCED, "config": {"xpress_mlp_hidden": 12, "xpress_topc": 0}},
}
DOMINO = {
    "as published": {},
    "behind the anchor": {"config": {"shift_label": False}},
    "from the first draft": {"config": {"pure_draft_prefix_len": 0}},
    "behind the anchor, later": {"config": {"shift_label": False, "pure_draft_prefix_len": 3}},
    "SpecForge": {"to_layout": domino_specforge},
    "SpecForge's early names": {"to_layout": domino_old},
}
CONVS = {"conv_kernel_size": 2, "conv_group_size": 4}
LILICORR = {
    "as vLLM reads it": {},
    "of the model's size": {"config": {"lilicorr_hidden_size": 0, "lilicorr_num_heads": 4}},
    "with convolutions": {"config": CONVS},
    "scaled and capped": {"config": {"output_multiplier": 0.3, "final_logit_softcapping": 2.0}},
    "no layers": {"config": {"lilicorr_num_layers": 0}},
}
CASES = {("LiLiCorr", name): case for name, case in LILICORR.items()}
CASES |= {("XPress", name): case for name, case in XPRESS.items()}
CASES |= {("Domino", name): case for name, case in DOMINO.items()}
CONFIGS = {
    "XPress": make_pair.xpress_config,
    "Domino": make_pair.domino_config,
    "LiLiCorr": make_pair.lilicorr_config,
}
WEIGHTS = {
    "XPress": make_pair.xpress_weights,
    "Domino": make_pair.domino_weights,
    "LiLiCorr": make_pair.lilicorr_weights,
}
NAMED_BY = {"xpress_rank": "XPress", "emb_dim": "Domino", "lilicorr_num_heads": "LiLiCorr"}
DRAFTERS = {"XPress": RefinedDrafter, "Domino": ChainDrafter, "LiLiCorr": LatticeDrafter}


def heads(target, folder, kind, config=None, **files):
    written = write(folder, CONFIGS[kind](**(config or {})), **files)
    return Heads(target, folder, *written, reduced=files.get("reduced"))


@pytest.mark.parametrize(
    ("kind", "case", "temperature"),
    slow_but(
        [(*case, temperature) for case in CASES for temperature in (0.0, 0.7)],
        *((*case, (0.0, 0.7)[place % 2]) for place, case in enumerate(CASES)),
    ),
)
def test_drafts_are_those_of_the_reference(target, tmp_path, kind, case, temperature):
    one = heads(target, tmp_path, kind, **CASES[kind, case])
    assert type(one.drafter) is DRAFTERS[kind]
    assert one.drafter.model.config.kind == kind.lower()
    features, num_changed = random_features(), 0
    for width in (2, 5, one.drafter.block):
        got = one.drafts(features, width, temperature)
        for row, context in enumerate(features):
            expected, by_logits = one.expected(context, row, temperature=temperature, seed=9 + row)
            assert got[row].tolist() == [3 + row, *expected[: width - 1]]
            num_changed += expected != by_logits
    assert num_changed, "the head must matter"


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(
            ("XPress", case)
            for case in ("candidates", "all tokens", "speculators from the anchor", "reduced")
        ),
        ("Domino", "as published"),
        ("Domino", "behind the anchor, later"),
        ("LiLiCorr", "as vLLM reads it"),
        ("LiLiCorr", "with convolutions"),
    ],
)
def test_drafts_are_the_best_by_the_logits_with_hints_of_the_drafts_before(target, tmp_path, kind, case):
    """XPress's after as many passes as drafts; `blockdraft fit` relies on it."""
    config = dict(CASES[kind, case].get("config", {}))
    config |= {"xpress_num_passes": 8} if kind == "XPress" else {}
    one = heads(target, tmp_path, kind, **CASES[kind, case] | {"config": config})
    features = random_features()
    drafts = one.drafts(features, one.drafter.block)
    bench = one.absorb(features, random_chunks())
    view = bench.cache.view(bench.rows, one.drafter.num_columns)
    with torch.inference_mode():
        hidden = one.drafter.block_hidden(drafts[:, :1], view)
        hints = one.drafter.hints(hidden, drafts[:, :-1])
        logits = one.drafter.logits(one.drafter.drafting(hidden, drafts.shape[1] - 1), hints)
    assert logits.argmax(-1).tolist() == drafts[:, 1:].tolist()


def test_a_draft_of_domino_is_the_best_of_its_candidates(target, tmp_path):
    """Where all tokens are candidates, the reference's is another one."""
    one = heads(target, tmp_path, "Domino")
    one.drafter.num_candidates = 4
    features, num_changed = random_features(), 0
    bench = one.absorb(features, random_chunks())
    likeliest = one.drafter.block_logits(
        bench.rows.anchor[bench.rows.active][:, None], bench.cache.view(bench.rows, one.drafter.num_columns)
    ).topk(4)
    got = one.drafts(features, one.drafter.block)[:, 1:]
    for row, context in enumerate(features):
        assert all(
            token in found
            for token, found in zip(got[row].tolist(), likeliest.indices[row].tolist(), strict=False)
        )
        num_changed += got[row].tolist() != one.expected(context, row)[0]
    assert num_changed


@torch.inference_mode()
def test_lilicorr_knows_no_context_before_the_first_token(target, tmp_path):
    one = heads(target, tmp_path, "LiLiCorr")
    features = random_features((5,))
    bench = one.absorb(features, [[5]])
    bench.rows.length[0] = 0
    width = one.drafter.block
    got = one.drafter.draft(bench.rows, bench.cache, bench.cache.view(bench.rows, width), width)
    assert got[0].tolist() == [3, *one.expected(features[0][:0], 0)[0]]


@pytest.mark.parametrize(
    ("kind", "more", "drop", "named"),
    [
        ("XPress", {"xpress_head.mix.L": torch.zeros(6, 7, 7)}, (), "'xpress_head.mix.L' has shape"),
        ("XPress", {"xpress_head.w1.weight": torch.zeros(VOCAB, 7)}, (), "'xpress_head.w1.weight' has shape"),
        ("XPress", {}, ("xpress_head.mlp.up_proj.weight",), "no tensor 'xpress_head.mlp.up_proj.weight'"),
        ("XPress", {"xpress_head.gate.weight": torch.zeros(2, 2)}, (), "'xpress_head.gate.weight' first"),
        (
            "Domino",
            {"prefix_gru.weight_ih_l0": torch.zeros(30, 7)},
            (),
            "'prefix_gru.weight_ih_l0' has shape",
        ),
        ("Domino", {}, ("embed_proj.2.weight",), "no tensor 'embed_proj.2.weight'"),
        ("LiLiCorr", {"lilicorr.rank_embedding": torch.zeros(1, 1, 1, 5, 12)}, (), "rank_embedding' has"),
        ("LiLiCorr", {}, ("lilicorr.token_proj.bias",), "no tensor 'lilicorr.token_proj.bias'"),
        ("LiLiCorr", {"lilicorr.w_pen": torch.zeros(2)}, (), "'lilicorr.w_pen' first"),
        ("Domino", {"prefix_gru.bias_ih_l0": torch.zeros(30)}, (), "'prefix_gru.bias_ih_l0' first"),
    ],
)
def test_files_that_do_not_fit_their_configuration_are_refused_by_tensor(
    target, tmp_path, kind, more, drop, named
):
    write(tmp_path, CONFIGS[kind](), more=more, drop=drop)
    with pytest.raises(ModelError, match=named):
        load(target[0], tmp_path, dtype="float64", max_model_len=100)


def test_a_lilicorr_file_that_lacks_the_head_it_names_is_refused(target, tmp_path):
    write(tmp_path, CONFIGS["LiLiCorr"]() | {"has_own_lm_head": True})
    with pytest.raises(ModelError, match=r"no tensor 'lm_head\.weight'"):
        load(target[0], tmp_path, dtype="float64", max_model_len=100)


def needs(package, version):
    why = f"{package} is missing: pip install --no-deps {package}=={version}"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=why)


def folder_of(package):
    return Path(importlib.util.find_spec(package).origin).parent


@pytest.mark.slow
@needs("speculators", "0.9.0")
def test_the_refiner_is_that_of_speculators():
    file = folder_of("speculators") / "models" / "xpress" / "model_definitions.py"
    spec = importlib.util.spec_from_file_location("xpress_of_speculators", file)  # of torch alone
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    config = make_pair.xpress_config(xpress_mlp_hidden=12)
    weights = make_pair.xpress_weights(config, torch.Generator().manual_seed(8))
    _, renamed = xpress_speculators(config, weights)
    theirs = module.XPressRefinerHead(
        verifier_vocab_size=VOCAB, draft_vocab_size=VOCAB, hidden_size=HIDDEN, block_size=8, rank=6
    )
    theirs.load_state_dict({name.removeprefix("refiner_head."): one for name, one in renamed.items()})
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 8, HIDDEN, generator=generator)
    before = torch.randint(VOCAB, (2, 8), generator=generator)
    bias = theirs.block_bias(before, hidden)
    for row in range(2):
        ours = refiner_bias(weights, hidden[row], before[row])
        torch.testing.assert_close(ours, bias[row], rtol=0, atol=1e-4)


@pytest.fixture
def specforge_domino(monkeypatch):
    """SpecForge's drafter, of the files that need transformers alone."""
    folder = folder_of("specforge")
    for name in ("specforge", "specforge.modeling", "specforge.modeling.draft", "specforge.utils"):
        monkeypatch.setitem(sys.modules, name, part := types.ModuleType(name))
        part.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    part.get_device_type = lambda: "cpu"
    yield importlib.import_module("specforge.modeling.draft.domino").DominoDraftModel
    for name in [name for name in sys.modules if name.startswith("specforge.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow
@needs("specforge", "0.2.0")
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("num_plain", [0, 1, 3])
@torch.inference_mode()
def test_drafts_of_domino_are_those_of_specforge(target, tmp_path, specforge_domino, shift, num_plain):
    config = {"shift_label": shift, "pure_draft_prefix_len": num_plain}
    one = heads(target, tmp_path, "Domino", config, to_layout=domino_specforge)
    raw = {key: value for key, value in one.config.items() if key != "architectures"}
    theirs = specforge_domino(Qwen3Config(**raw, attn_implementation="eager")).double().eval()
    theirs.load_state_dict(one.weights)
    model, features, block = copy.deepcopy(target[1]).double(), random_features(), one.drafter.block
    got = one.drafts(features, block)[:, 1:]
    for row, context in enumerate(features):
        ids = torch.tensor([[3 + row, *[raw["dflash_config"]["mask_token_id"]] * (block - 1)]])
        hidden = theirs(
            noise_embedding=model.model.embed_tokens(ids),
            target_hidden=context[None],
            position_ids=torch.arange(len(context) + block)[None],
        )
        expected = theirs._sample_draft_tokens(model, hidden, ids)
        assert got[row].tolist() == expected[0].tolist()
