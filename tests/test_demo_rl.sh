#!/bin/sh
# The demo of reinforcement learning as `make demo-rl` runs it: its lines, its files, and what it learns.
set -u
. tests/suite.sh

# Rewards are means: of 256 responses of the first iteration, and of the last 20 iterations.
the_demo_learns_to_sort() {
    DEMO_DIR=$work/demo DEMO_RANKS=${HAVE_MPI:+2} data/scripts/demo-rl.sh >"$work/out" 2>"$work/err" || return 1
    [ ! -s "$work/err" ] || return 1
    set -- $(sed -n 's/^3\. task: .* reward \([0-9.]*\) to \([0-9.]*\)$/\1 \2/p' "$work/out")
    echo "reward from $1 to $2" >>"$work/err"
    awk -v a="$1" -v b="$2" 'BEGIN { exit !(a < 0.3 && b >= 0.8) }'
}

the_demo_leaves_its_files() {
    for file in format/config.json sorts/config.json metrics.jsonl demo.log; do
        [ -s "$work/demo/$file" ] || return 1
    done
    says '^5. sorts: 529>259 ' "$work/out" || return 1
    command -v gnuplot >/dev/null || return 0
    [ -s "$work/demo/reward.svg" ] && says "^4\. curves: $work/demo/reward.svg" "$work/out"
}

# As on a GPU: the shape of a file, with its batches and learning rates, but few steps.
the_demo_takes_a_shape() {
    DEMO_DIR=$work/shape DEMO_MODEL=tiny-gpt2 DEMO_ITERS=2 DEMO_FORMAT='--train-iters 3' \
        DEMO_TASK='--rollout-batch-size 32' data/scripts/demo-rl.sh >"$work/out" 2>"$work/err" || return 1
    says '^3\. task: 2 iterations of GRPO' "$work/out" && says '"model_type": "gpt2"' "$work/shape/sorts/config.json" &&
        says '"n_layer": 4' "$work/shape/sorts/config.json" || return 1
    for phase in generation reward scoring training; do
        says "^ *$phase  *[1-9][0-9]*  *[0-9.]*  *[1-9][0-9]*  *[0-9.]*%$" "$work/out" || return 1
    done
}

check the_demo_learns_to_sort the_demo_learns_to_sort
check the_demo_leaves_its_files the_demo_leaves_its_files
check the_demo_takes_a_shape the_demo_takes_a_shape
exit $failed
