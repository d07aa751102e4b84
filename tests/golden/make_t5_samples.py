#!/usr/bin/env python3
"""Makes tests/golden/megatron/t5_samples.json: samples with masked spans as Megatron-Core's T5 dataset makes them.

    python3 -m venv VENV && VENV/bin/pip install numpy torch packaging pybind11
    pip download megatron-core==0.19.2 --no-deps --python-version 3.12 --only-binary=:all: && unzip megatron_core*.whl -d WHEEL
    g++ -O2 -shared -fPIC -std=c++17 -I PYBIND11 -I PYTHON WHEEL/megatron/core/datasets/helpers.cpp -o \\
        WHEEL/megatron/core/datasets/helpers_cpp.SUFFIX      # with another Python than 3.12
    PYTHONPATH=WHEEL VENV/bin/python tests/golden/make_t5_samples.py

The classes of the wheel run as they are, on a pair of files that IndexedDatasetBuilder writes and tests/test_t5_dataset.c
writes too. The tokenizer is a stand-in: tokens 7, 17, 27 ... begin with ##. The options are those of pretrain_t5.py.
"""
import json
import os
import tempfile

import numpy
import torch

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.datasets.utils import Split

VOCABULARY, SENTINELS, DOCUMENTS = 1000, 40, 30
CASES = [  # seed, encoder, decoder, --mask-prob, --short-seq-prob, first and last document, samples, words
    (1234, 32, 24, 0.15, 0.1, 0, 30, 200, True), (7, 64, 64, 0.3, 0.0, 0, 20, 40, False),
    (99, 128, 64, 0.15, 0.5, 10, 30, 60, True), (5, 12, 16, 0.9, 0.3, 3, 9, 50, False)]


class Tokenizer:
    cls, sep, mask, bos, eos, pad = -2, -3, -4, 0, 1, -5
    additional_special_tokens_ids = list(range(VOCABULARY - SENTINELS, VOCABULARY))
    unique_identifiers = {"class": "stand-in"}

    def __init__(self, words):
        self.inv_vocab = {i: "##x" if words and i % 10 == 7 else "x" for i in range(VOCABULARY)}


def sentence(document, number):
    """Lengths and tokens without a generator of random numbers, so that another language writes the same."""
    length = 600 if (document, number) == (4, 1) else 700 if (document, number) == (6, 0) else \
        1 + (document * 7 + number * 11) % 29
    return [2 + (document * 131 + number * 37 + i * i * 3 + i * 17) % (VOCABULARY - SENTINELS - 2) for i in range(length)]


def write(prefix):
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.uint16)
    for document in range(DOCUMENTS):
        count = 1 if document in (6, 11) else (document * 5) % 9
        for number in range(count):
            builder.add_item(torch.tensor(sentence(document, number)))
        builder.end_document()
    builder.finalize(prefix + ".idx")


torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
with tempfile.TemporaryDirectory() as folder:
    write(folder + "/data")
    cases = []
    for seed, encoder, decoder, mask, short, begin, end, samples, words in CASES:
        config = T5MaskedWordPieceDatasetConfig(
            random_seed=seed, sequence_length=encoder, sequence_length_decoder=decoder, blend=([folder + "/data"], None),
            split="1,0,0", path_to_cache=f"{folder}/{seed}", tokenizer=Tokenizer(words), masking_probability=mask,
            short_sequence_probability=short, masking_max_ngram=10, masking_do_full_word=True,
            masking_do_permutation=False, masking_use_longer_ngrams=False, masking_use_geometric_distribution=True)
        indexed = IndexedDataset(folder + "/data")
        dataset = T5MaskedWordPieceDataset(indexed, folder + "/data", numpy.arange(begin, end, dtype=numpy.int32), samples,
                                           Split.train, config)
        taken = []
        for i in range(samples):
            sample = dataset[i]
            inputs = sample["text_enc"][:int((sample["enc_mask"]).sum())].tolist()
            count = int(sample["loss_mask"].sum())
            taken.append([inputs, sample["text_dec"][:count].tolist(), sample["labels"][:count].tolist()])
        cases.append({"seed": seed, "encoder": encoder, "decoder": decoder, "mask_prob": mask, "short_seq_prob": short,
                      "begin": begin, "end": end, "words": words, "num_samples": len(dataset), "samples": taken})
path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "megatron", "t5_samples.json")
with open(path, "w") as file:
    json.dump({"vocabulary": VOCABULARY, "sentinels": SENTINELS, "documents": DOCUMENTS, "cases": cases}, file,
              separators=(",", ":"))
    file.write("\n")
