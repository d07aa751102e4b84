"""Writes qwen3_5_vl/grads.safetensors: gradients by Hugging Face transformers with all of it in float64.

transformers computes gated delta nets in float32 whatever the model's type, by which some of their small gradients are
off by a thousandth. Here its module runs with float64 in these places. Needs transformers 5.24 and torch:

    python3 tests/golden/vision/make_grads.py
"""

import inspect
import os

import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as module
from safetensors.torch import load_file, save_file

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "qwen3_5_vl")
text = inspect.getsource(module).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
exec(compile(text.replace("dtype=torch.float)", "dtype=torch.float64)"), module.__file__, "exec"), module.__dict__)
torch.set_default_dtype(torch.float64)
config = module.Qwen3_5Config.from_pretrained(folder)
config._attn_implementation = "eager"
model = module.Qwen3_5ForConditionalGeneration(config).double()
weights = load_file(os.path.join(folder, "model.safetensors"))
model.load_state_dict({name: value.double() for name, value in weights.items()}, strict=True)
io = load_file(os.path.join(folder, "io.safetensors"))
inputs = {name: io[name].long() for name in ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids", "labels")}
model(pixel_values=io["pixel_values"].double(), **inputs).loss.backward()
grads = {name: value.grad.float().contiguous() for name, value in model.named_parameters()}
save_file(grads, os.path.join(folder, "grads.safetensors"))
