/* Any bytes as config.json: read or refused, and what is read can be written and read again. */
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/models/hf_config.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/report.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mt_run_options options, again;
    mt_error error;
    mt_options_default(&options);
    mt_options_default(&again);
    if (mt_options_read_hf_config(&options, (const char *)data, (int64_t)size, "config.json", &error) == 0) {
        options.mock_data = true;
        options.stack.seq_length = options.stack.train_iters = 1;
        options.stack.lr = 1;
        if (mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) == 0) {
            char *text = mt_options_write_hf_config(&options);
            if (mt_options_read_hf_config(&again, text, (int64_t)strlen(text), "written", &error)) abort();
            again.mock_data = true;
            again.stack.seq_length = again.stack.train_iters = 1;
            again.stack.lr = 1;
            if (mt_options_finish(&again, MT_PROGRAM_TRAIN, 1, &error)) abort();
            if (options.stack.hf_family != again.stack.hf_family) abort();
            if (mt_flops(&options.stack, 1) != mt_flops(&again.stack, 1)) abort();
            free(text);
        }
    }
    mt_options_free(&options);
    mt_options_free(&again);
    return 0;
}
