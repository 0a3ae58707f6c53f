/* memfold: compressed memory in user space. Link with `pkg-config --cflags --libs memfold`.
 *
 * Every function may be called from any thread, and answers with a status; memfold_last_error() says what was wrong.
 * In a child of fork, memory of the parent is not there: a touch is a SIGSEGV, and calls answer MEMFOLD_STATUS_FORKED.
 * Made of crates/memfold-ffi/src: change that.
 */

#ifndef MEMFOLD_H
#define MEMFOLD_H

#include <stddef.h>
#include <stdint.h>
/* A memory: a number that is never given twice; 0 is none. */
typedef uint64_t memfold_t;


/*
 What a call answers. `memfold_last_error` has the sentence.
 */
typedef enum memfold_status {
  /*
   It is done.
   */
  MEMFOLD_STATUS_OK = 0,
  /*
   An argument is wrong, or a setting: also what was unmapped or destroyed before.
   */
  MEMFOLD_STATUS_INVALID = 1,
  /*
   No memory or address space.
   */
  MEMFOLD_STATUS_NO_MEMORY = 2,
  /*
   The system gives this user no userfaultfd.
   */
  MEMFOLD_STATUS_NO_PERMISSION = 3,
  /*
   This is a child of fork: what is mapped stays with its parent.
   */
  MEMFOLD_STATUS_FORKED = 4,
  /*
   The system refused something else.
   */
  MEMFOLD_STATUS_SYSTEM = 5,
} memfold_status;

/*
 What a memory holds and has done: bytes, and counts since it was created.
 */
typedef struct memfold_stats_t {
  /*
   What it uses: resident, frames, pool and index.
   */
  uint64_t physical_bytes;
  /*
   Of what is mapped, uncompressed in memory.
   */
  uint64_t resident_bytes;
  /*
   Uncompressed, on its way in or out.
   */
  uint64_t frame_bytes;
  /*
   What the compressed data takes.
   */
  uint64_t pool_bytes;
  /*
   What knowing where everything is takes.
   */
  uint64_t index_bytes;
  /*
   Of what is mapped, only compressed (or in the swap file), before compression.
   */
  uint64_t folded_bytes;
  /*
   In the swap file.
   */
  uint64_t swap_bytes;
  /*
   Address space of what is mapped.
   */
  uint64_t mapped_bytes;
  /*
   Touches of memory that was not there.
   */
  uint64_t faults;
  /*
   Of these, touches of what was folded.
   */
  uint64_t loads;
  /*
   Times the limit could not be kept, as nothing more could be folded.
   */
  uint64_t over_limit;
} memfold_stats_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Creates a memory with its threads. `settings` are flags of `memfold run` with their values,
 separated by spaces or line ends: "limit=2G codec=zstd swap=/var/tmp". Give at least a limit, or
 resident. With delivery=signal no permission is needed, but memory may be given to system calls
 only while it is pinned. delivery=gate can't be had from here: it serves programs under
 `memfold run` and Python.
 */
enum memfold_status memfold_create(const char *settings, memfold_t *memory);

/*
 Ends a memory, and all that is mapped in it.
 */
enum memfold_status memfold_destroy(memfold_t memory);

/*
 Maps `len` bytes of zeros, which take no memory until they are touched, at a multiple of 64 KiB.
 */
enum memfold_status memfold_map(memfold_t memory, size_t len, void **address);

/*
 Unmaps what `memfold_map` or `memfold_resize` gave at `address`. Nobody may use it any more.
 */
enum memfold_status memfold_unmap(memfold_t memory, void *address);

/*
 Makes what is mapped at `address` hold `len` bytes, there or elsewhere: `moved` is where. What
 fits is kept. On failure it is as before.
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
 Loads what is folded of a range.
 */
enum memfold_status memfold_prefetch(memfold_t memory, const void *address, size_t len);

/*
 Loads a range and keeps it in memory until `memfold_unpin` with the same range, or until it is
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
 What a memory holds and has done. `size` is sizeof *stats: a later version of the struct has
 more fields at its end, which an older library sets to 0.
 */
enum memfold_status memfold_stats(memfold_t memory, struct memfold_stats_t *stats, size_t size);

/*
 Why the calling thread's last call failed, in a sentence; empty after one that didn't. Good
 until the thread's next call.
 */
const char *memfold_last_error(void);

/*
 The version, as "0.1.0".
 */
const char *memfold_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MEMFOLD_H */
