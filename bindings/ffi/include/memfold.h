/* memfold: compressed memory in user space. Link with `pkg-config --cflags --libs memfold`.
 *
 * Every function may be called from any thread, and answers with a status; memfold_last_error() says what was wrong.
 * In a child of fork, memory of the parent is not there: a touch is a SIGSEGV, and calls answer MEMFOLD_STATUS_FORKED.
 * Made of bindings/ffi/src: change that.
 */

#ifndef MEMFOLD_H
#define MEMFOLD_H

#include <stddef.h>
#include <stdint.h>
/* A memory: a number that is never given twice; 0 is none. */
typedef uint64_t memfold_t;


/*
 Status of a call. `memfold_last_error` has the sentence.
 */
typedef enum memfold_status {
  /*
   The call succeeded.
   */
  MEMFOLD_STATUS_OK = 0,
  /*
   An argument or a setting is wrong; or the memory was unmapped or destroyed before.
   */
  MEMFOLD_STATUS_INVALID = 1,
  /*
   No memory or address space is left.
   */
  MEMFOLD_STATUS_NO_MEMORY = 2,
  /*
   The system does not let this user have a userfaultfd.
   */
  MEMFOLD_STATUS_NO_PERMISSION = 3,
  /*
   This is a child of fork; mapped memory stays with its parent.
   */
  MEMFOLD_STATUS_FORKED = 4,
  /*
   The system refused something else.
   */
  MEMFOLD_STATUS_SYSTEM = 5,
} memfold_status;

/*
 Memory use of a memory in bytes, and counts since it was created.
 */
typedef struct memfold_stats_t {
  /*
   All physical memory: resident, frames, pool and index.
   */
  uint64_t physical_bytes;
  /*
   Mapped memory that is resident, uncompressed.
   */
  uint64_t resident_bytes;
  /*
   Uncompressed pages that are being evicted or loaded.
   */
  uint64_t frame_bytes;
  /*
   Memory of compressed data.
   */
  uint64_t pool_bytes;
  /*
   Memory of the index and other metadata.
   */
  uint64_t index_bytes;
  /*
   Mapped memory that is only compressed (or in the swap file), before compression.
   */
  uint64_t folded_bytes;
  /*
   Space used in the swap file.
   */
  uint64_t swap_bytes;
  /*
   Address space of mapped memory.
   */
  uint64_t mapped_bytes;
  /*
   Page faults: touches of memory that was not resident.
   */
  uint64_t faults;
  /*
   Page faults that loaded folded memory.
   */
  uint64_t loads;
  /*
   Times that the limit was exceeded, because nothing more could be folded.
   */
  uint64_t over_limit;
} memfold_stats_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Creates a memory with its threads. `settings` are flags of `memfold run` with their values,
 separated by spaces or line ends: "limit=2G codec=zstd swap=/var/tmp". Give at least limit or
 resident. delivery=signal needs no permission, but system calls may use the memory only while it
 is pinned. It is the default for a user without that permission, with a warning on stderr.
 delivery=gate is unavailable here; it is for `memfold run` and Python.
 */
enum memfold_status memfold_create(const char *settings, memfold_t *memory);

/*
 Destroys a memory, and everything that is mapped in it.
 */
enum memfold_status memfold_destroy(memfold_t memory);

/*
 Maps `len` bytes of zeros at a multiple of 64 KiB. They take no memory until they are touched.
 */
enum memfold_status memfold_map(memfold_t memory, size_t len, void **address);

/*
 Unmaps what `memfold_map` or `memfold_resize` returned. It may not be used any more.
 */
enum memfold_status memfold_unmap(memfold_t memory, void *address);

/*
 Changes the length of the mapping at `address` to `len` bytes. `moved` receives its address,
 which may be another one. Contents that fit are kept. On failure nothing changes.
 */
enum memfold_status memfold_resize(memfold_t memory, void *address, size_t len, void **moved);

/*
 Folds the pages wholly inside a range now.
 */
enum memfold_status memfold_fold(memfold_t memory, const void *address, size_t len);

/*
 Makes the pages of a range the first to be folded when memory is needed.
 */
enum memfold_status memfold_cold(memfold_t memory, const void *address, size_t len);

/*
 Loads the folded pages of a range.
 */
enum memfold_status memfold_prefetch(memfold_t memory, const void *address, size_t len);

/*
 Loads a range and keeps it resident until `memfold_unpin` with the same range, or until it is
 unmapped. Pins nest.
 */
enum memfold_status memfold_pin(memfold_t memory, const void *address, size_t len);

/*
 Ends one pin.
 */
enum memfold_status memfold_unpin(memfold_t memory, const void *address, size_t len);

/*
 Drops the contents of the pages wholly inside a range: they read as zeros. No other thread may
 use them meanwhile.
 */
enum memfold_status memfold_discard(memfold_t memory, void *address, size_t len);

/*
 Writes the counters of a memory. `size` is sizeof *stats: a later version of the struct has more
 fields at its end, which an older library sets to 0.
 */
enum memfold_status memfold_stats(memfold_t memory, struct memfold_stats_t *stats, size_t size);

/*
 Returns why the calling thread's last call failed, as a sentence; empty after a success. Valid
 until the thread's next call.
 */
const char *memfold_last_error(void);

/*
 Returns the version, such as "0.1.0".
 */
const char *memfold_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MEMFOLD_H */
