#!/bin/sh
# The reports of a run: TensorBoard's event files, read here by an independent reader with its own checksums, and the
# curves of make plot.
set -u
. tests/suite.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

small='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 50 --seq-length 8 --mock-data --lr 1e-2
    --micro-batch-size 2 --global-batch-size 4 --device cpu'

# run ARGUMENTS...: a small run.
run() {
    # shellcheck disable=SC2086
    "$train" $small "$@" >"$work/out" 2>"$work/err" && return 0
    cat "$work/err"
    return 1
}

# Prints "STEP TAG VALUE" of every scalar in a folder's event files, in order, having checked both checksums of every
# record; the table-driven CRC-32C shares nothing with the writer's.
cat >"$work/read.py" <<'PYTHON'
import glob, struct, sys

table = []
for n in range(256):
    for _ in range(8):
        n = (n >> 1) ^ 0x82F63B78 if n & 1 else n >> 1
    table.append(n)

def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

assert masked_crc(b"123456789") == ((((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at

def fields(data):
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(data, at)
        elif wire == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif wire == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            assert wire == 2, wire
            length, at = varint(data, at)
            value, at = data[at:at + length], at + length
            assert len(value) == length
        yield number, value

for path in sorted(glob.glob(sys.argv[1] + "/events.out.tfevents.*")):
    data, at, first, before = open(path, "rb").read(), 0, True, 0
    while at < len(data):
        length, crc = struct.unpack_from("<QI", data, at)
        assert crc == masked_crc(data[at:at + 8]), "checksum of a length"
        event = data[at + 12:at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked_crc(event), "checksum of an event"
        at += 16 + length
        of = dict(fields(event))
        assert of[1] >= before and of[1] > 1.5e9, "wall time"
        before = of[1]
        if first:
            assert of[3] == b"brain.Event:2"
            first = False
            continue
        for number, value in fields(of[5]):
            scalar = dict(fields(value))
            assert number == 1 and set(scalar) == {1, 2}
            print(of[2], scalar[1].decode().replace(" ", "_"), "%.9g" % scalar[2])
    assert not first
PYTHON

# metric FILE NAME: "ITERATION VALUE" of each line that has it.
metric() {
    sed -n "s/.*\"iteration\": \([0-9]*\).*\"$2\": \([-+.0-9e]*\).*/\1 \2/p" "$1"
}

event_files_hold_what_the_metrics_say() {
    run --train-iters 6 --eval-interval 3 --eval-iters 1 --tensorboard-dir "$work/board" --metrics "$work/m.jsonl" &&
        python3 "$work/read.py" "$work/board" >"$work/read" || return 1
    for pair in lm_loss:lm_loss grad-norm:grad_norm learning-rate:learning_rate tokens-per-second:tokens_per_second \
        mem-max-allocated-bytes:peak_memory_bytes skipped-iterations:skipped_iterations \
        lm_loss_validation:validation_loss; do
        awk -v tag="${pair%:*}" '$2 == tag { print $1, $3 }' "$work/read" >"$work/got"
        metric "$work/m.jsonl" "${pair#*:}" >"$work/want"
        [ -s "$work/want" ] && paste -d ' ' "$work/got" "$work/want" | awk -v tag="$pair" '
            { d = $2 - $4; if (d < 0) d = -d; m = $4 < 0 ? -$4 : $4
              if (NF != 4 || $1 != $3 || !(d <= 1e-5 * m)) { print tag ": " $0; bad = 1 } }
            END { exit bad }' || return 1
    done
    [ "$(awk '$2 == "lm_loss"' "$work/read" | wc -l)" = 6 ]
}

a_resumed_run_adds_a_file_of_its_own() {
    run --train-iters 4 --eval-iters 0 --tensorboard-dir "$work/two" --save "$work/checkpoint" &&
        run --train-iters 6 --eval-iters 0 --tensorboard-dir "$work/two" --load "$work/checkpoint" || return 1
    [ "$(find "$work/two" -type f | wc -l)" = 2 ] || return 1
    [ "$(python3 "$work/read.py" "$work/two" | awk '$2 == "lm_loss" { printf "%s ", $1 }')" = '1 2 3 4 5 6 ' ]
}

a_folder_that_cannot_be_written_is_an_error_before_training() {
    : >"$work/file"
    # shellcheck disable=SC2086
    "$train" $small --train-iters 2 --tensorboard-dir "$work/file/under" >"$work/out" 2>"$work/err" && return 1
    grep -q "^error: $work/file/under: the folder cannot be made: .*; choose another --tensorboard-dir" "$work/err" &&
        ! grep -q 'loss' "$work/out"
}

metrics_stay_json_when_numbers_are_not_finite() {
    run --train-iters 3 --init-method-std 30 --lr 1e6 --clip-grad 0 --no-check-for-nan-in-loss-and-grad \
        --eval-iters 0 --metrics "$work/wild.jsonl" || return 1
    grep -q 'null' "$work/wild.jsonl" || return 1
    python3 -c 'import json, sys
for line in open(sys.argv[1]):
    json.loads(line, parse_constant=lambda word: sys.exit(word + " is no JSON"))' "$work/wild.jsonl"
}

# Two runs; the second went back and made iterations 3 and 4 twice.
plot_draws_every_curve_of_several_runs() {
    run --train-iters 6 --eval-interval 3 --eval-iters 1 --metrics "$work/a.jsonl" || return 1
    { head -n 4 "$work/a.jsonl" && sed -n '3,$p' "$work/a.jsonl"; } >"$work/b.jsonl"
    make -s plot RUN="$work/a.jsonl,$work/b.jsonl" OUT="$work/curves.svg" >"$work/out" 2>&1 || return 1
    for title in loss 'gradient norm' 'tokens per second' 'memory of a rank' 'learning rate'; do
        says "$title" "$work/curves.svg" || return 1
    done
    ! grep -q -e 'steps skipped' -e reward "$work/curves.svg" || return 1 # they would be empty
    sed 's/"skipped_iterations": 0/"skipped_iterations": 2, "reward": 0.5/' "$work/a.jsonl" >"$work/more.jsonl"
    make -s plot RUN="$work/more.jsonl" OUT="$work/more.svg" >"$work/out" 2>&1 &&
        says 'steps skipped' "$work/more.svg" && says reward "$work/more.svg" || return 1
    # Both runs have the same numbers, so their curves are the same.
    grep -q '>a, validation<' "$work/curves.svg" && grep -q '>b, validation<' "$work/curves.svg" || return 1
    make -s plot RUN="$work/b.jsonl" OUT="$work/alone.svg" >"$work/out" 2>&1 &&
        make -s plot RUN="$work/a.jsonl" OUT="$work/whole.svg" >"$work/out" 2>&1 || return 1
    paths() { grep '<path' "$1"; }
    paths "$work/alone.svg" >"$work/p1" && paths "$work/whole.svg" >"$work/p2" && cmp "$work/p1" "$work/p2"
}

# In each panel, which has a frame of four corners before its curves, every point of a curve is inside the frame and not
# on it: flat curves, a learning rate that stays at its maximum, counts that begin at zero.
no_curve_lies_on_the_frame() {
    awk 'BEGIN { for (i = 1; i <= 20; i++)
            printf "{\"iteration\": %d, \"lm_loss\": %g, \"grad_norm\": 1.5, \"learning_rate\": %g, " \
                "\"tokens_per_second\": 5000, \"peak_memory_bytes\": 2147483648, \"skipped_iterations\": %d, " \
                "\"reward\": %g}\n", i, 7 - i / 10, (i < 10 ? i * 1e-4 : 1e-3), (i > 12), i / 20 }' >"$work/f.jsonl"
    make -s plot RUN="$work/f.jsonl" OUT="$work/f.svg" >"$work/out" 2>&1 || return 1
    awk 'BEGIN { RS = "<path " }
        { match($0, /d=.[^\047]*/); path = substr($0, RSTART + 3, RLENGTH - 3); count = 0 }
        { gsub(/[MLZ,]/, " ", path); count = split(path, at, /[ \t\n]+/); first = at[1] == "" ? 2 : 1 }
        /^stroke=.black/ && /Z/ { left = at[first]; top = at[first + 1]; bottom = at[first + 3]; right = at[first + 4] }
        /^stroke=.rgb/ {
            curves++
            for (i = first; i + 1 <= count; i += 2) {
                points++
                if (at[i] > left + 2 && at[i] < right - 2 && at[i + 1] > top + 2 && at[i + 1] < bottom - 2) continue
                print at[i] ", " at[i + 1] " of a curve in the frame " left " to " right ", " top " to " bottom
                bad = 1
            }
        }
        END { if (curves != 7 || points < 7 * 20) { print curves " curves, " points " points"; bad = 1 }; exit bad }
        ' "$work/f.svg"
}

plot_says_what_is_no_metrics_file() {
    echo nonsense >"$work/x.jsonl"
    ! make -s plot RUN="$work/x.jsonl" >"$work/out" 2>&1 && grep -q 'has no line with' "$work/out"
}

# Names that would end a string of gnuplot, or a line of its script.
plot_runs_nothing_from_a_files_name() {
    export RAN="$work/ran"
    for title in "x'; system(\"touch \$RAN\"); '" 'x
system("touch $RAN")
#' 'x`touch $RAN`%s\n COLUMN'; do
        cp "$work/a.jsonl" "$work/$title.jsonl"
        data/scripts/plot.sh "$work/$title.jsonl" >"$work/out" 2>"$work/err" || return 1
        [ -s "$work/$title.svg" ] && ! [ -e "$work/ran" ] || return 1
    done
    grep -q '>x`touch $RAN`%s\\n COLUMN<' "$work/$title.svg"
}

if command -v python3 >/dev/null; then
    check event_files_hold_what_the_metrics_say event_files_hold_what_the_metrics_say
    check a_resumed_run_adds_a_file_of_its_own a_resumed_run_adds_a_file_of_its_own
    check metrics_stay_json_when_numbers_are_not_finite metrics_stay_json_when_numbers_are_not_finite
else
    echo "skipped: there is no python3 to read event files with"
fi
check a_folder_that_cannot_be_written_is_an_error a_folder_that_cannot_be_written_is_an_error_before_training
if command -v gnuplot >/dev/null; then
    check plot_draws_every_curve_of_several_runs plot_draws_every_curve_of_several_runs
    check no_curve_lies_on_the_frame no_curve_lies_on_the_frame
    check plot_says_what_is_no_metrics_file plot_says_what_is_no_metrics_file
    check plot_runs_nothing_from_a_files_name plot_runs_nothing_from_a_files_name
else
    echo "skipped: gnuplot is absent"
fi
exit $failed
