#!/bin/sh
# Records how a server's batch, queue, pages and latencies follow its load, from /metrics, for the picture of
# notes/serving.md: requests at random times at eight rates, of 20 to 200 tokens with answers of 10 to 60.
#
#   usage: MT_BIN=FOLDER tests/record_serve.sh [FILE [SECONDS of each rate]]
set -eu
. tests/suite.sh
file=${1:-notes/serving-load.txt} seconds=${2:-10}
export OMP_NUM_THREADS=1 # beside its clients
"$train" --device cpu --num-layers 8 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 4 --seq-length 64 \
    --max-position-embeddings 1024 --normalization RMSNorm --swiglu --position-embedding-type rope \
    --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 1024 \
    --save "$work/model" >"$work/out" 2>"$work/err"
"$infer" --load "$work/model" --device cpu --serve 0 --tokenizer-type ByteLevel --inference-max-requests 8 \
    --serve-queue 32 --kv-cache-tokens 2048 --inference-dynamic-batching-block-size 16 2>"$work/log" >"$work/served" \
    </dev/null &
server=$!
trap '[ -z "$server" ] || kill -KILL $server; rm -rf "$work"' EXIT
await_port
python3 tests/serve_check.py "$port" load "$file" "$seconds"
