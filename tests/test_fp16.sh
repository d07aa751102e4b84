#!/bin/sh
# fp16 by the programs: overflows are skipped and reported, runs are saved and resumed, folders are read and written,
# all stages train.
# Sections of megatron.c: §14
set -u
. tests/suite.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
golden=tests/golden/hf

tidy() {
    rm -rf "$work"/*
}

small='--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16
    --vocab-size 128 --mock-data --lr 1e-2 --eval-iters 0 --device cpu --hidden-dropout 0 --attention-dropout 0
    --global-batch-size 4'

# run ARGUMENTS...: trains a small GPT.
run() {
    # shellcheck disable=SC2086
    on_ranks "${ranks:-1}" "$train" $small "$@"
}

refuses() {
    pattern=$1
    shift
    # shellcheck disable=SC2086
    refused "$pattern" "$train" $small --train-iters 2 "$@"
}

# state KEY FOLDER: a number of the newest checkpoint's trainer.json.
state() {
    sed -n "s/^ *\"$1\": \\([^,]*\\),\\{0,1\\}\$/\\1/p" "$2/latest/trainer.json"
}

# damage KEY VALUE FOLDER: sets a value there, in a checkpoint of the version without checksums.
damage() {
    sed -i "s/^\\( *\"$1\": \\)[^,]*/\\1$2/; s/\"version\": 2/\"version\": 1/" "$3/latest/trainer.json"
    rm -f "$3/latest/checksums.json"
}

# types FOLDER: the types of the tensors of its weights.
types() {
    tr '{}' '\n\n' <"$1/model.safetensors" | sed -n 's/.*"dtype": *"\([A-Z0-9]*\)".*/\1/p' | sort -u
}

options_that_do_not_fit_are_refused() {
    refuses '--fp16 and --bf16 exclude each other' --fp16 --bf16 &&
        refuses '--fp32-residual-connection needs --bf16 or --fp16' --fp32-residual-connection &&
        refuses '--fp32-residual-connection needs norms before attention and MLP' --fp32-residual-connection --bf16 \
            --norm-placement after &&
        refuses '--loss-scale needs --fp16' --loss-scale 512 &&
        refuses '--hysteresis needs --fp16' --hysteresis 1 --bf16 &&
        refuses '--hysteresis must be in ' --fp16 --hysteresis 0 &&
        refuses '--loss-scale must be in ' --fp16 --loss-scale 1e-30 &&
        refuses '--loss-scale-window and --loss-scale exclude each other' --fp16 --loss-scale 8 --loss-scale-window 3 &&
        refuses '--min-loss-scale 4 must be at most --initial-loss-scale 2' --fp16 --min-loss-scale 4 \
            --initial-loss-scale 2 &&
        refuses '--grad-reduce-in-bf16 needs --bf16' --fp16 --grad-reduce-in-bf16 &&
        refuses '--main-grads-dtype fp16 needs --fp16' --bf16 --use-precision-aware-optimizer --main-grads-dtype fp16 &&
        refuses '--main-params-dtype fp16 needs --bf16' --fp16 --use-precision-aware-optimizer \
            --main-params-dtype fp16
}

# The first scale, 2^32, overflows; hysteresis leaves it for one more step. Steps that are skipped do not count for the
# schedule: the rate of the first update is that of the first step.
overflows_are_skipped_and_reported() {
    run --fp16 --train-iters 24 --lr-decay-style linear --metrics "$work/m" --tensorboard-dir "$work/tensorboard" \
        --save "$work/o" || return 1
    says '^  *1/24 .* grad norm \(inf\|nan\)  loss scale 4.29497e+09  lr 1.00e-02  .* 1 skipped  ' "$work/out" &&
        says 'CPU in fp16, ' "$work/out" || return 1
    ! grep -e '-nan\|-inf' "$work/out" && grep -qa loss-scale "$work"/tensorboard/* || return 1
    series loss_scale "$work/m" >"$work/scales"
    series learning_rate "$work/m" >"$work/rates"
    sed -n 's/.*"grad_norm": \([^,]*\),.*/\1/p' "$work/m" >"$work/norms"
    sed -n 's/.*"skipped_iterations": \([0-9]*\).*/\1/p' "$work/m" >"$work/skips"
    [ "$(sort -u "$work/norms" | sed -n '/null/p')" = null ] || return 1
    paste "$work/scales" "$work/rates" "$work/norms" "$work/skips" | awk '
        function near(a, b) { return a > b * (1 - 1e-12) && a < b * (1 + 1e-12) }
        BEGIN { scale = 2 ^ 32; left = 2 }
        { if ($1 != scale || !near($2, 0.01 * (1 - updates / 24)) || $4 != skipped + ($3 == "null")) exit bad = 1
          if ($3 == "null") { skipped++; if (--left <= 0) scale /= 2 } else updates++ }
        END { exit bad || NR != 24 || skipped < 3 || updates < 3 }' || return 1
    skipped=$(tail -n 1 "$work/skips")
    [ "$(state skipped_samples "$work/o")" = $((4 * skipped)) ] &&
        [ "$(state consumed_train_samples "$work/o")" = 96 ] &&
        [ "$(state optimizer_step "$work/o")" = $((24 - skipped)) ] &&
        [ "$(state growth_tracker "$work/o")" -gt 0 ] && [ "$(state hysteresis_tracker "$work/o")" = $((2 - skipped)) ]
}

# The last step of the last epoch reads fewer samples.
skipped_samples_are_those_that_were_read() {
    awk 'BEGIN { for (i = 0; i < 43; i++) printf "{\"prompt\": \"%d>\", \"response\": \"%d\"}\n", i % 10, i % 7 }' \
        >"$work/sft.jsonl"
    for packs in '' --sequence-packing; do
        # shellcheck disable=SC2086
        "$train" --stage sft --data-path "$work/sft.jsonl" --tokenizer-type ByteLevel --chat-template plain \
            --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --global-batch-size 8 \
            --train-epochs 1 --lr 1e-3 --eval-iters 0 --device cpu --fp16 --initial-loss-scale 1e20 \
            --save "$work/few" --overwrite $packs >"$work/out" 2>"$work/err" || return 1
        read=$(state consumed_train_samples "$work/few")
        [ $((read % 8)) -gt 0 ] && [ "$(state skipped_samples "$work/few")" = "$read" ] || {
            echo "$read samples were read, and $(state skipped_samples "$work/few") skipped"
            return 1
        }
    done
}

# Without a scale gradients underflow, and with a small one the model does not learn; a large constant one ends the run.
a_constant_scale_stays() {
    run --fp16 --train-iters 8 --loss-scale 1e-9 --metrics "$work/tiny" &&
        run --fp16 --train-iters 8 --loss-scale 4096 --metrics "$work/good" &&
        run --train-iters 8 --metrics "$work/fp32" || return 1
    [ "$(series grad_norm "$work/tiny" | sort -u)" = 0 ] && [ "$(series loss_scale "$work/good" | sort -u)" = 4096 ] &&
        same_series "$work/good" "$work/fp32" 1e-3 0 lm_loss && ! same_series "$work/tiny" "$work/fp32" 1e-3 0 lm_loss \
        >/dev/null || return 1
    refuses 'iteration 1: the gradient norm is \(inf\|nan\); lower --loss-scale or take --bf16 ' --fp16 \
        --loss-scale 1e12 &&
        refuses 'iteration 1: the gradient norm is \(inf\|nan\); lower --min-loss-scale or take --bf16 ' --fp16 \
            --min-loss-scale 1e12 --initial-loss-scale 1e12 &&
        run --fp16 --loss-scale 1e12 --train-iters 4 --no-check-for-nan-in-loss-and-grad &&
        says '  4 skipped  ' "$work/out"
}

# A run that stops in the middle goes on bit for bit, with its scale and trackers.
a_run_resumes_bit_for_bit() {
    set -- --fp16 --initial-loss-scale 1e7 --hysteresis 2 --loss-scale-window 3 --global-batch-size 4
    run "$@" --train-iters 12 --metrics "$work/whole" --save "$work/whole.d" || return 1
    for stop in 2 3 5 7; do
        rm -rf "$work/half.d" "$work/half"
        run "$@" --train-iters 12 --exit-interval $stop --metrics "$work/half" --save "$work/half.d" &&
            run "$@" --train-iters 12 --load "$work/half.d" --save "$work/half.d" --metrics "$work/half" || return 1
        same_series "$work/whole" "$work/half" 0 0 lm_loss loss_scale learning_rate skipped_iterations || return 1
        for file in model.safetensors optimizer.safetensors trainer.json; do
            cmp "$work/whole.d/latest/$file" "$work/half.d/latest/$file" || return 1
        done
    done
    [ "${HAVE_MPI:-}" ] || return 0
    rm -rf "$work/half.d" "$work/half"
    run "$@" --train-iters 12 --exit-interval 5 --metrics "$work/half" --save "$work/half.d" &&
        ranks=2 run "$@" --train-iters 12 --load "$work/half.d" --metrics "$work/half" --tensor-model-parallel-size 2 &&
        same_series "$work/whole" "$work/half" 0 0 loss_scale skipped_iterations &&
        [ "$(series skipped_iterations "$work/half" | tail -n 1)" -gt 0 ]
}

damaged_numbers_are_refused() {
    run --fp16 --train-iters 5 --save "$work/s" || return 1
    for damaged in 'loss_scale "x"' 'loss_scale -4' 'loss_scale 1e-50' 'loss_scale null' 'skipped_samples 21' \
        'skipped_samples -4' 'skipped_iterations -1' 'growth_tracker 1.5' 'growth_tracker -1' 'hysteresis_tracker "2"' \
        'hysteresis_tracker 0.5'; do
        rm -rf "$work/bad"
        cp -r "$work/s" "$work/bad"
        damage "${damaged% *}" "${damaged#* }" "$work/bad"
        refuses "trainer.json: has no .*\"${damaged% *}\".*; begin anew from these weights by --finetune" --fp16 \
            --train-iters 8 --load "$work/bad" || return 1
    done
    run --fp16 --train-iters 3 --load "$work/bad" --finetune
}

# fp32 to fp16 and back: the master weights are the fp32 weights, so nothing is lost. A run keeps the samples that it
# skipped in fp16, which its schedule does not count, in other types too.
checkpoints_of_other_types_go_on() {
    run --train-iters 3 --save "$work/f" || return 1
    convert() {
        "$train" --load "$work/$1" --save "$work/$2" --train-iters 0 --device cpu ${3:+"$3"} >"$work/out" 2>"$work/err"
    }
    convert f h --fp16 && convert h g || return 1
    [ "$(types "$work/h/latest")" = F16 ] && [ "$(types "$work/g/latest")" = F32 ] || return 1
    for file in model optimizer; do
        cmp "$work/f/latest/$file.safetensors" "$work/g/latest/$file.safetensors" || return 1
    done
    run --train-iters 6 --load "$work/f" --fp16 --initial-loss-scale 1024 --metrics "$work/in16" &&
        run --train-iters 6 --load "$work/f" --metrics "$work/in32" &&
        same_series "$work/in16" "$work/in32" 1e-3 0 lm_loss || return 1
    run --fp16 --train-iters 10 --save "$work/s" && skipped=$(state skipped_samples "$work/s") &&
        run --bf16 --train-iters 11 --load "$work/s" --save "$work/s" &&
        run --train-iters 12 --load "$work/s" --save "$work/s" || return 1
    [ "$skipped" -gt 0 ] && [ "$(state skipped_samples "$work/s")" = "$skipped" ] &&
        [ -z "$(state loss_scale "$work/s")" ] && run --fp16 --train-iters 14 --load "$work/s" &&
        says ' loss scale 4.29497e+09 ' "$work/out"
}

# A folder of Megatron-LM's format has the samples that its schedule counted, and weights in float16.
folders_of_megatron_have_the_schedule() {
    llama='--num-layers 2 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear'
    # shellcheck disable=SC2086
    run $llama --fp16 --train-iters 10 --save "$work/s" --ckpt-format torch_dist || return 1
    skipped=$(state skipped_samples "$work/s")
    rm "$work/s/iter_0000010/config.json" "$work/s/iter_0000010/trainer.json" "$work/s/iter_0000010/checksums.json"
    # shellcheck disable=SC2086
    run $llama --fp16 --train-iters 11 --load "$work/s" --save "$work/t" --initial-loss-scale 64 || return 1
    [ "$skipped" -gt 0 ] && [ "$(state skipped_samples "$work/t")" = "$skipped" ] &&
        "$infer" --load "$work/s" --use-checkpoint-args --convert "$work/hf" >"$work/out" 2>"$work/err" &&
        [ "$(types "$work/hf")" = F16 ]
}

# A folder of float16 is read and written.
folders_are_read_and_written_in_fp16() {
    "$infer" --load $golden/llama --convert "$work/half" --fp16 >"$work/out" 2>"$work/err" &&
        "$infer" --load "$work/half" --convert "$work/again" >"$work/out" 2>"$work/err" &&
        "$train" --load "$work/half" --finetune --tokens-file $golden/llama/tokens.i32 --seq-length 32 --lr 1e-30 \
            --min-lr 0 --global-batch-size 4 --train-iters 1 --device cpu --fp16 --loss-scale 64 \
            --save "$work/trained" >"$work/out" 2>"$work/err" || return 1
    for folder in half again trained/latest; do
        [ "$(types "$work/$folder")" = F16 ] && says '"dtype": "float16"' "$work/$folder/config.json" || return 1
    done
    cmp "$work/half/model.safetensors" "$work/again/model.safetensors" || return 1
    # the golden weights are not halves: those of the folder are as near as halves are
    set -- --score $golden/llama/tokens.i32 --seq-length 32 --device cpu
    "$infer" --load $golden/llama "$@" --out "$work/exact" >"$work/out" 2>"$work/err" &&
        "$infer" --load "$work/half" "$@" --out "$work/rounded" >"$work/out" 2>"$work/err" &&
        "$infer" --load "$work/half" "$@" --fp16 --out "$work/fp16" >"$work/out" 2>"$work/err" || return 1
    for out in rounded fp16; do
        od -An -v -t f4 -w4 "$work/exact" >"$work/a" && od -An -v -t f4 -w4 "$work/$out" >"$work/b" &&
            paste "$work/a" "$work/b" | awk '
                { d = ($1 - $2) * ($1 - $2); if (d > 0) differs = 1; if (d > 1e-4) bad = 1 }
                END { exit bad || !differs || NR < 100 }' || return 1
    done
}

# A weight of 70000 is infinite in fp16. The update multiplies weights of 100 by lr times weight decay.
a_weight_beyond_the_range_is_reported() {
    run --init-method-std 100 --train-iters 1 --lr 1e3 --lr-decay-style constant --weight-decay 1 \
        --save "$work/large" || return 1
    "$infer" --load "$work/large" --prompt-tokens 1 --print-tokens --max-new-tokens 1 --fp16 --device cpu >"$work/out" \
        2>"$work/err"
    says '^warning: .* values of tensor ".*" are not finite in fp16; take --bf16' "$work/err" || return 1
    "$infer" --load "$work/large" --prompt-tokens 1 --print-tokens --max-new-tokens 1 --bf16 --device cpu >"$work/out" \
        2>"$work/err"
    ! grep -q 'not finite in' "$work/err"
}

texts_are_those_of_fp32() {
    for type in '' --fp16 '--fp16 --fp32-residual-connection'; do
        # shellcheck disable=SC2086
        "$infer" --load $golden/llama --prompt-tokens 5,6,7 --print-tokens --max-new-tokens 12 --temperature 0 \
            --device cpu $type >"$work/text$type" 2>"$work/err" && cmp "$work/text" "$work/text$type" || return 1
    done
    says 'CPU in fp16' "$work/err"
}

# Every optimizer; those other than Adam read gradients in fp32.
every_optimizer_trains() {
    set -- --fp16 --train-iters 6 --initial-loss-scale 4096
    for how in '' '--optimizer muon' '--optimizer sgd' '--optimizer lion' --optimizer-cpu-offload \
        '--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp8' \
        '--accumulate-allreduce-grads-in-fp32'; do
        # shellcheck disable=SC2086
        run "$@" $how --metrics "$work/m" --overwrite && run --train-iters 6 $(echo "$how" | sed 's/--acc.*//') \
            --metrics "$work/n" --overwrite && same_series "$work/m" "$work/n" 5e-3 0 lm_loss &&
            ! grep -q skipped "$work/out" || {
            echo "with $how"
            return 1
        }
    done
}

# Its two halves of a gradient are summed in fp32.
zb_h1_takes_gradients_in_fp32() {
    zb='--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --fp16'
    # shellcheck disable=SC2086
    refuses '--pipeline-schedule zb-h1 with --fp16 needs --accumulate-allreduce-grads-in-fp32' $zb || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    # shellcheck disable=SC2086
    ranks=2 run $zb --train-iters 6 --initial-loss-scale 4096 --accumulate-allreduce-grads-in-fp32 \
        --metrics "$work/m" && run --train-iters 6 --metrics "$work/n" && same_series "$work/m" "$work/n" 1e-3 0 lm_loss
}

# trains_alike STEPS ARGUMENTS...: in fp16 as in fp32, also where the scale is found; checks the loss.
trains_alike() {
    tolerance=$1
    shift
    "$train" "$@" --metrics "$work/fp32" --overwrite >"$work/out" 2>"$work/err" &&
        "$train" "$@" --fp16 --initial-loss-scale 256 --metrics "$work/fp16" --overwrite >"$work/out" 2>"$work/err" &&
        same_series "$work/fp32" "$work/fp16" "$tolerance" 0.01 lm_loss && says '  loss scale 256  ' "$work/out"
}

model='--num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --seq-length 16'
common='--chat-template plain --hidden-dropout 0 --attention-dropout 0 --device cpu --lr-decay-style constant
    --eval-iters 0'

write_data() {
    awk -v sft="$work/sft.jsonl" -v dpo="$work/dpo.jsonl" -v rl="$work/rl.jsonl" 'BEGIN {
        for (i = 0; i < 120; i++) {
            a = i * 7 % 10; b = (int(i / 10) * 3 + i) % 10; low = a < b ? a : b; high = a < b ? b : a
            printf "{\"prompt\": \"%d%d>\", \"response\": \"%d%d\"}\n", a, b, low, high > sft
            printf "{\"prompt\": \"%d%d>\", \"chosen\": \"%d%d\"", a, b, low, high > dpo
            printf ", \"rejected\": \"%d%d.\"}\n", high, low > dpo
            printf "{\"prompt\": \"%d%d>\", \"answer\": \"%d%d\"}\n", a, b, low, high > rl
        }
    }'
}

every_stage_trains() {
    write_data
    # shellcheck disable=SC2086
    trains_alike 5e-3 --load $golden/llama --finetune --tokens-file $golden/llama/tokens.i32 --seq-length 32 \
        --global-batch-size 4 --lr 1e-3 --device cpu --lora-rank 4 --lora-alpha 8 --lora-target all-linear \
        --train-iters 6 &&
        trains_alike 5e-3 --stage sft --data-path "$work/sft.jsonl" --tokenizer-type ByteLevel $model $common \
            --micro-batch-size 4 --global-batch-size 8 --train-iters 6 --lr 5e-3 --save "$work/base" || return 1
    # shellcheck disable=SC2086
    trains_alike 5e-3 --stage dpo --load "$work/base" --finetune --data-path "$work/dpo.jsonl" --seq-length 16 $common \
        --global-batch-size 8 --lr 1e-3 --train-iters 4 &&
        trains_alike 5e-3 --stage rm --value-head --load "$work/base" --finetune --data-path "$work/dpo.jsonl" \
            --seq-length 16 $common --global-batch-size 8 --lr 1e-3 --train-iters 4 &&
        trains_alike 5e-3 --stage kd --load "$work/base" --finetune --teacher-load "$work/base" --data-path \
            "$work/sft.jsonl" --seq-length 16 $common --global-batch-size 8 --lr 1e-3 --train-iters 4 --logits-topk 20
}

# Each finds its scale, saves and resumes it.
actor_and_critic_have_scales_of_their_own() {
    write_data
    # shellcheck disable=SC2086
    "$train" --stage sft --data-path "$work/sft.jsonl" --tokenizer-type ByteLevel $model $common --micro-batch-size 8 \
        --train-iters 20 --lr 5e-3 --save "$work/base" --fp16 --initial-loss-scale 256 --log-interval 10 \
        >"$work/out" 2>"$work/err" || return 1
    learn() {
        # shellcheck disable=SC2086
        "$train" --stage rl --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 --micro-batch-size 4 \
            --rollout-batch-size 4 --num-return-sequences 4 --global-batch-size 8 --lr 1e-4 --adv-estimator gae --fp16 \
            --initial-loss-scale 1e9 --loss-scale-window 50 --lr-warmup-iters 3 $common "$@" >"$work/out" 2>"$work/err"
    }
    learn --load "$work/base" --finetune --train-iters 8 --save "$work/rl" --metrics "$work/whole" || return 1
    actor=$(state loss_scale "$work/rl") critic=$(state loss_scale "$work/rl/critic")
    [ -n "$actor" ] && [ -n "$critic" ] && [ "$actor" != "$critic" ] || {
        echo "the actor has a scale of $actor, the critic of $critic"
        return 1
    }
    learn --load "$work/base" --finetune --train-iters 8 --exit-interval 3 --save "$work/half" --metrics "$work/part" &&
        learn --load "$work/half" --train-iters 8 --save "$work/half" --metrics "$work/part" &&
        same_series "$work/whole" "$work/part" 0 0 loss_scale reward skipped_iterations || return 1
    for folder in . critic; do
        [ "$(state skipped_samples "$work/rl/$folder")" -gt 0 ] || return 1 # schedules wait for the first update
        for key in loss_scale growth_tracker hysteresis_tracker skipped_samples skipped_iterations optimizer_step; do
            [ "$(state $key "$work/rl/$folder")" = "$(state $key "$work/half/$folder")" ] || return 1
        done
    done
}

check options_that_do_not_fit_are_refused options_that_do_not_fit_are_refused
check overflows_are_skipped_and_reported overflows_are_skipped_and_reported
check skipped_samples_are_those_that_were_read skipped_samples_are_those_that_were_read
check a_constant_scale_stays a_constant_scale_stays
check a_run_resumes_bit_for_bit a_run_resumes_bit_for_bit
check damaged_numbers_are_refused damaged_numbers_are_refused
check checkpoints_of_other_types_go_on checkpoints_of_other_types_go_on
check folders_of_megatron_have_the_schedule folders_of_megatron_have_the_schedule
check folders_are_read_and_written_in_fp16 folders_are_read_and_written_in_fp16
check a_weight_beyond_the_range_is_reported a_weight_beyond_the_range_is_reported
check texts_are_those_of_fp32 texts_are_those_of_fp32
check every_optimizer_trains every_optimizer_trains
check zb_h1_takes_gradients_in_fp32 zb_h1_takes_gradients_in_fp32
check every_stage_trains every_stage_trains
check actor_and_critic_have_scales_of_their_own actor_and_critic_have_scales_of_their_own
exit $failed
