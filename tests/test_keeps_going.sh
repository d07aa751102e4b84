#!/bin/sh
# Runs under mpirun: signals, time limits, bad steps, and restarts by launch.sh after losing ranks or hosts.
# Sections of megatron.c: §14
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
needs_mpi
MPIRUN=$(mpirun_here)
export MPIRUN

small='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 50 --seq-length 8 --mock-data --lr 1e-2
    --lr-decay-style constant --global-batch-size 8 --eval-iters 0 --distributed-timeout-seconds 60 --device cpu'

tidy() {
    rm -rf "$work/save" "$work/save "* "$work"/*.jsonl
}

# begin COMMAND...: trains in the background and returns after the first steps; job is its process id.
begin() {
    rm -f "$work/m.jsonl"
    "$@" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    waited=0
    until [ "$(wc -l 2>/dev/null <"$work/m.jsonl")" -gt 3 ] 2>/dev/null; do
        if ! kill -0 $job 2>/dev/null || [ $waited -ge $((10 * hang)) ]; then
            echo "no step was made"
            return 1
        fi
        sleep 0.1
        waited=$((waited + 1))
    done
}

# The run stopped early and saved its last step.
saved_its_last_step() {
    iteration=$(cat "$work/save/latest_checkpointed_iteration.txt") && [ "$iteration" -ge "${1:-4}" ] &&
        grep -q "stopped early after iteration $iteration\$" "$work/out" &&
        [ "$(tail -n 1 "$work/m.jsonl" | sed 's/.*"iteration": \([0-9]*\).*/\1/')" = "$iteration" ]
}

mpirun_forwards_the_exit_signal_and_the_run_is_saved() {
    # shellcheck disable=SC2086
    begin $MPIRUN -np 2 "$train" $small --train-iters 100000000 --save "$work/save" --metrics "$work/m.jsonl" \
        --exit-signal SIGUSR1 || return 1
    kill -USR1 $job
    wait $job && saved_its_last_step
}

# A batch system may signal mpirun. mpirun then kills the ranks after a short time (here 4 s, for a busy machine) and no
# longer forwards their output.
a_sigterm_to_mpirun_saves_the_run() {
    # shellcheck disable=SC2086
    begin env OMPI_MCA_odls_base_sigkill_timeout=4 $MPIRUN -np 2 "$train" $small --train-iters 100000000 \
        --save "$work/save" --metrics "$work/m.jsonl" || return 1
    kill -TERM $job
    wait $job
    iteration=$(cat "$work/save/latest_checkpointed_iteration.txt") && [ "$iteration" -gt 3 ] &&
        [ "$(tail -n 1 "$work/m.jsonl" | sed 's/.*"iteration": \([0-9]*\).*/\1/')" = "$iteration" ]
}

without_the_handler_a_signal_ends_the_run_at_once() {
    # shellcheck disable=SC2086
    begin $MPIRUN -np 2 "$train" $small --train-iters 100000000 --save "$work/save" --metrics "$work/m.jsonl" \
        --no-exit-signal-handler || return 1
    kill -TERM $job
    ! wait $job && ! [ -e "$work/save/latest_checkpointed_iteration.txt" ]
}

# It takes a step even if the limit is over before it.
a_run_at_its_time_limit_is_saved_on_all_ranks() {
    : >"$work/err"
    # shellcheck disable=SC2086
    $MPIRUN -np 3 "$train" $small --global-batch-size 6 --train-iters 100000000 --save "$work/save" \
        --exit-duration-in-mins 0.02 --metrics "$work/m.jsonl" >"$work/out" 2>"$work/err" </dev/null &&
        saved_its_last_step 1 || return 1
    # shellcheck disable=SC2086
    "$train" $small --train-iters 100000000 --save "$work/one" --exit-duration-in-mins 1e-9 >"$work/out" 2>"$work/err" \
        </dev/null && [ "$(cat "$work/one/latest_checkpointed_iteration.txt")" = 1 ] || return 1
    # the run continues from there
    iteration=$(cat "$work/save/latest_checkpointed_iteration.txt")
    # shellcheck disable=SC2086
    $MPIRUN -np 3 "$train" $small --global-batch-size 6 --train-iters $((iteration + 2)) --load "$work/save" \
        >"$work/out" 2>"$work/err" </dev/null && grep -q "$((iteration + 2))/$((iteration + 2)) 100%" "$work/out"
}

# A learning rate that leads to non-finite numbers. Rerunning a step gives the same result.
wild='--train-iters 50 --lr 1e6 --clip-grad 0 --init-method-std 30'

repeatable_bad_steps_are_rerun_and_skipped_and_then_end_the_run() {
    # shellcheck disable=SC2086
    $MPIRUN -np 2 "$train" $small $wild --bad-step-policy skip --rerun-mode validate_results >"$work/out" \
        2>"$work/err" </dev/null && return 1
    [ "$(grep -c 'ran again: a repeatable fault, every rank had the same result' "$work/err")" = 4 ] &&
        [ "$(grep -c 'this step makes no update$' "$work/err")" = 3 ] &&
        [ "$(grep -c '^error: .*after 3 bad steps in a row' "$work/err")" -ge 1 ] && ! grep -q transient "$work/err"
}

a_run_rewinds_to_its_checkpoint_and_skips_a_repeated_bad_step() {
    # shellcheck disable=SC2086
    $MPIRUN -np 2 "$train" $small $wild --bad-step-policy rewind --save "$work/save" --save-interval 1 \
        >"$work/out" 2>"$work/err" </dev/null && return 1
    # the first bad step runs twice, from the checkpoint before it
    bad=$(sed -n 's/^warning: iteration \([0-9]*\): .*; going back to the last checkpoint$/\1/p' "$work/err" |
        head -n 1)
    [ -n "$bad" ] && grep -q "^warning: went back to iteration $((bad - 1))\$" "$work/err" &&
        grep -q "^warning: iteration $bad: .*; this step makes no update\$" "$work/err" &&
        grep -q 'bad steps in a row' "$work/err"
}

# ---- the launcher

# Runs train; rank 3 of 4 kills itself once after every new checkpoint, or, if $work/sick exists, always.
cat >"$work/faulty" <<'SH'
#!/bin/sh
rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} size=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE}
work=$1 train=$2
shift 2
if [ "$rank" = 3 ] && [ "$size" = 4 ]; then
    (
        until latest=$(cat "$work/save/latest_checkpointed_iteration.txt" 2>/dev/null) &&
            { [ -e "$work/sick" ] || ! [ -e "$work/died.$latest" ]; }; do
            kill -0 $$ 2>/dev/null || exit
            sleep 0.02
        done
        : >"$work/died.$latest"
        [ "$(ls "$work" | grep -c died)" -gt 3 ] && ! [ -e "$work/sick" ] && exit
        kill -KILL $$
    ) >/dev/null 2>&1 &
fi
exec "$train" "$@"
SH
chmod +x "$work/faulty"

# same_losses A B: A and B have the same loss in every iteration, to 1e-5.
same_losses() {
    for file in "$1" "$2"; do
        sed -n 's/.*"iteration": \([0-9]*\), "lm_loss": \([-+.0-9e]*\).*/\1 \2/p' "$file" >"$file.losses"
    done
    awk 'NR == FNR { want[$1] = $2; next }
        { d = $2 - want[$1]; if (d < 0) d = -d; seen[$1] = 1; if (!(d <= 1e-5 * want[$1])) { print; exit 1 } }
        END { for (i in want) if (!(i in seen)) { print "no iteration " i; exit 1 } }' "$2.losses" "$1.losses"
}

# The reference for launched runs, long enough for several failures.
long_run() {
    [ -e "$work/plain" ] && return
    # shellcheck disable=SC2086
    $MPIRUN -np 4 "$train" $small --train-iters 200 --metrics "$work/plain" >"$work/out" 2>"$work/err" </dev/null
}

a_run_that_loses_ranks_repeatedly_has_the_same_losses() {
    long_run || return 1
    rm -f "$work"/died.* "$work/sick"
    # shellcheck disable=SC2086
    ./launch.sh -n 4 --pause 0 --max-restarts 10 "$work/faulty" "$work" "$train" $small --train-iters 200 \
        --save "$work/save" --save-interval 25 --metrics "$work/m.jsonl" >"$work/out" 2>"$work/err" </dev/null ||
        return 1
    grep -q 'launch: starting 4 ranks from iteration' "$work/err" &&
        [ "$(cat "$work/save/latest_checkpointed_iteration.txt")" = 200 ] &&
        same_losses "$work/m.jsonl" "$work/plain"
}

a_rank_that_always_fails_is_left_out() {
    long_run || return 1
    rm -f "$work"/died.*
    : >"$work/sick"
    # shellcheck disable=SC2086
    ./launch.sh -n 4 --pause 0 "$work/faulty" "$work" "$train" $small --train-iters 200 --save "$work/save" \
        --save-interval 25 --metrics "$work/m.jsonl" >"$work/out" 2>"$work/err" </dev/null || return 1
    rm -f "$work/sick"
    grep -q 'launch: trying fewer ranks: 2' "$work/err" && grep -q 'starting 2 ranks from iteration' "$work/err" &&
        [ "$(cat "$work/save/latest_checkpointed_iteration.txt")" = 200 ] &&
        same_losses "$work/m.jsonl" "$work/plain"
}

# ssh does not reach the host "gone", and never sees a host that it would read as an option; 3 ranks do not divide the
# batch of 8.
an_unreachable_host_is_left_out() {
    mkdir -p "$work/bin"
    printf '#!/bin/sh\necho "$*" >>"%s"\nexit 255\n' "$work/ssh.log" >"$work/bin/ssh"
    chmod +x "$work/bin/ssh"
    printf 'localhost slots=3\n# spare\ngone slots=4\n-oProxyCommand=reboot slots=4\n' >"$work/hosts"
    # shellcheck disable=SC2086
    PATH="$work/bin:$PATH" ./launch.sh -n 7 --hostfile "$work/hosts" --pause 0 "$train" $small --train-iters 5 \
        --save "$work/save" >"$work/out" 2>"$work/err" </dev/null || return 1
    grep -q 'launch: host gone does not answer' "$work/err" && grep -q 'launch: starting 2 ranks$' "$work/err" &&
        grep -q 'launch: host -oProxyCommand=reboot is an option of ssh: left out' "$work/err" &&
        grep -q ' gone true$' "$work/ssh.log" && ! grep -q -e -oProxy "$work/ssh.log" &&
        [ "$(cat "$work/save/latest_checkpointed_iteration.txt")" = 5 ]
}

# The command that replaces mpirun starts one process and then waits for ever; every other start works.
an_mpirun_that_outlives_its_ranks_is_killed() {
    mkfifo "$work/fifo"
    cat >"$work/stuck" <<'SH'
#!/bin/sh
work=$1
shift
if ! [ -e "$work/was_stuck" ]; then
    : >"$work/was_stuck"
    sleep 2
    read -r line <"$work/fifo"
fi
exec $REAL_MPIRUN "$@"
SH
    chmod +x "$work/stuck"
    # shellcheck disable=SC2086
    REAL_MPIRUN=$MPIRUN MPIRUN="$work/stuck $work" timeout $hang ./launch.sh -n 2 --pause 0 "$train" $small \
        --train-iters 5 --save "$work/save" >"$work/out" 2>"$work/err" </dev/null || return 1
    grep -q 'launch: .* has not ended 5 s after its last process: killed' "$work/err" &&
        [ "$(cat "$work/save/latest_checkpointed_iteration.txt")" = 5 ]
}

restarts_without_progress_end() {
    # shellcheck disable=SC2086
    MPIRUN=false ./launch.sh -n 2 --pause 0 --max-restarts 2 "$train" $small --train-iters 5 --save "$work/save" \
        >"$work/out" 2>"$work/err" </dev/null && return 1
    [ "$(grep -c 'launch: starting' "$work/err")" = 3 ] && grep -q 'max-restarts 2): giving up' "$work/err" || return 1
    # shellcheck disable=SC2086
    MPIRUN=false ./launch.sh -n 2 --pause 0 --max-restarts 9 --max-total-restarts 3 "$train" $small --train-iters 5 \
        --save "$work/save" >"$work/out" 2>"$work/err" </dev/null && return 1
    [ "$(grep -c 'launch: starting' "$work/err")" = 4 ] && grep -q '(--max-total-restarts): giving up' "$work/err"
}

# A stand-in for sleep returns at once.
pauses_grow_up_to_their_limit() {
    mkdir -p "$work/bin"
    printf '#!/bin/sh\nexit 0\n' >"$work/bin/sleep"
    chmod +x "$work/bin/sleep"
    # shellcheck disable=SC2086
    PATH="$work/bin:$PATH" MPIRUN=false ./launch.sh -n 2 --pause 20 --max-pause 70 --max-restarts 4 "$train" $small \
        --train-iters 5 --save "$work/save" >"$work/out" 2>"$work/err" </dev/null
    rm "$work/bin/sleep"
    [ "$(sed -n 's/^launch: next start in \(.*\) s$/\1/p' "$work/err" | tr '\n' ' ')" = '20 40 70 70 ' ]
}

# await TEXT FILE: until a file has a text.
await() {
    waited=0
    until grep -q -- "$1" "$2" 2>/dev/null; do
        sleep 0.1
        waited=$((waited + 1))
        [ $waited -lt $((10 * hang)) ] || return 1
    done
}

a_signal_ends_a_pause_at_once() {
    rm -f "$work/err"
    # shellcheck disable=SC2086
    MPIRUN=false ./launch.sh -n 2 --pause 1000 "$train" $small --train-iters 5 --save "$work/save" \
        >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    await 'next start in 1000 s' "$work/err" || return 1
    began=$(date +%s)
    kill -TERM $job
    wait $job
    [ $? = 143 ] && [ $(($(date +%s) - began)) -lt $hang ]
}

# Quotes, comments, nested names, and texts that a shell would run.
yaml_values_are_read_by_train_and_never_by_the_shell() {
    cat >"$work/run.yaml" <<YAML
model:
    num-layers: 1
    hidden_size: 16 # wide
    num_attention_heads: "2"
training:
    save: "$work/save # 'one'"
    tensor_model_parallel_size: '2' # of 2
    global_batch_size: "8"
YAML
    options='--vocab-size 50 --seq-length 8 --mock-data --lr 1e-2 --lr-decay-style constant --eval-iters 0'
    options="$options --device cpu --config $work/run.yaml"
    for iterations in 3 5; do
        # shellcheck disable=SC2086
        ./launch.sh -n 3 "$train" $options --train-iters $iterations >"$work/out" 2>"$work/err" </dev/null || return 1
    done
    grep -q '^launch: starting 2 ranks from iteration 3$' "$work/err" &&
        [ "$(cat "$work/save # 'one'/latest_checkpointed_iteration.txt")" = 5 ] || return 1
    command -v bash >/dev/null || return 0
    # shellcheck disable=SC2016
    printf 'micro_batch_size: "a[$(touch %s/run)0]"\nglobal_batch_size: 8\n' "$work" >"$work/run.yaml"
    # shellcheck disable=SC2086
    ! bash launch.sh -n 3 "$train" $small --config "$work/run.yaml" --train-iters 3 --save "$work/save" \
        >"$work/out" 2>"$work/err" </dev/null &&
        says 'launch: error: .*micro_batch_size expects a whole number' "$work/err" &&
        ! [ -e "$work/run" ]
}

# 3 ranks divide the batch, but not the experts.
the_number_of_ranks_is_one_that_train_accepts() {
    printf 'localhost slots=3' >"$work/hosts"
    # shellcheck disable=SC2086
    ./launch.sh -n 4 --hostfile "$work/hosts" "$train" $small --global-batch-size 12 --num-experts 2 --swiglu \
        --disable-bias-linear --ffn-hidden-size 16 --expert-model-parallel-size 2 --train-iters 2 \
        --save "$work/save" >"$work/out" 2>"$work/err" </dev/null && grep -q '^launch: starting 2 ranks$' "$work/err"
}

# Without --global-batch-size, fewer ranks keep the batch of the ranks that were asked for.
fewer_ranks_keep_the_global_batch() {
    printf 'localhost slots=2\n' >"$work/hosts"
    # shellcheck disable=SC2086
    set -- $small
    while [ "$1" != --global-batch-size ]; do set -- "$@" "$1" && shift; done
    shift 2
    ./launch.sh -n 4 --hostfile "$work/hosts" "$train" "$@" --train-iters 2 --save "$work/save" >"$work/out" \
        2>"$work/err" </dev/null && grep -q '^launch: starting 2 ranks$' "$work/err" &&
        grep -q '"global_batch_size": 4' "$work"/save/iter_0000002/trainer.json
}

# Every rank writes its process id to $work/rank.N.
cat >"$work/numbered" <<'SH'
#!/bin/sh
[ -z "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-}}" ] || echo $$ >"$1.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
shift
exec "$@"
SH
chmod +x "$work/numbered"

a_launcher_that_is_killed_leaves_no_ranks() {
    rm -f "$work"/rank.*
    # shellcheck disable=SC2086
    begin ./launch.sh -n 2 "$work/numbered" "$work/rank" "$train" $small --train-iters 100000000 \
        --save "$work/save" --metrics "$work/m.jsonl" || return 1
    kill -KILL $job
    waited=0
    while kill -0 "$(cat "$work/rank.0")" 2>/dev/null || kill -0 "$(cat "$work/rank.1")" 2>/dev/null; do
        sleep 0.1
        waited=$((waited + 1))
        if [ $waited -gt $((10 * hang)) ]; then
            kill -KILL "$(cat "$work/rank.0")" "$(cat "$work/rank.1")"
            return 1
        fi
    done
    wait $job 2>/dev/null
    grep -q 'launch.sh was killed: ending its ranks' "$work/err"
}

# Ctrl-C reaches all processes of the terminal's foreground group. The save takes 4 s; Open MPI's mpirun ends ranks
# sooner after a SIGINT of its own.
ctrl_c_leaves_a_save_its_time() {
    has_disk || return 0
    if ! command -v setsid >/dev/null || ! env --default-signal=INT true 2>/dev/null; then
        echo "skipped: setsid or env --default-signal is absent"
        return 0
    fi
    # shellcheck disable=SC2086
    begin setsid env --default-signal=INT ./launch.sh -n 2 env LD_PRELOAD="$work/disk.so" SLOW_FSYNC=4 "$train" \
        $small --train-iters 100000000 --save "$work/save" --metrics "$work/m.jsonl" || return 1
    kill -s INT -- -$job
    wait $job && saved_its_last_step
}

# ends_by SIGNAL: sends it until the job ends, whose status must be that of a process that it killed.
ends_by() {
    waited=0
    while kill -0 $job 2>/dev/null && [ $waited -lt 100 ]; do
        sleep 0.5
        kill -s "$1" $job 2>/dev/null
        waited=$((waited + 1))
    done
    wait $job
    [ "$(kill -l $?)" = "$1" ]
}

ctrl_c_saves_and_a_second_signal_ends_the_run_at_once() {
    # shellcheck disable=SC2086
    begin "$train" $small --train-iters 100000000 --save "$work/save" --metrics "$work/m.jsonl" || return 1
    kill -INT $job
    wait $job && saved_its_last_step &&
        says '^stopping after this step; this run has saved nothing so far; the second SIGTERM or Ctrl-C ends' \
            "$work/err" || return 1
    has_disk || return 0
    for pair in INT-INT TERM-TERM TERM-INT INT-TERM; do
        rm -rf "$work/save"
        # shellcheck disable=SC2086
        begin env LD_PRELOAD="$work/disk.so" SLOW_FSYNC=100 "$train" $small --train-iters 100000000 \
            --save "$work/save" --metrics "$work/m.jsonl" || return 1
        kill -s ${pair%-*} $job
        ends_by ${pair#*-} && ! [ -e "$work/save/latest_checkpointed_iteration.txt" ] || return 1
    done
}

# As the first process of a container, which no signal ends that it does not catch.
a_second_signal_ends_a_run_that_is_a_containers_first_process() {
    has_disk || return 0
    unshare --user --map-root-user --pid --fork true 2>/dev/null || { echo 'skipped: unshare is refused' && return; }
    # shellcheck disable=SC2086
    begin unshare --user --map-root-user --pid --fork env LD_PRELOAD="$work/disk.so" SLOW_FSYNC=100 "$train" $small \
        --train-iters 100000000 --save "$work/save" --metrics "$work/m.jsonl" || return 1
    process=$(ps -A -o pid= -o ppid= | awk -v parent=$job '$2 == parent { print $1 }')
    waited=0
    while kill -s TERM "$process" 2>/dev/null && [ $waited -lt 100 ]; do
        sleep 0.5
        waited=$((waited + 1))
    done
    kill -KILL "$process" 2>/dev/null
    wait $job
    [ $? = 143 ]
}

# Thousands of signals, most of them within a product of matrices, change no number: handlers have a stack of their own,
# because a product may keep values below the stack pointer.
signals_do_not_change_what_a_step_computes() {
    products="$small --num-layers 2 --hidden-size 40 --ffn-hidden-size 72 --vocab-size 300 --seq-length 90
        --global-batch-size 400 --train-iters 2 --exit-signal SIGUSR1"
    # shellcheck disable=SC2086
    "$train" $products --metrics "$work/a.jsonl" >"$work/out" 2>"$work/err" </dev/null || return 1
    rm "$work/out"
    # shellcheck disable=SC2086
    "$train" $products --metrics "$work/b.jsonl" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    until grep -q '^memory plan' "$work/out" || ! kill -0 $job; do sleep 0.01; done 2>/dev/null
    sent=0
    while [ $sent -lt 100000 ] && kill -USR1 $job; do sent=$((sent + 1)); done 2>/dev/null
    wait $job && for run in a b; do sed 's/.*"lm_loss": \([^,]*\),.*/\1/' "$work/$run.jsonl" >"$work/$run"; done &&
        [ -s "$work/b" ] && head -n "$(wc -l <"$work/b")" "$work/a" | cmp - "$work/b"
}

# A step of 10^18 operations is announced, and two signals end the run in it.
a_long_step_is_announced_and_two_signals_end_it() {
    rm -f "$work/out"
    # shellcheck disable=SC2086
    "$train" $small --seq-length 20000 --max-position-embeddings 20000 --hidden-size 64 --global-batch-size 4000000 \
        --train-iters 2 >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    waited=0
    until grep -q '^long step: about [0-9.e+]* operations on each rank, [0-9.]* hours at ' "$work/out"; do
        sleep 0.1
        waited=$((waited + 1))
        if ! kill -0 $job 2>/dev/null || [ $waited -gt 600 ]; then return 1; fi
    done
    kill -TERM $job
    ends_by TERM && says '^stopping after this step; nothing is saved without --save; ' "$work/err" || return 1
    # shellcheck disable=SC2086
    "$train" $small --train-iters 1 >"$work/out" 2>"$work/err" </dev/null && ! grep '^long step' "$work/out"
}

# Open MPI's mpirun kills its ranks a second after SIGTERM. The run says so, and takes SIGUSR1 in its place.
a_run_under_mpirun_says_how_it_is_stopped() {
    case $(mpirun --version 2>/dev/null) in *Open*MPI*) ;; *) echo 'skipped: not Open MPI' && return ;; esac
    # shellcheck disable=SC2086
    begin $MPIRUN -np 2 "$train" $small --train-iters 100000000 --save "$work/save" --metrics "$work/m.jsonl" ||
        return 1
    kill -USR1 $job
    wait $job && saved_its_last_step &&
        says '^Stopping: mpirun kills its ranks 1 s after a SIGTERM or Ctrl-C, too soon ' "$work/out" &&
        says '^stopping after this step; this run has saved nothing so far; ' "$work/err" &&
        [ "$(grep -c '^stopping' "$work/err")" = 1 ] || return 1
    rm -rf "$work/save"
    # shellcheck disable=SC2086
    begin env OMPI_MCA_odls_base_sigkill_timeout=20 $MPIRUN -np 2 "$train" $small --train-iters 100000000 \
        --save "$work/save" --save-interval 2 --metrics "$work/m.jsonl" --exit-signal SIGUSR2 || return 1
    kill -TERM $job
    wait $job
    ! grep '^Stopping: mpirun' "$work/out" &&
        says '^stopping .*mpirun kills its ranks 20 s after this signal; saved so far: iteration [1-9]' "$work/err" &&
        says 'kill -USR2 on mpirun would wait' "$work/err"
}

a_signal_during_the_start_stops_the_run_before_its_first_step() {
    has_disk || return 0
    for number in 2 15; do
        # shellcheck disable=SC2086
        LD_PRELOAD="$work/disk.so" SIGNAL_AT_START=$number "$train" $small --train-iters 100000000 \
            --save "$work/save" >"$work/out" 2>"$work/err" </dev/null &&
            says 'stopped early after iteration 0$' "$work/out" || return 1
    done
    # shellcheck disable=SC2086
    LD_PRELOAD="$work/disk.so" SIGNAL_AT_START=15 "$train" $small --train-iters 100000000 --save "$work/save" \
        --no-exit-signal-handler >"$work/out" 2>"$work/err" </dev/null
    [ $? = 143 ]
}

options_that_train_refuses_are_not_started() {
    # shellcheck disable=SC2086
    ! ./launch.sh -n 2 "$train" $small --train-iters 5 --save "$work/save" --lr nonsense >"$work/out" 2>"$work/err" \
        </dev/null && says "^launch: error: --lr expects a number, got 'nonsense'" "$work/err" &&
        ! grep -q starting "$work/err"
}

# A restart continues from the checkpoint of the run, not from --load or --hf-config.
a_signal_to_the_launcher_saves_and_ends_the_run() {
    # shellcheck disable=SC2086
    begin ./launch.sh -n 2 --pause 0 "$train" $small --train-iters 100000000 --save "$work/save" \
        --metrics "$work/m.jsonl" || return 1
    kill -TERM $job
    wait $job && saved_its_last_step || return 1
    iteration=$(cat "$work/save/latest_checkpointed_iteration.txt")
    # shellcheck disable=SC2086
    ./launch.sh -n 2 "$train" $small --train-iters $((iteration + 2)) --save "$work/save" --load tests/golden/none \
        --finetune --hf-config none.json >"$work/out" 2>"$work/err" </dev/null &&
        grep -q "starting 2 ranks from iteration $iteration" "$work/err" &&
        [ "$(cat "$work/save/latest_checkpointed_iteration.txt")" = $((iteration + 2)) ]
}

the_launcher_refuses_runs_that_it_cannot_restart() {
    # shellcheck disable=SC2086
    ! ./launch.sh -n 2 "$train" $small --train-iters 5 >"$work/out" 2>"$work/err" &&
        grep -q 'needs --save' "$work/err" &&
        ! ./launch.sh -n 2 "$train" $small --train-iters 5 --save "$work/save" --overwrite 2>"$work/err" &&
        grep -q 'launch: --overwrite would be repeated' "$work/err" &&
        ! ./launch.sh -n x "$train" --save "$work/save" 2>"$work/err" && grep -q 'whole numbers' "$work/err" &&
        ! ./launch.sh -n 2 "$train" $small --save "$work/save" --tensor-model-parallel-size 4 2>"$work/err" &&
        grep -q 'launch: error: .*the number of ranks 2 must be a multiple of .* = 4' "$work/err" || return 1
    mkfifo "$work/hosts.pipe"
    # shellcheck disable=SC2086
    ! timeout $hang ./launch.sh -n 2 --hostfile "$work/hosts.pipe" "$train" $small --save "$work/save" 2>"$work/err" &&
        grep -q 'launch: --hostfile .*hosts.pipe: cannot be read, or is not a regular file' "$work/err"
}

for name in mpirun_forwards_the_exit_signal_and_the_run_is_saved a_sigterm_to_mpirun_saves_the_run \
    without_the_handler_a_signal_ends_the_run_at_once a_run_at_its_time_limit_is_saved_on_all_ranks \
    repeatable_bad_steps_are_rerun_and_skipped_and_then_end_the_run \
    a_run_rewinds_to_its_checkpoint_and_skips_a_repeated_bad_step \
    a_run_that_loses_ranks_repeatedly_has_the_same_losses a_rank_that_always_fails_is_left_out \
    an_unreachable_host_is_left_out an_mpirun_that_outlives_its_ranks_is_killed restarts_without_progress_end \
    pauses_grow_up_to_their_limit a_signal_ends_a_pause_at_once yaml_values_are_read_by_train_and_never_by_the_shell \
    the_number_of_ranks_is_one_that_train_accepts fewer_ranks_keep_the_global_batch \
    a_launcher_that_is_killed_leaves_no_ranks ctrl_c_leaves_a_save_its_time \
    signals_do_not_change_what_a_step_computes ctrl_c_saves_and_a_second_signal_ends_the_run_at_once \
    a_second_signal_ends_a_run_that_is_a_containers_first_process a_long_step_is_announced_and_two_signals_end_it \
    a_run_under_mpirun_says_how_it_is_stopped \
    a_signal_during_the_start_stops_the_run_before_its_first_step \
    options_that_train_refuses_are_not_started a_signal_to_the_launcher_saves_and_ends_the_run \
    the_launcher_refuses_runs_that_it_cannot_restart; do
    check $name $name
done
exit $failed
