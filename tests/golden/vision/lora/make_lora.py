"""Writes the adapters of tests/golden/vision/lora by Hugging Face peft, in float64, and five steps of training them.

Every linear layer of a model with a vision tower has an adapter of rank 4 with random A and B ("all-linear": those of
the decoder, of the tower and of its mergers). Needs transformers 5.23, peft 0.21 and torch:

    python3 tests/golden/vision/lora/make_lora.py
"""

import json
import os

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

here = os.path.dirname(os.path.abspath(__file__))
classes = {
    "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
}
for name, model_class in classes.items():
    folder = os.path.join(here, "..", name)
    torch.manual_seed(1)
    base = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for key, value in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(value, std=0.02)
    model.peft_config["default"].base_model_name_or_path = name
    model.save_pretrained(os.path.join(here, name))
    os.remove(os.path.join(here, name, "README.md"))
    model = model.double()
    io = load_file(os.path.join(folder, "io.safetensors"))
    integers = ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids", "labels")
    inputs = {key: io[key].long() for key in integers if key in io} | {"pixel_values": io["pixel_values"].double()}
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, norms = [], []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
    with open(os.path.join(here, name, "expected.json"), "w") as file:
        json.dump({"losses": losses, "grad_norms": norms, "trainable": sum(v.numel() for v in trained)}, file, indent=1)
        file.write("\n")
