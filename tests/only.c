/* only.c: chooses tests of a suite. In every suite in C: with MT_ONLY, `make test ONLY=...`, cmocka runs the tests
 * whose names match it; else with MT_BRIEF, `make test SECTIONS=...`, all but the long one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

/* A suite with a test that takes longer than the others together defines its name, or a pattern. */
extern const char long_test[] __attribute__((weak));

__attribute__((constructor)) static void choose(void) {
    const char *only = getenv("MT_ONLY"), *brief = getenv("MT_BRIEF");
    if (only && *only)
        cmocka_set_test_filter(only);
    else if (brief && *brief && long_test)
        cmocka_set_skip_filter(long_test);
}
