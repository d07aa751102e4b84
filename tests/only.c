/* only.c: chooses one test of a suite, or some. In every suite in C: with MT_ONLY, `make test ONLY=...`, cmocka runs
 * the tests whose names match it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

__attribute__((constructor)) static void choose(void) {
    const char *only = getenv("MT_ONLY");
    if (only && *only) cmocka_set_test_filter(only);
}
