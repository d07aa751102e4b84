#!/bin/sh
# Fine-tuning from files: the recipe, its model in conversation, the files of ../shared/sft, and refused options.
set -u
. tests/suite.sh
shared=${MT_SHARED:-../shared}
story=$shared/models/stories260K-hf
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
small='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --position-embedding-type rope --vocab-size 257
    --tokenizer-type ByteLevel --seq-length 512 --sft --split 1,0,0 --chat-template plain --train-iters 1 --lr 1e-3
    --global-batch-size 2 --eval-iters 0 --device cpu'

# trains ARGUMENTS...: a step of a small model on bytes.
trains() {
    # shellcheck disable=SC2086
    "$train" $small "$@" >"$work/out" 2>"$work/err"
}

# refuses PATTERN ARGUMENTS...
refuses() {
    pattern=$1
    shift
    # shellcheck disable=SC2086
    refused "$pattern" "$train" $small "$@"
}

# README: two minutes on two cores. Greedy answers, each a turn of one conversation.
the_recipe_makes_a_model_that_answers() {
    "$train" --config data/recipes/sft-demo.yaml --load "$story" --save "$work/chat" --device cpu >"$work/out" \
        2>"$work/err" || return 1
    printf '%s\n' 'Hello!' 'What does a cow say?' 'What color is snow?' 'What comes after seven?' 'Thank you!' |
        "$infer" --load "$work/chat" --chat --chat-template plain --temperature 0 --device cpu >"$work/answers" \
            2>"$work/err" || return 1
    printf ' %s\n' 'Hello! Ask me something.' 'A cow says moo.' 'Snow is white.' 'After seven comes eight.' \
        'You are welcome.' >"$work/expected"
    diff "$work/expected" "$work/answers"
}

# The same fine-tuning on two ranks, up to rounding.
two_ranks_train_alike() {
    set -- --config data/recipes/sft-demo.yaml --load "$story" --train-epochs 3 --device cpu
    "$train" "$@" --metrics "$work/one.jsonl" >"$work/out" 2>"$work/err" &&
        $(mpirun_here) -np 2 "$train" "$@" --metrics "$work/two.jsonl" >"$work/out" 2>"$work/err" ||
        return 1
    for file in one two; do sed -n 's/.*"lm_loss": \([0-9.]*\).*/\1/p' "$work/$file.jsonl" >"$work/$file"; done
    [ -s "$work/one" ] && paste "$work/one" "$work/two" |
        awk '{ d = $1 - $2; if (d < 0) d = -d; if (!(d < 1e-4 * $1)) exit 1 }'
}

files_of_three_kinds_are_read() {
    trains --data-path "$shared/sft/dolly_hhrlhf_train_small.jsonl" || return 1
    says 'dolly_hhrlhf_train_small.jsonl: [0-9]* samples, [0-9]* tokens, the loss counts [0-9]*; .* truncated' \
        "$work/out" || return 1
    trains --data-path "$shared/sft/gsm8k_test.jsonl" --prompt-key question --response-key answer --seq-length 2048 &&
        says 'gsm8k_test.jsonl: 1319 samples' "$work/out" || return 1
    trains --data-path "$shared/sft/lf_c4_demo.jsonl" --long-samples drop &&
        says 'lf_c4_demo.jsonl: .* are too long and left out' "$work/out"
}

# The loss on responses is another one than on all tokens.
the_loss_follows_its_option() {
    for tokens in responses last all; do
        trains --data-path data/sft-demo.jsonl --loss-on $tokens --metrics "$work/$tokens.jsonl" || return 1
        sed -n 's/.*the loss counts \([0-9]*\);.*/\1/p' "$work/out" >"$work/counted.$tokens"
    done
    [ "$(cat "$work/counted.last")" -lt "$(cat "$work/counted.responses")" ] &&
        [ "$(cat "$work/counted.responses")" -lt "$(cat "$work/counted.all")" ] &&
        ! cmp -s "$work/all.jsonl" "$work/responses.jsonl"
}

bad_lines_are_named_and_counted() {
    { head -n 3 data/sft-demo.jsonl && echo '{"prompt": 1}' && sed -n 4,6p data/sft-demo.jsonl; } >"$work/bad.jsonl"
    refuses 'bad.jsonl:4: has "prompt" but not "response"; .*--response-key' --data-path "$work/bad.jsonl" &&
        trains --data-path "$work/bad.jsonl" --skip-bad-samples 1 || return 1
    says '^skipped .*bad.jsonl:4: ' "$work/out" && says '6 samples, .*; 1 bad lines are left out' "$work/out" ||
        return 1
    # truncation leaves no token of the response
    printf '{"prompt": "%040d", "response": "a"}\n' 1 >"$work/long.jsonl"
    refuses 'no samples: none has a token that the loss counts' --data-path "$work/long.jsonl" --seq-length 16 &&
        refuses 'no samples: all are longer than --seq-length; .* --long-samples truncate' \
            --data-path "$work/long.jsonl" --seq-length 16 --long-samples drop
}

options_without_meaning_are_refused() {
    for option in '--chat-template plain' '--loss-on all' '--long-samples drop' '--skip-bad-samples 1' \
        '--messages-key a' '--prompt-key a' '--query-key a' '--response-key a'; do
        # shellcheck disable=SC2086
        refused "${option%% *} needs --sft" "$train" --num-layers 1 --hidden-size 16 --num-attention-heads 2 \
            --vocab-size 257 --seq-length 64 --train-iters 1 --lr 1e-3 --mock-data $option || return 1
    done
    refused 'chat-template and --mock-data exclude each other' "$train" --num-layers 1 --hidden-size 16 \
        --num-attention-heads 2 --vocab-size 257 --seq-length 64 --train-iters 1 --lr 1e-3 --sft --mock-data \
        --chat-template plain &&
        refuses 'no folder with a chat template; choose one with --chat-template' --data-path data/sft-demo.jsonl \
            --chat-template auto &&
        refuses 'qwen3 needs the token <|im_start|>' --data-path data/sft-demo.jsonl --chat-template qwen3 &&
        refuses 'none.jsonl: cannot be read' --data-path "$work/none.jsonl" || return 1
    mkfifo "$work/pipe" && refuses 'it is a pipe' --data-path "$work/pipe"
}

if [ -d "$story" ]; then
    check the_recipe_makes_a_model_that_answers the_recipe_makes_a_model_that_answers
    if [ -n "${HAVE_MPI:-}" ]; then check two_ranks_train_alike two_ranks_train_alike; fi
else
    echo "skipped: ../shared/models/stories260K-hf is absent"
fi
if [ -d "$shared/sft" ]; then
    check files_of_three_kinds_are_read files_of_three_kinds_are_read
else
    echo "skipped: ../shared/sft is absent"
fi
for test in the_loss_follows_its_option bad_lines_are_named_and_counted options_without_meaning_are_refused; do
    check $test $test
done
exit $failed
