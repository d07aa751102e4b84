#!/bin/sh
# Training with SGD, Lion and Muon: layouts of ranks agree with one rank, a resumed run equals one that was not stopped,
# states take the memory that they need, and options that another optimizer has are refused.
# Sections of megatron.c: §13
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1

model='--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16
    --vocab-size 96 --mock-data --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --weight-decay 0.1 --device cpu
    --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --eval-iters 0'

# run ARGUMENTS...: trains on one rank.
run() {
    # shellcheck disable=SC2086
    "$train" $model "$@" >"$work/out" 2>"$work/err" </dev/null
}

# A sharded optimizer whose states are on two ranks, and tensor-parallel ranks.
layouts_agree() {
    run --optimizer "$1" --train-iters 4 --metrics "$work/$1.one" || return 1
    # shellcheck disable=SC2086
    on_ranks 4 "$train" $model --optimizer "$1" --train-iters 4 --metrics "$work/$1.four" \
        --tensor-model-parallel-size 2 --use-distributed-optimizer || return 1
    same_series "$work/$1.one" "$work/$1.four" 1e-5 0 lm_loss grad_norm
}

resumes_bit_for_bit() {
    run --optimizer "$1" --train-iters 4 --metrics "$work/$1.whole" &&
        run --optimizer "$1" --train-iters 2 --save "$work/$1" &&
        run --optimizer "$1" --train-iters 4 --save "$work/$1" --load "$work/$1" --metrics "$work/$1.rest" || return 1
    series lm_loss "$work/$1.whole" | tail -n 2 >"$work/a"
    series lm_loss "$work/$1.rest" >"$work/b"
    [ "$(wc -l <"$work/b")" = 2 ] && cmp -s "$work/a" "$work/b"
}

# On one rank a part of the parameters is updated through the slots of --optimizer-cpu-offload, and rounds alike.
offloaded_states_are_updated_alike() {
    run --optimizer "$1" --train-iters 3 --bf16 --metrics "$work/$1.device" &&
        run --optimizer "$1" --train-iters 3 --bf16 --metrics "$work/$1.host" --optimizer-cpu-offload \
            --optimizer-offload-fraction 0.5 || return 1
    same_series "$work/$1.device" "$work/$1.host" 0 0 lm_loss grad_norm
}

# In fp32 a gradient is as large as a state: AdamW has two, the others one.
states_take_their_memory() {
    for row in 'adam 2' 'sgd 1' 'lion 1' 'muon 1.197'; do # a seventh of Muon's elements are AdamW's
        run --optimizer "${row% *}" --train-iters 1 || return 1
        awk -v states="${row#* }" '/^  gradients / { each = $NF } /^  optimizer state / { ratio = $NF / each }
            END { exit !(ratio > states - 0.01 && ratio < states + 0.01) }' "$work/out" || return 1
    done
}

check states_take_their_memory states_take_their_memory
for optimizer in sgd lion muon; do
    check "${optimizer}_resumes_bit_for_bit" resumes_bit_for_bit $optimizer
done
for optimizer in sgd lion; do
    check "${optimizer}_offloaded_states_are_updated_alike" offloaded_states_are_updated_alike $optimizer
    if [ -n "${HAVE_MPI:-}" ]; then check "${optimizer}_on_four_ranks_is_that_of_one" layouts_agree $optimizer; fi
done

# shellcheck disable=SC2086
check another_optimizer_does_not_continue refused 'begun with --optimizer lion, not adam; .*--no-load-optim' \
    "$train" $model --train-iters 4 --load "$work/lion"
check another_optimizer_begins_anew run --optimizer sgd --train-iters 3 --load "$work/lion" --no-load-optim
# shellcheck disable=SC2086
check types_of_states_are_those_of_adamw refused 'use-precision-aware-optimizer' \
    "$train" $model --train-iters 1 --optimizer sgd --use-precision-aware-optimizer
# shellcheck disable=SC2086
check momentum_needs_sgd refused 'sgd-momentum' "$train" $model --train-iters 1 --sgd-momentum 0.5

# ---- Muon

# In fp32, so that layouts differ by the order of sums alone. Grouped queries, so that 4 tensor-parallel ranks have
# copies of key and value heads.
muon='--optimizer muon --muon-fp32-matmul-prec highest --muon-extra-scale-factor 0.2 --group-query-attention
    --num-query-groups 2 --swiglu --train-iters 4'

# muon_run NAME ARGUMENTS...: the series of one rank; muon_agrees NAME RANKS ARGUMENTS...: ranks have the same.
muon_run() {
    at=$1 && shift
    # shellcheck disable=SC2086
    run $muon --metrics "$work/$at.series" "$@"
}

muon_agrees() {
    at=$1 ranks=$2 && shift 2
    rm -f "$work/ranks"
    # shellcheck disable=SC2086
    on_ranks "$ranks" "$train" $model $muon --metrics "$work/ranks" "$@" || return 1
    same_series "$work/$at.series" "$work/ranks" 1e-5 0 lm_loss grad_norm
}

# Ranks that share a matrix compute what one rank does: with copies of key and value heads, and for three matrices or
# for one.
muon_on_tensor_parallel_ranks() {
    muon_agrees muon 2 --tensor-model-parallel-size 2 --muon-tp-mode "$1" &&
        muon_agrees muon 4 --tensor-model-parallel-size 4 --muon-tp-mode "$1" &&
        muon_agrees muon.joined 4 --tensor-model-parallel-size 4 --muon-tp-mode "$1" --muon-no-split-qkv \
            --muon-nesterov
}

# A layer's matrices on more ranks than it has, and on fewer.
muon_on_ranks_with_shards() {
    muon_agrees muon 2 --data-parallel-sharding-strategy "$1" &&
        muon_agrees muon 4 --data-parallel-sharding-strategy "$1" --overlap-grad-reduce --overlap-param-gather &&
        muon_agrees muon.joined 4 --data-parallel-sharding-strategy "$1" --muon-no-split-qkv --muon-nesterov
}

# Each rank's part of a matrix is a matrix of its own, so results depend on the number of ranks, but not on the shards.
blockwise_takes_each_part_for_a_matrix() {
    # shellcheck disable=SC2086
    on_ranks 2 "$train" $model $muon --metrics "$work/blockwise.series" --tensor-model-parallel-size 2 || return 1
    muon_agrees blockwise 4 --tensor-model-parallel-size 2 --use-distributed-optimizer || return 1
    ! same_series "$work/muon.series" "$work/blockwise.series" 1e-5 0 lm_loss
}

experts='--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16
    --disable-bias-linear'
muon_on_ranks_with_experts() {
    # shellcheck disable=SC2086
    muon_run muon.experts $experts &&
        muon_agrees muon.experts 2 $experts --expert-model-parallel-size 2 &&
        muon_agrees muon.experts 4 $experts --expert-model-parallel-size 2 --use-distributed-optimizer &&
        muon_agrees muon.experts 4 $experts --expert-tensor-parallel-size 2 --tensor-model-parallel-size 2 \
            --sequence-parallel --muon-tp-mode distributed --use-distributed-optimizer &&
        muon_agrees muon.experts 4 $experts --expert-tensor-parallel-size 1 --tensor-model-parallel-size 4 \
            --sequence-parallel --muon-tp-mode duplicated --use-distributed-optimizer
}

latents='--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8
    --qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear'
muon_on_ranks_with_latents() {
    rm -f "$work/ranks"
    one='--optimizer muon --muon-fp32-matmul-prec highest --train-iters 4'
    # shellcheck disable=SC2086
    run $one $latents --metrics "$work/latents" &&
        on_ranks 4 "$train" $model $one $latents --tensor-model-parallel-size 2 --muon-tp-mode duplicated \
            --use-distributed-optimizer --metrics "$work/ranks" &&
        same_series "$work/latents" "$work/ranks" 1e-5 0 lm_loss grad_norm
}

# From four ranks with shards to one, and back to two that share matrices.
muon_resumes_on_another_layout() {
    # shellcheck disable=SC2086
    on_ranks 4 "$train" $model $muon --train-iters 2 --tensor-model-parallel-size 2 --use-distributed-optimizer \
        --muon-tp-mode distributed --save "$work/moved" || return 1
    muon_run moved.one --train-iters 4 --load "$work/moved" &&
        muon_agrees moved.one 2 --train-iters 4 --load "$work/moved" --tensor-model-parallel-size 2 \
            --muon-tp-mode duplicated || return 1
    series lm_loss "$work/muon.series" | tail -n 2 >"$work/a"
    series lm_loss "$work/moved.one.series" >"$work/b"
    awk 'NR == FNR { a[FNR] = $1; next } { d = $1 - a[FNR]; if (d * d > 1e-10) exit 1 } END { exit FNR != 2 }' \
        "$work/a" "$work/b"
}

# muon_refused TEXT ARGUMENTS...: one line with the text.
muon_refused() {
    text=$1 && shift
    # shellcheck disable=SC2086
    refused "$text" "$train" $model --train-iters 1 "$@"
}

if [ -n "${HAVE_MPI:-}" ]; then
    check muon_on_one_rank muon_run muon
    check muon_of_joined_projections muon_run muon.joined --muon-no-split-qkv --muon-nesterov
    check muon_on_tensor_parallel_ranks_duplicated muon_on_tensor_parallel_ranks duplicated
    check muon_on_tensor_parallel_ranks_distributed muon_on_tensor_parallel_ranks distributed
    for strategy in optim optim_grads optim_grads_params; do
        check "muon_on_ranks_with_shards_$strategy" muon_on_ranks_with_shards $strategy
    done
    check muon_on_data_parallel_ranks muon_agrees muon 2
    check muon_on_a_pipeline muon_agrees muon 4 --pipeline-model-parallel-size 2 --use-distributed-optimizer
    check blockwise_takes_each_part_for_a_matrix blockwise_takes_each_part_for_a_matrix
    check muon_on_ranks_with_experts muon_on_ranks_with_experts
    check muon_on_ranks_with_latents muon_on_ranks_with_latents
    check muon_resumes_on_another_layout muon_resumes_on_another_layout
fi
check muon_leaves_vectors_to_lion run --optimizer muon --muon-scalar-optimizer lion --lion-beta1 0.8 --train-iters 2
check muon_has_no_other_types_of_states muon_refused 'use-precision-aware-optimizer' --optimizer muon \
    --use-precision-aware-optimizer
check muon_is_not_offloaded muon_refused 'optimizer-cpu-offload' --optimizer muon --optimizer-cpu-offload
check muon_has_no_adapters muon_refused 'lora-rank' --optimizer muon --lora-rank 4
check muon_options_need_muon muon_refused 'muon-tp-mode' --muon-tp-mode duplicated
check joined_projections_need_muon muon_refused 'muon-no-split-qkv' --muon-no-split-qkv
check low_precision_is_unknown muon_refused 'muon-fp32-matmul-prec' --optimizer muon --muon-fp32-matmul-prec low
check dist_muon_is_unknown muon_refused 'optimizer' --optimizer dist_muon
check adaptive_muon_is_unknown muon_refused 'optimizer' --optimizer adaptive_muon
exit $failed
