/* What can't be is refused with a status and a sentence, never by a crash. */
#include "test.h"

int main(void) {
    memfold_t memory = 0, gone;
    void *at, *other, *same;
    memfold_stats_t stats;

    REFUSED(memfold_create(NULL, &memory), INVALID, "null");
    REFUSED(memfold_create("limit=64M", NULL), INVALID, "null");
    REFUSED(memfold_create("", &memory), INVALID, "Give limit SIZE");
    REFUSED(memfold_create("limit", &memory), INVALID, "name=value");
    REFUSED(memfold_create("limit=1M", &memory), INVALID, "too small");
    REFUSED(memfold_create("limit=900T", &memory), INVALID, "more than the memory of this machine");
    REFUSED(memfold_create("limit=-1", &memory), INVALID, "not a size");
    REFUSED(memfold_create("limit=64M colour=red", &memory), INVALID, "not a setting");
    REFUSED(memfold_create("limit=64M delivery=gate", &memory), INVALID, "Use thread or signal");
    REFUSED(memfold_create("limit=64M codec=zip", &memory), INVALID, "zip");
    REFUSED(memfold_create("limit=64M swap=/no/such/directory", &memory), INVALID, "/no/such/directory");
    REFUSED(memfold_create("\xff", &memory), INVALID, "UTF-8");
    CHECK(memory == 0);
    REFUSED(memfold_map(0, 1, &at), INVALID, "no such memory");
    REFUSED(memfold_destroy(12345), INVALID, "no such memory");

    OK(memfold_create("limit=64M\nresident=32M", &memory));
    CHECK(memfold_last_error()[0] == 0);
    REFUSED(memfold_map(memory, 0, &at), INVALID, "at least 1 byte");
    REFUSED(memfold_map(memory, SIZE_MAX, &at), NO_MEMORY, "larger than the address space");
    REFUSED(memfold_map(memory, (size_t)1 << 50, &at), NO_MEMORY, "Reserving");
    REFUSED(memfold_map(memory, 1, NULL), INVALID, "null");

    OK(memfold_map(memory, 100000, &at));
    memset(at, 7, 100000);
    REFUSED(memfold_unmap(memory, (char *)at + 8), INVALID, "not allocated");
    REFUSED(memfold_unmap(memory, &memory), INVALID, "not allocated");
    REFUSED(memfold_unmap(memory, NULL), INVALID, "not allocated");
    REFUSED(memfold_fold(memory, at, (size_t)1 << 40), INVALID, "not allocated");
    REFUSED(memfold_fold(memory, at, SIZE_MAX), INVALID, "past the end");
    REFUSED(memfold_unpin(memory, at, 100), INVALID, "not allocated");
    REFUSED(memfold_resize(memory, at, 0, &other), INVALID, "at least 1 byte");
    REFUSED(memfold_resize(memory, at, SIZE_MAX, &other), NO_MEMORY, "larger");
    REFUSED(memfold_resize(memory, at, 5, NULL), INVALID, "null");
    REFUSED(memfold_stats(memory, NULL, sizeof stats), INVALID, "null");
    CHECK(((char *)at)[99999] == 7);

    /* Pins, hints and sizes as they are meant. */
    OK(memfold_pin(memory, at, 100000));
    OK(memfold_fold(memory, at, 100000));
    OK(memfold_stats(memory, &stats, sizeof stats));
    CHECK(stats.resident_bytes >= 100000 && stats.mapped_bytes == 131072);
    OK(memfold_unpin(memory, at, 100000));
    OK(memfold_cold(memory, at, 100000));
    OK(memfold_fold(memory, at, 100000));
    OK(memfold_prefetch(memory, at, 100000));
    memset(&stats, 0xff, sizeof stats);
    OK(memfold_stats(memory, &stats, sizeof stats.physical_bytes));
    CHECK(stats.physical_bytes != UINT64_MAX && stats.resident_bytes == UINT64_MAX);
    /* A program of a later version, whose struct is longer: what this one doesn't know is 0. */
    struct {
        memfold_stats_t known;
        uint64_t later[3], beyond;
    } longer;
    memset(&longer, 0xff, sizeof longer);
    OK(memfold_stats(memory, &longer.known, sizeof longer - sizeof longer.beyond));
    CHECK(longer.known.mapped_bytes == 131072 && longer.beyond == UINT64_MAX);
    for (int i = 0; i < 3; i++) CHECK(longer.later[i] == 0);
    OK(memfold_resize(memory, at, 10 << 20, &same));
    CHECK(((char *)same)[99999] == 7 && ((char *)same)[(10 << 20) - 1] == 0);
    OK(memfold_discard(memory, same, 4096));
    CHECK(((char *)same)[0] == 0 && ((char *)same)[4096] == 7);
    OK(memfold_unmap(memory, same));
    REFUSED(memfold_unmap(memory, same), INVALID, "freed");

    /* After its end a memory is refused, and its number is nobody else's. */
    gone = memory;
    OK(memfold_destroy(memory));
    OK(memfold_create("limit=64M", &memory));
    CHECK(memory != gone);
    REFUSED(memfold_destroy(gone), INVALID, "destroyed");
    REFUSED(memfold_map(gone, 1, &at), INVALID, "destroyed");
    REFUSED(memfold_stats(gone, &stats, sizeof stats), INVALID, "destroyed");
    OK(memfold_destroy(memory));
    CHECK(memfold_version()[0] != 0);
    return 0;
}
