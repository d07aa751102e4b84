#!/bin/sh
# make puzzle N=1 and so on: each program has an error that one layout shows, at the number that the answers of
# notes/00-megatron-in-one-file.md name, and that one rank does not show, except for the last. MT_MINI has no error.
set -u
. tests/suite.sh
needs_mpi
if ! command -v mpicc >/dev/null || ! command -v patch >/dev/null; then
    echo "skipped: mpicc or patch is absent"
    exit 77
fi
mini=${MT_MINI:-${MT_BIN:-.}/../notes/mini}
export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" # mini.c leaves its memory to the end of the process

# steps RANKS PROGRAM OPTIONS...: prints "LOSS NORM" of three steps.
steps() {
    ranks=$1
    shift
    # shellcheck disable=SC2046
    [ "$ranks" = 1 ] || set -- $(mpirun_here) -np "$ranks" "$@"
    "$@" --train-iters 3 2>"$work/err" </dev/null | sed -n 's/^step.* loss \([0-9.]*\)  grad norm \([0-9.]*\)$/\1 \2/p'
}

# differs_first FILE FILE: the first number that differs by more than rounding: "loss 1", "norm 1", ...
differs_first() {
    paste "$1" "$2" | awk '
        NF != 4 { exit }
        { for (i = 1; i < 3; i++) { d = $i / $(i + 2) - 1; if (d < 0) d = -d
              if (!(d < 1e-10)) { print (i == 1 ? "loss" : "norm"), NR; exit } } }'
}

# puzzle N RANKS WHERE OPTIONS...: WHERE is the first wrong number on RANKS ranks with OPTIONS.
puzzle() {
    n=$1 many=$2 where=$3 model=dense experts=
    shift 3
    case "$*" in *--num-experts*) model=moe experts='--num-experts 4' ;; esac
    # shellcheck disable=SC2086
    steps 1 "$work/puzzle-$n" $experts >"$work/one" &
    steps "$many" "$work/puzzle-$n" "$@" >"$work/many"
    wait
    cat "$work/$model" "$work/one" "$work/many" >"$work/out"
    [ "$(wc -l <"$work/out")" = 9 ] || return 1
    of_one=$(differs_first "$work/$model" "$work/one") of_many=$(differs_first "$work/$model" "$work/many")
    echo "one rank: ${of_one:-equal}; $many ranks: ${of_many:-equal}; expected: $where" >>"$work/out"
    [ "$of_many" = "$where" ] && if [ "$n" = 10 ]; then [ "$of_one" = "$where" ]; else [ -z "$of_one" ]; fi
}

for patch in notes/puzzles/*.patch; do
    n=$(basename "$patch" .patch)
    MAKEFLAGS='' make -s puzzle N="$n" PUZZLE="$work/puzzle-$n" >"$work/make-$n" 2>&1 &
done
steps 1 "$mini" >"$work/dense"
steps 1 "$mini" --num-experts 4 >"$work/moe"
wait
grep -hv '^built' "$work"/make-*
check every_puzzle_has_a_number [ "$(echo notes/puzzles/*)" = "$(echo notes/puzzles/1.patch notes/puzzles/10.patch \
    notes/puzzles/[2-9].patch)" ]
check puzzle_1 puzzle 1 2 'loss 1' --tensor-model-parallel-size 2
check puzzle_2 puzzle 2 2 'loss 1' --context-parallel-size 2
check puzzle_3 puzzle 3 2 'loss 1' --num-experts 4 --expert-model-parallel-size 2
check puzzle_4 puzzle 4 2 'norm 1'
check puzzle_5 puzzle 5 2 'norm 1' --tensor-model-parallel-size 2 --sequence-parallel
check puzzle_6 puzzle 6 2 'norm 1' --tensor-model-parallel-size 2
check puzzle_7 puzzle 7 2 'loss 1' --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
check puzzle_8 puzzle 8 4 'norm 1' --context-parallel-size 4
check puzzle_9 puzzle 9 2 'norm 1'
check puzzle_10 puzzle 10 2 'norm 1' --tensor-model-parallel-size 2
exit $failed
