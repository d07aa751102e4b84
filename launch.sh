#!/bin/sh
# Runs train under mpirun until it ends without an error. After a failure, starts it again from its last checkpoint,
# with fewer ranks if a host is gone.
#
#   usage: ./launch.sh -n RANKS [--hostfile FILE] [--max-restarts N] [--pause SECONDS] ./train --save DIR OPTIONS...
#
#   -n RANKS                the largest number of ranks to start
#   --hostfile FILE         lines of "HOST slots=N"; every start leaves out the hosts that ssh does not reach
#   --max-restarts N        failures in a row without a new checkpoint before it gives up (3)
#   --max-total-restarts N  restarts in all before it gives up (1000)
#   --pause SECONDS         between a failure and the next start (5); doubles with each failure without a new checkpoint
#   --max-pause SECONDS     its limit (300)
#
# The number of ranks is the largest one that train accepts with the --global-batch-size of the first start, so that
# training continues as it would with all ranks. If train has --gpu (h100, ...), the model must also fit on so many GPUs
# of this kind; train plans it. After two failures in a row without a new checkpoint it takes the next smaller number,
# until a host comes back. SIGTERM, SIGHUP and Ctrl-C: train saves and ends, and a pause ends at once; a
# second Ctrl-C ends train at once. If launch.sh itself is killed, so is mpirun. MPIRUN="mpirun --bind-to none" replaces
# the command that starts ranks. An mpirun that stays for 5 s after its last process has ended is killed: Open MPI 4.1's
# does not end if a rank dies while it connects to it, or if a host is gone.
set -u
ranks='' hostfile='' limit=3 total=1000 pause=5 longest=300

say() { echo "launch: $*" >&2; }
die() { say "$*" && exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
    -n | -np) ranks=${2:-} && shift ;;
    --hostfile) hostfile=${2:-} && shift ;;
    --max-restarts) limit=${2:-} && shift ;;
    --max-total-restarts) total=${2:-} && shift ;;
    --pause) pause=${2:-} && shift ;;
    --max-pause) longest=${2:-} && shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' && exit ;;
    -*) die "unknown option $1; --help lists them" ;;
    *) break ;;
    esac
    [ $# -gt 0 ] && shift
done
[ $# -gt 0 ] || die "which program? --help shows how"
for number in "$ranks" "$limit" "$total" "$pause" "$longest"; do
    case $number in '' | *[!0-9]* | 0?* | ???????*) # the shell reads 010 as 8
        die "-n, --max-restarts, --max-total-restarts, --pause and --max-pause expect whole numbers" ;;
    esac
done
[ "$ranks" -gt 0 ] || die "-n expects at least one rank"
[ -z "$hostfile" ] || { [ -f "$hostfile" ] && [ -r "$hostfile" ]; } ||
    die "--hostfile $hostfile: cannot be read, or is not a regular file; give a file: every start reads it"

work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT

# ---- signals

job='' helper='' signal=SIGUSR1 stopping='' interrupts=0

# stop NAME STATUS: requests a stop from train; between two starts it ends launch.sh with STATUS.
stop() {
    stopping=$1
    if [ "$1" = INT ]; then interrupts=$((interrupts + 1)); fi
    if [ -z "$job" ]; then
        [ -z "$helper" ] || kill "$helper" 2>/dev/null
        exit "$2"
    elif [ $interrupts -gt 1 ]; then
        kill -TERM "$job" 2>/dev/null
    else
        : >"$work/stopping"
        kill -"${signal#SIG}" "$job" 2>/dev/null
    fi
}
trap 'stop HUP 129' HUP
trap 'stop INT 130' INT
trap 'stop TERM 143' TERM

# finish PROCESS: its status at its end. A signal interrupts wait.
finish() {
    while :; do
        wait "$1"
        result=$?
        kill -0 "$1" 2>/dev/null || return $result
    done
}

# aside COMMAND...: runs it so that a signal ends launch.sh at once.
aside() {
    (exec 9>&- && "$@") &
    helper=$!
    finish $helper
    result=$?
    helper=''
    return $result
}

# end_job PROCESS SIGNAL: a signal to mpirun and its own helpers, such as ssh.
end_job() {
    kill -s "$2" -- "-$1" 2>/dev/null || kill -s "$2" "$1" 2>/dev/null
}

# Ends mpirun if launch.sh is killed: descriptor 9 of launch.sh is then closed, and the pipe ends. Its last line is the
# process to end, if any. In a session of its own, like mpirun, it does not get the signals of the terminal.
session=$(command -v setsid)
mkfifo "$work/alive" || exit
exec 9<>"$work/alive"
cat >"$work/guard" <<'GUARD'
trap '' HUP INT TERM
process=''
while read -r line; do process=$line; done
if [ -n "$process" ]; then
    echo "launch: launch.sh was killed: ending its ranks" >&2
    for signal in TERM KILL; do
        kill -s $signal -- "-$process" 2>/dev/null || kill -s $signal "$process" 2>/dev/null
        waited=0
        while kill -0 "$process" 2>/dev/null && [ $waited -lt 10 ]; do
            sleep 1
            waited=$((waited + 1))
        done
    done
fi
rm -rf "$1"
GUARD
# shellcheck disable=SC2086
$session sh "$work/guard" "$work" <"$work/alive" 9>&- >/dev/null &

# ---- what to start

# plan MOST ARGUMENTS...: asks train for the ranks to start, at most MOST; its answer is in $work/plan.
plan() {
    most=$1
    shift
    "$@" --auto-resume --print-launch "$most" >"$work/plan" 2>"$work/why" </dev/null && [ -n "$(planned ranks)" ]
}

planned() { sed -n "s/^$1 //p" "$work/plan" | tail -n 1; }
whole() { planned "$1" | grep -x '[0-9]\{1,9\}'; } # a number that the shell may calculate with

for word; do
    case $word in --overwrite | --overwrite=true)
        die "--overwrite would be repeated at every start; remove the --save folder, or choose another" ;;
    esac
done
aside plan "$ranks" "$@" || die "$(grep . "$work/why" || echo "$1 did not answer --print-launch $ranks")"
save=$(planned save)
[ -n "$save" ] || die "train needs --save, to be started again from there"
batch=$(whole global_batch_size)
device=$(planned device)
case $(planned exit_signal) in SIGUSR2) signal=SIGUSR2 ;; esac

# find_room: writes the number of ranks that the hosts have slots for now to $work/room, and the hosts that answer to
# $work/hosts.
find_room() {
    if [ -z "$hostfile" ]; then
        gpus=''
        [ "$device" = cuda ] && gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
        if [ -n "$gpus" ] && [ "$gpus" -lt "$ranks" ]; then echo "$gpus"; else echo "$ranks"; fi >"$work/room"
        return
    fi
    slots=0
    : >"$work/hosts"
    while read -r host rest || [ -n "$host" ]; do
        case $host in
        '' | '#'*) continue ;;
        -*) say "host $host is an option of ssh: left out" && continue ;;
        esac
        count=$(echo "$rest" | sed -n 's/.*slots=0*\([0-9]\{1,6\}\).*/\1/p')
        case $host in
        localhost | "$(uname -n)") ;;
        *)
            if ! ssh -o BatchMode=yes -o ConnectTimeout=10 "$host" true </dev/null >/dev/null 2>&1; then
                say "host $host does not answer: left out"
                continue
            fi
            ;;
        esac
        echo "$host slots=${count:-1}" >>"$work/hosts"
        slots=$((slots + ${count:-1}))
    done <"$hostfile"
    if [ $slots -lt "$ranks" ]; then echo $slots; else echo "$ranks"; fi >"$work/room"
}

latest() {
    tracker=$save/latest_checkpointed_iteration.txt
    [ -f "$tracker" ] && cat "$tracker" 2>/dev/null
}

# ---- starting it

# start RANKS ARGUMENTS...: starts from the last checkpoint, if there is one, or else as the arguments say. Returns
# mpirun's status.
start() {
    number=$1
    shift
    set -- "$@" --auto-resume --global-batch-size "$batch" --exit-signal "$signal"
    [ -z "$(latest)" ] || set -- "$@" --finetune=false --no-load-optim=false
    rm -f "$work/stopping"
    # shellcheck disable=SC2016,SC2086
    $session sh -c 'echo $$ >&9; exec "$@" 9>&-' sh ${MPIRUN:-mpirun} ${hostfile:+--hostfile "$work/hosts"} \
        -np "$number" "$@" </dev/null &
    job=$!
    end_if_abandoned $job &
    watch=$!
    finish $job
    result=$?
    job=''
    echo >&9
    kill $watch 2>/dev/null
    wait $watch 2>/dev/null
    return $result
}

# end_if_abandoned JOB: kills the process JOB once it has had children and has had none but ssh for 5 s. Repeats the
# request to stop, which comes to nothing while mpirun starts its ranks.
end_if_abandoned() {
    trap - HUP INT TERM
    exec 9>&-
    had_children='' alone=0 asked=0
    while sleep 1 >/dev/null 2>&1 && kill -0 "$1" 2>/dev/null; do
        if [ -e "$work/stopping" ] && asked=$((asked + 1)) && [ $((asked % 5)) = 0 ]; then
            kill -"${signal#SIG}" "$1" 2>/dev/null
        fi
        if ps -A -o ppid= -o stat= -o comm= |
            awk -v job="$1" '$1 == job && $2 !~ /^Z/ && $3 !~ /(^|\/)ssh$/ { found = 1 } END { exit !found }'; then
            had_children=yes alone=0
        elif [ -n "$had_children" ] && alone=$((alone + 1)) && [ $alone -ge 5 ]; then
            say "${MPIRUN:-mpirun} has not ended 5 s after its last process: killed"
            end_job "$1" KILL
        fi
    done
}

# ---- until it is done

failures=0 restarts=0 ceiling=$ranks delay=$pause last_room=0
while :; do
    aside find_room
    room=$(cat "$work/room")
    [ "$room" -le "$last_room" ] || ceiling=$ranks # the first start, or a host came back
    last_room=$room
    [ "$room" -lt "$ceiling" ] || room=$ceiling
    before=$(latest)
    number=0
    if [ "$room" -gt 0 ] && aside plan "$room" "$@" --global-batch-size "$batch"; then number=$(whole ranks); fi
    if [ "$number" -gt 0 ]; then
        say "starting $number ranks$([ -n "$before" ] && echo " from iteration $before")"
        start "$number" "$@"
        status=$?
        if [ $status = 0 ] || [ -n "$stopping" ]; then exit $status; fi
        say "$number ranks ended with status $status, at checkpoint $(latest || echo none)"
    else
        status=2
        say "there is room for $room ranks, too few for this run: $(cat "$work/why")"
    fi
    if [ "$(latest)" != "$before" ]; then failures=0 delay=$pause; else failures=$((failures + 1)); fi
    if [ $failures -gt "$limit" ]; then
        say "$failures failures without a new checkpoint (--max-restarts $limit): giving up"
        exit $status
    fi
    restarts=$((restarts + 1))
    if [ $restarts -gt "$total" ]; then
        say "$total restarts in all (--max-total-restarts): giving up"
        exit $status
    fi
    if [ $failures -ge 2 ] && [ "$number" -gt 1 ] &&
        aside plan $((number - 1)) "$@" --global-batch-size "$batch"; then
        ceiling=$(whole ranks)
        say "trying fewer ranks: $ceiling"
    fi
    if [ "$delay" -gt 0 ]; then say "next start in $delay s"; fi
    aside sleep "$delay"
    delay=$((delay * 2))
    if [ $delay -gt "$longest" ]; then delay=$longest; fi
done
