/* Fuzzes the safetensors reader: it refuses any bytes with one line, or returns tensors that can be read whole. */
#include "../data/base/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mt_safetensors *file;
    mt_error error = {{0}};
    volatile unsigned sum = 0; // keeps the compiler from removing the reads
    if (mt_safetensors_open_memory(&file, data, (int64_t)size, "input", &error) != 0) {
        if (!error.text[0] || strchr(error.text, '\n')) abort();
        return 0;
    }
    int64_t total = 0;
    for (int64_t i = 0; i < mt_safetensors_count(file); i++) {
        const mt_tensor_info *tensor = mt_safetensors_get(file, i);
        const uint8_t *bytes = tensor->data;
        total += tensor->bytes;
        if (tensor->bytes > 0) sum += bytes[0] + bytes[tensor->bytes - 1];
        if (mt_safetensors_find(file, tensor->name) != tensor) abort();
    }
    if (total > (int64_t)size) abort();
    (void)sum;
    mt_safetensors_close(file);
    return 0;
}
