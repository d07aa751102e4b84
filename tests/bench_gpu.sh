#!/bin/sh
# Measures the GPU backend at real shapes and ends with a short table: operations against the copy rate of the same run,
# attention, decoding, and whole training steps on random tokens, beside the figures of other programs
# (tests/bench_gpu.txt). The power and the clock of the GPU stand beside a row: at its power limit a GPU lowers its
# clock.
#
#   usage: tests/bench_gpu.sh DIR [TABLE]      from the root of the project; `make bench-gpu` does so
#
# DIR holds bench_cuda, bench_cuda_attention and bench_decode and keeps the logs; MT_BIN is the folder of the program
# train. Takes minutes, on one GPU and also on two and four where there are as many. Exits with 1 and the reason if no
# GPU answers or a program fails. A figure below the wanted one is marked; it is not a failure.
set -u
directory=$1 table=${2:-tests/bench_gpu.txt} bin=${MT_BIN:-.}
failed=0

# rows KIND: the table's rows of a kind, without their first field.
rows() {
    sed -n "s/^$1 *| *//p" "$table"
}

# field NUMBER: of the row on standard input.
field() {
    cut -d '|' -f "$1" | sed 's/^ *//; s/ *$//'
}

# Tokens a second in the last half of a run's metrics: the median.
median_rate() {
    sed -n 's/.*"tokens_per_second": \([0-9.e+]*\).*/\1/p' "$1" | tail -n 6 | sort -g |
        awk '{ rate[NR] = $1 } END { if (NR) printf "%.0f\n", rate[int((NR + 1) / 2)] }'
}

# Power and clock of the first GPU while it worked, as "690 W, 1455 MHz": the means of the samples in a file with 80% of
# the greatest power or more. A GPU at its power limit lowers its clock, and with it its peak rate.
power_and_clock() {
    awk -F ', *' '
        /^[0-9.]+, [0-9]+$/ { watts[++count] = $1; clock[count] = $2; if ($1 > most) most = $1 }
        END {
            for (i in watts)
                if (watts[i] >= 0.8 * most) { busy++; power += watts[i]; rate += clock[i] }
            if (busy) printf "%.0f W, %.0f MHz", power / busy, rate / busy
        }' "$1"
}

# summarize ROW RATE POWER: adds a line to the summary.
summarize() {
    echo "$1" | awk -F ' *[|] *' -v rate="$2" -v power="$3" '{
        note = rate == "failed" ? "" : rate < $2 ? "below the peer" : rate < $4 ? "below the goal" : ""
        if (note && power) note = note ", "
        printf "%-36s %14s %22s %10s  %s\n", $1, rate, $2 " " $3, $4, note power }' >>"$summary"
}

# train_row ROW NUMBER RANKS: runs a training case and adds its line to the summary.
train_row() {
    name=$(echo "$1" | field 1) log=$directory/bench_gpu_train_$2 launch=''
    [ "$3" = 1 ] || launch="mpirun -np $3"
    echo "train: $name"
    rm -f "$log.jsonl"
    nvidia-smi -i 0 --query-gpu=power.draw,clocks.sm --format=csv,noheader,nounits -lms 200 >"$log.power" 2>/dev/null &
    sampler=$!
    # shellcheck disable=SC2046,SC2086
    $launch "$bin/train" --mock-data --bf16 --lr 1e-5 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 \
        --train-iters 12 --device cuda --metrics "$log.jsonl" $(echo "$1" | field 5) >"$log.log" 2>&1
    status=$?
    kill $sampler 2>/dev/null
    rate=$(median_rate "$log.jsonl" 2>/dev/null)
    if [ $status != 0 ] || [ -z "$rate" ]; then
        tail -n 3 "$log.log"
        failed=1 rate=failed
    else
        tail -n 1 "$log.log"
    fi
    summarize "$1" "$rate" "$(power_and_clock "$log.power")"
}

# decode_row ROW NUMBER: the greatest rate of greedy decoding that bench_decode prints.
decode_row() {
    log=$directory/bench_gpu_decode_$2.log
    echo "decode: $(echo "$1" | field 1)"
    # shellcheck disable=SC2046
    "$directory/bench_decode" $(echo "$1" | field 5) --device cuda --bf16 >"$log" 2>&1
    status=$?
    rate=$(sed -n 's/.*, greedy, .*: \([0-9.]*\) tokens\/s, .*/\1/p' "$log" | sort -g | tail -n 1)
    if [ $status != 0 ] || [ -z "$rate" ]; then
        tail -n 3 "$log"
        failed=1 rate=failed
    fi
    summarize "$1" "$rate" ''
}

# Two lines for each attention shape of the table, with the best of the implementations in the log, and a third one
# where the table has a goal for a backward that repeats bit for bit. Shapes are compared with single spaces and with
# D 64 written as D 64/64. A shape that the log does not have is a failure.
attention_rows() {
    rows attention | awk -F ' *[|] *' -v log_file="$1" '
        function number_before(word) { return match(rest, "[0-9.]+ " word) ? substr(rest, RSTART) + 0 : 0 }
        function canonical(shape) {
            gsub(/[ \t]+/, " ", shape)
            gsub(/^ | $/, "", shape)
            gsub(/ ?\/ ?/, "/", shape)
            if (match(shape, / D [0-9]+$/)) shape = shape "/" substr(shape, RSTART + 3)
            return shape
        }
        BEGIN {
            while ((getline line < log_file) > 0) {
                if (line !~ /^attention .*forward.*backward/) continue
                shape = line
                split(line, word, " ")
                repeats = word[2] != "unordered" && word[2] != "cudnn"
                sub(/^attention +[^ ]+ +/, "", shape)
                rest = shape
                sub(/:.*/, "", shape)
                shape = canonical(shape)
                forward = number_before("TFLOP/s")
                sub(/.*backward/, "", rest)
                backward = number_before("TFLOP/s")
                if (forward > best[shape, 1]) best[shape, 1] = forward
                if (backward > best[shape, 2]) best[shape, 2] = backward
                if (repeats && backward > best[shape, 3]) best[shape, 3] = backward
            }
            name[2] = "  its backward"
            name[3] = "  one that repeats bit for bit"
        }
        {
            split($2, peer, " ")
            wanted[2] = $4
            wanted[3] = $5
            name[1] = "attention " $1
            for (pass = 1; pass <= ($5 ? 3 : 2); pass++) {
                found = best[canonical($1), pass]
                if (!found) missing = 1
                note = found && found < peer[pass] ? "below the peer" : ""
                if (!note && found && found < wanted[pass]) note = "below the goal"
                printf "%-36s %14s %22s %10s  %s\n", name[pass],
                    (found ? sprintf("%.0f TFLOP/s", found) : "not measured"),
                    (pass < 3 ? peer[pass] " " $3 : ""), wanted[pass], note
            }
        }
        END { exit missing }'
}

# The operations below the wanted part of the copy rate, and the number of the others. The table's row without names is
# for all operations that no other row names.
memory_rows() {
    rows memory | awk -F ' *[|] *' -v log_file="$1" '
        !$2 { usual = $1 }
        $2 { count = split($2, names, / *, */); for (i = 1; i <= count; i++) goal[names[i]] = $1 }
        END {
            while ((getline line < log_file) > 0) {
                count = split(line, word, " ")
                if (line ~ /^a copy of/) print "copy: " word[7], word[8]
                if (word[count] !~ /^[0-9.]+%$/) continue
                all++
                wanted = word[1] in goal ? goal[word[1]] : usual
                if (word[count] + 0 >= wanted) continue
                missed++
                gsub(/ +/, " ", line)
                print "below " wanted "% of the copy rate: " line
            }
            printf "operations at the wanted part of the copy rate: %d of %d\n", all - missed, all
        }'
}

if [ ! -x "$directory/bench_cuda" ] || [ ! -x "$bin/train" ]; then
    echo "bench-gpu: $directory/bench_cuda and $bin/train are not there; make bench-gpu builds them" >&2
    exit 1
fi
summary=$directory/bench_gpu.summary
: >"$summary"
"$directory/bench_cuda" >"$directory/bench_gpu_memory.log" 2>&1 || failed=1
cat "$directory/bench_gpu_memory.log"
if grep -q skipped "$directory/bench_gpu_memory.log"; then
    echo "bench-gpu: nothing was measured: $(sed -n 's/.*skipped: //p' "$directory/bench_gpu_memory.log")" >&2
    exit 1
fi
"$directory/bench_cuda_attention" >"$directory/bench_gpu_attention.log" 2>&1 || failed=1
cat "$directory/bench_gpu_attention.log"
number=0
# train_rows KIND RANKS: all training cases of a kind.
train_rows() {
    rows "$1" >"$directory/bench_gpu.cases"
    while IFS= read -r row; do
        number=$((number + 1))
        train_row "$row" $number "$2" </dev/null
    done <"$directory/bench_gpu.cases"
}
train_rows train 1
rows decode >"$directory/bench_gpu.cases"
while IFS= read -r row; do
    number=$((number + 1))
    decode_row "$row" $number </dev/null
done <"$directory/bench_gpu.cases"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# mpirun refuses to run as root, as containers do, unless it is allowed to.
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
for ranks in 2 4; do
    if [ "$gpus" -ge $ranks ] && command -v mpirun >/dev/null; then
        train_rows train$ranks $ranks
    else
        echo "the cases of $ranks GPUs are left out: they need as many GPUs, and mpirun"
    fi
done

echo
printf '%-36s %14s %22s %10s\n' '' measured peer wanted
cat "$summary"
attention_rows "$directory/bench_gpu_attention.log" || failed=1
memory_rows "$directory/bench_gpu_memory.log"
[ $failed = 0 ] || echo "bench-gpu: something failed; the logs are in $directory" >&2
exit $failed
