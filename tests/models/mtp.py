"""Tiny hybrids with an MTP head, and the head as transformers' own layers compute it.

transformers has no class for the head. How its parts go together is in vLLM's qwen3_next_mtp.py and
qwen3_5_mtp.py.
"""

import copy
import json

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.checkpoints import randomise, write_target
from tests.models.families import BASE, CASES, CONFIGS, FULL

FAINT = ("o_proj", "out_proj", "down_proj")  # the last projections before the residual stream


class MtpReference(nn.Module):
    """The head of the transformers model `hf`: it computes all pairs of a text at once, without a cache."""

    def __init__(self, hf):
        super().__init__()
        config = copy.deepcopy(hf.config)
        config.layer_types = [FULL]
        layer = type(hf.model.layers[0])
        norm = type(hf.model.norm)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.pre_fc_norm_embedding = norm(size, eps=eps)
        self.pre_fc_norm_hidden = norm(size, eps=eps)
        self.norm = norm(size, eps=eps)
        self._target = [hf]  # not a part of this module

    def hidden(self, before, token_ids):
        """Hidden states [L, E] after pairs of hidden states `before` [L, E] and the tokens after them."""
        hf, length = self._target[0].model, len(token_ids)
        parts = (self.pre_fc_norm_embedding(hf.embed_tokens(token_ids)), self.pre_fc_norm_hidden(before))
        x = self.fc(torch.cat(parts, dim=-1))[None]
        places = torch.arange(length)[None]
        angles = hf.rotary_emb(x, places)
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        y = self.layers[0](x, position_embeddings=angles, attention_mask=mask, position_ids=places)
        return self.norm(y)[0]

    @torch.no_grad()
    def logits(self, token_ids, drafts):
        """Logits [D, V] that `drafts`, which follow `token_ids`, are chosen from."""
        hf = self._target[0]
        before, text, logits = hf.model(token_ids[None]).last_hidden_state[0, :-1], token_ids, []
        for draft in drafts:
            after = self.hidden(before, text[1:])
            logits.append(hf.lm_head(after[-1]))
            text = torch.cat((text, torch.tensor([draft])))
            before = torch.cat((before, after[-1:]))
        return torch.stack(logits)


def write_mtp_target(folder, name, seed=1, **changes):
    """Save a configuration of tests/models/families.py with a head; returns both as transformers' modules.

    The target says little more than its embedding does, and its head nearly the same: so drafts are often
    right.
    """
    family, overrides = CASES[name]
    hf = write_target(folder, CONFIGS[family](**BASE | overrides | changes), seed)
    head = MtpReference(hf)
    randomise(head, seed + 1)
    size = hf.config.hidden_size
    with torch.no_grad():
        for part, weight in (*hf.named_parameters(), *head.named_parameters()):
            if any(name in part for name in FAINT):
                weight.mul_(0.15)
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, :size] += torch.eye(size)
        head.norm.weight.copy_(hf.model.norm.weight)
    hf.save_pretrained(folder)
    put_head(folder, head)
    return hf, head


def put_head(folder, head, rename=lambda name: f"mtp.{name}"):
    """Add the head's tensors to a saved target."""
    file = folder / "model.safetensors"
    tensors = {rename(name): weight.detach().contiguous() for name, weight in head.state_dict().items()}
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def change_tensors(folder, change):
    """Rewrite the tensors of a saved target."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@torch.inference_mode()
def drafted(engine, width, monkeypatch):
    """Drafts of all decoding rows and the logits [R, width - 1, V] that they were chosen from."""
    seen, target = [], engine.models.target
    logits = target.logits
    sequences = [one for one in engine.scheduler.running if one.is_decoding and one.num_placed_pages]
    if not sequences:
        return [], [], []
    engine.rows.activate([one.row for one in sequences])
    with monkeypatch.context() as patch:
        patch.setattr(target, "logits", lambda hidden: seen.append(logits(hidden)) or seen[-1])
        view = engine.cache.view(engine.rows, width)
        block = engine.models.drafter.draft(engine.rows, engine.cache, view, width)
    return sequences, block[:, 1:].tolist(), torch.stack(seen, dim=1)


def assert_drafts_of_reference(engine, head, monkeypatch, *, width=5):
    """Compare the next drafts of every decoding row; returns the number of rows."""
    sequences, drafts, logits = drafted(engine, width, monkeypatch)
    for sequence, mine, its in zip(sequences, drafts, logits, strict=True):
        if len(sequence.token_ids) == 1:
            continue  # no pair: the drafts are arbitrary
        expected = head.logits(torch.tensor(sequence.token_ids), mine)
        torch.testing.assert_close(its, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
        if not sequence.sampling.is_random:
            assert mine == expected.argmax(dim=-1).tolist()
    return len(sequences)
