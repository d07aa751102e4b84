# Sourced by the shell suites: the programs, a temporary folder in $work, and functions that check.
#
#   . tests/suite.sh       from the root of the project; $work is created in TMPDIR
#
# MT_BIN is the folder of the programs. A suite ends with `exit $failed`.
train=$(cd "${MT_BIN:-.}" && pwd)/train infer=$(cd "${MT_BIN:-.}" && pwd)/infer
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
hang=300 # seconds after which a program hangs, on any machine beside any load; no test waits for them
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none

# await_port: sets port to that of infer --serve, the process $server, once $work/log names it. An error if the server
# ends or hangs: then its log is printed.
await_port() {
    port='' waited=0
    while [ -z "$port" ]; do
        port=$(sed -n 's|^serving .* at http://.*:\([0-9]*\)$|\1|p' "$work/log")
        kill -0 "$server" 2>/dev/null || { cat "$work/log" && server='' && return 1; }
        sleep 0.1
        waited=$((waited + 1))
        [ $waited -lt $((hang * 10)) ] || { cat "$work/log" && return 1; }
    done
}

# tidy: runs after each test; a suite may redefine it.
tidy() {
    :
}

# check NAME COMMAND...: runs a test; if it fails, prints the output of its last program. With MT_ONLY, a name or
# pattern, only the tests that it chooses; with MT_BEFORE too those before them.
check() {
    name=$1
    shift
    # a pattern
    # shellcheck disable=SC2254
    case $name in
    ${MT_ONLY:-*}) ;;
    *) [ -n "${MT_BEFORE:-}" ] || return 0 ;;
    esac
    if [ $# -gt 0 ] && "$@"; then
        echo "ok $name"
    else
        echo "not ok $name"
        cat "$work/out" "$work/err" 2>/dev/null
        failed=1
    fi
    tidy
    [ -z "${MT_BEFORE:-}" ] || [ "$name" != "$MT_ONLY" ] || exit $failed
}

# refused PATTERN PROGRAM ARGUMENTS...: the program must fail with one line on standard error, beside notes, that has
# PATTERN.
refused() {
    pattern=$1
    shift
    if "$@" >"$work/out" 2>"$work/err" </dev/null; then
        echo "accepted: $*"
        return 1
    fi
    if [ "$(grep -vc '^note: ' "$work/err")" = 1 ] && grep -q "^error: .*$pattern" "$work/err"; then return 0; fi
    echo "expected \"$pattern\" from $*, got:"
    cat "$work/err"
    return 1
}

# says PATTERN FILE...: a file must have a line with PATTERN.
says() {
    grep -q -- "$@" && return 0
    echo "no line has \"$1\""
    return 1
}

# The printed configuration has an option with a value, whatever its origin: NAME VALUE.
shows() {
    says "^  $1  *$2\\( *# .*\\)\\{0,1\\}\$" "$work/out"
}

# Prints the mpirun command; Open MPI needs an option for more ranks than cores.
mpirun_here() {
    if mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte'; then
        echo 'mpirun --oversubscribe'
    else
        echo mpirun
    fi
}

# on_ranks RANKS PROGRAM ARGUMENTS...: runs a program; its output is in $work/out and $work/err. mpirun would read the
# standard input, which may be the list that a loop of the caller reads.
on_ranks() {
    number=$1
    shift
    # shellcheck disable=SC2046
    [ "$number" = 1 ] || set -- $(mpirun_here) -np "$number" "$@"
    "$@" >"$work/out" 2>"$work/err" </dev/null
}

# series KEY FILE: the numbers of a key in a file of metrics.
series() {
    sed -n "s/.*\"$1\": \([-0-9.e+]*\).*/\1/p" "$2"
}

# same_series A B TOLERANCE LEAST KEY...: two files of metrics have the same numbers x of the keys, up to TOLERANCE
# times LEAST + |x|.
same_series() {
    a=$1 b=$2 tolerance=$3 least=$4
    shift 4
    for key in "$@"; do
        series "$key" "$a" >"$work/a"
        series "$key" "$b" >"$work/b"
        [ -s "$work/a" ] && [ "$(wc -l <"$work/a")" = "$(wc -l <"$work/b")" ] || {
            echo "$a and $b: other numbers of $key"
            return 1
        }
        paste "$work/a" "$work/b" | awk -v t="$tolerance" -v least="$least" -v key="$key" '
            { d = $1 - $2; if (d < 0) d = -d; s = $1 < 0 ? -$1 : $1 }
            d > t * (least + s) { print key ": " $0; exit 1 }' || return 1
    done
}

# has_disk: compiles tests/preload_disk.c to $work/disk.so; fails where that is not possible, and says so.
has_disk() {
    export ASAN_OPTIONS="${ASAN_OPTIONS:-}:verify_asan_link_order=0" # the sanitizer's library is loaded after it
    [ -e "$work/disk.so" ] || ${CC:-cc} -shared -fPIC -o "$work/disk.so" tests/preload_disk.c -ldl 2>/dev/null || :
    [ -e "$work/disk.so" ] && return
    echo "skipped: a library to preload cannot be compiled here"
    return 1
}

# needs_mpi: skips the suite if MPI is absent.
needs_mpi() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null && return
    echo "skipped: MPI is absent"
    exit 77
}
