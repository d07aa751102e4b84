#!/bin/sh
# A surprise about transformers 5.24: a T5 whose decoder has more layers than its encoder loads, trains and computes
# logits, but its generate(), which has a cache by default, fails with an IndexError.
#
#   A good guess:  num_decoder_layers is free, as the paper and the configuration say; the cache has a place for each
#                  layer of the decoder.
#   What happens:  the cache of self-attention is sized by num_layers, which is that of the encoder. Fewer layers in the
#                  decoder leave places over; more raise an IndexError. use_cache=False generates.
#
# usage: [PYTHON=python3.12] findings/t5_with_a_deeper_decoder_generates_without_a_cache_only.sh   (3.10 or later, with
#        venv; a connection)
# Output seen:
#   encoder 3, decoder 2, with a cache: 5 tokens
#   encoder 2, decoder 3, with a cache: IndexError: list index out of range
#   encoder 2, decoder 3, without a cache: 5 tokens
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/t5.py" <<'PYTHON'
import sys

import torch
from transformers import T5Config, T5ForConditionalGeneration

seen = []


def generate(encoder, decoder, use_cache):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4}
    config = T5Config(num_layers=encoder, num_decoder_layers=decoder, decoder_start_token_id=0, pad_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config).eval()
    try:
        prompt = torch.tensor([[5, 6, 7]])
        written = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=use_cache, eos_token_id=None)
        seen.append("%d tokens" % written.shape[1])
    except IndexError as error:
        seen.append("IndexError: %s" % error)
    print("encoder %d, decoder %d, %s a cache: %s" % (encoder, decoder, "with" if use_cache else "without", seen[-1]))


generate(3, 2, True)
generate(2, 3, True)
generate(2, 3, False)
sys.exit(0 if seen == ["5 tokens", "IndexError: list index out of range", "5 tokens"] else 1)
PYTHON
"${PYTHON:-python3}" -m venv "$work/venv" &&
    "$work/venv/bin/pip" install -q torch==2.15.0 transformers==5.24.0 numpy >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/t5.py" 2>"$work/err"
