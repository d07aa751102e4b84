#!/bin/sh
# Training with SGD and with Lion: layouts of ranks agree with one rank, a resumed run equals one that was not stopped,
# states take the memory that they need, and options that another optimizer has are refused.
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
    for row in 'adam 2' 'sgd 1' 'lion 1'; do
        run --optimizer "${row% *}" --train-iters 1 || return 1
        awk -v states="${row#* }" '/^  gradients / { each = $NF } /^  optimizer state / { ratio = $NF / each }
            END { exit !(ratio > states - 0.01 && ratio < states + 0.01) }' "$work/out" || return 1
    done
}

check states_take_their_memory states_take_their_memory
for optimizer in sgd lion; do
    check "${optimizer}_resumes_bit_for_bit" resumes_bit_for_bit $optimizer
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
# shellcheck disable=SC2086
check muon_is_refused refused 'muon' "$train" $model --train-iters 1 --optimizer muon
exit $failed
