#!/usr/bin/env python3
"""Makes the checkpoints of Megatron-Core in tests/golden/megatron_dist, and checks what this program wrote.

    python3.12 -m venv VENV && VENV/bin/pip install megatron-core==0.19.2 torch numpy psutil einops
    VENV/bin/python tests/golden/make_megatron_checkpoints.py               # makes all; starts torchrun itself
    VENV/bin/python tests/golden/make_megatron_checkpoints.py load FOLDER NAME TP   # loads FOLDER, compares with NAME
    VENV/bin/python tests/golden/make_megatron_checkpoints.py resume FOLDER HF TYPE FORM TP # loads also the optimizer

`resume` compares weights and the optimizer's state of FOLDER, an iteration of a Llama-like model, with those of HF, the
same iteration saved as a Hugging Face folder. TYPE: fp32 or bf16; FORM: plain or distributed.

It runs on the CPU: gloo in place of NCCL, the layers of the local specification, and stand-ins for the calls that ask
for a GPU. Each folder NAME holds iter_0000007 as Megatron-LM leaves it, its tracker, and expected.f32: the
log-probabilities of tokens 1 to 15 by Megatron-Core's own forward pass, in the order of their places. Models with
multi-token prediction have losses.f64 too, the mean losses of the model and of each depth, and the gradients of a step
in place of the weights of a second folder, NAME_gradients.
"""
import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import warnings

warnings.filterwarnings("ignore")
HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "megatron_dist")
TOKENS = 16
COMMON = dict(num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2,
              kv_channels=8, normalization="RMSNorm", swiglu=True, add_bias_linear=False, add_qkv_bias=False,
              untie_embeddings_and_output_weights=True, position_embedding_type="rope", rotary_base=10000,
              rotary_percent=1.0, max_position_embeddings=32, vocab_size=100, padded_vocab_size=128,
              qk_layernorm=False, norm_epsilon=1e-5, num_experts=None, group_query_attention=True)
ROUTED = dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02,
              moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
              padded_vocab_size=100)  # Megatron-Core's losses have logits of the padding
BUCKETS = dict(hidden_size=8, ffn_hidden_size=12, kv_channels=4, qk_layernorm=True, bf16=True)
BIASED = dict(normalization="LayerNorm", swiglu=False, add_bias_linear=True, add_qkv_bias=True, num_layers=1,
              qk_layernorm=False)
# name: (ranks, format, with the optimizer's state, what differs from COMMON)
CASES = {
    "dense_tp2": (2, "torch_dist", False, {}),
    "gpt_tp2": (2, "torch_dist", False,
                dict(normalization="LayerNorm", swiglu=False, add_bias_linear=True, add_qkv_bias=True,
                     untie_embeddings_and_output_weights=False, position_embedding_type="learned_absolute",
                     num_query_groups=4, group_query_attention=False, kv_channels=4, num_layers=1)),
    "moe": (1, "torch_dist", False,
            dict(num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2, moe_layer_freq=[0, 1],
                 moe_shared_expert_intermediate_size=8, moe_router_pre_softmax=False)),
    "torch_tp2": (2, "torch", False, {}),
    # two virtual stages on each of two pipeline ranks; experts on two ranks; latent attention
    "torch_vpp2": (2, "torch", False, dict(num_layers=4, pp=2, vpp=2, hidden_size=8, ffn_hidden_size=12)),
    "torch_ep2": (2, "torch", False,
                  dict(num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2, moe_layer_freq=[0, 1], ep=2,
                       moe_router_pre_softmax=False, hidden_size=8, ffn_hidden_size=12)),
    "mla_pp2": (2, "torch_dist", False,
                dict(multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=4,
                     v_head_dim=8, rope_type="rope", rotary_scaling_factor=1.0, pp=2, num_query_groups=4,
                     group_query_attention=False, qk_layernorm=True, norm_epsilon=1e-6)),
    # latent attention without norms of its latents, beside LayerNorm, biases and learned positions; and norms of another epsilon
    "mla_plain": (1, "torch_dist", False,
                  dict(multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=8,
                       qk_pos_emb_head_dim=4, v_head_dim=8, rope_type="rope", rotary_scaling_factor=1.0,
                       num_layers=1, hidden_size=8, ffn_hidden_size=12, num_query_groups=4,
                       group_query_attention=False, normalization="LayerNorm", add_bias_linear=True,
                       position_embedding_type="learned_absolute")),
    "mla_epsilon": (1, "torch_dist", False,
                    dict(multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=4,
                         v_head_dim=8, rope_type="rope", rotary_scaling_factor=1.0, num_layers=1, hidden_size=8,
                         ffn_hidden_size=12, num_query_groups=4, group_query_attention=False, qk_layernorm=True,
                         norm_epsilon=3e-2)),
    # RoPE as in Llama 3.1, whose band of wavelengths between 2048 and 8192 has the last pair of channels
    "llama31": (1, "torch_dist", False, dict(use_rope_scaling=True, rope_scaling_factor=8.0, rotary_base=3000)),
    "interleaved": (1, "torch_dist", False,
                    dict(rotary_interleaved=True, rotary_seq_len_interpolation_factor=4, num_layers=1, hidden_size=8,
                         ffn_hidden_size=12)),
    "mla_yarn": (1, "torch_dist", False,
                 dict(multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=8,
                      v_head_dim=8, rope_type="yarn", rotary_scaling_factor=8.0, original_max_position_embeddings=8,
                      beta_fast=4.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=0.7, num_query_groups=4,
                      group_query_attention=False, qk_layernorm=True, norm_epsilon=1e-6)),
    # a gated delta net, then attention with gates; norms hold their weights minus 1
    "delta_tp2": (2, "torch_dist", False,
                  dict(experimental_attention_variant="gated_delta_net", linear_attention_freq=[1, 0],
                       linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=4,
                       linear_conv_kernel_dim=4, attention_output_gate=True, apply_layernorm_1p=True, qk_layernorm=True,
                       rotary_percent=0.5, norm_epsilon=1e-6)),
    # layers of one half each: Mamba-2, attention, MLP
    "hybrid_tp2": (2, "torch_dist", False,
                   dict(hybrid_layer_pattern="M*-M", num_layers=4, mamba_num_heads=4, mamba_head_dim=6, mamba_state_dim=5,
                        mamba_num_groups=2, position_embedding_type="none", swiglu=False, squared_relu=True)),
    # multi-token prediction by one module that is repeated, with a router's losses; also its gradients, see gradients()
    "mtp_repeated": (1, "torch_dist", False,
                     dict(mtp_num_layers=3, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.7, num_experts=4,
                          moe_ffn_hidden_size=8, moe_router_topk=2, moe_layer_freq=[1], moe_router_pre_softmax=False,
                          num_layers=1, **ROUTED)),
    "mtp_hybrid": (1, "torch_dist", False,
                   dict(mtp_num_layers=2, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3,
                        hybrid_layer_pattern="M*E/*E/*E", num_layers=3, mamba_num_heads=4, mamba_head_dim=6,
                        mamba_state_dim=5, mamba_num_groups=2, position_embedding_type="none", swiglu=False,
                        squared_relu=True, num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2,
                        moe_router_pre_softmax=False, moe_shared_expert_intermediate_size=8, **ROUTED)),
    # the distributed optimizer's state as its buckets, and beside it, NAME_space, the same as tensors of the model
    "buckets_dp2": (2, "torch_dist", "dp_reshardable", dict(BUCKETS, dp=2)),
    "buckets_tp2": (2, "torch_dist", "dp_reshardable", dict(BUCKETS, **BIASED)),
    "buckets_many": (2, "torch_dist", "dp_reshardable", dict(BUCKETS, bucket_size=600, **BIASED)), # the state of buckets_tp2
    "buckets_pp2": (2, "torch_dist", "dp_reshardable", dict(BUCKETS, pp=2)),
    "dense": (1, "torch_dist", True, dict(num_layers=1, hidden_size=8, ffn_hidden_size=12, qk_layernorm=True)),
}


def stand_ins():
    import torch
    mamba_stand_ins()
    from megatron.core.tensor_parallel import random
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = lambda *a: None
    torch.cuda.synchronize = lambda *a: None
    torch.cuda.get_rng_state = lambda *a: torch.get_rng_state()

    def on_cpu(make):
        return lambda *a, **k: make(*a, **({**k, "device": "cpu"} if str(k.get("device")).startswith("cuda") else k))
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *a, **k: self
    type_of = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: (
        type_of(self, *a, **k) if a or k else type_of(self).replace("torch.", "torch.cuda."))
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    begin = DotProductAttention.__init__
    DotProductAttention.__init__ = lambda self, *a, **k: begin(
        self, *a, **{key: value for key, value in k.items() if key not in ("k_channels", "v_channels")})
    random.CudaRNGStatesTracker.fork = lambda self, *a: contextlib.nullcontext()
    from megatron.core.ssm.gated_delta_net import common
    common.HAVE_FLA = True  # asked for, and not called where algorithms are deterministic
    common.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def norms():
    """RMSNorm alone and before a column-parallel linear, as those of Transformer Engine."""
    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear

    def normalize(x, weight, eps, config):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * (config.layernorm_zero_centered_gamma + weight)

    def initial(config, size):
        return torch.nn.Parameter(torch.full((size,), 0.0 if config.layernorm_zero_centered_gamma else 1.0))

    class Norm(torch.nn.Module):
        def __init__(self, config, hidden_size, eps=1e-5):
            super().__init__()
            self.weight, self.eps, self.config = initial(config, hidden_size), eps, config

        def forward(self, x):
            return normalize(x, self.weight, self.eps, self.config)

    class NormAndColumns(ColumnParallelLinear):
        def __init__(self, input_size, output_size, *, config, **words):
            super().__init__(input_size, output_size, config=config, **words)
            self.layer_norm_weight = initial(config, input_size)

        def forward(self, x, *a, **k):
            return super().forward(
                normalize(x, self.layer_norm_weight, self.config.layernorm_epsilon, self.config), *a, **k)
    return Norm, NormAndColumns


def mamba_stand_ins():
    """The functions of mamba_ssm that Megatron-Core calls in training, token by token."""
    import torch
    import types

    class Grouped(torch.nn.Module):
        def __init__(self, size, eps, group_size, norm_before_gate, device, dtype):
            super().__init__()
            self.weight, self.eps, self.group_size = torch.nn.Parameter(torch.ones(size)), eps, group_size

        def forward(self, x):
            parts = x.unflatten(-1, (-1, self.group_size))
            return (parts * torch.rsqrt((parts * parts).mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight

    def scan(zxbcdt, taps, bias, dt_bias, A, D, chunk_size, activation, headdim, ngroups, norm_before_gate, seq_idx):
        heads, channels, length = len(A), len(taps), zxbcdt.shape[1]
        inner = heads * headdim
        states = (channels - inner) // (2 * ngroups)
        z, conv, dt = zxbcdt.split([inner, channels, heads], -1)
        conv = torch.nn.functional.pad(conv.transpose(1, 2), (taps.shape[1] - 1, 0))
        conv = torch.nn.functional.silu(torch.conv1d(conv, taps[:, None], bias, groups=channels)).transpose(1, 2)
        x, B, C = conv.split([inner, ngroups * states, ngroups * states], -1)
        x = x.unflatten(-1, (heads, headdim))
        B, C = (m.unflatten(-1, (ngroups, states)).repeat_interleave(heads // ngroups, 2) for m in (B, C))
        dt = torch.nn.functional.softplus(dt + dt_bias)
        state, out = torch.zeros(x.shape[0], heads, headdim, states), []
        for t in range(length):
            decay = torch.exp(dt[:, t] * A)[..., None, None]
            state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            out.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
        return torch.stack(out, 1).flatten(2) * torch.nn.functional.silu(z)
    parts = {"layernorm_gated": dict(RMSNorm=Grouped),
             "ssd_combined": dict(mamba_chunk_scan_combined=scan, mamba_split_conv1d_scan_combined=scan)}
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        sys.modules[name] = types.ModuleType(name)
    for name, functions in parts.items():
        module = sys.modules["mamba_ssm.ops.triton." + name] = types.ModuleType(name)
        module.__dict__.update(functions)


def hybrid_model(c, a):
    """Megatron-Core's hybrid model with its own specification, but for Transformer Engine's modules."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock, MultiTokenPredictionBlockSubmodules, MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules)
    from megatron.core.transformer.transformer_layer import MoETransformerLayer
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from functools import partial
    hybrid_block.TENorm, columns = norms()
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=columns, out_proj=RowParallelLinear))
    attention = ModuleSpec(module=SelfAttention, params=dict(attn_mask_type=AttnMaskType.causal),
                           submodules=SelfAttentionSubmodules(linear_qkv=columns, core_attention=DotProductAttention,
                                                              linear_proj=RowParallelLinear))
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=columns, linear_fc2=RowParallelLinear))
    spec = ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer,
                               submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add)),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
            self_attention=attention, self_attn_bda=get_bias_dropout_add)),
        moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=hybrid_block.TENorm, mlp_bda=get_bias_dropout_add,
            mlp=get_moe_module_spec(use_te=False, num_experts=a["num_experts"] or 1, moe_grouped_gemm=False))),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[ModuleSpec(
                module=MultiTokenPredictionLayer, submodules=MultiTokenPredictionLayerSubmodules(
                    enorm=hybrid_block.TENorm, hnorm=hybrid_block.TENorm, layer_norm=hybrid_block.TENorm,
                    eh_proj=ColumnParallelLinear))])),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=TransformerLayerSubmodules(
            mlp=mlp, mlp_bda=get_bias_dropout_add))))
    return HybridModel(c, spec, vocab_size=a["padded_vocab_size"], max_sequence_length=a["max_position_embeddings"],
                       hybrid_layer_pattern=a["hybrid_layer_pattern"], position_embedding_type="none",
                       share_embeddings_and_output_weights=False, parallel_output="mtp_num_layers" in a)


def delta_spec(c):
    """A gated delta net before attention with gates, as for Transformer Engine, whose norms hold weights minus 1."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    Norm, NormAndColumns = norms()
    layers = [get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm") for _ in range(2)]
    for layer in layers:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layers[1].submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = Norm
    layers[0].submodules.input_layernorm = IdentityOp
    layers[0].submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(
        in_proj=NormAndColumns, out_norm=Norm, out_proj=RowParallelLinear))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def start(tp, pp=1, vpp=None, ep=1):
    import torch.distributed as dist
    for key, value in dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep)
    if ep > 1:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        with contextlib.suppress(Exception):
            model_parallel_cuda_manual_seed(7)


def build(tp, shape, chunk=None):
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec, get_gpt_layer_local_spec, get_gpt_mtp_block_spec)
    from megatron.core.transformer import TransformerConfig
    a = {**COMMON, **shape}
    torch.manual_seed(7)
    moe = {k: a[k] for k in ("moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_router_pre_softmax",
                             "moe_shared_expert_intermediate_size") if k in a}
    if a["num_experts"]:
        moe.update(num_moe_experts=a["num_experts"], moe_token_dispatcher_type="allgather",
                   moe_router_load_balancing_type="none")
        moe.update({k: a[k] for k in ROUTED if k in a and k.startswith("moe_")})
    kind = TransformerConfig
    if a.get("multi_latent_attention"):
        from megatron.core.transformer.transformer_config import MLATransformerConfig as kind
        moe.update({k: a[k] for k in ("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
                                      "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_scaling_factor",
                                      "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
                                      "mscale_all_dim") if k in a},
                   rotary_base=a["rotary_base"])
    if a.get("experimental_attention_variant"):
        moe.update({k: a[k] for k in a if k.startswith(("linear_", "experimental_")) or k == "attention_output_gate"},
                   layernorm_zero_centered_gamma=True, deterministic_mode=True)
    moe.update({k: a[k] for k in a if k.startswith(("mamba_", "mtp_"))})
    pp, vpp = a.get("pp", 1), a.get("vpp")
    c = kind(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp, pipeline_dtype=torch.float32,
        expert_model_parallel_size=a.get("ep", 1),
        num_layers=a["num_layers"], hidden_size=a["hidden_size"], ffn_hidden_size=a["ffn_hidden_size"],
        num_attention_heads=a["num_attention_heads"], num_query_groups=a["num_query_groups"],
        kv_channels=a["kv_channels"], use_cpu_initialization=True, gated_linear_unit=a["swiglu"],
        activation_func=(torch.nn.functional.silu if a["swiglu"] else
                         (lambda x: torch.relu(x) ** 2) if a.get("squared_relu") else torch.nn.functional.gelu),
        normalization=a["normalization"], add_bias_linear=a["add_bias_linear"], add_qkv_bias=a["add_qkv_bias"],
        rotary_interleaved=a.get("rotary_interleaved", False), tensor_model_parallel_size=tp,
        params_dtype=torch.bfloat16 if a.get("bf16") else torch.float32,
        bf16=bool(a.get("bf16")), bias_activation_fusion=False, hidden_dropout=0,
        attention_dropout=0, layernorm_epsilon=a["norm_epsilon"], qk_layernorm=a["qk_layernorm"],
        init_method_std=0.3, masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, **moe)
    stage, stages = (torch.distributed.get_rank() if pp > 1 else 0), pp * (vpp or 1)
    number = stage + (chunk or 0) * pp
    if a.get("experimental_attention_variant"):
        spec = delta_spec(c)
    elif a.get("multi_latent_attention"):
        spec = get_gpt_layer_local_spec(qk_layernorm=a["qk_layernorm"], multi_latent_attention=True,
                                        normalization=a["normalization"])
    elif a["num_experts"]:
        spec = get_gpt_decoder_block_spec(c, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=a["qk_layernorm"], normalization=a["normalization"])
    model = hybrid_model(c, a) if a.get("hybrid_layer_pattern") else GPTModel(
        c, spec, vocab_size=a["padded_vocab_size"], max_sequence_length=a["max_position_embeddings"],
        share_embeddings_and_output_weights=not a["untie_embeddings_and_output_weights"],
        position_embedding_type=a["position_embedding_type"], rotary_base=a["rotary_base"],
        parallel_output="mtp_num_layers" in a,
        rotary_percent=a["rotary_percent"], rope_scaling=a.get("use_rope_scaling", False),
        rope_scaling_factor=a.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=a.get("rotary_seq_len_interpolation_factor"),
        pre_process=number == 0, post_process=number == stages - 1, vp_stage=chunk,
        mtp_block_spec=get_gpt_mtp_block_spec(c, spec, use_transformer_engine=False) if "mtp_num_layers" in a else None)
    generator = torch.Generator().manual_seed(11 + torch.distributed.get_rank())
    replicated = torch.Generator().manual_seed(5 + number)
    for name, p in model.named_parameters():  # norms and biases other than 1 and 0
        if p.dim() == 1:
            whole = getattr(p, "tensor_model_parallel", False)
            p.data += 0.1 * torch.randn(p.shape, generator=generator if whole else replicated)
    return model, a


def through_stages(models, a, tokens, mask):
    """The logits of a pipeline: hidden states go from stage to stage by hand."""
    import torch
    import torch.distributed as dist
    hidden = torch.empty(TOKENS, 1, a["hidden_size"])
    for chunk, model in enumerate(models):
        for stage in range(a["pp"]):
            if dist.get_rank() == stage:
                if (chunk, stage) != (0, 0):
                    model.set_input_tensor(hidden)
                hidden = model(tokens, torch.arange(TOKENS)[None], mask)
            if (chunk, stage) == (len(models) - 1, a["pp"] - 1):
                return hidden
            dist.broadcast(hidden, stage)


def log_probabilities(model, a):
    import torch
    tokens = (torch.arange(TOKENS) * 7 % a["vocab_size"])[None]
    mask = torch.tril(torch.ones(1, 1, TOKENS, TOKENS)) < 0.5
    with torch.no_grad():
        if a.get("pp", 1) > 1:
            logits = through_stages(model, a, tokens, mask)
            if torch.distributed.get_rank() != a["pp"] - 1:
                return None
        else:
            logits = model(tokens, torch.arange(TOKENS)[None], mask)
        logits = logits.float()[0, :, : a["vocab_size"]]
    logp = torch.log_softmax(logits, -1)
    return torch.tensor([logp[i, tokens[0, i + 1]] for i in range(TOKENS - 1)])


def gradients(model, a):
    """The losses of one sequence; puts the gradients of their sum, as Megatron-Core weights it, in place of weights, and
    updates the biases that balance the experts."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    parallel_state.get_data_parallel_group = lambda *a, **k: None
    MTPLossLoggingHelper.tracker.clear()  # of an earlier forward pass
    tokens = (torch.arange(TOKENS + 1) * 7 % a["vocab_size"])[None]
    mask = torch.tril(torch.ones(1, 1, TOKENS, TOKENS)) < 0.5
    model.train()
    loss = model(tokens[:, :-1], torch.arange(TOKENS)[None], mask, labels=tokens[:, 1:].contiguous(),
                 loss_mask=torch.ones(1, TOKENS)).mean()
    loss.backward()
    losses = [loss.item()] + MTPLossLoggingHelper.tracker["loss_values"].tolist()
    for p in model.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    for router in model.modules():
        if getattr(router, "expert_bias", None) is not None:
            router.expert_bias.copy_(get_updated_expert_bias(router.local_tokens_per_expert, router.expert_bias, 1e-3))
    return losses


def args_of(a, tp):
    from megatron.core.transformer.enums import AttnBackend
    import torch
    args = argparse.Namespace(**a)
    args.tensor_model_parallel_size = tp
    args.pipeline_model_parallel_size = a.get("pp", 1)
    args.virtual_pipeline_model_parallel_size = a.get("vpp")
    args.expert_model_parallel_size = a.get("ep", 1)
    args.consumed_train_samples = 112
    args.consumed_valid_samples = 32
    args.params_dtype = torch.float32
    args.attention_backend = AttnBackend.auto
    args.use_rotary_position_embeddings = False
    args.rotary_interleaved = a.get("rotary_interleaved", False)
    args.apply_layernorm_1p = a.get("apply_layernorm_1p", False)
    args.squared_relu = a.get("squared_relu", False)
    return args


def save_buckets(model, a, common, folder, form):
    """One step of the distributed optimizer, and its state in two forms: `form`, and fully_reshardable."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    model.bfloat16()
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce="bucket_size" in a,
                                           grad_reduce_in_fp32=True, bucket_size=a.get("bucket_size"))
    wrapped = DistributedDataParallel(model.config, config, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16,
                        use_distributed_optimizer=True), [wrapped])
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    split, whole = (torch.Generator().manual_seed(5 + dist.get_rank(group))
                    for group in (None, inner.data_parallel_group))
    for group in inner.optimizer.param_groups:
        for p in group["params"]:
            own = split if getattr(p, "tensor_model_parallel", False) else whole
            if getattr(p, "shared", False):  # both copies of a tied embedding
                own = torch.Generator().manual_seed(3)
            p.grad = torch.randn(p.shape, generator=own)
    inner.optimizer.step()
    inner._copy_main_params_to_model_params()
    for buffer in inner.buffers:
        for bucket in buffer.buckets:  # every data-parallel rank gets the others' shards
            parts = list(bucket.param_data.chunk(dist.get_world_size(buffer.data_parallel_group)))
            dist.all_gather(parts, parts[dist.get_rank(buffer.data_parallel_group)].clone(),
                            group=buffer.data_parallel_group)
    for space in (form,) if "bucket_size" in a else (form, "fully_reshardable"):
        metadata = dict(distrib_optim_sharding_type=space, singleton_local_shards=False, chained_optim_avoid_prefix=True,
                        distrib_optim_fully_reshardable_mem_efficient=False, dp_cp_group=inner.data_parallel_group)
        state = dict(model.sharded_state_dict(metadata=metadata), **common)
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        target = folder if space == form else folder + "_space"
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            os.makedirs(os.path.join(target, "iter_0000007"))
            with open(os.path.join(target, "latest_checkpointed_iteration.txt"), "w") as file:
                file.write("7")
        dist.barrier()
        dist_checkpointing.save(state, os.path.join(target, "iter_0000007"), content_metadata=metadata and {
            k: v for k, v in metadata.items() if k != "dp_cp_group"})


def make(name):
    import numpy
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    tp, form, optim, shape = CASES[name]
    stand_ins()
    pp, ep = shape.get("pp", 1), shape.get("ep", 1)
    tp //= pp * ep * shape.get("dp", 1)
    start(tp, pp, shape.get("vpp"), ep)
    model, a = build(tp, shape, 0 if "vpp" in shape else None)
    chunks = [model] + [build(tp, shape, i)[0] for i in range(1, shape.get("vpp", 1))]
    if pp > 1 and not isinstance(optim, str):
        model = chunks
    folder = os.path.join(HERE, name)
    iteration = os.path.join(folder, "iter_0000007")
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(iteration)
    dist.barrier()
    common = dict(args=args_of(a, tp), checkpoint_version=3.0, iteration=7,
                  opt_param_scheduler=dict(max_lr=1e-3, num_steps=112))
    if isinstance(optim, str):
        return save_buckets(model, a, common, folder, optim)
    if form == "torch":
        rank = dist.get_rank()
        part = os.path.join(iteration, "mp_rank_%02d" % (rank % tp) + ("_%03d" % rank if pp * ep > 1 else ""))
        os.makedirs(part)
        models = {"model%d" % i if len(chunks) > 1 else "model": chunk.state_dict_for_save_checkpoint()
                  for i, chunk in enumerate(chunks)}
        torch.save(dict(common, **models), os.path.join(part, "model_optim_rng.pt"))
    else:
        state = dict(chunks[0].sharded_state_dict(metadata=dict(singleton_local_shards=False)), **common)
        if optim:
            from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
            wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
            optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1,
                                                               params_dtype=torch.float32), [wrapped])
            for p in model.parameters():
                p.main_grad = torch.linspace(-1, 1, p.numel()).reshape(p.shape)
                p.grad = p.main_grad
            inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
            inner.optimizer.step()
            state = dict(model.sharded_state_dict(metadata=dict(singleton_local_shards=False)), **common)
            state["optimizer"] = optimizer.sharded_state_dict(state, metadata=dict(singleton_local_shards=False))
        dist_checkpointing.save(state, iteration)
    expected = log_probabilities(model, a)
    if expected is not None and dist.get_rank() == (pp - 1 if pp > 1 else 0):
        with open(os.path.join(folder, "latest_checkpointed_iteration.txt"), "w") as file:
            file.write("7")
        expected.numpy().astype(numpy.float32).tofile(os.path.join(folder, "expected.f32"))
    if "mtp_num_layers" in shape:
        losses = gradients(model, a)
        numpy.array(losses).tofile(os.path.join(folder, "losses.f64"))
        shutil.rmtree(folder + "_gradients", ignore_errors=True)
        os.makedirs(folder + "_gradients/iter_0000007")
        state = dict(model.sharded_state_dict(metadata=dict(singleton_local_shards=False)), **common)
        dist_checkpointing.save(state, folder + "_gradients/iter_0000007")
        with open(os.path.join(folder + "_gradients", "latest_checkpointed_iteration.txt"), "w") as file:
            file.write("7")


def read_safetensors(path):
    import json
    import torch
    with open(path, "rb") as file:
        data = file.read()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    types = dict(F32=torch.float32, BF16=torch.bfloat16)
    base = 8 + int.from_bytes(data[:8], "little")
    return {name: torch.frombuffer(bytearray(data[base + e["data_offsets"][0] : base + e["data_offsets"][1]]),
                                   dtype=types[e["dtype"]]).reshape(e["shape"])
            for name, e in header.items() if name != "__metadata__"}


def hf_tensor(tensors, prefix, name, a):
    """The tensor of Megatron-Core's local specification from those of Hugging Face."""
    import torch
    flat = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight",
            "decoder.final_layernorm.weight": "model.norm.weight"}
    if name in flat:
        return tensors[prefix + flat[name]]
    layer, rest = name.split(".", 3)[2:]
    at = f"{prefix}model.layers.{layer}."
    if rest == "self_attention.linear_qkv.weight":
        groups = [tensors[f"{at}self_attn.{x}_proj.weight"].reshape(a["num_query_groups"], -1, a["hidden_size"])
                  for x in "qkv"]
        return torch.cat(groups, 1).reshape(-1, a["hidden_size"])
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([tensors[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    return tensors[at + {"self_attention.linear_proj.weight": "self_attn.o_proj.weight",
                         "mlp.linear_fc2.weight": "mlp.down_proj.weight", "input_layernorm.weight":
                         "input_layernorm.weight", "pre_mlp_layernorm.weight": "post_attention_layernorm.weight"}[rest]]


def part_of(whole, p, name, tp, rank):
    """The rows or columns that a tensor rank has."""
    import torch
    if tp == 1 or whole.shape == p.shape:
        return whole
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    if whole.shape[0] != p.shape[0] and whole.dim() == p.dim() and not name.startswith(("embedding", "output")):
        return whole.chunk(tp)[rank]
    return whole if name.startswith(("embedding", "output")) else whole.chunk(tp, 1)[rank]


def resume(folder, hf, kind, form, tp):
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    stand_ins()
    start(tp)
    model, a = build(tp, dict(bf16=kind == "bf16"))
    if kind == "bf16":
        model.bfloat16()
    distributed = form == "distributed"
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=0.0, weight_decay=0.01, bf16=kind == "bf16",
                        use_distributed_optimizer=distributed,
                        params_dtype=torch.bfloat16 if kind == "bf16" else torch.float32), [wrapped])
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    if distributed:  # torch's Adam has no state before its first step, which Megatron-Core counts on
        for group in inner.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        inner.optimizer.step()
        set_states = inner._set_main_param_and_optimizer_states  # which misses torch's tensor of steps, set before
        inner._set_main_param_and_optimizer_states = lambda p, states: set_states(p, {**states, "step": None})
    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=common))
    metadata["dp_cp_group"] = dist.group.WORLD if tp == 1 else None
    state = dict(model=model.sharded_state_dict(metadata=metadata))
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(state, folder)
    model.load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    weights, moments = (read_safetensors(os.path.join(hf, f"{x}.safetensors")) for x in ("model", "optimizer"))
    rank, compared = dist.get_rank(), 0
    for name, p in model.named_parameters():
        states = {"": p.data}
        if distributed:
            own = inner._get_main_param_and_optimizer_states(p)
            states.update({k: own[k] for k in ("exp_avg", "exp_avg_sq")})
            if kind == "bf16":
                states["master"] = own["param"]
        else:
            main = getattr(p, "main_param", p) if kind == "bf16" else p
            states.update({k: inner.optimizer.state[main][k] for k in ("exp_avg", "exp_avg_sq")})
            if kind == "bf16":
                states["master"] = main
        for key, got in states.items():
            wanted = part_of(hf_tensor(moments if key else weights, key + "." if key else "", name, a), p, name, tp, rank)
            got = got.reshape(-1, *wanted.shape[1:]) if got.numel() != wanted.numel() else got.reshape(wanted.shape)
            if name.startswith(("embedding", "output")):  # with padding
                rows = p.shape[0]
                wanted = wanted[rank * rows : (rank + 1) * rows]
                got = got[: wanted.shape[0]]
            assert torch.equal(got.float(), wanted.float()), (name, key)
            compared += 1
    steps = {int(s) for s in [g.get("step", 0) for g in inner.optimizer.param_groups]}
    assert steps == {common["iteration"]}, steps
    if rank == 0:
        print("equal tensors:", compared, "iteration:", common["iteration"], "samples:",
              common["args"].consumed_train_samples)


def load(folder, name, tp):
    import numpy
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    shape = {key: value for key, value in CASES[name][3].items() if key not in ("pp", "vpp", "ep")}
    stand_ins()
    start(tp)
    model, a = build(tp, shape)
    for p in model.parameters():
        p.data.zero_()
    state = model.sharded_state_dict(metadata=dict(singleton_local_shards=False))
    if a["num_experts"] and "moe_layer_freq" in a:  # the local specification names the norm before experts as that before a dense MLP
        for part in state.values():
            if part.key.endswith(".mlp.linear_fc1.layer_norm_weight") and a["moe_layer_freq"][int(part.key.split(".")[2])]:
                part.key = part.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    if a.get("multi_latent_attention"):  # and norms of latents apart from the linears behind them
        for part in state.values():
            for x in ("q", "kv"):
                part.key = part.key.replace(f".{x}_layernorm.weight", f".linear_{x}_up_proj.layer_norm_weight")
            part.key = part.key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    loaded = dist_checkpointing.load(state, folder)
    model.load_state_dict({k: v for k, v in loaded.items()}, strict=False)
    got = log_probabilities(model, a).numpy()
    wanted = numpy.fromfile(os.path.join(HERE, name, "expected.f32"), numpy.float32)
    if dist.get_rank() == 0:
        print("largest difference of log-probabilities:", abs(got - wanted).max())
    assert abs(got - wanted).max() < 1e-5
    if "mtp_num_layers" in shape:
        model.zero_grad()
        losses = numpy.array(gradients(model, a))
        assert abs(losses - numpy.fromfile(os.path.join(HERE, name, "losses.f64"))).max() < 1e-5


def main():
    words = sys.argv[1:]
    if words[:1] == ["make"]:
        return make(words[1])
    if words[:1] == ["loads"]:
        return load(words[1], words[2], int(words[3]))
    if words[:1] == ["resumes"]:
        return resume(*words[1:5], int(words[5]))
    if words[:1] in (["load"], ["resume"]):
        runs = [[words[0] + "s", *words[1:]]]
    else:
        runs = [["make", name, str(CASES[name][0])] for name in words or CASES]
    for run in runs:
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", run[-1], "--master-port",
                        "29533", os.path.abspath(__file__), *run], check=True)


if __name__ == "__main__":
    main()
