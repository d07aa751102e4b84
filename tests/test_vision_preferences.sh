#!/bin/sh
# Preferences with pictures: losses of DPO and of a reward model equal those of transformers on every layout, a run that
# was stopped goes on equally, saved reward models keep tower and head, and bad lines are errors.
# Sections of megatron.c: §21
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
golden=tests/golden/vision/preferences
expected=$golden/expected.json
model=tests/golden/vision/qwen2_5_vl
mkdir "$work/model" "$work/reward"
for folder in "$work/model" "$work/reward"; do
    cp $model/config.json $model/model.safetensors tests/golden/vision/sft/tokenizer*.json "$folder"
    cp tests/golden/vision/sft/chat_template.jinja tests/golden/vision/sft/preprocessor_config.json "$folder"
done
mv "$work/reward/model.safetensors" "$work/reward/base.safetensors"
cp $golden/score.safetensors "$work/reward"
cp $golden/reward.index.json "$work/reward/model.safetensors.index.json"
sed 's/"Qwen2_5_VLForConditionalGeneration"/"Qwen2_5_VLForSequenceClassification"/
    s/^{$/{ "id2label": {"0": "LABEL_0"},/' $model/config.json >"$work/reward/config.json"
settings='--seq-length 128 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --min-lr 1e-3
    --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-4 --weight-decay 0.1 --clip-grad 1
    --eval-iters 0 --log-interval 1 --device cpu'
data="--train-data-path $golden/pairs.jsonl"

# trains RANKS STAGE ARGUMENTS...: from the golden weights; its metrics are in $work/metrics.jsonl.
trains() {
    number=$1 stage=$2
    shift 2
    rm -f "$work/metrics.jsonl"
    [ "$stage" = rm ] && from=$work/reward || from=$work/model
    # shellcheck disable=SC2086
    on_ranks "$number" "$train" --stage "$stage" $settings --load "$from" --finetune --metrics "$work/metrics.jsonl" \
        "$@"
}

# values NAME FILE: a line for each step.
values() {
    sed -n "s/.*\"$1\": \([0-9.]*\).*/\1/p" "$2"
}

# equals_the_reference STAGE: losses and gradient norms of the last run are those of transformers, to 1e-5 of them.
equals_the_reference() {
    for key in lm_loss:losses grad_norm:grad_norms; do
        awk -v stage="\"$1\"" -v key="\"${key#*:}\"" '
            index($0, stage) { of_stage = 1 }
            of_stage && index($0, key) { on = 1; next }
            on && /\]/ { exit }
            on { gsub(/[ ,]/, ""); print }' "$expected" >"$work/expected"
        values "${key%:*}" "$work/metrics.jsonl" | paste - "$work/expected" | awk -v name="${key%:*}" '
            { d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || !(d <= 1e-5 * $2)) bad = 1; print name, $0 }
            END { exit bad || NR != 3 }' >"$work/err" || return 1
    done
}

# False, with a message, where this build or machine cannot read the conversations.
reads() {
    # shellcheck disable=SC2086
    trains 1 dpo $data && return
    grep 'built without libpng\|needs python3-jinja2' "$work/err" && return 1
    cat "$work/err"
}

losses_equal_transformers() {
    # shellcheck disable=SC2086
    trains 1 dpo $data && says 'pairs.jsonl: 8 samples, .*; 8 pictures' "$work/out" && equals_the_reference dpo &&
        trains 1 rm $data && equals_the_reference rm
}

layouts_train_alike() {
    for stage in dpo rm; do
        # shellcheck disable=SC2086
        trains 1 $stage $data --sequence-packing && equals_the_reference $stage || return 1
        [ -n "${HAVE_MPI:-}" ] || continue
        while read -r ranks layout; do
            # shellcheck disable=SC2086
            trains "$ranks" $stage $data $layout && equals_the_reference $stage || {
                echo "$stage on $ranks ranks: $layout"
                return 1
            }
        done <<'END'
2 --tensor-model-parallel-size 2 --sequence-parallel
2 --pipeline-model-parallel-size 2
2 --use-distributed-optimizer --sequence-packing
4 --data-parallel-sharding-strategy optim_grads_params
END
    done
    [ -n "${HAVE_MPI:-}" ] || return 0
    # shellcheck disable=SC2086
    trains 2 dpo $data --ref-tensor-model-parallel-size 2 && equals_the_reference dpo
}

a_stopped_run_goes_on_equally() {
    for stage in dpo rm; do
        # shellcheck disable=SC2086
        trains 1 $stage $data && values lm_loss "$work/metrics.jsonl" >"$work/whole" || return 1
        # shellcheck disable=SC2086
        trains 1 $stage $data --save "$work/$stage" --exit-interval 2 || return 1
        values lm_loss "$work/metrics.jsonl" >"$work/parts"
        more=$([ $stage = rm ] || echo --ref-load "$work/model")
        rm -f "$work/more.jsonl"
        # shellcheck disable=SC2086
        "$train" --stage $stage $settings $data --load "$work/$stage" --save "$work/$stage" $more \
            --metrics "$work/more.jsonl" >"$work/out" 2>"$work/err" || return 1
        values lm_loss "$work/more.jsonl" >>"$work/parts"
        [ "$(wc -l <"$work/parts")" -eq 3 ] && diff "$work/whole" "$work/parts" >"$work/err" || return 1
    done
    says '"Qwen2_5_VLForSequenceClassification"' "$work/rm/iter_0000003/config.json" &&
        says '"visual.merger.ln_q.weight"' "$work/rm/iter_0000003/model.safetensors.index.json" &&
        says '"score.weight"' "$work/rm/iter_0000003/model.safetensors.index.json"
}

# Pairs too long are left out with their pictures, and those of later pairs stay theirs.
pairs_that_are_left_out_take_their_pictures_with_them() {
    { head -n 2 $golden/pairs.jsonl | sed 's/"Wide, gray."/"Wide, gray, and longer than the room in a row is."/' &&
        tail -n 2 $golden/pairs.jsonl; } | sed "s|\.\./\.\./images|$(pwd)/tests/golden/images|g" >"$work/long.jsonl"
    sed 2d "$work/long.jsonl" >"$work/short.jsonl"
    for file in long short; do
        trains 1 dpo --train-data-path "$work/$file.jsonl" --seq-length 80 --global-batch-size 3 --long-samples drop ||
            return 1
        values lm_loss "$work/metrics.jsonl" >"$work/$file"
        says '6 samples, .*; 4 pictures' "$work/out" || return 1
    done
    [ "$(wc -l <"$work/long")" -eq 3 ] && diff "$work/long" "$work/short"
}

# numbers KEY COLUMN: of the pairs of the reference, 1 for the preferred response.
numbers() {
    awk -v key="\"$1\"" -v column="$2" '
        index($0, key) { on = 1; next }
        on && /^ \]/ { exit }
        on && /^   / { gsub(/[ ,]/, ""); if (n++ % 2 == column - 1) print }' "$expected"
}

# --score reads pictures too: the log-probability of a response, and its reward, on several ranks and in micro-batches.
scores_equal_transformers() {
    for response in 1 2; do
        set -- 'A square.' '"Wide, gray."' 'None.' 'Yes.'
        [ $response = 1 ] || set -- 'Who knows' '[{"type": "text", "text": "Big."}]' 'One of them.' 'No, it is small.'
        tr -d '\n' <<END | tr '@' '\n' | sed "s|FOLDER|$(pwd)/tests/golden/images|g" >"$work/score.jsonl"
{"prompt": "<image>What?", "response": "$1", "images": ["FOLDER/square.png"]}@
{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image", "image": "FOLDER/gray.png"},
 {"type": "text", "text": "Both?"}]}, {"role": "assistant", "content": $2}], "images": ["FOLDER/wide.png"]}@
{"prompt": "No picture.", "response": "$3"}@
{"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Big."},
 {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "$4"}], "images": "FOLDER/large.png"}@
END
        while read -r ranks layout; do
            [ "$ranks" = 1 ] || [ -n "${HAVE_MPI:-}" ] || continue
            for kind in logprob:reference:model reward:values:reward; do
                rest=${kind#*:}
                numbers "${rest%:*}" $response >"$work/wanted"
                # shellcheck disable=SC2086
                on_ranks "$ranks" "$infer" --load "$work/${rest#*:}" --device cpu --score "$work/score.jsonl" \
                    --seq-length 128 --out "$work/scores.jsonl" $layout || return 1
                sed -n "s/.*\"${kind%%:*}\":\([-0-9.e]*\).*/\1/p" "$work/scores.jsonl" | paste - "$work/wanted" | awk '
                    { d = $1 - $2; if (d < 0) d = -d; w = $2 < 0 ? -$2 : $2 }
                    NF != 2 || d > 1e-5 * w { bad = 1 }
                    { print }
                    END { exit bad || NR != 4 }' >"$work/err" || return 1
            done
        done <<'END'
1
1 --micro-batch-size 4
2 --tensor-model-parallel-size 2
2
END
    done
}

bad_lines_are_errors() {
    cp tests/golden/images/square.png "$work/good.png"
    while IFS='#' read -r prompt chosen images pattern; do
        printf '{"prompt": %s, "chosen": %s, "rejected": "No."%s}\n' '"<image>Is it?"' '"Yes."' \
            ', "images": ["good.png"]' "$prompt" "$chosen" "$images" >"$work/bad.jsonl"
        # shellcheck disable=SC2086
        refused "bad[.]jsonl:2: .*$pattern" "$train" --stage dpo $settings --load "$work/model" --finetune \
            --train-data-path "$work/bad.jsonl" || return 1
    done <<'END'
"<image>Is it?"#"Yes."#, "images": ["absent.png"]#absent.png: cannot be read: No such file
"Is it?"#"Yes."#, "images": ["good.png"]#has 1 pictures in "images" and 0 places
"<image>Is it?"#[{"role": "assistant", "content": [{"type": "image"}]}]#, "images": ["good.png"]#has 1 .* 2 places
"<image>Is it?"#"No."#, "images": ["good.png"]#"chosen" and "rejected" are the same response
END
    # shellcheck disable=SC2086
    refused 'lines.jsonl:1: has "images", which only a model with a vision tower reads' "$train" --stage dpo $settings \
        --load "$work/model" --finetune --train-data-path "$work/bad.jsonl" --language-model-only >/dev/null ||
        says '^error: .*has "images", which only a model with a vision tower reads' "$work/err"
}

reads || exit 0
check losses_equal_transformers losses_equal_transformers
check layouts_train_alike layouts_train_alike
check a_stopped_run_goes_on_equally a_stopped_run_goes_on_equally
check pairs_that_are_left_out_take_their_pictures_with_them pairs_that_are_left_out_take_their_pictures_with_them
check scores_equal_transformers scores_equal_transformers
check bad_lines_are_errors bad_lines_are_errors
exit $failed
