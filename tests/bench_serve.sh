#!/bin/sh
# Tokens per second of a server for 64 clients, beside infer --prompts with the same prompts in one batch.
#
#   usage: MT_BIN=FOLDER tests/bench_serve.sh [TOKENS [CLIENTS [OPTIONS of infer...]]]
#
# The model is of the demo's shape, with random weights; --load DIR in OPTIONS takes another one. Each client asks for
# TOKENS new tokens (128), which differ in nothing but their prompts. The server's seconds are those of its clients.
set -eu
. tests/suite.sh
tokens=${1:-128} clients=${2:-64}
[ $# -lt 2 ] || shift 2
export OMP_WAIT_POLICY=passive
"$train" --device cpu --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 \
    --group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 1024 \
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 \
    --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/demo-tokenizer.json \
    --save "$work/model" >"$work/out" 2>"$work/err"
awk -v n="$clients" 'BEGIN { for (i = 0; i < n; i++) printf "{\"prompt\": \"Text %d begins with words\"}\n", i }' \
    >"$work/prompts.jsonl"
set -- --load "$work/model" --device cpu --inference-max-requests "$clients" "$@"
"$infer" "$@" --prompts "$work/prompts.jsonl" --max-new-tokens "$tokens" --temperature 0 --chat-template plain \
    --out "$work/lines.jsonl" 2>"$work/err" >"$work/out"
sed -n 's/^read/infer --prompts: read/p' "$work/err"
"$infer" "$@" --serve 0 2>"$work/log" >"$work/served" </dev/null &
server=$!
trap 'kill -KILL $server; rm -rf "$work"' EXIT
port=''
while [ -z "$port" ]; do
    sleep 0.2
    port=$(sed -n 's|^serving .* at http://.*:\([0-9]*\)$|\1|p' "$work/log")
    kill -0 $server
done
python3 tests/serve_check.py "$port" rate "$work/prompts.jsonl" "$tokens"
