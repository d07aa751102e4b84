/* families.h: the folders of tests/golden/hf: tiny models with reference outputs of Hugging Face transformers. */
#ifndef MT_TEST_FAMILIES_H
#define MT_TEST_FAMILIES_H

#include <stdbool.h>
#include <string.h>

static const char *const families[] = {"gpt2",
                                       "llama",
                                       "llama3_rope_tied",
                                       "qwen2",
                                       "qwen3",
                                       "mixtral",
                                       "qwen2_moe",
                                       "qwen3_moe",
                                       "deepseek_v3",
                                       "deepseek_v3_dense",
                                       "deepseek_v3_no_q_latent",
                                       "smollm3",
                                       "gemma3",
                                       "olmo3",
                                       "qwen3_next",
                                       "gpt_oss",
                                       "nemotron_h",
                                       "nemotron_h_latent",
                                       "granitemoehybrid",
                                       "kimi_linear",
                                       "deepseek_v32",
                                       "seed_oss",
                                       "dots1",
                                       "exaone4",
                                       "glm4_moe",
                                       "glm4_moe_qk",
                                       "minimax_m2",
                                       "hy_v3",
                                       "solar_open",
                                       "exaone_moe",
                                       "glm4_moe_lite",
                                       "ministral3",
                                       "ernie4_5_moe",
                                       "qwen3_5",
                                       "qwen3_5_moe",
                                       "lfm2",
                                       "mimo_v2_flash",
                                       "glm_moe_dsa",
                                       "glm_moe_dsa_shared"};
/* The first NUM_KINDS have every kind of parameter; the others arrange the same parts otherwise. */
enum { NUM_FAMILIES = sizeof families / sizeof *families, NUM_KINDS = 21 };

/* Families with gated delta nets. */
__attribute__((unused)) static bool has_delta_nets(const char *family) {
    return strncmp(family, "qwen3_next", 10) == 0 || strncmp(family, "qwen3_5", 7) == 0;
}

/* Families with Mamba-2. */
__attribute__((unused)) static bool has_mamba(const char *family) {
    return strncmp(family, "nemotron_h", 10) == 0 || strcmp(family, "granitemoehybrid") == 0;
}

/* Families with these or short convolutions. */
__attribute__((unused)) static bool is_linear_family(const char *family) {
    return has_delta_nets(family) || has_mamba(family) || strcmp(family, "kimi_linear") == 0 ||
           strcmp(family, "lfm2") == 0;
}

/* Families with sparse attention. */
__attribute__((unused)) static bool has_indexer(const char *family) {
    return strcmp(family, "deepseek_v32") == 0 || strncmp(family, "glm_moe_dsa", 11) == 0;
}

/* Families whose indexer, of four heads, gives many keys equal scores: which of them are selected depends on the number
 * of keys, in transformers too, so that no text of a cache is the right one. */
__attribute__((unused)) static bool has_equal_scores(const char *family) {
    return strcmp(family, "deepseek_v32") == 0;
}

#endif
