"""Writes greedy.json beside each model: what transformers generates from the inputs of io.safetensors without sampling,
the first token (0) included, and the least margin between its best two logits. python make_greedy.py FOLDER ..."""
import json
import sys

import torch
from safetensors.torch import load_file
from transformers import T5ForConditionalGeneration

for folder in sys.argv[1:]:
    model = T5ForConditionalGeneration.from_pretrained(folder).double().eval()
    io = load_file(f"{folder}/io.safetensors")
    texts, margin = [], float("inf")
    for ids, mask in zip(io["input_ids"].long(), io["attention_mask"].bool()):
        out = model.generate(ids[mask][None], do_sample=False, num_beams=1, max_new_tokens=12, use_cache=False,
                             output_logits=True, return_dict_in_generate=True)
        texts.append(out.sequences[0].tolist())
        for logits in out.logits:
            best = logits[0].topk(2).values
            margin = min(margin, (best[0] - best[1]).item())
    json.dump({"greedy": texts, "margin": margin}, open(f"{folder}/greedy.json", "w"))
    print(folder, texts, margin)
