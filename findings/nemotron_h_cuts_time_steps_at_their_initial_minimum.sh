#!/bin/sh
# A surprise about Nemotron-H in transformers: the least time step of its Mamba-2 layers is time_step_min of
# config.json, which elsewhere is the smallest value that dt_bias is initialized for; time_step_limit is not read. A
# token that is generated with a cache has no least step.
#
#   A good guess:  as in Mamba-2 and Granite 4 of the same release, time_step_limit cuts the steps, time_step_min only
#                  initializes, and a cached token gives the logits of a whole pass.
#   What happens:  time_step_limit changes nothing, time_step_min does, and where steps are smaller than it the logits
#                  of a cached token differ from those of a whole pass.
#
# Differences of the last token's logits, of a model with one Mamba-2 layer whose steps are near 0:
#
# usage: findings/nemotron_h_cuts_time_steps_at_their_initial_minimum.sh   (python3 with venv and pip, a connection, 6
#        GB; four minutes)
# Output seen:
#   transformers 5.23.0
#   time_step_limit (0.0, 0.5) for (0.2, 0.5): logits differ: False
#   time_step_min 0.001 for 0.2: logits differ: True
#   a cached token for a whole pass: logits differ: True
#   the same with time_step_min 1e-12: logits differ: False
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/steps.py" <<'PYTHON'
import torch
import transformers
from transformers import NemotronHConfig, NemotronHForCausalLM

transformers.logging.set_verbosity_error()
tokens = torch.arange(1, 13).reshape(1, 12)


def last_logits(cached=False, **steps):
    config = NemotronHConfig(vocab_size=16, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
                             mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=4,
                             intermediate_size=32, layers_block_type=["mamba", "attention"], use_cache=cached, **steps)
    torch.manual_seed(1)
    model = NemotronHForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("in_proj.weight"):
                parameter.normal_()
                parameter[-4:] = 0  # of the four heads' steps: softplus(dt_bias)
            if name.endswith("dt_bias"):
                parameter.fill_(-20)
        if not cached:
            return model(tokens).logits[0, -1]
        past = model(tokens[:, :-1], use_cache=True).past_key_values
        return model(tokens[:, -1:], past_key_values=past, use_cache=True).logits[0, -1]


def differ(a, b):
    return (a - b).abs().max().item() > 1e-4 * b.abs().max().item()


print(f"transformers {transformers.__version__}")
print("time_step_limit (0.0, 0.5) for (0.2, 0.5): logits differ:",
      differ(last_logits(time_step_limit=(0.0, 0.5)), last_logits(time_step_limit=(0.2, 0.5))))
print("time_step_min 0.001 for 0.2: logits differ:",
      differ(last_logits(time_step_min=0.001), last_logits(time_step_min=0.2)))
print("a cached token for a whole pass: logits differ:",
      differ(last_logits(time_step_min=0.2, cached=True), last_logits(time_step_min=0.2)))
print("the same with time_step_min 1e-12: logits differ:",
      differ(last_logits(time_step_min=1e-12, cached=True), last_logits(time_step_min=1e-12)))
PYTHON
python3 -m venv "$work/venv" &&
    "$work/venv/bin/pip" install -q torch==2.15.0 transformers==5.23.0 >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/steps.py" >"$work/seen" 2>"$work/err" || {
    tail -n 1 "$work/err"
    exit 1
}
cat "$work/seen"
[ "$(sed 's/.*: //' "$work/seen" | tail -n 4 | tr '\n' ' ')" = 'False True True False ' ]
