#!/bin/sh
# Reinforcement learning on prompts with pictures: layouts do what one rank does, the generator's log-probabilities are
# training's, a stopped run goes on equally, the other roles read the pictures, and what cannot be is one line.
# Sections of megatron.c: §16 §21
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
for name in qwen3_vl qwen2_5_vl qwen3_5_vl; do
    mkdir "$work/$name"
    cp tests/golden/vision/$name/config.json tests/golden/vision/$name/model.safetensors "$work/$name"
    cp tests/golden/vision/sft/tokenizer*.json tests/golden/vision/sft/chat_template.jinja \
        tests/golden/vision/sft/preprocessor_config.json "$work/$name"
done
cp tests/golden/images/*.png tests/golden/images/*.jpg "$work"
tr -d '\n' >"$work/rl.text" <<'END'
{"prompt": "<image>What?", "images": ["square.png"], "answer": "A"}@
{"prompt": [{"role": "user", "content": [{"type": "image", "image": "wide.png"}, {"type": "image"},
 {"type": "text", "text": "Both?"}]}], "images": ["gray.png"]}@
{"messages": [{"role": "user", "content": "No picture."}]}@
{"messages": [{"role": "user", "content": "<image>What?"}], "images": "photo.jpg"}@
END
tr '@' '\n' <"$work/rl.text" >"$work/rl.jsonl"
settings='--stage rl --seq-length 96 --max-new-tokens 12 --rollout-batch-size 4 --num-return-sequences 4 --train-iters 2
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --adam-eps 1e-4 --lr-decay-style constant --log-interval 1
    --device cpu'
reward='--reward regex --reward-pattern [A-Z]'

# learn RANKS METRICS MODEL ARGUMENTS...
learn() {
    number=$1 metrics=$2 loaded=$3
    shift 3
    rm -f "$metrics"
    # shellcheck disable=SC2086
    on_ranks "$number" "$train" $settings --data-path "$work/rl.jsonl" --load "$work/$loaded" --finetune \
        --metrics "$metrics" "$@"
}

# False, with a message, where this build or machine cannot read the prompts.
reads() {
    # shellcheck disable=SC2086
    learn 1 "$work/one" qwen3_vl $reward && return
    grep 'built without libpng\|built without libjpeg\|needs python3-jinja2' "$work/err" && return 1
    cat "$work/err"
}

every_layout_does_the_same() {
    [ -n "${HAVE_MPI:-}" ] || return 0
    for run in 'qwen3_vl --kl-loss-coef 0.01' 'qwen2_5_vl --adv-estimator gae --kl-in-reward --kl-coef 0.01' \
        'qwen3_5_vl --adv-estimator rloo'; do
        # shellcheck disable=SC2086
        learn 1 "$work/one" $run $reward || return 1
        while read -r ranks layout; do
            # shellcheck disable=SC2086
            learn "$ranks" "$work/other" $run $reward $layout || return 1
            for key in reward response_tokens lm_loss grad_norm; do
                same_series "$work/one" "$work/other" 1e-4 1 $key || {
                    echo "$run: $ranks ranks, $layout"
                    return 1
                }
            done
            series generation_gap "$work/other" | awk '$1 > 1e-4 { exit 1 } END { exit NR != 2 }' || return 1
        done <<END
2 --sequence-packing
2 --tensor-model-parallel-size 2 --sequence-parallel --max-image-tokens 1
2 --pipeline-model-parallel-size 2
2 --rollout-tensor-model-parallel-size 2 --inference-max-requests 2
4 --data-parallel-sharding-strategy optim_grads_params
2 --context-parallel-size 2 --max-image-tokens 1
END
    done
    # shellcheck disable=SC2086
    set -- qwen2_5_vl --adv-estimator gae --kl-in-reward --kl-coef 0.01 $reward
    learn 1 "$work/one" "$@" && learn 2 "$work/other" "$@" --tensor-model-parallel-size 2 \
        --ref-tensor-model-parallel-size 1 --critic-tensor-model-parallel-size 1 || return 1
    for key in reward lm_loss value_loss grad_norm; do
        same_series "$work/one" "$work/other" 1e-4 1 $key || return 1
    done
}

# The difference is 0, not small.
rollouts_are_bitwise_those_of_training() {
    for loaded in qwen3_vl qwen2_5_vl; do
        for words in '' --sequence-packing; do
            # shellcheck disable=SC2086
            learn 1 "$work/one" $loaded --bitwise-rollouts $reward $words || return 1
            series generation_gap "$work/one" | awk '$1 != 0 { exit 1 } END { exit NR != 2 }' || return 1
        done
    done
}

# Actor and critic, batches that wait, and frozen parts.
a_stopped_run_goes_on_equally() {
    while read -r loaded words; do
        # shellcheck disable=SC2086
        set -- $loaded $reward $words --train-iters 3
        rm -rf "$work/saved"
        learn 1 "$work/whole" "$@" && learn 1 "$work/parts" "$@" --save "$work/saved" --exit-interval 2 || return 1
        shift
        more=$(echo "$words" | grep -q kl && echo --ref-load "$work/$loaded")
        # shellcheck disable=SC2086
        "$train" $settings --data-path "$work/rl.jsonl" --load "$work/saved" --save "$work/saved" --metrics \
            "$work/parts" $more "$@" >"$work/out" 2>"$work/err" || return 1
        for key in reward lm_loss grad_norm; do
            [ "$(series $key "$work/whole" | wc -l)" = 3 ] &&
                [ "$(series $key "$work/whole")" = "$(series $key "$work/parts")" ] || {
                echo "$loaded $words: $key"
                return 1
            }
        done
    done <<'END'
qwen3_vl --adv-estimator gae --kl-in-reward --kl-coef 0.01
qwen2_5_vl --rollout-lag 1 --sequence-packing --freeze-vision
qwen3_vl --partial-rollout-max-split 3
END
}

# A reward model of preferences with pictures scores prompts with pictures, and becomes a critic.
reward_models_read_pictures() {
    sed 's|"prompt"|"rejected": "Who?", "chosen": "A.", "prompt"|; /messages/d' "$work/rl.jsonl" >"$work/pairs.jsonl"
    # shellcheck disable=SC2086
    "$train" --stage rm --value-head --data-path "$work/pairs.jsonl" --split 1 --load "$work/qwen3_vl" --finetune \
        --seq-length 96 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-2 --eval-iters 0 \
        --device cpu --save "$work/rm" >"$work/out" 2>"$work/err" || return 1
    set -- qwen3_vl --reward model --reward-load "$work/rm" --adv-estimator gae --critic-load "$work/rm"
    learn 1 "$work/one" "$@" || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    learn 2 "$work/other" "$@" --reward-tensor-model-parallel-size 2 || return 1
    for key in reward lm_loss value_loss grad_norm; do
        same_series "$work/one" "$work/other" 1e-4 1 $key || return 1
    done
}

what_cannot_be_is_refused() {
    # a reward model of the same tokens without a tower
    echo '{"prompt": "What?", "chosen": "A.", "rejected": "Who?"}' >"$work/text.jsonl"
    "$train" --stage rm --value-head --data-path "$work/text.jsonl" --split 1 --load "$work/qwen2_5_vl" --finetune \
        --language-model-only --seq-length 96 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 \
        --eval-iters 0 --device cpu --save "$work/blind" >"$work/out" 2>"$work/err" || return 1
    cp -r "$work/qwen2_5_vl" "$work/other_means"
    sed 's/{/{"image_mean": [0.1, 0.2, 0.3], /' "$work/qwen2_5_vl/preprocessor_config.json" \
        >"$work/other_means/preprocessor_config.json"
    sed 's/square/absent/' "$work/rl.jsonl" >"$work/absent.jsonl"
    while IFS='|' read -r words pattern; do
        words=$(echo "$words" | sed "s|WORK|$work|g")
        # shellcheck disable=SC2086
        refused "$pattern" "$train" $settings --data-path "$work/rl.jsonl" --load "$work/qwen2_5_vl" --finetune \
            $words || return 1
    done <<'END'
--reward model --reward-load WORK/blind|the reward model has no vision tower, and the data have pictures
--reward regex --reward-pattern G --ref-load WORK/other_means --kl-loss-coef 0.1|the reference takes other patches
--reward regex --reward-pattern G --data-path WORK/absent.jsonl|absent.jsonl:1: .*absent.png: cannot be read
--reward env --env-command cat|rl.jsonl:1: has pictures, which conversations with --env-command do not have so far
--reward regex --reward-pattern G --max-new-tokens 70|has no prompts of at most 26 tokens
END
    # shellcheck disable=SC2086
    ! learn 1 "$work/one" qwen2_5_vl $reward --language-model-only &&
        says '^error: .*rl.jsonl:1: has "images", which only a model with a vision tower reads' "$work/err"
}

reads || exit 0
check every_layout_does_the_same every_layout_does_the_same
check rollouts_are_bitwise_those_of_training rollouts_are_bitwise_those_of_training
check a_stopped_run_goes_on_equally a_stopped_run_goes_on_equally
check reward_models_read_pictures reward_models_read_pictures
check what_cannot_be_is_refused what_cannot_be_is_refused
exit $failed
