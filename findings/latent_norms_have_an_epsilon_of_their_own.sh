#!/bin/sh
# A surprise about DeepSeek-V3 in transformers 5.23.0: the norms of the latent vectors of q and of k and v add 1e-6 to
# the mean square, whatever rms_norm_eps says; the other norms of the model add rms_norm_eps. Megatron-Core 0.19.2 gives
# all norms of the same model its one layernorm_epsilon.
#
#   A good guess:  config.json's rms_norm_eps is the epsilon of every norm of the model.
#   What happens:  two of the four norms of a layer ignore it. Of a model with rms_norm_eps 1e-5, a program that follows
#                  it everywhere computes another function, and so does Megatron-Core with --norm-epsilon 1e-5.
#
# usage: findings/latent_norms_have_an_epsilon_of_their_own.sh   (python3 with venv and pip, and a connection; minutes)
# Output seen:
#   transformers 5.23.0, rms_norm_eps 0.25
#   input_layernorm 0.25, post_attention_layernorm 0.25, norm 0.25
#   q_a_layernorm 1e-06, kv_a_layernorm 1e-06
#   logits with rms_norm_eps 0.25 and with the latent norms' epsilon set to it differ by more than 1e-3: True
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/norms.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

torch.manual_seed(0)
config = DeepseekV3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, q_lora_rank=16,
                          kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_attention_heads=2,
                          num_key_value_heads=2, first_k_dense_replace=1, rms_norm_eps=0.25)
model = DeepseekV3ForCausalLM(config).eval()
layer, attention = model.model.layers[0], model.model.layers[0].self_attn
print("transformers", transformers.__version__ + ", rms_norm_eps", config.rms_norm_eps)
outer = [layer.input_layernorm, layer.post_attention_layernorm, model.model.norm]
inner = [attention.q_a_layernorm, attention.kv_a_layernorm]
print("input_layernorm %g, post_attention_layernorm %g, norm %g" % tuple(n.variance_epsilon for n in outer))
print("q_a_layernorm %g, kv_a_layernorm %g" % tuple(n.variance_epsilon for n in inner))
for parameter in model.parameters():
    parameter.data.normal_(0, 0.3)
tokens = torch.arange(8)[None]
with torch.no_grad():
    own = model(tokens).logits
    ignored = all(n.variance_epsilon == 1e-6 for n in inner) and all(n.variance_epsilon == 0.25 for n in outer)
    for norm in inner:
        norm.variance_epsilon = 0.25
    differs = (model(tokens).logits - own).abs().max().item() > 1e-3
print("logits with rms_norm_eps 0.25 and with the latent norms' epsilon set to it differ by more than 1e-3:", differs)
sys.exit(0 if ignored and differs else 1)
PYTHON
python3 -m venv "$work/venv" &&
    "$work/venv/bin/pip" install -q torch==2.15.0 transformers==5.23.0 >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/norms.py" 2>"$work/err"
