"""Writes qwen3_5_moe and qwen3_vl_moe beside this file: tiny models with experts and a vision tower, and what Hugging
Face transformers computes from them in float64: logits and gradients of the first step, and five steps.

The inputs are those of qwen3_5_vl. Files have the names and shapes of save_pretrained; gradients have those of the
weights. transformers computes routers and gated delta nets in float32 whatever the model's type; here its modules run
with float64 in these places. The least margin between the last chosen expert's probability and the next one's is in
expected.json: far above the rounding of float32. Needs transformers 5.23 and torch:

    python3 tests/golden/vision/make_moe.py
"""

import importlib
import inspect
import json
import os
import tempfile

import torch
from safetensors.torch import load_file, save_file

here = os.path.dirname(os.path.abspath(__file__))
TEXT = dict(vocab_size=160, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=128, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
            router_aux_loss_coef=0.0, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
VISION = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=4, num_position_embeddings=64,
              out_hidden_size=32, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
TOKENS = dict(image_token_id=150, video_token_id=151, vision_start_token_id=152, vision_end_token_id=153,
              tie_word_embeddings=False)
ROPE = dict(rope_theta=1000000.0, rope_type="default", mrope_interleaved=True)
MODELS = {  # class, text, tower, seed: the first one with a margin above 1e-4
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        TEXT | dict(head_dim=16, linear_key_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                    linear_value_head_dim=8, shared_expert_intermediate_size=16,
                    rope_parameters=ROPE | dict(mrope_section=[2, 1, 1], partial_rotary_factor=0.5)),
        VISION, 1),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        TEXT | dict(head_dim=16, intermediate_size=48, moe_intermediate_size=24, rope_parameters=ROPE | dict(mrope_section=[4, 2, 2])),
        VISION | dict(deepstack_visual_indexes=[0, 1]), 2),
}


def save(model, folder, name):
    """Writes the parameters as save_pretrained does, as `name` of the folder."""
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        weights = load_file(os.path.join(temporary, "model.safetensors"))
        save_file({key: value.float() for key, value in weights.items()}, os.path.join(folder, name),
                  metadata={"format": "pt"})
        with open(os.path.join(temporary, "config.json")) as file:
            return json.load(file)


def make(name):
    family, text, vision, seed = MODELS[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    source = inspect.getsource(module).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = source.replace("dtype=torch.float)", "dtype=torch.float64)").replace("dtype=torch.float,",
                                                                                 "dtype=torch.float64,")
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    folder = os.path.join(here, name)
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(seed)
    config = getattr(module, family + "Config")(text_config=text, vision_config=vision, **TOKENS)
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    model = getattr(module, family + "ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() >= 2:
                value.normal_(0, 0.1)
            elif "norm" in key and "bias" not in key:
                value.add_(torch.randn_like(value) * 0.1)
            elif "bias" in key:
                value.normal_(0, 0.1)
    written = save(model, folder, "model.safetensors")
    written["dtype"] = "float32"
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(written, file, indent=1)
        file.write("\n")
    model = model.double()
    model.config._attn_implementation = "eager"
    io = load_file(os.path.join(here, "qwen3_5_vl", "io.safetensors"))
    integers = ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids", "labels")
    inputs = {key: io[key].long() for key in integers} | {"pixel_values": io["pixel_values"].double()}
    margins = []

    def watch(router, arguments, output):
        chosen = torch.softmax(arguments[0].reshape(-1, TEXT["hidden_size"]) @ router.weight.T, -1).sort(-1)[0]
        mask = io["attention_mask"].reshape(-1).bool()
        k = TEXT["num_experts_per_tok"]
        margins.append((chosen[:, -k] - chosen[:, -k - 1])[mask].min().item())

    for part in model.modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(watch)
    matrices = [value for value in model.parameters() if value.dim() >= 2]
    vectors = [value for value in model.parameters() if value.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(5):
        optimizer.zero_grad()
        out = model(**inputs)
        out.loss.backward()
        if step == 0:
            save_file(io | {"logits": out.logits.detach().float()}, os.path.join(folder, "io.safetensors"))
            values = [(p, p.data) for p in model.parameters()]
            for p, _ in values:
                p.data = p.grad
            save(model, folder, "grads.safetensors")
            for p, data in values:
                p.data = data
        losses.append(out.loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    expected = {"family": name, "steps": 5, "params": sum(p.numel() for p in model.parameters()), "losses": losses,
                "grad_norms": norms, "routing_margin": min(margins), "routing_margins": len(margins),
                "transformers": "5.23, with routers and gated delta nets in float64",
                "optimizer": {"lr": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1, "clip": 1.0}}
    with open(os.path.join(folder, "expected.json"), "w") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")
    print(name, min(margins), len(margins), losses, norms)


torch.set_default_dtype(torch.float64)
for each in MODELS:
    make(each)
