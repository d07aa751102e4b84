#!/bin/sh
# A surprise about transformers' DeepSeek-V3.2: with few heads in the indexer, greedy generation with a cache and
# without one writes different texts, in float64.
#
#   A good guess:  a cache saves work; in float64 the logits of a token differ by 1e-15, and greedy texts are the same.
#   What happens:  a score of the indexer is a sum over its heads of products cut below zero. With two heads the scores
#                  of many keys are exactly 0, and torch.topk gives equal scores an order of its own, which depends on
#                  how many rows and keys it sees: a step of generation and a whole text choose other keys of them. With
#                  the 64 heads of released models no scores are equal, and the two agree. So a small model for tests
#                  needs many heads in its indexer, or has no right answer.
#
# usage: findings/sparse_attention_breaks_ties_by_the_number_of_keys.sh   (python3 with venv and pip, a connection;
#        some minutes)
# Output seen:
#   transformers 5.23.0, torch 2.15.0
#   2 heads: same text False, largest difference of a logit over 1e-3 True
#   64 heads: same text True, largest difference of a logit over 1e-3 False
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/ties.py" <<'PYTHON'
import torch
import transformers
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

print(f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}")
for heads in (2, 64):
    torch.manual_seed(0)
    config = DeepseekV32Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        n_group=1, topk_group=1, first_k_dense_replace=3, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, index_topk=4, index_n_heads=heads, index_head_dim=16,
        max_position_embeddings=128, initializer_range=0.3)
    model = DeepseekV32ForCausalLM(config).double().eval()
    tokens = torch.arange(3, 15)[None]
    texts = [model.generate(tokens, max_new_tokens=24, do_sample=False, use_cache=cache, eos_token_id=None,
                            pad_token_id=0)[0].tolist() for cache in (True, False)]
    with torch.no_grad():
        whole = model(tokens).logits[0, -1]
        cache = model(tokens[:, :-1], use_cache=True).past_key_values
        step = model(tokens[:, -1:], past_key_values=cache).logits[0, -1]
    print(f"{heads} heads: same text {texts[0] == texts[1]}, "
          f"largest difference of a logit over 1e-3 {(whole - step).abs().max().item() > 1e-3}")
PYTHON
python3 -m venv "$work/venv" &&
    "$work/venv/bin/pip" install -q torch==2.15.0 transformers==5.23.0 >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/ties.py" >"$work/seen" 2>"$work/err" || {
    tail -n 1 "$work/err"
    exit 1
}
cat "$work/seen"
grep -q '^2 heads: same text False, .* True$' "$work/seen" &&
    grep -q '^64 heads: same text True, .* False$' "$work/seen"
