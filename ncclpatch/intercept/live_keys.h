// The keys that cards know today, with the memory that each is good for: where a thread that posts a request finds, without a
// lock, that nothing about it has changed.
//
// An entry may be replaced while it is read, so it has a version, which is odd meanwhile and another one afterwards. Then, and
// where a key has found no place, the answer is that the key is not known, and the reader asks elsewhere.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace amem::intercept {

class LiveKeys {
 public:
  constexpr LiveKeys() = default;

  struct Key {
    std::uint32_t key = 0;
    const void* domain = nullptr;
    std::uint64_t begin = 0, end = 0;
  };
  // One thread at a time.
  void Add(const Key& key) {
    for (Entry& entry : SetOf(key.key))
      if (entry.end.load(std::memory_order_relaxed) == 0) return entry.Write(key);
  }
  void Remove(std::uint32_t key, const void* domain) {
    for (Entry& entry : SetOf(key))
      if (entry.Is(key, domain)) entry.Write({});
  }

  // Any thread. Whether the key is good for all of that memory.
  [[nodiscard]] bool Cover(std::uint32_t key, const void* domain, std::uint64_t address, std::uint64_t bytes) const {
    for (const Entry& entry : sets_[PlaceOf(key)]) {
      const std::uint32_t version = entry.version.load(std::memory_order_acquire);
      if (!entry.Is(key, domain)) continue;
      const std::uint64_t begin = entry.begin.load(std::memory_order_acquire), end = entry.end.load(std::memory_order_acquire);
      if (version % 2 == 0 && entry.version.load(std::memory_order_relaxed) == version)
        return begin <= address && address + bytes <= end;
    }
    return false;
  }

 private:
  // The writer's stores release and the reader's loads acquire, so whoever reads a new field sees the odd version, too.
  struct Entry {
    std::atomic<std::uint32_t> version{0}, key{0};
    std::atomic<const void*> domain{nullptr};
    std::atomic<std::uint64_t> begin{0}, end{0};  // no end: it is free

    [[nodiscard]] bool Is(std::uint32_t other, const void* of) const {
      return key.load(std::memory_order_acquire) == other && domain.load(std::memory_order_acquire) == of;
    }
    void Write(const Key& now) {
      const std::uint32_t before = version.load(std::memory_order_relaxed);
      version.store(before + 1, std::memory_order_relaxed);
      key.store(now.key, std::memory_order_release);
      domain.store(now.domain, std::memory_order_release);
      begin.store(now.begin, std::memory_order_release);
      end.store(now.end, std::memory_order_release);
      version.store(before + 2, std::memory_order_release);
    }
  };
  static constexpr unsigned kSetBits = 11;
  using Set = std::array<Entry, 4>;
  static std::size_t PlaceOf(std::uint32_t key) { return (key * 2654435769U) >> (32 - kSetBits); }
  Set& SetOf(std::uint32_t key) { return sets_[PlaceOf(key)]; }

  std::array<Set, std::size_t{1} << kSetBits> sets_{};
};

}  // namespace amem::intercept
