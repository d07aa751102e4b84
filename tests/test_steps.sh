#!/bin/sh
# The eight steps to notes/mini.c: `make mini` builds them without a warning, and each trains to the losses of step 1 on
# its layouts; a wrong cut in any of them is seen; each adds at most 150 lines to the former; and the pages are their
# differences.
set -u
. tests/suite.sh
needs_mpi
if ! command -v mpicc >/dev/null; then
    echo "skipped: mpicc is absent"
    exit 77
fi
steps=notes/steps
export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" # the programs leave their memory to the end of the process

TP=--tensor-model-parallel-size
SP=--sequence-parallel
PP=--pipeline-model-parallel-size
VP=--num-virtual-stages-per-pipeline-rank
CP=--context-parallel-size
EP=--expert-model-parallel-size

# build SOURCE PROGRAM FLAGS...
build() {
    source=$1 program=$2
    shift 2
    mpicc -std=c11 -Wall -Wextra "$@" -o "$program" "$source" -lm
}

# losses RANKS PROGRAM OPTIONS...: prints "LOSS NORM" of three steps, or of as many as an option says.
losses() {
    number=$1 program=$2
    shift 2
    set -- "$program" --train-iters 3 "$@"
    # shellcheck disable=SC2046
    [ "$number" = 1 ] || set -- $(mpirun_here) -np "$number" "$@"
    "$@" 2>"$work/err" </dev/null | sed -n 's/^step.* loss \([0-9.]*\)  grad norm \([0-9.]*\)$/\1 \2/p'
}

# agree STEPS TOLERANCE FILE FILE: losses and norms of all steps, relative. The programs compute in float64, where
# rounding is below 1e-12; the smallest error of a cut that is known here, one number of a shard, is 1e-8.
agree() {
    [ "$(wc -l <"$3")" = "$1" ] && [ "$(wc -l <"$4")" = "$1" ] || return 1
    paste "$3" "$4" | awk -v tolerance="$2" '
        { for (i = 1; i < 3; i++) {
              d = $i / $(i + 2) - 1; if (d < 0) d = -d
              if (!(d <= tolerance)) { print "step " NR ": " $i " and " $(i + 2); bad = 1 } } }
        END { exit bad }'
}

# equal_experts STEP RANKS OPTIONS...: this layout of a step trains as step 1, with experts.
equal_experts() {
    step=$1 ranks=$2
    shift 2
    losses "$ranks" "$work/step-$step" --num-experts 4 "$@" >"$work/losses"
    agree 3 1e-10 "$work/losses" "$work/experts" >"$work/out"
}

# equal STEP RANKS OPTIONS...: it does, without and with experts.
equal() {
    step=$1 ranks=$2
    shift 2
    losses "$ranks" "$work/step-$step" "$@" >"$work/losses"
    agree 3 1e-10 "$work/losses" "$work/dense" >"$work/out" && equal_experts "$step" "$ranks" "$@"
}

# In a folder with the Makefile and the programs, and nothing else. Leaves the programs as $work/step-1 to $work/step-8.
make_mini() {
    mkdir -p "$work/alone/$steps" && cp Makefile "$work/alone" && cp notes/mini.c "$work/alone/notes" &&
        cp -P $steps/*.c "$work/alone/$steps" || return 1
    (cd "$work/alone" && env -i PATH="$PATH" HOME="${HOME:-/}" make -s mini WERROR=1) >"$work/out" 2>"$work/err" ||
        return 1
    for step in 1 2 3 4 5 6 7 8; do
        ln -s "$work/alone/build/default/$steps/$step" "$work/step-$step" && [ -x "$work/step-$step" ] || return 1
    done
    [ -x "$work/alone/build/default/notes/mini" ]
}

step_1_equals_pytorch() {
    for family in llama mixtral; do
        shape=
        [ $family = llama ] || shape='--num-experts 4 --ffn-hidden-size 32 --rotary-base 1000000'
        # shellcheck disable=SC2086
        losses 1 "$work/step-1" --load tests/golden/hf/$family --tokens-file tests/golden/hf/$family/tokens.i32 $shape \
            --adam-beta2 0.95 --weight-decay 0.1 --global-batch-size 4 --train-iters 10 >"$work/losses"
        awk '/"losses"/ { n = 0; into = 1 } /"grad_norms"/ { n = 0; into = 2 } /\]/ { into = 0 }
            into && /^ *[0-9]/ { gsub(/[ ,]/, ""); value[into, ++n] = $0 }
            END { for (i = 1; i <= n; i++) print value[1, i], value[2, i] }' tests/golden/hf/$family/expected.json \
            >"$work/pytorch"
        agree 10 1e-6 "$work/losses" "$work/pytorch" >"$work/out" || return 1
    done
}

step_1_needs_no_mpi() {
    ${CC:-cc} -std=c11 -pedantic -Wall -Wextra -Werror -o "$work/without-mpi" $steps/1.c -lm >"$work/out" 2>"$work/err"
}

# sees MODEL STEP RANKS EDIT OPTIONS...: the edit, a wrong cut, does not change the losses on one rank, and does on this
# layout.
sees() {
    model=$1 step=$2 ranks=$3 edit=$4
    shift 4
    sed "$edit" $steps/"$step".c >"$work/wrong-$step.c"
    if cmp -s $steps/"$step".c "$work/wrong-$step.c"; then
        echo "the edit changes nothing: $edit"
        return 1
    fi
    build "$work/wrong-$step.c" "$work/wrong-$step" -O0 -w || return 1
    experts=
    [ "$model" = dense ] || experts='--num-experts 4'
    # shellcheck disable=SC2086
    losses 1 "$work/wrong-$step" $experts >"$work/losses"
    agree 3 1e-10 "$work/losses" "$work/$model" >"$work/out" || return 1
    # shellcheck disable=SC2086
    losses "$ranks" "$work/wrong-$step" $experts "$@" >"$work/losses"
    [ "$(wc -l <"$work/losses")" = 3 ] && ! agree 3 1e-10 "$work/losses" "$work/$model" >"$work/out"
}

# adds_at_most LINES FILE FILE
adds_at_most() {
    added=$(diff "$2" "$3" | grep -c '^>')
    [ "$added" -gt 0 ] && [ "$added" -le "$1" ] || { echo "$3 adds $added lines to $2" && return 1; }
}

each_step_adds_at_most_150_lines() {
    for step in 2 3 4 5 6 7 8; do adds_at_most 150 $steps/$((step - 1)).c $steps/$step.c || return 1; done
    cmp $steps/8.c notes/mini.c && ! adds_at_most 150 $steps/1.c $steps/8.c >"$work/out"
}

# The lines of a difference as a page must show them, in any order, or as it does.
difference() {
    diff -U1 "$1" "$2" | sed '1,2d; s/^\(@@.*@@\).*/\1/' | sort
}
shown() {
    awk '/^```diff$/ { on = 1; next } /^```$/ { on = 0 } on' "$1" | sed 's/^\(@@.*@@\).*/\1/' | sort
}

# is_the_difference STEP PAGE
is_the_difference() {
    difference $steps/$(($1 - 1)).c $steps/"$1".c >"$work/difference"
    shown "$2" >"$work/shown"
    [ -s "$work/shown" ] && diff "$work/difference" "$work/shown" >"$work/out"
}

pages_are_the_differences() {
    for step in 2 3 4 5 6 7 8; do
        awk -f notes/weave.awk $steps/$step.md >"$work/page" 2>"$work/err" && diff $steps/$step.md "$work/page" \
            >"$work/out" && is_the_difference $step $steps/$step.md && continue
        echo "$steps/$step.md: shows another difference, or not all of it; \`make notes\` writes what it is now"
        return 1
    done
    # A section without changes is an error. A page that leaves out a section, or has a line of its own, is not the
    # difference.
    if echo "<!-- diff $steps/1.c $steps/2.c attention -->" | awk -f notes/weave.awk >"$work/out" 2>"$work/err"; then
        echo "notes/weave.awk accepts a section without changes"
        return 1
    fi
    sed '/diff .* optimizer -->/,/^```$/d' $steps/3.md >"$work/3.md"
    ! is_the_difference 3 "$work/3.md" && sed 's/^+ /+  /' $steps/3.md >"$work/3.md" &&
        ! is_the_difference 3 "$work/3.md"
}

# The walk of a token in notes/steps/README.md names the words that the programs read.
the_walk_follows_a_token() {
    cat >"$work/walk.c" <<END
#define main step_main
#include "$(pwd)/$steps/1.c"
#undef main
int main(void) {
    char *arguments[] = {"1", NULL};
    model m = {.o = parse_options(1, arguments)};
    create_model(&m), load_tokens(&m);
    printf("Our token is word %d, and its label, the next token, is word %d.", m.tokens[7], m.tokens[8]);
    return 0;
}
END
    build "$work/walk.c" "$work/walk" -w >"$work/out" 2>"$work/err" && says "$("$work/walk")" $steps/README.md
}

check make_mini_needs_the_programs_and_mpicc_alone make_mini
losses 1 "$work/step-1" >"$work/dense"
losses 1 "$work/step-1" --num-experts 4 >"$work/experts"

check step_1_needs_no_mpi step_1_needs_no_mpi
check step_1_equals_pytorch step_1_equals_pytorch
for step in 2 3 4 5 6 7 8; do check step_${step}_on_one_rank equal $step 1; done
check step_2_data equal 2 2
check step_3_sharded_optimizer equal 3 4
check step_4_tensor equal 4 2 $TP 2
check step_4_tensor_data_4 equal 4 4 $TP 2
check step_5_sequence equal 5 2 $TP 2 $SP
check step_5_sequence_data_4 equal 5 4 $TP 2 $SP
check step_6_pipeline equal 6 2 $PP 2
check step_6_interleaved_tensor_4 equal 6 4 $PP 2 $VP 2 $TP 2
check step_7_context equal 7 2 $CP 2
check step_7_context_tensor_4 equal 7 4 $CP 2 $TP 2 $SP
check step_8_experts equal_experts 8 2 $EP 2
check step_8_experts_tensor_4 equal_experts 8 4 $EP 4 $TP 2 $SP

check step_2_without_the_sum_is_seen sees dense 2 2 '/^    reduce_gradients(m);/d'
check step_3_with_a_shard_cut_short_is_seen sees dense 3 2 's/\*end = m->buffer.shard;/*end = m->buffer.shard - 1;/'
check step_4_without_a_sum_is_seen sees dense 4 2 '/sum_over_tensor_ranks(m, y);/d' $TP 2
check step_5_without_the_sum_of_norms_is_seen sees dense 5 2 \
    's/if (m->o.sequence_parallel && p->cut/if (0 \&\& p->cut/' $TP 2 $SP
check step_6_with_layers_in_another_order_is_seen sees dense 6 2 \
    's,i / m->stage_layers \* o->pp + m->pipeline.rank,m->pipeline.rank * o->vp + i / m->stage_layers,' $PP 2 $VP 2
check step_7_with_positions_of_the_rank_is_seen sees dense 7 2 \
    's/(double)token_position(m, m->context.rank, t)/(double)t/' $CP 2
check step_8_with_pairs_in_another_order_is_seen sees experts 8 2 's,pair % m->experts\],pair / m->o.ep],' $EP 2

# Each program lists its options and ends well; each message on options that do not fit names an option.
options_are_listed_and_named() {
    for step in 1 2 3 4 5 6 7 8; do
        "$work/step-$step" --help >"$work/out" 2>"$work/err" && [ ! -s "$work/err" ] || return 1
        sed -n '/^static const option_row option_rows/,/^};/s/^    {"\(--[a-z0-9-]*\)".*/\1/p' $steps/$step.c \
            >"$work/rows"
        sed -n 's/^  \(--[a-z0-9-]*\).*/\1/p' "$work/out" | diff "$work/rows" - && [ -s "$work/rows" ] || return 1
        sed -n '/^    } rules\[\] = {/,/}};/p' $steps/$step.c | tr -d '\n' | sed 's/},/},\n/g' >"$work/rules"
        [ "$(wc -l <"$work/rules")" -gt 3 ] && ! grep -v -e '"[^"]*--[a-z]' "$work/rules" | grep '"' || return 1
    done
    [ "$("$work/step-8" --help | grep -c PATH)" = 2 ]
}

check options_are_listed_and_named options_are_listed_and_named
check each_step_adds_at_most_150_lines each_step_adds_at_most_150_lines
check pages_are_the_differences pages_are_the_differences
check the_walk_follows_a_token the_walk_follows_a_token
exit $failed
