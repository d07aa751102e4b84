#!/bin/sh
# infer --serve with clients that others wrote: curl, the package openai, lm-eval. MT_PYTHON names a Python that has the
# packages. A client that is absent is skipped.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
python=${MT_PYTHON:-python3}
server='' port=''
trap '[ -z "$server" ] || kill -KILL "$server"; rm -rf "$work"' EXIT

# A folder with a tokenizer, and a template that takes tools.
makes_a_model() {
    "$train" --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --lr 0.01 \
        --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --mock-data \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/demo-tokenizer.json --save "$work/run" \
        >"$work/out" 2>"$work/err" && cp -R "$work/run/iter_0000002" "$work/model" || return 1
    echo '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}' \
        >"$work/model/tokenizer_config.json"
    cat >"$work/model/chat_template.jinja" <<'JINJA'
{% if tools %}Tools: {{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}
{{ c.function.name }} {{ c.function.arguments.place }}{% endfor %}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}
JINJA
}

serves() {
    "$infer" --load "$work/model" --device cpu --serve 0 --max-prefill-tokens 64 >"$work/served" 2>"$work/log" \
        </dev/null &
    server=$!
    await_port
}

curl_reads_a_stream() {
    curl -sN "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
        -d '{"prompt": "One day", "max_tokens": 5, "stream": true}' >"$work/out" 2>"$work/err" &&
        says '^data: \[DONE\]$' "$work/out" && [ "$(grep -c '^data: {' "$work/out")" -le 5 ] &&
        [ "$(curl -s -o "$work/body" -w '%{http_code}' "http://127.0.0.1:$port/v1/completions" -d '{')" = 400 ]
}

# client NAME: a client's checks; status 77: its package is absent.
client() {
    "$python" tests/serve_clients.py "$port" "$work/model" "$work" "$infer" "$1" >"$work/out" 2>"$work/err"
}

ends() {
    kill -TERM "$server" && wait "$server" && server=''
}

if "$infer" --load tests/golden/hf/llama --serve 1.2.3.4.5:6 --tokenizer-type ByteLevel 2>&1 </dev/null |
    grep -q 'no libmicrohttpd'; then
    echo 'skipped: this build has no libmicrohttpd'
    exit 77
fi
check makes_a_model makes_a_model
serves || failed=1
if command -v curl >/dev/null; then
    check curl_reads_a_stream curl_reads_a_stream
else
    echo 'skipped: no curl is here'
fi
for name in openai lm_eval; do
    "$python" -c "import $name" 2>/dev/null || { echo "skipped: $python has no $name" && continue; }
    check "client_$name" client $name
done
check ends ends
exit $failed
