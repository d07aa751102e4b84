#!/usr/bin/env python3
"""Makes tests/golden/hf/nemotron_h_latent: a tiny Nemotron-H whose experts compute in a width of their own.

usage: make_latent_experts.py FOLDER SEED   (torch, transformers 5.23.0)

The committed folder is that of seed 4, whose text has no end token and clear greatest logits. Answers in float64, as far
as transformers computes in it: its state spaces are in float32. Files: config.json, model.safetensors, tokens.i32 [10
steps, 4 sequences, 33], and of the first step logits.f32, logprobs.f32, entropy.f32 and grads/; expected.json has losses
and gradient norms of ten AdamW steps and a greedy continuation.
"""
import copy
import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM, NemotronHConfig, __version__

STEPS, BATCH, LENGTH, VOCAB = 10, 4, 32, 160
OPTIMIZER = {"lr": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1, "clip": 1.0}


def main(folder, seed):
    torch.manual_seed(seed)
    config = NemotronHConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], mamba_num_heads=4,
        mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=16, conv_kernel=4, n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, n_shared_experts=1,
        moe_latent_size=12, routed_scaling_factor=1.5, n_group=1, topk_group=1, max_position_embeddings=64,
        num_nextn_predict_layers=0, bos_token_id=0, eos_token_id=1, pad_token_id=None, tie_word_embeddings=False,
        use_mamba_kernels=False, initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").float()
    with torch.no_grad():
        for name, value in list(model.named_parameters()) + list(model.named_buffers()):
            if "e_score_correction_bias" in name:
                value.copy_(0.1 * torch.randn_like(value))
            elif "norm" in name:
                value.copy_(1 + 0.1 * torch.randn_like(value))
    model.save_pretrained(folder)
    model = model.double().eval()
    tokens = torch.randint(2, VOCAB, (STEPS, BATCH, LENGTH + 1))
    tokens.to(torch.int32).numpy().tofile(os.path.join(folder, "tokens.i32"))
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER["weight_decay"]}, {"params": others, "weight_decay": 0}],
        lr=OPTIMIZER["lr"], betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]), eps=OPTIMIZER["eps"])
    start = copy.deepcopy(model)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, labels = tokens[step, :, :-1], tokens[step, :, 1:]
        adam.zero_grad()
        logits = model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten())
        loss.backward()
        if step == 0:
            logp = torch.log_softmax(logits.detach().double(), -1)
            entropy = -(logp.exp() * logp).sum(-1)
            for name, value in (("logits", logits.detach()), ("entropy", entropy),
                                ("logprobs", logp.gather(-1, labels[..., None])[..., 0])):
                value.float().numpy().tofile(os.path.join(folder, name + ".f32"))
            gradients = copy.deepcopy(model)
            with torch.no_grad():
                for to, of in zip(gradients.parameters(), model.parameters()):
                    if of.grad is not None:
                        to.copy_(of.grad)
            gradients.float().save_pretrained(os.path.join(folder, "grads"))
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip"]).item())
        adam.step()
    text, margin = tokens[0, 0, :8].tolist(), float("inf")
    for _ in range(24):
        logits = start(torch.tensor([text]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        text.append(best.indices[0].item())
    expected = {"family": "nemotron_h", "batch": BATCH, "seq": LENGTH, "steps": STEPS, "vocab": VOCAB,
                "params": sum(p.numel() for p in model.parameters()), "losses": losses, "grad_norms": norms,
                "greedy_ids": text, "greedy_min_margin": margin, "transformers": __version__,
                "optimizer": OPTIMIZER}
    with open(os.path.join(folder, "expected.json"), "w", encoding="utf-8") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")
    for name in ("generation_config.json", "grads/generation_config.json"):
        if os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))


main(sys.argv[1], int(sys.argv[2]))
