"""Independent drafters of every kind: the dossier's equations, once more: no cache, no pages, no rows.

Weights are read by their checkpoint names; nothing of the package is used. Also the trainer of the fixture.
"""

import torch
from torch.nn import functional as F


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x, positions, theta):
    """x [T, heads, dim] rotated at absolute positions [T], halves paired."""
    dim = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = (positions.to(torch.float32)[:, None] * inverse)[:, None]
    cos = torch.cat([angle.cos(), angle.cos()], -1).to(x.dtype)
    sin = torch.cat([angle.sin(), angle.sin()], -1).to(x.dtype)
    turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
    return x * cos + turned * sin


def projected(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def visible(num_context, block, *, causal, window, anchored=False):
    """[block, num_context + block]: which keys each block row sees; the anchor is at num_context."""
    query = num_context + torch.arange(block)[:, None]
    key = torch.arange(num_context + block)[None]
    seen = (key <= query) if causal else (key < num_context + block).expand(block, -1)
    if window is None:
        return seen
    if anchored:
        return seen & (key >= num_context - window)
    return seen & ((query - key).abs() < window)


def convolved(x, base, delta):
    """x [block, E] by base [taps, E] and delta [block, taps, groups], column by column."""
    block, size = x.shape
    taps, groups = delta.shape[1:]
    group = torch.arange(size) // (size // groups)
    rows = []
    for t in range(block):
        row = torch.zeros_like(x[0])
        for i in range(taps):
            if t - i >= 0:  # nothing comes before the block
                row = row + (base[i] + delta[t, i][group]) * x[t - i]
        rows.append(row)
    return torch.stack(rows)


def around(w, conv, normed):
    """The two convolutions of a DFlash2 sublayer, given its normed input; nothing where there are none."""
    if f"{conv}.base_kernel" not in w:
        return lambda x: x, lambda x: x
    base = w[f"{conv}.base_kernel"]
    delta = (normed @ w[f"{conv}.kernel_projection.weight"].T).view(len(normed), 2, base.shape[1], -1)
    return (lambda x: convolved(x, base[0], delta[:, 0])), (lambda x: convolved(x, base[1], delta[:, 1]))


def block_logits(weights, config, embedding, head, features, anchor, masks=None):
    """Logits for one sequence: [block - 1, V], or [block, V] where rows predict the next position.

    features [C, taps * E] belong to positions 0 … C - 1; the anchor sits at position C.
    """
    dflash = config | config["dflash_config"]
    first = 0 if dflash.get("sample_from_anchor") else 1
    hidden = block_hidden(weights, config, embedding, features, anchor, masks)[first:]
    logits = hidden @ head.T * dflash.get("output_multiplier", 1.0)
    cap = dflash.get("final_logit_softcapping")
    return logits if not cap else torch.tanh(logits / cap) * cap


def block_hidden(weights, config, embedding, features, anchor, masks=None):
    """Hidden states [block, E] of [anchor, mask, mask, …], after the last norm."""
    dflash = config | config["dflash_config"]
    block, eps = config["block_size"], config["rms_norm_eps"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim, theta = config["head_dim"], config["rope_theta"]
    count = features.shape[0]
    ids = torch.cat([torch.as_tensor(anchor).view(1), torch.full((block - 1,), dflash["mask_token_id"])])
    x = embedding[ids] * dflash.get("input_embedding_scale", 1.0)
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    positions = torch.arange(count + block)
    for layer in range(config["num_hidden_layers"]):
        w = {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"layers.{layer}.")}
        h = rms(x, w["input_layernorm.weight"], eps)
        before, after = around(w, "attention_conv", h)
        h = before(h)
        both = torch.cat([context, h])
        q = rms(
            projected(w, "self_attn.q_proj", h).view(block, heads, dim),
            w["self_attn.q_norm.weight"],
            eps,
        )
        k = rms(
            projected(w, "self_attn.k_proj", both).view(-1, groups, dim),
            w["self_attn.k_norm.weight"],
            eps,
        )
        v = projected(w, "self_attn.v_proj", both).view(-1, groups, dim)
        q, k = rope(q, positions[count:], theta), rope(k, positions, theta)
        k = k.repeat_interleave(heads // groups, dim=1)
        v = v.repeat_interleave(heads // groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        seen = visible(count, block, causal=False, window=None) if masks is None else masks[layer](count)
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", p, v).reshape(block, -1)
        x = x + after(projected(w, "self_attn.o_proj", attended))
        h = rms(x, w["post_attention_layernorm.weight"], eps)
        before, after = around(w, "mlp_conv", h)
        h = before(h)
        inner = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
        x = x + after(inner @ w["mlp.down_proj.weight"].T)
    return rms(x, weights["norm.weight"], eps)


def pair_walk(
    weights, logits, hidden, anchor, top_k, temperature=0.0, noise=None, *, skips_first=False
):  # fmt: skip
    """DFlash2's drafts for one block: logits [block - 1, V], hidden [block - 1, E], noise [block - 1, V]."""
    a, b = (weights[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor"))
    mixture = hidden @ weights["candidate_selector.hidden_projection.weight"].T
    drafts, before, scale = [], int(anchor), 1 / temperature if temperature > 0 else 1.0
    worth = logits * scale + noise if temperature > 0 else logits  # no filters: the noise has its say at once
    for column, scores in enumerate(worth):
        best = sorted(range(len(scores)), key=lambda token: (-float(scores[token]), token))[:top_k]
        found = {}
        for token in best:
            pair = 0.0 if skips_first and column == 0 else (a[before] * mixture[column] * b[token]).sum()
            found[token] = float(scores[token] + pair * scale)
        before = min(found, key=lambda token: (-found[token], token))
        drafts.append(before)
    return drafts


def markov_walk(weights, logits, anchor):
    """DSpark's greedy walk over one sequence: drafts [N], and the logits [N, V] that each was chosen by.

    logits [N, V] are those of the N predictions; the first follows the anchor.
    """
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    before, drafts, biased = int(anchor), [], []
    for row in logits:
        biased.append(row + w2 @ w1[before])
        before = int(biased[-1].argmax())
        drafts.append(before)
    return torch.tensor(drafts), torch.stack(biased)


def refiner_bias(weights, hidden, before):
    """XPress's biases [C, V] for the first C columns of a block, given hidden [block, E] and `before` [C]."""
    w = {name.removeprefix("xpress_head."): one for name, one in weights.items()}
    mean = hidden.mean(0) @ w["down_g.weight"].T
    inputs = [
        w["in_proj.weight"] @ torch.cat([w["down_h.weight"] @ h, mean, w["w1.weight"][token]])
        for h, token in zip(hidden, before, strict=False)
    ]
    rows = []
    for column, x in enumerate(inputs):
        mixed = x + sum(w["mix.L"][:, column, j] * inputs[j] for j in range(column + 1))
        inner = F.silu(w["mlp.gate_proj.weight"] @ mixed) * (w["mlp.up_proj.weight"] @ mixed)
        rows.append(w["w2.weight"] @ (mixed + w["mlp.down_proj.weight"] @ inner))
    return torch.stack(rows)


def refined(weights, config, hidden, logits, anchor, choose):
    """XPress's drafts [D] for one block: hidden [block, E], logits [D, V].

    choose(logits, first=0) gives the tokens of drafts `first`, `first` + 1, … After the first choice, logits
    of tokens that are no candidates are -inf.
    """
    is_shifted, top_k = config["sample_from_anchor"], config["xpress_topc"] or logits.shape[1]
    least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
    kept = logits.masked_fill(logits < least, float("-inf"))
    drafts = choose(logits).tolist()
    for _ in range(config["xpress_num_passes"]):
        block = [anchor, *drafts]
        bias = refiner_bias(weights, hidden, block[:-1] if is_shifted else [anchor, *block[:-1]])
        drafts = choose(kept + (bias if is_shifted else bias[1:])).tolist()
    return drafts


def domino_walk(weights, config, hidden, logits, anchor, embedding, choose):
    """Domino's drafts [D] for one block, by PyTorch's own GRU: hidden [D, E], logits [D, V]."""
    dflash, size = config["dflash_config"], hidden.shape[1]
    gru = torch.nn.GRU(size, dflash["gru_hidden_dim"], batch_first=True, bias=False, dtype=hidden.dtype)
    gru.load_state_dict({name: weights[f"prefix_gru.{name}"] for name, _ in gru.named_parameters()})
    drafts = []
    for draft, row in enumerate(logits):
        with torch.no_grad():
            states, _ = gru(embedding[[anchor, *drafts]][None])
        features = torch.cat([hidden[draft], states[0, -1]])
        bias = weights["embed_proj.2.weight"] @ F.silu(weights["embed_proj.0.weight"] @ features)
        row = row if draft < dflash["pure_draft_prefix_len"] else row + bias
        drafts.append(int(choose(row[None], draft)))
    return drafts


def lattice_scores(weights, config, hidden, logits, context, embedding):
    """LiLiCorr's candidates [D, K], likeliest first, and their scores [D, K before, K] for one block.

    hidden [D, E] and logits [D, V] are of the drafting columns; context [E] is 0 before the first token.
    """
    w = {name.removeprefix("lilicorr."): one for name, one in weights.items()}
    own = {k.removeprefix("lilicorr_"): v for k, v in config["dflash_config"].items()}
    eps, block, num, top_k = config["rms_norm_eps"], config["block_size"], len(logits), own["candidate_topk"]
    size = w["slot_embedding"].shape[-1]

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def mlp(name, x):
        return linear(f"{name}.down_proj", F.silu(linear(f"{name}.up_proj", x)))

    ids = logits.topk(top_k).indices
    log_p = logits.log_softmax(-1).gather(1, ids)
    states = []
    for slot in range(num):
        for rank in range(top_k):
            p = log_p[slot, rank]
            told = torch.stack([p, p.exp(), p - log_p[slot, 0], p.new_tensor(rank / (top_k - 1))])
            told = torch.cat([told, p.new_tensor([float(rank == 0)])])
            told = F.layer_norm(told, (5,), w["feature_norm.weight"], w["feature_norm.bias"])
            token = embedding[ids[slot, rank]]
            token = linear("token_proj", token) if "token_proj.weight" in w else token
            state = token + linear("pass_hidden_proj", hidden[slot]) + mlp("feature_mlp", told)
            states.append(state + w["slot_embedding"][0, 0, slot, 0] + w["rank_embedding"][0, 0, 0, rank])
    x, slots = torch.stack(states), torch.arange(num * top_k) // top_k
    apart = slots[:, None] - slots
    bias = w["relative_slot_bias"][:, apart + block - 1] + w["same_slot_bias"][:, None, None] * (apart == 0)
    for layer in range(own["num_layers"]):
        name = f"layers.{layer}."
        attention = torch.nn.MultiheadAttention(size, own["num_heads"], batch_first=True, dtype=x.dtype)
        attention.load_state_dict(
            {k.removeprefix(name + "attn."): v for k, v in w.items() if k.startswith(name + "attn.")}
        )
        h = rms(x, w[name + "attn_norm.weight"], eps)[None]
        with torch.no_grad():
            x = x + attention(h, h, h, attn_mask=bias, need_weights=False)[0][0]
        x = x + mlp(name + "mlp", rms(x, w[name + "mlp_norm.weight"], eps))
    x = rms(x, w["output_norm.weight"], eps)
    anchor = linear("context_proj", context) if context.any() else torch.zeros(size, dtype=x.dtype)
    anchor = rms(anchor, w["anchor_norm.weight"], eps)
    joined = F.silu(linear("factor_input_proj", torch.cat([x, anchor.expand_as(x), x * anchor], -1)))

    def unit(x):
        return x / x.norm(dim=-1, keepdim=True).clamp(min=own["vector_eps"])

    after, before = (unit(linear(part, joined)).view(num, top_k, -1) for part in ("out_head", "in_head"))
    first = unit(linear("anchor_out_head", anchor)).expand(1, top_k, -1)
    return ids, own["logit_scale"] * torch.einsum("sif,sjf->sij", torch.cat([first, after[:-1]]), before)


def lattice_walk(weights, config, hidden, logits, context, embedding, choose):
    """LiLiCorr's drafts [D] for one block; see lattice_scores."""
    ids, scores = lattice_scores(weights, config, hidden, logits, context, embedding)
    drafts, place = [], 0
    for draft, found in enumerate(ids):
        row = torch.full_like(logits[:1], float("-inf"))
        row[0, found] = scores[draft, place]
        drafts.append(int(choose(row, draft)))
        place = found.tolist().index(drafts[-1])
    return drafts
