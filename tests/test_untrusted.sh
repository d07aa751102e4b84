#!/bin/sh
# Folders from strangers: pipes and devices in them do not block, links do not lead a copy out of them, numbers out of
# range and files that shrink are errors of one line.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
preprocess=$(dirname "$train")/data/preprocess

small='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16
    --micro-batch-size 2 --global-batch-size 2 --lr 1e-2 --eval-iters 0'
text=$work/text_text_document

# A text long enough that most of its pages are not read in the first steps, and a run on it with its tokenizer.
i=0
while [ $i -lt 3000 ]; do
    echo "a line of text with the number $i, and a few more words so that it is not too short"
    i=$((i + 1))
done >"$work/text.txt"
"$preprocess" --input "$work/text.txt" --documents lines --output-prefix "$work/text" --tokenizer-type ByteLevel \
    >"$work/out" 2>&1 || exit 1
# shellcheck disable=SC2086
"$train" $small --data-path "$text" --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model tests/golden/tokenizer/bytelevel.json --train-iters 2 --save "$work/run" \
    >"$work/out" 2>&1 </dev/null || { cat "$work/out" && exit 1; }

# trains ARGUMENTS...: a command for `refused` that ends after 25 s at the latest; train does not end by SIGTERM in a
# call that hangs.
trains() {
    # shellcheck disable=SC2086
    timeout -k 5 $hang "$train" $small --train-iters 4 --data-path "$text" "$@"
}

# copy: a fresh copy of the run in $work/copy; $folder is its checkpoint.
copy() {
    rm -rf "$work/copy"
    cp -R "$work/run" "$work/copy"
    folder=$work/copy/iter_0000002
}

files='config.json tokenizer.json trainer.json checksums.json model.safetensors optimizer.safetensors
    ../latest_checkpointed_iteration.txt'

a_pipe_in_the_place_of_any_file_is_refused_at_once() {
    for file in $files; do
        copy
        rm "$folder/$file"
        mkfifo "$folder/$file"
        refused "$(basename "$file")" trains --load "$work/copy" --tokenizer-type HuggingFaceTokenizer \
            --tokenizer-model "$folder" || return 1
    done
    for file in tokenizer.json generation_config.json; do # `infer` reads these in its own way
        copy
        rm -f "$folder/$file" "$folder/checksums.json" "$folder/trainer.json"
        mkfifo "$folder/$file"
        refused "$file" timeout $hang "$infer" --load "$folder" --prompt a || return 1
    done
    copy
    rm "$folder/model.safetensors"
    mkfifo "$folder/shard"
    echo '{"weight_map": {"lm_head.weight": "shard"}}' >"$folder/model.safetensors.index.json"
    rm "$folder/checksums.json" "$folder/trainer.json"
    refused "shard: cannot be read: it is a pipe" timeout $hang "$infer" --load "$folder" --prompt a
}

a_device_in_the_place_of_a_file_is_refused() {
    for file in trainer.json model.safetensors; do
        copy
        rm "$folder/$file"
        ln -s /dev/zero "$folder/$file"
        refused "$(basename "$file")" trains --load "$work/copy" --tokenizer-type HuggingFaceTokenizer \
            --tokenizer-model "$folder" || return 1
    done
}

pipes_named_by_options_are_refused() {
    mkfifo "$work/pipe" "$work/pipe.bin" "$work/pipe.idx" "$work/named.bin"
    cp "$text.idx" "$work/named.idx"
    # shellcheck disable=SC2086
    for option in --config --hf-config --tokens-file; do
        refused "pipe: cannot be read: it is a pipe" timeout $hang "$train" $small --train-iters 1 --vocab-size 300 \
            $option "$work/pipe" || return 1
    done
    # shellcheck disable=SC2086
    for prefix in pipe named; do
        refused "$prefix.*: cannot be read: it is a pipe" timeout $hang "$train" $small --train-iters 1 \
            --vocab-size 300 \
            --data-path "$work/$prefix" || return 1
    done
    refused "pipe: cannot be read: it is a pipe" timeout $hang "$infer" --load "$work/run" --score "$work/pipe" \
        --seq-length 8 --out "$work/scores" || return 1
    refused "zero: cannot be read: it is a device" "$preprocess" --input /dev/zero --output-prefix "$work/zero" \
        --tokenizer-type ByteLevel
}

# The records that fit into the pipe go there, then one warning follows, and the run ends as without --metrics.
metrics_for_a_pipe_that_nobody_reads_do_not_stop_the_run() {
    rm -f "$work/pipe" && mkfifo "$work/pipe"
    # shellcheck disable=SC2086
    timeout -k 5 $hang "$train" $small --train-iters 500 --mock-data --vocab-size 300 --metrics "$work/pipe" \
        >"$work/out" 2>"$work/err" </dev/null && grep -q ' 500/500 100% ' "$work/out" &&
        [ "$(wc -l <"$work/err")" = 1 ] &&
        says '^warning: .*pipe: cannot be written: nobody reads this pipe' "$work/err"
}

whole_numbers_of_trainer_json_have_a_range() {
    for key in iteration consumed_train_samples consumed_valid_samples optimizer_step; do
        copy
        rm "$folder/checksums.json"
        sed "s/\"$key\": [0-9]*/\"$key\": 9223372036854775807/; s/\"version\": 2/\"version\": 1/" \
            "$work/run/iter_0000002/trainer.json" >"$folder/trainer.json"
        refused "trainer.json: has no whole number \"$key\" in its range" trains --load "$work/copy" || return 1
    done
    sed 's/"loss_average": [^,]*/"loss_average": "x"/; s/"version": 2/"version": 1/' \
        "$work/run/iter_0000002/trainer.json" >"$folder/trainer.json"
    refused 'trainer.json: has no number "loss_average"' trains --load "$work/copy" || return 1
    for value in 5 null '[]'; do
        sed "s/\"optimizer\": [^,]*/\"optimizer\": $value/; s/\"version\": 2/\"version\": 1/" \
            "$work/run/iter_0000002/trainer.json" >"$folder/trainer.json"
        refused 'trainer.json: "optimizer" is not a name' trains --load "$work/copy" || return 1
    done
}

# The tokenizer's files are copied into every checkpoint, so none may be somebody's secret.
a_link_out_of_a_folder_is_not_copied() {
    copy
    echo '{"secret": 1}' >"$work/secret"
    ln -sf "$work/secret" "$folder/tokenizer_config.json"
    rm "$folder/checksums.json"
    sed 's/"version": 2/"version": 1/' "$work/run/iter_0000002/trainer.json" >"$folder/trainer.json"
    refused "its tokenizer_config.json is a link to .*/secret, outside the folder, and is not copied" \
        trains --load "$work/copy" --save "$work/saved" || return 1
    refused "its tokenizer_config.json is a link to .*/secret" trains --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model "$folder" --save "$work/saved" || return 1
    [ ! -e "$work/saved/iter_0000004" ] || return 1
    timeout $hang "$infer" --load "$folder" --prompt a --max-new-tokens 2 >"$work/out" 2>"$work/err" </dev/null
}

# Links inside a folder, files that the user named, and the layout of Hugging Face's cache stay possible.
a_link_inside_a_folder_is_copied() {
    copy
    cache=$work/cache/models--a--b
    mkdir -p "$cache/blobs" "$cache/snapshots/0123"
    mv "$folder/tokenizer.json" "$cache/blobs/4567"
    ln -s ../../blobs/4567 "$cache/snapshots/0123/tokenizer.json"
    ln -s "$cache/blobs/4567" "$work/named.json"
    for model in "$cache/snapshots/0123" "$work/named.json" "$work/run"; do
        rm -rf "$work/saved"
        trains --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$model" --save "$work/saved" \
            >"$work/out" 2>"$work/err" </dev/null || return 1
        cmp "$work/saved/iter_0000004/tokenizer.json" tests/golden/tokenizer/bytelevel.json || return 1
    done
}

# saves: continues a copy of the run by two steps and saves there.
saves() {
    trains --load "$work/copy" --save "$work/copy" --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model tests/golden/tokenizer/bytelevel.json
}

a_lock_that_is_no_regular_file_is_refused() {
    copy
    echo keep >"$work/victim"
    for target in "$work/victim" "$work/absent"; do
        ln -sf "$target" "$work/copy/.lock"
        refused "copy/.lock: cannot be locked: it is not a regular file; remove it, or choose another --save" saves ||
            return 1
    done
    [ "$(cat "$work/victim")" = keep ] && ! [ -e "$work/absent" ] || return 1
    rm "$work/copy/.lock"
    mkfifo "$work/copy/.lock"
    refused "copy/.lock: cannot be locked: it is not a regular file" saves || return 1
    rm "$work/copy/.lock"
    saves >"$work/out" 2>"$work/err" </dev/null
}

a_save_replaces_a_tracker_that_is_a_pipe_or_a_link() {
    for kind in pipe link; do
        copy
        tracker=$work/copy/latest_checkpointed_iteration.txt
        echo 2 >"$work/victim"
        rm "$tracker"
        if [ $kind = pipe ]; then mkfifo "$tracker"; else ln -s "$work/victim" "$tracker"; fi
        trains --load "$folder" --save "$work/copy" >"$work/out" 2>"$work/err" </dev/null || return 1
        [ -f "$tracker" ] && ! [ -L "$tracker" ] && [ "$(cat "$tracker")" = 4 ] && [ "$(cat "$work/victim")" = 2 ] ||
            return 1
    done
}

a_plot_of_a_pipe_is_refused() {
    command -v gnuplot >/dev/null || { echo "skipped: gnuplot is absent" && return 0; }
    mkfifo "$work/plot.jsonl"
    ! timeout $hang data/scripts/plot.sh "$work/plot.jsonl" >"$work/out" 2>"$work/err" </dev/null &&
        says "plot.jsonl: cannot be read, or is not a regular file" "$work/err"
}

# shrinks FILE BYTES: training must end with one line that names the file, some time after it was cut.
shrinks() {
    cp "$text.bin" "$work/cut.bin"
    cp "$text.idx" "$work/cut.idx"
    rm -f "$work/metrics"
    # shellcheck disable=SC2086
    timeout $hang "$train" $small --train-iters 1000000 --vocab-size 300 --data-path "$work/cut" \
        --log-interval 1000 --metrics "$work/metrics" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    waited=0
    until [ -s "$work/metrics" ] || [ $waited -ge $((10 * hang)) ]; do sleep 0.1 && waited=$((waited + 1)); done
    truncate -s "$2" "$work/$1"
    wait $job
    status=$?
    [ $status = 1 ] || { echo "exit status $status" && return 1; }
    [ "$(wc -l <"$work/err")" = 1 ] && says "^error: .*/$1: .*became shorter while it was in use" "$work/err"
}

data_that_shrinks_during_training_is_an_error() {
    shrinks cut.bin 8192 && shrinks cut.idx 4096 && shrinks cut.bin "$(($(wc -c <"$text.bin") - 2))"
}

check "a pipe in the place of any file is refused at once" a_pipe_in_the_place_of_any_file_is_refused_at_once
check "a device in the place of a file is refused" a_device_in_the_place_of_a_file_is_refused
check "pipes named by options are refused" pipes_named_by_options_are_refused
check "metrics for a pipe that nobody reads do not stop the run" \
    metrics_for_a_pipe_that_nobody_reads_do_not_stop_the_run
check "whole numbers of trainer.json have a range" whole_numbers_of_trainer_json_have_a_range
check "a link out of a folder is not copied" a_link_out_of_a_folder_is_not_copied
check "a link inside a folder is copied" a_link_inside_a_folder_is_copied
check "a lock that is no regular file is refused" a_lock_that_is_no_regular_file_is_refused
check "a save replaces a tracker that is a pipe or a link" a_save_replaces_a_tracker_that_is_a_pipe_or_a_link
check "a plot of a pipe is refused" a_plot_of_a_pipe_is_refused
check "data that shrinks during training is an error" data_that_shrinks_during_training_is_an_error
exit $failed
