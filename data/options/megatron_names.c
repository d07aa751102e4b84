/* megatron_names.c: the answers to Megatron-LM's option names that are no row of the option table, grouped by reason.
 * Whoever adds a row to option_table.c removes its name here; tests/test_options.c checks that every name of
 * tests/megatron-arguments.tsv and of tests/megatron-core-arguments.tsv has one answer. */
#include "megatron_names.h"

#include <stdbool.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // most answers have no value

#define OF_TRANSFORMERS "a setting of transformers' Trainer, which does not run here"

/* See mt_megatron_name.value. */
static const struct {
    const char *name, *option, *value, *values;
} aliases[] = {
    {"accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "false"}, // false is no setting: see Megatron-LM
    {"add-bias-linear", "disable-bias-linear", "!"},
    {"beta-fast", "yarn-beta-fast"},
    {"beta-slow", "yarn-beta-slow"},
    {"bucket-size", "ddp-bucket-size"},
    {"disable-fp8-wgrad", "fp8-wgrad", "!"},
    {"disable-pad-vocab-size", "make-vocab-size-divisible-by", "1"},
    {"dp-comm-overlap-bucket-size", "ddp-bucket-size"},
    {"dist-ckpt-format", "ckpt-format"},
    {"enable-straggler-detection", "log-straggler"},
    {"grad-reduce-in-fp32", "grad-reduce-in-bf16", "!"},
    {"hybrid-layer-pattern", "hybrid-override-pattern"},
    {"load-optim", "no-load-optim", "!"},
    {"load-rng", "no-load-rng", "!"},
    {"microbatch-group-size-per-vp-stage", "microbatch-group-size-per-virtual-pipeline-stage"},
    {"mscale", "yarn-mscale"},
    {"mscale-all-dim", "yarn-mscale-all-dim"},
    {"no-pad-vocab-size", "make-vocab-size-divisible-by", "1"},
    {"no-position-embedding", "position-embedding-type", "?none"},
    {"num-layers-in-first-pipeline-stage", "decoder-first-pipeline-num-layers"},
    {"num-layers-in-last-pipeline-stage", "decoder-last-pipeline-num-layers"},
    {"num-moe-experts", "num-experts"},
    {"override-opt-param-scheduler", "use-checkpoint-opt-param-scheduler", "!"},
    {"persistent-save-interval", "save-interval"},
    {"rotary-scaling-factor", "rope-scaling-factor"},
    {"save-optim", "no-save-optim", "!"},
    {"use-custom-fsdp", "data-parallel-sharding-strategy", "?optim_grads_params"},
    {"use-flash-attn", "attention-backend", "flash"},
    {"use-layer-wise-distributed-optimizer", "data-parallel-sharding-strategy", "?optim"},
    {"use-megatron-fsdp", "data-parallel-sharding-strategy", "?optim_grads_params"},
    {"use-rotary-position-embeddings", "position-embedding-type", "rope"},
    {"use-torch-fsdp2", "data-parallel-sharding-strategy", "?optim_grads_params"},
    {"virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"},
    {"yaml-cfg", "config"},
    {"yarn-correction-range-round-to-int", "no-yarn-correction-range-round-to-int", "!"},
    {"yarn-original-max-position-embeddings", "original-max-position-embeddings"},
    // transformers' TrainingArguments
    {"adam-epsilon", "adam-eps"},
    {"eval-steps", "eval-interval", NULL, "false="},
    {"full-determinism", "deterministic-mode"},
    {"gradient-checkpointing", "recompute-granularity", "full"},
    {"learning-rate", "lr"},
    {"logging-steps", "log-interval"},
    {"lr-scheduler-type", "lr-decay-style", NULL,
     "constant_with_warmup=constant|inverse_sqrt=inverse-square-root|warmup_stable_decay=WSD|"
     "cosine_with_restarts=!the learning rate has no restarts: take cosine|"
     "polynomial=!take linear, or another of --lr-decay-style"},
    {"max-grad-norm", "clip-grad"},
    {"max-steps", "train-iters", NULL, "-1=|0="},
    {"no-cuda", "device", "cpu"},
    {"num-train-epochs", "train-epochs"},
    {"optim", "optimizer", NULL,
     "adamw_torch=adam|adamw_torch_fused=adam|adamw_hf=adam|adamw=adam|adamw_apex_fused=adam|"
     "adamw_torch_npu_fused=adam|adamw_torch_xla=adam|paged_adamw=adam|paged_adamw_32bit=adam|lion_32bit=lion|"
     "paged_lion_32bit=lion|"
     "sgd=!transformers' SGD has no momentum: take --optimizer sgd --sgd-momentum 0"},
    {"output-dir", "save"},
    {"overwrite-output-dir", "overwrite"},
    {"per-device-train-batch-size", "micro-batch-size"},
    {"per-gpu-train-batch-size", "micro-batch-size"},
    {"resume-from-checkpoint", "auto-resume"},
    {"save-only-model", "no-save-optim"},
    {"save-steps", "save-interval", NULL, "-1=|0="},
    {"save-total-limit", "keep-checkpoints", NULL, "false="},
    {"use-cpu", "device", "cpu"},
    {"warmup-ratio", "lr-warmup-fraction"},
    {"warmup-steps", "lr-warmup-iters"},
};

/* Names with the same answer, with blanks between them. */
static const struct {
    mt_name_kind kind;
    const char *text, *names, *value;
} groups[] = {
    {MT_NAME_ALWAYS, "softmax is computed in fp32", "attention-softmax-in-fp32", "true"},
    {MT_NAME_ALWAYS, "the loss is the sum over the tokens of a step, divided by their number",
     "calculate-per-token-loss", "true"},
    {MT_NAME_ALWAYS, "kernels derive the mask from the lengths of the sequences",
     "no-create-attention-mask-in-dataloader", "true"},
    {MT_NAME_ALWAYS, "no state of random numbers is saved: they are functions of --seed and of their place",
     "no-save-rng", "true"},
    {MT_NAME_ALWAYS, "each rank creates only the parameters that it keeps", "init-model-with-meta-device", "true"},
    {MT_NAME_ALWAYS, "parameters and gradients of two units have buffers at a time", "fsdp-double-buffer", "true"},
    {MT_NAME_ALWAYS, "products of bf16 matrices are summed in fp32", "disable-bf16-reduced-precision-matmul", "true"},
    {MT_NAME_ALWAYS, "a checkpoint loads on any layout, which the options of this run give",
     "use-mp-args-from-checkpoint-args", "false"},
    {MT_NAME_ALWAYS, "checkpoints have checksums, which are verified when they are loaded", "verify-integrity", "true"},
    {MT_NAME_ALWAYS, "the tokenizer is saved with each checkpoint", "save-tokenizer-assets", "true"},
    {MT_NAME_ALWAYS, "weights that are not loaded are initialized", "perform-initialization", "true"},
    {MT_NAME_ALWAYS, "printed lines and --metrics have the throughput", "log-throughput", "true"},
    {MT_NAME_ALWAYS, "this program contacts no other service", "disable-msc no-one-logger", "true"},
    {MT_NAME_ALWAYS, "host memory for copies is pinned", "pin-cpu-grads pin-cpu-params", "true"},
    {MT_NAME_ALWAYS, "weight decay is decoupled, as in AdamW", "decoupled-weight-decay", "true"},
    {MT_NAME_ALWAYS, "master weights are fp32, or as --main-params-dtype says", "megatron-fsdp-main-params-dtype",
     "fp32|float32"},
    {MT_NAME_ALWAYS, "gradients are fp32, or as --main-grads-dtype says",
     "megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype", "fp32|float32"},
    {MT_NAME_ALWAYS, "the router computes in fp32", "moe-router-dtype", "fp32"},
    {MT_NAME_ALWAYS, "the indexer of sparse attention adds the positive scores of its heads",
     "dsa-indexer-scoring-relu", "true"},
    {MT_NAME_IDLE, "one rotation of the indexer's queries and keys cancels in their products",
     "dsa-indexer-rotate-activation"},
    {MT_NAME_ALWAYS, "blanks are as the SentencePiece model's own normalizer leaves them",
     "tokenizer-sentencepiece-ignore-extra-whitespaces", "true"},
    {MT_NAME_ALWAYS, "a shared expert runs during the exchange of tokens", "moe-shared-expert-overlap", "true"},
    {MT_NAME_ALWAYS, "a shard is shared by all data-parallel ranks", "outer-dp-sharding-strategy", "no_shard"},
    // Fields of transformers' TrainingArguments and of MCoreAdapter that have no counterpart: at their defaults where
    // numbers or checkpoints depend on them, else at any value
    {MT_NAME_ALWAYS, OF_TRANSFORMERS,
     "adafactor auto-find-batch-size batch-eval-metrics enable-jit-checkpoint use-cache bf16-full-eval "
     "dataloader-drop-last do-predict eval-on-start eval-use-gather-object "
     "fp16-full-eval group-by-length hub-always-push hub-private-repo "
     "ignore-data-skip include-inputs-for-metrics "
     "jit-mode-eval load-best-model-at-end predict-with-generate prediction-loss-only "
     "push-to-hub restore-callback-states-from-checkpoint save-on-each-node sortish-sampler "
     "tpu-metrics-debug use-ipex use-legacy-prediction-loop use-mps-device",
     "false"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS,
     "average-tokens-across-devices dataloader-in-order eval-do-concat-batches "
     "save-safetensors",
     "true"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "do-train do-eval", "true|false"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "disable-tqdm", "true|false"},
    {MT_NAME_ALWAYS, "--eval-steps, --save-steps and --logging-steps count steps",
     "eval-strategy evaluation-strategy logging-strategy save-strategy", "steps|no"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "eval-delay fsdp-min-num-params", "0"},
    {MT_NAME_ALWAYS, "labels are not smoothed", "label-smoothing-factor", "0|0.0"},
    {MT_NAME_IDLE, "evaluation has the micro-batches of training, or of --eval-micro-batch-size",
     "per-device-eval-batch-size per-gpu-eval-batch-size"},
    // the sections accelerator_config and fsdp_config
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "even-batches use-seedable-sampler", "true"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "non-blocking use-configured-state", "false"},
    {MT_NAME_IDLE, "fsdp, which is off", "fsdp-config min-num-params xla xla-fsdp-grad-ckpt xla-fsdp-v2"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "past-index", "-1"},
    {MT_NAME_ALWAYS, "ranks are those of mpirun", "local-rank", "-1|0"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "ddp-backend", "none|false|nccl"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "fp16-backend half-precision-backend", "auto"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "fp16-opt-level", "O1"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "hub-strategy", "every_save"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "length-column-name", "length"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS, "ray-scope", "last"},
    {MT_NAME_ALWAYS, "samples are shuffled", "train-sampling-strategy", "random"},
    {MT_NAME_IDLE, "reports are --metrics and --tensorboard-dir",
     "report-to run-name logging-dir logging-first-step include-num-input-tokens-seen include-tokens-per-second "
     "log-level log-level-replica log-on-each-node logging-nan-inf-filter skip-memory-metrics "
     "project trackio-bucket-id trackio-space-id trackio-static-space-id"},
    {MT_NAME_IDLE, "transformers' Trainer, which does not run here; numbers do not depend on it",
     "dataloader-num-workers dataloader-persistent-workers dataloader-pin-memory dataloader-prefetch-factor "
     "dataloader-multiprocessing-context remove-unused-columns ddp-bucket-cap-mb ddp-broadcast-buffers "
     "ddp-find-unused-parameters ddp-static-graph torch-compile torch-compile-backend torch-compile-mode "
     "torch-empty-cache-steps use-liger-kernel liger-kernel-config gradient-checkpointing-kwargs "
     "activation-checkpointing-kwargs use-reentrant"},
    {MT_NAME_IDLE, "--distributed-timeout-minutes limits collectives", "ddp-timeout"},
    {MT_NAME_ALWAYS, OF_TRANSFORMERS,
     "accelerator-config activation-checkpointing gradient-accumulation-kwargs "
     "dispatch-batches split-batches "
     "debug deepspeed eval-accumulation-steps fsdp fsdp-transformer-layer-cls-to-wrap generation-config "
     "generation-max-length generation-num-beams greater-is-better hub-model-id "
     "hub-revision hub-token include-for-metrics label-names lr-scheduler-kwargs "
     "metric-for-best-model mp-parameters neftune-noise-alpha optim-args optim-target-modules parallelism-config "
     "push-to-hub-model-id push-to-hub-organization push-to-hub-token "
     "tf32 torchdynamo tpu-num-cores",
     "none|false"},
    {MT_NAME_ALWAYS, "checkpoints are Hugging Face folders with the optimizer's state",
     "ckpt-d2h-non-blocking save-merged-model", "false"},
    {MT_NAME_ALWAYS, "checkpoints are Hugging Face folders with the optimizer's state", "save-hf-model", "true|false"},
    {MT_NAME_ALWAYS, "nothing is compiled in a step", "compile-warmup", "true|false"},
    {MT_NAME_ALWAYS, "gradients are reduced once they are complete", "delay-grad-reduce", "true|false"},
    {MT_NAME_ALWAYS, "the optimizer's state loads on any layout", "distrib-optim-fully-reshardable", "true|false"},
    {MT_NAME_ALWAYS, "kernels of other devices", "use-flash-attn-npu-batch-invariant", "false"},
    {MT_NAME_NAMED, "--lr-decay-iters or --lr-decay-samples", "lr-decay-steps"},
    {MT_NAME_NAMED, "--lr-warmup-iters or --lr-warmup-samples", "lr-warmup-steps"},
    {MT_NAME_NAMED, "--train-iters", "num-steps steps"},
    {MT_NAME_NAMED, "--lr-warmup-fraction", "warmup"},
    {MT_NAME_NAMED, "--optimizer-cpu-offload",
     "adam-cpu-offload cpu-offload-optimizer-states offload-optimizer offload-optimizer-states "
     "optimizer-offload-to-cpu use-cpu-offload zero-offload"},
    {MT_NAME_NAMED, "--lr-warmup-iters", "warmup-iters"},
    {MT_NAME_NAMED, "--global-batch-size", "train-batch-size"},
    {MT_NAME_NAMED, "--hidden-size", "d-model n-embd"},
    {MT_NAME_NAMED, "--num-layers", "n-layer n-layers"},
    {MT_NAME_NAMED, "--num-attention-heads", "n-head n-heads num-heads"},
    {MT_NAME_NAMED, "--vocab-size", "vocab"},
    {MT_NAME_NAMED, "--train-epochs", "epochs num-epochs"},
    {MT_NAME_NAMED, "--gradient-accumulation-steps", "accumulation-steps grad-accum grad-accum-steps"},
    {MT_NAME_NAMED, "--data-path", "dataset dataset-path train-data train-file"},
    {MT_NAME_NAMED, "--max-new-tokens", "max-tokens n-predict num-predict"},
    {MT_NAME_NAMED, "--temperature", "temp"},
    {MT_NAME_NAMED, "--load", "model-name-or-path"},
    {MT_NAME_NAMED, "--lr-wsd-decay-iters or --lr-wsd-decay-samples", "wsd-decay-steps"},
    {MT_NAME_NAMED, "--weight-decay-incr-style", "wd-incr-steps"},
    {MT_NAME_NAMED, "--rope-scaling-type", "rope-type"},
    {MT_NAME_NAMED, "--check-for-nan-in-loss-and-grad", "check-for-nan-in-grad check-for-nan-in-loss"},
    {MT_NAME_NAMED, "--exit-signal-handler", "exit-signal-handler-for-dataloader exit-signal-handler-for-training"},
    {MT_NAME_NAMED, "--auto-resume", "adlr-autoresume"},
    {MT_NAME_NAMED, "--keep-checkpoints", "most-recent-k"},
    {MT_NAME_NAMED, "--load with the folder of that step, DIR/iter_NNNNNNN", "ckpt-step override-ckpt-iteration"},
    {MT_NAME_NAMED, "--load, with --finetune", "pretrained-checkpoint"},
    {MT_NAME_NAMED, "--tokenizer-type auto", "use-tokenizer-model-from-checkpoint-args"},
    {MT_NAME_NAMED, "--swiglu", "gated-linear-unit"},
    {MT_NAME_NAMED, "--bf16", "autocast-dtype params-dtype pipeline-dtype"},
    {MT_NAME_NAMED, "--make-vocab-size-divisible-by", "pad-vocab-size padded-vocab-size"},
    {MT_NAME_NAMED, "--micro-batch-size", "batch-size"},
    {MT_NAME_NAMED, "--tensor-model-parallel-size", "model-parallel-size tensor-parallel-size tp tp-size"},
    {MT_NAME_NAMED, "--pipeline-model-parallel-size", "pipeline-parallel-size pp pp-size"},
    {MT_NAME_NAMED, "--seq-length", "block-size context-length ctx-size max-seq-len max-seq-length sequence-length"},
    {MT_NAME_NAMED, "--trace-first-step", "profile-step-start"},
    {MT_NAME_NAMED, "--trace-last-step", "profile-step-end"},
    {MT_NAME_NAMED, "--profile, a table of operations, or --trace, a timeline",
     "nvtx-ranges profile-ranks use-nsys-profiler use-pytorch-profiler"},
    {MT_NAME_NAMED, "--reset-attention-mask and --reset-position-ids", "dataloader-inter-document-masking"},
    {MT_NAME_NAMED, "--config FILE.yaml", "data-args-path per-split-data-args-path"},
    {MT_NAME_NAMED, "--recompute-granularity full", "checkpoint-activations"},
    {MT_NAME_NAMED, "--num-return-sequences", "grpo-group-size"},
    {MT_NAME_NAMED, "--rollout-batch-size", "grpo-prompts-per-step"},
    {MT_NAME_NAMED, "--ppo-epochs", "grpo-iterations"},
    {MT_NAME_NAMED, "--clip-ratio-low", "grpo-clamp-eps-lower"},
    {MT_NAME_NAMED, "--clip-ratio-high", "grpo-clamp-eps-upper"},
    {MT_NAME_NAMED, "--kl-loss-coef", "grpo-kl-beta"},
    {MT_NAME_NAMED, "--entropy-coeff", "grpo-entropy-term-weight"},
    {MT_NAME_NAMED, "--temperature", "rl-default-temperature"},
    {MT_NAME_NAMED, "--top-k", "rl-default-top-k"},
    {MT_NAME_NAMED, "--top-p", "rl-default-top-p"},
    {MT_NAME_NAMED, "--rollout-tensor-model-parallel-size", "rl-inference-tensor-model-parallel-size"},
    {MT_NAME_NAMED, "--rollout-expert-model-parallel-size", "rl-inference-expert-model-parallel-size"},
    {MT_NAME_NAMED, "--teacher-load, with --stage kd: the teacher's logits are computed in each step",
     "logits-load-dir logits-save-dir"},
    {MT_NAME_NAMED, "--distill-loss-weight", "logits-load-kd-loss-alpha"},
    {MT_NAME_NAMED, "--logits-topk", "logits-save-top-k"},
    {MT_NAME_NAMED, "--chat-template", "sft-tokenizer-prompt-format"},
    {MT_NAME_IDLE, "there is one implementation of the model",
     "export-te-mcore-model enable-experimental flash-attention-version memory-efficient-layer-norm "
     "moe-single-grouped-bias "
     "moe-single-grouped-weight moe-use-grouped-tensor no-persist-layer-norm onnx-safe persist-layer-norm "
     "transformer-impl use-flashinfer-fused-rope use-gigatoken use-grouped-gemm-for-dense-mlp "
     "use-grouped-gemm-for-shared-expert use-mcore-models use-te-activation-func use-transformer-engine-op-fuser "
     "use-mamba-mem-eff-path disable-mamba-mem-eff-path use-inference-optimized-layers"},
    {MT_NAME_NO_MEANING, "there is one implementation of the model", "use-legacy-static-engine"},
    {MT_NAME_IDLE, "kernels are fused wherever that is faster",
     "apply-rope-fusion bias-activation-fusion bias-dropout-fusion cross-entropy-fusion-impl "
     "cross-entropy-loss-fusion disable-jit-fuser fused-residual-rmsnorm fused-single-qkv-rope "
     "gradient-reduce-div-fusion masked-softmax-fusion mla-down-proj-fusion moe-router-fusion "
     "no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-gradient-reduce-div-fusion "
     "no-masked-softmax-fusion no-rope-fusion"},
    {MT_NAME_NO_MEANING, "kernels are fused wherever that is faster",
     "moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size"},
    {MT_NAME_IDLE, "no PyTorch, Python or garbage collector runs here",
     "clone-scatter-output-in-embedding config-logger-dir create-all-gather-group deallocate-pipeline-outputs "
     "distributed-backend empty-unused-memory-level filter-warnings flight-recorder-dump-on-timeout "
     "flight-recorder-dump-path flight-recorder-extra-dump-on-exec flight-recorder-include-only-active "
     "flight-recorder-include-stack-trace flight-recorder-trace-buffer-size lazy-mpu-init local-rank "
     "logging-level manual-gc manual-gc-eval manual-gc-interval memory-keys memory-snapshot-path "
     "modules-to-filter pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra "
     "pytorch-profiler-collect-shapes record-memory-history record-shapes set-level-for-all-loggers "
     "torch-fsdp2-no-reshard-after-forward trust-remote-code disable-gloo-process-groups use-gloo-process-groups"},
    {MT_NAME_NO_MEANING, "no PyTorch, Python or garbage collector runs here",
     "fake-process-group run-workload-inspector-server"},
    {MT_NAME_IDLE, "the optimizer's state is sharded over all data-parallel ranks, with the same numbers",
     "num-distributed-optimizer-instances"},
    {MT_NAME_IDLE, "it adds checks to Megatron's own run", "test-mode"},
    {MT_NAME_IDLE, "it reports large gradients and changes none; --check-for-spiky-loss acts on large losses",
     "check-for-large-grads"},
    {MT_NAME_IDLE, "--hybrid-override-pattern says what the layers are; local is BERT's", "spec",
     "megatron.core.models.hybrid.hybrid_layer_specs|megatron.core.models.mamba.mamba_layer_specs"},
    {MT_NAME_NO_MEANING, "it is a Python function, or a part of one of Megatron's configuration classes",
     "activation-func attr checkpoint ddp dist embedding-init-method "
     "experimental-attention-variant-loss-scale-func finalize-model-grads-func fn grad-scale-func grad-sync-func "
     "heterogeneous-block-specs inference init-method logger model moe-grad-scale-func mtp-grad-scale-func name "
     "no-sync-func output-layer-init-method param-sync-func predicate profiling quant-recipe rerun-state-machine "
     "rng scheduler straggler timers tokenizer train validation with-name-predicate"},
    {MT_NAME_IDLE, "random numbers are functions of --seed and of their place, on every device and layout",
     "inference-rng-tracker save-rng te-rng-tracker use-cpu-initialization use-te-rng-tracker"},
    {MT_NAME_ALWAYS, "a checkpoint's format is recognized by its files", "auto-detect-ckpt-format", "true"},
    {MT_NAME_IDLE, "tensors of a checkpoint have their places by name, and one thread writes it",
     "async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm async-strategy "
     "ckpt-assume-constant-structure ckpt-drop-redundant-extra-state ckpt-fully-parallel-load-exchange-algo "
     "ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group "
     "ckpt-fully-parallel-save-process-group ckpt-load-validate-sharding-integrity ckpt-pg-tensors-cache-create "
     "ckpt-pg-tensors-cache-path dist-ckpt-optim-fully-reshardable dist-ckpt-strictness dist-ckpt-workers "
     "distrib-optim-fully-reshardable-mem-efficient hetereogenous-dist-checkpoint strict-fsdp-dtensor-load "
     "use-dist-ckpt use-persistent-ckpt-worker dist-ckpt-save-pre-mcore-014 stream-ckpt-dequant"},
    {MT_NAME_NO_MEANING, "tensors of a checkpoint have their places by name, and one thread writes it",
     "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format load-main-params-from-ckpt"},
    {MT_NAME_IDLE, "token files are mapped into memory, and samples are found when a run starts",
     "data-cache-path dataloader-defer-npy-index-mmap dataloader-fast-cache-load no-mmap-bin-files "
     "num-dataset-builder-threads num-workers"},
    {MT_NAME_NO_MEANING, "token files are mapped into memory, and samples are found when a run starts",
     "mid-level-dataset-surplus"},
    {MT_NAME_IDLE, "messages and collectives choose their order, buffers and streams themselves",
     "align-grad-reduce align-param-gather average-in-collective barrier-with-L1-time batch-p2p-comm "
     "batch-p2p-sync ddp-average-in-collective disable-symmetric-registration fsdp-all-gather-in-start-param-sync "
     "fsdp-db-use-persist-buf-on-alloc-fail fsdp-manual-registration high-priority-a2a-comm-stream "
     "megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer "
     "megatron-fsdp-use-decoupled-grad megatron-fsdp-version no-align-param-gather no-overlap-p2p-communication "
     "overlap-p2p-comm overlap-p2p-comm-warmup-flush pipeline-model-parallel-comm-backend "
     "suggested-communication-unit-size train-sync-interval use-ring-exchange-p2p "
     "overlap-p2p-communication-warmup-flush no-barrier-with-level-1-timing"},
    {MT_NAME_IDLE, "gradients are accumulated and reduced in fp32",
     "ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation "
     "param-name-patterns-for-fp32-local-accumulation reduce-scatter-with-fp32-accumulation"},
    {MT_NAME_IDLE, "printed lines, --metrics and --tensorboard-dir have all numbers that are known",
     "log-device-memory-used log-l2-norm-grad-to-tensorboard log-loss-scale-to-tensorboard log-memory-interval "
     "log-progress log-runtime-to-tensorboard log-throughput-to-tensorboard "
     "log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard runtime-time-unit "
     "tensorboard-queue-size throughput-window-size"},
    {MT_NAME_IDLE, "--log-straggler measures each printed line and needs no port",
     "disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count"},
    {MT_NAME_IDLE, "it changes speed, not numbers: kernels and messages are scheduled here without it",
     "ddp-pad-buckets-for-high-nccl-busbw defer-embedding-wgrad-compute delay-wgrad-compute "
     "high-priority-stream-groups nccl-communicator-config-path nccl-ub overlap-param-gather-with-optimizer-step "
     "pad-buckets-for-high-nccl-busbw sharp-enabled-group tp-comm-atomic-ag tp-comm-atomic-rs "
     "tp-comm-bootstrap-backend tp-comm-bulk-dgrad tp-comm-bulk-wgrad tp-comm-overlap-ag tp-comm-overlap-cfg "
     "tp-comm-overlap-disable-fc1 tp-comm-overlap-disable-qkv tp-comm-overlap-rs tp-comm-overlap-rs-dgrad "
     "tp-comm-split-ag tp-comm-split-rs use-nccl-ub use-sharp wgrad-deferral-limit "
     "overlap-moe-expert-parallel-comm overlap-dispatch-backward-with-experts-wgrad "
     "ep-overlap-early-attn-memory-release gtp-expert-remat-nccl-ub gtp-remat-nccl-ub muon-use-syrk "
     "use-fused-weighted-squared-relu mlp-chunks-for-training"},
    {MT_NAME_IDLE, "a dispatcher of tokens has one implementation here; --moe-token-dispatcher-type chooses it",
     "moe-deepep-num-sms moe-enable-deepep moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms "
     "moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms "
     "moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-zero-copy "
     "moe-ncclep-static-shape moe-permute-fusion-into-hybridep"},
    {MT_NAME_IDLE,
     "a graph holds the forward and backward of a micro-batch (--cuda-graph-impl local); decoding has CUDA graphs in "
     "any case",
     "cuda-graph-modules cuda-graph-retain-backward-graph cuda-graph-scope "
     "cuda-graph-use-single-mempool cuda-graph-warmup-steps decode-only-cuda-graphs enable-cuda-graph "
     "external-cuda-graph inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens "
     "inference-cuda-graph-scope megatron-fsdp-cuda-graph-mode moe-pad-experts-for-cuda-graph-inference "
     "optimizer-cuda-graph"},
    {MT_NAME_IDLE, "gathered weights in fp8 have memory of their own, with the same numbers",
     "reuse-grad-buf-for-mxfp8-param-ag"},
    {MT_NAME_IDLE, "no extension accumulates gradients: the matrix product itself does, in fp32",
     "no-gradient-accumulation-fusion gradient-accumulation-fusion"},
    {MT_NAME_IDLE, "all ranks write and read their parts of a checkpoint",
     "ckpt-fully-parallel-save ckpt-fully-parallel-load fully-parallel-load fully-parallel-save"},
    {MT_NAME_IDLE, "it keeps scores in the range of fp16 and cancels in their softmax, which computes in fp32 here",
     "apply-query-key-layer-scaling"},
    {MT_NAME_IDLE, "Transformer Engine ignores it too", "fp8-interval"},
    {MT_NAME_IDLE, "products of experts pad their rows themselves",
     "moe-router-padding-for-fp8 moe-router-padding-for-quantization"},
    {MT_NAME_IDLE,
     "this report is not made; --metrics FILE.jsonl and --tensorboard-dir have all numbers that are known",
     "log-energy log-max-attention-logit moe-per-layer-logging"},
    {MT_NAME_IDLE, "--tensorboard-dir has a record with each printed line, as --log-interval says",
     "tensorboard-log-interval"},
    {MT_NAME_IDLE, "reports go to no service: --metrics FILE.jsonl and --tensorboard-dir have them",
     "app-tag-run-name app-tag-run-version one-logger-async one-logger-project one-logger-run-name otel-enabled "
     "otel-service-name otel-span-groups wandb-entity wandb-exp-name wandb-project wandb-save-dir"},
    {MT_NAME_IDLE, "a layer is a bucket of gradients, or as many as --ddp-bucket-size says",
     "ddp-num-buckets num-buckets"},
    {MT_NAME_IDLE, "the options of the model say it", "is-hybrid-model"},
    {MT_NAME_IDLE, "weights that are not loaded are initialized", "no-initialization"},
    {MT_NAME_IDLE, "the tokenizer that is given is taken, else the one in the --load folder",
     "no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args"},
    {MT_NAME_IDLE, "Muon's matrices have whole shards in any case", "no-use-layer-wise-param-layout"},
    {MT_NAME_IDLE, "host memory for copies is pinned",
     "no-pin-cpu-grads no-pin-cpu-params use-torch-optimizer-for-cpu-offload"},
    {MT_NAME_NO_MEANING, "tokenizer.json and the SentencePiece model say it",
     "allow-ambiguous-pad-tokens metadata-path special-tokens tokenizer-hf-no-include-special-tokens "
     "tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy "
     "tokenizer-metadata tokenizer-special-tokens"},
    {MT_NAME_UNSUPPORTED, "other types of logits and of the loss",
     "enable-autocast fp16-lm-cross-entropy output-logit-dtype"},
    {MT_NAME_UNSUPPORTED, "fp4, and fp8 outside the linears of layers or as the stored type of weights",
     "activation-func-fp8-input-store disable-parameter-transpose-cache fp4 fp4-param fp4-param-gather "
     "fp4-quantizer-factory fp4-recipe fp8-dot-product-attention fp8-multi-head-attention fp8-output-proj "
     "fp8-quantizer-factory keep-fp8-transpose-cache kitchen-attention-backend kitchen-config-file "
     "kitchen-recipe-number moe-combine-bwd-dtype moe-dispatch-fwd-dtype te-precision-config-file use-kitchen "
     "use-kitchen-attention fp4-format"},
    {MT_NAME_UNSUPPORTED, "recomputation for some micro-batches only",
     "num-microbatches-with-partial-activation-checkpoints"},
    {MT_NAME_UNSUPPORTED,
     "--fine-grained-activation-offloading keeps the activations of --offload-modules in host memory",
     "cpu-offloading cpu-offloading-activations cpu-offloading-num-layers"},
    {MT_NAME_UNSUPPORTED, "other forms of keeping activations, weights or optimizer state in host memory",
     "activation-offload-fraction cpu-offloading-double-buffering cpu-offloading-retain-pinned-cpu-buffers "
     "cpu-offloading-weights delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks "
     "fine-grained-offloading-max-inflight-offloads min-offloaded-tensor-size moe-paged-stash "
     "moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size"},
    {MT_NAME_UNSUPPORTED, "optimizers other than AdamW, SGD, Lion and Muon",
     "adaptive-muon-beta2 adaptive-muon-eps adaptive-muon-moment2-method soap-shampoo-beta soap-use-kl-shampoo"},
    {MT_NAME_UNSUPPORTED, "other forms of master weights than those of --main-params-dtype", "store-param-remainders"},
    {MT_NAME_UNSUPPORTED, "attention other than multi-head, grouped and multi-head latent attention",
     "dsa-indexer-k-norm-fp32 dsa-kernel-backend "
     "gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder "
     "qk-clip qk-clip-alpha qk-clip-threshold qk-l2-norm"},
    {MT_NAME_UNSUPPORTED, "layers other than the transformer's attention, MLP and experts",
     "apply-residual-connection-post-layernorm enable-mhc-connections heterogeneous-layers-config-encoded-json "
     "heterogeneous-layers-config-path mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num "
     "mhc-sinkhorn-iterations"},
    {MT_NAME_UNSUPPORTED, "states of Mamba-2 in other types than fp32",
     "mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype mamba-training-ssm-states-dtype"},
    {MT_NAME_UNSUPPORTED, "other initial weights, or other learning rates and weight decays for a part of them",
     "data-parallel-random-init "
     "dump-param-to-param-group-map embedding-init-method-std freeze-all-layers head-lr-mult "
     "init-method-xavier-uniform mup-attn-scale-power mup-base-head-dim mup-base-hidden-size mup-embedding-mult "
     "mup-output-mult mup-width-mult no-weight-decay-cond-type use-mup"},
    {MT_NAME_UNSUPPORTED, "other forms of multi-token prediction", "mtp-detach-heads mtp-hsm mtp-standalone"},
    {MT_NAME_UNSUPPORTED, "other forms of experts and of their dispatch",
     "expert-tensor-parallel-num-weight-shards moe-apply-probs-on-input "
     "moe-expert-rank-capacity-factor moe-input-jitter-eps moe-router-force-biased "
     "moe-router-topk-limited-devices moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits "
     "moe-routing-trace-dump-weights moe-routing-trace-max-training-iters moe-routing-trace-path "
     "moe-token-dropping save-tokens-per-expert-interval tensor-parallel-num-weight-shards"},
    {MT_NAME_UNSUPPORTED, "models that read images, in Megatron-LM's form",
     "classes-fraction data-per-class-fraction dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size "
     "dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp dino-warmup-teacher-temp "
     "dino-warmup-teacher-temp-epochs img-h img-w iter-per-epoch mask-factor mask-type num-channels num-classes "
     "allow-missing-vision-projector-checkpoint disable-vision-class-token freeze-LM freeze-ViT "
     "language-model-type max-num-tiles patch-dim pixel-shuffle swin-backbone-type use-tiling vision-model-type "
     " vision-backbone-type vision-pretraining vision-pretraining-type"},
    {MT_NAME_UNSUPPORTED, "models of images and text (MIMO)",
     "audio-encoder-model dataset-provider hf-assign-unused-tokens image-seq-length image-size "
     "language-model-checkpoint model-provider packing-buffer-size total-seq-length vision-encoder-checkpoint"},
    {MT_NAME_UNSUPPORTED, "BERT and retrieval",
     "bert-embedder-type bert-load bert-no-binary-head biencoder-projection-dim "
     "biencoder-shared-query-context-model block-data-path embedding-path "
     "evidence-data-path ict-head-size ict-load indexer-batch-size indexer-log-interval "
     "output-bert-embeddings query-in-block-prob retriever-report-topk-accuracies retriever-score-scaling "
     "sample-rate titles-data-path use-one-sent-docs"},
    {MT_NAME_UNSUPPORTED, "files of a teacher's logits; --stage kd computes them",
     "logits-load-decode-threads "
     "logits-load-ignore-errors logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dtype "
     "logits-save-top-p logits-save-top-p-min-k"},
    {MT_NAME_UNSUPPORTED,
     "--stage rl is reinforcement learning; see its --dynamic-sampling, --sequence-packing, --optimizer-offload",
     "grpo-filter-groups-with-same-reward perform-rl-step rl-offload-optimizer-during-inference "
     "rl-use-sequence-packing"},
    {MT_NAME_UNSUPPORTED, "other forms of reinforcement learning than those of --stage rl",
     "langrl-env-config refit-method rl-consumption-granularity rl-durable-rollout-bank rl-generation-lag "
     "rl-importance-sampling-truncation-coef rl-inference-expert-tensor-model-parallel-size "
     "rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level rl-inference-parsers "
     "rl-inference-pipeline-model-parallel-size rl-kv-cache-management-mode rl-max-inflight-requests "
     "rl-offload-inference-model-weights-when-idle rl-partial-rollouts rl-persist-cuda-graphs rl-profile "
     "rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir rl-rollout-bank-max-bytes rl-sequence-packing-algo "
     "rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token rl-submission-granularity "
     "rl-training-cuda-graphs rl-verify-model-weights-swap"},
    {MT_NAME_UNSUPPORTED, "a server for inference, and its caches",
     "batch-invariant-backend batch-invariant-mode cache-mla-latents enable-chunked-prefill flash-decode "
     "inference-batch-times-seqlen-threshold inference-coordinator-port inference-disable-ep-consensus "
     "inference-disable-triton-nvls-kernels inference-dynamic-batching "
     "inference-dynamic-batching-async-sched-mode inference-dynamic-batching-buffer-size-gb "
     "inference-dynamic-batching-cuda-graph-mixed-prefill-count "
     "inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-enable-prefix-caching "
     "inference-dynamic-batching-logprobs-mode inference-dynamic-batching-mamba-memory-ratio "
     "inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens "
     "inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-paused-buffer-size-gb "
     "inference-dynamic-batching-prefix-caching inference-dynamic-batching-prefix-caching-coordinator-policy "
     "inference-dynamic-batching-prefix-caching-eviction-policy "
     "inference-dynamic-batching-prefix-caching-mamba-gb inference-dynamic-batching-prefix-caching-routing-alpha "
     "inference-dynamic-batching-sampling-backend inference-dynamic-batching-track-generated-token-events "
     "inference-dynamic-batching-track-paused-request-events inference-dynamic-batching-unified-memory-level "
     "inference-fuse-tp-communication inference-grouped-gemm-backend inference-logging-step-interval "
     "inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type "
     "inference-sampling-seed inference-shards inference-text-gen-server-logging "
     "inference-use-synchronous-zmq-collectives inference-wandb-logging max-tokens-to-oom mlp-chunks-for-prefill "
     "nccl-all-reduce-for-prefill offset-sampling-seed-by-dp-rank return-log-probs "
     "skip-prompt-log-probs symmetric-ar-type use-same-sampling-seed-across-dp-ranks"},
    {MT_NAME_UNSUPPORTED, "other ways to split the model over ranks",
     "enable-full-sharding-in-hsdp expert-gtp-weight-remat-size gtp-remat-opt-in-modules "
     "gtp-remat-reduce-scatter-with-fp32-accumulation gtp-weight-remat-size "},
    {MT_NAME_UNSUPPORTED, "other batches, and skipping of steps or of training",
     "decrease-batch-size-if-needed grad-norm-skip-threshold iterations-to-skip no-data-sharding "
     "per-dataset-sequences-path phase-transition-iterations skip-train "},
    {MT_NAME_UNSUPPORTED, "other tokenizers", "null-tokenizer-eod-id null-tokenizer-pad-id"},
    {MT_NAME_UNSUPPORTED, "checkpoints in other places, or of other things",
     "enable-msc non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo "
     "non-persistent-local-ckpt-dir non-persistent-save-interval object-storage-cache-path replication "
     "replication-factor replication-jump save-activations-interval save-config-filepath save-dgrads-interval "
     "save-params-interval save-wgrads-interval"},
    {MT_NAME_UNSUPPORTED, "restarts inside a process (launch.sh restarts a run) and faults injected into it",
     "adlr-autoresume-interval calc-ft-timeouts enable-ft-package "
     "ft-num-warmup-iters gpu-sniff-test-interval "
     "inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout "
     "inprocess-empty-cuda-cache inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval "
     "inprocess-heartbeat-timeout inprocess-last-call-wait inprocess-max-iterations "
     "inprocess-monitor-process-interval inprocess-monitor-thread-interval inprocess-progress-watchdog-interval "
     "inprocess-restart inprocess-soft-timeout inprocess-termination-grace-time result-rejected-tracker-filename "
     "fault-injector-delay-start-iteration fault-injector-fault-delay fault-injector-fault-probabilities "
     "fault-injector-fault-types fault-injector-mtti-seconds fault-injector-num-ranks "
     "fault-injector-offset-seconds fault-injector-ranks fault-injector-seed"},
    {MT_NAME_UNSUPPORTED, "models of elastic size: Flextron",
     "flextron export-default-te-spec export-model-type enable-router binary-mask soft-mask hard-sample-th "
     "router-beta original-model-sample-prob tau-init tau-decay loss-alpha lr-mult-router router-gbs "
     "router-inter-dim budget-list budget-probs budget-type emb-int-list mlp-int-list mamba-int-list "
     "moe-expert-int-list linear-scaler-start linear-scaler-end slice router-std"},
};

const char *mt_share_option(const char *option) {
    static const char *const shares[][2] = {{"lr-warmup-iters", "lr-warmup-fraction"},
                                            {"eval-interval", "eval-interval-fraction"},
                                            {"log-interval", "log-interval-fraction"},
                                            {"save-interval", "save-interval-fraction"}};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (strcmp(option, shares[i][0]) == 0) return shares[i][1];
    return NULL;
}

/* '_' in `name` equals '-'. */
static bool mt_name_equals(const char *name, size_t length, const char *other, size_t other_length) {
    if (length != other_length) return false;
    for (size_t i = 0; i < length; i++)
        if ((name[i] == '_' ? '-' : name[i]) != other[i]) return false;
    return true;
}

static bool mt_name_is_listed(const char *names, const char *name, size_t length) {
    for (const char *at = names; *at; at += strspn(at, " ")) {
        size_t listed = strcspn(at, " ");
        if (mt_name_equals(name, length, at, listed)) return true;
        at += listed;
    }
    return false;
}

static mt_megatron_name mt_name_find(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (mt_name_equals(name, length, aliases[i].name, strlen(aliases[i].name)))
            return (mt_megatron_name){MT_NAME_ALIAS, aliases[i].option, aliases[i].value, aliases[i].values};
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        if (mt_name_is_listed(groups[i].names, name, length))
            return (mt_megatron_name){groups[i].kind, groups[i].text, groups[i].value, NULL};
    return (mt_megatron_name){MT_NAME_UNKNOWN, NULL, NULL, NULL};
}

/* The opposite of a flag that has an answer. Properties that always hold cannot be switched off; other features are
 * off. */
static mt_megatron_name mt_name_negate(mt_megatron_name flag) {
    bool is_off = flag.kind == MT_NAME_ALWAYS && strcmp(flag.value, "false") == 0;
    if (is_off) return (mt_megatron_name){MT_NAME_ALWAYS, flag.text, "true", NULL};
    if (flag.kind == MT_NAME_ALWAYS && strcmp(flag.value, "true") == 0)
        return (mt_megatron_name){MT_NAME_UNSUPPORTED, flag.text, NULL, NULL};
    if (flag.kind == MT_NAME_IDLE) return flag;
    if (flag.kind == MT_NAME_UNSUPPORTED || flag.kind == MT_NAME_NO_MEANING)
        return (mt_megatron_name){MT_NAME_IDLE, "it switches off what is off here in any case", NULL, NULL};
    return (mt_megatron_name){MT_NAME_UNKNOWN, NULL, NULL, NULL};
}

mt_megatron_name mt_megatron_name_find(const char *name, size_t length) {
    static const char *const prefixes[] = {"no-", "disable-"}; // as Megatron derives them from fields that are true
    mt_megatron_name found = mt_name_find(name, length);
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes && found.kind == MT_NAME_UNKNOWN; i++) {
        size_t prefix = strlen(prefixes[i]);
        if (length > prefix && mt_name_equals(name, prefix, prefixes[i], prefix))
            found = mt_name_negate(mt_name_find(name + prefix, length - prefix));
    }
    return found;
}
