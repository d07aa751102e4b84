#!/usr/bin/env python3
"""The numbers of tests/golden/hf/qwen2_moe, by Hugging Face transformers in float64. Made with torch 1.13 and
transformers 4.46; needs safetensors too.

  usage: qwen2_moe/reference.py        (in tests/golden/hf; writes the folder)
"""
import json, os, sys
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.models.qwen2_moe import modeling_qwen2_moe as module

STEPS, BATCH, SEQ = 10, 4, 32
FAMILY = "qwen2_moe"

# transformers rounds softmaxes and norms to float32 on the way, whatever the model's type; here they stay as they are.
softmax = torch.nn.functional.softmax
torch.nn.functional.softmax = lambda x, dim=None, dtype=None: softmax(x, dim=dim)


def norm(self, x):
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


module.Qwen2MoeRMSNorm.forward = norm


def new_model():
    """Weights with none at 0 or 1, and routers and gates that are decided, so that every term shows."""
    torch.manual_seed(20)
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=72, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rope_theta=10000.0, rms_norm_eps=1e-6, num_experts=6,
        num_experts_per_tok=4, moe_intermediate_size=16, shared_expert_intermediate_size=24, norm_topk_prob=False,
        mlp_only_layers=[1], decoder_sparse_step=1, router_aux_loss_coef=0.0, attn_implementation="eager",
        bos_token_id=0, eos_token_id=1, torch_dtype="float32"))
    for name, param in model.named_parameters():
        std = 0.5 if name.endswith("mlp.gate.weight") or "shared_expert_gate" in name else 0.1
        mean = 1.0 if "norm" in name else 0.0
        param.data.normal_(mean, std)
    return model


def loss_of(model, rows):
    tokens = torch.tensor(rows[:, :-1].astype(np.int64))
    labels = torch.tensor(rows[:, 1:].astype(np.int64))
    logits = model(tokens).logits
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(-1, labels[..., None])[..., 0]
    return -chosen.mean(), logits, chosen, -(logprobs.exp() * logprobs).sum(-1)


def write(name, values):
    np.ascontiguousarray(values.detach().numpy(), np.float32).tofile(os.path.join(FAMILY, name))


model = new_model()
model.save_pretrained(FAMILY)
os.path.exists(FAMILY + "/generation_config.json") and os.remove(FAMILY + "/generation_config.json")
model = Qwen2MoeForCausalLM.from_pretrained(FAMILY, torch_dtype=torch.float64, attn_implementation="eager")
rows = np.random.default_rng(20).integers(0, 96, (STEPS, BATCH, SEQ + 1)).astype(np.int32)
rows.tofile(FAMILY + "/tokens.i32")

loss, logits, chosen, entropy = loss_of(model, rows[0])
write("logits.f32", logits), write("logprobs.f32", chosen), write("entropy.f32", entropy)
loss.backward()
os.makedirs(FAMILY + "/grads", exist_ok=True)
save_file({n: p.grad.float().contiguous() for n, p in model.named_parameters()}, FAMILY + "/grads/model.safetensors",
          {"format": "pt"})

text, margin = [int(t) for t in rows[0, 0, :8]], float("inf")
with torch.no_grad():
    while len(text) < SEQ:
        best = model(torch.tensor([text])).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        text.append(int(best.indices[0]))

settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
optimizer = torch.optim.AdamW(
    [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings["weight_decay"]},
     {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}],
    lr=settings["lr"], betas=(settings["beta1"], settings["beta2"]), eps=settings["eps"])
losses, norms = [], []
for step in range(STEPS):
    optimizer.zero_grad()
    loss = loss_of(model, rows[step])[0]
    loss.backward()
    norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])))
    losses.append(float(loss))
    optimizer.step()

expected = {"family": FAMILY, "batch": BATCH, "seq": SEQ, "steps": STEPS, "vocab": 96,
            "params": sum(p.numel() for p in model.parameters()), "losses": losses, "grad_norms": norms,
            "greedy_ids": text, "greedy_min_margin": margin, "transformers": transformers.__version__,
            "optimizer": settings}
with open(FAMILY + "/expected.json", "w") as file:
    json.dump(expected, file, indent=1)
