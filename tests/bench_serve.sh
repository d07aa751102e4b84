#!/bin/sh
# A server beside infer --prompts: tokens per second for 64 clients, in turn with the same prompts in one batch; and how
# long its streams wait while a prompt of 2,000 tokens is read.
#
#   usage: MT_BIN=FOLDER tests/bench_serve.sh [TOKENS [CLIENTS [ROUNDS [OPTIONS of infer...]]]]
#
# The model is of the demo's shape, with random weights; --load DIR in OPTIONS takes another one. Each client asks for
# TOKENS new tokens (512).
set -eu
. tests/suite.sh
tokens=${1:-512} clients=${2:-64} rounds=${3:-5}
[ $# -lt 3 ] || shift 3
export OMP_WAIT_POLICY=passive
"$train" --device cpu --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 \
    --group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 4096 \
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 \
    --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/demo-tokenizer.json \
    --save "$work/model" >"$work/out" 2>"$work/err"
awk -v n="$clients" 'BEGIN { for (i = 0; i < n; i++) printf "{\"prompt\": \"Text %d begins with words\"}\n", i }' \
    >"$work/prompts.jsonl"
set -- --load "$work/model" --device cpu --inference-max-requests "$clients" "$@"
"$infer" "$@" --serve 0 2>"$work/log" >"$work/served" </dev/null &
server=$!
trap '[ -z "$server" ] || kill -KILL $server; rm -rf "$work"' EXIT
await_port
python3 tests/serve_check.py "$port" rates "$work/prompts.jsonl" "$tokens" "$rounds" $server "$infer" "$@" \
    --chat-template plain --out "$work/lines.jsonl"
python3 tests/serve_check.py "$port" pauses 16 2000 "$rounds"
