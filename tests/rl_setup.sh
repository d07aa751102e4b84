# rl_setup.sh: a small model, its data, and a run of reinforcement learning, for the suites rl and rl_layouts.
# shellcheck shell=sh disable=SC2154

# Prompts of two digits; a response is right if it has them in ascending order. The model learns to write the two in
# either order.
write_data() {
    awk -v sft="$work/sft.jsonl" -v rl="$work/rl.jsonl" 'BEGIN {
        for (i = 0; i < 600; i++) {
            a = i * 7 % 10; b = (int(i / 10) * 3 + i) % 10
            low = a < b ? a : b; high = a < b ? b : a
            swapped = int(i / 3) % 2
            printf "{\"prompt\": \"%d%d>\", \"response\": \"%d%d\"}\n", a, b, swapped ? b : a, swapped ? a : b > sft
            printf "{\"prompt\": \"%d%d>\", \"answer\": \"%d%d\"}\n", a, b, low, high > rl
        }
    }'
}

model="--num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --seq-length 16"
common="--chat-template plain --hidden-dropout 0 --attention-dropout 0 --device cpu --lr-decay-style constant
    --eval-iters 0"

learn_format() {
    # shellcheck disable=SC2086
    "$train" --stage sft --data-path "$work/sft.jsonl" --tokenizer-type ByteLevel $model $common \
        --variable-seq-lengths --micro-batch-size 64 --train-iters 300 --lr 5e-3 --save "$work/base" \
        --log-interval 50 >"$work/out" 2>"$work/err"
}

# learn RANKS METRICS ARGUMENTS...
learn() {
    ranks=$1 metrics=$2
    shift 2
    set -- --stage rl --load "$work/base" --finetune --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --micro-batch-size 4 --log-interval 1 --metrics "$metrics" --overwrite "$@"
    # shellcheck disable=SC2086
    on_ranks "$ranks" "$train" "$@" $common
}
