# Sourced by the demos: run commands whose output goes to $log, and read metrics. $model is a folder, $log a file.

# begin_log: empties the log, and says what the demo replaces.
begin_log() {
    mkdir -p "$model"
    if [ -s "$model/metrics.jsonl" ]; then echo "replacing the earlier run in $model"; fi
    : >"$log"
}

# in_place: on a terminal shows the last line about the loss, in place; elsewhere that of every hundredth iteration.
in_place() {
    if [ -t 1 ]; then
        awk '/ [0-9]+%  loss / { printf "\r\033[K%s", substr($0, 1, 79); fflush() } END { printf "\r\033[K" }'
    else
        awk '/^ *[0-9]*00\/[0-9]+ .*%  loss / { print "   " $0; fflush() }'
    fi
}

# run COMMAND...: runs a command whose output goes to the log; if it fails, prints the end of the log and exits.
run() {
    printf '\n$ %s\n' "$*" >>"$log"
    {
        status=0
        "$@" 2>&1 || status=$?
        echo $status >"$model/status"
    } | tee -a "$log" | in_place
    status=$(cat "$model/status")
    rm -f "$model/status"
    [ "$status" = 0 ] && return
    tail -n 20 "$log" >&2
    exit "$status"
}

# values FILE NAME: the numbers of this name in a file of metrics; value: the last one; first: the first one.
values() {
    sed -n "s/.*\"$2\": \([-+.0-9e]*\).*/\1/p" "$1"
}
value() {
    values "$1" "$2" | tail -n 1
}
first() {
    values "$1" "$2" | head -n 1
}

# mean_of_last COUNT FILE NAME
mean_of_last() {
    values "$2" "$3" | tail -n "$1" | awk '{ sum += $1 } END { printf "%.2f", sum / NR }'
}

# mpirun_command RANKS: prints the command that starts ranks of one thread.
mpirun_command() {
    if mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte'; then
        echo "env OMP_NUM_THREADS=1 OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none" \
            "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -np $1"
    else
        echo "env OMP_NUM_THREADS=1 mpirun -np $1"
    fi
}

# draw_curves FILE.svg: step 4 of a demo draws the curves of its metrics.
draw_curves() {
    run data/scripts/plot.sh "$model/metrics.jsonl" "$1"
    if [ -s "$1" ]; then
        echo "4. curves: $1"
    else
        echo "4. curves: not drawn, gnuplot is absent"
    fi
}
