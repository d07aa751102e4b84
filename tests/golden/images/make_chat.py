#!/usr/bin/env python3
"""Writes chat.json: conversations with pictures as tokens by Hugging Face transformers: make_chat.py > chat.json

Run it from the root of the project, with transformers 5.23 and Pillow 13. Tokens and grids are those of the processor's
apply_chat_template, with Qwen2VLImageProcessorPil and the demo's tokenizer, which gets the tokens of "special". A case
has the conversation as a line of a file has it: "messages", and "images" beside them where texts have <image>, which is
a part of type image for the processor.
"""
import json
import re
import tempfile

from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

folder = "tests/golden/images/"
special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
template = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""


def text(words):
    return {"type": "text", "text": words}


def image(name):
    return {"type": "image", "image": folder + name}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


cases = [
    {"messages": [user([image("square.png"), text("What is this?")]), assistant("A square.")]},
    {"messages": [user([text("Before "), image("large.png"), text(" and after.")]), assistant("Yes.")]},
    {"messages": [{"role": "system", "content": "You look at pictures."},
                  user([image("wide.png"), image("small.png"), text("\nWhich one is wider?")]), assistant("The first."),
                  user([text("And than this? "), image("large.png")]), assistant("No.\n")]},
    {"messages": [user([image("gray.png")])], "generates": True},
    {"messages": [user("No picture."), assistant("None.")]},
    {"messages": [user("<image>\nCompare it with <image>."), assistant("Both are drawn."), user("<image><image>")],
     "images": ["palette.png", "alpha.png", "square.png", "gray_alpha.png"], "generates": True},
    {"messages": [user([image("square.png"), text("Draw it. ")]),
                  assistant([image("small.png"), text("Here it is.")])]},
]


def typed(case):
    images = iter(case.get("images", []))
    messages = []
    for message in case["messages"]:
        content = message["content"]
        if isinstance(content, str) and "images" in case:
            parts = [part for part in re.split("(<image>)", content) if part]
            content = [image(next(images)) if part == "<image>" else text(part) for part in parts]
        messages.append({"role": message["role"], "content": content})
    return messages


base = json.load(open("data/demo-tokenizer.json"))
count = len(base["model"]["vocab"])
base["added_tokens"] += [{"id": count + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for i, s in enumerate(special)]
with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    json.dump(base, file)
    file.flush()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file.name, eos_token="<|im_end|>", pad_token="<|endoftext|>")
tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
pixels = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 1600})


class Processor(Qwen2_5_VLProcessor):
    def check_argument_for_proper_class(self, name, argument):  # videos are not read
        return None if argument is None else super().check_argument_for_proper_class(name, argument)


processor = Processor(pixels, tokenizer, None, chat_template=template)
for case in cases:
    out = processor.apply_chat_template(typed(case), tokenize=True, return_dict=True,
                                        add_generation_prompt=case.get("generates", False))
    case["ids"] = [int(i) for i in out["input_ids"][0]]
    case["grids"] = [[int(n) for n in grid[1:]] for grid in out.get("image_grid_thw", [])]
lines = ",\n".join(json.dumps(case) for case in cases)
print(f'{{"special": {json.dumps(special)},\n"template": {json.dumps(template)},\n"cases": [\n{lines}\n]}}')
