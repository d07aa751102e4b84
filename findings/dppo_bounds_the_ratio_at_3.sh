#!/bin/sh
# A surprise about verl 0.9.1: its losses dppo_tv and dppo_kl read the greatest ratio of new and old probability from
# clip_ratio_c, and fall back on 20 where the configuration has none. Their comment recommends a large bound. The
# configuration of an actor always has one: 3.0, which is that of PPO's dual clipping.
#
#   A good guess:  without clip_ratio_c in the file, the ratio of a token is bounded at 20, as the losses' source says.
#   What happens:  it is bounded at 3: a token that has become ten times as probable counts three times, not ten.
#
# usage: findings/dppo_bounds_the_ratio_at_3.sh   (python3 with venv and pip, and a connection; minutes)
# Output seen:
#   verl 0.9.1, clip_ratio_c 3.0 unless given
#   dppo_tv, ratios 2 10 50: gradients -2 -3 -3
#   dppo_kl, ratios 2 10 50: gradients -2 -3 -3
#   dppo_tv with clip_ratio_c 20: gradients -2 -10 -20
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/dppo.py" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config.actor import ActorConfig


def gradients(loss, **given):
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=1e6,
                         clip_ratio_low=1e6, clip_ratio_high=1e6, **given)  # no token is left out
    found, one = [], torch.ones(1, 1, dtype=torch.float64)
    for ratio in (2, 10, 50):
        logp = (one * 0.5).log().requires_grad_()
        old = logp.detach() - (one * ratio).log()
        value, _ = get_policy_loss_fn(loss)(old, logp, one, one, "token-mean", config)
        found.append(round(torch.autograd.grad(value, logp)[0].item(), 4))
    return found


bound = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1).clip_ratio_c
print("verl %s, clip_ratio_c %s unless given" % (version("verl"), bound))
tv, kl, wide = gradients("dppo_tv"), gradients("dppo_kl"), gradients("dppo_tv", clip_ratio_c=20.0)
for name, values in (("dppo_tv, ratios 2 10 50:", tv), ("dppo_kl, ratios 2 10 50:", kl),
                     ("dppo_tv with clip_ratio_c 20:", wide)):
    print(name, "gradients %g %g %g" % tuple(values))
sys.exit(0 if tv == kl == [-2, -3, -3] and wide == [-2, -10, -20] else 1)
PYTHON
python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q torch==2.15.0 transformers==5.23.0 ray==2.58.0 \
    omegaconf==2.3.1 hydra-core==1.3.8 tensordict==0.15.3 codetiming==1.4.0 orjson==3.13.0 numpy pandas \
    >"$work/pip" 2>&1 && "$work/venv/bin/pip" install -q --no-deps verl==0.9.1 >>"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/dppo.py" 2>"$work/err"
