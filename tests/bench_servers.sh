#!/bin/sh
# infer --serve beside transformers' server on the same model and requests, one after the other: tokens per second of
# CLIENTS at once, and of one.
#
#   usage: MT_BIN=FOLDER MT_TRANSFORMERS=COMMAND tests/bench_servers.sh [TOKENS [CLIENTS [ROUNDS]]]
#
# MT_TRANSFORMERS is the command `transformers`, with its packages for a server (pip install transformers[serving]
# torch). Both have as many threads as OMP_NUM_THREADS says, and compute in fp32. The model is of the demo's shape, with
# random weights.
set -eu
. tests/suite.sh
tokens=${1:-64} clients=${2:-16} rounds=${3:-3}
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$train" --device cpu --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 \
    --group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 4096 \
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 \
    --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/demo-tokenizer.json \
    --save "$work/run" >"$work/out" 2>"$work/err"
model=$work/run/iter_0000001
echo '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}' >"$model/tokenizer_config.json"
awk -v n="$clients" 'BEGIN { for (i = 0; i < n; i++) printf "{\"prompt\": \"Text %d begins with words\"}\n", i }' \
    >"$work/prompts.jsonl"
server=''
trap '[ -z "$server" ] || kill -KILL $server; rm -rf "$work"' EXIT

# measure NAME PORT MODEL: the server's rates, once it answers; then it ends.
measure() {
    while ! curl -s -o "$work/health" "http://127.0.0.1:$2/health"; do
        kill -0 $server || { cat "$work/log" && exit 1; }
        sleep 0.5
    done
    echo "$1"
    python3 tests/serve_check.py "$2" throughput "$3" "$work/prompts.jsonl" "$tokens" "$rounds"
    kill -TERM $server && wait $server || :
    server=''
}

free_port() {
    python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

port=$(free_port)
"$infer" --load "$model" --device cpu --serve "$port" --serve-model-name demo --inference-max-requests "$clients" \
    >"$work/served" 2>"$work/log" </dev/null &
server=$!
measure 'infer --serve' "$port" demo
for batching in --continuous-batching --no-continuous-batching; do
    port=$(free_port)
    # a command with arguments
    # shellcheck disable=SC2086
    ${MT_TRANSFORMERS:-transformers} serve "$model" --device cpu --dtype float32 --host 127.0.0.1 --port "$port" \
        $batching >"$work/served" 2>"$work/log" </dev/null &
    server=$!
    measure "transformers serve $batching" "$port" "$model"
done
