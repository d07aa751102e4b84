#!/bin/sh
# Runs test suites, prints a line for each, and adds up their tests.
#
#   usage: tests/run_tests.sh DIR SUITE...
#
# TEST_JOBS suites run at a time, by default 1. Suites on several ranks, or that measure time or wait for a limit, run
# alone at the end.
#
# SUITE is tests/test_SUITE.c, built as DIR/test_SUITE, or tests/test_SUITE.sh, or both. Suites named *_mpi run on four
# ranks, *_mpi8 on eight, and of these cuda_* on no more ranks than there are GPUs. A C suite is a cmocka program. A
# shell suite prints "ok NAME", "not ok NAME" or "skipped: REASON" for each test; if it prints none of them, its exit
# status counts as one test (77: skipped). A suite that crashes, hangs, or exits with an error and no failed test counts
# as one more failure.
#
# MT_ONLY: the tests with this name, or a pattern such as 'rope_*', alone; it is an error if no suite has one. A shell
# suite runs just these first. Where one fails, they may need files of earlier tests, so the suite runs again up to
# them, and that counts.
#
# MT_BRIEF: not empty, the C suites leave out their long tests (tests/only.c).
#
# DIR/NAME.seconds holds the name of a suite, and the seconds and processor seconds of its last whole run.
set -u
directory=$1
shift
alone=' cuda demo faults keeps_going profile two_hosts '

# Ranks on one machine share its cores, and containers often run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_mpi_yield_when_idle=1
# Spinning threads slow tiny models down on a busy machine.
export OMP_WAIT_POLICY=passive

# Prints the seconds that a suite may take: TEST_TIMEOUT, or 900, and more on a slow or busy machine.
probe='BEGIN { for (i = 0; i < 3000000; i++) sum += i % 7 }'
TEST_SLOWNESS=${TEST_SLOWNESS:-$( (awk "$probe" && times) | tail -n 1 | tr 'ms' '  ' | awk '{ print 60 * $1 + $2 }')}
export TEST_SLOWNESS
time_limit() {
    [ -z "${TEST_TIMEOUT:-}" ] || { echo "$TEST_TIMEOUT" && return; }
    uptime | sed 's/.*averages*: *\([0-9]*\).*/\1/' | awk -v slow="$TEST_SLOWNESS" \
        -v cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)" '
        { load = $1 / cores / 2; cpu = slow / 0.25; print int(900 * (cpu > 1 ? cpu : 1) * (load > 1 ? load : 1)) }'
}
oversubscribe=''
mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte' && oversubscribe='--oversubscribe --allow-run-as-root'

# run_ranks COUNT PROGRAM LOG: each rank writes its own log. Rank 0's is the log of the suite; the others are shown if
# it fails.
run_ranks() {
    # shellcheck disable=SC2086,SC2016
    OMP_NUM_THREADS=1 $limited mpirun $oversubscribe -np "$1" sh -c '
        rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
        exec "$1" >"$2.$rank" 2>&1' sh "$2" "$3" </dev/null >"$3.mpirun" 2>&1
    status=$?
    cp "$3.0" "$3" 2>/dev/null || : >"$3"
    [ $status = 0 ] || cat "$3".[1-9] "$3.mpirun" >>"$3.others" 2>/dev/null
    return $status
}

# ranks_of NAME: prints the ranks of a suite. A rank of a cuda suite needs a GPU of its own; where none answers, the
# suite says so itself.
ranks_of() {
    case $1 in *_mpi8) ranks=8 ;; *) ranks=4 ;; esac
    case $1 in cuda_*) gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') ;; *) gpus=0 ;; esac
    visible=$(echo "${CUDA_VISIBLE_DEVICES:-}" | awk -F, '{ print NF }') # GPUs of these, 0: of all
    [ "$visible" = 0 ] || [ "$gpus" -le "$visible" ] || gpus=$visible
    while [ "$gpus" -gt 0 ] && [ $ranks -gt "$gpus" ]; do ranks=$((ranks / 2)); done # a power of two, as layouts have
    echo $ranks
}

# count LOG: prints PASSED FAILED SKIPPED of the log of a cmocka or shell suite. A test that began and neither passed
# nor was skipped counts as failed.
count() {
    awk '/^\[ RUN / { run++ }
         /^\[ +OK +\]/ || /^ok / { passed++ }
         /^\[ +SKIPPED +\] [A-Za-z_]/ && !listed { skipped++ }
         /^skipped:/ && !run { shell_skipped++ }
         /^\[=+\].*test\(s\) run/ { listed = 1 }
         /^\[=+\].*Running/ { listed = 0 }
         /^not ok / { failed++ }
         END { if (run) failed = run - passed - skipped
               print passed + 0, failed + 0, skipped + shell_skipped }' "$1"
}

# keep_chosen LOG: leaves the lines of shell tests that MT_ONLY chooses.
keep_chosen() {
    while IFS= read -r line; do
        case $line in
        'ok '* | 'not ok '*)
            test_name=${line#not }
            test_name=${test_name#ok }
            # a pattern
            # shellcheck disable=SC2254
            case ${test_name%%[ :]*} in $MT_ONLY) ;; *) continue ;; esac
            ;;
        skipped:*) continue ;;
        esac
        printf '%s\n' "$line"
    done <"$1" >"$1.chosen"
    mv "$1.chosen" "$1"
}

# run_chosen PROGRAM LOG: runs the tests of a shell suite that MT_ONLY chooses.
run_chosen() {
    $limited "$1" </dev/null >"$2" 2>&1
    status=$?
    keep_chosen "$2"
    [ $status != 0 ] || return 0
    MT_BEFORE=1 $limited "$1" </dev/null >"$2" 2>&1
    status=$?
    keep_chosen "$2"
    [ $status != 1 ] || grep -q '^not ok ' "$2" || ! grep -q '^ok ' "$2" || status=0 # only others failed
    return $status
}

# run_suite NAME PROGRAM: prints its line, behind its log if a test failed, and writes the numbers to DIR/NAME.result.
run_suite() {
    name=$1 program=$2 log=$directory/$(basename "$2").log passed=0 failed=0 skipped=0
    rm -f "$log" "$log".*
    limit=$(time_limit)
    if command -v timeout >/dev/null; then limited="timeout $limit"; else limited=''; fi
    began=$(date +%s)
    # Each suite has a folder for temporary files. It is removed with all that the suite leaves in it.
    TMPDIR=$(mktemp -d) || exit 1
    export TMPDIR
    case $name-$program in
    *_mpi-* | *_mpi.sh-* | *_mpi8-*)
        if [ -z "${HAVE_MPI:-}" ] || ! command -v mpirun >/dev/null; then
            echo 0 0 1 >"$directory/$name.result"
            echo "- $name: skipped, MPI is absent"
            return
        fi
        ranks=$(ranks_of "$name")
        if [ "$name" = cuda_trace_mpi ] && [ "$ranks" != 4 ]; then
            echo 0 0 1 >"$directory/$name.result"
            echo "- $name: skipped, needs four GPUs"
            return
        fi
        run_ranks "$ranks" "$program" "$log"
        ;;
    *.sh-*)
        if [ -n "${MT_ONLY:-}" ]; then
            run_chosen "$program" "$log"
        else
            $limited "$program" </dev/null >"$log" 2>&1
        fi
        ;;
    *) # one rank: without MPI, whose leaks need the slow unwinder to be recognised, the fast one is enough
        ASAN_OPTIONS=${ASAN_OPTIONS:-}:fast_unwind_on_malloc=1 $limited "$program" </dev/null >"$log" 2>&1
        ;;
    esac
    status=$?
    rm -rf "$TMPDIR"
    seconds=$(($(date +%s) - began))

    # shellcheck disable=SC2046
    set -- $(count "$log")
    passed=$1 failed=$2 skipped=$3
    if [ -n "${MT_ONLY:-}" ]; then
        if [ "$passed$failed$skipped$status" = 0000 ]; then
            echo "0 0 0" >"$directory/$name.result"
            echo "- $name: no test is named $MT_ONLY"
            return
        fi
    elif [ "$status" = 0 ] && [ -z "${MT_BRIEF:-}" ]; then
        times >"$log.times" # of this shell, and in the second line of the processes that it waited for
        processor=$(awk 'NR == 2 { gsub(/[ms]/, " "); print int(60 * ($1 + $3) + $2 + $4 + 0.5) }' "$log.times")
        rm -f "$log.times"
        echo "$name $seconds $processor" >"$directory/$name.seconds"
    fi
    if [ $((passed + failed + skipped)) = 0 ]; then
        case $status in 0) passed=1 ;; 77) skipped=1 ;; esac
    fi
    case $status in
    0) ;;
    77) ;;
    124) failed=$((failed + 1)) && echo "stopped after $limit seconds" >>"$log" ;;
    *) if [ "$failed" = 0 ]; then failed=1 && echo "exit status $status" >>"$log"; fi ;;
    esac
    echo "$passed $failed $skipped" >"$directory/$name.result"
    if [ "$failed" = 0 ]; then
        if [ "$skipped" = 0 ]; then note=''; else note=", $skipped skipped"; fi
        echo "✓ $name: $passed passed$note ($seconds s)"
    else
        cat "$log"
        [ -f "$log.others" ] && cat "$log.others"
        echo "✗ $name: $failed FAILED ($program; the log is $log)"
    fi
}

if [ "${1:-}" = --one ]; then # called below
    case $2 in
    *.sh) output=$(run_suite "$2" "tests/test_$2") ;;
    *) output=$(run_suite "$2" "$directory/test_$2") ;;
    esac
    echo "$output" # at once, so that suites do not mix their lines
    exit 0
fi

together='' later='' unknown=0 seen=' '
for suite in "$@"; do
    case $seen in *" $suite "*) continue ;; esac # runs of one suite would share a log
    seen="$seen$suite "
    found=no
    for name in "$suite" "$suite.sh"; do
        case $name in *.sh) file=tests/test_$name ;; *) file=tests/test_$name.c ;; esac
        [ -f "$file" ] || continue
        found=yes
        case $suite,$alone in
        *_mpi,* | *_mpi8,* | *" $suite "*) later="$later $name" ;;
        *) together="$together $name" ;;
        esac
    done
    [ $found = yes ] && continue
    unknown=$((unknown + 1))
    echo "✗ $suite: there is no tests/test_$suite.c or tests/test_$suite.sh"
done

mkdir -p "$directory/bin"
rm -f "$directory"/*.result
# Suites run several mpirun at once. In a common folder for temporary files, an Open MPI 4.1 that ends can remove the
# folder that another one has just found there, which then does not start. So each mpirun has a folder.
if [ -n "$oversubscribe" ]; then
    cat >"$directory/bin/mpirun" <<END
#!/bin/sh
OMPI_MCA_orte_tmpdir_base=\${OMPI_MCA_orte_tmpdir_base:-\$(mktemp -d)} exec "$(command -v mpirun)" "\$@"
END
    chmod +x "$directory/bin/mpirun"
    PATH=$(cd "$directory/bin" && pwd):$PATH
    export PATH
fi
# shellcheck disable=SC2086
[ -z "$together" ] || printf '%s\n' $together | xargs -P "${TEST_JOBS:-1}" -n 1 "$0" "$directory" --one
for name in $later; do "$0" "$directory" --one "$name"; done
# A suite without a result, whose runner was killed, counts as failed.
# shellcheck disable=SC2086
for name in $together $later; do cat "$directory/$name.result" 2>/dev/null || echo 0 1 0; done |
    awk -v failed=$unknown -v only="${MT_ONLY:-}" '{ passed += $1; failed += $2; skipped += $3 }
        END {
            if (only != "" && passed + failed + skipped == 0) {
                print "error: no test of these suites is named " only >"/dev/stderr"
                failed = 1
            }
            printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
            exit failed > 0
        }'
