#!/bin/sh
# Checkpoints that Megatron-Core wrote: on every layout, the log-probabilities are those of its own forward pass.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
golden=$(pwd)/tests/golden/megatron_dist
shapes='mla_pp2 mla_yarn mla_plain mla_epsilon llama31 interleaved delta_tp2 hybrid_tp2 mtp_repeated mtp_hybrid'
if [ "${HAVE_MPI:-}" ]; then ranks="mpirun --oversubscribe -n"; else ranks=; fi

# tokens FILE: 7 i mod 100, i < 16, as int32.
tokens() {
    i=0
    while [ $i -lt 16 ]; do
        # shellcheck disable=SC2059
        printf "\\$(printf %03o $((i * 7 % 100)))\\0\\0\\0"
        i=$((i + 1))
    done >"$1"
}

# scores NAME FOLDER RANKS ARGUMENTS...: infer's log-probabilities of a folder equal those of the checkpoint NAME.
scores() {
    scored=$1 folder=$2 count=$3
    shift 3
    # shellcheck disable=SC2086
    ${ranks:+$ranks $count} "$infer" --load "$folder" --score "$work/tokens" --seq-length 15 \
        --out "$work/scores" --device cpu "$@" >"$work/out" 2>"$work/err" </dev/null || return 1
    od -An -v -t f4 -w4 "$golden/$scored/expected.f32" >"$work/want"
    od -An -v -t f4 -w4 "$work/scores" | paste - "$work/want" | awk '
        { difference = $1 - $2; if (difference < 0) difference = -difference; if (difference > 1e-5) bad++ }
        END { exit NR != 15 || bad > 0 }'
}

every_checkpoint_scores_as_in_megatron() {
    for written in dense dense_tp2 gpt_tp2 moe torch_tp2 torch_vpp2 torch_ep2 $shapes; do
        scores $written "$golden/$written" 1 --use-checkpoint-args || return 1
    done
    scores dense_tp2 "$golden/dense_tp2/iter_0000007" 1 --use-checkpoint-args
}

every_layout_scores_as_in_megatron() {
    [ "$ranks" ] || return 0
    for written in dense_tp2 moe torch_tp2 delta_tp2 hybrid_tp2; do
        scores $written "$golden/$written" 2 --use-checkpoint-args --tensor-model-parallel-size 2 &&
            scores $written "$golden/$written" 2 --use-checkpoint-args --pipeline-model-parallel-size 2 || return 1
    done
    scores dense_tp2 "$golden/dense_tp2" 4 --use-checkpoint-args --tensor-model-parallel-size 4 &&
        scores gpt_tp2 "$golden/gpt_tp2" 2 --use-checkpoint-args --tensor-model-parallel-size 2 &&
        scores moe "$golden/moe" 2 --use-checkpoint-args --expert-model-parallel-size 2
}

model='--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --max-position-embeddings 32 --vocab-size 100 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope'

options_give_the_model_and_are_compared() {
    from="--load $golden/dense_tp2 --mock-data --lr 1e-3 --device cpu --train-iters 0 --no-load-optim"
    # shellcheck disable=SC2086
    "$train" $from $model --save "$work/given" >"$work/out" 2>"$work/err" &&
        scores dense_tp2 "$work/given" 1 || return 1
    # shellcheck disable=SC2086
    refused "its run has --rotary-base 10000, not 500000; give that, or --use-checkpoint-args" "$train" $from $model \
        --rotary-base 500000 --save "$work/other" || return 1
    # shellcheck disable=SC2086
    refused "its run has --num-layers 2, not 3; leave the option out" "$train" $from --use-checkpoint-args \
        --num-layers 3 --save "$work/other" || return 1
    # shellcheck disable=SC2086
    refused "its run has --normalization RMSNorm, not LayerNorm" "$train" $from --save "$work/other" \
        $(echo "$model" | sed 's/--normalization RMSNorm//')
}

run='--use-checkpoint-args --mock-data --micro-batch-size 4 --global-batch-size 16 --seq-length 16 --lr 1e-3
    --device cpu --eval-iters 0 --log-interval 1'

a_run_goes_on_with_the_optimizer_or_says_why_not() {
    # shellcheck disable=SC2086
    "$train" --load "$golden/dense" $run --train-iters 9 --save "$work/run" >"$work/out" 2>"$work/err" || return 1
    grep -q '^ *8/9 ' "$work/out" && ! grep -q '^ *7/9 ' "$work/out" || return 1
    grep -q '"optimizer_step": 3' "$work/run/iter_0000009/trainer.json" || return 1 # one step in Megatron
    grep -q '"consumed_train_samples": 144' "$work/run/iter_0000009/trainer.json" || return 1
    # shellcheck disable=SC2086
    refused 'was saved without the optimizer.s state; continue with a new optimizer by --no-load-optim' "$train" \
        --load "$golden/dense_tp2" $run --train-iters 9 || return 1
    # shellcheck disable=SC2086
    "$train" --load "$golden/dense_tp2" $run --train-iters 8 --no-load-optim >"$work/out" 2>"$work/err" &&
        grep -q '^ *8/8 ' "$work/out"
}

# The same state as buckets of the distributed optimizer, and as tensors of the model.
the_state_in_buckets_is_that_of_the_model() {
    for written in buckets_dp2 buckets_tp2 buckets_many buckets_pp2; do
        space=$(echo "$written" | sed 's/many/tp2/')_space
        rm -rf "$work/own" "$work/space"
        saves $written "$work/own" 1 && saves "$space" "$work/space" 1 &&
            same "$work/own/iter_0000007" "$work/space/iter_0000007" &&
            grep -q '"optimizer_step": 1' "$work/own/iter_0000007/trainer.json" || return 1
        [ "$ranks" ] || continue
        for layout in '--tensor-model-parallel-size 2' '--use-distributed-optimizer'; do
            rm -rf "$work/other"
            # shellcheck disable=SC2086
            saves $written "$work/other" 2 $layout && same "$work/own/iter_0000007" "$work/other/iter_0000007" ||
                return 1
        done
    done
    # names in other places of .metadata: those of two norms change places
    cp -r "$golden/buckets_dp2" "$work/swapped" || return 1
    LC_ALL=C sed -i 's/q_layernorm/Q_layernorm/g; s/k_layernorm/q_layernorm/g; s/Q_layernorm/k_layernorm/g' \
        "$work/swapped/iter_0000007/.metadata"
    # shellcheck disable=SC2086
    refused 'its buckets have another order of parameters than is known here' "$train" --load "$work/swapped" $run \
        --train-iters 8
}

a_checkpoint_becomes_a_folder_of_hugging_face() {
    for written in dense_tp2 gpt_tp2 moe torch_tp2 $shapes; do
        # shellcheck disable=SC2086
        "$train" --load "$golden/$written" --use-checkpoint-args --no-load-optim --train-iters 0 \
            --save "$work/hf-$written" --device cpu --mock-data --lr 1e-3 >"$work/out" 2>"$work/err" &&
            scores $written "$work/hf-$written" 1 || return 1
    done
}

# The weights of infer --convert are those of a model that is loaded and saved, there and back.
a_conversion_has_the_same_weights() {
    for written in gpt_tp2 moe torch_tp2 torch_vpp2 $shapes; do
        # shellcheck disable=SC2086
        "$train" --load "$golden/$written" --use-checkpoint-args --no-load-optim --train-iters 0 \
            --save "$work/by-train" --overwrite --device cpu --mock-data --lr 1e-3 >"$work/out" 2>"$work/err" &&
            "$infer" --load "$golden/$written" --use-checkpoint-args --convert "$work/to-hf" >"$work/out" \
                2>"$work/err" &&
            cmp "$work/by-train/latest/model.safetensors" "$work/to-hf/model.safetensors" &&
            "$infer" --load "$work/to-hf" --convert "$work/to-dist" --ckpt-format torch_dist >"$work/out" \
                2>"$work/err" &&
            scores $written "$work/to-dist" 1 &&
            "$infer" --load "$work/to-dist" --convert "$work/again" >"$work/out" 2>"$work/err" &&
            cmp "$work/again/model.safetensors" "$work/to-hf/model.safetensors" || return 1
        rm -rf "$work/to-hf" "$work/to-dist" "$work/again"
    done
    for family in gpt2 qwen3_moe gpt_oss deepseek_v3; do # transposed, stacked and by groups
        "$train" --load "tests/golden/hf/$family" --train-iters 0 --save "$work/by-train" --overwrite --device cpu \
            --mock-data --lr 1e-3 >"$work/out" 2>"$work/err" &&
            "$infer" --load "tests/golden/hf/$family" --convert "$work/to-hf" >"$work/out" 2>"$work/err" &&
            cmp "$work/by-train/latest/model.safetensors" "$work/to-hf/model.safetensors" || return 1
        rm -rf "$work/to-hf"
    done
    refused 'do not hold --activation-func-clamp-value' "$infer" --load tests/golden/hf/gpt_oss \
        --convert "$work/to-dist" --ckpt-format torch_dist && [ ! -e "$work/to-dist" ] || return 1
    # NVIDIA's kernels have no least step, as transformers' Nemotron-H has
    "$train" --load tests/golden/hf/nemotron_h --mamba-dt-limit-low 0 --finetune --train-iters 0 --mock-data --lr 1e-3 \
        --device cpu --save "$work/to-dist" --ckpt-format torch_dist >"$work/out" 2>"$work/err"
}

# saves NAME FOLDER RANKS ARGUMENTS...: a golden checkpoint, with its optimizer's state if any, as torch_dist.
saves() {
    saved=$1 folder=$2 count=$3
    shift 3
    # shellcheck disable=SC2086
    ${ranks:+$ranks $count} "$train" --load "$golden/$saved" $run --train-iters 7 --save "$folder" \
        --ckpt-format torch_dist "$@" >"$work/out" 2>"$work/err" </dev/null
}

# same A B: two iterations' folders have the same tensors, in the same places.
same() {
    cmp "$1/__0_0.distcp" "$2/__0_0.distcp" && cmp "$1/.metadata" "$2/.metadata"
}

what_is_saved_for_megatron_scores_alike() {
    for written in dense dense_tp2 gpt_tp2 moe torch_tp2 torch_ep2 $shapes; do
        saves $written "$work/own-$written" 1 --no-load-optim && scores $written "$work/own-$written" 1 || return 1
        # as a folder of Megatron-LM's, by its arguments and the sums of its archives
        rm "$work/own-$written/iter_0000007/config.json" "$work/own-$written/iter_0000007/trainer.json" \
            "$work/own-$written/iter_0000007/checksums.json"
        scores $written "$work/own-$written" 1 --use-checkpoint-args || return 1
    done
}

every_layout_saves_the_same_bytes() {
    saves dense "$work/one" 1 && saves moe "$work/one-moe" 1 --no-load-optim &&
        saves delta_tp2 "$work/one-delta" 1 --no-load-optim &&
        saves hybrid_tp2 "$work/one-hybrid" 1 --no-load-optim &&
        saves mtp_repeated "$work/one-mtp" 1 --no-load-optim &&
        saves mtp_hybrid "$work/one-mtp-hybrid" 1 --no-load-optim || return 1
    grep -q '"optimizer_step": 1' "$work/one/iter_0000007/trainer.json" || return 1
    saves dense "$work/async" 1 --async-save && same "$work/one/iter_0000007" "$work/async/iter_0000007" || return 1
    [ "$ranks" ] || return 0
    saves dense "$work/tp" 2 --tensor-model-parallel-size 2 && same "$work/one/iter_0000007" "$work/tp/iter_0000007" &&
        saves dense "$work/dp" 2 --use-distributed-optimizer &&
        same "$work/one/iter_0000007" "$work/dp/iter_0000007" &&
        saves dense "$work/fsdp" 4 --data-parallel-sharding-strategy optim_grads_params --async-save \
            --tensor-model-parallel-size 2 && same "$work/one/iter_0000007" "$work/fsdp/iter_0000007" &&
        saves moe "$work/ep" 2 --no-load-optim --expert-model-parallel-size 2 &&
        cmp "$work/one-moe/iter_0000007/__0_0.distcp" "$work/ep/iter_0000007/__0_0.distcp" &&
        saves moe "$work/pp" 2 --no-load-optim --pipeline-model-parallel-size 2 &&
        same "$work/one-moe/iter_0000007" "$work/pp/iter_0000007" &&
        saves delta_tp2 "$work/delta" 2 --no-load-optim --tensor-model-parallel-size 2 &&
        same "$work/one-delta/iter_0000007" "$work/delta/iter_0000007" &&
        saves delta_tp2 "$work/delta-dp" 4 --no-load-optim --use-distributed-optimizer \
            --tensor-model-parallel-size 2 && same "$work/one-delta/iter_0000007" "$work/delta-dp/iter_0000007" &&
        saves delta_tp2 "$work/delta4" 4 --no-load-optim --data-parallel-sharding-strategy optim_grads_params \
            --pipeline-model-parallel-size 2 && same "$work/one-delta/iter_0000007" "$work/delta4/iter_0000007" &&
        saves hybrid_tp2 "$work/hybrid" 4 --no-load-optim --pipeline-model-parallel-size 2 \
            --tensor-model-parallel-size 2 && same "$work/one-hybrid/iter_0000007" "$work/hybrid/iter_0000007" &&
        saves mtp_repeated "$work/mtp" 4 --no-load-optim --data-parallel-sharding-strategy optim_grads_params \
            --tensor-model-parallel-size 2 --sequence-parallel &&
        cmp "$work/one-mtp/iter_0000007/__0_0.distcp" "$work/mtp/iter_0000007/__0_0.distcp" &&
        saves mtp_hybrid "$work/mtp-hybrid" 4 --no-load-optim --expert-model-parallel-size 2 \
            --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|tmmL' --use-distributed-optimizer &&
        cmp "$work/one-mtp-hybrid/iter_0000007/__0_0.distcp" "$work/mtp-hybrid/iter_0000007/__0_0.distcp"
}

# goes_on OPTIONS...: a run of six steps, in one go and from its third one.
goes_on() {
    own="$* $(echo "$run" | sed 's/--use-checkpoint-args//') --deterministic-mode --save-interval 3 --train-iters 6"
    own="$own --ckpt-format torch_dist"
    rm -rf "$work/first" "$work/again" "$work/other" "$work/back"
    # shellcheck disable=SC2086
    "$train" $own --save "$work/first" >"$work/out" 2>"$work/err" &&
        "$train" $own --load "$work/first/iter_0000003" --save "$work/again" >"$work/out" 2>"$work/err" &&
        same "$work/first/iter_0000006" "$work/again/iter_0000006" || return 1
    # a folder of the other format goes on alike
    # shellcheck disable=SC2086
    "$train" $own --load "$work/first/iter_0000003" --train-iters 3 --ckpt-format huggingface --save "$work/other" \
        >"$work/out" 2>"$work/err" &&
        "$train" $own --load "$work/other" --save "$work/back" >"$work/out" 2>"$work/err" &&
        same "$work/first/iter_0000006" "$work/back/iter_0000006"
}

delta='--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2
    --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 --attention-output-gate --qk-layernorm
    --apply-layernorm-1p'

a_run_goes_on_bit_for_bit_from_what_it_saved() {
    # shellcheck disable=SC2086
    goes_on $model && goes_on $model --bf16 && goes_on $model $delta && goes_on $model $delta --bf16 &&
        goes_on $model --hybrid-override-pattern 'M-' --mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 4 \
            --mamba-num-groups 2 --bf16
}

# Like --save: both formats, and a merged adapter; damage is found when the folder is loaded.
a_converted_folder_has_checksums() {
    "$infer" --load "$golden/dense_tp2" --use-checkpoint-args --convert "$work/sums" >"$work/out" 2>"$work/err" &&
        "$infer" --load "$work/sums" --convert "$work/sums-dist" --ckpt-format torch_dist >"$work/out" 2>"$work/err" &&
        "$infer" --load "$work/sums-dist" --use-checkpoint-args --convert "$work/sums-again" >"$work/out" \
            2>"$work/err" && cmp "$work/sums/checksums.json" "$work/sums-again/checksums.json" || return 1
    printf x | dd of="$work/sums-dist/release/__0_0.distcp" bs=1 seek=9000 conv=notrunc 2>"$work/err"
    printf x | dd of="$work/sums/model.safetensors" bs=1 seek=9000 conv=notrunc 2>"$work/err"
    refused '__0_0.distcp: damaged: bytes 0 to .*; copy the folder again' "$infer" --load "$work/sums-dist" \
        --use-checkpoint-args --convert "$work/no-sums" &&
        refused 'model.safetensors: damaged: bytes 0 to .*; copy the folder again' "$infer" --load "$work/sums" \
            --convert "$work/no-sums" || return 1
    [ -z "$ranks" ] && several=1 || several=2
    "$train" --load "$work/sums-again" --finetune --lora-rank 2 --lora-target all-linear --mock-data --train-iters 1 \
        --seq-length 16 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --lr-decay-style constant --device cpu \
        --save "$work/adapter" >"$work/out" 2>"$work/err" &&
        on_ranks "$several" "$infer" --load "$work/sums-again" --load-adapter "$work/adapter" \
            --merge-adapter "$work/merged" --device cpu &&
        "$infer" --load "$work/merged" --convert "$work/merged-again" >"$work/out" 2>"$work/err" || return 1
    printf x | dd of="$work/merged/model.safetensors" bs=1 seek=9000 conv=notrunc 2>"$work/err"
    refused 'merged/model.safetensors: damaged: bytes 0 to' "$infer" --load "$work/merged" --convert "$work/no-sums"
}

a_damaged_file_gives_way_to_the_checkpoint_before() {
    # shellcheck disable=SC2086
    own="$model $(echo $run | sed 's/--use-checkpoint-args//') --save-interval 3 --ckpt-format torch_dist"
    # shellcheck disable=SC2086
    "$train" $own --train-iters 6 --save "$work/hurt" >"$work/out" 2>"$work/err" || return 1
    printf x | dd of="$work/hurt/iter_0000006/__0_0.distcp" bs=1 seek=9000 conv=notrunc 2>"$work/err" || return 1
    refused '__0_0.distcp: damaged: bytes 0 to' "$infer" --load "$work/hurt/iter_0000006" --score "$work/tokens" \
        --seq-length 15 --out "$work/scores" || return 1
    # shellcheck disable=SC2086
    "$train" $own --train-iters 7 --save "$work/hurt" --load "$work/hurt" >"$work/out" 2>"$work/err" &&
        grep -q 'going on from iteration 3' "$work/err" && grep -q '^ *4/7 ' "$work/out"
}

what_megatron_has_no_place_for_is_refused() {
    # shellcheck disable=SC2086
    own="$model $(echo $run | sed 's/--use-checkpoint-args//') --train-iters 1 --ckpt-format torch_dist --save $work/no"
    # shellcheck disable=SC2086
    refused 'written for --optimizer adam, not sgd; give --no-save-optim' "$train" $own --optimizer sgd &&
        refused 'has a parameter "[^"]*lora_A.*no place in checkpoints of Megatron-LM' "$train" $own --lora-rank 2 \
            --lora-target all-linear --load "$golden/dense_tp2" --finetune &&
        refused 'do not hold --norm-placement' "$train" $own --norm-placement after &&
        refused 'do not hold --window-size' "$train" $own --window-size 8 &&
        refused 'states of the optimizer with scales are not written' "$train" $own --bf16 --exp-avg-dtype fp8 \
            --use-precision-aware-optimizer --use-distributed-optimizer &&
        refused 'nor RoPE scaled other than by yarn' "$train" \
            $(echo "$own" | sed 's/--group-query-attention//; s/--num-query-groups 2 --kv-channels 8//') \
            --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 \
            --rotary-interleaved --rope-scaling-type linear --rope-scaling-factor 4 &&
        refused 'scores a group by its best 1 experts, and this model by 2' "$infer" --convert "$work/no" \
            --load tests/golden/hf/deepseek_v3 --ckpt-format torch_dist &&
        refused 'yarn of latent attention alone' "$train" $own --rope-scaling-type yarn --rope-scaling-factor 4 \
            --original-max-position-embeddings 8 &&
        refused 'factors 1 and 4 and 8192 positions, not 1, 4 and 16;' "$infer" --convert "$work/no" \
            --load tests/golden/hf/llama3_rope_tied --ckpt-format torch_dist &&
        refused 'do not hold --mamba-dt-limit-low' "$infer" --convert "$work/no" --load tests/golden/hf/nemotron_h \
            --ckpt-format torch_dist &&
        [ ! -e "$work/no" ] || return 1
    # shellcheck disable=SC2086
    "$train" $own --optimizer sgd --no-save-optim >"$work/out" 2>"$work/err" &&
        refused "was saved without the optimizer's state" "$train" $own --load "$work/no" --train-iters 2
}

tokens "$work/tokens"
check every_checkpoint_scores_as_in_megatron every_checkpoint_scores_as_in_megatron
check every_layout_scores_as_in_megatron every_layout_scores_as_in_megatron
check options_give_the_model_and_are_compared options_give_the_model_and_are_compared
check a_run_goes_on_with_the_optimizer_or_says_why_not a_run_goes_on_with_the_optimizer_or_says_why_not
check the_state_in_buckets_is_that_of_the_model the_state_in_buckets_is_that_of_the_model
check a_checkpoint_becomes_a_folder_of_hugging_face a_checkpoint_becomes_a_folder_of_hugging_face
check what_is_saved_for_megatron_scores_alike what_is_saved_for_megatron_scores_alike
check a_conversion_has_the_same_weights a_conversion_has_the_same_weights
check every_layout_saves_the_same_bytes every_layout_saves_the_same_bytes
check a_run_goes_on_bit_for_bit_from_what_it_saved a_run_goes_on_bit_for_bit_from_what_it_saved
check a_converted_folder_has_checksums a_converted_folder_has_checksums
check a_damaged_file_gives_way_to_the_checkpoint_before a_damaged_file_gives_way_to_the_checkpoint_before
check what_megatron_has_no_place_for_is_refused what_megatron_has_no_place_for_is_refused
exit $failed
