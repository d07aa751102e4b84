"""References of experts in float64, transcribed from Megatron-Core 0.19.2 without torch; writes balancing.json. Quantile
balancing: qb_dual_update (moe_utils.py) and _update_router_qb_beta (finalize_model_grads.py); biases here are
-qb_beta, which is added to logits. The scales of upcycled experts: upcycling_utils.py. The normal numbers that
replace logits with --moe-router-force-load-balancing: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3"), then Box and Muller. Run in this folder: python3 balancing.py"""

import json
import math
import random


def dual_update(scores, k, beta):
    """The chosen experts of each token, greatest first, and the quantile of each expert."""
    tokens, experts = len(scores), len(beta)
    assert tokens * k % experts == 0
    indices, alpha = [], []
    for row in scores:
        order = sorted(range(experts), key=lambda e: (-(row[e] - beta[e]), e))
        indices.append(order[:k])
        alpha.append(row[order[k]] - beta[order[k]])
    target = tokens * k // experts
    columns = [sorted((scores[t][e] - alpha[t] for t in range(tokens)), reverse=True) for e in range(experts)]
    return indices, [column[target] for column in columns]


def step(beta, quantiles, ema):
    """The bias after a step, from the quantiles of its micro-batches."""
    mean = [sum(q[e] for q in quantiles) / len(quantiles) for e in range(len(beta))]
    new = [ema * b + (1 - ema) * m for b, m in zip(beta, mean)]
    return [b - sum(new) / len(new) for b in new]


def case(experts, k, tokens, ema, seed):
    draw = random.Random(seed)
    beta = [draw.randrange(-64, 64) / 64 for _ in range(experts)]
    batches = [[[draw.randrange(-(1 << 16), 1 << 16) / (1 << 14) + 2 * (e == 0) for e in range(experts)]
                for _ in range(tokens)] for _ in range(2)]
    results = [dual_update(batch, k, beta) for batch in batches]
    return {
        "E": experts, "k": k, "T": tokens, "ema": ema, "bias": [-b for b in beta],
        "micro_batches": [{"logits": sum(batch, []), "experts": sum(indices, []), "quantiles": quantiles}
                          for batch, (indices, quantiles) in zip(batches, results)],
        "after": [-b for b in step(beta, [q for _, q in results], ema)],
    }


def philox(key, low, high):
    k = [key & 0xFFFFFFFF, key >> 32]
    c = [low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF, high >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def normals(words):
    result = []
    for i in (0, 2):
        radius = math.sqrt(-2 * math.log((words[i] + 0.5) / 2**32))
        angle = 2 * math.pi * (words[i + 1] + 0.5) / 2**32
        result += [radius * math.cos(angle), radius * math.sin(angle)]
    return result


def draws(key, tokens, experts):
    rows = [sum((normals(philox(key, t, counter)) for counter in range((experts + 3) // 4)), [])[:experts]
            for t in tokens]
    return {"key": str(key), "token_index": tokens, "E": experts, "logits": sum(rows, [])}


def upcycling_scale(gated, squared_relu, pre_softmax, experts, granularity, topk):
    """_get_weight_scale of upcycling_utils.py."""
    expansion_rate = experts // granularity
    scale = expansion_rate * granularity * granularity / topk if pre_softmax else granularity
    return scale ** (1 / 3) if gated or squared_relu else scale ** (1 / 2)


if __name__ == "__main__":
    cases = [case(8, 2, 24, 0.0, 1), case(6, 3, 10, 0.25, 2), case(5, 1, 35, 0.9, 3), case(16, 4, 64, 0.0, 4)]
    with open("balancing.json", "w") as file:
        sizes = [(8, 1, 2), (8, 2, 2), (8, 2, 4), (64, 8, 8)]
        scales = [{"activation": name, "pre_softmax": pre, "E": e, "G": g, "k": k,
                   "scale": upcycling_scale(name == "swiglu", name == "squared-relu", pre, e, g, k)}
                  for name in ("swiglu", "squared-relu", "gelu") for pre in (False, True) for e, g, k in sizes]
        drawn = draws(0x123456789ABCDEF, [0, 1, 77, 5000000000], 10)
        json.dump({"upcycling": scales, "quantiles": cases, "draws": drawn}, file)
        file.write("\n")
