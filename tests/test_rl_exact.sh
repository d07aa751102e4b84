#!/bin/sh
# Reinforcement learning without a mismatch: --bitwise-rollouts and --router-replay, on layouts of ranks.
# Sections of megatron.c: §9f §16
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1

common="--chat-template plain --hidden-dropout 0 --attention-dropout 0 --device cpu --lr-decay-style constant
    --eval-iters 0"
for digit in 0 1 2 3 4 5 6 7 8 9; do
    printf '{"prompt": "%d%d>", "answer": "%d%d"}\n' $digit 7 7 $digit $digit 4 4 $digit
done >"$work/rl.jsonl"

# gap_is_zero METRICS: in all of two iterations.
gap_is_zero() {
    series generation_gap "$1" | awk '$1 != 0 { print "gap " $1; exit 1 } END { exit NR != 2 }'
}

# Dense models with windows and biases, experts and latent attention, with and without tensor parallelism.
bitwise_rollouts_equal_training() {
    shape="--num-layers 4 --hidden-size 48 --num-attention-heads 4 --swiglu --normalization RMSNorm
        --position-embedding-type rope"
    set -- --stage rl --tokenizer-type ByteLevel --data-path "$work/rl.jsonl" --seq-length 200 --max-new-tokens 190 \
        --micro-batch-size 4 --log-interval 1 --overwrite --rollout-batch-size 2 --num-return-sequences 4 \
        --train-iters 2 --lr 1e-3 --init-method-std 0.1
    while read -r kind; do
        for type in '' --bf16; do
            for layout in '1' '2 --tensor-model-parallel-size 2' \
                '4 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2'; do
                [ "${HAVE_MPI:-}" ] || [ "$layout" = 1 ] || continue
                # shellcheck disable=SC2086
                {
                    ranks=${layout%% *}
                    on_ranks "$ranks" "$train" "$@" $shape $kind $type ${layout#"$ranks"} $common --bitwise-rollouts \
                        --metrics "$work/bits" && gap_is_zero "$work/bits" || {
                        echo "$kind $type $layout"
                        return 1
                    }
                }
            done
        done
    done <<EOF
--window-size 37 --window-attn-skip-freq 2 --add-qkv-bias --temperature 0.8
--num-experts 6 --moe-router-topk 3 --moe-ffn-hidden-size 20 --disable-bias-linear
--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7 --disable-bias-linear
EOF
    # shellcheck disable=SC2086
    set -- "$train" "$@" $shape $common --bitwise-rollouts
    refused 'bitwise-rollouts is for the CPU' "$@" --device cuda &&
        refused 'adds up attention by parts' "$@" --context-parallel-size 2 &&
        refused 'a multiple of that' "$@" --inference-dynamic-batching-block-size 64 &&
        refused 'flex adds up the parts of 4 ranks' "$@" --tensor-model-parallel-size 4 --num-experts 4 \
            --moe-ffn-hidden-size 8 --disable-bias-linear --moe-token-dispatcher-type flex &&
        refused 'tp-comm-overlap adds up the parts of 4 ranks' "$@" --tensor-model-parallel-size 4 \
            --sequence-parallel --tp-comm-overlap
}

# The first step changes the experts' biases, which choose other experts in the second, and, by its learning rate, no
# weights: with the experts of the first, the second has the old policy's log-probabilities.
routes_are_replayed() {
    set -- --stage rl --tokenizer-type ByteLevel --data-path "$work/rl.jsonl" --seq-length 32 --max-new-tokens 16 \
        --micro-batch-size 4 --log-interval 1 --overwrite --rollout-batch-size 4 --num-return-sequences 4 \
        --train-iters 2 --lr 1e-12 --min-lr 0 --init-method-std 0.1 --ppo-epochs 2 --num-layers 4 --hidden-size 32 \
        --num-attention-heads 4 --swiglu --position-embedding-type rope --disable-bias-linear --num-experts 8 \
        --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-score-function sigmoid \
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-layer-freq '[0,1,1,1]' \
        --adv-estimator reinforce --reward regex --reward-pattern '[a-p]'
    # shellcheck disable=SC2086
    on_ranks 1 "$train" "$@" $common --metrics "$work/free" &&
        series ppo_kl "$work/free" | awk '$1 < 1e-5 && $1 > -1e-5 { exit 1 }' || return 1
    for replay in R2 R3 'R3 --partial-rollout-max-split 4'; do
        # shellcheck disable=SC2086
        on_ranks 1 "$train" "$@" $common --router-replay $replay --metrics "$work/one" && replays "$work/one" ||
            return 1
        [ "${HAVE_MPI:-}" ] || continue
        while read -r ranks layout; do
            # shellcheck disable=SC2086
            on_ranks "$ranks" "$train" "$@" $common --router-replay $replay --metrics "$work/other" $layout &&
                replays "$work/other" && same_series "$work/one" "$work/other" 1e-4 1 grad_norm || {
                echo "$replay: $layout"
                return 1
            }
        done <<EOF
2 --expert-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
2 --tensor-model-parallel-size 2 --sequence-parallel --rollout-tensor-model-parallel-size 1
2 --pipeline-model-parallel-size 2 --recompute-granularity selective --recompute-modules moe
2 --context-parallel-size 2
EOF
    done
    # shellcheck disable=SC2086
    set -- "$train" "$@" $common
    refused 'router-replay is for the CPU' "$@" --router-replay R2 --device cuda &&
        refused 'excludes\|cannot be\|router-replay' "$@" --router-replay R2 --moe-enable-routing-replay
}

# replays METRICS: choices were replaced, and log-probabilities stayed.
replays() {
    series routes_replaced "$1" | awk '$1 < 0.05 { print "replaced " $1; exit 1 } END { exit NR != 2 }' &&
        series ppo_kl "$1" | awk '$1 > 1e-6 || $1 < -1e-6 { print "kl " $1; exit 1 } END { exit NR != 2 }'
}

check bitwise_rollouts_equal_training bitwise_rollouts_equal_training
check routes_are_replayed routes_are_replayed
exit $failed
