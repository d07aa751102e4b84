# Writes the script of a page, TO "script", and what block N must print, TO "want.N" with "tolerance.N". Without
# `has_mpi`, blocks with mpirun are left out. See test_notes.sh.

function open_block(kind_) {
    kind = kind_
    begun = 0
}

function close_block() {
    if (kind == "run") end_run()
    if (kind == "prints" && !begun) {
        printf "%s:%d: nothing is said to be printed\n", FILENAME, FNR >"/dev/stderr"
        exit 1
    }
    kind = ""
}

# A block is run if it can be; its output stands behind a line "@@@ N".
function end_run() {
    left_out = !has_mpi && block ~ /mpirun/
    if (!left_out) printf "echo '@@@ %d'\n%s", ++runs, block >(to "script")
    block = ""
}

BEGIN { print "set -e" >(to "script") }

/^<!-- run -->/ {
    close_block()
    open_block("run")
    next
}
/^<!-- prints/ {
    close_block()
    if (runs + left_out == 0) {
        printf "%s:%d: nothing was run before\n", FILENAME, FNR >"/dev/stderr"
        exit 1
    }
    open_block("prints")
    if (!left_out) print ($3 ~ /%$/ ? $3 + 0 : 0) >(to "tolerance." runs)
    next
}
kind == "" || (/^$/ && !begun) { next }
/^    / || /^\|/ {
    begun = 1
    if (kind == "run") block = block substr($0, 5) "\n"
    else if (!left_out) print >(to "want." runs)
    next
}
/^$/ { next }
{ close_block() }
END { close_block() }
