#!/bin/sh
# tests/bench_gpu.sh reads the output of the benchmarks and of train, and says why if it cannot measure. MT_TESTS is the
# folder of bench_cuda_attention, which prints its rows without a GPU too.
set -u
bench=$PWD/tests/bench_gpu.sh table=$PWD/tests/bench_gpu.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"

# program NAME: an executable, the script on standard input.
program() {
    { echo '#!/bin/sh' && cat; } >"$work/bin/$1"
    chmod +x "$work/bin/$1"
}

# expect NAME STATUS PATTERN...: runs the script; each pattern must be in its output.
expect() {
    name=$1 status=$2 missing=''
    shift 2
    MT_BIN=$work/bin "$bench" "$work/bin" "$table" >"$work/output" 2>&1
    got=$?
    for pattern in "$@"; do
        grep -q -- "$pattern" "$work/output" || missing="$missing '$pattern'"
    done
    if [ $got = "$status" ] && [ -z "$missing" ]; then
        echo "ok $name"
    else
        echo "not ok $name: exit $got, without$missing"
        cat "$work/output"
    fi
}

# says_nothing_of PATTERN: in the output of the last run.
says_nothing_of() {
    if grep -q "$1" "$work/output"; then echo "not ok no_$1"; else echo "ok no_$1"; fi
}

if ! [ -x "${MT_TESTS:-}/bench_cuda_attention" ]; then
    echo "not ok bench_gpu: MT_TESTS=${MT_TESTS:-} has no bench_cuda_attention; run this by make test"
    exit 1
fi

expect without_programs_it_says_so 1 'bench_cuda and .* are not there'

program train <<'END'
echo "error: no GPU" >&2
exit 1
END
program bench_cuda <<'END'
echo "bench_cuda: skipped: no GPU answers: none found"
END
program bench_cuda_attention </dev/null
expect without_a_gpu_it_says_so_and_fails 1 'nothing was measured: no GPU answers'

program bench_cuda <<'END'
echo "a copy of 3.9 GB moves 4.250 TB/s (read and written)"
echo "operation                  sizes                        time, us     TB/s  of copy"
echo "rmsnorm_forward            BF16 8192 x 1 x 4096             37.2    3.600    84.9%"
echo "swiglu_forward             BF16 8192 x 14336               165.0    4.200   100.1%"
echo "route_forward              BF16 16384 x 2048                10.7    0.900    21.0%"
echo "permute                    BF16 16384 x 2048               271.0    3.230    76.0%"
END
program bench_cuda_attention <<END
"${MT_TESTS:-}/bench_cuda_attention" --rows
shape='T   4096 x 2   H  32/8   D 128/128'
echo "attention mma    \$shape: forward   82.000 ms 3350.0 TFLOP/s, backward  280.000 ms 2450.0 TFLOP/s"
echo "attention wgmma  \$shape: forward   48.200 ms 5705.0 TFLOP/s, backward  380.000 ms 1810.0 TFLOP/s"
END
program bench_decode <<'END'
decode='decode 8 at once, 4 + 64 tokens'
echo "$decode, greedy, 124M parameters, bf16, GPU with graphs: 2900.5 tokens/s, 0.3 ms per step; limit: 250 MB"
echo "$decode, greedy, 124M parameters, bf16, GPU with one kernel: 5900.5 tokens/s, 0.3 ms per step; limit: 250 MB"
echo "$decode, temperature 1, 124M parameters, bf16, GPU with one kernel: 9000.5 tokens/s, 0.3 ms per step; limit"
END
expect a_run_that_fails_is_named 1 'Llama 3 8B, 8 layers, 2 x 4096 *failed' 'error: no GPU' 'something failed'

program train <<'END'
while [ "$1" != --metrics ]; do shift; done
for rate in 1 2 3 4 5 6 36000 38000 36500 900000 35000 39000; do
    echo "{\"iteration\": 1, \"tokens_per_second\": $rate, \"tflops_per_device\": 1}"
done >"$2"
echo "12/12 100%"
END
expect the_last_half_counts_by_its_median 0 '2 x 4096 *36500 *34394 Megatron *41000  below the goal' \
    '8 micro-batches a step *36500 *39872 Megatron *44000  below the peer'
expect decoding_is_the_best_greedy_rate 0 'GPT-2 124M, 1 text *5900.5 *6000  below the goal' \
    'Llama 3 8B, 8 texts *5900.5 *1890 *$'
expect the_best_implementation_counts 0 'T 4096 x 2 H 32/8 D 128 *5705 TFLOP/s *570 cuDNN' \
    'its backward *2450 TFLOP/s *458 cuDNN'
# The rows as the program prints them: 2 x 32 heads of 128 channels over 4096 tokens in 1 ms are 275 TFLOP/s.
expect shapes_of_the_table_are_found_in_the_program_s_rows 0 'T 8192 x 1 H 32/8 D 128 *550 TFLOP/s *597 cuDNN' \
    'T 32768 x 1 H 32/8 D 128 *[0-9]* TFLOP/s' 'T 1024 x 64 H 12/12 D 64 *103 TFLOP/s *309 cuDNN'
says_nothing_of 'not measured'
expect operations_below_the_goal_are_listed 0 'below 85% of the copy rate: rmsnorm_forward BF16 8192 x 1 x 4096' \
    'below 70% of the copy rate: route_forward BF16 16384' 'wanted part of the copy rate: 2 of 4' 'copy: 4.250 TB/s'

program bench_cuda_attention <<END
shape='T   8192 x 1   H  32/8   D 128/128'
echo "attention unordered \$shape: forward   2.000 ms 550.0 TFLOP/s, backward  4.000 ms 580.0 TFLOP/s"
echo "attention cudnn     \$shape: forward   2.000 ms 550.0 TFLOP/s, backward  4.000 ms 511.0 TFLOP/s"
echo "attention hopper    \$shape: forward   2.000 ms 550.0 TFLOP/s, backward  5.000 ms 490.0 TFLOP/s"
END
expect backwards_that_repeat_have_a_goal_of_their_own 1 'its backward *580 TFLOP/s *511 cuDNN *560 *$' \
    'one that repeats bit for bit *490 TFLOP/s *500  below the goal'
program bench_cuda_attention </dev/null
expect a_shape_without_a_row_is_a_failure 1 'T 4096 x 2 H 32/8 D 128 *not measured' 'something failed'
program bench_cuda_attention <<END
"$MT_TESTS/bench_cuda_attention" --rows
END

program nvidia-smi <<'END'
[ "$1" = -L ] || { printf '90.10, 1980\n688.00, 1400\n692.00, 1500\n' && exec sleep 60; }
for gpu in 0 1 2 3; do echo "GPU $gpu: a fake"; done
END
program mpirun <<'END'
case "$1 $2" in '-np 2' | '-np 4') ;; *) exit 1 ;; esac
shift 2
for word; do # wait for the samples of the power
    case $word in *.jsonl) until [ -s "${word%jsonl}power" ]; do sleep 0.01; done ;; esac
done
exec "$@"
END
PATH=$work/bin:$PATH
expect several_gpus_have_cases_of_their_own 0 '4 x 4096, tensor *36500  *690 W, 1450 MHz$' \
    'Llama 3 8B, 4 x 8192, data *36500 *39198 PyTorch *42000  below the peer, 690 W, 1450 MHz'
