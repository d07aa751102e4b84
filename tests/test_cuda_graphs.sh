#!/bin/sh
# --cuda-graph-impl: passes as CUDA graphs give the numbers of passes without, and a run without graphs says why.
set -u
. tests/suite.sh
tiny="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 6 --train-iters 6 --lr 1e-2 --mock-data --vocab-size 128
    --tokenizer-type NullTokenizer --log-interval 1 --eval-iters 0"

# trains NAME OPTIONS: writes $work/NAME.jsonl.
trains() {
    metrics=$work/$1.jsonl
    rm -f "$metrics"
    shift
    # shellcheck disable=SC2086
    "$train" $tiny --metrics "$metrics" "$@" >"$work/out" 2>"$work/err"
}

has_gpu() {
    trains gpu --device cuda
}

# numbers NAME: losses and gradient norms, every digit of them.
numbers() {
    sed -n 's/.*"lm_loss": \([^,]*\), "grad_norm": \([^,]*\),.*/\1 \2/p' "$work/$1.jsonl"
}

# Six steps of three micro-batches: the first two keys run, then are recorded, then launched; with dropout, whose draws
# depend on the token, and with other options of the passes.
graphs_give_the_bits_of_single_launches() {
    has_gpu || { echo 'skipped: no GPU answers' && return; }
    for words in '--bf16' '--hidden-dropout 0 --attention-dropout 0' \
        '--fp16 --initial-loss-scale 1024 --accumulate-allreduce-grads-in-fp32' \
        '--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1'; do
        # shellcheck disable=SC2086
        trains plain --device cuda --deterministic-mode $words &&
            trains graphs --device cuda --deterministic-mode --cuda-graph-impl local $words || return 1
        ! grep 'cuda-graph-impl has no effect' "$work/out" && [ "$(numbers plain | wc -l)" = 6 ] || return 1
        [ "$(numbers plain)" = "$(numbers graphs)" ] || {
            echo "$words: other numbers"
            return 1
        }
    done
}

a_run_without_graphs_says_why() {
    trains cpu --device cpu --cuda-graph-impl local &&
        says '--cuda-graph-impl has no effect: the CPU has no graphs' "$work/out" || return 1
    trains cpu --device cpu --cuda-graph-impl full_iteration &&
        says '--cuda-graph-impl has no effect: the CPU has no graphs' "$work/out"
}

experts_run_without_graphs() {
    has_gpu || { echo 'skipped: no GPU answers' && return; }
    trains experts --device cuda --bf16 --num-experts 4 --cuda-graph-impl local &&
        says '--cuda-graph-impl has no effect: the host waits for the loads of experts' "$work/out"
}

check a_run_without_graphs_says_why a_run_without_graphs_says_why
check graphs_give_the_bits_of_single_launches graphs_give_the_bits_of_single_launches
check experts_run_without_graphs experts_run_without_graphs
exit $failed
