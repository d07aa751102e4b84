#!/bin/sh
# Reinforcement learning on layouts of ranks: each does the same as one rank.
# Sections of megatron.c: §7b §16
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
. tests/rl_setup.sh

# The epsilon keeps AdamW from dividing gradients that are rounding errors by their own size.
every_layout_does_the_same() {
    for method in "--adv-estimator grpo --dynamic-sampling --rollout-lag 1" \
        "--partial-rollout-max-split 4 --max-new-tokens 8 --temperature 1.8 --rollout-lag 1 --reward regex
            --reward-pattern [0-4]" \
        "--adv-estimator gae --whiten-advantages --kl-in-reward --kl-coef 0.01 --entropy-coeff 0.01" \
        "--adv-estimator rloo --pg-variant gspo --kl-loss-coef 0.01 --temperature 0.7"; do
        set -- --rollout-batch-size 6 --num-return-sequences 4 --train-iters 3 --lr 1e-3 --ppo-epochs 2 \
            --global-batch-size 8 --adam-eps 1e-4
        # shellcheck disable=SC2086
        learn 1 "$work/one" "$@" $method || return 1
        while read -r ranks layout; do
            # shellcheck disable=SC2086
            learn "$ranks" "$work/other" "$@" $method $layout || return 1
            for key in reward response_tokens entropy lm_loss grad_norm; do
                same_series "$work/one" "$work/other" 1e-4 1 $key || {
                    echo "$method: $ranks ranks, $layout"
                    return 1
                }
            done
            series generation_gap "$work/other" | awk '$1 > 1e-4 { exit 1 }' || return 1
        done <<EOF
2
2 --data-parallel-sharding-strategy optim_grads_params
4 --tensor-model-parallel-size 2 --use-distributed-optimizer
2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L
2 --context-parallel-size 2
4 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
EOF
    done
}

# Most with an estimator of their own. kl_cov selects all tokens here, and clip_cov draws from all: where covariances
# are nearly equal, a layout's rounding would choose. It does choose the sign of kl_cov's |log r| in a first step, whose
# policy is the old one, so the weight of that is small.
every_loss_does_the_same_on_layouts() {
    while read -r method; do
        set -- --rollout-batch-size 6 --num-return-sequences 4 --train-iters 2 --lr 1e-3 --ppo-epochs 2 \
            --global-batch-size 8 --adam-eps 1e-4 --rollout-is sequence --rollout-is-batch-normalize
        # shellcheck disable=SC2086
        learn 1 "$work/one" "$@" --pg-variant $method || return 1
        for layout in '' '--context-parallel-size 2'; do
            # shellcheck disable=SC2086
            learn 2 "$work/other" "$@" --pg-variant $method $layout || return 1
            for key in reward response_tokens lm_loss grad_norm clip_fraction; do
                same_series "$work/one" "$work/other" 1e-4 1 $key || {
                    echo "$method: $layout"
                    return 1
                }
            done
        done
    done <<EOF
sapo --adv-estimator reinforce_plus_plus_baseline
sapo_detached
dppo_tv --adv-estimator opo --clip-ratio 0.01
dppo_kl --adv-estimator gpg --clip-ratio 0.001 --clip-ratio-c 1.01
dro --dro-beta 0.1 --adv-estimator grpo_passk
kimi15
kl_cov --kl-cov-ratio 1 --ppo-kl-coef 1e-4
clip_cov --clip-cov-ratio 0.2 --clip-cov-lb -100 --clip-cov-ub 100
tis --tis-upper-bound 1.1
topr --topr-positive-weight 2
opmd
sppo --clip-ratio 0.1
gpg --adv-estimator remax
gpg --adv-estimator gdpo --reward number regex --reward-pattern ^[0-4] --reward-weights 1 0.5
gpg --adv-estimator reinforce --reward number regex --reward-pattern ^[0-4] --norm-mean-type group --norm-std-type batch
gpg --adv-estimator gigpo --step-reward-weight 0.5
gpg --adv-estimator optimal_token_baseline
EOF
}

# Teachers have layouts of their own, and a lagging one is renewed over layouts. forward_kl_topk has no gradient where
# its sum is below 0, so that its teachers differ from the student: rounding decides about the sign of 0.
teachers_have_layouts() {
    awk '{ sub(/^{/, "{\"data_source\": \"" (NR % 3 ? "a" : "b") "\", ") } { print }' "$work/rl.jsonl" \
        >"$work/sources.jsonl"
    learn 1 "$work/teacher" --rollout-batch-size 16 --num-return-sequences 8 --train-iters 20 --lr 2e-3 \
        --save "$work/sorter" || return 1
    topk='--distillation-loss-mode forward_kl_topk'
    for method in "--distillation-in loss --teachers a=$work/sorter b=$work/base" \
        "--distillation-in policy-gradient --self-distillation lagging --teacher-interval 2" \
        "--distillation-in loss $topk --distillation-topk 6 --teacher-load $work/sorter" \
        "--distillation-in loss $topk --self-distillation initial --ref-load $work/sorter" \
        "--distillation-in advantages --self-distillation initial --distillation-loss-coef 0.1"; do
        # a teacher far from the student moves it so far that rounding grows a hundredfold in an iteration
        case $method in *lagging*) iterations=3 ;; *) iterations=2 ;; esac
        set -- --rollout-batch-size 6 --num-return-sequences 4 --train-iters $iterations --lr 1e-3 --ppo-epochs 2 \
            --global-batch-size 8 --adam-eps 1e-4 --data-path "$work/sources.jsonl"
        # shellcheck disable=SC2086
        learn 1 "$work/one" "$@" $method || return 1
        while read -r ranks layout; do
            case $method in *initial*) layout=$(echo "$layout" | sed 's/teacher-/ref-/g') ;; esac
            # shellcheck disable=SC2086
            learn "$ranks" "$work/other" "$@" $method $layout || return 1
            for key in reward lm_loss grad_norm distillation; do
                same_series "$work/one" "$work/other" 1e-4 1 $key || {
                    echo "$method: $ranks ranks, $layout"
                    return 1
                }
            done
        done <<EOF
2 --data-parallel-sharding-strategy optim_grads_params
4 --tensor-model-parallel-size 2 --teacher-tensor-model-parallel-size 1 --teacher-pipeline-model-parallel-size 2
2 --context-parallel-size 2 --teacher-tensor-model-parallel-size 2
4 --pipeline-model-parallel-size 2 --param-offload --teacher-pipeline-model-parallel-size 1
EOF
    done
}

# Modules of multi-token prediction train on the responses, beside the policy. Where the weight of their loss is almost
# nothing, the policy trains as without them.
modules_of_multi_token_prediction_train() {
    # shellcheck disable=SC2086
    "$train" --stage sft --data-path "$work/sft.jsonl" --tokenizer-type ByteLevel $model $common --mtp-num-layers 1 \
        --variable-seq-lengths --micro-batch-size 64 --train-iters 250 --lr 5e-3 --save "$work/mtp" --log-interval 50 \
        >"$work/out" 2>"$work/err" || return 1
    set -- --load "$work/mtp" --rollout-batch-size 6 --num-return-sequences 4 --train-iters 3 --lr 1e-3 \
        --ppo-epochs 2 --global-batch-size 8 --adam-eps 1e-4 --entropy-coeff 0.01
    learn 1 "$work/one" "$@" && series mtp_1_loss "$work/one" | awk '$1 > 0 { n++ } END { exit n != 3 }' &&
        learn 1 "$work/none" "$@" --mtp-num-layers 0 && learn 1 "$work/tiny" "$@" --mtp-loss-scaling-factor 1e-9 ||
        return 1
    for key in reward grad_norm lm_loss; do same_series "$work/none" "$work/tiny" 1e-4 1 $key || return 1; done
    while read -r ranks layout; do
        # shellcheck disable=SC2086
        learn "$ranks" "$work/other" "$@" $layout || return 1
        for key in reward grad_norm lm_loss mtp_1_loss; do
            same_series "$work/one" "$work/other" 1e-4 1 $key || return 1
        done
    done <<EOF
2
4 --tensor-model-parallel-size 2 --rollout-tensor-model-parallel-size 1
2 --pipeline-model-parallel-size 2
2 --context-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params
EOF
    refused 'the loss of its modules is a mean over tokens' "$train" --stage rl --load "$work/mtp" --finetune \
        --lr 1e-3 --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 --train-iters 1 --loss-agg-mode \
        seq-mean-token-sum --chat-template plain
}

# Killed at random moments, a run that starts again ends with the same weights: with a teacher that lags, and batches
# that wait or responses in progress, which its checkpoints hold.
a_run_that_is_killed_goes_on_as_before() {
    ends_as_before --rollout-lag 2 && rm -rf "$work/killed" "$work/unharmed" &&
        ends_as_before --partial-rollout-max-split 3 --max-new-tokens 8 --temperature 1.8
}

# ends_as_before OPTIONS...
ends_as_before() {
    set -- "$train" --stage rl --load "$work/base" --finetune --data-path "$work/rl.jsonl" --seq-length 16 \
        --max-new-tokens 4 --micro-batch-size 4 --rollout-batch-size 4 --num-return-sequences 2 --lr 1e-3 \
        --train-iters 12 --distillation-in policy-gradient --self-distillation lagging --teacher-interval 4 \
        --adv-estimator gae --keep-checkpoints 3 --save-interval 1 "$@"
    # shellcheck disable=SC2086
    "$@" $common --save "$work/unharmed" >"$work/out" 2>"$work/err" || return 1
    starts=0
    until [ -d "$work/killed/iter_0000012" ]; do
        starts=$((starts + 1))
        [ $starts -lt 200 ] || return 1
        # shellcheck disable=SC2086
        "$@" $common --save "$work/killed" --auto-resume >"$work/out" 2>"$work/err" &
        job=$!
        before=$(find "$work/killed" -maxdepth 1 -name 'iter_*' 2>/dev/null | sort | tail -n 1)
        while kill -0 $job 2>/dev/null; do # after some more iterations, at any moment of the next one
            now=$(find "$work/killed" -maxdepth 1 -name 'iter_*' 2>/dev/null | sort | tail -n 1)
            [ "$now" = "$before" ] || break
        done
        sleep "0.$(od -An -N2 -tu2 /dev/urandom | awk '{ printf "%03d", $1 % 200 }')"
        kill -KILL $job 2>/dev/null
        wait $job
    done
    [ $starts -gt 1 ] || { echo "the run was not killed" && return 1; }
    for file in iter_0000012/model.safetensors iter_0000012/rollouts.bin critic/iter_0000012/model.safetensors \
        teacher/iter_0000012/model.safetensors; do
        cmp "$work/unharmed/$file" "$work/killed/$file" || return 1
    done
}

# The versions of weights are those of --rollout-lag, whichever ranks write: bit for bit on one layout, and a run may
# stop with ranks that write and go on without them, or the other way round.
ranks_that_write_change_nothing() {
    set -- --rollout-batch-size 6 --num-return-sequences 4 --ppo-epochs 2 --global-batch-size 8 --lr 1e-3 \
        --adam-eps 1e-4 --max-new-tokens 8 --temperature 1.8 --reward regex --reward-pattern '[0-4]' --bypass-mode
    for lag in 1 2; do
        learn 1 "$work/one" "$@" --rollout-lag $lag --train-iters 5 --bitwise-rollouts &&
            learn 2 "$work/two" "$@" --rollout-lag $lag --train-iters 5 --bitwise-rollouts --rollout-ranks 1 || return 1
        for key in reward lm_loss grad_norm ppo_kl response_tokens staleness; do
            same_series "$work/one" "$work/two" 0 1 $key || return 1
        done
    done
    series generation_seconds_overlapped "$work/two" | awk '$1 < 0 { exit 1 } END { exit NR != 5 }' || return 1
    learn 1 "$work/one" "$@" --rollout-lag 2 --train-iters 4 --stop 12 || return 1
    while read -r ranks layout; do
        # shellcheck disable=SC2086
        learn "$ranks" "$work/other" "$@" --rollout-lag 2 --train-iters 4 --stop 12 $layout || return 1
        for key in reward lm_loss grad_norm response_tokens; do
            same_series "$work/one" "$work/other" 1e-4 1 $key || {
                echo "$ranks ranks, $layout"
                return 1
            }
        done
    done <<EOF
3 --rollout-ranks 2
3 --rollout-ranks 1 --tensor-model-parallel-size 2
4 --rollout-ranks 2 --rollout-tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params
EOF
    learn 1 "$work/whole" "$@" --rollout-lag 1 --train-iters 5 --bitwise-rollouts || return 1
    for first in 1 2; do
        rm -rf "$work/apart"
        # shellcheck disable=SC2046
        learn $first "$work/parts" "$@" --rollout-lag 1 --train-iters 3 --bitwise-rollouts --save "$work/apart" \
            $([ $first = 1 ] || echo --rollout-ranks 1) || return 1
        # shellcheck disable=SC2046,SC2086
        on_ranks $((3 - first)) "$train" --stage rl --load "$work/apart" --data-path "$work/rl.jsonl" --seq-length 16 \
            --micro-batch-size 4 --log-interval 1 --metrics "$work/parts" $common "$@" --rollout-lag 1 \
            --train-iters 5 --bitwise-rollouts $([ $first = 2 ] || echo --rollout-ranks 1) || return 1
        for key in reward lm_loss grad_norm staleness; do
            same_series "$work/whole" "$work/parts" 0 1 $key || return 1
        done
    done
}

# Rewards that end lose no batch, and errors of either side end all ranks.
ranks_that_write_end_with_the_others() {
    set -- --rollout-batch-size 4 --num-return-sequences 2 --lr 1e-3 --reward command --train-iters 5 --bypass-mode \
        --rollout-lag 1 --bitwise-rollouts
    echo 'while read -r line; do [ $((seen += 1)) -le ${1:-1000} ] || exit 3; echo 0.$((${#line} * 7 % 10)); done' \
        >"$work/ends.sh"
    learn 1 "$work/whole" "$@" --reward-command "sh $work/ends.sh" || return 1
    rm -rf "$work/apart"
    learn 2 "$work/parts" "$@" --rollout-ranks 1 --save "$work/apart" --reward-command "sh $work/ends.sh 20" && return 1
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] && says '^saved iteration 2 to' "$work/out" || return 1
    # shellcheck disable=SC2086
    on_ranks 2 "$train" --stage rl --load "$work/apart" --data-path "$work/rl.jsonl" --seq-length 16 \
        --max-new-tokens 4 --micro-batch-size 4 --log-interval 1 --metrics "$work/parts" $common "$@" \
        --rollout-ranks 1 --reward-command "sh $work/ends.sh" || return 1
    for key in reward lm_loss grad_norm; do same_series "$work/whole" "$work/parts" 0 1 $key || return 1; done
    for wrong in '--rollout-ranks 2' '--rollout-ranks 1 --rollout-tensor-model-parallel-size 3' \
        '--rollout-ranks 1 --data-path missing'; do
        # shellcheck disable=SC2086
        learn 2 "$work/parts" "$@" --reward-command true $wrong && return 1
        [ "$(grep -c '^error: ' "$work/err")" = 1 ] || { echo "$wrong" && return 1; }
    done
    set -- "$train" --stage rl --load "$work/base" --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --chat-template plain --train-iters 1 --lr 1e-3 --rollout-ranks 1
    refused 'needs --rollout-lag' "$@" --bypass-mode && refused 'needs --bypass-mode' "$@" --rollout-lag 1 &&
        refused 'dynamic-sampling' "$@" --rollout-lag 1 --bypass-mode --dynamic-sampling &&
        refused 'leaves no rank that trains, of 1' "$@" --rollout-lag 1 --bypass-mode
}

# Drawn from one token, a response is the greedy one, whose reward is its baseline; in any layout of the generator.
remax_compares_with_a_greedy_response() {
    set -- --num-return-sequences 1 --train-iters 2 --lr 1e-3 --pg-variant gpg --reward number \
        --adv-estimator remax --global-batch-size 16 --rollout-batch-size 16
    learn 1 "$work/greedy" "$@" --top-k 1 &&
        series reward "$work/greedy" | awk '$1 > 0 && $1 < 1 { n++ } END { exit !n }' &&
        series advantage "$work/greedy" | awk '$1 != 0 { exit 1 } END { exit NR != 2 }' || return 1
    learn 1 "$work/one" "$@" && series advantage "$work/one" | awk '$1 != 0 { n++ } END { exit !n }' || return 1
    while read -r ranks layout; do
        # shellcheck disable=SC2086
        learn "$ranks" "$work/other" "$@" $layout || return 1
        for key in reward response_tokens advantage lm_loss grad_norm generation_tokens; do
            same_series "$work/one" "$work/other" 1e-4 1 $key || return 1
        done
    done <<EOF
2 --rollout-tensor-model-parallel-size 2
2 --tensor-model-parallel-size 2 --rollout-tensor-model-parallel-size 1
EOF
}

[ "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null || { echo "skipped: MPI is absent" && exit 0; }
write_data
check the_format_is_learned learn_format
check every_layout_does_the_same every_layout_does_the_same
check every_loss_does_the_same_on_layouts every_loss_does_the_same_on_layouts
check teachers_have_layouts teachers_have_layouts
check modules_of_multi_token_prediction_train modules_of_multi_token_prediction_train
check a_run_that_is_killed_goes_on_as_before a_run_that_is_killed_goes_on_as_before
check ranks_that_write_change_nothing ranks_that_write_change_nothing
check ranks_that_write_end_with_the_others ranks_that_write_end_with_the_others
check remax_compares_with_a_greedy_response remax_compares_with_a_greedy_response
exit $failed
