/* What the tests here have in common. */
#include <memfold.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(holds) \
    ((holds) ? (void)0 : (fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #holds), exit(1)))

#define OK(call) \
    ((call) == MEMFOLD_STATUS_OK ? (void)0 \
                                 : (fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, memfold_last_error()), exit(1)))

/* The call answers with a status, and a sentence that has these words. */
#define REFUSED(call, kind, words)                    \
    do {                                              \
        CHECK((call) == MEMFOLD_STATUS_##kind);       \
        CHECK(strstr(memfold_last_error(), (words))); \
    } while (0)
