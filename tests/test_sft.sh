#!/bin/sh
# Fine-tuning from files: the recipes, conversations with their models and in every chat template, the files of
# ../shared/sft, and refused options.
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

# The folder of a model that was trained without marks says so: --chat needs no --chat-template, also after a run that
# went on.
a_model_remembers_the_template_plain() {
    printf '{"prompt":"Hello","response":"you"}\n%.0s' 1 2 3 4 >"$work/plain.jsonl"
    trains --data-path "$work/plain.jsonl" --save "$work/plain" &&
        trains --data-path "$work/plain.jsonl" --save "$work/plain" --load "$work/plain" --train-iters 2 || return 1
    set -- --temperature 0 --max-new-tokens 8 --device cpu --chat
    for iteration in 1 2; do
        folder=$work/plain/iter_000000$iteration
        printf 'Hello\n' | "$infer" --load "$folder" "$@" >"$work/remembered" 2>"$work/err" &&
            printf 'Hello\n' | "$infer" --load "$folder" --chat-template plain "$@" >"$work/out" 2>"$work/err" &&
            cmp "$work/out" "$work/remembered" && [ -s "$work/out" ] || return 1
    done
}

# Trained on with another template, the model does not have plain's any more.
another_template_takes_the_place_of_plain() {
    special_tokenizer "$work/special.json"
    printf '{"prompt":"Hello","response":"you"}\n' >"$work/plain.jsonl"
    set -- --sft --data-path "$work/plain.jsonl" --split 1,0,0 --seq-length 64 --train-iters 1 --lr 0.01
    trains_special "$@" --chat-template plain --save "$work/unmarked" &&
        [ -e "$work/unmarked/iter_0000001/chat_template.jinja" ] &&
        trains_special "$@" --chat-template chatml --load "$work/unmarked" --finetune --save "$work/marked" &&
        [ ! -e "$work/marked/iter_0000001/chat_template.jinja" ]
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

# special_tokenizer FILE: the demo's tokenizer with the special tokens of all templates.
special_tokenizer() {
    added='' id=1024
    for token in '<|im_start|>' '<|im_end|>' '<|begin_of_text|>' '<|start_header_id|>' '<|end_header_id|>' \
        '<|eot_id|>' '<s>' '[INST]' '[/INST]' '</s>' '<｜begin▁of▁sentence｜>' '<｜User｜>' \
        '<｜Assistant｜>' '<｜end▁of▁sentence｜>'; do
        flags='"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true'
        added="$added{\"id\":$id,\"content\":\"$token\",$flags},"
        id=$((id + 1))
    done
    sed "s#\"added_tokens\":\[#&$added#" data/demo-tokenizer.json >"$1"
}

# trains_special ARGUMENTS...: a small model of that tokenizer.
trains_special() {
    "$train" --num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --swiglu \
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm \
        --group-query-attention --num-query-groups 1 --vocab-size 1038 --make-vocab-size-divisible-by 1 \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$work/special.json" --max-position-embeddings 4096 \
        --global-batch-size 1 --lr-decay-style constant --eval-iters 0 --device cpu "$@" >"$work/out" 2>"$work/err"
}

# A model learns one answer in each template and gives it in both turns of a conversation.
every_template_holds_a_conversation() {
    special_tokenizer "$work/special.json"
    echo '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}' | tr -d '\n' >"$work/hi.jsonl"
    for template in chatml qwen2_5 qwen3 llama3 mistral deepseek3 plain; do
        rm -rf "$work/talks"
        trains_special --sft --data-path "$work/hi.jsonl" --split 1,0,0 --chat-template $template --seq-length 128 \
            --train-iters 100 --lr 0.01 --save "$work/talks" &&
            printf 'hi\nhi\n' | "$infer" --load "$work/talks" --chat --chat-template $template --temperature 0 \
                --max-new-tokens 16 --device cpu >"$work/answers" 2>"$work/err" || return 1
        case $template in chatml) # whose end of a turn is not the tokenizer's end of a text
            tr -d ' \n' <"$work"/talks/iter_0000100/generation_config.json >"$work/flat"
            says '"eos_token_id":\[[0-9]*,[0-9]*\]' "$work/flat" || return 1 ;;
        esac
        [ "$(grep -c '^ *hello$' "$work/answers")" = 2 ] || { echo "$template" && cat "$work/answers" && return 1; }
    done
}

# An adapter that learned a template's end of a turn keeps it, and so does the merged model.
an_adapter_names_the_end_of_a_turn() {
    special_tokenizer "$work/special.json"
    trains_special --mock-data --seq-length 64 --train-iters 1 --lr 1e-4 --save "$work/untaught" || return 1
    echo '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}' \
        >"$work/turn.jsonl"
    "$train" --load "$work/untaught" --finetune --sft --train-data-path "$work/turn.jsonl" --chat-template chatml \
        --seq-length 128 --train-iters 1 --lr 1e-3 --eval-iters 0 --lora-rank 2 --lora-target all-linear \
        --save "$work/taught" --device cpu >"$work/out" 2>"$work/err" &&
        "$infer" --load "$work/untaught" --load-adapter "$work/taught" --merge-adapter "$work/joined" --device cpu \
            >"$work/out" 2>"$work/err" </dev/null || return 1
    for folder in "$work"/taught/iter_0000001 "$work/joined"; do
        tr -d ' \n' <"$folder/generation_config.json" >"$work/flat" 2>/dev/null &&
            says '"eos_token_id":\[[0-9]*,[0-9]*\]' "$work/flat" || return 1
    done
}

# The template is found in the model's folder, and a saved checkpoint keeps it.
the_recipe_of_qwen3_runs() {
    special_tokenizer "$work/special.json"
    trains_special --mock-data --seq-length 64 --train-iters 1 --lr 1e-4 --save "$work/qwen3" || return 1
    for folder in "$work"/qwen3/iter*; do :; done
    # ChatML as published
    tr -d '\n' >"$folder/chat_template.jinja" <<'E2'
{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
E2
    "$train" --config data/recipes/sft-qwen3-0.6b.yaml --load "$folder" --data-path data/sft-demo.jsonl \
        --save "$work/tuned" --device cpu --seq-length 512 --train-epochs 1 >"$work/out" 2>"$work/err" &&
        echo Hello | "$infer" --load "$work/tuned" --chat --system-prompt 'Answer briefly.' --max-new-tokens 4 \
            --device cpu >"$work/answers" 2>"$work/err"
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
    # few tokens are no reason for a warning: samples do not repeat them
    head -n 1 data/sft-demo.jsonl >"$work/few.jsonl" && trains --data-path "$work/few.jsonl" && [ ! -s "$work/err" ] ||
        return 1
    trains --data-path "$work/few.jsonl" --split 9,1,0 --eval-iters 1 --eval-interval 1 &&
        says 'no validation loss: its share in --split is no sample$' "$work/err" || return 1
    # truncation leaves no token of the response
    printf '{"prompt": "%040d", "response": "a"}\n' 1 >"$work/long.jsonl"
    refuses 'no samples: none has a token that the loss counts' --data-path "$work/long.jsonl" --seq-length 16 &&
        refuses 'no samples: all are longer than --seq-length; .* --long-samples truncate' \
            --data-path "$work/long.jsonl" --seq-length 16 --long-samples drop
}

# README: an interrupted run is given again with --load RUN, and --ref-load where a reference counts. GPT-2 has
# biases, which its config.json does not mention.
preferences_resume_by_the_same_command() {
    for i in 1 2 3 4; do echo '{"prompt": "a", "chosen": "b", "rejected": "c"}'; done >"$work/pairs.jsonl"
    trains --data-path data/sft-demo.jsonl --position-embedding-type learned_absolute --save "$work/base" || return 1
    set -- "$train" --data-path "$work/pairs.jsonl" --seq-length 16 --chat-template plain --lr 1e-3 --eval-iters 0 \
        --split 1,0,0 --device cpu
    for stage in dpo 'rm --value-head'; do
        # shellcheck disable=SC2086
        "$@" --stage $stage --load "$work/base" --finetune --train-iters 1 --save "$work/pairs" --overwrite \
            >"$work/out" 2>"$work/err" || return 1
        reference=''
        [ "$stage" = dpo ] && reference="--ref-load $work/base"
        # shellcheck disable=SC2086
        "$@" --stage $stage --load "$work/pairs" $reference --train-iters 2 --save "$work/pairs" >"$work/out" \
            2>"$work/err" && says '2/2 100%' "$work/out" || return 1
        # shellcheck disable=SC2086
        "$@" --stage $stage --load "$work/base" --finetune --train-iters 3 --save "$work/pairs" \
            --auto-resume >"$work/out" 2>"$work/err" && says '3/3 100%' "$work/out" || return 1
    done
}

# The message of a step that is not finite names the operand. The learning rate is not at fault before the first update.
a_message_names_the_operand_that_is_not_finite() {
    mkdir "$work/nan" && cp "$work/base/latest/config.json" "$work/base/latest/tokenizer_config.json" "$work/nan" ||
        return 1
    weights=$work/base/latest/model.safetensors
    header=$(($(od -An -t u8 -N 8 "$weights") + 8)) bytes=$(wc -c <"$weights")
    {
        head -c "$header" "$weights"
        tr '\0' '\377' </dev/zero | head -c $((bytes - header)) # NaN
    } >"$work/nan/model.safetensors"
    set -- "$train" --stage dpo --data-path "$work/pairs.jsonl" --seq-length 16 --chat-template plain --lr 1e-3 \
        --eval-iters 0 --split 1,0,0 --device cpu --finetune --train-iters 2
    for loss in sigmoid ipo hinge; do
        "$@" --load "$work/base" --ref-load "$work/nan" --preference-loss $loss >"$work/out" 2>"$work/err" && return 1
        says 'iteration 1: .*: the log-probabilities of the reference model (--ref-load) are not finite' "$work/err" &&
            ! grep -q -e '--lr' "$work/err" || return 1
    done
    "$@" --load "$work/nan" >"$work/out" 2>"$work/err" && return 1
    says "iteration 1: .*no update was made before: check the model's weights" "$work/err" &&
        ! grep -q -e '--lr' "$work/err"
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
for test in every_template_holds_a_conversation an_adapter_names_the_end_of_a_turn the_recipe_of_qwen3_runs \
    the_loss_follows_its_option bad_lines_are_named_and_counted preferences_resume_by_the_same_command \
    a_message_names_the_operand_that_is_not_finite a_model_remembers_the_template_plain \
    another_template_takes_the_place_of_plain options_without_meaning_are_refused; do
    check $test $test
done
exit $failed
