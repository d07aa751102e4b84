#!/bin/sh
# Models that take turns: a generator, a reference and a teacher on layouts of their own compute what they do on the
# trained model's, and parts that rest between phases change no bit.
# Sections of megatron.c: §15a §15b
set -u
. tests/suite.sh
needs_mpi
export OMP_NUM_THREADS=1

common="--chat-template plain --seq-length 16 --hidden-dropout 0 --attention-dropout 0 --device cpu --log-interval 1
    --lr-decay-style constant --make-vocab-size-divisible-by 2"
shape="--num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --tokenizer-type ByteLevel"
experts="--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0"
rest="--param-offload --grad-offload --optimizer-offload"

# Two digits in either order; the ascending one is right.
write_data() {
    awk -v work="$work" 'BEGIN {
        for (i = 0; i < 200; i++) {
            a = i * 7 % 10; b = (int(i / 10) * 3 + i) % 10
            low = a < b ? a : b; high = a < b ? b : a
            if (low == high) continue
            shown = int(i / 3) % 2 ? b a : a b
            printf "{\"prompt\": \"%d%d>\", \"response\": \"%s\"}\n", a, b, shown > work "/sft.jsonl"
            printf "{\"prompt\": \"%d%d>\", \"answer\": \"%d%d\"}\n", a, b, low, high > work "/rl.jsonl"
            printf "{\"prompt\": \"%d%d>\", \"chosen\": \"%d%d\", \"rejected\": \"%d%d\"}\n", a, b, low, high, high,
                low > work "/dpo.jsonl"
        }
    }'
}

learn_form() {
    # shellcheck disable=SC2086
    "$train" --sft --data-path "$work/sft.jsonl" $shape $common --variable-seq-lengths --micro-batch-size 32 \
        --train-iters 150 --lr 5e-3 --eval-iters 0 --save "$work/dense" >"$work/out" 2>"$work/err" &&
        "$train" --sft --data-path "$work/sft.jsonl" $shape $experts $common --variable-seq-lengths \
            --micro-batch-size 32 --train-iters 150 --lr 5e-3 --eval-iters 0 --save "$work/experts" >"$work/out" \
            2>"$work/err"
}

# run RANKS METRICS ARGUMENTS...
run() {
    ranks=$1 metrics=$work/$2
    shift 2
    # shellcheck disable=SC2086
    on_ranks "$ranks" "$train" $common --metrics "$metrics" --overwrite "$@"
}

# iterate RANKS METRICS MODEL ARGUMENTS...: reinforcement learning of a critic too.
iterate() {
    ranks=$1 metrics=$2 base=$3
    shift 3
    run "$ranks" "$metrics" --stage rl --load "$work/$base" --finetune --data-path "$work/rl.jsonl" --eval-iters 0 \
        --max-new-tokens 4 --micro-batch-size 4 --reward number --train-iters 3 --lr 1e-3 --ppo-epochs 2 \
        --rollout-batch-size 6 --num-return-sequences 4 --global-batch-size 16 --kl-loss-coef 0.01 "$@"
}

distill() {
    ranks=$1 metrics=$2
    shift 2
    # shellcheck disable=SC2086
    run "$ranks" "$metrics" --stage kd --teacher-load "$work/dense" --data-path "$work/sft.jsonl" --split 90,10,0 \
        $shape --num-layers 4 --hidden-size 16 --ffn-hidden-size 48 --lr 5e-3 --eval-iters 1 --train-iters 3 \
        --micro-batch-size 2 --global-batch-size 8 --vocab-size 257 "$@"
}

prefer() {
    ranks=$1 metrics=$2
    shift 2
    run "$ranks" "$metrics" --stage dpo --load "$work/dense" --finetune --data-path "$work/dpo.jsonl" \
        --split 90,10,0 --variable-seq-lengths --micro-batch-size 4 --global-batch-size 16 \
        --train-iters 3 --lr 1e-3 --eval-iters 1 \
        "$@"
}

# same A B TOLERANCE KEY...: two runs have the same numbers.
same() {
    first=$work/$1 second=$work/$2 bound=$3
    shift 3
    same_series "$first" "$second" "$bound" 1 "$@"
}

# as_one METRICS: the same rollouts and steps as of one rank; generation and training agree.
as_one() {
    same one "$1" 1e-5 reward response_tokens lm_loss ref_kl grad_norm &&
        series generation_gap "$work/$1" | awk '$1 > 1e-4 { print "gap " $1; exit 1 }'
}

a_generator_and_a_reference_have_layouts_of_their_own() {
    iterate 1 one dense --adv-estimator gae && iterate 4 apart dense --adv-estimator gae \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer \
        --rollout-tensor-model-parallel-size 1 --ref-tensor-model-parallel-size 1 &&
        as_one apart && same one apart 1e-5 value_loss || return 1
    # The weights that wrote the responses changed.
    series reward "$work/one" | sort -u | awk 'END { exit NR < 2 }' || return 1
    says '^generator: a model of its own on tensor 1 x pipeline 1 x data 4 ranks$' "$work/out" &&
        says '^reference: a model of its own on tensor 1 x pipeline 2 x data 2 ranks$' "$work/out" &&
        [ "$(grep -c '^memory plan' "$work/out")" = 3 ] && [ "$(grep -c '^  KV cache' "$work/out")" = 1 ] || return 1
    # shellcheck disable=SC2086
    iterate 4 rest dense --adv-estimator gae --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
        --use-distributed-optimizer --rollout-tensor-model-parallel-size 1 --ref-tensor-model-parallel-size 1 $rest &&
        same apart rest 0 reward lm_loss value_loss grad_norm generation_gap &&
        says '^actor: optimizer state, .*: on the host while other models work$' "$work/out" &&
        says '^actor: gradients, .*: not kept while other models work$' "$work/out" &&
        says '^generator: weights, .*: on the host' "$work/out" &&
        says '^generator: KV cache, .*: not kept' "$work/out" && says '^critic: optimizer state' "$work/out" || return 1
    # shellcheck disable=SC2086
    iterate 1 alone dense --adv-estimator gae $rest && same one alone 0 reward lm_loss value_loss generation_gap &&
        says '^actor: KV cache, .*: not kept' "$work/out"
}

# A reward model of another family, which is the critic's start too.
learn_rewards() {
    # shellcheck disable=SC2086
    "$train" --stage rm --data-path "$work/dpo.jsonl" --num-layers 3 --hidden-size 24 --num-attention-heads 6 \
        --tokenizer-type ByteLevel $common --variable-seq-lengths --micro-batch-size 32 --train-iters 20 --lr 1e-2 \
        --eval-iters 0 --save "$work/gpt2" "$@" >"$work/out" 2>"$work/err"
}

a_critic_and_a_reward_model_have_layouts_of_their_own() {
    learn_rewards && says GPT2ForSequenceClassification "$work/gpt2/config.json" || return 1
    set -- --adv-estimator gae --value-clip 0.5 --critic-lr 2e-3
    iterate 1 one dense "$@" && iterate 4 apart dense "$@" --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 --critic-pipeline-model-parallel-size 1 && as_one apart &&
        same one apart 1e-5 value_loss value_target &&
        says '^critic: a model of its own on tensor 2 x pipeline 1 x data 2 ranks$' "$work/out" || return 1
    # mini-batches of 15 sequences in micro-batches of 3 on four data-parallel ranks
    iterate 4 apart dense "$@" --tensor-model-parallel-size 4 --critic-tensor-model-parallel-size 1 \
        --micro-batch-size 3 --global-batch-size 15 && iterate 1 one dense "$@" --micro-batch-size 3 \
        --global-batch-size 15 && as_one apart && same one apart 1e-5 value_loss value_target || return 1
    # of another shape
    set -- "$@" --critic-load "$work/gpt2" --reward model --reward-load "$work/gpt2"
    iterate 1 one dense "$@" || return 1
    series reward "$work/one" | sort -u | awk 'END { exit NR < 3 }' || return 1
    # shellcheck disable=SC2086
    iterate 4 apart dense "$@" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
        --data-parallel-sharding-strategy optim_grads_params --critic-pipeline-model-parallel-size 1 \
        --reward-tensor-model-parallel-size 1 --reward-pipeline-model-parallel-size 1 $rest && as_one apart &&
        same one apart 1e-5 value_loss value_target &&
        says '^reward model: a model of its own on tensor 1 x pipeline 1 x data 4 ranks$' "$work/out" &&
        says '^critic: optimizer state, .*: on the host while other models work$' "$work/out" || return 1
    iterate 4 apart dense "$@" --context-parallel-size 2 --use-distributed-optimizer \
        --reward-pipeline-model-parallel-size 3 && return 1
    says '^error: --reward-load .*: the number of ranks 4 must be a multiple of' "$work/err" || return 1
    iterate 2 apart dense "$@" --pipeline-model-parallel-size 2 && return 1
    says '^error: --critic-load .*/gpt2: --num-layers (config.json), 3, must .* of its own by --critic-\*-model-par' \
        "$work/err" || return 1
    iterate 4 apart dense "$@" --context-parallel-size 2 --use-distributed-optimizer \
        --reward-tensor-model-parallel-size 2 && as_one apart && same one apart 1e-5 value_loss value_target
}

# resume RANKS METRICS FOLDER ARGUMENTS...: without --critic-load.
resume() {
    ranks=$1 metrics=$work/$2 folder=$3
    shift 3
    rm -f "$metrics"
    # shellcheck disable=SC2086
    on_ranks "$ranks" "$train" $common --stage rl --load "$folder" --ref-load "$work/dense" --eval-iters 0 \
        --data-path "$work/rl.jsonl" --max-new-tokens 4 --micro-batch-size 4 --train-iters 3 --lr 1e-3 --ppo-epochs 2 \
        --rollout-batch-size 6 --num-return-sequences 4 --global-batch-size 16 --kl-loss-coef 0.01 \
        --adv-estimator gae --reward model --reward-load "$work/gpt2" --metrics "$metrics" "$@"
}

# A checkpoint of the actor names the critic beside it, whatever that one's shape and layout; so does the run's folder.
a_critic_of_another_shape_resumes() {
    set -- --tensor-model-parallel-size 2 --critic-tensor-model-parallel-size 1 --use-distributed-optimizer
    iterate 2 whole dense "$@" --adv-estimator gae --reward model --reward-load "$work/gpt2" \
        --critic-load "$work/gpt2" --save "$work/pair" --save-interval 1 || return 1
    tail -n 1 "$work/whole" >"$work/third"
    resume 2 last "$work/pair/iter_0000002" "$@" && same third last 0 reward lm_loss value_loss grad_norm &&
        resume 1 last "$work/pair/iter_0000002" && same third last 1e-5 reward lm_loss value_loss grad_norm &&
        resume 1 last "$work/pair" --train-iters 4 && [ "$(series value_loss "$work/last" | wc -l)" = 1 ] || return 1
    mv "$work/pair/critic/iter_0000002" "$work/pair/critic/gone"
    resume 1 last "$work/pair/iter_0000002" && return 1
    says '^error: .*/pair/critic/iter_0000002: the critic .* is not there; name a critic by --critic-load' "$work/err"
}

a_generator_and_a_critic_have_experts_of_their_own() {
    iterate 1 one experts || return 1
    # shellcheck disable=SC2086
    iterate 4 dense_experts experts --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 \
        --use-distributed-optimizer --rollout-tensor-model-parallel-size 1 $rest && as_one dense_experts &&
        iterate 4 spread experts --expert-model-parallel-size 4 --rollout-tensor-model-parallel-size 2 \
            --rollout-expert-model-parallel-size 2 --moe-token-dispatcher-type flex && as_one spread &&
        says 'tensor 2 x pipeline 1 x data 2 ranks, experts on 2$' "$work/out" || return 1
    iterate 1 one experts --adv-estimator gae && iterate 4 critics experts --adv-estimator gae \
        --pipeline-model-parallel-size 2 --critic-tensor-model-parallel-size 2 \
        --critic-pipeline-model-parallel-size 1 --critic-expert-model-parallel-size 2 && as_one critics &&
        same one critics 1e-5 value_loss &&
        says '^critic: .* tensor 2 x pipeline 1 x data 2 ranks, experts on 2$' "$work/out" || return 1
    # a dense critic beside them
    set -- --adv-estimator gae --critic-load "$work/gpt2" --moe-layer-recompute
    iterate 1 one experts "$@" && iterate 2 critics experts "$@" --expert-model-parallel-size 2 && as_one critics &&
        same one critics 1e-5 value_loss
}

# The base goes to the generator once, the adapters in each iteration.
adapters_go_to_the_generator() {
    set -- --lora-rank 4 --lora-alpha 32 --lora-target all-linear --lr 1e-2
    iterate 1 one dense "$@" && iterate 4 lora dense "$@" --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 --rollout-tensor-model-parallel-size 1 && as_one lora
}

# refers NAME STAGE RANKS ARGUMENTS...: the reference of adapters, which is their base, costs no model, and has the bits
# of a second model.
refers() {
    label=$1 stage=$2 ranks=$3
    shift 3
    set -- --lora-rank 4 --lora-alpha 32 --lora-target all-linear --lr 1e-2 "$@"
    [ "$stage" = prefer ] || set -- dense "$@"
    "$stage" "$ranks" "$label" "$@" && says '^reference: the .* with its adapters switched off$' "$work/out" &&
        ! grep -q '^reference: a model of its own' "$work/out" &&
        "$stage" "$ranks" "$label.second" "$@" --ref-load "$work/copy" &&
        awk '/^  weights/ { weights = $2 } /^reference: a model of its own, .* MiB$/ { second = $(NF - 1) }
            END { exit !(second > weights) }' "$work/out" || return 1
    if [ "$stage" = prefer ]; then
        same "$label" "$label.second" 0 lm_loss grad_norm accuracy chosen_reward rejected_reward validation_loss ||
            return 1
        series lm_loss "$work/$label" | tail -n 1 | grep -v '^0\.693' >"$work/moved"
    else
        same "$label" "$label.second" 0 lm_loss grad_norm ref_kl reward || return 1
        series ref_kl "$work/$label" | tail -n 1 | grep -v '^0$' >"$work/moved"
    fi && [ -s "$work/moved" ]
}

adapters_are_switched_off_for_the_reference() {
    rm -rf "$work/copy" && cp -R "$work/dense" "$work/copy" || return 1
    refers base prefer 1 --lora-dropout 0.1 && refers base.4 prefer 4 --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 || return 1
    refers base.rl iterate 1 && refers base.rl.4 iterate 4 --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 --adv-estimator gae
}

a_teacher_has_a_layout_of_its_own() {
    for k in 0 20; do
        distill 1 teacher --logits-topk $k &&
            distill 4 apart --logits-topk $k --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
                --teacher-tensor-model-parallel-size 1 --teacher-pipeline-model-parallel-size 1 &&
            same teacher apart 1e-6 lm_loss divergence grad_norm || return 1
    done
    # shellcheck disable=SC2086
    distill 4 apart --logits-topk 20 --context-parallel-size 4 --cp-comm-type a2a+p2p \
        --hierarchical-context-parallel-sizes 2 2 --teacher-tensor-model-parallel-size 2 $rest &&
        same teacher apart 1e-6 lm_loss divergence grad_norm &&
        says '^teacher: a model of its own on tensor 2 x pipeline 1 x data 2 ranks$' "$work/out" || return 1
    # a layout that the student cannot have with this teacher of two layers
    distill 4 apart --logits-topk 20 --pipeline-model-parallel-size 4 --teacher-pipeline-model-parallel-size 2 &&
        same teacher apart 1e-6 lm_loss divergence grad_norm
}

preferences_have_a_reference_elsewhere() {
    # shellcheck disable=SC2086
    prefer 1 dpo && prefer 1 rest $rest && same dpo rest 0 lm_loss grad_norm &&
        prefer 4 apart --context-parallel-size 2 --ref-tensor-model-parallel-size 2 \
            --ref-pipeline-model-parallel-size 2 && same dpo apart 1e-6 lm_loss grad_norm
}

# The critic, which rests, is saved and found again.
a_run_with_rest_resumes() {
    set -- --adv-estimator gae --rollout-tensor-model-parallel-size 2 $rest
    iterate 2 whole dense "$@" && iterate 2 parts dense "$@" --train-iters 2 --save "$work/run" || return 1
    # shellcheck disable=SC2046,SC2086
    $(mpirun_here) -np 2 "$train" $common --stage rl --load "$work/run" --save "$work/run" --ref-load "$work/dense" \
        --data-path "$work/rl.jsonl" --eval-iters 0 --max-new-tokens 4 --micro-batch-size 4 --reward number \
        --train-iters 3 --lr 1e-3 --ppo-epochs 2 --rollout-batch-size 6 --num-return-sequences 4 \
        --global-batch-size 16 --kl-loss-coef 0.01 --metrics "$work/last" "$@" >"$work/out" 2>"$work/err" || return 1
    series value_loss "$work/whole" | tail -n 1 >"$work/a" && series value_loss "$work/last" >"$work/b" &&
        cmp "$work/a" "$work/b"
}

others_are_refused() {
    iterate 2 none dense --rollout-tensor-model-parallel-size 3 && return 1
    says '^error: --rollout-tensor-model-parallel-size: the number of ranks 2 must be a multiple of' "$work/err" ||
        return 1
    distill 2 none --context-parallel-size 2 --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 16 \
        --teacher-tensor-model-parallel-size 2 && return 1
    says '^error: --dynamic-context-parallel and a teacher on another layout exclude each other' "$work/err" || return 1
    learn_rewards --vocab-size 300 --train-iters 1 --save "$work/wide" || return 1
    set -- "$train" --stage rl --load "$work/dense" --finetune --data-path "$work/rl.jsonl" --max-new-tokens 4 \
        --train-iters 1 --lr 1e-3 --seq-length 16 --chat-template plain --device cpu
    refused '--critic-load .*/wide: has a vocabulary of 300 tokens' "$@" --adv-estimator gae --critic-load \
        "$work/wide" || return 1
    refused 'critic-expert-model-parallel-size 2: the critic has no experts' "$@" --adv-estimator gae \
        --critic-expert-model-parallel-size 2 || return 1
    refused 'reward-expert-model-parallel-size 2: the reward model has no experts' "$@" --reward model --reward-load \
        "$work/gpt2" --reward-expert-model-parallel-size 2 || return 1
    refused 'critic-tensor-model-parallel-size needs --adv-estimator gae' "$@" --critic-tensor-model-parallel-size 1 ||
        return 1
    refused 'reward-tensor-model-parallel-size needs --reward model' "$@" --reward-tensor-model-parallel-size 1 ||
        return 1
    refused 'rollout-expert-model-parallel-size needs --num-experts' "$train" --stage rl --load "$work/dense" \
        --data-path "$work/rl.jsonl" --rollout-tensor-model-parallel-size 1 --rollout-expert-model-parallel-size 2 &&
        refused 'there is no teacher of its own here' "$@" --teacher-tensor-model-parallel-size 1 &&
        refused 'param-offload needs --stage dpo|rl|kd' "$train" --load "$work/dense" --param-offload --mock-data
}

write_data
check learn_form learn_form
check a_generator_and_a_reference_have_layouts_of_their_own a_generator_and_a_reference_have_layouts_of_their_own
check a_critic_and_a_reward_model_have_layouts_of_their_own a_critic_and_a_reward_model_have_layouts_of_their_own
check a_critic_of_another_shape_resumes a_critic_of_another_shape_resumes
check a_generator_and_a_critic_have_experts_of_their_own a_generator_and_a_critic_have_experts_of_their_own
check adapters_go_to_the_generator adapters_go_to_the_generator
check adapters_are_switched_off_for_the_reference adapters_are_switched_off_for_the_reference
check a_teacher_has_a_layout_of_its_own a_teacher_has_a_layout_of_its_own
check preferences_have_a_reference_elsewhere preferences_have_a_reference_elsewhere
check a_run_with_rest_resumes a_run_with_rest_resumes
check others_are_refused others_are_refused
exit $failed
