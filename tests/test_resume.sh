#!/bin/sh
# A run that is killed, at random moments of training and saving, resumes from its own folder as if never stopped; and
# the options that choose a checkpoint. MT_KILLS (6): number of kills. MT_DEVICE=cuda trains on a GPU, as one rank.
set -u
# In memory if possible: every save waits for the disk.
[ -w /dev/shm ] && export TMPDIR="${TMPDIR:-/dev/shm}"
. tests/suite.sh
kills=${MT_KILLS:-6}
device=${MT_DEVICE:-cpu}
export OMP_NUM_THREADS=1
launch=''
if [ "$device" = cpu ] && [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then
    launch="$(mpirun_here) -np 2"
fi

# With dropout, because its random numbers must continue too.
small='--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16
    --vocab-size 96 --mock-data --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style cosine
    --eval-iters 0 --deterministic-mode --device '$device

# run ARGUMENTS...: trains on one rank.
run() {
    # shellcheck disable=SC2086
    "$train" $small "$@" >"$work/out" 2>"$work/err" </dev/null
}

# refuses PATTERN ARGUMENTS...: the run ends with one error line that contains the pattern.
refuses() {
    pattern=$1
    shift
    if run "$@"; then
        echo "accepted: $*"
        return 1
    fi
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] && says "^error: .*$pattern" "$work/err"
}

# losses FILE: prints "ITERATION LOSS" for each whole line of a metrics file.
losses() {
    sed -n 's/.*"iteration": \([0-9]*\),.*"lm_loss": \([-+.0-9e]*\),.*}$/\1 \2/p' "$1"
}

# folders DIR: prints the iterations of its checkpoints on one line.
folders() {
    for folder in "$1"/iter_*; do expr "${folder##*_}" + 0; done | sort -n | tr '\n' ' '
}

# random LIMIT: prints a number of seconds below it; $drawn is the state.
drawn=${MT_SEED:-1}
random() {
    drawn=$(((drawn + 1) * 16807 % 2147483647))
    awk -v drawn=$drawn -v limit="$1" 'BEGIN { printf "%.3f\n", drawn / 2147483647 * limit }'
}

# ---- kills

steps=400
# start METRICS ARGUMENTS...: starts the job in a session of its own; $job is its number.
start() {
    metrics=$1
    shift
    # shellcheck disable=SC2086
    setsid $launch "$train" $small --train-iters $steps --save "$work/killed" --load "$work/killed" --save-interval 3 \
        --keep-checkpoints 3 --metrics "$metrics" "$@" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
}

# Kills every process of the job and waits until none is left.
kill_job() {
    for _ in $(seq 100); do
        # shellcheck disable=SC2046
        kill -KILL $(ps -o pid= -s "$job") 2>/dev/null
        [ -z "$(ps -o pid=,stat= -s "$job" | grep -v Z)" ] && break
        sleep 0.02
    done
    wait "$job" 2>/dev/null
}

# Every loss that a part of the run reported equals that of the uninterrupted run; no checkpoint was found damaged.
part_is_right() {
    grep -i 'damaged' "$work/err" && return 1
    losses "$1" >"$work/part"
    awk 'NR == FNR { want[$1] = $2; next } want[$1] != $2 { print "iteration " $1 ": " $2 ", not " want[$1]; bad = 1 }
        END { exit bad }' "$work/want" "$work/part"
}

kills_at_random_moments_change_nothing() {
    # shellcheck disable=SC2086
    $launch "$train" $small --train-iters $steps --save "$work/whole" --metrics "$work/whole.jsonl" >"$work/out" \
        2>"$work/err" </dev/null || return 1
    losses "$work/whole.jsonl" >"$work/want"
    [ "$(wc -l <"$work/want")" = $steps ] || return 1
    # Kills come within half of the time that such a run takes here, and runs that end before are counted: so it ends.
    half=$(series iteration_ms "$work/whole.jsonl" | awk '{ sum += $1 } END { print sum / 2000 }')
    done=0 finished=0 saving=0 parts=0
    while [ $done -lt "$kills" ] && [ $finished -lt $((2 * kills)) ]; do
        rm -f "$work/m.jsonl"
        [ $((done % 2)) = 0 ] && mode=--async-save || mode=
        # shellcheck disable=SC2086
        start "$work/m.jsonl" $mode
        if [ $((done % 4)) != 3 ]; then # else while it starts or loads
            while [ ! -s "$work/m.jsonl" ] && kill -0 $job 2>/dev/null; do sleep 0.01; done
            sleep "$(random "$half")"
        else
            sleep "$(random 1)"
        fi
        if ! kill -0 $job 2>/dev/null; then # it came to its end: once more
            wait $job || return 1
            finished=$((finished + 1))
            part_is_right "$work/m.jsonl" && cmp "$work/whole/latest/model.safetensors" \
                "$work/killed/latest/model.safetensors" || return 1
            rm -rf "$work/killed"
            continue
        fi
        kill_job
        done=$((done + 1))
        case $(echo "$work"/killed/iter_*.tmp-*) in *'*'*) ;; *) saving=$((saving + 1)) ;; esac
        [ -f "$work/m.jsonl" ] || continue
        parts=$((parts + 1))
        part_is_right "$work/m.jsonl" || return 1
    done
    rm -f "$work/m.jsonl"
    start "$work/m.jsonl"
    wait $job || return 1
    [ $done -gt 0 ] || return 1
    echo "$done kills, $saving of them while a checkpoint was written; $parts parts of runs; $finished ends before"
    part_is_right "$work/m.jsonl" &&
        cmp "$work/whole/latest/model.safetensors" "$work/killed/latest/model.safetensors" &&
        cmp "$work/whole/latest/optimizer.safetensors" "$work/killed/latest/optimizer.safetensors"
}

# ---- the checkpoint that a run resumes from

a_damaged_checkpoint_is_named_and_the_one_before_is_used() {
    run --train-iters 9 --save "$work/d" --save-interval 3 --metrics "$work/d.jsonl" || return 1
    losses "$work/d.jsonl" | tail -n 3 >"$work/want"
    file=$work/d/iter_0000009/optimizer.safetensors
    printf X | dd of="$file" bs=1 seek=$(($(wc -c <"$file") / 2)) conv=notrunc 2>/dev/null
    refuses 'optimizer.safetensors: damaged: bytes 0 to .* load .*/d/iter_0000006, the intact' --train-iters 9 \
        --load "$work/d" || return 1
    for how in "--load $work/d" "--load $work/elsewhere --auto-resume" '--auto-resume'; do
        rm -rf "$work/again" "$work/again.jsonl"
        cp -a "$work/d" "$work/again"
        # shellcheck disable=SC2086
        run --train-iters 9 --save "$work/again" $(echo "$how" | sed "s|/d$|/again|") --metrics "$work/again.jsonl" &&
            says 'warning: .*iter_0000009/optimizer.safetensors: damaged: .*; going on from iteration 6' "$work/err" &&
            losses "$work/again.jsonl" | cmp - "$work/want" &&
            run --train-iters 9 --load "$work/again" || return 1
    done
    for iteration in 3 6; do truncate -s -1 "$work/d/iter_000000$iteration/model.safetensors"; done
    refuses 'damaged: .*; no intact checkpoint is before it' --train-iters 9 --load "$work/d" --save "$work/d"
}

# Whichever file is cut, changed or gone, and whichever program reads it first: the damage has one text, which names the
# checkpoint to load, and that one continues in the other folder.
a_damaged_file_has_one_text_that_names_the_checkpoint_before() {
    run --train-iters 6 --save "$work/t" --save-interval 3 || return 1
    for file in config.json trainer.json checksums.json model.safetensors optimizer.safetensors; do
        for how in cut changed gone; do
            rm -rf "$work/hurt"
            cp -a "$work/t" "$work/hurt"
            path=$work/hurt/iter_0000006/$file
            case $how in
            cut) truncate -s -3 "$path" ;;
            changed) printf '~' | dd of="$path" bs=1 seek=300 conv=notrunc 2>/dev/null ;;
            gone) rm "$path" ;;
            esac
            refuses "iter_0000006.*: damaged: .*; load $work/hurt/iter_0000003, the intact checkpoint before it\$" \
                --train-iters 9 --load "$work/hurt" --save "$work/elsewhere" && says "$file" "$work/err" || return 1
            cp "$work/err" "$work/text"
            refuses "iter_0000006.*$file" --train-iters 9 --load "$work/hurt/iter_0000006" --save "$work/elsewhere" &&
                cmp "$work/err" "$work/text" || return 1
            [ $file = optimizer.safetensors ] && continue
            refused "$file" "$infer" --load "$work/hurt" --prompt-tokens 1 --print-tokens --device cpu &&
                cmp "$work/err" "$work/text" || return 1
            refused "$file" "$infer" --load "$work/hurt" --convert "$work/elsewhere" && cmp "$work/err" "$work/text" ||
                return 1
        done
    done
    run --train-iters 9 --load "$work/hurt/iter_0000003" --save "$work/elsewhere" && says '9/9 100%' "$work/out"
}

# The weights of a checkpoint whose optimizer is damaged or was taken away are there for all who read these alone.
files_that_are_not_read_are_not_compared() {
    run --train-iters 3 --save "$work/w1" || return 1
    for how in changed gone; do
        file=$work/w1/iter_0000003/optimizer.safetensors
        printf X | dd of="$file" bs=1 seek=2000 conv=notrunc 2>/dev/null
        [ $how = changed ] || rm "$file"
        rm -rf "$work/w2"
        "$infer" --load "$work/w1" --convert "$work/w2" >"$work/out" 2>"$work/err" &&
            cmp "$work/w1/iter_0000003/model.safetensors" "$work/w2/model.safetensors" &&
            "$infer" --load "$work/w1" --prompt-tokens 1 --print-tokens --device cpu >"$work/out" 2>"$work/err" &&
            run --train-iters 1 --load "$work/w1" --finetune && run --train-iters 4 --load "$work/w1" --no-load-optim &&
            refuses 'optimizer.safetensors' --train-iters 4 --load "$work/w1" || return 1
    done
}

# The same command again, after its last step: the checkpoint stays, byte for byte and in its time; another folder gets
# it, and more steps go on.
a_finished_run_says_so_and_saves_nothing() {
    run --train-iters 3 --save "$work/z" && ls -li --full-time "$work/z/iter_0000003" >"$work/want" || return 1
    for how in "--load $work/z" --auto-resume "--load $work/z/iter_0000003"; do
        # shellcheck disable=SC2086
        run --train-iters 3 --save "$work/z" $how && says 'nothing is left to train: .* raise --train-iters' \
            "$work/out" && ! grep '^saved' "$work/out" &&
            ls -li --full-time "$work/z/iter_0000003" | cmp - "$work/want" || return 1
    done
    run --train-iters 3 --load "$work/z" --save "$work/z2" && says '^saved iteration 3' "$work/out" &&
        run --train-iters 4 --load "$work/z" --save "$work/z" && ! grep 'nothing is left' "$work/out" &&
        says '^saved iteration 4' "$work/out"
}

# A flipped byte in the tokenizer of the last checkpoint: the tokenizer too is that of the one before.
everything_comes_from_the_checkpoint_that_is_whole() {
    run --vocab-size 600 --tokenizer-type HuggingFaceTokenizer --tokenizer-model tests/golden/tokenizer/bytelevel.json \
        --train-iters 4 --save "$work/e" --save-interval 2 || return 1
    for place in 0 200 2000; do
        rm -rf "$work/e2"
        cp -a "$work/e" "$work/e2"
        printf '~' | dd of="$work/e2/iter_0000004/tokenizer.json" bs=1 seek=$place conv=notrunc 2>"$work/err"
        run --vocab-size 600 --train-iters 5 --load "$work/e2" --save "$work/e2" &&
            says 'warning: .*tokenizer.json: damaged: .*; going on from iteration 2' "$work/err" &&
            cmp "$work/e2/iter_0000005/tokenizer.json" "$work/e/iter_0000002/tokenizer.json" || return 1
    done
}

# The optimizer on the host, with gradients and moments in bf16: the same losses as on the device, and a checkpoint of
# one continues on the other, bit for bit.
the_place_of_the_optimizer_changes_no_loss() {
    types='--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16'
    host='--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d'
    # shellcheck disable=SC2086
    run $types --train-iters 6 --metrics "$work/o.jsonl" && losses "$work/o.jsonl" >"$work/on-device" &&
        run $types $host --train-iters 6 --save "$work/o" --save-interval 3 --async-save --metrics "$work/o1.jsonl" &&
        losses "$work/o1.jsonl" | cmp - "$work/on-device" &&
        run $types $host --train-iters 6 --load "$work/o/iter_0000003" --metrics "$work/o2.jsonl" &&
        run $types --train-iters 6 --load "$work/o/iter_0000003" --metrics "$work/o3.jsonl" &&
        run --bf16 --train-iters 6 --load "$work/o/iter_0000003" --metrics "$work/o4.jsonl" || return 1
    for part in o2 o3; do
        losses "$work/$part.jsonl" >"$work/part"
        tail -n 3 "$work/on-device" | cmp - "$work/part" || return 1
    done
    losses "$work/o4.jsonl" >"$work/part" && [ "$(wc -l <"$work/part")" = 3 ] && # other types: other losses
        ! tail -n 3 "$work/on-device" | cmp -s - "$work/part"
}

# Moments and master weights with scales: a run resumes bit for bit; its checkpoint has fp32 states, which a run with
# other types takes, too. Without bf16 weights, or with an optimizer on the host, scales are refused.
states_with_scales_resume_bit_for_bit() {
    types='--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16'
    # shellcheck disable=SC2086
    run --bf16 $types --main-params-dtype fp16 --train-iters 6 --save "$work/x" --save-interval 3 --async-save \
        --metrics "$work/x.jsonl" &&
        run --bf16 $types --main-params-dtype fp16 --train-iters 6 --load "$work/x/iter_0000003" \
            --metrics "$work/x1.jsonl" &&
        run --bf16 --train-iters 6 --load "$work/x/iter_0000003" --metrics "$work/x2.jsonl" &&
        refuses '--main-params-dtype fp16 needs --bf16' $types --main-params-dtype fp16 --train-iters 6 &&
        refuses 'exp-avg-dtype fp8.*optimizer-cpu-offload' $types --train-iters 6 --optimizer-cpu-offload || return 1
    losses "$work/x.jsonl" | tail -n 3 >"$work/scaled-losses"
    losses "$work/x1.jsonl" | cmp - "$work/scaled-losses" || return 1
    losses "$work/x2.jsonl" >"$work/part" && [ "$(wc -l <"$work/part")" = 3 ] &&
        ! cmp -s "$work/part" "$work/scaled-losses"
}

# The linear of a mixer's input had the mixer's name among the scales of fp8: such a file continues bit for bit, and one
# with an unknown name does not.
scales_of_older_files_resume_bit_for_bit() {
    conv='--fp8-format hybrid --fp8-amax-history-len 4 --experimental-attention-variant short_conv
        --linear-attention-freq 2'
    # shellcheck disable=SC2086
    run $conv --train-iters 6 --save "$work/scaled" --save-interval 3 --metrics "$work/scaled.jsonl" || return 1
    scales=$(grep -la mixer_in.scale "$work/scaled/iter_0000003"/*.safetensors) || return 1
    for linear in mixer_in short_in other_in; do
        cp -a "$work/scaled/iter_0000003" "$work/$linear" &&
            sed "s/mixer_in/$linear/g" "$scales" >"$work/$linear/${scales##*/}" &&
            sed -i 's/"version": 2/"version": 1/' "$work/$linear/trainer.json" && # without checksums
            rm "$work/$linear/checksums.json" || return 1
        # shellcheck disable=SC2086
        run $conv --train-iters 6 --load "$work/$linear" --metrics "$work/$linear.jsonl" || return 1
        losses "$work/scaled.jsonl" | tail -n 3 >"$work/part"
        if [ $linear = other_in ]; then
            says 'lacks linears that are in fp8 now' "$work/err" || return 1
        else
            losses "$work/$linear.jsonl" | cmp - "$work/part" || return 1
        fi
    done
}

# Without a small file a run must not begin again at its first step.
a_lost_file_does_not_restart_the_run() {
    run --train-iters 9 --save "$work/l" --save-interval 3 || return 1
    for lost in latest_checkpointed_iteration.txt:10 iter_0000009/trainer.json:7 iter_0000009/checksums.json:7 \
        iter_0000009/optimizer.safetensors:7 'iter_0000009/trainer.json iter_0000009/checksums.json:7' \
        'latest_checkpointed_iteration.txt iter_0000009/config.json:7'; do
        rm -rf "$work/again" "$work/again.jsonl"
        cp -a "$work/l" "$work/again"
        # shellcheck disable=SC2086
        (cd "$work/again" && rm ${lost%:*}) || return 1
        run --train-iters 11 --load "$work/again" --save "$work/again" --metrics "$work/again.jsonl" &&
            says '^warning: .*; going on from iteration' "$work/err" &&
            [ "$(losses "$work/again.jsonl" | head -n 1 | cut -d ' ' -f 1)" = "${lost#*:}" ] || return 1
    done
    rm "$work/l/iter_0000009/trainer.json" "$work/l/iter_0000009/checksums.json"
    refuses 'its trainer.json is not there' --train-iters 11 --load "$work/l" && run --train-iters 1 --load "$work/l" \
        --finetune
}

# hold FOLDER: starts a run, $job, that saves there until it is killed, and waits for its first checkpoint.
hold() {
    rm -rf "$1"
    # shellcheck disable=SC2086
    setsid $launch "$train" $small --train-iters 1000000 --save "$1" --save-interval 5 --keep-checkpoints 2 \
        >"$work/first" 2>&1 </dev/null &
    job=$!
    until [ -e "$1/latest_checkpointed_iteration.txt" ]; do
        kill -0 $job || return 1
        sleep 0.1
    done
}

# A run that stays in the folder until it is killed, and others that must not touch it.
a_folder_in_use_is_refused() {
    hold "$work/u" || return 1
    refuses 'u: holds checkpoints of another run' --train-iters 5 --save "$work/u" &&
        refuses 'u: is in use by another run, process [0-9]* on host .*; wait for its end' --train-iters 5 \
            --save "$work/u" --overwrite &&
        refuses 'u: is in use by another run, process' --train-iters 5 --save "$work/u" --auto-resume
    status=$?
    kill_job
    [ $status = 0 ] && ! grep '^error' "$work/first" || return 1
    iteration=$(cat "$work/u/latest_checkpointed_iteration.txt")
    run --train-iters $((iteration + 1)) --save "$work/u" --auto-resume
}

# The lock of another host, which a shared disk passes on: the lock is held here, and the file names that host. A lock
# dies with its holder, so that the name alone, left by a host that is gone, stops no run.
a_lock_of_another_host_is_named_and_a_stale_one_is_taken() {
    hold "$work/node" || return 1
    echo 'process 4711 on host node7' >"$work/node/.lock"
    refuses 'node: is in use by another run, process 4711 on host node7; wait for its end' --train-iters 5 \
        --save "$work/node" --auto-resume
    status=$?
    kill_job
    iteration=$(cat "$work/node/latest_checkpointed_iteration.txt")
    [ $status = 0 ] && [ "$(cat "$work/node/.lock")" = 'process 4711 on host node7' ] &&
        run --train-iters $((iteration + 1)) --save "$work/node" --auto-resume &&
        says "process [0-9]* on host $(uname -n)\$" "$work/node/.lock"
}

# Another run saves and ends after this run has found the folder empty and before it holds the lock.
checkpoints_that_come_before_the_lock_are_seen() {
    has_disk || return 0
    run --train-iters 3 --save "$work/other" || return 1
    for how in --auto-resume "--load $work/late" ''; do
        rm -rf "$work/late"
        # shellcheck disable=SC2086
        LD_PRELOAD=$work/disk.so BEFORE_LOCK="cp -a $work/other/. $work/late" refuses 'late: h[eo]ld.*run' \
            --train-iters 2 --save "$work/late" $how || return 1
        [ "$(cat "$work/late/latest_checkpointed_iteration.txt")" = 3 ] || return 1
    done
    run --train-iters 4 --save "$work/late" --auto-resume && says '4/4 100%' "$work/out"
}

# A run that ends by an error before its first checkpoint leaves neither a lock nor a folder that was not there.
a_run_that_saves_nothing_leaves_no_lock() {
    refuses 'none.idx: cannot be read' --train-iters 3 --save "$work/never" --data-path "$work/none" \
        --mock-data=false &&
        [ ! -e "$work/never" ] && mkdir "$work/empty" &&
        refuses 'none.idx: cannot be read' --train-iters 3 --save "$work/empty/a/b//c/" --data-path "$work/none" \
            --mock-data=false && [ -z "$(ls -A "$work/empty")" ] &&
        refuses 'none.idx: cannot be read' --train-iters 3 --save "$work/empty" --data-path "$work/none" \
            --mock-data=false && [ -z "$(ls -A "$work/empty")" ] || return 1
    run --train-iters 1 --save "$work/empty" && [ -e "$work/empty/.lock" ] || return 1
    mkdir "$work/other-files" && touch "$work/other-files/mine" &&
        refuses 'none.idx: cannot be read' --train-iters 3 --save "$work/other-files" --data-path "$work/none" \
            --mock-data=false && [ -e "$work/other-files/mine" ]
}

a_missing_checkpoint_begins_anew_or_ends_the_run() {
    refuses 'holds no checkpoint to resume from' --train-iters 3 --load "$work/n" --save "$work/n" \
        --exit-on-missing-checkpoint &&
        run --train-iters 3 --load "$work/n" --save "$work/n" && says 'the run starts from the beginning' "$work/out" &&
        run --train-iters 3 --load "$work/n" --save "$work/n" --exit-on-missing-checkpoint &&
        refuses 'No such file' --train-iters 3 --load "$work/none" --save "$work/n"
}

# --auto-resume begins from --load with --finetune only at the first start.
auto_resume_finetunes_once() {
    run --train-iters 4 --save "$work/base" &&
        run --train-iters 3 --load "$work/base" --finetune --auto-resume --save "$work/tuned" &&
        [ "$(cat "$work/tuned/latest_checkpointed_iteration.txt")" = 3 ] &&
        run --train-iters 5 --load "$work/base" --finetune --auto-resume --save "$work/tuned" \
            --metrics "$work/t.jsonl" &&
        [ "$(losses "$work/t.jsonl" | cut -d' ' -f1 | tr '\n' ' ')" = '4 5 ' ]
}

# The recipe begins from a model by finetune: true. Its second start is refused, and each way that the errors name goes
# on; they name the line of the recipe.
a_recipe_that_finetunes_says_how_to_go_on() {
    printf 'load: %s\nfinetune: true\nsave: %s\n' "$work/untuned" "$work/tuned2" >"$work/tune.yaml"
    run --train-iters 4 --save "$work/untuned" && run --config "$work/tune.yaml" --train-iters 2 || {
        grep -q 'without libyaml' "$work/err" # the only valid error
        return
    }
    refuses 'finetune (.*tune.yaml:2) begins anew; continue their run by --auto-resume' --config "$work/tune.yaml" \
        --train-iters 3 &&
        refuses 'by --auto-resume or by setting --finetune (.*tune.yaml:2) to false' --config "$work/tune.yaml" \
            --train-iters 3 --load "$work/tuned2" &&
        run --config "$work/tune.yaml" --train-iters 3 --load "$work/tuned2" --finetune false &&
        says '3/3 100%' "$work/out" && run --config "$work/tune.yaml" --train-iters 4 --auto-resume &&
        says '4/4 100%' "$work/out" && [ "$(folders "$work/tuned2")" = '2 3 4 ' ]
}

# Models without a tokenizer are common: a note among the others, once, also where the run takes the checkpoint before.
a_model_without_a_tokenizer_is_noted_once() {
    run --train-iters 4 --save "$work/mute" --save-interval 2 && run --train-iters 5 --load "$work/mute" \
        --save "$work/mute" && [ "$(grep -c 'tokenizer' "$work/out")" = 1 ] &&
        says '^note: .*iter_0000004 has no tokenizer, so the checkpoints of this run have none; infer' "$work/out" &&
        ! head -n 1 "$work/out" | grep -q tokenizer || return 1
    printf X | dd of="$work/mute/iter_0000005/model.safetensors" bs=1 seek=3000 conv=notrunc 2>/dev/null
    run --train-iters 6 --load "$work/mute" --save "$work/mute" && says 'going on from iteration 4' "$work/err" &&
        [ "$(grep -c '^note: .* has no tokenizer' "$work/out")" = 1 ] && run --train-iters 7 --load "$work/mute" &&
        ! grep 'tokenizer' "$work/out"
}

checkpoints_stay_as_options_say() {
    run --train-iters 12 --save "$work/k1" --save-interval 2 && [ "$(folders "$work/k1")" = '2 4 6 8 10 12 ' ] &&
        run --train-iters 12 --save "$work/k2" --save-interval 2 --keep-checkpoints 2 --async-save &&
        [ "$(folders "$work/k2")" = '10 12 ' ] &&
        run --train-iters 12 --save "$work/k3" --save-interval 2 --save-retain-interval 4 &&
        [ "$(folders "$work/k3")" = '4 8 12 ' ] &&
        run --train-iters 10 --save "$work/k4" --save-interval 2 --save-retain-interval 4 --keep-checkpoints 2 &&
        [ "$(folders "$work/k4")" = '4 8 10 ' ]
}

# Steps continue during a save, and change parameters as soon as the copies allow it. On a GPU a step of 16 tokens takes
# less time than the copies of the embedding and its moments (over 300 MB), so an update that did not wait would show.
a_save_in_the_background_holds_what_one_at_once_does() {
    wide='--hidden-size 128 --micro-batch-size 1 --global-batch-size 2 --log-interval 100'
    [ "$device" = cpu ] || wide='--hidden-size 512 --vocab-size 50000 --micro-batch-size 1 --global-batch-size 1
        --log-interval 100'
    for how in '' '--bf16 --overlap-grad-reduce --overlap-param-gather --data-parallel-sharding-strategy optim' \
        '--bf16 --swiglu --disable-bias-linear --num-experts 4 --moe-router-score-function sigmoid
            --moe-router-enable-expert-bias'; do
        for into in at-once behind; do
            [ $into = behind ] && mode=--async-save || mode=
            # shellcheck disable=SC2086
            $launch "$train" $small $wide $how $mode --train-iters 4 --save "$work/$into" --save-interval 1 \
                >"$work/out" 2>"$work/err" </dev/null || return 1
        done
        [ "$(folders "$work/behind")" = '1 2 3 4 ' ] || return 1
        for iteration in 1 2 3 4; do
            for stem in model optimizer; do
                cmp "$work/at-once/iter_000000$iteration/$stem.safetensors" \
                    "$work/behind/iter_000000$iteration/$stem.safetensors" || return 1
            done
        done
        rm -rf "$work/at-once" "$work/behind"
    done
}

another_seed_goes_on_by_no_load_rng_only() {
    run --train-iters 4 --save "$work/s" --metrics "$work/s4.jsonl" &&
        refuses 'begun with --seed 1234, not 7' --train-iters 6 --load "$work/s" --seed 7 &&
        run --train-iters 6 --load "$work/s" --seed 7 --no-load-rng --metrics "$work/s7.jsonl" &&
        run --train-iters 6 --load "$work/s" --no-load-rng --metrics "$work/s.jsonl" || return 1
    [ "$(losses "$work/s7.jsonl" | wc -l)" = 2 ] && ! cmp -s "$work/s7.jsonl" "$work/s.jsonl"
}

# fp32 to bf16 and back: the master weights are the fp32 weights, so nothing is lost.
no_steps_convert_a_checkpoint() {
    run --train-iters 4 --save "$work/f" || return 1
    convert() {
        # shellcheck disable=SC2086
        $launch "$train" --load "$work/$1" --save "$work/$2" --train-iters 0 --device $device ${3:-} >"$work/out" \
            2>"$work/err" </dev/null
    }
    convert f h --bf16 && convert h g && convert f i || return 1
    [ "$(cat "$work/h/latest_checkpointed_iteration.txt")" = 4 ] || return 1
    [ "$(wc -c <"$work/h/model.safetensors")" -lt "$(wc -c <"$work/f/model.safetensors")" ] || return 1
    for stem in model optimizer; do
        cmp "$work/f/latest/$stem.safetensors" "$work/i/latest/$stem.safetensors" || return 1
    done
    run --train-iters 6 --load "$work/h" --bf16 && run --train-iters 6 --load "$work/i" --metrics "$work/i.jsonl" &&
        run --train-iters 6 --save "$work/w" --save-interval 4 && run --train-iters 6 --load "$work/f" \
        --metrics "$work/f.jsonl" && losses "$work/f.jsonl" >"$work/part" &&
        losses "$work/i.jsonl" | cmp - "$work/part" && [ "$(wc -l <"$work/part")" = 2 ] &&
        refuses '--train-iters 0 leaves no step; say how long to train' --train-iters 0
}

# A full disk during an asynchronous save ends the run with one error line.
an_error_in_the_background_ends_the_run() {
    rm -rf "$work/b"
    run --train-iters 3 --save "$work/b" || return 1
    if (
        ulimit -f 100 # files may have so many blocks of 512 bytes
        run --train-iters 100000 --save "$work/b" --load "$work/b" --save-interval 2 --async-save
    ); then
        return 1
    fi
    says '^error: .*too large for the limit on file sizes' "$work/err" && [ "$(grep -c . "$work/err")" = 1 ] &&
        [ "$(folders "$work/b")" = '3 ' ] && run --train-iters 4 --load "$work/b"
}

# The first update multiplies weights of 100 by lr times weight decay, so that queries and keys are 1e20, whose products
# fp32 does not hold. On a GPU the step after it is not yet checked when it is to be saved.
a_bad_step_is_not_saved() {
    refuses 'iteration 2 is bad, and there is no checkpoint yet to go back to' --train-iters 6 --lr 1e6 \
        --weight-decay 1e6 --init-method-std 100 --lr-decay-style constant --bad-step-policy rewind \
        --save "$work/bad" --save-interval 2 --log-interval 100 &&
        [ ! -e "$work/bad/iter_0000002" ]
}

# One sample of the validation data has a byte that the vocabulary lacks; on two ranks, one of them reads it. The save
# of the same iteration is there, with one error line, and a run that resumes goes on with the next validation samples.
an_evaluation_that_fails_does_not_lose_the_save() {
    preprocess=$(dirname "$train")/data/preprocess
    for i in 1 2 3 4 5 6 7 8; do echo "this is line $i of a long text for validation"; done >"$work/text.txt"
    for part in good bad; do
        [ $part = good ] || sed -i '4s/long/l\xc3\xb6ng/' "$work/text.txt"
        "$preprocess" --input "$work/text.txt" --documents lines --output-prefix "$work/$part" \
            --tokenizer-type ByteLevel >"$work/out" 2>"$work/err" || return 1
    done
    data="--train-data-path $work/good_text_document --vocab-size 128 --num-layers 1 --hidden-size 16 --seq-length 16
        --num-attention-heads 2 --global-batch-size 2 --lr 1e-3 --lr-decay-style constant --device cpu --train-iters 4
        --eval-interval 2 --eval-iters 9 --save-interval 2 --save $work/e"
    for async in '' --async-save; do
        rm -rf "$work/e"
        # shellcheck disable=SC2086
        $launch "$train" $data --valid-data-path "$work/bad_text_document" $async >"$work/out" 2>"$work/err" \
            </dev/null && return 1
        says 'saved iteration 2' "$work/out" && says '^error: .*token 195' "$work/err" &&
            [ "$(grep -c '^error: ' "$work/err")" = 1 ] && ! grep MPI_ABORT "$work/err" || return 1
        grep '"consumed_valid_samples": 18' "$work/e/iter_0000002/trainer.json" >"$work/part" || return 1
    done
    # shellcheck disable=SC2086
    $launch "$train" $data --valid-data-path "$work/good_text_document" --load "$work/e" >"$work/out" 2>"$work/err" \
        </dev/null && says '^ *4  validation loss' "$work/out"
}

# The ranks that read the data find a byte that the vocabulary lacks: one error line, and every rank ends.
data_that_cannot_be_read_end_all_ranks() {
    # shellcheck disable=SC2086
    $launch "$train" $data --overwrite --eval-iters 0 --train-data-path "$work/bad_text_document" --train-iters 100 \
        >"$work/out" 2>"$work/err" </dev/null && return 1
    [ "$(grep -c '^error: .*token 195' "$work/err")" = 1 ] && ! grep MPI_ABORT "$work/err" &&
        ! grep 'warning' "$work/err"
}

# Losses name batches, because the weights stay.
still="--num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 257 --tokenizer-type ByteLevel
    --hidden-dropout 0 --attention-dropout 0 --lr 1e-30 --lr-decay-style constant --seq-length 32
    --micro-batch-size 2 --global-batch-size 4 --split 100,0,0 --eval-iters 0 --device $device"

# stays ARGUMENTS...: trains on one rank.
stays() {
    # shellcheck disable=SC2086
    "$train" $still "$@" >"$work/out" 2>"$work/err" </dev/null
}

# A run keeps the order that it began with: where fewer steps are asked for, and where more are, in its first epoch and
# behind it.
a_longer_or_shorter_run_keeps_the_order_it_began_with() {
    awk 'BEGIN { for (i = 0; i < 60; i++) printf "line %d of a text with %d words\n\n", i, i * i }' >"$work/o.txt"
    "$(dirname "$train")/data/preprocess" --input "$work/o.txt" --output-prefix "$work/o" \
        --tokenizer-type ByteLevel --append-eod >"$work/out" || return 1
    for kind in one blend; do
        path="$work/o_text_document"
        [ $kind = blend ] && path="0.7 $path 0.3 $path"
        rm -rf "$work/o1" "$work"/o??.jsonl
        # shellcheck disable=SC2086
        set -- --data-path $path
        stays "$@" --train-iters 30 --save "$work/o1" --save-interval 10 --metrics "$work/o30.jsonl" &&
            stays "$@" --train-iters 20 --load "$work/o1/iter_0000010" --metrics "$work/o20.jsonl" || return 1
        ! grep '^note' "$work/out" || return 1
        losses "$work/o30.jsonl" | sed -n 11,20p >"$work/want"
        losses "$work/o20.jsonl" >"$work/part"
        [ -s "$work/want" ] && cmp "$work/want" "$work/part" || return 1
        stays "$@" --train-iters 50 --load "$work/o1" --save "$work/o1" --save-interval 10 \
            --metrics "$work/o50.jsonl" &&
            says '^note: the run was planned for 120 training samples and now needs 200' "$work/out" || return 1
        stays "$@" --train-iters 50 --load "$work/o1/iter_0000040" --metrics "$work/o40.jsonl" || return 1
        ! grep '^note' "$work/out" || return 1
        losses "$work/o50.jsonl" | sed -n 11,20p >"$work/want"
        losses "$work/o40.jsonl" >"$work/part"
        [ -s "$work/want" ] && cmp "$work/want" "$work/part" || return 1
    done
}

# The order of the data and nothing else: the weights, which do not move, are the same byte for byte, and the losses are
# not. A run keeps its --data-seed as its --seed.
the_seed_of_the_data_is_of_their_order_alone() {
    set -- --data-path "$work/o_text_document" --train-iters 4 --lr 1e-60
    stays "$@" --save "$work/q1" --metrics "$work/q1.jsonl" &&
        stays "$@" --save "$work/q2" --metrics "$work/q2.jsonl" --data-seed 7 &&
        stays "$@" --save "$work/q3" --metrics "$work/q3.jsonl" --data-seed 1234 || return 1
    for part in 1 2 3; do losses "$work/q$part.jsonl" >"$work/order-$part"; done
    cmp "$work/order-1" "$work/order-3" && ! cmp -s "$work/order-1" "$work/order-2" &&
        cmp "$work/q1/latest/model.safetensors" "$work/q2/latest/model.safetensors" || return 1
    stays "$@" --seed 7 --data-seed 1234 --save "$work/q4" &&
        ! cmp -s "$work/q1/latest/model.safetensors" "$work/q4/latest/model.safetensors" || return 1
    stays "$@" --train-iters 5 --load "$work/q2" && return 1
    says '^error: .*begun with --data-seed 7, not 1234' "$work/err" &&
        stays "$@" --train-iters 5 --load "$work/q2" --data-seed 7 &&
        stays "$@" --train-iters 5 --load "$work/q2" --no-load-rng &&
        stays "$@" --train-iters 5 --load "$work/q3"
}

# The number of lines, what the loss counts, the share of --split: a run that goes on refuses another set of samples,
# until --no-load-rng or --finetune begins a new order.
other_data_are_refused() {
    awk 'BEGIN { for (i = 0; i < 30; i++) printf "{\"prompt\":\"p%d\",\"response\":\"r%d\"}\n", i, i }' >"$work/d.jsonl"
    set -- --sft --chat-template plain --data-path "$work/d.jsonl" --load "$work/began" --train-iters 4
    stays --sft --chat-template plain --data-path "$work/d.jsonl" --save "$work/began" --train-iters 2 || return 1
    refuses_data() {
        pattern=$1
        shift
        stays "$@" && return 1
        says "^error: .*training data are not .*$pattern" "$work/err"
    }
    refuses_data 'other trained tokens (--loss-on)' "$@" --loss-on all || return 1
    refuses_data '30 samples with [0-9]* tokens then, 15 with' "$@" --split 1,1,0 || return 1
    cp "$work/d.jsonl" "$work/same.jsonl"
    stays "$@" --data-path "$work/same.jsonl" || return 1
    sed -i 's/p7/q7/' "$work/d.jsonl"
    refuses_data 'other contents' "$@" || return 1
    sed -i 1d "$work/d.jsonl"
    refuses_data '29 with' "$@" || return 1
    stays "$@" --no-load-rng && stays "$@" --finetune
}

check kills_at_random_moments_change_nothing kills_at_random_moments_change_nothing
check a_damaged_checkpoint_is_named a_damaged_checkpoint_is_named_and_the_one_before_is_used
check a_damaged_file_has_one_text a_damaged_file_has_one_text_that_names_the_checkpoint_before
check files_that_are_not_read_are_not_compared files_that_are_not_read_are_not_compared
check a_finished_run_says_so_and_saves_nothing a_finished_run_says_so_and_saves_nothing
check everything_comes_from_the_checkpoint_that_is_whole everything_comes_from_the_checkpoint_that_is_whole
check the_place_of_the_optimizer_changes_no_loss the_place_of_the_optimizer_changes_no_loss
check states_with_scales_resume_bit_for_bit states_with_scales_resume_bit_for_bit
check scales_of_older_files_resume_bit_for_bit scales_of_older_files_resume_bit_for_bit
check a_lost_file_does_not_restart_the_run a_lost_file_does_not_restart_the_run
check a_folder_in_use_is_refused a_folder_in_use_is_refused
check a_lock_of_another_host_is_named a_lock_of_another_host_is_named_and_a_stale_one_is_taken
check checkpoints_that_come_before_the_lock_are_seen checkpoints_that_come_before_the_lock_are_seen
check a_run_that_saves_nothing_leaves_no_lock a_run_that_saves_nothing_leaves_no_lock
check a_missing_checkpoint_begins_anew_or_ends_the_run a_missing_checkpoint_begins_anew_or_ends_the_run
check auto_resume_finetunes_once auto_resume_finetunes_once
check a_recipe_that_finetunes_says_how_to_go_on a_recipe_that_finetunes_says_how_to_go_on
check a_model_without_a_tokenizer_is_noted_once a_model_without_a_tokenizer_is_noted_once
check checkpoints_stay_as_options_say checkpoints_stay_as_options_say
check a_save_in_the_background_holds_what_one_at_once_does a_save_in_the_background_holds_what_one_at_once_does
check another_seed_goes_on_by_no_load_rng_only another_seed_goes_on_by_no_load_rng_only
check no_steps_convert_a_checkpoint no_steps_convert_a_checkpoint
check a_bad_step_is_not_saved a_bad_step_is_not_saved
check an_error_in_the_background_ends_the_run an_error_in_the_background_ends_the_run
check an_evaluation_that_fails_does_not_lose_the_save an_evaluation_that_fails_does_not_lose_the_save
check data_that_cannot_be_read_end_all_ranks data_that_cannot_be_read_end_all_ranks
check a_run_keeps_the_order_it_began_with a_longer_or_shorter_run_keeps_the_order_it_began_with
check the_seed_of_the_data_is_of_their_order_alone the_seed_of_the_data_is_of_their_order_alone
check other_data_are_refused other_data_are_refused
exit $failed
