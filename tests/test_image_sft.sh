#!/bin/sh
# Fine-tuning on conversations with pictures: losses equal those of transformers on every layout, a run that was stopped
# goes on equally, and pictures that cannot be read are errors of their lines.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
golden=tests/golden/vision/sft
expected=$golden/expected.json
mkdir "$work/model"
cp tests/golden/vision/qwen2_5_vl/config.json tests/golden/vision/qwen2_5_vl/model.safetensors "$work/model"
cp "$golden"/tokenizer*.json "$golden/chat_template.jinja" "$golden/preprocessor_config.json" "$work/model"
settings='--sft --seq-length 128 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 --min-lr 1e-3
    --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1
    --eval-iters 0 --log-interval 1 --device cpu'
data="--train-data-path $golden/lines.jsonl"

# trains ARGUMENTS...: on one rank from the golden weights; its metrics are in $work/metrics.jsonl.
trains() {
    rm -f "$work/metrics.jsonl"
    # shellcheck disable=SC2086
    "$train" $settings --load "$work/model" --finetune --metrics "$work/metrics.jsonl" "$@" >"$work/out" 2>"$work/err"
}

# trains_on RANKS ARGUMENTS...
trains_on() {
    number=$1
    shift
    rm -f "$work/metrics.jsonl"
    # shellcheck disable=SC2086
    on_ranks "$number" "$train" $settings $data --load "$work/model" --finetune --metrics "$work/metrics.jsonl" "$@"
}

# values NAME: a line for each step.
values() {
    sed -n "s/.*\"$1\": \([0-9.]*\).*/\1/p" "$work/metrics.jsonl"
}

# equals_the_reference: the losses and gradient norms of the last run are those of transformers, to 1e-5 of them.
equals_the_reference() {
    for key in lm_loss:losses grad_norm:grad_norms; do
        awk "/\"${key#*:}\"/ { on = 1; next } /\]/ { on = 0 } on { gsub(/[ ,]/, \"\"); print }" "$expected" \
            >"$work/expected"
        values "${key%:*}" >"$work/values"
        paste "$work/values" "$work/expected" | awk -v name="${key%:*}" '
            { d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || !(d <= 1e-5 * $2)) bad = 1; print name, $0 }
            END { exit bad || NR != 3 }' >"$work/err" || return 1
    done
}

# False, with a message, where this build or machine cannot read the conversations.
reads() {
    # shellcheck disable=SC2086
    trains $data && return
    grep 'built without libpng\|needs python3-jinja2' "$work/err" && return 1
    cat "$work/err"
}

losses_equal_transformers() {
    # shellcheck disable=SC2086
    trains $data && says 'lines.jsonl: 4 samples, 212 tokens, the loss counts 39; .*; 5 pictures' "$work/out" &&
        equals_the_reference
}

# Rows of any length too: an epoch of packed rows is two of them, so that a step has each sample twice.
layouts_train_alike() {
    # shellcheck disable=SC2086
    trains $data --sequence-packing --micro-batch-size 1 && equals_the_reference &&
        trains $data --variable-seq-lengths && equals_the_reference || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    trains_on 2 --tensor-model-parallel-size 2 --sequence-parallel && equals_the_reference &&
        trains_on 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 && equals_the_reference &&
        trains_on 2 --use-distributed-optimizer --sequence-packing --micro-batch-size 1 && equals_the_reference &&
        trains_on 4 --data-parallel-sharding-strategy optim_grads_params --micro-batch-size 1 && equals_the_reference &&
        trains_on 2 --context-parallel-size 2 && equals_the_reference &&
        trains_on 2 --context-parallel-size 2 --cp-comm-type all_gather --sequence-packing --micro-batch-size 1 &&
        equals_the_reference
}

a_stopped_run_goes_on_equally() {
    # shellcheck disable=SC2086
    set -- $data --sequence-packing --global-batch-size 1 --micro-batch-size 1 --train-iters 4
    trains "$@" && values lm_loss >"$work/whole" && trains "$@" --save "$work/saved" --exit-interval 2 || return 1
    values lm_loss >"$work/parts"
    [ -e "$work/saved/iter_0000002/preprocessor_config.json" ] || return 1
    # shellcheck disable=SC2086
    "$train" $settings "$@" --load "$work/saved" --save "$work/saved" --metrics "$work/more.jsonl" >"$work/out" \
        2>"$work/err" || return 1
    sed -n 's/.*"lm_loss": \([0-9.]*\).*/\1/p' "$work/more.jsonl" >>"$work/parts"
    [ "$(wc -l <"$work/parts")" -eq 4 ] && diff "$work/whole" "$work/parts" >"$work/err"
}

# names FOLDER PATTERN: the names of an adapter's tensors.
names() {
    grep -a -o "base_model[a-z_.0-9AB]*lora_$2.weight" "$1/adapter_model.safetensors" | sort -u
}

# Adapters of every linear layer, the tower's and the merger's too: their file names modules as peft does, a stopped run
# goes on equally, and the merged folder has the loss of the adapter.
adapters_of_the_tower_are_saved_resumed_and_merged() {
    # shellcheck disable=SC2086
    set -- $data --lora-rank 4 --lora-target all-linear --train-iters 4
    trains "$@" && values lm_loss >"$work/whole" && trains "$@" --save "$work/adapter" --exit-interval 2 || return 1
    values lm_loss >"$work/parts"
    cp -r "$work/adapter/iter_0000002" "$work/half"
    names "$work/half" '[AB]' >"$work/names"
    names tests/golden/vision/lora/qwen2_5_vl '[AB]' >"$work/expected"
    [ -s "$work/names" ] && diff "$work/names" "$work/expected" >"$work/err" || return 1
    for module in attn.proj mlp.0 mlp.2 qkv q_proj; do
        grep -q "\"$module\"" "$work/half/adapter_config.json" || return 1
    done
    refused "has adapters of the vision tower, which are not served" "$infer" --load "$work/model" --serve 0 \
        --serve-adapter one="$work/half" --device cpu || return 1
    # shellcheck disable=SC2086
    "$train" $settings "$@" --load "$work/model" --load-adapter "$work/adapter" --save "$work/adapter" \
        --metrics "$work/more.jsonl" >"$work/out" 2>"$work/err" || return 1
    sed -n 's/.*"lm_loss": \([0-9.]*\).*/\1/p' "$work/more.jsonl" >>"$work/parts"
    [ "$(wc -l <"$work/parts")" -eq 4 ] && diff "$work/whole" "$work/parts" >"$work/err" || return 1
    "$infer" --load "$work/model" --load-adapter "$work/half" --merge-adapter "$work/merged" --device cpu >"$work/out" \
        2>"$work/err" || return 1
    cp "$golden/preprocessor_config.json" "$work/merged"
    rm -f "$work/metrics.jsonl"
    # shellcheck disable=SC2086
    "$train" $settings $data --load "$work/merged" --finetune --train-iters 1 --metrics "$work/metrics.jsonl" \
        >"$work/out" 2>"$work/err" || return 1
    { values lm_loss && sed -n '1p;3p' "$work/whole"; } | tr '\n' ' ' >"$work/values"
    awk '{ d = $1 - $3; if (d < 0) d = -d; exit !(NF == 3 && $2 != $3 && d <= 1e-5 * $3) }' "$work/values"
}

# all-linear leaves out what is frozen; a name of the tower alone adapts it all the same.
frozen_parts_have_the_adapters_that_are_named() {
    while IFS='|' read -r words parts; do
        rm -rf "$work/some"
        # shellcheck disable=SC2086
        trains $data --lora-rank 4 $words --save "$work/some" --train-iters 1 || return 1
        names "$work/some/iter_0000001" A >"$work/names"
        for part in language_model visual.blocks visual.merger; do
            ! grep -q "$part" "$work/names" || printf '%s ' "$part"
        done >"$work/parts"
        [ "$(cat "$work/parts")" = "$parts " ] || return 1
    done <<'EOF'
--lora-target all-linear|language_model visual.blocks visual.merger
--lora-target all-linear --freeze-vision|language_model visual.merger
--lora-target all-linear --freeze-projector|language_model visual.blocks
--lora-target gate_proj --freeze-vision|language_model
--lora-target qkv --freeze-vision|visual.blocks
--lora-target q_proj,mlp.0,mlp.2 --freeze-projector|language_model visual.merger
EOF
}

# A line with a good picture, then one whose picture or conversation is bad.
bad_pictures_are_errors_of_their_lines() {
    cp tests/golden/images/square.png "$work/good.png"
    head -c 100 tests/golden/images/square.png >"$work/short.png"
    echo text >"$work/text.png"
    # an absurd size: 2^31 - 1 pixels a side
    { head -c 16 "$work/good.png" && printf '\177\377\377\377\177\377\377\377' && tail -c +25 "$work/good.png"; } \
        >"$work/absurd.png"
    while IFS='#' read -r content images pattern; do
        printf '{"messages": [{"role": "user", "content": %s}, {"role": "assistant", "content": "Yes."}]%s}\n' \
            '"<image>Is it?"' ', "images": ["good.png"]' "$content" "$images" >"$work/bad.jsonl"
        # shellcheck disable=SC2086
        refused "bad[.]jsonl:2: .*$pattern" "$train" $settings --load "$work/model" --finetune \
            --train-data-path "$work/bad.jsonl" || return 1
        # shellcheck disable=SC2086
        trains --train-data-path "$work/bad.jsonl" --skip-bad-samples 1 && says "^skipped .*$pattern" "$work/out" ||
            return 1
    done <<'EOF'
"<image>"#, "images": ["absent.png"]#absent.png: cannot be read: No such file
"<image>"#, "images": ["short.png"]#short.png: damaged or unsupported PNG
"<image>"#, "images": ["text.png"]#text.png: neither PNG nor JPEG
"<image>"#, "images": ["absurd.png"]#absurd.png: .
"<image>"#, "images": ["good.png", "good.png"]#has 2 pictures in "images" and 1 places
"<image><image>"#, "images": ["good.png"]#has 1 pictures in "images" and 2 places
"none"#, "images": ["good.png"]#has 1 pictures in "images" and 0 places
[{"type": "video", "video": "a.mp4"}]##has the type "video"
[{"type": "image_url", "image_url": {"url": "https:\/\/a.b\/c.png"}}]##is on a network
"Is <|image_pad|> it?"##has 0 pictures, and its text 1 image tokens
EOF
}

# Pictures as bytes in a column, as datasets of Hugging Face have them: a struct of bytes and the name of a file that
# need not exist.
bytes_of_parquet_equal_files() {
    python=${MT_PYTHON:-python3}
    "$python" -c 'import pyarrow' 2>/dev/null || python=build/python/bin/python
    if ! "$python" -c 'import pyarrow' 2>/dev/null; then
        echo 'skipped: no pyarrow is here'
        return 0
    fi
    "$python" - "$golden/lines.jsonl" "$work/lines.parquet" <<'END' >"$work/out" 2>"$work/err" || return 1
import json, os, sys
import pyarrow, pyarrow.parquet
rows = []
for line in open(sys.argv[1]):
    row = json.loads(line)
    names, parts = row.pop("images", []), []
    for message in row["messages"]:  # the picture of a part goes beside the messages
        if isinstance(message["content"], list):
            names += [part["image"] for part in message["content"] if part["type"] == "image"]
            message["content"] = "".join("<image>" if part["type"] == "image" else part["text"]
                                         for part in message["content"])
    folder = os.path.dirname(sys.argv[1])
    row["pictures"] = [{"bytes": open(os.path.join(folder, name), "rb").read(), "path": "absent.png"} for name in names]
    rows.append(row)
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sys.argv[2])
END
    (export MT_PYTHON="$python"
    trains --train-data-path "$work/lines.parquet" --image-key pictures) && says '; 5 pictures' "$work/out" &&
        equals_the_reference || return 1
    sed 's/"images"/"pictures"/; s|\.\./\.\./images/||g' "$golden/lines.jsonl" >"$work/lines.jsonl"
    trains --train-data-path "$work/lines.jsonl" --image-key pictures --image-folder tests/golden/images &&
        equals_the_reference
}

# A token is 8 x 8 pixels: of five pictures each has one, or up to four, or as many as the processor's file allows.
pixels_are_limited() {
    for pixels in 64 256 0; do
        # shellcheck disable=SC2086
        trains $data --image-min-pixels 64 --image-max-pixels $pixels || return 1
        sed -n 's/.*: 4 samples, \([0-9]*\) tokens.*/\1/p' "$work/out"
    done | tr '\n' ' ' | awk '{ print; exit !($1 < $2 && $2 <= $1 + 15 && $2 < $3 && $3 == 212) }' || return 1
    # shellcheck disable=SC2086
    refused 'pictures would have 256 to 100 pixels' "$train" $settings $data --load "$work/model" --finetune \
        --image-max-pixels 100
}

what_is_not_supported_is_refused() {
    dynamic='--sequence-packing --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 128'
    while IFS='|' read -r ranks words pattern; do
        # shellcheck disable=SC2086
        set -- "$train" $settings $data --load "$work/model" --finetune $words
        [ "$ranks" = 1 ] || set -- env $(mpirun_here) -np "$ranks" "$@"
        if [ "$words" = --language-model-only ] || [ "$ranks" -gt 1 ]; then # it warns, or ends with words of mpirun
            [ "$ranks" = 1 ] || [ -n "${HAVE_MPI:-}" ] || continue
            ! "$@" >"$work/out" 2>"$work/err" </dev/null && says "^error: .*$pattern" "$work/err" || return 1
        else
            refused "$pattern" "$@" || return 1
        fi
    done <<EOF
1|--seq-length 64|lines.jsonl:2: has 97 tokens with those of its 3 pictures, and --seq-length 64 would cut a picture
1|--chat-template chatml|lines.jsonl:1: has pictures, which only the chat template of a folder writes
1|--language-model-only|lines.jsonl:1: has "images", which only a model with a vision tower reads
1|--mtp-num-layers 1|--mtp-num-layers 1: modules of multi-token prediction do not know images
1|--lora-rank 4 --lora-target patch_embed.proj|model.visual.patch_embed.proj is a convolution in transformers
2|--context-parallel-size 2 $dynamic|--dynamic-context-parallel: the images of a model with a vision tower are divided
EOF
}

reads || exit 0
check losses_equal_transformers losses_equal_transformers
check layouts_train_alike layouts_train_alike
check a_stopped_run_goes_on_equally a_stopped_run_goes_on_equally
check adapters_of_the_tower_are_saved_resumed_and_merged adapters_of_the_tower_are_saved_resumed_and_merged
check frozen_parts_have_the_adapters_that_are_named frozen_parts_have_the_adapters_that_are_named
check bad_pictures_are_errors_of_their_lines bad_pictures_are_errors_of_their_lines
check bytes_of_parquet_equal_files bytes_of_parquet_equal_files
check pixels_are_limited pixels_are_limited
check what_is_not_supported_is_refused what_is_not_supported_is_refused
exit $failed
