#!/bin/sh
# A surprise about Hugging Face transformers: from version 5 on `add_bos_token` and `add_eos_token` of
# tokenizer_config.json have no effect on a folder with a tokenizer.json; version 4 obeys them.
#
#   A good guess:  a folder gives the same ids in both versions, and a Llama tokenizer with both fields true puts BOS
#                  and EOS around a text.
#   What happens:  4.57 replaces the post-processor of tokenizer.json by one that follows the two fields. 5.24 takes
#                  the post-processor as it stands in tokenizer.json, here none, and prints nothing; its tokenizer then
#                  says that add_bos_token is false. A model trained with BOS on one version is asked without it on the
#                  other.
#
# usage: findings/transformers_5_ignores_add_bos_token.sh   (python3 with venv and pip, and a connection; two minutes)
# Output seen:
#   transformers 4.57.1: LlamaTokenizerFast gives [0, 2, 3, 1], add_bos_token is True
#   transformers 5.24.0: LlamaTokenizer gives [2, 3], add_bos_token is False
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
mkdir "$work/model" || exit 1

# A vocabulary of four tokens: <s> and </s> are BOS and EOS; no post-processor.
cat >"$work/model/tokenizer.json" <<'JSON'
{"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
 "post_processor": null, "decoder": null,
 "added_tokens": [
  {"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
   "special": true},
  {"id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
   "special": true}],
 "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
           "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
           "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3}, "merges": []}}
JSON
cat >"$work/model/tokenizer_config.json" <<'JSON'
{"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true,
 "add_eos_token": true}
JSON
echo '{"model_type": "llama"}' >"$work/model/config.json"
cat >"$work/ids.py" <<'PYTHON'
import sys
import transformers
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(f"transformers {transformers.__version__}: {type(tokenizer).__name__} gives {tokenizer('ab').input_ids}, "
      f"add_bos_token is {tokenizer.add_bos_token}")
PYTHON

for version in 4.57.1 5.24.0; do
    python3 -m venv "$work/$version" &&
        "$work/$version/bin/pip" install -q "transformers==$version" >"$work/pip" 2>&1 || exit 77
    "$work/$version/bin/python" "$work/ids.py" "$work/model" 2>"$work/err" || {
        tail -n 1 "$work/err"
        exit 1
    }
done | tee "$work/seen"
[ "$(wc -l <"$work/seen")" = 2 ] || exit 77
[ "$(sed 's/.* gives //; s/, add_bos.*//' "$work/seen" | tr '\n' ' ')" = '[0, 2, 3, 1] [2, 3] ' ]
