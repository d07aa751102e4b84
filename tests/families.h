/* families.h: the folders of tests/golden/hf: tiny models with reference outputs of Hugging Face transformers. */
#ifndef MT_TEST_FAMILIES_H
#define MT_TEST_FAMILIES_H

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
                                       "gpt_oss"};
enum { NUM_FAMILIES = sizeof families / sizeof *families };

#endif
