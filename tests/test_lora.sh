#!/bin/sh
# Adapters by the programs: a run that stops and resumes, merging, generation, preferences against the base.
# Sections of megatron.c: §7
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
base=tests/golden/hf/llama

# tunes ARGUMENTS...: trains adapters of the golden Llama.
tunes() {
    "$train" --load $base --tokens-file $base/tokens.i32 --seq-length 32 --global-batch-size 4 --lr 1e-2 --device cpu \
        --lora-rank 4 --lora-alpha 32 --lora-target all-linear --log-interval 1 "$@" \
        >"$work/out" 2>"$work/err" </dev/null
}

# losses FILE: of a metrics file.
losses() {
    sed 's/.*"lm_loss": \([^,]*\),.*/\1/' "$1"
}

a_run_resumes_from_its_adapter() {
    tunes --train-iters 5 --lr-decay-iters 5 --metrics "$work/whole" || return 1
    tunes --train-iters 3 --lr-decay-iters 5 --metrics "$work/first" --save "$work/save" --auto-resume || return 1
    tunes --train-iters 5 --lr-decay-iters 5 --metrics "$work/second" --save "$work/save" --auto-resume || return 1
    says 'saved iteration 5' "$work/out" && [ ! -e "$work/save/iter_0000005/model.safetensors" ] &&
        losses "$work/whole" >"$work/expected" && { losses "$work/first" && losses "$work/second"; } >"$work/actual" &&
        cmp "$work/expected" "$work/actual" && [ "$(sort -u "$work/actual" | wc -l)" = 5 ]
}

# A base in fp8: a run that stops and resumes; its adapter is merged into the folder of the base. With --fp8-recipe
# blockwise products read the codes of a model whose matrices are 128 wide: the losses are those of quantized weights.
a_base_in_fp8_trains_resumes_and_merges() {
    set -- --lora-base-dtype fp8 --lr-decay-iters 5 --log-params-norm
    tunes "$@" --train-iters 5 --metrics "$work/whole8" &&
        tunes "$@" --train-iters 3 --metrics "$work/first8" --save "$work/save8" &&
        tunes "$@" --train-iters 5 --metrics "$work/second8" --save "$work/save8" --auto-resume &&
        losses "$work/whole8" >"$work/expected" &&
        { losses "$work/first8" && losses "$work/second8"; } >"$work/actual" &&
        cmp "$work/expected" "$work/actual" && [ "$(sort -u "$work/actual" | wc -l)" = 5 ] || return 1
    "$infer" --load $base --load-adapter "$work/save8" --merge-adapter "$work/merged8" --device cpu >"$work/out" \
        2>"$work/err" </dev/null && says 'wrote the merged model' "$work/out" || return 1
    set -- --mock-data --vocab-size 64 --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 2 \
        --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 16 \
        --hidden-dropout 0 --attention-dropout 0 --global-batch-size 2 --train-iters 3 --lr 1e-2 --device cpu \
        --lora-rank 2 --lora-target all-linear --fp8-format e4m3 --fp8-recipe blockwise
    "$train" "$@" --metrics "$work/codes" >"$work/out" 2>"$work/err" </dev/null &&
        "$train" "$@" --lora-base-dtype fp8 --metrics "$work/codes8" >"$work/out" 2>"$work/err" </dev/null &&
        losses "$work/codes" >"$work/expected" && losses "$work/codes8" >"$work/actual" &&
        cmp "$work/expected" "$work/actual" && [ "$(sort -u "$work/actual" | wc -l)" = 5 ] || return 1
    refused 'lora-base-dtype fp8 and --stage rl exclude each other' "$train" --load $base --stage rl --data-path none \
        --lora-rank 2 --lora-target q_proj --lora-base-dtype fp8 --train-iters 1 --lr 1 --device cpu
}

scores() {
    "$infer" --device cpu --score $base/tokens.i32 --seq-length 32 "$@" >"$work/out" 2>"$work/err" </dev/null
}

# A folder with other files: they stay, and may change without damage to the model.
merging_beside_other_files_sums_its_own() {
    mkdir -p "$work/beside/a/b" && echo mine >"$work/beside/a/b/file" && echo mine >"$work/beside/notes.txt" &&
        tunes --train-iters 1 --save "$work/small_adapter" || return 1
    "$infer" --load $base --load-adapter "$work/small_adapter" --merge-adapter "$work/beside" --device cpu \
        >"$work/out" 2>"$work/err" </dev/null && ! grep -q 'notes.txt\|b/file' "$work/beside/checksums.json" &&
        echo changed >"$work/beside/notes.txt" && rm -r "$work/beside/a" && scores --load "$work/beside" --out "$work/d"
}

a_merged_model_scores_like_its_adapter() {
    tunes --train-iters 2 --save "$work/adapter" || return 1
    "$infer" --load $base --load-adapter "$work/adapter" --merge-adapter "$work/merged" --device cpu >"$work/out" \
        2>"$work/err" </dev/null && says 'wrote the merged model' "$work/out" || return 1
    refused 'holds a model already' "$infer" --load $base --load-adapter "$work/adapter" --merge-adapter \
        "$work/merged" --device cpu || return 1
    scores --load $base --load-adapter "$work/adapter" --out "$work/a" &&
        scores --load "$work/merged" --out "$work/b" && scores --load $base --out "$work/c" || return 1
    od -An -v -t f4 -w4 "$work/a" >"$work/at" && od -An -v -t f4 -w4 "$work/b" >"$work/bt" &&
        od -An -v -t f4 -w4 "$work/c" >"$work/ct"
    paste "$work/at" "$work/bt" "$work/ct" | awk '
        { d = $1 - $2; e = $1 - $3; if (d * d > 1e-8) bad = 1; if (e * e > 1e-4) differs = 1 }
        END { exit bad || !differs || NR != 1280 }'
}

# A limit on the size of files simulates a full disk. The rest of a merge that was killed stays.
a_merge_that_fails_leaves_nothing() {
    tunes --train-iters 1 --save "$work/merges" || return 1
    set -- "$infer" --load $base --load-adapter "$work/merges" --merge-adapter "$work/again" --device cpu
    (
        ulimit -f 8
        refused 'again/model.safetensors: cannot be written: too large for the limit' "$@"
    ) && [ -z "$(ls "$work/again")" ] || return 1
    if mkdir "$work/disk" && mount -t tmpfs -o size=64k tmpfs "$work/disk" 2>/dev/null; then
        refused 'disk/again/model.safetensors: cannot be written: No space left .*another --merge-adapter' "$infer" \
            --load $base --load-adapter "$work/merges" --merge-adapter "$work/disk/again" --device cpu &&
            [ -z "$(ls "$work/disk/again")" ]
        merged=$?
        umount "$work/disk"
        [ $merged = 0 ] || return 1
    fi
    cp -R $base "$work/texts" && chmod -R u+w "$work/texts" && mkdir -p "$work/late/tokenizer.json" || return 1
    echo '{"model": {"type": "Unigram", "vocab": []}}' >"$work/texts/tokenizer.json" # which cannot be written there
    refused 'late/tokenizer.json: cannot be written' "$infer" --load "$work/texts" --load-adapter "$work/merges" \
        --merge-adapter "$work/late" --device cpu && [ ! -e "$work/late/config.json" ] &&
        [ ! -e "$work/late/model.safetensors" ] || return 1
    echo killed >"$work/again/model.safetensors"
    refused 'again: holds model.safetensors but no config.json' "$@" && rm "$work/again/model.safetensors" &&
        "$@" >"$work/out" 2>"$work/err" </dev/null && says 'wrote the merged model' "$work/out"
}

# taken FOLDER: it has what the folder chat says beside its weights.
taken() {
    for file in generation_config.json special_tokens_map.json chat_template.jinja tokenizer_config.json \
        additional_chat_templates/tools.jinja; do
        cmp "$work/chat/$file" "$1/$file" || return 1
    done
    tr -d ' \n' <"$1/config.json" >"$work/flat" && says '"eos_token_id":\[2,38\],"pad_token_id":5' "$work/flat"
}

# End tokens, padding, sampling and templates: a run, its resumption, a conversion, a merge.
what_a_folder_says_goes_with_every_save() {
    cp -R $base "$work/chat" && chmod -R u+w "$work/chat" && mkdir "$work/chat/additional_chat_templates" || return 1
    sed 's/"eos_token_id": [^,]*/"eos_token_id": [2, 38]/; s/"pad_token_id": [^,]*/"pad_token_id": 5/' \
        $base/config.json >"$work/chat/config.json"
    printf '%s\n' '{"eos_token_id": [2, 38], "temperature": 0.6, "top_k": 20, "new": {"a": [1]},' \
        ' "max_length": 1000000000000000000000}' >"$work/chat/generation_config.json"
    echo '{"eos_token": "</s>"}' >"$work/chat/special_tokens_map.json"
    echo '{"model_max_length": 1000000000000000019884624838656}' >"$work/chat/tokenizer_config.json"
    echo '{{ messages }}' >"$work/chat/chat_template.jinja"
    echo '{{ tools }}' >"$work/chat/additional_chat_templates/tools.jinja"
    cp tests/golden/tokenizer/bytelevel.json "$work/chat/tokenizer.json"
    set -- "$train" --tokens-file $base/tokens.i32 --seq-length 32 --global-batch-size 4 --lr 1e-2 --device cpu
    "$@" --load "$work/chat" --train-iters 0 --save "$work/converted" >"$work/out" 2>"$work/err" </dev/null &&
        taken "$work/converted" && "$@" --load "$work/converted" --finetune --train-iters 1 --save "$work/trained" \
        >"$work/out" 2>"$work/err" </dev/null && taken "$work/trained" &&
        "$@" --train-iters 2 --save "$work/trained" --auto-resume >"$work/out" 2>"$work/err" </dev/null &&
        [ -e "$work/trained/iter_0000002" ] && taken "$work/trained" &&
        "$@" --load "$work/chat" --lora-rank 2 --lora-target q_proj --train-iters 1 --save "$work/low" \
            >"$work/out" 2>"$work/err" </dev/null && "$infer" --load "$work/chat" --load-adapter "$work/low" \
        --merge-adapter "$work/settled" --device cpu >"$work/out" 2>"$work/err" </dev/null && taken "$work/settled"
}

# peft's users save the tokenizer beside the adapter, with the template of its conversations.
an_adapter_brings_its_chat_template() {
    rm -rf "$work/base" && cp -R $base "$work/base" && chmod -R u+w "$work/base" || return 1
    cp tests/golden/tokenizer/bytelevel.json "$work/base/tokenizer.json"
    echo '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}' >"$work/talk.jsonl"
    echo '{"messages": [{"role": "user", "content": "a"}]}' >"$work/ask.jsonl"
    "$train" --load "$work/base" --lora-rank 2 --lora-target q_proj --sft --train-data-path "$work/talk.jsonl" \
        --chat-template plain --train-iters 1 --lr 1e-3 --seq-length 32 --save "$work/talks" --device cpu \
        >"$work/out" 2>"$work/err" </dev/null && [ -s "$work/talks/latest/chat_template.jinja" ] || return 1
    refused 'has no chat template' "$infer" --load "$work/base" --prompts "$work/ask.jsonl" \
        --out "$work/said" --max-new-tokens 1 --device cpu
    "$infer" --load "$work/base" --load-adapter "$work/talks" --prompts "$work/ask.jsonl" \
        --out "$work/said" --max-new-tokens 1 --device cpu >"$work/out" 2>"$work/err" </dev/null &&
        "$infer" --load "$work/base" --load-adapter "$work/talks" --merge-adapter "$work/talked" --device cpu \
            >"$work/out" 2>"$work/err" </dev/null &&
        cmp "$work/talks/latest/chat_template.jinja" "$work/talked/chat_template.jinja" || return 1
    "$train" --load "$work/base" --load-adapter "$work/talks" --finetune --sft --train-data-path "$work/talk.jsonl" \
        --train-iters 1 --lr 1e-3 --seq-length 32 --save "$work/more" --device cpu >"$work/out" 2>"$work/err" \
        </dev/null && cmp "$work/talks/latest/chat_template.jinja" "$work/more/latest/chat_template.jinja" || return 1
    mkdir "$work/exchanged" && cp "$work/talks/latest"/adapter_* "$work/exchanged" || return 1
    sed 's/"a":65,"b":66/"a":66,"b":65/' "$work/base/tokenizer.json" >"$work/exchanged/tokenizer.json"
    refused 'token .* is another text in ' "$infer" --load "$work/base" --load-adapter "$work/exchanged" \
        --prompt a --max-new-tokens 1 --device cpu
}

# A damaged tokenizer ends a run; one of a kind that this program lacks is copied, with a line.
a_folder_does_not_lose_its_tokenizer() {
    rm -rf "$work/kind" && cp -R $base "$work/kind" && chmod -R u+w "$work/kind" || return 1
    echo '{"model": {"type": "Unigram", "vocab": []}}' >"$work/kind/tokenizer.json"
    "$train" --load "$work/kind" --train-iters 0 --save "$work/kept" --device cpu \
        >"$work/out" 2>"$work/err" </dev/null &&
        says 'the tokenizer is taken along as it is, .*Unigram' "$work/out" &&
        cmp "$work/kind/tokenizer.json" "$work/kept/tokenizer.json" || return 1
    echo '{"a":' >"$work/kind/tokenizer_config.json"
    refused 'kind/tokenizer_config.json:2: not JSON' "$train" --load "$work/kind" --train-iters 0 --save "$work/none" \
        --device cpu
}

# Matrices whose rows stand by head, or all experts in one tensor, and those of an indexer have no adapters.
what_all_linear_leaves_out_is_said() {
    for case in 'qwen3_next=in_proj_qkvz, in_proj_ba, q_proj' 'gpt_oss=gate_up_proj, down_proj' llama= lfm2= \
        nemotron_h= nemotron_h_latent= 'granitemoehybrid=input_linear, output_linear' kimi_linear= qwen3_5=q_proj \
        'deepseek_v32=wq_b, wk, weights_proj'; do
        name=${case%%=*}
        "$train" --load "tests/golden/hf/$name" --tokens-file "tests/golden/hf/$name/tokens.i32" --seq-length 32 \
            --lr 1e-2 --device cpu --lora-rank 2 --lora-target all-linear --train-iters 1 >"$work/out" 2>"$work/err" \
            </dev/null || return 1
        sed -n 's/^--lora-target all-linear leaves out \(.*\): no .*/\1/p' "$work/out" >"$work/left"
        [ "$(cat "$work/left")" = "${case#*=}" ] || return 1
    done
}

# peft 0.21 goes by the family: also where a model of it has no experts, it drops adapters of MLPs.
what_peft_drops_is_said() {
    for name in deepseek_v3 deepseek_v3_dense kimi_linear; do
        for target in all-linear o_proj; do
            "$train" --load tests/golden/hf/$name --tokens-file tests/golden/hf/$name/tokens.i32 --seq-length 32 \
                --global-batch-size 4 --lr 1e-2 --device cpu --lora-rank 2 --lora-target $target --train-iters 1 \
                --save "$work/$name" >"$work/out" 2>"$work/err" </dev/null || return 1
            grep -c 'peft (0.21) drops .*such as model.layers.0.*.gate_proj' "$work/out" >>"$work/drops"
            rm -rf "${work:?}/$name"
        done
    done
    [ "$(tr '\n' ' ' <"$work/drops")" = '1 0 1 0 1 0 ' ]
}

# peft may write the whole name of every matrix, thousands of them.
a_list_of_targets_has_no_limit() {
    mkdir "$work/long" && cp tests/golden/tune/lora/adapter_model.safetensors "$work/long" || return 1
    {
        i=0
        echo '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ['
        while [ $i -lt 3000 ]; do
            echo '"model.layers.0.self_attn.q_proj",'
            i=$((i + 1))
        done
        for layer in 0 1 2 3; do
            for module in self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj \
                mlp.gate_proj mlp.up_proj mlp.down_proj; do
                echo "\"model.layers.$layer.$module\","
            done
        done
        echo '"model.layers.0.mlp.up_proj"]}'
    } >"$work/long/adapter_config.json"
    "$infer" --load $base --load-adapter "$work/long" --prompt-tokens 1 --print-tokens --max-new-tokens 1 --device cpu \
        >"$work/out" 2>"$work/err" </dev/null || return 1
    for wrong in '["q_proj", 5]' '[]' '["q,k"]' '{}' 5 null '[""]'; do
        echo "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": $wrong}" \
            >"$work/long/adapter_config.json"
        refused 'long/adapter_config.json: "target_modules" must be' "$infer" --load $base --load-adapter "$work/long" \
            --prompt-tokens 1 --print-tokens --device cpu || return 1
    done
    for wrong in '"r": 4.0' '"lora_alpha": "8"' '"lora_dropout": "0"' '"fan_in_fan_out": "true"' '"fan_in_fan_out": 0' \
        '"r": 99999999999999999999'; do
        echo '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}' | # the key once
            sed "s/${wrong%%:*}: [0-9]*, //; s/}/, $wrong}/" >"$work/long/adapter_config.json"
        refused "long/adapter_config.json: ${wrong%%:*} must be" "$infer" --load $base --load-adapter "$work/long" \
            --prompt-tokens 1 --print-tokens --device cpu || return 1
    done
    echo '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "x"}' >"$work/long/adapter_config.json"
    refused 'long: "target_modules" of adapter_config.json x: the pattern matches' "$infer" --load $base \
        --load-adapter "$work/long" --prompt-tokens 1 --print-tokens --device cpu
}

# as_reference REFERENCE ACTUAL: no value of these files of fp32 differs by more than 1e-5.
as_reference() {
    od -An -v -t f4 -w4 "$1" >"$work/at" && od -An -v -t f4 -w4 "$2" >"$work/bt" &&
        paste "$work/at" "$work/bt" | awk '
            { d = $1 - $2; if (!(d * d <= 1e-10)) bad = 1 }
            END { exit bad || NR != 128 }'
}

# By peft 0.21 in fp64: use_rslora, rank_pattern, alpha_pattern, exclude_modules and layers_to_transform at once.
adapters_that_differ_from_matrix_to_matrix_equal_peft() {
    patterns=tests/golden/tune/patterns
    head -c 528 $base/tokens.i32 >"$work/first"
    set -- "$infer" --device cpu --score "$work/first" --seq-length 32 --out "$work/got"
    "$@" --load $base --load-adapter $patterns >"$work/out" 2>"$work/err" </dev/null &&
        as_reference $patterns/logprobs.f32 "$work/got" && ! says warning "$work/err" || return 1
    "$infer" --load $base --load-adapter $patterns --merge-adapter "$work/unlike" --device cpu >"$work/out" \
        2>"$work/err" </dev/null && "$@" --load "$work/unlike" >"$work/out" 2>"$work/err" </dev/null &&
        as_reference $patterns/logprobs.f32 "$work/got" || return 1
    ! "$train" --load $base --load-adapter $patterns --tokens-file $base/tokens.i32 --seq-length 32 \
        --global-batch-size 4 --lr 1e-2 --device cpu --train-iters 1 >"$work/out" 2>"$work/err" </dev/null &&
        says '^error: .*lora_B.weight: the scale .* a run trains adapters of one scale' "$work/err"
}

# By peft 0.21 in fp64: names of target_modules reach dense layers and shared experts, since experts are no modules of
# transformers 5. Hy3's shared experts have other names in its released folders.
adapters_without_experts_equal_peft() {
    for family in qwen2_moe hy_v3; do
        adapter=tests/golden/tune/mlp_$family model=tests/golden/hf/$family
        head -c 528 $model/tokens.i32 >"$work/first"
        set -- "$infer" --device cpu --score "$work/first" --seq-length 32 --out "$work/got"
        "$@" --load $model --load-adapter $adapter >"$work/out" 2>"$work/err" </dev/null &&
            as_reference $adapter/logprobs.f32 "$work/got" &&
            "$infer" --load $model --load-adapter $adapter --merge-adapter "$work/shared_$family" --device cpu \
                >"$work/out" 2>"$work/err" </dev/null &&
            "$@" --load "$work/shared_$family" >"$work/out" 2>"$work/err" </dev/null &&
            as_reference $adapter/logprobs.f32 "$work/got" || return 1
        "$train" --load $model --load-adapter $adapter --tokens-file $model/tokens.i32 --seq-length 32 --lr 1e-2 \
            --global-batch-size 4 --device cpu --train-iters 1 --save "$work/tuned_$family" >"$work/out" \
            2>"$work/err" </dev/null && ! grep -q '\.experts\.' "$work/tuned_$family/adapter_model.safetensors" ||
            return 1
    done
}

# The golden adapter has rank 4 and alpha 8; each of these says the same in other words.
one_adapter_in_other_words() {
    mkdir "$work/words" && cp tests/golden/tune/lora/adapter_model.safetensors "$work/words" || return 1
    head -c 528 $base/tokens.i32 >"$work/first"
    while IFS= read -r words; do
        printf '{"peft_type": "LORA", %s}\n' "$words" >"$work/words/adapter_config.json"
        "$infer" --load $base --load-adapter "$work/words" --score "$work/first" --seq-length 32 --out "$work/got" \
            --device cpu >"$work/out" 2>"$work/err" </dev/null &&
            as_reference tests/golden/tune/lora/logprobs.f32 "$work/got" && ! says warning "$work/err" || return 1
    done <<'END'
"r": 4, "lora_alpha": 8, "target_modules": "all-linear"
"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "use_rslora": true
"r": 9, "lora_alpha": 1, "target_modules": "all-linear", "rank_pattern": {".*": 4}, "alpha_pattern": {"[a-z_]+": 8}
"r": 1, "lora_alpha": 8, "target_modules": ".*proj", "rank_pattern": {"mlp\\.[a-z_]+": 4, "self_attn.._proj": 4}
"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "rank_pattern": {"proj": 9, "gate": 2}, "alpha_pattern": {}
"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "layers_to_transform": [0, 1, 2, 3], "layers_pattern": []
"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ".*norm|proj", "later": null, "more": {}
END
}

# Each in one line; a field of a later peft is reported.
what_an_adapter_may_not_ask_for_is_refused() {
    mkdir "$work/asks" && cp tests/golden/tune/lora/adapter_model.safetensors "$work/asks" || return 1
    set -- "$infer" --load $base --load-adapter "$work/asks" --prompt-tokens 1 --print-tokens --device cpu
    asks() { echo "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": \"all-linear\", $1}" \
        >"$work/asks/adapter_config.json"; }
    for asked in '"use_dora": true' '"bias": "all"' '"bias": "lora_only"' '"modules_to_save": ["lm_head"]' \
        '"layer_replication": [[0, 2]]' '"lora_bias": true' \
        '"trainable_token_indices": [1]' '"kasa_config": {"beta": 1}' '"init_lora_weights": "pissa"'; do
        asks "$asked"
        refused "asks/adapter_config.json: ${asked%%:*} asks for" "$@" || return 1
    done
    asks '"target_parameters": ["gate.weight", "gate_up_proj", "down_proj"]'
    refused 'gate.weight (a router.*gate_up_proj (one A for gate and up.*down_proj (.*merge_and_unload' "$@" ||
        return 1
    for asked in '"use_rslora": "true"' '"rank_pattern": [4]' '"rank_pattern": {"q_proj": "4"}' \
        '"rank_pattern": {"a": 0}' '"alpha_pattern": {"q_proj": null}' '"layers_to_transform": "0"' \
        '"layers_to_transform": [true]' '"exclude_modules": 1' '"layers_pattern": [1]' \
        '"target_parameters": "mlp.experts.down_proj"'; do
        asks "$asked"
        refused "asks/adapter_config.json: ${asked%%:*}.* must be" "$@" || return 1
    done
    asks '"rank_pattern": {"(": 4}'
    refused 'asks/adapter_config.json: "(" of "rank_pattern" is ' "$@" || return 1
    asks '"layers_to_transform": 7'
    refused 'leave no matrix of this model an adapter' "$@" || return 1
    asks '"layers_to_transform": 1'
    refused 'has no place' "$@" || return 1
    asks '"rank_pattern": {"q_proj": 5}'
    refused 'q_proj.lora_A.weight" is \[4, 32\] and the model.s \[5, 32\]' "$@" || return 1
    asks '"next": 1, "also": "x", "none": []'
    "$@" >"$work/out" 2>"$work/err" </dev/null &&
        says '^warning: .*asks/adapter_config.json: "next", "also": not known to this program' "$work/err"
}

# A matrix of the model whose product has no adapter: the message says so, and names no list of other matrices.
matrices_that_have_no_adapters_are_explained() {
    mkdir -p "$work/gate" && cp tests/golden/tune/lora/adapter_model.safetensors "$work/gate" || return 1
    echo '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "shared_expert_gate"]}' \
        >"$work/gate/adapter_config.json"
    refused 'mlp.shared_expert_gate is a router or a gate, .*merge_and_unload' "$infer" \
        --load tests/golden/hf/qwen2_moe --load-adapter "$work/gate" --prompt-tokens 1 --print-tokens --device cpu ||
        return 1
    for pair in mixtral:gate:router llama:embed_tokens:'outside the layers' llama:lm_head:'outside the layers' \
        gpt_oss:gate_up_proj:'one tensor' llama:input_layernorm:'no matrix'; do
        word=${pair#*:}
        refused "--lora-target ${word%%:*}: .*${word#*:}" "$train" --load "tests/golden/hf/${pair%%:*}" --tokens-file \
            $base/tokens.i32 --seq-length 32 --train-iters 1 --lr 1e-3 --device cpu --lora-rank 4 \
            --lora-target "${word%%:*}" || return 1
    done
}

adapters_are_not_looked_for_in_a_full_run() {
    "$train" --load $base --train-iters 0 --save "$work/full" --device cpu \
        >"$work/out" 2>"$work/err" </dev/null || return 1
    refused 'full: holds a whole model, not an adapter' "$infer" --load $base --load-adapter "$work/full" \
        --prompt-tokens 1 --print-tokens --device cpu
}

# The messages name --save, which was given, and an option that helps.
a_run_goes_on_with_adapters_or_without_as_it_began() {
    set -- "$train" --load $base --tokens-file $base/tokens.i32 --seq-length 32 --train-iters 2 --lr 1e-2 --device cpu \
        --auto-resume --save
    refused "run of --save $work/full has no adapters; leave out --lora-rank" "$@" "$work/full" --lora-rank 4 \
        --lora-target q_proj && tunes --train-iters 1 --save "$work/adapted" || return 1
    refused "run of --save $work/adapted has adapters; give its --lora-rank" "$@" "$work/adapted" &&
        refused 'adapter of .* has 4; give that' "$@" "$work/adapted" --lora-rank 8 --lora-target all-linear
}

# A download that broke off leaves links without files; a damaged digit in config.json must not take memory.
what_a_folder_lacks_is_named_before_memory_is_taken() {
    set -- "$infer" --prompt-tokens 1 --print-tokens --device cpu --load "$work/links"
    cp -R $base "$work/links" && chmod -R u+w "$work/links" || return 1
    for file in generation_config.json tokenizer.json model.safetensors config.json; do
        rm -f "$work/links/$file" && ln -s gone "$work/links/$file" || return 1
        [ $file = tokenizer.json ] && continue # not read here
        refused "links/$file: is a link to gone" "$@" || return 1
        rm "$work/links/$file" && [ $file = generation_config.json ] || cp $base/$file "$work/links"
    done
    refused 'links/tokenizer.json: is a link to gone' "$infer" --prompt a --device cpu --load "$work/links" || return 1
    sed 's/"hidden_size": [0-9]*/"hidden_size": 1048576/' $base/config.json >"$work/links/config.json"
    (
        # shellcheck disable=SC3045
        [ -n "${SANITIZE:-}" ] || ulimit -v 4000000 # a sanitizer reserves terabytes of addresses
        refused 'embed_tokens.weight" is .* and the model.s' "$@"
    )
}

a_config_without_its_type_is_refused() {
    tunes --train-iters 1 --save "$work/typed" && cp -r "$work/typed/iter_0000001" "$work/untyped" &&
        rm "$work/untyped/checksums.json" "$work/untyped/trainer.json" || return 1
    for config in '{}' '{"r": 4, "lora_alpha": 4, "target_modules": "all-linear"}'; do
        echo "$config" >"$work/untyped/adapter_config.json"
        refused 'adapter_config.json: "peft_type" is not "LORA"' "$infer" --load $base --load-adapter "$work/untyped" \
            --prompt-tokens 1 --print-tokens --device cpu || return 1
    done
}

an_adapter_is_no_model() {
    tunes --train-iters 1 --save "$work/other" || return 1
    refused 'holds an adapter; name its base' "$infer" --load "$work/other" --prompt-tokens 1 --print-tokens &&
        refused 'continue that run by --load-adapter' "$train" --load $base --tokens-file $base/tokens.i32 \
            --seq-length 32 --train-iters 2 --lr 1e-2 --device cpu --lora-rank 4 --lora-target q_proj \
            --save "$work/other" || return 1
    refused 'continue that run by --load-adapter' "$train" --load $base --tokens-file $base/tokens.i32 \
        --seq-length 32 --train-iters 2 --lr 1e-2 --device cpu --save "$work/other"
}

# prefers ARGUMENTS...: DPO with adapters on random weights.
prefers() {
    "$train" --num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --vocab-size 257 \
        --tokenizer-type ByteLevel --chat-template plain --device cpu --stage dpo \
        --lora-rank 4 --lora-target all-linear \
        --train-data-path "$work/pairs.jsonl" --seq-length 64 --global-batch-size 2 --lr 1e-2 \
        --lr-decay-style constant --prompt-key prompt --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 "$@" \
        >"$work/out" 2>"$work/err" </dev/null
}

the_reference_of_adapters_is_their_base() {
    for i in 1 2 3 4 5 6 7 8; do
        printf '{"prompt": "Say %d", "chosen": "%d", "rejected": "no"}\n' $i $i
    done >"$work/pairs.jsonl"
    prefers --train-iters 4 --metrics "$work/dpo_whole" &&
        prefers --train-iters 2 --save "$work/dpo" --auto-resume --metrics "$work/dpo_first" &&
        prefers --train-iters 4 --save "$work/dpo" --auto-resume --metrics "$work/dpo_second" &&
        says '^reference: the trained model with its adapters switched off$' "$work/out" || return 1
    losses "$work/dpo_whole" >"$work/expected"
    { losses "$work/dpo_first" && losses "$work/dpo_second"; } >"$work/actual"
    cmp "$work/expected" "$work/actual" && head -1 "$work/actual" | grep -q '^0\.6931' &&
        [ "$(sort -u "$work/actual" | wc -l)" = 4 ] || return 1
    prefers --lora-base-dtype fp8 --train-iters 1 --metrics "$work/dpo_fp8" && losses "$work/dpo_fp8" | head -1 |
        grep -q '^0\.6931'
}

check a_run_resumes_from_its_adapter a_run_resumes_from_its_adapter
check a_base_in_fp8_trains_resumes_and_merges a_base_in_fp8_trains_resumes_and_merges
check a_merged_model_scores_like_its_adapter a_merged_model_scores_like_its_adapter
check merging_beside_other_files_sums_its_own merging_beside_other_files_sums_its_own
check a_merge_that_fails_leaves_nothing a_merge_that_fails_leaves_nothing
check what_a_folder_says_goes_with_every_save what_a_folder_says_goes_with_every_save
check a_folder_does_not_lose_its_tokenizer a_folder_does_not_lose_its_tokenizer
check what_all_linear_leaves_out_is_said what_all_linear_leaves_out_is_said
check what_peft_drops_is_said what_peft_drops_is_said
check a_list_of_targets_has_no_limit a_list_of_targets_has_no_limit
check adapters_that_differ_from_matrix_to_matrix_equal_peft adapters_that_differ_from_matrix_to_matrix_equal_peft
check adapters_without_experts_equal_peft adapters_without_experts_equal_peft
check one_adapter_in_other_words one_adapter_in_other_words
check what_an_adapter_may_not_ask_for_is_refused what_an_adapter_may_not_ask_for_is_refused
check matrices_that_have_no_adapters_are_explained matrices_that_have_no_adapters_are_explained
check adapters_are_not_looked_for_in_a_full_run adapters_are_not_looked_for_in_a_full_run
check a_run_goes_on_with_adapters_or_without_as_it_began a_run_goes_on_with_adapters_or_without_as_it_began
check what_a_folder_lacks_is_named_before_memory_is_taken what_a_folder_lacks_is_named_before_memory_is_taken
check a_config_without_its_type_is_refused a_config_without_its_type_is_refused
check an_adapter_brings_its_chat_template an_adapter_brings_its_chat_template
check an_adapter_is_no_model an_adapter_is_no_model
check the_reference_of_adapters_is_their_base the_reference_of_adapters_is_their_base
exit $failed
