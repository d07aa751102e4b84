/* role_keys.h: the keys of YAML files with roles, as ROLL, verl and Trinity-RFT write them: each one's meaning here. */
#ifndef MT_ROLE_KEYS_H
#define MT_ROLE_KEYS_H

#include <stdbool.h>
#include <stddef.h>

typedef enum mt_role_key_kind {
    MT_KEY_OPTION,  // sets the option `text`
    MT_KEY_SECTION, // a mapping whose keys are rows of the section `text`
    MT_KEY_FIXED,   // states a property, `text`, that always holds here: `values` are accepted
    MT_KEY_UNUSED,  // not used here: `text` is the engine that uses it, or the reason
    MT_KEY_REFUSED, // refused unless false or null; `text` is the reason
    MT_KEY_ADAPTER, // MT_KEY_SECTION of an adapter, which is off without `rank`; with it, `type` must be given
    MT_KEY_OTHERS,  // "*": another role's key, by `text`; its name, and those below it, are of the section `values`
    // An option, `text`, whose value follows from several keys
    MT_KEY_MODEL,        // a folder or ORG/NAME: --load; train also takes --finetune
    MT_KEY_FILES,        // files of samples, below dataset_dir where they are not found without
    MT_KEY_LENGTH,       // prompt_length + response_length, unless there is sequence_length
    MT_KEY_MINI_BATCH,   // prompts, times the responses of each
    MT_KEY_DUAL_CLIP,    // 1 + 2 x pg_clip if true
    MT_KEY_OFFLOAD,      // --param-offload, --grad-offload and --optimizer-offload
    MT_KEY_LOSS_COEF,    // 0 unless the section's use_kl_loss is true
    MT_KEY_REWARD_KL,    // the estimator of the divergence in rewards
    MT_KEY_LR_SHARE,     // as a share of the section's `lr`
    MT_KEY_ENABLED,      // as it is, if the section's `enable` is true
    MT_KEY_JSON,         // a section that is the option's text, in JSON
    MT_KEY_BETAS,        // two numbers: --adam-beta1 and --adam-beta2
    MT_KEY_STEPS,        // steps; as a share of all steps, below 1, the option of mt_share_option
    MT_KEY_ADDITIONAL,   // MT_KEY_SECTION, or the path of a JSON file with its keys
    MT_KEY_DOMAINS,      // shares of the domains of `rewards`, with their tags; one share is all
    MT_KEY_SHARES,       // shares of domains or files: refused unless there is one
    MT_KEY_DIST_PATH,    // a folder that is refused where it is named, unless use_dist_checkpointing is false
    MT_KEY_GEN_BATCH,    // fixed: must be train_batch_size
    MT_KEY_GROUP_LIMIT,  // fixed: a share of rewards that only groups with equal rewards of 0 or 1 pass
    MT_KEY_DEVICES,      // the devices of a role
    MT_KEY_ALGORITHM,    // Trinity-RFT's algorithm_type: the estimator of advantages, and the policy loss
    MT_KEY_DIVERGENCE,   // Trinity-RFT's estimator in the loss: none is none, but in that of preferences
    MT_KEY_KL_COEF,      // the weight of MT_KEY_DIVERGENCE, if there is one
    MT_KEY_PENALTY,      // Trinity-RFT's divergence in rewards, and its weight, where the trainer computes advantages
    MT_KEY_ENTROPY_COEF, // Trinity-RFT's weight of the entropy: refused in losses of files, unused where it has none
    MT_KEY_AGGREGATION,  // Trinity-RFT's loss_agg_mode, which must be that of policy_loss_fn_args, and of files
                         // token-mean
    MT_KEY_REWARD_NORM,  // ROLL's reward_norm: --norm-mean-type, and --norm-std-type unless reward_shift is true
    MT_KEY_TRAJECTORIES, // responses of environments, by their groups; else prompts
    MT_KEY_ESTIMATOR,    // ROLL's adv_estimator: with environments, rewards are compared by reward_normalization alone
    MT_KEY_GROUPING,     // of rewards: refused unless it is the prompt or the iteration, or rewards are not normalized
    MT_KEY_NORM_METHOD,  // --norm-mean-type, and --norm-std-type for mean_std, over the grouping
    MT_KEY_DYNAMIC,      // micro-batches by tokens: --variable-seq-lengths, or --sequence-packing of responses
    MT_KEY_TOKENS,       // the most of these on all context ranks
    MT_KEY_DISTILLATION, // MT_KEY_SECTION if its `enabled` is true, otherwise not used here
    MT_KEY_TEACHERS,     // verl's teacher_models: --teacher-load of one, --teachers of several
    MT_KEY_TEACHER_KEY,  // as it is, with several of these
    MT_KEY_DISTILL_COEF, // as it is, unless use_task_rewards is false
    MT_KEY_DISTILL_CLIP, // as it is, if use_policy_gradient is true
    MT_KEY_DISTILL_TOPK, // as it is, if loss_mode is forward_kl_topk
    MT_KEY_MTP,          // verl's multi-token prediction: each key counts where its part of `mtp` is enabled
    MT_KEY_EXPERIENCE,   // MT_KEY_SECTION where the role is fine-tuned on samples of files, otherwise not used here
    MT_KEY_FREEZE,       // --freeze-vision and --freeze-projector
    MT_KEY_STRATEGY      // the engine's section: that of `text` for Megatron, otherwise not used here
} mt_role_key_kind;

typedef struct mt_role_key {
    const char *section; // whose keys they are
    const char *names;   // with blanks between them; "*": all others
    mt_role_key_kind kind;
    const char *text;
    // MT_KEY_FIXED: "a|b". Otherwise values that have other names here, "theirs=ours|theirs=!reason to refuse", or are
    // another option that is true, "theirs=--option"; "*=" is any other, and a value without a name is the default.
    // NULL: as they are.
    const char *values;
    const char *roles;    // that the key is for, with blanks between them; "=": the role of the key's name; NULL: all
    const char *accepted; // values to accept without effect while the option does not exist, besides false
} mt_role_key;

/* The row of a key, first of those for the role, else of another role's; NULL: the key is unknown. For `role`
 * "rewards.NAME" the role is rewards. */
const mt_role_key *mt_role_key_find(const char *section, const char *name, const char *role);

/* True if the row is for the role. */
bool mt_role_key_applies(const mt_role_key *row, const char *name, const char *role);

/* True if the keys of a section that have no row are Megatron-LM's. */
bool mt_role_section_is_megatron(const char *section);

/* The key of a section with the nearest name, or of another section with this name; false if there is none. */
bool mt_role_key_nearest(char nearest[112], const char *section, const char *name);

/* The value that `text` has here, in `value`; false: refused, for the reason in `value`. */
bool mt_role_key_translate(const mt_role_key *row, const char *text, char *value, size_t room);

/* The stage of a training role: the first row of the role whose key the file has. */
typedef struct mt_role_stage {
    const char *role, *key; // NULL: any
    const char *stage;
} mt_role_stage;
extern const mt_role_stage mt_role_stages[]; // ends with a stage of NULL

/* The value of an absent key in a training role, where this program has another default. */
typedef struct mt_role_default {
    const char *root, *stage; // root: the section of the whole file; stage NULL: any
    const char *key, *option;
    const char *value;  // "=..." follows from other keys (role_config.c)
    const char *with;   // "option", not false, "option=value" or "key a.b", true, that the file must have; NULL: none
    const char *unless; // an option that the file must not set, but to false; NULL: none
} mt_role_default;
extern const mt_role_default mt_role_defaults[]; // ends with a root of NULL

#endif
