#!/bin/sh
# A command that is refused ends with one line, with status 1, and without a page of MPI_Abort; text and halves of a
# dataset as --data-path are answered with the next step; options without effect say so.
set -u
. tests/suite.sh
small="--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 100 --seq-length 16
    --train-iters 1 --lr 1e-3 --device cpu"

# refused_together PATTERN PROGRAM ARGUMENTS...: two ranks refuse with one line. mpirun adds that the status is not 0.
refused_together() {
    pattern=$1
    shift
    timeout $hang $(mpirun_here) -np 2 "$@" >"$work/out" 2>"$work/err" && return 1
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] && says "^error: .*$pattern" "$work/err" &&
        ! grep -q MPI_ABORT "$work/err" && says 'Exit code: *1' "$work/err"
}

# prints PATTERN ARGUMENTS...: a run of one step prints a line.
prints() {
    pattern=$1
    shift
    # The options are a list of words.
    # shellcheck disable=SC2086
    "$train" $small "$@" >"$work/out" 2>"$work/err" && says "$pattern" "$work/out"
}

prints_nothing_idle() {
    # shellcheck disable=SC2086
    "$train" $small >"$work/out" 2>"$work/err" && ! grep -q 'no effect' "$work/out"
}

if [ -n "${HAVE_MPI:-}" ]; then
    # shellcheck disable=SC2086
    check ranks_refuse_a_name_together refused_together 'fp16-lm-cross-entropy is not supported' "$train" $small \
        --fp16-lm-cross-entropy
    # shellcheck disable=SC2086
    check ranks_refuse_a_rule_together refused_together 'must be a multiple of' "$train" $small --ffn-hidden-size 33 \
        --tensor-model-parallel-size 2
    # shellcheck disable=SC2086
    check ranks_refuse_a_tokenizer_together refused_together 'no-such-file' "$train" $small \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$work/no-such-file"
    check infer_refuses_together refused_together 'load is missing' "$infer" --prompt a
    # shellcheck disable=SC2086
    check ranks_refuse_a_folder_that_is_absent_together refused_together 'absent/m.jsonl' "$train" $small \
        --metrics "$work/absent/m.jsonl"
    # shellcheck disable=SC2086
    check ranks_refuse_a_trace_together refused_together 'absent/t.json' "$train" $small --trace-first-step 1 \
        --trace-last-step 1 --trace "$work/absent/t.json"
    check infer_refuses_a_folder_without_a_tokenizer_together refused_together 'without a tokenizer: --prompt-tokens' \
        "$infer" --load tests/golden/hf/gpt2 --prompt a --tensor-model-parallel-size 2 --device cpu
    check infer_refuses_scores_together refused_together 'no-such-file' "$infer" --load tests/golden/hf/gpt2 \
        --score "$work/no-such-file" --out "$work/s" --seq-length 8 --tensor-model-parallel-size 2 --device cpu
    # shellcheck disable=SC2086
    check ranks_refuse_too_large_a_model_together refused_together 'the 2 ranks of a machine need' "$train" $small \
        --hidden-size 200000
    mkdir "$work/cut" && cp tests/golden/hf/gpt2/config.json "$work/cut" &&
        head -c 20000 tests/golden/hf/gpt2/model.safetensors >"$work/cut/model.safetensors"
    # shellcheck disable=SC2086
    check ranks_refuse_weights_together refused_together 'cut/model.safetensors' "$train" --load "$work/cut" \
        --mock-data --seq-length 16 --train-iters 1 --lr 1e-3 --device cpu
    check infer_refuses_weights_together refused_together 'cut/model.safetensors' "$infer" --load "$work/cut" \
        --prompt-tokens 1,2 --print-tokens --tensor-model-parallel-size 2 --device cpu
    check infer_refuses_a_long_prompt_together refused_together 'context' "$infer" --load tests/golden/hf/gpt2 \
        --prompt-tokens "1$(printf ',%d' $(seq 100))" --print-tokens --tensor-model-parallel-size 2 --device cpu
    # shellcheck disable=SC2086
    prints_sequence_parallel() {
        timeout $hang $(mpirun_here) -np 2 "$train" $small --tensor-model-parallel-size 2 "$@" >"$work/out" 2>&1
    }
    without_sequence_parallel_warns() {
        prints_sequence_parallel && says 'with it, each rank would keep at least 0.00391 MiB less' "$work/out"
    }
    experts_turn_sequence_parallel_on() {
        prints_sequence_parallel --num-experts 2 --moe-ffn-hidden-size 31 --disable-bias-linear --swiglu &&
            says '--sequence-parallel is on: with experts' "$work/out" &&
            says '--expert-tensor-parallel-size is 1: experts or ranks' "$work/out"
    }
    check without_sequence_parallel_warns without_sequence_parallel_warns
    check experts_turn_sequence_parallel_on experts_turn_sequence_parallel_on
    offloads_expert_rows() {
        # shellcheck disable=SC2086
        timeout $hang $(mpirun_here) -np 2 "$train" $small --num-experts 2 --disable-bias-linear --swiglu \
            --expert-model-parallel-size 2 --fine-grained-activation-offloading --offload-modules moe_act "$@" \
            >"$work/out" 2>&1
    }
    rows_that_depend_on_the_data_say_so() {
        idle='--offload-modules expert_fc1, moe_act has no effect: the number of their rows depends on the data'
        offloads_expert_rows && says "$idle" "$work/out" && offloads_expert_rows \
            --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity && ! grep 'no effect' "$work/out"
    }
    check rows_that_depend_on_the_data_say_so rows_that_depend_on_the_data_say_so
else
    echo "skipped: without MPI there is one rank"
fi

echo 'Once upon a time.' >"$work/my.txt"
real="--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 100 --seq-length 16 --train-iters 1
    --lr 1e-3"
# shellcheck disable=SC2086
check text_is_answered_with_preprocess refused \
    "my.txt: is text, not a dataset; first run data/preprocess --input $work/my.txt --output-prefix $work/my " \
    "$train" $real --data-path "$work/my.txt"
: >"$work/my_text_document.idx"
# shellcheck disable=SC2086
check a_prefix_is_answered_with_its_dataset refused "my: is not a dataset, but $work/my_text_document is; give that\$" \
    "$train" $real --data-path "$work/my"
# shellcheck disable=SC2086
check text_is_answered_with_its_dataset refused "my.txt: is not a dataset, but $work/my_text_document is; give that\$" \
    "$train" $real --data-path "$work/my.txt"
# shellcheck disable=SC2086
check a_weight_without_a_path_is_named refused 'data-path: the weight 0.3 has no path after it' \
    "$train" $real --data-path "0.7 $work/x 0.3"
echo '{"prompt": "a", "response": "b"}' >"$work/samples.jsonl"
check files_of_samples_have_no_weights refused '0.5: is a weight, which only indexed datasets have' "$train" \
    --num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 257 --tokenizer-type ByteLevel --seq-length 16 \
    --train-iters 1 --lr 1e-3 --sft --chat-template plain --data-path 0.5 "$work/samples.jsonl"
# shellcheck disable=SC2086
check half_a_dataset_is_answered_with_its_prefix refused "expects the prefix of the two files .*; give $work/x\$" \
    "$train" $real --data-path 0.5 "$work/x.bin" 0.5 "$work/y"
check overlap_on_one_rank_says_so prints '--overlap-grad-reduce has no effect: there is one data-parallel rank' \
    --overlap-grad-reduce
check a_constant_rate_has_no_minimum prints '--min-lr has no effect' --lr-decay-style constant --min-lr 1e-4
check biases_of_queries_are_there_already prints '--add-qkv-bias has no effect: all linear layers have biases' \
    --add-qkv-bias
check types_of_the_optimizer_are_given prints '--use-precision-aware-optimizer has no effect: none of' \
    --use-precision-aware-optimizer
check nothing_to_overwrite_says_so prints '--overwrite has no effect: neither --save nor --metrics is given' --overwrite
check no_warm_up_has_no_first_rate prints '--lr-warmup-init has no effect: there is no warm-up' --lr-warmup-init 1e-5
check the_optimizer_is_on_the_cpu_already prints '--optimizer-cpu-offload has no effect: on the CPU' \
    --optimizer-cpu-offload
limits_without_mpirun_say_so() {
    prints '--distributed-timeout-minutes has no effect: without mpirun' --distributed-timeout-minutes 5 \
        --distributed-timeout-seconds-after-init 60 --save-timeout-seconds 70 &&
        says '--distributed-timeout-seconds-after-init has no effect: without mpirun' "$work/out" &&
        says '--save-timeout-seconds has no effect: without mpirun' "$work/out"
}
check limits_without_mpirun_say_so limits_without_mpirun_say_so
options_with_an_effect_say_nothing() {
    # shellcheck disable=SC2086
    "$train" $small --lr-warmup-init 1e-5 --lr-warmup-fraction 0.5 --metrics "$work/over.jsonl" --overwrite \
        >"$work/out" 2>"$work/err" && ! grep 'no effect' "$work/out"
}
# Once the options are read, other parts of the program refuse them.
later_errors_have_the_names_that_were_given() {
    refused '--layernorm-epsilon is 0.5, but the weights have 1e-05' "$train" --load tests/golden/hf/llama \
        --mock-data --seq-length 8 --train-iters 1 --lr 1e-3 --layernorm-epsilon 0.5 || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    # shellcheck disable=SC2086,SC2046
    timeout $hang $(mpirun_here) -np 1 "$train" $small --distributed-timeout-seconds-after-init 60 : \
        -np 1 "$train" $small --distributed-timeout-seconds-after-init 61 >"$work/out" 2>"$work/err" && return 1
    says "^error: rank 1 has --distributed-timeout-seconds-after-init '61' and rank 0 '60'" "$work/err"
}
# Tensors have the names of the folder's model_type, so no option may make it another one.
options_that_a_loaded_family_lacks_are_named() {
    for pair in 'qwen3_next --mtp-num-layers 2' 'mixtral --mtp-num-layers 1' \
        'gpt_oss --moe-router-pre-softmax' 'gpt2 --window-size 4'; do
        # shellcheck disable=SC2086
        set -- $pair
        refused "\"model_type\" is $1, and no model of this type has $2; leave" "$train" \
            --load "tests/golden/hf/$1" "$2" ${3:+"$3"} --mock-data --seq-length 8 --train-iters 1 --lr 1e-3 \
            --device cpu --hidden-dropout 0 || return 1
    done
}
check options_that_a_loaded_family_lacks_are_named options_that_a_loaded_family_lacks_are_named
every_note_about_a_folder_is_printed() {
    mkdir "$work/noted"
    sed 's/"residual_dropout": [0-9.]*/"residual_dropout": 0.1/; s/^{/{"rope_scaling": {"rope_type": "default"},/' \
        tests/golden/hf/seed_oss/config.json >"$work/noted/config.json"
    "$train" --hf-config "$work/noted/config.json" --mock-data --seq-length 8 --train-iters 1 --lr 1e-3 \
        --device cpu >"$work/out" 2>"$work/err" && says 'residual_dropout.* becomes --hidden-dropout' "$work/err" &&
        says 'rope_scaling.* replaces' "$work/err"
}
check every_note_about_a_folder_is_printed every_note_about_a_folder_is_printed
check later_errors_have_the_names_that_were_given later_errors_have_the_names_that_were_given
check options_with_an_effect_say_nothing options_with_an_effect_say_nothing
modules_without_a_layer_say_so() {
    selective='--recompute-granularity selective --recompute-modules'
    prints '^--recompute-modules core_attn has no effect: attention never keeps its probabilities$' \
        --recompute-activations || return 1
    # shellcheck disable=SC2086
    prints '^--recompute-modules moe_act has no effect: no layer has experts$' $selective moe moe_act shared_experts &&
        says '^--recompute-modules moe has no effect: no layer has experts$' "$work/out" &&
        says '^--recompute-modules shared_experts has no effect: no layer has a shared expert$' "$work/out" &&
        [ "$(grep -c 'no effect' "$work/out")" = 3 ] || return 1
    # shellcheck disable=SC2086
    prints '^--recompute-modules mlp has no effect: no layer has an MLP without experts$' --num-experts 2 \
        --disable-bias-linear --swiglu $selective mlp moe moe_act && [ "$(grep -c 'no effect' "$work/out")" = 1 ] ||
        return 1
    # shellcheck disable=SC2086
    prints '100%' --num-experts 2 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 8 --disable-bias-linear \
        --swiglu $selective mlp layernorm moe_act shared_experts && ! grep 'no effect' "$work/out"
}
check modules_without_a_layer_say_so modules_without_a_layer_say_so
offloaded_modules_without_a_layer_say_so() {
    offload='--fine-grained-activation-offloading --offload-modules'
    # shellcheck disable=SC2086
    prints '^--offload-modules expert_fc1, moe_act has no effect: no layer has experts$' $offload expert_fc1 mlp &&
        [ "$(grep -c 'no effect' "$work/out")" = 1 ] || return 1
    # shellcheck disable=SC2086
    prints '^--offload-modules mlp has no effect: no layer has an MLP without experts$' --num-experts 2 \
        --disable-bias-linear --swiglu $offload mlp moe_act && [ "$(grep -c 'no effect' "$work/out")" = 1 ] || return 1
    # shellcheck disable=SC2086
    prints '^--offload-modules other than attn_norm has no effect: full recomputation keeps the input of a unit' \
        --recompute-granularity full $offload attn_norm,mlp && [ "$(grep -c 'no effect' "$work/out")" = 1 ] || return 1
    # shellcheck disable=SC2086
    prints '^--offload-modules core_attn has no effect: no layer has attention$' --hybrid-override-pattern MM \
        --mamba-head-dim 8 $offload core_attn mlp &&
        says '^--offload-modules mlp has no effect: no layer has an MLP without experts$' "$work/out" || return 1
    # shellcheck disable=SC2086
    prints '^  host memory ' --num-layers 3 $offload attn_norm mlp_norm && ! grep 'no effect' "$work/out"
}
check offloaded_modules_without_a_layer_say_so offloaded_modules_without_a_layer_say_so
check names_that_change_nothing_say_so prints \
    '^no effect here: --attention-softmax-in-fp32 (softmax is computed in fp32)$' \
    --attention-softmax-in-fp32 --softmax-type vanilla
# A script of Megatron runs where the names change nothing here; one line has them, each reason once.
names_without_meaning_say_so() {
    idle='--use-mcore-models --manual-gc --manual-gc-interval 10 --num-workers=4 --transformer-impl local
        --no-log-energy --no-ckpt-fully-parallel-save --disable-gloo-process-groups
        --wandb-project p'
    # shellcheck disable=SC2086
    prints '^no effect here: --use-mcore-models, --transformer-impl (there is one implementation of the model); ' \
        $idle --fp16 false &&
        says '; --manual-gc, --manual-gc-interval, --disable-gloo-process-groups (no PyTorch' "$work/out" &&
        says '; --wandb-project (reports go to no service: --metrics FILE' "$work/out" &&
        test "$(grep -c 'no effect' "$work/out")" = 1 || return 1
    # shellcheck disable=SC2086
    refused '--strict-options: no effect here: --use-mcore-models, --transformer-impl (there is one .*; leave' \
        "$train" $small $idle --strict-options || return 1
    # shellcheck disable=SC2086
    prints '^ *1/' --strict-options || return 1
    "$infer" --load tests/golden/hf/gpt2 --prompt-tokens 1,2 --print-tokens --max-new-tokens 2 --device cpu \
        --attention-softmax-in-fp32 --use-mcore-models >"$work/out" 2>"$work/err" &&
        ! grep 'no effect' "$work/out" &&
        says '^no effect here: --attention-softmax-in-fp32 (.*); --use-mcore-models (' "$work/err"
}
check names_without_meaning_say_so names_without_meaning_say_so
check a_plain_run_has_no_idle_option prints_nothing_idle
exit $failed
