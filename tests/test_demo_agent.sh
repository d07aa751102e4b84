#!/bin/sh
# The demo of turns and tools as `make demo-agent` runs it: the model learns to use the calculator.
set -u
. tests/suite.sh
command -v python3 >/dev/null || {
    echo 'skipped: python3 is absent, and data/scripts/calculator.py needs it'
    exit 0
}

# The calculator computes expressions of numbers, in the two forms of a call, and rewards answers.
the_calculator_answers() {
    while IFS='|' read -r text left expected; do
        printf '{"id": 7, "messages": [{"role": "assistant", "content": "%s"}], "answer": "376", "turns_left": %s}\n' \
            "$text" "$left" | python3 data/scripts/calculator.py --role user --result '{}>' >"$work/out" 2>"$work/err"
        case $expected in
        result*) expected="\"messages\": [{\"role\": \"user\", \"content\": \"${expected#result }>\"}]" ;;
        *) expected="\"done\": true, \"reward\": ${expected#reward }" ;;
        esac
        [ "$(cat "$work/out")" = "{\"id\": 7, $expected}" ] && [ ! -s "$work/err" ] || {
            echo "$text: not $expected"
            return 1
        }
    done <<'EOF'
[47*8]|2|result 376
 [ (1 + 2) / 8 - 1 ]|1|result -0.625
x <tool_call>{\"name\": \"calculator\", \"arguments\": {\"expression\": \"7 % 4\"}}</tool_call>|1|result 3
<tool_call>no</tool_call>|1|result error
[9**9**9]|1|result error
[1/0]|1|result error
[__import__('os')]|1|result error
[47*8]|0|reward 0.0
it is 376.|2|reward 1.0
376 or 377|2|reward 0.0
none|2|reward 0.0
EOF
}

# Rewards are means: of 256 conversations of the first iteration, and of the last 10 iterations.
the_demo_learns_to_use_the_calculator() {
    DEMO_DIR=$work/demo data/scripts/demo-agent.sh >"$work/out" 2>"$work/err" && [ ! -s "$work/err" ] || return 1
    set -- $(sed -n 's/^3[.] task: .* reward \([0-9.]*\) to \([0-9.]*\), turns [0-9.]* to \([0-9.]*\)$/\1 \2 \3/p' \
        "$work/out")
    echo "reward from $1 to $2, $3 turns" >>"$work/err"
    awk -v a="$1" -v b="$2" -v turns="$3" 'BEGIN { exit !(a < 0.5 && b >= 0.75 && turns > 1.8) }'
}

the_demo_leaves_its_files() {
    for file in format/config.json agent/config.json metrics.jsonl demo.log; do
        [ -s "$work/demo/$file" ] || return 1
    done
    says '^5. agent: 47[*]8=.*12[*]3=.*90[*]7=' "$work/out"
}

check the_calculator_answers the_calculator_answers
check the_demo_learns_to_use_the_calculator the_demo_learns_to_use_the_calculator
check the_demo_leaves_its_files the_demo_leaves_its_files
exit $failed
