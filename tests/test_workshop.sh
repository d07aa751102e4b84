#!/bin/sh
# The workshop that CONTRIBUTING.md describes: its table of sections and suites is that of the sources; one test of a
# suite runs alone; a suite in C compiles what it includes and nothing else; an example's list of files is enough.
set -u
. tests/suite.sh
unknown=$(printf '\302\24777') # a section that does not exist, which tests/lint would report

sections_have_suites() {
    tests/sections --check >"$work/out" 2>"$work/err"
}

# A copy for changes: megatron.c, the suites and the script.
copy_suites() {
    rm -rf "$work/copy" && mkdir -p "$work/copy/tests" && cp megatron.c "$work/copy" &&
        cp tests/sections tests/slow_suites tests/test_*.[cs]* "$work/copy/tests"
}

# finds TEXT: the check of the copy fails with this line.
finds() {
    if "$work/copy/tests/sections" --check >"$work/out" 2>"$work/err"; then return 1; fi
    says "^error: $1" "$work/err"
}

a_section_without_a_suite_is_found() {
    copy_suites && sed "s/^ \*   §19b .*/&\n *   $unknown  a new one/" megatron.c >"$work/copy/megatron.c" &&
        finds "no quick suite names section $unknown "
}

an_unknown_section_is_found() {
    copy_suites && sed "s/^\(\/\/ Sections of megatron.c:\).*/\1 $unknown/" tests/test_grid.c \
        >"$work/copy/tests/test_grid.c" && finds "tests/test_grid.c: megatron.c has no section $unknown\$"
}

# A suite that begins to test a section is in the table, or the check fails.
a_suite_that_is_not_named_is_found() {
    copy_suites && sed 's/^\(\/\/ Sections of megatron.c:\).*/\1 §3/' tests/test_grid.c \
        >"$work/copy/tests/test_grid.c" &&
        finds 'suite grid alone calls mt_grid_[a-z_]*, and does not name its section, §4$'
}

the_table_is_that_of_the_sources() {
    tests/sections --weave >"$work/out" 2>"$work/err" && diff CONTRIBUTING.md "$work/out" >"$work/err" &&
        [ "$(grep -c '^| §' CONTRIBUTING.md)" = "$(grep -c '^ \*   §' megatron.c)" ]
}

sections_choose_suites() {
    [ "$(tests/sections 4)" = 'grid memory' ] && tests/sections 9d 3e >"$work/out" &&
        says '\(^\| \)kernels\( \|$\)' "$work/out" && says '\(^\| \)gradients\( \|$\)' "$work/out" || return 1
    if tests/sections 99 >"$work/out" 2>"$work/err"; then return 1; fi
    says "^error: megatron.c has no section ${unknown%77}99\$" "$work/err"
}

# Every target and suite that the page names exists.
names_exist() {
    grep -o '\(`\|^    \)make [a-z][a-z-]*' CONTRIBUTING.md | tr -d '`' | sort -u | while read -r _ target; do
        grep -qE "^([a-z -]* )?$target( [a-z -]*)?:" Makefile || echo "no target $target"
    done >"$work/out"
    sed -n 's/^| `\([a-z0-9_.]*\)` | [0-9].*/\1/p' CONTRIBUTING.md | while read -r suite; do
        [ -e "tests/test_$suite.c" ] || [ -e "tests/test_$suite" ] || echo "no suite $suite"
    done >>"$work/out"
    [ ! -s "$work/out" ]
}

# One test of a suite in C: the others do not run.
a_c_test_runs_alone() {
    chosen=$(sed -n 's/^ *cmocka_unit_test(\([a-z0-9_]*\)).*/\1/p' tests/test_grid.c | head -n 1)
    [ -n "$chosen" ] && MT_ONLY=$chosen "$MT_TESTS/test_grid" >"$work/out" 2>&1 &&
        [ "$(grep -c '^\[ RUN ' "$work/out")" = 1 ] && says "^\[ RUN *\] $chosen$" "$work/out"
}

# A suite in C with two tests; the long one is left out where sections choose suites, unless it is asked for by name.
a_brief_run_leaves_out_the_long_test() {
    cat >"$work/brief.c" <<'END'
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
const char long_test[] = "slow*";
static void quick(void **state) { (void)state; }
static void slow_one(void **state) { (void)state; }
int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(quick), cmocka_unit_test(slow_one)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
END
    ${CC:-cc} "$work/brief.c" tests/only.c -o "$work/brief" -lcmocka >"$work/out" 2>&1 || return 1
    runs_of() { "$@" 2>&1 | sed -n 's/^\[ RUN *\] //p' | paste -s -d ' ' -; }
    [ "$(runs_of env MT_ONLY= MT_BRIEF=9d "$work/brief")" = quick ] &&
        [ "$(runs_of env MT_ONLY= MT_BRIEF= "$work/brief")" = 'quick slow_one' ] &&
        [ "$(runs_of env MT_ONLY=slow_one MT_BRIEF=9d "$work/brief")" = slow_one ] || return 1
    sed -n 's/^const char long_test\[\] = "\(.*\)";.*/\1/p' tests/test_*_mpi.c >"$work/names"
    [ -s "$work/names" ] || return 1
    while read -r long; do
        grep -q "cmocka_unit_test($long)" tests/test_*.c || { echo "long_test: no test is named $long" && return 1; }
    done <"$work/names"
}

# The release: the first version of CHANGELOG.md is the header's, and its first list is of breaking changes where the
# first number has changed. Headers and files that UPGRADING.md sends a reader to exist.
the_release_is_described() {
    version=$(sed -n 's/^#define MT_VERSION *"\(.*\)"/\1/p' megatron.h)
    [ "$(sed -n 's/^## //p' CHANGELOG.md | head -n 1)" = "${version%-dev}" ] || return 1
    sed -n "/^## ${version%-dev}/,/^### /p" CHANGELOG.md | grep '^\*\*' | head -n 1 | grep '^\*\*Breaking' \
        >"$work/out" && tr '`|,; ' '\n\n\n\n\n' <UPGRADING.md | grep '^data/.*[a-z]/[a-z_0-9]*\.[hc]$' |
        sort -u >"$work/names" && [ "$(wc -l <"$work/names")" -gt 5 ] || return 1
    while read -r file; do [ -e "$file" ] || { echo "UPGRADING.md: no $file" && return 1; }; done <"$work/names"
}

# The files that make would compile for a suite, in a copy of the tree where nothing is built.
compiles() {
    rm -rf "$work/tree" && mkdir -p "$work/tree/build/default" &&
        cp -R Makefile megatron.c megatron.h train.c infer.c data tests cuda "$work/tree" &&
        mkdir "$work/tree/notes" && cp -R notes/examples notes/draw.c "$work/tree/notes" && : >"$work/out" || return 1
    (cd "$work/tree" && unset SANITIZE WITHOUT CC OPT DRAFT &&
        MAKEFLAGS='' MAKEOVERRIDES='' MAKELEVEL=0 make -n COUNTING=1 WITHOUT=cuda SUITES="$1" test) >"$work/err" 2>&1
    sed -n 's/.*echo "\[.*\] CC \(.*\)"$/\1/p' "$work/err" | sort | tr '\n' ' ' >"$work/out"
}

kernels_needs_itself_and_megatron_c() {
    compiles kernels && [ "$(cat "$work/out")" = 'megatron.c tests/only.c tests/test_kernels.c ' ]
}

a_suite_needs_what_it_includes() {
    compiles safetensors && says 'data/base/safetensors.c .*megatron.c .*tests/test_safetensors.c ' "$work/out" &&
        ! grep -q 'data/options\|data/learn\|train.c' "$work/out"
}

a_suite_of_texts_needs_nothing() {
    compiles runner && [ ! -s "$work/out" ]
}

check sections_have_suites sections_have_suites
check a_section_without_a_suite_is_found a_section_without_a_suite_is_found
check an_unknown_section_is_found an_unknown_section_is_found
check a_suite_that_is_not_named_is_found a_suite_that_is_not_named_is_found
check the_table_is_that_of_the_sources the_table_is_that_of_the_sources
check sections_choose_suites sections_choose_suites
check names_exist names_exist
check the_release_is_described the_release_is_described
if [ -x "${MT_TESTS:-}/test_grid" ]; then
    check a_brief_run_leaves_out_the_long_test a_brief_run_leaves_out_the_long_test
    check a_c_test_runs_alone a_c_test_runs_alone
else
    echo "skipped: a_c_test_runs_alone, test_grid is not built"
fi
check kernels_needs_itself_and_megatron_c kernels_needs_itself_and_megatron_c
check a_suite_needs_what_it_includes a_suite_needs_what_it_includes
check a_suite_of_texts_needs_nothing a_suite_of_texts_needs_nothing
exit $failed
