#!/bin/sh
# The infer program: golden continuations and scores, prompts, lines of text, and errors.
# Sections of megatron.c: §16
set -u
. tests/suite.sh
golden=tests/golden/hf
story=${MT_SHARED:-../shared}/models/stories260K-hf
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"

# refuses PATTERN ARGUMENTS...
refuses() {
    pattern=$1
    shift
    refused "$pattern" "$infer" "$@"
}

# close A B TOLERANCE: two files of floats have the same length and differ by at most TOLERANCE.
close() {
    [ -s "$1" ] && [ "$(wc -c <"$1")" = "$(wc -c <"$2")" ] || return 1
    od -An -v -tf4 -w4 "$1" >"$work/a"
    od -An -v -tf4 -w4 "$2" >"$work/b"
    paste "$work/a" "$work/b" | awk -v tolerance="$3" -v file="$1" '
        { d = $1 - $2; if (d < 0) d = -d; if (!(d <= tolerance)) { bad = NR; print file ": " $0; exit } }
        END { exit bad ? 1 : 0 }'
}

# ids N M: elements N to M of the greedy continuation in expected.json.
ids() {
    awk '/"greedy_ids"/ { on = 1; next } on && /\]/ { exit } on { gsub(/[ ,]/, ""); print }' "$1/expected.json" |
        sed -n "$2,$3p" | paste -sd "$4" -
}

continues_as_transformers() {
    for family in gpt2 llama llama3_rope_tied qwen2 qwen3 qwen3_next qwen3_5 qwen3_5_moe lfm2 mimo_v2_flash \
        nemotron_h nemotron_h_latent kimi_linear glm_moe_dsa glm_moe_dsa_shared; do
        folder=$golden/$family
        "$infer" --load "$folder" --prompt-tokens "$(ids "$folder" 1 8 ,)" --print-tokens --max-new-tokens 24 \
            --temperature 0 >"$work/out" 2>"$work/err" || return 1
        [ "$(cat "$work/out")" = "$(ids "$folder" 9 32 ' ')" ] || return 1
    done
}

scores_as_transformers() {
    for family in gpt2 llama llama3_rope_tied qwen2 qwen3 qwen3_next qwen3_5 qwen3_5_moe lfm2 \
        mimo_v2_flash nemotron_h nemotron_h_latent granitemoehybrid kimi_linear \
        glm_moe_dsa_shared; do
        folder=$golden/$family
        "$infer" --load "$folder" --score "$folder/tokens.i32" --seq-length 32 --max-sequences 4 --micro-batch-size 3 \
            --out "$work/logprobs" --entropy-out "$work/entropy" --logits-out "$work/logits" 2>"$work/err" || return 1
        close "$work/logprobs" "$folder/logprobs.f32" 1e-4 || return 1
        close "$work/entropy" "$folder/entropy.f32" 1e-4 || return 1
        close "$work/logits" "$folder/logits.f32" 1e-4 || return 1
    done
}

# A folder in fp8 with a scale for each block of 32 x 32; $1 $2: tensor- and pipeline-parallel ranks.
scores_fp8_folder() {
    folder=tests/golden/tune/fp8
    set -- "$@" --load $folder --score $folder/tokens.i32 --seq-length 32 --device cpu --out "$work/logprobs"
    if [ "$1$2" = 11 ]; then shift 2 && "$infer" "$@" 2>"$work/err"; else shared "$@" 2>"$work/err"; fi &&
        close "$work/logprobs" $folder/logprobs.f32 5e-6
}

scores_whole_file() {
    "$infer" --load $golden/llama --score $golden/llama/tokens.i32 --seq-length 32 --out "$work/all" 2>"$work/err" &&
        [ "$(wc -c <"$work/all")" = $((10 * 4 * 32 * 4)) ]
}

runs_in_bf16() {
    "$infer" --load $golden/llama --prompt-tokens 5,6,7 --print-tokens --max-new-tokens 9 --bf16 >"$work/out" \
        2>"$work/err" && [ "$(wc -w <"$work/out")" = 9 ]
}

# The same --seed gives the same text, another seed another text.
repeats_by_seed() {
    for seed in 1 1 2; do
        "$infer" --load $golden/llama --prompt-tokens 5,6,7 --print-tokens --max-new-tokens 20 --seed $seed \
            >>"$work/seeds" 2>"$work/err" || return 1
    done
    [ "$(sort "$work/seeds" | uniq | wc -l)" = 2 ] && [ "$(sed -n 1p "$work/seeds")" = "$(sed -n 2p "$work/seeds")" ]
}

# Several prompts give the same texts as each alone, with headers. (Greedy: random draws depend on the prompt's index.)
answers_several_prompts() {
    for text in 'Hello' 'a longer text' 'x'; do
        "$infer" --load $golden/gpt2 --tokenizer-type ByteLevel --temperature 0 --max-new-tokens 12 --prompt "$text" \
            >>"$work/alone" 2>"$work/err" || return 1
    done
    "$infer" --load $golden/gpt2 --tokenizer-type ByteLevel --temperature 0 --max-new-tokens 12 \
        --prompt 'Hello' 'a longer text' 'x' >"$work/together" 2>"$work/err" || return 1
    grep -a '^== [123] of 3 ==$' "$work/together" | wc -l | grep -q 3 || return 1
    [ "$(grep -av '^== . of 3 ==$' "$work/together" | grep -av '^$')" = "$(grep -av '^$' "$work/alone")" ]
}

# Without --prompt every line is continued; a line that is too long is an error, and the others are answered.
answers_lines() {
    printf 'Hello\n\nworld' | "$infer" --load $golden/llama --tokenizer-type ByteLevel --print-tokens \
        --max-new-tokens 5 >"$work/out" 2>"$work/err" || return 1
    [ "$(wc -l <"$work/out")" = 2 ] && [ "$(wc -w <"$work/out")" = 10 ] || return 1
    long=$(printf '%070d' 0)
    printf '%s\nworld\n' "$long" | "$infer" --load $golden/llama --tokenizer-type ByteLevel --print-tokens \
        --max-new-tokens 5 >"$work/out" 2>"$work/err" && return 1
    [ "$(wc -w <"$work/out")" = 5 ] && grep -q '^error: .*70 tokens' "$work/err" || return 1
    for line in 'ab\0cd' 'ab'; do # a zero byte is a part of the line
        printf "$line\n" | "$infer" --load $golden/llama --tokenizer-type ByteLevel --print-tokens --temperature 0 \
            --max-new-tokens 5 2>"$work/err" || return 1
        grep -o '^read [0-9]* tokens' "$work/err"
    done >"$work/out"
    [ "$(grep '^read' "$work/out" | tr '\n' ' ')" = 'read 5 tokens read 2 tokens ' ]
}

# A model whose vocabulary is ByteLevel's, with a context of 48 tokens, in $work/bytes.
makes_model_of_bytes() {
    [ -d "$work/bytes" ] || "$train" --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 48 \
        --vocab-size 257 --tokenizer-type ByteLevel --position-embedding-type rope --mock-data --train-iters 2 \
        --lr 1e-2 --save "$work/bytes" >"$work/out" 2>"$work/err"
}

# The second response continues the system message, both messages of the user, and the first response with its end.
holds_a_conversation() {
    makes_model_of_bytes || return 1
    set -- --load "$work/bytes" --temperature 0 --max-new-tokens 4 --print-tokens
    printf 'Hello\n\nyou\n' | "$infer" "$@" --chat --chat-template plain --system-prompt Sy >"$work/chat" \
        2>"$work/err" || return 1
    first=$(sed -n 1p "$work/chat" | tr ' ' ,)
    # 7 tokens, then 15, of them 10 in the cache
    [ "$(wc -l <"$work/chat")" = 2 ] && grep -q '^read 12 tokens' "$work/err" || return 1
    "$infer" "$@" --prompt-tokens 83,121,72,101,108,108,111 >"$work/out" 2>"$work/err" &&
        [ "$(cat "$work/out")" = "$(sed -n 1p "$work/chat")" ] || return 1
    "$infer" "$@" --prompt-tokens "83,121,72,101,108,108,111,$first,256,121,111,117" >"$work/out" 2>"$work/err" &&
        [ "$(cat "$work/out")" = "$(sed -n 2p "$work/chat")" ]
}

# The third message does not fit behind the others, the last not even alone.
a_conversation_starts_again() {
    makes_model_of_bytes || return 1
    set -- --load "$work/bytes" --temperature 0 --max-new-tokens 4 --print-tokens
    printf 'abcdefghijklmnop\nabcdefghijklmnop\nzyxwvutsrqponmlk\n%060d\n' 0 | "$infer" "$@" --chat \
        --chat-template plain >"$work/chat" 2>"$work/err" && return 1
    [ "$(wc -l <"$work/chat")" = 3 ] && [ "$(grep -c '^note: the context of 48 tokens is full' "$work/err")" = 1 ] &&
        grep -q '^error: .*60 tokens' "$work/err" || return 1
    printf 'zyxwvutsrqponmlk\n' | "$infer" "$@" --chat --chat-template plain >"$work/out" 2>"$work/err" &&
        [ "$(cat "$work/out")" = "$(sed -n 3p "$work/chat")" ]
}

refuses_bad_conversations() {
    makes_model_of_bytes &&
        refuses 'has no chat template; choose one with --chat-template' --load "$work/bytes" --chat &&
        refuses 'chatml needs the token <|im_start|>' --load "$work/bytes" --chat --chat-template chatml &&
        refuses 'chat-template needs --chat' --load "$work/bytes" --chat-template plain &&
        refuses 'system-prompt needs --chat' --load "$work/bytes" --system-prompt x &&
        refuses 'chat and --prompt exclude each other' --load "$work/bytes" --chat --prompt x &&
        refuses 'chat-template' --load "$work/bytes" --chat --chat-template alpaca
}

# Generation stops at the context of these models, 64 tokens.
stops_at_the_context() {
    "$infer" --load $golden/llama --prompt-tokens 5,6,7 --print-tokens --max-new-tokens 1000 --temperature 0 \
        >"$work/out" 2>"$work/err" && [ "$(wc -w <"$work/out")" = 61 ] && grep -q 'context of 64' "$work/err"
}

writes_only_text_to_standard_output() {
    "$infer" --load $golden/llama --prompt-tokens 5 --print-tokens --max-new-tokens 0 >"$work/out" 2>"$work/err" &&
        [ "$(cat "$work/out")" = '' ] && grep -q 'tokens/s' "$work/err"
}

refuses_bad_prompts() {
    refuses 'prompt-tokens.*--print-tokens' --load $golden/llama --prompt Hello &&
        refuses 'empty' --load $golden/llama --tokenizer-type ByteLevel --prompt '' &&
        refuses '160' --load $golden/llama --prompt-tokens 1,160,3 --print-tokens &&
        refuses 'prompt-tokens' --load $golden/llama --prompt-tokens 1,,3 --print-tokens &&
        refuses 'outside' --load $golden/llama --tokenizer-type ByteLevel --prompt "$(printf '\377')" &&
        refuses '70 tokens' --load $golden/llama --tokenizer-type ByteLevel --prompt "$(printf '%070d' 0)" &&
        refuses 'load' --prompt Hello &&
        refuses 'nowhere' --load "$work/nowhere" --prompt-tokens 1 --print-tokens
}

# An error leaves the output file unchanged and no temporary file.
refuses_bad_scores() {
    tokens=$golden/llama/tokens.i32
    head -c 130 $tokens >"$work/odd.i32"
    { head -c 200 $tokens && printf '\240\0\0\0' && head -c 60 $tokens; } >"$work/outside.i32"
    : >"$work/empty.i32"
    set -- --load $golden/llama --seq-length 32 --out "$work/kept"
    echo good >"$work/kept"
    refuses "odd.i32: 130 bytes" "$@" --score "$work/odd.i32" &&
        refuses "empty.i32" "$@" --score "$work/empty.i32" &&
        refuses "absent.i32" "$@" --score "$work/absent.i32" &&
        refuses "$work" "$@" --score "$work" &&
        refuses "outside.i32: token 160 at position 17 of sequence 1" "$@" --score "$work/outside.i32" &&
        refuses "nowhere/x" "$@" --score $tokens --logits-out "$work/nowhere/x" &&
        refuses "--out and --logits-out name one file" "$@" --score $tokens --logits-out "$work/./kept" &&
        cp $tokens "$work/tokens" &&
        refuses "--score and --entropy-out name one file" "$@" --score "$work/tokens" --entropy-out "$work/./tokens" &&
        cmp $tokens "$work/tokens" &&
        [ "$(cat "$work/kept")" = good ] && [ "$(find "$work" -name '*.tmp*')" = '' ]
}

# idle OPTIONS ARGUMENTS...: infer reports of these options that they have no effect, and of no others.
idle() {
    names=$1
    shift
    "$infer" "$@" --device cpu >"$work/out" 2>"$work/err" || return 1
    named=$(sed -n 's/^--\(.*\) has no effect: ..*/\1/p' "$work/err" | sort | paste -sd ' ')
    [ "$named" = "$names" ] || {
        echo "expected \"$names\" from $*, got \"$named\""
        return 1
    }
}

# As train does, each once; what has an effect is not named.
options_without_effect_are_named() {
    score="--load $golden/llama --score $golden/llama/tokens.i32 --seq-length 32 --out $work/idle"
    tokens="--load $golden/llama --prompt-tokens 5 --print-tokens --max-new-tokens 2"
    # shellcheck disable=SC2086
    idle '' $tokens --temperature 0.5 --top-k 3 --top-p 0.5 --min-p 0.1 --seed 3 && idle '' $score &&
        idle 'min-p seed top-k top-p' $tokens --temperature 0 --top-k 3 --top-p 0.5 --min-p 0.1 --seed 3 &&
        idle 'attention-backend flash cp-comm-type deterministic-mode distributed-timeout-seconds' $tokens \
            --deterministic-mode --cp-comm-type a2a --distributed-timeout-seconds 5 --attention-backend flash &&
        idle 'moe-grouped-gemm moe-token-dispatcher-type' $tokens --moe-token-dispatcher-type allgather \
            --no-moe-grouped-gemm &&
        idle tokenizer-type $tokens --tokenizer-type ByteLevel && idle 'top-p' $score --top-p 1 &&
        idle 'cp-comm-type max-new-tokens seed temperature top-k' --load $golden/llama --load-adapter \
            tests/golden/tune/lora --merge-adapter "$work/merged" --temperature 0.5 --top-k 3 --max-new-tokens 4 \
            --seed 1 --cp-comm-type p2p
}

# A limit on the size of files simulates a full disk.
reports_a_full_disk() {
    echo good >"$work/kept"
    (
        ulimit -f 8
        refuses 'kept: cannot be written' --load $golden/llama --seq-length 32 --score $golden/llama/tokens.i32 \
            --out "$work/small" --logits-out "$work/kept"
    ) && [ "$(cat "$work/kept")" = good ] && [ "$(find "$work" -name '*.tmp*')" = '' ] || return 1
    [ -w /dev/full ] || return 0
    "$infer" --load $golden/llama --prompt-tokens 5 --print-tokens >/dev/full 2>"$work/err" && return 1
    grep -q 'standard output' "$work/err" || return 1
    # shellcheck disable=SC2016
    refused 'standard output' sh -c '"$1" --load "$2" --print-config >/dev/full' sh "$infer" $golden/llama || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    # Of two ranks, the first one writes. mpirun's own output is another.
    # shellcheck disable=SC2016
    timeout $hang $(mpirun_here) -np 2 sh -c 'exec "$@" >/dev/full' sh "$infer" --load $golden/llama --device cpu \
        --prompt-tokens 5 --print-tokens --tensor-model-parallel-size 2 2>"$work/err" && return 1
    [ "$(grep -c '^error: ' "$work/err")" = 1 ] && says '^error: standard output: cannot be written' "$work/err" &&
        ! grep -q MPI_ABORT "$work/err" && says 'Exit code: *1' "$work/err"
}

# shared TENSOR PIPELINE ARGUMENTS...: infer on TENSOR x PIPELINE ranks.
shared() {
    tensor=$1 pipeline=$2
    shift 2
    OMP_NUM_THREADS=1 $(mpirun_here) -np $((tensor * pipeline)) "$infer" \
        --tensor-model-parallel-size "$tensor" --pipeline-model-parallel-size "$pipeline" "$@"
}

# Greedy tokens equal those of transformers, sampled tokens those of one rank.
ranks_continue_as_one() {
    for layout in '2 1' '1 2' '2 2' '4 1'; do
        for family in gpt2 llama qwen2 qwen3; do
            folder=$golden/$family
            # shellcheck disable=SC2086
            shared $layout --load "$folder" --prompt-tokens "$(ids "$folder" 1 8 ,)" --print-tokens \
                --max-new-tokens 24 --temperature 0 >"$work/out" 2>"$work/err" || return 1
            [ "$(cat "$work/out")" = "$(ids "$folder" 9 32 ' ')" ] || return 1
        done
    done
    "$infer" --load $golden/llama --prompt-tokens 5,6,7 --print-tokens --max-new-tokens 20 --top-k 20 >"$work/alone" \
        2>"$work/err" &&
        shared 2 2 --load $golden/llama --prompt-tokens 5,6,7 --print-tokens --max-new-tokens 20 --top-k 20 \
            >"$work/out" 2>"$work/err" && cmp "$work/alone" "$work/out"
}

ranks_score_as_one() {
    for family in gpt2 llama llama3_rope_tied qwen2; do
        set -- --load $golden/$family --score $golden/$family/tokens.i32 --seq-length 32 --max-sequences 7 \
            --micro-batch-size 3
        "$infer" "$@" --out "$work/logprobs.1" --entropy-out "$work/entropy.1" --logits-out "$work/logits.1" \
            2>"$work/err" || return 1
        for layout in '2 1' '1 2' '2 2'; do
            # shellcheck disable=SC2086
            shared $layout "$@" --out "$work/logprobs" --entropy-out "$work/entropy" --logits-out "$work/logits" \
                2>"$work/err" || return 1
            for file in logprobs entropy logits; do close "$work/$file" "$work/$file.1" 1e-5 || return 1; done
        done
    done
    grep -c '^scored 7 sequences' "$work/err" | grep -qx 1 && [ "$(find "$work" -name '*.tmp*')" = '' ]
}

# list KEY FILE LINE: the numbers of a list in a line of JSON, a line each.
list() {
    sed -n "$3p" "$2" | sed "s/.*\"$1\":\[\([^]]*\)\].*/\1/" | tr ',' '\n'
}

# Lines of JSON hold the tokens that would be printed; log-probabilities are those of scoring the whole sequences, and
# of a sampled distribution where nothing restricts it.
writes_json_lines() {
    set -- --load $golden/llama --prompt-tokens 5,6,7 --print-tokens --max-new-tokens 9 --num-return-sequences 3
    "$infer" "$@" >"$work/printed" 2>"$work/err" && "$infer" "$@" --out "$work/lines.jsonl" >"$work/out" \
        2>"$work/err" && [ ! -s "$work/out" ] || return 1
    [ "$(sed 's/.*"tokens":\[\([^]]*\)\].*/\1/' "$work/lines.jsonl" | tr , ' ')" = "$(cat "$work/printed")" ] &&
        [ "$(grep -c '"finish_reason":"length"' "$work/lines.jsonl")" = 3 ] || return 1
    sed 's/.*"tokens":\[\([^]]*\)\].*/{"tokens":[5,6,7,\1]}/' "$work/lines.jsonl" >"$work/whole.jsonl"
    "$infer" --load $golden/llama --score "$work/whole.jsonl" --out "$work/scores.jsonl" 2>"$work/err" || return 1
    for line in 1 2 3; do
        list logprobs "$work/scores.jsonl" $line | tail -n 9 >"$work/want"
        list logprobs "$work/lines.jsonl" $line >"$work/got"
        list sampled_logprobs "$work/lines.jsonl" $line | paste "$work/want" "$work/got" - | awk '
            function far(x, y) { return !(x - y <= 1e-5 && y - x <= 1e-5) }
            NF != 3 || far($1, $2) || far($2, $3) { print; bad = 1 } END { exit NR == 9 ? bad : 1 }' || return 1
    done
}

# Prompts of a file, two at once: each line is continued as its prompt alone, in the order of the file.
answers_a_file_of_prompts() {
    makes_model_of_bytes || return 1
    : >"$work/prompts.jsonl"
    for text in Hello aa bbb x 'a longer text'; do
        "$infer" --load "$work/bytes" --prompt "$text" --temperature 0 --max-new-tokens 7 --print-tokens \
            2>"$work/err" || return 1
        printf '{"prompt": "%s", "answer": 1}\n' "$text" >>"$work/prompts.jsonl"
    done >"$work/alone"
    sed -i '3s/.*/{"messages": [{"role": "user", "content": "bbb"}]}/' "$work/prompts.jsonl"
    set -- --load "$work/bytes" --prompts "$work/prompts.jsonl" --chat-template plain --temperature 0 \
        --max-new-tokens 7
    "$infer" "$@" --inference-max-requests 2 --out "$work/lines.jsonl" >"$work/out" 2>"$work/err" || return 1
    sed 's/.*"tokens":\[\([^]]*\)\].*/\1/' "$work/lines.jsonl" | tr , ' ' | cmp "$work/alone" - &&
        [ "$(sed 's/{"prompt":\([0-9]\),"sample":0,.*/\1/' "$work/lines.jsonl" | tr '\n' ' ')" = '0 1 2 3 4 ' ] &&
        refuses 'prompts needs --out' "$@" && refuses 'prompts and --prompt exclude' "$@" --prompt a --out "$work/x" &&
        cp "$work/prompts.jsonl" "$work/kept.jsonl" &&
        refuses 'prompts and --out name one file, .*; give each its own' "$@" --out "$work/./prompts.jsonl" &&
        cmp "$work/kept.jsonl" "$work/prompts.jsonl" || return 1
    if [ "${HAVE_MPI:-}" ]; then
        layout 3 "$@" --out "$work/ranks.jsonl" >"$work/out" 2>"$work/err" &&
            sed 's/"logprobs.*//' "$work/lines.jsonl" >"$work/one" &&
            sed 's/"logprobs.*//' "$work/ranks.jsonl" | cmp "$work/one" - || return 1
    fi
    printf '{"prompt": "%050d"}\n' 0 >>"$work/prompts.jsonl"
    refuses 'prompts.jsonl:6: has a prompt of 50 tokens, which leaves no room in a context of 48' "$@" --out "$work/x"
}

# A stop string spans tokens; the text is cut before it. The model of bytes writes ill-formed ones.
# The output of an earlier run is named before the work, and stays if that fails; the program cannot be asked.
outputs_that_are_replaced_are_named() {
    set -- --load $golden/llama --device cpu
    one="--prompt-tokens 1,2 --print-tokens --max-new-tokens 2"
    two="--score $golden/llama/tokens.i32 --seq-length 32"
    # shellcheck disable=SC2086
    for task in "$one" "$two"; do
        rm -f "$work/named"
        "$infer" "$@" $task --out "$work/named" >"$work/out" 2>"$work/err" && ! grep 'is there already' "$work/err" &&
            [ -s "$work/named" ] && cp "$work/named" "$work/before" && echo more >>"$work/named" &&
            "$infer" "$@" $task --out "$work/named" >"$work/out" 2>"$work/err" &&
            says "^note: --out $work/named is there already; it will be replaced" "$work/err" &&
            cmp "$work/named" "$work/before" || return 1
    done
}

# The first token of a text, which comes from its prompt's forward, counts too.
the_rates_count_every_new_token() {
    for new in 1 3; do
        "$infer" --load $golden/llama --prompt-tokens "$(ids $golden/llama 1 8 ,)" --print-tokens --temperature 0 \
            --max-new-tokens $new --num-return-sequences 2 --device cpu >"$work/out" 2>"$work/err" &&
            says "^read .*; then wrote $((2 * new)), " "$work/err" || return 1
    done
}

ends_at_stop_strings() {
    makes_model_of_bytes || return 1
    three=$(printf '\357\277\275\357\277\275\357\277\275')
    set -- --load "$work/bytes" --tokenizer-type ByteLevel --temperature 0 --max-new-tokens 30 --prompt Hi Hello
    "$infer" "$@" --out "$work/whole.jsonl" 2>"$work/err" && grep -qv "\"text\":\"$three$three" "$work/whole.jsonl" &&
        return 1
    "$infer" "$@" --stop nowhere "$three" --out "$work/cut.jsonl" 2>"$work/err" || return 1
    [ "$(grep -c '"text":"",.*"finish_reason":"stop"' "$work/cut.jsonl")" = 2 ] || return 1
    for line in 1 2; do [ "$(list tokens "$work/cut.jsonl" $line | wc -l)" -le 4 ] || return 1; done
    "$infer" "$@" --stop nowhere "$three" >"$work/out" 2>"$work/err" &&
        [ "$(grep -av '^== . of 2 ==$' "$work/out" | grep -av '^$')" = "$(printf 'Hi\nHello')" ]
}

# --min-p 1 leaves the most probable token; a large penalty leaves none that was there before.
restricts_sampling() {
    set -- --load $golden/llama --prompt-tokens 5,6,7 --print-tokens --max-new-tokens 40
    "$infer" "$@" --temperature 0 >"$work/greedy" 2>"$work/err" && "$infer" "$@" --min-p 1 >"$work/out" \
        2>"$work/err" && cmp "$work/greedy" "$work/out" || return 1
    for seed in 1 2; do
        "$infer" "$@" --seed $seed --repetition-penalty 1e6 --temperature 0.1 >"$work/out" 2>"$work/err" || return 1
        { echo 5 6 7 && cat "$work/out"; } | tr ' ' '\n' >"$work/list"
        [ "$(wc -l <"$work/list")" -gt 4 ] && [ "$(sort "$work/list" | uniq -d | wc -l)" = 0 ] || return 1
    done
}

refuses_bad_generation() {
    set -- --load $golden/llama --prompt-tokens 5 --print-tokens
    refuses 'min-p' "$@" --min-p 1.5 && refuses 'repetition-penalty' "$@" --repetition-penalty 0 &&
        refuses 'block-size 12 is not a power of two' "$@" --inference-dynamic-batching-block-size 12 &&
        refuses 'stop and --print-tokens exclude' "$@" --stop x &&
        refuses 'stop: a text is empty' --load $golden/llama --tokenizer-type ByteLevel --prompt a --stop '' &&
        refuses 'out needs --score, --prompt, --prompts or --prompt-tokens' --load $golden/llama --out "$work/x" &&
        refuses 'num-return-sequences needs --prompt' --load $golden/llama --num-return-sequences 2 &&
        refuses 'nowhere/x' "$@" --out "$work/nowhere/x"
}

# Lines reach every rank; a line that is too long is reported once.
ranks_answer_lines() {
    long=$(printf '%070d' 0)
    printf 'Hello\n\n%s\nworld' "$long" >"$work/lines"
    set -- --load $golden/llama --tokenizer-type ByteLevel --print-tokens --max-new-tokens 5
    "$infer" "$@" <"$work/lines" >"$work/alone" 2>"$work/err" && return 1
    shared 2 2 "$@" <"$work/lines" >"$work/out" 2>"$work/err" && return 1
    cmp "$work/alone" "$work/out" && [ "$(grep -c '^error: .*70 tokens' "$work/err")" = 1 ] || return 1
    { sleep 6 && echo Hello; } | shared 2 1 "$@" --distributed-timeout-seconds 4 >"$work/out" 2>"$work/err" &&
        [ "$(cat "$work/out")" = "$(sed -n 1p "$work/alone")" ]
}

ranks_hold_a_conversation() {
    makes_model_of_bytes || return 1
    printf 'Hello\nyou\nabcdefghijklmnop\nabcdefghijklmnop\n' >"$work/lines"
    set -- --load "$work/bytes" --chat --chat-template plain --temperature 0 --max-new-tokens 4
    "$infer" "$@" <"$work/lines" >"$work/alone" 2>"$work/err" &&
        shared 2 2 "$@" <"$work/lines" >"$work/out" 2>"$work/err" && cmp "$work/alone" "$work/out" &&
        [ "$(grep -c '^note: the context' "$work/err")" = 1 ]
}

# Every error is printed once, and the job ends.
ranks_refuse_together() {
    for bad in "2 1 --prompt-tokens 5,160 --print-tokens" "1 2 --score $work/absent --seq-length 32 --out $work/x" \
        "2 2 --score $golden/llama/tokens.i32 --seq-length 32 --out $work/nowhere/x"; do
        # shellcheck disable=SC2086
        shared $bad --load $golden/llama >"$work/out" 2>&1 && return 1
        [ "$(grep -c '^error: ' "$work/out")" = 1 ] || return 1
    done
    return 0
}

# layout RANKS ARGUMENTS...: infer on so many ranks.
layout() {
    ranks=$1
    shift
    OMP_NUM_THREADS=1 $(mpirun_here) -np "$ranks" "$infer" "$@"
}

# Samples of several prompts on data-, expert-, sequence- and context-parallel ranks, fewer at once than there are, and
# from a small cache: the tokens of one rank, in order.
layouts_generate_as_one() {
    set -- --device cpu --tokenizer-type ByteLevel --prompt Hello aa bbb cccc dddd --num-return-sequences 3 \
        --max-new-tokens 9 --print-tokens
    for family in mixtral deepseek_v3; do
        "$infer" --load $golden/$family "$@" >"$work/alone" 2>"$work/err" || return 1
        [ "$(sort "$work/alone" | uniq | wc -l)" = 15 ] || return 1
        for words in '2' '3 --inference-max-requests 2' '2 --expert-model-parallel-size 2' \
            '4 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex' \
            '4 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel' \
            '4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2' '2 --context-parallel-size 2' \
            '1 --kv-cache-tokens 40 --inference-dynamic-batching-block-size 4'; do
            # shellcheck disable=SC2086
            layout $words --load $golden/$family "$@" >"$work/out" 2>"$work/err" && cmp "$work/alone" "$work/out" ||
                return 1
        done
    done
    # Lines of standard input are answered too.
    printf 'Hello\nyou\n' >"$work/lines"
    set -- --load $golden/llama --tokenizer-type ByteLevel --print-tokens --max-new-tokens 5
    "$infer" "$@" <"$work/lines" >"$work/alone" 2>"$work/err" && layout 2 "$@" <"$work/lines" >"$work/out" \
        2>"$work/err" && cmp "$work/alone" "$work/out"
}

# Five layers on two pipeline stages.
ranks_generate_the_story() {
    set -- --load "$story" --prompt 'Once upon a time' --temperature 0 --max-new-tokens 60
    "$infer" "$@" >"$work/alone" 2>"$work/err" || return 1
    for layout in '2 1' '1 2 --decoder-first-pipeline-num-layers 2' '2 2 --decoder-last-pipeline-num-layers 2'; do
        # shellcheck disable=SC2086
        shared $layout "$@" >"$work/out" 2>"$work/err" && cmp "$work/alone" "$work/out" || return 1
    done
}

generates_the_story() {
    "$infer" --load "$story" --prompt 'Once upon a time' --temperature 0 --max-new-tokens 60 >"$work/out" \
        2>"$work/err" || return 1
    grep -q '^Once upon a time, there was a little girl named Lily\. She loved to play outside' "$work/out" || return 1
    echo 'Once upon a time' | "$infer" --load "$story" --temperature 0 --max-new-tokens 60 >"$work/line" \
        2>"$work/err" || return 1
    [ "Once upon a time$(cat "$work/line")" = "$(cat "$work/out")" ]
}

cuts_the_story() {
    set -- --load "$story" --prompt 'Once upon a time' --temperature 0 --max-new-tokens 60
    "$infer" "$@" --stop 'dog' 'Lily. She loved' >"$work/out" 2>"$work/err" &&
        [ "$(cat "$work/out")" = 'Once upon a time, there was a little girl named ' ]
}

# The model has 512 tokens, the ByteLevel tokenizer 257: the others are shown as U+FFFD.
shows_tokens_that_the_tokenizer_lacks() {
    "$infer" --load "$story" --tokenizer-type ByteLevel --prompt 'Once' --temperature 5 --max-new-tokens 40 \
        >"$work/out" 2>"$work/err" && grep -aq "^Once.*$(printf '\357\277\275')" "$work/out"
}

check the_rates_count_every_new_token the_rates_count_every_new_token
check outputs_that_are_replaced_are_named outputs_that_are_replaced_are_named
check greedy_continuations_equal_transformers continues_as_transformers
check scores_entropies_and_logits_equal_transformers scores_as_transformers
check a_folder_in_fp8_scores_as_transformers scores_fp8_folder 1 1
check score_takes_the_whole_file_by_default scores_whole_file
check bf16_weights_generate runs_in_bf16
check a_seed_repeats_a_text repeats_by_seed
check several_prompts_are_answered_like_each_alone answers_several_prompts
check a_file_of_prompts_is_answered_like_each_alone answers_a_file_of_prompts
check each_line_of_standard_input_is_answered answers_lines
check a_conversation_continues_its_turns holds_a_conversation
check a_full_context_starts_the_conversation_again a_conversation_starts_again
check bad_conversations_are_refused refuses_bad_conversations
check generation_stops_at_the_context_with_a_note stops_at_the_context
check standard_output_has_only_the_text writes_only_text_to_standard_output
check bad_prompts_are_refused_in_one_line refuses_bad_prompts
check json_lines_have_tokens_and_log_probabilities writes_json_lines
check a_stop_string_ends_a_text ends_at_stop_strings
check min_p_and_the_penalty_restrict_tokens restricts_sampling
check bad_options_of_generation_are_refused refuses_bad_generation
check bad_scores_are_refused_and_leave_no_files refuses_bad_scores
check options_without_effect_are_named options_without_effect_are_named
check a_full_disk_is_reported_and_keeps_the_old_file reports_a_full_disk
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then
    check ranks_continue_as_transformers_and_one_rank ranks_continue_as_one
    check ranks_score_as_one_rank ranks_score_as_one
    check two_tensor_parallel_ranks_score_a_folder_in_fp8 scores_fp8_folder 2 1
    check two_pipeline_stages_score_a_folder_in_fp8 scores_fp8_folder 1 2
    check lines_of_standard_input_reach_every_rank ranks_answer_lines
    check ranks_hold_the_same_conversation ranks_hold_a_conversation
    check ranks_refuse_with_one_error ranks_refuse_together
    check all_layouts_generate_as_one_rank layouts_generate_as_one
    [ -r "$story/config.json" ] && check ranks_generate_the_same_story ranks_generate_the_story
else
    echo 'skipped: infer on several ranks, MPI is absent'
fi
if [ -r "$story/config.json" ]; then
    check stories260k_generates_its_story generates_the_story
    check a_stop_string_cuts_the_story cuts_the_story
    check tokens_without_text_are_shown_as_replacements shows_tokens_that_the_tokenizer_lacks
else
    echo "skipped: stories260k_generates_its_story, $story is absent"
fi
exit $failed
