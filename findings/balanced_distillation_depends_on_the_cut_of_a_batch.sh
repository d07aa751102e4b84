#!/bin/sh
# A surprise about Model Optimizer's distillation for Megatron-Core: its balance of logits and hidden states makes the
# gradient of a batch depend on how the batch is cut into micro-batches, in float64.
#
#   A good guess:  all losses are means over equal micro-batches, so two micro-batches with half of the weight each
#                  have the gradient of one, up to rounding; the size of a micro-batch is a matter of memory.
#   What happens:  LogitsAndIntermediatesLossBalancer, the default of that distillation, scales the loss of hidden
#                  states to the value that the loss of logits has in this call. Each micro-batch has a factor of its
#                  own, which changes the gradient of the batch. Runs of the same global batch on more data-parallel
#                  ranks, or with another micro-batch size, train differently, and tests of layouts need micro-batches
#                  of equal samples.
#
# usage: findings/balanced_distillation_depends_on_the_cut_of_a_batch.sh   (PYTHON or python3, 3.12 or later, with venv
#        and pip; a connection; some minutes)
# Output seen:
#   nvidia-modelopt 0.47.0, torch 2.15.0
#   balanced: the gradient of two micro-batches is that of one: False
#   not balanced: the gradient of two micro-batches is that of one: True
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/balance.py" <<'PYTHON'
import importlib.metadata

import torch
from modelopt.torch.distill.plugins.megatron import LogitsAndIntermediatesLossBalancer

print(f"nvidia-modelopt {importlib.metadata.version('nvidia-modelopt')}, torch {torch.__version__.split('+')[0]}")
torch.manual_seed(0)
weight, samples = torch.randn(4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)


def gradient(balanced, cuts):
    parameter = weight.clone().requires_grad_()
    balance = LogitsAndIntermediatesLossBalancer(1.0, True)
    for rows in samples.split(len(samples) // cuts):
        out = rows @ parameter
        losses = {"student_loss": out.mean(), "LogitsKLLoss_0": out.square().mean(),
                  "HiddenStateCosineLoss_1": (out - 1).abs().mean()}
        loss = balance(dict(losses))["kd_loss"] if balanced else sum(losses.values())
        (loss / cuts).backward()
    return parameter.grad


for name, balanced in (("balanced", True), ("not balanced", False)):
    equal = torch.allclose(gradient(balanced, 1), gradient(balanced, 2), rtol=1e-12, atol=1e-12)
    print(f"{name}: the gradient of two micro-batches is that of one: {equal}")
PYTHON
"${PYTHON:-python3}" -m venv "$work/venv" && "$work/venv/bin/pip" install -q torch==2.15.0 megatron-core==0.19.2 \
    nvidia-modelopt==0.47.0 requests==2.34.2 huggingface_hub==2.4.0 >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/balance.py" >"$work/seen" 2>"$work/err" || {
    tail -n 1 "$work/err"
    exit 1
}
cat "$work/seen"
grep -q '^balanced: .* False$' "$work/seen" && grep -q '^not balanced: .* True$' "$work/seen"
