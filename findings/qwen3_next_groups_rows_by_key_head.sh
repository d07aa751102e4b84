#!/bin/sh
# A surprise about Qwen3-Next's files: the rows of linear_attn.in_proj_qkvz.weight stand by key head, but the channels
# of linear_attn.conv1d.weight in the same layer stand by kind. Qwen3.5 computes the same layer with both by kind.
#
#   A good guess:  the projection's rows are all of q, all of k, all of v, all of z, as the channels of the convolution
#                  behind it are q, k, v; and Qwen3.5's in_proj_qkv holds the same rows without z.
#   What happens:  Qwen3-Next's rows are, for each key head, its q, its k, the v of its value heads and their z (and
#                  in_proj_ba: their b, then their a). A reader that takes them in the convolution's order computes
#                  with mixed heads: every shape fits, and nothing complains.
#
# With 2 key heads and 4 value heads of one channel, the row that each channel of the convolution comes from:
#
# usage: findings/qwen3_next_groups_rows_by_key_head.sh   (python3 with venv and pip, a connection, 6 GB; four minutes)
# Output seen:
#   transformers 5.23.0
#   in_proj_qkvz of 12 rows: channels of the convolution are rows [0, 6, 1, 7, 2, 3, 8, 9]
#   in_proj_qkv of 8 rows: channels of the convolution are rows [0, 1, 2, 3, 4, 5, 6, 7]
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/rows.py" <<'PYTHON'
import torch
import transformers
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

sizes = dict(hidden_size=4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=1,
             linear_value_head_dim=1, num_hidden_layers=1, layer_types=["linear_attention"])
print(f"transformers {transformers.__version__}")
for config, layer, name in ((Qwen3NextConfig, Qwen3NextGatedDeltaNet, "in_proj_qkvz"),
                            (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet, "in_proj_qkv")):
    net = layer(config(**sizes), layer_idx=0)
    rows = getattr(net, name).weight
    with torch.no_grad():
        rows.zero_()
        rows[:, 0] = torch.arange(rows.shape[0])  # row r gives the value r
    seen = []
    plain = torch.nn.functional.conv1d

    def conv1d(x, *arguments, **options):
        seen.append(x[0, :, -1].int().tolist())
        return plain(x, *arguments, **options)

    torch.nn.functional.conv1d = conv1d
    token = torch.zeros(1, 3, 4)
    token[..., 0] = 1
    net(token)
    torch.nn.functional.conv1d = plain
    print(f"{name} of {rows.shape[0]} rows: channels of the convolution are rows {seen[0]}")
PYTHON
python3 -m venv "$work/venv" &&
    "$work/venv/bin/pip" install -q torch==2.15.0 transformers==5.23.0 >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/rows.py" >"$work/seen" 2>"$work/err" || {
    tail -n 1 "$work/err"
    exit 1
}
cat "$work/seen"
grep -q '^in_proj_qkvz of 12 rows: .* rows \[0, 6, 1, 7, 2, 3, 8, 9\]$' "$work/seen" &&
    grep -q '^in_proj_qkv of 8 rows: .* rows \[0, 1, 2, 3, 4, 5, 6, 7\]$' "$work/seen"
