#!/bin/sh
# infer with pictures: --image, --prompts, --chat and --serve answer as transformers does, on one rank and on several,
# and bad pictures and settings are one line.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
golden=tests/golden/vision/sft
pictures=tests/golden/images
server=''
mkdir "$work/model"
cp tests/golden/vision/qwen3_vl/config.json tests/golden/vision/qwen3_vl/model.safetensors "$work/model"
cp "$golden"/tokenizer*.json "$golden/chat_template.jinja" "$golden/preprocessor_config.json" "$work/model"
settings="--load $work/model --device cpu"
greedy="--temperature 0 --max-new-tokens 8"

# answer NUMBER KEY: of the reference, from 1: a list without brackets, or a text.
answer() {
    sed -n 's/^  {//p' "$golden/answers.json" | sed -n "$1p" | sed -n "s/.*\"$2\": [[\"]\([^]\"]*\)[]\"].*/\1/p"
}

# list NUMBER KEY: of the line of $work/lines.jsonl.
list() {
    sed -n "$1p" "$work/lines.jsonl" | sed -n "s/.*\"$2\":\[\([^]]*\)\].*/\1/p"
}

# line_equals LINE ANSWER: tokens and log-probabilities of a line of --out are those of the reference.
line_equals() {
    [ "$(list "$1" tokens)" = "$(answer "$2" tokens | tr -d ' ')" ] || {
        echo "line $1 has other tokens: $(list "$1" tokens)"
        return 1
    }
    list "$1" logprobs | tr ',' '\n' >"$work/got"
    answer "$2" logprobs | tr -d ' ' | tr ',' '\n' >"$work/wanted"
    paste "$work/got" "$work/wanted" | awk '
        { d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || d > 1e-4) bad = 1 } END { exit bad || NR != 8 }' && return
    echo "line $1 has other log-probabilities"
    return 1
}

# False, with a message, where this build or machine cannot read pictures or templates.
reads() {
    # shellcheck disable=SC2086
    "$infer" $settings $greedy --image $pictures/square.png --prompt 'What?' >"$work/out" 2>"$work/err" && return
    grep 'built without libpng\|built without libjpeg\|needs python3-jinja2' "$work/err" && return 1
    cat "$work/err"
}

# The text of the message is not printed; <image> gives the places.
image_goes_with_a_prompt() {
    [ "$(cat "$work/out")" = "$(answer 1 text)" ] || return 1
    for text in 'Both?' '<image><image>Both?'; do
        # shellcheck disable=SC2086
        "$infer" $settings $greedy --image $pictures/wide.png $pictures/gray.png --prompt "$text" \
            --out "$work/lines.jsonl" >"$work/out" 2>"$work/err" && line_equals 1 2 || return 1
    done
    # shellcheck disable=SC2086
    "$infer" $settings $greedy --image $pictures/photo.jpg --prompt 'What?' --num-return-sequences 3 \
        --out "$work/lines.jsonl" >"$work/out" 2>"$work/err" &&
        line_equals 1 4 && line_equals 2 4 && line_equals 3 4
}

# Five lines, each with @ behind it.
write_prompts() {
    cp $pictures/square.png $pictures/wide.png $pictures/gray.png $pictures/photo.jpg "$work"
    tr -d '\n' <<'EOF' | tr '@' '\n' | sed "s|TEXT|$(answer 1 text)|; s|WORK|$work|" >"$work/prompts.jsonl"
{"prompt": "<image>What?", "images": ["square.png"]}@
{"prompt": [{"role": "user", "content": [{"type": "image", "image": "wide.png"},
 {"type": "image_url", "image_url": {"url": "file://gray.png"}}, {"type": "text", "text": "Both?"}]}]}@
{"messages": [{"role": "user", "content": "No picture."}]}@
{"messages": [{"role": "user", "content": "<image>What?"}], "images": "photo.jpg"}@
{"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "TEXT"},
 {"role": "user", "content": "<image>And?"}], "images": ["square.png", "WORK/wide.png"]}@
EOF
}

lines_equal() {
    for line in 1 2 3 4 5; do
        line_equals $line $line || return 1
    done
}

# Lines of --prompts, with few rows of features and short forwards too, and on ranks.
lines_of_prompts_have_pictures() {
    write_prompts
    # shellcheck disable=SC2086
    set -- "$infer" $settings $greedy --prompts "$work/prompts.jsonl" --out "$work/lines.jsonl"
    "$@" >"$work/out" 2>"$work/err" && lines_equal &&
        "$@" --max-image-tokens 1 --inference-max-requests 2 >"$work/out" 2>"$work/err" && lines_equal || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    on_ranks 2 "$@" --tensor-model-parallel-size 2 && lines_equal &&
        on_ranks 2 "$@" --pipeline-model-parallel-size 2 && lines_equal && on_ranks 2 "$@" && lines_equal
}

# A conversation with pictures before messages. A line that names no picture is an error, and the conversation goes on.
conversations_have_pictures() {
    # shellcheck disable=SC2086
    ! printf '/image %s\nWhat?\n/image %s\n/image   %s \nAnd?\n' $pictures/square.png absent.png $pictures/wide.png |
        "$infer" $settings $greedy --chat >"$work/out" 2>"$work/err" || return 1
    says '^error: absent.png: cannot be read: No such file' "$work/err" || return 1
    printf '%s\n%s\n' "$(answer 1 text)" "$(answer 5 text)" | cmp - "$work/out" || return 1
    # shellcheck disable=SC2086
    printf 'What?\n' | "$infer" $settings $greedy --chat --image $pictures/square.png >"$work/out" 2>"$work/err" &&
        [ "$(cat "$work/out")" = "$(answer 1 text)" ]
}

# A conversation whose pictures have no room begins again, with the picture of the message at hand.
a_full_conversation_begins_again_with_its_last_picture() {
    # shellcheck disable=SC2086
    printf '/image %s\nWhat?\n/image %s\nWhat?\n' $pictures/square.png $pictures/photo.jpg |
        "$infer" $settings $greedy --chat --max-image-tokens 8 >"$work/out" 2>"$work/err" &&
        says '^note: the pictures have more than --max-image-tokens 8; the conversation starts again' "$work/err" &&
        [ "$(tail -n 1 "$work/out")" = "$(answer 4 text)" ]
}

# begin RANKS OPTIONS...: starts a server.
begin() {
    number=$1
    shift
    # shellcheck disable=SC2086
    set -- "$infer" $settings --serve 0 "$@"
    # shellcheck disable=SC2046
    [ "$number" = 1 ] || set -- $(mpirun_here) -np "$number" "$@"
    : >"$work/log"
    "$@" >"$work/served" 2>"$work/log" </dev/null &
    server=$!
    await_port
}

# end: the server must end in order.
end() {
    kill -TERM "$server"
    wait "$server"
    server=''
    says '^read [0-9]* tokens' "$work/log" && ! grep '^error' "$work/log"
}
trap '[ -z "$server" ] || kill -KILL "$server"; rm -rf "$work"' EXIT

asks() {
    timeout $hang python3 tests/serve_pictures.py "$port" "$@" >"$work/out" 2>"$work/err" && return
    cat "$work/log"
    return 1
}

# The same by the package openai of $MT_PYTHON, if that has it.
asks_by_package() {
    timeout $hang "${MT_PYTHON:-python3}" tests/serve_pictures.py "$port" openai >"$work/out" 2>"$work/err"
    status=$?
    [ $status = 77 ] && echo "skipped: ${MT_PYTHON:-python3} has no openai" && return
    [ $status = 0 ]
}

requests_have_pictures() {
    # shellcheck disable=SC2086
    if "$infer" $settings --serve x 2>&1 </dev/null | grep -q 'no libmicrohttpd'; then
        echo 'skipped: the server, as this build has no libmicrohttpd'
        return 0
    fi
    begin 1 --max-image-tokens 16 --max-prefill-tokens 7 && asks answers && asks refusals && asks_by_package && end &&
        begin 1 --language-model-only && asks text_model && end || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    begin 2 --tensor-model-parallel-size 2 && asks answers && end &&
        begin 2 --pipeline-model-parallel-size 2 && asks answers && end
}

the_page_sends_pictures() {
    mkdir "$work/profile"
    begin 1 && python3 tests/serve_page_pictures.py "$port" "$work/profile" >"$work/out" 2>"$work/err" && end
}

# An adapter answers as the model that it is merged into, and otherwise than its base.
adapters_answer_as_merged_models() {
    "$train" --load "$work/model" --finetune --sft --train-data-path $golden/lines.jsonl --seq-length 128 \
        --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 0.1 --lora-rank 4 --lora-target all-linear \
        --eval-iters 0 --device cpu --save "$work/adapter" >"$work/out" 2>"$work/err" || return 1
    set -- --device cpu --prompts "$work/prompts.jsonl" --temperature 0 --max-new-tokens 8
    adapter="$work/adapter/iter_0000003"
    "$infer" --load "$work/model" --load-adapter "$adapter" --device cpu --merge-adapter "$work/merged" >"$work/out" \
        2>"$work/err" &&
        "$infer" "$@" --load "$work/merged" --out "$work/of_merged.jsonl" >"$work/out" 2>"$work/err" &&
        "$infer" "$@" --load "$work/model" --load-adapter "$adapter" --out "$work/lines.jsonl" >"$work/out" \
            2>"$work/err" || return 1
    sed 's/.*"tokens":\[\([^]]*\)\].*/\1/' "$work/of_merged.jsonl" >"$work/wanted"
    sed 's/.*"tokens":\[\([^]]*\)\].*/\1/' "$work/lines.jsonl" | cmp - "$work/wanted" &&
        [ "$(list 1 tokens)" != "$(answer 1 tokens | tr -d ' ')" ]
}

bad_pictures_and_settings_are_one_line() {
    echo text >"$work/text.png"
    while IFS='|' read -r words pattern; do
        # shellcheck disable=SC2086
        refused "$pattern" "$infer" $settings $words || return 1
    done <<EOF
--image $work/text.png --prompt a|--image: $work/text.png: neither PNG nor JPEG
--image absent.png --prompt a|--image: absent.png: cannot be read: No such file
--image $pictures/square.png --prompt <image><image>|--image: has 1 pictures in "images" and 2 places
--image $pictures/square.png --prompt a --chat-template chatml|--image: has pictures, which only the chat template of
--image https://a.b/c.png --prompt a|--image: the picture https://a.b/c.png is on a network
--image $pictures/square.png|--image needs --prompt or --chat
--image $pictures/square.png --serve 0|--image and --serve exclude each other
--image $pictures/square.png --prompt-tokens 1|--image and --prompt-tokens exclude each other
--image absent.png --chat|absent.png: cannot be read
EOF
    mkdir "$work/text"
    cp tests/golden/hf/llama/config.json tests/golden/hf/llama/model.safetensors "$golden"/tokenizer*.json "$work/text"
    refused '--image: the model has no vision tower' "$infer" --load "$work/text" --device cpu \
        --image $pictures/square.png --prompt a || return 1
    printf '{"prompt": "<image>What?", "images": ["absent.png"]}\n' >"$work/bad.jsonl"
    # shellcheck disable=SC2086
    refused 'bad.jsonl:1: .*absent.png: cannot be read' "$infer" $settings --prompts "$work/bad.jsonl" \
        --out "$work/o" && [ ! -e "$work/o" ] || return 1
    printf '{"prompt": "<image>a", "response": "b", "images": ["absent.png"]}\n' >"$work/score.jsonl"
    # shellcheck disable=SC2086
    refused 'score.jsonl:1: .*absent.png: cannot be read' "$infer" $settings --score "$work/score.jsonl" \
        --out "$work/o" && [ ! -e "$work/o" ]
}

reads || exit 0
check image_goes_with_a_prompt image_goes_with_a_prompt
check lines_of_prompts_have_pictures lines_of_prompts_have_pictures
check conversations_have_pictures conversations_have_pictures
check a_full_conversation_begins_again_with_its_last_picture a_full_conversation_begins_again_with_its_last_picture
check requests_have_pictures requests_have_pictures
if "$infer" --load "$work/model" --serve x 2>&1 </dev/null | grep -q 'no libmicrohttpd'; then
    echo 'skipped: the page, as no server is here'
elif command -v chromium >/dev/null; then
    check the_page_sends_pictures the_page_sends_pictures
else
    echo 'skipped: the page, as no chromium is here'
fi
check adapters_answer_as_merged_models adapters_answer_as_merged_models
check bad_pictures_and_settings_are_one_line bad_pictures_and_settings_are_one_line
exit $failed
