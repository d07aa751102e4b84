"""Writes preferences with pictures, pairs.jsonl, and their losses by Hugging Face transformers in float64, expected.json:
three steps of AdamW on all pairs, of direct preference optimization against the model that the run begins with, and of
a reward model. The reward model is the same one with a head of one row, score.safetensors; reward.index.json names the
file of each of its tensors, base.safetensors being ../qwen2_5_vl/model.safetensors. Files of ../sft and pictures of ../../images as there. Needs transformers 5.23, torch and
Pillow 13; run it from the root of the project:

    python3 tests/golden/vision/preferences/make_preferences.py
"""

import json
import os
import re

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

BETA = 0.1
folder = os.path.dirname(os.path.abspath(__file__))
sft, weights = os.path.join(folder, "..", "sft"), os.path.join(folder, "..", "qwen2_5_vl")


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def image(name):
    return {"type": "image", "image": "../../images/" + name}


def text(said):
    return {"type": "text", "text": said}


# texts with <image>; lists of messages; no picture; whole conversations, the last of two answers being preferred
lines = [
    {"prompt": "<image>What?", "chosen": "A square.", "rejected": "Who knows", "images": ["../../images/square.png"]},
    {"prompt": [user([{"type": "image"}, image("gray.png"), text("Both?")])],
     "chosen": [assistant("Wide, gray.")], "rejected": [assistant([text("Big.")])],
     "images": ["../../images/wide.png"]},
    {"prompt": "No picture.", "chosen": "None.", "rejected": "One of them."},
    {"chosen": [user("<image>What?"), assistant("Big."), user("Sure?"), assistant("Yes.")],
     "rejected": [user("<image>What?"), assistant("Big."), user("Sure?"), assistant("No, it is small.")],
     "images": "../../images/large.png"},
]
with open(os.path.join(folder, "pairs.jsonl"), "w") as file:
    file.write("\n".join(json.dumps(line) for line in lines) + "\n")

torch.set_default_dtype(torch.float64)
with open(os.path.join(sft, "chat_template.jinja")) as file:
    template = file.read()
tokens = PreTrainedTokenizerFast(tokenizer_file=os.path.join(sft, "tokenizer.json"), chat_template=template)
with open(os.path.join(sft, "preprocessor_config.json")) as file:
    processor = Qwen2VLImageProcessorPil(**json.load(file))


def encode(line, choice):
    """Inputs of a prompt with one of its responses, and the first token of the last response."""
    images = line.get("images", [])
    paths = iter([images] if isinstance(images, str) else images)
    prompt, response = line.get("prompt", []), line[choice]
    messages = [user(prompt)] if isinstance(prompt, str) else list(prompt)
    messages += [assistant(response)] if isinstance(response, str) else response
    whole = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, str):
            parts = [{"type": "image"} if part == "<image>" else text(part)
                     for part in re.split("(<image>)", parts) if part]
        parts = [{"type": "image", "image": part.get("image") or next(paths)} if part["type"] == "image" else part
                 for part in parts]
        whole.append({"role": message["role"], "content": parts})
    found = [part["image"] for message in whole for part in message["content"] if part["type"] == "image"]
    written, inputs = tokens.apply_chat_template(whole, tokenize=False), {}
    if found:
        out = processor(images=[Image.open(os.path.join(folder, path)) for path in found], return_tensors="pt")
        counts = iter((out["image_grid_thw"].prod(-1) // 4).tolist())
        written = re.sub(re.escape("<|image_pad|>"), lambda _: "<|image_pad|>" * next(counts), written)
        inputs = {"pixel_values": out["pixel_values"].double(), "image_grid_thw": out["image_grid_thw"]}
    ids = torch.tensor([tokens(written, add_special_tokens=False)["input_ids"]])
    if found:
        inputs["mm_token_type_ids"] = (ids == 150).long()
    header = tokens("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    row = ids[0].tolist()
    starts = [i for i in range(len(header), len(row)) if row[i - len(header):i] == header]
    spans = [(start, row.index(155, start) + 1) for start in starts]
    return {"input_ids": ids, **inputs}, spans


pairs = [[encode(line, choice) for choice in ("chosen", "rejected")] for line in lines]
model = Qwen2_5_VLForConditionalGeneration.from_pretrained(weights, dtype=torch.float64, attn_implementation="eager")
generator = torch.Generator().manual_seed(0)
score = torch.randn(1, model.config.text_config.hidden_size, generator=generator) * 0.1
save_file({"score.weight": score.float().contiguous()}, os.path.join(folder, "score.safetensors"))
score = score.float().double()
with safe_open(os.path.join(weights, "model.safetensors"), "pt") as file:
    names = {name: "base.safetensors" for name in file.keys()}
with open(os.path.join(folder, "reward.index.json"), "w") as file:
    json.dump({"metadata": {}, "weight_map": {**names, "score.weight": "score.safetensors"}}, file, indent=0)
    file.write("\n")


def logp(inputs, spans):
    """The sum over the tokens of all responses."""
    logps = model(**inputs).logits[0, :-1].log_softmax(-1)
    picked = logps.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
    return sum(picked[begin - 1:end - 1].sum() for begin, end in spans)


def value(inputs, spans):
    """The head's number at the end of the last response."""
    hidden = model.model(**inputs).last_hidden_state[0, spans[-1][1] - 1]
    return hidden @ head[0]


def steps(loss_of_pair, params):
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-4)
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum(loss_of_pair(i) for i in range(len(pairs))) / len(pairs)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0).item())
        optimizer.step()
    return {"losses": losses, "grad_norms": norms}


def softplus(x):
    return torch.nn.functional.softplus(x)


start = {name: p.detach().clone() for name, p in model.named_parameters()}
with torch.no_grad():
    reference = [[logp(*choice).item() for choice in pair] for pair in pairs]


def preference(i):
    chosen, rejected = (logp(*pairs[i][k]) - reference[i][k] for k in (0, 1))
    return softplus(-BETA * (chosen - rejected))


expected = {"reference": reference, "dpo": steps(preference, list(model.parameters()))}
with torch.no_grad():
    for name, p in model.named_parameters():
        p.copy_(start[name])
head = torch.nn.Parameter(score.clone())
with torch.no_grad():
    expected["values"] = [[value(*choice).item() for choice in pair] for pair in pairs]
trained = [p for name, p in model.named_parameters() if not name.startswith("lm_head")] + [head]
expected["rm"] = steps(lambda i: softplus(value(*pairs[i][1]) - value(*pairs[i][0])), trained)
with open(os.path.join(folder, "expected.json"), "w") as file:
    json.dump(expected, file, indent=1)
    file.write("\n")
