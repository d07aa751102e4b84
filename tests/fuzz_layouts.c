/* fuzz_layouts.c: trains random models on random layouts of ranks and compares each run with one rank.
 *
 *   usage: fuzz_layouts SECONDS SEED [NUMBER]
 *
 * A configuration is drawn from the table below by its number and the seed: a model, a layout of ranks, and often a
 * second layout, on which the run resumes from a checkpoint of the first. All metrics that do not measure time or
 * memory must equal those of one rank up to rounding. A configuration that train refuses in one line counts as refused.
 * Anything else is a failure: other numbers, a crash, a hang, a checkpoint that is not accepted. A failure is shrunk:
 * options are left out as long as the rest fails, and the commands of the rest are printed.
 *
 * Two scores of a router that are equal up to rounding are a tie, and another order of sums gives the token to another
 * expert: one of some thousand tokens of a run, with a difference that is small but greater than rounding. A fault does
 * not depend on the seed, and a tie does. So a model of experts with such a difference trains again with other seeds,
 * and fails if it differs with each. So does a model without experts, but only with a difference that some steps of
 * rounding can grow to, and that its first step does not have.
 *
 * One of eight configurations is reinforcement learning. A token that rounding draws otherwise is a tie, too. One of
 * ten others is an encoder-decoder, and one of twelve of the rest a model of tests/golden/vision, which learns from
 * conversations with pictures of tests/golden/images.
 *
 * MT_BIN is the folder of train; FUZZ_TIMEOUT: the seconds of one run (60); a run that did not end is tried once more
 * with five times as many. FUZZ_DEVICE is train's --device (cpu), FUZZ_RANKS the most ranks of a layout (8): on GPUs as
 * many as there are GPUs. FUZZ_STAGE rl draws reinforcement learning alone, pt none of it, t5 encoder-decoders alone,
 * vl models with pictures alone.
 */
#include "../data/base/file.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"
#include "folder.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TOLERANCE        1e-5 // relative, of fp32 sums in another order
#define BF16_TOLERANCE   0.05 // a value that rounds to its other neighbour changes later steps
#define FP8_TOLERANCE    0.1  // the largest difference seen without a fault is 0.02
#define TIE_TOLERANCE    0.05 // one token of a hundred or more goes to another expert
#define TIES_TOLERANCE   0.25 // in a narrow type, where several do
#define GROWTH_TOLERANCE 1e-4 // rounding grows from step to step; the largest difference seen without a fault is 1.4e-5

enum {
    MAX_ITEMS = 96,
    MAX_WORDS = 256,
    LINE = 8192,
    STEPS = 4,
    SAVED = 2,
    SEEDS = 3,
    MAX_SHRINKS = 300,
    MAX_HANGS = 60
};

/* ---- the table of options ---------------------------------------------------------------------------------------- */

/* An item of a configuration belongs to all three runs or to those on one of the layouts. */
typedef enum part { ONE_RANK = 0, ALL = 1, FIRST = 2, SECOND = 4 } part;

/* A row is drawn with some chance, if all texts of `needs` and none of `without` (separated by &) are in the words
 * drawn before, and gives one of its choices (separated by ;). A choice of the form NAME=VALUE is for the environment.
 */
typedef struct row {
    int percent;
    const char *needs, *without, *choices;
} row;

#define LATENT  "--multi-latent-attention --normalization RMSNorm --position-embedding-type rope --kv-lora-rank "
#define EXPERTS "--num-experts"
#define MAMBA   "--experimental-attention-variant mamba2 --linear-attention-freq "
#define KDA     "--experimental-attention-variant kda --linear-attention-freq "
#define DELTA   "--experimental-attention-variant gated_delta_net --linear-attention-freq "
// Marks models whose widths are multiples of 64: --fp8-param-gather needs multiples of 16 on each rank.
#define WIDE    "--ffn-hidden-size 64"
#define STAGES  "--pipeline-model-parallel-size"
#define MUON    "--optimizer muon --muon-fp32-matmul-prec highest --muon-extra-scale-factor 0.1 --muon-tp-mode "
#define DROPOUT "--hidden-dropout 0 --attention-dropout 0;--hidden-dropout 0.1 --attention-dropout 0.1"
// Letters of layers with one half, as many as there are layers; with experts, or without.
#define HALVES "latent&attention-variant&mtp-num-layers&moe-layer-freq"
// Reinforcement learning: words_of gives this word its options. ONCE: the run does not resume.
#define RL      "REINFORCE"
#define RL_ONCE RL "&ONCE"
#define PATTERN                                                                                                        \
    "--mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 12 --mamba-state-dim 10 --hybrid-override-pattern "

/* Of the model and the run. A new capability adds a row here, or below. */
static const row model_rows[] = {
    {15, "", RL, "RAMP"}, // the batch grows; see words_of
    {15, "", RL,
     "--fp8-format hybrid;--fp8-format e4m3 --fp8-amax-history-len 3 --fp8-amax-compute-algo max --tp-only-amax-red;"
     "--fp8-format hybrid --fp8-recipe tensorwise;--fp8-format e4m3 --fp8-recipe blockwise --no-fp8-wgrad;"
     "--fp8-format e4m3 --fp8-recipe mxfp8;--fp8-format hybrid --fp8-margin 2 --first-last-layers-bf16 "
     "--num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 1"},
    {15, "", RL, "--bf16"},
    // In fp32: products in bf16 would round the momentum of another order of sums to other values everywhere.
    {10, "", "--bf16&--fp8-format&" RL,
     MUON "duplicated;" MUON "distributed;" MUON "duplicated --muon-no-split-qkv --muon-nesterov;" MUON
          "distributed --muon-no-split-qkv --muon-scalar-optimizer lion"},
    {10, "--bf16", "", "--use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-dtype fp16"},
    {10, "", "use-precision&muon&" RL,
     "--use-precision-aware-optimizer --main-grads-dtype bf16;--use-precision-aware-optimizer --exp-avg-dtype bf16 "
     "--exp-avg-sq-dtype bf16;--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"},
    // In a narrow type a sum of another order soon gives other roundings everywhere. With small steps the runs stay
    // near each other; with 5e-3 gradient norms in fp8 differed by a third after four steps, without any fault.
    // A norm of a block's small output divides its rounding by that output: gradient norms of six layers were 137 and
    // differed by 2e-4 after four steps. The larger epsilon bounds the factor by ten: 5 and 4e-7. fp32 only, and fp8.
    {25, "", "--bf16", "--norm-placement both --norm-epsilon 0.01;--norm-placement after --norm-epsilon 0.01"},
    {100, "--fp8-format", "", "--lr 3e-4"},
    // An iteration of reinforcement learning has several steps: Kimi delta attention differed by 7e-5 in the first
    // iteration with 5e-3, and by 3e-6 with 1e-3.
    {100, RL, "--lr", "--lr 3e-4"},
    {100, "--bf16", "--lr", "--lr 3e-4"},
    {100, "-dtype", "--lr", "--lr 3e-4"},
    {100, "", "--lr", "--lr 5e-3"},
    {100, "", "", "--micro-batch-size 1;--micro-batch-size 1;--micro-batch-size 2;--micro-batch-size 3"},
    {100, "", "", "--num-layers 4;--num-layers 2;--num-layers 3;--num-layers 4;--num-layers 5;--num-layers 6"},
    {20, "", "",
     LATENT "12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7;" LATENT
            "5 --qk-head-dim 4 --qk-pos-emb-head-dim 2 --v-head-dim 9"},
    {70, "--fp8-format", "latent",
     WIDE " --hidden-size 64 --num-attention-heads 4 --kv-channels 16;" WIDE " --hidden-size 128 "
          "--num-attention-heads 8 --kv-channels 16"},
    {50, "latent", "", "--q-lora-rank 10;--q-lora-rank 40"},
    {100, "latent", "", "--hidden-size 32 --num-attention-heads 8;--hidden-size 28 --num-attention-heads 4"},
    {100, "", "latent&" WIDE,
     "--hidden-size 32 --num-attention-heads 8;--hidden-size 24 --num-attention-heads 4 --kv-channels 10;"
     "--hidden-size 40 --num-attention-heads 4 --kv-channels 6;--hidden-size 20 --num-attention-heads 12 "
     "--kv-channels 8;--hidden-size 18 --num-attention-heads 6 --kv-channels 4"},
    {50, "", "latent&heads 6",
     "--group-query-attention --num-query-groups 2;--group-query-attention --num-query-groups 1;"
     "--group-query-attention --num-query-groups 4"},
    {50, "heads 6", "latent",
     "--group-query-attention --num-query-groups 2;--group-query-attention --num-query-groups 1;"
     "--group-query-attention --num-query-groups 3"},
    {100, "", WIDE, "--ffn-hidden-size 48;--ffn-hidden-size 20;--ffn-hidden-size 36;--ffn-hidden-size 72"},
    {50, "", "RMSNorm", "--normalization RMSNorm"},
    {60, "", "embedding-type", "--position-embedding-type rope;--position-embedding-type none"},
    {15, "type rope", "latent&kv-channels 6&kv-channels 10", "--rotary-percent 0.5"},
    {20, "type rope", "", "--rotary-interleaved"},
    {15, "type rope", "",
     "--rope-scaling-type linear --rope-scaling-factor 2;--use-rope-scaling;--rope-scaling-type yarn "
     "--rope-scaling-factor 4 --original-max-position-embeddings 8"},
    {40, "yarn", "latent", "--llama-4-scaling-beta 0.3"},
    {60, "", "", "--swiglu"},
    {20, "", "swiglu", "--openai-gelu;--squared-relu;--geglu"},
    {15, "", "", "--layernorm-zero-centered-gamma"},
    {10, "", "", "--embedding-multiplier 3.5"},
    {20, "", "", "--softmax-type learnable;--softmax-type off-by-one"},
    {10, "", "latent", "--softmax-scale 0.4"},
    {10, "", "latent", "--attention-output-gate"},
    // Heads of few channels may be short vectors: 1 / length enlarges the rounding of another order of sums. So do a
    // norm of the block's small output and rounding to fp8.
    {8, "", "norm-placement&--fp8-format",
     DELTA
     "2 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 18 --linear-value-head-dim 12;" DELTA
     "3 --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 20 "
     "--linear-conv-kernel-dim 2"},
    {8, "", "gated_delta_net",
     "--experimental-attention-variant short_conv --linear-attention-freq 2;--experimental-attention-variant "
     "short_conv --linear-attention-freq 3 --linear-conv-kernel-dim 3"},
    {8, "", "gated_delta_net&short_conv",
     MAMBA "2 --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 12 --mamba-state-dim 10;" MAMBA
           "3 --mamba-num-groups 4 --mamba-num-heads 8 --mamba-head-dim 6 --mamba-state-dim 16 "
           "--linear-conv-kernel-dim 3 --disable-mamba-conv-bias --mamba-dt-limit-high 0.05;" MAMBA
           "2 --mamba-num-groups 1 --mamba-num-heads 8 --mamba-head-dim 8 --mamba-state-dim 10"},
    // Heads of few channels, as of gated delta nets.
    {8, "", "gated_delta_net&short_conv&mamba2&norm-placement&--fp8-format",
     KDA
     "2 --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16;" KDA
     "3 --linear-num-key-heads 8 --linear-num-value-heads 8 --linear-key-head-dim 12 --linear-value-head-dim 12 "
     "--linear-conv-kernel-dim 2"},
    {15, "type rope", "latent", "--no-rope-freq 2;--no-rope-freq 3"},
    {60, "", "", "--disable-bias-linear"},
    {20, "", "latent", "--add-qkv-bias"},
    {30, "", "", "--qk-layernorm"},
    {30, "--qk-layernorm", "latent", "--qk-layernorm-all-heads"},
    {50, "", "", "--untie-embeddings-and-output-weights"},
    {25, "", "", "--window-size 5"},
    {50, "--window-size", "", "--window-attn-skip-freq 2;--window-attn-skip-freq 3"},
    {40, "--window-size&type rope", "latent", "--window-rotary-base 500"},
    {30, "--window-size", "latent", "--window-num-query-groups 2;--window-num-query-groups 4"},
    {40, "--window-size&--softmax-type", "latent", "--sinks-in-windows-only"},
    {15, "", "latent&output-gate", "--value-channels 6;--value-channels 12"},
    {10, "", "latent", "--attention-value-scale 0.7"},
    {100, "", "", DROPOUT ";" DROPOUT ";--hidden-dropout 0 --attention-dropout 0.2"},
    {30, "embedding-type", RL, "--mtp-num-layers 1;--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"},
    {50, "--mtp-num-layers 2", "", "--mtp-use-repeated-layer"},

    {20, "", RL,
     "--sft --seq-length 64;--sft --sequence-packing --seq-length 48;--sft --variable-seq-lengths --seq-length "
     "90;--sft "
     "--sequence-packing --variable-seq-lengths --seq-length 64"},
    {40, "", WIDE,
     "--num-experts 8 --moe-ffn-hidden-size 16;--num-experts 4 --moe-ffn-hidden-size 12;--num-experts 6 "
     "--moe-ffn-hidden-size 8;--num-experts 8"},
    {40, WIDE, "", "--num-experts 8;--num-experts 4 --moe-ffn-hidden-size 128;--num-experts 6"},
    {100, EXPERTS, "",
     "--moe-router-topk 2;--moe-router-topk 2 --moe-router-pre-softmax;--moe-router-topk 1 --moe-router-pre-softmax;"
     "--moe-router-topk 3 --moe-router-score-function sigmoid;--moe-router-topk 2 --moe-router-score-function sigmoid "
     "--moe-router-num-groups 2 --moe-router-group-topk 1;--moe-router-topk 2 --moe-router-score-function "
     "sqrtsoftplus"},
    // The samples of --sft are distributed over ranks by their work, so another layout has other micro-batches. Then
    // capacities, and losses that balance a whole micro-batch, are not comparable. Losses of sequences are, but their
    // number is limited by the tokens of a rank. Responses are distributed and packed in the same way.
    {15, "--moe-router-pre-softmax", "topk 1&--sft&" RL, "--moe-router-load-balancing-type sinkhorn"},
    {60, EXPERTS "&--sft", "--sequence-packing&--variable",
     "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss"},
    {60, EXPERTS, "sinkhorn&--sft&" RL,
     "--moe-aux-loss-coeff 1e-2;--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss;"
     "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type global_aux_loss;"
     "--moe-aux-loss-coeff 1e-2 2e-2 5e-3 --moe-router-load-balancing-type seq_aux_loss global_aux_loss aux_loss"},
    {30, EXPERTS, "", "--moe-z-loss-coeff 1e-3"},
    {10, EXPERTS, RL, "--moe-router-force-load-balancing"},
    {30, "sigmoid", "", "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02"},
    {10, EXPERTS, "sigmoid&sinkhorn", "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02"},
    {20, EXPERTS, "sinkhorn&--sft&" RL,
     "--moe-expert-capacity-factor 1;--moe-expert-capacity-factor 1.25 --moe-token-drop-policy position;"
     "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"},
    {30, EXPERTS "&--disable-bias-linear", WIDE, "--moe-shared-expert-intermediate-size 24"},
    {30, EXPERTS "&--disable-bias-linear&" WIDE, "", "--moe-shared-expert-intermediate-size 64"},
    {15, "--moe-router-topk", "", "--moe-router-topk-scaling-factor 1.5"},
    {40, "shared-expert", "", "--moe-shared-expert-gate"},
    {20, EXPERTS, "", "--moe-latent-size 24"},
    {20, EXPERTS, "", "--moe-layer-freq 2;--moe-layer-freq 3"},
    {20, EXPERTS "&num-layers 4", "moe-layer-freq", "--moe-layer-freq [0,1,1,0];--moe-layer-freq ([0]*1+[1]*3)"},
    {12, "num-layers 3", HALVES "&" EXPERTS, PATTERN "M*-;" PATTERN "-M*"},
    {12, "num-layers 4", HALVES "&" EXPERTS, PATTERN "M*M-;" PATTERN "-MM*;" PATTERN "*-M-;" PATTERN "M-M-"},
    {12, "num-layers 5", HALVES "&" EXPERTS, PATTERN "M-*-M;" PATTERN "*MM-M"},
    {12, "num-layers 6", HALVES "&" EXPERTS, PATTERN "M-M*-M;" PATTERN "-M*-M*"},
    {30, "num-layers 4&" EXPERTS, HALVES, PATTERN "M*ME;" PATTERN "EM*-;" PATTERN "*EME"},
    {30, "num-layers 5&" EXPERTS, HALVES, PATTERN "ME*-M;" PATTERN "-M*EM"},
    {30, "num-layers 6&" EXPERTS, HALVES, PATTERN "MEM*EM;" PATTERN "M-*EME"},
    {40, "hybrid-override-pattern&embedding-type", EXPERTS "&" RL,
     "--mtp-num-layers 1 --mtp-hybrid-override-pattern *-;--mtp-num-layers 2 --mtp-hybrid-override-pattern - "
     "--mtp-use-repeated-layer;--mtp-num-layers 2 --mtp-hybrid-override-pattern *- --mtp-use-repeated-layer"},
    {40, "hybrid-override-pattern&embedding-type&" EXPERTS, RL,
     "--mtp-num-layers 1 --mtp-hybrid-override-pattern E;--mtp-num-layers 2 --mtp-hybrid-override-pattern *E "
     "--mtp-use-repeated-layer"},

    {15, "", "--sft", "--seq-length 13;--seq-length 21"},
    {100, "", "--seq-length", "--seq-length 16;--seq-length 32;--seq-length 24;--seq-length 12"},
    // Micro-batches whose choices are a multiple of the experts.
    {25, EXPERTS " 4", RL "&--seq-length 13&--seq-length 21&--sft&aux-loss&num-groups&expert-bias&sinkhorn",
     "--moe-router-load-balancing-type quantile_balancing;--moe-router-load-balancing-type quantile_balancing "
     "--moe-router-quantile-balancing-ema 0.5"},
    {10, "", "", "--max-position-embeddings 64"},
    {30, "", "--sft&" RL,
     "--tokenizer-type ByteLevel --reset-attention-mask;--tokenizer-type ByteLevel --reset-position-ids "
     "--reset-attention-mask --eod-mask-loss;--tokenizer-type ByteLevel --reset-position-ids"},
    {100, "", "ByteLevel&" RL, "--vocab-size 61;--vocab-size 128;--vocab-size 67"},
    {30, "ByteLevel", "", "--vocab-size 300"},
    {30, "", "RAMP", "--lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 1"},
    {20, "", "", "--clip-grad 0.1;--clip-grad 0"},
    {20, "", RL, "--eval-interval 2 --eval-iters 2"},
    {40, "--bf16", "", "--fp32-residual-connection"},
};

/* Of an encoder-decoder, in place of model_rows. */
static const row t5_rows[] = {
    {15, "", "", "RAMP"},
    {15, "", "",
     "--fp8-format hybrid;--fp8-format e4m3 --fp8-recipe blockwise;--fp8-format e4m3 --fp8-recipe mxfp8;"
     "--fp8-format hybrid --fp8-recipe tensorwise --no-fp8-wgrad"},
    {15, "", "", "--bf16"},
    {15, "", "--bf16&--fp8-format", MUON "duplicated;" MUON "distributed"},
    {100, "--fp8-format", "", "--lr 3e-4"},
    {100, "--bf16", "--lr", "--lr 3e-4"},
    {100, "", "--lr", "--lr 5e-3"},
    {100, "", "", "--micro-batch-size 1;--micro-batch-size 2;--micro-batch-size 3"},
    {100, "", "",
     "--num-layers 2 --decoder-num-layers 2;--num-layers 3 --decoder-num-layers 1;--num-layers 1 --decoder-num-layers "
     "3;--num-layers 4 --decoder-num-layers 2;--num-layers 4 --decoder-num-layers 4"},
    {100, "--fp8-format", "", WIDE " --hidden-size 64 --num-attention-heads 4 --kv-channels 16"},
    {100, "", WIDE,
     "--hidden-size 32 --num-attention-heads 8;--hidden-size 24 --num-attention-heads 4 --kv-channels 10;--hidden-size "
     "20 --num-attention-heads 12 --kv-channels 8"},
    {100, "", WIDE, "--ffn-hidden-size 48;--ffn-hidden-size 20;--ffn-hidden-size 72"},
    {100, "", "", "--relu;--geglu"},
    {50, "", "", "--untie-embeddings-and-output-weights"},
    {100, "", "",
     "--position-embedding-type relative --relative-attention-num-buckets 8 --relative-attention-max-distance 12 "
     "--normalization RMSNorm --disable-bias-linear --softmax-scale 1"},
    {100, "", "", "--hidden-dropout 0 --attention-dropout 0;--hidden-dropout 0.1 --attention-dropout 0.1"},
    {100, "", "",
     "--encoder-seq-length 24 --decoder-seq-length 16;--encoder-seq-length 9 --decoder-seq-length 13;"
     "--encoder-seq-length 32 --decoder-seq-length 5"},
    {100, "", "", "--vocab-size 61;--vocab-size 128"},
    {30, "", "RAMP", "--lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 1"},
    {20, "", "", "--clip-grad 0.1;--clip-grad 0"},
    {20, "", "", "--eval-interval 2 --eval-iters 2"},
};

/* Of a model with a vision tower, in place of model_rows. The first row is the model: its file has the other sizes.
 * Gradients of the small gated delta nets are steep, so that rounding grows more with larger steps. */
#define TOWER "--load vl/"
static const row vl_rows[] = {
    {100, "", "",
     TOWER "qwen2_5_vl;" TOWER "qwen3_vl;" TOWER "qwen3_5_vl --lr 1e-4;" TOWER "qwen3_vl_moe --num-experts 4;" TOWER
           "qwen3_5_moe --num-experts 4 --lr 1e-4"},
    {15, "", "qwen3_5", "--bf16"},
    {10, "", "qwen3_5", "--fp8-format hybrid;--fp8-format e4m3 --fp8-recipe blockwise"},
    {100, "--fp8-format", "", "--lr 3e-4"},
    {100, "--bf16", "--lr", "--lr 3e-4"},
    {100, "", "--lr", "--lr 2e-3"},
    {30, "--bf16", "", "--fp32-residual-connection"},
    {100, "", "", "--micro-batch-size 1;--micro-batch-size 1;--micro-batch-size 2"},
    {100, "", "",
     "--seq-length 112;--variable-seq-lengths --seq-length 112;--sequence-packing --seq-length 128;--sequence-packing "
     "--variable-seq-lengths --seq-length 128"},
    {30, "", "", "--freeze-vision;--freeze-projector;--freeze-vision --freeze-projector"},
    {25, "", "--freeze&--fp8-format&" EXPERTS,
     "--lora-rank 2 --lora-target all-linear;--lora-rank 3 --lora-target all-linear --lora-dropout 0.2"},
    {20, "", "", "--clip-grad 0.1;--clip-grad 0"},
};

/* Of reinforcement learning, drawn apart from the others and before them, so that their draws do not depend on it. It
 * runs in fp32 alone: tokens that are drawn by rounding are few there. Ranks of tokens by covariance, for kl_cov and
 * clip_cov, are ties more often: all tokens are chosen from. So is the sign of kl_cov's |log r|, whose weight is small.
 */
static const row rl_rows[] = {
    {100, RL, "",
     "--rollout-batch-size 4 --num-return-sequences 3;--rollout-batch-size 3 --num-return-sequences 4;"
     "--rollout-batch-size 8 --num-return-sequences 2"},
    {100, RL, "",
     "--reward regex --reward-pattern [a-p];--reward regex exact --reward-pattern [a-p0-9];"
     "--reward command --reward-command SCORE;--reward command regex --reward-pattern [A-Z] --reward-command SCORE"},
    {50, RL "&regex exact", "", "--reward-weights 1 0.5"},
    {50, RL "&command regex", "", "--reward-weights -0.5 2"},
    {75, RL, "",
     "--adv-estimator rloo;--adv-estimator remax;--adv-estimator gdpo;--adv-estimator reinforce;--adv-estimator gae "
     "--lam 0.9;--adv-estimator reinforce_plus_plus_baseline;--adv-estimator reinforce_plus_plus;--adv-estimator opo;"
     "--adv-estimator gpg;--adv-estimator grpo_passk;--adv-estimator gigpo --step-reward-weight 0.5;"
     "--adv-estimator step_reinforce;--adv-estimator optimal_token_baseline;--adv-estimator grpo --no-norm-adv-by-std"},
    {15, RL, "remax&gigpo&step_reinforce", "--env-command ANSWER;--env-command ANSWER --env-max-turns 2"},
    {50, RL "&gae", "", "--critic-lr 1e-3 --value-clip 0.2;--value-clip 0.1"},
    {50, RL "&reinforce", "_baseline",
     "--norm-mean-type batch --norm-std-type group;--norm-mean-type group;--norm-std-type batch"},
    {20, RL "&estimator r", "", "--gamma 0.9"},
    {20, RL, "gdpo", "--whiten-advantages;--advantage-clip 0.5;--reward-clip 0.6"},
    {20, RL, "gdpo&reward-clip", "--overlong-penalty 0.5;--overlong-buffer-length 2 --overlong-penalty-factor 0.3"},
    {10, RL, "overlong", "--overlong-mask"},
    {15, RL, "", "--dynamic-sampling --dynamic-sampling-max-rounds 3"},
    {75, RL, "",
     "--pg-variant gpg;--pg-variant gspo;--pg-variant cispo;--pg-variant gmpo;--pg-variant sapo;--pg-variant topr "
     "--topr-positive-weight 2;--pg-variant dppo_tv --clip-ratio 0.05;--pg-variant dppo_kl --clip-ratio 0.01;"
     "--pg-variant dro --dro-beta 0.1;--pg-variant kimi15;--pg-variant kl_cov --kl-cov-ratio 1 --ppo-kl-coef 1e-4;"
     "--pg-variant clip_cov --clip-cov-ratio 0.2 --clip-cov-lb -100 --clip-cov-ub 100;--pg-variant tis "
     "--tis-upper-bound 1.1;--pg-variant opmd;--pg-variant sppo --clip-ratio 0.1;--pg-variant sapo_detached"},
    {30, RL, "gspo&gmpo&sapo",
     "--loss-agg-mode seq-mean-token-sum;--loss-agg-mode seq-mean-token-mean;--loss-agg-mode seq-mean-token-sum-norm"},
    {50, RL, "",
     "--rollout-is token;--rollout-is sequence --rollout-is-threshold 0.5_2;--rollout-is token "
     "--rollout-is-batch-normalize;--rollout-rs seq_mean_k3,token_k1 --rollout-rs-threshold 0.5,0.1_10"},
    {25, RL, "--rollout-is&--rollout-rs&optimal_token", "--bypass-mode;--bypass-mode --rollout-lag 1"},
    {20, RL, "", "--bitwise-rollouts"},
    {25, RL, "--rollout-lag", "--rollout-lag 1;--rollout-lag 2"},
    {25, RL, "env-command&remax&optimal_token",
     "--partial-rollout-max-split 2;--partial-rollout-max-split 5 --max-head-offpolicyness 5;"
     "--partial-rollout-max-split 3"},
    {20, RL, "",
     "--distillation-in loss --self-distillation lagging --teacher-interval 2;--distillation-in policy-gradient "
     "--distillation-loss-max-clamp 0.1 --self-distillation lagging --teacher-interval 2;--distillation-in advantages "
     "--distillation-loss-mode k2 --self-distillation lagging --teacher-interval 3;"
     // not in the loss: its gradient jumps where the divergence is 0, as between a student and its copy
     "--distillation-in policy-gradient --distillation-loss-mode forward_kl_topk --distillation-topk 3 "
     "--distillation-log-prob-min-clamp -4 --self-distillation lagging --teacher-interval 2"},
    {30, RL, "", "--ppo-epochs 2"},
    {15, RL, "", "--no-shuffle-mini-batches;--no-shuffle-prompts"},
    {20, RL, "", "--entropy-coeff 0.01"},
    {30, RL_ONCE, "", "--kl-loss-coef 0.01;--kl-loss-coef 0.01 --kl-loss-type k2"},
    {20, RL_ONCE, "gdpo&kl-loss", "--kl-in-reward --kl-coef 0.01"},
    {20, RL, "", "--temperature 0.7;--top-k 40;--top-p 0.9"},
    {15, RL, "", "--sequence-packing false"},
    {30, RL, "", "--vocab-size 300"},
};

/* Of its model. */
static const row rl_model_rows[] = {
    {50, RL "&" EXPERTS, "", "--router-replay R2;--router-replay R3"},
    {30, RL "&embedding-type", "gae&gspo&gmpo&sapo&loss-agg-mode&router-replay&hybrid-override",
     "--mtp-num-layers 1;--mtp-num-layers 2;--mtp-num-layers 2 --mtp-use-repeated-layer"},
};

/* Of a layout, besides its sizes (draw_layout). */
static const row layout_rows[] = {
    {100, "tensor-model-parallel-size&" EXPERTS, "", "--sequence-parallel"},
    {60, "tensor-model-parallel-size", "sequence-parallel", "--sequence-parallel"},
    {30, "--sequence-parallel", "", "--tp-comm-overlap"},
    {50, "context-parallel-size", "window", "--cp-comm-type all_gather;--cp-comm-type a2a"},
    {60, "--sft&context-parallel-size", "",
     "--dynamic-context-parallel;--dynamic-context-parallel "
     "--max-seqlen-per-dp-cp-rank 60"},
    {100, "context-parallel-size&window", "", "--cp-comm-type all_gather;--cp-comm-type a2a"},
    {40, "context-parallel-size 4", "--cp-comm-type&window&attention-variant&hybrid",
     "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"},
    {40, STAGES, "",
     "--num-virtual-stages-per-pipeline-rank 2;--num-layers-per-virtual-pipeline-stage 1;"
     "--num-virtual-stages-per-pipeline-rank 3"},
    {60, STAGES " 2&--num-layers 2 --decoder-num-layers 2", "virtual",
     "--pipeline-model-parallel-layout Et|tttttL;--pipeline-model-parallel-layout Ettt|tttL;"
     "--pipeline-model-parallel-layout Et|tt|t|ttL;--pipeline-model-parallel-layout E|tt||ttttL"},
    {20, STAGES " 2&num-layers 4", "virtual&mtp-num-layers&decoder-num-layers",
     "--pipeline-model-parallel-layout Et|tttL;--pipeline-model-parallel-layout E|(t)*4L"},
    {20, STAGES, "virtual&parallel-layout",
     "--decoder-first-pipeline-num-layers 1;--decoder-last-pipeline-num-layers 1"},
    {15, STAGES, "decoder-first&decoder-last&parallel-layout",
     "--account-for-embedding-in-pipeline-split;--account-for-loss-in-pipeline-split;"
     "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"},
    {50, STAGES, "virtual&mtp-num-layers", "--pipeline-schedule zb-h1"},
    {60, "", "zb-h1",
     "--data-parallel-sharding-strategy optim;--data-parallel-sharding-strategy optim_grads;"
     "--data-parallel-sharding-strategy optim_grads_params"},
    {30, "", "sharding-strategy", "--use-distributed-optimizer"},
    {40, "", "", "--overlap-grad-reduce"},
    {50, "--overlap-grad-reduce&sharding-strategy", "", "--overlap-param-gather"},
    {40, EXPERTS, "", "--moe-token-dispatcher-type allgather;--moe-token-dispatcher-type flex"},
    {20, EXPERTS, "", "--no-moe-permute-fusion"},
    {20, EXPERTS, "--fp8-format", "--no-moe-grouped-gemm"},
    {15, EXPERTS, "", "--moe-layer-recompute"},
    {20, "latent", "--moe-layer-recompute",
     "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"},
    {30, "", "recompute",
     "--recompute-granularity full;--recompute-granularity full --recompute-method uniform --recompute-num-layers "
     "3;--recompute-granularity full --recompute-num-layers 2;--recompute-granularity full "
     "--recompute-method block;--recompute-granularity selective --recompute-modules layernorm mlp moe_act "
     "shared_experts;--recompute-granularity selective --recompute-modules moe,layernorm"},
    {10, "", "recompute", "--recompute-activations"},
    {50, "granularity full&tensor-model-parallel-size", "--sequence-parallel", "--distribute-saved-activations"},
    {30, "", "",
     "--fine-grained-activation-offloading --offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm "
     "expert_fc1 moe_act mlp;--fine-grained-activation-offloading --offload-modules attn_norm,core_attn,mlp"},
    {20, "", "", "--deterministic-mode"},
    {10, "", "", "--rerun-mode validate_results"},
    {10, "", RL, "--profile;--log-straggler;--profile --log-straggler"},
    {20, "--save", "", "--async-save"},
    {25, "", "", "--ddp-bucket-size 1000;--ddp-bucket-size 10000;--ddp-bucket-size 1000000"},
    {20, "", "dtype fp16&dtype fp8&muon",
     "--optimizer-cpu-offload;--optimizer-cpu-offload --optimizer-offload-fraction 0.5;--optimizer-cpu-offload "
     "--optimizer-offload-fraction 0.3 --overlap-cpu-optimizer-d2h-h2d"},
    {15, "", "use-precision&muon",
     "--use-precision-aware-optimizer;--use-precision-aware-optimizer --main-grads-dtype fp32 --exp-avg-dtype fp32 "
     "--exp-avg-sq-dtype fp32"},
    {90, "--fp8-format&sharding-strategy optim&" WIDE, "blockwise&mxfp8&tp-only-amax-red", "--fp8-param-gather"},
    {40, "", "", "OMPI_MCA_btl_vader_eager_limit=256"}, // longer messages wait for their receiver
};

/* Of a layout of reinforcement learning. */
static const row rl_layout_rows[] = {
    {60, RL "&--mtp-num-layers 2", "attention-variant", "--num-speculative-tokens 2"},
    {60, RL "&--mtp-num-layers", "attention-variant&speculative", "--num-speculative-tokens 1"},
    {50, RL, "--bitwise-rollouts", "--rollout-tensor-model-parallel-size 1;--rollout-tensor-model-parallel-size 2"},
    {40, RL "&rollout-tensor&" EXPERTS, "", "--rollout-expert-model-parallel-size 2"},
    {60, RL "&--rollout-lag&--bypass-mode",
     "dynamic-sampling&env-command&partial&remax&router-replay&lora&rollout-tensor",
     "--rollout-ranks 1;--rollout-ranks 2;--rollout-ranks 2 --rollout-tensor-model-parallel-size 2"},
    {25, RL "&gae", "",
     "--critic-tensor-model-parallel-size 1 --critic-pipeline-model-parallel-size 1;"
     "--critic-tensor-model-parallel-size 2"},
    {25, RL "&--kl-", "",
     "--ref-tensor-model-parallel-size 1 --ref-pipeline-model-parallel-size 1;--ref-tensor-model-parallel-size 2"},
    {40, RL "&lagging", "",
     "--teacher-tensor-model-parallel-size 1 --teacher-pipeline-model-parallel-size 1;"
     "--teacher-tensor-model-parallel-size 2"},
    {15, RL, "", "--param-offload;--grad-offload --optimizer-offload"},
};

/* In all runs. The large epsilon keeps AdamW from dividing gradients that are rounding errors by their own size. */
static const char always[] = "--make-vocab-size-divisible-by 16 --weight-decay 0.5 --adam-eps 1e-3 "
                             "--init-method-std 0.1";

/* Prompts of reinforcement learning, a program that rewards responses, and one that answers them. */
#define PROMPTS "prompts"
#define SCORES  "score"
#define ANSWERS "answer"
static const char of_rl[] =
    "--stage rl --tokenizer-type ByteLevel --chat-template plain --data-path " PROMPTS " --max-new-tokens 5";

/* Models with a vision tower, and their conversations. */
static const char of_vl[] = "--sft --train-data-path vl/lines.jsonl";

static const char *device = "cpu";
static int most_ranks = 8;
static const char *stage = ""; // "rl": of all configurations; "pt": of none; "t5", "vl": all are such models

/* ---- configurations ---------------------------------------------------------------------------------------------- */

typedef struct item {
    part part;
    const row *row; // NULL: a size of the layout
    char text[320];
} item;

typedef struct config {
    item items[MAX_ITEMS];
    int count;
    int data[2];    // data-parallel sizes of the layouts
    bool resumes;   // on the second layout
    int batch_unit; // a multiple of both layouts' smallest batch
    int batches;    // the global batch, in units
    int seed;       // of the weights and the data; 0: train's own
} config;

typedef struct random_words {
    uint64_t seed, number, count;
} random_words;

static int draw_below(random_words *random, int limit) {
    uint32_t words[4];
    mt_philox(words, random->seed, random->number, random->count++);
    return (int)(words[0] % (uint32_t)limit);
}

static int draw_of(random_words *random, const int *values, int count) {
    return values[draw_below(random, count)];
}

static void add_item(config *c, part part, const row *row, const char *text, size_t length) {
    MT_CHECK(c->count < MAX_ITEMS && length < sizeof c->items[0].text);
    item *new = &c->items[c->count++];
    *new = (item){.part = part, .row = row};
    memcpy(new->text, text, length);
}

/* The texts of a part's items with a blank before each. `part` ONE_RANK has only the items of all runs. */
static void texts_of(const config *c, part part, char text[LINE]) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < c->count; i++)
        if (c->items[i].part & (ALL | part)) {
            used += (size_t)snprintf(text + used, LINE - used, " %s", c->items[i].text);
            MT_CHECK(used < LINE);
        }
}

/* True if some (or all) of the texts in `list`, separated by &, are in `text`. */
static bool has_texts(const char *text, const char *list, bool all) {
    char one[80];
    for (; *list; list += strcspn(list, "&"), list += *list == '&') {
        snprintf(one, sizeof one, "%.*s", (int)strcspn(list, "&"), list);
        if ((strstr(text, one) != NULL) != all) return !all;
    }
    return all;
}

static void draw_rows(config *c, random_words *random, part part, const row *rows, size_t count) {
    char text[LINE];
    for (const row *row = rows; row < rows + count; row++) {
        int chance = draw_below(random, 100), which = draw_below(random, 1 << 20), choices = 1;
        for (const char *at = row->choices; *at; at++) choices += *at == ';';
        texts_of(c, part, text);
        if (chance >= row->percent || !has_texts(text, row->needs, true) || has_texts(text, row->without, false))
            continue;
        const char *choice = row->choices;
        for (which %= choices; which > 0; which--) choice += strcspn(choice, ";") + 1;
        add_item(c, part, row, choice, strcspn(choice, ";"));
    }
}

/* The number behind an option in a text, or `absent`. */
static int number_of(const char *text, const char *option, int absent) {
    const char *at = strstr(text, option);
    return at ? atoi(at + strlen(option)) : absent;
}

static void add_size(config *c, part part, const char *option, int size, int absent) {
    char text[100];
    if (size != absent) add_item(c, part, NULL, text, (size_t)snprintf(text, sizeof text, "%s %d", option, size));
}

/* The sizes of a layout of 2 to 8 ranks, then its rows. */
static void draw_layout(config *c, random_words *random, random_words *of_rl, part part) {
    static const int tensor[] = {1, 1, 2, 2, 4}, stages[] = {1, 1, 2, 2, 3, 4}, context[] = {1, 1, 1, 2, 2, 4},
                     data[] = {1, 1, 2, 2, 3, 4};
    int tp, pp, cp, dp, ranks;
    char text[LINE];
    do {
        tp = draw_of(random, tensor, 5), pp = draw_of(random, stages, 6);
        cp = draw_of(random, context, 6), dp = draw_of(random, data, 6);
        ranks = tp * pp * cp * dp;
    } while (ranks < 2 || ranks > most_ranks);
    c->data[part == SECOND] = dp;
    add_size(c, part, "--tensor-model-parallel-size", tp, 1);
    add_size(c, part, "--pipeline-model-parallel-size", pp, 1);
    add_size(c, part, "--context-parallel-size", cp, 1);
    texts_of(c, part, text);
    int experts = number_of(text, EXPERTS, 0), etp = draw_below(random, 2) ? 1 : tp, ep = 1;
    for (int size = 2; size <= 8; size++)
        if (experts % size == 0 && ranks / pp % (etp * size) == 0 && draw_below(random, 3) > 0) ep = size;
    if (experts > 0) add_size(c, part, "--expert-tensor-parallel-size", etp, tp);
    if (experts > 0) add_size(c, part, "--expert-model-parallel-size", ep, 1);
    if (part == FIRST) add_item(c, part, NULL, "--save saved", strlen("--save saved"));
    draw_rows(c, random, part, layout_rows, sizeof layout_rows / sizeof *layout_rows);
    draw_rows(c, of_rl, part, rl_layout_rows, sizeof rl_layout_rows / sizeof *rl_layout_rows);
}

/* Both layouts, and a batch that both can divide. */
static void draw_layouts(config *c, random_words *random, random_words *of_rl) {
    char text[LINE];
    draw_layout(c, random, of_rl, FIRST);
    if (c->resumes) draw_layout(c, random, of_rl, SECOND);
    texts_of(c, ONE_RANK, text);
    int common = c->data[0]; // the least common multiple
    while (common % c->data[1] != 0) common += c->data[0];
    c->batch_unit = common * number_of(text, "--micro-batch-size", 1);
    c->batches = 2 + draw_below(random, 3);
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

/* A command: its words, and the texts NAME=VALUE that come before. */
typedef struct command {
    char text[LINE], copy[LINE];
    char *words[MAX_WORDS], *environment[8];
    int count, num_environment, ranks;
} command;

static void add_word(command *to, const char *word) {
    MT_CHECK(to->count + 1 < MAX_WORDS);
    to->words[to->count++] = (char *)word;
    to->words[to->count] = NULL;
}

/* True if the text has a mark, which becomes blanks. */
static bool take_mark(char *text, const char *mark) {
    char *at = strstr(text, mark);
    if (at) memset(at, ' ', strlen(mark));
    return at != NULL;
}

/* The words of a part's run with further options. A ramp grows from one unit of the batch to all of them. */
static void words_of(command *to, const config *c, part part, const char *further) {
    char texts[LINE], ramp[200], *rest = NULL;
    int unit = c->batch_unit, units = c->batches;
    texts_of(c, part, texts);
    bool learns = take_mark(texts, " " RL), sees = strstr(texts, TOWER) != NULL;
    take_mark(texts, " ONCE");
    char *loads = strstr(further, "--load") ? strstr(texts, TOWER) : NULL; // a checkpoint in place of the model
    if (loads) memset(loads, ' ', strcspn(loads + strlen(TOWER), " ") + strlen(TOWER));
    char *at = strstr(texts, " RAMP");
    snprintf(ramp, sizeof ramp, "--rampup-batch-size %d %d %d --train-samples %d", unit, unit, 3 * unit, 10 * unit);
    if (at) memset(at, ' ', strlen(" RAMP"));
    if (!at) snprintf(ramp, sizeof ramp, "--train-iters %d", STEPS);
    if (!at && !strstr(texts, "lr-decay-style")) strcat(ramp, " --lr-decay-style constant");
    if (!strstr(texts, "--eval-interval")) strcat(ramp, " --eval-iters 0");
    // Equal tokens at the starts of documents have equal states and probabilities. Of those a full expert would drop
    // some by rounding, with every seed.
    if (has_texts(texts, "--moe-expert-capacity-factor&--reset-attention-mask", true) && !strstr(texts, "drop-policy"))
        strcat(ramp, " --moe-token-drop-policy position");
    if (c->seed > 0) snprintf(ramp + strlen(ramp), sizeof ramp - strlen(ramp), " --seed %d", c->seed);
    *to = (command){.ranks = part == ONE_RANK
                                 ? 1
                                 : c->data[part == SECOND] * number_of(texts, "--tensor-model-parallel-size", 1) *
                                           number_of(texts, "--pipeline-model-parallel-size", 1) *
                                           number_of(texts, "--context-parallel-size", 1) +
                                       number_of(texts, "--rollout-ranks", 0)};
    int length = snprintf(to->text, LINE, "--device %s %s%s %s %s --global-batch-size %d%s %s", device,
                          learns ? of_rl
                          : sees ? of_vl
                                 : "--mock-data",
                          sees && !loads ? " --finetune" : "", always, ramp, unit * units, texts, further);
    MT_CHECK(length < LINE);
    memcpy(to->copy, to->text, LINE);
    for (char *word = strtok_r(to->copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        if (strncmp(word, "OMPI_", 5) == 0)
            to->environment[to->num_environment++] = word;
        else
            add_word(to, strcmp(word, "SCORE") == 0    ? "sh " SCORES
                         : strcmp(word, "ANSWER") == 0 ? "sh " ANSWERS
                                                       : word);
    }
}

/* Prints a command for a shell. */
static void print_command(const command *run) {
    printf("  ");
    for (int i = 0; i < run->num_environment; i++) printf("%s ", run->environment[i]);
    if (run->ranks > 1) printf("mpirun --oversubscribe -np %d ", run->ranks);
    printf("./train");
    for (int i = 0; i < run->count; i++) printf(strpbrk(run->words[i], "[]()*| ") ? " '%s'" : " %s", run->words[i]);
    printf("\n");
}

/* True if the options of a part go together; they are not yet checked against a machine. */
static bool options_fit(const config *c, part part, mt_error *error) {
    mt_run_options options;
    command run;
    char *words[MAX_WORDS + 1] = {"train"};
    words_of(&run, c, part, "");
    memcpy(words + 1, run.words, sizeof(char *) * (size_t)run.count);
    int status = mt_options_parse(&options, MT_PROGRAM_TRAIN, run.count + 1, words, error);
    if (status == 0 && options.stack.vocab_size == 0) options.stack.vocab_size = 257; // of the tokenizer
    if (status == 0) status = mt_options_finish(&options, MT_PROGRAM_TRAIN, run.ranks, error);
    mt_options_free(&options);
    return status == 0;
}

/* Configuration `number`; of its layouts the first of several that fit the model. */
static config draw_config(uint64_t seed, int64_t number) {
    enum { TRIES = 10 };
    random_words random = {.seed = seed, .number = (uint64_t)number}, of_rl = random, of_t5 = random, of_tower = random;
    of_rl.count = UINT64_C(1) << 32, of_t5.count = UINT64_C(1) << 33, of_tower.count = UINT64_C(1) << 34;
    bool learns = draw_below(&of_rl, 100) < 12, maps = draw_below(&of_t5, 10) == 0 && !learns;
    bool sees = draw_below(&of_tower, 12) == 0 && !learns && !maps;
    if (*stage) learns = strcmp(stage, "rl") == 0, maps = strcmp(stage, "t5") == 0, sees = strcmp(stage, "vl") == 0;
    config model = {.data = {1, 1}}, c;
    char text[LINE];
    mt_error unused;
    model.resumes = draw_below(&random, 10) < 6;
    if (learns) add_item(&model, ALL, NULL, RL, strlen(RL));
    if (learns && !model.resumes) add_item(&model, ALL, NULL, "ONCE", strlen("ONCE"));
    draw_rows(&model, &of_rl, ALL, rl_rows, sizeof rl_rows / sizeof *rl_rows);
    if (maps)
        draw_rows(&model, &of_t5, ALL, t5_rows, sizeof t5_rows / sizeof *t5_rows);
    else if (sees)
        draw_rows(&model, &of_tower, ALL, vl_rows, sizeof vl_rows / sizeof *vl_rows);
    else
        draw_rows(&model, &random, ALL, model_rows, sizeof model_rows / sizeof *model_rows);
    draw_rows(&model, &of_rl, ALL, rl_model_rows, sizeof rl_model_rows / sizeof *rl_model_rows);
    texts_of(&model, ONE_RANK, text);
    if (strstr(text, "--lora-rank")) model.resumes = false; // a checkpoint holds the adapter alone
    for (int i = 0; i < TRIES; i++) {
        c = model;
        draw_layouts(&c, &random, &of_rl);
        if (options_fit(&c, FIRST, &unused) && (!c.resumes || options_fit(&c, SECOND, &unused))) break;
    }
    return c;
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

// In the order of their weight: a run has the greatest one of its metrics. NEARLY: the difference may be one of a tie.
typedef enum outcome { AGREES, REFUSED, NEARLY, FAILED, HUNG } outcome;

static char train_path[4096];
static double timeout_seconds = 60;
static bool shrinks; // a failure, which was seen before
static bool is_open_mpi;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Replaces this process; standard output and error go to the files `out` and `err`. */
static void become(const command *run) {
    char *words[MAX_WORDS + 8], ranks[16];
    int count = 0;
    for (int i = 0; i < run->num_environment; i++) putenv(run->environment[i]);
    snprintf(ranks, sizeof ranks, "%d", run->ranks);
    if (run->ranks > 1) {
        words[count++] = "mpirun";
        if (is_open_mpi) words[count++] = "--oversubscribe";
        words[count++] = "-np";
        words[count++] = ranks;
    }
    words[count++] = train_path;
    memcpy(words + count, run->words, sizeof(char *) * (size_t)(run->count + 1));
    int out = open("out", O_WRONLY | O_CREAT | O_TRUNC, 0600), err = open("err", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    int nothing = open("/dev/null", O_RDONLY);
    setpgid(0, 0);
    if (out >= 0 && err >= 0 && dup2(nothing, 0) == 0 && dup2(out, 1) == 1 && dup2(err, 2) == 2)
        execvp(words[0], words);
    _exit(127);
}

/* Waits for a process, at most some seconds; false if it still runs. */
static bool await(pid_t process, double seconds, int *status) {
    const struct timespec pause = {.tv_nsec = 5000000};
    for (double end = now() + seconds; now() < end; nanosleep(&pause, NULL))
        if (waitpid(process, status, WNOHANG) == process) return true;
    return false;
}

/* Reads the files `out` and `err` of a run that failed. It refused its options if it has printed one error, and ended
 * by itself before it trained. */
static outcome read_failure(const char *metrics, int status, mt_error *detail) {
    mt_error unused;
    int64_t bytes;
    char *text = mt_file_read("err", 1 << 24, &bytes, &unused), *line = text ? strstr(text, "error: ") : NULL;
    char *reported = mt_file_read(metrics, 1 << 24, &bytes, &unused);
    bool by_itself = WIFEXITED(status) && line && (line == text || line[-1] == '\n') && (!reported || !*reported);
    free(reported);
    static const char *const crashes[] = {"internal check", "Sanitizer", "runtime error", "Segmentation", "signal"};
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++)
        if (text && strstr(text, crashes[i])) by_itself = false;
    if (!line && text && *text) line = text;
    mt_error_set(detail, "%.*s (status %#x)", line ? (int)strcspn(line, "\n") : 10, line ? line : "no message", status);
    free(text);
    return by_itself ? REFUSED : FAILED;
}

/* Runs a command, which writes `metrics`, for some seconds at most. */
static outcome run_command(const command *run, const char *metrics, double seconds, mt_error *detail) {
    int status = 0;
    unlink(metrics);
    fflush(stdout);
    pid_t process = fork();
    if (process == 0) become(run);
    if (process < 0) mt_die("fork: %s", strerror(errno));
    if (!await(process, seconds, &status)) {
        kill(process, SIGTERM); // mpirun ends its ranks
        if (!await(process, 10, &status)) {
            kill(-process, SIGKILL);
            waitpid(process, &status, 0);
        }
        mt_error_set(detail, "no end after %g seconds", seconds);
        return HUNG;
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? AGREES : read_failure(metrics, status, detail);
}

/* ---- comparison -------------------------------------------------------------------------------------------------- */

/* The metrics of a run by iteration, "3": {...}; to free. Several lines of an iteration are joined. */
static json_t *read_metrics(const char *path) {
    mt_error error;
    int64_t bytes;
    json_t *all = json_object();
    char *text = mt_file_read(path, 1 << 24, &bytes, &error), *rest = NULL, key[32];
    for (char *line = text ? strtok_r(text, "\n", &rest) : NULL; line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *object = json_loads(line, 0, NULL);
        snprintf(key, sizeof key, "%lld", (long long)json_integer_value(json_object_get(object, "iteration")));
        json_t *before = json_object_get(all, key);
        if (before) json_object_update(before, object);
        if (!before && object) json_object_set(all, key, object);
        json_decref(object);
    }
    free(text);
    return all;
}

/* True for a metric that measures time or memory. */
static bool is_measured(const char *key) {
    return strstr(key, "_per_") || strstr(key, "_ms") || strstr(key, "_bytes") || strstr(key, "straggler") ||
           strstr(key, "seconds");
}

/* True for a metric that counts the tokens of experts: a score that rounds otherwise chooses another expert. */
static bool is_routed(const char *key) {
    return strstr(key, "imbalance") || strstr(key, "dropped") || strstr(key, "expert");
}

/* True for a metric of writing: ranks that only write report a batch an iteration later. */
static bool is_of_writing(const char *key) {
    return strstr(key, "generation_tokens") || strstr(key, "reward_tokens") || strstr(key, "drafts");
}

/* Relative, of a configuration's numbers: by the narrowest type in which values are rounded. */
static double tolerance_of(const config *c) {
    char text[LINE];
    texts_of(c, ONE_RANK, text);
    if (has_texts(text, "--fp8-format&dtype fp8", false)) return FP8_TOLERANCE;
    return has_texts(text, "--bf16&dtype bf16&dtype fp16", false) ? BF16_TOLERANCE : TOLERANCE;
}

/* Compares the metrics of one rank from an iteration on with those of another run. A policy's losses are near 0, and
 * compared with 1. A token that rounding draws otherwise changes all that follows, as a tie of experts does. */
static outcome compare_metrics(const char *path, int64_t from, const config *c, mt_error *detail) {
    char text[LINE], layouts[LINE];
    texts_of(c, ONE_RANK, text);
    texts_of(c, (part)(FIRST | SECOND), layouts);
    bool writes_apart = strstr(layouts, "--rollout-ranks") != NULL;
    bool has_experts = strstr(text, EXPERTS) != NULL, learns = strstr(text, RL) != NULL;
    bool is_bitwise = strstr(text, "--bitwise-rollouts") != NULL;
    double tolerance = tolerance_of(c);
    json_t *expected = read_metrics("one.jsonl"), *actual = read_metrics(path), *wanted, *value;
    const char *iteration, *key;
    outcome result = AGREES;
    int compared = 0;
    bool chooses_alike = tolerance == TOLERANCE;
    double tie = chooses_alike ? TIE_TOLERANCE : TIES_TOLERANCE;
    json_object_foreach(expected, iteration, wanted) {
        const json_t *found = json_object_get(actual, iteration);
        if (atoll(iteration) < from) continue;
        json_object_foreach(wanted, key, value) {
            const json_t *other = json_object_get(found, key);
            double a = json_number_value(other), b = json_number_value(value);
            double size = learns && strcmp(key, "grad_norm") != 0 ? fmax(fabs(b), 1) : fabs(b);
            bool good = json_is_number(value) ? json_is_number(other) && fabs(a - b) <= tolerance * size
                                              : json_typeof(value) == (other ? json_typeof(other) : JSON_NULL);
            bool near =
                json_is_number(value) && json_is_number(other) &&
                (learns        ? true
                 : has_experts ? is_routed(key) || fabs(a - b) <= tie * fabs(b)
                               : chooses_alike && atoll(iteration) > 1 && fabs(a - b) <= GROWTH_TOLERANCE * fabs(b));
            if (is_bitwise && strcmp(key, "generation_gap") == 0) good = near = a == 0 && b == 0;
            if (is_measured(key) || (!chooses_alike && is_routed(key))) continue;
            if (writes_apart && is_of_writing(key)) continue;
            if (from > 1 && strcmp(key, "skipped_iterations") == 0) continue; // of the iterations since the start
            compared++;
            if (good || result >= (near ? NEARLY : FAILED)) continue;
            result = near ? NEARLY : FAILED;
            mt_error_set(detail, "%s: iteration %s has %s %.9g, one rank has %.9g%s", path, iteration, key, a, b,
                         other ? "" : " (it is absent)");
        }
    }
    if (result == AGREES && compared == 0) {
        result = FAILED;
        mt_error_set(detail, "%s: no iteration from %lld on", path, (long long)from);
    }
    json_decref(expected), json_decref(actual);
    return result;
}

/* ---- a configuration --------------------------------------------------------------------------------------------- */

#define FIRST_FURTHER  "--save-interval 2 --metrics first.jsonl"
#define SECOND_FURTHER "--load saved/iter_0000002 --metrics second.jsonl"

/* A run that did not end is tried once more with five times the time: the machine may have been busy. */
static outcome run_part(const config *c, part part, const char *further, const char *metrics, mt_error *detail) {
    static command run;
    words_of(&run, c, part, further);
    outcome result = run_command(&run, metrics, timeout_seconds, detail);
    if (result != HUNG || shrinks) return result;
    if (part == FIRST && system("rm -rf saved") != 0) mt_die("the folder of the checkpoints cannot be removed");
    return run_command(&run, metrics, 5 * timeout_seconds, detail);
}

/* The second layout resumes. If it is refused, it must be refused without a checkpoint, too. */
static outcome resume(const config *c, mt_error *detail) {
    mt_error unused;
    outcome result = run_part(c, SECOND, SECOND_FURTHER, "second.jsonl", detail);
    if (result == REFUSED)
        return run_part(c, SECOND, "--metrics fresh.jsonl", "fresh.jsonl", &unused) == REFUSED ? REFUSED : FAILED;
    return result == AGREES ? compare_metrics("second.jsonl", SAVED + 1, c, detail) : result;
}

/* Runs a configuration in the current folder with one seed. */
static outcome try_seed(const config *c, mt_error *detail) {
    if (!options_fit(c, FIRST, detail) || (c->resumes && !options_fit(c, SECOND, detail))) return REFUSED;
    if (system("rm -rf saved *.jsonl") != 0) mt_die("the folder of the runs cannot be emptied");
    outcome result = run_part(c, FIRST, FIRST_FURTHER, "first.jsonl", detail);
    if (result == AGREES) result = run_part(c, ONE_RANK, "--metrics one.jsonl", "one.jsonl", detail);
    if (result == AGREES) result = compare_metrics("first.jsonl", 1, c, detail);
    return result == AGREES && c->resumes ? resume(c, detail) : result;
}

/* Runs a configuration in the current folder, with other seeds too if a tie or growth of rounding may explain how it
 * differs. If it agrees with one of them only, `detail` is the difference of the first. */
static outcome try_config(const config *c, mt_error *detail) {
    mt_error other;
    config again = *c;
    outcome result = try_seed(c, detail);
    if (result == AGREES) detail->text[0] = 0;
    while (result == NEARLY && ++again.seed < SEEDS) result = try_seed(&again, &other);
    if (result > NEARLY && again.seed > 0) *detail = other;
    return result == NEARLY ? FAILED : result;
}

/* Takes over a smaller configuration if it fails in the same way. */
static bool accept(config *c, const config *smaller, outcome how, mt_error *detail, int *tries) {
    mt_error own;
    if ((*tries)-- <= 0 || try_config(smaller, &own) != how) return false;
    *c = *smaller;
    *detail = own;
    return true;
}

/* Leaves out groups of `size` items that the failure does not need; true if it needs one less. */
static bool leave_out(config *c, int size, outcome how, mt_error *detail, int *tries) {
    bool smaller = false;
    for (int first = c->count - size; first > -size; first -= size) {
        int from = first > 0 ? first : 0, to = first + size, kept = from;
        if (to > c->count) continue; // of a group that was left out
        config other = *c;
        for (int i = from; i < c->count; i++)
            if (i >= to || strcmp(c->items[i].text, "--save saved") == 0) other.items[kept++] = c->items[i];
        other.count = kept;
        smaller |= kept < c->count && accept(c, &other, how, detail, tries);
    }
    return smaller;
}

/* Leaves out what the failure does not need: the second layout, data-parallel ranks, groups of options and options one
 * at a time; then replaces choices by the first one of their row. */
static void shrink(config *c, outcome how, mt_error *detail) {
    int tries = how == HUNG ? MAX_HANGS : MAX_SHRINKS;
    bool smaller = true;
    config other = *c;
    other.resumes = false;
    if (c->resumes) accept(c, &other, how, detail, &tries);
    for (int i = c->count - 1; i >= 0 && !c->resumes; i--) // items of the second layout have no effect now
        if (c->items[i].part == SECOND) c->count = i;
    for (int layout = 0; layout < 2; layout++) {
        other = *c, other.data[layout] = 1;
        if (c->data[layout] > 1) accept(c, &other, how, detail, &tries);
    }
    for (int size = c->count / 2; size > 1; size /= 2) leave_out(c, size, how, detail, &tries);
    while (smaller && tries > 0) smaller = leave_out(c, 1, how, detail, &tries);
    for (int i = 0; i < c->count; i++) {
        const row *row = c->items[i].row;
        size_t first = row ? strcspn(row->choices, ";") : 0;
        if (!row || strncmp(c->items[i].text, row->choices, first) == 0) continue;
        other = *c;
        snprintf(other.items[i].text, sizeof other.items[i].text, "%.*s", (int)first, row->choices);
        accept(c, &other, how, detail, &tries);
    }
}

static void report_failure(config *c, outcome how, mt_error *detail, long long seed, long long number) {
    command run;
    printf("%lld FAILED: %s\n", number, detail->text);
    fflush(stdout);
    shrinks = true;
    shrink(c, how, detail);
    shrinks = false;
    printf("shrunk: %s\n", detail->text);
    words_of(&run, c, ONE_RANK, "--metrics one.jsonl");
    print_command(&run);
    words_of(&run, c, FIRST, FIRST_FURTHER);
    print_command(&run);
    if (c->resumes) words_of(&run, c, SECOND, SECOND_FURTHER);
    if (c->resumes) print_command(&run);
    printf("again: make fuzz-layouts SEED=%lld NUMBER=%lld\n", seed, number);
}

/* ---- the program ------------------------------------------------------------------------------------------------- */

static void write_file(const char *name, const char *text) {
    FILE *file = fopen(name, "w");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) mt_die("%s/%s: %s", root, name, strerror(errno));
}

/* 40 prompts, whose meaning does not matter, a program whose rewards are the lengths of the lines that it reads, and
 * one that answers each response with a question mark. */
static void write_prompts(void) {
    char text[4096] = "", *end = text;
    for (int i = 0; i < 40; i++)
        end += sprintf(end, "{\"prompt\": \"%.*s%d\", \"answer\": \"%c\"}\n", i % 5, "abcde", i, 'a' + i % 26);
    write_file(PROMPTS, text);
    write_file(SCORES, "while IFS= read -r line; do echo \"${#line}e-2\"; done\n");
    write_file(ANSWERS, "while IFS= read -r line; do\n"
                        "    id=${line#*: }\n"
                        "    echo \"{\\\"id\\\": ${id%%,*}, \\\"messages\\\": [{\\\"role\\\": \\\"user\\\", "
                        "\\\"content\\\": \\\"?\\\"}]}\"\n"
                        "done\n");
}

/* Conversations with no picture to three, of unlike sizes. */
static void write_conversations(const char *golden) {
    static const char *const pictures[] = {"square", "wide", "gray", "large", "alpha", "palette", "small"};
    static char text[1 << 17];
    char *end = text;
    for (int i = 0; i < 30; i++) {
        int count = i * i % 4;
        end += sprintf(end, "{\"messages\": [{\"role\": \"user\", \"content\": \"No %d: ", i);
        for (int k = 0; k < count; k++) end += sprintf(end, "<image> ");
        end += sprintf(end, "?\"}, {\"role\": \"assistant\", \"content\": \"A %.*s.\"}], \"images\": [", 1 + i % 7,
                       "squares");
        for (int k = 0; k < count; k++)
            end += sprintf(end, "%s\"%s/images/%s.png\"", k ? ", " : "", golden, pictures[(3 * i + 2 * k) % 7]);
        end += sprintf(end, "]}\n");
    }
    write_file("vl/lines.jsonl", text);
}

/* The models of tests/golden/vision as folders of `vl`, with a tokenizer; relative paths end at chdir. */
static void write_towers(const char *golden) {
    static const char *const models[] = {"qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "qwen3_vl_moe", "qwen3_5_moe"};
    char command[8192];
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        snprintf(command, sizeof command,
                 "mkdir -p vl/%s && cp '%s/vision/%s/config.json' '%s/vision/%s/model.safetensors' "
                 "'%s/vision/sft/'tokenizer*.json '%s/vision/sft/chat_template.jinja' vl/%s",
                 models[i], golden, models[i], golden, models[i], golden, golden, models[i]);
        if (system(command) != 0) mt_die("%s: not to be copied; start this program in the project's folder", golden);
        snprintf(command, sizeof command, "vl/%s/preprocessor_config.json", models[i]);
        write_file(command, "{\"patch_size\": 4, \"merge_size\": 2, \"temporal_patch_size\": 2, \"size\": "
                            "{\"shortest_edge\": 256, \"longest_edge\": 1024}}");
    }
    write_conversations(golden);
}

/* Finds train and what mpirun is, and enters an empty folder, in memory if possible. */
static void prepare(void) {
    const char *bin = getenv("MT_BIN"), *limit = getenv("FUZZ_TIMEOUT");
    char name[4200], *absolute;
    snprintf(name, sizeof name, "%.4000s/train", bin ? bin : ".");
    absolute = realpath(name, NULL);
    if (!absolute || strlen(absolute) >= sizeof train_path) mt_die("%s: not found; build train first", name);
    strcpy(train_path, absolute);
    free(absolute);
    if (limit) timeout_seconds = atof(limit);
    if (getenv("FUZZ_DEVICE")) device = getenv("FUZZ_DEVICE");
    if (getenv("FUZZ_STAGE")) stage = getenv("FUZZ_STAGE");
    if (getenv("FUZZ_RANKS")) most_ranks = atoi(getenv("FUZZ_RANKS"));
    if (most_ranks < 2) mt_die("FUZZ_RANKS=%d: a layout has at least two ranks", most_ranks);
    is_open_mpi = system("mpirun --version 2>/dev/null | grep -qi 'open.mpi\\|openrte'") == 0;
    static char settings[][60] = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                                  "OMPI_MCA_mpi_yield_when_idle=1", "OMPI_MCA_btl_vader_single_copy_mechanism=none",
                                  "OMP_NUM_THREADS=1"};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) putenv(settings[i]);
    char *golden = realpath("tests/golden", NULL);
    if (!golden || strlen(golden) > 1000) mt_die("tests/golden: not found; start this program in the project's folder");
    if (make_root(NULL) != 0 || chdir(root) != 0) mt_die("%s: %s", root, strerror(errno));
    write_prompts();
    write_towers(golden);
    free(golden);
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 4) mt_die("usage: fuzz_layouts SECONDS SEED [NUMBER]");
    double seconds = atof(argv[1]);
    long long seed = atoll(argv[2]), count[HUNG + 1] = {0}, number = argc > 3 ? atoll(argv[3]) : 0;
    mt_error detail;
    prepare();
    printf("random layouts of seed %lld\n", seed);
    for (double end = now() + seconds; now() < end; number++) {
        config c = draw_config((uint64_t)seed, number);
        outcome how = try_config(&c, &detail);
        count[how]++;
        if (how == AGREES)
            printf("%lld agrees%s%s\n", number, detail.text[0] ? " with another seed; first: " : "", detail.text);
        if (how == REFUSED) printf("%lld refused: %s\n", number, detail.text);
        if (how >= FAILED) report_failure(&c, how, &detail, seed, number);
        fflush(stdout);
        if (argc > 3) break;
    }
    if (remove_root(NULL) != 0) mt_die("%s cannot be removed", root);
    long long failed = count[FAILED] + count[HUNG], all = count[AGREES] + count[REFUSED] + failed;
    printf("%lld configurations; refused: %lld%%; hung: %lld\n", all, all ? 100 * count[REFUSED] / all : 0,
           count[HUNG]);
    printf("%lld passed, %lld failed, %lld skipped\n", count[AGREES], failed, count[REFUSED]);
    return failed > 0;
}
