#!/bin/sh
# tests/run_tests.sh counts the tests of suites, and counts a suite as failed if it crashes, hangs or only exits with an
# error.
set -u
runner=$PWD/tests/run_tests.sh
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
printf '#!/bin/sh\necho ok one\necho not ok two\necho skipped: three\n' >tests/test_shell.sh
printf '#!/bin/sh\nexit 77\n' >tests/test_silent.sh
chmod +x tests/*.sh

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
export TEST_JOBS=3
expect suites_are_added_up 1 '5 passed, 3 failed, 1 skipped' good bad crashing leaking
