// A std::pmr::memory_resource of folded memory, under a pool for small pieces.
//
//   c++ -std=c++20 resource.cc $(pkg-config --cflags --libs memfold) -o resource && ./resource
#include <memfold.h>

#include <cstdio>
#include <map>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>

/// Folded memory as a resource. It ends with all that is allocated in it.
class FoldedResource : public std::pmr::memory_resource {
public:
    explicit FoldedResource(const char *settings) {
        if (memfold_create(settings, &memory_) != MEMFOLD_STATUS_OK) throw std::runtime_error(memfold_last_error());
    }
    ~FoldedResource() override { memfold_destroy(memory_); }
    FoldedResource(const FoldedResource &) = delete;
    FoldedResource &operator=(const FoldedResource &) = delete;

    memfold_stats_t stats() const {
        memfold_stats_t stats{};
        memfold_stats(memory_, &stats, sizeof stats);
        return stats;
    }

private:
    void *do_allocate(std::size_t bytes, std::size_t alignment) override {
        void *at;
        if (alignment > 65536 || memfold_map(memory_, bytes ? bytes : 1, &at) != MEMFOLD_STATUS_OK) throw std::bad_alloc();
        return at;
    }
    void do_deallocate(void *at, std::size_t, std::size_t) override { memfold_unmap(memory_, at); }
    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override { return this == &other; }

    memfold_t memory_ = 0;
};

int main() {
    FoldedResource folded("limit=48M codec=zstd");
    // Every piece of folded memory takes whole pages: small ones come from large chunks of it.
    std::pmr::unsynchronized_pool_resource pool({.max_blocks_per_chunk = 1 << 16, .largest_required_pool_block = 1 << 12}, &folded);
    std::pmr::map<long, std::pmr::string> names(&pool);
    for (long i = 0; i < 800'000; i++) names[i] = "the name of the entry with the number " + std::to_string(i);
    std::size_t bytes = 0;
    for (const auto &[number, name] : names) bytes += name.size() + (name.back() != '0' + number % 10);
    const auto stats = folded.stats();
    std::printf("%zu bytes of names; %llu MiB folded\n", bytes, (unsigned long long)(stats.folded_bytes >> 20));
    return bytes != 800'000u * 38 + 4'688'890 || stats.folded_bytes == 0;
}
