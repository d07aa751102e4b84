#!/bin/sh
# Reinforcement learning: it learns, and a resumed run goes on as if it had not stopped. Layouts: rl_layouts, rl_exact.
# Sections of megatron.c: §7b §16
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1

. tests/rl_setup.sh

mean() {
    awk '{ sum += $1 } END { print sum / NR }'
}

# gains METRICS: the mean reward of the last 15 iterations is above 0.8, and by 0.2 above that of the first three. One
# iteration has few responses, and its reward may be a tenth off.
gains() {
    first=$(series reward "$1" | head -n 3 | mean) last=$(series reward "$1" | tail -n 15 | mean)
    awk -v a="$first" -v b="$last" 'BEGIN { exit !(b > 0.8 && b > a + 0.2) }' || {
        echo "reward from $first to $last"
        return 1
    }
}

# phases_add_up METRICS RESPONSES SCORES TRAINED: tokens and seconds of the phases, in the metrics and in the table of
# $work/out, which leaves out the first iteration. An iteration writes RESPONSES responses. Models score its sequences
# SCORES times and train on them TRAINED times.
phases_add_up() {
    keys="response_tokens tokens_per_second iteration_ms"
    for phase in generation reward scoring training; do keys="$keys ${phase}_tokens ${phase}_seconds"; done
    for key in $keys; do series "$key" "$1" >"$work/series.$key"; done
    # shellcheck disable=SC2046,SC2086
    (cd "$work" && paste -d ' ' $(printf 'series.%s ' $keys)) >"$work/series"
    awk -v responses="$2" -v scores="$3" -v trained="$4" '
        function differs(a, b, tolerance) { return a < b * (1 - tolerance) || a > b * (1 + tolerance) }
        FILENAME != ARGV[1] {
            if ($1 == "phases") in_table = 1
            if (in_table && $1 in tokens) {
                rows++
                if ($2 != tokens[$1] || $3 > seconds[$1] + 0.001 || $3 < seconds[$1] - 0.001) bad = bad " " $1
                if (differs($2 / $3, $4, 0.01) && $3 > 0.1 || differs(100 * $3 / all, $5 + 0, 0.02) && $5 > 5)
                    bad = bad " rates of " $1
            }
            next
        }
        NF != 11 { bad = bad " fields" }
        {
            sequences = $2 * $3 / 1000
            if (differs($4, responses * $1, 1e-9) || $6 != $4) bad = bad " responses"
            if (differs($8, scores * sequences, 1e-9) || differs($10, trained * sequences, 1e-9)) bad = bad " sequences"
            if ($5 + $7 + $9 + $11 > $3 / 1000) bad = bad " seconds"
            if (NR == 1) next
            tokens["generation"] += $4; tokens["reward"] += $6; tokens["scoring"] += $8; tokens["training"] += $10
            seconds["generation"] += $5; seconds["reward"] += $7; seconds["scoring"] += $9; seconds["training"] += $11
            all += $3 / 1000
        }
        END {
            for (name in seconds) if (name != "reward" && seconds[name] <= 0) bad = bad " no time of " name
            if (rows != 4) bad = bad " table"
            if (bad) print "phases:" bad
            exit bad != ""
        }' "$work/series" "$work/out"
}

grpo_learns() {
    learn 1 "$work/grpo" --rollout-batch-size 16 --num-return-sequences 8 --train-iters 60 --lr 2e-3 \
        --reward number --save "$work/sorter" && gains "$work/grpo" && phases_add_up "$work/grpo" 128 1 1 &&
        series advantage "$work/grpo" | grep -q . &&
        series entropy "$work/grpo" | awk 'NR == 1 { first = $1 } END { exit !($1 < first / 2 && $1 > 0) }' &&
        ! grep -q 'ref_kl\|value_\|groups_dropped' "$work/grpo" # not measured
}

# distilled METRICS LEAST: the divergence from the teacher, LEAST or more at first, falls to less than half.
distilled() {
    first=$(series distillation "$1" | head -n 5 | mean) last=$(series distillation "$1" | tail -n 10 | mean)
    awk -v a="$first" -v b="$last" -v least="$2" 'BEGIN { exit !(a > least && b < a / 2) }' || {
        echo "divergence from $first to $last"
        return 1
    }
}

# The model of grpo_learns teaches, without a reward and by each form of the divergence.
a_student_learns_from_its_teacher() {
    set -- --rollout-batch-size 16 --num-return-sequences 2 --train-iters 40 --lr 2e-3 --no-use-task-rewards
    set -- "$@" --teacher-load "$work/sorter"
    for form in advantages policy-gradient loss; do
        learn 1 "$work/opd.$form" "$@" --reward number --distillation-in $form &&
            distilled "$work/opd.$form" 0.2 || return 1
    done
    rewards=$(series reward "$work/opd.loss" | tail -n 10 | mean)
    awk -v r="$rewards" 'BEGIN { exit !(r > 0.7) }' || return 1
    # on the policy, the gradient of the first step is the same
    for form in advantages policy-gradient; do series grad_norm "$work/opd.$form" | head -n 1 >"$work/$form"; done
    paste "$work/advantages" "$work/policy-gradient" |
        awk '{ d = $1 / $2 - 1 } END { exit !(d < 1e-5 && d > -1e-5) }' || return 1
    sed 's/, "answer": "[0-9]*"//' "$work/rl.jsonl" >"$work/unanswered.jsonl"
    learn 1 "$work/opd.topk" "$@" --reward number --distillation-in loss --distillation-loss-mode forward_kl_topk \
        --distillation-topk 5 && distilled "$work/opd.topk" 0.05 &&
        series teacher_mass "$work/opd.topk" | awk '{ bad += !($1 > 0.5 && $1 <= 1) } END { exit bad > 0 }' || return 1
    learn 1 "$work/opd.none" "$@" --distillation-in advantages --reward none --data-path "$work/unanswered.jsonl" &&
        same_series "$work/opd.advantages" "$work/opd.none" 0 1 grad_norm
}

# Every third prompt is of the source b.
write_sources() {
    awk '{ sub(/^{/, "{\"data_source\": \"" (NR % 3 ? "a" : "b") "\", ") } { print }' "$work/rl.jsonl" \
        >"$work/sources.jsonl"
}

# A prompt has the teacher that its field names; two teachers that are one model are that model.
each_prompt_has_its_teacher() {
    write_sources
    set -- --rollout-batch-size 6 --num-return-sequences 4 --train-iters 3 --lr 1e-3 --distillation-in advantages
    set -- "$@" --data-path "$work/sources.jsonl"
    learn 1 "$work/one" "$@" --teacher-load "$work/sorter" &&
        learn 1 "$work/both" "$@" --teachers "a=$work/sorter" "b=$work/sorter" || return 1
    for key in distillation grad_norm; do same_series "$work/one" "$work/both" 1e-5 1 $key || return 1; done
    series scoring_tokens "$work/one" >"$work/a" && series scoring_tokens "$work/both" | cmp -s - "$work/a" || return 1
    # the student itself is the other teacher: from it there is no divergence at first
    learn 1 "$work/part" "$@" --teachers "a=$work/sorter" "*=$work/base" && learn 1 "$work/other" "$@" \
        --teachers "b=$work/sorter" "a=$work/base" || return 1
    for file in one part other; do series distillation "$work/$file" | head -n 1; done | awk '
        { d[NR] = $1 } END { s = d[2] + d[3] - d[1]; exit !(d[2] * d[3] != 0 && s * s < 1e-9) }'
}

# Its own teacher as it was at first, or some iterations ago; a resumed run has the teacher that it had.
a_model_teaches_itself() {
    set -- --rollout-batch-size 6 --num-return-sequences 4 --lr 1e-3 --ppo-epochs 2 --global-batch-size 8
    learn 1 "$work/self" "$@" --train-iters 4 --distillation-in advantages --self-distillation initial &&
        learn 1 "$work/named" "$@" --train-iters 4 --distillation-in advantages --teacher-load "$work/base" || return 1
    for key in distillation grad_norm; do same_series "$work/self" "$work/named" 1e-5 1 $key || return 1; done
    set -- "$@" --distillation-in loss --self-distillation lagging --teacher-interval 3
    learn 1 "$work/whole" "$@" --train-iters 7 &&
        series teacher_age "$work/whole" | tr '\n' ' ' | grep -q '^0 1 2 0 1 2 0 $' || return 1
    for stop in 3 5; do
        rm -rf "$work/lags" && learn 1 "$work/parts" "$@" --train-iters $stop --save "$work/lags" || return 1
        # shellcheck disable=SC2086
        "$train" --stage rl --load "$work/lags" --save "$work/lags" --data-path "$work/rl.jsonl" --seq-length 16 \
            --max-new-tokens 4 --micro-batch-size 4 --log-interval 1 --metrics "$work/parts" $common "$@" \
            --train-iters 7 >"$work/out" 2>"$work/err" || return 1
        for key in reward lm_loss grad_norm distillation; do
            same_series "$work/whole" "$work/parts" 0 1 $key || return 1
        done
    done
    rm -r "$work/lags/teacher/iter_0000007"
    refused 'the teacher that was saved with iteration 7 is not there' "$train" --stage rl --load "$work/lags" \
        --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 --chat-template plain "$@" --train-iters 9
}

# The first iterations have the responses of the first weights; then each has those of some iterations ago. A run that
# resumes has the responses that waited.
responses_wait_for_their_iteration() {
    set -- --rollout-batch-size 6 --num-return-sequences 4 --ppo-epochs 2 --global-batch-size 8
    learn 1 "$work/still" "$@" --lr 1e-30 --train-iters 3 && set -- "$@" --lr 1e-3 &&
        learn 1 "$work/whole" "$@" --train-iters 6 --rollout-lag 2 &&
        series staleness "$work/whole" | tr '\n' ' ' | grep -q '^0 1 2 2 2 2 $' || return 1
    for key in reward entropy; do
        series $key "$work/whole" | head -n 3 >"$work/a" && series $key "$work/still" | cmp -s - "$work/a" || return 1
    done
    for method in '' '--dynamic-sampling --rollout-is token --rollout-rs token_k1 --rollout-rs-threshold 0.5_2' \
        '--adv-estimator remax --bypass-mode'; do
        # shellcheck disable=SC2086
        rm -rf "$work/late" && learn 1 "$work/whole" "$@" --train-iters 6 --rollout-lag 2 $method &&
            learn 1 "$work/parts" "$@" --train-iters 3 --rollout-lag 2 $method --save "$work/late" &&
            [ -s "$work/late/iter_0000003/rollouts.bin" ] || return 1
        # shellcheck disable=SC2086
        "$train" --stage rl --load "$work/late" --save "$work/late" --data-path "$work/rl.jsonl" --seq-length 16 \
            --max-new-tokens 4 --micro-batch-size 4 --log-interval 1 --metrics "$work/parts" $common "$@" $method \
            --rollout-lag 2 --train-iters 6 >"$work/out" 2>"$work/err" || return 1
        for key in reward lm_loss grad_norm staleness; do
            same_series "$work/whole" "$work/parts" 0 1 $key || return 1
        done
    done
    # the second weights write the third batch: with a lag of 1, or where a run without one goes on with it
    learn 1 "$work/lag" "$@" --train-iters 3 --rollout-lag 1 && rm -rf "$work/late" &&
        learn 1 "$work/first" "$@" --train-iters 1 --save "$work/late" || return 1
    # shellcheck disable=SC2086
    "$train" --stage rl --load "$work/late" --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --micro-batch-size 4 --log-interval 1 --metrics "$work/second" $common "$@" --rollout-lag 1 --train-iters 3 \
        >"$work/out" 2>"$work/err" || return 1
    for key in reward entropy; do
        [ "$(series $key "$work/lag" | tail -n 1)" = "$(series $key "$work/second" | tail -n 1)" ] || return 1
    done
}

# logged_reward FILE [LINES]: the options of a program that writes its lines to FILE, and rewards a response by its
# length; it ends with an error behind LINES of them.
logged_reward() {
    rm -f "$1"
    echo "while read -r line; do [ \$((seen += 1)) -le ${2:-1000000} ] || exit 3; echo \"\$line\" >>$1; \
        echo 0.\$((\${#line} * 7 % 10)); done"
}

# Responses of 1 to 8 tokens; a phase writes two.
split="--num-return-sequences 3 --ppo-epochs 2 --global-batch-size 4 --rollout-batch-size 4 --max-new-tokens 8
    --temperature 1.8 --reward command --partial-rollout-max-split 4"

# Cut and continued by unchanged weights, a response is the one that is written at once: in one iteration whatever the
# learning rate, in several with one of nearly 0.
continued_responses_equal_uncut_ones() {
    # shellcheck disable=SC2086
    set -- $split --lr 1e-3 --train-iters 4 --bitwise-rollouts
    learn 1 "$work/whole" "$@" --partial-rollout-max-split 1 --reward-command "$(logged_reward "$work/texts.whole")" &&
        learn 1 "$work/cut" "$@" --over-sampling-batch-size 4 --reward-command "$(logged_reward "$work/texts.cut")" &&
        cmp "$work/texts.whole" "$work/texts.cut" || return 1
    for key in lm_loss grad_norm ppo_kl entropy generation_gap overlong; do
        same_series "$work/whole" "$work/cut" 0 1 $key || return 1
    done
    series staleness_at_most "$work/cut" | awk '$1 != 0 { exit 1 } END { exit NR != 4 }' || return 1
    # shellcheck disable=SC2086
    set -- $split --lr 1e-30
    learn 1 "$work/whole" "$@" --train-iters 6 --partial-rollout-max-split 1 \
        --reward-command "$(logged_reward "$work/texts.whole")" &&
        learn 1 "$work/cut" "$@" --train-iters 5 --reward-command "$(logged_reward "$work/texts.cut")" || return 1
    # 20 of the first 24 prompts, in another order; the old log-probabilities are those of a forward of now
    sort "$work/texts.whole" >"$work/a" && sort "$work/texts.cut" | comm -23 - "$work/a" >"$work/b" &&
        [ ! -s "$work/b" ] && [ "$(wc -l <"$work/texts.cut")" = 60 ] &&
        series responses_continued "$work/cut" | awk '{ n += $1 > 0 } END { exit !(n > 1) }' &&
        series generation_gap "$work/cut" | awk '$1 > 1e-4 { exit 1 }' &&
        series ppo_kl "$work/cut" | awk '$1 > 1e-6 || $1 < -1e-6 { print "kl " $1; exit 1 } END { exit NR != 5 }'
}

# Old log-probabilities are those of the weights that wrote a token: by training's forward of then as by the generator,
# which agree here. No token is older than the bound. In the first iteration nothing is continued.
continued_responses_keep_their_log_probabilities() {
    # shellcheck disable=SC2086
    set -- $split --lr 2e-3 --train-iters 5
    learn 1 "$work/scored" "$@" --reward-command "$(logged_reward "$work/texts")" &&
        learn 1 "$work/bypass" "$@" --reward-command "$(logged_reward "$work/texts")" --bypass-mode || return 1
    for key in lm_loss grad_norm ppo_kl staleness responses_continued; do
        same_series "$work/scored" "$work/bypass" 1e-3 0.01 $key || return 1
    done
    series generation_gap "$work/scored" | awk '$1 > 1e-4 { exit 1 } END { exit NR != 5 }' &&
        series staleness "$work/scored" | awk 'NR == 1 && $1 != 0 { exit 1 } { sum += $1 } END { exit !(sum > 0.5) }' &&
        series prompts_in_progress "$work/scored" | awk '$1 != 4 { exit 1 }' || return 1
    for bound in 1 2; do # the second: one more than --rollout-lag
        learn 1 "$work/bound" "$@" --reward-command "$(logged_reward "$work/texts")" --max-head-offpolicyness $bound \
            --rollout-lag $((bound - 1)) && series staleness_at_most "$work/bound" | awk -v bound=$bound '
                $1 > bound { print "staleness " $1; exit 1 } $1 == bound { n++ } END { exit !n }' || return 1
    done
}

# A run that stops, or whose rewards end, goes on with the responses in progress.
responses_in_progress_are_saved() {
    while read -r stop method; do
        # shellcheck disable=SC2086
        set -- $split --lr 1e-3 $method
        rm -rf "$work/late"
        learn 1 "$work/whole" "$@" --train-iters 5 --reward-command "$(logged_reward "$work/texts.whole")" &&
            learn 1 "$work/parts" "$@" --train-iters "$stop" --save "$work/late" \
                --reward-command "$(logged_reward "$work/texts.parts")" || return 1
        # shellcheck disable=SC2086
        "$train" --stage rl --load "$work/late" --save "$work/late" --data-path "$work/rl.jsonl" --seq-length 16 \
            --micro-batch-size 4 --log-interval 1 --metrics "$work/parts" $common "$@" --train-iters 5 \
            --reward-command "$(logged_reward "$work/texts.rest")" >"$work/out" 2>"$work/err" </dev/null || return 1
        cat "$work/texts.parts" "$work/texts.rest" | cmp - "$work/texts.whole" || return 1
        for key in lm_loss grad_norm staleness responses_continued prompts_in_progress; do
            same_series "$work/whole" "$work/parts" 0 1 $key || return 1
        done
    done <<EOF
3
2 --rollout-lag 2 --dynamic-sampling --rollout-is token
1 --adv-estimator gae --bypass-mode
EOF
    # shellcheck disable=SC2086
    set -- $split --lr 1e-3
    learn 1 "$work/whole" "$@" --train-iters 4 --reward-command "$(logged_reward "$work/texts.whole")" || return 1
    rm -rf "$work/late"
    learn 1 "$work/parts" "$@" --train-iters 4 --save "$work/late" \
        --reward-command "$(logged_reward "$work/texts.parts" 29)" && return 1 # in the third iteration
    says '^saved iteration 2 to' "$work/out" || return 1
    # shellcheck disable=SC2086
    set -- "$train" --stage rl --load "$work/late" --data-path "$work/rl.jsonl" --seq-length 16 --micro-batch-size 4 \
        --log-interval 1 --metrics "$work/parts" $common "$@" --train-iters 4 --reward-command \
        "$(logged_reward "$work/texts.rest")"
    refused 'in progress to 4 prompts' "$@" --partial-rollout-max-split 1 &&
        "$@" >"$work/out" 2>"$work/err" &&
        (head -n 24 "$work/texts.parts" && cat "$work/texts.rest") | cmp - "$work/texts.whole" || return 1
    for key in lm_loss grad_norm staleness; do same_series "$work/whole" "$work/parts" 0 1 $key || return 1; done
    set -- "$train" --stage rl --load "$work/base" --finetune --data-path "$work/rl.jsonl" --seq-length 16 --lr 1e-3 \
        --max-new-tokens 8 --chat-template plain --train-iters 1 --partial-rollout-max-split
    refused 'a phase writes a token at least' "$@" 9 && refused 'at most twice' "$@" 2 --over-sampling-batch-size 17 &&
        refused 'more than --rollout-lag 1' "$@" 2 --max-head-offpolicyness 1 --rollout-lag 1 &&
        refused 'needs --partial-rollout-max-split' "$@" 1 --over-sampling-batch-size 8 &&
        refused 'env-command' "$@" 2 --env-command true && refused '--stop' "$@" 2 --stop 5 &&
        refused 'remax' "$@" 2 --adv-estimator remax
}

options_of_a_policy_are_idle_beside_a_teacher_alone() {
    set -- --rollout-batch-size 4 --num-return-sequences 2 --train-iters 1 --lr 1e-3 --teacher-load "$work/sorter" \
        --reward number --clip-ratio-low 0.1 --clip-ratio-c 4 --kl-loss-type k2 --kl-loss-coef 0.1 --entropy-coeff 0.01
    learn 1 "$work/opd.idle" "$@" --distillation-in loss --no-use-task-rewards || return 1
    for option in clip-ratio-low clip-ratio-c kl-loss-type kl-loss-coef entropy-coeff; do
        grep -q -e "--$option has no effect: with --no-use-task-rewards" "$work/out" "$work/err" || {
            echo "no note about --$option" && return 1
        }
    done
    ! grep -q -e '--clip-ratio-high has no effect' "$work/out" "$work/err" || return 1
    for others in '--distillation-in loss' '--distillation-in advantages --no-use-task-rewards'; do
        # shellcheck disable=SC2086
        learn 1 "$work/opd.idle" "$@" $others && ! grep -q -e 'has no effect' "$work/out" "$work/err" || return 1
    done
}

teachers_are_refused() {
    set -- "$train" --stage rl --load "$work/base" --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --chat-template plain --train-iters 1 --lr 1e-3
    refused 'distillation-in needs a teacher' "$@" --distillation-in loss &&
        refused 'teacher-load with --stage rl needs --distillation-in' "$@" --teacher-load "$work/sorter" || return 1
    set -- "$@" --distillation-in loss
    refused 'k1 in the loss has a gradient that no teacher changes' "$@" --teacher-load "$work/sorter" \
        --distillation-loss-mode k1 &&
        refused 'forward_kl_topk needs the actor' "$@" --teacher-load "$work/sorter" --distillation-in advantages \
            --distillation-loss-mode forward_kl_topk &&
        refused 'distillation-topk 300 is more than the vocabulary' "$@" --teacher-load "$work/sorter" \
            --distillation-loss-mode forward_kl_topk --distillation-topk 300 &&
        refused 'distillation-topk needs --distillation-loss-mode forward_kl_topk' "$@" --distillation-topk 3 \
            --teacher-load "$work/sorter" &&
        refused 'reward none is for --no-use-task-rewards' "$@" --teacher-load "$work/sorter" --reward none &&
        refused 'expects words such as gsm8k=FOLDER' "$@" --teachers "$work/sorter" &&
        refused 'teachers has a twice' "$@" --teachers a=x a=y &&
        refused 'lagging is not supported with adapters' "$@" --self-distillation lagging --lora-rank 4 \
            --lora-target all-linear &&
        refused 'there is no teacher of its own here' "$@" --self-distillation initial \
            --teacher-tensor-model-parallel-size 1 &&
        refused 'exclude each other' "$@" --teacher-load "$work/sorter" --teachers "a=$work/sorter" &&
        refused 'exclude each other' "$@" --teacher-load "$work/sorter" --no-use-task-rewards --adv-estimator gae
}

ppo_with_a_critic_learns() {
    learn 1 "$work/ppo" --rollout-batch-size 128 --num-return-sequences 1 --train-iters 40 --lr 2e-3 \
        --adv-estimator gae --whiten-advantages --critic-lr 5e-3 --ppo-epochs 2 --global-batch-size 64 \
        --kl-loss-coef 0.001 --value-clip 0.5 && gains "$work/ppo" && phases_add_up "$work/ppo" 128 3 4 &&
        series value_loss "$work/ppo" | awk 'NR == 1 { first = $1 } END { exit !($1 < first) }' &&
        series value_target "$work/ppo" | grep -q . && series ref_kl "$work/ppo" | grep -q .
}

# Rewards with weights are one reward, their sum.
rewards_are_added_up() {
    set -- --rollout-batch-size 6 --num-return-sequences 4 --train-iters 2 --lr 1e-3
    learn 1 "$work/one" "$@" --reward number &&
        learn 1 "$work/more" "$@" --reward number regex --reward-pattern ^ --reward-weights 1 2 || return 1
    for key in lm_loss grad_norm; do
        same_series "$work/one" "$work/more" 1e-4 1 $key || return 1 # a constant is in no advantage
    done
    paste "$(series reward "$work/one" >"$work/a" && echo "$work/a")" \
        "$(series reward "$work/more" >"$work/b" && echo "$work/b")" |
        awk '{ d = $2 - $1 - 2 } d > 1e-6 || d < -1e-6 { exit 1 }' || return 1
    set -- "$train" --stage rl --load "$work/base" --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --chat-template plain --train-iters 1 --lr 1e-3
    refused 'has 1 numbers, and --reward names 2' "$@" --reward number exact --reward-weights 1 &&
        refused 'compares each reward as it is' "$@" --adv-estimator gdpo --reward-clip 1 &&
        refused 'names number twice' "$@" --reward number number
}

# The old policy is the generator's, which agrees with training here, and nothing is scored.
bypass_mode_takes_the_generators_log_probabilities() {
    set -- --rollout-batch-size 6 --num-return-sequences 4 --train-iters 2 --lr 1e-3 --ppo-epochs 2 \
        --global-batch-size 8
    learn 1 "$work/scored" "$@" && learn 1 "$work/bypass" "$@" --bypass-mode || return 1
    for key in reward lm_loss grad_norm; do same_series "$work/scored" "$work/bypass" 1e-3 1 $key || return 1; done
    series scoring_tokens "$work/bypass" | awk '$1 > 0 { exit 1 }' &&
        ! grep -q 'generation_gap\|"entropy"' "$work/bypass" || return 1
    set -- "$train" --stage rl --load "$work/base" --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --chat-template plain --train-iters 1 --lr 1e-3 --bypass-mode
    refused 'bypass-mode' "$@" --rollout-is token && refused 'bypass-mode' "$@" --rollout-rs token_k2 \
        --rollout-rs-threshold 1
}

# Generator and training agree here, so that bounds below 1 hold for all tokens.
rollouts_are_corrected() {
    set -- --rollout-batch-size 6 --num-return-sequences 4 --train-iters 1 --lr 1e-3 --pg-variant gpg
    learn 1 "$work/plain" "$@" || return 1
    for number in mismatch_kl mismatch_k3 mismatch_chi2 mismatch_chi2_of_sequences; do
        series $number "$work/plain" | awk '{ found = $1 < 1e-4 && $1 > -1e-4 } END { exit !found }' || return 1
    done
    series mismatch_perplexity_ratio "$work/plain" |
        awk '{ found = $1 > 0.999 && $1 < 1.001 } END { exit !found }' || return 1
    for level in token sequence; do
        learn 1 "$work/half" "$@" --rollout-is $level --rollout-is-threshold 0.5 || return 1
        series rollout_weights_cut "$work/half" | grep -qx 1 || return 1
        awk -v half="$(series grad_norm "$work/half")" -v whole="$(series grad_norm "$work/plain")" 'BEGIN {
            exit !(whole > 0 && half / whole > 0.4999 && half / whole < 0.5001) }' || return 1
    done
    learn 1 "$work/none" "$@" --rollout-is token --rollout-is-threshold 0.1_0.5 &&
        series grad_norm "$work/none" | grep -qx 0 || return 1
    learn 1 "$work/all" "$@" --rollout-rs token_k1,seq_max_k2 --rollout-rs-threshold 0.5_2,1 &&
        same_series "$work/plain" "$work/all" 1e-6 1 grad_norm &&
        series rollout_tokens_rejected "$work/all" | grep -qx 0 || return 1
    learn 1 "$work/rejected" "$@" --rollout-rs seq_mean_k1 --rollout-rs-threshold 2_3 &&
        says 'rollout-rs leaves out all tokens' "$work/out" || return 1
    set -- "$train" --stage rl --load "$work/base" --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --chat-template plain --train-iters 1 --lr 1e-3
    refused 'has token_k1 to k3.*not .seq_max_k1' "$@" --rollout-rs seq_max_k1 --rollout-rs-threshold 2 &&
        refused 'has 2 values for 1 rules' "$@" --rollout-rs token_k1 --rollout-rs-threshold 2,3 &&
        refused 'token_k2 expects one number above 0, not .1_2' "$@" --rollout-rs token_k2 --rollout-rs-threshold 1_2 &&
        refused 'token_k1 expects LOW_HIGH' "$@" --rollout-rs token_k1 --rollout-rs-threshold 0.5 &&
        refused 'has token_k1 twice' "$@" --rollout-rs token_k1,token_k1 --rollout-rs-threshold 2 &&
        refused 'threshold expects HIGH or LOW_HIGH' "$@" --rollout-is token --rollout-is-threshold 3_2 &&
        refused 'needs --dro-beta' "$@" --pg-variant dro
}

# Generation and training compare the probabilities of all tokens at --temperature, whatever tokens are drawn from.
the_generation_gap_is_small() {
    while read -r drawn; do
        # shellcheck disable=SC2086
        learn 1 "$work/gap" --rollout-batch-size 6 --num-return-sequences 4 --train-iters 2 --lr 1e-3 $drawn &&
            series generation_gap "$work/gap" | awk -v drawn="$drawn" '
                { rows++ }
                $1 > 1e-4 { print drawn ": " $1; exit 1 }
                END { exit rows != 2 }' || return 1
    done <<EOF
--temperature 0.7
--temperature 0.7 --top-k 5 --top-p 0.9
--temperature 0.7 --top-p 0.9 --min-p 0.05 --repetition-penalty 1.2
--temperature 1.5 --top-k 20 --min-p 0.01
--repetition-penalty 1.2
EOF
}

a_resumed_run_goes_on_as_before() {
    for method in grpo "grpo --dynamic-sampling" "gae --kl-loss-coef 0.01" remax; do
        run=$work/run.${method##* } reference=
        [ "${method%% *}" != gae ] || reference="--ref-load $work/base"
        set -- --rollout-batch-size 6 --num-return-sequences 4 --lr 1e-3 --ppo-epochs 2 --global-batch-size 8
        # shellcheck disable=SC2086
        learn 1 "$work/whole" "$@" --adv-estimator $method --train-iters 4 &&
            learn 1 "$work/parts" "$@" --adv-estimator $method --train-iters 2 --save "$run" || return 1
        # shellcheck disable=SC2086
        "$train" --stage rl --load "$run" --save "$run" --data-path "$work/rl.jsonl" --seq-length 16 \
            --max-new-tokens 4 --micro-batch-size 4 --log-interval 1 --metrics "$work/parts" $common "$@" \
            --adv-estimator $method $reference --train-iters 4 >"$work/out" 2>"$work/err" || return 1
        for key in reward lm_loss grad_norm value_loss ref_kl groups_dropped sampling_rounds; do
            case $key in value_loss | ref_kl | groups_dropped | sampling_rounds)
                grep -q "$key" "$work/whole" || continue ;;
            esac
            same_series "$work/whole" "$work/parts" 0 1 $key || return 1
        done
        [ "${method##* }" != --dynamic-sampling ] || cp "$work/whole" "$work/dynamic"
    done
    # other prompts replaced the dropped ones
    dropped=$(series groups_dropped "$work/dynamic" | awk '{ sum += $1 } END { print sum }')
    [ "$dropped" -gt 0 ] && says "\"consumed_prompts\": $((24 + dropped))," \
        "$work/run.--dynamic-sampling/iter_0000004/trainer.json"
}

# A damaged critic is followed by the checkpoint before, actor and critic together.
a_damaged_critic_is_followed_by_the_one_before() {
    run=$work/pair
    set -- --rollout-batch-size 4 --num-return-sequences 2 --lr 1e-3 --adv-estimator gae
    learn 1 "$work/pair.whole" "$@" --train-iters 4 --save "$run" --save-interval 2 || return 1
    set -- "$train" --stage rl --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 --micro-batch-size 4 \
        --log-interval 1 --metrics "$work/pair.again" "$@" --train-iters 5
    weights=critic/iter_0000004/model.safetensors optimizer=critic/iter_0000004/optimizer.safetensors
    for damage in "truncate -s 1000 $weights" "rm -r critic/iter_0000004" \
        "dd if=/dev/urandom of=$optimizer bs=1 seek=20000 count=99 conv=notrunc"; do
        rm -rf "$run.copy" "$work/pair.again" && cp -r "$run" "$run.copy" && cp "$work/pair.whole" "$work/pair.again" &&
            (cd "$run.copy" && $damage 2>/dev/null) || return 1
        # shellcheck disable=SC2086
        "$@" --load "$run.copy" --save "$run.copy" $common >"$work/out" 2>"$work/err" &&
            says 'warning: .*critic/iter_0000004.*; going on from iteration 2' "$work/err" || return 1
        for key in reward lm_loss value_loss; do
            series $key "$work/pair.again" | head -n 4 >"$work/again" && [ "$(wc -l <"$work/again")" = 4 ] &&
                series $key "$work/pair.whole" | cmp -s - "$work/again" || return 1
        done
    done
    rm -r "$run.copy/critic"
    # shellcheck disable=SC2086
    refused 'critic/iter_0000005: the critic .* is not there; name a critic by --critic-load' "$@" --load "$run.copy" \
        --save "$run.copy" $common --train-iters 6 || return 1
    # a model that another stage saved becomes the critic
    # shellcheck disable=SC2086
    "$@" --load "$run.copy" --save "$run.copy" $common --train-iters 6 --critic-load "$work/base" >"$work/out" \
        2>"$work/err" && says '^saved iteration 6 to' "$work/out" || return 1
    truncate -s 1000 "$run/$weights"
    # shellcheck disable=SC2086
    refused 'critic/iter_0000004.*; name a critic by --critic-load' "$@" --load "$run" $common
}

# 2 x 50 prompts, 40 in an iteration: the decay of the learning rate ends with the third.
epochs_are_iterations() {
    head -n 50 "$work/rl.jsonl" >"$work/fifty.jsonl"
    learn 1 "$work/epochs" --data-path "$work/fifty.jsonl" --rollout-batch-size 40 --num-return-sequences 2 \
        --train-epochs 2 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 0 --lr-decay-style linear &&
        says 'in each of 3 iterations' "$work/out" && says '^  *3/3 ' "$work/out" &&
        [ "$(series reward "$work/epochs" | wc -l)" = 3 ] &&
        refused 'train-epochs and --train-iters exclude' "$train" --stage rl --load "$work/base" --finetune \
            --data-path "$work/fifty.jsonl" --chat-template plain --seq-length 16 --max-new-tokens 4 --lr 1e-3 \
            --rollout-batch-size 40 --train-epochs 2 --train-iters 1
}

# The responses of an iteration are the batch, whatever the number of ranks: launch.sh starts as many as divide it.
fewer_ranks_are_launched() {
    # shellcheck disable=SC2086
    "$train" --stage rl --load "$work/base" --finetune --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --rollout-batch-size 4 --num-return-sequences 2 --micro-batch-size 4 --lr 1e-3 --train-iters 1 $common \
        --print-launch 8 >"$work/out" && says '^ranks 2$' "$work/out" && says '^global_batch_size 8$' "$work/out"
}

# The rewards of all responses are alike: no iteration has a step.
iterations_without_a_step_are_skipped() {
    learn 1 "$work/skips" --rollout-batch-size 4 --num-return-sequences 2 --train-iters 2 --lr 1e-3 \
        --dynamic-sampling --dynamic-sampling-max-rounds 3 --reward command \
        --reward-command 'while read -r line; do echo 1; done' &&
        says ' 1/2 .* no step: no prompt has rewards that differ .* groups dropped 12  1 skipped' "$work/out" &&
        says ' 2/2 .* 2 skipped' "$work/out" && says '"sampling_rounds": 3,' "$work/skips" &&
        ! grep -q 'nan\|null\|lm_loss' "$work/out" "$work/skips"
}

# Pairs: the digits in ascending order are preferred.
write_pairs() {
    sed 's/"answer": "\([0-9]\)\([0-9]\)"/"chosen": "\1\2", "rejected": "\2\1"/' "$work/rl.jsonl" |
        grep -v '"chosen": "\([0-9]\)\1"' >"$work/pairs.jsonl"
}

# learn_pairs STAGE METRICS ARGUMENTS...
learn_pairs() {
    stage=$1 metrics=$2
    shift 2
    # shellcheck disable=SC2086
    "$train" --stage "$stage" --load "$work/base" --finetune --data-path "$work/pairs.jsonl" --seq-length 16 \
        --variable-seq-lengths --micro-batch-size 16 --global-batch-size 32 --train-iters 60 --lr 1e-3 \
        --log-interval 1 --metrics "$metrics" --overwrite $common "$@" >"$work/out" 2>"$work/err"
}

dpo_learns() {
    write_pairs
    learn_pairs dpo "$work/dpo" --save "$work/dpo.model" || return 1
    series accuracy "$work/dpo" | tail -n 5 | mean | awk '{ exit !($1 > 0.9) }' || return 1
    "$infer" --load "$work/dpo.model" --prompt '52>' --max-new-tokens 4 --temperature 0 --device cpu >"$work/out" \
        2>"$work/err" && says '^52>25$' "$work/out"
}

# A model with dropout learns without, unless the user gives it: the first step has the reference's log-probabilities.
dropout_is_off_unless_given() {
    mkdir "$work/drops" && cp "$work/base/iter_0000300/"model* "$work/base/iter_0000300/"tok* "$work/drops" &&
        sed 's/"attention_dropout": 0.0/"attention_dropout": 0.2, "hidden_dropout": 0.2/' \
            "$work/base/iter_0000300/config.json" >"$work/drops/config.json" &&
        says '"hidden_dropout": 0.2' "$work/drops/config.json" || return 1
    set -- "$train" --load "$work/drops" --finetune --seq-length 16 --train-iters 1 --lr 1e-3 --micro-batch-size 16 \
        --chat-template plain --device cpu --eval-iters 0 --lr-decay-style constant --log-interval 1
    for stage in "dpo --data-path $work/pairs.jsonl --variable-seq-lengths" "rl --data-path $work/rl.jsonl \
        --max-new-tokens 4 --rollout-batch-size 4 --num-return-sequences 4 --kl-loss-coef 0.1"; do
        # shellcheck disable=SC2086
        "$@" --stage $stage --print-config >"$work/out" && shows hidden-dropout 0 &&
            shows attention-dropout 0 &&
            "$@" --stage $stage --attention-dropout 0.3 --print-config >"$work/out" &&
            shows hidden-dropout 0 && shows attention-dropout 0.3 &&
            "$@" --stage $stage --ref-load "$work/drops" --metrics "$work/drop" --overwrite >"$work/out" \
                2>"$work/err" || return 1
        case $stage in
        dpo*) series lm_loss "$work/drop" | awk '!($1 - 0.693147 < 1e-6 && 0.693147 - $1 < 1e-6) { exit 1 }' ;;
        rl*) series ppo_kl "$work/drop" | awk '!($1 < 1e-6 && $1 > -1e-6) { exit 1 }' ;;
        esac || return 1
    done
    "$@" --stage rm --value-head --data-path "$work/pairs.jsonl" --variable-seq-lengths --print-config >"$work/out" &&
        shows hidden-dropout 0 && shows attention-dropout 0 || return 1
    for teaches in sft "kd --teacher-load $work/drops"; do
        # shellcheck disable=SC2086
        "$@" --stage $teaches --data-path "$work/sft.jsonl" --print-config >"$work/out" &&
            shows hidden-dropout 0.2 || return 1
    done
    # a run that resumes goes on with its dropout
    # shellcheck disable=SC2086
    "$@" --stage $stage --hidden-dropout 0.3 --save "$work/drop.run" >"$work/out" 2>"$work/err" &&
        "$@" --stage $stage --load "$work/drop.run" --save "$work/drop.run" --finetune=false --print-config \
            >"$work/out" && shows hidden-dropout 0.3
}

# The reward model prefers ascending digits; an actor that it rewards learns to write them.
a_reward_model_rewards() {
    learn_pairs rm "$work/rm" --value-head --save "$work/rm.model" --lr 3e-3 || return 1
    series accuracy "$work/rm" | tail -n 5 | mean | awk '{ exit !($1 > 0.9) }' || return 1
    # it begins as a critic too; a run that resumes by its whole command has the critic that it saved
    set -- --rollout-batch-size 4 --num-return-sequences 2 --lr 1e-3 --adv-estimator gae --critic-load "$work/rm.model"
    learn 1 "$work/critic" "$@" --train-iters 4 && learn 1 "$work/critic.2" "$@" --train-iters 2 \
        --save "$work/critic.run" || return 1
    # shellcheck disable=SC2086
    "$train" --stage rl --load "$work/base" --finetune --auto-resume --save "$work/critic.run" --seq-length 16 \
        --data-path "$work/rl.jsonl" --max-new-tokens 4 --micro-batch-size 4 --metrics "$work/critic.2" $common "$@" \
        --train-iters 4 >"$work/out" 2>"$work/err" && same_series "$work/critic" "$work/critic.2" 0 1 value_loss ||
        return 1
    set -- --rollout-batch-size 16 --num-return-sequences 8 --train-iters 20 --lr 2e-3 --reward model \
        --reward-load "$work/rm.model"
    learn 1 "$work/by_model" "$@" || return 1
    first=$(series reward "$work/by_model" | head -n 3 | mean) last=$(series reward "$work/by_model" | tail -n 3 | mean)
    awk -v a="$first" -v b="$last" 'BEGIN { exit !(b > a + 0.5) }' || {
        echo "reward from $first to $last"
        return 1
    }
    [ "${HAVE_MPI:-}" ] || return 0
    learn 2 "$work/by_model.2" "$@" --train-iters 3 || return 1
    for file in by_model by_model.2; do series reward "$work/$file" | head -n 3 >"$work/$file.first"; done
    paste "$work/by_model.first" "$work/by_model.2.first" |
        awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-4) exit 1 }'
}

# Models beside the actor read its tokens: a tokenizer in their folders must have the same texts for them.
tokenizers_of_partners_are_compared() {
    latest=$(find "$work/rm.model" -name model.safetensors | sort | tail -n 1)
    mkdir "$work/odd" && cp "$(dirname "$latest")"/model* "$(dirname "$latest")/config.json" "$work/odd" || return 1
    set -- "$train" --stage rl --load "$work/base" --finetune --seq-length 16 --data-path "$work/rl.jsonl" \
        --max-new-tokens 4 --micro-batch-size 4 --rollout-batch-size 4 --num-return-sequences 2 --lr 1e-3 \
        --train-iters 1 $common
    "$@" --reward model --reward-load "$work/odd" >"$work/out" 2>"$work/err" &&
        says '^--reward-load .*odd has no tokenizer to compare' "$work/out" || return 1
    printf '%s' '{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,' \
        '"post_processor": null, "decoder": null,' \
        '"model": {"type": "BPE", "vocab": {"a": 97, "c": 98}, "merges": []}}' \
        >"$work/odd/tokenizer.json"
    refused 'reward-load .*odd: token 98 is another text in .*; take a model with the same tokenizer' \
        "$@" --reward model --reward-load "$work/odd" &&
        refused 'critic-load .*odd: token 98 is another text' "$@" --adv-estimator gae --critic-load "$work/odd" ||
        return 1
    sed -i 's/"c": 98/"b": 98/' "$work/odd/tokenizer.json"
    "$@" --reward model --reward-load "$work/odd" >"$work/out" 2>"$work/err" && ! grep 'to compare' "$work/out"
}

# A reward model may have another shape than the actor, on each layout; its vocabulary must be the actor's.
a_reward_model_has_its_own_shape() {
    set -- --stage rm --data-path "$work/few.jsonl" --seq-length 16 --variable-seq-lengths --micro-batch-size 16 \
        --num-layers 4 --hidden-size 16 --num-attention-heads 2 --position-embedding-type rope --train-iters 20 \
        --lr 1e-2 --log-interval 1
    head -n 64 "$work/pairs.jsonl" >"$work/few.jsonl"
    # shellcheck disable=SC2086
    "$train" "$@" --tokenizer-type ByteLevel --save "$work/other.model" $common >"$work/out" 2>"$work/err" &&
        "$train" "$@" --tokenizer-type ByteLevel --vocab-size 300 --save "$work/wide.model" $common >"$work/out" \
            2>"$work/err" &&
        "$train" "$@" --tokenizer-type ByteLevel --ffn-hidden-size 32 --num-experts 4 --moe-router-topk 2 \
            --disable-bias-linear --save "$work/experts.model" $common >"$work/out" 2>"$work/err" || return 1
    set -- --rollout-batch-size 6 --num-return-sequences 4 --global-batch-size 8 --train-iters 3 --lr 1e-3 \
        --reward model --reward-load "$work/other.model"
    # a model's values are not 0, as the rewards of no model would be
    learn 1 "$work/shape" "$@" &&
        series reward "$work/shape" | awk '$1 == 0 { zero++ } END { exit !(NR == 3 && !zero) }' || return 1
    learn 1 "$work/shape.wide" "$@" --reward-load "$work/wide.model" && return 1
    says '^error: --reward-load .*wide.model: has a vocabulary of 300 tokens' "$work/err" || return 1
    [ "${HAVE_MPI:-}" ] || return 0
    for layout in '--tensor-model-parallel-size 2 --use-distributed-optimizer' \
        '--pipeline-model-parallel-size 2 --context-parallel-size 2'; do
        # shellcheck disable=SC2086
        learn 4 "$work/shape.4" "$@" $layout && same_series "$work/shape" "$work/shape.4" 1e-4 1 reward || return 1
    done
    learn 1 "$work/shape" "$@" --reward-load "$work/experts.model" && learn 2 "$work/shape.2" "$@" --reward-load \
        "$work/experts.model" --tensor-model-parallel-size 2 && same_series "$work/shape" "$work/shape.2" 1e-4 1 reward
}

adapters_learn() {
    learn 1 "$work/lora" --rollout-batch-size 8 --num-return-sequences 8 --train-iters 10 --lr 5e-3 --lora-rank 8 \
        --lora-target all-linear --kl-loss-coef 0.001 --save "$work/lora.run" &&
        says '^reference: the actor with its adapters switched off$' "$work/out" &&
        [ -s "$work/lora.run/adapter_model.safetensors" ] &&
        series generation_gap "$work/lora" | awk '$1 > 1e-4 { exit 1 }' &&
        series ref_kl "$work/lora" | awk 'NR == 1 && $1 > 1e-6 { exit 1 } { last = $1 } END { exit !(last > 0) }'
}

a_command_rewards() {
    cat >"$work/reward.sh" <<'EOF'
while read -r line; do
    case $line in *'"response": "'[0-9]*) echo 1 ;; *) echo 0 ;; esac
done
EOF
    learn 2 "$work/command" --rollout-batch-size 4 --num-return-sequences 2 --train-iters 2 --lr 1e-3 \
        --reward command --reward-command "sh $work/reward.sh" && series reward "$work/command" | grep -qx 1 || return 1
    learn 2 "$work/command" --rollout-batch-size 4 --num-return-sequences 2 --train-iters 2 --lr 1e-3 \
        --reward command --reward-command "exit 3" && return 1
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] && grep -q 'exit 3' "$work/err"
}

# A text that ends responses: rewards read the text before it. The responses of the model are two digits.
stop_strings_end_responses() {
    set -- --rollout-batch-size 8 --num-return-sequences 4 --train-iters 2 --lr 1e-3 --reward command
    seen=$work/seen
    set -- "$@" --reward-command "while read -r line; do echo \"\$line\" >>$seen; echo 0.\$((i += 1)); done"
    learn 1 "$work/unstopped" "$@" && says '"response": "5' "$seen" && mv "$seen" "$seen.all" || return 1
    learn 1 "$work/stopped" "$@" --stop 5 x78 && [ "$(wc -l <"$seen")" = 64 ] && says '"response": "[0-9]"' "$seen" &&
        says '"response": ""' "$seen" && ! grep -q '"response": "[^"]*5' "$seen" || return 1
    # a response to the same prompt by the same weights, cut; "5" is trained, and nothing behind it
    head -n 32 "$seen.all" | sed 's/\("response": "[0-46-9]*\)5[^"]*/\1/' >"$work/cut"
    head -n 32 "$seen" | cmp -s - "$work/cut" || return 1
    tokens=$(sed -n 's/.*"response": "\([^"]*\)".*/\1/p' "$seen.all" | head -n 32 |
        awk '{ n += index($0, "5") ? index($0, "5") : length($0) + 1 } END { print n / NR }')
    [ "$(series response_tokens "$work/stopped" | head -n 1)" = "$tokens" ] || return 1
    [ "${HAVE_MPI:-}" ] || return 0
    learn 4 "$work/stopped.4" "$@" --stop 5 x78 --tensor-model-parallel-size 2 &&
        same_series "$work/stopped" "$work/stopped.4" 1e-4 1 response_tokens lm_loss
}

# A reward program that answers two iterations, then dies, or hangs while a signal asks the run to stop.
rewards_that_end_lose_nothing() {
    ranks=1
    [ -z "${HAVE_MPI:-}" ] || ranks=2
    cat >"$work/ends.sh" <<'EOF'
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do read -r line && echo 0.$i; done
read -r line
eval "$MT_TEST_THEN"
EOF
    set -- --rollout-batch-size 4 --num-return-sequences 2 --train-iters 9 --lr 1e-3 --reward command \
        --reward-command "exec sh $work/ends.sh" --reward-timeout-seconds 500
    export MT_TEST_THEN='exit 3'
    learn $ranks "$work/ends" "$@" --save "$work/dies" && return 1
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] && says '^error: .*exit status 3 after 0 answers to 8' "$work/err" &&
        says '^saved iteration 2 to' "$work/out" || return 1
    MT_TEST_THEN='kill -TERM $PPID; exec sleep 1000'
    began=$(date +%s)
    learn $ranks "$work/ends" "$@" --save "$work/hangs" && says '^saved iteration 2 to' "$work/out" &&
        says 'stopped early after iteration 2' "$work/out" && [ $(($(date +%s) - began)) -lt $hang ]
}

# Responses that take seconds; nothing is trained on them, so the run goes on as if it had not stopped.
a_signal_ends_the_writing_of_responses() {
    rm -f "$work/out"
    set -- "$train" --stage rl --load "$work/base" --finetune --data-path "$work/rl.jsonl" --seq-length 16 --lr 1e-3 \
        --max-new-tokens 12 --micro-batch-size 4 --rollout-batch-size 600 --num-return-sequences 200 --train-iters 2 \
        --global-batch-size 120000 --save "$work/written"
    # shellcheck disable=SC2046
    [ -z "${HAVE_MPI:-}" ] || set -- $(mpirun_here) -np 4 "$@" --pipeline-model-parallel-size 2
    # shellcheck disable=SC2086
    "$@" --exit-signal SIGUSR1 $common >"$work/out" 2>"$work/err" </dev/null &
    process=$!
    until grep -q ' prompts, .* the longest has' "$work/out"; do
        kill -0 $process || return 1
        sleep 0.1
    done
    sleep 0.3
    kill -USR1 $process
    wait $process && says 'stopped early after iteration 0$' "$work/out"
}

# On a small model, with a few lines.
recipes_run() {
    set -- --load "$work/base" --seq-length 16 --chat-template plain --device cpu --hidden-dropout 0 \
        --attention-dropout 0
    "$train" --config data/recipes/grpo-qwen3-0.6b.yaml "$@" --data-path "$work/rl.jsonl" --train-iters 1 \
        --rollout-batch-size 2 --max-new-tokens 4 --global-batch-size 8 --save "$work/recipe" >"$work/out" \
        2>"$work/err" &&
        says '1/1 100%  loss .* reward ' "$work/out" || return 1
    # the command line wins over the recipe's two sides of the ratio, and over a ratio for both
    printf '%s\n' 'stage: rl' 'clip_ratio: 0.2' >"$work/ratio.yaml"
    learn 1 "$work/ratios" --config data/recipes/grpo-qwen3-0.6b.yaml --train-iters 1 --rollout-batch-size 2 \
        --global-batch-size 8 --clip-ratio 0.4 --print-config && shows clip-ratio 0.4 &&
        shows clip-ratio-low 0.4 && shows clip-ratio-high 0.4 &&
        learn 1 "$work/ratios" --config "$work/ratio.yaml" --train-iters 1 --lr 1 --clip-ratio-low 0.1 \
            --clip-ratio-high 0.3 --rollout-batch-size 2 --print-config &&
        shows clip-ratio-low 0.1 &&
        ! grep -q 'clip-ratio  \|error' "$work/out" || return 1
    head -n 64 "$work/pairs.jsonl" >"$work/few.jsonl"
    for stage in dpo "rm --value-head"; do
        # shellcheck disable=SC2086
        sed "s/^beta.*//" data/recipes/dpo-qwen3-0.6b.yaml >"$work/recipe.yaml" &&
            "$train" --config "$work/recipe.yaml" "$@" --stage $stage --data-path "$work/few.jsonl" \
                >"$work/out" 2>"$work/err" && says ' 100%  loss .* accuracy ' "$work/out" || return 1
    done
}

contradictions_are_refused() {
    set -- "$train" --stage rl --load "$work/base" --finetune --data-path "$work/rl.jsonl" --seq-length 16 \
        --max-new-tokens 4 --train-iters 1 --lr 1e-3 --chat-template plain
    refused 'num-return-sequences must be 2 or more' "$@" --num-return-sequences 1 || return 1
    refused 'reward regex needs --reward-pattern' "$@" --reward regex || return 1
    refused 'max-new-tokens 0: --stage rl needs responses' "$@" --max-new-tokens 0 || return 1
    refused 'stop: a text is empty' "$@" --stop '' || return 1
    refused 'block-size 100 is not a power of two' "$@" --inference-dynamic-batching-block-size 100 || return 1
    refused 'leaves no room for a prompt' "$@" --max-new-tokens 16 || return 1
    refused 'another --stage' "$train" --stage rl --load "$work/base" --data-path "$work/rl.jsonl" --seq-length 16 \
        --max-new-tokens 4 --train-iters 1 --lr 1e-3 || return 1
    refused 'ref-load has no effect' "$@" --ref-load "$work/base" || return 1
    for given in '--kl-loss-coef 0.1 --ref-load' '--adv-estimator gae --critic-load' '--reward model --reward-load'; do
        # shellcheck disable=SC2086
        refused 'lora.run: holds an adapter; take a whole model' "$@" $given "$work/lora.run" || return 1
    done
    refused 'is a language model' "$@" --reward model --reward-load "$work/base" || return 1
    refused 'is a model with a value head' "$@" --kl-loss-coef 0.1 --ref-load "$work/rm.model" || return 1
    refused 'the run resumes at iteration 4; name the model that it started from by --ref-load' "$train" --stage rl \
        --load "$work/run.0.01" --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 --train-iters 9 \
        --lr 1e-3 --chat-template plain --adv-estimator gae --kl-loss-coef 0.01 --rollout-batch-size 6 \
        --num-return-sequences 4 || return 1
    refused 'exclude each other' "$@" --overlong-mask --overlong-penalty 1 || return 1
    refused 'exclude each other' "$@" --overlong-penalty 1 --overlong-buffer-length 2 || return 1
    refused 'must be at most --max-new-tokens 4' "$@" --overlong-buffer-length 5 || return 1
    refused 'gspo and gmpo .* seq-mean-token-mean' "$@" --pg-variant gspo --loss-agg-mode token-mean || return 1
    for given in 'with this --pg-variant, which has no range of ratios=--pg-variant gpg --clip-ratio-high 0.3' \
        'with this --pg-variant, which has no range of ratios=--pg-variant gpg --clip-ratio 0.3' \
        'clip-ratio has no effect beside=--clip-ratio 0.3 --clip-ratio-low 0.1 --clip-ratio-high 0.2' \
        'without --kl-loss-coef or --kl-in-reward=--kl-loss-type k1' \
        'without --kl-loss-coef or --kl-in-reward=--ref-tensor-model-parallel-size 1' \
        'more than the responses of an iteration=--rollout-batch-size 2 --global-batch-size 17' \
        'more than the responses of an iteration=--rollout-batch-size 2 --gradient-accumulation-steps 17' \
        'adv-estimator grpo=--adv-estimator gae --no-norm-adv-by-std' \
        'gamma needs --adv-estimator gae=--adv-estimator rloo --gamma 0.9'; do
        # shellcheck disable=SC2086
        refused "${given%%=*}" "$@" ${given#*=} || return 1
    done
    refused 'gamma needs --adv-estimator gae' "$@" --gamma 0.9 || return 1
    refused 'no-norm-adv-by-std) needs --adv-estimator grpo' "$@" --adv-estimator rloo --no-norm-adv-by-std || return 1
    refused 'stage rm and --loss-on exclude' "$train" --stage rm --value-head --load "$work/base" --finetune \
        --data-path "$work/rl.jsonl" --seq-length 16 --train-iters 1 --lr 1 --loss-on all || return 1
    refused 'eval-iters 9: --stage rl has no evaluation' "$@" --eval-iters 9 || return 1
    for given in check-for-spiky-loss eval-interval=9 profile trace=x.json log-straggler loss-on=all \
        long-samples=drop split=1,0,0 variable-seq-lengths response-key=r dataloader-type=cyclic eod-mask-loss; do
        option=${given%%=*} value=${given#*=}
        [ "$option" = "$value" ] && value=
        refused "stage rl.* and --$option exclude each other" "$@" "--$option" ${value:+"$value"} || return 1
    done
    refused 'rollout-batch-size x --num-return-sequences, the default --global-batch-size, = 6 must be' "$@" \
        --rollout-batch-size 3 --num-return-sequences 2 --micro-batch-size 4 || return 1
    sed '300s/"answer": "[0-9]*"/"answer": "none"/' "$work/rl.jsonl" >"$work/words.jsonl"
    refused 'words.jsonl:300: the answer "none" has no number' "$@" --reward number --data-path "$work/words.jsonl" ||
        return 1
    head -n 50 "$work/rl.jsonl" >"$work/other.jsonl"
    refused 'the prompts are not those of the start of the run' "$train" --stage rl --load "$work/run.grpo" \
        --data-path "$work/other.jsonl" --seq-length 16 --max-new-tokens 4 --train-iters 9 --lr 1e-3 \
        --chat-template plain --rollout-batch-size 6 --num-return-sequences 4 --global-batch-size 8 || return 1
    refused 'begun with --rollout-batch-size 6' "$train" --stage rl --load "$work/run.grpo" \
        --data-path "$work/rl.jsonl" --seq-length 16 --max-new-tokens 4 \
        --train-iters 9 --lr 1e-3 --chat-template plain --rollout-batch-size 5 \
        --num-return-sequences 4
}

write_data
check the_format_is_learned learn_format
check grpo_learns_to_sort grpo_learns
check a_student_learns_from_its_teacher a_student_learns_from_its_teacher
check each_prompt_has_its_teacher each_prompt_has_its_teacher
check a_model_teaches_itself a_model_teaches_itself
check teachers_are_refused teachers_are_refused
check options_of_a_policy_are_idle_beside_a_teacher_alone options_of_a_policy_are_idle_beside_a_teacher_alone
check responses_wait_for_their_iteration responses_wait_for_their_iteration
check continued_responses_equal_uncut_ones continued_responses_equal_uncut_ones
check continued_responses_keep_their_log_probabilities continued_responses_keep_their_log_probabilities
check responses_in_progress_are_saved responses_in_progress_are_saved
check ppo_with_a_critic_learns_to_sort ppo_with_a_critic_learns
check rewards_are_added_up rewards_are_added_up
check bypass_mode_takes_the_generators_log_probabilities bypass_mode_takes_the_generators_log_probabilities
check rollouts_are_corrected rollouts_are_corrected
check the_generation_gap_is_small the_generation_gap_is_small
check a_resumed_run_goes_on_as_before a_resumed_run_goes_on_as_before
check a_damaged_critic_is_followed_by_the_one_before a_damaged_critic_is_followed_by_the_one_before
[ "${HAVE_MPI:-}" ] && check a_command_rewards a_command_rewards
check epochs_are_iterations epochs_are_iterations
check fewer_ranks_are_launched fewer_ranks_are_launched
check iterations_without_a_step_are_skipped iterations_without_a_step_are_skipped
check stop_strings_end_responses stop_strings_end_responses
check a_signal_ends_the_writing_of_responses a_signal_ends_the_writing_of_responses
check rewards_that_end_lose_nothing rewards_that_end_lose_nothing
check dpo_learns_an_order dpo_learns
check dropout_is_off_unless_given dropout_is_off_unless_given
check a_reward_model_rewards a_reward_model_rewards
check tokenizers_of_partners_are_compared tokenizers_of_partners_are_compared
check a_reward_model_has_its_own_shape a_reward_model_has_its_own_shape
check adapters_learn_with_their_base_as_reference adapters_learn
check recipes_run recipes_run
check contradictions_are_refused contradictions_are_refused
exit $failed
