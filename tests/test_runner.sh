#!/bin/sh
# tests/run_tests.sh counts the tests of suites, and counts a suite as failed if it crashes, hangs or only exits with an
# error.
set -u
runner=$PWD/tests/run_tests.sh
suite_sh=$PWD/tests/suite.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
mkdir tests build

# suite NAME: a suite in C, whose built program is the script on standard input.
suite() {
    : >"tests/test_$1.c"
    { echo '#!/bin/sh' && cat; } >"build/test_$1"
    chmod +x "build/test_$1"
}

# expect NAME STATUS LAST_LINE SUITE...
expect() {
    name=$1 status=$2 line=$3
    shift 3
    output=$(HAVE_MPI='' "$runner" build "$@" 2>&1)
    got=$?
    last=$(echo "$output" | tail -n 1)
    if [ $got = "$status" ] && [ "$last" = "$line" ]; then
        echo "ok $name"
    else
        echo "not ok $name: exit $got, '$last'"
    fi
}

suite good <<'S'
printf '[==========] Running 3 test(s).\n[ RUN      ] one\n[       OK ] one\n[ RUN      ] two\nskipped: no data\n'
printf '[  SKIPPED ] two\n[ RUN      ] three\n[       OK ] three\n[==========] 3 test(s) run.\n'
printf '[  PASSED  ] 2 test(s).\n[  SKIPPED ] 1 test(s), listed below:\n[  SKIPPED ] two\n'
S
suite bad <<'S'
printf '[==========] Running 2 test(s).\n[ RUN      ] one\n[       OK ] one\n[ RUN      ] two\n[  FAILED  ] two\n'
printf '[==========] 2 test(s) run.\n[  PASSED  ] 1 test(s).\n[  FAILED  ] 1 test(s), listed below:\n[  FAILED  ] two\n'
exit 1
S
suite crashing <<'S'
printf '[==========] Running 2 test(s).\n[ RUN      ] one\n[       OK ] one\n[ RUN      ] two\n'
kill -SEGV $$
S
suite leaking <<'S'
printf '[==========] Running 1 test(s).\n[ RUN      ] one\n[       OK ] one\n[==========] 1 test(s) run.\n'
exit 23
S
suite hanging <<'S'
sleep 20
S
suite ranks_mpi <<'S'
exit 1
S
suite silent_in_c <<'S'
echo '[==========] Running 0 test(s).'
S
printf '#!/bin/sh\necho ok one\necho not ok two\necho skipped: three\n' >tests/test_shell.sh
printf '#!/bin/sh\nexit 77\n' >tests/test_silent.sh
chmod +x tests/*.sh

expect a_suite_that_is_named_twice_runs_once 0 '2 passed, 0 failed, 1 skipped' good good
expect passed_and_skipped_are_counted 0 '2 passed, 0 failed, 1 skipped' good
expect failures_are_counted 1 '1 passed, 1 failed, 0 skipped' bad
expect a_crash_fails 1 '1 passed, 1 failed, 0 skipped' crashing
expect a_leak_found_after_the_tests_fails 1 '1 passed, 1 failed, 0 skipped' leaking
export TEST_TIMEOUT=1
expect a_hang_fails 1 '0 passed, 1 failed, 0 skipped' hanging
unset TEST_TIMEOUT
expect ranks_are_skipped_without_mpi 0 '0 passed, 0 failed, 1 skipped' ranks_mpi
expect shell_suites_are_counted 1 '1 passed, 1 failed, 1 skipped' shell
expect status_77_is_skipped 0 '0 passed, 0 failed, 1 skipped' silent
expect an_unknown_suite_fails 1 '0 passed, 1 failed, 0 skipped' nothing

# One test by its name: one that needs no other, one that needs the test before it, one that fails, and no test.
cp "$suite_sh" tests/suite.sh
cat >tests/test_chain.sh <<'S'
#!/bin/sh
. tests/suite.sh
first() { touch "$work/file"; }
second() { [ -e "$work/file" ]; }
third() { touch "$OUT/third"; }
check first first
check second second
check wrong false
check third third
exit $failed
S
chmod +x tests/test_chain.sh
OUT=$work
export OUT
for only in first second third; do
    MT_ONLY=$only && export MT_ONLY
    expect "a_shell_test_runs_alone_$only" 0 '1 passed, 0 failed, 0 skipped' chain
done
rm -f third
MT_ONLY=second
expect later_tests_do_not_run 0 '1 passed, 0 failed, 0 skipped' chain
if [ -e third ]; then echo 'not ok later_tests_are_left_out'; else echo 'ok later_tests_are_left_out'; fi
MT_ONLY=wrong
expect a_chosen_test_may_fail 1 '0 passed, 1 failed, 0 skipped' chain
MT_ONLY='*ir*'
expect a_pattern_chooses_several 0 '2 passed, 0 failed, 0 skipped' chain
MT_ONLY=one
expect lines_of_other_tests_do_not_count 0 '1 passed, 0 failed, 0 skipped' shell
MT_ONLY=nothing
expect an_unknown_test_fails 1 '0 passed, 1 failed, 0 skipped' chain silent_in_c
unset MT_ONLY
if grep -qx 'good [0-9]* [0-9]*' build/good.seconds && [ ! -e build/bad.seconds ]; then
    echo 'ok whole_runs_are_timed'
else
    echo 'not ok whole_runs_are_timed'
fi

# With GPUs, a fake mpirun runs one process that passes a test for each rank.
mkdir fake
cat >fake/mpirun <<'S'
#!/bin/sh
while [ $# -gt 0 ] && [ "$1" != -np ]; do shift; done
[ $# -gt 2 ] || exit 0
RANKS=$2
export RANKS
shift 2
exec "$@"
S
cat >fake/nvidia-smi <<'S'
#!/bin/sh
i=0
while [ $i -lt "$GPUS" ]; do echo "GPU $i: H200 (UUID: GPU-$i)" && i=$((i + 1)); done
S
chmod +x fake/*
for name in cuda_layouts_mpi cuda_trace_mpi cuda_large_mpi8 plain_mpi; do
    suite $name <<'S'
i=0
while [ $i -lt "$RANKS" ]; do echo "ok $i" && i=$((i + 1)); done
S
done

# expect_ranks NAME GPUS SUITE LAST_LINE
expect_ranks() {
    last=$(PATH=$work/fake:$PATH GPUS=$2 HAVE_MPI=1 "$runner" build "$3" 2>&1 | tail -n 1)
    if [ "$last" = "$4" ]; then echo "ok $1"; else echo "not ok $1: '$last'"; fi
}
expect_ranks a_cuda_suite_has_four_ranks 8 cuda_layouts_mpi '4 passed, 0 failed, 0 skipped'
expect_ranks a_cuda_suite_has_a_rank_for_each_of_two_gpus 2 cuda_layouts_mpi '2 passed, 0 failed, 0 skipped'
expect_ranks a_cuda_suite_has_a_power_of_two_of_ranks 3 cuda_layouts_mpi '2 passed, 0 failed, 0 skipped'
expect_ranks a_cuda_suite_has_one_rank_for_one_gpu 1 cuda_layouts_mpi '1 passed, 0 failed, 0 skipped'
expect_ranks eight_ranks_become_four_on_four_gpus 4 cuda_large_mpi8 '4 passed, 0 failed, 0 skipped'
CUDA_VISIBLE_DEVICES=2,5 && export CUDA_VISIBLE_DEVICES
expect_ranks visible_gpus_alone_have_ranks 8 cuda_layouts_mpi '2 passed, 0 failed, 0 skipped'
unset CUDA_VISIBLE_DEVICES
expect_ranks a_suite_of_four_gpus_is_skipped_on_two 2 cuda_trace_mpi '0 passed, 0 failed, 1 skipped'
expect_ranks without_a_gpu_the_suite_says_so_itself 0 cuda_trace_mpi '4 passed, 0 failed, 0 skipped'
expect_ranks other_suites_do_not_ask_for_gpus 2 plain_mpi '4 passed, 0 failed, 0 skipped'
export TEST_JOBS=3
expect suites_are_added_up 1 '5 passed, 3 failed, 1 skipped' good bad crashing leaking
