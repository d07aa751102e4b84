#!/bin/sh
# Draws what all ranks do in training steps: data/scripts/trace.html with a trace in it, one page that needs no network.
#
#   usage: data/scripts/trace.sh PAGE.html [TRACE.json]      (make trace)
#
# TRACE.json is a file of train --trace. Without it a small model is trained for three steps, two of them traced, on
# RANKS ranks: pipeline stages and tensor parallelism, or what OPTIONS ask for. MT_BIN is the folder of the programs.
set -eu
page=$1 trace=${2:-}
bin=${MT_BIN:-.} ranks=${RANKS:-4}
. "$(dirname "$0")/demo-steps.sh"

if [ -z "$trace" ]; then
    trace=${page%.html}.json
    options=${OPTIONS:---device cpu --num-layers 8 --tensor-model-parallel-size $((ranks % 2 == 0 ? 2 : 1))
        --pipeline-model-parallel-size $((ranks % 4 == 0 ? 2 : 1))}
    launch=''
    if [ "$ranks" -gt 1 ]; then launch=$(mpirun_command "$ranks"); fi
    mkdir -p "$(dirname "$page")"
    # shellcheck disable=SC2086
    $launch "$bin/train" --mock-data --hidden-size 256 --num-attention-heads 8 --vocab-size 1024 --seq-length 128 \
        --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --eval-iters 0 --train-iters 3 $options \
        --trace "$trace" >"$page.log" 2>&1 || { tail -n 20 "$page.log" >&2 && exit 1; }
fi
if ! head -n 1 "$trace" 2>/dev/null | grep -q '"traceEvents"'; then
    echo "error: $trace: is no file of train --trace" >&2
    exit 1
fi
awk -v trace="$trace" '
    $0 == "TRACE" { while ((getline line <trace) > 0) print line; next }
    { print }' "$(dirname "$0")/trace.html" >"$page"
echo "$page: open it in a browser"
