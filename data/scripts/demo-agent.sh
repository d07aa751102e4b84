#!/bin/sh
# From nothing to a model that uses a tool, in a few minutes on two cores. Products such as 47*8 are too hard for a
# small model; a calculator answers it where it writes [47*8]. Supervised fine-tuning shows conversations in which
# answers are guessed, calls have wrong digits, and results are not copied. Reinforcement learning (GRPO) then rewards
# right answers.
#
#   usage: data/scripts/demo-agent.sh      (make demo-agent)
#
# All commands and their output are in DEMO_DIR/demo.log. MT_BIN is the folder of the programs, DEMO_DIR that of the
# models, DEMO_ITERS the number of iterations of reinforcement learning. DEMO_FORMAT and DEMO_TASK are further options
# of the two trainings; they win over those below.
set -eu
bin=${MT_BIN:-.}
model=${DEMO_DIR:-runs/demo-agent}
log=$model/demo.log
. data/scripts/demo-steps.sh
begin_log

# 1. Data. The generator is that of demo-rl.sh.
awk -v folder="$model" '
function draw(n) {
    state = state * 16807 % 2147483647
    return int(state / 2147483647 * n)
}
function message(role, text) {
    return "{\"role\": \"" role "\", \"content\": \"" text "\"}"
}
BEGIN {
    state = 1
    for (i = 0; i < 4000; i++) {
        a = 10 + draw(90); b = 2 + draw(8); prompt = a "*" b "="
        printf "{\"prompt\": \"%s\", \"answer\": \"%d\"}\n", prompt, a * b > (folder "/task.jsonl")
        a = 10 + draw(90); b = 2 + draw(8); prompt = a "*" b "="
        if (draw(5) < 2) { # a guess
            said = message("assistant", 20 + draw(800))
        } else {
            if (draw(5) == 0) a = 10 + draw(90)
            answer = draw(4) == 0 ? 20 + draw(800) : a * b
            said = message("assistant", "[" a "*" b "]") ", " message("user", a * b ">") ", "
            said = said message("assistant", answer)
        }
        printf "{\"messages\": [%s, %s]}\n", message("user", prompt), said > (folder "/format.jsonl")
    }
}'
echo "1. data: 4000 products such as 47*8= with their answers ($model/task.jsonl), and 4000 conversations about" \
    "others ($model/format.jsonl)"

common="--chat-template plain --seq-length 32 --hidden-dropout 0 --attention-dropout 0 --device cpu
    --lr-decay-style cosine --eval-iters 0"

# 2. The form of a call and of an answer.
began=$(date +%s)
# shellcheck disable=SC2086
run "$bin/train" --stage sft --data-path "$model/format.jsonl" --tokenizer-type ByteLevel $common --num-layers 2 \
    --hidden-size 128 --num-attention-heads 4 --swiglu --normalization RMSNorm --position-embedding-type rope \
    --disable-bias-linear --variable-seq-lengths --micro-batch-size 32 --global-batch-size 64 --train-iters 600 \
    --lr 3e-3 --log-interval 10 --save "$model/format" --metrics "$model/format.metrics.jsonl" --overwrite \
    ${DEMO_FORMAT:-}
echo "2. format: fine-tuned for $(value "$model/format.metrics.jsonl" iteration) iterations in" \
    "$(($(date +%s) - began)) s, loss $(first "$model/format.metrics.jsonl" lm_loss | cut -c1-4) to" \
    "$(value "$model/format.metrics.jsonl" lm_loss | cut -c1-4)"

# 3. The task, with the calculator.
began=$(date +%s)
# shellcheck disable=SC2086
run "$bin/train" --stage rl --load "$model/format" --finetune --data-path "$model/task.jsonl" $common \
    --env-command "python3 data/scripts/calculator.py --role user --result {}\\>" --max-new-tokens 21 \
    --rollout-batch-size 32 --num-return-sequences 8 --global-batch-size 128 --micro-batch-size 32 --lr 1e-3 \
    --ppo-epochs 2 --train-iters "${DEMO_ITERS:-80}" --log-interval 1 --save "$model/agent" \
    --metrics "$model/metrics.jsonl" --overwrite ${DEMO_TASK:-}
echo "3. task: $(value "$model/metrics.jsonl" iteration) iterations of GRPO in $(($(date +%s) - began)) s," \
    "reward $(first "$model/metrics.jsonl" reward | cut -c1-4) to" \
    "$(mean_of_last 10 "$model/metrics.jsonl" reward), turns $(first "$model/metrics.jsonl" turns | cut -c1-4) to" \
    "$(mean_of_last 10 "$model/metrics.jsonl" turns)"
sed -n '/^phases of/,/^  iteration/s/^/   /p' "$log"

# 4. The curves of the run.
draw_curves "$model/reward.svg"

# 5. Calls.
"$bin/infer" --load "$model/agent" --prompt '47*8=' '12*3=' '90*7=' --max-new-tokens 8 --temperature 0 --device cpu \
    >"$model/agent.calls" 2>>"$log" || { tail -n 20 "$log" >&2 && exit 1; }
echo "5. agent: $(grep '[*].*=' "$model/agent.calls" | paste -sd ' ' -)"
