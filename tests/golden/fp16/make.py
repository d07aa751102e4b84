"""Writes loss_scale.json: the scales and trackers of Megatron-Core 0.19.2's DynamicGradScaler over fixed sequences of
overflows.

    pip install megatron-core==0.19.2 torch numpy
    python3 tests/golden/fp16/make.py
"""
import json
import os
import random

import torch

tensor = torch.tensor
torch.tensor = lambda *args, **kwargs: tensor(*args, **{**kwargs, "device": "cpu"})  # its tensors are on a GPU
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler  # noqa: E402

runs = []
for number, (initial, least, window, hysteresis, share) in enumerate([
        (2**32, 1, 1000, 2, 0.3), (2**16, 1, 3, 2, 0.4), (1024, 64, 4, 1, 0.5), (1000, 1, 2, 3, 0.35),
        (4, 3, 5, 2, 0.6), (2**24, 2**20, 1, 1, 0.5), (0.5, 0.25, 2, 2, 0.2)]):
    draw = random.Random(number)
    overflows = [draw.random() < share for _ in range(60)]
    scaler = DynamicGradScaler(initial, least, 2.0, 0.5, window, hysteresis)
    states = []
    for overflow in overflows:
        scaler.update(overflow)
        state = scaler.state_dict()
        states.append([state["scale"].item(), state["growth_tracker"], state["hysteresis_tracker"]])
    runs.append({"initial_loss_scale": initial, "min_loss_scale": least, "loss_scale_window": window,
                 "hysteresis": hysteresis, "overflows": "".join("+" if o else "." for o in overflows),
                 "states": states})

constant = ConstantGradScaler(512.0)
for overflow in [True, False, True]:
    constant.update(overflow)
    assert constant.scale.item() == 512 and constant.state_dict() == {}

path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "loss_scale.json")
with open(path, "w") as file:
    file.write("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
