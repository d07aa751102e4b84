"""Writes answers.json: what Hugging Face transformers answers in float64, without sampling, to conversations with and
without pictures by ../qwen3_vl with the files of make_sft.py, with the log-probability of each token, and the least margin between its
best two logits. Needs transformers 5.23, torch and Pillow 13; run it from the root of the project:

    python3 tests/golden/vision/sft/make_answers.py
"""

import json
import os
import re

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

NEW_TOKENS = 8
folder = os.path.dirname(os.path.abspath(__file__))
images = os.path.join(folder, "..", "..", "images")
with open(os.path.join(folder, "chat_template.jinja")) as file:
    template = file.read()
with open(os.path.join(folder, "preprocessor_config.json")) as file:
    processor = Qwen2VLImageProcessorPil(**json.load(file), image_mean=[0.5] * 3, image_std=[0.5] * 3)
tokens = PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "tokenizer.json"), chat_template=template)
model = Qwen3VLForConditionalGeneration.from_pretrained(
    os.path.join(folder, "..", "qwen3_vl"), dtype=torch.float64, attn_implementation="eager"
)
margin = float("inf")


def image(name):
    return {"type": "image", "image": name}


def text(said):
    return {"type": "text", "text": said}


def answer(messages):
    global margin
    names = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
    inputs = {}
    whole = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if names:
        out = processor(images=[Image.open(os.path.join(images, name)) for name in names], return_tensors="pt")
        counts = iter((out["image_grid_thw"].prod(-1) // 4).tolist())
        whole = re.sub(re.escape("<|image_pad|>"), lambda _: "<|image_pad|>" * next(counts), whole)
        inputs = {"pixel_values": out["pixel_values"].double(), "image_grid_thw": out["image_grid_thw"]}
    ids = torch.tensor([tokens(whole, add_special_tokens=False)["input_ids"]])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == 150).long(),
                         do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=155, output_logits=True,
                         return_dict_in_generate=True, **inputs)
    new = out.sequences[0, ids.shape[1] :].tolist()
    logps = []
    for logits, token in zip(out.logits, new):
        best = logits[0].topk(2).values
        margin = min(margin, (best[0] - best[1]).item())
        logps.append(round(logits[0].log_softmax(-1)[token].item(), 6))
    said = tokens.decode(new, skip_special_tokens=True)
    return {"messages": messages, "prompt_tokens": ids.shape[1], "tokens": new, "logprobs": logps, "text": said}


def user(*parts):
    return {"role": "user", "content": list(parts)}


cases = [
    answer([user(image("square.png"), text("What?"))]),
    answer([user(image("wide.png"), image("gray.png"), text("Both?"))]),
    answer([user(text("No picture."))]),
    answer([user(image("photo.jpg"), text("What?"))]),
]
first = cases[0]
said = {"role": "assistant", "content": [text(first["text"])]}
cases.append(answer([first["messages"][0], said, user(image("wide.png"), text("And?"))]))
with open(os.path.join(folder, "answers.json"), "w") as file:
    lines = ",\n  ".join(json.dumps(case) for case in cases)
    file.write('{"answers": [\n  %s],\n "margin": %.3g}\n' % (lines, margin))
