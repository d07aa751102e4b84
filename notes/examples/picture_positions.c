/* Where the tokens of a picture stand: the coordinates that a server gives to a text with a picture, and what rotary
 * positions make of them:
 *
 *   make everything && build/default/notes/examples/picture_positions
 *
 * The table has a column for each token: T of text, P of the picture. Below it is the score of a query and a key of
 * ones after their rotation, for pairs of tokens: it depends on the differences of the three coordinates alone. Chapter
 * 33 derives it.
 */
#include "megatron.h"

#include <math.h>
#include <stdlib.h>

enum { BEFORE = 3, HEIGHT = 2, WIDTH = 3, PICTURE = HEIGHT * WIDTH, BEHIND = 3, T = BEFORE + PICTURE + BEHIND };
enum { PAIRS = 8, SECTIONS = 3 };
static const int section[SECTIONS] = {2, 3, 3}; // pairs of channels that rotate by frame, row and column

static double score(const int32_t *a, const int32_t *b) {
    double sum = 0;
    for (int pair = 0; pair < PAIRS; pair++) {
        int which = pair < section[0] ? 0 : pair < section[0] + section[1] ? 1 : 2;
        double frequency = pow(10000, -(double)pair / PAIRS);
        double angle = a[which] * frequency, other = b[which] * frequency;
        // the query (1, 1) and the key (1, 1) of the pair, each rotated
        double q[2] = {cos(angle) - sin(angle), sin(angle) + cos(angle)};
        double k[2] = {cos(other) - sin(other), sin(other) + cos(other)};
        sum += q[0] * k[0] + q[1] * k[1];
    }
    return sum;
}

static void print_row(const char *name, const int32_t *coordinates, int which) {
    printf("%-7s", name);
    for (int t = 0; t < T; t++) printf(" %3d", (int)coordinates[3 * t + which]);
    printf("\n");
}

int main(void) {
    mt_batcher_plan plan = {.max_sequences = 1, .max_length = T + 1, .max_tokens = T, .page_rows = T + 1};
    plan.num_pages = 1, plan.max_image_tokens = PICTURE, plan.merge_size = 2;
    int32_t tokens[T + 1] = {0};
    mt_sequence_image image = {.first = BEFORE, .grid = {2 * HEIGHT, 2 * WIDTH}};
    mt_sequence_images images = {.count = 1, .items = &image};
    mt_sequence text = {.tokens = tokens, .num_prompt = T, .num_tokens = T, .max_tokens = T + 1, .slot = -1};
    text.images = &images;
    mt_batcher *batcher = mt_batcher_create(&plan);
    MT_CHECK(mt_batcher_next(batcher, &text, 1) == T);
    const int32_t *at = batcher->batch.image_rows.coordinates;
    printf("token  ");
    for (int t = 0; t < T; t++) printf(" %3s", t < BEFORE || t >= BEFORE + PICTURE ? "T" : "P");
    printf("\n");
    print_row("frame", at, 0), print_row("row", at, 1), print_row("column", at, 2);

    int first = BEFORE, last = T - 1;
    double here = score(at + 3 * first, at + 3 * (first + WIDTH)),
           next = score(at + 3 * (first + 1), at + 3 * (first + 1 + WIDTH));
    double text_pair = score(at, at + 3), later = score(at + 3 * (last - 1), at + 3 * last);
    printf("a patch and the one below it: %.3f, and beside them %.3f\n", here, next);
    printf("neighbours of the text before the picture: %.3f, and behind it %.3f\n", text_pair, later);
    bool equal = fabs(here - next) < 1e-9 && fabs(text_pair - later) < 1e-9;
    printf("scores depend on differences alone: %s\n", equal ? "ok" : "FAILED");
    mt_batcher_destroy(batcher);
    return equal ? 0 : 1;
}
