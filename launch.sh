#!/bin/sh
# Runs train under mpirun until it ends without an error. After a failure, starts it again from its last checkpoint,
# with fewer ranks if a host is gone.
#
#   usage: ./launch.sh -n RANKS [--hostfile FILE] [--max-restarts N] [--pause SECONDS] ./train --save DIR OPTIONS...
#
#   -n RANKS            the largest number of ranks to start
#   --hostfile FILE     lines of "HOST slots=N"; every start leaves out the hosts that ssh does not reach
#   --max-restarts N    failures in a row without a new checkpoint before it gives up (3)
#   --pause SECONDS     between a failure and the next start (5)
#
# The number of ranks is a multiple of the tensor, pipeline and context sizes, and divides --global-batch-size evenly
# into micro-batches, so that training continues as it would with all ranks. After two failures in a row without a new
# checkpoint it takes the next smaller number. On SIGTERM and SIGINT it sends SIGUSR1, which mpirun passes on, and train
# saves and ends. MPIRUN="mpirun --bind-to none" replaces the command that starts ranks. An mpirun that stays for 5 s
# after its last process has ended is killed: Open MPI 4.1's does not end if a rank dies while it connects to it.
set -u
ranks='' hostfile='' limit=3 pause=5

say() { echo "launch: $*" >&2; }
die() { say "$*" && exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
    -n | -np) ranks=${2:-} && shift ;;
    --hostfile) hostfile=${2:-} && shift ;;
    --max-restarts) limit=${2:-} && shift ;;
    --pause) pause=${2:-} && shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
    -*) die "unknown option $1; --help lists them" ;;
    *) break ;;
    esac
    [ $# -gt 0 ] && shift
done
[ $# -gt 0 ] || die "which program? --help shows how"
for number in "$ranks" "$limit" "$pause"; do
    case $number in '' | *[!0-9]*) die "-n, --max-restarts and --pause expect whole numbers" ;; esac
done
[ "$ranks" -gt 0 ] || die "-n expects at least one rank"
[ -z "$hostfile" ] || [ -r "$hostfile" ] || die "--hostfile $hostfile: cannot be read"

# last_of NAME ARGUMENTS...: the value of --NAME, or nothing.
last_of() {
    name=$1 value='' next=''
    shift
    for word; do
        if [ -n "$next" ]; then value=$word next=''; fi
        case $word in
        "--$name") next=yes ;;
        "--$name="*) value=${word#*=} ;;
        esac
    done
    echo "$value"
}

# option NAME DEFAULT ARGUMENTS...: the value of --NAME in train: from the command line, else from the YAML file.
option() {
    name=$1 fallback=$2
    shift 2
    found=$(last_of "$name" "$@")
    file=$(last_of config "$@")
    if [ -z "$found" ] && [ -r "$file" ]; then
        key=$(echo "$name" | tr - _)
        found=$(sed -n "s/[[:space:]]*#.*//; s/^[[:space:]]*$key:[[:space:]]*//p" "$file" | tail -n 1)
    fi
    echo "${found:-$fallback}"
}

save=$(option save '' "$@")
[ -n "$save" ] || die "train needs --save, to be started again from there"
tensor=$(option tensor-model-parallel-size 1 "$@")
pipeline=$(option pipeline-model-parallel-size 1 "$@")
context=$(option context-parallel-size 1 "$@")
micro_batch=$(option micro-batch-size 1 "$@")
global_batch=$(option global-batch-size 0 "$@")
signal=$(option exit-signal '' "$@")
case $signal in SIGUSR1 | SIGUSR2) ;; *) signal=SIGUSR1 ;; esac
model=$((tensor * pipeline * context))

# legal LIMIT: the largest number of ranks up to LIMIT that trains the same run, or nothing. Without
# --global-batch-size the batch depends on the number of ranks, so that only the first number is legal.
legal() {
    number=$(($1 / model * model))
    while [ $number -gt 0 ]; do
        if [ "$global_batch" = 0 ]; then
            [ $number = "$ranks" ] && break
        elif [ $((global_batch % (micro_batch * (number / model)))) = 0 ]; then
            break
        fi
        number=$((number - model))
    done
    [ $number -gt 0 ] && echo $number
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# available: the number of ranks that the hosts have slots for now; writes the hosts that answer to $work/hosts.
available() {
    if [ -z "$hostfile" ]; then
        gpus=''
        [ "$(option device auto "$@")" = cuda ] && gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
        if [ -n "$gpus" ] && [ "$gpus" -lt "$ranks" ]; then echo "$gpus"; else echo "$ranks"; fi
        return
    fi
    slots=0
    : >"$work/hosts"
    while read -r host rest; do
        case $host in '' | '#'*) continue ;; esac
        count=$(echo "$rest" | sed -n 's/.*slots=\([0-9][0-9]*\).*/\1/p')
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
    if [ $slots -lt "$ranks" ]; then echo $slots; else echo "$ranks"; fi
}

latest() { cat "$save/latest_checkpointed_iteration.txt" 2>/dev/null; }

# start RANKS ARGUMENTS...: starts from the last checkpoint, if there is one, whose --load replaces the --hf-config or
# --load of the first start. Returns mpirun's status.
start() {
    number=$1
    shift
    if [ -n "$(latest)" ]; then
        count=$#
        while [ $count -gt 0 ]; do # removes --hf-config: each argument moves to the end of the list
            word=$1
            shift
            count=$((count - 1))
            case $word in
            --hf-config) shift && count=$((count - 1)) ;;
            --hf-config=*) ;;
            *) set -- "$@" "$word" ;;
            esac
        done
        set -- "$@" --load "$save" --finetune=false --no-load-optim=false
    fi
    # shellcheck disable=SC2086
    ${MPIRUN:-mpirun} ${hostfile:+--hostfile "$work/hosts"} -np "$number" "$@" --exit-signal "$signal" </dev/null &
    job=$!
    end_if_abandoned $job &
    watch=$!
    while :; do # a signal interrupts the wait
        wait $job
        result=$?
        kill -0 $job 2>/dev/null || break
    done
    kill $watch 2>/dev/null
    wait $watch 2>/dev/null
    return $result
}

# end_if_abandoned JOB: kills the process JOB once it has had children and has had none for 5 s.
end_if_abandoned() {
    trap - TERM INT
    had_children='' alone=0
    while sleep 1 >/dev/null 2>&1 && kill -0 "$1" 2>/dev/null; do
        if ps -A -o ppid= -o stat= | grep -q "^ *$1 *[^Z ]"; then
            had_children=yes alone=0
        elif [ -n "$had_children" ] && alone=$((alone + 1)) && [ $alone -ge 5 ]; then
            say "${MPIRUN:-mpirun} has not ended 5 s after its last process: killed"
            kill -KILL "$1"
        fi
    done
}

job='' stopping=''
stop() {
    stopping=yes
    if [ -n "$job" ]; then kill -"${signal#SIG}" "$job" 2>/dev/null; else exit 143; fi
}
trap stop TERM INT

failures=0 ceiling=$ranks
while :; do
    room=$(available "$@")
    [ "$room" -lt "$ceiling" ] || room=$ceiling
    number=$(legal "$room")
    [ -n "$number" ] || die "there is room for $room ranks, but this run needs a multiple of $model that divides" \
        "--global-batch-size, which must be given for fewer than $ranks"
    before=$(latest)
    say "starting $number ranks$([ -n "$before" ] && echo " from iteration $before")"
    start "$number" "$@"
    status=$?
    if [ $status = 0 ] || [ -n "$stopping" ]; then exit $status; fi
    if [ "$(latest)" != "$before" ]; then failures=0; else failures=$((failures + 1)); fi
    say "$number ranks ended with status $status, at checkpoint $(latest || echo none)"
    if [ $failures -gt "$limit" ]; then
        say "$failures failures without a new checkpoint (--max-restarts $limit): giving up"
        exit $status
    fi
    if [ $failures -ge 2 ] && fewer=$(legal $((number - 1))) && [ -n "$fewer" ]; then
        say "trying fewer ranks: $fewer"
        ceiling=$fewer
    fi
    sleep "$pause"
    [ -z "$stopping" ] || exit $status
done
