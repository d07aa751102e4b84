#!/bin/sh
# Tests of the program data/preprocess. Prints "ok NAME" or "not ok NAME" for each test.
set -u
. tests/suite.sh
program=${MT_BIN:-.}/data/preprocess
scratch=$work
bytes='--tokenizer-type ByteLevel'

# script NAME: all commands in $scratch/test must succeed. (`set -e` has no effect in the condition of an `if`.)
script() {
    (
        set -e
        . "$scratch/test"
    ) >"$scratch/log" 2>&1
    if [ $? = 0 ]; then
        echo "ok $1"
    else
        echo "not ok $1"
        cat "$scratch/log"
        failed=1
    fi
}

# numbers TYPE FILE [SKIP BYTES]: prints the numbers of a binary file on one line.
numbers() { od -An -v -t "$1" -w1000000 ${3:+-j "$3"} ${4:+-N "$4"} "$2" | sed 's/^ *//; s/  */ /g'; }
same() { [ "$1" = "$2" ] || { echo "got '$1', expected '$2'"; false; }; }
nothing() { [ -z "$(find "$scratch" -name "$1*")" ] || { find "$scratch" -name "$1*" && false; }; }

cat >"$scratch/test" <<'END'
printf '{"text":"hello"}\n{"text":""}\n{"text":"h\\u00e9\\u0000!"}' >"$scratch/a.jsonl"
$program --input "$scratch/a.jsonl" --output-prefix "$scratch/a" $bytes --append-eod --workers 2
same "$(numbers u2 "$scratch/a_text_document.bin")" "104 101 108 108 111 256 104 195 169 0 33 256"
same "$(head -c 9 "$scratch/a_text_document.idx" | od -An -c | tr -d ' ')" 'MMIDIDX\0\0'
same "$(numbers u1 "$scratch/a_text_document.idx" 9 9)" "1 0 0 0 0 0 0 0 8"
same "$(numbers u4 "$scratch/a_text_document.idx" 18 16)" "2 0 4 0"
same "$(numbers d4 "$scratch/a_text_document.idx" 34 8)" "6 6"
same "$(numbers d8 "$scratch/a_text_document.idx" 42)" "0 12 0 1 1 2"
END
script a_small_jsonl_becomes_the_expected_bytes

cat >"$scratch/test" <<'END'
printf '{"text":"ab","other":["x","","yz"]}\n\n{"other":[],"text":"c"}\n' >"$scratch/k.jsonl"
$program --input "$scratch/k.jsonl" --json-keys text other --output-prefix "$scratch/k" $bytes --append-eod
same "$(numbers u2 "$scratch/k_text_document.bin")" "97 98 256 99 256"
same "$(numbers u2 "$scratch/k_other_document.bin")" "120 121 122 256"
same "$(numbers d4 "$scratch/k_other_document.idx" 34 8)" "1 3"
same "$(numbers d8 "$scratch/k_other_document.idx" 58)" "0 2 2"
END
script every_key_has_its_own_files_and_lists_become_sequences

cat >"$scratch/test" <<'END'
printf '\none\ntwo\n \n\nthree\n\nfour' >"$scratch/p.txt"
$program --input "$scratch/p.txt" --output-prefix "$scratch/p" $bytes
same "$(numbers d4 "$scratch/p_text_document.idx" 34 12)" "12 7 4"
$program --input "$scratch/p.txt" --output-prefix "$scratch/l" $bytes --documents lines
same "$(numbers d4 "$scratch/l_text_document.idx" 34 32)" "1 4 4 2 1 6 1 4"
$program --input "$scratch/p.txt" --output-prefix "$scratch/f" $bytes --documents file
same "$(numbers d4 "$scratch/f_text_document.idx" 34 4)" "23"
for p in p l f; do
    same "$(numbers u2 "$scratch/${p}_text_document.bin")" "$(numbers u1 "$scratch/p.txt")"
done
END
script the_documents_of_plain_text_in_order_are_the_file

# Long lines, many lines, and lines longer than a batch.
cat >"$scratch/test" <<'END'
awk 'BEGIN { for (i = 0; i < 20000; i++) { n = i * i % 211; if (i % 5000 == 7) n = 900000
    s = sprintf("%d ", i); while (length(s) < n) s = s s; printf "{\"text\": \"%s\"}\n", s } }' >"$scratch/w.jsonl"
for n in 1 2 5; do
    $program --input "$scratch/w.jsonl" --output-prefix "$scratch/w$n" $bytes --append-eod --workers $n
done
cmp "$scratch/w1_text_document.bin" "$scratch/w2_text_document.bin"
cmp "$scratch/w1_text_document.idx" "$scratch/w2_text_document.idx"
cmp "$scratch/w1_text_document.bin" "$scratch/w5_text_document.bin"
cmp "$scratch/w1_text_document.idx" "$scratch/w5_text_document.idx"
same "$(numbers u4 "$scratch/w1_text_document.idx" 18 4)" 20000
END
script output_does_not_depend_on_the_number_of_workers

cat >"$scratch/test" <<'END'
i=0
for line in '{"text":1}' '{"tex":"a"}' '["text"]' '{"text":"a"' '{"text":"a"} b' '{"text":["a",2]}' '{"text":"\xff"}' \
    '{"text":"\\ud800"}' nonsense; do
    printf '{"text":"fine"}\n\n'"$line"'\n{"text":"fine"}\n' >"$scratch/bad.jsonl"
    printf 'good' >"$scratch/bad_text_document.bin"
    refused "$scratch/bad.jsonl:3: " $program --input "$scratch/bad.jsonl" --output-prefix "$scratch/bad" $bytes
    same "$(cat "$scratch/bad_text_document.bin")" good
    rm "$scratch/bad_text_document.bin"
    nothing bad_
    i=$((i + 1))
done
same $i 9
END
script a_bad_line_stops_the_job_and_leaves_the_output_unchanged

cat >"$scratch/test" <<'END'
refused "did you mean --input?" $program --inptu x
refused "unknown option" $program --zzzzzzz
refused "needs a value" $program --input --workers 2
refused "takes one value" $program --input a b
refused "--output-prefix" $program --input "$scratch/a.jsonl" $bytes
refused "--tokenizer-type" $program --input "$scratch/a.jsonl" --output-prefix "$scratch/n"
refused "exactly one" $program $bytes
refused "exactly one" $program $bytes --encode --decode
refused "--workers 0" $program --input "$scratch/a.jsonl" --output-prefix "$scratch/n" $bytes --workers 0
refused "--documents" $program --input "$scratch/a.jsonl" --output-prefix "$scratch/n" $bytes --documents lines
refused "named twice" $program --input "$scratch/a.jsonl" --output-prefix "$scratch/n" $bytes --json-keys a a
refused "absent.jsonl" $program --input "$scratch/absent.jsonl" --output-prefix "$scratch/n" $bytes
refused "it is a folder" $program --input "$scratch" --output-prefix "$scratch/n" $bytes
refused "cannot be written" $program --input "$scratch/a.jsonl" --output-prefix "$scratch/absent/n" $bytes
: >"$scratch/empty.jsonl"
refused "holds no documents" $program --input "$scratch/empty.jsonl" --output-prefix "$scratch/n" $bytes
nothing n_
END
script wrong_options_are_refused_in_one_line

cat >"$scratch/test" <<'END'
job="$program --input $scratch/w.jsonl --output-prefix $scratch/n $bytes"
refused "cannot be written" sh -c "ulimit -f 64; exec $job"
nothing n_
END
script a_write_that_fails_is_reported_and_leaves_nothing

cat >"$scratch/test" <<'END'
mkdir "$scratch/disk"
mount -t tmpfs -o size=64k tmpfs "$scratch/disk"
trap 'umount "$scratch/disk"' EXIT
refused "No space left" $program --input "$scratch/w.jsonl" --output-prefix "$scratch/disk/n" $bytes
nothing n_
END
if (mkdir "$scratch/probe" && mount -t tmpfs tmpfs "$scratch/probe" && umount "$scratch/probe") 2>/dev/null; then
    script a_full_disk_is_reported_and_leaves_nothing
else
    echo "skipped: a_full_disk_is_reported_and_leaves_nothing: no permission to mount a small disk"
fi

# The limit is set when the program has started: its libraries may reserve much, for many cores.
cat >"$scratch/test" <<'END'
mkfifo "$scratch/pipe.txt"
$program --input "$scratch/pipe.txt" --documents file --workers 1 --output-prefix "$scratch/n" $bytes 2>"$scratch/err" &
pid=$!
exec 3<>"$scratch/pipe.txt" # read and write, so that open does not block
until [ -n "$(find "$scratch" -name "n_*")" ] || ! kill -0 $pid; do sleep 0.1; done
prlimit --pid $pid --as=$((1024 * $(sed -n 's/^VmSize:[^0-9]*\([0-9]*\).*/\1/p' /proc/$pid/status) + (64 << 20)))
exec 4>"$scratch/pipe.txt" 3>&- # for writing alone, so that the job's end ends head
head -c 120000000 /dev/zero >&4 || true
exec 4>&-
! wait $pid
grep -q "out of memory" "$scratch/err"
nothing n_
END
if [ -n "${SANITIZE:-}" ]; then
    : # a sanitizer reserves terabytes of addresses
elif command -v prlimit >/dev/null && [ -r /proc/self/status ]; then
    script a_job_without_memory_leaves_nothing
else
    echo "skipped: a_job_without_memory_leaves_nothing: no prlimit"
fi

cat >"$scratch/test" <<'END'
mkfifo "$scratch/pipe.jsonl"
$program --input "$scratch/pipe.jsonl" --output-prefix "$scratch/n" $bytes 2>"$scratch/err" &
pid=$!
exec 3<>"$scratch/pipe.jsonl" # read and write, so that open does not block
head -c 3000 "$scratch/w.jsonl" >&3
until [ -n "$(find "$scratch" -name "n_*")" ] || ! kill -0 $pid; do sleep 0.1; done
kill -TERM $pid
exec 3>&-
! wait $pid
grep -q interrupted "$scratch/err"
nothing n_
END
script an_interrupted_job_leaves_nothing

cat >"$scratch/test" <<'END'
same "$(printf 'a\nb\303\251' | $program --encode $bytes)" "97 10 98 195 169"
same "$(printf 'a\nb\303\251' | $program --encode $bytes | wc -l)" 1
same "$(printf '' | $program --encode $bytes)" ""
printf 'a\n\000b\303\251' >"$scratch/raw"
$program --encode $bytes <"$scratch/raw" | $program --decode $bytes | cmp - "$scratch/raw"
END
script encode_prints_ids_on_one_line_and_decode_reverses_it

cat >"$scratch/test" <<'END'
for ids in '1 x' '1 2.5' '-1' '99999999999' '1 256 257'; do
    echo "$ids" >"$scratch/ids"
    refused "" sh -c "$program --decode $bytes <$scratch/ids"
done
for task in "--encode $bytes" --help --version "--input $scratch/a.jsonl --output-prefix $scratch/full $bytes"; do
    [ ! -e /dev/full ] || refused "No space left" sh -c "echo text | $program $task >/dev/full"
done
END
script bad_ids_and_a_full_output_are_refused

cat >"$scratch/test" <<'END'
head -c 6000000 /dev/zero | tr '\0' 'a' >"$scratch/long.txt" # one document of one word
$program --input "$scratch/long.txt" --documents file --output-prefix "$scratch/n" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model tests/golden/tokenizer/unigram.model 2>"$scratch/err" &
pid=$!
until [ -n "$(find "$scratch" -name "n_*")" ] || ! kill -0 $pid; do sleep 0.1; done
kill -TERM $pid
! wait $pid
nothing n_
grep -q interrupted "$scratch/err"
END
script a_signal_ends_a_job_inside_of_a_document

# Two signals, of two kinds so that neither is lost, while the disk hangs: the first one's message never comes.
cat >"$scratch/test" <<'END'
rm -f "$scratch/err" # of the job before
LD_PRELOAD=$work/disk.so HANGING_FSYNC=n_text $program --input "$scratch/w.jsonl" --output-prefix "$scratch/n" \
    $bytes 2>"$scratch/err" &
pid=$!
until grep -q 'fsync hangs' "$scratch/err" || ! kill -0 $pid; do sleep 0.1; done
kill -$first $pid
kill -$second $pid
status=0
wait $pid || status=$?
same $status 1
nothing n_
! grep -q interrupted "$scratch/err"
END
for first in TERM HUP; do # a shell starts its background programs with SIGINT ignored
    second=HUP
    [ $first = HUP ] && second=TERM
    has_disk && script "a_second_signal_ends_a_job_whose_disk_hangs:_$first"
done

cat >"$scratch/test" <<'END'
head -c 2000000 /dev/zero | tr '\0' 'a' >"$scratch/long.txt"
! ASAN_OPTIONS="${ASAN_OPTIONS:-}:verify_asan_link_order=0" LD_PRELOAD="$scratch/disk.so" SIGNAL_IN_WRITE=15 $program \
    --input "$scratch/long.txt" --documents file --output-prefix "$scratch/n" $bytes 2>"$scratch/err"
same "$(cat "$scratch/err")" "error: interrupted; nothing was written"
nothing n_
END
if ${CC:-cc} -shared -fPIC -o "$scratch/disk.so" tests/preload_disk.c -ldl 2>/dev/null; then
    script a_signal_during_the_last_write_is_named
else
    echo "skipped: a_signal_during_the_last_write_is_named: a library to preload cannot be compiled here"
fi

cat >"$scratch/test" <<'END'
printf '{"text":"a"}\n{"text":"b"}\n' >"$scratch/j.txt"
refused "first lines are JSON objects" $program --input "$scratch/j.txt" --output-prefix "$scratch/n" $bytes
for json in '[{"text":"a"},\n{"text":"b"}]\n' ' [\n {\n  "text": "a"}]' '{\n  "text": "a"\n}\n'; do
    printf "$json" >"$scratch/list.txt"
    refused "begins like JSON" $program --input "$scratch/list.txt" --output-prefix "$scratch/n" $bytes
done
for plain in '{"text":"a"} is JSON.\n' '[a] list\n' '{\n  block\n}\n' '{'; do
    printf "$plain" >"$scratch/plain.txt"
    $program --input "$scratch/plain.txt" --output-prefix "$scratch/plain" $bytes >"$scratch/out"
done
nothing n_
$program --input "$scratch/j.txt" --documents lines --output-prefix "$scratch/j" $bytes >"$scratch/out"
printf '\357\273\277{"text":"a"}\n' >"$scratch/mark.jsonl"
$program --input "$scratch/mark.jsonl" --output-prefix "$scratch/mark" $bytes >"$scratch/out"
same "$(od -An -tu2 "$scratch/mark_text_document.bin" | tr -d ' ')" 97
echo text >"$scratch/p.txt"
refused "plain text and has no keys" $program --input "$scratch/p.txt" --json-keys z --output-prefix "$scratch/n" $bytes
for key in ../z a/b ..; do
    refused "part of a file's name" $program --input "$scratch/mark.jsonl" --json-keys $key \
        --output-prefix "$scratch/n" $bytes
done
nothing n_
END
script json_lines_in_plain_text_and_keys_of_no_file_name_are_refused

# Fields of tokenizer_config.json by which transformers would give other tokens are refused, and no others.
cat >"$scratch/test" <<'END'
mkdir "$scratch/folder"
configured() { echo "{\"tokenizer_class\": \"$1\", $2}" >"$scratch/folder/tokenizer_config.json"; }
encodes() { printf a | $program --encode --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$scratch/folder"; }
cp tests/golden/tokenizer/metaspace.json "$scratch/folder/tokenizer.json"
ids=$(encodes)
for config in 'LlamaTokenizer "add_prefix_space": true' 'LlamaTokenizer "add_prefix_space": null' \
    'LlamaTokenizer "add_eos_token": false' 'LlamaTokenizer "legacy": false' \
    'PreTrainedTokenizerFast "add_prefix_space": false' 'PreTrainedTokenizerFast "add_eos_token": true'; do
    configured "${config%% *}" "${config#* }"
    same "$(encodes)" "$ids"
done
configured LlamaTokenizerFast '"add_prefix_space": false'
refused 'puts a space before a text, but "add_prefix_space" of tokenizer_config.json is false' encodes
configured LlamaTokenizer '"add_eos_token": true'
refused 'adds no token behind a text, but "add_eos_token" of tokenizer_config.json is true' encodes
cp data/demo-tokenizer.json "$scratch/folder/tokenizer.json"
configured Qwen2Tokenizer '"add_prefix_space": true'
refused 'puts no space before a text, but "add_prefix_space" of tokenizer_config.json is true' encodes
configured LlamaTokenizer '"add_prefix_space": true'
encodes
for wrong in '"add_prefix_space": 1' '"add_eos_token": "true"' '"legacy": 0'; do
    configured Qwen2Tokenizer "$wrong"
    refused "${wrong%%:*} must be true or false" encodes
done
END
script a_config_that_changes_the_tokenizer_is_refused

# Megatron's HuggingFaceTokenizer adds the tokens of the post-processor to each text.
cat >"$scratch/test" <<'END'
frame='{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"X","type_id":0}},{"Sequence":{"id":"A",'
frame=$frame'"type_id":0}},{"SpecialToken":{"id":"Y","type_id":0}}],"pair":[],'
frame=$frame'"special_tokens":{"X":{"id":"X","ids":[7],"tokens":["x"]},"Y":{"id":"Y","ids":[8,9],"tokens":["y","y"]}}}'
sed "s/\"post_processor\":null/\"post_processor\":$frame/" data/demo-tokenizer.json >"$scratch/t.json"
printf '{"text":["a","b"]}\n' >"$scratch/f.jsonl"
hf="--tokenizer-type HuggingFaceTokenizer --tokenizer-model $scratch/t.json"
a=$(printf a | $program --encode $hf) b=$(printf b | $program --encode $hf)
ids() { od -An -tu2 "$scratch/f_text_document.bin" | xargs; }
$program --input "$scratch/f.jsonl" --output-prefix "$scratch/f" $hf >"$scratch/out"
same "$(ids)" "7 $a 8 9 7 $b 8 9"
grep -q 'begins with the token 7, ' "$scratch/out"
$program --input "$scratch/f.jsonl" --output-prefix "$scratch/f" $hf --tokenizer-hf-no-include-special-tokens \
    >"$scratch/out"
same "$(ids)" "$a $b"
refused "goes with --input and" $program --input "$scratch/f.jsonl" --output-prefix "$scratch/n" $bytes \
    --tokenizer-hf-no-include-special-tokens
many=$(seq 65 | tr '\n' ',')
for damage in 's/"ids":\[7\]/"ids":["7"]/ without.an.id' 's/"X":{"id"/"Z":{"id"/ no.ids.of..X' \
    "s/\"ids\":\[7\]/\"ids\":[${many%,}]/ more.than.64.tokens"; do
    sed "${damage% *}" "$scratch/t.json" >"$scratch/u.json"
    refused "${damage##* }" $program --input "$scratch/f.jsonl" --output-prefix "$scratch/n" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$scratch/u.json"
done
END
script documents_get_the_tokens_of_the_post_processor

# A list of the types is the same wherever one is missing or wrong, and a missing file has a remedy.
cat >"$scratch/test" <<'END'
types='HuggingFaceTokenizer, SentencePieceTokenizer, Llama2Tokenizer, GPT2BPETokenizer, TikTokenizer or ByteLevel$'
! $program --encode 2>"$scratch/err" </dev/null
grep -q "^error: --tokenizer-type: is needed; give $types" "$scratch/err"
! $program --encode --tokenizer-type Other 2>"$scratch/err" </dev/null
grep -q "^error: --tokenizer-type Other: unknown; give $types" "$scratch/err"
for type in HuggingFaceTokenizer SentencePieceTokenizer Llama2Tokenizer GPT2BPETokenizer TikTokenizer ByteLevel; do
    $program --help | grep -q "$type"
done
! $program --input "$scratch/none.txt" --output-prefix "$scratch/none" $bytes 2>"$scratch/err"
grep -q "^error: --input $scratch/none.txt: cannot be opened: .*; check the path" "$scratch/err"
END
script lists_of_tokenizers_agree_and_a_missing_file_has_a_remedy

# Like Megatron's, with a note; until the new files are whole the old ones stay.
cat >"$scratch/test" <<'END'
echo old >"$scratch/o.txt"
$program --input "$scratch/o.txt" --output-prefix "$scratch/o" $bytes 2>"$scratch/err"
same "$(cat "$scratch/err")" ""
mkdir "$scratch/kept"
cp "$scratch"/o_text_document.* "$scratch/kept"
echo new >"$scratch/o.jsonl"
! $program --input "$scratch/o.jsonl" --output-prefix "$scratch/o" $bytes 2>"$scratch/err"
grep -q 'note: --output-prefix .*o_text_document.bin is there already; it will be replaced' "$scratch/err"
cmp "$scratch/o_text_document.bin" "$scratch/kept/o_text_document.bin"
cmp "$scratch/o_text_document.idx" "$scratch/kept/o_text_document.idx"
echo new >"$scratch/o.txt"
$program --input "$scratch/o.txt" --output-prefix "$scratch/o" $bytes 2>"$scratch/err"
same "$(grep -c '^note: --output-prefix .* is there already' "$scratch/err")" 2
same "$(od -An -tu2 "$scratch/o_text_document.bin" | xargs)" "110 101 119 10"
END
script files_that_are_replaced_are_named_and_stay_until_then

# Megatron's Llama2Tokenizer adds BOS, its SentencePieceTokenizer does not.
cat >"$scratch/test" <<'END'
sp=tests/golden/tokenizer/bpe.model
printf '{"text":"a"}\n' >"$scratch/s.jsonl"
a=$(printf a | $program --encode --tokenizer-type SentencePieceTokenizer --tokenizer-model $sp)
same "$(printf a | $program --encode --tokenizer-type Llama2Tokenizer --tokenizer-model $sp)" "$a"
ids() { od -An -tu2 "$scratch/s_text_document.bin" | xargs; }
$program --input "$scratch/s.jsonl" --output-prefix "$scratch/s" --tokenizer-type Llama2Tokenizer --tokenizer-model $sp
same "$(ids)" "1 $a"
$program --input "$scratch/s.jsonl" --output-prefix "$scratch/s" --tokenizer-type SentencePieceTokenizer \
    --tokenizer-model $sp 2>"$scratch/err"
same "$(ids)" "$a"
grep -q 'note: documents begin without BOS' "$scratch/err"
mkdir "$scratch/sp"
cp $sp "$scratch/sp/tokenizer.model"
echo '{"add_bos_token":false}' >"$scratch/sp/tokenizer_config.json"
for type in Llama2Tokenizer SentencePieceTokenizer; do
    rm "$scratch/s_text_document.bin" "$scratch/s_text_document.idx"
    $program --input "$scratch/s.jsonl" --output-prefix "$scratch/s" --tokenizer-type $type \
        --tokenizer-model "$scratch/sp" 2>"$scratch/err"
    same "$(ids)" "$a"
    same "$(cat "$scratch/err")" ""
done
END
script sentencepiece_documents_begin_with_bos_where_it_is_asked_for

exit $failed
