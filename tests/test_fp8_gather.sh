#!/bin/sh
# The collectives of fp8 training, and the operations that quantize, counted in the trace of a step. On the CPU, and on
# two GPUs where there are two.
# Sections of megatron.c: §7 §12a
set -u
. tests/suite.sh
needs_mpi

export OMP_NUM_THREADS=1
model='--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --vocab-size 256 --seq-length 64 --micro-batch-size 1
    --global-batch-size 4 --mock-data --train-iters 3 --lr 1e-3 --eval-iters 0 --bf16 --fp8-format hybrid
    --deterministic-mode'

# trace RANKS FILE ARGUMENTS...: trains, and writes the collectives of rank 0 in step 3 as lines "NAME BYTES", and the
# losses and norms of all steps to FILE.losses.
trace() {
    ranks=$1 file=$2
    shift 2
    rm -f "$work/metrics"
    # shellcheck disable=SC2046,SC2086
    $(mpirun_here) -np "$ranks" "$train" $model --trace "$work/trace.json" --trace-first-step 3 --trace-last-step 3 \
        --metrics "$work/metrics" "$@" >"$work/out" 2>"$work/err" </dev/null || {
        cat "$work/err"
        return 1
    }
    sed -n 's/.*"pid":0,.*"name":"\(all_gather\|all_reduce\)".*"bytes":\([0-9.]*\).*/\1 \2/p' "$work/trace.json" \
        >"$file"
    grep -o '"\(lm_loss\|grad_norm\)": [^,}]*' "$work/metrics" >"$file.losses"
}

# counts NUMBER LINE FILE: the file has the line so many times.
counts() {
    [ "$(grep -cx "$2" "$3")" = "$1" ] && return 0
    echo "expected \"$2\" $1 times in:"
    cat "$3"
    return 1
}

# same_losses FILE FILE: the steps of two runs have the same losses and norms, to the last digit.
same_losses() {
    [ "$(wc -l <"$1.losses")" = 6 ] && cmp "$1.losses" "$2.losses"
}

# A layer has 4 C^2 + 3 C F + 2 C = 164096 parameters. A rank sends half of them, with 2 bytes each or 1. With
# --fp8-param-gather the two norms follow in bf16, and without delayed scaling the largest values of 4 linears.
weights_are_gathered_in_8_bits() {
    device=$1
    trace 2 "$work/bf16" --device "$device" --fp8-recipe tensorwise --use-distributed-optimizer &&
        counts 2 'all_gather 164096' "$work/bf16" && counts 0 'all_gather 82048' "$work/bf16" || return 1
    for recipe in tensorwise delayed; do
        trace 2 "$work/fp8" --device "$device" --fp8-recipe $recipe --use-distributed-optimizer --fp8-param-gather &&
            counts 2 'all_gather 82048' "$work/fp8" && counts 0 'all_gather 164096' "$work/fp8" &&
            counts 2 'all_reduce 512' "$work/fp8" || return 1
        [ $recipe = delayed ] || {
            counts $(($(grep -cx 'all_reduce 16' "$work/bf16") + 2)) 'all_reduce 16' "$work/fp8" &&
                same_losses "$work/fp8" "$work/bf16"
        } || return 1
    done
}

# The 4 linears of a layer have 9 rows of blocks of 128 x 128, each with 4 places for scales: 144 bytes. Of two or four
# ranks each sends 1/2 or 3/4 of the parameters, and 2/2 or 6/4 of the sums. Sharded parameters are gathered for every
# use, unless a buffer holds them.
blocks_are_gathered_in_8_bits() {
    device=$1 ranks=$2 strategy=$3 gathers=$4
    others=$((ranks - 1))
    wide=$((164096 * 2 * others / ranks)) narrow=$((164096 * others / ranks))
    shape="--device $device --fp8-recipe blockwise --data-parallel-sharding-strategy $strategy"
    # shellcheck disable=SC2086
    trace "$ranks" "$work/bf16" $shape && counts "$gathers" "all_gather $wide" "$work/bf16" &&
        counts 0 "all_gather $narrow" "$work/bf16" && trace "$ranks" "$work/fp8" $shape --fp8-param-gather &&
        counts "$gathers" "all_gather $narrow" "$work/fp8" && counts 0 "all_gather $wide" "$work/fp8" &&
        counts "$gathers" "all_reduce $((512 * 2 * others / ranks))" "$work/fp8" &&
        counts 2 "all_reduce $((144 * 2 * others / ranks))" "$work/fp8" && same_losses "$work/bf16" "$work/fp8"
}

# Rows of whole blocks only: two tensor-parallel ranks have half of 128 columns each. Alone they gather nothing.
widths_that_cut_blocks_are_refused() {
    shape='--device cpu --fp8-recipe blockwise --tensor-model-parallel-size 2 --use-distributed-optimizer'
    # shellcheck disable=SC2046,SC2086
    ! $(mpirun_here) -np 4 "$train" $model $shape --fp8-param-gather >"$work/out" 2>"$work/err" </dev/null &&
        grep -q '^error: --fp8-param-gather needs weights of multiples of 16 x 128, and layer 0 has one of 128 x 64' \
            "$work/err" &&
        $(mpirun_here) -np 2 "$train" $model $shape --fp8-param-gather >"$work/out" 2>"$work/err" </dev/null
}

# The scales of 2 layers with 4 linears of 3 operands are 96 bytes. Each of four ranks sends 3/4 of them twice; each of
# two tensor-parallel ranks 1/2 twice.
one_collective_for_all_scales() {
    shape='--device cpu --fp8-recipe delayed --tensor-model-parallel-size 2'
    # shellcheck disable=SC2086
    trace 4 "$work/all" $shape && counts 1 'all_reduce 144' "$work/all" && counts 0 'all_reduce 96' "$work/all" &&
        trace 4 "$work/tensor" $shape --tp-only-amax-red && counts 0 'all_reduce 144' "$work/tensor" &&
        counts 1 'all_reduce 96' "$work/tensor"
}

# quantizes RANKS CALLS TRANSPOSES ARGUMENTS...: rank 0 quantizes and transposes so many times in step 3.
quantizes() {
    ranks=$1 calls=$2 transposes=$3
    shift 3
    trace "$ranks" "$work/calls" --device cpu "$@" || return 1
    for pair in "quantize $calls" "fp8_transpose $transposes"; do
        found=$(grep -o "\"pid\":0,[^{}]*\"name\":\"${pair% *}\"" "$work/trace.json" | wc -l)
        [ "$found" = "${pair#* }" ] || {
            echo "$found times ${pair% *}, expected ${pair#* }: $*"
            return 1
        }
    done
}

# 2 layers with 4 linears, 4 micro-batches. The weights are quantized once per step: 8 calls. Of each linear and
# micro-batch x is quantized once, in the forward, and so is dy: 64 calls. With full recomputation the backward
# quantizes x again, and before it the replay of the first layer x of three linears: 44 calls more. With delayed
# scaling the norms store x of two linears, the activation x of a third, and its backward dy of one: 4 transposes
# replace 4 calls. With a bias this dy is needed in bf16. With sequence parallelism the outputs of norms are gathered
# in bf16, and quantized in the backward again; with its overlap nothing is stored in fp8, no transpose of x is saved,
# and a linear takes the rows in two parts, and the row-parallel ones quantize dy once more for its transpose.
operations_before_linears_quantize() {
    quantizes 1 72 0 --fp8-recipe tensorwise &&
        quantizes 1 116 0 --fp8-recipe tensorwise --recompute-granularity full &&
        quantizes 1 40 32 --fp8-recipe delayed &&
        quantizes 1 72 0 --fp8-recipe delayed --no-fp8-wgrad &&
        quantizes 2 40 32 --fp8-recipe delayed --tensor-model-parallel-size 2 &&
        quantizes 2 72 16 --fp8-recipe delayed --tensor-model-parallel-size 2 --sequence-parallel &&
        quantizes 2 168 0 --fp8-recipe delayed --tensor-model-parallel-size 2 --sequence-parallel \
            --tp-comm-overlap &&
        (
            model=$(echo "$model" | sed 's/--disable-bias-linear//')
            quantizes 1 48 24 --fp8-recipe delayed
        )
}

# A linear of a layer is quantized 9 times in a step: its weight once, x and dy of 4 micro-batches. The gate of an
# attention layer is the fifth linear. In a delta net's layer the projections of its input and of its output replace
# those of attention. The experts of gpt-oss are stored in one tensor: 2 linears in each of 4 layers, which quantize x
# of the 4 micro-batches, gathered from its rows, again in the backward of one of them. Saved transposes leave all
# losses as a replay gives them.
every_linear_of_a_layer_computes_in_fp8() {
    delta='--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2
        --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16'
    # shellcheck disable=SC2086
    quantizes 1 90 0 --fp8-recipe tensorwise --attention-output-gate &&
        quantizes 1 72 0 --fp8-recipe tensorwise $delta &&
        quantizes 1 81 0 --fp8-recipe tensorwise $delta --attention-output-gate &&
        quantizes 1 66 24 --fp8-recipe delayed --attention-output-gate &&
        (
            model="${model#*--vocab-size 256}"
            quantizes 1 160 0 --fp8-recipe tensorwise --load tests/golden/hf/gpt_oss
        ) || return 1
    for recipe in tensorwise delayed; do
        shape="--device cpu --fp8-recipe $recipe $delta --attention-output-gate"
        # shellcheck disable=SC2086
        trace 1 "$work/saved" $shape && trace 1 "$work/replayed" $shape --recompute-granularity full &&
            same_losses "$work/saved" "$work/replayed" || return 1
    done
}

check weights_are_gathered_in_8_bits weights_are_gathered_in_8_bits cpu
check blocks_are_gathered_in_8_bits_for_the_optimizer blocks_are_gathered_in_8_bits cpu 2 optim 2
check blocks_are_gathered_in_8_bits_for_every_use blocks_are_gathered_in_8_bits cpu 2 optim_grads_params 5
check blocks_of_four_ranks_are_gathered_in_8_bits blocks_are_gathered_in_8_bits cpu 4 optim_grads_params 3
check widths_that_cut_blocks_are_refused widths_that_cut_blocks_are_refused
check one_collective_for_all_scales one_collective_for_all_scales
check operations_before_linears_quantize operations_before_linears_quantize
check every_linear_of_a_layer_computes_in_fp8 every_linear_of_a_layer_computes_in_fp8
# shellcheck disable=SC2086
if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -ge 2 ] &&
    ! $(mpirun_here) -np 2 "$train" $model --device cuda 2>&1 </dev/null | grep -q 'this build'; then
    check weights_are_gathered_in_8_bits_on_two_gpus weights_are_gathered_in_8_bits cuda
    check blocks_are_gathered_in_8_bits_on_two_gpus blocks_are_gathered_in_8_bits cuda 2 optim 2
    check blocks_are_gathered_for_every_use_on_two_gpus blocks_are_gathered_in_8_bits cuda 2 optim_grads_params 5
else
    echo "skipped: weights_are_gathered_in_8_bits_on_two_gpus and two more: need two GPUs, CUDA and NCCL"
fi
exit $failed
