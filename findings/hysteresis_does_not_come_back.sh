#!/bin/sh
# A surprise about Megatron-Core 0.19.2: --hysteresis 2 spares the loss scale of fp16 one overflow, but only once for
# each --loss-scale-window clean steps in succession, not once for each run of overflows.
#
#   A good guess:  an overflow after hundreds of clean steps is a first one again, and does not lower the scale; two in
#                  succession do.
#   What happens:  the count of spared overflows comes back only when the window is complete, 1,000 steps by default.
#                  Two overflows that are 500 steps apart halve the scale, and then so does each later one.
#
# usage: [PYTHON=python3.12] findings/hysteresis_does_not_come_back.sh   (3.12 or later, with venv; a connection)
# Output seen:
#   DynamicGradScaler, window 1000, hysteresis 2, from 65536
#   overflow at step 1: 65536
#   500 clean steps, then an overflow: 32768
#   500 clean steps, then an overflow: 16384
#   1000 clean steps, then an overflow: 32768
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/scaler.py" <<'PYTHON'
import sys

import torch

tensor = torch.tensor
torch.tensor = lambda *args, **kwargs: tensor(*args, **{**kwargs, "device": "cpu"})  # the scaler's are on a GPU
from megatron.core.optimizer.grad_scaler import DynamicGradScaler  # noqa: E402

scaler = DynamicGradScaler(65536.0, 1.0, 2.0, 0.5, 1000, 2)
seen = []


def overflow(text, clean):
    for _ in range(clean):
        scaler.update(False)
    scaler.update(True)
    seen.append(scaler.scale.item())
    print(text + ": %g" % seen[-1])


print("DynamicGradScaler, window 1000, hysteresis 2, from 65536")
overflow("overflow at step 1", 0)
overflow("500 clean steps, then an overflow", 500)
overflow("500 clean steps, then an overflow", 500)
overflow("1000 clean steps, then an overflow", 1000)
sys.exit(0 if seen == [65536, 32768, 16384, 32768] else 1)
PYTHON
"${PYTHON:-python3}" -m venv "$work/venv" &&
    "$work/venv/bin/pip" install -q torch==2.15.0 megatron-core==0.19.2 numpy >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/scaler.py" 2>"$work/err"
