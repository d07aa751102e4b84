#!/usr/bin/env python3
"""Makes tests/golden/losses/topk.json: verl's forward_kl_topk of on-policy distillation by its own function, as a term
of the loss, with torch's gradients by the student's logits, in float64.

    pip download --no-deps verl==0.9.1 && unzip verl-*.whl 'verl/trainer/distillation/*'
    python tests/golden/make_topk.py verl/trainer/distillation/fsdp/losses.py >tests/golden/losses/topk.json
"""
import json
import sys
import types

import torch

TOKENS, LABELS, TOPK = 6, 9, 4
MASK = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def load(path):
    """The module's functions; of its imports only torch is there."""
    for name in "verl verl.utils verl.utils.ulysses verl.workers verl.workers.config".split():
        sys.modules[name] = types.ModuleType(name)
    sys.modules["verl.utils.ulysses"].get_ulysses_sequence_parallel_world_size = lambda: 1
    sys.modules["verl.utils.ulysses"].slice_input_tensor = None
    sys.modules["verl.workers.config"].DistillationConfig = object
    sys.modules["verl.workers.config"].DistillationLossConfig = object
    module = types.ModuleType("losses")
    exec(compile(open(path).read(), path, "exec"), module.__dict__)
    return module


def values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def main(path):
    verl = load(path)
    torch.Tensor.float = lambda self: self  # keep float64
    mask = torch.tensor(MASK, dtype=torch.float64)
    student, teacher = 2 * values(1, TOKENS, LABELS), 2 * values(2, TOKENS, LABELS)
    student[3] = teacher[3]
    student[3, :2] -= 3  # near its teacher
    ids = teacher.topk(TOPK).indices.sort().values
    logps = teacher.log_softmax(-1).gather(1, ids)
    student[4].scatter_(0, ids[4], 5 + teacher[4].gather(0, ids[4]))  # more mass on these labels: a negative sum
    cases = []
    for min_clamp, max_clamp in ((None, None), (-2.0, None), (None, 0.8), (-3.0, 1.5)):
        own = student.clone().requires_grad_()
        nested = [torch.nested.nested_tensor([x], layout=torch.jagged) for x in (logps, ids)]
        loss = types.SimpleNamespace(log_prob_min_clamp=min_clamp)
        got = verl.compute_forward_kl_topk(own[None], nested[0], nested[1], types.SimpleNamespace(
            distillation_loss=loss), "thd")["distillation_losses"][0]
        terms = got.clamp_min(0)  # verl/trainer/distillation/losses.py
        if max_clamp is not None:
            terms = terms.clamp(min=-max_clamp, max=max_clamp)
        (terms * mask).sum().backward()
        cases.append(dict(min_clamp=min_clamp, max_clamp=max_clamp, divergence=got.tolist(),
                          loss=(terms * mask).sum().item(), gradient=own.grad.tolist()))
    print(json.dumps(dict(mask=MASK, student=student.tolist(), ids=ids.tolist(), teacher_logps=logps.tolist(),
                          cases=cases)))


if __name__ == "__main__":
    main(sys.argv[1])
