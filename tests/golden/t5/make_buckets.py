"""Writes buckets.h: the buckets of T5's relative biases by transformers, as runs of distances (-200 to 200) that share
one. Needs transformers and torch: python make_buckets.py >buckets.h"""
import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention

print(f"/* By make_buckets.py, transformers {transformers.__version__}: the first distance of each run, and its bucket. */")
distances = torch.arange(-200, 201)
for buckets, farthest in (32, 128), (8, 24), (16, 64), (64, 256), (12, 50), (32, 20), (10, 300), (2, 8), (4, 3):
    for bidirectional in True, False:
        if bidirectional and buckets < 4:
            continue
        found = T5Attention._relative_position_bucket(distances, bidirectional, buckets, farthest).tolist()
        runs = [(d, b) for d, b, before in zip(distances.tolist(), found, [None] + found) if b != before]
        pairs = ", ".join(f"{{{d}, {b}}}" for d, b in runs)
        print(f"{{{buckets}, {farthest}, {str(bidirectional).lower()}, {len(runs)}, {{{pairs}}}}},")
