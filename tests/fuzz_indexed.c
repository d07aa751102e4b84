/* fuzz_indexed.c: the .idx parser on arbitrary bytes. The first eight bytes are the size of the .bin; every sequence of
 * an accepted index must lie inside it. */
#include "data/datasets/dataset.h"
#include "data/datasets/indexed_dataset.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int64_t bin_size;
    mt_indexed_index index;
    mt_error error;
    if (size < sizeof bin_size) return 0;
    memcpy(&bin_size, data, sizeof bin_size);
    bin_size &= INT64_MAX;
    if (mt_indexed_index_parse(&index, data + 8, (int64_t)size - 8, bin_size, "fuzz.idx", &error) != 0) {
        MT_CHECK(error.text[0] != '\0' && !strchr(error.text, '\n'));
        return 0;
    }
    MT_CHECK(index.num_documents >= 0);
    for (int64_t i = 0; i < index.num_sequences; i++) {
        int32_t length;
        int64_t offset;
        memcpy(&length, index.lengths + i * 4, 4);
        memcpy(&offset, index.offsets + i * 8, 8);
        MT_CHECK(length >= 0 && offset >= 0 && offset <= bin_size - length);
    }
    return 0;
}
