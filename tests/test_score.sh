#!/bin/sh
# infer --score: files of int32 tokens and of JSON Lines, on every layout as on one rank, and rewards.
set -u
. tests/suite.sh
golden=tests/golden
export OMP_NUM_THREADS=1

# numbers FILE: each number of a file of JSON on a line of its own, and the other text.
numbers() {
    sed 's/[][{}:,]/\n&\n/g; s/ //g' "$1"
}

# close_json A B: the same text, and numbers that differ by at most 1e-5.
close_json() {
    numbers "$1" >"$work/a"
    numbers "$2" >"$work/b"
    [ -s "$work/a" ] && [ "$(wc -l <"$work/a")" = "$(wc -l <"$work/b")" ] || return 1
    paste -d '|' "$work/a" "$work/b" | awk -F '|' -v file="$1" '
        $1 != $2 { d = $1 - $2; if (d < 0) d = -d; if ($1 !~ /^-?[0-9]/ || d > 1e-5) { print file ": " $0; exit 1 } }'
}

# on RANKS ARGUMENTS...: infer on so many ranks.
on() {
    ranks=$1
    shift
    $(mpirun_here) -np "$ranks" "$infer" "$@" 2>"$work/err" </dev/null || {
        cat "$work/err"
        return 1
    }
}

# Eleven sequences of different lengths.
write_sequences() {
    awk 'BEGIN {
        for (s = 0; s < 11; s++) {
            printf "{\"tokens\": ["
            for (i = 0; i <= 2 + s * 5 % 17; i++) printf "%s%d", i ? ", " : "", (s * 31 + i * i * 7) % 160
            print "]}"
        }
    }' >"$work/tokens.jsonl"
}

layouts_score_as_one_rank() {
    write_sequences
    for model in llama mixtral; do
        set -- --load $golden/hf/$model --score "$work/tokens.jsonl" --micro-batch-size 2
        "$infer" "$@" --out "$work/one.jsonl" 2>"$work/err" || return 1
        [ "$(wc -l <"$work/one.jsonl")" = 11 ] || return 1
        while read -r ranks layout; do
            case $model-$layout in llama-*expert*) continue ;; esac
            # shellcheck disable=SC2086
            on "$ranks" "$@" $layout --out "$work/other.jsonl" && close_json "$work/other.jsonl" "$work/one.jsonl" || {
                echo "$model: $ranks ranks, $layout"
                return 1
            }
        done <<EOF
2
4
2 --context-parallel-size 2
4 --context-parallel-size 2 --cp-comm-type all_gather
2 --context-parallel-size 2 --cp-comm-type a2a
4 --tensor-model-parallel-size 2 --sequence-parallel
4 --pipeline-model-parallel-size 2
4 --pipeline-model-parallel-size 2 --context-parallel-size 2
4 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
2 --expert-model-parallel-size 2
4 --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather
4 --expert-model-parallel-size 4 --moe-token-dispatcher-type flex
4 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel
EOF
    done
}

int32_files_too() {
    set -- --load $golden/hf/llama --score $golden/hf/llama/tokens.i32 --seq-length 32 --max-sequences 9 \
        --micro-batch-size 2
    "$infer" "$@" --out "$work/logprobs.1" --entropy-out "$work/entropy.1" 2>"$work/err" || return 1
    for layout in "" "--context-parallel-size 2" "--pipeline-model-parallel-size 2"; do
        # shellcheck disable=SC2086
        on 4 "$@" $layout --out "$work/logprobs" --entropy-out "$work/entropy" || return 1
        for file in logprobs entropy; do
            od -An -v -tf4 -w4 "$work/$file" >"$work/$file.text"
            od -An -v -tf4 -w4 "$work/$file.1" >"$work/$file.1.text"
            close_json "$work/$file.text" "$work/$file.1.text" || return 1
        done
    done
}

# logits.f32 has the rewards of transformers: sequence 1 has 27 tokens, the others 32.
rewards_equal_transformers() {
    od -An -v -td4 -w128 $golden/tune/reward/tokens.i32 | awk '{
        n = NR == 2 ? 27 : 32
        printf "{\"tokens\": ["
        for (i = 1; i <= n; i++) printf "%s%d", (i > 1 ? ", " : ""), $i
        print "]}"
    }' >"$work/reward.jsonl"
    od -An -v -tf4 -w4 $golden/tune/reward/logits.f32 | tr -d ' ' >"$work/expected"
    for ranks in 1 2; do
        if [ $ranks = 1 ]; then
            "$infer" --load $golden/tune/reward --score "$work/reward.jsonl" --out "$work/out.jsonl" 2>"$work/err" ||
                return 1
        else
            on 2 --load $golden/tune/reward --score "$work/reward.jsonl" --out "$work/out.jsonl" || return 1
        fi
        sed 's/.*"reward":\([^}]*\)}/\1/' "$work/out.jsonl" >"$work/rewards"
        close_json "$work/rewards" "$work/expected" || return 1
    done
}

# logits.f32 has the critic's values of 4 x 32 tokens, those of sequence 1 behind its 27 tokens of padding.
values_equal_transformers() {
    od -An -v -tf4 -w4 $golden/tune/critic/logits.f32 | awk 'NR <= 32 + 27 || NR > 64 { print $1 }' >"$work/expected"
    for layout in 1 2 "2 --tensor-model-parallel-size 2" "2 --context-parallel-size 2"; do
        # shellcheck disable=SC2086
        on $layout --load $golden/tune/critic --score "$work/reward.jsonl" --out "$work/out.jsonl" || return 1
        [ "$(grep -c '^{"tokens":\[[0-9,]*\],"values":\[[^]]*\]}$' "$work/out.jsonl")" = 4 ] || return 1
        sed 's/.*"values":\[\(.*\)\]}/\1/' "$work/out.jsonl" | tr ',' '\n' >"$work/values"
        [ "$(wc -l <"$work/values")" = 123 ] && close_json "$work/values" "$work/expected" || return 1
    done
}

texts_are_scored() {
    printf '%s\n' '{"prompt": "ab", "response": "cde"}' '{"text": "hello"}' >"$work/texts.jsonl"
    "$train" --mock-data --tokenizer-type ByteLevel --num-layers 1 --hidden-size 16 --num-attention-heads 2 \
        --seq-length 32 --train-iters 1 --lr 1e-3 --save "$work/bytes" >"$work/out" 2>"$work/err" || return 1
    "$infer" --load "$work/bytes" --chat-template plain --score "$work/texts.jsonl" \
        --out "$work/out.jsonl" 2>"$work/err" && [ "$(wc -l <"$work/out.jsonl")" = 2 ] &&
        sed -n 1p "$work/out.jsonl" | grep -q '"count":[34]}'
}

launcher=
# prefers NAME ARGUMENTS...: DPO of the model of texts_are_scored; $work/NAME gets the losses.
prefers() {
    run=$1
    shift
    # shellcheck disable=SC2086
    $launcher "$train" --stage dpo --load "$work/bytes" --finetune --chat-template plain --eval-iters 0 --device cpu \
        --train-data-path "$work/pairs.jsonl" --seq-length 32 --global-batch-size 4 --train-iters 4 --lr 1e-2 \
        --hidden-dropout 0 --attention-dropout 0 --metrics "$work/$run.metrics" "$@" \
        >"$work/out" 2>"$work/err" || return 1
    sed 's/.*"lm_loss": \([^,]*\),.*/\1/' "$work/$run.metrics" >"$work/$run"
}

# The scores of both responses, as a preference's reference, give the run with the reference model.
scores_are_the_reference_of_preferences() {
    for choice in chosen rejected; do
        for i in 1 2 3 4 5 6 7 8; do
            [ $choice = chosen ] && answer=$i$i || answer=no
            printf '{"prompt": "Say %d", "response": "%s"}\n' $i $answer
        done >"$work/$choice.jsonl"
        "$infer" --load "$work/bytes" --chat-template plain --score "$work/$choice.jsonl" --out "$work/out.jsonl" \
            2>"$work/err" || return 1
        sed 's/.*"logprob":\([^,]*\),.*/\1/' "$work/out.jsonl" >"$work/$choice"
    done
    paste "$work/chosen" "$work/rejected" | awk '{
        printf "{\"prompt\": \"Say %d\", \"chosen\": \"%d%d\", \"rejected\": \"no\", ", NR, NR, NR
        printf "\"ref_chosen_logp\": %s, \"%s\": %s}\n", $1, \
            NR % 2 ? "ref_rejected_logp" : "reference_rejected_logps", $2 }' >"$work/pairs.jsonl"
    prefers model && prefers data --ref-logps-in-data && close_json "$work/data" "$work/model" &&
        head -1 "$work/data" | grep -q '^0\.6931' && [ "$(sort -u "$work/data" | wc -l)" = 4 ] || return 1
    prefers packed_model --sequence-packing --global-batch-size 1 &&
        prefers packed_data --sequence-packing --global-batch-size 1 --ref-logps-in-data &&
        close_json "$work/packed_data" "$work/packed_model" || return 1
    if [ "${HAVE_MPI:-}" ]; then
        launcher="$(mpirun_here) -np 4"
        prefers ranks --ref-logps-in-data --context-parallel-size 2 && close_json "$work/ranks" "$work/data" || return 1
        launcher=
    fi
    # a run that resumes needs no --ref-load
    prefers first --ref-logps-in-data --train-iters 2 --lr-decay-iters 4 --save "$work/dpo" --auto-resume &&
        prefers second --ref-logps-in-data --lr-decay-iters 4 --save "$work/dpo" --auto-resume || return 1
    cat "$work/second" >>"$work/first"
    cmp "$work/first" "$work/data" || return 1
    ! prefers short --ref-logps-in-data --seq-length 6 && says 'those of whole responses' "$work/err" || return 1
    sed -i '3s/ref_chosen_logp/other/' "$work/pairs.jsonl"
    ! prefers bad --ref-logps-in-data && says 'pairs.jsonl:3: has no number "ref_chosen_logp"' "$work/err"
}

refuses_bad_files() {
    set -- --load $golden/hf/llama --out "$work/none.jsonl"
    printf '{"tokens": [1, 999]}\n' >"$work/bad.jsonl"
    refused 'bad.jsonl:1: has the token 999' "$infer" "$@" --score "$work/bad.jsonl" || return 1
    printf '{"tokens": [1, 2]}\n{"tokens": [1, 2.5]}\n' >"$work/bad.jsonl"
    refused 'bad.jsonl:2: "tokens": item 2' "$infer" "$@" --score "$work/bad.jsonl" || return 1
    printf '{"text": "x y"}\n' >"$work/bad.jsonl"
    refused 'bad.jsonl:1: has text, and there is no tokenizer' "$infer" "$@" --score "$work/bad.jsonl" || return 1
    printf '{"tokens": [1, 2]}\n{"tokens": [1, 2, 3, 4]}\n' >"$work/long.jsonl"
    refused 'long.jsonl:2: has 4 tokens' "$infer" "$@" --score "$work/long.jsonl" --seq-length 2 || return 1
    refused 'leave out --entropy-out' "$infer" "$@" --score "$work/bad.jsonl" --entropy-out "$work/e" || return 1
    for option in '--seed 7' '--kv-cache-tokens 64' '--inference-max-requests 2'; do
        # shellcheck disable=SC2086
        refused "score and ${option%% *} exclude" "$infer" "$@" --score "$work/long.jsonl" $option || return 1
    done
    for option in --entropy-out --logits-out; do
        refused "$option: .* no distribution over tokens" "$infer" --load $golden/tune/reward --seq-length 32 \
            --score $golden/tune/reward/tokens.i32 --out "$work/none.jsonl" $option "$work/e" || return 1
    done
    printf '%s\n' '{"messages": [{"role": "user", "content": "a"}]}' >"$work/bad.jsonl"
    refused 'bad.jsonl:1: has no response to score: end it with a message of the assistant' "$infer" \
        --load "$work/bytes" --chat-template plain --score "$work/bad.jsonl" --out "$work/none.jsonl" || return 1
    refused 'generates no text' "$infer" --load $golden/tune/reward --prompt-tokens 1,2 --print-tokens || return 1
    [ ! -e "$work/none.jsonl" ]
}

# Of a damaged model: a NaN is the last element of its last norm. The lists keep their lengths.
numbers_that_are_not_finite_are_null() {
    write_sequences
    mkdir "$work/nan" && cp $golden/hf/llama/config.json $golden/hf/llama/model.safetensors "$work/nan" &&
        printf '\377\377\377\377' | dd of="$work/nan/model.safetensors" bs=1 conv=notrunc 2>"$work/err" \
            seek=$(($(wc -c <"$work/nan/model.safetensors") - 4)) || return 1
    "$infer" --load "$work/nan" --score "$work/tokens.jsonl" --out "$work/nan.jsonl" 2>"$work/err" &&
        says 'warning: .* are not finite' "$work/err" && head -n 1 "$work/nan.jsonl" >"$work/out" &&
        says '"logprobs":\[null,null],"entropies":\[null,null],"logprob":null,"count":2}' "$work/out"
}

if [ "${HAVE_MPI:-}" ]; then
    check every_layout_scores_as_one_rank layouts_score_as_one_rank
    check every_layout_scores_int32_files_as_one_rank int32_files_too
    check rewards_equal_those_of_transformers rewards_equal_transformers
    check values_equal_those_of_transformers values_equal_transformers
fi
check texts_are_scored_with_their_responses texts_are_scored
check scores_are_the_reference_of_preferences scores_are_the_reference_of_preferences
check numbers_that_are_not_finite_are_null numbers_that_are_not_finite_are_null
check bad_files_are_refused refuses_bad_files
exit $failed
