#!/bin/sh
# Two hosts as network namespaces under launch.sh --hostfile: one loses its power and comes back.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
needs_mpi
if ! mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte' || ! unshare -n -u true 2>/dev/null ||
    ! command -v ip >/dev/null || ! command -v nsenter >/dev/null; then
    echo "skipped: two hosts need Open MPI, ip, nsenter and the right to make namespaces"
    exit 77
fi

unshare -n -u sleep 600 &
first=$!
unshare -n -u sleep 600 &
second=$!
trap 'kill $first $second 2>/dev/null; rm -rf "$work"' EXIT

# on PROCESS COMMAND...: runs it on the host of a process.
on() {
    host=$1
    shift
    nsenter -t "$host" -n -u "$@"
}

connect_hosts() {
    until [ "$(readlink /proc/$first/ns/net)" != "$(readlink /proc/self/ns/net)" ] &&
        [ "$(readlink /proc/$second/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do
        sleep 0.1
    done
    on $first hostname first && on $second hostname second &&
        on $first ip link add east type veth peer name west netns $second &&
        on $first ip address add 10.203.0.1/24 dev east && on $second ip address add 10.203.0.2/24 dev west &&
        on $first ip link set lo up && on $second ip link set lo up &&
        on $first ip link set east up && on $second ip link set west up
}
if ! connect_hosts >"$work/out" 2>&1; then
    echo "skipped: namespaces cannot be connected here: $(tail -n 1 "$work/out")"
    exit 77
fi

# ssh to a host without power does not answer; a connection that was open hangs.
mkdir -p "$work/bin" "$work/tmp"
cat >"$work/bin/ssh" <<SH
#!/bin/sh
while :; do
    case \$1 in
    -o | -l | -p) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
case \$1 in
10.203.0.1) host=$first ;;
10.203.0.2) host=$second && [ -e "$work/gone" ] && exit 255 ;;
esac
shift
nsenter -t \$host -n -u sh -c "\$*"
status=\$?
while [ \$host = $second ] && [ -e "$work/gone" ]; do sleep 1; done
exit \$status
SH
chmod +x "$work/bin/ssh"
printf '10.203.0.1 slots=2\n10.203.0.2 slots=2\n' >"$work/hosts"

# Ends every process of the second host, after its cable is cut.
cut_power() {
    : >"$work/gone"
    on $second ip link set west down
    place=$(readlink /proc/$second/ns/net)
    for entry in /proc/[0-9]*; do
        process=${entry#/proc/}
        [ "$(readlink "$entry/ns/net" 2>/dev/null)" = "$place" ] && [ "$process" != $second ] && kill -KILL "$process"
    done
}

restore_power() {
    on $second ip link set west up && rm "$work/gone"
}

# await COMMAND...: until a command succeeds.
await() {
    waited=0
    until "$@"; do
        sleep 0.1
        waited=$((waited + 1))
        if [ $waited -ge $((10 * hang)) ] || ! kill -0 $job; then
            echo "waited in vain: $*"
            return 1
        fi
    done
}
reports() { grep -q -- "$1" "$work/err" 2>/dev/null; }
steps() { cat "$work/metrics" 2>/dev/null | wc -l; }
has_steps() { [ "$(steps)" -ge "$1" ]; }

a_host_that_goes_away_is_left_out_and_used_again_when_it_is_back() {
    PATH="$work/bin:$PATH" OMPI_MCA_orte_tmpdir_base="$work/tmp" MPIRUN=$(mpirun_here) \
        nsenter -t $first -n -u ./launch.sh -n 4 --hostfile "$work/hosts" --pause 0 --max-restarts 3 \
        "$work/numbered" "$work/rank" "$train" --num-layers 1 --hidden-size 16 --num-attention-heads 2 \
        --vocab-size 50 --seq-length 8 --mock-data --lr 1e-2 --lr-decay-style constant --global-batch-size 8 \
        --eval-iters 0 --device cpu --distributed-timeout-seconds 4 --save-timeout-seconds 8 \
        --train-iters 100000000 --save-interval 10 --keep-checkpoints 2 --save "$work/save" \
        --metrics "$work/metrics" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    await reports 'starting 4 ranks$' && await has_steps 20 || return 1
    cut_power
    await reports 'host 10.203.0.2 does not answer: left out' &&
        await reports 'starting 2 ranks from iteration [0-9]*$' && await has_steps $(($(steps) + 20)) || return 1
    restore_power
    kill -KILL "$(cat "$work/rank.1")"
    await reports 'starting 4 ranks from iteration [0-9]*$' && await has_steps $(($(steps) + 20)) || return 1
    kill -TERM $job
    wait $job && grep -q 'stopped early after iteration' "$work/out"
}

# Ranks that mpirun places in turn: the first host has ranks 0 and 2, the second 1 and 3.
tensor_groups_across_hosts_are_named() {
    for by in node slot; do
        # shellcheck disable=SC2046
        PATH="$work/bin:$PATH" OMPI_MCA_orte_tmpdir_base="$work/tmp" nsenter -t $first -n -u $(mpirun_here) -np 4 \
            --hostfile "$work/hosts" --map-by $by "$train" --num-layers 1 --hidden-size 16 --num-attention-heads 2 \
            --vocab-size 50 --seq-length 8 --mock-data --lr 1e-2 --eval-iters 0 --device cpu --train-iters 1 \
            --tensor-model-parallel-size 2 >"$work/out.$by" 2>"$work/err" </dev/null || return 1
    done
    says '^2 of 2 tensor groups of 2 ranks cross hosts, such as ranks 0-1: .*--map-by slot' "$work/out.node" &&
        ! grep 'cross hosts' "$work/out.slot"
}

# Every rank writes its process id to a file.
cat >"$work/numbered" <<'SH'
#!/bin/sh
[ -z "${OMPI_COMM_WORLD_RANK:-}" ] || echo $$ >"$1.$OMPI_COMM_WORLD_RANK"
shift
exec "$@"
SH
chmod +x "$work/numbered"

check tensor_groups_across_hosts_are_named tensor_groups_across_hosts_are_named
name=a_host_that_goes_away_is_left_out_and_used_again_when_it_is_back
check $name $name
[ $failed = 0 ] || kill "$job" 2>/dev/null
exit $failed
