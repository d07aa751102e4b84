#!/usr/bin/env python3
"""Makes tests/golden/megatron/fim.json: samples before and after Megatron-LM's filling in the middle, with its draws.

    python3 -m venv VENV && VENV/bin/pip install numpy tokenizers
    pip download megatron-core==0.19.2 --no-deps && unzip megatron_core-0.19.2-*.whl -d WHEEL
    VENV/bin/python tests/golden/make_fim.py WHEEL

megatron/training/datasets/fim_dataset.py of the wheel runs as it is; stand-ins take the place of the base class, which
only finds the sample, and of the tokenizer around `tokenizers`, as the wheel's huggingface_tokenizer.py has it.
"""
import importlib.util
import json
import os
import sys
import types

import numpy as np
from tokenizers import Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
NAMES = {"prefix": "<x>", "middle": "WORD", "suffix": "!", "pad": "#", "eod": "<|endoftext|>"}
TEXTS = ["def add(a, b):\n    return a + b\n", "The quick brown fox jumps over the lazy dog.",
         "naïve café – ünïcödé 日本語 🙂 end", "x", "# header\nint main(void) { return 0; }\n", " "]


def load(wheel):
    for name in ["megatron", "megatron.core", "megatron.core.datasets"]:
        sys.modules[name] = types.ModuleType(name)
    for name, classes in [("gpt_dataset", ["GPTDataset", "GPTDatasetConfig"]), ("indexed_dataset", ["IndexedDataset"]),
                          ("utils", ["Split"])]:
        module = types.ModuleType("megatron.core.datasets." + name)
        for c in classes:
            setattr(module, c, type(c, (), {}))
        sys.modules["megatron.core.datasets." + name] = module
    path = os.path.join(wheel, "megatron/training/datasets/fim_dataset.py")
    spec = importlib.util.spec_from_file_location("fim_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPTFIMDataset


class Words:
    """The calls of fim_dataset.py."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}

    def tokens_to_ids(self, tokens):
        one = isinstance(tokens, str)
        ids = [self.tokenizer.token_to_id(t) for t in ([tokens] if one else tokens)]
        return ids[0] if one else ids

    def text_to_ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ids_to_text(self, ids, remove_special_tokens):
        assert remove_special_tokens
        return self.tokenizer.decode([int(i) for i in ids if int(i) not in self.special], skip_special_tokens=False)


class Recorder:
    """np.random.RandomState, whose numbers are kept in order."""

    def __init__(self, seed):
        self.random, self.draws = np.random.RandomState(seed), []

    def binomial(self, n, p):
        self.draws.append(int(self.random.binomial(n, p)))
        return self.draws[-1]

    def randint(self, low, high, size):
        values = self.random.randint(low=low, high=high, size=size)
        self.draws += [int(v) for v in values]
        return values


def main():
    dataset = load(sys.argv[1])
    tokenizer = Tokenizer.from_file(os.path.join(HERE, "tokenizer/bytelevel.json"))
    words, eod = Words(tokenizer), tokenizer.token_to_id(NAMES["eod"])
    encoded = [words.text_to_ids(t) for t in TEXTS]
    dot = tokenizer.token_to_id(".")
    streams = {
        "one": encoded[1],
        "documents": sum((e + [eod] for e in encoded), []) + encoded[0],
        "empty": [eod, eod] + encoded[0] + [eod, eod] + encoded[2] + [eod],
        "cut": encoded[2][3:-3],  # begins and ends within characters
        "fragments": encoded[0] + [dot] + encoded[3] + [dot, dot] + encoded[4] + [eod] + encoded[2] + [dot] + encoded[1],
    }
    cases = []
    for name, tokens in streams.items():
        for seed in range(6):
            fim = dataset.__new__(dataset)
            fim.np_rng = Recorder(100 + seed)
            fim.fim_rate, fim.fim_spm_rate = [0.5, 1.0][seed % 2], 0.5
            fim.fragment_fim_rate = 0.7
            fim.fim_split_sample = dot if name == "fragments" or seed == 3 else None
            fim.no_fim_prefix = "# header" if seed >= 4 else None
            fim.config = types.SimpleNamespace(tokenizer=types.SimpleNamespace(_tokenizer=words))
            (fim.prefix_tok_id, fim.middle_tok_id, fim.suffix_tok_id, fim.pad_tok_id,
             fim.eod_tok_id) = words.tokens_to_ids(list(NAMES.values()))
            sample = np.array(tokens, dtype=np.int64)
            fim.shuffle_index, fim.sample_index, fim.document_index = [0], [(0, 0), (0, len(tokens) - 1)], [0]
            fim.dataset = types.SimpleNamespace(get=lambda document, offset, length: sample[offset:offset + length])
            out = fim._query_document_sample_shuffle_indices(0)[0]
            cases.append({"name": name, "split": fim.fim_split_sample is not None, "no_prefix": fim.no_fim_prefix or "",
                          "tokens": tokens, "draws": fim.np_rng.draws, "expected": [int(t) for t in out]})
    with open(os.path.join(HERE, "megatron/fim.json"), "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")
    print(len(cases), "cases", sum(c["tokens"] != c["expected"] for c in cases), "changed")


main()
