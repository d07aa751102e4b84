#!/bin/sh
# Every rule of tests/lint reports a file that breaks it, and a project that follows all rules passes.
set -u
lint=$PWD/tests/lint
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

lines() { awk -v n="$1" -v text="$2" 'BEGIN { while (n-- > 0) print text }'; }

# A project that follows every rule: a function of 60 lines, a line of 120 characters.
write_good() {
    rm -rf ./*
    mkdir -p tests data/base data/tokens data/run
    {
        printf '/* megatron.c\n *\n *   §1   errors and memory\n *   §2a  kernels: norms\n *   §2b  kernels: attention\n */\n'
        printf '#include "megatron.h"\n\n/* ==== §1 errors and memory ==== */\n\n'
        printf 'static const int table[] = {\n' && lines 80 '    1,' && printf '};\n\n'
        printf 'static int a_long_name(int first,\n                       int second) {\n'
        lines 58 '    first += second;'
        printf '}\n\n/* ==== §2a kernels: norms ==== */\n/* ==== §2b kernels: attention ==== */\n'
        printf '// § %s\n' "$(lines 115 x | tr -d '\n')"
    } >megatron.c
    cat >megatron.h <<'H'
#ifndef MEGATRON_H
#define MEGATRON_H
/* Of a group, the first has the comment. */
int mt_first(int a);
int mt_second(int a,
              int b);

typedef struct mt_thing {
    int (*call)(int a);
} mt_thing;

typedef int (*mt_callback)(int a);

// A function in a header.
static inline int mt_third(int a) {
    return mt_first(a);
}
#endif
H
    printf 'all:\n\ttrue\n' >Makefile
    printf 'mkdtemp("/tmp/test-XXXXXX");\n' >tests/test_thing.c
}

# expect NAME PATTERN: the lint fails and says just this, in one line.
expect() {
    if output=$("$lint" . 2>&1); then
        echo "not ok $1: passed"
    elif [ "$(echo "$output" | wc -l)" = 1 ] && echo "$output" | grep -q "$2"; then
        echo "ok $1"
    else
        echo "not ok $1: expected $2, got: $output"
    fi
    write_good
}

write_good
if output=$("$lint" . 2>&1); then echo "ok good_code_passes"; else echo "not ok good_code_passes: $output"; fi

printf '# why\nall | likeliest|odd( one)? | argmax\ncode | (/\\*|//) what | the noun\n' >tests/lint_words
echo 'int *mt_likeliest; // why' >data/base/thing.c
expect banned_word_in_a_name '^data/base/thing.c:1: banned-words: "likeliest": write argmax'

printf '# why\nall | likeliest|odd( one)? | argmax\n' >tests/lint_words
printf 'Oddly, the Odd one\n' >notes.md
expect banned_words_in_a_note '^notes.md:1: banned-words: "odd_one": write argmax'

printf 'code | (/\\*|//) what | the noun\n' >tests/lint_words
printf '// What it is\n' >notes.md
if output=$("$lint" . 2>&1); then echo "ok code_words_are_not_for_notes"; else echo "not ok code_words: $output"; fi
printf '// What it is\n' >data/base/thing.c
expect banned_words_that_begin_a_comment '^data/base/thing.c:1: banned-words: "//_what": write the noun'

sed -i.bak '/^ \*   §2b/d' megatron.c && rm ./*.bak
expect banner_missing_in_contents '^megatron.c:[0-9]*: contents: "§2b kernels: attention" is not in the contents'

sed -i.bak 's/^ \*   §2b .*/&\n *   §3  routing/' megatron.c && rm ./*.bak
expect contents_without_banner '^megatron.c:6: contents: "§3 routing" has no banner'

sed -i.bak 's/^ \*   §2a .*/ *   §2a  kernels: softmax/' megatron.c && rm ./*.bak
expect title_differs_from_contents '^megatron.c:[0-9]*: contents: .*norms.*softmax'

sed -i.bak '1i /* ==== §1 errors and memory; §2a norms ==== */' megatron.h && rm ./*.bak
expect header_title_that_the_code_does_not_have '^megatron.h:1: sections: megatron.c has no section "§2a norms"'

printf 'See §2b, §1 and §2c.\n' >notes.md
expect reference_to_no_section '^notes.md:1: sections: megatron.c has no section "§2c"'

printf '\nint mt_bare(int a);\n' >>megatron.h
expect prototype_without_comment '^megatron.h:20: undocumented: mt_bare'

printf '#pragma once\n\nint mt_bare(int a,\n            int b);\n' >data/base/thing.h
expect prototype_of_two_lines_without_comment '^data/base/thing.h:3: undocumented: mt_bare'

for word in TODO FIXME XXX HACK; do
    echo "// $word: later" >data/base/thing.c
    expect "unfinished_$word" '^data/base/thing.c:1: unfinished'
done

for path in /home/me/x /root/x /work/x /tmp/x; do
    echo "const char *path = \"$path\";" >data/base/thing.c
    expect "private_path_$path" '^data/base/thing.c:1: private-path'
done

echo '#include "../tokens/chat.h"' >data/base/thing.c
expect include_of_a_later_wing '^data/base/thing.c:1: wings: base/ comes before tokens/, .*include data/tokens/chat.h'

echo '#include "../../data/tokens/chat.h"' >data/base/thing.c
expect include_of_a_later_wing_by_way_of_the_root '^data/base/thing.c:1: wings: base/ comes before tokens/'

printf '#pragma once\n\n# include "data/run/launch.h" // why\n' >data/tokens/thing.h
expect include_of_a_later_wing_from_the_root '^data/tokens/thing.h:3: wings: tokens/ comes before run/'

printf '#include "../base/file.h"\n#include "thing.h"\n#include "../../megatron.h"\n' >data/run/thing.c
if output=$("$lint" . 2>&1); then echo "ok include_of_earlier_wings"; else echo "not ok include_of_earlier_wings: $output"; fi
write_good

echo 'int x;' >data/thing.c
expect source_outside_of_the_wings '^data/thing.c:1: wings: stands in no wing of data/: base tokens'
mkdir -p data/other && echo 'int x;' >data/other/thing.h
expect header_in_another_folder '^data/other/thing.h:1: wings: stands in no wing'

printf '\tint x;\n' >data/base/thing.c
expect tab '^data/base/thing.c:1: tab'

echo 'int x; ' >data/base/thing.c
expect trailing_space '^data/base/thing.c:1: trailing-space'

{ printf '// ' && lines 118 x | tr -d '\n' && echo; } >data/base/thing.c
expect line_of_121_characters '^data/base/thing.c:1: line-length: 121'

echo 'banned-words data/base/thing.c odd_one a table reads best in one piece' >tests/lint_exceptions
expect exception_that_excuses_nothing '^tests/lint_exceptions:1: exception: .*excuses nothing'

printf 'all | odd one | argmax\n' >tests/lint_words
echo 'int odd_one; // the odd one' >data/base/thing.c
echo 'banned-words data/base/thing.c odd_one the name of a paper' >tests/lint_exceptions
if output=$("$lint" . 2>&1); then echo "ok exception_excuses_words"; else echo "not ok exception_excuses_words: $output"; fi
write_good

sizes=$("$lint" --sizes . | tr -s ' ')
if echo "$sizes" | grep -qx 'megatron.c [0-9]* 1 60.0 60 a_long_name' && echo "$sizes" | grep -qx 'megatron.h 18 1 3.0 3 mt_third'; then
    echo "ok sizes_are_printed"
else
    echo "not ok sizes_are_printed: $sizes"
fi
