#!/usr/bin/env python3
"""Makes tests/golden/losses/distillation.json: losses of Model Optimizer's distillation for Megatron-Core, by its own
classes, with torch's gradients in float64.

    pip download --no-deps nvidia-modelopt==0.47.0 && unzip nvidia_modelopt-*.whl 'modelopt/torch/distill/*'
    python tests/golden/make_distillation.py modelopt/torch/distill/plugins/megatron.py >tests/golden/losses/distillation.json

Of its imports only torch is there: the classes that are used here call nothing of Megatron-Core on one rank.
"""
import json
import sys
import types

import torch

SEQUENCE, CHANNELS, LABELS, TEMPERATURE = 5, 6, 7, 1.7
MASK = [1.0, 0.0, 1.0, 1.0, 1.0]


class Any:
    """Stands for every name of a module that is not there."""
    def __class_getitem__(cls, item):
        return cls


class Absent(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return torch.nn.Module if name == "DistillationLossBalancer" or name == "MegatronModule" else Any


def load(path):
    names = """megatron megatron.core megatron.core.pipeline_parallel megatron.core.pipeline_parallel.schedules
        megatron.core.transformer megatron.core.utils modelopt modelopt.torch modelopt.torch.distill
        modelopt.torch.distill.config modelopt.torch.quantization modelopt.torch.quantization.nn""".split()
    for name in names:
        sys.modules[name] = Absent(name)
    sys.modules["modelopt.torch.distill"].loss_balancers = types.SimpleNamespace(STUDENT_LOSS_KEY="student_loss")
    module = sys.modules["plugin"] = types.ModuleType("plugin")
    for parent, child in (("modelopt", "torch"), ("modelopt.torch", "distill")):
        setattr(sys.modules[parent], child, sys.modules[parent + "." + child])
    exec(compile(open(path).read(), path, "exec"), module.__dict__)
    return module


def values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def main(path):
    plugin = load(path)
    torch.Tensor.float = lambda self: self  # keep float64
    mask = torch.tensor(MASK, dtype=torch.float64)
    config = types.SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
    inputs = dict(mask=mask, logp=-values(1, SEQUENCE).abs(), student=values(2, SEQUENCE, LABELS),
                  teacher=values(3, SEQUENCE, LABELS), student_hidden=values(4, 2, SEQUENCE, CHANNELS),
                  teacher_hidden=values(5, 2, SEQUENCE, CHANNELS))
    cases = {}
    for name, skip, scale in (("hidden", True, 1.0), ("all", False, 3.0)):
        own = {key: inputs[key].clone().requires_grad_() for key in ("logp", "student", "student_hidden")}

        def masked(loss):
            return (loss[0].reshape(-1) * mask).sum()
        parts = {"student_loss": -(own["logp"] * mask).sum()}
        parts["LogitsKLLoss_0"] = masked(plugin.LogitsKLLoss(config, TEMPERATURE)(
            own["student"][:, None], inputs["teacher"][:, None]))
        for i, kind in enumerate((plugin.HiddenStateCosineLoss, plugin.MSELoss)):
            parts[f"{kind.__name__}_{i + 1}"] = masked(kind(config)(
                own["student_hidden"][i][:, None], inputs["teacher_hidden"][i][:, None]))
        got = plugin.LogitsAndIntermediatesLossBalancer(scale, skip)(parts)
        got["kd_loss"].backward()
        cases[name] = dict(loss=got["kd_loss"].item(), divergence=got["logits_loss"].item(),
                           hidden=got["intermediate_loss"].item(),
                           gradients={key: (torch.zeros_like(value) if value.grad is None else value.grad).tolist()
                                      for key, value in own.items()})
    print(json.dumps(dict(temperature=TEMPERATURE, scale=3.0, inputs={k: v.tolist() for k, v in inputs.items()},
                          cases=cases)))


if __name__ == "__main__":
    main(sys.argv[1])
