"""GPT-2 124M in PyTorch, the peer of tests/bench_small_gpus.sh: prints tokens/s of training steps on the GPU that answers.

usage: bench_small_gpus.py eager|compile bf16|fp16 MICRO_BATCH LENGTH STEPS

As a user writes it: fp32 weights, autocast, scaled_dot_product_attention, fused AdamW, in fp16 a GradScaler. Random
tokens, no dropout, the vocabulary padded to 50,304. The rate is the median of the last half of the steps.
"""
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LAYERS, HEADS, WIDTH = 50304, 12, 12, 768


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(C, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if into_residual else 0.02)

    def forward(self, tokens, labels):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY).float(), labels.reshape(-1))


def main():
    mode, precision, micro_batch, length, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT2(length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, fused=device == "cuda")
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16" and device == "cuda")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    run = torch.compile(model) if mode == "compile" else model
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    rates = []
    for _ in range(steps):
        data = torch.randint(0, 50257, (micro_batch, length + 1), device=device)
        wait()
        begin = time.perf_counter()
        with torch.autocast(device, dtype=dtype):
            loss = run(data[:, :-1], data[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        wait()
        rates.append(micro_batch * length / (time.perf_counter() - begin))
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"PyTorch {torch.__version__} {mode} {precision} on {name}: loss {loss.item():.3f}, "
          f"{statistics.median(rates[len(rates) // 2:]):.0f} tokens/s")


if __name__ == "__main__":
    main()
