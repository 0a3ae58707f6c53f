// A std::vector whose elements lie in folded memory.
//
//   c++ -std=c++17 vector.cc $(pkg-config --cflags --libs memfold) -o vector && ./vector
#include <memfold.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <new>
#include <numeric>
#include <stdexcept>
#include <vector>

/// Allocates from a memory, which must live longer than what is allocated.
template <class T>
class FoldedAllocator {
public:
    using value_type = T;

    explicit FoldedAllocator(memfold_t memory) : memory_(memory) {}
    template <class U>
    FoldedAllocator(const FoldedAllocator<U> &other) : memory_(other.memory()) {}

    T *allocate(std::size_t count) {
        if (count > std::numeric_limits<std::size_t>::max() / sizeof(T)) throw std::bad_array_new_length();
        void *at;
        if (memfold_map(memory_, std::max<std::size_t>(count * sizeof(T), 1), &at) != MEMFOLD_STATUS_OK)
            throw std::bad_alloc();
        return static_cast<T *>(at);
    }
    void deallocate(T *at, std::size_t) { memfold_unmap(memory_, at); }
    memfold_t memory() const { return memory_; }

private:
    memfold_t memory_;
};
template <class T, class U>
bool operator==(const FoldedAllocator<T> &a, const FoldedAllocator<U> &b) {
    return a.memory() == b.memory();
}
template <class T, class U>
bool operator!=(const FoldedAllocator<T> &a, const FoldedAllocator<U> &b) {
    return !(a == b);
}

int main() {
    memfold_t memory;
    if (memfold_create("limit=64M", &memory) != MEMFOLD_STATUS_OK) throw std::runtime_error(memfold_last_error());
    long long sum = 0;
    {
        std::vector<int, FoldedAllocator<int>> numbers{FoldedAllocator<int>(memory)};
        for (int i = 0; i < 20'000'000; i++) numbers.push_back(i / 100);
        std::reverse(numbers.begin(), numbers.end());
        std::sort(numbers.begin(), numbers.end());
        sum = std::accumulate(numbers.begin(), numbers.end(), 0LL);
    }
    std::printf("sum %lld\n", sum);
    return memfold_destroy(memory) != MEMFOLD_STATUS_OK || sum != 1999990000000LL;
}
