#!/bin/sh
# Models named ORG/NAME come from the local cache of Hugging Face; checkpoints of Megatron-LM are recognized.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
preprocess=$(cd "${MT_BIN:-.}" && pwd)/data/preprocess
golden=$(pwd)/tests/golden
hash=0123456789abcdef0123456789abcdef01234567
export HOME="$work/home" HF_HUB_CACHE="$work/elsewhere/hub"
unset HF_HOME XDG_CACHE_HOME

# caches CACHE ORG NAME FILE...: files of a model as `hf download` stores them: blobs, and links of a snapshot to them.
caches() {
    model=$1/models--$2--$3
    mkdir -p "$model/refs" "$model/blobs" "$model/snapshots/$hash"
    printf '%s' $hash >"$model/refs/main"
    shift 3
    for file; do
        blob=$(cksum <"$file" | tr -d ' ')
        cp "$file" "$model/blobs/$blob"
        ln -sf "../../blobs/$blob" "$model/snapshots/$hash/$(basename "$file")"
    done
}

# generates ARGUMENTS...: infer continues a prompt of tokens; the tokens are in $work/out.
generates() {
    "$infer" --prompt-tokens 1,2,3 --print-tokens --max-new-tokens 4 --temperature 0 --device cpu "$@" \
        >"$work/out" 2>"$work/err" </dev/null
}

a_name_is_found_in_every_place_of_the_cache() {
    generates --load "$golden/hf/qwen3" && mv "$work/out" "$work/want" || return 1
    caches "$work/home/.cache/huggingface/hub" Qwen Tiny-3 "$golden"/hf/qwen3/config.json \
        "$golden"/hf/qwen3/model.safetensors
    (
        unset HF_HUB_CACHE
        generates --load Qwen/Tiny-3 && cmp "$work/out" "$work/want"
    ) || return 1
    mkdir "$work/caches" && mv "$work/home/.cache/huggingface" "$work/caches" || return 1
    (
        unset HF_HUB_CACHE
        export XDG_CACHE_HOME="$work/caches"
        generates --load Qwen/Tiny-3 && cmp "$work/out" "$work/want"
    ) || return 1
    mv "$work/caches/huggingface" "$work/elsewhere"
    (
        unset HF_HUB_CACHE
        export HF_HOME="$work/elsewhere"
        generates --load Qwen/Tiny-3 && cmp "$work/out" "$work/want"
    ) && (
        export HF_HOME=/nowhere
        generates --load Qwen/Tiny-3 && cmp "$work/out" "$work/want"
    )
}

train_options='--seq-length 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --eval-iters 0
    --device cpu'

a_cached_model_and_tokenizer_are_fine_tuned_and_saved() {
    printf 'a b c d e f g h i j k l m n o p q r s t u v w x y z\n%.0s' 1 2 3 4 5 6 >"$work/text.txt"
    caches "$HF_HUB_CACHE" Qwen Tokens "$golden"/tokenizer/bytelevel.json
    (cd "$HF_HUB_CACHE/models--Qwen--Tokens/snapshots/$hash" && mv bytelevel.json tokenizer.json) &&
        "$preprocess" --input "$work/text.txt" --output-prefix "$work/text" --tokenizer-type HuggingFaceTokenizer \
            --tokenizer-model Qwen/Tokens --documents lines >"$work/out" 2>"$work/err" || return 1
    # shellcheck disable=SC2086
    "$train" --hf-config Qwen/Tiny-3 --vocab-size 1024 --tokenizer-type HuggingFaceTokenizer --tokenizer-model \
        Qwen/Tokens --data-path "$work/text_text_document" --split 1,0,0 $train_options --save "$work/tuned" \
        >"$work/out" 2>"$work/err" && cmp "$work/tuned/latest/tokenizer.json" "$golden/tokenizer/bytelevel.json"
}

what_is_not_there_is_named_with_the_command_that_fetches_it() {
    refused "--load Qwen/None: no such file or folder, and the Hugging Face cache ($HF_HUB_CACHE) has no model\
 of this name; check the path, or, for a model of the Hub, run: hf download Qwen/None\$" \
        "$infer" --load Qwen/None --prompt a &&
        refused 'run: hf download Qwen/None$' "$preprocess" --encode --tokenizer-type HuggingFaceTokenizer \
            --tokenizer-model Qwen/None || return 1
    # shellcheck disable=SC2086
    refused '--tokenizer-model Qwen/None: .* run: hf download Qwen/None$' "$train" --hf-config Qwen/Tiny-3 \
        --mock-data $train_options --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/None &&
        refused '--reward-load Qwen/None: .* run: hf download Qwen/None$' "$train" --load Qwen/Tiny-3 --stage rl \
            --reward model --reward-load Qwen/None $train_options &&
        refused '--critic-load Qwen/None: .* run: hf download Qwen/None$' "$train" --load Qwen/Tiny-3 --stage rl \
            --adv-estimator gae --critic-load Qwen/None $train_options &&
        refused '--hf-config Qwen/Tokens: the Hugging Face cache has the model without config.json ' \
            "$train" --hf-config Qwen/Tokens --mock-data $train_options || return 1
    printf 'x/../..' >"$HF_HUB_CACHE/models--Qwen--Tokens/refs/main"
    refused 'hf download Qwen/Tokens$' "$infer" --load Qwen/Tokens --prompt a
}

a_path_is_not_looked_up() {
    mkdir -p "$work/Qwen/Tiny-3" || return 1
    (cd "$work" && refused 'Qwen/Tiny-3: holds neither config.json' "$infer" --load Qwen/Tiny-3 --prompt a) &&
        refused 'x/y/z: No such file or directory' "$infer" --load x/y/z --prompt a
}

damaged_checkpoints_of_megatron_are_named() {
    folder=$work/megatron/iter_0000100
    mkdir -p "$folder" && echo 100 >"$work/megatron/latest_checkpointed_iteration.txt" &&
        : >"$folder/.metadata" && : >"$folder/__0_0.distcp" || return 1
    for load in "$work/megatron" "$folder"; do
        refused "$folder/.metadata: not a pickle of a checkpoint: it ends too early" "$infer" --load "$load" \
            --prompt a || return 1
    done
    folder=$work/older/release
    mkdir -p "$folder/mp_rank_00" && echo release >"$work/older/latest_checkpointed_iteration.txt" &&
        : >"$folder/mp_rank_00/model_optim_rng.pt" || return 1
    # shellcheck disable=SC2086
    refused "$folder/mp_rank_00/model_optim_rng.pt: not a zip archive" "$train" --load "$work/older" --mock-data \
        $train_options
}

a_format_is_detected_and_one_that_is_not_written_refused() {
    # shellcheck disable=SC2086
    "$train" --load "$golden/hf/qwen3" --auto-detect-ckpt-format --mock-data $train_options \
        >"$work/out" 2>"$work/err" || return 1
    # shellcheck disable=SC2086
    "$train" --load "$golden/hf/qwen3" --ckpt-format torch --mock-data $train_options >"$work/out" 2>"$work/err" ||
        return 1
    grep -q 'ckpt-format torch has no effect: that format is read only' "$work/out" "$work/err" || return 1
    # shellcheck disable=SC2086
    refused "ckpt-format expects huggingface|torch_dist|torch|fsdp_dtensor, got 'zarr'" \
        "$train" --load "$golden/hf/qwen3" --save "$work/formats" --ckpt-format zarr --mock-data \
        $train_options && [ ! -e "$work/formats" ]
}

check a_name_is_found_in_every_place_of_the_cache a_name_is_found_in_every_place_of_the_cache
check a_cached_model_and_tokenizer_are_fine_tuned_and_saved a_cached_model_and_tokenizer_are_fine_tuned_and_saved
check what_is_not_there_is_named_with_the_command_that_fetches_it \
    what_is_not_there_is_named_with_the_command_that_fetches_it
check a_path_is_not_looked_up a_path_is_not_looked_up
check damaged_checkpoints_of_megatron_are_named damaged_checkpoints_of_megatron_are_named
check a_format_is_detected_and_one_that_is_not_written_refused \
    a_format_is_detected_and_one_that_is_not_written_refused
exit $failed
