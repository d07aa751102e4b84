/* Any bytes as a YAML file of options or of roles: read or refused, and never past the validator with a value out of
 * range. */
#include "../data/options/option_help.h"
#include "../data/options/option_rules.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/run_options.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The same bytes as a file of roles. */
static void read_role(const char *role, const char *text, int64_t bytes) {
    mt_run_options options;
    mt_error error;
    mt_options_default(&options);
    if (mt_options_read_role(&options, MT_PROGRAM_TRAIN, role, text, bytes, "run.yaml", &error) == 0) {
        FILE *file = fopen("/dev/null", "w");
        if (!file) abort();
        if (options.config_keys.count % 4 != 0) abort();
        mt_options_print_config(&options, MT_PROGRAM_TRAIN, 1, NULL, file);
        (void)fclose(file);
        (void)mt_options_finish(&options, MT_PROGRAM_TRAIN, 4, &error);
    }
    mt_options_free(&options);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const roles[] = {"sft_train", "actor_train", "reference", "student", "critic", "rewards.rule"};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) read_role(roles[i], (const char *)data, (int64_t)size);
    mt_run_options options;
    mt_error error;
    mt_options_default(&options);
    if (mt_options_read_yaml(&options, MT_PROGRAM_TRAIN, (const char *)data, (int64_t)size, "run.yaml", &error) == 0 &&
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) == 0) {
        if (options.stack.num_layers < 1 || options.stack.global_batch_size % options.stack.micro_batch_size != 0)
            abort();
        if (options.stack.num_iterations < 1 || mt_global_batch_size(&options, 0) < 1) abort();
        if (!(mt_learning_rate(&options.stack, 0) <= options.stack.lr) || !(mt_weight_decay(&options.stack, 0) >= 0))
            abort();
    }
    mt_options_free(&options);
    return 0;
}
