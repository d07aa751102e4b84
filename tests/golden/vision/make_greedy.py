"""Writes greedy.json beside each model: what transformers generates from texts with no, one and two pictures of
io.safetensors without sampling, and the least margin between its best two logits. Picture 2 is picture 0 with every
number negated. python make_greedy.py FOLDER ..."""
import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

IMAGE = 150
for folder in sys.argv[1:]:
    model = AutoModelForImageTextToText.from_pretrained(folder, experts_implementation="eager").double().eval()
    io = load_file(f"{folder}/io.safetensors")
    first, second = io["input_ids"].tolist()
    grids = io["image_grid_thw"].long()
    patches = io["pixel_values"].double().split([int(grid.prod()) for grid in grids])
    patches, grids = [*patches, -patches[0]], [*grids, grids[0]]
    texts = [
        {"prompt": first[:24], "pictures": [0]},
        {"prompt": first[:16] + second[:20], "pictures": [0, 1]},
        {"prompt": first[15:30], "pictures": []},
        {"prompt": first[:24], "pictures": [2]},
        {"prompt": second[:15], "pictures": [1]},
        {"prompt": first[:16] + second[:20], "pictures": [2, 1]},
    ]
    margin = float("inf")
    for text in texts:
        ids = torch.tensor([text["prompt"]])
        inputs = {"mm_token_type_ids": (ids == IMAGE).long()}
        if text["pictures"]:
            inputs["pixel_values"] = torch.cat([patches[i] for i in text["pictures"]])
            inputs["image_grid_thw"] = torch.stack([grids[i] for i in text["pictures"]])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1,
                             max_new_tokens=12, eos_token_id=None, suppress_tokens=[IMAGE], output_logits=True,
                             return_dict_in_generate=True, **inputs)
        text["greedy"] = out.sequences[0, ids.shape[1]:].tolist()
        for logits in out.logits:
            best = logits[0].topk(2).values
            margin = min(margin, (best[0] - best[1]).item())
    lines = ",\n  ".join(json.dumps(text) for text in texts)
    with open(f"{folder}/greedy.json", "w") as file:
        file.write('{"texts": [\n  %s],\n "margin": %.3g}\n' % (lines, margin))
    print(folder, margin)
