"""Writes the folder of a fine-tuning with pictures, and its losses by Hugging Face transformers in float64.

Files for a tokenizer of 156 tokens, which beside ../qwen2_5_vl/config.json and its weights make a whole model; lines of
conversations with pictures of ../../images; expected.json: losses of steps that train on all lines, over the tokens of
answers and the ends of their turns. The processor makes tokens and patches, Qwen2_5_VLForConditionalGeneration the
losses. Needs transformers 5.23, torch and Pillow 13; run it from the root of the project:

    python3 tests/golden/vision/sft/make_sft.py
"""

import json
import os
import re

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

folder = os.path.dirname(os.path.abspath(__file__))
images = os.path.join(folder, "..", "..", "images")
with open(os.path.join(images, "chat.json")) as file:
    template = json.load(file)["template"]

# ASCII's printable bytes, a space and a line feed as byte-level BPE writes them; then numbers up to the model's tokens
letters = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]
special = {150: "<|image_pad|>", 151: "<|video_pad|>", 152: "<|vision_start|>", 153: "<|vision_end|>",
           154: "<|im_start|>", 155: "<|im_end|>"}
vocabulary = {letter: i for i, letter in enumerate(letters)}
vocabulary |= {f"<{i}>": i for i in range(len(letters), 150)} | {text: i for i, text in special.items()}
level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
tokenizer = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level,
             "added_tokens": [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                               "normalized": False, "special": True} for i, text in special.items()],
             "post_processor": None, "decoder": level,
             "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                       "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
                       "merges": []}}
pixels = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
          "size": {"shortest_edge": 256, "longest_edge": 512}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


lines = [
    {"messages": [user("<image>What?"), assistant("A square.")], "images": ["../../images/square.png"]},
    {"messages": [user("Both: <image> <image>"), assistant("Wide, gray."), user("And <image>?"), assistant("Big.")],
     "images": ["../../images/wide.png", "../../images/gray.png", "../../images/large.png"]},
    {"messages": [user("No picture."), assistant("None.")]},
    {"messages": [user([{"type": "text", "text": "See"}, {"type": "image", "image": "../../images/alpha.png"}]),
                  assistant("I do.")]},
]
files = {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}),
         "chat_template.jinja": template, "preprocessor_config.json": json.dumps(pixels),
         "lines.jsonl": "\n".join(json.dumps(line) for line in lines)}
for name, text in files.items():
    with open(os.path.join(folder, name), "w") as file:
        file.write(text + "\n" * (name != "chat_template.jinja"))

torch.set_default_dtype(torch.float64)
tokens = PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "tokenizer.json"), chat_template=template)
processor = Qwen2VLImageProcessorPil(**pixels)


def encode(line):
    """Tokens, labels, patches and grids of a line."""
    paths, messages = iter(line.get("images", [])), []
    for message in line["messages"]:
        parts = message["content"]
        if isinstance(parts, str):
            parts = [{"type": "image", "image": next(paths)} if text == "<image>" else {"type": "text", "text": text}
                     for text in re.split("(<image>)", parts) if text]
        messages.append({"role": message["role"], "content": parts})
    found = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
    out = None
    text = tokens.apply_chat_template(messages, tokenize=False)
    if found:
        out = processor(images=[Image.open(os.path.join(folder, path)) for path in found], return_tensors="pt")
        counts = iter((out["image_grid_thw"].prod(-1) // 4).tolist())
        text = re.sub(re.escape("<|image_pad|>"), lambda _: "<|image_pad|>" * next(counts), text)
    ids = tokens(text, add_special_tokens=False)["input_ids"]
    labels, header = [-100] * len(ids), tokens("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for i in range(len(ids)):
        if ids[i - len(header) : i] == header:
            end = ids.index(155, i)
            labels[i : end + 1] = ids[i : end + 1]
    return torch.tensor([ids]), torch.tensor([labels]), out


model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
    os.path.join(folder, "..", "qwen2_5_vl"), dtype=torch.float64, attn_implementation="eager"
)
matrices = [value for value in model.parameters() if value.dim() >= 2]
vectors = [value for value in model.parameters() if value.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
encoded = [encode(line) for line in lines]
count = sum(int((labels[:, 1:] >= 0).sum()) for _, labels, _ in encoded)
losses, norms = [], []
for step in range(3):
    optimizer.zero_grad()
    total = 0.0
    for ids, labels, out in encoded:
        inputs = {}
        if out is not None:
            inputs = {"pixel_values": out["pixel_values"].double(), "image_grid_thw": out["image_grid_thw"],
                      "mm_token_type_ids": (ids == 150).long()}
        logits = model(input_ids=ids, **inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[0], labels[0, 1:], ignore_index=-100, reduction="sum") / count
        loss.backward()
        total += loss.item()
    losses.append(total)
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
with open(os.path.join(folder, "expected.json"), "w") as file:
    json.dump({"lengths": [ids.shape[1] for ids, _, _ in encoded], "labels": count, "losses": losses,
               "grad_norms": norms}, file, indent=1)
    file.write("\n")
