#!/bin/sh
# infer --serve: answers, streams, scores, limits, clients that misbehave, the end; on one rank and on several. The
# clients are tests/serve_check.py.
set -u
. tests/suite.sh
golden=tests/golden/hf
export OMP_NUM_THREADS=1
server='' port=''

# begin FOLDER OPTIONS...: starts a server on a free port of $place, with $ranks ranks; its process is $server.
ranks=1 place=0
begin() {
    folder=$1
    shift
    set -- "$infer" --load "$folder" --device cpu --serve "$place" "$@"
    # shellcheck disable=SC2046
    [ "$ranks" = 1 ] || set -- $(mpirun_here) -np "$ranks" "$@"
    : >"$work/log" # the server before has written another port
    [ -z "$server" ] || kill -KILL "$server" # of a test that failed, or was left out by MT_ONLY
    "$@" >"$work/served" 2>"$work/log" </dev/null &
    server=$!
    await_port
}

# end: SIGTERM, which must end the server with status 0. mpirun that gets a signal has a status of its own; its ranks
# must have come to their last line.
end() {
    kill -TERM "$server" && wait "$server"
    status=$?
    server=''
    [ "$ranks" = 1 ] || { says '^read [0-9]* tokens' "$work/log" && ! grep '^error' "$work/log" && status=0; }
    [ $status = 0 ] || { cat "$work/log" && return 1; }
}
trap '[ -z "$server" ] || kill -KILL "$server"; rm -rf "$work"' EXIT

# asks CHECK ARGUMENTS...: a check of the client.
asks() {
    timeout $hang python3 tests/serve_check.py "$port" "$@" >"$work/out" 2>"$work/err" && return
    cat "$work/log"
    return 1
}

# of_infer FOLDER OPTIONS...: the greedy tokens of infer for the client's prompts, in $work/greedy.
of_infer() {
    folder=$1
    shift
    for prompt in 72,101,108 5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22 1 72,101,9,9; do
        "$infer" --load "$folder" --device cpu --prompt-tokens $prompt --print-tokens --max-new-tokens 24 \
            --temperature 0 "$@" 2>"$work/err" || return 1
    done >"$work/greedy"
}

greedy_is_infers_whatever_else_runs() {
    of_infer $golden/llama && asks greedy_is_infers_whatever_else_runs "$work/greedy"
}

seeds_draw_infers_samples() {
    "$infer" --load $golden/llama --device cpu --prompt-tokens 72,101,108 --print-tokens --max-new-tokens 16 --seed 7 \
        --num-return-sequences 3 >"$work/samples" 2>"$work/err" && asks seeds_draw_infers_samples "$work/samples"
}

scores_are_those_of_infer() {
    "$infer" --load $golden/llama --device cpu --score $golden/llama/tokens.i32 --seq-length 32 --out "$work/logps" \
        2>"$work/err" && asks scores_are_those_of_infer $golden/llama/tokens.i32 "$work/logps" 32 1e-5 &&
        asks scores_are_those_of_infer $golden/llama/tokens.i32 $golden/llama/logprobs.f32 32 1e-4
}

wrong_places_are_refused() {
    set -- --load $golden/llama --tokenizer-type ByteLevel
    for wrong in x 70000 1.2.3:4 :80 localhost:80 8000x ::1:80 '[::1]'; do
        refused 'serve' "$infer" "$@" --serve "$wrong" || return 1
    done
    : >"$work/empty"
    refused 'exclude each other' "$infer" "$@" --serve 0 --prompt x &&
        refused 'api-key.* needs --serve' "$infer" "$@" --api-key "$work/empty" &&
        refused 'first line is empty' "$infer" "$@" --serve 0 --api-key "$work/empty" &&
        refused 'absent' "$infer" "$@" --serve 0 --api-key "$work/absent"
}

keys_open() {
    printf 'a secret key\n' >"$work/key"
    begin $golden/llama --tokenizer-type ByteLevel --api-key "$work/key" --serve-cors https://page.example &&
        asks keys_open 'a secret key' https://page.example && end
}

everybody_may_enter_is_said() {
    place=0.0.0.0:0
    begin $golden/llama --tokenizer-type ByteLevel &&
        says 'note: --serve 0.0.0.0:0: everybody who reaches this address may use the model' "$work/log" && end
    status=$?
    place=0
    return $status
}

limits_hold() {
    begin $golden/llama --tokenizer-type ByteLevel --serve-queue 2 --inference-max-requests 1 &&
        asks full_queues_refuse && end &&
        begin $golden/llama --tokenizer-type ByteLevel --serve-timeout 1 --inference-max-requests 4 &&
        asks late_requests_end && end
}

ends_after_its_work() {
    begin $golden/llama --tokenizer-type ByteLevel --inference-max-requests 4 && asks ends_after_its_work "$server" &&
        wait "$server" && server=''
}

# A port in use is known before the model is loaded.
a_port_in_use_is_an_error() {
    kill -0 "$server" &&
        refused 'cannot be opened' "$infer" --load $golden/llama --serve "$port" --tokenizer-type ByteLevel
}

# Drafts of a module of multi-token prediction change no token, in streams and with stops too.
drafts_change_nothing() {
    "$train" --hf-config $golden/llama/config.json --mock-data --mtp-num-layers 1 --seq-length 32 --micro-batch-size 4 \
        --train-iters 40 --lr 1e-2 --eval-iters 0 --device cpu --save "$work/mtp" >"$work/out" 2>"$work/err" &&
        of_infer "$work/mtp" || return 1
    begin "$work/mtp" --tokenizer-type ByteLevel --chat-template plain --max-prefill-tokens 8 \
        --num-speculative-tokens 2 && asks greedy "$work/greedy" && asks streams_are_the_whole_answers &&
        asks drafts_are_counted && end
}

# Models with layers that keep states, with experts, and without a tokenizer.
other_models_serve() {
    for family in nemotron_h qwen3_moe; do
        of_infer $golden/$family && begin $golden/$family --tokenizer-type ByteLevel --max-prefill-tokens 8 &&
            asks greedy "$work/greedy" && end || return 1
    done
}

# An adapter beside those of tests/golden/tune: another rank, scale and choice of matrices.
makes_an_adapter() {
    "$train" --device cpu --load $golden/llama --tokens-file $golden/llama/tokens.i32 --seq-length 32 --lr 0.03 \
        --micro-batch-size 4 --global-batch-size 4 --train-iters 3 --lr-decay-style constant --lora-rank 3 \
        --lora-alpha 7 --lora-target q_proj,down_proj --save "$work/adapter" >"$work/out" 2>"$work/err"
}

# Answers of infer with each adapter alone, on one rank, in $work/adapters.
of_adapters() {
    : >"$work/adapters"
    for model in llama "one tests/golden/tune/lora" "two tests/golden/tune/patterns" "three $work/adapter"; do
        # shellcheck disable=SC2086
        set -- $model
        of_infer $golden/llama ${2:+--load-adapter "$2"} || return 1
        sed "s/^/$1 /" "$work/greedy" >>"$work/adapters"
    done
}

# OPTIONS...: all adapters at once give the answers of each alone.
adapters_answer_as_alone() {
    begin $golden/llama --tokenizer-type ByteLevel --max-prefill-tokens 8 --inference-dynamic-batching-block-size 4 \
        --inference-max-requests 8 --serve-adapter one=tests/golden/tune/lora two=tests/golden/tune/patterns \
        three="$work/adapter" "$@" && asks adapters_answer_as_alone "$work/adapters" && end
    status=$?
    ranks=1
    return $status
}

# Ten clients for each place in the queue. `make fire` has more of them.
holds_under_fire() {
    clients=${MT_FIRE_CLIENTS:-50}
    begin $golden/llama --tokenizer-type ByteLevel --max-prefill-tokens 16 --inference-dynamic-batching-block-size 4 \
        --inference-max-requests 8 --serve-queue $((clients / 10)) --serve-max-body 65536 --kv-cache-tokens 256 \
        --serve-adapter one=tests/golden/tune/lora two=tests/golden/tune/patterns || return 1
    hang=${MT_FIRE_SECONDS:-$hang} asks holds_under_fire "${MT_FIRE_REQUESTS:-2000}" "$clients" "$server" || return 1
    [ -z "${MT_FIRE_REQUESTS:-}" ] || cat "$work/out"
    end
}

wrong_adapters_are_refused() {
    set -- --load $golden/llama --tokenizer-type ByteLevel --serve 0
    lora=tests/golden/tune/lora
    refused 'expects NAME=FOLDER' "$infer" "$@" --serve-adapter $lora &&
        refused 'another model has the name a;' "$infer" "$@" --serve-adapter a=$lora a=$lora &&
        refused 'another model has the name llama;' "$infer" "$@" --serve-adapter llama=$lora &&
        refused 'serve-adapter a: .*absent' "$infer" "$@" --serve-adapter a="$work/absent" &&
        refused 'serve-adapter a: .*holds a whole model' "$infer" "$@" --serve-adapter a=$golden/llama &&
        refused 'exclude each other' "$infer" "$@" --serve-adapter a=$lora --load-adapter $lora &&
        refused 'needs --serve' "$infer" --load $golden/llama --serve-adapter a=$lora || return 1
    "$train" --device cpu --load $golden/qwen3_moe --tokens-file $golden/qwen3_moe/tokens.i32 --seq-length 32 --lr 1 \
        --micro-batch-size 4 --global-batch-size 4 --train-iters 1 --lora-rank 1 --lora-target all-linear \
        --save "$work/experts" >"$work/out" 2>"$work/err" &&
        refused 'has adapters of experts, which are not served' "$infer" --load $golden/qwen3_moe --tokenizer-type \
            ByteLevel --serve 0 --serve-adapter a="$work/experts"
}

# ranks FAMILY OPTIONS...: two ranks give the tokens of one.
on_two_ranks() {
    family=$1
    shift
    of_infer $golden/$family || return 1
    ranks=2
    begin $golden/$family --tokenizer-type ByteLevel --max-prefill-tokens 8 "$@" && asks greedy "$work/greedy" &&
        asks clients_that_leave_are_cancelled && end
    status=$?
    ranks=1
    return $status
}

# The page needs a context in which an answer takes a while; the rotary positions of this model have no end.
a_page_talks() {
    cp -R $golden/llama "$work/long" &&
        sed 's/"max_position_embeddings": 64/"max_position_embeddings": 8192/' $golden/llama/config.json \
            >"$work/long/config.json" || return 1
    mkdir "$work/profile"
    begin "$work/long" --tokenizer-type ByteLevel --chat-template plain --serve-adapter one=tests/golden/tune/lora &&
        python3 tests/serve_page.py "$port" "$work/profile" 2>"$work/err" && end
}

if "$infer" --load $golden/llama --serve 1.2.3.4.5:6 --tokenizer-type ByteLevel 2>&1 </dev/null |
    grep -q 'no libmicrohttpd'; then
    check without_the_library_it_is_refused refused 'this build has no libmicrohttpd' "$infer" --load $golden/llama \
        --tokenizer-type ByteLevel --serve 0
    exit $failed
fi
check wrong_places_are_refused wrong_places_are_refused
if ! command -v python3 >/dev/null; then
    echo 'skipped: no python3 is here, whose library has the clients'
    exit $failed
fi
# Few tokens of prompts in a step, and small pages: prompts are read in parts, and share pages.
begin $golden/llama --tokenizer-type ByteLevel --chat-template plain --max-prefill-tokens 8 --serve-max-body 65536 \
    --inference-dynamic-batching-block-size 4 --inference-max-requests 8 || failed=1
check lists_the_model asks lists_the_model llama
check tokens_are_those_of_the_tokenizer asks tokens_are_those_of_the_tokenizer
check greedy_is_infers_whatever_else_runs greedy_is_infers_whatever_else_runs
check prompts_are_read_in_parts asks prompts_are_read_in_parts 8
check seeds_draw_infers_samples seeds_draw_infers_samples
check scores_are_those_of_infer scores_are_those_of_infer
check streams_are_the_whole_answers asks streams_are_the_whole_answers
check stops_cut_the_text asks stops_cut_the_text
check wrong_requests_are_refused_in_one_sentence asks wrong_requests_are_refused_in_one_sentence
check clients_that_leave_are_cancelled asks clients_that_leave_are_cancelled
check garbage_harms_nobody asks garbage_harms_nobody
check a_port_in_use_is_an_error a_port_in_use_is_an_error
check it_ends_by_sigterm end
check keys_open keys_open
check everybody_may_enter_is_said everybody_may_enter_is_said
check limits_hold limits_hold
check ends_after_its_work ends_after_its_work
check other_models_serve other_models_serve
check drafts_change_nothing drafts_change_nothing
check holds_under_fire holds_under_fire
check wrong_adapters_are_refused wrong_adapters_are_refused
check makes_an_adapter makes_an_adapter
check reads_the_answers_of_adapters of_adapters
check adapters_answer_as_alone adapters_answer_as_alone
if command -v chromium >/dev/null; then
    check a_page_talks a_page_talks
else
    echo 'skipped: the page, as no chromium is here'
fi
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then
    check tensor_parallel_ranks_serve on_two_ranks llama --tensor-model-parallel-size 2
    check pipeline_ranks_serve on_two_ranks llama --pipeline-model-parallel-size 2
    ranks=2
    check adapters_on_tensor_parallel_ranks adapters_answer_as_alone --tensor-model-parallel-size 2
    ranks=2
    check adapters_on_pipeline_ranks adapters_answer_as_alone --pipeline-model-parallel-size 2
    check expert_parallel_ranks_serve on_two_ranks qwen3_moe --expert-model-parallel-size 2
else
    echo 'skipped: ranks, as MPI is absent'
fi
exit $failed
