#!/bin/sh
# A rank that hangs, dies or has other options ends the job soon, with an error that names it. MT_DEVICE=cuda: on three
# GPUs.
set -u
device=${MT_DEVICE:-cpu} patience=4
[ "$device" = cpu ] || patience=20 # starting NCCL takes seconds
. tests/suite.sh
export OMP_NUM_THREADS=1
preprocess=$(dirname "$train")/data/preprocess
needs_mpi
mpirun=$(mpirun_here)

options='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 50 --seq-length 8 --mock-data --lr 1e-3
    --global-batch-size 12 --train-iters 100000000 --eval-iters 0'
options="$options --device $device"

# start COUNT ARGUMENTS...: trains in the background and returns after the first steps. Every rank writes its process id
# to a file, to be stopped or killed; job is the process id of mpirun.
start() {
    count=$1
    shift
    rm -f "$work"/rank.* "$work/metrics"
    # shellcheck disable=SC2086,SC2016
    $mpirun -np "$count" sh -c '
        echo $$ >"$1.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
        shift
        exec "$@"' sh "$work/rank" "$train" $options --metrics "$work/metrics" "$@" \
        >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    waited=0
    until [ -s "$work/metrics" ]; do
        if ! kill -0 "$job" 2>/dev/null || [ $waited -ge $((hang * 10)) ]; then
            echo "no step was made"
            return 1
        fi
        sleep 0.1
        waited=$((waited + 1))
    done
}

# The job must end with an error.
ends() {
    waited=0
    while kill -0 "$job" 2>/dev/null; do
        if [ $waited -ge $((hang * 10)) ]; then
            echo "the job still runs after $hang seconds"
            kill -KILL "$job"
            return 1
        fi
        sleep 0.1
        waited=$((waited + 1))
    done
    wait "$job"
    status=$?
    [ $status != 0 ] && return 0
    echo "the job ended with status 0"
    return 1
}

a_hanging_rank_ends_the_job_and_the_others_report_it() {
    start 3 --distributed-timeout-seconds $patience || return 1
    kill -STOP "$(cat "$work/rank.1")"
    ends
    ended=$?
    kill -KILL "$(cat "$work/rank.1")" 2>/dev/null
    [ $ended = 0 ] || return 1
    says "^error: rank 0 waited more than $patience s for [a-zA-Z_ (:]* in group" "$work/err" || return 1
    says "^error: rank 2 waited more than $patience s for [a-zA-Z_ (:]* in group" "$work/err" || return 1
    ! grep -q 'rank 1 waited' "$work/err"
}

a_rank_that_dies_ends_the_job() {
    start 3 || return 1
    kill -KILL "$(cat "$work/rank.2")"
    ends
}

# The timeout limits one wait, not the run.
a_run_may_be_longer_than_the_timeout() {
    start 2 --distributed-timeout-seconds $patience || return 1
    sleep $((patience + 2))
    kill -0 "$job" || return 1
    kill -TERM "$(cat "$work/rank.0")" "$(cat "$work/rank.1")"
    wait "$job"
}

# begin_ranks COUNT COMMAND ARGUMENTS...: as start does, without waiting for a step; COMMAND ($rank is set) runs before
# train in every rank's shell.
begin_ranks() {
    count=$1 command=$2
    shift 2
    rm -f "$work/metrics"
    # shellcheck disable=SC2086,SC2016
    $mpirun -np "$count" sh -c 'rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; eval "$1"; shift; exec "$@"' sh "$command" \
        "$train" $options "$@" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
}

# shellcheck disable=SC2016
a_rank_that_never_starts_ends_the_job() {
    begin_ranks 2 '[ $rank = 1 ] && exec sleep 1000' --distributed-timeout-minutes 0.05
    ends || return 1
    says '^error: rank 0 waited more than 3 s for MPI_Init during the start: .*--distributed-timeout-minutes' \
        "$work/err" || return 1
    begin_ranks 2 '[ $rank = 1 ] && exit 0' --distributed-timeout-minutes 0.05
    ends || return 1
    says 'rank 0 waited more than 3 s for MPI_Init\|rank 1 .*exiting improperly' "$work/err" # mpirun may notice it too
}

a_save_may_take_longer_than_a_step_may_wait() {
    has_disk || return 0
    begin_ranks 2 "export LD_PRELOAD=$work/disk.so SLOW_FSYNC=$((patience + 3)) ONLY_RANK=1" --train-iters 3 \
        --save "$work/save" --distributed-timeout-seconds $patience
    wait "$job" && [ "$(cat "$work/save/latest_checkpointed_iteration.txt")" = 3 ]
}

a_disk_that_hangs_during_a_save_is_named() {
    has_disk || return 0
    begin_ranks 2 "export LD_PRELOAD=$work/disk.so SLOW_FSYNC=1000 ONLY_RANK=1" --train-iters 3 \
        --save "$work/hung" --save-timeout-seconds $patience
    ends || return 1
    says "^error: rank 1 waited more than $patience s for the disk to write .*/hung/.*safetensors during a save: .*\
--save-timeout-seconds" "$work/err"
}

a_disk_that_hangs_under_the_data_is_named() {
    has_disk || return 0
    printf '{"text": "%0500d"}\n' 1 2 3 4 5 6 7 8 >"$work/text.jsonl"
    "$preprocess" --input "$work/text.jsonl" --output-prefix "$work/text" --tokenizer-type ByteLevel \
        >"$work/out" 2>"$work/err" || return 1
    data=$(ls "$work"/text*.bin)
    hangs="export LD_PRELOAD=$work/disk.so HANGING_MAP=$data ONLY_RANK=1"
    set -- --mock-data=false --vocab-size 300 --data-path "${data%.bin}" --train-iters 100
    begin_ranks 2 "$hangs" "$@" --distributed-timeout-minutes 0.15
    ends || return 1
    says "^error: rank 1 waited more than 9 s for the disk to read .*_document.bin during the start: " "$work/err" ||
        return 1
    begin_ranks 2 "$hangs HANGS_AFTER_SAVE=1" "$@" --distributed-timeout-seconds $patience \
        --save "$work/data_hangs" --save-interval 2
    ends || return 1
    says "^error: rank 1 waited more than $patience s for the disk to read data during a step: " "$work/err"
}

a_disk_that_hangs_under_the_metrics_is_named() {
    has_disk || return 0
    for files in "--metrics $work/hung.jsonl" "--tensorboard-dir $work/hung.events"; do
        # shellcheck disable=SC2086
        begin_ranks 2 "export LD_PRELOAD=$work/disk.so HANGING_WRITE=$work/hung" $files \
            --distributed-timeout-seconds $patience --distributed-timeout-minutes 0.15
        ends || return 1
        says "^error: rank 0 waited more than [0-9]* s for the disk to write $work/hung.* during .*the disk hangs" \
            "$work/err" || return 1
    done
}

# A file above 256 MiB, in which the start compares pieces only, with one other token on rank 1: iteration 12 reads it.
a_token_that_differs_between_ranks_is_found_when_it_is_read() {
    for rank in 0 1; do mkdir -p "$work/rank$rank" && truncate -s $((36 * 7500000)) "$work/rank$rank/tokens"; done
    printf '\007' | dd of="$work/rank1/tokens" bs=1 seek=5000 conv=notrunc 2>/dev/null
    # shellcheck disable=SC2016
    begin_ranks 2 "cd $work/rank"'$rank' --mock-data=false --tokens-file tokens --tensor-model-parallel-size 2 \
        --train-iters 100
    ends || return 1
    says '^error: iteration 12: rank 1 read other data than rank 0; give every rank the same files' "$work/err" &&
        [ "$(grep -c '^error: ' "$work/err")" = 1 ] && says '^ *11/100 ' "$work/out" && ! grep '^ *12/100 ' "$work/out"
}

ranks_with_different_options_are_named() {
    # shellcheck disable=SC2086
    $mpirun -np 2 "$train" $options : -np 1 "$train" $options --clip-grad 0.5 \
        >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    ends || return 1
    says "^error: rank 2 has --clip-grad '0.5' and rank 0 '1'" "$work/err"
}

sizes_that_do_not_fit_the_ranks_are_refused() {
    # shellcheck disable=SC2086
    $mpirun -np 3 "$train" $options --tensor-model-parallel-size 2 \
        >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    ends || return 1
    says '^error: the number of ranks 3 must be a multiple of --tensor-model-parallel-size x .* = 2' \
        "$work/err" || return 1
    [ "$(grep -c '^error: ' "$work/err")" = 1 ]
}

check "a hanging rank ends the job and the others report it" a_hanging_rank_ends_the_job_and_the_others_report_it
check "a rank that dies ends the job" a_rank_that_dies_ends_the_job
check "a run may be longer than the timeout" a_run_may_be_longer_than_the_timeout
check "a rank that never starts ends the job" a_rank_that_never_starts_ends_the_job
check "a save may take longer than a step may wait" a_save_may_take_longer_than_a_step_may_wait
check "a disk that hangs during a save is named" a_disk_that_hangs_during_a_save_is_named
check "a disk that hangs under the data is named" a_disk_that_hangs_under_the_data_is_named
check "a disk that hangs under the metrics is named" a_disk_that_hangs_under_the_metrics_is_named
check "a token that differs between ranks is found when it is read" \
    a_token_that_differs_between_ranks_is_found_when_it_is_read
check "ranks with different options are named" ranks_with_different_options_are_named
check "sizes that do not fit the ranks are refused" sizes_that_do_not_fit_the_ranks_are_refused
exit $failed
