#!/bin/sh
# From nothing to a model that sorts digits, in about two minutes on two cores. Supervised fine-tuning teaches the form
# of an answer: the three digits of the prompt, in any order. Reinforcement learning (GRPO) then rewards the answers
# whose digits ascend.
#
#   usage: data/scripts/demo-rl.sh      (make demo-rl)
#
# With DEMO_MODEL=gpt2-124m DEMO_DEVICE=cuda (make demo-rl MODEL=gpt2-124m DEVICE=cuda) a GPU trains a model of GPT-2's
# size in bf16, on more responses at once: 124 million parameters. Of its 50257 tokens the demo uses the 257 of single
# bytes. DEMO_MODEL may be any file of data/configs.
#
# All commands and their output are in DEMO_DIR/demo.log. MT_BIN is the folder of the programs, DEMO_DIR that of the
# models, DEMO_ITERS the number of iterations of reinforcement learning. Processes: DEMO_RANKS data-parallel ranks.
# DEMO_FORMAT and DEMO_TASK are further options of the two trainings; they win over those below.
set -eu
bin=${MT_BIN:-.}
model=${DEMO_DIR:-runs/demo-rl}
device=${DEMO_DEVICE:-cpu}
log=$model/demo.log
. data/scripts/demo-steps.sh

# The model; the batches and learning rates of both trainings. Learning rates fall with the width of a model, and a GPU
# is idle with small batches.
if [ -z "${DEMO_MODEL:-}" ]; then
    shape="--num-layers 2 --hidden-size 128 --num-attention-heads 4 --swiglu --normalization RMSNorm
        --position-embedding-type rope --disable-bias-linear"
    format="--micro-batch-size 32 --global-batch-size 64 --train-iters 300 --lr 3e-3"
    task="--rollout-batch-size 32 --num-return-sequences 8 --global-batch-size 128 --micro-batch-size 32 --lr 1e-3"
else
    shape="--hf-config data/configs/$DEMO_MODEL.json"
    format="--micro-batch-size 256 --global-batch-size 256 --train-iters 400 --lr 5e-4 --lr-warmup-fraction 0.1"
    task="--rollout-batch-size 64 --num-return-sequences 16 --global-batch-size 512 --micro-batch-size 256
        --inference-max-requests 1024 --lr 3e-5 --lr-warmup-fraction 0.05"
fi
precision=''
if [ "$device" = cuda ]; then precision=--bf16; fi

# 1. Data: every prompt of three digits; a response in some order of them; the answer in ascending order.
begin_log
# rand() differs from one awk to another. This generator does not: 16807 x mod 2^31 - 1, whose products are exact in
# doubles (Park and Miller, "Random number generators: good ones are hard to find").
awk -v folder="$model" '
function draw(n) {
    state = state * 16807 % 2147483647
    return int(state / 2147483647 * n)
}
BEGIN {
    state = 1
    for (i = 0; i < 4000; i++) {
        for (k = 1; k <= 3; k++) digit[k] = draw(10)
        prompt = digit[1] digit[2] digit[3] ">"
        for (k = 3; k > 1; k--) { j = 1 + draw(k); t = digit[k]; digit[k] = digit[j]; digit[j] = t }
        printf "{\"prompt\": \"%s\", \"response\": \"%d%d%d\"}\n", prompt, digit[1], digit[2], digit[3] > \
            (folder "/format.jsonl")
        for (k = 1; k < 3; k++) for (j = 1; j < 3; j++)
            if (digit[j] > digit[j + 1]) { t = digit[j]; digit[j] = digit[j + 1]; digit[j + 1] = t }
        printf "{\"prompt\": \"%s\", \"answer\": \"%d%d%d\"}\n", prompt, digit[1], digit[2], digit[3] > \
            (folder "/task.jsonl")
    }
}'
echo "1. data: 4000 prompts such as 529>, with an order of the digits ($model/format.jsonl) and the answer" \
    "($model/task.jsonl)"

launch=''
if [ "${DEMO_RANKS:-1}" -gt 1 ]; then launch=$(mpirun_command "$DEMO_RANKS"); fi
common="--chat-template plain --seq-length 16 --hidden-dropout 0 --attention-dropout 0 --device $device $precision
    --lr-decay-style cosine --eval-iters 0"

# 2. The form of an answer.
began=$(date +%s)
# shellcheck disable=SC2086
run $launch "$bin/train" --stage sft --data-path "$model/format.jsonl" --tokenizer-type ByteLevel $common \
    $shape --variable-seq-lengths $format --log-interval 10 --save "$model/format" \
    --metrics "$model/format.metrics.jsonl" --overwrite ${DEMO_FORMAT:-}
echo "2. format: fine-tuned for $(value "$model/format.metrics.jsonl" iteration) iterations in" \
    "$(($(date +%s) - began)) s," \
    "loss $(first "$model/format.metrics.jsonl" lm_loss | cut -c1-4) to" \
    "$(value "$model/format.metrics.jsonl" lm_loss | cut -c1-4)"

# 3. The task.
began=$(date +%s)
# shellcheck disable=SC2086
run $launch "$bin/train" --stage rl --load "$model/format" --finetune --data-path "$model/task.jsonl" $common \
    --max-new-tokens 6 $task --ppo-epochs 2 --train-iters "${DEMO_ITERS:-240}" --log-interval 1 \
    --save "$model/sorts" --metrics "$model/metrics.jsonl" --overwrite ${DEMO_TASK:-}
echo "3. task: $(value "$model/metrics.jsonl" iteration) iterations of GRPO in $(($(date +%s) - began)) s," \
    "reward $(first "$model/metrics.jsonl" reward | cut -c1-4) to" \
    "$(mean_of_last 20 "$model/metrics.jsonl" reward)"
sed -n '/^phases of/,/^  iteration/s/^/   /p' "$log"

# 4. The curves of the run.
draw_curves "$model/reward.svg"

# 5. Answers, before and after.
for stage in format sorts; do
    # shellcheck disable=SC2086
    "$bin/infer" --load "$model/$stage" --prompt '529>' '710>' '383>' --max-new-tokens 6 --temperature 0 \
        --device "$device" $precision >"$model/$stage.answers" 2>>"$log" || { tail -n 20 "$log" >&2 && exit 1; }
    echo "5. $stage: $(grep '>' "$model/$stage.answers" | paste -sd ' ' -)"
done
