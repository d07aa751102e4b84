"""Writes grads.safetensors and expected.json of qwen3_5_vl by Hugging Face transformers with all of it in float64.

transformers computes gated delta nets in float32 whatever the model's type, by which some of their small gradients are
off by a thousandth. Here its module runs with float64 in these places. With --disturb the weights are first multiplied
by 1 + 1e-7 times a normal number, and only the five steps are printed: the norm of the last one's gradient changes by
7e-4 of itself, its loss by 7e-7. Needs transformers 5.24 and torch:

    python3 tests/golden/vision/make_float64.py [--disturb]
"""

import inspect
import json
import os
import sys

import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as module
from safetensors.torch import load_file, save_file

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "qwen3_5_vl")
disturbs = "--disturb" in sys.argv
text = inspect.getsource(module).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
exec(compile(text.replace("dtype=torch.float)", "dtype=torch.float64)"), module.__file__, "exec"), module.__dict__)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
config = module.Qwen3_5Config.from_pretrained(folder)
config._attn_implementation = "eager"
model = module.Qwen3_5ForConditionalGeneration(config).double()
weights = {name: value.double() for name, value in load_file(os.path.join(folder, "model.safetensors")).items()}
if disturbs:
    weights = {name: value * (1 + 1e-7 * torch.randn_like(value)) for name, value in weights.items()}
model.load_state_dict(weights, strict=True)
io = load_file(os.path.join(folder, "io.safetensors"))
integers = ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids", "labels")
inputs = {name: io[name].long() for name in integers} | {"pixel_values": io["pixel_values"].double()}
matrices = [value for value in model.parameters() if value.dim() >= 2]
vectors = [value for value in model.parameters() if value.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
losses, norms = [], []
for step in range(5):
    optimizer.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    if step == 0 and not disturbs:
        grads = {name: value.grad.float().contiguous() for name, value in model.named_parameters()}
        save_file(grads, os.path.join(folder, "grads.safetensors"))
    losses.append(loss.item())
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
if disturbs:
    print(losses, norms)
else:
    path = os.path.join(folder, "expected.json")
    with open(path) as file:
        expected = json.load(file)
    expected.update(losses=losses, grad_norms=norms, transformers="5.24, with gated delta nets in float64")
    with open(path, "w") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")
