#!/bin/sh
# --num-speculative-tokens: tokens drafted by modules of multi-token prediction. The text is that without drafts, on
# every layout of ranks.
# Sections of megatron.c: §10b §16
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
. tests/rl_setup.sh

# write FOLDER OPTIONS...: a model that has learned a few steps of the texts, so that some drafts are right.
write() {
    folder=$1
    shift
    # shellcheck disable=SC2086
    "$train" --stage sft --data-path "$work/sft.jsonl" --tokenizer-type ByteLevel $model $common \
        --variable-seq-lengths --micro-batch-size 64 --train-iters 60 --lr 5e-3 --save "$folder" --log-interval 60 \
        "$@" >"$work/out" 2>"$work/err"
}

# The number of accepted drafts, and of all, in the last line of a run.
drafts() {
    sed -n 's/^accepted \([0-9]*\) of \([0-9]*\) drafted tokens$/\1 \2/p' "$work/err"
}

# same RANKS DRAFTS OPTIONS...: texts and log-probabilities are those of $work/plain, the latter up to rounding, and
# some drafts, but not all, were accepted.
same() {
    ranks=$1 count=$2
    shift 2
    on_ranks "$ranks" "$infer" --out "$work/drafted" --num-speculative-tokens "$count" "$@" || return 1
    drafts | awk '{ exit !($1 > 0 && $1 < $2) }' || { echo "accepted: $(drafts)" && return 1; }
    python3 - "$work/plain" "$work/drafted" <<'EOF' || { echo "$ranks ranks, $count drafts: $*" && return 1; }
import json, sys
plain, drafted = ([json.loads(line) for line in open(name)] for name in sys.argv[1:])
assert len(plain) == len(drafted) > 0
for a, b in zip(plain, drafted):
    for key in a:
        if isinstance(a[key], list) and a[key] and isinstance(a[key][0], float):
            assert len(a[key]) == len(b[key]) and all(abs(x - y) < 1e-4 for x, y in zip(a[key], b[key])), (key, a, b)
        else:
            assert a[key] == b[key], (key, a, b)
EOF
}

# Prompts of several lengths; some begin alike. More than run at once, in a cache too small for all of them.
texts_are_those_without_drafts() {
    awk 'BEGIN { for (i = 0; i < 12; i++) printf "{\"prompt\": \"%d%d>%s\"}\n", i / 4, i % 7, i % 3 ? "" : "1" }' \
        >"$work/prompts"
    while read -r count options; do
        # shellcheck disable=SC2086
        set -- --load "$work/mtp" --device cpu --prompts "$work/prompts" --chat-template plain --max-new-tokens 11 \
            --num-return-sequences 2 --inference-max-requests 5 --inference-dynamic-batching-block-size 4 $options
        on_ranks 1 "$infer" --out "$work/plain" "$@" && same 1 "$count" "$@" || return 1
        case $count in
        2) same 2 2 "$@" --tensor-model-parallel-size 2 && same 2 2 "$@" --pipeline-model-parallel-size 2 &&
            same 2 2 "$@" || return 1 ;;
        esac
    done <<EOF
1 --temperature 0
2 --temperature 0.7 --seed 3
3 --temperature 1 --top-p 0.9 --top-k 20 --kv-cache-tokens 40
4 --temperature 0.8 --repetition-penalty 1.2 --stop 11 --min-p 0.01
EOF
}

# One module at every depth, and experts on ranks of their own.
repeated_modules_and_experts_draft_too() {
    set -- --device cpu --prompts "$work/prompts" --chat-template plain --max-new-tokens 11 --temperature 0.7
    on_ranks 1 "$infer" --load "$work/experts" --out "$work/plain" "$@" &&
        same 1 2 --load "$work/experts" "$@" &&
        same 2 2 --load "$work/experts" "$@" --expert-model-parallel-size 2
}

# Conversations, and lines of standard input.
lines_and_conversations_are_the_same() {
    for mode in '' '--chat --chat-template plain'; do
        for count in 0 2; do
            # shellcheck disable=SC2086
            printf '12>\n31>\n12>\n' | "$infer" --load "$work/mtp" --device cpu --max-new-tokens 9 --seed 5 $mode \
                --num-speculative-tokens $count >"$work/lines.$count" 2>"$work/err" || return 1
        done
        cmp "$work/lines.0" "$work/lines.2" && [ -n "$(drafts)" ] || return 1
    done
}

# Without rounding between batches of one size and of another, an iteration of reinforcement learning has the same bits.
rollouts_are_the_same() {
    for count in 0 1; do
        learn 1 "$work/metrics.$count" --load "$work/mtp" --rollout-batch-size 6 --num-return-sequences 4 \
            --train-iters 2 --lr 1e-3 --bitwise-rollouts --num-speculative-tokens $count || return 1
    done
    for key in reward response_tokens lm_loss grad_norm mtp_1_loss; do
        series $key "$work/metrics.0" >"$work/a" && series $key "$work/metrics.1" >"$work/b" &&
            [ -s "$work/a" ] && cmp "$work/a" "$work/b" || return 1
    done
    series drafts_accepted "$work/metrics.1" | awk '$1 > 0 && $1 < 1 { n++ } END { exit n != 2 }' &&
        learn 2 "$work/metrics.2" --load "$work/mtp" --rollout-batch-size 6 --num-return-sequences 4 --train-iters 2 \
            --lr 1e-3 --tensor-model-parallel-size 2 --rollout-tensor-model-parallel-size 1 \
            --num-speculative-tokens 1 &&
        series drafts_accepted "$work/metrics.2" | awk '$1 > 0 && $1 < 1 { n++ } END { exit n != 2 }'
}

models_without_drafts_are_refused() {
    mkdir -p "$work/states"
    sed '0,/{/s//{ "mtp_num_layers": 1,/' tests/golden/hf/qwen3_next/config.json >"$work/states/config.json"
    set -- "$infer" --device cpu --prompt-tokens 1,2 --print-tokens --num-speculative-tokens 1
    refused 'the model has no modules of multi-token prediction' "$@" --load tests/golden/hf/llama &&
        refused 'cannot take back a draft' "$@" --load "$work/states" &&
        refused 'is more than the --mtp-num-layers.* 2 that train' "$train" --stage rl --load "$work/mtp" --finetune \
            --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 --train-iters 1 --lr 1e-3 \
            --num-speculative-tokens 3 --chat-template plain
}

write_data
write "$work/mtp" --mtp-num-layers 2 && write "$work/experts" --mtp-num-layers 2 --mtp-use-repeated-layer \
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32
check texts_are_those_without_drafts texts_are_those_without_drafts
check repeated_modules_and_experts_draft_too repeated_modules_and_experts_draft_too
check lines_and_conversations_are_the_same lines_and_conversations_are_the_same
check rollouts_are_the_same rollouts_are_the_same
check models_without_drafts_are_refused models_without_drafts_are_refused
exit $failed
