#!/usr/bin/env python3
"""Times the `generate` of transformers on one GPU, to compare infer with: a randomly initialised model of a config.json
in bf16, prompts of random tokens of one length, and new tokens up to a fixed number, since no token ends a sequence.

  usage: transformers_generate.py [--config data/configs/llama3-8b.json] [--batch 256] [--prompt-tokens 512]
             [--new-tokens 512] [--mode greedy|sample|both] [--attention auto|sdpa|flash_attention_2]

The cache is the default of `generate`, a DynamicCache, which appends a token to each layer's keys and values by copying
them. Attention is flash_attention_2 where the package flash_attn is installed, else PyTorch's sdpa. Sampling draws from
all tokens at temperature 1. A short generation with the same batch comes first and is not timed. For each mode a line
has the seconds of prefill (up to the first new token of all sequences) and of decode (the other new tokens), and the
tokens per second of decode. 256 sequences of 512 + 512 tokens of Llama 3 8B take 16 GB of weights and 34 GB of cache.

The exit status is 77 where torch, transformers or a GPU is absent.
"""
import argparse
import json
import sys
import time


def attention_of(wanted):
    if wanted != "auto":
        return wanted
    return "flash_attention_2" if transformers.utils.is_flash_attn_2_available() else "sdpa"


def create(path, device, dtype, attention):
    with open(path, encoding="utf-8") as file:
        fields = json.load(file)
    fields.update(eos_token_id=None, bos_token_id=None)  # then `generate` has no token that ends a sequence
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def generate(model, device, batch, prompt_tokens, new_tokens, samples):
    """Seconds of prefill and of decode."""
    tokens = torch.randint(0, model.config.vocab_size, (batch, prompt_tokens), device=device)
    prefilled = []

    def note_prefill(input_ids, scores, **unused):
        """A stopping criterion, called once for each new token of all sequences; it stops none."""
        if not prefilled:
            synchronize(device)
            prefilled.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if samples else {"do_sample": False}
    synchronize(device)
    begin = time.perf_counter()
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, pad_token_id=0,
                         stopping_criteria=transformers.StoppingCriteriaList([note_prefill]), **sampling)
    synchronize(device)
    end = time.perf_counter()
    assert out.shape == (batch, prompt_tokens + new_tokens), f"generate returned {tuple(out.shape)}"
    return prefilled[0] - begin, end - prefilled[0]


def read_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="data/configs/llama3-8b.json")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--mode", choices=("greedy", "sample", "both"), default="both")
    parser.add_argument("--attention", choices=("auto", "sdpa", "flash_attention_2"), default="auto")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.new_tokens < 2:
        parser.error("--new-tokens must be 2 or more: the first one belongs to the prefill")
    return arguments


def main():
    a = read_arguments()
    if a.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU answers")
        return 77
    torch.manual_seed(1)
    attention = attention_of(a.attention)
    model = create(a.config, a.device, torch.bfloat16, attention)
    where = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {where}: {a.config}, "
          f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters in bf16, {attention}; "
          f"{a.batch} sequences of {a.prompt_tokens} + {a.new_tokens} tokens", flush=True)
    with torch.inference_mode():
        for samples in {"greedy": (False,), "sample": (True,), "both": (False, True)}[a.mode]:
            generate(model, a.device, a.batch, min(a.prompt_tokens, 32), 4, samples)
            prefill, decode = generate(model, a.device, a.batch, a.prompt_tokens, a.new_tokens, samples)
            steps = a.new_tokens - 1
            print(f"{'sampling' if samples else 'greedy'}: prefill {prefill:.3f} s "
                  f"({a.batch * a.prompt_tokens / prefill:.0f} tokens/s), decode {decode:.3f} s "
                  f"({a.batch * steps / decode:.0f} tokens/s, {1e3 * decode / steps:.2f} ms a step)", flush=True)
    if a.device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    return 0


try:
    import torch
    import transformers
except ImportError as why:
    print(f"skipped: {why}")
    sys.exit(77)
sys.exit(main())
