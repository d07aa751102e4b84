#!/bin/sh
# Crash tests on two ranks, and of the whole program: tests/test_crash.c under mpirun; then `train` with the shim loaded
# before it, which fails, drops or does not survive one call of its saves, and is started again.
set -u
# In memory if possible: every save waits for the disk.
[ -w /dev/shm ] && export TMPDIR="${TMPDIR:-/dev/shm}"
. tests/suite.sh
export OMP_NUM_THREADS=1
tests=${MT_TESTS:-$(dirname "$train")/../tests}
shim=$tests/crash_shim.so
[ -f "$shim" ] || { echo "skipped: $shim was not built" && exit 77; }
calls=${MT_CRASH_CALLS:-"2 19 90 170 205 240"}

small='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16
    --vocab-size 32 --mock-data --micro-batch-size 1 --global-batch-size 2 --lr 1e-2 --eval-iters 0
    --deterministic-mode --save-interval 2 --train-iters 6 --auto-resume --keep-checkpoints 2'

format=''

# run RANKS FOLDER [VARIABLE=VALUE...]: trains, on ranks that see the variables.
run() {
    ranks=$1 folder=$2
    shift 2
    if [ "$ranks" = 1 ]; then
        # shellcheck disable=SC2086
        env "$@" "$train" $small $format --save "$folder" >"$work/out" 2>"$work/err" </dev/null
    else
        # shellcheck disable=SC2086
        timeout $hang $(mpirun_here) -np "$ranks" env "$@" "$train" $small $format --save "$folder" \
            >"$work/out" 2>"$work/err" </dev/null
    fi
}

# A sanitizer must be the first library, so the shim cannot be.
is_sanitized() {
    grep -q __asan_init "$train"
}

# resumes RANKS FILE...: for each call, a run that is hit there and one that goes on end where an undisturbed run does:
# their last checkpoints have the same files.
resumes() {
    ranks=$1 points=0 hits=0
    shift
    rm -rf "$work/whole$ranks"
    run "$ranks" "$work/whole$ranks" A=1 || return 1
    for how in fail drop kill; do
        for at in $calls; do
            rm -rf "$work/save" "$work/shared"
            run "$ranks" "$work/save" LD_PRELOAD="$shim" CRASH_SHARED="$work/shared" CRASH_ROOT="$work/save" \
                CRASH_HOW=$how CRASH_AT="$at"
            status=$?
            points=$((points + 1))
            if [ $status != 0 ]; then
                hits=$((hits + 1))
                [ $how = kill ] || [ "$(grep '^error: ' "$work/err" | sort -u | wc -l)" = 1 ] || return 1
            fi
            run "$ranks" "$work/save" A=1 || return 1
            [ "$(cat "$work/save/latest_checkpointed_iteration.txt")" = 6 ] || return 1
            for file in "$@"; do
                cmp "$work/whole$ranks/latest/$file" "$work/save/latest/$file" || return 1
            done
        done
    done
    echo "$points points on $ranks ranks, $hits of them ended the run"
    [ $hits -ge 6 ]
}

two_ranks() {
    timeout $hang $(mpirun_here) -np 2 "$tests/test_crash" >"$work/out" 2>"$work/err" </dev/null
    status=$?
    cat "$work/out"
    return $status
}

if is_sanitized; then
    echo "skipped: a program with sanitizers loads no shim"
else
    check "train goes on after a call that failed, was lost or killed it" resumes 1 model.safetensors \
        optimizer.safetensors
    format="--ckpt-format torch_dist"
    check "so it does with the format of Megatron-Core" resumes 1 __0_0.distcp .metadata common.pt
    format=''
fi
[ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null || { echo "skipped: MPI is absent" && exit $failed; }
check "crashes and faults on two ranks leave a whole checkpoint" two_ranks
is_sanitized || check "two ranks go on after a call that failed, was lost or killed one" resumes 2 model.safetensors \
    optimizer.safetensors
exit $failed
