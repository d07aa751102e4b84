#!/bin/sh
# Trains a model in bf16 and with every fp8 recipe, and compares the last validation losses: those of fp8 must be within
# 0.5% of bf16's (notes/18-fp8.md).
#
#   usage: tests/bench_fp8.sh DIR [TEXT]      from the root of the project; `make bench-fp8` does so
#
# On the CPU (DEVICE=cpu, the default) a Llama of 3.5 million parameters, 300 steps, which take minutes a recipe on two
# cores; with DEVICE=cuda GPT-2 124M, 2,000 steps. STEPS=n: another number. TEXT is
# ../shared/text/tinystories_2MiB.txt unless it is given; it may also be the prefix of an indexed dataset with tokens of
# the model. DIR gets the logs, the metrics and, by gnuplot, curves.png.
# Exits with 1 if a run fails or a recipe is too far off.
set -u
directory=$1 text=${2:-${MT_SHARED:-../shared}/text/tinystories_2MiB.txt} bin=${MT_BIN:-.} device=${DEVICE:-cpu}
mkdir -p "$directory" || exit 1
if [ -r "$text.idx" ]; then
    data=$text tokenizer=''
elif [ -r "$text" ]; then
    data=$directory/text_text_document
    tokenizer='--tokenizer-type HuggingFaceTokenizer --tokenizer-model data/demo-tokenizer.json'
else
    echo "bench-fp8: no text $text; give TEXT=FILE" >&2
    exit 1
fi

if [ "$device" = cuda ]; then
    steps=${STEPS:-2000} grids='' mxfp8=''
    model='--hf-config data/configs/gpt2-124m.json --hidden-dropout 0.1 --attention-dropout 0 --seq-length 1024
        --micro-batch-size 4 --global-batch-size 4 --lr 3e-4 --min-lr 3e-5'
else
    steps=${STEPS:-300} grids=fp32 mxfp8=mxfp8
    model='--num-layers 4 --hidden-size 256 --ffn-hidden-size 640 --num-attention-heads 4 --swiglu
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
        --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --seq-length 128
        --micro-batch-size 8 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4'
fi

# options NAME: those of a run.
options() {
    case $1 in
    fp32) ;;
    bf16) echo --bf16 ;;
    delayed) echo --bf16 --fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max ;;
    tensorwise) echo --bf16 --fp8-format hybrid --fp8-recipe tensorwise ;;
    *) echo --bf16 --fp8-format e4m3 --fp8-recipe "$1" ;;
    esac
}

# curve NAME: writes the losses of a run and their mean distance from bf16's, and adds both to the pictures.
curve() {
    sed -n 's/.*"iteration": \([0-9]*\), "lm_loss": \([^,]*\),.*/\1 \2/p' "$directory/$1.jsonl" >"$directory/$1.loss"
    paste "$directory/$1.loss" "$directory/bf16.loss" | awk '
        { sum += $2 - $4 }
        $1 % 20 == 0 { print $1, sum / 20; sum = 0 }' >"$directory/$1.distance"
    losses="$losses${losses:+, }'$directory/$1.loss' with lines title '$1'"
    distances="$distances${distances:+, }'$directory/$1.distance' with lines title '$1'"
}

# shellcheck disable=SC2086
[ "$data" = "$text" ] || "$bin/data/preprocess" --input "$text" --output-prefix "$directory/text" $tokenizer \
    --append-eod >"$directory/preprocess.log" 2>&1 || {
    echo "bench-fp8: $(tail -n 1 "$directory/preprocess.log")" >&2
    exit 1
}
failed=0 losses='' distances='' reference=''
for run in bf16 $grids delayed tensorwise blockwise $mxfp8; do
    rm -f "$directory/$run.jsonl"
    # shellcheck disable=SC2046,SC2086
    "$bin/train" --data-path "$data" $tokenizer $model --split 95,5,0 --train-iters "$steps" \
        --lr-decay-style cosine --lr-warmup-iters $((steps / 6)) --eval-interval $(((steps + 2) / 3)) --eval-iters 20 \
        --device "$device" --metrics "$directory/$run.jsonl" $(options "$run") >"$directory/$run.log" 2>&1 || {
        echo "bench-fp8: $run: $(tail -n 1 "$directory/$run.log")" >&2
        exit 1
    }
    loss=$(awk '/validation loss/ { loss = $4 } END { print loss }' "$directory/$run.log")
    reference=${reference:-$loss}
    curve "$run"
    echo "$run $loss $reference" | awk '{
        off = ($2 / $3 - 1) * 100
        bad = !($2 > 0 && off <= 0.5 && off >= -0.5)
        printf "%-12s validation loss %.4f  %+.2f%%%s\n", $1, $2, off, bad ? "  more than 0.5%" : ""
        exit bad }' || failed=1
done
command -v gnuplot >/dev/null || exit $failed
gnuplot <<GNUPLOT
set terminal pngcairo size 1100,400 font 'sans,11'
set output '$directory/curves.png'
set multiplot layout 1,2
set grid
set xlabel 'step'
set title 'training loss'
plot $losses
set title 'difference from bf16, mean of 20 steps'
unset key
plot $distances
GNUPLOT
echo "curves: $directory/curves.png"
exit $failed
