#!/bin/sh
# The notes are true: the code that they quote is the source's, what they name exists, and their experiments print what
# the pages say. Marks in a page, which a reader does not see, say what is checked:
#
#   <!-- quote ... -->        the block below is that of notes/weave.awk
#   <!-- diff ... -->         so is this one, between fences
#   <!-- run -->              the block below is run; all blocks of a page are one script
#   <!-- prints -->           the block or table below is what the block before it printed; "..." is any text. Numbers
#                             may differ by one in the last digit, and by 5% with <!-- prints 5% -->
#
# Every other number in the text has a source, as tests/note_numbers.awk says: an equation, a block of the page, the
# section of the lab notes that the paragraph links, or a comment with an equation or a reason.
#
# MT_NOTES names pages to check; by default all are.
set -u
. tests/suite.sh
root=$(pwd)
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' # the numbers are the CPU's
if ! [ -x "${MT_BIN:-.}/data/preprocess" ]; then
    echo "skipped: data/preprocess is not built"
    exit 77
fi
pages=${MT_NOTES:-$(ls notes/*.md notes/steps/*.md | grep -v lab.md)}

# make_tree FOLDER: a folder that looks like the project's to a command: links to its files, and to the programs of
# this build.
make_tree() {
    mkdir -p "$1/data" && ln -s "$root"/data/* "$1/data/" || return 1
    for file in Makefile megatron.c megatron.h notes tests launch.sh README.md cuda; do
        ln -s "$root/$file" "$1/" || return 1
    done
    ln -s "$train" "$1/train" && ln -s "$infer" "$1/infer" &&
        ln -sf "$(dirname "$train")/data/preprocess" "$1/data/preprocess" && mkdir "$1/build" || return 1
    [ -z "${MT_EXAMPLES:-}" ] || ln -s "$(cd "$MT_EXAMPLES/../.." && pwd)" "$1/build/default"
}

has_mpi() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null
}

# Open MPI's option, which MPICH does not know.
mpi_options() {
    if mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte'; then cat; else sed 's/--oversubscribe //'; fi
}

# quotes_are_the_source PAGE...
quotes_are_the_source() {
    for page; do
        awk -f notes/weave.awk "$page" >"$work/page" 2>"$work/err" && diff "$page" "$work/page" >"$work/out" || {
            echo "$page: quotes another source; \`make notes\` writes what it is now" >>"$work/err"
            return 1
        }
    done
}

# Prints all words of the code, all options, and the words of each section of megatron.c: kind, name, and the section's
# tag.
list_known() {
    { # also a variable of a library
        ls megatron.[ch] data/*/*.[ch] cuda/* tests/*.[ch] tests/*.sh data/scripts/*.sh notes/*.c notes/steps/*.c \
            notes/examples/*.c* train.c infer.c Makefile launch.sh | grep -v test_notes | xargs cat
        echo OPENBLAS_CORETYPE
        ls tests/test_* | sed 's|tests/test_||' # suites
    } | tr -cs 'A-Za-z0-9_' '\n' | sort -u | awk '{ print "word\t" $0 }'
    ls notes/[0-9]*.md | sed 's|notes/0*\([0-9][0-9]*\)-.*|chapter\t\1|'
    { # and those of mpirun and compute-sanitizer
        "$train" --help && "$infer" --help && "$tree/data/preprocess" --help && cat Makefile data/scripts/probe.sh &&
            echo '--hostfile --oversubscribe --tool'
    } 2>/dev/null | tr -cs 'a-z0-9-' '\n' | grep '^--[a-z]' | sort -u | awk '{ print "option\t" $0 }'
    awk '/^\/\* =+ §/ { n = split($0, tags, "§"); for (i = 2; i <= n; i++) sub(/ .*/, "", tags[i]) }
        /^[A-Za-z]|^ *bool \(\*|^    MT_/ || FILENAME == "megatron.h" { # definitions, operations, roles; prototypes
            gsub(/[^A-Za-z0-9_]+/, " ")
            for (i = 2; i <= n; i++) print tags[i] " " $0
        }' megatron.c megatron.h | awk '
        function emit(word, top) {
            print "section\t" word "\t" $1
            if (sub(/[a-z]$/, "", top)) print "section\t" word "\t" top
        }
        { for (i = 2; i <= NF; i++) { emit($i, $1); if (sub(/^mt_cpu_/, "", $i)) emit($i, $1) } }' | sort -u
}

# Filters lines "PAGE: there is no option NAME": without those of other programs' names that train takes.
unless_taken() {
    while IFS= read -r line; do
        name=${line##* there is no option }
        case $line in *' there is no option '*)
            "$train" "${name% }" </dev/null 2>&1 |
                grep -q 'unknown option\|is named\|is not supported\|has no meaning' || continue ;;
        esac
        echo "$line"
    done
}

# names_exist PAGE...: files that are linked, files and code named between backticks, sections and options.
names_exist() {
    [ -s "$work/known" ] || list_known >"$work/known"
    for page; do awk -f tests/note_names.awk "$page"; done | sort -u >"$work/names"
    awk -F '\t' '
        FNR == NR { known[$1, $2, $3] = 1; next }
        $1 == "word" || $1 == "option" || $1 == "section" || $1 == "chapter" {
            if (!(($1, $3, $4) in known)) printf "%s: there is no %s %s %s\n", $2, $1, $3, $4
        }
        $1 == "anchor" { printf "%s: there is no anchor %s\n", $2, $3 }' "$work/known" "$work/names" |
        unless_taken >"$work/err"
    grep '^file' "$work/names" | while read -r kind from word; do
        path=$tree/$word
        case $word in /*) path=$word ;; esac
        [ -e "$path" ] || [ -e "$path.c" ] || echo "$from: there is no $kind $word" # .c: or a program
    done >>"$work/err"
    [ -s "$work/names" ] && ! [ -s "$work/err" ]
}

# numbers_have_sources PAGE...
numbers_have_sources() {
    for page; do awk -f tests/note_numbers.awk "$page" || :; done >"$work/err" 2>&1
    ! [ -s "$work/err" ]
}

# The lab notes: each section names the machine of its measurements, or counts, and a command.
measurements_can_be_repeated() {
    awk '
        function end_section() {
            if (name == "") return
            if (text !~ /H100|H200|EPYC|core|counted/) lacks("a machine")
            if (text !~ /`[^`]*(\.\/train|build\/|make |tests\/)[^`]*`|    \.\/train/) lacks("a command")
        }
        function lacks(what) { print "notes/lab.md: " name " lacks " what; failed = 1 }
        /^## / { end_section(); name = $0; text = "" }
        { text = text $0 " " }
        END { end_section(); exit failed }' "${1:-notes/lab.md}" >"$work/err"
}

# has_form PAGE...: a chapter asks a question, shows a picture, has the same sections as all others, quotes 10 to 30
# lines in all, and answers each of its exercises.
has_form() {
    for page; do
        case $page in notes/[0-9]* | */02-parameters.md) ;; *) continue ;; esac
        awk '
            BEGIN {
                parts = "The idea,The derivation,The lines,Try it,What it costs,Where it is,Exercises"
                wanted = split(parts, heading, ",")
            }
            { sub(/^## The ladder$/, "## The lines") } # of kernels
            /^## / { if ($0 == "## " heading[seen + 1]) seen++ }
            !seen && /\?/ { asks = 1 }
            !seen && /^!\[.*\.svg\)/ { shows = 1 }
            /^[^ ]/ { in_quote = /^<!-- quote / }
            in_quote && /^    / { quoted++; in_section += seen == 3 }
            seen == 4 && /^<!-- run/ { runs++ }
            /^<details>/ { quizzes++ }
            seen == 5 && /[0-9]/ { costs++ }
            seen == 5 && /[Mm]easure|took/ { measures++ }
            answers == "" && /^(## |\*\*)Answers/ { answers = " " }
            answers != "" { answers = answers $0 " " }
            seen == wanted && answers == "" && /^[0-9]\. / { exercises++ }
            function complain(text) { print FILENAME " " text; failed = 1 }
            function lacks(what) { complain("lacks " what) }
            END {
                if (seen < wanted) lacks("the section \"" heading[seen + 1] "\", in this order")
                if (!asks || !shows) lacks("a question, or a picture, before the idea")
                if (in_section < 10) lacks("10 lines of the source in the section \"The lines\"")
                if (quoted > 30) complain("quotes " quoted " lines of the source, more than 30")
                if (!runs || !costs) lacks("an experiment that is run, or numbers of its cost")
                if (!measures) lacks("a measurement of its cost")
                if (exercises + quizzes < 3 || !exercises) lacks("three exercises")
                for (i = 1; i <= exercises; i++)
                    if (index(answers, " " i ". ") == 0) lacks("the answer to exercise " i)
                exit failed
            }' "$page" >"$work/err" || return 1
    done
}

# has_path_form PAGE...: a chapter of the path of notes/README.md begins with a step that does not fit or is too slow,
# which a command shows; has three quizzes with folded answers, one of them with a command at least; and ends with a
# rule of thumb in a box, with a number for an H100 and for two cores, and when not to follow it.
has_path_form() {
    for page; do
        case $page in
        */00-*.md | */07-*.md | */08-*.md | */09-*.md | */11-*.md | */15-*.md | */21-*.md) ;;
        *) continue ;;
        esac
        awk '
            /^## / { heading = $0; box = "" }
            heading == "" && /^\*\*The problem\.\*\*/ { problem = 1 }
            heading == "" && problem && /^<!-- prints/ { shown = 1 }
            /^<!-- run/ { run = 1 }
            /^<details>/ { open = 1; quizzes++; runs += run; run = 0 }
            /^<\/details>/ { open = run = 0 }
            heading == "## Exercises" && /^<details>/ { late = 1 }
            sub(/^> /, "") { box = box $0 " " }
            function lacks(what) { print FILENAME " lacks " what; failed = 1 }
            END {
                if (!shown) lacks("\"**The problem.**\", and a command that shows it, before the idea")
                if (quizzes < 3 || !runs || open || late) lacks("three quizzes with folded answers, one with a command")
                if (heading != "## Takeaway") lacks("the section \"Takeaway\" at its end")
                if (box !~ /^\*\*/ || box !~ /\*H100\*/ || box !~ /\*Two cores\*/ || box !~ /\*Not\* /)
                    lacks("a rule in a box, for an \"*H100*\", for \"*Two cores*\", and when \"*Not*\"")
                exit failed
            }' "$page" >"$work/err" || return 1
    done
}

# A chapter of the path without one of these has not the form.
lacks_a_part_of_the_path() {
    for edit in 's/^\*\*The problem\.//' '1,/^## The idea/s/^<!-- prints//' 's/^<details>//' 's/^<.details>//' \
        's/^## Takeaway/## Summary/' 's/^> \*\*/> /' 's/^\(> .*\)\*H100\*/\1/' 's/\*Two cores\*//' \
        's/^> \*Not\*/> Not/'; do
        sed "$edit" notes/00-megatron-in-one-file.md >"$work/00-page.md"
        if has_path_form "$work/00-page.md"; then
            echo "has_path_form accepts $edit"
            return 1
        fi
    done
}

# Commands that a page shows without a model, "./train --option ...", train a small one, unless a mark runs them or they
# need a file.
short_commands_are_accepted() {
    model='--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 --seq-length 32
        --global-batch-size 8 --train-iters 1 --lr 1e-3 --eval-iters 0 --device cpu --swiglu --normalization RMSNorm
        --position-embedding-type rope --disable-bias-linear'
    awk -v model="$(echo $model)" -v has_mpi="$(has_mpi && echo 1)" '
        /^<!-- (quote|run|prints)/ { marked = 1 }
        /^[^ ]/ && !/^<!-- (quote|run|prints)/ { marked = 0 }
        marked || !/^    ( |\.\/train|mpirun .*\.\/train)/ { command = ""; next }
        { command = command $0 }
        !/ \.\.\.$/ { next }
        command !~ /--(data-path|load|hf-config)/ && (has_mpi || command !~ /mpirun/) {
            sub(/ \.\.\.$/, "", command)
            if (command ~ /main-grads-dtype/) command = command " --bf16"
            gsub(/  +/, " ", command)
            sub(/mpirun/, "mpirun --oversubscribe", command)
            print command " " model
        }
        { command = "" }' "$@" | mpi_options >"$work/commands"
    [ -s "$work/commands" ] && while read -r command; do
        (cd "$tree" && sh -c "$command") >"$work/out" 2>"$work/err" </dev/null && continue
        echo "fails: $command" >>"$work/err"
        return 1
    done <"$work/commands"
}

# experiments PAGE FOLDER: runs the blocks of a page and compares what they print. FOLDER gets out, err and the tree.
experiments() {
    make_tree "$2/tree" && mkdir "$2/steps" || return 1
    awk -v to="$2/steps/" -v has_mpi="$(has_mpi && echo 1)" -f tests/note_steps.awk "$1" 2>"$2/err" || return 1
    mpi_options <"$2/steps/script" >"$2/script"
    (cd "$2/tree" && sh ../script) >"$2/out" 2>"$2/err" </dev/null || return 1
    for want in "$2"/steps/want.*; do
        [ -e "$want" ] || continue
        number=${want##*.}
        awk -v number="$number" '/^@@@ / { on = $2 == number; next } on' "$2/out" >"$2/steps/got"
        awk -v page="$1" -v tolerance="$(cat "$2/steps/tolerance.$number")" -f tests/note_compare.awk \
            "$want" "$2/steps/got" >"$2/err" || return 1
    done
}

# A page with one mark of each kind.
write_page() {
    cat <<'END'
Code, `mt_slots_place` (§9b), with `--num-layers`; [a link](page.md) and [one to a section](page.md#a-section).
Chapters: chapter 2, [chapter 7](07-page.md).
Its 8 rows of 4 bytes are 8 x 4 = 32 bytes, and 64 rows take 0.256 KB.

    bytes = 256 n

<!-- 64 * 4 / 1000 = 0.256; 64 * 4 = 256 -->

## A section

<!-- quote megatron.c mt_slots_place -->

<!-- run -->

    printf 'one %s\ntwo 2\n' 1.25

<!-- prints -->

| | |
|---|---|
| one | 1.25 |
| two | 2 |
END
}

# A chapter without one of its parts, or with its quotes twice, has not the form.
lacks_a_part() {
    for edit in '/^!\[/d' 's/^## The derivation/## Derivation/' 's/^3\. `mt_model/3 `mt_model/' '/^<!-- run/d' \
        '/^    .*;/d' '/^    .*;/p' 's/Measured//' '/^2\. AdamW/d'; do
        sed "$edit" notes/02-parameters.md >"$work/02-parameters.md"
        if has_form "$work/02-parameters.md"; then
            echo "has_form accepts $edit"
            return 1
        fi
    done
}

has_a_bad_command() {
    echo '    ./train --recompute-granularity selective --recompute-modules nothing ...' >"$work/bad.md"
    short_commands_are_accepted "$work/bad.md" || return 0
    echo "short_commands_are_accepted accepts a module that does not exist"
    return 1
}

# passes CHECK EDIT: the page passes the check when it is edited.
passes() {
    rm -rf "$work/planted" && mkdir "$work/planted" && touch "$work/planted/07-page.md"
    sed "$2" "$work/page.md" >"$work/planted/page.md"
    case $1 in
    experiments) experiments "$work/planted/page.md" "$work/planted" && return 0 ;;
    *) "$1" "$work/planted/page.md" && return 0 ;;
    esac
    [ "$1" = experiments ] && cp "$work/planted/err" "$work/err"
    return 1
}

# sees CHECK EDIT PATTERN: the edit is an error, and the check reports it.
sees() {
    if passes "$1" "$2"; then
        echo "$1 accepts $2"
        return 1
    fi
    says "$3" "$work/err"
}

the_checks_see_errors() {
    write_page | awk -f notes/weave.awk >"$work/page.md" || return 1
    for test in quotes_are_the_source names_exist numbers_have_sources experiments; do passes $test '' || return 1; done
    sees quotes_are_the_source 's/MT_KEEP/MT_KEEPS/' 'quotes another source' &&
        sees quotes_are_the_source 's/c mt_slots_place/c mt_nothing/' 'no definition of mt_nothing' &&
        sees quotes_are_the_source 's/_place -->/_place from "bool recompute" to "nothing" -->/' 'no lines from' &&
        sees names_exist 's/`mt_slots_place`/`mt_slots_places`/' 'no word mt_slots_places' &&
        sees names_exist 's/--num-layers/--num-layer/' 'no option --num-layer ' &&
        sees names_exist 's/§9b/§9c/' 'no section mt_slots_place 9c' &&
        sees names_exist 's/(page.md)/(nothing.md)/' 'no file .*nothing.md' &&
        sees names_exist 's/chapter 2/chapter 99/' 'no chapter 99' &&
        sees names_exist 's/chapter 7/chapter 8/' 'no chapter 8 in the file 07' &&
        sees numbers_have_sources 's/8 x 4/9 x 4/' "= 32 does not hold: 36" &&
        sees numbers_have_sources 's/take 0.256/take 0.265/' "0.265 has no source" &&
        sees numbers_have_sources 's/64 rows/65 rows/' "65 has no source" &&
        sees numbers_have_sources 's/256 n/257 n/' "257 has no source" &&
        sees numbers_have_sources 's/-- 64/-- 65/' "65 . 4 . 1000 = 0.256 does not hold: 0.26" &&
        sees numbers_have_sources 's/and 64.*//' "the text has no 0.256" &&
        lacks_a_part && lacks_a_part_of_the_path && has_a_bad_command &&
        sees names_exist 's/#a-section/#another/' 'no anchor .*another' &&
        passes experiments 's/| 1.25/| 1.26/' && # one in the last digit
        sees experiments 's/| 1.25/| 1.27/' 'says "one 1.27", and its commands print "one 1.25"' &&
        passes experiments 's/| 1.25/| 1.30/; s/prints -/prints 5% -/' &&
        sees experiments 's/| 1.25/| 1.32/; s/prints -/prints 5% -/' 'says "one 1.32"' &&
        sees experiments 's/| 2/| 3/' 'says "two 3", and its commands print "two 2"' &&
        sees experiments '/^| two/d' 'its commands print "two 2" behind what the page says' &&
        sees experiments 's/two 2\\n//' 'says "two 2", and its commands print ""' &&
        sees experiments 's/    printf/    nothing; printf/' 'nothing: *not found'
}

# Two pages are run at a time; a folder in $work says who has taken which.
run_pages() {
    for page in $pages; do
        folder=$work/$(basename "$page" .md)
        grep -q '^<!-- run' "$page" && mkdir "$folder" 2>/dev/null || continue
        experiments "$page" "$folder" && touch "$folder/passed"
    done
}

passed() {
    cp "$1/out" "$1/err" "$work/" 2>/dev/null
    [ -e "$1/passed" ]
}

tree=$work/tree
make_tree "$tree" || exit 1
# shellcheck disable=SC2086
{
    check quotes_are_the_source quotes_are_the_source $pages README.md
    check names_exist names_exist $pages README.md notes/lab.md
    check numbers_have_sources numbers_have_sources $pages README.md
    check measurements_can_be_repeated measurements_can_be_repeated
    check chapters_have_one_form has_form $pages
    check the_path_has_one_form has_path_form $pages
    [ -n "${MT_NOTES:-}" ] || check short_commands_are_accepted short_commands_are_accepted $pages
}
[ -n "${MT_NOTES:-}" ] || check the_checks_see_errors the_checks_see_errors
run_pages &
run_pages
wait $!
for page in $pages; do
    grep -q '^<!-- run' "$page" || continue
    folder=$work/$(basename "$page" .md)
    [ -d "$folder" ] && check "experiments_of_$(basename "$page" .md | tr '-' '_')" passed "$folder"
done
exit $failed
