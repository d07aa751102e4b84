#!/bin/sh
# YAML files with roles, as ROLL, verl and Trinity-RFT write them: tests/roles, and the files of ../shared/yaml.
set -u
. tests/suite.sh
shared=$(cd "${MT_SHARED:-../shared}" 2>/dev/null && pwd)
roles=$PWD/tests/roles
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
small='--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --vocab-size 257
    --tokenizer-type ByteLevel --chat-template plain --device cpu'
if "$train" --config "$roles/roll.yaml" --role sft_train --print-config 2>&1 | grep -q 'built without libyaml'; then
    echo "skipped: libyaml is absent"
    exit 77
fi

# prints FILE ROLE ARGUMENTS...: the configuration of a role.
prints() {
    file=$1 role=$2
    shift 2
    "$train" --config "$file" --role "$role" --print-config "$@" >"$work/out" 2>"$work/err" </dev/null
}

# sets KEY OPTION VALUE: the last output has the key with its option and value.
sets() {
    says "^ *[0-9-]*  $1  *--$2 $3\$" "$work/out"
}

# Each change, "SED=ERROR", of the file NAME.yaml gives its error: NAME CHANGE...
refuses_changes() {
    name=$1
    shift
    for change in "$@"; do
        sed "${change%%=*}/" "$work/$name.yaml" >"$work/bad.yaml" &&
            refused "${change#*=}" "$train" --config "$work/bad.yaml" --role actor_train --print-config || return 1
    done
}

# unused KEY REASON: the last output has the key among those without effect.
unused() {
    says "^ *[0-9-]*  $1  *$2" "$work/out"
}

# refuses PATTERN LINE...: a file of these lines for the role sft_train.
refuses() {
    pattern=$1
    shift
    printf '%s\n' "$@" >"$work/bad.yaml"
    refused "$pattern" "$train" --config "$work/bad.yaml" --role sft_train --print-config
}

# ROLL's and verl's names for pictures.
pictures_have_options() {
    cat >"$work/seen.yaml" <<'EOF'
sft_train:
  model_args: {freeze_module_prefix: vision_model}
  data_args: {image_max_pixels: 4096, image_min_pixels: 64, image_folder: pictures}
EOF
    prints "$work/seen.yaml" sft_train --load tests/golden/vision/qwen3_vl || return 1
    sets sft_train.model_args.freeze_module_prefix freeze-vision true &&
        sets sft_train.model_args.freeze_module_prefix freeze-projector true &&
        sets sft_train.data_args.image_max_pixels image-max-pixels 4096 &&
        sets sft_train.data_args.image_min_pixels image-min-pixels 64 &&
        sets sft_train.data_args.image_folder image-folder pictures || return 1
    printf '%s\n' 'data: {image_key: pictures}' \
        'actor_rollout_ref: {actor: {freeze_vision_tower: true}, rollout: {name: vllm}}' >"$work/seen.yaml"
    prints "$work/seen.yaml" actor_train --load tests/golden/vision/qwen3_vl || return 1
    sets data.image_key image-key pictures && sets actor_rollout_ref.actor.freeze_vision_tower freeze-vision true
}

keys_have_options_and_references_values() {
    prints "$roles/roll.yaml" sft_train || return 1
    sets seed seed 7 && sets output_dir save ./output/small && sets sequence_length seq-length 64 &&
        sets pretrain load models/a/b-7 && sets pretrain finetune true && sets max_grad_norm clip-grad 0.5 &&
        sets sft_train.training_args.learning_rate lr 0.002 &&
        sets sft_train.training_args.weight_decay weight-decay 0.1 &&
        sets sft_train.training_args.per_device_train_batch_size micro-batch-size 2 &&
        sets sft_train.training_args.gradient_accumulation_steps gradient-accumulation-steps 3 &&
        sets sft_train.training_args.lr_scheduler_type lr-decay-style constant &&
        sets sft_train.training_args.warmup_steps lr-warmup-iters 1 &&
        sets sft_train.training_args.num_train_epochs train-epochs 2 &&
        sets sft_train.model_args.dtype bf16 false &&
        sets sft_train.model_args.attn_implementation attention-backend flash &&
        sets sft_train.strategy_args.strategy_config.recompute_granularity recompute-granularity full &&
        sets sft_train.strategy_args.strategy_config.additional_configs.recompute_method recompute-method uniform &&
        sets sft_train.use_sequence_packing sequence-packing true && sets sft_train stage sft &&
        sets sft_train.data_args.file_name train-data-path train.json
}

# is_fp16 FILE ROLE KEY: the file's key sets --fp16, and no default sets --bf16.
is_fp16() {
    prints "$1" "$2" && sets "$3" fp16 true && ! grep -q -- '--bf16' "$work/out"
}

# verl's optimizer begins with a scale of its own.
files_may_ask_for_fp16() {
    for type in fp16 float16; do
        sed "s/dtype: [a-z0-9]*/dtype: $type/" "$roles/roll.yaml" >"$work/half.yaml"
        is_fp16 "$work/half.yaml" sft_train sft_train.model_args.dtype || return 1
        sed "s/use_mbridge: True/dtype: $type/" "$roles/verl.yaml" >"$work/half.yaml"
        is_fp16 "$work/half.yaml" actor_train actor_rollout_ref.actor.megatron.dtype &&
            sets '(absent: initial_loss_scale)' initial-loss-scale 32768 || return 1
        cat >"$work/half.yaml" <<EOF
mode: both
model: {model_path: a/b}
algorithm: {algorithm_type: grpo}
trainer: {trainer_config: {actor_rollout_ref: {actor: {megatron: {dtype: $type}}}}}
EOF
        is_fp16 "$work/half.yaml" actor_train trainer.trainer_config.actor_rollout_ref.actor.megatron.dtype || return 1
    done
    for keys in 'training_args: {fp16: true}' \
        'strategy_args: {strategy_name: megatron_train, strategy_config: {fp16: true}}'; do
        printf 'pretrain: a/b\nsft_train:\n  model_args: {}\n  %s\n' "$keys" >"$work/half.yaml"
        prints "$work/half.yaml" sft_train && shows fp16 true && ! grep -q -- '--bf16' "$work/out" || return 1
    done
    # transformers' files have the default too
    printf 'pretrain: a/b\nsft_train:\n  model_args: {}\n  training_args: {fp16: False}\n' >"$work/half.yaml"
    prints "$work/half.yaml" sft_train && sets '(absent: dtype)' bf16 true
}

# Hugging Face writes num_train_epochs as a float.
floats_are_whole_numbers() {
    sed 's/num_train_epochs: .*/num_train_epochs: 3.0/' "$roles/roll.yaml" >"$work/floats.yaml"
    prints "$work/floats.yaml" sft_train && sets sft_train.training_args.num_train_epochs train-epochs 3 || return 1
    refuses 'bad.yaml:3: num_train_epochs expects a whole number, got .2.5' 'sft_train:' '  training_args:' \
        '    num_train_epochs: 2.5'
}

keys_of_other_engines_are_listed() {
    unused hydra hydra && unused track_with trackers && unused defaults hydra && unused system_envs Ray &&
        unused sft_train.strategy_args.strategy_config.apply_rope_fusion . && unused reference 'other roles' &&
        unused lengths 'a value that other keys refer to' && unused max_steps 'the default' &&
        unused sft_train.strategy_args.strategy_config.sequence_parallel \
            'gives way to --tensor-model-parallel-size 1' &&
        unused sft_train.device_mapping '.*has 4' && unused sft_train.strategy_args.strategy_name 'the choice'
}

# Each role has its own keys; "<<" and aliases; a section of another engine is not looked into.
every_role_is_read() {
    prints "$roles/roll.yaml" reference &&
        sets reference.model_args.attn_implementation attention-backend flash &&
        sets reference.model_args.dtype bf16 true && sets reference.infer_batch_size micro-batch-size 5 &&
        says '^options on 2 ranks' "$work/out" || return 1
    prints "$roles/roll.yaml" rewards.rule &&
        sets rewards.rule.model_args.dtype bf16 false && unused rewards.model 'other roles' &&
        unused rewards.rule.worker_cls "ROLL's Python" || return 1
    prints "$roles/roll.yaml" rewards.model &&
        unused rewards.model.strategy_args.strategy_config vllm
}

# The generator's settings; --score needs none of them.
infer_reads_its_role() {
    set -- --config "$roles/roll.yaml" --role actor_infer
    "$infer" "$@" --print-config >"$work/out" 2>"$work/err" && sets actor_infer.generating_args.top_k top-k 0 &&
        sets actor_infer.generating_args.max_new_tokens max-new-tokens 3 &&
        unused actor_infer.data_args.template 'of no use in this run' &&
        unused actor_infer.generating_args.num_return_sequences 'of no use in this run' &&
        unused actor_infer.infer_batch_size 'of no use in this run' || return 1
    "$infer" "$@" --print-config --score none.i32 >"$work/out" 2>"$work/err" &&
        unused actor_infer.generating_args.top_k 'gives way to --score' &&
        sets actor_infer.infer_batch_size micro-batch-size 4 || return 1
    [ -d "$shared/models/stories260K-hf" ] || return 0
    "$infer" "$@" --load "$shared/models/stories260K-hf" --prompt 'Once upon a' --print-tokens --device cpu \
        >"$work/out" 2>"$work/err" && [ "$(wc -w <"$work/out")" = 6 ] && says 'vllm$' "$work/err"
}

# Keys on the command line, as Hydra takes them: changed, added, removed; options win over them.
words_of_hydra_change_keys() {
    printf '%s\n' 'seed: 5' 'lengths: &l {prompt: 8}' 'a: *l' \
        'sft_train: {model_args: &m {dtype: bf16, lora_rank: 4},' \
        '  training_args: {learning_rate: 0.5, max_steps: 3}}' 'actor_infer: {model_args: *m}' \
        'sequence_length: ${a.prompt}' 'prompt_length: ${lengths.prompt}' >"$work/hydra.yaml"
    prints "$work/hydra.yaml" sft_train seed=7 sft_train.training_args.learning_rate=1e-3 \
        '~sft_train.training_args.max_steps' \
        +sft_train.training_args.num_train_epochs=2 ++sft_train.training_args.weight_decay=0.25 \
        'sft_train.data_args.file_name=[a.json, "b c.jsonl"]' sft_train.model_args.lora_rank=6 a.prompt=16 \
        sft_train.data_args.template= || return 1
    sets seed seed 7 && sets sft_train.training_args.learning_rate lr 0.001 && ! grep -q max_steps "$work/out" &&
        sets sft_train.training_args.num_train_epochs train-epochs 2 &&
        sets sft_train.training_args.weight_decay weight-decay 0.25 &&
        sets sft_train.data_args.file_name train-data-path 'a.json b c.jsonl' &&
        sets sft_train.model_args.lora_rank lora-rank 6 && sets sft_train.model_args.dtype bf16 true &&
        sets sequence_length seq-length 16 && says '^ *-  seed  ' "$work/out" &&
        says '^  seed  *7  *# command line$' "$work/out" &&
        says '^  seq-length  *16  *# hydra.yaml:7$' "$work/out" || return 1
    prints "$work/hydra.yaml" sft_train 'sft_train.model_args={lora_rank: 9}' 'sft_train.training_args.run_name=a: b' &&
        sets sft_train.model_args.lora_rank lora-rank 9 && sets sft_train.model_args.dtype bf16 true || return 1
    prints "$work/hydra.yaml" sft_train lengths.prompt=32 seed=7 --seed 9 && shows seed 9 && shows seq-length 8 ||
        return 1
    "$infer" --config "$work/hydra.yaml" --role actor_infer --print-config sft_train.model_args.dtype=fp32 \
        >"$work/out" 2>"$work/err" && sets actor_infer.model_args.dtype bf16 true || return 1
    set -- "$train" --config "$work/hydra.yaml" --role sft_train --print-config
    refused 'command line: unknown option no_such_key' "$@" sft_train.model_args.no_such_key=1 &&
        refused 'command line: dtype cannot be fp7: expects' "$@" sft_train.model_args.dtype=fp7 &&
        refused 'command line: ~sft_train.nothing: .*hydra.yaml has no such key' "$@" '~sft_train.nothing' &&
        refused 'seed=\[1:.*is not YAML' "$@" 'seed=[1' && refused 'command line: seed expects' "$@" seed=x &&
        refused "unexpected argument 'se-ed'" "$@" se-ed &&
        refused "unexpected argument 'a.b=1': such a word changes a key of a file of roles" "$train" --mock-data a.b=1
}

# An actor of a file with environments takes prompts of files; a model that scores has no use for these keys.
environments_give_way_to_prompts() {
    printf '%s\n' 'custom_envs: {a: {env_type: sokoban}}' 'train_env_manager: {group_size: 4, num_env_groups: 8}' \
        'render_save_dir: ./r' 'max_tokens_per_step: 5' 'rollout_batch_size: 32' 'adv_estimator: grpo' \
        'reward_normalization: {grouping: traj_group_id, method: mean_std}' 'step_reward_gamma: 0.9' \
        'actor_train: {model_args: {dtype: bf16}}' \
        'reference: {model_args: {dtype: bf16}, infer_batch_size: 3}' >"$work/environments.yaml"
    prints "$work/environments.yaml" reference && sets reference.infer_batch_size micro-batch-size 3 &&
        unused custom_envs 'other roles' && unused render_save_dir 'pictures of environments' &&
        prints "$work/environments.yaml" actor_train && sets rollout_batch_size rollout-batch-size 8 &&
        sets train_env_manager.group_size num-return-sequences 4 && sets max_tokens_per_step max-new-tokens 5 &&
        sets adv_estimator adv-estimator step_reinforce && shows norm-mean-type group && shows norm-std-type group &&
        unused custom_envs 'environments, which do not run here: prompts come from --data-path, rewards' &&
        unused train_env_manager.num_env_groups 'environments, which do not run here' &&
        says 'rl needs --data-path$' "$work/out" ||
        return 1
    sed 's/traj_group_id/batch/' "$work/environments.yaml" >"$work/changed.yaml"
    prints "$work/changed.yaml" actor_train && shows norm-mean-type batch && shows norm-std-type batch || return 1
    sed 's/mean_std/mean/' "$work/environments.yaml" >"$work/changed.yaml"
    prints "$work/changed.yaml" actor_train && shows norm-mean-type group && ! grep -q 'norm-std-type' "$work/out" ||
        return 1
    sed 's/traj_group_id, method: mean_std/tags, method: identity/' "$work/environments.yaml" >"$work/changed.yaml"
    prints "$work/changed.yaml" actor_train && ! grep -q 'norm-std-type' "$work/out" || return 1
    sed 's/method: mean_std/norm_mean_type: batch/' "$work/environments.yaml" >"$work/changed.yaml"
    prints "$work/changed.yaml" actor_train && shows norm-mean-type batch && ! grep -q 'norm-std-type' "$work/out" ||
        return 1
    sed 's/traj_group_id/tags/' "$work/environments.yaml" >"$work/tags.yaml"
    sed 's/mean_std/asym_clip/' "$work/environments.yaml" >"$work/cut.yaml"
    sed 's/rollout_batch_size: 32/rollout_batch_size: 30/' "$work/environments.yaml" >"$work/odd.yaml"
    refused 'grouping rewards are compared with those of their prompt' "$train" --config "$work/tags.yaml" \
        --role actor_train --print-config &&
        refused 'method cannot be asym_clip: rewards are not cut' "$train" --config "$work/cut.yaml" \
            --role actor_train --print-config &&
        refused 'must be a multiple of train_env_manager.group_size' "$train" --config "$work/odd.yaml" \
            --role actor_train --print-config &&
        refuses 'video_max_pixels is not supported: videos are not read' \
            'sft_train: {data_args: {video_max_pixels: 9}}' &&
        printf '%s\n' 'async_generation_ratio: 0.5' 'actor_train: {model_args: {dtype: bf16}}' >"$work/late.yaml" &&
        refused 'cannot be 0.5: whole batches wait' "$train" --config "$work/late.yaml" --role actor_train
}

# ROLL's micro-batches by tokens: for samples of files --variable-seq-lengths with the budget of a context rank, for
# responses packed rows.
micro_batches_by_tokens_have_options() {
    printf '%s\n' 'sft_train: {model_args: {dtype: bf16}, use_dynamic_batching_in_train: true,' \
        '  max_tokens_per_microbatch_in_train: 4096, sequence_length_round_in_train: 64,' \
        '  use_dynamic_batching_in_infer: true, max_tokens_per_microbatch_in_infer: 9,' \
        '  strategy_args: {strategy_name: megatron_train, strategy_config: {context_parallel_size: 2}}}' \
        >"$work/dynamic.yaml"
    prints "$work/dynamic.yaml" sft_train &&
        sets sft_train.use_dynamic_batching_in_train variable-seq-lengths true &&
        sets sft_train.max_tokens_per_microbatch_in_train max-seqlen-per-dp-cp-rank 2048 || return 1
    sed 's/train: true/train: false/' "$work/dynamic.yaml" >"$work/static.yaml"
    prints "$work/static.yaml" sft_train && ! grep -q -- '--variable-seq-lengths true' "$work/out" &&
        unused sft_train.max_tokens_per_microbatch_in_train 'use_dynamic_batching_in_train, which is not true' ||
        return 1
    printf '%s\n' 'adv_estimator: grpo' 'actor_train: {model_args: {dtype: bf16},' \
        '  use_dynamic_batching_in_train: true, max_tokens_per_microbatch_in_train: 4096}' >"$work/dynamic.yaml"
    prints "$work/dynamic.yaml" actor_train &&
        sets actor_train.use_dynamic_batching_in_train sequence-packing true
}

# A value that is refused does no harm where the command line has the option.
refused_values_give_way_to_the_command_line() {
    printf '%s\n' 'actor_train: {pg_variant: toprr, training_args: {lr_scheduler_type: polynomial}}' \
        >"$work/values.yaml"
    refused 'pg_variant expects' "$train" --config "$work/values.yaml" --role actor_train --print-config &&
        refused 'lr_scheduler_type cannot be polynomial' "$train" --config "$work/values.yaml" --role actor_train \
            --print-config --pg-variant gspo &&
        prints "$work/values.yaml" actor_train --pg-variant gspo --lr-decay-style cosine && shows pg-variant gspo &&
        shows lr-decay-style cosine &&
        unused actor_train.training_args.lr_scheduler_type 'gives way to the command line' &&
        ! "$train" --config "$work/values.yaml" --role actor_train --print-config --pg-variant gspoo \
            --lr-decay-style cosine >"$work/out" 2>"$work/err" && says 'pg-variant expects' "$work/err"
}

# Where a key is absent, ROLL's and verl's defaults hold.
absent_keys_have_their_defaults() {
    printf '%s\n' 'sft_train: {model_args: {lora_target: "q_proj,v_proj", lora_rank: 6}}' >"$work/lora.yaml"
    prints "$work/lora.yaml" sft_train && sets sft_train.model_args.lora_target lora-target q_proj,v_proj &&
        sets '(absent: lora_alpha)' lora-alpha 12 && sets '(absent: weight_decay)' weight-decay 0 &&
        ! grep -q 'absent: lora_rank' "$work/out" || return 1
    printf '%s\n' 'sft_train: {model_args: {lora_target: all}}' >"$work/lora.yaml"
    prints "$work/lora.yaml" sft_train && sets sft_train.model_args.lora_target lora-target all-linear &&
        sets '(absent: lora_rank)' lora-rank 8 && sets '(absent: lora_alpha)' lora-alpha 16
}

# A file of verl that leaves keys out has the values of verl's generated file; n counts once.
a_partial_file_of_verl_has_its_defaults() {
    cat >"$work/partial.yaml" <<EOF
data: {train_files: $work/say.jsonl, train_batch_size: 4, max_prompt_length: 0x20}
actor_rollout_ref:
  model: {path: a/b}
  actor: {ppo_mini_batch_size: 4, ppo_micro_batch_size_per_gpu: 1, use_kl_loss: true}
EOF
    prints "$work/partial.yaml" actor_train && sets '(absent: adv_estimator)' adv-estimator gae &&
        sets '(absent: adv_estimator)' whiten-advantages true && sets '(absent: n)' num-return-sequences 1 &&
        sets actor_rollout_ref.actor.ppo_mini_batch_size global-batch-size 4 &&
        sets '(absent: critic.optim.lr)' critic-lr 1e-05 && sets '(absent: critic.cliprange_value)' value-clip 0.5 &&
        sets '(absent: kl_loss_coef)' kl-loss-coef 0.001 && sets '(absent: lr)' lr 1e-06 &&
        sets data.max_prompt_length seq-length 544 && sets '(absent: max_response_length)' max-new-tokens 512 &&
        sets '(absent: total_epochs)' train-epochs 30 && sets '(absent: dtype)' bf16 true &&
        sets '(absent: seed)' seed 42 && says 'rewards: --reward exact, as' "$work/out" || return 1
    prints "$work/partial.yaml" actor_train actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.model.lora_alpha=16 \
        $small && unused actor_rollout_ref.model.lora_alpha 'of no use in this run' || return 1
    printf 'actor_rollout_ref: {actor: {optim: {}}, rollout: {n: 3}}\nalgorithm: {adv_estimator: grpo}\n' \
        >"$work/partial.yaml"
    prints "$work/partial.yaml" actor_train && sets '(absent: train_batch_size)' rollout-batch-size 1024 &&
        sets '(absent: ppo_mini_batch_size)' global-batch-size 768 &&
        sets '(absent: max_prompt_length)' seq-length 1024 &&
        ! grep -q 'whiten\|value-clip\|kl-loss-coef' "$work/out" || return 1
    printf '%s\n' 'actor_rollout_ref: {actor: {optim: {}, use_kl_loss: true}}' 'algorithm: {adv_estimator: grpo}' \
        'trainer: {total_training_steps: 3}' "data: {train_files: $work/say.jsonl}" >"$work/partial.yaml"
    # shellcheck disable=SC2086
    prints "$work/partial.yaml" actor_train $small && sets '(absent: kl_loss_coef)' kl-loss-coef 0.001 &&
        says 'compare the responses to a prompt: --num-return-sequences must be' "$work/out"
}

# As verl's, those of ROLL and of Trinity-RFT.
partial_files_of_roll_and_trinity_have_their_defaults() {
    printf '%s\n' 'actor_train: {model_args: {}}' 'response_length: 16' >"$work/partial.yaml"
    prints "$work/partial.yaml" actor_train && sets '(absent: rollout_batch_size)' rollout-batch-size 128 &&
        sets '(absent: max_steps)' train-iters 500 && sets '(absent: prompt_length)' seq-length 1040 &&
        sets '(absent: gradient_accumulation_steps)' gradient-accumulation-steps 1 &&
        sets '(absent: per_device_train_batch_size)' micro-batch-size 8 && sets '(absent: learning_rate)' lr 5e-05 &&
        sets '(absent: critic.learning_rate)' critic-lr 5e-05 || return 1
    printf '%s\n' 'actor_train: {model_args: {}}' 'sequence_length: 96' 'prompt_length: 64' 'max_steps: -1' \
        >"$work/partial.yaml"
    prints "$work/partial.yaml" actor_train && sets '(absent: max_new_tokens)' max-new-tokens 32 &&
        ! grep -q 'absent: max_steps' "$work/out" || return 1
    printf '%s\n' 'algorithm: {algorithm_type: ppo}' 'trainer: {trainer_config: {actor_rollout_ref: {actor: {' \
        '  megatron: {}}}}}' >"$work/partial.yaml"
    prints "$work/partial.yaml" actor_train && sets '(absent: algorithm_type)' whiten-advantages true &&
        sets '(absent: batch_size)' rollout-batch-size 1 && sets '(absent: critic.optim.lr)' critic-lr 1e-06
}

# Keys that change the data or the numbers are honoured, or refused unless they are neutral.
keys_that_change_the_data_have_an_answer() {
    cat >"$work/data.yaml" <<EOF
data: {shuffle: false, train_batch_size: 4, gen_batch_size: 4, truncation: error,
  custom_cls: {path: null, name: null}, apply_chat_template_kwargs: {}}
actor_rollout_ref:
  model: {path: a/b, custom_chat_template: null, external_lib: null}
  actor: {strategy: megatron, optim: {}, megatron: {use_dist_checkpointing: false, dist_checkpointing_path: a}}
  rollout: {mode: async, n: 2, multi_turn: {max_assistant_turns: 3}, agent: {default_agent_loop: single_turn_agent},
            over_sample_rate: 0, quantization: null}
  ref: {strategy: megatron, megatron: {use_dist_checkpointing: False, dist_checkpointing_path: b}}
algorithm: {adv_estimator: grpo}
critic: {strategy: megatron, megatron: {use_dist_checkpointing: False, dist_checkpointing_path: c}}
skip: {_target_: a.b, rollout: {enable: false, action: cache}, async_rollout: {enable: false}}
trainer: {val_only: false}
EOF
    # shellcheck disable=SC2016 # the reference is the YAML's
    kwargs='{enable_thinking: false, day: "3", at: [0x10, null, 1.5, {a: yes, b: "${data.shuffle}"}]}'
    sed "s/kwargs: {}/kwargs: $kwargs/" \
        "$work/data.yaml" >"$work/kwargs.yaml" && prints "$work/kwargs.yaml" actor_train &&
        sets data.apply_chat_template_kwargs chat-template-kwargs \
            '{"enable_thinking": false, "day": "3", "at": \[16, null, 1.5, {"a": true, "b": false}\]}' &&
        prints "$work/data.yaml" actor_train && sets data.shuffle shuffle-prompts false &&
        refuses_changes data 's/truncation: error/truncation: left=truncation can only be error' \
            's/gen_batch_size: 4/gen_batch_size: 8=gen_batch_size can only be train_batch_size' \
            's/{path: null/{path: my.py=path is not supported: prompts are' \
            's/kwargs: {}/kwargs: 3=apply_chat_template_kwargs expects a section' \
            's/kwargs: {}/kwargs: {a: 017}=is an octal number' \
            's/kwargs: {}/kwargs: {a: 1, a: 2}=a is given twice in this section' \
            's/custom_chat_template: null/custom_chat_template: x=custom_chat_template is not supported' \
            's/multi_turn: {/multi_turn: {enable: true, =enable is not supported: tools are Python classes there' \
            's/single_turn_agent/tool_agent=default_agent_loop can only be single_turn_agent' \
            's/rate: 0/rate: 0.1=over_sample_rate can only be 0' \
            's/quantization: null/quantization: fp8=quantization is not supported' \
            's/actor: {strategy: megatron/actor: {strategy: banana=strategy can only be megatron' \
            's/ref: {strategy: megatron/ref: {strategy: banana=strategy can only be megatron' \
            's/critic: {strategy: megatron/critic: {strategy: banana=strategy can only be megatron' \
            's/False, dist_checkpointing_path: b/true=use_dist_checkpointing is not supported: weights' \
            's/False, dist_checkpointing_path: c/true=use_dist_checkpointing is not supported: weights' \
            's/rollout: {enable: false/rollout: {enable: true=rollout is not supported: each iteration' \
            's/mode: async/mode: a=mode can only be sync' 's/val_only: false/val_only: true=val_only is not' \
            's/_checkpointing: false, dist_checkpointing_path: a/_checkpointing: true=use_dist_checkpointing is not' \
            's/use_dist_checkpointing: false, /=dist_checkpointing_path is not supported: weights' || return 1
    printf '%s\n' 'actor_train: {data_args: {interleave_probs: "1.0"}, model_args: {model_type: trl},' \
        '  strategy_args: {strategy_name: megatron_train}, model_update_frequency: 1}' \
        'reference: {strategy_args: {strategy_name: hf_infer}}' >"$work/data.yaml"
    prints "$work/data.yaml" actor_train &&
        refuses_changes data 's/"1.0"/"0.3,0.7"=interleave_probs is not supported: samples come' \
            's/type: trl/type: banana=model_type can only be' \
            's/megatron_train/banana=strategy_name can only be megatron_train|' \
            's/hf_infer/banana=strategy_name can only be megatron_train|' \
            's/frequency: 1/frequency: 2=model_update_frequency can only be 1'
}

# The name of an engine may be written in any case: its settings count all the same.
the_case_of_an_engine_loses_no_setting() {
    for engine in megatron_train Megatron_Train MEGATRON_TRAIN; do
        printf '%s\n' "actor_train: {strategy_args: {strategy_name: $engine," \
            '  strategy_config: {tensor_model_parallel_size: 2}}}' >"$work/case.yaml"
        prints "$work/case.yaml" actor_train &&
            sets actor_train.strategy_args.strategy_config.tensor_model_parallel_size tensor-model-parallel-size 2 &&
            refused 'rl needs --data-path' "$train" --config "$work/case.yaml" --role actor_train || return 1
    done
}

# A critic trains beside the actor, with its settings except lr; others would have no effect.
settings_of_a_critic_that_differ_are_refused() {
    for line in 'optim: {lr: 1e-5, weight_decay: 0.5}' 'optim: {lr_decay_style: cosine}' \
        'loss_agg_mode: seq-mean-token-sum' 'optim: {lr_warmup_steps_ratio: 0.05}' 'ppo_epochs: 3'; do
        for estimator in gae grpo; do
            cat >"$work/critic.yaml" <<EOF
data: {train_files: none.jsonl, train_batch_size: 4, max_prompt_length: 16, max_response_length: 16}
algorithm: {adv_estimator: $estimator}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 4, ppo_micro_batch_size_per_gpu: 1, loss_agg_mode: token-mean, ppo_epochs: 1,
    optim: {lr: 1e-6, weight_decay: 0.01, lr_decay_style: constant, lr_warmup_steps_ratio: 0}}
  rollout: {n: 2}
critic: {$line}
EOF
            if [ $estimator = gae ]; then
                refused ' is .* make them equal' "$train" --config "$work/critic.yaml" \
                    --role actor_train || return 1
            else # no critic is trained
                "$train" --config "$work/critic.yaml" --role actor_train --print-config >"$work/out" 2>"$work/err" &&
                    ! grep -q 'make them equal' "$work/out" || return 1
            fi
        done
    done
    sed 's/^critic: .*/critic: {optim: {lr: 1e-5, weight_decay: 1e-2, lr_decay_style: banana}}/' "$work/critic.yaml" \
        >"$work/banana.yaml"
    refused "lr_decay_style expects constant|linear|.*, got 'banana'" "$train" \
        --config "$work/banana.yaml" --role actor_train
}

# A role that scores or generates is not trained.
roles_that_rest_do_not_train() {
    printf '%s\n' 'actor_train: {strategy_args: {strategy_name: megatron_infer}}' \
        'reference: {strategy_args: {strategy_name: megatron_infer}}' 'teacher: {model_args: {}}' >"$work/rest.yaml"
    for role in actor_train reference teacher; do
        prints "$work/rest.yaml" $role &&
            refused "role $role: .*rest.yaml does not train this role" "$train" --config "$work/rest.yaml" \
                --role $role --mock-data || return 1
    done
}

# Fields of transformers' TrainingArguments and of MCoreAdapter at their defaults, also false; those with a counterpart
# set it. Keys for experts give way in a model without.
fields_at_their_defaults_are_accepted() {
    cat >"$work/fields.yaml" <<EOF
sft_train:
  training_args: {output_dir: out, do_train: false, eval_strategy: "no", prediction_loss_only: False,
    learning_rate: 5e-5, max_grad_norm: 0.5, lr_scheduler_type: constant_with_warmup,
    lr_scheduler_kwargs: {}, warmup_ratio: 0.1,
    log_level: passive, logging_steps: 500, save_steps: 70, save_total_limit: 2, max_steps: -1, fp16_opt_level: O1,
    local_rank: -1, debug: "", fsdp: "", label_smoothing_factor: 0.0, report_to: null, include_for_metrics: [],
    torch_compile: false, average_tokens_across_devices: true, optim: adamw_torch_fused, group_by_length: false,
    enable_jit_checkpoint: false, use_cache: false, train_sampling_strategy: random, project: huggingface,
    trackio_space_id: trackio, ddp_static_graph: null, tf32: False, fsdp_config: false, eval_steps: no,
    ddp_find_unused_parameters: false, resume_from_checkpoint: false, activation_checkpointing: null,
    dataloader_in_order: true, dataloader_multiprocessing_context: null, trackio_bucket_id: null, ddp_backend: nccl,
    split_batches: null, num_train_epochs: 3.0}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {sequence_parallel: false, overlap_p2p_comm: true, variable_seq_lengths: false,
      moe_token_dispatcher_type: allgather, moe_shared_expert_overlap: false, moe_layer_recompute: false,
      calculate_per_token_loss: false, cuda_graph_scope: full, accumulate_allreduce_grads_in_fp32: false,
      distrib_optim_fully_reshardable: false, delay_grad_reduce: true, ckpt_format: legacy, save_hf_model: false,
      optimizer_cpu_offload: false, optimizer_offload_fraction: 0.0, additional_configs: $work/more.json}
EOF
    echo '{"recompute_granularity": "full", "moe_aux_loss_coeff": 0.5}' >"$work/more.json"
    # shellcheck disable=SC2086
    prints "$work/fields.yaml" sft_train $small --seq-length 32 --train-data-path none.jsonl &&
        sets sft_train.training_args.max_grad_norm clip-grad 0.5 &&
        sets sft_train.training_args.lr_scheduler_type lr-decay-style constant &&
        sets sft_train.training_args.logging_steps log-interval 500 &&
        sets sft_train.training_args.save_steps save-interval 70 &&
        sets sft_train.strategy_args.strategy_config.additional_configs.recompute_granularity \
            recompute-granularity full &&
        unused sft_train.strategy_args.strategy_config.moe_token_dispatcher_type 'the model has no experts' &&
        unused sft_train.strategy_args.strategy_config.additional_configs.moe_aux_loss_coeff 'the model has no' &&
        unused sft_train.strategy_args.strategy_config.calculate_per_token_loss 'the loss is the sum' &&
        ! grep -q 'do not make a run' "$work/out" || return 1
    echo '{"banan": 1}' >"$work/more.json"
    refused 'fields.yaml:[0-9]*: unknown option banan' "$train" --config "$work/fields.yaml" --role sft_train ||
        return 1
    echo '{"recompute_granularity": "full",' >"$work/more.json"
    refused 'more.json:[0-9]*: is not YAML' "$train" --config "$work/fields.yaml" --role sft_train || return 1
    rm "$work/more.json"
    refused 'more.json: cannot be read' "$train" --config "$work/fields.yaml" --role sft_train || return 1
    "$train" --mock-data --max-grad-norm 0.5 --lr_scheduler_type constant_with_warmup --logging-steps 3 --save_steps 4 \
        --bf16 False --do_train True --gradient_checkpointing False --max_steps 7 --save "$work/none" --print-config \
        >"$work/out" 2>"$work/err" && shows clip-grad 0.5 &&
        shows lr-decay-style constant && shows log-interval 3 &&
        shows save-interval 4 && shows train-iters 7 &&
        ! grep -q '^  bf16' "$work/out"
}

# Fields of transformers that no number depends on stop no run, as its users set them; others are refused.
fields_without_effect_have_any_value() {
    cat >"$work/idle.yaml" <<EOF
sft_train:
  training_args: {output_dir: out, run_name: first, report_to: wandb, logging_dir: ./logs, ddp_timeout: 180000000,
    dataloader_num_workers: 4, dataloader_pin_memory: false, remove_unused_columns: false, logging_first_step: true,
    log_level: info, torch_compile: true, use_liger_kernel: true, include_tokens_per_second: true, max_steps: 7,
    gradient_checkpointing_kwargs: {use_reentrant: false}, ddp_find_unused_parameters: true}
EOF
    # shellcheck disable=SC2086
    prints "$work/idle.yaml" sft_train $small --seq-length 32 --train-data-path none.jsonl &&
        unused sft_train.training_args.run_name trackers && shows train-iters 7 || return 1
    # shellcheck disable=SC2086
    "$train" --mock-data $small --seq-length 32 --run_name first --report_to wandb --ddp_timeout 180000000 \
        --dataloader_num_workers 4 --remove_unused_columns False --logging_first_step --torch_compile True \
        --gradient_checkpointing_kwargs '{"use_reentrant": false}' --max_steps 7 --print-config >"$work/out" \
        2>"$work/err" && says 'no effect here: .*--run_name' "$work/out" && shows train-iters 7 || return 1
    for wrong in group_by_length=true label_smoothing_factor=0.1; do
        # shellcheck disable=SC2086
        refused 'can only be' "$train" --mock-data $small --seq-length 32 "--$wrong" --print-config || return 1
    done
    says 'smoothed' "$work/err"
}

# Fields with a counterpart set it, and lists may be empty, as in a file.
fields_on_the_command_line_have_what_a_file_may_have() {
    run="$train --mock-data ${small% --device cpu} --seq-length 32 --max_steps 7 --print-config"
    $run --include_for_metrics --label_names '[]' --optim_target_modules '[]' --gradient_checkpointing true \
        --per_device_eval_batch_size 4 --use_cpu True --full_determinism True --optim lion_32bit \
        --disable_tqdm None --data_seed None --hub_private_repo null >"$work/out" 2>"$work/err" &&
        shows recompute-granularity full && shows device cpu && shows deterministic-mode true && shows optimizer lion &&
        says 'no effect here: .*--include-for-metrics' "$work/out" && ! grep -q '^  data-seed' "$work/out" || return 1
    for off in False None; do
        $run --gradient_checkpointing $off --no_cuda $off --full_determinism $off >"$work/out" 2>"$work/err" &&
            ! grep -q '^  recompute\|^  device\|^  deterministic' "$work/out" || return 1
    done
    $run --resume_from_checkpoint True --save "$work/none" >"$work/out" 2>"$work/err" && shows auto-resume true &&
        refused 'two values; leave one out' $run --gradient_checkpointing --recompute-granularity selective &&
        refused 'has no restarts' $run --lr_scheduler_type cosine_with_restarts &&
        refused 'can only be' $run --include_for_metrics inputs
}

# As Python writes them, and transformers' values for "not given"; in both orders, and in a flat file.
fields_on_the_command_line_may_be_at_their_defaults() {
    # shellcheck disable=SC2086
    for steps in '--max_steps -1 --train-iters 7' '--train-iters 7 --max_steps=-1' '--max_steps 7.0'; do
        "$train" $small --seq-length 32 --mock-data --tf32 False --deepspeed None --resume_from_checkpoint False \
            --save_total_limit False --eval_steps no --save_steps -1 --warmup_steps 0.25 $steps --print-config \
            >"$work/out" 2>"$work/err" && shows train-iters 7 &&
            shows lr-warmup-fraction 0.25 &&
            ! grep -q '^  save-interval\|^  eval-interval\|^  keep-checkpoints' "$work/out" || return 1
    done
    printf '%s\n' 'train_iters: 7' 'max_steps: -1' 'tf32: False' 'save_total_limit: false' 'warmup_steps: 0.25' \
        >"$work/flat.yaml"
    # shellcheck disable=SC2086
    "$train" $small --seq-length 32 --mock-data --config "$work/flat.yaml" --print-config >"$work/out" 2>"$work/err" &&
        shows train-iters 7 && shows lr-warmup-fraction 0.25 || return 1
    # max_steps overrides the epochs, whose default is 3.0
    # shellcheck disable=SC2086
    "$train" $small --seq-length 32 --mock-data --num_train_epochs 3.0 --max_steps 7 --print-config >"$work/out" \
        2>"$work/err" && shows train-iters 7 && ! grep -q '^  train-epochs' "$work/out" || return 1
    "$train" --num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 257 --seq-length 32 --mock-data \
        --lr 1e-3 --device cpu --num_train_epochs 3.0 --max_steps 1 >"$work/out" \
        2>"$work/err" && grep -q '^--num-train-epochs has no effect: --max-steps decides' "$work/out" || return 1
    for wrong in '--tf32 True' '--max_steps 7.5' '--fsdp full_shard' '--warmup_steps 0.1 --lr-warmup-fraction 0.2'; do
        # shellcheck disable=SC2086
        refused "$(echo "${wrong%% *} " | tr _ -)" "$train" $small --mock-data $wrong || return 1
    done
}

# transformers' intervals below 1 are shares of all steps, rounded up; so they are where the steps follow from epochs.
intervals_may_be_shares_of_all_steps() {
    tiny="--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 32 --lr 1e-3"
    # shellcheck disable=SC2086
    "$train" $tiny --vocab-size 64 --mock-data --train-iters 7 --logging_steps 0.3 --eval_steps 0.1 \
        --save_steps 0.5 --save "$work/none" --print-config >"$work/out" 2>"$work/err" &&
        says '^  log-interval  *3$' "$work/out" && says '^  eval-interval  *1$' "$work/out" &&
        says '^  save-interval  *4$' "$work/out" || return 1
    # shellcheck disable=SC2086
    refused '--logging-steps 0.3 is 3 steps, and --log-interval is 4' "$train" $tiny --vocab-size 64 --mock-data \
        --train-iters 7 --logging_steps 0.3 --log-interval 4 || return 1
    for i in 1 2 3 4 5 6 7 8 9 10; do echo "{\"prompt\":\"q$i\",\"response\":\"answer\"}"; done >"$work/ten.jsonl"
    # shellcheck disable=SC2086
    "$train" $tiny --vocab-size 257 --tokenizer-type ByteLevel --chat-template plain --sft \
        --train-data-path "$work/ten.jsonl" --train-epochs 3 --global-batch-size 2 --micro-batch-size 1 \
        --eval-iters 0 --logging_steps 0.3 --save_steps 0.5 --save "$work/shares" >"$work/out" 2>"$work/err" &&
        [ "$(grep -c '/15 ' "$work/out")" = 3 ] && [ -d "$work/shares/iter_0000008" ] || return 1
    printf '%s\n' 'sft_train: {training_args: {logging_steps: 0.2, save_steps: 0.5, eval_steps: 500, max_steps: 10}}' \
        >"$work/shares.yaml"
    # shellcheck disable=SC2086
    prints "$work/shares.yaml" sft_train $small --seq-length 32 --train-data-path none.jsonl --save "$work/none" &&
        sets sft_train.training_args.logging_steps log-interval-fraction 0.2 &&
        sets sft_train.training_args.save_steps save-interval-fraction 0.5 &&
        sets sft_train.training_args.eval_steps eval-interval 500 && says '^  save-interval  *5$' "$work/out"
}

# --optim is another name of --optimizer: two values are a contradiction, two that agree not. data_seed is the seed of
# the data's order alone.
fields_of_another_name_must_agree() {
    # shellcheck disable=SC2086
    for wrong in '--optim adamw_torch --optimizer muon' '--optimizer sgd --optim adamw_torch_fused'; do
        refused 'are two names of one option, with two values' "$train" $small --mock-data $wrong || return 1
    done
    # shellcheck disable=SC2086
    for right in '--optim adamw_torch --optimizer adam' '--optim adamw_hf' '--data_seed 42 --seed 42' \
        '--data_seed 43 --seed 42' '--local_rank 0' '--local_rank -1'; do
        "$train" $small --seq-length 32 --mock-data $right --print-config >"$work/out" 2>"$work/err" || return 1
    done
    # shellcheck disable=SC2086
    refused "SGD has no momentum" "$train" $small --mock-data --optim sgd || return 1
    # shellcheck disable=SC2086
    refused "optim expects adam.*, got 'adafactor'" "$train" $small --mock-data --optim adafactor || return 1
    printf '%s\n' 'seed: 42' 'sft_train: {training_args: {optim: adamw_torch, data_seed: 42}}' >"$work/seeds.yaml"
    # shellcheck disable=SC2086
    prints "$work/seeds.yaml" sft_train $small --seq-length 32 --optimizer muon &&
        sets sft_train.training_args.data_seed data-seed 42 && says '^  optimizer  *muon' "$work/out" &&
        unused sft_train.training_args.optim 'the command line has' || return 1
    sed -i 's/data_seed: 42/data_seed: 7/' "$work/seeds.yaml"
    # shellcheck disable=SC2086
    prints "$work/seeds.yaml" sft_train $small --seq-length 32 &&
        sets sft_train.training_args.data_seed data-seed 7 && shows seed 42
}

# The sections that transformers writes with a run's TrainingArguments.
sections_at_their_defaults_are_accepted() {
    accelerator='"split_batches": false, "dispatch_batches": null, "even_batches": true, "non_blocking": false'
    accelerator="{$accelerator, \"use_seedable_sampler\": true, \"gradient_accumulation_kwargs\": null}"
    fsdp='{"min_num_params": 0, "xla": false, "xla_fsdp_v2": false, "xla_fsdp_grad_ckpt": false}'
    # shellcheck disable=SC2086
    "$train" $small --seq-length 32 --mock-data --accelerator_config "$accelerator" --fsdp_config "$fsdp" \
        --print-config >"$work/out" 2>"$work/err" || return 1
    printf '%s\n' "accelerator_config: $accelerator" "fsdp_config: $fsdp" 'fsdp: []' 'local_rank: 0' >"$work/flat.yaml"
    # shellcheck disable=SC2086
    "$train" $small --seq-length 32 --mock-data --config "$work/flat.yaml" --print-config >"$work/out" 2>"$work/err" ||
        return 1
    printf '%s\n' 'sft_train:' "  training_args: {accelerator_config: $accelerator, fsdp_config: $fsdp, fsdp: []}" \
        >"$work/sections.yaml"
    # shellcheck disable=SC2086
    prints "$work/sections.yaml" sft_train $small --seq-length 32 &&
        unused sft_train.training_args.fsdp_config 'fsdp, which is off' || return 1
    sed -i 's/^sft_train/actor_train/' "$work/sections.yaml"
    refuses_changes sections 's/"split_batches": false/"split_batches": true=split_batches can only be false' \
        's/"even_batches": true/"even_batches": false=even_batches can only be true' || return 1
    for wrong in '{"split_batches": true}=can only be none|false' '{"split_batches":=not a section in JSON' \
        '{"lr": 3}="lr" is not known'; do
        # shellcheck disable=SC2086
        refused "accelerator-config: .*${wrong#*=}" "$train" $small --mock-data --accelerator_config "${wrong%%=*}" ||
            return 1
    done
}

# Where nothing is saved, intervals of saving have no use. transformers 5 has a share of all steps as warmup_steps.
fields_without_a_use_do_not_stop_a_file() {
    cat >"$work/fields.yaml" <<EOF
save_steps: 50
sft_train:
  training_args: {save_total_limit: 2, warmup_steps: 0.1}
EOF
    # shellcheck disable=SC2086
    prints "$work/fields.yaml" sft_train $small --seq-length 32 --train-data-path none.jsonl &&
        unused save_steps 'of no use in this run' &&
        unused sft_train.training_args.save_total_limit 'of no use in this run' &&
        sets sft_train.training_args.warmup_steps lr-warmup-fraction 0.1 &&
        ! grep -q 'do not make a run' "$work/out" || return 1
    # shellcheck disable=SC2086
    prints "$work/fields.yaml" sft_train $small --save "$work/none" && sets save_steps save-interval 50
}

# --print-config takes the ranks of device_mapping, whatever the sizes.
ranks_are_those_of_the_device_mapping() {
    printf '%s\n' 'sft_train: {model_args: {}, device_mapping: "list(range(0,8))"}' >"$work/devices.yaml"
    # shellcheck disable=SC2086
    prints "$work/devices.yaml" sft_train $small --seq-length 32 --train-data-path none.jsonl &&
        says '^options on 8 ranks' "$work/out" && shows global-batch-size 64
}

verl_is_read() {
    prints "$roles/verl.yaml" reference && sets actor_rollout_ref.model.path load "$HOME/models/small" &&
        sets actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu micro-batch-size 2 &&
        sets actor_rollout_ref.ref.megatron.tensor_model_parallel_size tensor-model-parallel-size 2 &&
        sets actor_rollout_ref.ref.megatron.override_transformer_config.recompute_num_layers recompute-num-layers 1 &&
        unused actor_rollout_ref.actor 'other roles' && unused trainer.logger trackers &&
        unused actor_rollout_ref.ref.megatron.use_mbridge 'formats of checkpoints' || return 1
    prints "$roles/verl.yaml" critic && sets critic.ppo_mini_batch_size global-batch-size 8 &&
        sets critic.optim.lr lr 1e-05 && (export MT_TEST_SAVE=here &&
        prints "$roles/verl.yaml" critic && sets trainer.default_local_dir save here/small) &&
        refused 'a critic trains beside its actor' "$train" --config "$roles/verl.yaml" --role critic
}

# The keys of DAPO; those of a section that is off have no effect.
verl_learns_as_dapo() {
    sed 's/^    shuffle: false$/    shuffle: true/' "$roles/verl.yaml" >"$work/dapo.yaml"
    cat >>"$work/dapo.yaml" <<'EOF'
algorithm:
  filter_groups: {enable: true, metric: acc, max_num_gen_batches: 7}
reward_model:
  reward_manager: dapo
  overlong_buffer: {enable: true, len: 16, penalty_factor: 0.5, log: false}
EOF
    prints "$work/dapo.yaml" actor_train && sets actor_rollout_ref.actor.shuffle shuffle-mini-batches true &&
        sets algorithm.filter_groups.enable dynamic-sampling true &&
        sets algorithm.filter_groups.max_num_gen_batches dynamic-sampling-max-rounds 7 &&
        sets reward_model.overlong_buffer.len overlong-buffer-length 16 &&
        sets reward_model.overlong_buffer.penalty_factor overlong-penalty-factor 0.5 &&
        unused reward_model.reward_manager 'the role reward' && unused trainer.test_freq 'of no use in this run' ||
        return 1
    sed -i 's/enable: true/enable: false/; s/max_num_gen_batches: 7/max_num_gen_batches: 0/' "$work/dapo.yaml"
    prints "$work/dapo.yaml" actor_train && unused reward_model.overlong_buffer.len 'off: enable is not true' &&
        unused reward_model.overlong_buffer.penalty_factor 'off: enable is not true' &&
        ! grep -q '^  overlong\|^  dynamic' "$work/out" || return 1
    prints "$roles/verl.yaml" actor_train && sets actor_rollout_ref.actor.shuffle shuffle-mini-batches false ||
        return 1
    printf '%s\n' "data: {train_files: $work/say.jsonl, seed: 7}" 'actor_rollout_ref: {model: {path: a/b}, actor: {}}' \
        >"$work/seed.yaml"
    prints "$work/seed.yaml" actor_train && sets data.seed data-seed 7 && shows seed 42
}

# Names of ROLL's configuration that hold here with one value.
properties_are_fixed() {
    set -- 'actor_train: {model_args: {}}' 'async_generation_ratio: 0' 'critic_warmup: 0' 'mask_type: loss' \
        'enable_reference: true' 'train_infer_correction: {is_weight: {enabled: false, upper_bound: 1.2}}' \
        'dataset_filter: {source: ~, num_samples: 0}'
    printf '%s\n' "$@" >"$work/fixed.yaml"
    prints "$work/fixed.yaml" actor_train && sets async_generation_ratio rollout-lag 0 || return 1
    refuses_changes fixed 's/ratio: 0/ratio: 0.5=async_generation_ratio cannot be 0.5' \
        's/warmup: 0/warmup: 3=critic_warmup can' \
        's/enabled: false/enabled: true=enabled is not supported' 's/source: ~/source: a=source is not supported' \
        's/num_samples: 0/num_samples: 5=num_samples can only be 0' 's/mask_type: loss/mask_type: all=mask_type can'
}

# Names of verl's later configurations, and sections that oc.select leads to.
later_verl_is_read() {
    cat >"$work/later.yaml" <<'EOF'
actor_rollout_ref:
  model:
    {_target_: a.b, path: a/b, hf_config_path: null, exclude_modules: null, lora_adapter_path: null, lora_rank: 0,
     override_config: {model_config: {}, moe_config: {freeze_moe_router: false}, rotary_base: 5000}}
  actor:
    _target_: a.b
    rollout_n: ${oc.select:actor_rollout_ref.rollout.n,1}
    optim: {betas: [0.8, 0.95], override_optimizer_config: {adam_eps: 1e-6}, use_checkpoint_opt_param_scheduler: false}
    policy_loss: {_target_: a.b, loss_mode: geo_mean, clip_cov_ratio: 0.0002}
    calculate_entropy: false
    loss_scale_factor: null
    use_fused_kernels: ${oc.select:actor_rollout_ref.model.use_fused_kernels,false}
    megatron: {use_remove_padding: true, override_transformer_config: {recompute_granularity: full}}
  ref:
    log_prob_micro_batch_size_per_gpu: 2
    megatron:
      seed: ${oc.select:actor_rollout_ref.actor.megatron.seed,42}
      override_transformer_config: "${oc.select:actor_rollout_ref.actor.megatron.override_transformer_config,{}}"
  rollout: {n: 4}
algorithm:
  rollout_correction: {rollout_is: null, rollout_is_threshold: 2.0, bypass_mode: false}
  use_pf_ppo: false
  pf_ppo: {reweight_method: pow}
EOF
    prints "$work/later.yaml" actor_train && sets actor_rollout_ref.actor.optim.betas adam-beta1 0.8 &&
        sets actor_rollout_ref.actor.optim.betas adam-beta2 0.95 &&
        sets actor_rollout_ref.actor.optim.override_optimizer_config.adam_eps adam-eps 1e-06 &&
        sets actor_rollout_ref.actor.policy_loss.loss_mode pg-variant gmpo &&
        sets actor_rollout_ref.rollout.n num-return-sequences 4 &&
        sets actor_rollout_ref.model.override_config.rotary_base rotary-base 5000 &&
        unused algorithm.pf_ppo use_pf_ppo && prints "$work/later.yaml" reference &&
        sets actor_rollout_ref.ref.megatron.override_transformer_config.recompute_granularity recompute-granularity \
            full && sets actor_rollout_ref.ref.megatron.seed seed 42 || return 1
    # verl's defaults: modules, and no granularity that recomputes them
    sed 's/recompute_granularity: full/recompute_granularity: null, recompute_modules: [core_attn]/' \
        "$work/later.yaml" >"$work/modules.yaml" && prints "$work/modules.yaml" actor_train &&
        unused actor_rollout_ref.actor.megatron.override_transformer_config.recompute_modules 'of no use' || return 1
    sed 's/rollout_is: null/rollout_is: token/' "$work/later.yaml" >"$work/correct.yaml" &&
        prints "$work/correct.yaml" actor_train && sets algorithm.rollout_correction.rollout_is rollout-is token &&
        sets algorithm.rollout_correction.rollout_is_threshold rollout-is-threshold 2.0 || return 1
    sed 's/bypass_mode: false/bypass_mode: true/; s/use_remove_padding: true/&, router_replay: {mode: R3}/' \
        "$work/later.yaml" >"$work/bypass.yaml" && prints "$work/bypass.yaml" actor_train &&
        sets algorithm.rollout_correction.bypass_mode bypass-mode true &&
        sets actor_rollout_ref.actor.megatron.router_replay.mode router-replay R3 || return 1
    sed 's/betas: .*95\]/betas: 0.8/' "$work/later.yaml" >"$work/bad.yaml" &&
        refused 'bad.yaml:8: betas expects two numbers' "$train" --config "$work/bad.yaml" --role actor_train \
            --print-config && sed 's/router: false/router: true/' "$work/later.yaml" >"$work/bad.yaml" &&
        refused 'freeze_moe_router can only be false' "$train" --config "$work/bad.yaml" --role actor_train \
            --print-config
}

# verl's other losses than PPO's do not clip twice, and those of whole sequences have an aggregation of their own. ROLL
# names the loss without a ratio "vanilla", verl that of PPO.
every_policy_loss_runs() {
    for loss in vanilla gspo geo_mean cispo gpg sapo dppo_tv dppo_kl dro kl_cov clip_cov; do
        for given in '' '\n    clip_ratio_c: 3.0\n    loss_agg_mode: token-mean'; do
            sed "s/^    use_kl_loss: false/&\n    policy_loss: {loss_mode: $loss, dro_beta: 0.1}$given/" \
                "$roles/verl.yaml" >"$work/loss.yaml"
            # shellcheck disable=SC2086
            prints "$work/loss.yaml" actor_train $small --tensor-model-parallel-size 1 --data-path prompts.jsonl \
                --seq-length 64 --max-new-tokens 4 && ! grep 'do not make a run' "$work/out" || return 1
            case $loss-$given in
            vanilla-) sets '(absent: clip_ratio_c)' clip-ratio-c 3 || return 1 ;;
            vanilla-*) sets actor_rollout_ref.actor.loss_agg_mode loss-agg-mode token-mean || return 1 ;;
            dppo_*-) sets '(absent: clip_ratio_c)' clip-ratio-c 3 || return 1 ;;
            dppo_*) sets actor_rollout_ref.actor.clip_ratio_c clip-ratio-c 3 || return 1 ;;
            *-) ! grep 'clip.ratio.c' "$work/out" || return 1 ;;
            *) unused actor_rollout_ref.actor.clip_ratio_c 'the policy loss' || return 1 ;;
            esac
            case $loss-$given in
            gspo-?* | geo_mean-?* | sapo-?*)
                unused actor_rollout_ref.actor.loss_agg_mode 'the policy loss' || return 1
                ;;
            esac
        done
    done
    set -- 'dual_clip_loss: true' 'importance_sampling: token' 'actor_train: {model_args: {}, pg_variant: vanilla}'
    printf '%s\n' "$@" >"$work/loss.yaml"
    prints "$work/loss.yaml" actor_train && sets actor_train.pg_variant pg-variant gpg &&
        unused dual_clip_loss 'the policy loss' || return 1
    sed 's/token$/seq/; s/, pg_variant: vanilla//' "$work/loss.yaml" >"$work/sequences.yaml"
    prints "$work/sequences.yaml" actor_train && sets importance_sampling pg-variant gspo &&
        sets dual_clip_loss clip-ratio-c 1.4
}

# ROLL's normalisation of rewards, by its present names and its earlier ones.
rewards_are_normalised_as_rolls() {
    printf '%s\n' 'adv_estimator: step_reinforce' 'actor_train: {model_args: {}}' 'norm_mean_type: batch' \
        'norm_std_type: group' >"$work/norm.yaml"
    prints "$work/norm.yaml" actor_train && sets adv_estimator adv-estimator step_reinforce &&
        sets norm_mean_type norm-mean-type batch && sets norm_std_type norm-std-type group || return 1
    printf '%s\n' 'adv_estimator: reinforce' 'actor_train: {model_args: {}}' 'reward_norm: batch' \
        'reward_shift: false' >"$work/norm.yaml"
    prints "$work/norm.yaml" actor_train && sets reward_norm norm-mean-type batch && shows norm-std-type batch &&
        sed 's/false/true/' "$work/norm.yaml" >"$work/shift.yaml" && prints "$work/shift.yaml" actor_train &&
        sets reward_norm norm-mean-type batch && ! shows norm-std-type batch || return 1
    sed 's/batch/running/' "$work/norm.yaml" >"$work/running.yaml" &&
        refused 'running statistics: take batch or group' "$train" --config "$work/running.yaml" --role actor_train \
            --print-config
}

# One option sets the estimators of both divergences. verl's kl_loss_type is the one in the loss, kl_penalty the one in
# rewards; ROLL's loss has k3.
divergences_have_their_estimators() {
    verl='actor_rollout_ref: {model: {path: a/b}, actor: {use_kl_loss: true, kl_loss_coef: 0.1, '
    printf '%s\n' "$verl kl_loss_type: mse}}" 'algorithm: {kl_penalty: kl}' >"$work/kl.yaml"
    prints "$work/kl.yaml" actor_train && sets actor_rollout_ref.actor.kl_loss_type kl-loss-type k2 &&
        unused algorithm.kl_penalty 'rewards without a divergence' || return 1
    printf '%s\n' "$verl kl_loss_type: mse}}" 'algorithm: {kl_penalty: kl, use_kl_in_reward: true}' >"$work/kl.yaml"
    refused 'kl_penalty differs from the estimator in the loss' "$train" --config "$work/kl.yaml" \
        --role actor_train --print-config || return 1
    printf '%s\n' 'actor_rollout_ref: {model: {path: a/b}, actor: {use_kl_loss: true}}' \
        'algorithm: {use_kl_in_reward: true}' >"$work/kl.yaml"
    refused 'use_kl_in_reward differs from the estimator in the loss' "$train" --config "$work/kl.yaml" \
        --role actor_train --print-config || return 1
    printf '%s\n' "$verl kl_loss_type: kl}}" 'algorithm: {use_kl_in_reward: true}' >"$work/kl.yaml"
    prints "$work/kl.yaml" actor_train && sets actor_rollout_ref.actor.kl_loss_type kl-loss-type k1 || return 1
    set -- 'actor_train: {model_args: {}}' 'use_kl_loss: true' 'kl_loss_coef: 0.1' 'kl_penalty: kl'
    printf '%s\n' "$@" >"$work/kl.yaml"
    prints "$work/kl.yaml" actor_train && unused kl_penalty 'rewards without a divergence' &&
        ! grep -q '^  kl-loss-type' "$work/out" || return 1
    printf '%s\n' "$@" 'add_token_level_kl: true' >"$work/kl.yaml"
    refused 'kl_penalty differs from' "$train" --config "$work/kl.yaml" --role actor_train --print-config ||
        return 1
    printf '%s\n' "$1" 'add_token_level_kl: true' >"$work/kl.yaml"
    prints "$work/kl.yaml" actor_train && sets '(absent: kl_penalty)' kl-loss-type k1 &&
        sets '(absent: init_kl_coef)' kl-coef 0.2
}

# ROLL's cispo reads a range of its own, 0.1 by default, and not pg_clip.
cispo_of_roll_has_its_range() {
    set -- 'pg_clip: 0.2' 'pg_clip_high: 0.3' 'actor_train: {model_args: {}, pg_variant: cispo}'
    printf '%s\n' "$@" >"$work/cispo.yaml"
    prints "$work/cispo.yaml" actor_train && unused pg_clip 'the policy loss' &&
        unused pg_clip_high 'the policy loss' && sets '(absent: cispo_epsilon_low)' clip-ratio-low 0.1 &&
        sets '(absent: cispo_epsilon_high)' clip-ratio-high 0.1 || return 1
    sed 's/cispo}/cispo, cispo_epsilon_high: 0.4, cispo_use_unified_mask: false}/' "$work/cispo.yaml" \
        >"$work/given.yaml" && prints "$work/given.yaml" actor_train &&
        sets actor_train.cispo_epsilon_high clip-ratio-high 0.4 &&
        sets '(absent: cispo_epsilon_low)' clip-ratio-low 0.1 || return 1
    sed 's/mask: false/mask: true/' "$work/given.yaml" >"$work/bad.yaml" &&
        refused 'mask can only be false' "$train" --config "$work/bad.yaml" --role actor_train --print-config ||
        return 1
    sed 's/cispo/ppo/' "$work/cispo.yaml" >"$work/given.yaml" && prints "$work/given.yaml" actor_train &&
        sets pg_clip_high clip-ratio-high 0.3 && ! grep -q 'absent: cispo' "$work/out"
}

# Keys of ROLL's public examples.
examples_of_roll_are_read() {
    cat >"$work/examples.yaml" <<'EOF'
track_name: None
train_batch_size: 64
global_template: native
sequence_length: ${oc.decode:${oc.env:MT_TEST_LENGTH,8192}}
rollout_batch_size: 4
train_infer_ratio_mask: false
train_infer_correction: {filters: []}
validation: {eval_steps: 10}
actor_train:
  model_args: {attn_implementation: fa2, flash_attn: sdpa, freeze_module_prefix: vision_model}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {save_only_model: true}
  use_remove_padding: true
EOF
    prints "$work/examples.yaml" actor_train && unused track_name trackers && unused train_batch_size 'reading: an' &&
        sets global_template chat-template auto && sets sequence_length seq-length 8192 &&
        sets actor_train.model_args.flash_attn attention-backend auto &&
        unused validation.eval_steps 'the validation' &&
        sets actor_train.strategy_args.strategy_config.save_only_model no-save-optim true &&
        unused actor_train.use_remove_padding 'batches with padding' &&
        sets actor_train.model_args.freeze_module_prefix freeze-vision true &&
        sets '(absent: adv_estimator)' adv-estimator gae &&
        sets '(absent: num_return_sequences_in_group)' num-return-sequences 1 || return 1
    refuses_changes examples \
        's/ratio_mask: false/ratio_mask: true=ratio_mask is not supported: corrections of the generator' \
        's/filters: \[\]/filters: [{enabled: true}]=filters is not supported: corrections of the generator' \
        's/vision_model/model.layers=freeze_module_prefix cannot be model.layers: take vision_model' \
        's/^track_name.*/opsd_mode: full=opsd_mode is not supported: a teacher reads'
}

# Sampling has the defaults of ROLL's classes, and an iteration its shares of domains, by the tags of their rewards.
sampling_and_domains_of_roll_are_read() {
    cat >"$work/domains.yaml" <<'EOF'
rollout_batch_size: 8
prompt_length: 8
response_length: 16
num_return_sequences_in_group: 4
actor_train:
  data_args: {tag: kind, domain_interleave_probs: {math_rule: 0.5, code: 0.25, value: 0.25}}
  model_args: {}
actor_infer: {generating_args: {max_new_tokens: 7, num_return_sequences: 2, top_k: -1}}
rewards: {math_rule: {tag_included: [aime]}, code: {tag_included: [kod, taco]}, value: {worker_cls: a}}
EOF
    prints "$work/domains.yaml" actor_train &&
        sets actor_train.data_args.domain_interleave_probs prompt-shares \
            'math_rule,\*,aime=0.5 code,kod,taco=0.25 value=0.25' &&
        sets actor_train.data_args.tag tag-key kind && sets '(absent: temperature)' temperature 0.95 &&
        sets '(absent: top_p)' top-p 0.7 && sets actor_infer.generating_args.top_k top-k 0 &&
        sets response_length max-new-tokens 16 && sets num_return_sequences_in_group num-return-sequences 4 &&
        unused actor_infer.generating_args.max_new_tokens 'the lengths of the file' || return 1
    sed 's/, top_k: -1//; s/, code: 0.25, value: 0.25//' "$work/domains.yaml" >"$work/one.yaml" &&
        prints "$work/one.yaml" actor_train && sets '(absent: top_k)' top-k 50 &&
        unused actor_train.data_args.domain_interleave_probs 'one share is all' || return 1
    refused '0.25 leaves no prompt' "$train" --config "$work/domains.yaml" --role actor_train --rollout-batch-size 3 \
        --num-layers 1 --hidden-size 8 --num-attention-heads 1 --tokenizer-type ByteLevel --vocab-size 257 \
        --data-path README.md --chat-template plain --device cpu
}

# Keys of verl's public files, and of Trinity-RFT's. Adapters of fused matrices are others than those here.
examples_of_verl_are_read() {
    cat >"$work/examples.yaml" <<'EOF'
actor_rollout_ref:
  model:
    path: a/b
    mtp: {_target_: a.b, enable: false, enable_train: false, mtp_loss_scaling_factor: 0.1, method: mtp}
    lora: {type: canonical_lora, lora_A_init_method: kaiming, rank: 0, alpha: 32, merge: false, exclude_modules: [],
           target_modules: [linear_q, linear_proj]}
  actor:
    use_dynamic_bsz: true
    alg_type: ppo
    tau: 0.0
    optim: {lr: 1e-6, min_lr_ratio: 0.1, num_cycles: 0.5, zero_indexed_step: true, beta1: 0.8, muon_momentum: 0.95}
    megatron: {router_replay: {mode: disabled, record_file: null}, qat: {enable: false, mode: w4a16}}
  rollout: {use_fire_sampling: false, disaggregation: {enabled: false}}
distillation: {enabled: false, teacher_models: {num_replicas: 0}}
reward: {num_workers: 8, reward_model: {enable: false, model_path: null}}
trainer: {use_v1: true, v1: {trainer_mode: sync, sync: {}}, npu_profile: {a: b}}
EOF
    prints "$work/examples.yaml" actor_train && unused actor_rollout_ref.model.lora 'off: rank is 0' &&
        sets actor_rollout_ref.actor.use_dynamic_bsz sequence-packing true &&
        sets actor_rollout_ref.actor.optim.min_lr_ratio min-lr 1e-07 &&
        sets actor_rollout_ref.actor.optim.beta1 adam-beta1 0.8 && unused distillation 'off: enabled is not' &&
        unused reward.reward_model 'a reward model is' && ! grep -q 'lora-target' "$work/out" || return 1
    refuses_changes examples \
        's/mtp: {_target_: a.b, enable: false/mtp: {enable: true=enable loads modules that enable_train does not' \
        's/canonical_//; s/ rank: 0/ rank: 8=can only be canonical_lora' 's/alg_type: ppo/alg_type: dpo=alg_type can' \
        's/rank: 0, alpha: 32/rank: 8=lora needs alpha' 's/mode: disabled/mode: R4=expects disabled|R2|R3' \
        's/linear_q,/linear_qkv,/; s/ rank: 0/ rank: 8=cannot be linear_qkv: a fused matrix' \
        's/l: {enable: false/l: {enable: true=reward_model is not supported: a reward' \
        's/trainer_mode: sync/trainer_mode: colocate_async=trainer_mode can only be sync' \
        's/alpha: 32/alphas: 32=unknown option alphas; did you mean alpha' || return 1
    # multi-token prediction: left out, trained, and drafting
    mtp=actor_rollout_ref.model.mtp
    prints "$work/examples.yaml" actor_train && sets $mtp.enable mtp-num-layers 0 &&
        unused $mtp.mtp_loss_scaling_factor 'enable and enable_train, which' || return 1
    settings='enable: true, enable_train: true, enable_rollout: true, detach_encoder: false'
    settings="$settings, num_speculative_tokens: 2, speculative_num_steps: 3"
    sed "s/a.b, enable: false, enable_train: false/a.b, $settings/" \
        "$work/examples.yaml" >"$work/mtp.yaml" && prints "$work/mtp.yaml" actor_train &&
        sets $mtp.mtp_loss_scaling_factor mtp-loss-scaling-factor 0.1 &&
        sets $mtp.num_speculative_tokens num-speculative-tokens 2 && unused $mtp.speculative_num_steps SGLang &&
        ! grep -q mtp-num-layers "$work/out" || return 1
    sed 's/rollout: {use/rollout: {name: sglang, use/' "$work/mtp.yaml" >"$work/sglang.yaml" &&
        prints "$work/sglang.yaml" actor_train && sets $mtp.speculative_num_steps num-speculative-tokens 3 &&
        unused $mtp.num_speculative_tokens vLLM || return 1
    refuses_changes mtp 's/detach_encoder: false/detach_encoder: true=detach_encoder' || return 1
    sed 's/^    mtp: .*//' "$work/examples.yaml" >"$work/absent.yaml" && prints "$work/absent.yaml" actor_train &&
        sets '(absent: mtp.enable)' mtp-num-layers 0 || return 1
    sed 's/ rank: 0/ rank: 8/' "$work/examples.yaml" >"$work/lora.yaml" &&
        prints "$work/lora.yaml" actor_train && sets actor_rollout_ref.model.lora.rank lora-rank 8 &&
        sets actor_rollout_ref.model.lora.alpha lora-alpha 32 &&
        shows lora-target 'q_proj o_proj'
}

# On-policy distillation in a file of verl, with one teacher and several, and in the two forms of ROLL.
on_policy_distillation_is_read() {
    cat >"$work/opd.yaml" <<'EOF'
actor_rollout_ref: {model: {path: a/b}, actor: {ppo_mini_batch_size: 8}, rollout: {n: 2}}
distillation:
  _target_: a.b
  enabled: true
  n_gpus_per_node: 8
  teacher_key: data_source
  teacher_models:
    num_replicas: 0
    teacher_model: {key: null, model_path: c/d, num_replicas: 0, inference: {tensor_model_parallel_size: 2, name: vllm}}
  distillation_loss: {loss_mode: low_var_kl, topk: 32, use_task_rewards: true, distillation_loss_coef: 0.5,
    loss_max_clamp: 10.0, log_prob_min_clamp: -10.0, use_policy_gradient: true, policy_loss_mode: vanilla,
    clip_ratio: 0.2, clip_ratio_low: 0.1, clip_ratio_high: 0.3}
EOF
    loss=distillation.distillation_loss teacher=distillation.teacher_models.teacher_model
    prints "$work/opd.yaml" actor_train && sets $teacher.model_path teacher-load c/d &&
        sets $teacher.inference.tensor_model_parallel_size teacher-tensor-model-parallel-size 2 &&
        sets $loss.loss_mode distillation-loss-mode k3 && sets $loss.distillation_loss_coef distillation-loss-coef \
            0.5 &&
        sets $loss.loss_max_clamp distillation-loss-max-clamp 10 &&
        sets $loss.use_policy_gradient distillation-in policy-gradient &&
        sets $loss.clip_ratio_high distillation-clip-ratio-high 0.3 &&
        unused distillation.teacher_key 'several teachers: one' && unused $loss.topk forward_kl_topk || return 1
    sed 's/low_var_kl/forward_kl_topk/' "$work/opd.yaml" >"$work/opd-topk.yaml"
    prints "$work/opd-topk.yaml" actor_train && sets $loss.loss_mode distillation-loss-mode forward_kl_topk &&
        sets $loss.topk distillation-topk 32 &&
        sets $loss.log_prob_min_clamp distillation-log-prob-min-clamp -10 || return 1
    refuses_changes opd 's/low_var_kl/js=loss_mode cannot be js: the divergence is' \
        's/mode: vanilla/mode: gspo=policy_loss_mode can only be vanilla' \
        's/loss_max_clamp/loss_max_clmp=unknown option loss_max_clmp; did you mean loss_max_clamp' || return 1
    # without the gradient of a policy, its range is of no use, and without rewards the weight is 1
    sed 's/gradient: true/gradient: false/; s/rewards: true/rewards: false/' "$work/opd.yaml" >"$work/alone.yaml"
    prints "$work/alone.yaml" actor_train && sets $loss.use_policy_gradient distillation-in loss &&
        sets $loss.use_task_rewards use-task-rewards false && unused $loss.clip_ratio_low 'use_policy_gradient' &&
        unused $loss.distillation_loss_coef 'use_task_rewards, which is false' || return 1
    sed 's/^    num_replicas: 0/    one: {key: math, model_path: e\/f}\n    two: {key: code, model_path: g\/h}/
        /^  distillation_loss/,$d' "$work/opd.yaml" >"$work/two.yaml"
    prints "$work/two.yaml" actor_train && sets distillation.teacher_models teachers 'math=e/f code=g/h' &&
        sets distillation.teacher_key teacher-key data_source &&
        sets '(absent: use_policy_gradient)' distillation-in loss &&
        sets '(absent: loss_mode)' distillation-loss-mode k3 || return 1
    cat >"$work/roll-opd.yaml" <<'EOF'
rollout_batch_size: 4
kl_penalty: mse
opd_kl_coef: 0.25
student_train:
  model_args: {model_name_or_path: a/b}
  data_args: {file_name: x.jsonl}
  training_args: {learning_rate: 1e-6}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 1}}
student_infer: {generating_args: {temperature: 0.9}, strategy_args: {strategy_name: vllm}}
teacher:
  model_args: {model_name_or_path: c/d}
  strategy_args: {strategy_name: megatron_infer, strategy_config: {pipeline_model_parallel_size: 4}}
EOF
    prints "$work/roll-opd.yaml" student_train && sets teacher.model_args.model_name_or_path teacher-load c/d &&
        sets teacher.strategy_args.strategy_config.pipeline_model_parallel_size teacher-pipeline-model-parallel-size \
            4 &&
        sets student_infer.generating_args.temperature temperature 0.9 &&
        sets student_train distillation-in advantages && sets student_train use-task-rewards false &&
        sets student_train distillation-loss-mode k2 && sets student_train adv-estimator reinforce &&
        ! grep -q -e '--distillation-loss-coef 0' "$work/out" || return 1
    sed 's/student_/actor_/; s/^kl_pen.*/use_opd: true/' "$work/roll-opd.yaml" >"$work/mixed.yaml"
    prints "$work/mixed.yaml" actor_train && sets use_opd distillation-in advantages &&
        sets use_opd distillation-loss-coef 0.25 && ! grep -q -e '--use-task-rewards' "$work/out" || return 1
    sed 's/use_opd: true/use_opd: false/' "$work/mixed.yaml" >"$work/none.yaml" &&
        prints "$work/none.yaml" actor_train && unused teacher 'on-policy distillation: use_opd' &&
        ! grep -q -e '--teacher-load' "$work/out"
}

# Trinity-RFT's own file, whose trainer_config has verl's keys; its references lead there, or to verl's defaults.
trinity_is_read() {
    printf '{"question": "Say %d", "answer": "%d"}\n' 1 1 2 2 3 3 4 4 >"$work/say.jsonl"
    cat >"$work/trinity.yaml" <<EOF
project: small
checkpoint_root_dir: $work/trinity.run
algorithm: {algorithm_type: grpo, repeat_times: 2, optimizer: {lr: 1e-5, warmup_style: constant},
            kl_loss_fn_args: {kl_coef: 0.01}, policy_loss_fn_args: {clip_range_high: 0.28}}
model: {model_path: a/b, max_response_tokens: 4, max_model_len: 64, lora_configs: [{name: lora, lora_rank: 4}]}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_steps: 1
  batch_size: 2
  explorer_input:
    taskset: {path: $work/say.jsonl, storage_type: file, format: {prompt_key: question, response_key: answer}}
    eval_tasksets: [{name: a}]
explorer: {runner_per_model: 8, rollout_model: {engine_num: 2, temperature: 0.9, enforce_eager: true}}
synchronizer: {sync_method: nccl, sync_interval: 1}
trainer:
  save_interval: 100
  use_dynamic_bsz: true
  trainer_config:
    actor_rollout_ref:
      actor:
        megatron: {tensor_model_parallel_size: 1}
        grad_clip: 0.5
    critic:
      optim: {lr: 1e-4}
      grad_clip: \${trainer.trainer_config.actor_rollout_ref.actor.grad_clip}
      ppo_epochs: \${trainer.trainer_config.actor_rollout_ref.actor.ppo_epochs}
EOF
    prints "$work/trinity.yaml" actor_train && sets algorithm.algorithm_type adv-estimator grpo &&
        sets algorithm.optimizer.lr lr 1e-05 &&
        sets algorithm.policy_loss_fn_args.clip_range_high clip-ratio-high 0.28 &&
        sets model.lora_configs.lora_rank lora-rank 4 && sets '(absent: lora_alpha)' lora-alpha 32 &&
        sets buffer.explorer_input.taskset.format.response_key answer-key answer &&
        sets explorer.rollout_model.temperature temperature 0.9 && sets '(absent: kl_loss_fn)' kl-loss-type k2 &&
        sets trainer.trainer_config.actor_rollout_ref.actor.grad_clip clip-grad 0.5 &&
        unused explorer.runner_per_model "Trinity-RFT's explorer" && sets trainer stage rl || return 1
    prints "$work/trinity.yaml" critic && sets trainer.trainer_config.critic.optim.lr lr 0.0001 &&
        sets trainer.trainer_config.critic.grad_clip clip-grad 0.5 &&
        unused trainer.trainer_config.critic.ppo_epochs 'the default' || return 1
    refused 'has the roles actor_train, critic; choose one' "$train" --config "$work/trinity.yaml" || return 1
    refuses_changes trinity 's/sync_interval: 1/sync_interval: 2=sync_interval can only be 1 here: the present' \
        's/^cluster.*/stages: [{stage_name: a}]=stages is not supported: a run has one stage' \
        's/runner_per_model: 8/over_rollout: {ratio: 0.2}=ratio can only be 0' \
        's/gpu_per_node: 8}/&\nexplorers: 1=unknown option explorers; did you mean explorer' || return 1
    # shellcheck disable=SC2086
    "$train" --config "$work/trinity.yaml" --role actor_train $small >"$work/out" 2>"$work/err" &&
        says '^     1/1 .* reward ' "$work/out"
}

# Trinity-RFT 0.6: the layout in trainer.megatron, without verl's keys; algorithms with losses of their own.
trinity_without_the_keys_of_verl_is_read() {
    printf '{"question": "Say %d", "answer": "%d"}\n' 1 1 2 2 3 3 4 4 >"$work/say.jsonl"
    cat >"$work/trinity6.yaml" <<EOF
mode: both
checkpoint_root_dir: $work/trinity6.run
algorithm: {algorithm_type: TYPE, repeat_times: 2, optimizer: {lr: 1e-5}}
model: {model_path: a/b, max_response_tokens: 4, max_model_len: 64}
buffer:
  total_steps: 1
  batch_size: 2
  explorer_input:
    taskset: {path: $work/say.jsonl, storage_type: file, format: {prompt_key: question, response_key: answer}}
trainer:
  trainer_strategy: megatron
  save_interval: 100
  megatron: {tensor_model_parallel_size: 1, context_parallel_size: 1, sequence_parallel: true}
EOF
    refused 'has the roles actor_train, actor_infer, reference; choose one' "$train" --config "$work/trinity6.yaml" ||
        return 1
    for type in ppo grpo gspo cispo dapo sapo topr opmd sppo rloo reinforceplusplus remax; do
        loss=token-mean
        [ $type = gspo ] && loss=seq-mean-token-mean
        sed "s/TYPE/$type, loss_agg_mode: $loss/; s|trinity6.run|trinity6.$type|" "$work/trinity6.yaml" >"$work/t.yaml"
        # shellcheck disable=SC2086
        "$train" --config "$work/t.yaml" --role actor_train $small >"$work/out" 2>"$work/err" &&
            says '^     1/1 .* reward ' "$work/out" && prints "$work/t.yaml" actor_train || return 1
        case $type in
        ppo) sets algorithm.algorithm_type adv-estimator gae ;;
        gspo) shows pg-variant gspo && shows clip-ratio-low 0.0003 && shows clip-ratio-high 0.0004 ;;
        cispo) shows pg-variant cispo && shows clip-ratio-low 1 && shows clip-ratio-high 0.28 ;;
        sapo) shows pg-variant sapo_detached && sets algorithm.algorithm_type adv-estimator grpo ;;
        topr) shows pg-variant topr && sets algorithm.algorithm_type adv-estimator reinforce ;;
        opmd) shows pg-variant opmd && shows norm-adv-by-std false ;;
        sppo) shows pg-variant sppo && shows norm-adv-by-std false && shows clip-ratio 0.3 &&
            sets algorithm.algorithm_type kl-loss-coef 0 ;;
        dapo) sets algorithm.algorithm_type kl-loss-coef 0 && ! grep 'kl_loss_fn' "$work/out" ;;
        grpo) sets '(absent: kl_loss_fn_args)' kl-loss-coef 0.001 ;;
        *) ;;
        esac || return 1
    done
    # functions of their own win over those of the algorithm
    sed "s|TYPE|grpo, advantage_fn: rloo, policy_loss_fn: sppo|" "$work/trinity6.yaml" >"$work/t.yaml"
    prints "$work/t.yaml" actor_train && sets algorithm.advantage_fn adv-estimator rloo &&
        sets algorithm.policy_loss_fn pg-variant sppo && shows clip-ratio 0.3 || return 1
    sed "s|TYPE|grpo, advantage_fn: opmd|" "$work/trinity6.yaml" >"$work/t.yaml"
    prints "$work/t.yaml" actor_train && sets algorithm.advantage_fn adv-estimator grpo &&
        shows norm-adv-by-std false || return 1
    sed "s|TYPE|gspo, policy_loss_fn: opmd, policy_loss_fn_args: {tau: 2.0}|" "$work/trinity6.yaml" >"$work/t.yaml"
    prints "$work/t.yaml" actor_train && sets algorithm.algorithm_type adv-estimator grpo &&
        sets algorithm.policy_loss_fn pg-variant opmd && sets algorithm.policy_loss_fn_args.tau opmd-tau 2 || return 1
    sed "s|TYPE|grpo, policy_loss_fn: sapo, policy_loss_fn_args: {tau_neg: 2.0}|" "$work/trinity6.yaml" >"$work/t.yaml"
    prints "$work/t.yaml" actor_train && sets algorithm.policy_loss_fn pg-variant sapo_detached &&
        sets algorithm.policy_loss_fn_args.tau_neg tau-neg 2 || return 1
    # a divergence in rewards, where the trainer computes advantages
    sed "s|TYPE|ppo, kl_loss_fn: none, kl_penalty_fn: k1, kl_penalty_fn_args: {kl_coef: 0.02}|
        s|trinity6.run|trinity6.penalty|" "$work/trinity6.yaml" >"$work/t.yaml"
    prints "$work/t.yaml" actor_train && sets algorithm.kl_penalty_fn kl-in-reward true && shows kl-loss-type k1 &&
        sets algorithm.kl_penalty_fn_args.kl_coef kl-coef 0.02 || return 1
    # shellcheck disable=SC2086
    "$train" --config "$work/t.yaml" --role actor_train $small >"$work/out" 2>"$work/err" || return 1
    sed "s|TYPE|grpo, kl_penalty_fn: k1, kl_penalty_fn_args: {kl_coef: 0.02}|" "$work/trinity6.yaml" >"$work/t.yaml"
    prints "$work/t.yaml" actor_train && unused algorithm.kl_penalty_fn 'the advantages of ppo' &&
        unused algorithm.kl_penalty_fn_args.kl_coef 'the advantages of ppo' || return 1
    sed "s|TYPE|rloo, kl_penalty_fn: k2|" "$work/trinity6.yaml" >"$work/t.yaml"
    prints "$work/t.yaml" actor_train && sets algorithm.kl_penalty_fn kl-in-reward true &&
        sets '(absent: kl_loss_fn)' kl-loss-type k2 || return 1
    sed 's/TYPE/gspo/' "$work/trinity6.yaml" >"$work/t.yaml"
    # shellcheck disable=SC2086
    refused 'gspo and gmpo have one ratio for each sequence, and --loss-agg-mode' "$train" --config "$work/t.yaml" \
        --role actor_train $small || return 1
    refuses_changes trinity6 's/TYPE/raft=algorithm_type cannot be raft: take ppo' \
        's/TYPE/topr, advantage_fn: grpo=algorithm_type with policy_loss_fn topr needs advantage_fn reinforce' \
        's/TYPE/ppo, kl_penalty_fn: k1=kl_penalty_fn differs from kl_loss_fn, which is k2' \
        's/response_key: answer/video_key: videos/; s/TYPE/grpo=video_key is not supported: videos are not read' \
        's/TYPE/grpo, policy_loss_fn: dpo=algorithm_type has the loss ppo, and policy_loss_fn is dpo' \
        's/TYPE/[grpo]=algorithm_type expects .*, not a list' \
        's/TYPE/gspo, policy_loss_fn: sft=algorithm_type has the loss gspo, and policy_loss_fn is sft' \
        's/TYPE/grpo, policy_loss_fn: mix=policy_loss_fn cannot be mix: take ppo, gspo' \
        's/TYPE/grpo, advantage_fn: asymre=advantage_fn cannot be asymre: take ppo, grpo' \
        's/TYPE/cispo, policy_loss_fn_args: {enable_mask_clip: true}=enable_mask_clip can only be false' || return 1
    sed "s/TYPE/sft/; s/mode: both/mode: train/; s/total_steps: 1/total_steps: 2/
        s/^trainer:/synchronizer: {sync_method: checkpoint, sync_interval: 10}\ntrainer:/
        s|^  batch_size: 2|  train_batch_size: 2|; s|^  explorer_input:|  trainer_input:|
        s|taskset: |experience_buffer: |" "$work/trinity6.yaml" >"$work/t.yaml"
    # shellcheck disable=SC2086
    "$train" --config "$work/t.yaml" --role actor_train $small >"$work/out" 2>"$work/err" &&
        says '^     2/2 .* loss ' "$work/out" && says 'say.jsonl: 4 samples' "$work/out" &&
        prints "$work/t.yaml" actor_train && sets buffer.train_batch_size global-batch-size 2 &&
        sets buffer.trainer_input.experience_buffer.format.response_key response-key answer || return 1
    # preferences, with a divergence from the reference beside them
    printf '{"question": "Say %d", "good": "%d", "bad": "no"}\n' 1 1 2 2 3 3 4 4 >"$work/pairs.jsonl"
    sed "s/: sft,/: dpo, kl_loss_fn: k1, kl_loss_fn_args: {kl_coef: 0.2}, policy_loss_fn_args: {beta: 0.3},/
        s/response_key: answer/chosen_key: good, rejected_key: bad/; s|say.jsonl|pairs.jsonl|
        s|trinity6.run|trinity6.dpo|" "$work/t.yaml" >"$work/dpo.yaml"
    # shellcheck disable=SC2086
    "$train" --config "$work/dpo.yaml" --role actor_train $small >"$work/out" 2>"$work/err" &&
        says '^     2/2 .* accuracy ' "$work/out" && prints "$work/dpo.yaml" actor_train && shows stage dpo &&
        sets algorithm.kl_loss_fn kl-loss-type k1 && sets algorithm.kl_loss_fn_args.kl_coef kl-loss-coef 0.2 &&
        sets algorithm.policy_loss_fn_args.beta beta 0.3 &&
        sets buffer.trainer_input.experience_buffer.format.rejected_key rejected-key bad || return 1
    sed 's/kl_loss_fn: k1, .*args: {beta: 0.3},//' "$work/dpo.yaml" >"$work/t.yaml"
    prints "$work/t.yaml" actor_train && shows kl-loss-type k2 && shows kl-loss-coef 0.001
}

# Trinity-RFT's losses: none is no divergence, other keys of an algorithm win or are refused where the loss lacks them.
the_losses_of_trinity_are_its_own() {
    printf '%s\n' 'algorithm: {algorithm_type: TYPE}' 'model: {model_path: a/b, max_model_len: 64}' \
        'buffer: {total_steps: 9, batch_size: 2}' 'trainer: {trainer_strategy: megatron}' >"$work/loss.yaml"
    # prints_loss ALGORITHM: the file with it
    prints_loss() {
        sed "s/TYPE/$1/" "$work/loss.yaml" >"$work/t.yaml"
        prints "$work/t.yaml" actor_train
    }
    prints_loss 'gspo, policy_loss_fn_args: {clip_range: 0.1}' && shows clip-ratio 0.1 &&
        ! grep -e '--clip-ratio-[lh]' "$work/out" || return 1
    prints_loss 'grpo, loss_agg_mode: seq-mean-token-mean, policy_loss_fn_args: {loss_agg_mode: token-mean}' &&
        shows loss-agg-mode seq-mean-token-mean && prints_loss 'ppo, policy_loss_fn_args: {loss_agg_mode: a}' &&
        ! grep '^  *loss-agg-mode' "$work/out" || return 1
    for type in 'grpo, kl_loss_fn: none' dapo sppo; do
        prints_loss "$type, kl_loss_fn_args: {kl_coef: 0.1}" && sets algorithm.algorithm_type kl-loss-coef 0 &&
            unused algorithm.kl_loss_fn_args.kl_coef 'kl_loss_fn, which is none' || return 1
    done
    prints_loss 'dapo, kl_loss_fn: k1, kl_loss_fn_args: {kl_coef: 0.1}' && shows kl-loss-coef 0.1 &&
        prints_loss 'sppo, entropy_loss_fn_args: {entropy_coef: 0.1}' &&
        unused algorithm.entropy_loss_fn_args.entropy_coef 'entropy_loss_fn, which is none' &&
        prints_loss 'dpo, kl_loss_fn: none' && sets algorithm.kl_loss_fn kl-loss-type k2 &&
        shows kl-loss-coef 0.001 || return 1
    # the learning rate falls to a hundredth, where Megatron's warm-up begins
    prints_loss 'grpo, optimizer: {lr: 1e-3, lr_scheduler_type: cosine, lr_warmup_steps: 2, weight_decay: 0.3}' &&
        shows weight-decay 0.3 && shows min-lr 1e-05 && shows lr-warmup-init 1e-05 &&
        prints_loss 'sft, optimizer: {lr_scheduler_type: cosine, min_lr_ratio: 0.5}' && shows lr 1e-06 &&
        shows min-lr 5e-07 && ! grep lr-warmup-init "$work/out" || return 1
    for turns in '' ', enable_concatenated_multi_turn: false'; do
        files="trainer_input: {experience_buffer: {path: a.b, format: {messages_key: m$turns}}}"
        sed "s/TYPE/sft/; s/total_steps: 9/&, $files/" "$work/loss.yaml" >"$work/t.yaml"
        prints "$work/t.yaml" actor_train && shows loss-on last || return 1
    done
    refuses_changes loss 's/TYPE/dpo, entropy_loss_fn_args: {entropy_coef: 0.1}=entropy_coef can only be 0 here' \
        's/TYPE/sft, loss_agg_mode: seq-mean-token-mean=loss_agg_mode can only be token-mean here' \
        's/TYPE/sft, kl_loss_fn: k2=kl_loss_fn can only be none here: samples of sft have no reference' \
        's/TYPE/ppo, loss_agg_mode: seq-mean-token-sum, policy_loss_fn_args: {clip_ratio_c: 3}=is not that of'
}

# Options that others of the file leave without effect; with the divergence, two of them have one.
idle_options_of_rl_are_unused() {
    lines='\n    clip_ratio: 0.2\n    clip_ratio_low: 0.1\n    clip_ratio_high: 0.3\n    kl_loss_type: kl'
    sed "s/^    use_kl_loss: false/&$lines/
        s/^\( *\)override_transformer_config/\1check_for_spiky_loss: true\n&/" "$roles/verl.yaml" >"$work/idle.yaml" &&
        prints "$work/idle.yaml" actor_train && unused actor_rollout_ref.actor.clip_ratio 'of no use in this run' &&
        sets actor_rollout_ref.actor.clip_ratio_low clip-ratio-low 0.1 &&
        unused actor_rollout_ref.actor.kl_loss_type 'of no use in this run' &&
        unused actor_rollout_ref.ref.megatron.tensor_model_parallel_size 'of no use in this run' &&
        unused actor_rollout_ref.actor.megatron.check_for_spiky_loss 'of no use in this run' || return 1
    prints "$work/idle.yaml" actor_train --kl-loss-coef 0.1 &&
        sets actor_rollout_ref.actor.kl_loss_type kl-loss-type k1
}

# A run that --load of the command line names goes on, where the file's model would begin anew.
a_run_of_the_command_line_goes_on() {
    prints "$roles/roll.yaml" sft_train --load "$work/none" && shows load '.*/none' &&
        unused pretrain 'gives way to --load, which resumes a run unless --finetune is given' &&
        ! grep -q '^  finetune' "$work/out" || return 1
    prints "$roles/roll.yaml" sft_train --load "$work/none" --finetune && shows finetune true
}

# A ratio alone is for both sides, also where they are null; one side alone leaves the other to it.
a_ratio_alone_is_for_both_sides() {
    for lines in '' '\n    clip_ratio_low: null\n    clip_ratio_high: null'; do
        sed "s/^    use_kl_loss: false/&\n    clip_ratio: 0.3$lines/" "$roles/verl.yaml" >"$work/ratio.yaml"
        prints "$work/ratio.yaml" actor_train && sets actor_rollout_ref.actor.clip_ratio clip-ratio 0.3 &&
            ! grep 'clip-ratio-[lh]' "$work/out" || return 1
    done
    sed 's/^    use_kl_loss: false/&\n    clip_ratio: 0.3\n    clip_ratio_low: 0.1/' "$roles/verl.yaml" \
        >"$work/ratio.yaml"
    prints "$work/ratio.yaml" actor_train && sets actor_rollout_ref.actor.clip_ratio clip-ratio 0.3 &&
        sets actor_rollout_ref.actor.clip_ratio_low clip-ratio-low 0.1 && ! grep 'clip-ratio-high' "$work/out"
}

# --clip-ratio of the command line is for both sides; sides of the command line, for the file's clip_ratio.
ratios_of_the_command_line_win() {
    sed 's/^    use_kl_loss: false/&\n    clip_ratio_low: 0.1\n    clip_ratio_high: 0.3/' "$roles/verl.yaml" \
        >"$work/ratios.yaml"
    prints "$work/ratios.yaml" actor_train --clip-ratio 0.4 && shows clip-ratio 0.4 &&
        unused actor_rollout_ref.actor.clip_ratio_low 'gives way to the command line' &&
        unused actor_rollout_ref.actor.clip_ratio_high 'gives way to the command line' &&
        ! grep -q '^  clip-ratio-\(low\|high\)' "$work/out" || return 1
    prints "$work/ratios.yaml" actor_train --clip-ratio 0.4 --clip-ratio-high 0.5 &&
        shows clip-ratio-high 0.5 && ! grep -q '^  clip-ratio-low' "$work/out"
}

# Layouts of the roles beside the one that trains, and the parts of models that rest.
layouts_of_other_roles_are_read() {
    printf '%s\n' 'is_offload_states: true' 'actor_train:' '  model_args: {}' 'actor_infer:' '  strategy_args:' \
        '    strategy_name: vllm' '    strategy_config: {block_size: 16, tensor_parallel_size: 4}' 'reference:' \
        '  strategy_args:' '    strategy_name: megatron_infer' \
        '    strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}' >"$work/layouts.yaml"
    prints "$work/layouts.yaml" actor_train --kl-loss-coef 0.1 &&
        sets actor_infer.strategy_args.strategy_config.tensor_parallel_size rollout-tensor-model-parallel-size 4 &&
        unused actor_infer.strategy_args.strategy_config.block_size 'the role actor_infer' &&
        sets reference.strategy_args.strategy_config.tensor_model_parallel_size ref-tensor-model-parallel-size 2 &&
        unused reference.strategy_args.strategy_config.sequence_parallel 'the trained model' || return 1
    for part in param grad optimizer; do sets is_offload_states $part-offload true || return 1; done
    prints "$work/layouts.yaml" actor_train --kl-loss-coef 0.1 --tensor-model-parallel-size 1 &&
        unused reference.strategy_args.strategy_config.tensor_model_parallel_size \
            'gives way to --tensor-model-parallel-size' || return 1
    printf '%s\n' 'actor_train: {model_args: {}}' 'adv_estimator: gae' 'critic: {strategy_args: {' \
        'strategy_name: megatron_train, strategy_config: {pipeline_model_parallel_size: 2,' \
        'recompute_granularity: full}}}' \
        'reward: {model_args: {model_name_or_path: prefers}, strategy_args: {strategy_name: megatron_infer,' \
        '  strategy_config: {tensor_model_parallel_size: 2}}}' >"$work/layouts.yaml"
    prints "$work/layouts.yaml" actor_train --reward model &&
        sets critic.strategy_args.strategy_config.pipeline_model_parallel_size \
            critic-pipeline-model-parallel-size 2 &&
        unused critic.strategy_args.strategy_config.recompute_granularity 'the role critic' &&
        sets reward.model_args.model_name_or_path reward-load prefers &&
        sets reward.strategy_args.strategy_config.tensor_model_parallel_size reward-tensor-model-parallel-size 2 &&
        prints "$work/layouts.yaml" actor_train --adv-estimator grpo &&
        unused critic.strategy_args.strategy_config.pipeline_model_parallel_size 'of no use in this run' &&
        sets '(absent: reward.model_args)' reward model && prints "$work/layouts.yaml" actor_train --reward exact &&
        unused reward.model_args.model_name_or_path 'of no use in this run' || return 1
    printf '%s\n' 'student: {model_args: {}}' 'teacher: {strategy_args: {strategy_name: megatron_infer,' \
        '  strategy_config: {pipeline_model_parallel_size: 2}}}' >"$work/layouts.yaml"
    prints "$work/layouts.yaml" student &&
        sets teacher.strategy_args.strategy_config.pipeline_model_parallel_size \
            teacher-pipeline-model-parallel-size 2 || return 1
    sed 's/name: vllm/tensor_model_parallel_size: 2/; s/param_offload: false/param_offload: true/' \
        "$roles/verl.yaml" >"$work/layouts.yaml"
    printf '%s\n' 'reward_model: {model: {path: prefers}, megatron: {pipeline_model_parallel_size: 4}}' \
        >>"$work/layouts.yaml"
    prints "$work/layouts.yaml" actor_train --adv-estimator gae --reward model &&
        sets critic.megatron.tensor_model_parallel_size critic-tensor-model-parallel-size 1 &&
        unused critic.megatron.seed 'the role critic' && sets reward_model.model.path reward-load prefers &&
        sets reward_model.megatron.pipeline_model_parallel_size reward-pipeline-model-parallel-size 4 || return 1
    prints "$work/layouts.yaml" actor_train --kl-loss-coef 0.1 &&
        sets actor_rollout_ref.rollout.tensor_model_parallel_size rollout-tensor-model-parallel-size 2 &&
        sets actor_rollout_ref.ref.megatron.tensor_model_parallel_size ref-tensor-model-parallel-size 2 &&
        sets actor_rollout_ref.actor.megatron.param_offload param-offload true &&
        unused actor_rollout_ref.ref.megatron.param_offload 'the role reference'
}

# Keys whose options do not exist are named with them, in one error; values that ask for nothing are accepted.
absent_options_are_named() {
    printf '%s\n' 'teacher_temperature: 2' 'seed: 3' 'student:' '  training_args:' '    learning_rate: 1' \
        >"$work/absent.yaml"
    refused 'absent.yaml:1: teacher_temperature sets --teacher-temperature, which is not built yet' "$train" --config \
        "$work/absent.yaml" --role student --print-config || return 1
    sed 's/: 2$/: 1.0/' "$work/absent.yaml" >"$work/accepted.yaml"
    prints "$work/accepted.yaml" student && sets seed seed 3
}

unknown_keys_have_a_line_and_a_name() {
    refuses 'bad.yaml:2: unknown option learning_rat; did you mean learning_rate?' 'sft_train: {training_args: {' \
        '  learning_rat: 1}}' &&
        refuses 'bad.yaml:1: unknown option seeed; did you mean seed?' 'seeed: 1' 'sft_train: {model_args: {}}' &&
        refuses 'bad.yaml:1: unknown option xyzzyx' 'xyzzyx: 1' 'sft_train: {model_args: {}}' &&
        refuses 'bad.yaml:2: unknown option tensor_model_paralel_size; did you mean tensor_model_parallel_size?' \
            'sft_train: {strategy_args: {strategy_name: megatron_train, strategy_config: {' \
            '  tensor_model_paralel_size: 1}}}' &&
        refuses 'unknown option learning_rate; did you mean learning_rate in training_args?' \
            'sft_train: {model_args: {}, learning_rate: 1}' || return 1
    printf '%s\n' 'seeed: 1' 'sft_train:' '  model_args: {dtyp: bf16, dtype: fp4}' '  wxyz: ~' >"$work/bad.yaml"
    if "$train" --config "$work/bad.yaml" --role sft_train >"$work/out" 2>"$work/err"; then return 1; fi
    says '4 options cannot be used' "$work/err" &&
        says 'is unknown: .*:1: seeed (did you mean seed?), .*:3: dtyp (did you mean dtype?), .*:4: wxyz' "$work/err" &&
        says 'cannot be fp4: expects bf16, fp16 or fp32: .*:3: dtype' "$work/err"
}

# misspelt ROLE LINE NAME NEAREST YAML...: a key of another role's section is unknown.
misspelt() {
    role=$1 line=$2 key=$3 nearest=$4
    shift 4
    printf '%s\n' "$@" >"$work/bad.yaml"
    refused "bad.yaml:$line: unknown option $key; $nearest" "$train" --config "$work/bad.yaml" --role "$role" \
        --print-config
}

keys_of_other_roles_are_known() {
    misspelt sft_train 2 validatn 'did you mean validation?' 'sft_train: {model_args: {}}' 'validatn: {}' &&
        misspelt sft_train 2 generating_arg 'did you mean generating_args?' 'sft_train: {model_args: {}}' \
            'validation: {generating_arg: {}}' &&
        misspelt sft_train 2 tempalte 'did you mean template?' 'sft_train: {model_args: {}}' \
            'validation: {data_args: {tempalte: plain}}' &&
        misspelt sft_train 2 max_new_tokenz 'did you mean max_new_tokens?' 'sft_train: {model_args: {}}' \
            'validation: {generating_args: {max_new_tokenz: 6}}' || return 1
    set -- 'actor_train: {model_args: {}}'
    misspelt actor_train 2 max_new_tokenz 'did you mean max_new_tokens?' "$@" \
        'actor_infer: {generating_args: {max_new_tokenz: 6}}' &&
        misspelt actor_train 2 dtyp 'did you mean dtype?' "$@" 'reference: {model_args: {dtyp: bf16}}' &&
        misspelt actor_train 2 model_arg 'did you mean model_args?' "$@" 'actor_infer: {model_arg: {dtype: bf16}}' &&
        misspelt actor_train 2 infer_batchsize 'did you mean infer_batch_size?' "$@" \
            'reference: {infer_batchsize: 6}' &&
        misspelt actor_train 2 leaning_rate 'did you mean learning_rate?' "$@" \
            'critic: {training_args: {leaning_rate: 1}}' &&
        misspelt actor_train 2 strategy_arg 'did you mean strategy_args?' "$@" 'critic: {strategy_arg: {}}' &&
        misspelt actor_train 3 tensor_model_paralel_size 'did you mean tensor_model_parallel_size?' "$@" \
            'reference: {strategy_args: {strategy_name: megatron_infer, strategy_config: {' \
            '  tensor_model_paralel_size: 2}}}' &&
        misspelt actor_train 3 recompute_granularty 'did you mean recompute_granularity?' "$@" \
            'critic: {strategy_args: {strategy_name: megatron_train, strategy_config: {' \
            '  recompute_granularty: full}}}' &&
        misspelt student 2 sequence_packing 'did you mean use_sequence_packing?' 'student: {model_args: {}}' \
            'teacher: {sequence_packing: true}' || return 1
    # the keys of an engine that is not Megatron are its own, and those of a section in another file
    printf '%s\n' "$@" 'critic: {strategy_args: {strategy_name: deepspeed_train, strategy_config: "${zero3}"}}' \
        'actor_infer: {strategy_args: {strategy_name: vllm, strategy_config: {block_size: 16}}}' >"$work/good.yaml"
    prints "$work/good.yaml" actor_train && unused critic.strategy_args.strategy_config deepspeed_train &&
        unused actor_infer.strategy_args.strategy_config.block_size 'the role actor_infer' || return 1
    printf '%s\n' "$@" 'actor_infer: {generating_args: {stop_strings: [x, yz], include_stop_str_in_output: false}}' \
        >"$work/good.yaml"
    prints "$work/good.yaml" actor_train && sets actor_infer.generating_args.stop_strings stop 'x yz'
}

keys_of_other_roles_of_verl_are_known() {
    set -- 'actor_rollout_ref:' '  actor: {strategy: megatron}'
    misspelt actor_train 3 max_new_tokenz '--help' "$@" '  rollout: {max_new_tokenz: 6}' &&
        misspelt actor_train 3 max_num_seq 'did you mean max_num_seqs?' "$@" '  rollout: {max_num_seq: 6}' &&
        misspelt actor_train 3 temperatur 'did you mean temperature?' "$@" \
            '  rollout: {val_kwargs: {temperatur: 0}}' &&
        misspelt actor_train 3 log_prob_micro_batch_size_per_gp 'did you mean log_prob_micro_batch_size_per_gpu?' \
            "$@" '  ref: {log_prob_micro_batch_size_per_gp: 2}' &&
        misspelt actor_train 3 param_offlod 'did you mean param_offload?' "$@" \
            '  ref: {megatron: {param_offlod: true}}' &&
        misspelt actor_train 3 ppo_epoch 'did you mean ppo_epochs?' "$@" 'critic: {ppo_epoch: 2}' &&
        misspelt actor_train 3 lr_warmup_step 'did you mean lr_warmup_steps?' "$@" \
            'critic: {optim: {lr_warmup_step: 2}}' &&
        misspelt actor_train 3 pth 'did you mean path?' "$@" 'critic: {model: {pth: a}}' &&
        misspelt actor_train 3 sandbox_fussion 'did you mean sandbox_fusion?' "$@" \
            'reward_model: {sandbox_fussion: {}}' &&
        misspelt actor_train 3 overlong_bufer 'did you mean overlong_buffer?' "$@" \
            'reward_model: {overlong_bufer: {enable: true}}' &&
        misspelt actor_train 3 max_prompt_lenght 'did you mean max_prompt_length?' "$@" \
            'data: {max_prompt_lenght: 6}' || return 1
    printf '%s\n' "$@" '  rollout: {name: vllm, engine_kwargs: {vllm: {xyzzy: 1}}, do_sample: true, min_p: 0.1,' \
        '    repetition_penalty: 1.1, ignore_eos: false, prompt_length: 6, val_kwargs: {n: 2}, stop: "END"}' \
        'data: {reward_fn_key: data_source, shuffle: true, train_max_samples: -1}' \
        'reward_model: {enable: false, reward_kwargs: {xyzzy: 1}}' >"$work/good.yaml"
    prints "$work/good.yaml" actor_train && unused actor_rollout_ref.rollout.engine_kwargs 'the generating engine' &&
        sets actor_rollout_ref.rollout.repetition_penalty repetition-penalty 1.1 &&
        sets actor_rollout_ref.rollout.min_p min-p 0.1 &&
        sets actor_rollout_ref.rollout.stop stop END && unused data.reward_fn_key "verl's datasets" &&
        sed 's/train_max_samples: -1/train_max_samples: 9/' "$work/good.yaml" >"$work/bad.yaml" &&
        refused 'train_max_samples can only be -1 here' "$train" --config "$work/bad.yaml" --role actor_train \
            --print-config || return 1
    printf '%s\n' "$@" 'reward_model: {micro_batch_size_per_gpu: 2, reward_manager: naive, megatron: {seed: 3},' \
        '  model: {path: a/b}}' >"$work/good.yaml"
    printf '%s\n' "$@" 'critic: {model: {path: ~/models/a, tokenizer_path: ~/b}}' 'algorithm: {adv_estimator: gae}' \
        'trainer: {default_local_dir: ~/runs/a}' >"$work/home.yaml"
    prints "$work/home.yaml" actor_train && sets critic.model.path critic-load "$HOME/models/a" &&
        sets trainer.default_local_dir save "$HOME/runs/a" || return 1
    # shellcheck disable=SC2086
    prints "$work/home.yaml" actor_train $small && unused critic.model.path 'gives way to --num-layers' || return 1
    prints "$work/good.yaml" reward && sets reward_model.micro_batch_size_per_gpu micro-batch-size 2 &&
        sets reward_model.megatron.seed seed 3 && unused reward_model.reward_manager "verl's Python" &&
        refused 'has the roles actor_train, reward$' "$train" --config "$work/good.yaml" --role student
}

# Any value of another kind in the place of a key's value is read or refused.
values_of_other_kinds_do_no_harm() {
    runs=0
    while read -r example of; do
        count=$(wc -l <"$roles/$example.yaml")
        for line in $(seq "$count"); do
            for value in '[]' '""' '[x]' '{a: b}'; do
                sed "${line}s/^\( *[^ #]*:\) .*/\1 $value/" "$roles/$example.yaml" >"$work/other.yaml"
                ! cmp -s "$work/other.yaml" "$roles/$example.yaml" || continue
                runs=$((runs + 1)) status=0
                prints "$work/other.yaml" "$of" || status=$?
                [ $status = 0 ] || { [ $status = 1 ] && says '^error: ' "$work/err"; } || {
                    echo "$example, line $line, $value: exit status $status"
                    return 1
                }
            done
        done
    done <<END
roll sft_train
verl actor_train
END
    echo "$runs files"
    [ "$runs" -gt 100 ]
}

values_are_checked() {
    refuses 'bad.yaml:1: seed expects a whole number, got .x.' 'seed: x' 'sft_train: {model_args: {}}' &&
        refuses 'bad.yaml:1: seed expects a value, not a section' 'seed: {a: 1}' 'sft_train: {model_args: {}}' &&
        refuses 'bad.yaml:1: seed expects a whole number, not a list' 'seed: [1, 2]' 'sft_train: {model_args: {}}' &&
        refuses 'sft_train.model_args expects a section of keys' 'sft_train: {model_args: 3, worker_cls: a}' &&
        refuses 'bad.yaml:1: worker_cls cannot be banana here: a class of one.* take roll.pipeline' \
            'sft_train: {worker_cls: banana}' &&
        refuses 'bad.yaml:2: seed is given twice in this section' 'seed: 1' 'seed: 2' 'sft_train: {model_args: {}}' &&
        refuses 'device_mapping expects devices' 'sft_train: {model_args: {}, device_mapping: list(8)}' &&
        refuses 'device_mapping expects devices' \
            'sft_train: {model_args: {}, device_mapping: "list(range(0,8,99999999999999999999))"}' &&
        refuses 'device_mapping expects devices' 'sft_train: {model_args: {}, device_mapping: "[0, 1"}' &&
        refuses 'bad.yaml:1: .*device_mapping expects devices' 'sft_train: {device_mapping: [0, b]}' &&
        refuses 'num_labels can only be 1 here' 'sft_train: {model_args: {num_labels: 2}}' &&
        refuses 'lr_scheduler_type cannot be polynomial' \
            'sft_train: {training_args: {lr_scheduler_type: polynomial}}' &&
        refuses 'is not YAML' 'sft_train: [' && refuses 'has a second document' 'a: 1' '---' 'b: 1' &&
        refuses 'it has no sections' '- 1' && refuses 'has no sections of roles' 'seed: 1'
}

references_lead_somewhere() {
    refuses 'bad.yaml:1: ${nothing}: the file has no such key' 'seed: ${nothing}' 'sft_train: {model_args: {}}' &&
        refuses 'bad.yaml:1: ${sft_train.seed}: the file has no' 'seed: ${sft_train.seed}' \
            'sft_train: {model_args: {}}' &&
        refuses 'refers to itself' 'seed: ${a}' 'a: ${b}' 'b: ${a}' 'sft_train: {model_args: {}}' &&
        refuses 'refers to itself' 'seed: 1${seed}' 'sft_train: {model_args: {}}' &&
        refuses 'is a section or a list, not a text' 'seed: 1${sft_train}' 'sft_train: {model_args: {}}' &&
        refuses 'the environment has no such variable' 'seed: ${oc.env:MT_NONE}' 'sft_train: {model_args: {}}' &&
        refuses 'oc.env and oc.select are supported' 'seed: ${now:%Y}' 'sft_train: {model_args: {}}' &&
        refuses 'bad.yaml:1: << merges what is no section, or itself' 'sft_train: &a {model_args: {}, <<: *a}' &&
        refuses 'merges what is no section' 'sft_train: {model_args: {}, <<: 3}' &&
        refuses 'could need\|itself' \
            'sft_train: &a {model_args: {}, <<: [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a, *a]}' ||
        return 1
    printf '%s\n' 'seeds: {list: [5, {seed: "${..0}"}], last: "${.list.1.seed}"}' 'seed: ${seeds.last}' \
        'sft_train: {model_args: {}, infer_batch_size: "${..seed}"}' >"$work/relative.yaml"
    prints "$work/relative.yaml" sft_train && sets seed seed 5 &&
        refuses 'bad.yaml:1: ${.nothing}: the file has no such key' 'seed: ${.nothing}' 'sft_train: {}' &&
        refuses 'bad.yaml:1: ${..seeds}: the file has no such key' 'seed: ${..seeds}' 'seeds: 3' 'sft_train: {}' &&
        refuses 'refers to itself' 'seed: ${.seed}' 'sft_train: {model_args: {}}' || return 1
    printf '%s\n' 'seed: ${oc.env:MT_NUMBER,4}' 'sft_train: {model_args: {}}' >"$work/env.yaml"
    prints "$work/env.yaml" sft_train && sets seed seed 4 || return 1
    (export MT_NUMBER=9 && prints "$work/env.yaml" sft_train && sets seed seed 9)
}

# 2^30 texts behind one another are refused, not expanded.
references_do_not_explode() {
    echo 'sft_train: {model_args: {}}' >"$work/bomb.yaml"
    echo 'output_dir: ${a0}' >>"$work/bomb.yaml"
    for i in 0 1 2 3 4 5 6 7 8 9 10 11 12; do
        echo "a$i: \${a$((i + 1))}\${a$((i + 1))}\${a$((i + 1))}\${a$((i + 1))}"
    done >>"$work/bomb.yaml"
    echo 'a13: xxxxxxxx' >>"$work/bomb.yaml"
    refused 'holds more than options could need\|64 KiB' timeout $hang "$train" --config "$work/bomb.yaml" \
        --role sft_train --print-config
}

# 48 stands nowhere in the file: a message names the option beside the key.
a_sum_of_keys_is_named_by_its_option() {
    printf '%s\n' 'data: {train_files: no.jsonl, max_prompt_length: 32, max_response_length: 16}' 'actor_rollout_ref:' \
        '  actor: {optim: {lr: 1e-6}}' 'trainer: {total_training_steps: 1}' >"$work/sum.yaml"
    refused 'seq-length (.*sum.yaml:1) (by max_prompt_length) 48 is more than --max-position-embeddings 40' "$train" \
        --config "$work/sum.yaml" --role actor_train --num-layers 1 --hidden-size 16 --num-attention-heads 2 \
        --vocab-size 257 --tokenizer-type ByteLevel --max-position-embeddings 40 --reward exact --chat-template plain
}

# Of roles there is nothing to choose from if a file has one; words of Hydra change its keys too.
the_only_role_of_a_file_is_taken() {
    printf '%s\n' 'seed: 7' 'sft_train: {training_args: {learning_rate: 0.5}}' 'sequence_length: 96' >"$work/only.yaml"
    "$train" --config "$work/only.yaml" --print-config sft_train.training_args.learning_rate=0.25 >"$work/out" \
        2>"$work/err" && grep -q 'only.yaml, role sft_train' "$work/out" &&
        sets sft_train.training_args.learning_rate lr 0.25 && sets sequence_length seq-length 96 || return 1
    echo 'actor_infer: {model_args: {}}' >>"$work/only.yaml"
    refused 'has the roles sft_train, actor_infer; choose one' "$train" --config "$work/only.yaml"
}

roles_are_named() {
    refused 'has the roles sft_train, actor_infer, reference, critic, rewards.rule, rewards.model' "$train" --config \
        "$roles/roll.yaml" --role actor_train &&
        refused 'has the roles sft_train, .*rewards.model' "$train" --config "$roles/roll.yaml" --role rewards.x &&
        refused 'has the roles actor_train, actor_infer, reference, critic' "$train" --config "$roles/verl.yaml" \
            --role student &&
        refused 'has the roles actor_train, reference, critic' sh -c \
            "sed '/rollout:/,/gpu_mem/d' $roles/verl.yaml >$work/none.yaml &&
            $train --config $work/none.yaml --role actor_infer" &&
        refused 'has the roles sft_train.*choose one with --role' "$train" --config "$roles/roll.yaml" &&
        refused 'role needs --config' "$train" --role sft_train --mock-data --num-layers 1 \
            --hidden-size 16 --num-attention-heads 2 --vocab-size 64 --seq-length 8 --lr 1 --train-iters 1
}

# A run that is cut short keeps the file's warm-up and decay.
a_short_run_keeps_the_learning_rates() {
    sed 's/^max_steps: .*/max_steps: 100/; s/warmup_steps: 1/warmup_steps: 20/' "$roles/roll.yaml" >"$work/long.yaml"
    # shellcheck disable=SC2086
    prints "$work/long.yaml" sft_train $small --train-iters 2 && shows lr-decay-iters 100 &&
        shows lr-warmup-iters 20 && ! grep -q 'do not make a run' "$work/out"
}

# Files as they are named, else in dataset_dir; a list of samples in one JSON file.
the_command_line_wins() {
    mkdir -p "$work/run/data" && cd "$work/run" || return 1
    for i in 1 2 3 4 5 6 7 8; do
        [ $i = 1 ] && echo '[' || echo ,
        printf '{"instruction": "Say \\"%d]}\\".", "input": "", "output": "%d"}\n' $i $i
    done >data/train.json
    echo ']' >>data/train.json
    cp data/train.json valid.json
    # shellcheck disable=SC2086
    "$train" --config "$roles/roll.yaml" --role sft_train $small --seed 3 --train-iters 2 --save out --eval-iters 1 \
        >"$work/out" 2>"$work/err"
    status=$?
    cd "$OLDPWD" || return 1
    [ $status = 0 ] && shows seed 3 && says 'data/train.json: 8 samples' "$work/out" &&
        says '^     2/2 .* loss ' "$work/out" && shows global-batch-size 6 &&
        says 'pretrain: gives way to --num-layers and --hidden-size' "$work/out" &&
        says 'num_train_epochs: gives way to --train-iters' "$work/out" &&
        says 'seed, .*: the command line has their options' "$work/out" && ! grep -q 'load  *models' "$work/out" ||
        return 1
    # shellcheck disable=SC2086
    refused 'data.json:3: expects , or ] after an object' sh -c "printf '[\n{\"text\": \"ab\"}\n{}]' >$work/data.json &&
        $train --config $roles/roll.yaml --role sft_train $(echo $small) --train-iters 1 --lr-warmup-iters 0 \
        --save $work/none --train-data-path $work/data.json"
}

# MODEL_ARGS of a file of Megatron-LM's tests, with variables of ENV_VARS and of the environment.
a_file_of_megatrons_tests_trains() {
    file=$roles/megatron_test.yaml
    "$train" --config "$file" --print-config >"$work/out" 2>"$work/err" || return 1
    says 'save (has ${MT_TEST_WORK}, which is not set' "$work/out" && shows num-layers 2 &&
        says '^  hidden-size  *32  *# megatron_test.yaml:10$' "$work/out" && shows recompute-modules 'core_attn mlp' &&
        says 'TEST_TYPE, .*LAUNCHER (MODEL_ARGS has the options' "$work/out" &&
        refused 'megatron_test.yaml:32: save has ${MT_TEST_WORK}, which is not set; export it' "$train" \
            --config "$file" || return 1
    MT_TEST_WORK=$work "$train" --config "$file" --seed 3 >"$work/out" 2>"$work/err" || return 1
    says '^     3/3 .* loss ' "$work/out" && says 'saved iteration 3 to .*/run' "$work/out" &&
        [ -f "$work/run/config.json" ] || return 1
    "$train" --config "$file" --save "$work/mine" --train-iters 2 >"$work/out" 2>"$work/err" &&
        says 'saved iteration 2 to .*/mine' "$work/out" &&
        refused '--hidden-size (.*megatron_test.yaml:10) 32 must be' "$train" --config "$file" --save "$work/mine" \
            --num-attention-heads 5
}

# The command line wins over a file of options, also over what it excludes, and arguments of Megatron-LM that need
# another one have no effect; a file of other options has errors.
arguments_give_way() {
    printf '%s\n' 'MODEL_ARGS:' '  --num-layers: 1' '  --hidden-size: 16' '  --num-attention-heads: 2' \
        '  --vocab-size: 64' '  --micro-batch-size: 1' '  --global-batch-size: 1' '  --seq-length: 8' \
        '  --max-position-embeddings: 8' '  --train-iters: 1' '  --lr: 1e-4' '  --data-path: ${MT_NO_SUCH}' \
        '  --split: 949,50,1' '  --lr-wsd-decay-style: minus_sqrt' '  --moe-router-topk: 2' \
        '  --first-last-layers-bf16: true' '  --num-layers-at-start-in-bf16: 1' '  --attention-backend: fused' \
        '  --window-size: (3,0)' >"$work/arguments.yaml"
    refused 'data-path has ${MT_NO_SUCH}, which is not set' "$train" --config "$work/arguments.yaml" || return 1
    "$train" --config "$work/arguments.yaml" --mock-data >"$work/out" 2>"$work/err" &&
        says '^     1/1 .* loss ' "$work/out" && shows window-size 4 &&
        says '^--lr-wsd-decay-style.* has no effect: it needs --lr-decay-style WSD$' "$work/out" &&
        says '^--moe-router-topk.* has no effect: it needs --num-experts$' "$work/out" &&
        says 'first-last-layers-bf16 (.*:16) has no effect: without --fp8-format' "$work/out" &&
        says 'attention-backend (.*:18) cudnn has no effect: the CPU has one attention' "$work/out" || return 1
    MT_NO_SUCH=nothing "$train" --config "$work/arguments.yaml" --mock-data >"$work/out" 2>"$work/err" &&
        says 'no effect here: .*--data-path (.*:12) (gives way to --mock-data of the command line)' "$work/out" &&
        MT_NO_SUCH=nothing refused 'strict-options: no effect here: .*gives way to --mock-data' "$train" \
            --config "$work/arguments.yaml" --mock-data --strict-options || return 1
    sed -e 1d -e 's/^  --//' -e '/MT_NO_SUCH/d' -e '/split/d' -e '/backend/d' \
        "$work/arguments.yaml" >"$work/options.yaml"
    refused 'lr-wsd-decay-style (.*) needs --lr-decay-style' "$train" --config "$work/options.yaml" --mock-data
}

# total batch = per device x accumulation x data-parallel ranks
the_batch_grows_with_the_ranks() {
    for ranks in 1 2 4; do
        # shellcheck disable=SC2046,SC2086
        $(mpirun_here) -np $ranks "$train" --config "$roles/roll.yaml" --role sft_train $small --print-config \
            >"$work/out" 2>"$work/err" && says "^options on $ranks rank" "$work/out" &&
            shows global-batch-size $((6 * ranks)) || return 1
    done
    # shellcheck disable=SC2046,SC2086
    $(mpirun_here) -np 4 "$train" --config "$roles/roll.yaml" --role sft_train $small --print-config \
        --tensor-model-parallel-size 2 >"$work/out" 2>"$work/err" && shows global-batch-size 12 &&
        sets sft_train.strategy_args.strategy_config.sequence_parallel sequence-parallel true || return 1
    # shellcheck disable=SC2086
    prints "$roles/roll.yaml" sft_train $small --global-batch-size 10 &&
        shows global-batch-size 10 &&
        unused sft_train.training_args.gradient_accumulation_steps 'gives way to --global-batch-size'
}

# Every Megatron role of the files; keys whose options do not exist yet are the only errors.
shared_files_are_read() {
    while read -r file role; do
        if prints "$shared/yaml/$file.yaml" "$role"; then
            says '^keys without effect here' "$work/out" || return 1
        else
            ! grep -v 'cannot be used:$\|sets --[a-z-]*\( [a-z]*\)\{0,1\}, which is not built yet' "$work/err" ||
                return 1
        fi
    done <<END
roll-sft sft_train
roll-dpo actor_train
roll-dpo reference
roll-distill student
roll-distill teacher
roll-rlvr actor_train
roll-rlvr reference
trinity actor_train
trinity reference
trinity critic
END
}

# ROLL's examples: each is read for a role, unless it has a value that is not supported, and most for the actor.
examples_of_roll_are_accepted() {
    accepted=0 trained=0
    for file in "$shared"/yaml/roll/*.yaml; do
        found=0 learns=0
        for role in reference actor_infer teacher student actor_train; do
            prints "$file" $role || continue
            found=1
            case $role in student | actor_train) learns=1 ;; esac
        done
        accepted=$((accepted + found)) trained=$((trained + learns))
    done
    echo "$accepted files of ROLL are accepted for a role, $trained for one that trains"
    [ $accepted -ge 38 ] && [ $trained -ge 32 ]
}

# verl's generated file with the words of a run's command, as its examples start it: GRPO, and PPO with a critic.
generated_file_of_verl_trains() {
    for i in 1 2 3 4 5 6 7 8; do
        printf '{"data_source": "x", "prompt": [{"role": "user", "content": "Say %d"}], "reward_model": ' $i
        printf '{"style": "rule", "ground_truth": "%d"}}\n' $i
    done >"$work/verl.jsonl"
    for words in 'grpo actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.use_kl_loss=True' \
        'gae actor_rollout_ref.rollout.n=1 critic.optim.lr=1e-5 critic.ppo_micro_batch_size_per_gpu=1'; do
        # shellcheck disable=SC2086
        "$train" --config "$shared/yaml/verl/ppo_megatron_trainer-0.9.1.yaml" --role actor_train \
            "data.train_files=['$work/verl.jsonl']" data.val_files=null data.train_batch_size=4 \
            data.max_prompt_length=56 data.max_response_length=8 actor_rollout_ref.actor.ppo_mini_batch_size=2 \
            actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
            actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
            trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=1 trainer.total_epochs=1 \
            trainer.default_local_dir="$work/verl.run" +trainer.val_before_train=False \
            algorithm.adv_estimator=$words $small --overwrite >"$work/out" 2>"$work/err" &&
            says '^     2/2 .* reward ' "$work/out" && says 'saved iteration 2' "$work/out" || return 1
        rm -rf "$work/verl.run"
    done
}

# roll-sft.yaml as it stands, with the shape and the data of a small run.
roll_sft_trains() {
    mkdir -p "$work/sft/data" && cp "$shared/yaml/roll-sft.yaml" "$work/sft" || return 1
    for i in 1 2 3 4 5 6 7 8 9; do
        printf '{"instruction": "Say", "input": "%d", "output": "%d"}\n' $i $i
    done >"$work/sft/data/code_alpaca_20k.json"
    # shellcheck disable=SC2046,SC2086
    (cd "$work/sft" && $(mpirun_here) -np 8 "$train" --config roll-sft.yaml --role sft_train $small --train-iters 2 \
        --seq-length 256 --save-interval 2) >"$work/out" 2>"$work/err" &&
        says '^     2/2 .* loss [0-9]' "$work/out" && says 'saved iteration 2 to ./output_sft' "$work/out"
}

# roll-dpo.yaml as it stands, likewise: preferences against the initial model.
roll_dpo_trains() {
    mkdir -p "$work/dpo/data" && cp "$shared/yaml/roll-dpo.yaml" "$work/dpo" || return 1
    for i in 1 2 3 4 5 6 7 8 9; do
        printf '{"prompt": "Say %d", "chosen": "%d", "rejected": "no"}\n' $i $i
    done >"$work/dpo/data/comparison_gpt4_data_zh.json"
    # shellcheck disable=SC2086
    (cd "$work/dpo" && "$train" --config roll-dpo.yaml --role actor_train $small --train-iters 2 --seq-length 64 \
        --eval-iters 1) >"$work/out" 2>"$work/err" &&
        says '^     2/2 .* loss 0\.69' "$work/out" && shows stage dpo
}

# roll-rlvr.yaml as it stands, likewise; the rewards of its Python classes are replaced by --reward. A program's rewards
# differ, and responses end at --stop: the file masks overlong ones.
roll_rlvr_trains() {
    mkdir -p "$work/rlvr/data" && cp "$shared/yaml/roll-rlvr.yaml" "$work/rlvr" || return 1
    sed -n '/^actor_train/,/^actor_infer/s|^ *- \(data/.*jsonl\)$|\1|p' "$work/rlvr/roll-rlvr.yaml" >"$work/paths"
    while read -r path; do
        for i in 1 2 3; do
            printf '{"messages": [{"role": "user", "content": "Say %d"}], "answer": "%d"}\n' $i $i
        done >"$work/rlvr/$path"
    done <"$work/paths"
    # shellcheck disable=SC2086
    (cd "$work/rlvr" && "$train" --config roll-rlvr.yaml --role actor_train $small --train-iters 2 --seq-length 64 \
        --prompt-shares '*=1' \
        --max-new-tokens 4 --rollout-batch-size 3 --global-batch-size 12) >"$work/out" 2>"$work/err" &&
        says '^     2/2 .* reward [0-9]' "$work/out" && shows stage rl || return 1
    # shellcheck disable=SC2086
    (cd "$work/rlvr" && "$train" --config roll-rlvr.yaml --role actor_train $small --train-iters 2 --seq-length 64 \
        --prompt-shares '*=1' \
        --max-new-tokens 16 --rollout-batch-size 3 --global-batch-size 12 --stop e t a o i n s h r --save steps \
        --save-interval 1 --lr 1e-3 --lr-warmup-iters 0 --metrics steps.jsonl --reward command --reward-command \
        'i=0; while read -r line; do i=$((i + 1)); echo $((i % 2)); done') >"$work/out" 2>"$work/err" &&
        series lm_loss "$work/rlvr/steps.jsonl" | awk '$1 != 0 { steps++ } END { exit steps != 2 }' &&
        series grad_norm "$work/rlvr/steps.jsonl" | awk '!($1 > 0) { exit 1 }' &&
        [ "$(wc -c <"$work/rlvr/steps/iter_0000002/model.safetensors")" -gt 9999 ] &&
        ! cmp -s "$work/rlvr/steps/iter_0000001/model.safetensors" \
            "$work/rlvr/steps/iter_0000002/model.safetensors" || return 1
    prints "$work/rlvr/roll-rlvr.yaml" actor_train && sets '(absent: reward)' reward exact &&
        prints "$work/rlvr/roll-rlvr.yaml" actor_train --reward number && shows reward number
}

# roll-distill.yaml as it stands, likewise: the student, with a teacher of another shape.
roll_distill_trains() {
    mkdir -p "$work/distill/data" && cp "$shared/yaml/roll-distill.yaml" "$work/distill" || return 1
    for i in 1 2 3 4 5 6 7 8 9; do
        printf '{"question_zh": "Say %d", "answer_zh": "%d"}\n' $i $i
    done >"$work/distill/data/GSM8K_zh.json"
    # shellcheck disable=SC2086
    "$train" --sft --prompt-key question_zh --response-key answer_zh --data-path "$work/distill/data/GSM8K_zh.json" \
        $small --num-layers 4 --hidden-size 32 --seq-length 64 --train-iters 1 --lr 1e-3 --eval-iters 0 \
        --split 1,0,0 --save "$work/distill/teacher" >"$work/out" 2>"$work/err" || return 1
    # shellcheck disable=SC2046,SC2086
    (cd "$work/distill" && $(mpirun_here) -np 8 "$train" --config roll-distill.yaml --role student $small \
        --teacher-load teacher --train-iters 2 --seq-length 64 --eval-iters 1) >"$work/out" 2>"$work/err" &&
        says '^     2/2 .* divergence [0-9]' "$work/out" && says 'validation loss [0-9]' "$work/out" &&
        shows stage kd && shows logits-topk 64
}

check keys_have_options_and_references_values keys_have_options_and_references_values
check keys_of_other_engines_are_listed keys_of_other_engines_are_listed
check files_may_ask_for_fp16 files_may_ask_for_fp16
check floats_are_whole_numbers floats_are_whole_numbers
check every_role_is_read every_role_is_read
check infer_reads_its_role infer_reads_its_role
check words_of_hydra_change_keys words_of_hydra_change_keys
check environments_give_way_to_prompts environments_give_way_to_prompts
check micro_batches_by_tokens_have_options micro_batches_by_tokens_have_options
check refused_values_give_way_to_the_command_line refused_values_give_way_to_the_command_line
check absent_keys_have_their_defaults absent_keys_have_their_defaults
check a_partial_file_of_verl_has_its_defaults a_partial_file_of_verl_has_its_defaults
check partial_files_of_roll_and_trinity_have_their_defaults partial_files_of_roll_and_trinity_have_their_defaults
check keys_that_change_the_data_have_an_answer keys_that_change_the_data_have_an_answer
check the_case_of_an_engine_loses_no_setting the_case_of_an_engine_loses_no_setting
check settings_of_a_critic_that_differ_are_refused settings_of_a_critic_that_differ_are_refused
check roles_that_rest_do_not_train roles_that_rest_do_not_train
check fields_at_their_defaults_are_accepted fields_at_their_defaults_are_accepted
check fields_without_effect_have_any_value fields_without_effect_have_any_value
check fields_on_the_command_line_have_what_a_file_may_have fields_on_the_command_line_have_what_a_file_may_have
check fields_on_the_command_line_may_be_at_their_defaults fields_on_the_command_line_may_be_at_their_defaults
check intervals_may_be_shares_of_all_steps intervals_may_be_shares_of_all_steps
check fields_of_another_name_must_agree fields_of_another_name_must_agree
check sections_at_their_defaults_are_accepted sections_at_their_defaults_are_accepted
check fields_without_a_use_do_not_stop_a_file fields_without_a_use_do_not_stop_a_file
check ranks_are_those_of_the_device_mapping ranks_are_those_of_the_device_mapping
check verl_is_read verl_is_read
check verl_learns_as_dapo verl_learns_as_dapo
check properties_are_fixed properties_are_fixed
check later_verl_is_read later_verl_is_read
check every_policy_loss_runs every_policy_loss_runs
check rewards_are_normalised_as_rolls rewards_are_normalised_as_rolls
check divergences_have_their_estimators divergences_have_their_estimators
check cispo_of_roll_has_its_range cispo_of_roll_has_its_range
check examples_of_roll_are_read examples_of_roll_are_read
check sampling_and_domains_of_roll_are_read sampling_and_domains_of_roll_are_read
check examples_of_verl_are_read examples_of_verl_are_read
check on_policy_distillation_is_read on_policy_distillation_is_read
check trinity_is_read trinity_is_read
check trinity_without_the_keys_of_verl_is_read trinity_without_the_keys_of_verl_is_read
check the_losses_of_trinity_are_its_own the_losses_of_trinity_are_its_own
check idle_options_of_rl_are_unused idle_options_of_rl_are_unused
check a_run_of_the_command_line_goes_on a_run_of_the_command_line_goes_on
check a_ratio_alone_is_for_both_sides a_ratio_alone_is_for_both_sides
check ratios_of_the_command_line_win ratios_of_the_command_line_win
check layouts_of_other_roles_are_read layouts_of_other_roles_are_read
check absent_options_are_named absent_options_are_named
check unknown_keys_have_a_line_and_a_name unknown_keys_have_a_line_and_a_name
check keys_of_other_roles_are_known keys_of_other_roles_are_known
check keys_of_other_roles_of_verl_are_known keys_of_other_roles_of_verl_are_known
check values_are_checked values_are_checked
check values_of_other_kinds_do_no_harm values_of_other_kinds_do_no_harm
check references_lead_somewhere references_lead_somewhere
check references_do_not_explode references_do_not_explode
check a_sum_of_keys_is_named_by_its_option a_sum_of_keys_is_named_by_its_option
check the_only_role_of_a_file_is_taken the_only_role_of_a_file_is_taken
check roles_are_named roles_are_named
check a_short_run_keeps_the_learning_rates a_short_run_keeps_the_learning_rates
check the_command_line_wins the_command_line_wins
check arguments_give_way arguments_give_way
check a_file_of_megatrons_tests_trains a_file_of_megatrons_tests_trains
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then
    check the_batch_grows_with_the_ranks the_batch_grows_with_the_ranks
fi
if [ -d "$shared/yaml" ]; then
    check shared_files_are_read shared_files_are_read
    check generated_file_of_verl_trains generated_file_of_verl_trains
    check examples_of_roll_are_accepted examples_of_roll_are_accepted
    [ -z "${HAVE_MPI:-}" ] || check roll_sft_trains roll_sft_trains
    check roll_dpo_trains roll_dpo_trains
    check roll_rlvr_trains roll_rlvr_trains
    [ -z "${HAVE_MPI:-}" ] || check roll_distill_trains roll_distill_trains
else
    echo "skipped: ../shared/yaml is absent"
fi
check pictures_have_options pictures_have_options
exit $failed
