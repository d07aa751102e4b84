#!/bin/sh
# From nothing to a model that names colours and places of shapes in pictures, in about three minutes on two cores: a
# vision tower and a decoder with random weights are fine-tuned on conversations about pictures that
# data/scripts/shapes.py draws, and answer questions about others.
#
#   usage: data/scripts/demo-vision.sh      (make demo-vision)
#
# All commands and their output are in DEMO_DIR/demo.log. MT_BIN is the folder of the programs, DEMO_DIR that of the
# model and the page, DEMO_ITERS the number of iterations, DEMO_OPTIONS more options of train.
set -eu
bin=${MT_BIN:-.}
model=${DEMO_DIR:-runs/demo-vision}
log=$model/demo.log
iterations=${DEMO_ITERS:-800}
. data/scripts/demo-steps.sh
begin_log

# 1. Pictures.
run python3 data/scripts/shapes.py "$model/shapes"
echo "1. data: $(wc -l <"$model/shapes/train.jsonl") pictures with an answer to train on, and" \
    "$(wc -l <"$model/shapes/test.jsonl") others ($model/shapes)"

# 2. Training. The first run ends after an iteration, so that its answers can be compared; the second goes on.
began=$(date +%s)
train() {
    # shellcheck disable=SC2086
    run "$bin/train" --stage sft --train-data-path "$model/shapes/train.jsonl" \
        --valid-data-path "$model/shapes/test.jsonl" --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model "$model/shapes/tokenizer" --vision-tower qwen3 --vision-num-layers 2 \
        --vision-hidden-size 64 --vision-ffn-hidden-size 128 --vision-num-attention-heads 4 --vision-patch-size 8 \
        --vision-num-positions 36 --image-token-id 1028 --vision-start-token-id 1026 --vision-end-token-id 1027 \
        --mrope-section 4 6 6 --mrope-interleaved --num-layers 2 --hidden-size 128 --num-attention-heads 4 --swiglu \
        --normalization RMSNorm --qk-layernorm --position-embedding-type rope --disable-bias-linear \
        --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --seq-length 64 \
        --variable-seq-lengths --micro-batch-size 64 --global-batch-size 64 --train-iters "$iterations" --lr 3e-3 \
        --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --eval-interval 100 --eval-iters 3 \
        --log-interval 10 --save-interval "$(((iterations + 1) / 2))" --device cpu --save "$model/model" \
        --metrics "$model/metrics.jsonl" "$@" ${DEMO_OPTIONS:-}
}
rm -rf "$model/model"
train --exit-interval 1 --overwrite
train --load "$model/model"
echo "2. training: $iterations iterations in $(($(date +%s) - began)) s, loss" \
    "$(first "$model/metrics.jsonl" lm_loss | cut -c1-4) to $(value "$model/metrics.jsonl" lm_loss | cut -c1-6)"

# 3. Answers, greedy, about pictures of the test, after one iteration, half of them, and all.
answers=''
for folder in "$model"/model/iter_*; do
    iteration=$(basename "$folder" | sed 's/iter_0*//')
    run "$bin/infer" --load "$folder" --prompts "$model/shapes/questions.jsonl" --out "$folder.answers.jsonl" \
        --temperature 0 --max-new-tokens 24 --device cpu
    answers="$answers $iteration=$folder.answers.jsonl"
done

# 4. The page.
run data/scripts/plot.sh "$model/metrics.jsonl" "$model/curves.svg"
# shellcheck disable=SC2086
python3 data/scripts/shapes.py "$model/shapes" $answers --page "$model/page.html" >"$model/shares" 2>>"$log" ||
    { tail -n 20 "$log" >&2 && exit 1; }
sed 's/^/3. /' "$model/shares" | tee -a "$log"
echo "4. page: $model/page.html"
