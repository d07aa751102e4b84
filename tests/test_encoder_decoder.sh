#!/bin/sh
# Encoder-decoders by the programs: pairs of texts or tokens are read, runs go on, folders are read and written, a
# trained model answers, and what is missing is refused in one line.
# Sections of megatron.c: §20
set -u
. tests/suite.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
golden=tests/golden/t5
preprocess=$(dirname "$train")/data/preprocess

tidy() {
    rm -rf "$work"/*
}

shape='--num-layers 1 --decoder-num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --relu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type relative --softmax-scale 1
    --relative-attention-num-buckets 8 --relative-attention-max-distance 16 --hidden-dropout 0 --attention-dropout 0'
small="$shape --encoder-seq-length 12 --decoder-seq-length 8 --sft --split 1,0,0 --eval-iters 0 --device cpu
    --lr 1e-2 --micro-batch-size 2 --global-batch-size 4"

# pairs: lines of tokens; a target is the input backwards, with 1 at its end.
pairs() {
    cat >"$work/pairs.jsonl" <<'EOF'
{"input": [5, 9, 14, 7, 3], "target": [3, 7, 14, 9, 5, 1]}
{"input": [8, 2, 6], "target": [6, 2, 8, 1]}
{"input": [11, 4, 4, 10], "target": [10, 4, 4, 11, 1]}
{"input": [13, 12, 5, 2, 9, 6], "target": [6, 9, 2, 5, 12, 13, 1]}
EOF
}

# run ARGUMENTS...: trains on the pairs.
run() {
    # shellcheck disable=SC2086
    on_ranks "${ranks:-1}" "$train" $small --vocab-size 16 --data-path "$work/pairs.jsonl" "$@"
}

refuses() {
    pattern=$1
    shift
    # shellcheck disable=SC2086
    refused "$pattern" "$train" $small --vocab-size 16 --data-path "$work/pairs.jsonl" --train-iters 2 "$@"
}

what_is_missing_is_refused() {
    pairs
    refuses '--context-parallel-size 2: an encoder-decoder keeps its sequences whole' --context-parallel-size 2 &&
        refuses '--encoder-num-layers plus twice --decoder-num-layers, 3, must be a multiple of 2 pipeline ranks' \
            --pipeline-model-parallel-size 2 --print-schedule &&
        refuses "'Et|tL' has 2 layers, but --encoder-num-layers plus twice --decoder-num-layers is 3" \
            --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|tL' --print-schedule &&
        refuses '--fp8-format: an encoder-decoder' --fp8-format hybrid &&
        refuses '--lora-rank: an encoder-decoder has no adapters' --lora-rank 4 --lora-target q &&
        refuses '--stage: an encoder-decoder is trained by pt and sft' --stage dpo &&
        refuses '--tp-comm-overlap: an encoder-decoder' --tp-comm-overlap --tensor-model-parallel-size 2 \
            --sequence-parallel &&
        refuses '--fine-grained-activation-offloading: an encoder-decoder' --fine-grained-activation-offloading \
            --offload-modules mlp_norm &&
        refuses '--recompute-granularity selective: an encoder-decoder' --recompute-granularity selective &&
        refuses '--mask-prob and --sft exclude each other' --mask-prob 0.2 &&
        refuses '--sequence-packing: pairs of an encoder-decoder are not packed' --sequence-packing &&
        refuses '--variable-seq-lengths: micro-batches of an encoder-decoder' --variable-seq-lengths &&
        refuses '--decoder-num-layers and --num-experts exclude' --num-experts 4 &&
        refuses '--decoder-num-layers and --window-size exclude' --window-size 4 &&
        refuses '--decoder-num-layers and --mtp-num-layers exclude' --mtp-num-layers 1 &&
        refuses '--decoder-num-layers and --multi-latent-attention exclude' --multi-latent-attention &&
        refuses '--relative-attention-num-buckets 9 must be even' --relative-attention-num-buckets 9 &&
        refuses '--relative-attention-max-distance 4 must be more than half' --relative-attention-max-distance 4 &&
        refuses 'an encoder-decoder is one of T5: .*--softmax-scale 1' --softmax-scale 0.5 &&
        refused '--encoder-num-layers needs --decoder-num-layers' "$train" --num-layers 1 --encoder-num-layers 2 \
            --hidden-size 8 --num-attention-heads 1 --vocab-size 9 --seq-length 8 --mock-data --train-iters 1 --lr 1
}

lines_that_are_no_pairs_are_refused() {
    for line in '{"input": [1, 2]}|has no "target", but an encoder-decoder learns from an input and a target' \
        '{"prompt": "a", "response": "b"}|has no "input"' '{"input": [], "target": [1]}|"input" is empty' \
        '{"input": [3], "target": [3, 99]}|has the token 99' '{"input": [3.5], "target": [3]}|item 1 is not a token' \
        '{"input": 3, "target": [3]}|"input" is neither a text nor a list of tokens' \
        '{"input": "a", "target": "b"}|has text, and there is no tokenizer'; do
        printf '%s\n' "${line%%|*}" >"$work/pairs.jsonl"
        refuses "pairs.jsonl:1: .*${line#*|}" || return 1
    done
}

# Four pairs by heart, by tokens.
a_trained_model_answers() {
    pairs
    run --train-iters 80 --save "$work/model" || return 1
    for pair in 5,9,14,7,3:'3 7 14 9 5 1' 8,2,6:'6 2 8 1' 11,4,4,10:'10 4 4 11 1'; do
        "$infer" --load "$work/model/latest" --device cpu --prompt-tokens "${pair%%:*}" --print-tokens \
            --temperature 0 --max-new-tokens 7 >"$work/out" 2>"$work/err" || return 1
        says "^${pair#*:}" "$work/out" || return 1 # there is no tokenizer that would name the end
    done
}

# With bytes as tokens, 256 at the end, and keys of other names.
texts_are_read_and_written() {
    printf '%s\n' '{"de": "rot", "en": "red"}' '{"de": "blau", "en": "blue"}' >"$work/pairs.jsonl"
    # shellcheck disable=SC2086
    on_ranks 1 "$train" $small --tokenizer-type ByteLevel --data-path "$work/pairs.jsonl" --prompt-key de \
        --response-key en --global-batch-size 2 --train-iters 60 --save "$work/model" || return 1
    printf 'rot\nblau\n' | "$infer" --load "$work/model/latest" --device cpu --temperature 0 --max-new-tokens 8 \
        >"$work/out" 2>"$work/err" || return 1
    says '^red' "$work/out" && says '^blue' "$work/out"
}

# The folder of transformers, trained two steps, keeps its keys.
folders_are_read_and_written() {
    pairs
    on_ranks 1 "$train" --load $golden/t5_gated --sft --data-path "$work/pairs.jsonl" --split 1,0,0 --eval-iters 0 \
        --encoder-seq-length 12 --decoder-seq-length 8 --lr 1e-3 --train-iters 2 --device cpu --save "$work/model" ||
        return 1
    for line in '"architectures": \[' '"T5ForConditionalGeneration"' '"feed_forward_proj": "gated-gelu"' \
        '"num_layers": 3' '"num_decoder_layers": 3' '"scale_decoder_outputs": false' '"is_encoder_decoder": true' \
        '"decoder_start_token_id": 0' '"relative_attention_max_distance": 24' '"eos_token_id": 1'; do
        says "$line" "$work/model/latest/config.json" || return 1
    done
    says 't5 model: 3 and 3 layers of encoder and decoder' "$work/out"
}

# Masked spans of a text's lines: the loss falls, whatever the layout; a run goes on with the next samples.
masked_spans_are_found() {
    for i in 1 2 3 4 5 6 7 8; do echo "the $i of $i and the $i are $i"; done >"$work/text.txt"
    "$preprocess" --input "$work/text.txt" --documents lines --tokenizer-type ByteLevel --append-eod \
        --output-prefix "$work/text" >"$work/out" 2>"$work/err" || return 1
    # shellcheck disable=SC2086
    set -- $shape --encoder-seq-length 32 --decoder-seq-length 32 --tokenizer-type ByteLevel --vocab-extra-ids 20 \
        --data-path "$work/text_text_document" --split 1,0,0 --eval-iters 0 --device cpu --lr 1e-2 \
        --lr-decay-style constant --micro-batch-size 4 --global-batch-size 8
    on_ranks 1 "$train" "$@" --train-iters 40 --metrics "$work/whole" || return 1
    series lm_loss "$work/whole" >"$work/losses"
    awk 'NR == 1 { first = $1 } END { exit !(NR == 40 && first > 5 && $1 < 3) }' "$work/losses" || return 1
    on_ranks 1 "$train" "$@" --train-iters 40 --exit-interval 30 --save "$work/model" --metrics "$work/parts" &&
        on_ranks 1 "$train" "$@" --train-iters 40 --load "$work/model" --metrics "$work/parts" || return 1
    same_series "$work/whole" "$work/parts" 0 0 lm_loss grad_norm || return 1
    refused 'or other masked spans' "$train" "$@" --train-iters 40 --load "$work/model" --mask-prob 0.3 &&
        refused 'has more than 2 masked spans' "$train" "$@" --train-iters 2 --vocab-extra-ids 2 &&
        refused 'are longer than --decoder-seq-length 3' "$train" "$@" --train-iters 9 --decoder-seq-length 3 &&
        refused 'give --vocab-extra-ids 100' "$train" "$@" --train-iters 2 --vocab-extra-ids 0
}

# Six steps in one run, and in two.
a_run_goes_on() {
    pairs
    run --train-iters 6 --metrics "$work/whole" || return 1
    run --train-iters 6 --exit-interval 3 --save "$work/model" --metrics "$work/parts" &&
        run --train-iters 6 --load "$work/model" --save "$work/model" --metrics "$work/parts" || return 1
    same_series "$work/whole" "$work/parts" 0 0 lm_loss grad_norm
}

# Six steps on one rank; and two on stages that a layout names, two on stages of equal work, two on tensor ranks, with
# the prompt then answered by stages. The checkpoints pass from one to the next.
a_run_goes_on_with_other_stages() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null || return 0
    pairs
    run --train-iters 6 --metrics "$work/whole" || return 1
    for layout in "--exit-interval 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|tttL" \
        "--exit-interval 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto" \
        --tensor-model-parallel-size\ 2; do
        # shellcheck disable=SC2086
        ranks=2 run --train-iters 6 --load "$work/model" --save "$work/model" --metrics "$work/parts" $layout ||
            return 1
    done
    same_series "$work/whole" "$work/parts" 1e-5 1e-3 lm_loss grad_norm || return 1
    set -- --load "$work/model/latest" --device cpu --prompt-tokens 5,9,14 --print-tokens --temperature 0 \
        --max-new-tokens 6
    on_ranks 1 "$infer" "$@" || return 1
    cp "$work/out" "$work/one"
    on_ranks 2 "$infer" "$@" --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 || return 1
    cmp "$work/one" "$work/out"
}

check what_is_missing_is_refused what_is_missing_is_refused
check lines_that_are_no_pairs_are_refused lines_that_are_no_pairs_are_refused
check a_trained_model_answers a_trained_model_answers
check texts_are_read_and_written texts_are_read_and_written
check folders_are_read_and_written folders_are_read_and_written
check masked_spans_are_found masked_spans_are_found
check a_run_goes_on a_run_goes_on
check a_run_goes_on_with_other_stages a_run_goes_on_with_other_stages
exit $failed
