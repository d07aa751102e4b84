#!/bin/sh
# Measures one layer of Mixtral's experts (8 experts of width 14336, top-2, hidden size 4096; 4,096 tokens per rank) in
# a training step: the time of products, permutation, exchange, activation and routing, and the floor of each.
#
#   usage: tests/bench_experts.sh DIR      from the root of the project; `make bench-experts` does so
#
# Runs train with --profile on one GPU and, if there are four GPUs and mpirun, on four with expert parallelism. DIR gets
# the logs. The floor of an operation is its time at the ceiling measured by the same profile: a large matrix product or
# a copy. Operations without a ceiling, such as messages, have no floor. Exits with 1 if nothing could be measured.
set -u
directory=$1 bin=${MT_BIN:-.}

# layer NAME LAUNCH OPTIONS...: prints the table of one run.
layer() {
    name=$1 launch=$2 log=$directory/bench_experts_$(echo "$1" | tr -c 'a-z0-9\n' _)
    shift 2
    # shellcheck disable=SC2086
    $launch "$bin/train" --hf-config data/configs/mixtral-8x7b.json --num-layers 1 --vocab-size 1024 --seq-length 4096 \
        --micro-batch-size 1 --mock-data --bf16 --lr 1e-5 --eval-iters 0 --train-iters 8 --device cuda --profile "$@" \
        >"$log.log" 2>&1 || {
        echo "bench-experts: $name: $(tail -n 1 "$log.log")" >&2
        return 1
    }
    echo "$name"
    awk '
        function part(operation) {
            if (operation ~ /^grouped_linear/) return "grouped products"
            if (operation ~ /^(gather_rows|combine_rows|scale_rows_.*|exchange_order)$/) return "permute and combine"
            if (operation ~ /^all_to_all_v$/) return "exchange"
            if (operation ~ /^expert_swiglu/) return "activation"
            if (operation ~ /^(router_logits|route_|balance_|count_experts|dispatch_plan|convert$)/) return "router"
            return ""
        }
        $2 ~ /^[0-9]+$/ && part($1) != "" {
            of = $NF ~ /%$/ && NF >= 7 ? $NF + 0 : 0
            if (of > 100) of = 100
            ms[part($1)] += $3
            floor[part($1)] += $3 * of / 100
            all += $3
        }
        END {
            count = split("grouped products;permute and combine;exchange;activation;router", names, ";")
            for (i = 1; i <= count; i++)
                if (ms[names[i]] > 0)
                    printf "  %-22s %8.3f ms per step   floor %8.3f ms\n", names[i], ms[names[i]], floor[names[i]]
            if (floor["grouped products"] == 0) { print "  no operation was profiled"; exit 1 }
            printf "  %-22s %8.3f ms per step   %.2f times the floor of the products\n", "all", all,
                all / floor["grouped products"]
        }' "$log.log"
}

if [ ! -x "$bin/train" ]; then
    echo "bench-experts: $bin/train does not exist; make bench-experts builds it" >&2
    exit 1
fi
layer "one GPU" "" || exit 1
[ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -ge 4 ] && command -v mpirun >/dev/null || exit 0
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
layer "four GPUs, two experts each" "mpirun -np 4" --global-batch-size 4 --expert-model-parallel-size 4
