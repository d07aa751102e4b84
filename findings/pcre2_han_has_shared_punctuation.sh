#!/bin/sh
# A surprise about PCRE2: \p{Han} also matches characters that several scripts share, such as the ideographic full stop,
# U+3002. In Rust's expressions, and so in tiktoken's patterns, it matches characters of the script Han alone.
#
#   A good guess:  a vocabulary's pattern with \p{Han}, such as that of Kimi-K2, splits texts alike in PCRE2 and in
#                  tiktoken, for which it was written.
#   What happens:  since 10.40 PCRE2 reads \p{Han} as \p{scx:Han}, script extensions. A word of Chinese then has the
#                  full stop in it, and merges across it give other tokens. \p{sc:Han} is the script alone.
#
# tiktoken gets one merge, of the last byte of U+4EAC and the first of U+3002: it applies only within one word.
#
# usage: findings/pcre2_han_has_shared_punctuation.sh   (python3 with venv and pip, a connection; half a minute)
# Output seen:
#   PCRE2 10.47, tiktoken 0.14.0
#   PCRE2 \p{Han}+: U+5317 U+4EAC U+3002 U+4E1C U+4EAC
#   PCRE2 \p{sc:Han}+: U+5317 U+4EAC | U+4E1C U+4EAC
#   tiktoken \p{Han}+: the merge across U+3002 applies: False
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/han.py" <<'PYTHON'
import importlib.metadata
import pcre2
import tiktoken

text = "\u5317\u4eac\u3002\u4e1c\u4eac"
print(f"PCRE2 {pcre2.__libpcre2_version__.split()[0]}, tiktoken {importlib.metadata.version('tiktoken')}")
for pattern in (r"\p{Han}+", r"\p{sc:Han}+"):
    words = [" ".join(f"U+{ord(c):04X}" for c in match.group()) for match in pcre2.finditer(pattern, text)]
    print(f"PCRE2 {pattern}: {' | '.join(words)}")
ranks = {bytes([i]): i for i in range(256)}
ranks["\u4eac".encode()[-1:] + "\u3002".encode()[:1]] = 256
encoding = tiktoken.Encoding("merge", pat_str=r"\p{Han}+|[^\p{Han}]+", mergeable_ranks=ranks, special_tokens={})
print(f"tiktoken \\p{{Han}}+: the merge across U+3002 applies: {256 in encoding.encode(text)}")
PYTHON
python3 -m venv "$work/venv" &&
    "$work/venv/bin/pip" install -q pcre2==0.7.1 tiktoken==0.14.0 >"$work/pip" 2>&1 || exit 77
"$work/venv/bin/python" "$work/han.py" >"$work/seen" 2>"$work/err" || {
    tail -n 1 "$work/err"
    exit 1
}
cat "$work/seen"
grep -qF 'PCRE2 \p{Han}+: U+5317 U+4EAC U+3002 U+4E1C U+4EAC' "$work/seen" &&
    grep -qF 'PCRE2 \p{sc:Han}+: U+5317 U+4EAC | U+4E1C U+4EAC' "$work/seen" &&
    grep -q 'applies: False$' "$work/seen"
