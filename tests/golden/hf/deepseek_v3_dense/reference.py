#!/usr/bin/env python3
"""The numbers of tests/golden/hf/deepseek_v3_dense and deepseek_v3_no_q_latent: DeepSeek-V3's attention with dense
MLPs, in float64 and by automatic differentiation, independent of this program. It first proves itself on
../deepseek_v3, whose numbers are those of transformers. Needs jax and numpy.

  usage: deepseek_v3_dense/reference.py        (in tests/golden/hf; writes both folders)
"""
import json, os, struct, sys
import numpy as np
import jax, jax.numpy as jnp

jax.config.update("jax_enable_x64", True)
STEPS, BATCH, SEQ = 10, 4, 32


def read_safetensors(path):
    raw = open(path, "rb").read()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    tensors = {}
    for name, t in header.items():
        if name != "__metadata__":
            a, b = t["data_offsets"]
            tensors[name] = np.frombuffer(raw[8 + size + a:8 + size + b], np.float32).reshape(t["shape"])
    return tensors


def write_safetensors(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        n = tensors[name].size * 4
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            f.write(np.ascontiguousarray(tensors[name], np.float32).tobytes())


def norm(x, w, eps):
    return w * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def rope_tables(c, positions):
    """cos, sin [T, R / 2], and what multiplies the softmax's scale; YaRN as transformers' _compute_yarn_parameters."""
    p, R = c["rope_parameters"], c["qk_rope_head_dim"]
    base = p["rope_theta"]
    frequency = base ** (-np.arange(0, R, 2) / R)
    amplitude = sharpening = 1.0
    if p["rope_type"] == "yarn":
        factor, original = p["factor"], p["original_max_position_embeddings"]
        g = lambda m: 1.0 if factor <= 1 else 0.1 * m * np.log(factor) + 1
        edge = lambda turns: R * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base))
        low, high = max(np.floor(edge(p["beta_fast"])), 0), min(np.ceil(edge(p["beta_slow"])), R - 1)
        if low == high: high += 0.001
        ramp = np.clip((np.arange(R // 2) - low) / (high - low), 0, 1)
        frequency = frequency / factor * ramp + frequency * (1 - ramp)
        amplitude, sharpening = g(p["mscale"]) / g(p["mscale_all_dim"]), g(p["mscale_all_dim"]) ** 2
    angles = positions[:, None] * frequency
    return amplitude * np.cos(angles), amplitude * np.sin(angles), sharpening


def turn(x, cos, sin, interleaved):  # [B, T, H, R]; as transformers: even channels first, then odd ones
    if interleaved: x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1)
    a, b = jnp.split(x, 2, -1)
    c, s = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


def attention(c, w, x):
    B, T, _ = x.shape
    H, N, R, V = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank = c["kv_lora_rank"]
    cos, sin, sharpening = rope_tables(c, np.arange(T))
    if c["q_lora_rank"]:
        q = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6) @ w["q_b_proj.weight"].T
    else:
        q = x @ w["q_proj.weight"].T
    q = q.reshape(B, T, H, N + R)
    latent = x @ w["kv_a_proj_with_mqa.weight"].T
    kv = norm(latent[..., :rank], w["kv_a_layernorm.weight"], 1e-6) @ w["kv_b_proj.weight"].T
    kv = kv.reshape(B, T, H, N + V)
    k_rope = turn(latent[..., None, rank:], cos, sin, c["rope_interleave"])
    q_rope = turn(q[..., N:], cos, sin, c["rope_interleave"])
    scores = jnp.einsum("bihd,bjhd->bhij", q[..., :N], kv[..., :N])
    scores += jnp.einsum("bihd,bjd->bhij", q_rope, k_rope[:, :, 0])
    scores = scores * sharpening / np.sqrt(N + R) + np.triu(np.full((T, T), -1e30), 1)
    out = jnp.einsum("bhij,bjhv->bihv", jax.nn.softmax(scores, -1), kv[..., N:])
    return out.reshape(B, T, H * V) @ w["o_proj.weight"].T


def mlp(w, x):
    return (jax.nn.silu(x @ w["gate_proj.weight"].T) * (x @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T


def within(w, prefix):
    return {name[len(prefix):]: value for name, value in w.items() if name.startswith(prefix)}


def experts(c, w, x):
    scores = jax.nn.sigmoid(x @ w["gate.weight"].T)
    choice = scores + w["gate.e_score_correction_bias"]
    E, G = c["n_routed_experts"], c["n_group"]
    groups = choice.reshape(*choice.shape[:-1], G, E // G)
    best = jnp.sum(jax.lax.top_k(groups, 2)[0], -1)
    worst = jax.lax.top_k(best, c["topk_group"])[0][..., -1:]
    choice = jnp.where(jnp.repeat(best >= worst, E // G, -1), choice, -jnp.inf)
    chosen = jax.lax.top_k(choice, c["num_experts_per_tok"])[1]
    weights = jnp.take_along_axis(scores, chosen, -1)
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) * c["routed_scaling_factor"]
    out = mlp(within(w, "shared_experts."), x)
    for e in range(E):
        share = jnp.sum(jnp.where(chosen == e, weights, 0), -1, keepdims=True)
        if "experts.%d.gate_proj.weight" % e in w:
            out += share * mlp(within(w, "experts.%d." % e), x)
    return out


def logits_of(c, w, tokens):
    eps = c["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        l = within(w, "model.layers.%d." % i)
        x = x + attention(c, within(l, "self_attn."), norm(x, l["input_layernorm.weight"], eps))
        y = norm(x, l["post_attention_layernorm.weight"], eps)
        dense = i < c["first_k_dense_replace"]
        x = x + (mlp(within(l, "mlp."), y) if dense else experts(c, within(l, "mlp."), y))
    return norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def loss_of(c, w, rows):
    logprobs = jax.nn.log_softmax(logits_of(c, w, rows[:, :-1]), -1)
    return -jnp.mean(jnp.take_along_axis(logprobs, rows[:, 1:, None], -1))


def first_step(c, w, rows):
    logits = logits_of(c, w, rows[:, :-1])
    logprobs = jax.nn.log_softmax(logits, -1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
    return logits, jnp.take_along_axis(logprobs, rows[:, 1:, None], -1)[..., 0], entropy


def train(c, w, tokens):
    """Ten AdamW steps with clipping: losses, norms, and the first step's gradients."""
    fixed = {k: x for k, x in w.items() if k.endswith("e_score_correction_bias")}
    w = {k: x for k, x in w.items() if k not in fixed}
    step = jax.jit(jax.value_and_grad(lambda w, rows: loss_of(c, w | fixed, rows)))
    lr, beta1, beta2, eps, decay, clip = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0
    m, v = ({k: 0 * x for k, x in w.items()} for _ in range(2))
    losses, norms, grads0 = [], [], None
    for i in range(STEPS):
        loss, g = step(w, tokens[i])
        grads0 = grads0 or g
        n = float(jnp.sqrt(sum(jnp.sum(x * x) for x in g.values())))
        losses.append(float(loss)), norms.append(n)
        scale = min(1.0, clip / (n + 1e-6))
        for k in w:
            m[k] = beta1 * m[k] + (1 - beta1) * g[k] * scale
            v[k] = beta2 * v[k] + (1 - beta2) * (g[k] * scale) ** 2
            mean, var = m[k] / (1 - beta1 ** (i + 1)), v[k] / (1 - beta2 ** (i + 1))
            w = w | {k: w[k] - lr * (mean / (jnp.sqrt(var) + eps) + (decay * w[k] if w[k].ndim > 1 else 0))}
    return losses, norms, grads0


def greedy(c, w, prompt, count):
    ids, margin = list(map(int, prompt)), np.inf
    run = jax.jit(lambda tokens: logits_of(c, w, tokens))
    for _ in range(count):
        padded = np.zeros((1, len(prompt) + count), np.int64)
        padded[0, :len(ids)] = ids
        row = np.array(run(padded)[0, len(ids) - 1])
        best = np.sort(row)[-2:]
        margin = min(margin, best[1] - best[0])
        ids.append(int(row.argmax()))
    return ids, float(margin)


def double(w):
    return {k: jnp.asarray(x, jnp.float64) for k, x in w.items()}


def prove(folder):
    c = json.load(open(folder + "/config.json"))
    w = double(read_safetensors(folder + "/model.safetensors"))
    tokens = np.fromfile(folder + "/tokens.i32", np.int32).reshape(STEPS, BATCH, SEQ + 1)
    expected = json.load(open(folder + "/expected.json"))
    logits, _, _ = first_step(c, w, tokens[0])
    golden = np.fromfile(folder + "/logits.f32", np.float32).reshape(logits.shape)
    theirs = read_safetensors(folder + "/grads/model.safetensors")
    losses, norms, g = train(c, w, tokens)
    away = {"logits": np.abs(logits - golden).max(),
            "gradients": max(float(np.linalg.norm(g[k] - theirs[k]) / np.linalg.norm(theirs[k])) for k in g),
            "losses": np.abs(np.array(losses) / expected["losses"] - 1).max(),
            "gradient norms": np.abs(np.array(norms) / expected["grad_norms"] - 1).max()}
    print(folder + ": off by", ", ".join("%s %.1e" % x for x in away.items()))
    assert max(away.values()) < 1e-6


def make(folder, c, seed):
    random = np.random.RandomState(seed)
    C, F, V, H = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["num_attention_heads"]
    N, R, Dv, q, kv = (c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"))
    shapes = {"model.embed_tokens.weight": (V, C), "model.norm.weight": (C,), "lm_head.weight": (V, C)}
    for i in range(c["num_hidden_layers"]):
        p = "model.layers.%d." % i
        a = p + "self_attn."
        if q:
            shapes |= {a + "q_a_proj.weight": (q, C), a + "q_a_layernorm.weight": (q,), a + "q_b_proj.weight": (H * (N + R), q)}
        else:
            shapes |= {a + "q_proj.weight": (H * (N + R), C)}
        shapes |= {a + "kv_a_proj_with_mqa.weight": (kv + R, C), a + "kv_a_layernorm.weight": (kv,),
                   a + "kv_b_proj.weight": (H * (N + Dv), kv), a + "o_proj.weight": (C, H * Dv),
                   p + "input_layernorm.weight": (C,), p + "post_attention_layernorm.weight": (C,),
                   p + "mlp.gate_proj.weight": (F, C), p + "mlp.up_proj.weight": (F, C), p + "mlp.down_proj.weight": (C, F)}
    w = {k: (random.randn(*s) * 0.2 + (len(s) == 1)).astype(np.float32) for k, s in sorted(shapes.items())}
    tokens = random.randint(0, V, (STEPS, BATCH, SEQ + 1)).astype(np.int32)
    wide = double(w)
    logits, logprobs, entropy = first_step(c, wide, tokens[0])
    losses, norms, grads = train(c, wide, tokens)
    ids, margin = greedy(c, wide, tokens[0, 0, :8], 24)
    os.makedirs(folder + "/grads", exist_ok=True)
    open(folder + "/config.json", "w").write(json.dumps(c, indent=2, sort_keys=True) + "\n")
    write_safetensors(folder + "/model.safetensors", w)
    write_safetensors(folder + "/grads/model.safetensors", {k: np.asarray(x) for k, x in grads.items()})
    tokens.tofile(folder + "/tokens.i32")
    for name, x in (("logits", logits), ("logprobs", logprobs), ("entropy", entropy)):
        np.asarray(x, np.float32).tofile("%s/%s.f32" % (folder, name))
    expected = {"family": os.path.basename(folder), "batch": BATCH, "seq": SEQ, "steps": STEPS, "vocab": V,
                "params": sum(x.size for x in w.values()), "losses": losses, "grad_norms": norms, "greedy_ids": ids,
                "greedy_min_margin": margin}
    open(folder + "/expected.json", "w").write(json.dumps(expected, indent=1) + "\n")
    print(folder, losses[0], losses[-1], norms[0], "margin", margin)


COMMON = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
          "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "dtype": "float32", "hidden_act": "silu",
          "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True, "max_position_embeddings": 64}
DENSE = COMMON | {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "first_k_dense_replace": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "qk_head_dim": 10, "head_dim": 4, "v_head_dim": 7, "rms_norm_eps": 1e-5, "rope_interleave": True,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "mscale": 0.7, "mscale_all_dim": 1.2, "original_max_position_embeddings": 16}}
NO_Q_LATENT = COMMON | {
    "vocab_size": 48, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "first_k_dense_replace": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6, "qk_head_dim": 10, "head_dim": 6, "v_head_dim": 8, "rms_norm_eps": 1e-6,
    "rope_interleave": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

if __name__ == "__main__":
    prove("deepseek_v3")
    make("deepseek_v3_dense", DENSE, 1)
    make("deepseek_v3_no_q_latent", NO_Q_LATENT, 2)
