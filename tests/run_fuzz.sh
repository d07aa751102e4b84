#!/bin/sh
# Runs libFuzzer targets one after another, each for some seconds, and reports crashes, hangs and leaks.
#
#   usage: tests/run_fuzz.sh SECONDS PROGRAM...
#
# With SECONDS 0 each target runs its inputs once, without new ones.
#
# PROGRAM is build/fuzzer/tests/fuzz_TARGET. It starts from tests/fuzz_corpus/TARGET, if that exists, and from the first
# 16 KiB of the files in tests/golden and tests/roles whose names fit the target. New inputs are added to
# build/fuzz/corpus/TARGET. Inputs that fail are kept as build/fuzz/TARGET-*: run PROGRAM on one to see it fail again.
set -u
seconds=$1
shift
[ $# -gt 0 ] || { echo "no tests/fuzz_*.c: nothing to run"; exit 0; }
export OMP_NUM_THREADS=1
failed=''

# seeds TARGET: the files of tests/golden and tests/roles that the target can read.
seeds() {
    case $1 in
    *safetensors*) find tests/golden -name '*.safetensors' ;;
    *idx* | *index* | *dataset*) find tests/golden -name '*.idx' ;;
    picture) find tests/golden -name '*.png' -o -name '*.jpg' ;;
    yaml) find tests/roles -name '*.yaml' ;;
    *config* | *json*) find tests/golden -name '*.json' ;;
    esac
}

for program in "$@"; do
    target=$(basename "$program" | sed 's/^fuzz_//')
    corpus=build/fuzz/corpus/$target
    log=build/fuzz/$target.log
    mkdir -p "$corpus"
    seeds "$target" | while read -r file; do
        head -c 16384 "$file" >"$corpus/$(echo "$file" | sed 's|^tests/||; s|^golden/||; s|/|-|g')"
    done
    if [ -d "tests/fuzz_corpus/$target" ]; then cp -R "tests/fuzz_corpus/$target/." "$corpus"; fi
    echo "$target: $(find "$corpus" -type f | wc -l) inputs to begin with, $seconds seconds (log: $log)"
    if [ "$seconds" = 0 ]; then limit=-runs=0; else limit=-max_total_time=$seconds; fi
    if "$program" "$limit" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/$target-" "$corpus" </dev/null >"$log" 2>&1; then
        echo "✓ $target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs tried"
    else
        failed="$failed $target"
        sed -n '/ERROR\|runtime error/,$p' "$log" | head -30
        echo "✗ $target FAILED"
    fi
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
