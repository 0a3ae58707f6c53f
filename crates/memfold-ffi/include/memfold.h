#ifndef MEMFOLD_H
#define MEMFOLD_H
#include <stddef.h>
#include <stdint.h>
typedef uint64_t memfold_t;
typedef enum memfold_status { MEMFOLD_STATUS_OK=0, MEMFOLD_STATUS_INVALID=1, MEMFOLD_STATUS_NO_MEMORY=2, MEMFOLD_STATUS_NO_PERMISSION=3, MEMFOLD_STATUS_FORKED=4, MEMFOLD_STATUS_SYSTEM=5 } memfold_status;
typedef struct memfold_stats_t { uint64_t physical_bytes, resident_bytes, frame_bytes, pool_bytes, index_bytes, folded_bytes, swap_bytes, mapped_bytes, faults, loads, over_limit; } memfold_stats_t;
#ifdef __cplusplus
extern "C" {
#endif
memfold_status memfold_create(const char *settings, memfold_t *memory);
memfold_status memfold_destroy(memfold_t memory);
memfold_status memfold_map(memfold_t memory, size_t len, void **address);
memfold_status memfold_unmap(memfold_t memory, void *address);
memfold_status memfold_resize(memfold_t memory, void *address, size_t len, void **moved);
memfold_status memfold_fold(memfold_t memory, const void *address, size_t len);
memfold_status memfold_cold(memfold_t memory, const void *address, size_t len);
memfold_status memfold_prefetch(memfold_t memory, const void *address, size_t len);
memfold_status memfold_pin(memfold_t memory, const void *address, size_t len);
memfold_status memfold_unpin(memfold_t memory, const void *address, size_t len);
memfold_status memfold_discard(memfold_t memory, void *address, size_t len);
memfold_status memfold_stats(memfold_t memory, memfold_stats_t *stats, size_t size);
const char *memfold_last_error(void);
const char *memfold_version(void);
#ifdef __cplusplus
}
#endif
#endif
