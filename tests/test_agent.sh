#!/bin/sh
# Reinforcement learning in turns: an environment answers the model, whose tokens train and whose own do not.
# Sections of megatron.c: §16
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1

# Prompts of two digits. The model writes one, the environment "=", and the model the other one; they are right in
# ascending order. Samples of this form have them in either order.
write_conversations() {
    awk -v sft="$work/sft.jsonl" -v rl="$work/rl.jsonl" 'BEGIN {
        for (i = 0; i < 400; i++) {
            a = i * 7 % 10; b = (int(i / 10) * 3 + i) % 10
            form = "{\"role\": \"%s\", \"content\": \"%s\"}"
            for (swapped = 0; swapped < 2; swapped++)
                printf "{\"messages\": [" form ", " form ", " form ", " form "]}\n", "user", a b ">", "assistant", \
                    (swapped ? b : a), "user", "=", "assistant", (swapped ? a : b) > sft
            printf "{\"prompt\": \"%d%d>\", \"answer\": \"%d%d\"}\n", a, b, a < b ? a : b, a < b ? b : a > rl
        }
    }'
    # texts: $1 the prompt, $2 the first response, $3 "=", $4 the second one, each behind an underscore
    cat >"$work/env.sh" <<'EOF'
set -f
while IFS= read -r line; do
    echo "$line" >>"$MT_TEST_SEEN"
    id=${line#*'"id": '} answer=${line#*'"answer": "'} rest=$line texts=
    id=${id%%,*} answer=${answer%%\"*}
    while case $rest in *'"content":"'*) : ;; *) false ;; esac; do
        rest=${rest#*'"content":"'}
        texts="$texts _${rest%%\"*}"
    done
    set -- $texts
    lines=$((${lines:-0} + 1))
    [ $lines != "${MT_TEST_DIES:-0}" ] || exit 3
    case $#$line in
    2*'"turns_left": 0}') echo "{\"id\": $id}" ;;
    2*) echo "{\"id\": $id, \"reward\": 0.25, \"messages\": [{\"role\": \"user\", \"content\": \"=\"}]}" ;;
    *) case $2$4 in _${answer%?}_${answer#?}) reward=1 ;; *) reward=0 ;; esac
        echo "{\"id\": $id, \"reward\": $reward, \"done\": true}" ;;
    esac
done
EOF
}

common="--chat-template plain --seq-length 16 --hidden-dropout 0 --attention-dropout 0 --device cpu
    --lr-decay-style constant --eval-iters 0"
learn_form() {
    # shellcheck disable=SC2086
    "$train" --stage sft --data-path "$work/sft.jsonl" --tokenizer-type ByteLevel --num-layers 2 --hidden-size 32 \
        --num-attention-heads 4 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \
        --variable-seq-lengths --micro-batch-size 64 --train-iters 200 --lr 5e-3 --save "$work/base" $common \
        >"$work/out" 2>"$work/err"
}

# learn RANKS NAME ARGUMENTS...: metrics in $work/NAME, lines of the environment in $work/NAME.seen.
learn() {
    ranks=$1 metrics=$2
    export MT_TEST_SEEN="$work/$metrics.seen"
    shift 2
    set -- --stage rl --data-path "$work/rl.jsonl" --max-new-tokens 8 --micro-batch-size 4 --log-interval 1 \
        --metrics "$work/$metrics" --rollout-batch-size 8 --num-return-sequences 4 --lr 1e-3 --adam-eps 1e-4 \
        --env-command "exec sh $work/env.sh" "$@"
    # shellcheck disable=SC2086
    on_ranks "$ranks" "$train" "$@" $common
}
start="--load $work/base --finetune"

# The generator's log-probabilities are those of training: all tokens stand where the model wrote them.
conversations_are_trained_on() {
    # shellcheck disable=SC2086
    learn 1 whole $start --train-iters 4 --ppo-epochs 2 --global-batch-size 16 || return 1
    series turns "$work/whole" | awk '$1 < 1.8 { exit 1 } END { exit NR != 4 }' &&
        series generation_gap "$work/whole" | awk '$1 > 1e-4 { exit 1 }' || return 1
    # every conversation had one first line, with an id of its own
    [ "$(grep '"turns_left": 7}' "$work/whole.seen" | sed 's/,.*//' | sort -u | wc -l)" = 128 ] || return 1
    [ "$(grep -c '"turns_left": 7}' "$work/whole.seen")" = 128 ] || return 1
    # rewards are added up: 0.25 for two responses, and 1 for right ones
    series reward "$work/whole" | awk '{ sum += $1 } END { exit !(sum / NR > 0.3 && sum / NR < 1.25) }' &&
        series grad_norm "$work/whole" | awk '$1 <= 0 { exit 1 }'
}

# --bitwise-rollouts: no rounding is between a response after several turns and its training.
turns_have_no_mismatch() {
    # shellcheck disable=SC2086
    learn 1 exact $start --train-iters 2 --bitwise-rollouts &&
        [ "$(series generation_gap "$work/exact" | sort -u)" = 0 ] &&
        series turns "$work/exact" | awk '$1 < 1.8 { exit 1 }'
}

a_resumed_run_holds_the_same_conversations() {
    # shellcheck disable=SC2086
    learn 1 parts $start --train-iters 2 --ppo-epochs 2 --global-batch-size 16 --save "$work/run" &&
        learn 1 parts --load "$work/run" --save "$work/run" --train-iters 4 --ppo-epochs 2 --global-batch-size 16 &&
        same_series "$work/whole" "$work/parts" 0 1 reward turns lm_loss grad_norm response_tokens &&
        cmp "$work/whole.seen" "$work/parts.seen"
}

layouts_hold_the_same_conversations() {
    while read -r ranks layout; do
        # shellcheck disable=SC2086
        learn "$ranks" "other$ranks" $start --train-iters 4 --ppo-epochs 2 --global-batch-size 16 $layout &&
            same_series "$work/whole" "$work/other$ranks" 1e-4 1 reward turns lm_loss grad_norm response_tokens || {
            echo "$ranks ranks, $layout"
            return 1
        }
    done <<EOF
2
4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --rollout-tensor-model-parallel-size 1
EOF
}

# It answers one iteration, then dies, or hangs.
an_environment_that_ends_loses_nothing() {
    ranks=1
    [ -z "${HAVE_MPI:-}" ] || ranks=2
    lines=$(sed '/"id": 32,.*"turns_left": 7/,$d' "$work/whole.seen" | wc -l)
    export MT_TEST_DIES=$((lines + 40))
    # shellcheck disable=SC2086
    learn $ranks dies $start --train-iters 9 --ppo-epochs 2 --global-batch-size 16 --save "$work/dies.run" && return 1
    unset MT_TEST_DIES
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] && says '^error: the environment .*exit status 3 after .* answers' \
        "$work/err" && says '^saved iteration 1 to' "$work/out" || return 1
    # shellcheck disable=SC2086
    learn $ranks hangs $start --train-iters 9 --env-command 'exec sleep 1000' --env-timeout-seconds 0.5 && return 1
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] && says '^error: .*wrote 0 answers to 32 responses in 0.5 s' "$work/err"
}

contradictions_are_refused() {
    # shellcheck disable=SC2086
    set -- "$train" --stage rl --data-path "$work/rl.jsonl" --max-new-tokens 8 --train-iters 1 --lr 1e-3 $start $common
    refused 'reward env needs --env-command' "$@" --reward env &&
        refused 'env-max-turns needs --env-command' "$@" --env-max-turns 2 &&
        refused 'exclude each other' "$@" --env-command true --stop x &&
        refused 'exclude each other' "$@" --env-command true --adv-estimator remax &&
        refused 'env-timeout-seconds must be less' "$@" --env-command true --env-timeout-seconds 1e8
}

write_conversations
check the_form_is_learned learn_form
check conversations_are_trained_on conversations_are_trained_on
check turns_have_no_mismatch turns_have_no_mismatch
check a_resumed_run_holds_the_same_conversations a_resumed_run_holds_the_same_conversations
[ "${HAVE_MPI:-}" ] && check layouts_hold_the_same_conversations layouts_hold_the_same_conversations
check an_environment_that_ends_loses_nothing an_environment_that_ends_loses_nothing
check contradictions_are_refused contradictions_are_refused
exit $failed
