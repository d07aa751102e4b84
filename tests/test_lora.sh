#!/bin/sh
# Adapters by the programs: a run that stops and resumes, merging, generation, preferences against the base.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
base=tests/golden/hf/llama

# tunes ARGUMENTS...: trains adapters of the golden Llama.
tunes() {
    "$train" --load $base --tokens-file $base/tokens.i32 --seq-length 32 --global-batch-size 4 --lr 1e-2 --device cpu \
        --lora-rank 4 --lora-alpha 32 --lora-target all-linear --log-interval 1 "$@" \
        >"$work/out" 2>"$work/err" </dev/null
}

# losses FILE: of a metrics file.
losses() {
    sed 's/.*"lm_loss": \([^,]*\),.*/\1/' "$1"
}

a_run_resumes_from_its_adapter() {
    tunes --train-iters 5 --lr-decay-iters 5 --metrics "$work/whole" || return 1
    tunes --train-iters 3 --lr-decay-iters 5 --metrics "$work/first" --save "$work/save" --auto-resume || return 1
    tunes --train-iters 5 --lr-decay-iters 5 --metrics "$work/second" --save "$work/save" --auto-resume || return 1
    says 'saved iteration 5' "$work/out" && [ ! -e "$work/save/iter_0000005/model.safetensors" ] &&
        losses "$work/whole" >"$work/expected" && { losses "$work/first" && losses "$work/second"; } >"$work/actual" &&
        cmp "$work/expected" "$work/actual" && [ "$(sort -u "$work/actual" | wc -l)" = 5 ]
}

scores() {
    "$infer" --device cpu --score $base/tokens.i32 --seq-length 32 "$@" >"$work/out" 2>"$work/err" </dev/null
}

a_merged_model_scores_like_its_adapter() {
    tunes --train-iters 2 --save "$work/adapter" || return 1
    "$infer" --load $base --load-adapter "$work/adapter" --merge-adapter "$work/merged" --device cpu >"$work/out" \
        2>"$work/err" </dev/null && says 'wrote the merged model' "$work/out" || return 1
    refused 'holds a model already' "$infer" --load $base --load-adapter "$work/adapter" --merge-adapter \
        "$work/merged" --device cpu || return 1
    scores --load $base --load-adapter "$work/adapter" --out "$work/a" &&
        scores --load "$work/merged" --out "$work/b" && scores --load $base --out "$work/c" || return 1
    od -An -v -t f4 -w4 "$work/a" >"$work/at" && od -An -v -t f4 -w4 "$work/b" >"$work/bt" &&
        od -An -v -t f4 -w4 "$work/c" >"$work/ct"
    paste "$work/at" "$work/bt" "$work/ct" | awk '
        { d = $1 - $2; e = $1 - $3; if (d * d > 1e-8) bad = 1; if (e * e > 1e-4) differs = 1 }
        END { exit bad || !differs || NR != 1280 }'
}

# A limit on the size of files simulates a full disk. The rest of a merge that was killed stays.
a_merge_that_fails_leaves_nothing() {
    tunes --train-iters 1 --save "$work/merges" || return 1
    set -- "$infer" --load $base --load-adapter "$work/merges" --merge-adapter "$work/again" --device cpu
    (
        ulimit -f 8
        refused 'again/model.safetensors: cannot be written: too large for the limit' "$@"
    ) && [ -z "$(ls "$work/again")" ] || return 1
    echo killed >"$work/again/model.safetensors"
    refused 'again: holds model.safetensors but no config.json' "$@" && rm "$work/again/model.safetensors" &&
        "$@" >"$work/out" 2>"$work/err" </dev/null && says 'wrote the merged model' "$work/out"
}

a_config_without_its_type_is_refused() {
    tunes --train-iters 1 --save "$work/typed" && cp -r "$work/typed/iter_0000001" "$work/untyped" || return 1
    for config in '{}' '{"r": 4, "lora_alpha": 4, "target_modules": "all-linear"}'; do
        echo "$config" >"$work/untyped/adapter_config.json"
        refused 'adapter_config.json: "peft_type" is not "LORA"' "$infer" --load $base --load-adapter "$work/untyped" \
            --prompt-tokens 1 --print-tokens --device cpu || return 1
    done
}

an_adapter_is_no_model() {
    tunes --train-iters 1 --save "$work/other" || return 1
    refused 'holds an adapter; name its base' "$infer" --load "$work/other" --prompt-tokens 1 --print-tokens &&
        refused 'continue that run by --load-adapter' "$train" --load $base --tokens-file $base/tokens.i32 \
            --seq-length 32 --train-iters 2 --lr 1e-2 --device cpu --lora-rank 4 --lora-target q_proj \
            --save "$work/other" || return 1
    refused 'continue that run by --load-adapter' "$train" --load $base --tokens-file $base/tokens.i32 \
        --seq-length 32 --train-iters 2 --lr 1e-2 --device cpu --save "$work/other"
}

# prefers ARGUMENTS...: DPO with adapters on random weights.
prefers() {
    "$train" --num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --vocab-size 257 \
        --tokenizer-type ByteLevel --chat-template plain --device cpu --stage dpo \
        --lora-rank 4 --lora-target all-linear \
        --train-data-path "$work/pairs.jsonl" --seq-length 64 --global-batch-size 2 --lr 1e-2 \
        --lr-decay-style constant --prompt-key prompt --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 "$@" \
        >"$work/out" 2>"$work/err" </dev/null
}

the_reference_of_adapters_is_their_base() {
    for i in 1 2 3 4 5 6 7 8; do
        printf '{"prompt": "Say %d", "chosen": "%d", "rejected": "no"}\n' $i $i
    done >"$work/pairs.jsonl"
    prefers --train-iters 4 --metrics "$work/dpo_whole" &&
        prefers --train-iters 2 --save "$work/dpo" --auto-resume --metrics "$work/dpo_first" &&
        prefers --train-iters 4 --save "$work/dpo" --auto-resume --metrics "$work/dpo_second" &&
        says '^reference: the trained model with its adapters switched off$' "$work/out" || return 1
    losses "$work/dpo_whole" >"$work/expected"
    { losses "$work/dpo_first" && losses "$work/dpo_second"; } >"$work/actual"
    cmp "$work/expected" "$work/actual" && head -1 "$work/actual" | grep -q '^0\.6931' &&
        [ "$(sort -u "$work/actual" | wc -l)" = 4 ]
}

check a_run_resumes_from_its_adapter a_run_resumes_from_its_adapter
check a_merged_model_scores_like_its_adapter a_merged_model_scores_like_its_adapter
check a_merge_that_fails_leaves_nothing a_merge_that_fails_leaves_nothing
check a_config_without_its_type_is_refused a_config_without_its_type_is_refused
check an_adapter_is_no_model an_adapter_is_no_model
check the_reference_of_adapters_is_their_base the_reference_of_adapters_is_their_base
exit $failed
