#!/bin/sh
# From nothing to a model that sorts digits, in about two minutes on two cores. Supervised fine-tuning teaches the form
# of an answer: the three digits of the prompt, in any order. Reinforcement learning (GRPO) then rewards the answers
# whose digits ascend.
#
#   usage: data/demo-rl.sh      (make demo-rl)
#
# All commands and their output are in DEMO_DIR/demo.log. MT_BIN is the folder of the programs, DEMO_DIR that of the
# models, DEMO_ITERS the number of iterations of reinforcement learning. Processes: DEMO_RANKS data-parallel ranks.
set -eu
bin=${MT_BIN:-.}
model=${DEMO_DIR:-runs/demo-rl}
iterations=${DEMO_ITERS:-240}
log=$model/demo.log
. data/demo-steps.sh

# 1. Data: every prompt of three digits; a response in some order of them; the answer in ascending order.
mkdir -p "$model"
: >"$log"
awk -v folder="$model" 'BEGIN {
    srand(1)
    for (i = 0; i < 4000; i++) {
        for (k = 1; k <= 3; k++) digit[k] = int(rand() * 10)
        prompt = digit[1] digit[2] digit[3] ">"
        for (k = 3; k > 1; k--) { j = 1 + int(rand() * k); t = digit[k]; digit[k] = digit[j]; digit[j] = t }
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
common="--chat-template plain --seq-length 16 --hidden-dropout 0 --attention-dropout 0 --device cpu --eval-iters 0"

# 2. The form of an answer.
began=$(date +%s)
# shellcheck disable=SC2086
run $launch "$bin/train" --stage sft --data-path "$model/format.jsonl" --tokenizer-type ByteLevel $common \
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --swiglu --normalization RMSNorm \
    --position-embedding-type rope --disable-bias-linear --variable-seq-lengths --micro-batch-size 32 \
    --global-batch-size 64 --train-iters 300 --lr 3e-3 --lr-decay-style cosine --log-interval 10 \
    --save "$model/format" --metrics "$model/format.metrics.jsonl" --overwrite
echo "2. format: fine-tuned for 300 iterations in $(($(date +%s) - began)) s," \
    "loss $(first "$model/format.metrics.jsonl" lm_loss | cut -c1-4) to" \
    "$(value "$model/format.metrics.jsonl" lm_loss | cut -c1-4)"

# 3. The task.
began=$(date +%s)
# shellcheck disable=SC2086
run $launch "$bin/train" --stage rl --load "$model/format" --finetune --data-path "$model/task.jsonl" $common \
    --max-new-tokens 6 --rollout-batch-size 32 --num-return-sequences 8 --global-batch-size 128 --ppo-epochs 2 \
    --micro-batch-size 32 --train-iters "$iterations" --lr 1e-3 --lr-decay-style cosine --log-interval 1 \
    --save "$model/sorts" --metrics "$model/metrics.jsonl" --overwrite
echo "3. task: $iterations iterations of GRPO in $(($(date +%s) - began)) s," \
    "reward $(first "$model/metrics.jsonl" reward | cut -c1-4) to" \
    "$(mean_of_last 20 "$model/metrics.jsonl" reward)"

# 4. The curves of the run.
draw_curves "$model/reward.svg"

# 5. Answers, before and after.
for stage in format sorts; do
    "$bin/infer" --load "$model/$stage" --prompt '529>' '710>' '383>' --max-new-tokens 6 \
        --temperature 0 --device cpu >"$model/$stage.answers" 2>>"$log" || { tail -n 20 "$log" >&2 && exit 1; }
    echo "5. $stage: $(grep '>' "$model/$stage.answers" | paste -sd ' ' -)"
done
