#!/bin/sh
# The train program: golden losses, resuming, stopping early, metrics, YAML, traces, and errors.
# Sections of megatron.c: §14 §15
set -u
. tests/suite.sh
golden=tests/golden/hf
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

tidy() {
    rm -f "$work"/*.jsonl
}

# refuses PATTERN ARGUMENTS...
refuses() {
    pattern=$1
    shift
    refused "$pattern" "$train" "$@"
}

# metric FILE NAME: prints the values of a metric, one line per iteration.
metric() {
    sed -n "s/.*\"$2\": \([-+.0-9e]*\).*/\1/p" "$1"
}

optimizer='--lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --lr-warmup-iters 0 --adam-beta1 0.9 --adam-beta2 0.95
    --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 --device cpu'

# golden_run FAMILY ARGUMENTS...: ten steps on the family's tokens.
golden_run() {
    family=$1
    shift
    # shellcheck disable=SC2086
    "$train" --load "$golden/$family" --tokens-file "$golden/$family/tokens.i32" --seq-length 32 --micro-batch-size 1 \
        --global-batch-size 4 --train-iters 10 $optimizer --overwrite "$@" >"$work/out" 2>"$work/err" || {
        cat "$work/err"
        return 1
    }
}

losses_and_norms_equal_expected_json() {
    for family in gpt2 llama llama3_rope_tied qwen2 qwen3; do
        golden_run "$family" --metrics "$work/m.jsonl" || return 1
        for pair in losses:lm_loss grad_norms:grad_norm; do
            awk -v key="\"${pair%%:*}\"" '$0 ~ key { on = 1; next } on && /\]/ { exit }
                on { gsub(/[ ,]/, ""); print }' "$golden/$family/expected.json" >"$work/want"
            metric "$work/m.jsonl" "${pair##*:}" >"$work/got"
            [ "$(wc -l <"$work/got")" = 10 ] || return 1
            paste "$work/got" "$work/want" | awk -v family="$family" '
                { d = ($1 - $2) / $2; if (d < 0) d = -d; if (!(d <= 1e-5)) { print family ": " $0; bad = 1; exit } }
                END { exit bad }' || return 1
        done
    done
}

metrics_have_every_key() {
    golden_run llama --metrics "$work/m.jsonl" || return 1
    for key in iteration lm_loss grad_norm learning_rate tokens_per_second tflops_per_device iteration_ms \
        peak_memory_bytes; do
        [ "$(metric "$work/m.jsonl" $key | wc -l)" = 10 ] || return 1
    done
    grep -q load_imbalance "$work/m.jsonl" && return 1
    golden_run mixtral --metrics "$work/m.jsonl" --moe-z-loss-coeff 1e-3 --moe-aux-loss-coeff 1e-2 ||
        return 1
    for key in lm_loss load_balancing_loss z_loss load_imbalance worst_load_imbalance dropped peak_memory_bytes; do
        [ "$(metric "$work/m.jsonl" $key | wc -l)" = 10 ] || return 1
    done
    grep -q 'aux loss .*  z loss .*  load .* (worst ' "$work/out" || return 1
    # a model cut to its first layer, which has no experts
    "$train" --hf-config "$golden/deepseek_v3/config.json" --num-layers 1 --mtp-num-layers 0 --mock-data \
        --seq-length 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 \
        --eval-iters 0 --device cpu --metrics "$work/dense.jsonl" >"$work/out" 2>"$work/err" || return 1
    [ "$(metric "$work/dense.jsonl" lm_loss | wc -l)" = 2 ] && ! grep -q 'load' "$work/dense.jsonl" "$work/out"
}

# first_loss FOLDER ARGUMENTS...: prints the loss of the first step from a folder.
first_loss() {
    from=$1
    shift
    # shellcheck disable=SC2086
    $upcycle_launch "$train" --load "$from" --tokens-file "$golden/llama/tokens.i32" --seq-length 32 \
        --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --overwrite $optimizer --metrics "$work/m.jsonl" \
        "$@" >"$work/out" 2>"$work/err" || {
        cat "$work/err" >&2
        return 1
    }
    metric "$work/m.jsonl" lm_loss
}

# near LOSS LOSS: to 1e-5.
near() {
    echo "$1 $2" | awk '{ d = ($1 - $2) / $2; if (d < 0) d = -d; exit !(NF == 2 && d <= 1e-5) }' || {
        echo "$1 is not near $2"
        return 1
    }
}

# Experts that are equal are the dense MLP, whichever are chosen, as their weights sum to 1: copies of Llama's, and the
# halves of a squared ReLU's channels, whose two halves of a copy are chosen together.
an_upcycled_model_has_the_loss_of_the_dense_one() {
    upcycle_launch=
    dense=$(first_loss "$golden/llama") || return 1
    upcycled=$(first_loss "$golden/llama" --moe-use-upcycling --num-experts 4) && near "$upcycled" "$dense" || return 1
    upcycled=$(first_loss "$golden/llama" --moe-use-upcycling --num-experts 4 --moe-layer-freq 2 --moe-router-topk 3 \
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias) && near "$upcycled" "$dense" || return 1
    # shellcheck disable=SC2086
    "$train" --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --squared-relu \
        --disable-bias-linear --vocab-size 256 --tokens-file "$golden/llama/tokens.i32" --seq-length 32 \
        --global-batch-size 4 --train-iters 1 --init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0 \
        $optimizer --save "$work/relu" --overwrite >"$work/out" 2>"$work/err" || return 1
    dense=$(first_loss "$work/relu" --finetune) || return 1
    for halves in '--moe-router-topk 2' '--moe-router-topk 4' '--moe-router-topk 6 --moe-router-pre-softmax'; do
        # shellcheck disable=SC2086
        upcycled=$(first_loss "$work/relu" --moe-use-upcycling --num-experts 6 --moe-upcycling-granularity 2 $halves) &&
            near "$upcycled" "$dense" || return 1
    done
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null || return 0
    for layout in '--expert-model-parallel-size 2' '--tensor-model-parallel-size 2 --sequence-parallel' \
        '--data-parallel-sharding-strategy optim_grads_params'; do
        upcycle_launch="$(mpirun_here) -np 2"
        # shellcheck disable=SC2086
        upcycled=$(first_loss "$work/relu" --moe-use-upcycling --num-experts 6 --moe-upcycling-granularity 2 $layout) &&
            near "$upcycled" "$dense" || return 1
    done
    upcycle_launch=
}

# --train-iters 0 writes a Hugging Face folder of experts, here Mixtral's.
an_upcycled_model_is_saved_as_a_folder() {
    upcycle_launch=
    "$train" --load "$golden/llama" --moe-use-upcycling --num-experts 4 --train-iters 0 --device cpu --overwrite \
        --save "$work/upcycled" >"$work/out" 2>"$work/err" || return 1
    grep -q '"model_type": "mixtral"' "$work/upcycled/config.json" || return 1
    upcycled=$(first_loss "$work/upcycled" --finetune) || return 1
    near "$upcycled" "$(first_loss "$golden/llama")" &&
        refuses 'the model of .* has experts; leave it out' --load "$work/upcycled" --moe-use-upcycling \
            --num-experts 4 --train-iters 0 --device cpu --save "$work/again" &&
        refuses 'moe-ffn-hidden-size 20: experts of --moe-use-upcycling have' --load "$golden/llama" \
            --moe-use-upcycling --num-experts 4 --moe-ffn-hidden-size 20 --mock-data --seq-length 8 \
            --train-iters 1 --lr 1 &&
        refuses 'num-experts 3 must be a multiple of --moe-upcycling-granularity 2' --load "$golden/llama" \
            --moe-use-upcycling --num-experts 3 --moe-upcycling-granularity 2 --mock-data \
            --seq-length 8 --train-iters 1 --lr 1 &&
        refuses 'MLP has no biases' --load "$golden/gpt2" --moe-use-upcycling --num-experts 4 --mock-data \
            --seq-length 8 --train-iters 1 --lr 1 &&
        refuses 'moe-use-upcycling needs --load' --num-layers 2 --hidden-size 16 --num-attention-heads 2 \
            --vocab-size 64 --moe-use-upcycling --num-experts 4 --mock-data --seq-length 8 --train-iters 1 --lr 1
}

# The same command again: the run goes on from its own checkpoint, which has the experts, and not from the dense model.
an_upcycled_run_resumes_by_the_same_command() {
    for ranks in 1 2; do
        [ $ranks = 1 ] || [ -n "${HAVE_MPI:-}" ] || continue
        rm -rf "$work/upcycles" "$work"/half.jsonl "$work"/rest.jsonl "$work"/once.jsonl
        for run in 'once 4' 'half 2' 'rest 4'; do
            name=${run% *} save=upcycles
            [ "$name" != once ] || save=upcycled-once
            on_ranks $ranks "$train" --load "$golden/llama" --moe-use-upcycling --num-experts 4 \
                --expert-model-parallel-size $ranks --tokens-file "$golden/llama/tokens.i32" --seq-length 32 \
                --global-batch-size 4 --micro-batch-size 2 --train-iters "${run#* }" --lr 1e-2 --eval-iters 0 \
                --lr-decay-style constant --device cpu --auto-resume --save "$work/$save" \
                --metrics "$work/$name.jsonl" || return 1
        done
        rm -rf "$work/upcycled-once"
        metric "$work/once.jsonl" lm_loss >"$work/expected"
        { metric "$work/half.jsonl" lm_loss && metric "$work/rest.jsonl" lm_loss; } >"$work/actual"
        [ "$(wc -l <"$work/actual")" = 4 ] && cmp "$work/expected" "$work/actual" || return 1
    done
}

# Mixtral with a NaN in the router of its second layer.
a_non_finite_router_is_named() {
    mkdir "$work/poisoned" && cp "$golden/mixtral/config.json" "$golden/mixtral/model.safetensors" "$work/poisoned" &&
        chmod u+w "$work/poisoned"/* || return 1
    header=$(od -An -tu8 -N8 "$work/poisoned/model.safetensors" | tr -d ' ')
    offset=$(head -c $((8 + header)) "$work/poisoned/model.safetensors" |
        grep -ao '"model.layers.1.block_sparse_moe.gate.weight":{[^}]*' | sed 's/.*"data_offsets":\[\([0-9]*\),.*/\1/')
    printf '\377\377\377\377' | dd of="$work/poisoned/model.safetensors" bs=1 seek=$((8 + header + offset)) \
        conv=notrunc 2>"$work/err" || return 1
    if "$train" --load "$work/poisoned" --tokens-file $golden/mixtral/tokens.i32 --seq-length 32 --micro-batch-size 1 \
        --global-batch-size 4 --train-iters 10 --lr 1e-3 --device cpu >"$work/out" 2>"$work/err"; then
        return 1
    fi
    expected='^error: iteration 1: rank 0: the router of layer 1 had 128 tokens whose logits are not finite'
    grep -q "$expected" "$work/err" && return 0
    cat "$work/err"
    return 1
}

unreported_steps_change_nothing() {
    golden_run qwen3 --metrics "$work/all.jsonl" && golden_run qwen3 --log-interval 4 --metrics "$work/some.jsonl" ||
        return 1
    for key in iteration lm_loss grad_norm learning_rate consumed_samples; do
        metric "$work/all.jsonl" $key | awk 'NR == 4 || NR == 8 || NR == 10' >"$work/a"
        metric "$work/some.jsonl" $key >"$work/b"
        [ "$(wc -l <"$work/b")" = 3 ] && cmp "$work/a" "$work/b" || return 1
    done
}

small='--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16
    --vocab-size 96 --mock-data --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style cosine
    --eval-iters 1 --eval-interval 4 --device cpu'

# small_run ARGUMENTS...: trains a small GPT with dropout on mock data.
small_run() {
    # shellcheck disable=SC2086
    "$train" $small "$@" >"$work/out" 2>"$work/err" || {
        cat "$work/err"
        return 1
    }
}

a_resumed_run_repeats_bit_for_bit() {
    for precision in '' --bf16; do
        # shellcheck disable=SC2086
        small_run $precision --train-iters 12 --save "$work/whole" --metrics "$work/whole.jsonl" &&
            small_run $precision --train-iters 12 --save "$work/parts" --save-interval 5 &&
            echo 5 >"$work/parts/latest_checkpointed_iteration.txt" &&
            small_run $precision --train-iters 12 --load "$work/parts" --save "$work/again" \
                --metrics "$work/parts.jsonl" ||
            return 1
        metric "$work/whole.jsonl" lm_loss | tail -n 7 >"$work/a"
        metric "$work/parts.jsonl" lm_loss >"$work/b"
        [ "$(wc -l <"$work/b")" = 7 ] && cmp "$work/a" "$work/b" || return 1
        for file in model optimizer; do
            cmp "$work/whole/latest/$file.safetensors" "$work/again/latest/$file.safetensors" || return 1
        done
        rm -rf "$work/whole" "$work/parts" "$work/again" "$work"/*.jsonl
    done
}

sigterm_saves_and_ends_the_run() {
    rm -f "$work/m.jsonl"
    # shellcheck disable=SC2086
    "$train" $small --train-iters 100000000 --save "$work/stopped" --metrics "$work/m.jsonl" >"$work/out" 2>&1 &
    process=$!
    until [ "$(wc -l 2>/dev/null <"$work/m.jsonl" || echo 0)" -gt 3 ] || ! kill -0 $process; do sleep 0.1; done
    kill -TERM $process
    wait $process || return 1
    iteration=$(cat "$work/stopped/latest_checkpointed_iteration.txt") && [ "$iteration" -gt 0 ] &&
        grep -q "stopped early after iteration $iteration" "$work/out"
}

# A closed terminal takes its output with it; nohup has the run go on.
a_closed_terminal_saves_and_ends_the_run() {
    rm -f "$work/m.jsonl"
    # shellcheck disable=SC2086
    env --default-signal=HUP "$train" $small --train-iters 100000000 --save "$work/hung" --metrics "$work/m.jsonl" \
        >"$work/out" 2>&1 &
    process=$!
    until [ "$(wc -l 2>/dev/null <"$work/m.jsonl" || echo 0)" -gt 3 ] || ! kill -0 $process; do sleep 0.1; done
    kill -HUP $process
    wait $process && [ "$(cat "$work/hung/latest_checkpointed_iteration.txt")" -gt 0 ] || return 1
    rm "$work/m.jsonl"
    # shellcheck disable=SC2086
    env --ignore-signal=HUP "$train" $small --train-iters 100000000 --save "$work/nohup" --metrics "$work/m.jsonl" \
        >"$work/out" 2>&1 &
    process=$!
    for lines in 3 30; do # with a line of validation for every fourth iteration
        until [ "$(wc -l 2>/dev/null <"$work/m.jsonl" || echo 0)" -gt $lines ]; do
            kill -0 $process || return 1
            sleep 0.1
        done
        kill -HUP $process
    done
    kill -TERM $process
    wait $process && [ "$(cat "$work/nohup/latest_checkpointed_iteration.txt")" -ge 20 ]
}

# One of the run, and the one at its end.
a_signal_ends_an_evaluation_and_the_run_is_saved() {
    for interval in 2 100; do
        rm -rf "$work/stopped" "$work/m.jsonl"
        # shellcheck disable=SC2086
        "$train" $small --train-iters 3 --eval-interval $interval --eval-iters 10000000 --save "$work/stopped" \
            --metrics "$work/m.jsonl" >"$work/out" 2>&1 &
        process=$! waited=0
        until [ "$(wc -l 2>/dev/null <"$work/m.jsonl" || echo 0)" = $((interval == 2 ? 2 : 3)) ]; do
            kill -0 $process || return 1
            sleep 0.1
        done
        sleep 0.3
        kill -TERM $process
        while kill -0 $process 2>/dev/null && [ $waited -lt $((10 * hang)) ]; do
            sleep 0.1
            waited=$((waited + 1))
        done
        kill -KILL $process 2>/dev/null
        wait $process && [ "$(cat "$work/stopped/latest_checkpointed_iteration.txt")" = $((interval == 2 ? 2 : 3)) ] &&
            says 'stopped early' "$work/out" && ! grep 'validation loss' "$work/out" || return 1
    done
}

the_time_limit_saves_and_ends_the_run() {
    small_run --train-iters 100000000 --exit-duration-in-mins 0.01 --save "$work/timed" &&
        [ "$(cat "$work/timed/latest_checkpointed_iteration.txt")" -gt 0 ]
}

yaml_equals_the_command_line() {
    cat >"$work/run.yaml" <<END
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  max_position_embeddings: 16
  vocab_size: 96
data: {mock_data: true, seq_length: 16}
micro_batch_size: 2
global_batch_size: 4
lr: 1e-5
lr_decay_style: cosine
eval_iters: 1
eval_interval: 4
device: cpu
train_iters: 3
END
    small_run --train-iters 3 --metrics "$work/line.jsonl" || return 1
    if ! "$train" --config "$work/run.yaml" --lr 1e-2 --metrics "$work/yaml.jsonl" >"$work/out" 2>"$work/err"; then
        grep -q 'without libyaml' "$work/err" # the only valid error
        return
    fi
    metric "$work/line.jsonl" lm_loss >"$work/a"
    metric "$work/yaml.jsonl" lm_loss >"$work/b"
    [ -s "$work/a" ] && cmp "$work/a" "$work/b"
}

the_loss_falls_on_mock_data() {
    small_run --train-iters 200 --hidden-dropout 0 --attention-dropout 0 --lr-warmup-iters 20 \
        --metrics "$work/m.jsonl" &&
        metric "$work/m.jsonl" lm_loss | awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < 0.6 * first) }'
}

a_bad_folder_is_refused_before_training() {
    : >"$work/file"
    # shellcheck disable=SC2086
    refuses "$work/file" $small --train-iters 3 --save "$work/file/under"
}

# reads_until_a_step PROGRAM...: its standard output goes to a reader that ends after the line of the first step.
reads_until_a_step() {
    rm -f "$work/pipe"
    mkfifo "$work/pipe" || return 1
    "$@" >"$work/pipe" 2>"$work/err" </dev/null &
    process=$!
    sed -n '/^ *1\/100000000 /q' "$work/pipe"
}

# As "train | tee log" meets it when Ctrl-C ends tee, or "train | head": nothing is lost. Under nohup it goes on.
a_closed_pipe_of_the_output_saves_and_ends_the_run() {
    rm -f "$work/m.jsonl"
    # shellcheck disable=SC2086
    reads_until_a_step env --default-signal=HUP,PIPE "$train" $small --train-iters 100000000 --save "$work/piped"
    wait $process && [ "$(cat "$work/piped/latest_checkpointed_iteration.txt")" -gt 0 ] &&
        says '^nobody reads the standard output any more: stopping after this step; ' "$work/err" &&
        ! grep 'training goes on' "$work/err" || return 1
    # shellcheck disable=SC2086
    reads_until_a_step env --ignore-signal=HUP --default-signal=PIPE "$train" $small --train-iters 100000000 \
        --save "$work/unread" --metrics "$work/m.jsonl"
    lines=$(wc -l <"$work/m.jsonl")
    until [ "$(wc -l <"$work/m.jsonl")" -gt $((lines + 3)) ]; do
        kill -0 $process || return 1
        sleep 0.1
    done
    kill -TERM $process
    wait $process && [ "$(cat "$work/unread/latest_checkpointed_iteration.txt")" -gt 3 ] &&
        says '^warning: standard output: cannot be written: Broken pipe; training goes on' "$work/err" || return 1
    # shellcheck disable=SC2086
    reads_until_a_step env --default-signal=HUP,PIPE "$train" $small --train-iters 100000000 --no-exit-signal-handler
    wait $process
    [ $? = 141 ] # 128 + SIGPIPE
}

# Files may have at most 8 blocks of 512 bytes here, which is more than a library writes when it is loaded. Before that
# limit whole lines are written; then training goes on without them.
a_full_disk_is_reported_once_and_training_goes_on() {
    (
        ulimit -f 8
        # shellcheck disable=SC2086
        exec "$train" $small --train-iters 300 --metrics "$work/m.jsonl" --tensorboard-dir "$work/board"
    ) 2>&1 | cat >"$work/out"
    [ "$(grep -c ' 300/300 100% ' "$work/out")" = 1 ] && [ "$(grep -c '^warning: ' "$work/out")" = 2 ] &&
        says '^warning: .*/m.jsonl: .*too large for the limit on file sizes' "$work/out" &&
        says '^warning: .*/board/events.*too large .*; training goes on without these records' "$work/out" &&
        grep -q '"lm_loss"' "$work/m.jsonl" && ! grep -v '^{.*}$' "$work/m.jsonl" || return 1
    (
        ulimit -f 8
        # shellcheck disable=SC2086
        exec "$train" $small --train-iters 12 --trace "$work/t.json" --trace-first-step 1 --trace-last-step 9
    ) >"$work/out" 2>"$work/err" && says ' 12/12 100% ' "$work/out" && [ ! -e "$work/t.json" ] &&
        says '^warning: .*/t.json: cannot be written: too large .*; training goes on without the trace' "$work/err" ||
        return 1
    (
        ulimit -f 8
        # shellcheck disable=SC2086
        exec "$train" $small --train-iters 12 --trace "$work/t.json" --trace-first-step 1 --trace-last-step 12
    ) >"$work/out" 2>"$work/err" &&
        says '^warning: .*/t.json: cannot be written: too large .*; this run leaves no trace' "$work/err" || return 1
    [ -w /dev/full ] || return 0
    small_run --train-iters 3 --metrics /dev/full &&
        says '^warning: /dev/full: cannot be written: No space' "$work/err" || return 1
    rm -rf "$work/saved"
    # shellcheck disable=SC2086
    "$train" $small --train-iters 3 --save "$work/saved" >/dev/full 2>"$work/err" &&
        [ -e "$work/saved/iter_0000003" ] &&
        [ "$(grep -c '^warning: standard output: cannot be written: No space' "$work/err")" = 1 ]
}

# A run that only prints has failed where nothing could be printed.
a_print_to_a_full_disk_is_an_error() {
    [ -w /dev/full ] || return 0
    for prints in --print-config --print-schedule '--print-launch 2' '--plan --bf16 --gpus 2 --gpu h200' \
        '--explain --bf16 --gpus 1 --gpu h200'; do
        # shellcheck disable=SC2086
        "$train" $small --train-iters 1 $prints >/dev/null && refused 'standard output: cannot be written: No space' \
            sh -c '"$@" >/dev/full' sh "$train" $small --train-iters 1 $prints || return 1
    done
    refused 'standard output' sh -c '"$1" --help >/dev/full' sh "$train" &&
        refused 'standard output' sh -c '"$1" --version >/dev/full' sh "$train"
}

# launch.sh asks before each start: neither weights nor data are opened, nor memory taken for 8 billion parameters.
a_question_about_the_launch_opens_nothing() {
    mkdir "$work/shape" && cp tests/golden/hf/llama/config.json "$work/shape" || return 1
    set -- --seq-length 32 --global-batch-size 8 --train-iters 9 --lr 1e-3 --device cpu --print-launch 4
    "$train" --load "$work/shape" --data-path "$work/none" "$@" >"$work/out" 2>"$work/err" &&
        says '^ranks 4$' "$work/out" || return 1
    (
        # shellcheck disable=SC3045
        [ -n "${SANITIZE:-}" ] || ulimit -v 2000000 # a sanitizer reserves terabytes of addresses
        "$train" --hf-config data/configs/llama3-8b.json --mock-data "$@" >"$work/out" 2>"$work/err"
    ) && says '^ranks 4$' "$work/out"
}

metrics_of_another_run_stay_and_those_of_this_run_continue() {
    small_run --train-iters 4 --save "$work/four" --metrics "$work/m.jsonl" && cp "$work/m.jsonl" "$work/want.jsonl" ||
        return 1
    # shellcheck disable=SC2086
    refuses 'm.jsonl: holds the metrics of another run; choose another --metrics' $small --train-iters 4 \
        --metrics "$work/m.jsonl" && cmp "$work/m.jsonl" "$work/want.jsonl" || return 1
    printf '{"iteration": 4, "lm_lo' >>"$work/m.jsonl" # the last line of a run that was killed
    small_run --train-iters 6 --load "$work/four" --metrics "$work/m.jsonl" || return 1
    head -n "$(wc -l <"$work/want.jsonl")" "$work/m.jsonl" | cmp - "$work/want.jsonl" || return 1
    [ "$(metric "$work/m.jsonl" lm_loss | wc -l)" = 6 ] && ! grep -v '^{.*}$' "$work/m.jsonl" || return 1
    small_run --train-iters 2 --metrics "$work/m.jsonl" --overwrite &&
        [ "$(metric "$work/m.jsonl" lm_loss | wc -l)" = 2 ]
}

# A run that saves elsewhere than it loads from is another run: it cuts no records and leaves no gap between them.
metrics_of_the_loaded_run_stay_when_another_begins_there() {
    small_run --train-iters 6 --save "$work/loaded" --save-interval 3 --metrics "$work/m.jsonl" &&
        cp "$work/m.jsonl" "$work/want.jsonl" || return 1
    # shellcheck disable=SC2086
    refuses 'm.jsonl: holds metrics up to iteration 6, and this run, which does not load from its own' $small \
        --train-iters 7 --load "$work/loaded/iter_0000003" --save "$work/other" --metrics "$work/m.jsonl" &&
        cmp "$work/m.jsonl" "$work/want.jsonl" || return 1
    # --overwrite of later checkpoints keeps the records before them
    small_run --train-iters 4 --load "$work/loaded/iter_0000003" --save "$work/loaded" --overwrite \
        --metrics "$work/m.jsonl" &&
        [ "$(iterations "$work/m.jsonl")" = '1 2 3 4 ' ] || return 1
    printf 'release\n' >"$work/loaded/latest_checkpointed_iteration.txt" && rm -r "$work"/loaded/iter_* || return 1
    # shellcheck disable=SC2086
    refuses 'loaded: its latest_checkpointed_iteration.txt names a checkpoint that --save did not write' $small \
        --train-iters 2 --save "$work/loaded"
}

# iterations FILE: prints the iterations of the steps' records.
iterations() {
    sed -n 's/^{"iteration": \([0-9]*\), "lm_loss".*/\1/p' "$1" | tr '\n' ' '
}

a_resumed_run_removes_the_metrics_that_it_repeats() {
    small_run --train-iters 6 --save "$work/six" --save-interval 3 --metrics "$work/m.jsonl" && rm -r \
        "$work/six/iter_0000006" && printf '3\n' >"$work/six/latest_checkpointed_iteration.txt" || return 1
    small_run --train-iters 6 --load "$work/six" --metrics "$work/m.jsonl" &&
        [ "$(iterations "$work/m.jsonl")" = '1 2 3 4 5 6 ' ] || return 1
    # records that stood twice before the last checkpoint: only later ones go
    small_run --train-iters 2 --metrics "$work/two.jsonl" && cat "$work/two.jsonl" >>"$work/m.jsonl" &&
        small_run --train-iters 4 --load "$work/six" --metrics "$work/m.jsonl" &&
        [ "$(iterations "$work/m.jsonl")" = '1 2 3 1 2 4 ' ] || return 1
    for end in '' '\n'; do # without a new line it is no torn record either
        printf "notes$end" >"$work/notes.jsonl"
        # shellcheck disable=SC2086
        refuses 'notes.jsonl: line 1 is no record of --metrics; choose another --metrics' $small --train-iters 6 \
            --load "$work/six" --metrics "$work/notes.jsonl" &&
            refuses 'notes.jsonl: line 1 is no record of --metrics, so --overwrite does not' $small --train-iters 2 \
                --metrics "$work/notes.jsonl" --overwrite && [ "$(cat "$work/notes.jsonl")" = notes ] || return 1
    done
    # a torn record, and one that reached the disk as zeros
    for torn in '{"iter' '{"iteration": 5, "lm_' '\000\000\000\000'; do
        printf "$torn" >>"$work/m.jsonl"
        small_run --train-iters 4 --load "$work/six" --metrics "$work/m.jsonl" &&
            [ "$(iterations "$work/m.jsonl")" = '1 2 3 1 2 4 ' ] || return 1
    done
    # a run that failed before its first checkpoint, started once more
    small_run --train-iters 2 --auto-resume --save "$work/anew" --metrics "$work/m.jsonl" &&
        says 'm.jsonl is now .*m.jsonl.1: this run starts at iteration 0' "$work/out" &&
        [ "$(iterations "$work/m.jsonl")" = '1 2 ' ]
}

# in_five ARGUMENTS...: a run of three steps that saves to $work/five.
in_five() {
    # shellcheck disable=SC2086
    "$train" $small --train-iters 3 --save "$work/five" "$@"
}

a_run_that_starts_below_saved_iterations_is_refused() {
    small_run --train-iters 5 --save "$work/five" --save-interval 1 || return 1
    up_to='five: holds checkpoints up to iteration 5, but this run would start at iteration'
    refused "up to iteration 5, but this run begins anew; .*replace them by --overwrite, or choose another --save" \
        in_five --load "$work/five" --finetune && refused "$up_to 2;" in_five --load "$work/five/iter_0000002/" &&
        ln -s "five/iter_0000002" "$work/second" && refused "$up_to 2;" in_five --load "$work/second" &&
        [ "$(cat "$work/five/latest_checkpointed_iteration.txt")" = 5 ] || return 1
    in_five --load "$work/five/latest" --train-iters 6 >"$work/out" 2>"$work/err" &&
        in_five --load "$work/five" --finetune --auto-resume --train-iters 7 >"$work/out" 2>"$work/err" &&
        [ "$(cat "$work/five/latest_checkpointed_iteration.txt")" = 7 ] || return 1
    in_five --load "$work/five" --finetune --overwrite >"$work/out" 2>"$work/err" &&
        [ "$(cd "$work/five" && echo iter_*)" = iter_0000003 ]
}

# The option that is wrong is the one that the user gave.
options_of_the_tokenizer_are_blamed_by_name() {
    refused '--tokenizer-type ByteLevel has 257 tokens, more than --vocab-size 100; give --vocab-size 257' \
        "$train" --mock-data --train-iters 1 --vocab-size 100 --tokenizer-type ByteLevel || return 1
    for program in "$train --mock-data" "$infer --load tests/golden/hf/llama" \
        "${train%/train}/data/preprocess --encode"; do
        # shellcheck disable=SC2086
        refused 'vocab-file and --merge-file are for --tokenizer-type GPT2BPETokenizer; give that' $program \
            --vocab-file a.json --merge-file b.txt --tokenizer-type SentencePieceTokenizer || return 1
    done
}

# The evaluation after the last step comes after the save: its samples are free for a longer run.
many_short_parts_do_not_run_out_of_validation_data() {
    for part in 1:0 2:0 3:0 5:4 6:4; do
        small_run --train-iters ${part%:*} --save "$work/short" --auto-resume &&
            grep -q "\"consumed_valid_samples\": ${part#*:}\>" "$work/short/latest/trainer.json" || return 1
    done
}

# The command of the README, once more, and as it says with --load.
the_same_command_continues_by_load() {
    printf 'one\ntwo\nthree\n%.0s' 1 2 3 4 5 6 7 8 9 >"$work/my.txt"
    "${train%/train}/data/preprocess" --input "$work/my.txt" --output-prefix "$work/my" --tokenizer-type ByteLevel \
        --append-eod >"$work/out" 2>"$work/err" || return 1
    # shellcheck disable=SC2317
    same_command() {
        "$train" --hf-config data/configs/tiny-llama.json --vocab-size 257 --tokenizer-type ByteLevel \
            --data-path "$work/my_text_document" --split 95,5,0 --seq-length 16 --micro-batch-size 1 \
            --global-batch-size 2 --lr 1e-3 --eval-iters 0 --device cpu --save "$work/my" \
            --metrics "$work/my.jsonl" "$@"
    }
    same_command --train-iters 2 >"$work/out" 2>"$work/err" &&
        refused 'my: holds checkpoints of another run, up to iteration 2; continue that run by --load' \
            same_command --train-iters 3 &&
        same_command --train-iters 3 --load "$work/my" >"$work/out" 2>"$work/err" &&
        same_command --train-iters 4 --auto-resume >"$work/out" 2>"$work/err" &&
        [ "$(metric "$work/my.jsonl" iteration | tr '\n' ' ')" = '1 2 3 4 ' ] &&
        same_command --train-iters 1 --overwrite >"$work/out" 2>"$work/err" &&
        [ "$(metric "$work/my.jsonl" iteration | tr '\n' ' ')" = '1 ' ] &&
        [ "$(cd "$work/my" && echo iter_*)" = iter_0000001 ]
}

# Two ranks that find other contents under the same names.
# --dataloader-type single reads once; without the option, further epochs follow, as in Megatron-LM.
single_reads_the_data_once() {
    head -c 4000 README.md >"$work/once.txt"
    for i in 1 2 3 4 5 6 7 8 9 10; do
        echo "{\"prompt\": \"q$i\", \"response\": \"answer\"}"
    done >"$work/once.json"
    "$(dirname "$train")/data/preprocess" --input "$work/once.txt" --output-prefix "$work/once" \
        --tokenizer-type ByteLevel --append-eod >"$work/out" 2>"$work/err" || return 1
    set -- --num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 257 --tokenizer-type ByteLevel \
        --device cpu --seq-length 100 --global-batch-size 4 --lr 1e-3 --eval-iters 0
    text="$work/once_text_document" single='--dataloader-type single'
    "$train" "$@" --data-path "$text" --split 1,0,0 --train-iters 15 >"$work/out" 2>"$work/err" || return 1
    # shellcheck disable=SC2086
    "$train" "$@" $single --data-path "$text" --split 1,0,0 --train-iters 9 >"$work/out" 2>"$work/err" &&
        refuses 'single reads the data once: .*_document has 40 samples .* needs 60' "$@" $single --data-path "$text" \
            --split 1,0,0 --train-iters 15 &&
        refuses 'single reads the data once' "$@" $single --data-path 0.9 "$text" 0.1 "$text" --split 1,0,0 \
            --train-iters 15 || return 1
    set -- "$@" --sft --chat-template plain --train-data-path "$work/once.json" # ten samples: the last step has two
    # shellcheck disable=SC2086
    "$train" "$@" $single --train-iters 3 --metrics "$work/once.jsonl" >"$work/out" 2>"$work/err" &&
        "$train" "$@" $single --train-epochs 1 >"$work/out" 2>"$work/err" &&
        "$train" "$@" --train-iters 4 >"$work/out" 2>"$work/err" &&
        refuses 'reads the data once: .* has 10 samples .* needs 16' "$@" $single --train-iters 4 &&
        refuses 'reads the data once: .* has 10 samples .* needs 20' "$@" $single --train-epochs 2
}

ranks_with_different_data_are_named() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null || return 0
    mkdir "$work/here" "$work/there"
    cp "$golden/llama/tokens.i32" "$work/here/t.i32" && cp "$golden/llama/tokens.i32" "$work/there/t.i32" &&
        chmod u+w "$work/there/t.i32" || return 1
    printf '\001' | dd of="$work/there/t.i32" bs=1 seek=400 conv=notrunc 2>"$work/err"
    printf 'one\ntwo\nthree\nfour\n%.0s' 1 2 3 4 5 6 7 8 9 >"$work/here/x.txt"
    sed 's/two/TWO/' "$work/here/x.txt" >"$work/there/x.txt"
    for side in here there; do
        "${train%/train}/data/preprocess" --input "$work/$side/x.txt" --output-prefix "$work/$side/x" \
            --tokenizer-type ByteLevel --append-eod >"$work/out" 2>"$work/err" || return 1
    done
    cp tests/golden/tokenizer/bytelevel.json "$work/here/t.json" &&
        { cat "$work/here/t.json" && echo; } >"$work/there/t.json" || return 1
    # both ARGUMENTS...: rank 0 in here, rank 1 in there.
    both() {
        # shellcheck disable=SC2086,SC2016
        $(mpirun_here) -np 1 sh -c 'cd "$1" && shift && exec "$@"' sh "$work/here" "$train" $both_options "$@" : \
            -np 1 sh -c 'cd "$1" && shift && exec "$@"' sh "$work/there" "$train" $both_options "$@" \
            >"$work/out" 2>"$work/err" </dev/null
    }
    both_options='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --global-batch-size 2
        --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --tensor-model-parallel-size 2 --device cpu'
    for data in '--tokens-file t.i32 --vocab-size 512' '--data-path x_text_document --tokenizer-type ByteLevel'; do
        # shellcheck disable=SC2086
        both $data && return 1
        says "^error: rank 1 has another $(echo "$data" | cut -d ' ' -f 2) than rank 0; give every rank" "$work/err" ||
            return 1
    done
    both --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json && return 1
    says '^error: rank 1 has another tokenizer than rank 0; give every rank' "$work/err"
}

# steps_of FILE: prints the iterations of a trace.
steps_of() {
    sed -n 's/.*"name":"step".*"iteration":\([0-9]*\).*/\1/p' "$1" | tr '\n' ' '
}

a_trace_has_the_requested_steps_and_changes_no_loss() {
    small_run --train-iters 8 --save "$work/eight" --metrics "$work/plain.jsonl" &&
        small_run --train-iters 8 --metrics "$work/traced.jsonl" --trace "$work/t.json" || return 1
    metric "$work/plain.jsonl" lm_loss >"$work/want"
    metric "$work/traced.jsonl" lm_loss >"$work/got"
    [ -s "$work/got" ] && cmp "$work/want" "$work/got" && [ "$(steps_of "$work/t.json")" = '2 3 ' ] || return 1
    grep -q 'profile of' "$work/out" && return 1
    # in a resumed run, steps count from its first; here the run ends before --trace-last-step
    small_run --train-iters 12 --load "$work/eight" --trace "$work/t.json" --trace-first-step 3 --trace-last-step 9 &&
        [ "$(steps_of "$work/t.json")" = '11 12 ' ] && [ "$(echo "$work"/t.json*)" = "$work/t.json" ]
}

a_trace_of_a_run_that_stops_early_has_its_steps() {
    small_run --train-iters 100000000 --exit-duration-in-mins 0.01 --trace "$work/t.json" --trace-first-step 1 \
        --trace-last-step 90000000 && [ "$(steps_of "$work/t.json" | cut -c1-4)" = '1 2 ' ]
}

a_bad_trace_is_refused_before_training() {
    # shellcheck disable=SC2086
    refuses "$work/none/t.json: cannot be written: No such" $small --train-iters 3 \
        --trace "$work/none/t.json" &&
        ! grep -q loss "$work/out" &&
        refuses "$work: cannot be written: Is a directory" $small --train-iters 3 --trace "$work" &&
        refuses 'trace-first-step 4 comes after this run.s last step (step 3)' $small --train-iters 3 \
            --trace "$work/t.json" --trace-first-step 4 &&
        refuses 'trace-last-step 2 comes before --trace-first-step 3' $small --train-iters 3 --trace "$work/t.json" \
            --trace-first-step 3 --trace-last-step 2 &&
        refuses 'trace-first-step needs --trace' $small --train-iters 3 --trace-first-step 2 &&
        refuses 'is the file of --metrics' $small --train-iters 3 --trace "$work/one" --metrics "$work/one" &&
        [ ! -e "$work/one" ]
}

check options_of_the_tokenizer_are_blamed_by_name options_of_the_tokenizer_are_blamed_by_name
check losses_and_norms_equal_expected_json losses_and_norms_equal_expected_json
check metrics_have_every_key metrics_have_every_key
check an_upcycled_model_has_the_loss_of_the_dense_one an_upcycled_model_has_the_loss_of_the_dense_one
check an_upcycled_model_is_saved_as_a_folder an_upcycled_model_is_saved_as_a_folder
check an_upcycled_run_resumes_by_the_same_command an_upcycled_run_resumes_by_the_same_command
check a_non_finite_router_is_named a_non_finite_router_is_named
check unreported_steps_change_nothing unreported_steps_change_nothing
check a_resumed_run_repeats_bit_for_bit a_resumed_run_repeats_bit_for_bit
check sigterm_saves_and_ends_the_run sigterm_saves_and_ends_the_run
if env --default-signal=HUP --ignore-signal=INT true 2>/dev/null; then
    check a_closed_terminal_saves_and_ends_the_run a_closed_terminal_saves_and_ends_the_run
    check a_closed_pipe_of_the_output_saves_and_ends_the_run a_closed_pipe_of_the_output_saves_and_ends_the_run
else
    echo "skipped: closed terminals and pipes: env does not set signals here"
fi
check a_signal_ends_an_evaluation_and_the_run_is_saved a_signal_ends_an_evaluation_and_the_run_is_saved
check the_time_limit_saves_and_ends_the_run the_time_limit_saves_and_ends_the_run
check yaml_equals_the_command_line yaml_equals_the_command_line
check the_loss_falls_on_mock_data the_loss_falls_on_mock_data
check a_bad_folder_is_refused_before_training a_bad_folder_is_refused_before_training
check a_full_disk_is_reported_once_and_training_goes_on a_full_disk_is_reported_once_and_training_goes_on
check a_print_to_a_full_disk_is_an_error a_print_to_a_full_disk_is_an_error
check a_question_about_the_launch_opens_nothing a_question_about_the_launch_opens_nothing
check metrics_of_another_run_stay metrics_of_another_run_stay_and_those_of_this_run_continue
check metrics_of_the_loaded_run_stay metrics_of_the_loaded_run_stay_when_another_begins_there
check a_resumed_run_removes_the_metrics_that_it_repeats a_resumed_run_removes_the_metrics_that_it_repeats
check a_run_that_starts_below_saved_iterations_is_refused a_run_that_starts_below_saved_iterations_is_refused
check many_short_parts_do_not_run_out_of_validation_data many_short_parts_do_not_run_out_of_validation_data
check the_same_command_continues_by_load the_same_command_continues_by_load
check single_reads_the_data_once single_reads_the_data_once
check ranks_with_different_data_are_named ranks_with_different_data_are_named
check a_trace_has_the_requested_steps a_trace_has_the_requested_steps_and_changes_no_loss
check a_trace_of_a_run_that_stops_early_has_its_steps a_trace_of_a_run_that_stops_early_has_its_steps
check a_bad_trace_is_refused_before_training a_bad_trace_is_refused_before_training
# shellcheck disable=SC2086
check the_longest_sequence_needs_too_much_memory refuses 'the model needs [0-9.]* GiB of memory' $small \
    --train-iters 1 --seq-length 1073741823 --max-position-embeddings 1073741823
# The limit is that of each rank: a model that needs more is refused when it is created, and one that fits trains alike.
a_memory_limit_is_kept() {
    set -- --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --mock-data \
        --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --eval-iters 0 --device cpu
    "$train" "$@" --metrics "$work/free.jsonl" >"$work/out" 2>"$work/err" || return 1
    mib=$(awk '$1 == "total" { print int($2 + 1) }' "$work/out")
    "$train" "$@" --metrics "$work/within.jsonl" --memory-limit $((mib + 1))MiB >"$work/out" \
        2>"$work/err" && same_series "$work/free.jsonl" "$work/within.jsonl" 0 0 lm_loss grad_norm || return 1
    wanted='the model needs [0-9.]* GiB of memory (.*) and the machine has [0-9.]* GiB available of --memory-limit'
    refuses "$wanted" "$@" --memory-limit $((mib - 2))MiB &&
        refuses '--memory-limit 2: give a number .* with GiB, MiB' "$@" --memory-limit 2 || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    on_ranks 2 "$train" "$@" --memory-limit $((mib + 1))MiB &&
        ! on_ranks 2 "$train" "$@" --memory-limit $((mib - 2))MiB && says "$wanted" "$work/err"
}
check a_memory_limit_is_kept a_memory_limit_is_kept
check an_unknown_option_names_the_nearest refuses 'did you mean --num-layers' --num-layer 3
# 213 units of time in strips of 48: five rows of ranks, each with its numbers on the left.
a_long_schedule_is_drawn_in_strips() {
    "$train" --num-layers 32 --pipeline-model-parallel-size 8 --global-batch-size 64 \
        --print-schedule "$work/long.svg" >"$work/out" 2>"$work/err" || return 1
    says 'width="1272" height="1146"' "$work/long.svg" && [ "$(grep -c '"end">7</text>' "$work/long.svg")" = 5 ]
}
check a_long_schedule_is_drawn_in_strips a_long_schedule_is_drawn_in_strips
check two_sources_of_data_are_refused refuses 'mock-data' --mock-data --data-path x $small --train-iters 1
exit $failed
