#!/bin/sh
# tests/fuzz_layouts finds what it looks for: a stand-in for train, which writes metrics and trains nothing, has a fault
# that depends on an option. The fault is found, and shrunk to that option; the same number gives the same commands.
# A small difference that only one seed of a model of experts has is a tie of its router, and no fault; nor is one that
# only one seed of another model has, if it is within what rounding grows to after the first step.
set -u
. tests/suite.sh
fuzz=${MT_TESTS:-build/default/tests}/fuzz_layouts
bin=$work/bin
mkdir -p "$bin"
unset HAVE_MPI

# An mpirun that starts one rank.
cat >"$bin/mpirun" <<'END'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -np ] && shift; shift; done
MPIRUN=1 exec "$@"
END

# FAULT is an option, MANNER what happens to runs of several ranks that have it.
cat >"$bin/train" <<'END'
#!/bin/sh
[ -z "${COMMANDS:-}" ] || echo "$*" >>"$COMMANDS"
case " $* " in *" $FAULT"*) bad=${MPIRUN:-0} ;; *) bad=0 ;; esac
case " $* " in *" --load "*) first=3 ;; *) first=1 ;; esac
case " $* " in *" --seed "*) seed=other ;; *) seed=own ;; esac
while [ "$1" != --metrics ]; do shift; done
grad_norm=1.00001 late=''
[ $bad = 1 ] && case $MANNER in
wrong) grad_norm=1.00003 ;;
tie) [ $seed = other ] || grad_norm=1.00003 ;;
far) [ $seed = other ] || grad_norm=1.1 ;;
grown) [ $seed = other ] || late=1.00003 ;;
grown_far) [ $seed = other ] || late=1.0003 ;;
grows) late=1.00003 ;;
crash) kill -SEGV $$ ;;
hang) exec sleep 60 ;;
refuse) echo 'error: these options do not go together' >&2; exit 1 ;;
resume) [ $first = 3 ] && echo 'error: --num-layers is 4, but the weights have 5' >&2 && exit 1 ;;
esac
for i in 1 2 3 4; do
    [ $i -lt 3 ] || grad_norm=${late:-$grad_norm}
    [ $i -lt $first ] || echo "{\"iteration\": $i, \"lm_loss\": $i, \"grad_norm\": $grad_norm, \"iteration_ms\": $$}"
done >"$2"
END
chmod +x "$bin/mpirun" "$bin/train"

# fuzz MANNER FAULT SEED [NUMBER]: prints what the program does in some seconds, or with one number.
fuzz() {
    COMMANDS=$work/commands MANNER=$1 FAULT=$2 PATH="$bin:$PATH" MT_BIN=$bin FUZZ_TIMEOUT=${timeout:-30} "$fuzz" \
        "${seconds:-2}" "$3" ${4:+"$4"} >"$work/out" 2>"$work/err"
}

# The number of the first failure in the output.
first_failure() {
    sed -n 's/^\([0-9]*\) FAILED.*/\1/p' "$work/out" | head -n 1
}

# shrinks MANNER FAULT PATTERN: what fails has a message with PATTERN, and the shrunk commands have FAULT and no other
# option that they can do without.
shrinks() {
    fuzz "$1" "$2" 5 && return 1
    number=$(first_failure)
    [ -n "$number" ] || return 1
    fuzz "$1" "$2" 5 "$number" && return 1
    says "^shrunk: .*$3" "$work/out" && says "mpirun .* $2" "$work/out" || return 1
    grep -q -e --qk-layernorm -e --untie -e --clip-grad -e --swiglu -e --async-save -e --profile "$work/out" && return 1
    cp "$work/out" "$work/before" && ! fuzz "$1" "$2" 5 "$number" && cmp "$work/out" "$work/before"
}

equal_runs_agree() {
    fuzz wrong --no-such-option 5 && says '^0 agrees' "$work/out" && ! grep -q FAILED "$work/out" &&
        tail -n 1 "$work/out" | grep -q '^[1-9][0-9]* passed, 0 failed, [0-9]* skipped$'
}

# fails MANNER FAULT SEED: sets number to the first configuration that fails, whatever the draws before it.
fails() {
    number=0
    while fuzz "$1" "$2" "$3" $number; do
        number=$((number + 1))
        [ $number -lt 80 ] || return 1
    done
}

# A difference that depends on the seed is excused for experts only, and only if it is small.
a_tie_of_experts_is_no_failure() {
    number=0
    until fuzz tie --num-experts 7 $number &&
        grep -q 'agrees with another seed; first: .*grad_norm 1.00003' "$work/out"; do
        number=$((number + 1))
        [ $number -lt 80 ] || return 1
    done
    ! fuzz far --num-experts 7 $number && says 'FAILED: .*grad_norm 1.1' "$work/out" &&
        ! fuzz wrong --num-experts 7 $number && says 'FAILED: .*grad_norm 1.00003' "$work/out" &&
        fails tie --use-distributed-optimizer 7 && says 'FAILED: .*grad_norm 1.00003' "$work/out"
}

# Without experts, what is wrong in the first step, or by more, or with every seed, is a failure.
rounding_that_grows_is_no_failure() {
    fails tie --use-distributed-optimizer 7 || return 1
    fuzz grown --use-distributed-optimizer 7 "$number" &&
        says "^$number agrees with another seed; first: .*iteration 3 has grad_norm 1.00003" "$work/out" &&
        ! fuzz grown_far --use-distributed-optimizer 7 "$number" && says 'FAILED: .*grad_norm 1.0003' "$work/out" &&
        ! fuzz grows --use-distributed-optimizer 7 "$number" && says 'FAILED: .*grad_norm 1.00003' "$work/out"
}

# With documents that begin anew, tokens of equal probability are common: none is dropped for its probability.
equal_tokens_are_dropped_by_position() {
    number=120
    while [ $number -lt 400 ]; do
        : >"$work/commands"
        fuzz wrong --no-such-option 77001 $number
        grep -e --moe-expert-capacity-factor "$work/commands" >"$work/drops"
        [ -s "$work/drops" ] && grep -q -e --reset-attention-mask "$work/drops" && break
        number=$((number + 1))
    done
    [ $number -lt 400 ] && ! grep -v -e '--moe-token-drop-policy position' "$work/drops"
}

refused_options_are_no_failure() {
    fuzz refuse --overlap-grad-reduce 5 && says 'refused: error: these options' "$work/out" &&
        ! grep -q FAILED "$work/out"
}

# draws WORD: one of the first configurations has experts without this option.
draws() {
    number=0
    while [ $number -lt 80 ]; do
        : >"$work/commands"
        fuzz wrong --no-such-option 5 $number
        grep -e '--num-experts' "$work/commands" | grep -q -v -e "$1" && return
        number=$((number + 1))
    done
    return 1
}

experts_are_drawn_with_biases_and_without_swiglu() {
    draws --swiglu && draws --disable-bias-linear
}

# On a busy machine other runs may seem to hang, too.
a_hang_is_found() {
    timeout=0.5 seconds=0.1
    fuzz hang --device 5
    result=$?
    unset timeout seconds
    [ $result = 1 ] && says 'FAILED: no end after 2.5 seconds' "$work/out" && says '; hung: [1-9]' "$work/out"
}

check equal_runs_agree equal_runs_agree
check a_tie_of_experts_is_no_failure a_tie_of_experts_is_no_failure
check rounding_that_grows_is_no_failure rounding_that_grows_is_no_failure
check equal_tokens_are_dropped_by_position equal_tokens_are_dropped_by_position
check refused_options_are_no_failure refused_options_are_no_failure
check a_wrong_number_is_shrunk_to_the_option_that_makes_it shrinks wrong --overlap-grad-reduce 'grad_norm 1.00003'
check a_crash_is_shrunk_to_the_option_that_makes_it shrinks crash --use-distributed-optimizer 'no message'
check experts_are_drawn_with_biases_and_without_swiglu experts_are_drawn_with_biases_and_without_swiglu
check a_refused_checkpoint_of_its_own_is_a_failure shrinks resume --deterministic-mode 'the weights have 5'
check a_hang_is_a_failure a_hang_is_found
exit $failed
