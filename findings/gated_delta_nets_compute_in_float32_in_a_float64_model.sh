#!/bin/sh
# A surprise about transformers' gated delta nets (Qwen3-Next, Qwen3.5): a layer whose weights and inputs are float64
# computes its rule in float32, and gives the result back as float64.
#
#   A good guess:  .double() makes a reference: outputs to 1e-15, and gradients that a difference quotient confirms, as
#                  for the attention layers and MLPs of the same model.
#   What happens:  the rule's operands become float32 inside the layer, whatever their type was. A difference quotient
#                  with a step of 1e-6 is wrong in its first digits, and gradients of a whole model are off by up to a
#                  thousandth. An own kernel that is held against such a "float64" model looks wrong where it is right;
#                  a reference needs the recurrence in float64.
#
# usage: findings/gated_delta_nets_compute_in_float32_in_a_float64_model.sh   (python3 with venv and pip, a connection,
#        6 GB; four minutes)
# Output seen:
#   transformers 5.23.0
#   Qwen3_5MLP: output torch.float64, difference quotient within 1e-7 of the gradient: True
#   Qwen3_5GatedDeltaNet: output torch.float64, difference quotient within 1e-7 of the gradient: False, within
#   1e-4: False
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/in_double.py" <<'PYTHON'
import torch
import transformers
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5MLP

torch.manual_seed(1)
config = Qwen3_5TextConfig(hidden_size=32, intermediate_size=64, linear_num_key_heads=2, linear_num_value_heads=4,
                           linear_key_head_dim=8, linear_value_head_dim=8, num_hidden_layers=1,
                           layer_types=["linear_attention"])


def error(layer):
    """The relative error of a difference quotient along a random direction, and the output's type."""
    layer = layer.double()
    x = torch.randn(1, 16, 32, dtype=torch.float64, requires_grad=True)
    weights, direction = (torch.randn(1, 16, 32, dtype=torch.float64) for _ in range(2))

    def loss(at):
        return (layer(at) * weights).sum()

    loss(x).backward()
    wanted, step = (x.grad * direction).sum().item(), 1e-6
    with torch.no_grad():
        quotient = ((loss(x + step * direction) - loss(x - step * direction)) / (2 * step)).item()
    return abs(quotient - wanted) / abs(wanted), layer(x).dtype


print(f"transformers {transformers.__version__}")
e, kind = error(Qwen3_5MLP(config, 64))
print(f"Qwen3_5MLP: output {kind}, difference quotient within 1e-7 of the gradient: {e < 1e-7}")
e, kind = error(Qwen3_5GatedDeltaNet(config, layer_idx=0))
print(f"Qwen3_5GatedDeltaNet: output {kind}, difference quotient within 1e-7 of the gradient: {e < 1e-7}, "
      f"within 1e-4: {e < 1e-4}")
PYTHON
python3 -m venv "$work/venv" &&
    "$work/venv/bin/pip" install -q torch==2.15.0 transformers==5.23.0 >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/in_double.py" >"$work/seen" 2>"$work/err" || {
    tail -n 1 "$work/err"
    exit 1
}
cat "$work/seen"
grep -q '^Qwen3_5MLP: output torch.float64, .*: True$' "$work/seen" &&
    grep -q '^Qwen3_5GatedDeltaNet: output torch.float64, .*: False, within 1e-4: False$' "$work/seen"
