/* What each page holds, kept apart from the pages: 20 bytes for each. A page's bytes follow from
 * its content alone, not from its place, so contents can be copied and moved. */
#include "common.h"

enum {
    /* Threads that own memory. Each changes only its own. */
    OWNERS = 4,
    /* Slot 0 is one region for all: its pages belong to the owners by turns. */
    SLOTS = 4,
    MOST = 6144,
};

enum kind { ZEROS, NOISE, QUARTER, REPEATS, ALIKE, LETTERS, KINDS };

/* Why a page isn't as others are. */
enum {
    NO_ACCESS = 1,
    READ_ONLY = 2,
    GUARDED = 4,
    /* It is being changed to what the model can't say. */
    UNKNOWN = 8,
    /* MADV_FREE: it has its content, or zeros, until it is written. */
    LAZY = 16,
    WIPED_IN_CHILD = 32,
    NOT_IN_CHILD = 64,
};

struct content {
    uint32_t seed;
    /* A word that was changed after the page was filled. 0: none. */
    uint16_t poked;
    uint16_t kind;
};

/* While its owner changes a page, each word is that of `now` or of `next`. */
struct page {
    struct content now, next;
    uint32_t flags;
};

struct region {
    char *at;
    size_t pages;
    /* The seed of the file that it maps privately. 0: it maps none. */
    uint32_t file_seed;
    /* Its pages once had different rights or advice, so it may be several mappings. */
    int is_cut;
    /* A call is changing it. A child that is copied meanwhile can't know how it is. */
    int is_changing;
    struct page *page;
};

static struct page page_table[OWNERS][SLOTS][MOST];
static struct region region_table[OWNERS][SLOTS];
static __thread unsigned me;
static uint32_t next_seed[OWNERS];

/* How many forks are between `main` and this process. */
static int depth;

/* No other thread of this process changes memory. */
static int is_alone;

static uint32_t new_seed(void) { return next_seed[me] += OWNERS; }

static uint64_t key_of(struct content c) { return mix(c.seed * 0x100000001ul + c.kind); }

static inline uint64_t filled_word(unsigned kind, uint64_t key, unsigned w) {
    switch (kind) {
    case NOISE: return mix(key + w);
    case QUARTER: return word(key, w);
    case REPEATS: return key ^ (w & 3);
    case ALIKE: return w % 64 == key % 64 ? key : mix(w);
    case LETTERS: return (mix(key + w) & 0x0707070707070707ul) | 0x6060606060606060ul;
    default: return 0;
    }
}

static inline uint64_t poked_word(struct content c) { return mix(~key_of(c) + c.poked); }

static inline uint64_t word_of(struct content c, uint64_t key, unsigned w) {
    return c.poked && w == c.poked ? poked_word(c) : filled_word(c.kind, key, w);
}

static void store(struct content *to, struct content c) {
    uint64_t bytes;
    memcpy(&bytes, &c, sizeof bytes);
    __atomic_store_n((uint64_t *)to, bytes, __ATOMIC_RELEASE);
}

static struct region *region_of(unsigned slot) { return &region_table[slot % SLOTS ? me : 0][slot % SLOTS]; }

static char *bytes_of(const struct region *r, size_t p) { return r->at + p * PAGE; }

static void wrong(const struct region *r, size_t p, unsigned w, uint64_t found, struct content c) {
    char text[320];
    int n = snprintf(text, sizeof text,
                     "WRONG: pid %d owner %u page %lu of %lu at %p word %u: %lx, not %lx (kind %u seed %u poked %u)\n", getpid(), me,
                     (unsigned long)p, (unsigned long)r->pages, (void *)bytes_of(r, p), w, (unsigned long)found,
                     (unsigned long)word_of(c, key_of(c), w), c.kind, c.seed, c.poked);
    (void)!write(2, text, n);
    _exit(98);
}

static int is_readable(const struct page *page) { return !(page->flags & (NO_ACCESS | GUARDED | UNKNOWN)); }
static int is_writable(const struct page *page) { return !(page->flags & (NO_ACCESS | GUARDED | UNKNOWN | READ_ONLY)); }

/* Returns whether each word is 0. */
static int is_zero(const uint64_t *at) {
    for (unsigned w = 0; w < PAGE / 8; w++)
        if (at[w]) return 0;
    return 1;
}

static void check_page(struct region *r, size_t p) {
    struct page *page = &r->page[p];
    const uint64_t *at = (const uint64_t *)bytes_of(r, p);
    uint64_t key = key_of(page->now);
    if (!is_readable(page)) return;
    if ((page->flags & LAZY) && is_zero(at)) return;
    for (unsigned w = 0; w < PAGE / 8; w++)
        if (at[w] != word_of(page->now, key, w)) wrong(r, p, w, at[w], page->now);
}

/* Checks a page of another owner, whose thread was copied while it perhaps changed that page. */
static void check_torn_page(struct region *r, size_t p) {
    struct page *page = &r->page[p];
    const uint64_t *at = (const uint64_t *)bytes_of(r, p);
    struct content now = page->now, next = page->next;
    uint64_t key = key_of(now), next_key = key_of(next);
    if (!is_readable(page)) return;
    if ((page->flags & LAZY) && is_zero(at)) return;
    for (unsigned w = 0; w < PAGE / 8; w++)
        if (at[w] != word_of(now, key, w) && at[w] != word_of(next, next_key, w)) wrong(r, p, w, at[w], now);
}

static void begin_change(struct page *page, struct content next) { store(&page->next, next); }
static void end_change(struct page *page) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    page->flags &= ~LAZY;
    store(&page->now, page->next);
}

static void fill_page(struct region *r, size_t p, enum kind kind) {
    struct page *page = &r->page[p];
    uint64_t *to = (uint64_t *)bytes_of(r, p);
    struct content next = {.seed = new_seed(), .kind = kind};
    uint64_t key = key_of(next);
    if (!is_writable(page)) return;
    begin_change(page, next);
    for (unsigned w = 0; w < PAGE / 8; w++) to[w] = filled_word(kind, key, w);
    end_change(page);
}

/* Changes one word. A page that may be zeros or not is filled instead. */
static void poke_page(struct region *r, size_t p) {
    struct page *page = &r->page[p];
    uint64_t *to = (uint64_t *)bytes_of(r, p);
    struct content next = page->now;
    if (!is_writable(page)) return;
    if (page->flags & LAZY) return fill_page(r, p, QUARTER);
    next.poked = 1 + mix(new_seed()) % (PAGE / 8 - 1);
    begin_change(page, next);
    if (page->now.poked) to[page->now.poked] = filled_word(next.kind, key_of(next), page->now.poked);
    to[next.poked] = poked_word(next);
    end_change(page);
}

/* Pages of a region that this thread owns, in order or scattered. */
struct range {
    struct region *region;
    size_t first, count, own, step, offset;
    int is_scattered;
};

static struct range range(unsigned slot, size_t first, size_t count, int is_scattered) {
    struct region *r = region_of(slot);
    int is_mixed = slot % SLOTS == 0 && !is_alone;
    struct range it = {.region = r, .first = first, .is_scattered = is_scattered, .step = is_mixed ? OWNERS : 1, .offset = is_mixed ? me : 0};
    it.own = r->pages / it.step;
    it.count = it.own ? (count < it.own ? count : it.own) : 0;
    return it;
}

static size_t page_of(const struct range *it, size_t i) {
    size_t n = it->is_scattered ? mix(it->first + i) : it->first + i;
    return n % it->own * it->step + it->offset;
}

static uint64_t sum_of(const struct region *r) {
    uint64_t sum = mix(r->pages + r->file_seed);
    for (size_t p = 0; p < r->pages; p++)
        sum = mix(sum ^ r->page[p].now.seed ^ (uint64_t)r->page[p].now.kind << 32 ^ (uint64_t)r->page[p].now.poked << 40 ^
                  (uint64_t)r->page[p].flags << 52);
    return sum;
}
