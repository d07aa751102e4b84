#!/bin/sh
# Ten files of the form of Megatron-LM's tests train for three steps, each on the ranks that its layout needs; where the
# shared folder has NVIDIA's own, so do these, with smaller sizes behind the file.
set -u
. tests/suite.sh
shared=$(cd "${MT_SHARED:-../shared}" 2>/dev/null && pwd)
export OMP_NUM_THREADS=1
if [ -z "${HAVE_MPI:-}" ] || ! command -v mpirun >/dev/null; then
    echo "skipped: needs MPI"
    exit 77
fi
export DATA_PATH="$work/data" DATA_CACHE_PATH="$work/cache" TENSORBOARD_PATH="$work/board" DATA_BLEND="$work/blend"
export CHECKPOINT_SAVE_PATH="$work/save" CHECKPOINT_LOAD_PATH="$work/save" OUTPUT_PATH="$work/output"
mkdir -p "$work/data/bpe"
cp tests/golden/tokenizer/gpt2/vocab.json tests/golden/tokenizer/gpt2/merges.txt "$work/data/bpe"
vocabulary=$(sed 's/"[^"]*": *[0-9]*/&\n/g' "$work/data/bpe/vocab.json" | grep -c '": *[0-9]')

# trains RANKS FILE ARGUMENTS...: three steps, whose losses are numbers, and a checkpoint.
trains() {
    ranks=$1 file=$2
    shift 2
    rm -rf "$work/save"
    on_ranks "$ranks" "$train" --config "$file" --device cpu "$@" || return 1
    for step in 1 2 3; do
        says "^ *$step/3 .* loss [0-9.]* .*grad norm [0-9.]* " "$work/out" || return 1
    done
    says 'no effect here: ' "$work/out" && says 'saved iteration 3 to ' "$work/out" && [ -d "$work/save" ]
}

# own RANKS LINES...: a file with the lines below MODEL_ARGS, one "name: value" each, beside those of every file.
own() {
    ranks=$1
    shift
    {
        printf '%s\n' 'ENV_VARS:' '  CUDA_DEVICE_MAX_CONNECTIONS: 1' '  NCCL_ALGO: Ring' 'TEST_TYPE: regular' \
            'LAUNCHER: ft_launcher' 'MODEL_ARGS:'
        printf '  --%s\n' 'hidden-size: 32' 'num-attention-heads: 4' 'micro-batch-size: 1' 'global-batch-size: 8' \
            'seq-length: 32' 'max-position-embeddings: 32' 'mock-data: true' 'train-iters: 3' 'lr: 0.00015' \
            'lr-decay-style: cosine' 'lr-wsd-decay-style: minus_sqrt' 'min-lr: 1.0e-5' 'weight-decay: 1e-2' \
            'clip-grad: 1.0' 'lr-warmup-fraction: .01' 'log-interval: 1' 'save-interval: 25' 'eval-iters: 0' \
            'log-params-norm: true' 'log-num-zeros-in-grad: true' 'log-timers-to-tensorboard: true' \
            'tensorboard-dir: ${TENSORBOARD_PATH}' 'data-cache-path: ${DATA_CACHE_PATH}' \
            'save: ${CHECKPOINT_SAVE_PATH}' 'load: ${CHECKPOINT_LOAD_PATH}' 'vocab-file: ${DATA_PATH}/bpe/vocab.json' \
            'merge-file: ${DATA_PATH}/bpe/merges.txt' 'split: 949,50,1' 'distributed-backend: nccl' \
            'use-mcore-models: true' 'no-gradient-accumulation-fusion: true' 'attention-softmax-in-fp32: true' \
            'use-persistent-ckpt-worker: true' "$@"
    } >"$work/own.yaml"
    trains "$ranks" "$work/own.yaml"
}

moe='disable-bias-linear: true'

dense_layers() {
    own 2 'num-layers: 2' 'pipeline-model-parallel-size: 2' 'bf16: true' 'attention-backend: unfused' \
        'transformer-impl: local' 'ckpt-format: torch_dist' 'async-save: true'
}

fp16() {
    own 2 'num-layers: 2' 'tensor-model-parallel-size: 2' 'fp16: true' 'initial-loss-scale: 4096' \
        'apply-query-key-layer-scaling: true' 'sequence-parallel: true' 'ckpt-format: torch_dist'
}

latent_attention() {
    own 4 'num-layers: 2' 'multi-latent-attention: true' 'q-lora-rank: 16' 'kv-lora-rank: 8' 'qk-head-dim: 16' \
        'qk-pos-emb-head-dim: 8' 'v-head-dim: 16' 'tensor-model-parallel-size: 2' 'pipeline-model-parallel-size: 2' \
        'sequence-parallel: true' 'untie-embeddings-and-output-weights: true' 'bf16: true' \
        'attention-backend: unfused' 'ckpt-format: torch_dist'
}

experts() {
    own 4 'num-layers: 2' "$moe" 'num-experts: 4' 'moe-router-topk: 2' 'moe-ffn-hidden-size: 16' \
        'expert-model-parallel-size: 4' 'moe-router-load-balancing-type: aux_loss' 'moe-aux-loss-coeff: 1e-2' \
        'moe-grouped-gemm: true' 'moe-router-dtype: fp32' 'moe-token-dispatcher-type: alltoall' 'bf16: true' \
        'use-distributed-optimizer: true' 'ckpt-format: torch_dist' 'dist-ckpt-optim-fully-reshardable: true'
}

hybrid_layers() {
    own 4 'hybrid-layer-pattern: M-M*' 'spec: "[megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec]"' \
        'mamba-head-dim: 8' 'mamba-state-dim: 8' 'mamba-num-groups: 2' 'group-query-attention: true' \
        'num-query-groups: 2' 'tensor-model-parallel-size: 2' 'context-parallel-size: 2' 'bf16: true' \
        'attention-backend: fused' 'ckpt-format: torch_dist'
}

delta_nets() {
    own 2 'num-layers: 3' "$moe" 'untie-embeddings-and-output-weights: true' 'group-query-attention: true' \
        'num-query-groups: 2' 'swiglu: true' 'position-embedding-type: rope' 'rotary-percent: 0.5' \
        'no-rope-fusion: true' 'apply-layernorm-1p: true' 'attention-output-gate: true' \
        'experimental-attention-variant: gated_delta_net' 'linear-attention-freq: 3' 'linear-conv-kernel-dim: 4' \
        'linear-key-head-dim: 8' 'linear-value-head-dim: 8' 'linear-num-key-heads: 4' 'linear-num-value-heads: 8' \
        'num-experts: 4' 'moe-ffn-hidden-size: 16' 'moe-shared-expert-intermediate-size: 16' \
        'moe-shared-expert-gate: true' 'moe-router-topk: 2' 'tensor-model-parallel-size: 2' 'sequence-parallel: true' \
        'bf16: true' 'ckpt-format: torch_dist'
}

windows() {
    own 2 'num-layers: 4' 'window-size: (8,0)' 'window-attn-skip-freq: 2' 'context-parallel-size: 2' \
        'cp-comm-type: all_gather' 'normalization: RMSNorm' 'position-embedding-type: rope' 'qk-layernorm: true' \
        'calculate-per-token-loss: true' 'bf16: true'
}

virtual_stages() {
    own 2 'num-layers: 6' 'pipeline-model-parallel-size: 2' 'num-virtual-stages-per-pipeline-rank: 2' \
        'account-for-embedding-in-pipeline-split: true' 'account-for-loss-in-pipeline-split: true' \
        'untie-embeddings-and-output-weights: true' 'overlap-p2p-communication-warmup-flush: true' 'bf16: true'
}

fully_sharded() {
    own 2 'num-layers: 2' 'use-megatron-fsdp: true' 'data-parallel-sharding-strategy: optim_grads_params' \
        'no-gradient-accumulation-fusion: true' 'use-distributed-optimizer: true' 'overlap-grad-reduce: true' \
        'overlap-param-gather: true' 'init-model-with-meta-device: true' 'bf16: true' 'ckpt-format: fsdp_dtensor'
}

muon_and_modules() {
    own 2 'num-layers: 2' "$moe" 'num-experts: 4' 'moe-router-topk: 2' 'moe-ffn-hidden-size: 16' \
        'expert-model-parallel-size: 2' 'mtp-num-layers: 1' 'mtp-loss-scaling-factor: 0.1' 'optimizer: muon' \
        'muon-momentum: 0.9' 'muon-scale-mode: spectral' 'moe-router-score-function: sigmoid' \
        'moe-router-enable-expert-bias: true' 'position-embedding-type: rope' 'bf16: true'
}

small="--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data
    --vocab-size $vocabulary --train-iters 3 --micro-batch-size 1 --global-batch-size 8 --eval-iters 0"

# nvidias RANKS NAME ARGUMENTS...: a file of the shared folder.
nvidias() {
    ranks=$1 nvidia=$2
    shift 2
    for folder in text/common_pile/v01_filtered_data/bpe text/the_pile/shard00/bpe; do
        mkdir -p "$DATA_PATH/$folder"
        cp "$DATA_PATH/bpe/"* "$DATA_PATH/$folder"
    done
    # shellcheck disable=SC2086
    trains "$ranks" "$shared/yaml/megatron/$nvidia.yaml" $small "$@"
}

nvidias_files_train() {
    nvidias 4 gpt__gpt3_mcore_te_tp2_pp2_mla --num-layers 2 --q-lora-rank 16 --kv-lora-rank 8 &&
        nvidias 2 gpt__gpt3_mcore_tp1_pp2_fp16 --num-layers 2 --initial-loss-scale 4096 &&
        nvidias 2 gpt__gpt3_mcore_te_tp2_pp1_gdn --num-layers 3 --linear-key-head-dim 8 --linear-value-head-dim 8 &&
        nvidias 8 hybrid__hybrid_mr_mcore_te_tp2_pp1_cp4_dgx_a100_1N8G --hybrid-layer-pattern 'M-M*' \
            --mamba-head-dim 8 --mamba-state-dim 8 --num-query-groups 2 &&
        nvidias 8 moe__gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon --num-layers 2 --moe-ffn-hidden-size 16 \
            --no-save-optim &&
        nvidias 8 nemotron__nemotron3_5_lightning_nightly_tp1_pp1_cp1_ep8_dgx_gb200 --num-layers 4 \
            --hybrid-layer-pattern 'ME*E/*E/*E' --num-query-groups 2 --kv-channels 8 --ffn-hidden-size 16 \
            --moe-ffn-hidden-size 16 --mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 2 \
            --num-experts 16 --moe-router-topk 2 --moe-shared-expert-intermediate-size 16 &&
        nvidias 8 gpt__gpt3_mcore_te_tp2_pp2_cp2_calculate_per_token_loss --num-layers 2 &&
        nvidias 4 gpt__gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split &&
        nvidias 2 gpt__gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor --num-layers 2 &&
        nvidias 4 moe__gpt3_mcore_te_tp2_pp1_te_8experts2parallel_top2router --num-layers 2
}

for test in dense_layers fp16 latent_attention experts hybrid_layers delta_nets windows virtual_stages \
    fully_sharded muon_and_modules; do
    check $test $test
done
[ ! -d "$shared/yaml/megatron" ] || check nvidias_files_train nvidias_files_train
exit $failed
