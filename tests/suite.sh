# What the shell suites share, which source this: the programs, a folder of the suite's own in $work, and verdicts.
#
#   . tests/suite.sh       from the root of the project; TMPDIR, if it is exported, says where $work is to be
#
# MT_BIN is the folder of the programs. A suite ends with `exit $failed`.
train=$(cd "${MT_BIN:-.}" && pwd)/train infer=$(cd "${MT_BIN:-.}" && pwd)/infer
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none

# tidy: after each test; a suite may have its own.
tidy() {
    :
}

# verdict NAME COMMAND...: the command is the test. Where it fails, what its last program said is shown.
verdict() {
    name=$1
    shift
    if "$@"; then
        echo "ok $name"
    else
        echo "not ok $name"
        cat "$work/out" "$work/err" 2>/dev/null
        failed=1
    fi
    tidy
}

# refused PATTERN PROGRAM ARGUMENTS...: it fails with one line on standard error, which holds the pattern.
refused() {
    pattern=$1
    shift
    if "$@" >"$work/out" 2>"$work/err" </dev/null; then
        echo "accepted: $*"
        return 1
    fi
    if [ "$(wc -l <"$work/err")" = 1 ] && grep -q "^error: .*$pattern" "$work/err"; then return 0; fi
    echo "wanted \"$pattern\" from $*, got:"
    cat "$work/err"
    return 1
}

# says PATTERN FILE...
says() {
    grep -q -- "$@" && return 0
    echo "nothing says \"$1\""
    return 1
}

# mpirun, with more ranks than cores where it asks for a word.
mpirun_here() {
    if mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte'; then
        echo 'mpirun --oversubscribe'
    else
        echo mpirun
    fi
}

# needs_mpi: ends a suite that is nothing without it.
needs_mpi() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null && return
    echo "skipped: MPI is absent"
    exit 77
}
