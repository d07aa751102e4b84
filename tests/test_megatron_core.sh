#!/bin/sh
# Megatron-Core itself loads the folders of --ckpt-format torch_dist, on the CPU, on one and two tensor ranks: it
# computes the log-probabilities of the checkpoint that --load read, and its optimizers have the states of --save.
# Skipped where python3 has no torch or no megatron.core; tests/golden/make_megatron_checkpoints.py names the packages.
set -u
python=${PYTHON:-python3}
if ! "$python" -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ("torch", "megatron", "numpy"))))' 2>/dev/null; then
    echo "skipped: $python has no torch or no megatron.core"
    exit 77
fi
. tests/suite.sh
export OMP_NUM_THREADS=1
golden=tests/golden/megatron_dist
shapes='mla_pp2 mla_yarn mla_plain mla_epsilon llama31 interleaved delta_tp2 hybrid_tp2 mtp_repeated mtp_hybrid'
script=tests/golden/make_megatron_checkpoints.py

# megatron WORDS...: the script's command; prints what differs.
megatron() {
    "$python" $script "$@" >"$work/out" 2>"$work/err" </dev/null
}

megatron_computes_what_it_did_before() {
    for written in dense dense_tp2 gpt_tp2 moe torch_tp2; do
        "$train" --load "$golden/$written" --use-checkpoint-args --no-load-optim --train-iters 0 --mock-data --lr 1e-3 \
            --device cpu --save "$work/$written" --ckpt-format torch_dist >"$work/out" 2>"$work/err" </dev/null &&
            megatron load "$work/$written/iter_0000007" $written 1 || return 1
    done
    for written in torch_vpp2 torch_ep2 $shapes; do
        "$infer" --load "$golden/$written" --use-checkpoint-args --convert "$work/$written" --ckpt-format torch_dist \
            >"$work/out" 2>"$work/err" </dev/null && megatron load "$work/$written/release" $written 1 || return 1
    done
    megatron load "$work/dense_tp2/iter_0000007" dense_tp2 2 && megatron load "$work/gpt_tp2/iter_0000007" gpt_tp2 2 &&
        megatron load "$work/delta_tp2/release" delta_tp2 2 &&
        megatron load "$work/hybrid_tp2/release" hybrid_tp2 2
}

model='--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --max-position-embeddings 32 --vocab-size 100 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --mock-data
    --micro-batch-size 4 --global-batch-size 16 --seq-length 16 --lr 1e-3 --device cpu --eval-iters 0 --train-iters 3
    --deterministic-mode'

every_optimizer_of_megatron_goes_on() {
    for type in fp32 bf16; do
        precision=''
        [ $type = fp32 ] || precision=--bf16
        # shellcheck disable=SC2086
        "$train" $model $precision --save "$work/hf-$type" >"$work/out" 2>"$work/err" </dev/null &&
            "$train" $model $precision --save "$work/dist-$type" --ckpt-format torch_dist >"$work/out" 2>"$work/err" \
                </dev/null || return 1
        for form in plain distributed; do
            for ranks in 1 2; do
                megatron resume "$work/dist-$type/iter_0000003" "$work/hf-$type/iter_0000003" $type $form $ranks &&
                    grep -q '^equal tensors: [46][05] iteration: 3 samples: 48$' "$work/out" || return 1
            done
        done
    done
}

check megatron_computes_what_it_did_before megatron_computes_what_it_did_before
check every_optimizer_of_megatron_goes_on every_optimizer_of_megatron_goes_on
exit $failed
