#!/bin/sh
# train saves Hugging Face folders: transformers opens the folder of --save unchanged, for every family, and gives
# tokens the same log-probabilities as infer. Skipped where python3 has no torch or no transformers.
set -u
python=${PYTHON:-python3}
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "transformers"))))' \
    2>/dev/null; then
    echo "skipped: $python has no torch or no transformers"
    exit 77
fi
. tests/suite.sh
golden=tests/golden/hf
export OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1

# Two steps from weights with distinct log-probabilities; folders saved in bf16 are scored in fp32 too.
set --
for name in gpt2 llama llama3_rope_tied qwen2 qwen3 mixtral qwen2_moe qwen3_moe deepseek_v3 gpt_oss llama-bf16 \
    deepseek_v3-bf16 gpt_oss-bf16 smollm3 gemma3 olmo3 seed_oss dots1 exaone4 glm4_moe glm4_moe_qk minimax_m2 hy_v3 \
    solar_open exaone_moe glm4_moe_lite ministral3 ernie4_5_moe qwen3_next qwen3_5 qwen3_5_moe lfm2 \
    mimo_v2_flash nemotron_h nemotron_h_latent granitemoehybrid kimi_linear glm_moe_dsa_shared \
    qwen3_next-bf16; do
    family=${name%-bf16} precision=''
    [ "$family" = "$name" ] || precision=--bf16
    tokens=$golden/$family/tokens.i32
    # shellcheck disable=SC2086
    if "$train" --hf-config "$golden/$family/config.json" --init-method-std 0.2 --tokens-file "$tokens" \
        --seq-length 32 --global-batch-size 4 --train-iters 2 --lr 1e-2 --lr-decay-style constant \
        --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --save "$work/$name" $precision \
        >"$work/out" 2>"$work/err" </dev/null &&
        "$infer" --load "$work/$name" --score "$tokens" --seq-length 32 --micro-batch-size 4 \
            --out "$work/$name.logprobs" --entropy-out "$work/$name.entropy" >"$work/out" 2>"$work/err" </dev/null; then
        set -- "$@" "$name" "$work/$name" "$tokens" "$work/$name.logprobs" "$work/$name.entropy"
    else
        echo "not ok $name"
        cat "$work/err"
        failed=1
    fi
done
"$python" tests/transformers_score.py 32 "$@" 2>"$work/err" || { failed=1 && tail -n 20 "$work/err"; }
exit $failed
