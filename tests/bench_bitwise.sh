#!/bin/sh
# The cost of --bitwise-rollouts on this CPU: seconds of the phases of reinforcement learning without and with it.
#
#   usage: tests/bench_bitwise.sh [ARGUMENTS FOR train]
set -u
. tests/suite.sh
awk 'BEGIN { for (i = 0; i < 64; i++) printf "{\"prompt\": \"%d + %d =\", \"answer\": \"%d\"}\n", i, i, 2 * i }' \
    >"$work/rl.jsonl"
for option in "" --bitwise-rollouts; do
    # shellcheck disable=SC2086
    "$train" --stage rl --tokenizer-type ByteLevel --data-path "$work/rl.jsonl" --chat-template plain --device cpu \
        --num-layers 4 --hidden-size 256 --num-attention-heads 8 --swiglu --normalization RMSNorm \
        --position-embedding-type rope --seq-length 160 --max-new-tokens 128 --micro-batch-size 4 \
        --rollout-batch-size 4 --num-return-sequences 8 --train-iters 3 --lr 1e-4 $option "$@" >"$work/out" || exit 1
    echo "${option:-without}"
    sed -n '/^phases/,$p' "$work/out"
done
