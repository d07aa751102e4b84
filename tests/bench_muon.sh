#!/bin/sh
# Measures a training step with Muon beside one with AdamW: 8 layers of Llama 3 8B, 2 x 4,096 tokens a micro-batch, in
# bf16 on one GPU; with one micro-batch a step, where the optimizer counts most, and with eight.
#
#   usage: tests/bench_muon.sh DIR      from the root of the project
#
# DIR gets the logs. Prints milliseconds of both and their ratio, from the median of the steps after the first four.
# Exits with 1 if nothing could be measured.
set -u
directory=$1 bin=${MT_BIN:-.}

# median OPTIMIZER SEQUENCES: milliseconds of a step.
median() {
    metrics=$directory/bench_muon_$1_$2
    rm -f "$metrics"
    "$bin/train" --hf-config data/configs/llama3-8b.json --num-layers 8 --seq-length 4096 --micro-batch-size 2 \
        --global-batch-size "$2" --mock-data --bf16 --lr 1e-5 --eval-iters 0 --train-iters 14 --device cuda \
        --optimizer "$1" --metrics "$metrics" >"$metrics.log" 2>&1 || {
        echo "bench-muon: $1: $(tail -n 1 "$metrics.log")" >&2
        return 1
    }
    sed -n 's/.*"iteration_ms": \([0-9.e+]*\).*/\1/p' "$metrics" | tail -n 10 | sort -g | sed -n 5p
}

for sequences in 2 16; do
    adam=$(median adam $sequences) && muon=$(median muon $sequences) || exit 1
    echo "$adam $muon" | awk -v n=$sequences '{
        printf "%d x 4096 tokens a step: AdamW %.1f ms, Muon %.1f ms, %.2f times\n", n, $1, $2, $2 / $1 }'
done
