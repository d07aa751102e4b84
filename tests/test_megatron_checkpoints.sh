#!/bin/sh
# Checkpoints that Megatron-Core wrote: on every layout, the log-probabilities are those of its own forward pass.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
golden=$(pwd)/tests/golden/megatron_dist
if [ "${HAVE_MPI:-}" ]; then ranks="mpirun --oversubscribe -n"; else ranks=; fi

# tokens FILE: 7 i mod 100, i < 16, as int32.
tokens() {
    i=0
    while [ $i -lt 16 ]; do
        # shellcheck disable=SC2059
        printf "\\$(printf %03o $((i * 7 % 100)))\\0\\0\\0"
        i=$((i + 1))
    done >"$1"
}

# scores NAME FOLDER RANKS ARGUMENTS...: infer's log-probabilities of a folder equal those of the checkpoint NAME.
scores() {
    scored=$1 folder=$2 count=$3
    shift 3
    # shellcheck disable=SC2086
    ${ranks:+$ranks $count} "$infer" --load "$folder" --score "$work/tokens" --seq-length 15 \
        --out "$work/scores" --device cpu "$@" >"$work/out" 2>"$work/err" </dev/null || return 1
    od -An -v -t f4 -w4 "$golden/$scored/expected.f32" >"$work/want"
    od -An -v -t f4 -w4 "$work/scores" | paste - "$work/want" | awk '
        { difference = $1 - $2; if (difference < 0) difference = -difference; if (difference > 1e-5) bad++ }
        END { exit NR != 15 || bad > 0 }'
}

every_checkpoint_scores_as_in_megatron() {
    for written in dense dense_tp2 gpt_tp2 moe torch_tp2; do
        scores $written "$golden/$written" 1 --use-checkpoint-args || return 1
    done
    scores dense_tp2 "$golden/dense_tp2/iter_0000007" 1 --use-checkpoint-args
}

every_layout_scores_as_in_megatron() {
    [ "$ranks" ] || return 0
    for written in dense_tp2 moe torch_tp2; do
        scores $written "$golden/$written" 2 --use-checkpoint-args --tensor-model-parallel-size 2 &&
            scores $written "$golden/$written" 2 --use-checkpoint-args --pipeline-model-parallel-size 2 || return 1
    done
    scores dense_tp2 "$golden/dense_tp2" 4 --use-checkpoint-args --tensor-model-parallel-size 4 &&
        scores gpt_tp2 "$golden/gpt_tp2" 2 --use-checkpoint-args --tensor-model-parallel-size 2 &&
        scores moe "$golden/moe" 2 --use-checkpoint-args --expert-model-parallel-size 2
}

model='--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --max-position-embeddings 32 --vocab-size 100 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope'

options_give_the_model_and_are_compared() {
    from="--load $golden/dense_tp2 --mock-data --lr 1e-3 --device cpu --train-iters 0 --no-load-optim"
    # shellcheck disable=SC2086
    "$train" $from $model --save "$work/given" >"$work/out" 2>"$work/err" &&
        scores dense_tp2 "$work/given" 1 || return 1
    # shellcheck disable=SC2086
    refused "its run has --rotary-base 10000, not 500000; give that, or --use-checkpoint-args" "$train" $from $model \
        --rotary-base 500000 --save "$work/other" || return 1
    # shellcheck disable=SC2086
    refused "its run has --num-layers 2, not 3; leave the option out" "$train" $from --use-checkpoint-args \
        --num-layers 3 --save "$work/other" || return 1
    # shellcheck disable=SC2086
    refused "its run has --normalization RMSNorm, not LayerNorm" "$train" $from --save "$work/other" \
        $(echo "$model" | sed 's/--normalization RMSNorm//')
}

run='--use-checkpoint-args --mock-data --micro-batch-size 4 --global-batch-size 16 --seq-length 16 --lr 1e-3
    --device cpu --eval-iters 0 --log-interval 1'

a_run_goes_on_with_the_optimizer_or_says_why_not() {
    # shellcheck disable=SC2086
    "$train" --load "$golden/dense" $run --train-iters 9 --save "$work/run" >"$work/out" 2>"$work/err" || return 1
    grep -q '^ *8/9 ' "$work/out" && ! grep -q '^ *7/9 ' "$work/out" || return 1
    grep -q '"optimizer_step": 3' "$work/run/iter_0000009/trainer.json" || return 1 # one step in Megatron
    grep -q '"consumed_train_samples": 144' "$work/run/iter_0000009/trainer.json" || return 1
    # shellcheck disable=SC2086
    refused 'was saved without the optimizer.s state; continue with a new optimizer by --no-load-optim' "$train" \
        --load "$golden/dense_tp2" $run --train-iters 9 || return 1
    # shellcheck disable=SC2086
    "$train" --load "$golden/dense_tp2" $run --train-iters 8 --no-load-optim >"$work/out" 2>"$work/err" &&
        grep -q '^ *8/8 ' "$work/out"
}

a_checkpoint_becomes_a_folder_of_hugging_face() {
    for written in dense_tp2 gpt_tp2 moe torch_tp2; do
        # shellcheck disable=SC2086
        "$train" --load "$golden/$written" --use-checkpoint-args --no-load-optim --train-iters 0 \
            --save "$work/hf-$written" --device cpu --mock-data --lr 1e-3 >"$work/out" 2>"$work/err" &&
            scores $written "$work/hf-$written" 1 || return 1
    done
}

tokens "$work/tokens"
check every_checkpoint_scores_as_in_megatron every_checkpoint_scores_as_in_megatron
check every_layout_scores_as_in_megatron every_layout_scores_as_in_megatron
check options_give_the_model_and_are_compared options_give_the_model_and_are_compared
check a_run_goes_on_with_the_optimizer_or_says_why_not a_run_goes_on_with_the_optimizer_or_says_why_not
check a_checkpoint_becomes_a_folder_of_hugging_face a_checkpoint_becomes_a_folder_of_hugging_face
exit $failed
